"""Limits that warm up: Guava's arithmetic on the memory store and by the script."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
import redis
from hypothesis import example, given, strategies as st

from limitgate import ConfigError, Decision, Limit, Limiter, MemoryStore, Rule, load_rules
from limitgate.algorithms import warm_up
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.limit import as_limit, seconds_of
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, full_refund
from limitgate.stores.redis import wire
from tests.algorithms.test_differential import HEADER
from tests.support.clock import Clock
from tests.support.effort import HISTORIES
from tests.support.guava import Guava, rate_of
from tests.support.scripted import TTL_SUFFIX, Scripted

SECOND = 1_000_000
PERIODS = (1, 7, 60, 3600, 366 * 86400)
COUNTS = (1, 2, 3, 7, 333, 99_991, 1_000_003, 10**11)
WARM_UPS = ("1ms", "333ms", "1s", "7s", "1m", "18m", "1h", "9600h", 0.001_001, 12.345_678)
COSTS = (0, 1, 1, 1, 1, 2, 3, 10, 1000, 10**9, 10**30)
FORWARD = (0, 0, 1, 2, 1000, 333_333, 10**6, 10**7, 3_600 * 10**6, 400 * 86_400 * 10**6)
BACK = (-1, -333_333, -(10**7))
AHEAD = (0, 0, 0, 1, 10**6, 10**8)
BLOCK = 200


@lru_cache(maxsize=1000)
def a_window(period: int, count: int, warming: str | float) -> Bucket:
    """A limit out of the whole range that is allowed, in a bucket."""
    count = min(count, 1_000_000 * period)
    us = min(round(seconds_of(warming) * SECOND), (warm_up.MAX_FULL - 1) // count)
    return bucket_of(Limit(f"{count} per {period} seconds", warm_up=us / SECOND))


class Event(NamedTuple):
    """Something that is asked of a bucket, when, and what is to be answered."""

    plan: Plan
    now: int
    state: tuple[Fraction, Fraction]
    """What was owed and what was taken from the store before, in requests."""
    wait_us: float


def a_correction(rnd: random.Random, limit: Limit, now: int) -> Adjustment:
    """Something to be put back, or taken on top, of what was charged a while ago."""
    ticks = rnd.choice((-1, 1)) * rnd.choice((0, 1, rnd.randrange(limit.period_us), limit.period_us, 7 * limit.period_us))
    taken = max(-limit.full, min(limit.full, rnd.choice((ticks, ticks // 2))))
    warmest = rnd.choice((0, limit.full, rnd.randrange(limit.full + 1), 2 * limit.full))
    grace = rnd.choice((0, 0, 1, 1000, 10**6, 10**10))
    turn = rnd.choice((0, 0, 1, 10**6, 10**10))
    return Adjustment(
        0, now - rnd.choice((0, 0, 1, 1000, 333_333, 10**7, 10**11, -5)), [(ticks, taken, turn, warmest)], [grace]
    )


def history(rnd: random.Random, size: int = 5) -> list[Event]:
    """What is asked of one bucket, mostly under one limit, and what Guava says to it."""
    period, key, now = rnd.choice(PERIODS), f"warm:{rnd.randrange(2**64):x}", 1_790_000_000_000_000
    several = [a_window(period, rnd.choice(COUNTS), rnd.choice(WARM_UPS)) for _ in range(rnd.choice((1, 1, 2)))]
    guava, events = Guava(several[0].limits[0], now), []
    for _ in range(size):
        bucket = rnd.choice(several)
        (limit,) = bucket.limits
        verb, cost, ahead, lease = rnd.choice(("spend",) * 10 + ("peek", "reset")), rnd.choice(COSTS), rnd.choice(AHEAD), None
        if rnd.random() < 0.15:
            verb, cost, lease = "adjust", 0, a_correction(rnd, limit, now)
        plan = Plan((Charge(key, bucket, cost, enforced=True, rule=None, adjustment=lease, max_wait_us=ahead),), verb)
        event, guava = _asked(guava, plan, now)
        events.append(event)
        now += _step(rnd, guava, limit)
    return events


def _asked(found: Guava, plan: Plan, now: int) -> tuple[Event, Guava]:
    """What is to be answered, and what there is to be found the next time: what was there before if nothing is written."""
    (charge,), (limit,) = plan.charges, plan.charges[0].bucket.limits
    guava = replace(found)
    guava.at(now)
    guava.under(limit)
    writes = now < found.now or plan.verb == "reset" or charge.adjustment is not None or limit.count != found.limit.count
    if charge.adjustment is not None:
        ((ticks, taken, turn, warmest),), since = charge.adjustment.back, max(0, now - charge.adjustment.as_of)
        if ticks > 0:
            back = [_requests(each, limit) for each in (ticks, taken, warmest)]
            guava.put_back(*back[:2], since, charge.adjustment.grace[0], turn, warmest=back[2])
        elif ticks < 0:
            guava.take(_requests(-ticks, limit), _requests(-taken, limit))
    if plan.verb == "reset":
        guava.owed = guava.taken = Fraction(0)
    event = Event(plan, now, (guava.owed, guava.taken), guava.wait_us(charge.cost))
    if plan.verb == "spend" and charge.cost and event.wait_us <= charge.max_wait_us:
        guava.take(Fraction(charge.cost))
        writes = True
    return event, guava if writes else found


def _requests(ticks: int, limit: Limit) -> Fraction:
    return Fraction(ticks, limit.period * SECOND)


def _step(rnd: random.Random, guava: Guava, limit: Limit) -> int:
    """Microseconds to the next event: often just until nothing is owed, or until it is cold, or one off it."""
    if rnd.random() < 0.1:
        return rnd.choice(BACK)
    stable = rate_of(limit).stable
    waits = [math.ceil(guava.owed * stable), math.ceil((guava.owed + guava.taken / 2) * stable)]
    waits = [wait for wait in waits if 0 < wait < 366 * 86_400 * 10 * SECOND]
    if waits and rnd.random() < 0.6:
        return max(0, rnd.choice(waits) + rnd.choice((-1, 0, 0, 1)))
    return rnd.choice(FORWARD)


def same(event: Event, reading: Reading) -> None:
    """The state is exact, and so is what is decided."""
    (charge,), (limit,) = event.plan.charges, event.plan.charges[0].bucket.limits
    owed, taken = event.state
    assert reading.buckets[0].before[0] == (owed * limit.period_us, taken * limit.period_us)
    decision = decide(event.plan, reading)
    passes = event.wait_us <= charge.max_wait_us
    assert decision.allowed is passes
    assert decision.retry_after == (0 if passes else (event.wait_us - charge.max_wait_us) / SECOND)
    spends = passes and event.plan.verb == "spend"
    assert decision.delay == (event.wait_us / SECOND if spends and charge.max_wait_us else 0)
    if not spends:
        stable = rate_of(limit).stable
        assert decision.reset_after == math.ceil(owed * stable) / SECOND
        assert (decision.limit, decision.remaining) == (1, 0 if owed else 1)
        assert decision.windows[0].used == math.ceil(owed)


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("block", range(HISTORIES // BLOCK))
def test_histories_property(scripted: Scripted, client: redis.Redis, block: int) -> None:
    """Script and memory store agree with Guava in fractions on every state and every promise, over hundreds of histories."""
    histories = [history(random.Random(seed)) for seed in range(block * BLOCK, (block + 1) * BLOCK)]
    with client.pipeline(transaction=False) as pipe:
        for events in histories:
            for event in events:
                pipe.execute_command(*scripted.command(event.plan, event.now))
            pipe.unlink(events[0].plan.charges[0].key)
        replies = iter(pipe.execute())
    for seed, events in enumerate(histories, block * BLOCK):
        store = MemoryStore(clock := Clock())
        store._reclaim = lambda _now: True  # what is gone cannot be found in the future when the clock steps back
        try:
            for event in events:
                (reading,), unreadable, _, _ = wire.answers([event.plan], next(replies))
                same(event, reading)
                assert not unreadable
                clock.now = event.now
                same(event, store.spend(event.plan))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        next(replies)


def test_histories_meet_every_case() -> None:
    """The generated histories are worth something: each kind of event and of answer is common among them."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        for event in history(random.Random(seed)):
            charge, (owed, taken) = event.plan.charges[0], event.state
            full = rate_of(charge.bucket.limits[0]).most
            seen["refused"] += charge.max_wait_us < event.wait_us < math.inf
            seen["never"] += event.wait_us == math.inf
            seen["booked ahead"] += 0 < event.wait_us <= charge.max_wait_us
            seen["put back"] += charge.adjustment is not None and charge.adjustment.back[0][0] > 0
            seen["taken on top"] += charge.adjustment is not None and charge.adjustment.back[0][0] < 0
            seen["half warm"] += 0 < taken < full and not owed
            seen["warm"] += taken == full
    assert len(seen) == 7
    assert min(seen.values()) > 30, seen


