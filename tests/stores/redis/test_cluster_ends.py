"""What a store on a Redis Cluster holds and leaves behind: connections, threads and tasks; loops, forks and other seeds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limitgate import AsyncRedisStore, RedisStore, StoreError
from limitgate.limits.plan import Reading
from tests.stores.test_stores import AsyncDoor, Door, attempts
from tests.support.clusters import KINDS, charge, ends, key_on, nodes_of, plan, settled, used, visitors
from tests.support.crowds import ask, begin
from tests.support.proxy import PATIENT, in_a_loop, until
from tests.support.redis_cluster import RedisCluster
from tests.support.threads import Began


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def door(request: pytest.FixtureRequest, redis_cluster: RedisCluster) -> Iterator[Door]:
    """A store of either kind that asks Redis every time."""
    with contextlib.closing(request.param(redis_cluster.url, local_refusals=False)) as door:
        yield door


def test_a_closed_store_leaves_nothing(door: Door, redis_cluster: RedisCluster) -> None:
    """After closing there is no connection to any node, no thread and no task; the store can be used again."""
    began = Began()
    before = visitors(redis_cluster)
    charges = [charge(key_on(place)) for place in (0, 1, 2)]
    for _ in range(2):
        door.crowd([plan(*charges)] * 20)
        assert visitors(redis_cluster) - before
        if isinstance(door, AsyncDoor):
            door.run(door.store.aclose())
            tasks = door.run(_tasks())
            assert tasks == []
        else:
            door.close()
        assert settled(door, lambda: visitors(redis_cluster) <= before)
    assert settled(door, lambda: not _ours(began))
    gc.collect()


async def _tasks() -> list[Any]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _ours(began: Began) -> list[str]:
    return [name for name in began.names() if name.startswith("limitgate")]


@in_a_loop
async def test_closing_gives_back_first(redis_cluster: RedisCluster) -> None:
    """What a refused request took is given back even if the store is closed right after the refusal."""
    loose, tight = charge(key_on(0), "9/day"), charge(key_on(1), "1/day")
    async with contextlib.aclosing(AsyncRedisStore(redis_cluster.url)) as store:
        assert await ask(store, plan(tight)) == [True]
        assert await ask(store, plan(loose, tight)) == [False]
    assert store.not_given_back == 0
    async with contextlib.aclosing(AsyncRedisStore(redis_cluster.url)) as fresh:
        assert (await fresh.aspend(plan(loose, verb="peek"), PATIENT)).buckets[0].before[0] < loose.bucket.weights[0] / 1000


def test_a_loop_that_ends_gives_back_first(redis_cluster: RedisCluster) -> None:
    """A loop that ends without closing the store leaves nothing behind that a refused request took, and no connection."""
    before = visitors(redis_cluster)
    loose, tight = charge(key_on(0), "9/day"), charge(key_on(1), "1/day")
    store = AsyncRedisStore(redis_cluster.url, local_refusals=False)

    @in_a_loop
    async def visit() -> None:
        await ask(store, plan(loose, tight))

    for _ in range(4):
        visit()
    with contextlib.closing(KINDS["threads"](redis_cluster.url)) as door:
        assert used(door, loose, tight) == [1, 1]
    assert store.not_given_back == 0
    assert settled(door, lambda: visitors(redis_cluster) <= before)


@pytest.mark.parametrize("turns", range(1, 7))
@in_a_loop
async def test_closing_fails_what_still_waits(redis_cluster: RedisCluster, turns: int) -> None:
    """Requests on their way to several nodes fail when the store is closed, and neither task nor connection is left."""
    before, store = visitors(redis_cluster), AsyncRedisStore(redis_cluster.url)
    plans = [plan(*[charge(key_on(place)) for place in (0, 1, 2)]) for _ in range(20)]
    await ask(store, *plans)
    requests = begin(store, *plans)
    for _ in range(turns):
        await asyncio.sleep(0)
    await store.aclose()
    await asyncio.gather(*requests, return_exceptions=True)
    assert await _tasks() == []
    await until(lambda: visitors(redis_cluster) <= before)


def test_loops_side_by_side(redis_cluster: RedisCluster) -> None:
    """Event loops in several threads share a store on a cluster, and exactly the limit is admitted."""
    store, shared = AsyncRedisStore(redis_cluster.url), charge(key_on(1), "50/day")
    other = charge(key_on(2), "9000/day")

    @in_a_loop
    async def visit() -> None:
        answers.extend(await ask(store, *[plan(shared)] * 40, *[plan(other, shared)] * 40))
        await store.aclose()

    answers: list[Any] = []
    with ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(visit) for _ in range(5)]:
            done.result()
    with contextlib.closing(KINDS["threads"](redis_cluster.url)) as door:
        assert answers.count(True) == used(door, shared)[0] == 50


def test_a_forked_child_makes_its_own_connections(redis_cluster: RedisCluster) -> None:
    """After a fork, parent and child share the buckets of a cluster but no connection."""
    began, door = Began(), Door(RedisStore(redis_cluster.url))
    charges = [charge(key_on(place)) for place in (0, 1, 2)]
    door.spend(plan(*charges))
    assert settled(door, lambda: not _ours(began))
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os._exit(len([None for _ in range(20) if door.spend(plan(*charges)).admitted]))
        os._exit(99)
    allowed = [door.spend(plan(*charges)).admitted for _ in range(20)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == sum(allowed) == 20
    assert used(door, *charges) == [41] * 3
    door.close()


def test_whoever_goes_away_is_charged_everywhere_or_nowhere(redis_cluster: RedisCluster) -> None:
    """Requests that are cancelled at any stage leave their charges on all nodes or on none."""
    charges = [charge(key_on(place), f"{9000 if place else 40}/day") for place in (0, 1, 2)]

    async def visit(store: AsyncRedisStore, turns: int) -> None:
        requests = begin(store, *[plan(*charges)] * 30)
        for _ in range(turns):
            await asyncio.sleep(0)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    with contextlib.closing(AsyncDoor(AsyncRedisStore(redis_cluster.url, local_refusals=False))) as door:
        for turns in range(8):
            door.run(visit(door.store, turns))
        assert settled(door, lambda: len(set(used(door, *charges))) == 1), used(door, *charges)


def test_a_single_servers_url_says_what_is_expected(redis_cluster: RedisCluster) -> None:
    """Who points redis:// at a node of a cluster is told which URL to use."""
    for kind in KINDS.values():
        with contextlib.closing(kind(f"redis://127.0.0.1:{redis_cluster.masters[0].port}")) as door:
            errors = attempts(door, [plan(charge(key_on(1)))])
            assert ends(errors) == ["reply"]
            assert "redis+cluster://" in str(errors[0])


def test_seeds_by_another_name(redis_cluster: RedisCluster) -> None:
    """Nodes that call themselves otherwise than the URL does are found, and the URL's addresses are let go."""
    url = "redis+cluster://" + ",".join(f"localhost:{node.port}" for node in redis_cluster.masters)
    charges = [charge(key_on(place)) for place in (0, 1, 2)]
    before = visitors(redis_cluster)
    for kind in KINDS.values():
        with contextlib.closing(kind(url)) as door:
            assert door.spend(plan(*charges)).admitted
            assert settled(door, lambda: len(visitors(redis_cluster) - before) <= 3)
            door.idle(0.3)
            assert {host for host, _ in nodes_of(door)} == {"127.0.0.1"}
        assert settled(door, lambda: visitors(redis_cluster) <= before)


def test_one_seed_is_enough(redis_cluster: RedisCluster) -> None:
    """Any single node of the URL leads to all others."""
    for kind in KINDS.values():
        with contextlib.closing(kind(f"redis+cluster://127.0.0.1:{redis_cluster.masters[1].port}")) as door:
            answers: list[Reading | StoreError] = attempts(door, [plan(charge(key)) for key in map(key_on, (0, 1, 2))])
            assert ends(answers) == [True] * 3
