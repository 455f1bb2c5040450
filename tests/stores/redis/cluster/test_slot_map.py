"""Plans taken apart by slots and put together again, and the arithmetic of giving back, against an exact model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st
from redis.crc import key_slot

from limitgate import AsyncRedisStore, Limit, MemoryStore, RedisStore, StoreError
from limitgate.limits.bucket import Bucket, bucket_of, buckets_of
from limitgate.limits.plan import Charge, Plan, Reading, Verb, read
from limitgate.stores.redis import wire
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.breaker import Breaker
from limitgate.stores.redis.cluster import SlotMap, concluded, parts_of
from tests.support.redis_server import RedisServer
from tests.support.scripted import CLOCK

START = 1_790_000_000_000_000
LIMITS = ("5/day", "3/second", "7 per 3 minutes burst 2", "1000/second burst 30")
KEYS = [f"key:{number}" for number in range(6)] + ["{key}:1", "{key}:2"]

charges = st.builds(
    lambda key, limits, cost, binding: Charge(key, bucket_of(*limits), cost, binding, None),
    st.sampled_from(KEYS),
    st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3, unique=True),
    st.integers(0, 4),
    st.booleans(),
)
plans = st.builds(
    Plan, st.lists(charges, min_size=1, max_size=6).map(tuple), st.sampled_from(["spend", "peek", "adjust", "reset"])
)


@st.composite
def read_plans(draw: Any) -> tuple[Plan, list[list[int]]]:
    """A plan and what its buckets owe."""
    plan = draw(plans)
    debts = [[draw(st.integers(0, capacity)) for capacity in charge.bucket.capacities] for charge in plan.charges]
    return plan, debts


def outcomes_of(plan: Plan, debts: Sequence[Sequence[int]]) -> list[Any]:
    """What nodes say to the parts of a plan, each at another time."""
    outcomes: list[Any] = []
    for number, part in enumerate(parts_of(plan)):
        outcomes.append(read(part.plan.charges, START + number, [debts[place] for place in part.places]))
    return outcomes


# --- apart and together -----------------------------------------------------------------------------------------------


@given(read_plans())
def test_parts_put_together_are_the_whole_property(asked: tuple[Plan, list[list[int]]]) -> None:
    """What is read of a plan's parts, put together, is what is read of the plan as a whole, at the latest of the times."""
    plan, debts = asked
    outcomes = outcomes_of(plan, debts)
    found = concluded(plan, parts_of(plan), outcomes).outcome
    assert isinstance(found, Reading)
    whole = read(plan.charges, max(outcome.now for outcome in outcomes), debts)
    assert found._replace(buckets=list(found.buckets)) == whole


@given(plans)
def test_every_charge_is_in_one_part_property(plan: Plan) -> None:
    """A part holds the charges of one slot in their order, and every charge is in one part."""
    parts = parts_of(plan)
    assert len({part.hash_slot for part in parts}) == len(parts)
    assert sorted(place for part in parts for place in part.places) == list(range(len(plan.charges)))
    for part in parts:
        assert list(part.places) == sorted(part.places)
        assert part.plan == plan._replace(charges=tuple(plan.charges[place] for place in part.places))
        assert {key_slot(charge.key.encode()) for charge in part.plan.charges} == {part.hash_slot}


@given(read_plans(), st.integers(0, 3), st.integers(0, 10**9))
def test_what_is_given_back_is_what_was_taken_property(asked: tuple[Plan, list[list[int]]], failing: int, seed: int) -> None:
    """A plan that is refused or fails gives back just what its parts took, and one that is admitted nothing."""
    plan, debts = asked
    parts, outcomes = parts_of(plan), outcomes_of(plan, debts)
    for place in random.Random(seed).sample(range(len(parts)), min(failing, len(parts))):
        outcomes[place] = StoreError("gone")
    told = concluded(plan, parts, outcomes)
    taken: list[tuple[str, list[int]]] = []
    if len(parts) > 1 and plan.verb == "spend" and not (isinstance(told.outcome, Reading) and told.outcome.admitted):
        for outcome in outcomes:
            if isinstance(outcome, Reading) and outcome.admitted:
                for charge, _, after in outcome.buckets:
                    if charge.cost and after is not None:
                        taken.append((charge.key, [charge.cost * weight for weight in charge.bucket.weights]))
    given_back = [
        (charge.key, list(charge.adjustment.back)) for back in told.refunds for charge in back.charges if charge.adjustment
    ]
    assert given_back == taken
    assert all(back.verb == "adjust" and len(parts_of(back)) == 1 for back in told.refunds)
    assert all(charge.cost == 0 for back in told.refunds for charge in back.charges)


