"""Turns booked in a log of requests, on a real Redis and in the memory store, held against lists of what passes when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import redis

from limitgate import Limit, MemoryStore
from limitgate.algorithms.sliding_log import MAX_TURNS
from limitgate.limits.bucket import MAX_AHEAD, Bucket, bucket_of, buckets_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, full_refund, refund
from tests.support.clock import Clock
from tests.support.effort import HISTORIES
from tests.support.oracles import US
from tests.support.scripted import TTL_SUFFIX, Scripted
from tests.support.stored import buckets

DAY = 86_400 * US


class Store(NamedTuple):
    """A store under a clock of the test's own."""

    clock: Clock
    store: Any

    def spend(self, plan: Plan) -> Reading:
        return self.store.spend(plan, 5)


@pytest.fixture(params=["memory", "script"])
def store(request: pytest.FixtureRequest, client: redis.Redis) -> Store:
    clock = Clock()
    return Store(clock, MemoryStore(clock) if request.param == "memory" else Scripted(client, clock))


def log(text: str) -> Bucket:
    return bucket_of(Limit(text, algorithm="sliding_log"))


def waiting(bucket: Bucket, key: str, cost: int = 1, wait_us: int = MAX_AHEAD) -> Plan:
    """A request that waits for its turn for so long."""
    return Plan((Charge(key, bucket, cost, enforced=True, rule="r", max_wait_us=min(wait_us, bucket.longest_wait_us)),))


def peek(store: Store, plan: Plan) -> Decision:
    """The buckets of a plan as they stand."""
    return decide(plan._replace(verb="peek"), store.spend(plan._replace(verb="peek")))


@dataclass
class Turns:
    """The naive way: a list of what passes when; every moment at which anything changes is tried."""

    count: int
    period: int
    passing: list[list[int]] = field(default_factory=list)
    """Moment and cost of each; a cost of 0 once it was given back."""

    def turn(self, now: int, cost: int) -> int:
        """The first moment, not before any that was booked, at which a cost fits."""
        begin = max([now, *[at for at, many in self.passing if many]])
        moments = sorted({begin, *[at + self.period for at, _ in self.passing if at + self.period > begin]})
        return next(at for at in moments if self.used(at) + cost <= self.count)

    def used(self, now: int) -> int:
        return sum(cost for at, cost in self.passing if at > now - self.period)

    def give_back(self, turn: list[int], now: int, cost: int) -> None:
        """Take back a cost of what passes then, unless others are booked behind it."""
        if turn[0] > now and any(at > turn[0] for at, many in self.passing if many):
            return
        if turn[0] > now - self.period:
            turn[1] -= cost

    @property
    def most(self) -> int:
        """The most that passes in any period."""
        moments = [at for at, _ in self.passing]
        return max(
            [sum(cost for at, cost in self.passing if since <= at < since + self.period) for since in moments], default=0
        )


