"""One suite for every algorithm that a limit may have, on every store."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import AsyncRedisStore, Decision, Limit, Limiter, MemoryStore, RedisStore, Rule
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.limit import NAMES
from limitgate.limits.plan import Charge, Plan, Reading, refund
from tests.http.test_response import Door, parsed_list
from tests.stores.test_stores import AsyncDoor, Door as StoreDoor
from tests.support.clock import Clock
from tests.support.clusters import KINDS
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.scripted import TTL_SUFFIX, Scripted

COUNTING = tuple([name for name in NAMES if name != "warm_up"])
"""The algorithms that count requests; limits that warm up have tests of their own."""

US = 1_000_000
MINUTE, DAY = 60 * US, 86_400 * US
HUGE = 10**400


class Key:
    """One key of a limiter, under a clock of the test's own that stands at the beginning of a minute."""

    def __init__(self, store: Any, clock: Clock) -> None:
        clock.now -= clock.now % DAY
        self.store = store
        self.clock = clock
        self.name = uuid4().hex
        self.limiter = Limiter(store)

    def hit(self, *limits: Limit, cost: int = 1) -> Decision:
        return self.limiter.hit(self.name, *limits, cost=cost)

    def peek(self, *limits: Limit, cost: int = 1) -> Decision:
        return self.limiter.peek(self.name, *limits, cost=cost)

    def used(self, *limits: Limit) -> list[int]:
        return [window.used for window in self.peek(*limits, cost=0).windows]

    def charge(self, limit: Limit, cost: int) -> tuple[Plan, Reading]:
        """Charge a bucket of its own, as a rule does, for a correction to come."""
        plan = Plan((Charge(self.name, bucket_of(limit), cost, enforced=True, rule="rule"),))
        return plan, self.store.spend(plan, 5)

    def correct(self, charged: tuple[Plan, Reading], cost: int) -> None:
        plan = refund(*charged, [cost])
        self.store.spend(plan, 5)

    def charged(self, limit: Limit, cost: int = 1) -> Decision:
        """What that bucket would say to a cost."""
        plan = Plan((Charge(self.name, bucket_of(limit), cost, enforced=True, rule="rule"),), "peek")
        return decide(plan, self.store.spend(plan, 5))


@pytest.fixture(params=["memory", "script"])
def key(request: pytest.FixtureRequest, client: redis.Redis) -> Key:
    clock = Clock()
    return Key(MemoryStore(clock) if request.param == "memory" else Scripted(client, clock), clock)


@pytest.fixture(params=COUNTING)
def five(request: pytest.FixtureRequest) -> Limit:
    """Five requests a minute, by each algorithm."""
    return Limit("5/minute", algorithm=request.param)


def all_of(text: str) -> list[Limit]:
    """A limit by every algorithm."""
    return [Limit(text, algorithm=name) for name in COUNTING]


# --- hit, peek, reset -------------------------------------------------------------------------------------------------


def test_as_many_pass_as_the_count(key: Key, five: Limit) -> None:
    """A fresh key admits the count at once, says what is left, refuses the next, and nothing it says changes anything."""
    for left in (4, 3, 2, 1, 0):
        peeked, hit = key.peek(five), key.hit(five)
        assert (peeked.allowed, peeked.remaining, peeked.granted) == (True, left + 1, 0)
        assert (hit.allowed, hit.remaining, hit.granted, hit.limit, hit.retry_after) == (True, left, 1, 5, 0)
        assert (hit.windows[0].used, hit.windows[0].period) == (5 - left, 60)
    refused = key.hit(five)
    assert (refused.allowed, refused.remaining, refused.granted) == (False, 0, 0)
    assert 0 < refused.retry_after <= 72
    assert 0 < refused.reset_after <= 120
    assert key.peek(five) == refused
    assert key.used(five) == [5]


def test_a_reset_key_is_as_new(key: Key, five: Limit) -> None:
    """After a reset everything fits again, and nothing is remembered of what was."""
    key.hit(five, cost=5)
    reset = key.limiter.reset(key.name, five)
    assert (reset.allowed, reset.remaining, reset.reset_after, reset.windows[0].used) == (True, 5, 0, 0)
    assert key.hit(five, cost=5).allowed


