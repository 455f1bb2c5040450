"""The script's replies, as both Redis stores share them: answers without asking, calls to send, outcomes of replies."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any
from weakref import WeakSet

from limitgate.errors import StoreError, StoreFault
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainRefund, ScriptVariant
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.observing.instruments import Result
from limitgate.observing.store_calls import CallSeries, StoreCounts
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.redis.breaker import Breaker, Tally
from limitgate.stores.redis.deny_cache import DenyCache, KnownBans
from limitgate.stores.redis.dial.inspection import Inspection
from limitgate.stores.redis.errors import OUT_OF_MEMORY
from limitgate.stores.redis.leases import Leases
from limitgate.stores.redis.protocol import plain, wire
from limitgate.stores.redis.server_clock import ServerClock

Outcome = AnyAnswer | StoreError
"""Outcome of a plan that Redis has answered."""
DECLINED = Reading(0, (), admitted=False)
"""Outcome of a plain plan that its script has not carried out: it has to be asked for as a plan of any kind."""

log = logging.getLogger("limitgate.store")


class RedisStoreBase:
    """Store whose plans are decided by the script.

    ``local_refusals`` says whether refusals that hold are repeated without asking. ``clock`` is monotonic, in seconds.
    """

    unreadable = 0
    """Values under our keys that were not ours; each was replaced."""
    clock_steps = 0
    """Buckets written in the server's future: its clock stepped back."""
    clock_leaps = 0
    """Times that a server's clock was ahead of the time that had passed."""
    scheme = "redis"
    """Scheme of the URL."""
    observed: StoreCounts | None = None
    """Figures for observers; None if there are none."""
    calls: CallSeries | None = None
    """Calls among them."""
    closings = 0
    """Times that the store was closed: what works for it in the background begins nothing new then."""
    not_given_back = 0
    """Charges that a refused request left behind on a node of a cluster, as it could not be told; they drain there."""

    def __init__(self, *, local_refusals: bool = True, clock: Callable[[], float] = monotonic) -> None:
        self.deny_cache = DenyCache() if local_refusals else None
        self.leases = Leases()
        self._bans = KnownBans()
        self._breakers: WeakSet[Breaker] = WeakSet()
        self._tally = Tally()
        self.inspection = Inspection()
        """Reports of servers on new connections."""
        self._stepped = Once(Diagnosis.CLOCK_STEPPED)
        self._leapt = Once(Diagnosis.CLOCK_LEAPT)
        self.listen_deadline = math.inf
        """Seconds that the latest request would wait; a server that takes longer to answer a probe is of no use."""
        self._clock = clock
        reset_in_children(self)

    @property
    def replacements(self) -> int:
        """Connections that led to a server which may have forgotten something since the one before."""
        return self.inspection.replacements

    @property
    def healthy(self) -> bool:
        """True if requests wait for Redis; where it has stopped answering they do not, until a probe finds it back."""
        with self._tally.lock:  # a node that comes up meanwhile has a breaker of its own
            breakers = list(self._breakers)
        return all(breaker.is_closed for breaker in breakers)

    @property
    def failures(self) -> int:
        """Number of calls to a server that have failed."""
        return self._tally.failures

    @property
    def outages(self) -> int:
        """Number of times that requests stopped waiting for a server."""
        return self._tally.outages

    def ban_left_us(self, key: str) -> int:
        """Microseconds for which a bucket is still banned, as far as this store has seen it; 0 if it is not."""
        return self._bans.left_us(key, self._clock())

    def breaker(self, server: str = "Redis", *, instead_of: Breaker | None = None) -> Breaker:
        """A breaker for one more server of this store, or for one in the place of another."""
        breaker = Breaker(server, self._tally)
        with self._tally.lock:
            if instead_of is not None:
                instead_of.retire()
                self._breakers.discard(instead_of)
            self._breakers.add(breaker)
        return breaker

    def reset_after_fork(self) -> None:
        """In the child of a fork: what was taken in advance is the parent's, and nobody here will release a lock."""
        self.deny_cache = DenyCache() if self.deny_cache is not None else None
        self.leases = Leases()
        self._breakers = WeakSet()
        self._tally = Tally()

    def locally(self, plan: AnyPlan) -> Reading | None:
        """The reading of a plan that is surely admitted or refused as things stand; None if Redis has to be asked."""
        reading = self.leases.answer(plan, self._clock()) if self.leases else None
        return self.refused(plan) if reading is None else reading

    def refused(self, plan: AnyPlan) -> Reading | None:
        """The reading of a plan that is surely refused as things stand; None if Redis has to be asked."""
        return self.deny_cache.answer(plan, self._clock()) if self.deny_cache else None

    def outgoing(self, call: wire.Call) -> None:
        """Make the plans of a call ready to be sent."""
        clock = self._clock
        call.sent = now = clock()
        if call.shape is not None:
            return
        call.plans = [self.leases.extend(plan, now) if isinstance(plan, Plan) else plan for plan in call.plans]

    def understood(self, call: wire.Call, reply: object, clock: ServerClock) -> list[Outcome]:
        """Return the outcomes of a call's plans. Raises `StoreError` for a reply of any other shape.

        The ``clock`` is that of the server which replied.
        """
        plans, sent = call.plans, call.sent
        readings, unreadable, steps, unwritten = wire.answers(plans, reply)
        self._count(unreadable, steps)
        heard = self._clock()
        if leap := clock.leap(readings[0].now, sent, heard):
            self._note_leap(clock, leap)
        lost = _lost(plans, readings) if unwritten else ()
        if unwritten:
            self.inspection.refused(clock.name, OUT_OF_MEMORY)
        outcomes: list[Outcome] = list(readings)
        bans, cache = self._bans, self.deny_cache
        bans.drop_ended(heard)
        is_news = bool(lost or cache or self.leases.pending or bans.ends)
        given_back: list[str] = []
        for place, (plan, reading) in enumerate(zip(plans, readings)):
            if not is_news and reading.admitted and plan.verb == "spend":
                continue  # mostly there is nothing to note
            if place in lost:
                self.leases.forget(plan)
                outcomes[place] = StoreError("Redis is out of memory", "oom")
            elif not isinstance(reading, PlainRefund):
                outcomes[place] = self._learned(plan, reading, sent, heard)
            else:
                given_back += reading.keys
        if given_back and cache is not None:
            cache.forget(given_back, readings[0].now, sent, heard)
        if self.leases:
            self.end_leases_in_time()
        return outcomes

    def _learned(self, plan: AnyPlan, reading: AnyReading, sent: float, heard: float) -> AnyReading:
        """Learn from the reading of a plan. Returns it, or the one that is handed out in its place."""
        if self._bans.ends or plan.verb == "ban" or not reading.admitted:
            self._bans.learn(reading, heard)
        if self.deny_cache is not None:
            self.deny_cache.learn(plan, reading, sent, heard)
        self.leases.learn(reading, sent)
        if not reading.admitted and self.leases:  # maybe only because somebody before took all the room in advance
            return self.leases.answer(plan, heard) or reading
        return reading

    def understood_plain(self, call: wire.Call, shape: ScriptVariant, reply: object, clock: ServerClock) -> list[Outcome]:
        """`understood` for a call of plain plans. `DECLINED` for one of which a bucket is not as it asks for.

        Mostly these are the plans themselves, each of which is its own reading.
        """
        plans: Any = call.plans
        now, unwritten, verdicts = plain.answers(shape, plans, reply)
        our_clock = self._clock  # no method, so called by a name of its own
        sent, heard, cache, has_bans = call.sent, our_clock(), self.deny_cache, self._bans.ends
        if leap := clock.leap(now, sent, heard):
            self._note_leap(clock, leap)
        if unwritten:
            self.inspection.refused(clock.name, OUT_OF_MEMORY)
        if shape.gives_back:
            return self._understood_refunds(plans, now, verdicts, sent, heard, unwritten=unwritten)
        if verdicts is None and not (unwritten or has_bans or (cache is not None and cache.refusals)):
            return plans  # type: ignore[no-any-return] # mostly there is nothing to note
        self._bans.drop_ended(heard)
        outcomes: list[Outcome] = [*plans]
        for place, (plan, verdict) in enumerate(zip(plans, verdicts or repeat(plain.ADMITTED))):
            if has_bans and verdict != plain.NOT_CARRIED_OUT:
                self._bans.forget(plan.keys, now)
            if verdict == plain.NOT_CARRIED_OUT:
                outcomes[place] = DECLINED
            elif unwritten and verdict:
                outcomes[place] = StoreError("Redis is out of memory", "oom")
            elif cache is not None and (not verdict or cache.knows(plan.keys)):
                cache.learn(plan, plan, sent, heard)
        return outcomes

    def _understood_refunds(
        self,
        plans: list[PlainRefund],
        now: int,
        verdicts: Sequence[int] | None,
        sent: float,
        heard: float,
        *,
        unwritten: bool,
    ) -> list[Outcome]:
        """`understood_plain` for refunds."""
        outcomes: list[Outcome] = plans  # type: ignore[assignment]
        if verdicts is not None or unwritten:
            outcomes = [
                DECLINED
                if verdict == plain.NOT_CARRIED_OUT
                else StoreError("Redis is out of memory", "oom")
                if unwritten
                else plan
                for plan, verdict in zip(plans, verdicts or repeat(plain.ADMITTED))
            ]
        if self.deny_cache is not None:
            self.deny_cache.forget([key for plan in plans for key in plan.keys], now, sent, heard)
        return outcomes

    def _note_leap(self, clock: ServerClock, leap: float) -> None:
        """Note that a server's clock has leapt so many seconds ahead."""
        self.clock_leaps += 1
        self._leapt.log(clock.name, leap)

    def end_leases_in_time(self) -> None:
        """See to it that leases are given back when they end. A store does so by its own means."""

    def refused_elsewhere(self, untouched: Iterable[tuple[Plan, Reading]], since: float) -> None:
        """These buckets were read, after a time, for requests that others have refused."""
        if self.deny_cache is not None:
            for plan, reading in untouched:
                self.deny_cache.learn(plan, reading, since, self._clock())

    def note_call(self, call: wire.Call, result: Result | StoreFault) -> None:
        """Count a call that was sent and has ended, if calls are counted. One that nobody waits for any more is too late."""
        if self.calls is not None and call.sent and call.config is None:
            self.calls.note(result if call.is_wanted else "timeout", self._clock() - call.sent)

    def unanswered(self, call: wire.Call) -> None:
        """No reply came to a call."""
        for plan in call.plans if call.shape is None else ():
            self.leases.forget(plan)

    def _count(self, unreadable: int, steps: int) -> None:
        if unreadable:
            if not self.unreadable:
                log.warning("a value in Redis was not readable and has been replaced; further ones are only counted")
            self.unreadable += unreadable
        if steps:
            self.clock_steps += steps
            self._stepped.log("Redis")


def _lost(plans: Sequence[AnyPlan], readings: Sequence[AnyAnswer]) -> set[int]:
    """The places of plans that Redis had no memory for: what they took was not taken, so nobody was refused for it either."""
    lost, unwritten = set(), set[str]()
    for place, (plan, reading) in enumerate(zip(plans, readings)):
        keys = {charge.key for charge in plan.charges}
        if (plan.verb == "spend" and reading.admitted) or plan.gives_back:
            lost.add(place)
            unwritten |= keys
        elif not (reading.admitted or keys.isdisjoint(unwritten)):
            lost.add(place)
    return lost