def a_history(seed: int, store: Store) -> Turns:
    """Hits, waits, interruptions, refunds and resets at random; each answer is that of the list."""
    rnd = random.Random(f"turns {seed}")
    count, period = rnd.choice((1, 2, 3, 7)), rnd.choice((1, 60)) * US
    bucket, key = log(f"{count} per {period // US} seconds"), uuid4().hex
    turns, made, clock = Turns(count, period), [], store.clock
    for _ in range(rnd.choice((6, 20))):
        clock.advance(us=rnd.choice((0, 0, 1, period // 7, period // 3, period - 1, period)))
        now, cost, what = clock.now, rnd.randint(1, count), rnd.random()
        if what < 0.2 and made:
            plan, reading, turn = made.pop(rnd.randrange(len(made)))
            less = rnd.randint(1, turn[1])
            store.spend(refund(plan, reading, [turn[1] - less]))
            turns.give_back(turn, now, less)
        elif what < 0.22:
            store.spend(Plan(waiting(bucket, key).charges, "reset"))
            turns, made = Turns(count, period), []
        else:
            wait = rnd.choice((0, 0, 1, period // 2, period, 5 * period))
            plan, turn_at = waiting(bucket, key, cost, wait), turns.turn(now, cost)
            reading = store.spend(plan)
            decision = decide(plan, reading)
            assert decision.allowed is (turn_at - now <= wait)
            told = decision.delay if decision.allowed else decision.retry_after
            assert round(told * US) == turn_at - now - (0 if decision.allowed else wait)
            if decision.allowed:
                turns.passing.append([turn_at, cost])
                made.append((plan, reading, turns.passing[-1]))
        peeked = peek(store, waiting(bucket, key))
        last = max([at for at, many in turns.passing if many], default=0)
        assert peeked.windows[0].used == turns.used(now)
        assert round(peeked.reset_after * US) == max(0, last + period - now)
        assert peeked.remaining == (0 if last > now else max(0, count - turns.used(now)))
    return turns


@pytest.mark.parametrize("block", range(4))
def test_turns_are_exact_and_no_period_has_more_property(store: Store, block: int) -> None:
    """Whatever is mixed of hits, waits, interruptions and resets: each turn is the first at which it fits, and no more pass."""
    for seed in range(block, HISTORIES // 2, 4):
        turns = a_history(seed, store)
        assert turns.most <= turns.count


def test_turns_come_in_order(store: Store) -> None:
    """Three at once, and those who wait by threes a minute later each; a hit has no room until all of them have come."""
    bucket, key = log("3/minute"), uuid4().hex
    delays = [decide(plan, store.spend(plan)).delay for plan in [waiting(bucket, key)] * 8]
    assert delays == [0, 0, 0, 60, 60, 60, 120, 120]
    store.clock.advance(120)
    hit = Plan((Charge(key, bucket, 1, enforced=True, rule="r"),))
    assert decide(hit, store.spend(hit)).remaining == 0
    assert decide(hit, store.spend(hit)).retry_after == 60


def test_nobody_passes_before_a_turn_that_is_booked(store: Store) -> None:
    """A large cost waits in front, and a small one that would fit at once waits behind it."""
    bucket, key = log("10/minute"), uuid4().hex
    for plan, delay in ((waiting(bucket, key, 6), 0), (waiting(bucket, key, 8), 60), (waiting(bucket, key, 1), 60)):
        assert decide(plan, store.spend(plan)).delay == delay
    refused = Plan((Charge(key, bucket, 1, enforced=True, rule="r"),))
    assert decide(refused, store.spend(refused)).retry_after == 60
    raised = waiting(log("100/minute"), key, wait_us=0)
    assert decide(raised, store.spend(raised)).retry_after == 60


def test_the_last_turn_can_be_given_back(store: Store) -> None:
    """It is free again; one that others are behind is not, and what they were promised stays."""
    bucket, key = log("1/minute"), uuid4().hex
    readings = [store.spend(waiting(bucket, key)) for _ in range(4)]
    plan = waiting(bucket, key)
    store.spend(full_refund(plan, readings[1]))
    assert decide(plan, store.spend(plan)).delay == 240
    for reading in (readings[3], store.spend(plan)):
        store.spend(full_refund(plan, reading))
    assert decide(plan, store.spend(plan)).delay == 300


def test_a_refund_leaves_turns_that_are_booked(store: Store) -> None:
    """What is given back without saying of when is what came last, never the turn of somebody who still waits."""
    bucket, key = log("2/minute"), uuid4().hex
    plan = waiting(bucket, key)
    for _ in range(3):
        store.spend(plan)
    charge = plan.charges[0]._replace(cost=0, enforced=False, max_wait_us=0, adjustment=Adjustment(0, 0, [5], [2**52]))
    store.spend(Plan.adjust([charge]))
    peeked = peek(store, plan)
    assert peeked.windows[0].used == 1
    assert (peeked.remaining, peeked.reset_after) == (0, 120)


def test_what_is_owed_on_top_is_behind_the_turns(store: Store) -> None:
    """It counts with the last of them, so the log stays in order and grows by nothing."""
    bucket, key = log("2/minute"), uuid4().hex
    plan = waiting(bucket, key)
    for _ in range(3):
        store.spend(plan)
        store.clock.advance(1)
    for _ in range(20):
        store.spend(Plan.adjust([plan.charges[0].adjusted([-1], [0])]))
        store.clock.advance(1)
    peeked = peek(store, plan)
    assert peeked.windows[0].used == 23
    assert peeked.reset_after == 120 - 23
    if isinstance(store.store, MemoryStore):
        ((_, _, _, (state,)),) = buckets(store.store).values()
        assert list(state.times) == sorted(state.times)
        assert len(state.times) == 3


def test_how_far_ahead_turns_are_booked(store: Store) -> None:
    """As many periods as have ten thousand requests, and one at least: so no log grows without end."""
    assert log("10000/minute").longest_wait_us == 60 * US
    assert log("100/minute").longest_wait_us == MAX_TURNS // 100 * 60 * US
    assert log("1 per 366 days").longest_wait_us == MAX_AHEAD
    bucket, key = log("5000/second"), uuid4().hex
    plan = waiting(bucket, key, 5000)
    told = [decide(plan, store.spend(plan)) for _ in range(5)]
    assert [each.delay for each in told] == [0, 1, 2, 0, 0]
    assert [each.retry_after for each in told] == [0, 0, 0, 1, 1]


def test_a_log_lives_until_its_last_turn_is_a_period_old(client: redis.Redis) -> None:
    """Its key expires just after that."""
    clock, key, bucket = Clock(), uuid4().hex, log("1/minute")
    script = Scripted(
        client, clock, on_set=f"server.call('SET', key .. '{TTL_SUFFIX}', string.format('%d', fake + ttl * 1000))"
    )
    for _ in range(4):
        script.spend(waiting(bucket, key), 5)
    assert 0 < int(client.get(key + TTL_SUFFIX)) - (clock.now + 240 * US) <= 2001


def test_a_long_log_of_turns(client: redis.Redis) -> None:
    """Some thousand turns, over many pages: each where it belongs, and the last ones given back one by one."""
    clock, key, bucket = Clock(), uuid4().hex, log("3/second")
    script, plan, readings = Scripted(client, clock), waiting(bucket, key), []
    for n in range(1500):
        clock.advance(us=n % 3)
        readings.append(script.spend(plan, 5))
        assert clock.now + round(decide(plan, readings[-1]).delay * US) == readings[n % 3].now + n // 3 * US
    for reading in readings[:-300:-1]:
        script.spend(full_refund(plan, reading), 5)
    assert peek(Store(clock, script), plan).windows[0].used == 1500 - 299


# --- several limits -----------------------------------------------------------------------------------------------------

TOGETHER: list[list[Limit]] = [
    [Limit("10 per 10 seconds", algorithm="sliding_log"), Limit("5/second", algorithm="sliding_log")],
    [Limit("5 per 5 seconds", algorithm="sliding_log"), Limit("1/second burst 1")],
    [Limit("4 per 3 seconds", algorithm="sliding_log"), Limit("9 per 10 seconds burst 3"), Limit("2/second burst 1")],
    [Limit("4 per 3 seconds", algorithm="sliding_log"), Limit("2/second", warm_up=4)],
]


def together(limits: Sequence[Limit], key: str, cost: int, wait_us: int) -> Plan:
    """A request that waits for its turn by all of them."""
    charges = [Charge(key + each.suffix, each, cost, enforced=True, rule="r") for each in buckets_of(tuple(limits))]
    return Plan(tuple([each._replace(max_wait_us=min(wait_us, each.bucket.longest_wait_us)) for each in charges]))


def conforms(limit: Limit, passing: Sequence[tuple[int, int]]) -> bool:
    """True if what passes when is within a limit: for a log no period has more, for GCRA no debt is above the burst."""
    if limit.algorithm == "sliding_log":
        return Turns(limit.count, limit.period_us, [list(each) for each in passing]).most <= limit.count
    debt, before = Fraction(0), 0
    for at, cost in sorted(passing):
        debt = max(Fraction(0), debt - Fraction((at - before) * limit.count, limit.period_us)) + cost
        before = at
        if debt > limit.burst:
            return False
    return True


def states_of(decision: Decision) -> list[tuple[Any, ...]]:
    """What a decision says of each window, and when the turn is."""
    return [(decision.allowed, decision.delay, decision.retry_after), *[tuple(window)[1:] for window in decision.windows]]


@pytest.mark.parametrize("limits", TOGETHER, ids=str)
def test_several_limits_hold_together_property(client: redis.Redis, limits: list[Limit]) -> None:
    """Everybody passes at the turn that is right by all limits; script and memory store tell the same."""
    for seed in range(HISTORIES // 20):
        rnd, clock, key = random.Random(f"together {seed}"), Clock(), uuid4().hex
        stores = MemoryStore(clock), Scripted(client, clock)
        passing: list[tuple[int, int]] = []
        made: list[tuple[Plan, list[Reading], tuple[int, int]]] = []
        for _ in range(40):
            clock.advance(us=rnd.choice((0, 0, 0, 1, 10_000, US // 3, US, 7 * US)))
            if made and made[-1][2][0] > clock.now and rnd.random() < 0.3:
                plan, readings, turn = made.pop()
                for store, reading in zip(stores, readings, strict=True):
                    store.spend(full_refund(plan, reading), 5)
                passing.remove(turn)
                continue
            cost = 1 if limits[1].burst == 1 else rnd.choice((1, 1, 2))
            plan = together(limits, key, cost, rnd.choice((0, US, 60 * US)))
            readings = [store.spend(plan, 5) for store in stores]
            told, also = (decide(plan, reading) for reading in readings)
            assert states_of(told) == states_of(also), seed
            if told.allowed:
                passing.append((clock.now + round(told.delay * US), cost))
                made.append((plan, readings, passing[-1]))
        assert all(conforms(limit, passing) for limit in limits if not limit.warm_up), seed


def test_those_who_wait_for_one_limit_do_not_crowd_another(store: Store) -> None:
    """Ten pass at once by the first limit when its turn comes, of which the second lets five a second pass."""
    key, plans = uuid4().hex, 30
    told = [decide(plan, store.spend(plan)).delay for plan in [together(TOGETHER[0], key, 1, DAY)] * plans]
    assert [(delay, len(list(group))) for delay, group in itertools.groupby(told)] == [
        (0, 5),
        (1, 5),
        (10, 5),
        (11, 5),
        (20, 5),
        (21, 5),
    ]
