"""A Redis Cluster that is well: all or nothing over slots, what that costs, and what it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from limitgate import AsyncRedisStore, Limit
from limitgate.limits.plan import refund
from tests.stores.test_stores import AsyncDoor, Door
from tests.support.clusters import KINDS, PLAIN_KINDS, charge, key_on, keys_on, owed, plan, settled, slot_of, tagged, used
from tests.support.crowds import ask
from tests.support.proxy import in_a_loop
from tests.support.redis_cluster import RedisCluster, eventually

Opener = Callable[..., Door]
EVERY_KIND = {**KINDS, **PLAIN_KINDS}


@pytest.fixture(params=EVERY_KIND.values(), ids=EVERY_KIND)
def open_door(request: pytest.FixtureRequest, redis_cluster: RedisCluster) -> Iterator[Opener]:
    """Opens a store of either kind on the cluster that all tests share."""
    with contextlib.ExitStack() as opened:
        yield lambda **options: opened.enter_context(contextlib.closing(request.param(redis_cluster.url, **options)))


@pytest.fixture
def door(open_door: Opener) -> Door:
    """A store of either kind that asks Redis every time."""
    return open_door(local_refusals=False)


@pytest.fixture
def cluster(redis_cluster: RedisCluster) -> RedisCluster:
    return redis_cluster


# --- all or nothing ---------------------------------------------------------------------------------------------------


def test_a_crowd_is_charged_as_often_as_it_is_admitted(door: Door) -> None:
    """Of a crowd that needs three nodes exactly as many pass as the tightest allows, and all are charged just those."""
    first, second, third = (charge(key_on(place), f"{limit}/day") for place, limit in enumerate((90, 30, 60)))
    answers = door.crowd([plan(first, second, third)] * 200)
    assert 0 < sum(reading.admitted for reading in answers) <= 30
    assert settled(door, lambda: len(set(used(door, first, second, third))) == 1)
    charged = used(door, second)[0]
    assert charged == sum(reading.admitted for reading in answers)
    more = [door.spend(plan(first, second, third)).admitted for _ in range(31 - charged)]
    assert more == [True] * (30 - charged) + [False]
    assert settled(door, lambda: used(door, first, second, third) == [30] * 3)


def test_crowds_with_limits_of_their_own_meet_in_one(door: Door) -> None:
    """Callers who share a bucket, and each have their own elsewhere, leave exactly what they were admitted for."""
    shared = charge(key_on(0), "60/day")
    own = [charge(key, "10/day") for key in islice(keys_on(1), 10)]
    answers = door.crowd([plan(each, shared) for each in own * 20])
    assert settled(door, lambda: sum(used(door, *own)) == used(door, shared)[0])
    assert used(door, shared)[0] == sum(reading.admitted for reading in answers)
    assert max(used(door, *own)) <= 10


def test_one_after_the_other_all_that_fits_is_admitted(door: Door) -> None:
    """Without a crowd nobody is refused because of what others took and gave back."""
    loose, tight = charge(key_on(0), "8/day"), charge(key_on(2), "3/day")
    assert [door.spend(plan(loose, tight)).admitted for _ in range(9)] == [True] * 3 + [False] * 6
    assert settled(door, lambda: used(door, loose) == [3])
    assert [door.spend(plan(loose)).admitted for _ in range(6)] == [True] * 5 + [False]


def test_a_refusal_leaves_no_key_behind(door: Door, cluster: RedisCluster) -> None:
    """A bucket that was full before a request that another one refused is as if it had never been asked."""
    full, refusing = charge(key_on(0), "8/day"), charge(key_on(1), "1/day")
    door.spend(plan(refusing))
    assert not door.spend(plan(full, refusing)).admitted
    with cluster.masters[0].client() as client:
        assert settled(door, lambda: not client.exists(full.key) or client.pttl(full.key) <= 2)


def test_what_was_owed_before_is_owed_still(door: Door) -> None:
    """Refusals elsewhere change nothing about how long a bucket that owes something goes on owing it."""
    busy, refusing = charge(key_on(0), "100/second", "7/day"), charge(key_on(1), "1/day")
    door.spend(plan(busy, refusing))
    before = door.spend(plan(busy, verb="peek"))
    for _ in range(20):
        assert not door.spend(plan(busy, refusing)).admitted
    door.idle(0.05)
    after = door.spend(plan(busy, verb="peek"))
    for then, now, count in zip(before.buckets[0].before, after.buckets[0].before, busy.bucket.counts, strict=True):
        left = max(0, then - (after.now - before.now) * count)
        assert left <= now <= left + 20 * count, "each refusal may leave less than a microsecond"


def test_a_shadow_elsewhere_never_blocks(door: Door) -> None:
    """A bucket on another node that may not refuse is charged while it has room, and nothing is given back for it."""
    real, shady = charge(key_on(0), "5/day"), charge(key_on(1), "3/day", binding=False)
    assert [door.spend(plan(real, shady)).admitted for _ in range(6)] == [True] * 5 + [False]
    assert settled(door, lambda: used(door, real, shady) == [5, 3])


def test_a_shadow_is_given_back_too(door: Door) -> None:
    """What a refused request took from a bucket that may not refuse goes back like all else."""
    refusing, shady = charge(key_on(0), "1/day"), charge(key_on(1), "9/day", binding=False)
    assert [door.spend(plan(refusing, shady)).admitted for _ in range(4)] == [True] + [False] * 3
    assert settled(door, lambda: used(door, refusing, shady) == [1, 1])


def test_a_cost_of_nothing(door: Door) -> None:
    """A charge of nothing on another node neither refuses nor is given back."""
    empty, free = charge(key_on(0), "1/day"), charge(key_on(1), "1/day", cost=0)
    door.spend(plan(free._replace(cost=1)))
    assert [door.spend(plan(empty, free)).admitted for _ in range(3)] == [True, False, False]
    assert used(door, empty, free) == [1, 1]


def test_several_windows_and_costs(door: Door) -> None:
    """Costs and several windows are given back window by window, and readings come in the order of the plan."""
    one = charge(key_on(2), "20/day", "30 per 2 days", cost=4)
    two = charge(key_on(0), "9/day", cost=3)
    three = charge(key_on(1), "50/day", "90 per 3 days", "70 per 2 days", cost=5)
    readings = [door.spend(plan(one, two, three)) for _ in range(5)]
    assert [reading.admitted for reading in readings] == [True] * 3 + [False] * 2
    for place, each in enumerate((one, two, three)):
        requests = [debt / weight for debt, weight in zip(readings[2].buckets[place].before, each.bucket.weights, strict=True)]
        assert requests == pytest.approx([2 * each.cost] * len(requests), abs=0.01)
    assert settled(door, lambda: used(door, one, two, three) == [12, 9, 15])
    third = door.spend(plan(three, verb="peek"))
    assert [round(debt / weight) for debt, weight in zip(third.buckets[0].before, three.bucket.weights, strict=True)] == [
        15
    ] * 3


def test_two_buckets_of_one_slot(door: Door, cluster: RedisCluster) -> None:
    """Buckets that hash tags put into one slot are asked in one call."""
    first, second = (charge(key, limit) for key, limit in zip(tagged(slot_of("a")), ("5/day", "3/day"), strict=False))
    door.spend(plan(first, verb="peek"))
    calls = cluster.calls()
    assert [door.spend(plan(first, second)).admitted for _ in range(5)] == [True] * 3 + [False] * 2
    assert cluster.calls() == calls + 5
    assert used(door, first, second) == [3, 3]


def test_the_same_bucket_twice(door: Door) -> None:
    """A bucket that a plan names twice, besides one elsewhere, is charged and given back twice."""
    twice, other = charge(key_on(0), "9/day"), charge(key_on(1), "3/day")
    assert [door.spend(plan(twice, other, twice)).admitted for _ in range(5)] == [True] * 3 + [False] * 2
    assert settled(door, lambda: used(door, twice, other) == [6, 3])


def test_peek_and_reset_over_slots(door: Door) -> None:
    """Looking at buckets of several nodes takes nothing, and a reset fills all of them."""
    first, second = charge(key_on(0), "3/day"), charge(key_on(1), "3/day")
    door.spend(plan(first, second))
    peeked = [door.spend(plan(first, second, verb="peek")).admitted for _ in range(5)]
    assert peeked == [True] * 5
    assert used(door, first, second) == [1, 1]
    door.spend(plan(first, second, verb="reset"))
    assert owed(door, first, second) == [0, 0]


def test_what_a_request_turns_out_to_have_cost_is_put_right_on_every_node(door: Door) -> None:
    """Buckets on several nodes are corrected together, downwards and upwards, and those that were right are left alone."""
    charges = [charge(key_on(place), "50/day", cost=5) for place in range(3)]
    asked = plan(*charges)
    reading = door.spend(asked)
    door.spend(refund(asked, reading, [0, 9, 5]))
    assert owed(door, *charges) == pytest.approx([0, 9, 5], abs=0.01)
    door.spend(refund(asked, reading, [5, 5, 100]))
    assert owed(door, *charges)[2] == pytest.approx(100, abs=0.01)
    assert not door.spend(plan(charges[2])).admitted


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_a_call_for_each_slot(door: Door, cluster: RedisCluster) -> None:
    """An admitted request costs a call per slot, a refused one another for each slot that gives back."""
    charges = [charge(key_on(place), "2/day") for place in (0, 1, 2)]
    door.crowd([plan(each, verb="peek") for each in charges * 3])
    calls = cluster.calls()
    door.spend(plan(*charges))
    assert cluster.calls() == calls + 3
    door.spend(plan(charges[0]))
    calls = cluster.calls()
    assert not door.spend(plan(*charges)).admitted
    assert settled(door, lambda: cluster.calls() == calls + 5)
    door.idle(0.05)
    assert cluster.calls() == calls + 5


@in_a_loop
async def test_a_crowd_shares_calls_by_slots(redis_cluster: RedisCluster) -> None:
    """Requests that arrive together share a call for each slot, not for each request."""
    async with contextlib.aclosing(AsyncRedisStore(redis_cluster.url, local_refusals=False)) as store:
        charges = [charge(key_on(place), "900/day") for place in (0, 1, 2)]
        await ask(store, *[plan(each) for each in charges] * 3)
        calls = redis_cluster.calls()
        assert await ask(store, *[plan(*charges)] * 60) == [True] * 60
        assert redis_cluster.calls() == calls + 3


def test_a_refused_caller_soon_costs_no_calls(open_door: Opener, cluster: RedisCluster) -> None:
    """Whoever one of two rules refuses is soon answered without asking, although the other rule has room."""
    door = open_door()
    loose, tight = charge(key_on(0), "50/day"), charge(key_on(1), "1/day")
    door.spend(plan(loose, tight))
    door.spend(plan(loose, tight))
    door.idle(0.05)
    calls = cluster.calls()
    assert [door.spend(plan(loose, tight)).admitted for _ in range(50)] == [False] * 50
    assert cluster.calls() == calls


@pytest.mark.parametrize("several", [1, 40], ids=["one", "many"])
def test_refused_crowds_soon_cost_no_calls(open_door: Opener, cluster: RedisCluster, several: int) -> None:
    """Callers who are refused in crowds, each by one of two rules, are soon answered without asking, too."""
    door = open_door()
    loose = [charge(key, "500/day") for key in islice(keys_on(0), several)]
    tight = [charge(key, "1/day") for key in islice(keys_on(1), several)]
    plans = [plan(*pair) for pair in zip(loose, tight, strict=True)] * (80 // several)
    door.crowd(plans)

    def cost() -> int:
        calls = cluster.calls()
        assert not any(reading.admitted for reading in door.crowd(plans))
        return cluster.calls() - calls

    # One may be cheap by chance.
    eventually(lambda: max(cost(), cost()) <= several // 10, "crowds that cost no calls")


@pytest.mark.parametrize("idle", [{"cost": 0}, {"binding": False}], ids=["cost 0", "a full shadow"])
def test_a_refused_caller_with_nothing_to_give_back_costs_no_calls_either(
    open_door: Opener, cluster: RedisCluster, idle: Any
) -> None:
    """A bucket that a refused request takes nothing from does not keep the refusal from being repeated here."""
    door = open_door()
    other, tight = charge(key_on(0), "1/day", **idle), charge(key_on(1), "1/day")
    door.spend(plan(other._replace(cost=1), tight))
    for _ in range(3):
        door.spend(plan(other, tight))
    door.idle(0.05)
    calls = cluster.calls()
    assert [door.spend(plan(other, tight)).admitted for _ in range(20)] == [False] * 20
    assert cluster.calls() == calls


def test_leases_on_a_cluster(open_door: Opener, cluster: RedisCluster) -> None:
    """Buckets that are leased from on several nodes are asked about once for many requests, and get back what is left."""
    door = open_door()
    charges = [charge(key_on(place), Limit("500/day", lease=100)) for place in (0, 1, 2)]
    door.spend(plan(*charges))
    calls = cluster.calls()
    assert all(door.spend(plan(*charges)).admitted for _ in range(50))
    assert cluster.calls() == calls
    door.close() if not isinstance(door, AsyncDoor) else door.run(door.store.aclose())
    fresh = open_door(local_refusals=False)
    plain = [charge(each.key, "500/day") for each in charges]
    assert settled(fresh, lambda: used(fresh, *plain) == [52] * 3, 2), used(fresh, *plain)
