"""The throttle of polite clients: wait for a turn, send, obey the service's rate fields, and come back after a 429.

A host that is overloaded is known by `limitgate.outbound.host_load`.

Written once for code that awaits and code that does not. What has to be done is a generator that yields what its `Transport`
gives: results in code that does not wait otherwise, awaitables in code that does. `run` and `arun` send the results back in.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Generic, NoReturn, Protocol, TypeVar, Unpack
from weakref import WeakSet

from limitgate.errors import ConfigError, StoreError
from limitgate.gate.flow import adrive, drive
from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limiter.operations import LOOK_AGAIN
from limitgate.limiter.stored_limits import Configured
from limitgate.limits.decision import Decision, RateLimited, refused_in_flight
from limitgate.limits.limit import Limit
from limitgate.observing.observer import Observer
from limitgate.outbound.host_load import HostLoad, HostLoads, Refusal, outcome_of
from limitgate.outbound.options import CheckedOptions, ClientOptions
from limitgate.outbound.response_fields import Answer
from limitgate.outbound.strict import check_is_strict, strict as strictly
from limitgate.overload.adaptive_limit import Outcome
from limitgate.process import switch, waiting
from limitgate.process.remaking import Remade
from limitgate.stores import MemoryStore


class Sent(Protocol):
    """Request of any client library."""

    @property
    def method(self) -> str | None:
        """Its method."""


Request = TypeVar("Request", bound=Sent)
Kind = TypeVar("Kind", AsyncLimiter, Limiter)
Flow = Generator[Any, Any, Any]
"""Yields whatever a `Transport` or a limiter gives: results, or awaitables of them."""

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
"""Methods that mean the same once and twice (RFC 9110 section 9.2.2)."""
OF_BODIES = ("content-encoding", "content-length", "transfer-encoding")
"""Fields that are removed from a response that lost its body."""
MOST_READ = 65_536
"""Most bytes of a refusal's body that are read."""
LONGEST_READ = 1.0
"""Most seconds for which a refusal's body is read."""
REMEMBERED = 10_000
"""Most keys that are remembered in this process."""
_SHORT = 260
"""Most characters of a key that is remembered as it is: any host with its port (RFC 1035 section 2.3.4)."""
_HEARD = 1.0
"""Seconds after which the store is asked again whether another process has begun or ended a pause."""
_ROUNDING = 2.0
"""Seconds by which a reset may be late: whole seconds, rounded up, by a clock that is not ours."""
_LONGEST_BACKOFF = 60.0

_log = logging.getLogger("limitgate.outbound")


class Transport(Protocol):
    """Operations of a client library on one request. All may return awaitables but those that return a bool."""

    def send(self, request: Any) -> Any:
        """Send a request; return its response, which has ``headers``, and the limits in it, an `Answer`."""

    def discard(self, response: Any) -> Any:
        """Read the rest of a refusal, unless it is too long, so that its connection can be used again; return the response."""

    def close(self, response: Any) -> Any:
        """Close a response that is not returned to the caller."""

    def sleep(self, seconds: float) -> Any:
        """Sleep."""

    def repeatable(self, request: Any) -> bool:
        """True if the body of a request can be sent again."""

    def is_unanswered(self, error: BaseException) -> bool:
        """True for an error of `send` that means: no connection, no answer, or none in time."""


def run(flow: Flow) -> Any:
    """Run a flow whose transport returns results, and return its outcome."""
    return drive(flow, _itself)


async def arun(flow: Flow) -> Any:
    """Run a flow whose transport returns awaitables, and return its outcome."""
    return await adrive(flow, _itself)


def _itself(wish: Any) -> Any:
    return wish


def is_idempotent(method: str, fields: Iterable[str]) -> bool:
    """True if a request may be sent twice: by its method, or since ``Idempotency-Key`` is among its fields."""
    return method.upper() in _IDEMPOTENT or any(name.lower() == "idempotency-key" for name in fields)


