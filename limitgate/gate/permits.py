"""Permits under adaptive limits, each released once, and a guard for proxies."""

from __future__ import annotations

import math
import random
import sys
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Sequence
from threading import Lock
from typing import Any

from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.prepared import AdaptiveMatch
from limitgate.http.client_ip import grouped
from limitgate.http.request import Request, waited_s
from limitgate.http.response import Refusal, overloaded
from limitgate.limits.bucket import Priority
from limitgate.limits.decision import Decision, InForce, InShadow, Window, refused_in_flight
from limitgate.observing.counts import ADMITTED, REFUSED, SHADOW_REFUSED
from limitgate.overload.adaptive_limit import Guard, Outcome, Permit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter, WaitingTask, WaitingThread
from limitgate.overload.lag import LagGuard, ProxyQueue, heartbeats
from limitgate.process.forking import reset_in_children

_FAILED = frozenset({503, 504})
_STREAM = b"text/event-stream"
_LATELY_S = 1.0
MOST_PROXIES = 1000
BUFFERED = 65_536
"""Bytes that a server buffers before it waits for the client."""
IPV6_PREFIX = 64
MOST_DIGITS = 20
"""Maximum of digits, because Python refuses to parse thousands."""

Stay = Callable[[Any], Awaitable[bool]]
"""Waits; returns False if the client leaves first."""


class ProxyGuard:
    """Guards proxies that report how long requests waited. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._guard = LagGuard()
        self._queues: dict[str | None, ProxyQueue] = {}
        self._lock = Lock()
        self._heard_at = -math.inf
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = Lock()

    @property
    def lag_s(self) -> float | None:
        """Latest lag in seconds; None if old."""
        return self._guard.lag_s if self._clock() - self._heard_at < _LATELY_S else None

    def of(self, request: Request, loop_guard: Guard | None) -> Guard | None:
        """Return a request's guard, with the wait that its proxy reports."""
        now = self._clock()
        waited = waited_s(request, now)
        if waited is not None:
            if now - self._heard_at >= _LATELY_S:
                heartbeats.note(self)
            self._heard_at = now
        return loop_guard if waited is None else _Waited(self, request.peer, waited, loop_guard)

    def refuses(self, now: float, share: float, proxy: str | None, waited: float) -> bool:
        with self._lock:
            queue = self._queues.get(proxy)
            if queue is None:
                queue = self._queues[proxy] = ProxyQueue()
                if len(self._queues) > MOST_PROXIES:
                    del self._queues[next(iter(self._queues))]
            self._guard.waited(now, queue.lag_s(now, waited))
            return self._guard.refuses(now, share)


class _Waited:
    __slots__ = ("_loop_guard", "_proxy", "_proxy_guard", "_waited")

    def __init__(self, proxy_guard: ProxyGuard, proxy: str | None, waited: float, loop_guard: Guard | None) -> None:
        self._proxy_guard = proxy_guard
        self._proxy = proxy
        self._waited = waited
        self._loop_guard = loop_guard

    def refuses(self, now: float, share: float = 1.0) -> bool:
        if self._proxy_guard.refuses(now, share, self._proxy, self._waited):
            return True
        return self._loop_guard is not None and self._loop_guard.refuses(now, share)


def group_of(client: str | None) -> str | None:
    return None if client is None else grouped(client, IPV6_PREFIX)


