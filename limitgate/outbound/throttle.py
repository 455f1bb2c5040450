"""Throttles outgoing requests: wait, send, obey the service's rate fields, and retry after a 429.

Generators yield results of a `Transport`, or awaitables, to `run` or `arun`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Timer
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar, Unpack
from weakref import WeakSet

from limitgate.errors import ConfigError, StoreError
from limitgate.gate.flow import adrive, drive
from limitgate.limiter.calls import LOOK_AGAIN
from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limiter.plans import Configured
from limitgate.limits.decision import Decision, RateLimited, refused_in_flight
from limitgate.limits.limit import Limit
from limitgate.observing.exporter import Observer
from limitgate.outbound.host_load import HostLoad, HostLoads, Refusal, outcome_of
from limitgate.outbound.options import CheckedOptions, ClientOptions, check_is_strict, strict as strictly
from limitgate.outbound.response_fields import Answer, Field
from limitgate.overload.adaptive_limit import Outcome
from limitgate.process import switch, waiting
from limitgate.process.forking import Remade
from limitgate.stores import MemoryStore


class Sent(Protocol):
    @property
    def method(self) -> str | None: ...


Request = TypeVar("Request", bound=Sent)
T = TypeVar("T")
Kind = TypeVar("Kind", AsyncLimiter, Limiter)

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
"""RFC 9110, section 9.2.2."""
OF_BODIES = ("content-encoding", "content-length", "transfer-encoding")
MOST_READ = 65_536
"""Bytes of a refusal's body."""
LONGEST_READ = 1.0
"""Seconds for a refusal's body."""
REMEMBERED = 10_000
_SHORT = 260
"""Keys up to this length aren't hashed: a host and port (RFC 1035, section 2.3.4)."""
_HEARD = 1.0
"""Seconds between checks for pauses of other processes."""
_ROUNDING = 2.0
"""Tolerance in seconds, because services round up and clocks differ."""
_LONGEST_BACKOFF = 60.0

_log = logging.getLogger("limitgate.outbound")

Flow = Generator[Any, Any, Any]
"""Yields results of a library or of a limiter, or awaitables."""


class Target(NamedTuple):
    """What a budget reads of a request."""

    body: bytes | None
    """None if the body isn't in memory."""
    path: str
    field: Field


class Reading:
    """Calls ``feed`` with each chunk. ``end`` returns a flow to run at the end."""

    def __init__(self, feed: Callable[[bytes], None], end: Callable[[], Flow]) -> None:
        self.feed = feed
        self._end = end
        self._is_over = False

    def over(self) -> Flow:
        """Run the flow for the end, once."""
        if not self._is_over:
            self._is_over = True
            yield from self._end()


class Transport(ABC):
    """One request in a client library. Results other than bools may be awaitables."""

    @abstractmethod
    def send(self, request: Any) -> Any:
        """Send a request; return its response and an `Answer`."""

    @abstractmethod
    def discard(self, response: Any) -> Any:
        """Read a short refusal, to reuse the connection."""

    @abstractmethod
    def close(self, response: Any) -> Any:
        """Close a response that isn't returned to the caller."""

    @abstractmethod
    def repeatable(self, request: Any) -> bool:
        """True if the body can be sent again."""

    @abstractmethod
    def is_unanswered(self, error: BaseException) -> bool:
        """True if there was no connection, no response, or a late response."""

    @abstractmethod
    def field(self, response: Any) -> Field:
        """Header fields, without the encoding of a decoded body."""

    @abstractmethod
    def target(self, request: Any) -> Target: ...

    @abstractmethod
    def along(self, response: Any, reading: Reading) -> Any:
        """Let a budget read the body: now if it is in memory, otherwise while the application reads it."""

    def is_unsent(self, error: BaseException) -> bool:
        """True if the error occurred before sending."""
        return False

    def refused(self, request: Any, error: RateLimited) -> Any:
        """Return a 429 for a request that wasn't sent, or raise ``error``."""
        raise error

    @abstractmethod
    def sleep(self, seconds: float) -> Any: ...

    @abstractmethod
    def finish(self, flow: Flow) -> Any:
        """Run a flow to its end, even if the caller is cancelled."""