@given(
    count=st.integers(1, 10**6),
    ms=st.integers(1, 10**6),
    parts=st.lists(st.fractions(0, 1, max_denominator=1000), min_size=2, max_size=2),
)
def test_the_cost_of_stored_time_is_guavas_property(count: int, ms: int, parts: list[Fraction]) -> None:
    """What is paid between any two warmths is the area below Guava's line between them, to less than a tick."""
    limit = Limit(f"{count}/second", warm_up=ms / 1000)
    begin, end = (int(part * limit.full) for part in sorted(parts))
    rate = rate_of(limit)
    stored, taken = ((limit.full - begin) / rate.stable / count, (end - begin) / rate.stable / count)
    exact = rate.time_of_stored(stored, taken) * count
    paid = end - begin + warm_up.toll(end, limit.full) - warm_up.toll(begin, limit.full)
    assert abs(paid - exact) < 1
    assert limit.full == rate.most * limit.period_us


# --- what it means ----------------------------------------------------------------------------------------------------


class Subject:
    """A limiter under a clock that goes on only when told."""

    def __init__(self, store: Callable[[Clock], object]) -> None:
        self.clock = Clock()
        self.began = self.clock.now
        self.limiter = Limiter(store(self.clock))
        self.key = uuid4().hex

    def hit(self, limit: Limit, cost: int = 1) -> Decision:
        return self.limiter.hit(self.key, limit, cost=cost)

    def peek(self, limit: Limit, cost: int = 1) -> Decision:
        return self.limiter.peek(self.key, limit, cost=cost)

    def saturate(self, limit: Limit, seconds: float) -> list[float]:
        """When requests pass, in seconds, if the next one always comes just when it may."""
        passed, end = [], self.clock.now + round(seconds * SECOND)
        while self.clock.now < end:
            decision = self.hit(limit)
            if decision.allowed:
                passed.append((self.clock.now - self.began) / SECOND)
            else:
                self.clock.advance(us=round(decision.retry_after * SECOND))
        return passed


