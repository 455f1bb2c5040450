"""The Lua script on a real Redis and the memory store, held against an oracle in exact fractions."""

from __future__ import annotations

import logging
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import Limit, Limiter, MemoryStore, RedisStore
from limitgate.limits.bucket import MAX_AHEAD, Bucket, bucket_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, full_refund, read
from limitgate.stores.redis import wire
from tests.support.clock import Clock
from tests.support.effort import HISTORIES, RANDOM
from tests.support.oracle import FIELDS, WINDOW_FIELDS, Answer, Oracle
from tests.support.redis_server import RedisServer
from tests.support.scripted import TTL_SUFFIX, Scripted

PERIODS = (1, 7, 60, 3600, 86400, 366 * 86400)
COUNTS = (1, 2, 3, 5, 7, 9, 333, 99_991, 1_000_003, 10**14)
BURSTS = (1, 2, 5, 50, 10**6, 10**18)
COSTS = (0, 1, 1, 1, 1, 2, 3, 10, 1000, 10**12, 10**30)
FORWARD = (0, 0, 1, 2, 1000, 333_333, 10**6, 10**7, 3_600 * 10**6, 86_400 * 10**6, 400 * 86_400 * 10**6)
LONGEST_WAIT = 366 * 86_400 * 10
"""Seconds that a history may wait for what was promised: at most what a full bucket takes, so that the clock stays exact."""
AHEAD = (0, 0, 0, 1, 1000, 333_333, 10**6, 6 * 10**7, 10**10, MAX_AHEAD)
BACK = (-1, -2, -333_333, -(10**7), -3_600 * 10**6)


@dataclass
class Event:
    plan: Plan
    answer: Answer


def a_limit(rnd: random.Random, period: int) -> Limit:
    """A limit out of the whole range that is allowed."""
    count = min(rnd.choice(COUNTS), 1_000_000 * period)
    earned_in_ten_periods = 3660 * 86400 * count // period
    burst = rnd.choice((count, count, *BURSTS))
    burst = max(1, min(burst, earned_in_ten_periods))
    return Limit(f"{count} per {period} seconds", burst=burst, borrow=rnd.random() < 0.2)


def some_windows(rnd: random.Random) -> list[Bucket]:
    """What may be asked of one bucket: all its limits, the same with other counts, and some of either."""
    periods = [rnd.choice(PERIODS) for _ in range(rnd.choice((1, 1, 2, 3, 4)))]
    whole = [tuple(a_limit(rnd, period) for period in periods) for _ in range(rnd.choice((1, 2, 3)))]
    parts = [tuple(rnd.sample(limits, rnd.randint(1, len(limits)))) for limits in whole]
    return [Bucket(limits) for limits in whole + parts]


def a_plan(rnd: random.Random, buckets: dict[str, list[Bucket]], now: int | None = None) -> Plan:
    charges = []
    for key in rnd.sample(list(buckets), rnd.choice((1, 1, len(buckets)))):
        bucket = rnd.choice(buckets[key])
        cost = rnd.choice((*COSTS, bucket.limits[0].burst, bucket.limits[-1].burst + 1))
        charges.append(
            Charge(key, bucket, cost, rnd.random() < 0.75, rnd.choice((None, "a", "b")), max_wait_us=rnd.choice(AHEAD))
        )
    if now is not None and rnd.random() < 0.15:
        return Plan(
            tuple(
                [charge._replace(cost=0, max_wait_us=0, adjustment=a_correction(rnd, charge.bucket, now)) for charge in charges]
            ),
            "adjust",
        )
    return Plan(tuple(charges), rnd.choice(("spend",) * 12 + ("peek", "look", "reset")))


def a_turn(rnd: random.Random, buckets: dict[str, list[Bucket]]) -> Plan:
    """A request that is ready to wait for its turn: buckets are used up quickly and more is booked ahead."""
    charges = []
    for key, several in buckets.items():
        (limits, *_), ahead = [each.limits for each in several], rnd.choice(AHEAD[-2:])
        cost = min([rnd.choice((1, 10**18)), *[limit.burst for limit in limits]])
        charges.append(Charge(key, several[0], cost, rnd.random() < 0.9, rnd.choice((None, "a")), max_wait_us=ahead))
    return Plan(tuple(charges))


