"""Budgets: the requests and tokens that a provider of language models allows an account."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any, Literal, TypeAlias
from weakref import WeakValueDictionary

from limitgate.algorithms import ALGORITHMS
from limitgate.errors import ConfigError, called_as
from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limits.decision import RateLimited
from limitgate.limits.limit import Duration, Limit, as_limit, as_seconds
from limitgate.llm.estimate import Answers, Estimate, estimate_of
from limitgate.llm.fair_share import HEADS, FairLine
from limitgate.llm.spending import AsyncBudgetReservation, BudgetReservation, Expected, Spending
from limitgate.llm.told_limits import ToldLimits
from limitgate.llm.usage import Usage, reader_for
from limitgate.llm.windows import Windows
from limitgate.observing.budget_counts import counts_of
from limitgate.outbound.throttle import ClientThrottle, Flow, Reading, Transport, afinish, arun, run
from limitgate.process.forking import Remade, reset_in_children

Limits: TypeAlias = Limit | str | Sequence[Limit | str] | None
Body: TypeAlias = bytes | Mapping[str, Any]
LONGEST_HOLD = 86_400
_CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_LONGEST_PART = 256
"""Characters of a host or model in a key."""


class Budget(Remade):
    """Requests and tokens that a provider allows an account: ``Budget(requests="500/minute", tokens="200000/minute")``.

    ``requests``, ``tokens`` (input and output), ``input_tokens`` and ``output_tokens`` are limits such as ``30000/minute``, or
    lists. All must have room for a request's estimate, which the reported usage replaces later. An estimate above a burst
    counts as the burst.

    ``key`` returns a request's key, from a client's request or from the body in `reserve`. A request without a key (None) isn't
    limited. By default, the key has the host, a digest of the credential, and the model. ``pools`` maps patterns of models to a
    common name: ``{"claude-opus-*": "opus"}``. ``estimate`` takes the body (parsed, or bytes) and returns input tokens, or
    input and output tokens. Reservations of a dead process are refunded after ``hold``, by default 2 minutes, or never if None.
    With ``limits="told"``, limits in the provider's responses replace these limits, in all processes. ``share`` returns a
    request's tenant, from the argument of ``key``. Waiting tenants take turns by tokens. ``name`` labels metrics.

    Raises `ConfigError` for invalid limits or options.
    """

    @called_as("Budget(requests='500/minute', tokens='200000/minute')")
    def __init__(
        self,
        requests: Limits = None,
        tokens: Limits = None,
        input_tokens: Limits = None,
        output_tokens: Limits = None,
        *,
        key: Callable[[Any], str | None] | None = None,
        pools: Mapping[str, str] | None = None,
        estimate: Callable[[Any], int | tuple[int, int] | Usage] | None = None,
        hold: Duration | None = "2m",
        limits: Literal["given", "told"] = "given",
        share: Callable[[Any], str] | None = None,
        name: str = "budget",
    ) -> None:
        windows = Windows(
            _limits("requests", requests),
            _limits("tokens", tokens),
            _limits("input_tokens", input_tokens),
            _limits("output_tokens", output_tokens),
        )
        # A provider may state limits of further kinds at any time.
        self._windows = windows.apart() if limits == "told" else windows
        if limits not in ("given", "told"):
            raise ConfigError(f"limits is {limits!r:.40}, expected 'given' or 'told'")
        if limits == "given" and not any(self._windows):
            raise ConfigError("a budget without limits, expected for example requests='500/minute', tokens='200000/minute'")
        for option, function in (("key", key), ("estimate", estimate), ("share", share)):
            if function is not None and not callable(function):
                raise ConfigError(f"{option} is {function!r:.80}, expected a callable")
        self._hold = None if hold is None else as_seconds(hold, "hold")
        if self._hold is not None and not 0 < self._hold <= LONGEST_HOLD:
            raise ConfigError(f"hold is {hold!r:.40}, expected seconds above 0, at most a day, or None")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"name is {name!r:.80}, expected up to 64 letters, digits, dots, dashes and underscores")
        self._name = name
        self._told_limits = ToldLimits(self._windows) if limits == "told" else None
        self._key = key
        self._pools = _checked_pools(pools)
        self._estimate = estimate
        self._share = share
        self._answers: Answers[str] = Answers()
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = Lock()
        self._lines: WeakValueDictionary[str, FairLine] = WeakValueDictionary()

    def reserve(self, limiter: Limiter, body: Body, *, timeout: Duration | None = 0) -> BudgetReservation:
        """Reserve the estimated cost of a request with this body. The decision is in ``.decision``.

        ``timeout`` is the longest wait for a turn, in seconds or as ``30s``; 0 doesn't wait, None waits for any time. Raises
        `StoreError`.
        """
        longest = _checked(limiter, Limiter, body, timeout)
        spending = self._spending_of(body)
        try:
            run(spending.taking(limiter, longest))
        except BaseException:
            run(spending.giving_back())
            raise
        return BudgetReservation(spending)

    async def areserve(self, limiter: AsyncLimiter, body: Body, *, timeout: Duration | None = 0) -> AsyncBudgetReservation:
        """`reserve` on an `AsyncLimiter`."""
        longest = _checked(limiter, AsyncLimiter, body, timeout)
        spending = self._spending_of(body)
        try:
            await arun(spending.taking(limiter, longest))
        except GeneratorExit:
            raise
        except BaseException:
            await afinish(spending.giving_back())
            raise
        return AsyncBudgetReservation(spending)

    def exchange(self, throttle: ClientThrottle[Any, Any], transport: Transport, request: Any, key: str) -> Flow:
        """Send a throttled client's request, as a flow. ``key`` is the host. Raises errors of the client library."""
        target = transport.target(request)
        spending = self.spending(request, body=target.body, host=key, path=target.path, field=target.field)
        if spending is None:
            return (yield transport.send(request))[0]
        return (yield from _exchange(throttle, transport, request, spending))

    def _spending_of(self, body: Body) -> Spending:
        spending = self.spending(body, body=body)
        if spending is None:
            raise ConfigError("key returned None, expected the text that names the budget of this body")
        return spending

    def spending(
        self,
        request: Any,
        *,
        body: Body | None,
        host: str = "",
        path: str = "",
        field: Callable[[str], str | None] | None = None,
    ) -> Spending | None:
        """Return the spending of a request; None if the request isn't limited.

        ``field`` returns a header by lower-case name.
        """
        field = field or _no_field
        estimated = self._estimated(body, path, field)
        if self._key is not None:
            key = self._key(request)
            if key is None:
                return None
            if not isinstance(key, str):
                raise ConfigError(f"key returned {key!r:.80}, expected text or None")
        else:
            key = self._default_key(host, field, estimated.model)
        answers = self._answers.of(key)
        output = answers.value if estimated.output is None else estimated.output
        expected = Expected(
            Usage(estimated.input, output), has_maximum=estimated.output is not None, is_partial=estimated.is_partial
        )
        return Spending(
            key,
            expected,
            self._windows,
            answers,
            name=key if self._key is None else None,
            host=host,
            hold=self._hold,
            told_limits=self._told_limits,
            share=(self._line(key), self._tenant(request)),
            counts=partial(counts_of, self._name),
        )

    def _default_key(self, host: str, field: Callable[[str], str | None], model: str | None) -> str:
        credential = next((value for name in _CREDENTIALS if (value := field(name))), "")
        digest = blake2b(credential.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest() if credential else "-"
        name = model or "-"
        name = next((pool for pattern, pool in self._pools.items() if fnmatchcase(name, pattern)), name)
        return f"{host[:_LONGEST_PART] or '-'} {digest} {name[:_LONGEST_PART]}"

    def _estimated(self, body: Body | None, path: str, field: Callable[[str], str | None]) -> Estimate:
        if body is None:
            size = field("content-length") or ""
            body_size = int(size) if size.isascii() and size.isdecimal() and len(size) < 12 else 0
            return Estimate(None, -(-body_size // 4), None, is_partial=True)
        found = estimate_of(
            body, path=path, content_type=field("content-type") or "", content_encoding=field("content-encoding") or ""
        )
        if self._estimate is None:
            return found
        into, output = _estimated_by(self._estimate, body)
        return found._replace(input=into, output=found.output if output is None else output, is_partial=False)

    def _line(self, key: str) -> FairLine:
        with self._lock:
            return self._lines.setdefault(key, FairLine(HEADS))

    def _tenant(self, request: Any) -> str:
        tenant = "" if self._share is None else self._share(request)
        if not isinstance(tenant, str):
            raise ConfigError(f"share returned {tenant!r:.80}, expected text")
        return tenant


def _exchange(throttle: ClientThrottle[Any, Any], transport: Transport, request: Any, spending: Spending) -> Flow:
    """Send a request in its turn, and settle it at the end of its response. A refusal is a 429 if the library has one."""
    spending.renews = True
    try:
        response = yield from throttle.attempts(transport, request, spending.key, spending)
    except RateLimited as error:
        # The request may have had its turn before a pause.
        yield transport.finish(spending.giving_back())
        return transport.refused(request, error) if error.response is None else error.response
    except GeneratorExit:
        raise
    except BaseException as error:
        if not spending.is_sent or transport.is_unsent(error):
            rest = spending.giving_back()
        else:
            rest = spending.settling_nothing() if transport.is_unanswered(error) else spending.settling_unknown()
        yield transport.finish(rest)
        raise
    if not spending.is_answered:
        yield transport.finish(spending.settling_nothing())
        return response
    field = transport.field(response)
    reader = reader_for(field("content-type") or "", field("content-encoding") or "")
    return (yield transport.along(response, Reading(reader.feed, partial(spending.settling_read, reader))))


def _checked(limiter: object, kind: type, body: object, timeout: Duration | None) -> float | None:
    if not isinstance(limiter, kind):
        raise TypeError(f"limiter is {limiter!r:.80}, expected {'an' if kind is AsyncLimiter else 'a'} {kind.__name__}")
    if not isinstance(body, bytes | Mapping):
        raise TypeError(f"body is {body!r:.80}, expected the bytes of a request, or the object in them")
    seconds = as_seconds(timeout, "timeout")
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"timeout is {timeout!r:.40}, expected seconds of at least 0, or None for no bound")
    return seconds


def _no_field(_: str) -> None:
    return None


def _limits(kind: str, given: Limits) -> tuple[Limit, ...]:
    if given is None:
        return ()
    try:
        limits = tuple(map(as_limit, given if isinstance(given, list | tuple) else [given]))
    except ConfigError as error:
        raise ConfigError(f"{kind}: {error}") from error
    for limit in limits:
        if not limit.period:
            raise ConfigError(f"{kind}: {limit!r} counts what is in flight, expected a limit per time such as '200000/minute'")
        if limit.lease:
            raise ConfigError(f"{kind}: {limit!r} has a lease, expected none in a budget")
        if not ALGORITHMS[limit.algorithm].CAN_WAIT and limit.count:
            raise ConfigError(f"{kind}: {limit!r} can't book turns, expected another algorithm, such as sliding_log")
    return limits


def _checked_pools(pools: Mapping[str, str] | None) -> Mapping[str, str]:
    pools = {} if pools is None else pools
    if not isinstance(pools, Mapping) or not all(isinstance(text, str) for pair in pools.items() for text in pair):
        raise ConfigError(f"pools is {pools!r:.80}, expected names by pattern, such as {{'claude-opus-*': 'opus'}}")
    return dict(pools)


def _estimated_by(estimate: Callable[[Any], Any], body: Body) -> tuple[int, int | None]:
    given: Any = body
    if isinstance(body, bytes):
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        given = parsed if isinstance(parsed, dict) else body
    found = estimate(given)
    numbers = found[:2] if isinstance(found, Usage) else found if isinstance(found, tuple) else (found,)
    if len(numbers) not in (1, 2) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ConfigError(f"estimate returned {found!r:.80}, expected input tokens, or input and output tokens")
    return numbers[0], numbers[1] if len(numbers) > 1 else None
