"""Counts of refusals and the bans that they lead to, by the script on a real Redis and in the memory store."""

from __future__ import annotations

import random
from collections import deque
from uuid import uuid4

import pytest

from limitgate import Ban, ConfigError, Limit, MemoryStore
from limitgate.algorithms.refusals import TIMES
from limitgate.gate.planning.compiled_rule import count_key, counting, forgetting
from limitgate.limits.bucket import buckets_of
from limitgate.limits.plan import Charge, Plan
from limitgate.stores.redis.cluster import hash_slot
from tests.support.clock import Clock
from tests.support.scripted import TTL_SUFFIX, Scripted

SECOND = 1_000_000
LIMITS = {
    "gcra": Limit("5/second"),
    "fixed_window": Limit("5 per 10 seconds", algorithm="fixed_window"),
    "sliding_window": Limit("5 per 10 seconds", algorithm="sliding_window"),
    "sliding_log": Limit("400 per 10 seconds", algorithm="sliding_log"),
    "warm_up": Limit("5/second", warm_up=3),
    "concurrency": Limit("5 at once"),
}


class Oracle:
    """The definition: a ban once ``after`` refusals lie within the last ``within`` seconds, each time longer."""

    def __init__(self, ban: Ban) -> None:
        self.ban = ban
        self.times: deque[tuple[int, int]] = deque()
        self.until = self.remembered = 0
        self.last = 0.0

    def refused(self, now: int, refusals: int) -> float:
        """Seconds of the ban that begins, 0 for none."""
        if now < self.until:
            return 0
        within = round(self.ban.within * SECOND)
        self.times = deque((at, number) for at, number in self.times if now - at < within)
        if self.times and now - self.times[-1][0] < within / TIMES:
            self.times[-1] = self.times[-1][0], self.times[-1][1] + refusals
        else:
            self.times.append((now, refusals))
        if sum(number for _, number in self.times) < self.ban.after:
            return 0
        self.times.clear()
        last = self.last if now < self.remembered else 0
        self.last = min(self.ban.most, max(self.ban.duration, last * self.ban.growing))
        self.until = now + round(self.last * SECOND)
        self.remembered = self.until + round(self.ban.most * SECOND)
        return self.last