def a_correction(rnd: random.Random, bucket: Bucket, now: int) -> Adjustment:
    """Something to be put back, or taken on top, of what was charged a while ago."""
    back = []
    for weight, limit in zip(bucket.weights, bucket.limits, strict=True):
        ticks = rnd.choice((-1, 1)) * rnd.choice((0, 1, rnd.randrange(weight + 1), weight, 7 * weight, limit.ceiling))
        back.append(max(-limit.ceiling, min(ticks, limit.ceiling)))
    grace = [rnd.choice((0, 0, 1, 1000, 10**6, 10**10)) for _ in back]
    return Adjustment(0, now - rnd.choice((0, 0, 1, 1000, 333_333, 10**7, 10**11, -5)), back, grace)


def left(event: Event) -> Plan | None:
    """What gives back what an event took that was booked ahead; None where it took nothing, or is a correction itself."""
    weights = [charge.bucket.weights for charge in event.plan.charges]
    states = [[int(owed * weight) for owed, weight in zip(*each, strict=True)] for each in zip(event.answer.debts, weights)]
    if event.plan.verb != "spend" or not event.answer.decision["delay"]:
        return None
    return full_refund(event.plan, read(event.plan.charges, event.answer.now, states))


def a_step(rnd: random.Random, answer: Answer | None, *, back: bool) -> int:
    """Microseconds to the next event: often just what the last answer promised, or one off it."""
    if back and rnd.random() < 0.15:
        return rnd.choice(BACK)
    waits = [answer.decision[wait] for wait in ("retry_after", "reset_after", "delay")] if answer else []
    waits = [round(wait * 1_000_000) for wait in waits if 0 < wait < LONGEST_WAIT]
    if waits and rnd.random() < 0.4:
        return max(0, rnd.choice(waits) + rnd.choice((-1, 0, 0, 1)))
    return rnd.choice(FORWARD)


def history(rnd: random.Random, oracle: Oracle, size: int = 12, *, back: bool = True) -> list[Event]:
    """Plans over one to three buckets, each with the time it is carried out at and what the oracle says to it."""
    name = uuid4().hex
    buckets = {f"{name}:{number}": some_windows(rnd) for number in range(rnd.choice((1, 2, 3)))}
    now, events = 1_790_000_000_000_000 + rnd.randrange(10**9), []
    queue = rnd.random() < 0.25
    for _ in range(size):
        now += rnd.choice(FORWARD[:7]) if queue else a_step(rnd, events[-1].answer if events else None, back=back)
        plan = a_turn(rnd, buckets) if queue and rnd.random() < 0.9 else a_plan(rnd, buckets, now)
        if events and rnd.random() < (0.5 if queue else 0.1):
            plan = left(rnd.choice(events[-4:])) or plan
        events.append(Event(plan, oracle.ask(plan, now)))
    return events


def replies(scripted: Scripted, events: list[Event]) -> list[object]:
    """What the script says to each event, all sent at once; the buckets are removed afterwards."""
    with scripted.client.pipeline(transaction=False) as pipe:
        for event in events:
            pipe.execute_command(*scripted.command(event.plan, event.answer.now))
        pipe.unlink(*{charge.key for event in events for charge in event.plan.charges})
        return pipe.execute()[:-1]


def same(event: Event, reading: Reading) -> None:
    """Every debt is exact, and every field of the decision is what the oracle says."""
    answer, decision = event.answer, decide(event.plan, reading)
    assert reading.now == answer.now
    for (charge, ticks, _), requests in zip(reading.buckets, answer.debts, strict=True):
        weights = [limit.period * 1_000_000 for limit in charge.bucket.limits]
        assert list(ticks) == [weight * owed for weight, owed in zip(weights, requests, strict=True)]
    assert {name: getattr(decision, name) for name in FIELDS} == answer.decision
    assert [tuple(getattr(window, name) for name in WINDOW_FIELDS) for window in decision.windows] == answer.windows


def check_script(scripted: Scripted, events: list[Event], oracle: Oracle) -> None:
    steps = 0
    for event, reply in zip(events, replies(scripted, events), strict=True):
        (reading,), unreadable, stepped, _ = wire.answers([event.plan], reply)
        same(event, reading)
        assert not unreadable
        steps += stepped
    assert steps <= oracle.clock_steps  # a bucket that owes nothing may be gone instead of in the future


