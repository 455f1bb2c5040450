"""Batching on asyncio: who shares a call, what waits, and that sharing changes no decision."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from limitgate import MemoryStore
from limitgate.limits.plan import Plan, Reading
from limitgate.stores.redis import wire
from limitgate.stores.redis.aio.batcher import MAX_BATCH, MAX_FLYING
from tests.algorithms import test_differential as differential
from tests.support.clock import Clock
from tests.support.crowds import a_plan, ask, begin, ends, store_at, turns, used
from tests.support.effort import EXAMPLES
from tests.support.proxy import PATIENT, Proxy, calls_to, in_a_loop
from tests.support.redis_server import RedisServer

SLACK = 3.0
"""Seconds that a busy machine may add to a deadline."""


# --- who shares a call ------------------------------------------------------------------------------------------------


@in_a_loop
async def test_requests_of_one_turn_share_one_call(redis_server: RedisServer) -> None:
    """What arrives in the same turn of the event loop goes to Redis in a single call, in the next turn in another."""
    async with store_at(redis_server.url) as store:
        await ask(store, a_plan())
        before = calls_to(redis_server)
        assert await ask(store, *[a_plan() for _ in range(MAX_BATCH)]) == [True] * MAX_BATCH
        assert calls_to(redis_server) - before == 1
        assert await ends(await turns(store, [a_plan()] * 9, [a_plan()] * 9)) == [True] * 18
        assert calls_to(redis_server) - before == 3


@in_a_loop
async def test_a_thousand_at_once_take_few_calls(redis_server: RedisServer) -> None:
    """A thousand simultaneous requests are all decided, in hardly more calls than they fill."""
    async with store_at(redis_server.url) as store:
        await ask(store, a_plan())
        before, plan = calls_to(redis_server), a_plan("900/day")
        assert await ask(store, *[plan] * 1000) == [True] * 900 + [False] * 100
        assert calls_to(redis_server) - before <= math.ceil(1000 / MAX_BATCH) + 1


@in_a_loop
async def test_a_call_carries_no_more_than_its_share(redis_server: RedisServer) -> None:
    """No call is about more requests than the bound, and none is sent half empty while others wait."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        assert await ask(store, *[a_plan() for _ in range(3 * MAX_BATCH + 5)]) == [True] * (3 * MAX_BATCH + 5)
        assert [size for size, call in zip(proxy.sizes, proxy.calls, strict=True) if call[0] == b"EVALSHA"] == [
            *[MAX_BATCH] * 3,
            5,
        ]


@pytest.mark.parametrize(("limit", "crowd"), [(1, 2), (30, 60), (64, 65), (100, 300), (500, 1000)])
@in_a_loop
async def test_the_first_to_come_are_the_first_served(redis_server: RedisServer, limit: int, crowd: int) -> None:
    """Of many simultaneous requests exactly those are admitted that arrived first, in one call or in several."""
    async with store_at(redis_server.url) as store:
        plan = a_plan(f"{limit}/day")
        assert await ask(store, *[plan] * crowd) == [True] * limit + [False] * (crowd - limit)


@pytest.mark.parametrize("limit", [7, 40, 150])
@in_a_loop
async def test_order_holds_over_many_turns(redis_server: RedisServer, limit: int) -> None:
    """Requests that arrive while earlier calls are on their way, or wait to be sent, are decided in order all the same."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        plan, crowds = a_plan(f"{limit}/day"), 2 * MAX_FLYING
        requests = await turns(store, *[[plan] * 5] * crowds)
        for _ in range(crowds):
            proxy.release(1)
            await asyncio.sleep(0)
            requests += begin(store, plan)
        proxy.release()
        assert await ends(requests) == [True] * limit + [False] * (6 * crowds - limit)


@in_a_loop
async def test_a_second_call_does_not_wait_for_the_first_reply(redis_server: RedisServer) -> None:
    """Calls follow each other on one connection while the first is not answered."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known = len(proxy.calls)
        requests = await turns(store, [a_plan()], [a_plan(), a_plan()], [a_plan()])
        await proxy.called(known + 3)
        assert proxy.sizes[known:] == [1, 2, 1]
        assert not any(request.done() for request in requests)
        proxy.release()
        assert await ends(requests) == [True] * 4
        assert len(proxy.lines) == 1


@in_a_loop
async def test_a_full_call_does_not_wait_for_the_turn_to_end(redis_server: RedisServer) -> None:
    """Redis begins with the first of a large crowd while the others are still arriving."""
    async with store_at(redis_server.url) as store:
        await ask(store, a_plan())
        (here,) = store._loops.values()
        batcher = here.servers
        (connection,) = batcher._connections
        requests = [batcher.spend(a_plan(), PATIENT) for _ in range(MAX_BATCH - 1)]
        assert len(connection.session.flying) == 0
        requests += [batcher.spend(a_plan(), PATIENT) for _ in range(2)]
        assert [len(batch.plans) for batch in connection.session.flying] == [MAX_BATCH]
        assert all(reading.admitted for reading in await asyncio.gather(*requests))