def test_a_cost_of_nothing_passes_and_takes_nothing(key: Key, five: Limit) -> None:
    """A request that costs nothing passes even an exhausted limit."""
    key.hit(five, cost=5)
    for _ in range(3):
        nothing = key.hit(five, cost=0)
        assert (nothing.allowed, nothing.remaining, nothing.retry_after) == (True, 0, 0)
    assert key.used(five) == [5]


def test_a_cost_above_the_count_never_fits(key: Key, five: Limit) -> None:
    """What costs more than the limit ever lets through is refused for good, and takes nothing."""
    for cost in (6, 2**53, HUGE):
        never = key.hit(five, cost=cost)
        assert (never.allowed, never.retry_after, never.remaining) == (False, math.inf, 5)
    assert key.used(five) == [0]


# --- waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_us", [0, 1, 13 * US, 59_999_999])
def test_a_promised_wait_is_exact(key: Key, five: Limit, first_us: int) -> None:
    """Whoever waits as long as it was told passes, and a microsecond earlier it would not have; whatever it costs."""
    key.clock.advance(us=first_us)
    refused = 0
    for step, cost in enumerate((3, 2, 1, 5, 1, 1, 4, 2, 5, 1, 5)):
        told = key.hit(five, cost=cost)
        if not told.allowed:
            refused += 1
            key.clock.advance(us=round(told.retry_after * US) - 1)
            assert not key.peek(five, cost=cost).allowed
            key.clock.advance(us=1)
            assert key.hit(five, cost=cost).allowed
        key.clock.advance(us=step * 1_234_567)
    assert refused >= 4


def test_after_the_promised_reset_everything_fits(key: Key, five: Limit) -> None:
    """`reset_after` is when nothing counts any more, and not before."""
    key.clock.advance(us=17 * US)
    for cost in (1, 3, 5):
        while not key.hit(five, cost=cost).allowed:
            key.clock.advance(us=round(key.peek(five, cost=cost).retry_after * US))
        key.clock.advance(us=round(key.peek(five).reset_after * US) - 1)
        assert key.used(five) > [0]
        key.clock.advance(us=1)
        assert (key.used(five), key.peek(five, cost=5).allowed, key.peek(five).reset_after) == ([0], True, 0)


# --- several limits ---------------------------------------------------------------------------------------------------


def test_mixed_limits_are_charged_together_or_not_at_all(key: Key) -> None:
    """In one plan, whichever limit refuses, none is charged."""
    for tight in COUNTING:
        limits = [Limit("2/minute" if name == tight else "9/minute", algorithm=name) for name in COUNTING]
        key.name = uuid4().hex
        assert key.hit(*limits, cost=2).allowed
        refused = key.hit(*limits)
        assert (refused.allowed, refused.remaining, refused.limit) == (False, 0, 2)
        assert [window.used for window in refused.windows] == [2] * len(COUNTING)
        assert key.used(*limits) == [2] * len(COUNTING)
        key.clock.advance(us=round(refused.retry_after * US))
        assert key.hit(*limits).allowed


def test_equal_limits_of_one_algorithm_have_their_own_buckets(key: Key, five: Limit) -> None:
    """Two limits that differ in their counts alone are counted apart."""
    wide = Limit("7/minute", algorithm=five.algorithm)
    assert key.hit(wide, five, cost=4).allowed
    assert sorted(window.remaining for window in key.peek(wide, five).windows) == [1, 3]


# --- corrections ------------------------------------------------------------------------------------------------------


def test_what_was_charged_too_much_is_given_back(key: Key, five: Limit) -> None:
    """A request that turns out to have cost less leaves a bucket in which just that is used."""
    first, second = key.charge(five, 2), key.charge(five, 3)
    assert not key.charged(five).allowed
    key.correct(second, 1)
    assert key.charged(five).windows[0].used == 3
    key.correct(first, 0)
    assert (key.charged(five).windows[0].used, key.charged(five, 4).allowed) == (1, True)


def test_nothing_is_given_back_twice_over(key: Key, five: Limit) -> None:
    """What no longer counts is not given back: a bucket never has more room than a fresh one."""
    charged = key.charge(five, 2)
    key.clock.advance(us=3 * MINUTE)
    key.charge(five, 3)
    key.correct(charged, 0)
    assert key.charged(five).windows[0].used == 3


