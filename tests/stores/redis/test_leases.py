"""Leases: requests taken in advance admit no more than asking every time, on the real script and in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from hypothesis import given

from limitgate import AsyncRedisStore, Limit, MemoryStore, RedisStore, StoreError
from limitgate.algorithms import gcra
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading
from limitgate.process import background
from limitgate.stores.redis import leases, replies, wire
from tests.algorithms.test_differential import a_limit
from tests.stores.test_stores import PATIENT, REDIS, SLACK, AsyncDoor, Door, Tunnel, admitted, eventually
from tests.support.attempts import at_best
from tests.support.effort import EXAMPLES, RANDOM
from tests.support.hammering import hammer
from tests.support.lease_world import START, History, Process, World
from tests.support.proxy import calls_to
from tests.support.redis_server import RedisServer
from tests.support.threads import Began

SEEDS = EXAMPLES
BLOCKS = 4
SLOW = Limit("100000 per 366 days", lease=50)
"""So slow that next to nothing drains while a test runs."""


@pytest.fixture
def world(client: redis.Redis) -> Callable[..., World]:
    """A world with a bucket for each of these limits."""

    def world(*limits: Limit) -> World:
        return World(client, random.Random(1), [bucket_of(limit) for limit in limits])

    return world


@pytest.fixture(params=REDIS.values(), ids=REDIS)
def door(request: pytest.FixtureRequest, own_redis: RedisServer) -> Iterator[Door]:
    """A Redis store of either kind, on a Redis of the test's own."""
    with contextlib.closing(request.param(own_redis.url)) as door:
        yield door


def a_plan(*limits: Limit | str, key: str = "leased", cost: int = 1, verb: str = "spend") -> Plan:
    return Plan((Charge(key, bucket_of(*limits or (SLOW,)), cost, enforced=True, rule=None),), verb)


def requests(world: World, place: int = 0) -> int:
    """Requests that a bucket's first window owes in Redis, but for the small change that is spared of what goes back."""
    key = list(world.buckets)[place]
    return round(world.owed(key)[0] / world.buckets[key].weights[0])


def owed(server: RedisServer, limit: Limit | str = SLOW) -> int:
    """Requests that the bucket owes, but for the small change that is spared of what goes back."""
    with contextlib.closing(RedisStore(server.url)) as store:
        plan = a_plan(limit, verb="peek")
        return round(store.spend(plan, PATIENT).buckets[0].before[0] / plan.charges[0].bucket.weights[0])


# --- no more is admitted than without ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(BLOCKS))
def test_leases_admit_no_more_than_asking_every_time_property(client: redis.Redis, block: int) -> None:
    """Whatever processes, clocks and networks do, no interval sees more than its limits allow, nor a header that says more."""
    run_histories(client, range(block, SEEDS, BLOCKS))


def run_histories(client: redis.Redis, seeds: range) -> None:
    for seed in seeds:
        try:
            History(client, seed).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def never_melting(held: Any, at: float) -> None:
    held.as_of = held.began + int((at - held.sent) * 1e6)


def from_when_it_was_heard(self: replies.RedisStoreBase, call: wire.Call, *heard: Any) -> list[replies.Outcome]:
    call.sent = self._clock()
    return understood(self, call, *heard)