# --- what waits -------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_so_many_calls_are_on_their_way_and_no_more(redis_server: RedisServer) -> None:
    """Beyond the bound on calls requests wait; each reply lets one more call out, in order."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known, plans = len(proxy.calls), [a_plan() for _ in range(MAX_FLYING + 4)]
        requests = await turns(store, *[[plan] for plan in plans])
        await proxy.called(known + MAX_FLYING)
        crowd = [a_plan() for _ in range(2 * MAX_BATCH)]
        requests += begin(store, *crowd)
        await asyncio.sleep(0.02)
        assert len(proxy.calls) == known + MAX_FLYING
        proxy.release(1)
        await proxy.called(known + MAX_FLYING + 1)
        await asyncio.sleep(0.02)
        assert proxy.sizes[known:] == [1] * MAX_FLYING + [MAX_BATCH]
        proxy.release()
        assert await ends(requests) == [True] * len(requests)
        asked = [key.decode() for call in proxy.calls[known:] for key in call[3 : 3 + int(call[2])]]
        assert asked == [plan.charges[0].key for plan in plans + crowd]


@in_a_loop
async def test_requests_of_many_buckets_share_a_call_with_fewer(redis_server: RedisServer) -> None:
    """Nobody joins a call that would cost Redis more than 2 ms, so that none keeps it busy for long."""
    plans = [Plan(tuple([charge for _ in range(60) for charge in a_plan().charges])) for _ in range(5)]
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        known = len(proxy.calls)
        assert await ask(store, *plans) == [True] * 5
        assert proxy.sizes[known:] == [180, 120]


@in_a_loop
async def test_a_full_queue_takes_no_more_until_there_is_room(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request beyond the queue's bound fails at once and alone; when replies have come there is room again."""
    most = 2000
    monkeypatch.setattr("limitgate.stores.redis.aio.batcher.MAX_QUEUED", most)
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known, plan = len(proxy.calls), a_plan(f"{most}/day")
        requests = begin(store, *[plan] * (MAX_FLYING * MAX_BATCH))
        await proxy.called(known + MAX_FLYING)
        requests += begin(store, *[plan] * most)
        assert await ask(store, plan, plan) == ["overload"] * 2
        proxy.release()
        assert await ends(requests) == [True] * most + [False] * (MAX_FLYING * MAX_BATCH)
        assert await ask(store, plan, a_plan()) == [False, True]


@in_a_loop
async def test_who_goes_away_before_sending_is_not_charged(redis_server: RedisServer) -> None:
    """A request that is cancelled before it was sent, in its own turn or in the queue, is never charged."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        left, kept = uuid4().hex, uuid4().hex
        requests = []
        for _ in range(MAX_FLYING + 4):
            crowd = begin(store, *[a_plan(key=key) for key in (left, kept, left)])
            await asyncio.sleep(0)  # now they have asked, and their turn is about to end
            crowd[0].cancel()
            crowd[2].cancel()
            requests += crowd
        late = await turns(store, [a_plan(key=left)] * 3)
        for request in late:
            request.cancel()
        proxy.release()
        assert await ends(requests + late) == ["cancelled", True, "cancelled"] * (MAX_FLYING + 4) + ["cancelled"] * 3
        assert (await used(store, left), await used(store, kept)) == (0, MAX_FLYING + 4)


@in_a_loop
async def test_who_goes_away_after_sending_disturbs_nobody(redis_server: RedisServer) -> None:
    """A request that is cancelled while its call is on its way leaves its neighbours their own answers."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        known, keys = len(proxy.calls), [uuid4().hex for _ in range(90)]
        plans = [a_plan("99/day", key=key, cost=cost) for cost, key in enumerate(keys)]
        requests = await turns(store, plans[:30], plans[30:60], plans[60:])
        await proxy.called(known + 3)
        for request in requests[::2]:
            request.cancel()
        proxy.release()
        assert await ends(requests) == ["cancelled", True] * 45
        assert [await used(store, key, "99/day") for key in keys] == list(range(90))
        assert len(proxy.lines) == 1


@in_a_loop
async def test_who_is_late_before_sending_is_not_charged(redis_server: RedisServer) -> None:
    """A request whose time is up while it waits to be sent fails in time and is never sent; others that wait are."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        late, patient = a_plan(), a_plan()
        flying = await turns(store, *[[a_plan()]] * MAX_FLYING)
        begun = time.monotonic()
        waiting = begin(store, patient, patient)
        assert await ask(store, late, late, timeout=0.1) == ["timeout"] * 2
        assert 0.09 <= time.monotonic() - begun < 0.1 + SLACK
        proxy.release()
        assert await ends(flying + waiting) == [True] * (MAX_FLYING + 2)
        assert (await used(store, late.charges[0].key), await used(store, patient.charges[0].key)) == (0, 2)


@in_a_loop
async def test_who_is_late_makes_room(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose time is up leave the queue to others, though no reply has come."""
    monkeypatch.setattr("limitgate.stores.redis.aio.batcher.MAX_QUEUED", 20)
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        requests = await turns(store, *[[a_plan()]] * MAX_FLYING)
        assert await ask(store, *[a_plan()] * 21, timeout=0.05) == [*["timeout"] * 20, "overload"]
        requests += await turns(store, [a_plan()] * 20)
        proxy.release()
        assert await ends(requests) == [True] * (MAX_FLYING + 20)