def test_what_was_charged_too_little_is_owed(key: Key, five: Limit) -> None:
    """A request that turns out to have cost more is owed from now on, whether it fits or not."""
    charged = key.charge(five, 1)
    key.correct(charged, 8)
    after = key.charged(five)
    assert (after.allowed, after.remaining, after.windows[0].used) == (False, 0, 8)
    key.clock.advance(us=round(after.retry_after * US) - 1)
    assert not key.charged(five).allowed
    key.clock.advance(us=1)
    assert key.charged(five).allowed


def test_a_correction_may_be_absurd(key: Key, five: Limit) -> None:
    """Costs beyond anything are owed as much as can be kept, and a bucket goes on working."""
    for _ in range(3):
        key.correct(key.charge(five, 0), HUGE)
        key.correct(key.charge(five, 0)[0:2], HUGE)
    owing = key.charged(five)
    assert not owing.allowed
    assert 0 < owing.retry_after < math.inf
    assert owing.windows[0].used > 2**24
    plan = Plan((Charge(key.name, bucket_of(five), 1, enforced=True, rule="rule"),), "reset")
    assert decide(plan, key.store.spend(plan, 5)).remaining == 5


def test_a_refund_never_gives_more_than_was_taken(key: Key, five: Limit) -> None:
    """The limiter's ``refund`` gives back the latest requests, up to an empty bucket."""
    key.hit(five, cost=2)
    key.clock.advance(us=1 * US)
    key.hit(five, cost=2)
    before = key.peek(five).remaining
    assert key.limiter.refund(key.name, five, cost=3).remaining == min(5, before + 3)
    assert key.limiter.refund(key.name, five, cost=HUGE).remaining == 5
    assert key.hit(five, cost=5).allowed
    assert not key.hit(five).allowed


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_us", [1, 20 * US, MINUTE, 400 * DAY])
def test_no_step_of_the_clock_locks_anybody_out(key: Key, five: Limit, back_us: int) -> None:
    """After a step back nobody waits longer than a full bucket ever makes wait, and waits stay exact."""
    key.clock.advance(us=31 * US)
    key.hit(five, cost=5)
    key.clock.advance(us=-back_us)
    longest = 120 if five.algorithm == "sliding_window" else 60
    told = key.peek(five, cost=5)
    assert not told.allowed
    assert told.reset_after <= longest
    assert told.retry_after <= longest
    key.clock.advance(us=round(told.retry_after * US) - 1)
    assert not key.peek(five, cost=5).allowed
    key.clock.advance(us=1)
    assert key.hit(five, cost=5).allowed


# --- changes of a limit -----------------------------------------------------------------------------------------------


def test_a_changed_count_finds_what_was_used(key: Key, five: Limit) -> None:
    """What was used under one count is used under another one."""
    wide, narrow = (Limit(text, algorithm=five.algorithm) for text in ("9/minute", "2/minute"))
    key.hit(five, cost=4)
    assert key.peek(wide).remaining == 5
    lowered = key.peek(narrow)
    assert (lowered.allowed, lowered.remaining, lowered.windows[0].used) == (False, 0, 4)
    key.clock.advance(us=round(lowered.retry_after * US) - 1)
    assert not key.peek(narrow).allowed
    key.clock.advance(us=1)
    assert key.hit(narrow).allowed


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(COUNTING, 2)))
def test_another_algorithm_begins_anew(key: Key, old: str, new: str) -> None:
    """Changing the algorithm of a live key is no error: the new one starts full, and the old one finds its own again."""
    before, after = Limit("5/minute", algorithm=old), Limit("5/minute", algorithm=new)
    key.hit(before, cost=5)
    assert key.hit(after, cost=2).remaining == 3
    assert not key.hit(before).allowed


# --- what is kept in Redis --------------------------------------------------------------------------------------------

VERSION_AND_TIME = struct.pack("<BQ", 1, 1_790_000_000_000_000)[:8]
MEMBERS = {"list": ["RPUSH", "x"], "hash": ["HSET", "x", "y"], "set": ["SADD", "x"], "sorted set": ["ZADD", "1", "x"]}


def _once_for_long(size: int) -> bytes:
    """A small number and then large ones, seven bytes each."""
    return (b"\x01".ljust(7, b"\0") + b"\xff" * 21)[:size]