@pytest.fixture(params=["memory", "script"])
def subject(request: pytest.FixtureRequest, client: redis.Redis) -> Subject:
    return Subject(MemoryStore if request.param == "memory" else lambda clock: Scripted(client, clock))


def test_guavas_ramp(subject: Subject) -> None:
    """From a third of its rate, when cold, a limit gets to its whole rate in just the time to warm up."""
    passed = subject.saturate(Limit("10/second", warm_up="4s"), 6)
    gaps = [round(later - sooner, 6) for sooner, later in pairwise(passed)]
    assert gaps[:20] == [round(0.295 - 0.01 * number, 6) for number in range(20)]  # around 0.3 s, less by 10 ms each
    assert set(gaps[20:]) == {0.1}
    in_each_second = Counter(int(second) for second in passed)
    assert [in_each_second[second] for second in range(6)] == [4, 4, 5, 7, 10, 10]


@pytest.mark.parametrize(
    ("text", "seconds"), [("10/second", 4), ("100/second", 10), ("7/second", 12), ("600/minute", 2.5), ("1/second", 60)]
)
def test_half_of_what_the_rate_is_passes_while_it_warms_up(subject: Subject, text: str, seconds: float) -> None:
    """Saturated from the cold, count times warm_up over two requests pass within the warm-up, and then the whole rate."""
    limit = Limit(text, warm_up=seconds)
    rate = limit.count / limit.period
    passed = subject.saturate(limit, 2 * seconds)
    assert len([second for second in passed if second < seconds]) == math.ceil(rate * seconds / 2)
    assert len(passed) == pytest.approx(rate * seconds * 1.5, abs=1)


