"""State of stores and servers. Interprets replies, for both Redis stores."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from threading import RLock
from typing import Any
from weakref import WeakSet

from limitgate.errors import StoreError, StoreFault, check_switches
from limitgate.internal_errors import OwnError, internal_error, logged_errors
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import OF_ANY, AnyAnswer, AnyPlan, AnyReading, PlainRefund, ScriptVariant
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.observing.exporter import CallSeries, StoreCounts
from limitgate.observing.instruments import Result
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.redis import plain, wire
from limitgate.stores.redis.breaker import PROBE_TIMEOUT, Breaker, Tally
from limitgate.stores.redis.deny_cache import DenyCache, KnownBans
from limitgate.stores.redis.errors import OUT_OF_MEMORY, Redirection, store_error
from limitgate.stores.redis.inspection import Inspection
from limitgate.stores.redis.leases import Leases
from limitgate.stores.redis.session import Answered, Redirected, Session
from limitgate.stores.redis.url import Address, server_name
from limitgate.stores.redis.wire import Kept, kept

APART = 2.0
"""Clock jumps up to this many seconds aren't reported."""
DRIFT = 0.001
"""Tolerated difference of clock rates, because of slewing."""


class ServerClock:
    __slots__ = ("_latest", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self._latest = math.inf, 0.0

    def leap(self, now: int, sent: float, heard: float) -> float:
        """Seconds that the clock jumped ahead, or 0.

        ``now`` is Unix µs, read between ``sent`` and ``heard``, monotonic seconds.
        """
        earlier, since = self._latest
        self._latest = now, sent
        passed = heard - since
        ahead = (now - earlier) / 1_000_000 - passed
        if ahead <= APART:
            return 0.0
        return ahead if ahead > APART + DRIFT * passed else 0.0


Outcome = AnyAnswer | StoreError
DECLINED = Reading(0, (), admitted=False)
"""Result of a plain plan that must be resent as a general plan."""

log: logging.Logger = logging.getLogger("limitgate.store")


class RedisStoreBase:
    """``local_refusals`` answers refused callers locally. ``clock`` is monotonic seconds."""

    unreadable: int = 0
    """Number of values that LimitGate didn't write."""
    clock_steps: int = 0
    """Buckets written in the server's future."""
    clock_leaps: int = 0
    scheme = "redis"
    observed: StoreCounts | None = None
    calls: CallSeries | None = None
    closings = 0
    """Number of closings. If it changes, background work stops."""
    not_given_back = 0
    """Charges on cluster nodes whose refund failed. They drain."""

    def __init__(self, *, local_refusals: bool = True, clock: Callable[[], float] = monotonic) -> None:
        check_switches(local_refusals=local_refusals)
        self.deny_cache = DenyCache() if local_refusals else None
        self.leases: Leases = Leases()
        self._bans = KnownBans()
        self._breakers: WeakSet[Breaker] = WeakSet()
        self._tally = Tally()
        self.inspection: Inspection = Inspection()
        self._stepped = Once(Diagnosis.CLOCK_STEPPED)
        self._leapt = Once(Diagnosis.CLOCK_LEAPT)
        self.listen_deadline: float = math.inf
        """Deadline of the latest request."""
        self._clock = clock
        reset_in_children(self)

    @property
    def replacements(self) -> int:
        """Number of connections to a server that may have lost data."""
        return self.inspection.replacements

    @property
    def healthy(self) -> bool:
        """False while requests fail at once."""
        # Another thread may add a breaker.
        with self._tally.lock:
            breakers = list(self._breakers)
        return all(breaker.is_closed for breaker in breakers)

    @property
    def failures(self) -> int:
        return self._tally.failures

    @property
    def outages(self) -> int:
        return self._tally.outages

    def ban_left_us(self, key: str) -> int:
        return self._bans.left_us(key, self._clock())

    def breaker(self, server: str = "Redis", *, instead_of: Breaker | None = None) -> Breaker:
        breaker = Breaker(server, self._tally)
        with self._tally.lock:
            if instead_of is not None:
                instead_of.retire()
                self._breakers.discard(instead_of)
            self._breakers.add(breaker)
        return breaker

    def reset_after_fork(self) -> None:
        self.deny_cache = DenyCache() if self.deny_cache is not None else None
        self.leases = Leases()
        self._breakers = WeakSet()
        self._tally.lock = RLock()

    def locally(self, plan: AnyPlan) -> Reading | None:
        """Return a local answer; None to ask Redis."""
        reading = self.leases.answer(plan, self._clock()) if self.leases else None
        return self.refused(plan) if reading is None else reading

    def refused(self, plan: AnyPlan) -> Reading | None:
        """Return a remembered refusal; None to ask Redis."""
        return self.deny_cache.answer(plan, self._clock()) if self.deny_cache else None

    def outgoing(self, call: wire.Call) -> None:
        clock = self._clock
        call.sent = now = clock()
        if call.shape is not None:
            return
        call.plans = [self.leases.extend(plan, now) if isinstance(plan, Plan) else plan for plan in call.plans]

    def understood(self, call: wire.Call, reply: object, clock: ServerClock) -> list[Outcome]:
        """Return the outcomes of a call. Raises `StoreError`."""
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
                continue
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
        if self._bans.ends or plan.verb == "ban" or not reading.admitted:
            self._bans.learn(reading, heard)
        if self.deny_cache is not None:
            self.deny_cache.learn(plan, reading, sent, heard)
        self.leases.learn(reading, sent)
        # A lease may have used up the room.
        if not reading.admitted and self.leases:
            return self.leases.answer(plan, heard) or reading
        return reading

    def understood_plain(self, call: wire.Call, shape: ScriptVariant, reply: object, clock: ServerClock) -> list[Outcome]:
        """`understood`, with `DECLINED` for plans to resend."""
        plans: Any = call.plans
        now, unwritten, verdicts = plain.answers(shape, plans, reply)
        # A local name, because an attribute would bind the callable.
        our_clock = self._clock
        sent, heard, cache, has_bans = call.sent, our_clock(), self.deny_cache, self._bans.ends
        if leap := clock.leap(now, sent, heard):
            self._note_leap(clock, leap)
        if unwritten:
            self.inspection.refused(clock.name, OUT_OF_MEMORY)
        if shape.gives_back:
            return self._understood_refunds(plans, now, verdicts, sent, heard, unwritten=unwritten)
        if verdicts is None and not (unwritten or has_bans or (cache is not None and cache.refusals)):
            return plans  # type: ignore[no-any-return]
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
        self, plans: list[PlainRefund], now: int, verdicts: Sequence[int] | None, sent: float, heard: float, *, unwritten: bool
    ) -> list[Outcome]:
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
        self.clock_leaps += 1
        self._leapt.log(clock.name, leap)

    def end_leases_in_time(self) -> None: ...

    def refused_elsewhere(self, untouched: Iterable[tuple[Plan, Reading]], since: float) -> None:
        """Remember refusals that were read after ``since``, in plans that another node refused, too."""
        if self.deny_cache is not None:
            for plan, reading in untouched:
                self.deny_cache.learn(plan, reading, since, self._clock())

    def note_call(self, call: wire.Call, result: Result | StoreFault) -> None:
        """Count a call. If no caller waits, count a timeout."""
        if self.calls is not None and call.sent and call.config is None:
            self.calls.note(result if call.is_wanted else "timeout", self._clock() - call.sent)

    def unanswered(self, call: wire.Call) -> None:
        for plan in call.plans if call.shape is None else ():
            self.leases.forget(plan)

    def _count(self, unreadable: int, steps: int) -> None:
        if unreadable:
            if not self.unreadable:
                log.warning("replaced an unreadable value in Redis; further ones are only counted")
            self.unreadable += unreadable
        if steps:
            self.clock_steps += steps
            self._stepped.log("Redis")


