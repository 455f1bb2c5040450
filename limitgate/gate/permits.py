"""Permits: the places that a request has under the adaptive limits of a gate, and what delays requests before they come.

A place is given back once, on whatever way a request ends.
"""

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
from limitgate.http.request import Request
from limitgate.http.request_start import waited_s
from limitgate.http.response import Refusal, overloaded
from limitgate.limits.decision import Decision, InForce, InShadow, Window, refused_in_flight
from limitgate.limits.priority import NORMAL, Priority
from limitgate.observing.counts import ADMITTED, REFUSED, SHADOW_REFUSED
from limitgate.overload.adaptive_limit import AdaptiveLimit, Guard, Outcome, Permit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter, WaitingTask, WaitingThread
from limitgate.overload.heartbeat import heartbeats
from limitgate.overload.lag_guard import LagGuard
from limitgate.overload.proxy_queue import ProxyQueue
from limitgate.process.forking import reset_in_children
from limitgate.rules.callers import Caller

_FAILED = frozenset({503, 504})
"""Statuses that tell of an overload of the work itself, or of what it waits for."""
_STREAM = b"text/event-stream"
_LATELY_S = 1.0
MOST_PROXIES = 1000
"""Proxies whose clocks are known. Of more the one that was met first is forgotten."""
BUFFERED = 65_536
"""Bytes of a body after which servers wait for the client, whose slowness is no load."""
IPV6_PREFIX = 64
"""Bits of a network that one client of IPv6 has."""
MOST_DIGITS = 20
"""Digits of a length that a body may have. An application may hand on any, and Python refuses to read thousands."""

Stay = Callable[[Any], Awaitable[bool]]
"""Waits until a future is done; False if the client left before."""