@given(count=st.integers(1, 1000), ms=st.integers(1, 60_000), costs=st.lists(st.integers(1, 100), max_size=30))
def test_turns_are_not_before_guavas_property(count: int, ms: int, costs: list[int]) -> None:
    """Of requests that come all at once each has the turn that Guava gives it, or one less than a tick later."""
    bucket = bucket_of(Limit(f"{count}/second", warm_up=ms / 1000))
    rate, states = rate_of(bucket.limits[0]), [(0, 0)]
    stored, turn = rate.most, Fraction(0)
    for cost in costs:
        states = warm_up.try_charge(states, bucket, cost, 10**12)
        of_stored = min(stored, Fraction(cost))
        turn += rate.time_of_stored(stored, of_stored) + (cost - of_stored) * rate.stable
        stored -= of_stored
        assert 0 <= states[0][0] - turn * count < 1


def test_any_cost_passes_and_the_next_one_pays(subject: Subject) -> None:
    """Where nothing is owed a request passes, whatever it costs, and all of it is owed then; a cost of 0 takes nothing."""
    limit = Limit("10/second", warm_up="2s")
    assert subject.hit(limit, 0).reset_after == 0
    first = subject.hit(limit, 30)
    assert (first.allowed, first.limit, first.remaining, first.retry_after, first.granted) == (True, 1, 0, 0, 30)
    assert first.windows[0].used == 40  # 2 s of warming up, in which 10 of the 20 that are stored pass, and 2 s for the rest
    assert subject.hit(limit, 0).allowed
    refused = subject.hit(limit)
    assert (refused.allowed, refused.retry_after, refused.reset_after) == (False, 4, 4)


@pytest.mark.parametrize("cost", [1, 3, 50])
def test_a_promised_wait_is_exact(subject: Subject, cost: int) -> None:
    """Waiting just as long as was promised is enough, one microsecond less is not, whatever the next one costs."""
    limit = Limit("7/second", warm_up="3s")
    for _ in range(5):
        subject.hit(limit, cost)
        subject.clock.advance(us=1234)
        wait = round(subject.peek(limit, cost).retry_after * SECOND)
        subject.clock.advance(us=wait - 1)
        assert not subject.hit(limit, 50).allowed
        subject.clock.advance(us=1)
        assert subject.peek(limit, 50).allowed


@pytest.mark.parametrize(("idle", "stored"), [(0, 0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1), (400, 1)])
def test_idle_time_cools(subject: Subject, idle: float, stored: float) -> None:
    """As long as warming up takes, a warm limit gets colder while nothing is owed, and one above one half is slow again."""
    limit = Limit("10/second", warm_up="4s")
    subject.hit(limit, 100)
    subject.clock.advance(subject.peek(limit).retry_after + idle)
    wait = subject.hit(limit).reset_after
    above = max(0, stored - 0.5)
    assert wait == pytest.approx(0.1 * (1 + 4 * above) if not above else 0.1 * (1 + 4 * above) - 0.005)


def test_a_limit_that_is_changed_is_found_again(subject: Subject) -> None:
    """Under another count or time to warm up as many requests are owed; without warm_up it is another bucket."""
    subject.hit(Limit("10/second", warm_up="2s"), 30)
    assert subject.peek(Limit("20/second", warm_up="2s")).reset_after == 2
    assert subject.peek(Limit("20/second", warm_up="9s")).windows[0].used == 40
    assert subject.peek(Limit("5/second", warm_up="100ms")).reset_after == 8
    assert subject.peek(Limit("10/second")).reset_after == 0


def test_what_costs_more_than_can_be_remembered_never_passes(subject: Subject) -> None:
    """Up to 142 years may be owed; what costs more is refused for ever, and nothing is owed for it."""
    limit = Limit("1/day", warm_up="10s")
    assert subject.hit(limit, limit.most + 1).retry_after == math.inf
    assert subject.hit(limit, limit.most).allowed
    assert subject.hit(limit).retry_after == pytest.approx(142.7 * 365.25 * 86_400, rel=0.01)