def _foreign() -> dict[str, list[bytes | str]]:
    values = {"nothing": b"", "text": b"garbage", "a number": b"12"}
    sizes = {"fixed_window": 14, "sliding_window": 21, "sliding_log": 26, "gcra": 25}
    for name, size in sizes.items():
        values[f"as long as a {name}, of another version"] = b"\x03" + VERSION_AND_TIME[1:] + bytes(size)
        values[f"as long as a {name}, full of ones"] = VERSION_AND_TIME + b"\xff" * size
        values[f"as long as a {name}, full of ones, from the future"] = b"\x01" + b"\xff" * (size + 7)
        values[f"as long as a {name}, used once for longer than it could be"] = VERSION_AND_TIME + _once_for_long(size)
        values[f"a byte longer than a {name}"] = VERSION_AND_TIME + bytes(size + 1)
    return {**{name: ["SET", value] for name, value in values.items()}, **MEMBERS}


def test_what_is_not_ours_is_replaced(client: redis.Redis, five: Limit) -> None:
    """A value that makes no sense counts as an empty bucket, is replaced and counted; it locks nobody out and is no error."""
    scripted = Scripted(client, Clock())
    for name, (command, *rest) in _foreign().items():
        key = uuid4().hex
        client.execute_command(command, key, *rest)
        plan = Plan((Charge(key, bucket_of(five), 5, enforced=True, rule=None),))
        (now, unreadable, *_), again = (client.execute_command(*scripted.command(plan, scripted.clock.now)) for _ in range(2))
        assert (now, unreadable, again[1]) == (scripted.clock.now, 1, 0), name
        assert not decide(plan, scripted.spend(plan, 5)).allowed, name


def test_a_key_lives_as_long_as_it_is_of_use(client: redis.Redis, five: Limit) -> None:
    """Every key is written with a time to live that ends at most 2 ms after nothing counts any more, and goes at once then."""
    on_set = f"server.call('SET', key .. '{TTL_SUFFIX}', string.format('%d', fake + ttl * 1000))"
    clock = Clock()
    key = Key(Scripted(client, clock, on_set), clock)
    charged = []
    for step, cost in enumerate((1, 2, 1, 1, 5, 3)):
        charged.append(key.charge(five, cost))
        gone = int(client.get(key.name + TTL_SUFFIX))
        assert 0 < gone - clock.now - key.charged(five).reset_after * US <= 2001
        clock.advance(us=step * 7_654_321)
    assert client.exists(key.name)
    plan = Plan((Charge(key.name, bucket_of(five), 1, enforced=True, rule=None),), "reset")
    key.store.spend(plan, 5)
    assert not client.exists(key.name)
    last = key.charge(five, 2)
    assert client.exists(key.name)
    key.correct(last, 0)
    assert not client.exists(key.name)


# --- every store ------------------------------------------------------------------------------------------------------


def mixed(door: Any) -> None:
    """Limits of all algorithms in one plan: all or nothing, peek, reset, corrections."""
    name = uuid4().hex
    charges = []
    for algorithm in COUNTING:
        bucket = Bucket((Limit("3 per 366 days", algorithm=algorithm),))
        charges.append(Charge(f"{name}:{algorithm}", bucket, 1, enforced=True, rule=algorithm))
    tight = Bucket((Limit("2 per 366 days", algorithm="sliding_log"),))
    plan = Plan((*charges, Charge(f"{name}:tight", tight, 1, enforced=True, rule="tight")))
    told = []
    for _ in range(3):
        reading = door.spend(plan)
        told.append((reading.admitted, [window.used for window in decide(plan, reading).windows]))
    size = len(plan.charges)
    assert told == [(True, [1] * size), (True, [2] * size), (False, [2] * size)]
    refused = decide(plan, reading)
    assert (refused.rule, refused.refusing) == ("tight", ("tight",))
    assert 300 * 86_400 < refused.retry_after <= 366 * 86_400
    loose = Plan(tuple(charges))
    reading = door.spend(loose)
    assert decide(loose, reading).remaining == 0
    door.spend(refund(loose, reading, [0] * len(charges)))
    peek = Plan(loose.charges, "peek")
    assert [window.used for window in decide(peek, door.spend(peek)).windows] == [2] * len(charges)
    door.spend(Plan(loose.charges, "reset"))
    assert decide(peek, door.spend(peek)).remaining == 3