class ClientThrottle(Generic[Request, Kind]):
    """Throttle of a client. ``limits`` are counted by ``key``; without any only the service's own fields count.

    ``limiter`` counts, of the class ``kind``; one for the store at a URL is made here, and closed with the throttle.
    ``repeatable`` is true of requests that may be sent again after a refusal. ``options`` are `ClientOptions`. Raises
    `ConfigError` for mistakes, `TypeError` for an unknown option.
    """

    def __init__(
        self,
        limits: tuple[Limit | str | Configured, ...],
        limiter: Kind | str,
        kind: type[Kind],
        *,
        key: Callable[[Request], str | None],
        repeatable: Callable[[Request], bool],
        **options: Unpack[ClientOptions],
    ) -> None:
        checked = CheckedOptions.of(options)
        if not callable(key):
            raise ConfigError(f"key is {key!r:.80}, expected a callable that gives the text for a request")
        if checked.strict:
            limits = tuple([limit if isinstance(limit, Configured) else strictly(limit) for limit in limits])
        self._limiter: Kind = _limiter_of(limiter, kind, options.get("observers", ()))
        self.owned: Kind | None = self._limiter if isinstance(limiter, str) else None
        """The limiter if it was made here, to be closed with the client."""
        if limits:
            self._limiter.validate("", *limits, timeout=None)
        self._limits = limits
        self._local: Kind = kind(MemoryStore())
        """Limiter of this process, for use while the store fails."""
        self._are_configured = any(isinstance(limit, Configured) for limit in limits)
        self._local_limits: tuple[Limit | str | Configured, ...] = () if self._are_configured else limits
        """Its limits: of limits configured in the store those read last, None before that."""
        self._options = checked
        self._key = key
        self._repeatable = repeatable
        self._loads = HostLoads(checked.adaptive, throttles=checked.throttle) if checked.adaptive or checked.throttle else None
        """Load of each host, by key; None where nobody asked for it."""
        self._look_at: dict[str, float] = {}
        """Times at which to ask the store whether a pause was ended by a pardon, by key."""
        self._paused: dict[str, float] = {}
        """Ends of the pauses that this process knows of, by key, on its monotonic clock."""
        self._empty: dict[str, float] = {}
        """Times at which our own empty buckets will be full again, by key."""
        throttles.add(self)

    @property
    def counts_attempts(self) -> bool:
        """True if each attempt to send a request tells of the load of its host."""
        return self._loads is not None

    def forget(self) -> None:
        """Forget what this process knows of pauses, of empty buckets and of the load of hosts."""
        for known in (self._look_at, self._paused, self._empty):
            known.clear()
        if self._loads is not None:
            self._loads.forget()

    def exchange(self, transport: Transport, request: Request) -> Flow:
        """Send a request in its turn, and again if it is refused; return its response. Raises `RateLimited`, `StoreError`."""
        key = self._key(request) if switch.null_store is None else None
        if key is None:
            return (yield transport.send(request))[0]
        deadline = waiting.monotonic() + self._options.timeout
        load = None if self._loads is None else self._loads[_short(key)]
        refusals, refused = 0, None
        while True:
            yield from self._turn(transport, key, deadline, refused, load)
            full_in = self._full_in(key)
            if load is None:
                response, answer = yield transport.send(request)
            else:
                response, answer = yield from self._attempt(transport, request, load, refused)
            try:
                told = _pause(answer, max(full_in, self._full_in(key)))
                pause = self._cut(key, told)
                if pause:
                    yield from self._heed(key, pause, answer)
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
            if waiting.monotonic() + wait > deadline or not (self._repeatable(request) and transport.repeatable(request)):
                raise RateLimited(_refusal(max(told, wait)), refused)
            if wait > pause or pause <= _HEARD:
                yield transport.sleep(wait)  # else the next turn comes after the pause, which a pardon may end

    def _attempt(self, transport: Transport, request: Request, load: HostLoad, refused: Any) -> Flow:
        """Send a request if there is room in flight, and learn from how it ends."""
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
        """Raise `RateLimited` for a request that an overloaded host is spared; ``refused`` if it has refused it before."""
        decision = _refusal(refusal.retry_after, refusal.limit)
        self._limiter._count(decision, "nobody")  # noqa: SLF001 - a decision of this client that its limiter was not asked for
        raise RateLimited(decision, refused)

    def _cut(self, key: str, told: float) -> float:
        """Cut a pause to the longest one that is heeded."""
        longest = self._options.longest_pause
        if told > longest:
            _log.warning("%.260r asks for a pause of %.0f s, which is cut to %.0f s", key, told, longest)
        return min(told, longest)

    def _turn(self, transport: Transport, key: str, deadline: float, refused: Any, load: HostLoad | None) -> Flow:
        """Wait for the next turn outside of any pause; ``refused`` if the service has refused this request before.

        What an overloaded host is spared takes no turn.
        """
        if load is not None and (refusal := load.refusal()) is not None:
            self._refuse(refusal, refused)
        while True:
            yield from self._look_for_pardon(key)
            pause, banned = self._paused_for(key), 0.0
            if not pause:
                decision = yield from self._taking(key, max(0.0, deadline - waiting.monotonic()))
                if decision is None:
                    return
                banned = _banned_for(decision)
                if math.isinf(banned) and deadline < math.inf:
                    raise RateLimited(decision, refused)
                pause = max(banned, self._paused_for(key))
                if not (pause or decision.allowed):
                    raise RateLimited(decision, refused)
                if not pause:
                    return
            if waiting.monotonic() + pause > deadline:
                raise RateLimited(_refusal(pause), refused)
            yield transport.sleep(min(pause, LOOK_AGAIN) if banned or _short(key) in self._look_at else pause)  # may be lifted

    def _taking(self, key: str, left: float) -> Generator[Any, Any, Decision | None]:
        """Take the next turn within so many seconds; return its decision, None if ``on_error`` is open."""
        if not self._limits:
            return (yield from self._asking(lambda limiter, _: limiter.banned(key)))
        decision = yield from self._asking(lambda limiter, limits: limiter.wait(key, *limits, timeout=left))
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
        banned = yield from self._asking(lambda limiter, _: limiter.banned(key))
        return decision if banned is None or banned.allowed else banned

    def _asking(self, ask: Callable[[Any, Any], Any]) -> Generator[Any, Any, Decision | None]:
        """Call the limiter; if its store fails, follow ``on_error``. None stands for ``open``.

        An overload of this process is no failure of the store: then it counts by itself if it can.
        """
        decision: Decision | None = None
        try:
            decision = yield ask(self._limiter, self._limits)
        except StoreError as error:
            on_error = "local" if error.fault == "overload" and self._local_limits else self._options.on_error
            if on_error == "closed" or (on_error == "local" and self._limits and not self._local_limits):
                raise
            if on_error == "local":
                decision = yield ask(self._local, self._local_limits)
        return decision

    def _paused_for(self, key: str) -> float:
        """Rest of a key's pause in seconds, as far as this process knows."""
        return max(0.0, self._paused.get(_short(key), 0.0) - waiting.monotonic())

    def _full_in(self, key: str) -> float:
        """Seconds until our own empty bucket is full again; not positive if it is full, or was not empty."""
        return self._empty.get(_short(key), -math.inf) - waiting.monotonic()

    def _look_for_pardon(self, key: str) -> Flow:
        """End a known pause that the store no longer has; asked once a second, for pauses longer than that."""
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
        """Pause a key, in this process and in all that share the store."""
        if pause <= self._paused_for(key):
            return
        _remember(self._paused, _short(key), waiting.monotonic() + max(pause, self._paused_for(key)))  # as threads do so, too
        _log.info("%.260r answered %d and is left alone for %.3g s", key, answer.status, pause)
        self._look_at.pop(_short(key), None)
        with suppress(StoreError):
            yield self._limiter.ban(key, pause)
            if pause > _HEARD:
                _remember(self._look_at, _short(key), waiting.monotonic() + _HEARD)