def test_a_clock_that_steps_back_locks_nobody_out(subject: Subject) -> None:
    """After a step back it takes as long as it would have, and nothing got colder."""
    limit = Limit("10/second", warm_up="2s")
    subject.hit(limit, 30)
    subject.clock.advance(-86_400)
    assert subject.hit(limit).retry_after == 4
    subject.clock.advance(4)
    assert subject.hit(limit).reset_after == 0.1


COSTS_BEFORE_AND_AFTER = st.tuples(st.integers(1, 60), st.integers(0, 60))


@given(
    count=st.integers(1, 1000),
    ms=st.integers(1, 10_000),
    before=st.integers(0, 50),
    costs=COSTS_BEFORE_AND_AFTER,
    wait=st.integers(0, 30_000_000),
)
@example(count=109, ms=46, before=5, costs=(1, 0), wait=101_071)  # charged while warm, given back when cold
@example(count=10, ms=5_000, before=40, costs=(10, 0), wait=10_300_000)
def test_a_correction_is_as_if_it_had_cost_that_property(
    count: int, ms: int, before: int, costs: tuple[int, int], wait: int
) -> None:
    """Where nobody else asks meanwhile, a bucket is as if a request had cost from the start what it turned out to cost."""
    bucket = bucket_of(Limit(f"{count}/second", warm_up=ms / 1000))
    (limit,), (cost, truth) = bucket.limits, costs
    found = warm_up.try_charge([(0, 0)], bucket, before, 10**12)
    back, grace = warm_up.refund_amount(found, bucket, cost, truth)
    after = warm_up.advance(warm_up.try_charge(found, bucket, cost, 10**12), wait, bucket)
    (debt, warmth), ((owed, expected),) = (
        warm_up.apply_adjustment(after, back, wait, grace, bucket)[0],
        warm_up.advance(warm_up.try_charge(found, bucket, truth, 10**12), wait, bucket),
    )
    if truth > cost:  # from now on, so it may be more
        assert debt >= owed
    else:
        assert 0 <= debt - owed < limit.count  # a microsecond
        assert abs(warmth - expected) < limit.count


@given(
    costs=st.lists(st.integers(1, 20), min_size=2, max_size=8),
    which=st.integers(0, 7),
    truth=st.integers(0, 20),
    count=st.integers(1, 50),
)
def test_who_else_asked_meanwhile_makes_no_difference_property(costs: list[int], which: int, truth: int, count: int) -> None:
    """In a bucket that has not been idle since, one that had its turn and is given back leaves what the others cost alone."""
    bucket = bucket_of(Limit(f"{count}/second", warm_up=100_000))
    which %= len(costs)
    truth = min(truth, costs[which])

    def taken(costs: list[int]) -> list[tuple[int, int]]:
        states = [(0, 0)]
        for cost in costs:
            found.append(states)
            states = warm_up.try_charge(states, bucket, cost, 10**12)
        return states

    found: list[list[tuple[int, int]]] = []
    states = taken(costs)
    ((ticks, warmth, _, warmest),), grace = warm_up.refund_amount(found[which], bucket, costs[which], truth)
    assert warm_up.apply_adjustment(states, [(ticks, warmth, 0, warmest)], 0, grace, bucket) == taken(
        [*costs[:which], truth, *costs[which + 1 :]]
    )


def test_a_turn_is_given_back_while_nobody_is_behind(subject: Subject) -> None:
    """Who leaves the end of a queue makes room there; who leaves from amid it makes none, as those behind keep their turns."""
    bucket, store = bucket_of(Limit("10/second", warm_up="2s")), subject.limiter._store

    def book() -> tuple[Plan, Reading]:
        plan = Plan((Charge(subject.key, bucket, 1, enforced=True, rule=None, max_wait_us=10**9),))
        return plan, store.spend(plan, 5)

    def turn(booked: tuple[Plan, Reading]) -> float:
        return decide(*booked).delay

    first, second, third = book(), book(), book()
    assert 0 == turn(first) < turn(second) < turn(third)
    store.spend(full_refund(*second), 5)
    fourth = book()
    assert turn(fourth) > turn(third)
    store.spend(full_refund(*fourth), 5)
    again = book()
    assert turn(again) == turn(fourth)
    subject.clock.advance(turn(again))
    store.spend(full_refund(*again), 5)  # it has had its turn
    assert turn(book()) == 0


