"""A Redis Cluster of which parts fail: whom that concerns, who is told, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from redis.exceptions import TryAgainError

from limitgate import AsyncRedisStore, Limit, RedisStore, Rule, StoreError
from limitgate.limits.plan import Plan
from limitgate.stores.base import ConfigRequest
from limitgate.stores.redis.breaker import FAILURES
from limitgate.stores.redis.threads.connection import ListenDeadline, SyncConnection
from tests.stores.test_stores import Door, attempts
from tests.support.clusters import KINDS, charge, ends, key_on, keys_on, plan, settled, slot_of, tagged, used
from tests.support.crowds import begin, ends as crowd_ends
from tests.support.doors import SITES
from tests.support.proxy import PATIENT, in_a_loop
from tests.support.redis_cluster import RedisCluster, eventually
from tests.support.redis_server import free_port
from tests.support.server_features import REPLICAS, needs

BACK_WITHIN = 10.0
"""Seconds after which a store has found a node again, or its successor."""
SLACK = 3.0
"""Seconds that a busy machine may add to a deadline."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster that goes on without one of its nodes; each test leaves it whole."""
    cluster = RedisCluster(cluster_require_full_coverage="no")
    yield cluster
    cluster.stop()


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def open_door(request: pytest.FixtureRequest, cluster: RedisCluster) -> Iterator[Callable[..., Door]]:
    with contextlib.ExitStack() as opened:
        yield lambda url=cluster.url, **options: opened.enter_context(contextlib.closing(request.param(url, **options)))


@pytest.fixture
def door(open_door: Callable[..., Door]) -> Door:
    return open_door(local_refusals=False)


@pytest.fixture
def doors(cluster: RedisCluster) -> Iterator[list[Door]]:
    """Stores of both kinds, for tests that kill a node: it takes two seconds to come back."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(contextlib.closing(kind(cluster.url))) for kind in KINDS.values()]


@contextlib.contextmanager
def without(cluster: RedisCluster, place: int) -> Iterator[None]:
    """A master is killed. At the end it is back with its slots, whoever killed it last."""
    cluster.masters[place].kill()
    try:
        yield
    finally:
        revive(cluster, place)


def revive(cluster: RedisCluster, place: int) -> None:
    """Start a master that was killed, and wait until it serves its slots again, which takes it two seconds."""
    cluster.masters[place].start()
    eventually(cluster.is_whole, "the node to serve again")


def failure(door: Door, asked: Plan, timeout: float = 0.5) -> StoreError:
    """The error of a request, which comes in time."""
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        door.spend(asked, timeout)
    assert time.monotonic() - start < timeout + SLACK
    return caught.value


def gives_up(door: Door, key: str) -> None:
    """Ask for a bucket until its node is no longer asked."""
    while door.store.healthy:
        failure(door, plan(charge(key)))


def back(door: Door, *asked: Plan) -> float:
    """Seconds until all of these are answered."""
    start = time.monotonic()
    assert settled(door, lambda: not any(isinstance(answer, StoreError) for answer in attempts(door, asked)), 20)
    return time.monotonic() - start


# --- a node is gone ---------------------------------------------------------------------------------------------------


def test_a_dead_node_concerns_its_own_buckets(
    open_door: Callable[..., Door], cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a node, plans for others go on; errors name its buckets; it is found again, and each is logged once."""
    door = open_door()
    here, there, third = (charge(key_on(place), "900/day") for place in (0, 1, 2))
    both = plan(here, there, third)
    door.spend(both)
    with caplog.at_level(logging.DEBUG, "limitgate"):
        with without(cluster, 1):
            gives_up(door, there.key)
            for _ in range(3):
                error = failure(door, both, 0.2)
                assert error.keys == {there.key}
            assert not door.store.healthy
            answers = attempts(door, [plan(here, third)] * 20 + [plan(there)] * 5)
            assert ends(answers) == [True] * 20 + ["connection"] * 5
        assert settled(door, lambda: door.store.healthy, BACK_WITHIN)
        assert back(door, both) < SLACK
    assert door.store.outages == 1
    told = [re.split(",|: ", line)[0] for line in caplog.messages]
    node = f"the Redis node 127.0.0.1:{cluster.masters[1].port}"
    assert told == [f"{node} does not answer", f"LG019 {node} was restarted or replaced", f"{node} answers again"]
    assert settled(door, lambda: used(door, here, third) == [22, 22])