def _lost(plans: Sequence[AnyPlan], readings: Sequence[AnyAnswer]) -> set[int]:
    lost, unwritten = set(), set[str]()
    for place, (plan, reading) in enumerate(zip(plans, readings)):
        keys = {charge.key for charge in plan.charges}
        if (plan.verb == "spend" and reading.admitted) or plan.gives_back:
            lost.add(place)
            unwritten |= keys
        elif not (reading.admitted or keys.isdisjoint(unwritten)):
            lost.add(place)
    return lost


Answer = list[Outcome] | Kept | StoreError | Redirection


def blames_server(failure: StoreError) -> bool:
    """True unless this process or a lack of memory is the cause."""
    return failure.fault not in ("oom", "overload") and not isinstance(failure, OwnError)


def configuration(answer: Answer) -> Kept:
    if isinstance(answer, Kept):
        return answer
    raise failure_by(answer)


def failure_by(answer: Answer) -> StoreError:
    return store_error(
        answer if isinstance(answer, Exception) else StoreError("the answer belongs to another kind of call", "reply")
    )


class Server:
    """A server, or the cluster node at ``address``."""

    def __init__(self, replies: RedisStoreBase, address: Address | None) -> None:
        self.address = address
        self.name: str = server_name(address)
        self.breaker: Breaker = replies.breaker(self.name)
        self._replies = replies
        self._clock = ServerClock(self.name)

    def reset_after_fork(self) -> None:
        self.breaker = self._replies.breaker(self.name, instead_of=self.breaker)

    @property
    def probe_timeout(self) -> float:
        return min(PROBE_TIMEOUT, self._replies.listen_deadline)

    def judge(self, session: Session[Any], event: Answered[Any] | Redirected[Any]) -> Answer:
        """Interpret an answer.

        After a failure the next call uses another connection. A late answer doesn't close the breaker.
        """
        (call, reply), breaker, replies = event, self.breaker, self._replies
        try:
            if type(reply) is not bytes and isinstance(reply, Exception):
                if self.address is None or not isinstance(event, Redirected):
                    raise store_error(reply) from reply  # noqa: TRY301 - handled with decoding errors
                answer: Answer = event.reply
            elif call.shape is not None and call.shape is not OF_ANY:
                answer = replies.understood_plain(call, call.shape, reply, self._clock)
            elif call.config is not None:
                answer = kept(call.config, reply)
            else:
                answer = replies.understood(call, reply, self._clock)
            if breaker.in_trouble and call.is_wanted:
                breaker.succeeded()
            if replies.calls is not None and not isinstance(event, Redirected):
                is_lost = isinstance(answer, list) and any(isinstance(each, StoreError) for each in answer)
                replies.note_call(call, "oom" if is_lost else "ok")
        except Exception as error:  # noqa: BLE001 - the answer is consumed, and other calls have theirs
            failure = internal_error(error)
            replies.note_call(call, failure.fault)
            with logged_errors():
                replies.unanswered(call)
                replies.inspection.refused(self.name, error.__cause__ or error)
            if blames_server(failure):
                session.retire()
            elif call.is_wanted:
                with logged_errors():
                    breaker.succeeded()
            return failure
        return answer