def check_memory(events: list[Event], oracle: Oracle, *, reclaims: bool = False) -> None:
    clock = Clock()
    store = MemoryStore(clock)
    if not reclaims:  # an expired bucket that is gone cannot be found in the future when the clock steps back
        store._reclaim = lambda _now: True
    for event in events:
        clock.now = event.answer.now
        same(event, store.spend(event.plan))
    assert bool(store.clock_steps) >= bool(oracle.clock_steps)


@pytest.fixture(params=["memory", "script"])
def hit(request: pytest.FixtureRequest, client: redis.Redis) -> Callable[..., Decision]:
    """A limiter's ``hit`` on one key, on either store; its ``clock`` and ``peek`` beside it."""
    clock, key = Clock(), uuid4().hex
    limiter = Limiter(MemoryStore(clock) if request.param == "memory" else Scripted(client, clock))

    def hit(*limits: str, cost: int = 1) -> Decision:
        return limiter.hit(key, *limits, cost=cost)

    hit.clock = clock
    hit.peek = lambda *limits, cost=1: limiter.peek(key, *limits, cost=cost)
    return hit


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("block", range(4))
def test_histories_property(scripted: Scripted, block: int) -> None:
    """Script and memory store agree with the oracle on every debt and every field, over hundreds of histories."""
    for seed in range(block, HISTORIES, 4):
        oracle = Oracle()
        events = history(random.Random(seed), oracle)
        try:
            check_script(scripted, events, oracle)
            check_memory(events, oracle)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.usefixtures("_unwatched")
@given(rnd=RANDOM)
def test_dropping_expired_buckets_changes_nothing(rnd: random.Random) -> None:
    """While the clock goes forward, what the memory store drops as expired owed nothing."""
    oracle = Oracle()
    check_memory(history(rnd, oracle, 30, back=False), oracle, reclaims=True)


def test_histories_meet_every_case() -> None:
    """The generated histories are worth something: each kind of event and of answer is common among them."""
    seen = dict.fromkeys(("refused", "shadow", "forever", "equal periods", "other count", "part", "back", "cost 0"), 0)
    seen |= dict.fromkeys(("put right", "borrowed", "booked", "booked out", "turn left", "turn kept"), 0)
    for seed in range(300):
        oracle = Oracle()
        events = history(random.Random(seed), oracle)
        limits: dict[str, set[tuple[Limit, ...]]] = {}
        for event in events:
            decision = event.answer.decision
            seen["refused"] += not decision["allowed"]
            seen["shadow"] += decision["shadow"]
            seen["forever"] += decision["retry_after"] == math.inf
            seen["put right"] += event.plan.charges[0].adjustment is not None
            seen["booked"] += decision["delay"] > 0
            seen["booked out"] += 0 < decision["retry_after"] < math.inf and event.plan.charges[0].max_wait_us > 0
            seen["cost 0"] += any(charge.cost == 0 for charge in event.plan.charges)
            for charge in event.plan.charges:
                limits.setdefault(charge.key, set()).add(charge.bucket.limits)
                borrows = any(limit.borrow and charge.cost > limit.burst for limit in charge.bucket.limits)
                seen["borrowed"] += borrows and bool(decision["granted"])
        seen["back"] += oracle.clock_steps
        seen["turn left"] += oracle.left
        seen["turn kept"] += oracle.kept
        for asked in limits.values():
            periods = [[limit.period for limit in each] for each in asked]
            seen["equal periods"] += any(len(set(each)) < len(each) for each in periods)
            seen["part"] += len({len(each) for each in periods}) > 1
            seen["other count"] += len({tuple(sorted(each)) for each in periods}) < len(asked)
    assert min(seen.values()) > 50, seen


@pytest.mark.parametrize("back", [False, True], ids=["clock goes forward", "clock steps back"])
def test_a_key_lives_as_long_as_its_debt(client: redis.Redis, *, back: bool) -> None:
    """Every key is written with a time to live that ends when its debt has drained, at most 2 ms after."""
    scripted = Scripted(client, on_set=f"server.call('SET', key .. '{TTL_SUFFIX}', string.format('%d', fake + ttl * 1000))")
    for seed in range(100):
        oracle = Oracle()
        with client.pipeline(transaction=False) as pipe:
            for event in history(random.Random(seed), oracle, back=back):
                pipe.execute_command(*scripted.command(event.plan, event.answer.now))
            pipe.execute()
        for key, bucket in oracle.buckets.items():
            gone = client.get(key + TTL_SUFFIX) if client.exists(key) else None
            if gone is None:
                assert bucket.full_at() <= bucket.written, f"seed {seed}: the bucket was not kept"
            else:
                assert 0 < int(gone) - bucket.full_at() <= 2001, f"seed {seed}"