def test_the_first_failures_concern_no_other_buckets_either(doors: list[Door], cluster: RedisCluster) -> None:
    """Where a connection is refused, the error names the buckets that failed from the first time on."""
    asked = [(door, charge(key_on(0), "900/day"), charge(key_on(1), "900/day")) for door in doors]
    for door, here, there in asked:
        door.spend(plan(here, there))
    with without(cluster, 1):
        for door, here, there in asked:
            errors = [failure(door, plan(here, there)) for _ in range(4)]
            assert [error.keys for error in errors] == [{there.key}] * 4
            assert settled(door, lambda door=door, here=here: used(door, here) == [1])
    for door, here, there in asked:
        assert back(door, plan(here, there)) < BACK_WITHIN


def test_a_frozen_node_that_was_never_reached_starves_no_other(cluster: RedisCluster) -> None:
    """While threads wait for a connection to one node, what they want of others is asked, and no other is given up."""
    store = RedisStore(cluster.url)
    frozen, fine = plan(charge(key_on(0), "900/day")), plan(charge(key_on(1), "900/day"))
    store.spend(fine, 5)
    servers: Any = store._servers
    servers._map.nodes.pop(("127.0.0.1", cluster.masters[0].port), None)
    with cluster.masters[0].frozen():
        ended = [ends(servers.exchange([frozen, fine], ListenDeadline(0.2))) for _ in range(7)]
    assert [one for one, _ in ended] == ["timeout"] * 7
    # Neither node was reached before, so the first call may wait for the frozen one first.
    assert ended[0][1] in ("timeout", True)
    assert [two for _, two in ended[1:]] == [True] * 6
    with contextlib.closing(Door(store)) as door:
        assert back(door, frozen, fine) < BACK_WITHIN


@in_a_loop
async def test_a_patient_request_makes_no_other_wait(cluster: RedisCluster) -> None:
    """A request that is sent on to a node with much time left does not keep those there from failing in time."""
    slot, source, target = 300, *cluster.masters[:2]
    moved, own = charge(next(tagged(slot))), charge(key_on(1))
    async with contextlib.aclosing(AsyncRedisStore(cluster.url)) as store:
        await asyncio.gather(*begin(store, plan(moved), plan(own)))
        cluster.begin_migration(slot, source, target)
        cluster.migrate_keys(slot, source, target)
        cluster.end_migration(slot, target)
        with target.frozen():
            start = time.monotonic()
            (hasty,) = begin(store, plan(own), timeout=0.4)
            await asyncio.sleep(0.05)
            (patient,) = begin(store, plan(moved), timeout=8)
            (ended,) = await asyncio.gather(hasty, return_exceptions=True)
            assert isinstance(ended, StoreError)
            assert time.monotonic() - start < 0.4 + SLACK
        await asyncio.gather(patient, return_exceptions=True)
    cluster.begin_migration(slot, target, source)
    cluster.migrate_keys(slot, target, source)
    cluster.end_migration(slot, source)