class ProxyGuard:
    """Guard of a process behind proxies that say how long requests have waited, for any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._guard = LagGuard()
        self._queues: dict[str | None, ProxyQueue] = {}
        """Those of the proxies by their addresses; each has a clock of its own."""
        self._lock = Lock()
        self._heard_at = -math.inf
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """In the child of a fork: drop the lock, which a thread of the parent may have."""
        self._lock = Lock()

    @property
    def lag_s(self) -> float | None:
        """Lag of the request that came last, in seconds; None if that is a while ago."""
        return self._guard.lag_s if self._clock() - self._heard_at < _LATELY_S else None

    def of(self, request: Request, loop_guard: Guard | None) -> Guard | None:
        """The guard of a request: that of the event loop on which it comes, and this one where its proxy says something."""
        now = self._clock()
        waited = waited_s(request, now)
        if waited is not None:
            if now - self._heard_at >= _LATELY_S:
                heartbeats.note(self)
            self._heard_at = now
        return loop_guard if waited is None else _Waited(self, request.peer, waited, loop_guard)

    def refuses(self, now: float, share: float, proxy: str | None, waited: float) -> bool:
        """True if a request that comes now from a proxy, and has waited for so many seconds, is too much."""
        with self._lock:
            queue = self._queues.get(proxy)
            if queue is None:
                queue = self._queues[proxy] = ProxyQueue()
                if len(self._queues) > MOST_PROXIES:
                    del self._queues[next(iter(self._queues))]
            self._guard.waited(now, queue.lag_s(now, waited))
            return self._guard.refuses(now, share)


class _Waited:
    """Guard of one request that has waited."""

    __slots__ = ("_loop_guard", "_proxy", "_proxy_guard", "_waited")

    def __init__(self, proxy_guard: ProxyGuard, proxy: str | None, waited: float, loop_guard: Guard | None) -> None:
        self._proxy_guard = proxy_guard
        self._proxy = proxy
        self._waited = waited
        self._loop_guard = loop_guard

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """True if a request that comes now is too much."""
        if self._proxy_guard.refuses(now, share, self._proxy, self._waited):
            return True
        return self._loop_guard is not None and self._loop_guard.refuses(now, share)


def _client_of(request: Request) -> str | None:
    """The address of a client, or its network of IPv6."""
    client = request.resolved_client()
    return client if client is None or ":" not in client else grouped(client, IPV6_PREFIX)


class Permits:
    """The places of one request under the adaptive limits that are for it; those that refuse stand first."""

    # without an `__init__`, which takes as long as all the rest: `begin` comes first
    __slots__ = (
        "_adaptive",
        "_client",
        "_fields",
        "_has_lost",
        "_idle_s",
        "_idle_since",
        "_outcome",
        "_priority",
        "_sent",
        "held",
        "in_force",
        "refusal",
        "waited_s",
        "waits",
        "would_refuse",
    )

    _adaptive: AdaptiveMatch
    _priority: Priority
    """That of the caller."""
    _outcome: Outcome
    _sent: int
    """Bytes of the response's body so far."""
    _fields: Sequence[tuple[bytes, bytes]]
    """Those of the response; none before it starts."""
    _client: str | None
    """Who has sent it: the caller, or an address; None if that is not known, or it has no place."""
    _idle_s: float
    """Seconds for which it has waited for its client so far."""
    _idle_since: float | None
    """Since when it waits for it; None if it does not."""
    _has_lost: bool
    """True if others have its places, as it has waited for its client, until that has sent all of its body."""
    held: list[tuple[ConcurrencyLimiter, AdaptiveLimit, Permit]]
    """The places that the request has or waits for."""
    in_force: tuple[InForce, ...]
    """The limits as the request has found them."""
    refusal: Refusal | None
    """The response to a request for which there is no place."""
    waited_s: float
    """Seconds that the request has waited for its places."""
    waits: WaitingTask | WaitingThread | None
    """Who waits for a place; None if nobody has to."""
    would_refuse: tuple[CompiledRule, ...]
    """Shadows that had no place."""

    @property
    def goes_on(self) -> bool:
        """True if the request has its places, so that it neither waits nor is refused."""
        return self.waits is None is self.refusal

    @property
    def is_to_be_told(self) -> bool:
        """True if more is to be told of the request than the limits: that it has waited, or what a shadow would have done."""
        return bool(self.would_refuse or self.waited_s)

    def begin(
        self,
        request: Request,
        adaptive: AdaptiveMatch,
        caller: Caller | None,
        guard: Guard | None,
        waiter: type[WaitingTask | WaitingThread],
    ) -> bool:
        """Take the places of a request. False if it has to wait, or is refused. Of a ``guard`` it is asked once.

        ``waiter`` makes whoever waits for a place.
        """
        self.held = []
        self.in_force = ()
        self._outcome = "untaught" if request.sent_method == "HEAD" else "ok"
        self._sent = self.waited_s = self._idle_s = 0
        self._fields = self.would_refuse = ()
        self._has_lost = False
        self._idle_since = self._client = None
        self.refusal = self.waits = None
        self._adaptive = adaptive
        self._priority = priority = NORMAL if caller is None else caller.priority
        compiled_rules = adaptive.compiled_rules
        compiled_rule = compiled_rules[0]
        places: ConcurrencyLimiter = compiled_rule.places  # type: ignore[assignment]  # it is adaptive
        priority, limit = compiled_rule.priority or priority, places.limit
        permit = places.begin(adaptive.request_class, priority, guard, waiter)
        if permit is not None:  # a request that is refused needs no client
            self.held = [(places, limit, permit)]
            permit.client = self._client = _client_of(request) if caller is None else caller.id
        if permit is None or permit.began is None:
            self.held = []
            may_go_on = self._took(compiled_rule, limit, places, permit)
        else:  # as in `_took`: almost all requests
            room = limit.levels[priority].room - limit.in_flight
            self.in_force = ((compiled_rule.name, limit.limit, room if room > 0 else 0),)  # noqa: FURB136 - max() takes four times as long
            may_go_on = True
            if not compiled_rule.enforced:
                self.in_force = (InShadow(self.in_force[0]),)
        return may_go_on and (len(compiled_rules) == 1 or self._take(compiled_rules[1:], waiter))

    def _take(self, compiled_rules: Sequence[CompiledRule], waiter: Callable[[], WaitingTask | WaitingThread]) -> bool:
        """Take a place under each of these limits, up to one that makes wait or refuses: then it is false."""
        for compiled_rule in compiled_rules:
            places: ConcurrencyLimiter = compiled_rule.places  # type: ignore[assignment]  # it is adaptive
            limit = places.limit
            permit = places.begin(self._adaptive.request_class, compiled_rule.priority or self._priority, None, waiter)
            if not self._took(compiled_rule, limit, places, permit):
                return False
        return True

    def _took(
        self, compiled_rule: CompiledRule, limit: AdaptiveLimit, places: ConcurrencyLimiter, permit: Permit | None
    ) -> bool:
        """Note what was got under a limit. False if it makes wait or refuses."""
        room = limit.levels[compiled_rule.priority or self._priority].room - limit.in_flight
        found = compiled_rule.name, limit.limit, max(0, room)
        self.in_force += (found if compiled_rule.enforced else InShadow(found),)
        if permit is not None:
            permit.client = self._client
            self.held.append((places, limit, permit))
            if permit.began is not None:
                return True
        return self._goes_on_without(compiled_rule, limit, places, permit)

    def _goes_on_without(
        self, compiled_rule: CompiledRule, limit: AdaptiveLimit, places: ConcurrencyLimiter, permit: Permit | None
    ) -> bool:
        """Wait for a place that is not there, or be refused. True if the next limit can be asked all the same."""
        if permit is not None:
            self.waits = places.waiter(permit)
            if self.waits is not None:
                return False
            if permit.began is not None:
                return True
            self._refuse(compiled_rule, limit)  # it had to give way just now, to another thread
            return False
        if compiled_rule.enforced:
            self._refuse(compiled_rule, limit)
            return False
        if compiled_rule not in self.would_refuse:
            self.would_refuse += (compiled_rule,)
            if compiled_rule.row is not None:
                compiled_rule.row.count(SHADOW_REFUSED, 1.0)
        return True

    def wait(self) -> None:
        """Wait in this thread for all places that are missing."""
        while isinstance(self.waits, WaitingThread):
            places, _, permit = self.held[-1]
            self._go_on(has_place=places.wait(permit, self.waits))

    async def await_places(self, stay: Stay) -> bool:
        """Wait on the event loop for all places that are missing. False if the client left before."""
        while isinstance(self.waits, WaitingTask):
            places, _, permit = self.held[-1]
            if places.has_to_wait(permit, self.waits) and not await stay(self.waits.woken):
                self.end("untaught")
                return False
            self._go_on(has_place=permit.began is not None)
        return True

    def begin_again_here(self) -> None:
        """Take places anew that were given back, and wait for them in this thread."""
        before, self.in_force = self.in_force, ()
        self._take(self._adaptive.compiled_rules, WaitingThread)
        self.wait()
        if self.refusal is None:
            self.in_force = before

    async def begin_again(self, stay: Stay) -> bool:
        """Take places anew that were given back, and wait for them on the event loop. False if the client left before."""
        before, self.in_force = self.in_force, ()
        self._take(self._adaptive.compiled_rules, WaitingTask)
        stays = await self.await_places(stay)
        if self.refusal is None:
            self.in_force = before
        return stays

    def idle(self) -> None:
        """Note that it waits for its client from now on, to send or to read. That is no work, so others may need the places."""
        if self._idle_since is None:
            for places, limit, permit in self.held:
                if permit.began is not None and places.limit is limit:  # else others have it already, or it was forgotten
                    self._idle_since = places.idle(permit, self._idle_s)

    def busy(self) -> None:
        """Note that it waits for its client no longer."""
        since, self._idle_since = self._idle_since, None
        if since is None:
            return
        idle_s = 0.0
        for places, _, permit in self.held:
            idle_s = places.busy(permit, since)
            self._has_lost = self._has_lost or permit.began is None
        self._idle_s += idle_s

    def has_body(self) -> None:
        """Note that the whole body has arrived. Takes lost places again, beyond the limit if need be, as work begins anyway."""
        if not self._has_lost:
            return
        self._has_lost = False
        for places, limit, permit in self.held:
            if permit.began is None and places.limit is limit:  # else it was forgotten
                places.resume(permit)

    def _go_on(self, *, has_place: bool) -> None:
        """Go on after waiting for a place."""
        waiter, self.waits = type(self.waits), None
        compiled_rules, asked = self._adaptive.compiled_rules, len(self.in_force)
        if has_place:
            self.waited_s += self.held[-1][2].waited_s
            self._take(compiled_rules[asked:], waiter)  # type: ignore[arg-type]  # of one kind or the other
        else:
            self._refuse(compiled_rules[asked - 1], self.held[-1][1])

    def _refuse(self, compiled_rule: CompiledRule, limit: AdaptiveLimit) -> None:
        if compiled_rule.row is not None:
            compiled_rule.row.count(REFUSED, 1.0)
        self.refusal = overloaded(limit.retry_after_s(random.random))
        self.end("untaught")

    def refused(self, refusal: Refusal) -> Decision:
        """The decision of the last limit, under which there was no place, by the response that says when to come back."""
        return refused_in_flight(self.in_force, float(dict(refusal.waiting)["Retry-After"]))

    def count(self) -> None:
        """Count a request that is admitted, by rules that count nothing else."""
        held = [places for places, _, _ in self.held]
        for compiled_rule, (_, limit, remaining) in zip(self._adaptive.compiled_rules, self.in_force):
            if compiled_rule in self.would_refuse:  # and has a place after its turn
                continue
            if compiled_rule.row is not None and not compiled_rule.rule.has_counts and compiled_rule.places in held:
                compiled_rule.row.count(ADMITTED, (limit - remaining) / limit)

    def windows(self) -> Iterator[Window]:
        """The limits as they stand."""
        for compiled_rule in self._adaptive.compiled_rules:
            if compiled_rule.places is not None:
                limit = compiled_rule.places.limit
                room = limit.levels[compiled_rule.priority or self._priority].room
                remaining = max(0, room - limit.in_flight)
                yield Window(compiled_rule.name, limit.limit, 0, remaining, limit.limit - remaining, 0.0, 0.0)

    def starts(self, status: object, fields: Sequence[tuple[bytes, bytes]]) -> None:
        """Note how the response starts. A stream of events gives the places back at once."""
        if self._idle_since is not None:  # the application does not wait for the rest of the body
            self.busy()
        self._has_lost = False
        self._fields = fields
        if status != 200:
            if status in _FAILED:
                self._outcome = "failed"
            elif not isinstance(status, int) or status < 200 or status == 304 or status >= 400:  # servers may take any
                self._outcome = "untaught"
        for name, value in fields:
            if len(name) == 12 and value[:17].lower() == _STREAM and name.lower() == b"content-type":  # what is rare first
                self.end("untaught")

    def sends(self, size: int) -> None:
        """Note that a part of the body goes out. The last declared byte, a stream, and what takes long give the places back."""
        if not self.held:
            return
        self._sent += size
        length = self._declared()
        if length is not None and self._sent >= length:
            self.end()
        elif length is None or self._sent > BUFFERED:
            self.end("untaught")

    def _declared(self) -> int | None:
        """Bytes that the body is to have; None if the response does not say."""
        lengths = [value for name, value in self._fields if name.lower() == b"content-length"]
        return int(lengths[-1]) if lengths and lengths[-1].isdigit() and len(lengths[-1]) <= MOST_DIGITS else None

    def end(self, outcome: Outcome | None = None) -> None:
        """Give back all places; with the outcome by the response unless there is another one."""
        held = self.held
        while held:
            places, limit, permit = held.pop()
            if places.limit is limit:  # else they are the parent's, of which this process was forked
                try:
                    places.end(permit, outcome or self._outcome)
                except BaseException:  # an interruption
                    places.abandon(permit)
                    raise

    def end_unanswered(self, *, client_left: bool) -> None:
        """Give back all places of a request that has not been answered to its end, for whatever error is being handled."""
        if self.held:
            error = sys.exception()
            if isinstance(error, GeneratorExit):  # maybe of the garbage collector
                self.abandon()
                return
            has_failed = client_left or isinstance(error, TimeoutError | ConnectionError | CancelledError)
            self.end("failed" if has_failed else "untaught")

    def abandon(self) -> None:
        """Give back all places, from wherever the garbage collector calls."""
        while self.held:
            places, limit, permit = self.held.pop()
            if places.limit is limit:
                places.abandon(permit)

    def __del__(self) -> None:
        """Whoever forgets a request, be it a server that never closes a body, gives its places back."""
        if self.held:
            self.abandon()