# --- in the stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [1, 3, 1000])
@pytest.mark.parametrize("text", ["7/second", "333/minute", "1000003/day"])
def test_a_key_lives_until_it_is_cold(client: redis.Redis, text: str, cost: int) -> None:
    """A key is kept until its bucket is as one that nobody has used, at most 2 ms longer."""
    clock, key, bucket = Clock(), uuid4().hex, bucket_of(Limit(text, warm_up="7s"))
    on_set = f"server.call('SET', key .. '{TTL_SUFFIX}', string.format('%d', fake + ttl * 1000))"
    scripted = Scripted(client, clock, on_set)
    plan = Plan((Charge(key, bucket, cost, enforced=True, rule=None, max_wait_us=10**15),))
    for us in (0, 1, 1234, SECOND, 10**9):
        clock.advance(us=us)
        (state,) = scripted.spend(plan, 5).buckets[0].after
        assert 0 < int(client.get(key + TTL_SUFFIX)) - clock.now - warm_up.ttl_us(state, bucket.limits[0]) <= 2001
    clock.advance(us=warm_up.ttl_us(state, bucket.limits[0]))
    assert scripted.spend(plan._replace(verb="peek"), 5).buckets[0].before == [(0, 0)]


def test_a_full_store_forgets_no_warmth_before_those_that_owe_less() -> None:
    """A warm bucket counts as one that owes something until it is cold, since a new one would be colder."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=2)
    limiter, limit = Limiter(store), Limit("10/second", warm_up="60s")
    limiter.hit("warm", limit, cost=1000)
    clock.advance(limiter.peek("warm", limit).retry_after)
    limiter.hit("another", "9/second")
    limiter.hit("one more", "9/second")
    assert limiter.hit("warm", limit).reset_after == 0.1
    clock.advance(61)
    limiter.hit("new", "1/second")
    assert len(store) == 1


FOREIGN = {
    "of no such length": HEADER + bytes(25),
    "all zero": HEADER + bytes(26),
    "count of zero": HEADER + bytes(6) + (5).to_bytes(7, "little") + bytes(13),
    "rest above its count": HEADER + (3).to_bytes(6, "little") + bytes(7) + (3).to_bytes(6, "little") + bytes(7),
    "debt of centuries": HEADER + (3).to_bytes(6, "little") + (2**53).to_bytes(7, "little") + bytes(13),
    "warmth beyond bounds": HEADER + (3).to_bytes(6, "little") + bytes(13) + (2**51).to_bytes(7, "little"),
    "random": HEADER + random.Random(2).randbytes(26),
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_ours_is_replaced(client: redis.Redis, foreign: bytes) -> None:
    """A value that makes no sense counts as a cold bucket, and is replaced and counted."""
    clock = Clock(int.from_bytes(HEADER[1:], "little"))
    scripted, key = Scripted(client, clock), uuid4().hex
    client.set(key, foreign)
    plan = Plan((Charge(key, bucket_of(Limit("10/second", warm_up="2s")), 1, enforced=True, rule=None),))
    answers = wire.answers([plan], client.execute_command(*scripted.command(plan, clock())))
    assert (answers.readings[0].buckets[0].before, answers.unreadable) == ([(0, 0)], 1)
    assert scripted.spend(plan, 5).buckets[0].before[0][0] > 0


# --- how it is given --------------------------------------------------------------------------------------------------


MISTAKES = [
    ({"warm_up": "10s", "algorithm": "fixed_window"}, "expected no other algorithm"),
    ({"warm_up": "10s", "algorithm": "gcra"}, "expected no other algorithm"),
    ({"warm_up": "10s", "burst": 1}, "expected a rate without burst"),
    ({"warm_up": "10s", "lease": 1}, "expected no lease"),
    ({"warm_up": "10s", "borrow": True}, "expected borrow for gcra only"),
    ({"warm_up": "10s", "align": "utc"}, "is for a fixed_window only"),
    ({"warm_up": "10s", "limit": "10 at once"}, "expected a rate without burst"),
    ({"algorithm": "warm_up"}, "expected a duration for warm_up"),
    ({"warm_up": "0.9ms"}, "at least 1 ms"),
    ({"warm_up": "1126s", "limit": "1000000/second"}, "at most 1125.9 s"),
    ({"warm_up": "10s", "limit": "10/second burst 10"}, "expected a rate without burst"),
    ({"warm_up": 1e300}, "at most 1.1259e\\+08 s"),
    ({"warm_up": 10**400}, "is not a duration"),
    ({"warm_up": 0}, "at least 1 ms"),
    ({"warm_up": "soon"}, "'soon' is not a duration, expected seconds"),
]


@pytest.mark.parametrize(("options", "expected"), MISTAKES, ids=str)
def test_what_cannot_be_had_is_refused(options: dict[str, object], expected: str) -> None:
    """What contradicts warming up, and what could not be exact, is a ConfigError."""
    with pytest.raises(ConfigError, match=expected):
        as_limit({"limit": "10/second", **options})


def test_a_limit_that_warms_up(tmp_path: Path) -> None:
    """It is given as a number, a text, or in a rule file, and is the same limit; it prints what leads back to it."""
    limit = Limit("100/second", warm_up="10s")
    (tmp_path / "rules.yaml").write_text("rules: [{name: api, cost: 500, limits: [{limit: 100/second, warm_up: 10s}]}]")
    (rule,) = load_rules(tmp_path).tiers["default"]
    assert rule.every_limit == (limit,) == (Limit("100/second", warm_up=10.0, algorithm="warm_up"),)
    assert (limit.algorithm, limit.burst, limit.warm_up, str(limit)) == ("warm_up", 1, 10, "100/second")
    assert repr(limit) == "Limit('100/second', warm_up=10.0)"
    assert as_limit(limit.given) == limit
    assert eval(repr(Limit("1/minute", warm_up=0.5))) == Limit("1/minute", warm_up="500ms") != Limit("1/minute", warm_up=1)
    assert Rule("api", limit, "5/second", algorithm="sliding_log").every_limit[0] == limit == limit.having(lease=0)
    assert Rule("api", limit).buckets[0].suffix != Rule("api", "100/second").buckets[0].suffix


def test_a_share_has_a_share_of_the_rate() -> None:
    """Of several processes that each limit alone, all together let pass what the limit does."""
    shared = Limit("100/second", warm_up="10s").share(3, cost=7)
    assert (shared.count, shared.period, shared.burst, shared.warm_up) == (100, 3, 1, 10)
    bucket = bucket_of(Limit("100/second", warm_up="10s"))
    assert bucket.share(3, 7) is bucket.share(3, 900)


def test_plans_that_are_sent_together_are_carried_out_one_after_the_other(client: redis.Redis, scripted: Scripted) -> None:
    """In one call of the script each plan finds what those before it left, whatever limit they were under."""
    for seed in range(200):
        rnd, key, clock = random.Random(seed), uuid4().hex, Clock()
        store, several = MemoryStore(clock), [a_window(60, rnd.choice(COUNTS[:5]), rnd.choice(WARM_UPS)) for _ in range(2)]
        for _ in range(3):
            plans = [
                Plan(
                    (
                        Charge(
                            key, rnd.choice(several), rnd.choice(COSTS), enforced=True, rule=None, max_wait_us=rnd.choice(AHEAD)
                        ),
                    )
                )
                for _ in range(4)
            ]
            reply = client.execute_command("EVALSHA", scripted.sha, *wire.arguments(plans), clock.now)
            expected = [store.spend(plan) for plan in plans]
            got = wire.answers(plans, reply).readings
            assert [(each.buckets[0].before, each.admitted) for each in got] == [
                (each.buckets[0].before, each.admitted) for each in expected
            ]
            clock.advance(us=rnd.choice(FORWARD[:8]))
        client.unlink(key)