class ThrottledClient(Remade):
    """Base of what a client library takes from us: it has a throttle, and is pickled and copied by its arguments."""

    _throttle: ClientThrottle[Any, Any]

    @property
    def state_here(self) -> str:
        """That of a limiter that was made here."""
        owned = self._throttle.owned
        return "" if owned is None else owned.state_here.replace("expected the URL", "expected limiter= with the URL")


def _limiter_of(limiter: Kind | str, kind: type[Kind], observers: Iterable[str | Observer]) -> Kind:
    """A limiter of this kind: the one given, or a new one for the store at a URL, with these observers.

    Raises `ConfigError` for anything else, and for observers beside a limiter, which has its own.
    """
    if isinstance(limiter, str):
        return kind(limiter, observers=observers)
    if observers:
        raise ConfigError("observers stand beside a limiter, which has its own, expected them where that is made")
    if not isinstance(limiter, kind):
        raise ConfigError(f"limiter is {limiter!r:.80}, expected {kind.__name__} or the URL of a store")
    return limiter


throttles: WeakSet[ClientThrottle[Any, Any]] = WeakSet()
"""All throttles of this process."""


def _pause(answer: Answer, full_in: float) -> float:
    """Pause in seconds that an answer demands for its key.

    ``full_in`` is the time in seconds until our own bucket is full again, the longer of that at sending and now, since the
    answer may refer to either. If theirs is full no later, it is as empty as ours, and our turns are spaced already.
    """
    if answer.refused:
        return answer.pause or _backoff(1)
    is_known = answer.exhausted is not None and answer.exhausted <= full_in + _ROUNDING
    return 0.0 if is_known and answer.retry_after is None else answer.pause or 0.0


def _refusal(wait: float, limit: int = 0) -> Decision:
    """Decision of the service, for `RateLimited`, or for its sake. ``limit`` is that of requests in flight, if that decided."""
    if limit:
        return refused_in_flight(((None, limit, 0),), float(wait))
    return Decision(False, 0, 0, float(wait), float(wait), 0, None)


def _backoff(refusals: int) -> float:
    """Seconds to wait if the service does not say, or said too little: 1, 2, 4 and so on, up to a half less by chance."""
    return min(_LONGEST_BACKOFF, 2.0 ** min(refusals - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _counted(decision: Decision) -> tuple[Limit, ...]:
    """Limits of a decision."""
    charges = [each.charge for each in decision.standings]
    return tuple([limit for each in charges if each.bucket.algorithm.IS_LIMIT for limit in each.bucket.limits])


def _banned_for(decision: Decision) -> float:
    """Rest of a key's ban in seconds, by a decision."""
    banned = [each for each in decision.standings if not each.charge.bucket.algorithm.IS_LIMIT and not each.fits]
    return max([window.retry_after for each in banned for window in each.windows()], default=0.0)


def _short(key: str) -> str:
    """Key as it is remembered, bounded: a service may choose it, by the host that it redirects to."""
    if isinstance(key, str) and len(key) > _SHORT:  # else the limiter complains
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return key


def _remember(times: dict[str, float], key: str, until: float) -> None:
    """Remember a time. Forget past ones if there are many, or all if there are still too many."""
    if key not in times and len(times) >= REMEMBERED:
        now = waiting.monotonic()
        for old in [each for each, then in list(times.items()) if then <= now]:
            times.pop(old, None)
        if len(times) >= REMEMBERED:
            times.clear()
    times[key] = until