def test_nothing_lives_for_ever(client: redis.Redis, redis_server: RedisServer) -> None:
    """On the server's own clock a key expires just after the bucket is full again."""
    store, key = RedisStore(redis_server.url), uuid4().hex
    for cost in (1, 2, 30):
        plan = Plan((Charge(key, bucket_of("50/second", "1000/hour"), cost, enforced=True, rule=None),))
        decision = decide(plan, store.spend(plan, 5))
        refill_ms = 1000 * max(window.reset_after for window in decision.windows)
        assert refill_ms - 1000 < client.pttl(key) <= refill_ms + 2.001
    store.close()


def test_now_is_the_clock_of_the_server(client: redis.Redis, redis_server: RedisServer) -> None:
    """A reading's time is the server's, to the microsecond."""
    store = RedisStore(redis_server.url)
    plan = Plan((Charge(uuid4().hex, bucket_of("1/second"), 1, enforced=True, rule=None),))
    before, reading, after = client.time(), store.spend(plan, 5), client.time()
    assert before <= divmod(reading.now, 1_000_000) <= after
    store.close()


def _window(window: int, count: int, whole: int, rest: int) -> bytes:
    return b"".join(number.to_bytes(size, "little") for number, size in ((window, 6), (count, 6), (whole, 7), (rest, 6)))


HEADER = struct.pack("<BQ", 1, 1_790_000_000_000_000)[:8]
FIVE = bucket_of("5/minute")
FOREIGN = {
    "empty": b"",
    "text": b"garbage",
    "a number": b"12",
    "right length, all zero": bytes(33),
    "right length, random": random.Random(1).randbytes(33),
    "other version": b"\x02" + HEADER[1:] + _window(FIVE.ids[0], 5, 1, 0),
    "one byte short": HEADER + _window(FIVE.ids[0], 5, 1, 0)[:-1],
    "count of zero": HEADER + _window(FIVE.ids[0], 0, 1, 0),
    "rest above its count": HEADER + _window(FIVE.ids[0], 5, 1, 5),
    "debt of centuries": HEADER + _window(FIVE.ids[0], 5, 2**55, 0),
    "list": ["RPUSH", "x"],
    "hash": ["HSET", "x", "y"],
    "set": ["SADD", "x"],
}


@pytest.mark.parametrize("verb", ["spend", "peek", "reset"])
@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_ours_is_replaced(
    client: redis.Redis, redis_server: RedisServer, caplog: pytest.LogCaptureFixture, foreign: bytes | list[str], verb: str
) -> None:
    """A value that makes no sense counts as an empty bucket and is replaced, counted each time and logged once."""
    store = RedisStore(redis_server.url)
    with caplog.at_level(logging.WARNING, "limitgate"):
        for times in (1, 2):
            key = uuid4().hex
            command, *rest = ["SET", foreign] if isinstance(foreign, bytes) else foreign
            client.execute_command(command, key, *rest)
            plan = Plan((Charge(key, FIVE, 1, enforced=True, rule=None),), verb)
            assert list(store.spend(plan, 5).buckets[0].before) == [0]
            assert store.unreadable == times
            peeked = store.spend(plan._replace(verb="peek"), 5).buckets[0].before[0]
            assert math.ceil(peeked / 60_000_000) == (verb == "spend")
            assert store.unreadable == times, "still there"
    assert len(caplog.records) == 1
    store.close()