@given(read_plans(), st.lists(st.sampled_from(["timeout", "connection", "oom", "reply", None]), min_size=8, max_size=8))
def test_the_error_of_parts_property(asked: tuple[Plan, list[list[int]]], faults: list[Any]) -> None:
    """If parts fail the plan fails, by no more than their faults; the buckets are named if the others can be asked."""
    plan, debts = asked
    parts, outcomes = parts_of(plan), outcomes_of(plan, debts)
    outcomes = [StoreError(fault, fault) if fault else outcome for outcome, fault in zip(outcomes, faults, strict=False)]
    failed = {
        part: error.fault for part, error in zip(range(len(parts)), outcomes, strict=True) if isinstance(error, StoreError)
    }
    error = concluded(plan, parts, outcomes).outcome
    assert isinstance(error, StoreError) == bool(failed)
    if isinstance(error, StoreError) and len(parts) > 1:
        assert error.fault in failed.values()
        assert (error.fault == "oom") == ("oom" in failed.values()), "on_error takes a lack of memory least lightly"
        missed = {charge.key for part in failed for charge in parts[part].plan.charges}
        named = len(failed) < len(parts) and "timeout" not in failed.values()
        assert error.keys == (missed if named else frozenset())


@pytest.mark.parametrize(("verb", "given_back"), [("spend", ["r:k"]), ("peek", []), ("look", [])])
def test_only_what_was_taken_of_a_shadow_is_given_back(verb: Verb, given_back: list[str]) -> None:
    """A shadow rule that is full in one slot takes nothing in another one either; a look has taken nothing there."""
    full, free = buckets_of((Limit("2/day", algorithm="fixed_window"), Limit("8/day")))
    plan = Plan(tuple([Charge(f"r:k{each.suffix}", each, 1, enforced=False, rule="r") for each in (full, free)]), verb)
    parts, store = parts_of(plan), MemoryStore(lambda: START)
    store.spend(Plan((plan.charges[0]._replace(cost=2),)))
    told = concluded(plan, parts, [store.spend(part.plan) for part in parts])
    assert isinstance(told.outcome, Reading)
    assert (len(parts), told.outcome.admitted) == (2, True)
    assert [after for _, _, after in told.outcome.buckets] == [None, None]
    assert [charge.key for back in told.refunds for charge in back.charges] == given_back


def test_a_slot_map_learns_and_forgets() -> None:
    """A map goes by the last that it was told, and says which nodes hold nothing any more, once it knows all slots."""
    known: SlotMap[Any] = SlotMap([("seed", 1)], lambda _: SimpleNamespace(breaker=Breaker()))
    assert known.node(("seed", 1)) is known.node(known.holder(5))
    assert known.unused() == []
    known.moved(5, ("a", 1))
    assert (known.holder(5), known.holder(6), known.unused()) == (("a", 1), ("seed", 1), [])
    assert known.learn([[0, 8000, [b"a", 1]], [8001, 16383, [b"b", 1], [b"replica", 2]]], ("a", 1))
    assert (known.holder(8000), known.holder(8001), known.unused()) == (("a", 1), ("b", 1), [("seed", 1)])
    assert not known.learn([], ("a", 1))
    assert known.holder(8001) == ("b", 1)


# --- giving back, in Lua, against the truth ---------------------------------------------------------------------------