class Permits:
    """One request's permits. Enforced rules come first. `Load.enter` sets the attributes that have no default."""

    # No `__init__`, which would double the cost. Attributes with a default are seldom read.
    held: list[tuple[ConcurrencyLimiter, Permit]]
    in_force: tuple[InForce, ...]
    is_to_be_told: bool
    """True if the decision must show a wait or a shadow refusal."""
    adaptive: AdaptiveMatch
    priority: Priority
    outcome: Outcome
    client: str | None
    idle_since: float | None
    refusal: Refusal | None = None
    waited_s: float = 0.0
    waits: WaitingTask | WaitingThread | None = None
    would_refuse: tuple[CompiledRule, ...] = ()
    _sent = 0
    _fields: Sequence[tuple[bytes, bytes]] = ()
    _idle_s = 0.0
    _has_lost = False

    @property
    def goes_on(self) -> bool:
        return self.waits is None is self.refusal

    def take(
        self,
        compiled_rules: Sequence[CompiledRule],
        waiter: Callable[[], WaitingTask | WaitingThread],
        guard: Guard | None = None,
    ) -> bool:
        """Take the permits. Return False if the request waits, is refused, or lacks a shadow rule's permit.

        ``waiter`` waits in a task or a thread.
        """
        request_class, is_whole = self.adaptive.request_class, True
        for compiled_rule in compiled_rules:
            places: ConcurrencyLimiter = compiled_rule.places  # type: ignore[assignment]
            limit = places.limit
            priority = compiled_rule.priority or self.priority
            permit = places.begin(request_class, priority, guard, waiter)
            guard = None
            room = limit.levels[priority].room - limit.in_flight
            found = compiled_rule.name, limit.limit, room if room > 0 else 0  # noqa: FURB136 - max() is four times as slow
            self.in_force += (found if compiled_rule.enforced else InShadow(found),)
            if permit is not None:
                self.held.append((places, permit))
                permit.client = self.client
                if permit.began is not None:
                    continue
            is_whole = False
            if not self._goes_on_without(compiled_rule, places, permit):
                break
        return is_whole

    def resolve_client(self, request: Request) -> None:
        """Find the client. Call this only with permits, because refusals must stay cheap."""
        self.client = client = group_of(request.resolved_client())
        for _, permit in self.held:
            permit.client = client

    def _goes_on_without(self, compiled_rule: CompiledRule, places: ConcurrencyLimiter, permit: Permit | None) -> bool:
        if permit is not None:
            self.waits = places.waiter(permit)
            if self.waits is not None:
                return False
            if permit.began is not None:
                return True
            # Another thread has displaced this request.
            self._refuse(compiled_rule, places)
            return False
        if compiled_rule.enforced:
            self._refuse(compiled_rule, places)
            return False
        if compiled_rule not in self.would_refuse:
            self.would_refuse += (compiled_rule,)
            self.is_to_be_told = True
            if compiled_rule.row is not None:
                compiled_rule.row.count(SHADOW_REFUSED, 1.0)
        return True

    def wait(self) -> None:
        while isinstance(self.waits, WaitingThread):
            places, permit = self.held[-1]
            self._go_on(has_place=places.wait(permit, self.waits))

    async def await_places(self, stay: Stay) -> bool:
        while isinstance(self.waits, WaitingTask):
            places, permit = self.held[-1]
            if places.has_to_wait(permit, self.waits) and not await stay(self.waits.woken):
                self.end("untaught")
                return False
            self._go_on(has_place=permit.began is not None)
        return True

    def begin_again_here(self) -> None:
        before, self.in_force = self.in_force, ()
        self.take(self.adaptive.compiled_rules, WaitingThread)
        self.wait()
        if self.refusal is None:
            self.in_force = before

    async def begin_again(self, stay: Stay) -> bool:
        before, self.in_force = self.in_force, ()
        self.take(self.adaptive.compiled_rules, WaitingTask)
        stays = await self.await_places(stay)
        if self.refusal is None:
            self.in_force = before
        return stays

    def idle(self) -> None:
        """Lend permits while waiting for the client."""
        if self.idle_since is None:
            for places, permit in self.held:
                # Others use them already.
                if permit.began is not None:
                    self.idle_since = places.idle(permit, self._idle_s)

    def busy(self) -> None:
        since, self.idle_since = self.idle_since, None
        if since is None:
            return
        idle_s = 0.0
        for places, permit in self.held:
            idle_s = places.busy(permit, since)
            self._has_lost = self._has_lost or permit.began is None
        self._idle_s += idle_s

    def has_body(self) -> None:
        """Take lent permits back, even beyond the limit, because the work begins."""
        if not self._has_lost:
            return
        self._has_lost = False
        for places, permit in self.held:
            if permit.began is None:
                places.resume(permit)

    def _go_on(self, *, has_place: bool) -> None:
        waiter, self.waits = type(self.waits), None
        compiled_rules, asked = self.adaptive.compiled_rules, len(self.in_force)
        if has_place:
            waited_s = self.held[-1][1].waited_s
            if waited_s:
                self.waited_s += waited_s
                self.is_to_be_told = True
            self.take(compiled_rules[asked:], waiter)  # type: ignore[arg-type]  # Either kind of waiter.
        else:
            self._refuse(compiled_rules[asked - 1], self.held[-1][0])

    def _refuse(self, compiled_rule: CompiledRule, places: ConcurrencyLimiter) -> None:
        if compiled_rule.row is not None:
            compiled_rule.row.count(REFUSED, 1.0)
        self.refusal = overloaded(places.limit.retry_after_s(random.random))
        self.end("untaught")

    def refused(self, refusal: Refusal) -> Decision:
        return refused_in_flight(self.in_force, float(dict(refusal.waiting)["Retry-After"]))

    def count(self) -> None:
        """Count an admitted request for rules without other limits."""
        held = [places for places, _ in self.held]
        for compiled_rule, (_, limit, remaining) in zip(self.adaptive.compiled_rules, self.in_force):
            # It got this permit only after the booked turn.
            if compiled_rule in self.would_refuse:
                continue
            if compiled_rule.row is not None and not compiled_rule.rule.has_counts and compiled_rule.places in held:
                compiled_rule.row.count(ADMITTED, (limit - remaining) / limit)

    def windows(self) -> Iterator[Window]:
        for compiled_rule in self.adaptive.compiled_rules:
            if compiled_rule.places is not None:
                limit = compiled_rule.places.limit
                room = limit.levels[compiled_rule.priority or self.priority].room
                remaining = max(0, room - limit.in_flight)
                yield Window(compiled_rule.name, limit.limit, 0, remaining, limit.limit - remaining, 0.0, 0.0)

    def starts(self, status: object, fields: Sequence[tuple[bytes, bytes]]) -> None:
        """Note the start of a response. An event stream releases the permits."""
        # The application does not wait for the rest of the body.
        if self.idle_since is not None:
            self.busy()
        self._has_lost = False
        self._fields = fields
        if status != 200:
            if status in _FAILED:
                self.outcome = "failed"
            elif not isinstance(status, int) or status < 200 or status == 304 or status >= 400:
                self.outcome = "untaught"
        for name, value in fields:
            # Rare matches come first.
            if len(name) == 12 and value[:17].lower() == _STREAM and name.lower() == b"content-type":
                self.end("untaught")

    def sends(self, size: int) -> None:
        """Note sent bytes.

        Release the permits after the last declared byte. If the length is unknown or above `BUFFERED`, release them now,
        without a sample.
        """
        if not self.held:
            return
        self._sent += size
        length = self._declared()
        if length is not None and self._sent >= length:
            self.end()
        elif length is None or self._sent > BUFFERED:
            self.end("untaught")

    def _declared(self) -> int | None:
        lengths = [value for name, value in self._fields if name.lower() == b"content-length"]
        return int(lengths[-1]) if lengths and lengths[-1].isdigit() and len(lengths[-1]) <= MOST_DIGITS else None

    def end(self, outcome: Outcome | None = None) -> None:
        """Release all permits. ``outcome`` replaces the outcome of the response."""
        held = self.held
        while held:
            places, permit = held.pop()
            try:
                places.end(permit, outcome or self.outcome)
            except BaseException:
                places.abandon(permit)
                raise

    def end_unanswered(self, *, client_left: bool) -> None:
        if self.held:
            error = sys.exception()
            # The garbage collector may have closed the coroutine.
            if isinstance(error, GeneratorExit):
                self.abandon()
                return
            has_failed = client_left or isinstance(error, TimeoutError | ConnectionError | CancelledError)
            self.end("failed" if has_failed else "untaught")

    def abandon(self) -> None:
        while self.held:
            places, permit = self.held.pop()
            places.abandon(permit)

    def __del__(self) -> None:
        if self.held:
            self.abandon()