def charge_of(key: str, limit: Limit) -> Charge:
    (bucket,) = buckets_of((limit,))
    return Charge(key + bucket.suffix, bucket, 1, enforced=True, rule="r")


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("kind", LIMITS)
def test_histories_property(scripted: Scripted, kind: str) -> None:
    """Script and memory store begin the bans that the definition asks for, under any history, and of the same length."""
    begun = 0
    for seed in range(10):
        rnd = random.Random(f"{kind} {seed}")
        chances: list[tuple[float, ...]] = [(1, 10), (1, 7), (1, 1.5, 2), (7, 40)]
        ban = Ban(rnd.choice((1, 2, 5, 30)), *map(rnd.choice, chances))
        scripted.clock = clock = Clock()
        memory, oracle, charge = MemoryStore(clock), Oracle(ban), charge_of(uuid4().hex, LIMITS[kind])
        for number in range(60):
            clock.now += rnd.choice((0, 1, 2000, SECOND // 10, SECOND // 3, SECOND, 3 * SECOND, 9 * SECOND, 50 * SECOND))
            refusals = rnd.choice((1, 1, 1, 2, 5))
            expected = oracle.refused(clock.now, refusals)
            left = max(0, oracle.until - clock.now)
            for store in (scripted, memory):
                reading = store.spend(counting(charge, ban, refusals), 1)
                assert reading.buckets[1].before[0].began_us == round(expected * SECOND), (seed, number, store)
                asked = store.spend(Plan.peek([charge]), 1)
                assert asked.admitted is not left
                shown = asked.buckets[0]
                assert (shown.before[0] if shown.charge != charge else 0) == left
            if expected:
                begun += 1
                if rnd.random() < 0.2:  # pardoned: everything begins again
                    for store in (scripted, memory):
                        store.spend(forgetting([charge]), 1)
                        store.spend(Plan.ban([charge], 0), 1)
                    oracle = Oracle(ban)
    assert begun > 20


def test_what_it_keeps_in_redis(scripted: Scripted) -> None:
    """A count goes when nothing of it counts any more, and has at most a hundred times in it."""
    scripted.clock = clock = Clock()
    charge, ban = charge_of(uuid4().hex, LIMITS["gcra"]), Ban(10_000, 10, 60, 2, 120)
    key = count_key(charge.key)
    for _ in range(500):
        scripted.spend(counting(charge, ban, 1), 1)
        clock.now += 10_000
    assert scripted.client.strlen(key) <= 8 + 14 + 13 * 51
    scripted.client.delete(key, key + TTL_SUFFIX)
    scripted.client.set(key, b"what is not ours")
    assert not scripted.spend(counting(charge, ban, 1), 1).buckets[1].before[0].began_us
    assert scripted.client.strlen(key) == 8 + 14 + 13
    scripted.spend(forgetting([charge]), 1)
    assert not scripted.client.exists(key)


def test_no_room_in_memory() -> None:
    """Where memory is full, counts of new buckets are left out: invented keys fill it no further."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=10)
    ban = Ban(1, 60, 60)
    for number in range(10):
        store.spend(Plan.spend([charge_of(f"full{number}", Limit("1/day"))]))
    for number in range(100):
        reading = store.spend(counting(charge_of(f"new{number}", Limit("1/day")), ban, 1))
        assert not reading.buckets[1].before[0].began_us
    assert len(store) == 10


def test_bans_leave_room_for_others() -> None:
    """A flood of banned addresses does not make the clients of another rule share a bucket for as long as the bans last."""
    store = MemoryStore(clock := Clock(), max_buckets=1000)
    limit, ban = Limit("1/second"), Ban(1, 60, "1h")

    def refuse(name: str) -> int:
        charge = charge_of(name, limit)
        for _ in range(2):
            admitted = store.spend(Plan.spend([charge])).admitted
        assert not admitted
        return int(store.spend(counting(charge, ban, 1)).buckets[1].before[0].began_us)

    begun = sum(refuse(f"flood{number}") > 0 for number in range(1000))
    assert begun == len(store._bans) == 250
    clock.advance(10)
    assert all(store.spend(Plan.spend([charge_of(f"new{number}", Limit("1/day"))])).admitted for number in range(100))
    clock.advance(3600)
    assert sum(refuse(f"later{number}") > 0 for number in range(400)) > 100  # as the first bans have ended


def test_counts_make_room_in_memory() -> None:
    """A count is dropped before a bucket that refuses."""
    store = MemoryStore(Clock(), max_buckets=64)
    for number in range(32):
        store.spend(counting(charge_of(f"a{number}", Limit("1/day")), Ban(5, "1h", 60), 1))
    admitted = [store.spend(Plan.spend([charge_of(f"b{number}", Limit("1/day"))])).admitted for number in range(60)]
    assert all(admitted)  # none of them shares a bucket with others
    assert not any(store.spend(Plan.peek([charge_of(f"b{number}", Limit("1/day"))])).admitted for number in range(60))


@pytest.mark.parametrize("key", ["limitgate:api:5f0c", "{shop}:api:5f0c", "a{shop}b:api:5f0c", "limitgate:api:5f0c:3c0300"])
def test_a_count_is_in_the_hash_slot_of_its_bucket(key: str) -> None:
    """It also begins like the bucket, so that rights for a prefix are enough."""
    assert hash_slot(count_key(key)) == hash_slot(key)
    assert count_key(key).startswith(key)


@pytest.mark.parametrize("prefix", ["a{b", "{}a", "a}b", "a}{b}"])
def test_a_prefix_that_can_have_no_counts(prefix: str) -> None:
    with pytest.raises(ConfigError, match="has a brace outside a hash tag, expected a key_prefix such as"):
        count_key(f"{prefix}:api:5f0c")