understood = replies.RedisStoreBase.understood
MISTAKES = {
    "leases that do not melt": lambda patch: patch.setattr(leases._Held, "forward", never_melting),
    "leases counted from the reply": lambda patch: patch.setattr(replies.RedisStoreBase, "understood", from_when_it_was_heard),
    "leases given back whole": lambda patch: patch.setattr("limitgate.stores.redis.leases.LEASE_SPARE_US", 0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_histories_would_notice(client: redis.Redis, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mistake in the leases, one of the same histories soon sees more than its limits allow."""
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        run_histories(client, range(2000))


def test_histories_meet_every_case(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The histories are worth something: much is admitted without asking, refused, given back and melted in them."""
    seen = dict.fromkeys(("asked", "refused", "local", "given back", "melted"), 0)
    call, forward = World.call, leases._Held.forward

    def watched_call(world: World, plans: list[Plan]) -> object:
        reply = call(world, plans)
        seen["refused"] += sum(not reading.admitted for reading in wire.answers(plans, reply).readings)
        seen["given back"] += sum(
            bool(charge.adjustment and charge.adjustment.gives_back) for plan in plans for charge in plan.charges
        )
        return reply

    def watched_forward(held: Any, at: float) -> None:
        before = held.ahead[0] - held.debts[0]
        forward(held, at)
        seen["melted"] += held.ahead[0] - held.debts[0] < before

    monkeypatch.setattr(World, "call", watched_call)
    monkeypatch.setattr(leases._Held, "forward", watched_forward)
    for seed in range(60):
        world = History(client, seed).run()
        seen["asked"] += world.calls
        seen["local"] += world.local
    assert min(seen.values()) > 60, seen


def test_a_lease_does_not_count_on_what_others_give_back(world: Callable[..., World]) -> None:
    """A lease that was taken while another was out does not outlive the room that it leaves by being given back."""
    here = world(Limit("30/second burst 101", lease=50))
    early, late = Process(here), Process(here)
    early.ask(here.plan())
    late.ask(here.plan())
    assert requests(here) == 101
    early.give_back(age=0)
    assert requests(here) == 81  # less 50, but for those that drain in a second
    here.advance(900_000)
    assert [here.spend(here.plan(cost)).admitted for cost in (47, 46)] == [False, True]
    assert late.use_up(here.plan()) == 48  # 94 at once; it would be 124 if all had been given back


def test_a_lease_melts_while_it_is_idle(world: Callable[..., World]) -> None:
    """What is not used is lost as fast as an idle bucket earns, once what was used of it is earned back."""
    here = world(Limit("100/second", lease=50))
    process, (key,) = Process(here), here.buckets
    process.ask(here.plan())
    for after_us, left in ((0, 50), (9_900, 50), (110_500, 39), (510_500, 0)):
        here.advance(after_us - (here.now - START))
        process.store.leases._held[key].forward(process.clock())
        assert process.held(key) == left
    assert process.use_up(here.plan()) == 0


def test_a_cost_of_nothing_takes_no_lease(world: Callable[..., World]) -> None:
    """A request that costs nothing is charged nothing, so nothing can be used in advance of it either."""
    here = world(SLOW)
    process = Process(here)
    process.ask(here.plan(0))
    assert process.use_up(here.plan()) == 0
    assert requests(here) == 0
    process.ask(here.plan(1))
    process.ask(here.plan(0))
    assert process.use_up(here.plan()) == 49
    assert requests(here) == 51


def test_a_full_bucket_lends_nothing(world: Callable[..., World]) -> None:
    """A lease is no more than what fits, and what fits is shared."""
    here = world(Limit("100/day", lease=60))
    first, second = Process(here), Process(here)
    assert [reading.admitted for reading in first.ask(here.plan(10))] == [True]
    assert [reading.admitted for reading in second.ask(here.plan(10))] == [True]
    assert [first.held(key) for key in here.buckets] == [60]
    assert [second.held(key) for key in here.buckets] == [20]
    assert requests(here) == 100


# --- what goes unused -------------------------------------------------------------------------------------------------


@given(rnd=RANDOM)
def test_what_is_left_goes_back_property(client: redis.Redis, rnd: random.Random) -> None:
    """When processes have given back their leases, the bucket owes what was really used, but for what has drained."""
    world = World(client, rnd, [bucket_of(SLOW, Limit("1000000/day", lease=50))], transit_us=rnd.choice((0, 1000)))
    processes = [Process(world, ppm=rnd.randint(-500, 500)) for _ in range(rnd.randint(1, 3))]
    for _ in range(10):
        world.advance(rnd.randrange(200_000))
        rnd.choice(processes).ask(*[world.plan(rnd.randint(1, 5)) for _ in range(rnd.randint(1, 20))])
    world.advance(1_010_000)
    for process in processes:
        process.give_back()
        assert not process.store.leases
    world.advance(10_000)
    (key,) = world.buckets
    truth = world.truths[key]
    for owed, used_up, count in zip(world.owed(key), truth.at(world.now), truth.bucket.counts, strict=True):
        assert 0 <= owed - used_up <= 1_002_000 * world.calls * count  # what is spared each time at most
    world.forget()


def test_whoever_dies_leaves_its_lease_unused(world: Callable[..., World]) -> None:
    """A process that never gives back costs the others one lease at most, however much it used."""
    here = world(SLOW)
    for hits in (1, 30, 120):
        before = requests(here)
        process = Process(here)
        for _ in range(hits):
            process.ask(here.plan())
        process.alive = False
        assert hits <= requests(here) - before <= hits + SLOW.lease


def test_a_lease_that_does_not_suffice_is_exchanged(world: Callable[..., World]) -> None:
    """A request that costs more than what is left gives it back and takes another lease in the same call."""
    here = world(SLOW)
    process, (key,) = Process(here), here.buckets
    process.ask(here.plan())
    process.ask(*[here.plan()] * 45)
    calls = here.calls
    assert [reading.admitted for reading in process.ask(here.plan(20))] == [True]
    assert (here.calls - calls, requests(here), process.held(key)) == (1, 46 + 20 + 50, 50)


def test_a_refusal_gives_back_what_is_left(world: Callable[..., World]) -> None:
    """A request that is refused leaves nothing leased, and the wait it is told is that of a bucket without leases."""
    here, without = world(Limit("100/day", lease=50)), world(Limit("100/day"))
    process = Process(here)
    process.ask(*[here.plan()] * 30)
    without.spend(without.plan(30))
    (refused,) = process.ask(here.plan(71))
    expected = without.spend(without.plan(71))
    assert not refused.admitted
    assert requests(here) == 30
    assert not process.store.leases
    waits = [decide(here.plan(71), reading).retry_after for reading in (refused, expected)]
    assert 0 < waits[1] <= waits[0] <= waits[1] + 1.002


@given(rnd=RANDOM)
def test_one_process_is_refused_little_too_early_property(client: redis.Redis, rnd: random.Random) -> None:
    """As long as no time passes, one process is refused only where it would be without a lease, but for one request."""
    burst = rnd.choice((1, 2, 5, 20, 60))
    options = {"burst": burst, "lease": rnd.randint(1, burst)}
    world = World(client, rnd, [bucket_of(Limit("10 per 366 days", **options), Limit("10 per 300 days", **options))])
    process, (truth,) = Process(world), world.truths.values()
    for _ in range(30):
        plan = world.plan(rnd.choice((0, 1, 1, 1, 2, 5)))
        room = min(gcra.remaining(debt, limit) for debt, limit in zip(truth.debts, truth.bucket.limits, strict=True))
        (reading,) = process.ask(plan)
        assert reading.admitted or room <= plan.charges[0].cost
    world.forget()


@given(rnd=RANDOM)
def test_the_memory_store_has_no_use_for_a_lease_property(rnd: random.Random) -> None:
    """In memory a limit with a lease is the limit without it, in every answer."""
    now = START
    leased, plain = MemoryStore(lambda: now), MemoryStore(lambda: now)
    for _ in range(30):
        now += rnd.choice((0, 1000, 10**6))
        cost = rnd.choice((0, 1, 2, 5))
        plans = [
            a_plan(*limits, cost=cost)
            for limits in ((Limit("20/second", lease=20), Limit("50/minute", lease=9)), ("20/second", "50/minute"))
        ]
        one, other = (store.spend(plan) for store, plan in zip((leased, plain), plans, strict=True))
        assert (one.now, decide(plans[0], one).windows) == (other.now, decide(plans[1], other).windows)


# --- Lua and Python agree ---------------------------------------------------------------------------------------------


def a_leased_bucket(rnd: random.Random) -> Bucket:
    """Limits out of the whole range that is allowed, with a lease each."""
    limits = [a_limit(rnd, rnd.choice((1, 7, 60, 3600, 86400, 366 * 86400))) for _ in range(rnd.choice((1, 1, 2, 3)))]
    lease = rnd.choice((1, 2, 3, 50, 1023, 1024, 10**6))
    return Bucket(tuple(Limit(str(limit), lease=min(lease, limit.burst)) for limit in limits))


@given(rnd=RANDOM)
def test_python_knows_what_lua_took_property(client: redis.Redis, rnd: random.Random) -> None:
    """After each call the bucket owes to the tick what the process believes that it took; what goes back is exact too."""
    for _ in range(5):
        bucket = a_leased_bucket(rnd)
        world = World(client, rnd, [bucket])
        process, (key,) = Process(world), world.buckets
        least = min(limit.burst for limit in bucket.limits)
        world.spend(world.plan(rnd.choice((0, 1, least // 2, least - 1, least))))
        world.advance(rnd.choice((0, 1, 10**6 + 1, 10**9)))
        plan = world.plan(rnd.choice((1, 1, 2, least // 3 or 1)))
        (reading,) = process.ask(plan)
        owed, held = world.owed(key), process.store.leases._held.get(key)
        expected = list(reading.buckets[0].after if reading.admitted else reading.buckets[0].before)
        if held:
            expected = [debt + one - two for debt, one, two in zip(expected, held.ahead, held.debts, strict=True)]
        assert owed == expected
        room = [(full - debt) // weight for full, debt, weight in zip(bucket.capacities, owed, bucket.weights, strict=True)]
        assert process.held(key) == bucket.lease or min(room) == 0 or not reading.admitted
        world.forget()


@given(rnd=RANDOM)
def test_giving_back_is_exact_property(client: redis.Redis, rnd: random.Random) -> None:
    """What goes back is what was left less what drains on its way, but for a time of grace, under another count too."""
    for _ in range(5):
        bucket = a_leased_bucket(rnd)
        world = World(client, rnd, [bucket])
        (key,) = world.buckets
        least = min(limit.burst for limit in bucket.limits)
        world.spend(world.plan(rnd.choice((least, least // 2, 1))))
        on_its_way = rnd.choice((0, 1, 333_333, 10**6))
        back = [rnd.randint(0, limit.burst * limit.period_us) for limit in bucket.limits]
        grace = [rnd.choice((0, 0, 1, 333_000, 10**6)) for _ in back]
        as_of, before, counts = world.now + rnd.choice((0, 0, -5, 7)), world.owed(key), list(bucket.counts)
        if rnd.random() < 0.5:  # somebody knows the first limit under another count
            other = Limit(f"{max(1, counts[0] - 1)} per {bucket.limits[0].period} seconds burst 1")
            counts[0] = other.count
            world.spend(Plan((Charge(key, bucket_of(other), 0, enforced=True, rule=None),), "peek"))
        world.advance(on_its_way)
        lease = Adjustment(0, as_of, back, grace)
        world.spend(Plan((Charge(key, bucket, 0, enforced=False, rule=None, adjustment=lease),), "adjust"))
        gone_us = [max(0, max(0, world.now - as_of) - us) for us in grace]
        left = [max(0, ticks - us * count) for ticks, us, count in zip(back, gone_us, bucket.counts, strict=True)]
        drained = [max(0, debt - on_its_way * count) for debt, count in zip(before, counts, strict=True)]
        assert world.owed(key) == [max(0, debt - ticks) for debt, ticks in zip(drained, left, strict=True)]
        world.forget()


# --- several buckets in one plan --------------------------------------------------------------------------------------


def test_without_a_lease_on_every_bucket_each_request_asks(world: Callable[..., World]) -> None:
    """A rule without a lease beside one with a lease is asked every time, and both are charged or none."""
    here = world(SLOW, Limit("3/day"))
    process = Process(here)
    allowed = [process.ask(here.plan())[0].admitted for _ in range(5)]
    assert allowed == [True, True, True, False, False]
    assert (here.calls, requests(here, 1)) == (5, 3)
    assert requests(here) == 3, "the lease went back with the refusal"


def test_two_leases_are_used_together(world: Callable[..., World]) -> None:
    """A plan is admitted without asking as long as what is held of all its buckets suffices, and charged to all of them."""
    here = world(SLOW, Limit("100000 per 366 days", lease=5))
    process, (first, second) = Process(here), here.buckets
    process.ask(here.plan())
    assert (process.held(first), process.held(second)) == (50, 5)
    assert process.use_up(here.plan()) == 4
    assert (process.held(first), process.held(second)) == (46, 1)
    assert process.use_up(here.plan(keys=[first])) == 45
    calls = here.calls
    process.ask(here.plan())
    assert here.calls == calls + 1
    assert (requests(here), requests(here, 1)) == (5 + 45 + 1 + 50, 6 + 5)


def test_a_refusal_of_one_bucket_leases_from_none(world: Callable[..., World]) -> None:
    """Where one bucket refuses, nothing is taken from the other, neither now nor in advance."""
    here = world(SLOW, Limit("3/day", lease=3))
    here.spend(here.plan(3, keys=list(here.buckets)[1:]))
    process = Process(here)
    assert [reading.admitted for reading in process.ask(here.plan())] == [False]
    assert (requests(here), len(process.store.leases)) == (0, 0)


def test_a_shadow_rule_is_leased_too(world: Callable[..., World]) -> None:
    """A bucket that may not refuse is served from its lease, and asked about when it has no room."""
    here = world(SLOW, Limit("8/day", lease=4))
    process = Process(here)
    plan = here.plan()
    plan = plan._replace(charges=(plan.charges[0], plan.charges[1]._replace(enforced=False)))
    decisions = [decide(plan, process.ask(plan)[0]) for _ in range(12)]
    assert [decision.allowed for decision in decisions] == [True] * 12
    assert [decision.shadow for decision in decisions] == [False] * 7 + [True] * 5
    assert (requests(here, 1), here.local > 0) == (7, True)


def test_a_changed_limit_does_not_use_the_old_lease(world: Callable[..., World]) -> None:
    """What was taken under a limit that has changed since is given back, and the new limit asks until then."""
    here = world(Limit("1000/day", lease=50))
    process, (key,) = Process(here), here.buckets
    process.ask(here.plan())
    here.buckets[key] = here.truths[key].bucket = bucket_of(Limit("2000/day", lease=10))
    process.ask(here.plan())
    process.ask(here.plan())
    assert (here.calls, here.local) == (3, 0)
    here.advance(1_000_100)  # by a clock that runs a little slow
    process.give_back()
    assert requests(here) == 3
    process.ask(here.plan())
    assert process.use_up(here.plan()) == 9


def test_a_reset_while_a_lease_is_out_lets_through_no_more_than_that(world: Callable[..., World]) -> None:
    """After a reset the lease is used up or given back, not both, and the bucket never owes less than nothing."""
    here = world(Limit("100/day", lease=50))
    process, (key,) = Process(here), here.buckets
    process.ask(here.plan())
    process.send([here.plan()._replace(verb="reset")])
    assert requests(here) == 0
    process.give_back(age=0)
    assert (requests(here), process.use_up(here.plan())) == (0, 0)
    here.truths[key].debts = [0]
    assert [reading.admitted for reading in process.ask(here.plan(100))] == [True]


# --- one lease at a time ----------------------------------------------------------------------------------------------


def sent(store: replies.RedisStoreBase, *plans: Plan) -> wire.Call:
    call = wire.Call(plans)
    store.outgoing(call)
    return call


def test_only_one_call_at_a_time_takes_a_lease(world: Callable[..., World]) -> None:
    """While a call that takes a lease is on its way, others about the same bucket take none; if it gets lost, the next does."""
    here = world(SLOW)
    store = Process(here).store
    first, second = sent(store, here.plan(), here.plan()), sent(store, here.plan())
    assert [bool(plan.charges[0].adjustment) for plan in (*first.plans, *second.plans)] == [True, False, False]
    store.unanswered(second)
    assert not sent(store, here.plan()).plans[0].charges[0].adjustment
    store.unanswered(first)
    assert sent(store, here.plan()).plans[0].charges[0].adjustment


def test_a_lost_give_back_does_not_allow_two_leases_at_a_time(world: Callable[..., World]) -> None:
    """That a lease could not be given back says nothing about the call that takes the next one."""
    here = world(SLOW)
    process = Process(here)
    process.ask(here.plan())
    ended = process.store.leases.ended(process.clock(), 0)
    given_back, taking = sent(process.store, *ended), sent(process.store, here.plan())
    assert taking.plans[0].charges[0].adjustment
    process.store.unanswered(given_back)
    assert not sent(process.store, here.plan()).plans[0].charges[0].adjustment


def test_a_crowd_takes_one_lease(door: Door, own_redis: RedisServer) -> None:
    """A hundred requests at once take at most what they need and one lease more."""
    plans = [a_plan()] * 100
    assert admitted(plans, door.crowd(plans)) == 100
    assert 100 <= owed(own_redis) <= 150


def test_a_lease_is_asked_for_again_when_the_call_was_lost(door: Door, own_redis: RedisServer) -> None:
    """A call that fails leaves no lease, and the next one takes one."""
    with own_redis.frozen(), pytest.raises(StoreError):
        door.spend(a_plan(), 0.1)
    assert not door.store.leases
    assert eventually(lambda: door.spend(a_plan()).admitted and len(door.store.leases) == 1)


class OneWay(Tunnel):
    """Passes on what is asked; when told to ``cut``, it ends the connection instead of passing on the next answer."""

    cut = False

    def _step_down(self, source: Any, sink: Any) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.cut and source in self._ends[1::2]:
                    self.cut = False
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_lease_is_given_back_once_though_the_connection_is_cut(own_redis: RedisServer) -> None:
    """When a connection ends before it is known whether Redis took a lease back, it is not given back once more."""

    async def give_back(tunnel: OneWay) -> StoreError | None:
        store = AsyncRedisStore(tunnel.url)
        await store.aspend(a_plan(), PATIENT)
        tunnel.cut = True
        here = store._loops[asyncio.get_running_loop()]
        (given_back,) = here.give_back(age=0)
        await asyncio.wait([given_back])
        assert not tunnel.cut
        await store.aclose()
        return given_back.exception()

    with contextlib.closing(Door(RedisStore(own_redis.url))) as door:
        door.spend(a_plan("100000 per 366 days", cost=200))
        with contextlib.closing(OneWay(own_redis.socket)) as tunnel:
            assert type(asyncio.run(give_back(tunnel))) is StoreError
        assert owed(own_redis) == 201


def test_a_request_sent_once_more_gives_back_once(own_redis: RedisServer) -> None:
    """When a request that was to exchange a lease is sent again on a new connection, the lease is not given back again."""

    async def exchange(tunnel: OneWay) -> Reading:
        store = AsyncRedisStore(tunnel.url)
        await store.aspend(a_plan(), PATIENT)
        tunnel.cut = True
        reading = await store.aspend(a_plan(cost=60), PATIENT)
        assert not tunnel.cut
        await store.aclose()
        return reading

    with contextlib.closing(Door(RedisStore(own_redis.url))) as door:
        door.spend(a_plan("100000 per 366 days", cost=200))
        with contextlib.closing(OneWay(own_redis.socket)) as tunnel:
            assert asyncio.run(exchange(tunnel)).admitted
        assert owed(own_redis) == 200 + 1 + 60 + 50 + 60  # all that the first call took is left to drain


# --- real stores ------------------------------------------------------------------------------------------------------


def close_store(door: Door) -> None:
    """Close the store alone: its event loop goes on."""
    if isinstance(door, AsyncDoor):
        door.run(door.store.aclose())
    else:
        door.store.close()


def test_a_lease_saves_calls(door: Door, own_redis: RedisServer) -> None:
    """Five hundred requests one after another take eleven calls, and one more as the script is not known yet."""
    plan = a_plan(Limit("100000/day", lease=50))
    decisions = [decide(plan, door.spend(plan)) for _ in range(500)]
    assert all(decision.allowed for decision in decisions)
    assert min(decision.remaining for decision in decisions) > 0
    assert calls_to(own_redis) <= 12
    close_store(door)
    assert owed(own_redis, "100000/day") in range(500, 513)  # a second's worth is spared each time


def test_threads_share_a_lease(own_redis: RedisServer) -> None:
    """Eight threads of one process use one lease, every request is counted once, and at most one lease goes unused."""
    with contextlib.closing(RedisStore(own_redis.url)) as store, ThreadPoolExecutor(8) as pool:
        readings = list(pool.map(lambda _: store.spend(a_plan(Limit("400/day", lease=20)), PATIENT), range(1000)))
        allowed = sum(reading.admitted for reading in readings)
    assert 379 <= allowed <= 400
    assert calls_to(own_redis) < 400
    assert owed(own_redis, "400/day") == allowed


def test_without_a_lease_every_request_asks(door: Door, own_redis: RedisServer) -> None:
    """Leases are off unless somebody asks for them."""
    for _ in range(20):
        assert door.spend(a_plan("100000/day")).admitted
    assert calls_to(own_redis) >= 20
    assert not door.store.leases


async def silent_after(store: AsyncRedisStore, requests: int) -> None:
    """Some requests, and then none for as long as the event loop has anything left to do for them."""
    for _ in range(requests):
        await store.aspend(a_plan(), PATIENT)
    timer = store._loops[asyncio.get_running_loop()]._timer
    await asyncio.sleep(timer.when() - asyncio.get_running_loop().time() + 0.05)
    assert store._loops[asyncio.get_running_loop()]._timer is None


def test_a_lease_goes_back_when_a_process_falls_silent(door: Door, own_redis: RedisServer) -> None:
    """About a second after it was taken, what is left of a lease is back, and nothing goes on running for it."""
    start, began = time.monotonic(), Began()
    if isinstance(door, AsyncDoor):
        door.run(silent_after(door.store, 20))
    else:
        for _ in range(20):
            door.spend(a_plan())
        assert eventually(lambda: "limitgate-leases" not in began.names())
    assert 0.9 < time.monotonic() - start < 1.1 + SLACK
    assert owed(own_redis) == 20


def test_closing_gives_back_at_once(door: Door, own_redis: RedisServer) -> None:
    """A store that is closed leaves nothing leased."""
    for _ in range(20):
        door.spend(a_plan())
    assert owed(own_redis) == 51
    close_store(door)
    assert owed(own_redis) == 20
    assert door.spend(a_plan()).admitted


def test_closing_without_redis_takes_no_longer_than_connecting(door: Door, own_redis: RedisServer) -> None:
    """A store whose Redis is gone can be closed, leases or not."""
    door.spend(a_plan())
    own_redis.kill()
    start = time.monotonic()
    close_store(door)
    assert time.monotonic() - start < 2 + SLACK
    own_redis.start()


def test_a_lease_that_is_learned_of_as_the_thread_ends_goes_back(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that comes just when the thread that gives back has found none is given back in time all the same."""
    store = RedisStore(own_redis.url)
    pause, late = store.leases.pause, [a_plan(cost=3)]

    def ends_just_before_another_comes(at: float) -> float | None:
        left = pause(at)
        if left is None and late:
            marks: Any = background._made["marks"]
            marks.is_background = False  # as if another thread asked
            store.spend(late.pop(), PATIENT)
            marks.is_background = True
        return left

    monkeypatch.setattr(store.leases, "pause", ends_just_before_another_comes)
    store.spend(a_plan(), PATIENT)
    assert eventually(lambda: not late)
    assert eventually(lambda: owed(own_redis) == 4)
    monkeypatch.undo()
    store.close()


def test_nothing_is_given_back_beyond_a_full_bucket(own_redis: RedisServer) -> None:
    """Where somebody has reset the bucket meanwhile, what goes back leaves it full, and readable."""
    limit = Limit("100003 per 366 days", lease=50)
    with contextlib.closing(RedisStore(own_redis.url)) as other:
        store = RedisStore(own_redis.url)
        store.spend(a_plan(limit), PATIENT)
        other.spend(a_plan(limit, verb="reset"), PATIENT)
        other.spend(a_plan("9/day"), PATIENT)
        store.close()
        assert other.spend(a_plan(limit, verb="peek"), PATIENT).buckets[0].before == [0]
        assert other.spend(a_plan("9/day", verb="peek"), PATIENT).buckets[0].before[0] > 0
        assert other.unreadable == 0


def test_without_another_thread_a_lease_is_used_all_the_same(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started, nobody who is admitted hears of it, and the lease goes back when one can."""
    store = RedisStore(own_redis.url)
    store.spend(a_plan("9/day"), PATIENT)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert store.spend(a_plan(), PATIENT).admitted
    monkeypatch.undo()
    assert store.spend(a_plan(), PATIENT).admitted
    store.spend(a_plan("9/day"), PATIENT)
    assert eventually(lambda: owed(own_redis) == 2)
    store.close()


def test_a_crowd_is_not_refused_what_one_of_it_took_in_advance(door: Door) -> None:
    """Those who ask in the same call as the one that leases get what it took, down to the last one, which is kept."""
    plans = [a_plan(Limit("70 per 366 days", lease=50), key="crowd")] * 200
    door.spend(a_plan("9/day"))
    assert 69 <= admitted(plans, door.crowd(plans)) <= 70
    plans = [a_plan(Limit("100 per 366 days", lease=60), key="another")] * 64
    assert admitted(plans, door.crowd(plans)) == 64


def test_a_forked_child_does_not_use_its_parents_lease(own_redis: RedisServer) -> None:
    """After a fork the lease is the parent's alone: the child neither uses it nor gives it back."""
    assert at_best(lambda: shared_after_fork(own_redis)) == []


def shared_after_fork(own_redis: RedisServer) -> list[str]:
    """What is wrong with the calls, if the lease has not ended in the meantime, and with what is owed."""
    with own_redis.client() as client:
        client.flushall()
    door = Door(RedisStore(own_redis.url))
    door.spend(a_plan())
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            before = len(door.store.leases)
            door.store.close()
            door.spend(a_plan())
            own = sum(thread.name == "limitgate-leases" for thread in threading.enumerate())
            os._exit(owed(own_redis) if (before, own) == (0, 1) else 98)
        os._exit(99)
    found = [("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 102)]
    calls_before = calls_to(own_redis)
    assert door.spend(a_plan()).admitted
    found.append(("calls", calls_to(own_redis) - calls_before, 0))
    door.close()
    found.append(("owed", owed(own_redis), 2 + 51))
    return [f"{what}: {seen}, not {expected}" for what, seen, expected in found if seen != expected]


# --- real processes ---------------------------------------------------------------------------------------------------

RATE, BURST, LONG = 200, 50, 1.5
SHARED = Limit(f"{RATE}/second burst {BURST}", lease=20)


def test_real_processes_admit_no_more_than_their_limit(own_redis: RedisServer) -> None:
    """Three processes that hammer at one limit get what it allows, in no interval more, and most of it."""

    def complaints() -> list[str]:
        found = hammered(own_redis)
        for since, _ in found:
            ends = sorted(after for before, after in found if before >= since)
            for number, until in enumerate(ends, 1):
                assert number <= BURST + RATE * (until - since) * 1.0005 + 1
        return [] if len(found) > 0.8 * (BURST + RATE * LONG) else [f"only {len(found)}"]

    assert at_best(complaints) == []


def hammered(server: RedisServer) -> list[tuple[float, float]]:
    """When each admitted call of three processes began and ended."""
    with server.client() as client:
        client.flushall()
    context = multiprocessing.get_context("spawn")
    together, spans = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=hammer, args=(server.url, a_plan(SHARED), LONG, together, spans), kwargs={"in_loop": place == 0})
        for place in range(3)
    ]
    for process in processes:
        process.start()
    found = sorted(span for _ in processes for span in spans.get(timeout=120))
    for process in processes:
        process.join()
    return found