def test_a_step_of_the_servers_clock_is_counted(
    client: redis.Redis, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket from the future is rewritten with the present, counted each time and logged once."""
    store, future = RedisStore(redis_server.url), Clock(4_000_000_000_000_000)
    scripted = Scripted(client, future)
    with caplog.at_level(logging.WARNING, "limitgate"):
        for times in (1, 2):
            plan = Plan((Charge(uuid4().hex, bucket_of("1/day"), 1, enforced=True, rule=None),))
            scripted.spend(plan, 5)
            for _ in range(3):
                assert 86399 < decide(plan, store.spend(plan, 5)).retry_after <= 86400
            assert store.clock_steps == times
    assert len(caplog.records) == 1
    store.close()


def test_a_raised_limit_keeps_what_was_spent(hit: Callable[..., Decision]) -> None:
    """After a raise, what was spent is still spent, and the rest of the new limit is free."""
    assert hit("10/minute", cost=10).remaining == 0
    raised = hit.peek("25/minute")
    assert (raised.allowed, raised.remaining, raised.windows[0].used) == (True, 15, 10)


def test_a_lowered_limit_forgives_nothing(hit: Callable[..., Decision]) -> None:
    """After a lowering, what was spent must be earned back at the new rate."""
    hit("100/minute", cost=100)
    lowered = hit.peek("10/minute")
    assert (lowered.allowed, lowered.remaining, lowered.windows[0].used) == (False, 0, 100)
    assert (lowered.retry_after, lowered.reset_after) == ((100 + 1 - 10) * 6, 600)


def test_a_count_that_goes_up_and_down_changes_no_debt(hit: Callable[..., Decision]) -> None:
    """Servers with different counts for the same bucket, as during a rollout, see the same requests owed."""
    for spent in range(1, 8):
        hit(("10/minute", "1000/minute", "7/minute")[spent % 3])
        for limit in ("10/minute", "1000/minute", "7/minute", "333/minute burst 9"):
            assert hit.peek(limit).windows[0].used == spent


def test_a_changed_burst_finds_its_debt(hit: Callable[..., Decision]) -> None:
    """The burst is no part of a bucket's name."""
    hit("10/minute burst 30", cost=20)
    assert hit.peek("10/minute burst 25").remaining == 5
    assert hit.peek("10/minute").remaining == 0


def test_an_added_window_starts_full(hit: Callable[..., Decision]) -> None:
    """A limit that is added to a living bucket owes nothing yet, and the others keep their debt."""
    hit("10/minute", cost=4)
    assert [window.used for window in hit.peek("10/minute", "100/hour").windows] == [4, 0]


CHANGES = [
    ("60/minute burst 1", "1/minute burst 1"),
    ("1/minute burst 1", "60/minute burst 1"),
    ("100/second", "1/second"),
    ("7/minute", "9/minute burst 3"),
    ("333/day", "99991/day burst 20"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_the_wait_promised_after_a_change_is_exact(hit: Callable[..., Decision], old: str, new: str) -> None:
    """The wait that a caller is told under a changed limit is neither too short nor too long."""
    hit(old, cost=Limit(old).burst)
    hit.clock.advance(us=12_345)
    refused = hit(new)
    assert not refused.allowed
    hit.clock.advance(us=round(refused.retry_after * 1_000_000) - 1)
    assert not hit.peek(new).allowed
    hit.clock.advance(us=1)
    assert hit(new).allowed


@given(spent=st.integers(1, 50), count=st.integers(1, 50), more=st.integers(0, 50), wait=st.integers(0, 60_000_000))
def test_raising_never_denies_longer_property(spent: int, count: int, more: int, wait: int) -> None:
    """At any moment, a raised limit admits no later than the old one would have."""
    limiter = Limiter(MemoryStore(clock := Clock()))
    limiter.hit("key", f"{count}/minute burst 50", cost=spent)
    clock.advance(us=wait)
    old = limiter.peek("key", f"{count}/minute burst 50", cost=10)
    new = limiter.peek("key", f"{count + more}/minute burst 50", cost=10)
    assert new.retry_after <= old.retry_after


@given(spent=st.integers(1, 50), less=st.integers(1, 50), wait=st.integers(0, 60_000_000))
def test_lowering_never_forgives_property(spent: int, less: int, wait: int) -> None:
    """Lowering a limit, at any moment, leaves exactly as many requests owed as before."""
    limiter = Limiter(MemoryStore(clock := Clock()))
    limiter.hit("key", "50/minute", cost=spent)
    clock.advance(us=wait)
    old, new = limiter.peek("key", "50/minute"), limiter.peek("key", f"{less}/minute")
    assert new.windows[0].used == old.windows[0].used
