"""Held reservations, by the script on a real Redis and in the memory store."""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

import pytest
import redis

from limitgate import Limit, MemoryStore, RedisStore, StoreError
from limitgate.algorithms import holds
from limitgate.limiter.holding import Hold, state_of, without_hold
from limitgate.limits.bucket import parts_of
from limitgate.limits.limit import as_limit
from limitgate.limits.plan import Charge, Plan, Reading, full_refund, read, refund
from limitgate.stores.redis import wire
from limitgate.stores.redis.cluster import hash_slot
from tests.support.clock import Clock
from tests.support.redis_server import RedisServer
from tests.support.scripted import TTL_SUFFIX, Scripted

SECOND = 1_000_000
LIMITS: dict[str, tuple[Any, ...]] = {
    "gcra": ("50 per 10 seconds", "400/minute"),
    "fixed_window": (Limit("50 per 10 seconds", algorithm="fixed_window"),),
    "first_request": (Limit("50 per 10 seconds", algorithm="fixed_window", align="first-request"),),
    "sliding_window": (Limit("50 per 10 seconds", algorithm="sliding_window"),),
    "sliding_log": (Limit("50 per 10 seconds", algorithm="sliding_log"),),
    "warm_up": (Limit("50 per 10 seconds", warm_up=3),),
    "several": ("90/minute", Limit("50 per 10 seconds", algorithm="sliding_log"), Limit("90/hour", algorithm="fixed_window")),
}


def charges_of(key: str, limits: tuple[Any, ...], cost: int = 1) -> list[Charge]:
    """As a limiter makes them; the second limit of some has its own bucket, as with a cost of its own."""
    parts = parts_of(tuple(map(as_limit, limits)), (1,) if len(limits) == 2 else ())
    names = [f"{key}{bucket.suffix}:{{{key}}}" if bucket.suffix else key for bucket, _ in parts]
    return [Charge(name, bucket, cost, enforced=True, rule=None) for name, (bucket, _) in zip(names, parts)]


class Both:
    """The script and the memory store; whatever one says, the other has to say."""

    def __init__(self, scripted: Scripted) -> None:
        self.clock = Clock()
        self.scripted, self.memory = scripted, MemoryStore(self.clock)
        scripted.clock = self.clock

    def spend(self, *plans: Plan) -> list[Reading]:
        """Carry out plans, in one call of the script."""
        expected = [self.memory.spend(plan) for plan in plans]
        reply = self.scripted.client.execute_command(*self.scripted.command_of(plans, self.clock()))
        answers = wire.answers(plans, reply)
        assert not answers.unreadable
        for found, wanted in zip(answers.readings, expected, strict=True):
            self.same(found, wanted)
        return expected

    def same(self, found: Any, wanted: Reading) -> None:
        ours, theirs = state_of(wanted), state_of(found)
        assert (ours.held, ours.found, wanted.admitted) == (theirs.held, theirs.found, found.admitted)
        for (charge, mine, _), (_, reported, _) in zip(without_hold(wanted).buckets, without_hold(found).buckets, strict=True):
            algorithm, limits = charge.bucket.algorithm, charge.bucket.limits
            for one, other, limit in zip(mine, reported, limits, strict=True):
                for figure in (algorithm.used, algorithm.refill_us):
                    assert figure(one, limit) == figure(other, limit), charge
                assert algorithm.wait_us(one, charge.cost, limit) == algorithm.wait_us(other, charge.cost, limit)