class SyncTransport(Transport):
    def sleep(self, seconds: float) -> None:
        waiting.sleep(seconds)

    def finish(self, flow: Flow) -> None:
        run(flow)


class AsyncTransport(Transport):
    async def sleep(self, seconds: float) -> None:
        await waiting.asleep(seconds)

    async def finish(self, flow: Flow) -> None:
        await afinish(flow)


_ending: set[asyncio.Future[Any]] = set()


def begin_to_finish(flow: Flow) -> asyncio.Future[Any]:
    """Run a flow in a task."""
    task = asyncio.ensure_future(arun(flow))
    _ending.add(task)
    task.add_done_callback(_ending.discard)
    return task


async def afinish(flow: Flow) -> None:
    await asyncio.shield(begin_to_finish(flow))


async def _all_finished() -> None:
    """Wait for the flows that run in tasks of this event loop. The timeout of the store bounds each of them."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # as under trio
        return
    ending = [each for each in _ending if each.get_loop() is loop]
    if ending:
        await asyncio.wait(ending)


def _one(wish: Any) -> Flow:
    return (yield wish)


def run(flow: Flow) -> Any:
    return drive(flow, _itself)


async def arun(flow: Flow) -> Any:
    return await adrive(flow, _itself)


def _itself(wish: Any) -> Any:
    return wish


_by_method: list[Callable[[Any], bool]] = []


def by_method(repeatable: Callable[[T], bool]) -> Callable[[T], bool]:
    """Mark a default for ``repeatable``. Under a budget, all requests are repeated, because a refused request has no effect."""
    _by_method.append(repeatable)
    return repeatable


def is_idempotent(method: str, fields: Iterable[str]) -> bool:
    """True for an idempotent method or an ``Idempotency-Key``."""
    return method.upper() in _IDEMPOTENT or any(name.lower() == "idempotency-key" for name in fields)


class ClientThrottle(Generic[Request, Kind]):
    """Throttle of a client. Without ``limits``, it only obeys the service's fields.

    ``limiter`` is of class ``kind``, or a URL. ``options`` are `ClientOptions`. Raises `ConfigError`, `TypeError`.
    """

    def __init__(
        self,
        limits: tuple[Limit | str | Configured, ...],
        limiter: Kind | str,
        kind: type[Kind],
        /,
        *,
        key: Callable[[Request], str | None],
        repeatable: Callable[[Request], bool],
        **options: Unpack[ClientOptions],
    ) -> None:
        checked = CheckedOptions.of(options)
        if not callable(key):
            raise ConfigError(f"key is {key!r:.80}, expected a callable that returns the key of a request")
        if not callable(repeatable):
            raise ConfigError(
                f"repeatable is {repeatable!r:.80}, expected a callable that returns whether a request may be sent again, "
                "such as lambda request: True"
            )
        if checked.strict:
            limits = tuple([limit if isinstance(limit, Configured) else strictly(limit) for limit in limits])
        self._limiter: Kind = _limiter_of(limiter, kind, options.get("observers", ()))
        self.owned: Kind | None = self._limiter if isinstance(limiter, str) else None
        """The limiter if this throttle created it."""
        if limits:
            self._limiter.validate("", *limits, timeout=None)
        self._limits = limits
        self._local: Kind = kind(MemoryStore())
        self._are_configured = any(isinstance(limit, Configured) for limit in limits)
        self._local_limits: tuple[Limit | str | Configured, ...] = () if self._are_configured else limits
        """Last limits that were read from the store."""
        self._options = checked
        self._budget = options.get("budget")
        if self._budget is not None and not callable(getattr(self._budget, "exchange", None)):
            raise ConfigError(f"budget is {self._budget!r:.80}, expected a limitgate.llm.Budget")
        if self._budget is not None and limits:
            raise ConfigError("both limits and a budget are given, expected the limits in the budget")
        if self._budget is not None and checked.strict:
            raise ConfigError(
                "both strict and a budget are given, expected strict with limits, or a budget with a burst below its count"
            )
        self._key = key
        self._repeatable = repeatable
        self._loads = HostLoads(checked.adaptive, throttles=checked.throttle) if checked.adaptive or checked.throttle else None
        self._look_at: dict[str, float] = {}
        """Time of the next check, by key."""
        self._paused: dict[str, float] = {}
        """End of each key's pause, in monotonic seconds."""
        self._empty: dict[str, float] = {}
        """Time when each key's empty local bucket is full."""
        throttles.add(self)

    @property
    def counts_attempts(self) -> bool:
        """True if each attempt is a sample of the host's load."""
        return self._loads is not None

    def forget(self) -> None:
        for known in (self._look_at, self._paused, self._empty):
            known.clear()
        if self._loads is not None:
            self._loads.forget()

    def exchange(self, transport: Transport, request: Request) -> Flow:
        """Send a request, retrying after a refusal. Raises `RateLimited`, `StoreError`."""
        key = self._key(request) if switch.null_store is None else None
        if key is None:
            return (yield transport.send(request))[0]
        if self._budget is not None:
            return (yield from self._budget.exchange(self, transport, request, key))
        return (yield from self.attempts(transport, request, key))

    def attempts(self, transport: Transport, request: Request, key: str, spending: Any = None) -> Flow:
        """Send a request under ``key``, retrying after a refusal. ``spending`` charges it in place of limits."""
        deadline = waiting.monotonic() + self._options.timeout
        load = None if self._loads is None else self._loads[_short(key)]
        refusals, refused = 0, None
        while True:
            yield from self._turn(transport, key, deadline, refused, load, spending)
            full_in = self._full_in(key)
            if spending is not None:
                spending.is_sent = True
            if load is None:
                response, answer = yield transport.send(request)
            else:
                response, answer = yield from self._attempt(transport, request, load, refused)
            try:
                told, pause = yield from self._heard(transport, key, response, answer, full_in, spending)
                if not answer.refused:
                    return response
                refused = yield transport.discard(response)
            except GeneratorExit:
                raise
            except BaseException:
                yield transport.close(response)
                raise
            refusals += 1
            wait = pause if refusals == 1 else max(pause, _backoff(refusals))
            if spending is not None:
                yield transport.finish(spending.settling_nothing())
            if waiting.monotonic() + wait > deadline or not self._may_repeat(transport, request, spending):
                raise RateLimited(_refusal(max(told, wait)), refused)
            if wait > pause or pause <= _HEARD:
                # Otherwise the next turn comes after the pause, which a pardon may end.
                yield transport.sleep(wait)

    def _heard(  # noqa: PLR0917 - one call, in the order of its use
        self, transport: Transport, key: str, response: Any, answer: Answer, full_in: float, spending: Any
    ) -> Generator[Any, Any, tuple[float, float]]:
        if spending is not None:
            answer = spending.hear(answer, transport.field(response))
            yield transport.finish(spending.learning())
        told = _pause(answer, max(full_in, self._full_in(key)))
        pause = self._cut(key, told)
        if pause:
            yield from self._heed(key, pause, answer)
        return told, pause

    def _may_repeat(self, transport: Transport, request: Request, spending: Any) -> bool:
        is_wanted = self._repeatable(request)
        if spending is not None:
            is_wanted = spending.may_retry and (is_wanted or any(self._repeatable is each for each in _by_method))
        return is_wanted and transport.repeatable(request)

    def _attempt(self, transport: Transport, request: Request, load: HostLoad, refused: Any) -> Flow:
        place = load.begin(request.method)
        if isinstance(place, Refusal):
            self._refuse(place, refused)
        outcome: Outcome = "untaught"
        is_accepted: bool | None = None
        try:
            response, answer = yield transport.send(request)
            outcome = outcome_of(request.method, answer.status, response.headers.get("content-type"))
            is_accepted = outcome != "failed"
        except BaseException as error:
            if transport.is_unanswered(error):
                outcome, is_accepted = "failed", False
            raise
        finally:
            load.end(place, outcome, is_accepted=is_accepted)
        return response, answer

    def _refuse(self, refusal: Refusal, refused: Any) -> NoReturn:
        decision = _refusal(refusal.retry_after, refusal.limit)
        self._limiter._count(decision, "nobody")  # noqa: SLF001 - a decision of this client, not of its limiter
        raise RateLimited(decision, refused)

    def _cut(self, key: str, told: float) -> float:
        longest = self._options.longest_pause
        if told > longest:
            _log.warning("%.260r asked for a pause of %.0f s, which was reduced to %.0f s", key, told, longest)
        return min(told, longest)

    def _turn(  # noqa: PLR0917 - one call, in the order of its use
        self, transport: Transport, key: str, deadline: float, refused: Any, load: HostLoad | None, spending: Any
    ) -> Flow:
        """Wait for a turn outside of pauses. ``refused`` is the previous refusal."""
        if load is not None and (refusal := load.refusal()) is not None:
            self._refuse(refusal, refused)
        while True:
            yield from self._look_for_pardon(key)
            pause, banned = self._paused_for(key), 0.0
            if not pause:
                decision = yield from self._taking(key, max(0.0, deadline - waiting.monotonic()), spending)
                if decision is None:
                    return
                banned = banned_for(decision)
                if math.isinf(banned):
                    raise RateLimited(decision, refused)
                pause = max(banned, self._paused_for(key))
                if not (pause or decision.allowed):
                    raise RateLimited(decision, refused)
                if not pause:
                    return
            if waiting.monotonic() + pause > deadline:
                raise RateLimited(_refusal(pause), refused)
            # Poll, because the ban or pause may be lifted.
            yield transport.sleep(min(pause, LOOK_AGAIN) if banned or _short(key) in self._look_at else pause)

    def _taking(self, key: str, left: float, spending: Any) -> Generator[Any, Any, Decision | None]:
        if spending is not None:
            decision = yield from self._asking(lambda limiter, _: spending.taking(limiter, left))
        elif not self._limits:
            return (yield from self._banned(key))
        else:
            decision = yield from self._asking(lambda limiter, limits: _one(limiter.wait(key, *limits, timeout=left)))
        if decision is None or not decision.allowed:
            return decision
        if self._are_configured:
            self._local_limits = _counted(decision)
            for limit in self._local_limits if self._options.strict else ():
                check_is_strict(limit)
        if decision.remaining:
            self._empty.pop(_short(key), None)
        else:
            _remember(self._empty, _short(key), waiting.monotonic() - decision.delay + decision.reset_after)
        if decision.delay <= _HEARD:
            return decision
        banned = yield from self._banned(key)
        return decision if banned is None or banned.allowed else banned

    def _banned(self, key: str) -> Generator[Any, Any, Decision | None]:
        return (yield from self._asking(lambda limiter, _: _one(limiter.banned(key))))

    def _asking(self, ask: Callable[[Any, Any], Flow]) -> Generator[Any, Any, Decision | None]:
        """Apply ``on_error`` if the store fails; None means ``open``. An overloaded process counts locally."""
        decision: Decision | None = None
        try:
            decision = yield from ask(self._limiter, self._limits)
        except StoreError as error:
            on_error = "local" if error.fault == "overload" and self._local_limits else self._options.on_error
            if on_error == "closed" or (on_error == "local" and self._limits and not self._local_limits):
                raise
            if on_error == "local":
                decision = yield from ask(self._local, self._local_limits)
        return decision

    def _paused_for(self, key: str) -> float:
        return max(0.0, self._paused.get(_short(key), 0.0) - waiting.monotonic())

    def _full_in(self, key: str) -> float:
        return self._empty.get(_short(key), -math.inf) - waiting.monotonic()

    def _look_for_pardon(self, key: str) -> Flow:
        known, now = _short(key), waiting.monotonic()
        if self._paused_for(key) <= 0:
            self._look_at.pop(known, None)
        elif self._look_at.get(known, math.inf) <= now:
            self._look_at[known] = now + _HEARD
            with suppress(StoreError):
                if (yield self._limiter.banned(key)).allowed:
                    self._look_at.pop(known, None)
                    self._paused.pop(known, None)

    def _heed(self, key: str, pause: float, answer: Answer) -> Flow:
        if pause <= self._paused_for(key):
            return
        # `max`, because threads may race here.
        _remember(self._paused, _short(key), waiting.monotonic() + max(pause, self._paused_for(key)))
        _log.info("%.260r answered %d, so no request is sent for %.3g s", key, answer.status, pause)
        self._look_at.pop(_short(key), None)
        with suppress(StoreError):
            yield self._limiter.ban(key, pause)
            if pause > _HEARD:
                _remember(self._look_at, _short(key), waiting.monotonic() + _HEARD)