class Drowsy(Proxy):
    """Says nothing to those who connect until it is woken."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server)
        self.is_awake = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.is_awake.wait()
        await super()._serve(reader, writer)


@in_a_loop
async def test_who_is_late_before_there_is_a_connection_is_not_charged(redis_server: RedisServer) -> None:
    """While a connection is still being made, a request fails in time and is not sent when it is there."""
    async with Drowsy(redis_server) as proxy, store_at(proxy.url) as store:
        plan = a_plan()
        first = begin(store, plan)
        assert await ask(store, plan, timeout=0.05) == ["timeout"]
        assert not first[0].done()
        proxy.is_awake.set()
        assert await ends(first) == [True]
        assert await used(store, plan.charges[0].key) == 1


@pytest.mark.parametrize("order", [(0.1, 0.3), (0.3, 0.1)])
@in_a_loop
async def test_everybody_has_a_deadline_of_their_own(redis_server: RedisServer, order: tuple[float, float]) -> None:
    """Requests that wait for the same reply fail each in its own time, and who has time left gets the answer."""

    async def end(timeout: float) -> tuple[Any, float]:
        begun = time.monotonic()
        (found,) = await ask(store, plan, timeout=timeout)
        return found, time.monotonic() - begun - timeout

    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        plan = a_plan()
        patient = begin(store, plan)
        found = await asyncio.gather(*[end(timeout) for timeout in order])
        assert [fault for fault, _ in found] == ["timeout"] * 2
        assert all(-0.01 <= late < SLACK for _, late in found)
        assert not patient[0].done()
        proxy.release()
        assert await ends(patient) == [True]
        assert await ask(store, plan) == [True]
        assert len(proxy.lines) == 1


@in_a_loop
async def test_many_deadlines_cost_little(redis_server: RedisServer) -> None:
    """Thousands of requests with as many deadlines, all missed, leave the event loop free for others."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        plan, begun = a_plan(), time.process_time()
        requests = [asyncio.create_task(store.aspend(plan, 0.1 + number / 20_000)) for number in range(4000)]
        assert set(await ends(requests)) <= {"timeout", "connection"}  # which is given up if it all takes too long
        assert time.process_time() - begun < 3


# --- a batch is its plans one by one ----------------------------------------------------------------------------------


def batches(rnd: random.Random, store: MemoryStore, clock: Clock) -> Iterator[tuple[list[Plan], list[Reading]]]:
    """Plans that ask for the same few buckets, in batches, and what the memory store says to them one by one."""
    name = uuid4().hex
    buckets = {f"{name}:{number}": differential.some_windows(rnd) for number in range(rnd.choice((1, 2, 3, 5)))}
    waits = [0]
    for _ in range(rnd.choice((1, 3, 6))):
        clock.now += rnd.choice((*waits, *differential.FORWARD))
        plans = [differential.a_plan(rnd, buckets) for _ in range(rnd.choice((1, 2, 3, 8, 20)))]
        readings = [store.spend(plan) for plan in plans]
        yield plans, readings
        limits = [limit for plan in plans for charge in plan.charges for limit in charge.bucket.limits]
        debts = [debt for reading in readings for bucket in reading.buckets for debt in bucket.before]
        waits = [max(0, debt // limit.count + rnd.choice((-1, 0, 1))) for debt, limit in zip(debts, limits, strict=True)][:20]


def test_a_batch_is_its_plans_one_by_one(redis_server: RedisServer) -> None:
    """Thousands of plans, sent to the script in batches, get the readings that the memory store gives one after the other."""
    found = {"plans": 0, "refused": 0, "peek": 0, "reset": 0}
    with redis_server.client() as client:
        scripted = differential.Scripted(client)
        for seed in range(EXAMPLES):
            clock = Clock()
            for plans, readings in batches(random.Random(seed), MemoryStore(clock), clock):
                reply = client.execute_command("EVALSHA", scripted.sha, *wire.arguments(plans), clock.now)
                told, *complaints = wire.answers(plans, reply)
                assert told == readings, f"seed {seed}"
                assert not any(complaints)
                found["plans"] += len(plans)
                found["refused"] += sum(not reading.admitted for reading in readings)
                for plan in plans:
                    found[plan.verb] = found.get(plan.verb, 0) + 1
    assert min(found.values()) > 50, found