class Hold(NamedTuple):
    """What a request took that will be refused elsewhere."""

    back: Plan
    weight: Sequence[int]
    at: int
    busy_until: int
    """When what the bucket owed to admitted requests has drained."""


class StoredBucket:
    """A bucket in Redis, and beside it what it would owe had only those asked who were admitted in the end."""

    def __init__(self, client: redis.Redis, limit: Limit) -> None:
        self.client = client
        self.sha = client.script_load(CLOCK.replace("ON_SET", "") + wire.SPEND.text)
        self.charge = Charge(uuid4().hex, Bucket((limit,)), 1, enforced=True, rule=None)
        self.elsewhere = Charge(
            next(key for key in KEYS if key_slot(key.encode()) != key_slot(self.charge.key.encode())),
            bucket_of("5/day"),
            1,
            True,
            None,
        )
        self.count, self.weight = limit.count, limit.period_us
        self.now, self.truth = START, 0
        self.held: list[Hold] = []

    def advance(self, us: int) -> None:
        self.now += us
        self.truth = max(0, self.truth - us * self.count)

    def call(self, plan: Plan) -> Reading:
        reply = self.client.execute_command("EVALSHA", self.sha, *wire.arguments([plan]), self.now)
        return wire.answers([plan], reply).readings[0]

    def owed(self) -> int:
        return self.call(Plan((self.charge,), "peek")).buckets[0].before[0]

    def spend(self, cost: int) -> bool:
        admitted = self.call(Plan((self.charge._replace(cost=cost),))).admitted
        self.truth += cost * self.weight * admitted
        return admitted

    def hold(self, cost: int) -> None:
        """Take for a request that another bucket refuses."""
        plan = Plan((self.charge._replace(cost=cost), self.elsewhere))
        parts = parts_of(plan)
        refused = read([self.elsewhere], self.now, [[self.elsewhere.bucket.capacities[0]]])
        taken = self.call(parts[0].plan)
        (back, *_) = concluded(plan, parts, [taken, refused]).refunds or (None,)
        if back is not None:
            self.held.append(Hold(back, cost * self.weight, self.now, self.now + self.truth // self.count))

    def give_back(self, place: int) -> Hold:
        hold = self.held.pop(place)
        self.call(hold.back)
        return hold

    @property
    def holding(self) -> int:
        return sum(hold.weight for hold in self.held)


limits = st.sampled_from(
    ["1/second burst 3", "7/second burst 20", "1000/second", "333/second burst 500", "5/minute", "999983/second"]
)


def bucket_on(server: RedisServer, limit: str) -> StoredBucket:
    return StoredBucket(server.client(), Limit(limit))


@pytest.mark.usefixtures("_unwatched")
@given(limits, st.integers(0, 10), st.integers(0, 10), st.tuples(st.integers(0, 5_000_000), st.integers(0, 5_000_000)))
def test_alone_it_is_as_if_never_asked_property(
    redis_server: RedisServer, limit: str, before: int, cost: int, pauses: tuple[int, int]
) -> None:
    """If nobody else asks meanwhile, a bucket that is given back to owes what it would owe, or less than a µs more."""
    bucket = bucket_on(redis_server, limit)
    bucket.spend(min(before, Limit(limit).burst))
    bucket.advance(pauses[0])
    bucket.hold(cost)
    bucket.advance(pauses[1])
    for _ in range(len(bucket.held)):
        bucket.give_back(0)
    assert 0 <= bucket.owed() - bucket.truth < bucket.count


@given(limits, st.integers(0, 10**9))
def test_a_busy_bucket_is_as_if_never_asked_property(redis_server: RedisServer, limit: str, seed: int) -> None:
    """If what admitted requests owed outlasts each hold, any number of them in any order leave just what is owed."""
    rnd, bucket = random.Random(seed), bucket_on(redis_server, limit)
    bucket.spend(1)
    for _ in range(30):
        step = rnd.random()
        if step < 0.3:
            bucket.hold(rnd.choice((1, 1, 2)))
        elif step < 0.6 and bucket.held:
            bucket.give_back(rnd.randrange(len(bucket.held)))
        elif step < 0.7:
            bucket.spend(1)
        busy_until = min([bucket.now + bucket.truth // bucket.count - 1, *[hold.busy_until for hold in bucket.held]])
        bucket.advance(min(rnd.randrange(300_000), max(0, busy_until - bucket.now)))
        assert bucket.owed() == bucket.truth + bucket.holding
    while bucket.held:
        bucket.give_back(rnd.randrange(len(bucket.held)))
    assert bucket.owed() == bucket.truth


@given(limits, st.integers(0, 10**9))
def test_the_worst_of_many_holds_property(redis_server: RedisServer, limit: str, seed: int) -> None:
    """However holds and admitted requests interleave, what a bucket owes is off by no more than two bounds.

    At most as much is missing as was held at once; so no more is admitted than the burst, what drains, and that. At most as
    much is left too much as drained during holds, a begun microsecond counted whole, for each no more than it took.
    """
    rnd, bucket = random.Random(seed), bucket_on(redis_server, limit)
    most_held = left = 0
    request_us = max(1, bucket.weight // bucket.count)
    for _ in range(30):
        step = rnd.random()
        if step < 0.35:
            bucket.hold(rnd.choice((1, 1, 2)))
        elif step < 0.65 and bucket.held:
            hold = bucket.give_back(rnd.choice((0, -1, rnd.randrange(len(bucket.held)))))
            left += min(hold.weight, (bucket.now - hold.at + 1) * bucket.count)
        elif step < 0.8:
            bucket.spend(rnd.choice((1, 1, 3)))
        most_held = max(most_held, bucket.holding)
        bucket.advance(rnd.choice((0, rnd.randrange(300), rnd.randrange(request_us), rnd.randrange(3 * request_us))))
        drained = sum(min(hold.weight, (bucket.now - hold.at) * bucket.count) for hold in bucket.held)
        owed = bucket.owed()
        assert bucket.truth - most_held <= owed <= bucket.truth + bucket.holding + left + drained
        assert bucket.truth <= bucket.charge.bucket.capacities[0] + most_held, "more than the burst and what was held at once"


def test_the_worst_of_many_holds_is_reached(redis_server: RedisServer) -> None:
    """Holds that follow each other in an idle bucket may let as many requests pass on top as are held when the others begin."""
    bucket = bucket_on(redis_server, "1/second burst 10")
    bucket.hold(2)
    for _ in range(5):
        bucket.advance(500_000)
        bucket.hold(2)
        bucket.give_back(0)
    held = bucket.holding
    for _ in range(2):
        while bucket.spend(1):
            pass
        while bucket.held:
            bucket.give_back(0)
    assert bucket.truth - bucket.charge.bucket.capacities[0] == held == 2 * bucket.weight


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_nodes_are_asked_until_one_knows_who_holds_the_slots(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that fails, or that knows no slots, ends nothing; one that knows them ends the search."""
    url, asked = "redis+cluster://h1:1,h2:2,h3:3,h4:4", []
    monkeypatch.setattr(SlotMap, "known", lambda _: [("h1", 1), ("h2", 2), ("h3", 3), ("h4", 4)])

    def reply(address: tuple[str, int]) -> Any:
        asked.append(address)
        if address[1] == 1:
            raise OSError
        return [] if address[1] == 2 else [[0, 16383, [b"holder", 7, b"id"]]]

    async def learn() -> Any:
        store = AsyncRedisStore(url)
        servers: Any = store._reach(ListeningClock())

        async def areply(_: object, address: tuple[str, int]) -> Any:
            return reply(address)

        monkeypatch.setattr(servers._dialer, "aslots", areply)
        await servers._learn()
        return servers

    if kind == "asyncio":
        servers = asyncio.run(learn())
    else:
        servers = RedisStore(url)._servers
        monkeypatch.setattr(servers._dialer, "slots", reply)
        servers._learn()
    assert asked == [("h1", 1), ("h2", 2), ("h3", 3)]
    assert servers._map.holder(5) == ("holder", 7)