class ThrottledClient(Remade):
    _throttle: ClientThrottle[Any, Any]

    @property
    def state_here(self) -> str:
        owned = self._throttle.owned
        return "" if owned is None else owned.state_here.replace("expected the URL", "expected limiter= with the URL")

    async def _aclose_store(self) -> None:
        """Wait for settlements under way, then close the store if this client opened it."""
        try:
            await _all_finished()
        finally:
            if self._throttle.owned:
                await self._throttle.owned.aclose()


def _limiter_of(limiter: Kind | str, kind: type[Kind], observers: Iterable[str | Observer]) -> Kind:
    if isinstance(limiter, str):
        return kind(limiter, observers=observers)
    if observers:
        raise ConfigError("both observers and a limiter are given, expected the observers on the limiter")
    if not isinstance(limiter, kind):
        raise ConfigError(f"limiter is {limiter!r:.80}, expected {kind.__name__} or the URL of a store")
    return limiter


throttles: WeakSet[ClientThrottle[Any, Any]] = WeakSet()


def _pause(answer: Answer, full_in: float) -> float:
    """Return the pause; 0 if the service's bucket is full within ``full_in`` seconds, because turns have this distance."""
    if answer.refused:
        return answer.pause or _backoff(1)
    is_known = answer.exhausted is not None and answer.exhausted <= full_in + _ROUNDING
    return 0.0 if is_known and answer.retry_after is None else answer.pause or 0.0