DOORS: dict[str, Callable[[str], StoreDoor]] = {
    "memory": lambda _url: StoreDoor(MemoryStore()),
    "threads": lambda url: StoreDoor(RedisStore(url)),
    "asyncio": lambda url: AsyncDoor(AsyncRedisStore(url)),
}


@pytest.mark.parametrize("kind", DOORS)
def test_every_store_mixes_algorithms(redis_server: RedisServer, kind: str) -> None:
    """All algorithms in one plan, on the store that answers for a whole process."""
    door = DOORS[kind](redis_server.url)
    mixed(door)
    door.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_mixes_algorithms(redis_cluster: RedisCluster, kind: str) -> None:
    """Buckets of one plan on several nodes of a cluster: what one refuses is given back by the others."""
    door = KINDS[kind](redis_cluster.url)
    for _ in range(3):
        mixed(door)
    door.close()


# --- a whole gate -----------------------------------------------------------------------------------------------------

STYLES = ("x-ratelimit", "x-ratelimit-windows", "draft-11")


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_rule_of_all_algorithms_through_a_gate(redis_server: RedisServer, store: str) -> None:
    """One rule with limits of each algorithm: every style tells of all, each policy has a name, and the rule refuses once."""
    limits = [*all_of("3 per 366 days"), *all_of("5/day")]
    made = {"store": RedisStore(redis_server.url)} if store == "redis" else {}
    door = Door(Rule(f"api-{uuid4().hex[:8]}", *limits), headers=STYLES, **made)
    for left in (2, 1, 0):
        fields = door.ask().rate_fields()
        assert door.status == "200 OK"
        assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"]) == ("3", str(left))
        assert (fields["x-ratelimit-limit-day"], fields["x-ratelimit-remaining-day"]) == ("5", str(left + 2))
        policies, states = parsed_list(fields["ratelimit-policy"]), parsed_list(fields["ratelimit"])
        assert len({name for name, _ in policies}) == len(limits)
        assert [name for name, _ in policies] == [name for name, _ in states]
        assert sorted((each["q"], each["w"]) for _, each in policies) == sorted((limit.count, limit.period) for limit in limits)
        assert sorted(each["r"] for _, each in states) == sorted([left] * len(COUNTING) + [left + 2] * len(COUNTING))
    door.ask()
    body = json.loads(door.body)
    (name,) = body["violated-policies"]
    assert door.status.startswith("429")
    assert name.startswith("api-")
    assert int(door.fields["retry-after"]) == math.ceil(door.decision.retry_after)
    waits = [each["t"] for _, each in parsed_list(door.fields["ratelimit"])]
    assert max(waits[:1] + waits[3:6]) <= 2 * 366 * 86_400
    if made:
        made["store"].close()


def test_rules_of_different_algorithms_through_a_gate() -> None:
    """Of rules that are counted differently, the one that refuses is named, and the others are not charged."""
    rules = [Rule(name, "9/minute" if name != "sliding_log" else "2/minute", algorithm=name) for name in COUNTING]
    door = Door(*rules, headers=STYLES)
    assert [door.ask().status[:3] for _ in range(4)] == ["200", "200", "429", "429"]
    assert json.loads(door.body)["violated-policies"] == ["sliding_log"]
    assert {window.rule: window.used for window in door.decision.windows} == dict.fromkeys(COUNTING, 2)
    assert [name for name, _ in parsed_list(door.fields["ratelimit"])] == list(COUNTING)


# --- three names of one algorithm -------------------------------------------------------------------------------------

asked = st.lists(st.tuples(st.integers(0, 7), st.sampled_from((0, 1, 333_333, 7 * US, MINUTE, -US))), max_size=20)


@given(asked, st.sampled_from(("5/minute", "7/second burst 3", "333 per 7 minutes burst 5")))
def test_the_names_of_gcra_decide_alike_property(asked: list[tuple[int, int]], text: str) -> None:
    """A token bucket and a leaky bucket as a meter make the same decisions as GCRA, field by field."""
    clock = Clock()
    keys = {name: Key(MemoryStore(clock), clock) for name in ("gcra", "token_bucket", "leaky_bucket")}
    for cost, us in asked:
        told = {name: key.hit(Limit(text, algorithm=name), cost=cost) for name, key in keys.items()}
        assert len({(decision, decision.windows) for decision in told.values()}) == 1
        clock.advance(us=us)