def test_a_node_that_cannot_write_is_not_believed(
    open_door: Callable[..., Door], cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that refuses to write still says where other slots are. That is no sign that it works."""
    needs(REPLICAS)
    door, node = open_door(), cluster.masters[1]
    stuck = charge(key_on(1), "900/day")
    assert back(door, plan(stuck, charge(key_on(0), "900/day"))) < BACK_WITHIN
    cluster.say(node, "CONFIG", "SET", "min-replicas-to-write", 1)
    with caplog.at_level(logging.DEBUG, "limitgate"):
        gives_up(door, stuck.key)
        for _ in range(100):
            failure(door, plan(stuck), 0.2)
            door.idle(0.01)
        assert not door.store.healthy
        cluster.say(node, "CONFIG", "SET", "min-replicas-to-write", 0)
        assert back(door, plan(stuck)) < BACK_WITHIN
    assert door.store.outages == 1
    assert [message.startswith("LG062") for message in caplog.messages] == [True, False, False], "why, gone, and back"


# --- what cannot be given back ----------------------------------------------------------------------------------------


def fill(cluster: RedisCluster) -> None:
    """The first node has no more memory."""
    cluster.say(cluster.masters[0], "CONFIG", "SET", "maxmemory", 1)


@pytest.mark.parametrize("mishap", [fill, lambda cluster: cluster.masters[0].kill()], ids=["full", "dead"])
def test_what_cannot_be_given_back_is_counted_and_drains(door: Door, cluster: RedisCluster, mishap: Any) -> None:
    """If giving back fails, the charge stays, is counted, and its key goes when it has drained."""
    taken, late, dies = charge(key_on(0), "10/minute"), charge(key_on(1), "9/day"), mishap is not fill
    assert back(door, plan(taken), plan(late)) < BACK_WITHIN
    try:
        with cluster.masters[1].frozen():
            timer = threading.Timer(0.2, mishap, [cluster])
            timer.start()
            failure(door, plan(taken, late), 0.4)
            timer.join()
        assert settled(door, lambda: door.store.not_given_back == 1)
        if not dies:
            with cluster.masters[0].client() as client:
                assert 6000 < client.pttl(taken.key) <= 12_001
            assert used(door, taken) == [2]
    finally:
        if dies:
            revive(cluster, 0)
        cluster.say(cluster.masters[0], "CONFIG", "SET", "maxmemory", 0)
    assert back(door, plan(taken), plan(late)) < BACK_WITHIN


def test_leases_go_back_to_nodes_that_live(doors: list[Door], cluster: RedisCluster) -> None:
    """What was taken in advance of buckets on several nodes goes back to those that answer, though one of them is dead."""
    taken = []
    for door in doors:
        leased = [charge(key, Limit("900/day", lease=50)) for place in (0, 1, 2) for key in islice(keys_on(place), 3)]
        assert back(door, *[plan(each) for each in leased]) < BACK_WITHIN
        taken.append((door, leased))
    with without(cluster, 0):
        for door, leased in taken:
            gives_up(door, leased[0].key)
        doors[1].idle(1.5)  # the threads of the other go on meanwhile
        for door, leased in taken:
            plain = [charge(each.key, "900/day") for each in leased[3:]]
            assert max(used(door, *plain)) < 10, used(door, *plain)


# --- through the gate -------------------------------------------------------------------------------------------------


def test_rules_on_other_nodes_go_on_limiting(cluster: RedisCluster) -> None:
    """Without one node its rules are up to on_error, from the first request on, and the others limit exactly."""
    rules = [Rule(f"rule{number}", "5/day", on_error="open") for number in range(40)]
    with contextlib.ExitStack() as opened:
        sites = [
            opened.enter_context(kind(*rules, store=cluster.url, timeout=1.0, key_prefix=f"nodes-{kind.door}"))
            for kind in SITES
        ]
        assert [site.statuses(1) for site in sites] == [[200]] * 2
        with without(cluster, 1):
            for site in sites:
                assert site.statuses(6) == [200] * 4 + [429] * 2
                assert {decision.degraded for decision in site.seen[1:]} == {True}
                assert 10 < len(site.seen[-1].windows) < 35, "rules on the two other nodes"


# --- all is gone ------------------------------------------------------------------------------------------------------


def test_nobody_there(open_door: Callable[..., Door]) -> None:
    """Where no node of the URL answers, requests fail in time, and the store says that it is not healthy."""
    door = open_door(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    charges = [charge(key_on(place)) for place in (0, 1, 2)]
    for _ in range(12):
        assert failure(door, plan(*charges)).fault == "connection"
    assert not door.store.healthy


def test_a_dead_seed_is_passed_over(open_door: Callable[..., Door], cluster: RedisCluster) -> None:
    """If the first node of a URL is dead, the store finds the cluster through the others."""
    door = open_door(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.masters[2].port}")
    assert back(door, plan(*[charge(key_on(place)) for place in (0, 1, 2)])) < BACK_WITHIN


def test_a_cluster_that_is_down(doors: list[Door], cluster: RedisCluster) -> None:
    """A cluster that serves nothing without all its slots is a store error, and answers again once it has them."""
    charges = [charge(key_on(place), "900/day") for place in (0, 1, 2)]
    for door in doors:
        door.spend(plan(*charges))
    for node in cluster.masters:
        cluster.say(node, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
    try:
        with without(cluster, 1):
            eventually(lambda: cluster.info(cluster.masters[0])["cluster_state"] == "fail", "the cluster to be down")
            for door in doors:
                assert {failure(door, plan(charges[0])).fault for _ in range(6)} <= {"reply", "connection"}
                assert not door.store.healthy
        for door in doors:
            assert back(door, plan(*charges)) < BACK_WITHIN
    finally:
        for node in cluster.masters:
            cluster.say(node, "CONFIG", "SET", "cluster-require-full-coverage", "no")


# --- threads ----------------------------------------------------------------------------------------------------------


def test_calls_that_have_to_wait_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slot moves, what many threads ask of it is asked again after a pause for all, not one for each."""
    store = RedisStore("redis+cluster://127.0.0.1:1")
    servers: Any = store._servers
    rounds = []

    def moving(errands: Any, _: Any) -> list[Any]:
        rounds.append(len(errands))
        return [(errand, TryAgainError("TRYAGAIN")) for errand in errands]

    monkeypatch.setattr(servers, "_round", moving)
    keys = tagged(300)
    asked = [plan(charge(next(keys)), charge(next(keys))) for _ in range(64)]
    assert set(ends(servers.exchange(asked, ListenDeadline(0.1)))) == {"timeout"}
    assert rounds[0] == 1, "what goes to one slot is sent together"
    assert set(rounds[1:]) == {64}


def test_what_was_never_sent_takes_no_lease(cluster: RedisCluster) -> None:
    """A call that was ready, but that no node was asked for any more, keeps nobody from leasing from its buckets later."""
    with contextlib.closing(RedisStore(cluster.url)) as store:
        servers: Any = store._servers
        leased = charge(key_on(0), Limit("900/day", lease=50))
        store.spend(plan(charge(leased.key, "9/minute")), 5)
        node = servers._map.node(servers._map.holder(slot_of(leased.key)))
        for _ in range(FAILURES):
            node.breaker.failed(StoreError("no answer"), time.monotonic() + PATIENT)
        assert ends(servers.exchange([plan(leased)], ListenDeadline(1))) == ["connection"]
        assert not store.leases.pending


def test_where_no_thread_can_be_started_reading_a_value_finds_its_node_again(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a thread that would look for the node, a call that reads a value from it is let through now and then."""
    request = ConfigRequest(key_on(0))
    with contextlib.closing(RedisStore(cluster.url)) as store:
        assert store.config(request, 5).text is None
        with cluster.masters[0].frozen():
            monkeypatch.setattr(threading.Thread, "start", no_thread)
            while store.healthy:
                with pytest.raises(StoreError):
                    store.config(request, 0.05)
        deadline = time.monotonic() + PATIENT
        while not store.healthy:
            with contextlib.suppress(StoreError):
                store.config(request, 0.5)
            assert time.monotonic() < deadline
            time.sleep(0.01)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_nobody_waits_for_what_is_given_back(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow network, who is refused by one of two nodes waits for one call, not for what is given back as well.

    The network is slow by what is told to those who wait.
    """
    store = RedisStore(cluster.url, local_refusals=False)
    taken, full = charge(key_on(0), "9/day"), charge(key_on(1), "1/day")
    store.spend(plan(taken, full), 5)
    send, is_refused, in_time = SyncConnection.send, threading.Event(), []

    def late(connection: SyncConnection, data: bytes, listen_deadline: ListenDeadline) -> None:
        if connection.session.flying[0].plans[0].verb == "adjust":
            in_time.append(is_refused.wait(PATIENT))
        else:
            listen_deadline.waited_in_vain(0.3 * PATIENT)
        send(connection, data, listen_deadline)

    monkeypatch.setattr(SyncConnection, "send", late)
    assert not store.spend(plan(taken, full), PATIENT).admitted
    is_refused.set()
    store.close()
    monkeypatch.undo()
    assert in_time == [True]
    assert store.not_given_back == 0
    with contextlib.closing(Door(store)) as door:
        assert used(door, taken) == [1]


# --- crowds -----------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_what_a_late_part_took_is_given_back(cluster: RedisCluster) -> None:
    """Where one node is silent the request has failed. What that node carries out all the same, later, is undone."""
    async with contextlib.aclosing(AsyncRedisStore(cluster.url, local_refusals=False)) as store:
        here, there = charge(key_on(0), "900/day"), charge(key_on(1), "900/day")
        await store.aspend(plan(here, there), 5)
        with cluster.masters[1].frozen():
            assert await crowd_ends(begin(store, *[plan(here, there)] * 3, timeout=0.1)) == ["timeout"] * 3
        await drained(store, here, there, to=2)
        assert (await owed_by(store, here), await owed_by(store, there), store.not_given_back) == (1, 1, 0)


async def drained(store: AsyncRedisStore, *buckets: Any, to: int) -> None:
    """Wait until buckets owe no more than so much together."""
    deadline = time.monotonic() + 10
    while sum([await owed_by(store, bucket) for bucket in buckets]) > to:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def owed_by(store: AsyncRedisStore, charge: Any) -> int:
    """Requests that a bucket owes, a begun one counted whole."""
    try:
        reading = await store.aspend(plan(charge, verb="peek"), 1)
    except StoreError:
        return 1_000
    return -(-reading.buckets[0].before[0] // charge.bucket.weights[0])


@pytest.mark.alone
@pytest.mark.parametrize("local_refusals", [True, False])
@in_a_loop
async def test_a_crowd_holds_little_of_what_others_share(cluster: RedisCluster, *, local_refusals: bool) -> None:
    """Of a crowd that one node refuses few hold anything on another at a time, and all of it is given back."""
    async with contextlib.aclosing(AsyncRedisStore(cluster.url, local_refusals=local_refusals)) as store:
        guesses, everybody = charge(key_on(0), "5/day"), charge(key_on(1), "200/day")
        honest = charge(key_on(2), "900/day")
        await store.aspend(plan(honest, everybody), 5)
        crowd = begin(store, *[plan(guesses, everybody)] * 3000, timeout=0.5)
        others = []
        while not all(request.done() for request in crowd):
            others += begin(store, plan(honest, everybody))
            await asyncio.sleep(0.005)
        assert Counter(await crowd_ends(crowd)) == {True: 5, False: 2995}
        assert all(await crowd_ends(others)), "who shares a bucket with a crowd loses nothing in it"
        await drained(store, everybody, to=6 + len(others))
        assert (store.not_given_back, store.failures) == (0, 0)


@in_a_loop
async def test_nobody_of_a_crowd_waits_longer_than_they_may(cluster: RedisCluster) -> None:
    """Who waits for others of a crowd waits no longer than its own timeout, whatever theirs is, and says how long."""
    store = AsyncRedisStore(cluster.url, local_refusals=False)
    asked = plan(charge(key_on(0), "9000/day"), charge(key_on(1), "9000/day"))
    await store.aspend(asked, 5)
    with cluster.masters[1].frozen():
        patient = begin(store, *[asked] * 64, timeout=5)
        await asyncio.sleep(0.01)
        began = time.monotonic()
        hasty = begin(store, *[asked] * 10, timeout=0.1)
        assert await crowd_ends(hasty) == ["timeout"] * 10
        assert time.monotonic() - began < 0.1 + SLACK
        assert all(0.1 <= getattr(task.exception(), "waited", 0) < 0.1 + SLACK for task in hasty)
    assert await crowd_ends(patient) == [True] * 64
    await store.aclose()


@in_a_loop
async def test_a_crowd_that_waits_ends_with_the_node(cluster: RedisCluster) -> None:
    """Those of a crowd who wait for others fail like them when a node is silent, and at once when the store is closed."""
    store = AsyncRedisStore(cluster.url, local_refusals=False)
    asked = plan(charge(key_on(0), "9000/day"), charge(key_on(1), "9000/day"))
    await store.aspend(asked, 5)
    with cluster.masters[1].frozen():
        began = time.monotonic()
        assert set(await crowd_ends(begin(store, *[asked] * 500, timeout=0.2))) == {"timeout"}
        assert time.monotonic() - began < 0.2 + SLACK
        crowd = begin(store, *[asked] * 500, timeout=5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await store.aclose()
        assert set(await crowd_ends(crowd)) <= {"connection", "timeout"}