def _refusal(wait: float, limit: int = 0) -> Decision:
    if limit:
        return refused_in_flight(((None, limit, 0),), float(wait))
    return Decision(False, 0, 0, float(wait), float(wait), 0, None)


def _backoff(refusals: int) -> float:
    """Return randomized seconds: up to 1, 2, 4 and so on."""
    return min(_LONGEST_BACKOFF, 2.0 ** min(refusals - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


def _counted(decision: Decision) -> tuple[Limit, ...]:
    charges = [each.charge for each in decision.standings]
    return tuple([limit for each in charges if each.bucket.algorithm.IS_LIMIT for limit in each.bucket.limits])


def banned_for(decision: Decision) -> float:
    """Seconds until a ban ends; 0 without one."""
    banned = [each for each in decision.standings if not each.charge.bucket.algorithm.IS_LIMIT and not each.fits]
    return max([window.retry_after for each in banned for window in each.windows()], default=0.0)


def _short(key: str) -> str:
    """Shorten a key, because a service can choose long keys by redirects."""
    # The limiter rejects other types.
    if isinstance(key, str) and len(key) > _SHORT:
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return key


def _remember(times: dict[str, float], key: str, until: float) -> None:
    if key not in times and len(times) >= REMEMBERED:
        now = waiting.monotonic()
        for old in [each for each, then in list(times.items()) if then <= now]:
            times.pop(old, None)
        if len(times) >= REMEMBERED:
            times.clear()
    times[key] = until


@contextmanager
def shut_after(seconds: float, fileno: int) -> Iterator[None]:
    """Shut down a socket after ``seconds``, because socket timeouts only apply to single reads."""
    with socket.fromfd(fileno, socket.AF_INET, socket.SOCK_STREAM) as line:
        timer = Timer(seconds, _shut, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut(line: socket.socket) -> None:
    with suppress(OSError):  # The socket may be gone.
        line.shutdown(socket.SHUT_RDWR)