def a_plan(rnd: random.Random, key: str, limits: tuple[Any, ...], held: list[Any], begun: list[Any]) -> Plan:
    """What a limiter may ask next; sometimes about what is over, or never began."""
    what = rnd.choice(("charge", "charge", "register", "register", "release", "release", "undo", "renew"))
    known = rnd.choice(held) if held else None
    if what == "charge" or known is None:
        charges = charges_of(key, limits, rnd.choice((0, 1, 3, 10, 30, 60)))
        return Hold(charges, SECOND).charging(Plan.spend(charges))
    hold, plan, reading = known
    if what == "register" and hold not in begun:
        begun.append(hold)
        return hold.registering([(plan, reading)], reading.now + rnd.choice((0, 0, 0, -70 * SECOND)))
    if what == "renew":
        return hold.renewing()
    if what == "undo":
        begun[:] = [each for each in begun if each is not hold]  # a late registration, which is barred
    correction = refund(plan, reading, [rnd.choice((0, 1, 5, 100))] * len(plan.charges))
    return hold.releasing(correction) if what == "release" else hold.undoing(full_refund(plan, reading))


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("kind", LIMITS)
def test_histories_property(scripted: Scripted, kind: str) -> None:
    """Script and memory store agree on any history, with several plans in a call, and when the clock steps."""
    both, seen = Both(scripted), dict.fromkeys(("found", "gone", "expired"), 0)
    for seed in range(20):
        rnd, key, held = random.Random(f"{kind} {seed}"), uuid4().hex, list[Any]()
        before, begun = 0, list[Any]()
        for _ in range(40):
            both.clock.now += rnd.choice((0, 1, 1000, SECOND // 3, SECOND, 2 * SECOND, 5 * SECOND, 30 * SECOND))
            # An empty log begins a new clock in Redis, which memory does not.
            if rnd.random() < 0.03 and kind not in ("sliding_log", "several"):
                both.clock.now -= rnd.choice((1, SECOND, 3600 * SECOND))
            plans = [a_plan(rnd, key, LIMITS[kind], held, begun) for _ in range(rnd.choice((1, 1, 1, 2, 4)))]
            for plan, reading in zip(plans, both.spend(*plans)):
                state, action = state_of(reading), plan.charges[0].adjustment
                seen["expired"] += state.held < before
                before = state.held
                if action is not None:
                    seen["found" if state.found else "gone"] += 1
                    for hold, *_ in held:
                        if state.found and state.kept_at and hold._name == action.back[0].name:
                            hold.kept_at = rnd.choice((0, state.kept_at))
                elif reading.admitted and plan.charges[1].cost:
                    spent = plan._replace(charges=plan.charges[1:])
                    duration = rnd.choice((1, SECOND, SECOND, 4 * SECOND, 20 * SECOND))
                    held.append((Hold(spent.charges, duration), spent, without_hold(reading)))
            del held[:-6]
    assert min(seen.values()) > 20, seen


def registered(both: Both, key: str, limits: tuple[Any, ...], cost: int, seconds: float) -> tuple[Hold, Plan, Reading]:
    charges = charges_of(key, limits, cost)
    hold, plan = Hold(charges, round(seconds * SECOND)), Plan.spend(charges)
    reading = without_hold(both.spend(hold.charging(plan))[0])
    assert reading.admitted
    begun = both.spend(hold.registering([(plan, reading)], reading.now))[0]
    assert state_of(begun).found
    return hold, plan, reading


def used(both: Both, key: str, limits: tuple[Any, ...]) -> int:
    charges = charges_of(key, limits, 0)
    reading = both.spend(Hold(charges, 1).charging(Plan.spend(charges)))[0].buckets[1]
    return reading.charge.bucket.algorithm.used(reading.before[0], reading.charge.bucket.limits[0])


DAY: dict[str, tuple[Any, ...]] = {
    "gcra": ("100/day",),
    "fixed_window": (Limit("100/day", algorithm="fixed_window"),),
    "sliding_window": (Limit("100/day", algorithm="sliding_window"),),
    "sliding_log": (Limit("100/day", algorithm="sliding_log"),),
}


@pytest.mark.parametrize("kind", DAY)
def test_what_has_expired_is_given_back_before_the_charges_are_checked(scripted: Scripted, kind: str) -> None:
    """By the microsecond, in the same call."""
    both, key = Both(scripted), uuid4().hex
    registered(both, key, DAY[kind], 100, 5)
    charges = charges_of(key, DAY[kind], 100)
    both.clock.advance(us=5 * SECOND - 1)
    assert not both.spend(Hold(charges, 1).charging(Plan.spend(charges)))[0].admitted
    both.clock.advance(us=1)
    assert both.spend(Hold(charges, 1).charging(Plan.spend(charges)))[0].admitted
    assert used(both, key, DAY[kind]) == 100


@pytest.mark.parametrize("kind", DAY)
def test_nothing_is_given_back_twice(scripted: Scripted, kind: str) -> None:
    """Whoever comes first: the settlement, or the end of the hold."""
    both, key, limits = Both(scripted), uuid4().hex, DAY[kind]
    registered(both, key, limits, 40, 1000)
    hold, plan, reading = registered(both, key, limits, 40, 5)
    settles = hold.releasing(full_refund(plan, reading))
    assert [state_of(each).found for each in both.spend(settles, settles)] == [True, False]
    assert used(both, key, limits) == 40
    hold, plan, reading = registered(both, key, limits, 40, 5)
    both.clock.advance(5)
    settles = hold.releasing(full_refund(plan, reading))
    assert [state_of(each).found for each in both.spend(settles, settles, hold.renewing())] == [False, False, False]
    assert used(both, key, limits) == 40


def test_renewing_moves_the_deadline(scripted: Scripted) -> None:
    both, key, limits = Both(scripted), uuid4().hex, DAY["gcra"]
    (first, *_), (second, *_) = [registered(both, key, limits, 30, 10) for _ in range(2)]
    for _ in range(5):
        both.clock.advance(9)
        assert state_of(both.spend(first.renewing())[0]).found
    assert not state_of(both.spend(second.renewing())[0]).found
    assert used(both, key, limits) == 30
    both.clock.advance(10)
    assert used(both, key, limits) == 0


def test_a_registration_that_comes_after_its_undoing_does_nothing(scripted: Scripted) -> None:
    """As from a connection that was given up: the charge is refunded already."""
    both, key, limits = Both(scripted), uuid4().hex, DAY["fixed_window"]
    registered(both, key, limits, 40, 1000)
    charges = charges_of(key, limits, 40)
    hold, plan = Hold(charges, 5 * SECOND), Plan.spend(charges)
    reading = without_hold(both.spend(hold.charging(plan))[0])
    late = hold.registering([(plan, reading)], reading.now)
    assert both.spend(hold.undoing(full_refund(plan, reading)))[0].buckets[1].before[0][0] == 40
    for seconds in (0, 1, 58, 2, 100):
        both.clock.advance(seconds)
        assert not state_of(both.spend(late)[0]).found
    assert used(both, key, limits) == 40


@pytest.mark.parametrize(("limits", "most"), [(("10000000/day",), 5_000), (("10000000/day",) * 64, 312)])
def test_a_bucket_holds_so_many(scripted: Scripted, limits: tuple[Any, ...], most: int) -> None:
    """Beyond, nothing is registered, and an undoing refunds only what it finds."""
    both, key = Both(scripted), uuid4().hex
    charges = charges_of(key, limits, 1)
    plan = Plan.spend(charges)
    reading = without_hold(both.spend(Hold(charges, SECOND).charging(plan))[0])
    asked = [Hold(charges, 3600 * SECOND).registering([(plan, reading)], reading.now) for _ in range(most + 5)]
    found = 0
    for at in range(0, len(asked), 500):
        reply = scripted.client.execute_command(*scripted.command_of(asked[at : at + 500], both.clock()))
        answered = wire.answers(asked[at : at + 500], reply).readings
        found += sum(state_of(each).found for each in answered)  # type: ignore[arg-type]
        for each in asked[at : at + 500]:
            both.memory.spend(each)
    assert found == most == holds.most_entries(len(limits)) == state_of(both.spend(asked[-1])[0]).held
    late = Hold(charges, 3600 * SECOND)
    assert not state_of(both.spend(late.registering([(plan, reading)], reading.now))[0]).found
    assert both.spend(late.undoing(full_refund(plan, reading)))[0].buckets[1].before == reading.buckets[0].after
    assert scripted.client.strlen(charges[0].key + ":x") == 0
    (holding,) = [name for name in scripted.client.scan_iter(f"{key}:holds:*") if not name.endswith(TTL_SUFFIX.encode())]
    assert scripted.client.strlen(holding) < 2**20 * 1.2
    # A part of them is given back by each call.
    both.clock.advance(3600)
    sizes = [state_of(both.spend(late.charging(Plan.spend(charges_of(key, limits, 0))))[0]).held for _ in range(3)]
    each = holds.most_expired(len(limits))
    assert sizes == [most - each, most - 2 * each, most - 3 * each]


def test_a_log_gives_back_fewer_in_a_call(scripted: Scripted) -> None:
    """Each of its refunds may take 2 ms."""
    both, key = Both(scripted), uuid4().hex
    limits = (Limit("10000/day", algorithm="sliding_log"),)
    for _ in range(5):
        registered(both, key, limits, 1, 5)
        both.clock.advance(us=1000)
    both.clock.advance(10)
    assert [used(both, key, limits) for _ in range(6)] == [4, 3, 2, 1, 0, 0]


def test_places_that_move_are_found_again(scripted: Scripted) -> None:
    """Redis copies what is left if most of it has expired; callers know the old places."""
    both, key, limits = Both(scripted), uuid4().hex, DAY["fixed_window"]
    kept = []
    for number in range(100):
        registered(both, key, limits, 0, 5)
        if number % 25 == 24:
            kept.append(registered(both, key, limits, 1, 1000))
            kept[-1][0].kept_at = number
    both.clock.advance(10)
    (name,) = [each for each in scripted.client.scan_iter(f"{key}:holds:*") if not each.endswith(TTL_SUFFIX.encode())]
    sizes = [(used(both, key, limits), scripted.client.strlen(name))[1] for _ in range(2)]
    assert sizes[-1] == 8 + 40 + 4 * (14 + 8 + 16)
    for hold, plan, reading in kept:
        assert state_of(both.spend(hold.releasing(full_refund(plan, reading)))[0]).found
    assert used(both, key, limits) == 0


def test_what_it_keeps_in_redis(client: redis.Redis) -> None:
    """The key lives until the last deadline, and until the charges have drained, and goes with its last entry."""
    scripted = Scripted(client, on_set=f"server.call('SET', key .. '{TTL_SUFFIX}', string.format('%d', fake + ttl * 1000))")
    both = Both(scripted)
    for seconds, limit, expected in [(100, "100/minute", 100), (5, "100/minute", 30), (5, "100/day", 43_200)]:
        key = uuid4().hex
        hold, plan, reading = registered(both, key, (limit,), 50, seconds)
        (name,) = [each for each in client.scan_iter(f"{key}:holds:*") if not each.endswith(TTL_SUFFIX.encode())]
        assert client.strlen(name) == 8 + 40 + 62
        assert 0 <= int(client.get(name + TTL_SUFFIX.encode())) - both.clock() - expected * SECOND <= 3000
        both.spend(hold.releasing(full_refund(plan, reading)))
        assert not client.exists(name)


def test_what_is_not_ours_is_replaced(scripted: Scripted) -> None:
    scripted.clock = Clock()
    charges = charges_of(uuid4().hex, DAY["gcra"], 10)
    hold, plan = Hold(charges, SECOND), Plan.spend(charges)
    name = hold.charging(plan).charges[0].key
    foreign = b"\x01" + bytes(6) + b"\x01" + bytes(28) + b"\x01\0\0\0\x02\0\0\0" + bytes(4 + 62)
    for value in (b"", b"what is not ours", b"\x01" + bytes(47), bytes(110), b"\x01" + bytes(109), foreign):
        scripted.client.set(name, value)
        reading = scripted.spend(hold.charging(plan), 1)
        begun = scripted.spend(hold.registering([(plan, without_hold(reading))], reading.now), 1)
        assert state_of(begun).found, value
        assert scripted.spend(hold.releasing(full_refund(plan, without_hold(reading))), 1).buckets[1].before == [0]
        assert not scripted.client.exists(name)


def test_the_key_is_in_the_hash_slot_of_the_charges() -> None:
    """It begins like them, and other windows have another one."""
    keys = set()
    for name in ("limitgate:5f0c", "{shop}:5f0c"):
        for limits in LIMITS.values():
            charges = charges_of(name, limits)
            key = Hold(charges, 1).charging(Plan.spend(charges)).charges[0].key
            assert {hash_slot(each.key) for each in charges} == {hash_slot(key)}
            assert key.startswith(f"{name}:holds:")
            keys.add(key)
    assert len(keys) == 2 * (len(LIMITS) - 1)  # a fixed_window is one, however it is aligned
    changed = charges_of("limitgate:5f0c", ("60 per 10 seconds", "100/minute burst 7"))
    assert Hold(changed, 1).charging(Plan.spend(changed)).charges[0].key in keys


def test_a_full_memory_store_holds_nothing_new() -> None:
    """What it holds is never dropped to make room."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=16)
    charges = charges_of("held", ("10/day",), 10)
    hold, plan = Hold(charges, 3600 * SECOND), Plan.spend(charges)
    reading = without_hold(store.spend(hold.charging(plan)))
    assert state_of(store.spend(hold.registering([(plan, reading)], reading.now))).found
    for number in range(100):
        full = charges_of(f"full{number}", ("1/day",))
        store.spend(Plan.spend(full))
    late = Hold(full, 3600 * SECOND)
    assert not state_of(store.spend(late.registering([(Plan.spend(full), read(full, clock(), [[0]]))], clock()))).found
    assert len(store) == 16
    assert state_of(store.spend(hold.releasing(full_refund(plan, reading)))).found


def test_a_handler_that_interrupts_the_store_is_refused() -> None:
    """It could not learn whether the reservation was still held."""
    calls: list[Any] = []

    def clock() -> int:
        if calls:
            plan = calls.pop()
            with pytest.raises(StoreError, match="handler or finalizer"):
                store.spend(plan)
        return 1_790_000_000_000_000

    store = MemoryStore(clock)
    charges = charges_of("key", ("10/day",), 10)
    hold, plan = Hold(charges, 3600 * SECOND), Plan.spend(charges)
    reading = without_hold(store.spend(hold.charging(plan)))
    calls.append(hold.releasing(full_refund(plan, reading)))
    store.spend(Plan.peek(charges))


def test_memory_that_is_full_in_redis(redis_server: RedisServer, client: redis.Redis) -> None:
    """Nothing is registered and nothing given back while Redis cannot write; the caller is told."""
    store, key = RedisStore(redis_server.url), uuid4().hex
    charges = charges_of(key, ("10/day",), 10)
    hold, plan = Hold(charges, 3600 * SECOND), Plan.spend(charges)
    reading = without_hold(store.spend(hold.charging(plan), 5))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="out of memory"):
            store.spend(hold.registering([(plan, reading)], reading.now), 5)
    finally:
        client.config_set("maxmemory", 0)
    assert not state_of(store.spend(hold.releasing(full_refund(plan, reading)), 5)).found
    store.close()
