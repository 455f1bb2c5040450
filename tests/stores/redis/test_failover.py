"""Masters that are replaced: by a cluster's own replica, or by Sentinels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from limitgate import StoreError
from tests.stores.test_stores import PATIENT, Door, attempts
from tests.support.clusters import KINDS, charge, ends, key_on, nodes_of, plan, settled, used
from tests.support.redis_cluster import RedisCluster, Sentinels
from tests.support.redis_server import RedisServer
from tests.support.server_features import REPLICAS, needs

BACK_WITHIN = 10.0
"""Seconds after a promotion until requests succeed again, on a machine however busy; tests/faults tells the true ones."""


def back(door: Door, *asked: Any) -> float:
    """Seconds until all of these are answered."""
    start = time.monotonic()
    assert settled(door, lambda: not any(isinstance(answer, StoreError) for answer in attempts_in(door, asked)), 20)
    return time.monotonic() - start


def attempts_in(door: Door, asked: Any, timeout: float = 0.2) -> list[Any]:
    """What becomes of requests with little time, or with as much as they need."""
    answers = []
    for each in asked:
        try:
            answers.append(door.spend(each, timeout))
        except StoreError as error:
            answers.append(error)
    return answers


def until_promoted(doors: list[Door], asked: Any, promoted: Callable[[], bool]) -> None:
    """Keep asking while the failover goes on, as a service does."""
    deadline = time.monotonic() + 20
    while not is_so(promoted):
        assert time.monotonic() < deadline
        for door in doors:
            attempts_in(door, asked)
        time.sleep(0.02)


def is_so(promoted: Callable[[], bool]) -> bool:
    """Whether it is, as far as can be told: in a failover the test's own connections are closed, too."""
    try:
        return promoted()
    except redis.RedisError:
        return False


@pytest.fixture
def doors() -> Iterator[Callable[[str], list[Door]]]:
    """Stores of both kinds on one URL: a failover takes seconds, so they share it."""
    with contextlib.ExitStack() as opened:
        yield lambda url: [opened.enter_context(contextlib.closing(kind(url, local_refusals=False))) for kind in KINDS.values()]


# --- a cluster with replicas ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster in which each master has a replica. Each test replaces another master."""
    cluster = RedisCluster(replicas=1)
    yield cluster
    cluster.stop()


@pytest.mark.parametrize(("end", "place"), [("frozen", 1), ("killed", 2)], ids=["frozen", "killed"])
def test_a_replica_takes_over(doors: Callable[[str], list[Door]], cluster: RedisCluster, end: str, place: int) -> None:
    """When a master is gone its replica is used soon after its promotion, and the old one is forgotten."""
    old, new = cluster.masters[place], cluster.replica_of(place)
    charges = [charge(key_on(each), "90000 per 366 days") for each in (0, 1, 2)]
    both = doors(cluster.url)
    for door in both:
        assert ends(attempts(door, [plan(*charges)] * 5)) == [True] * 5
    with old.client() as client:
        client.wait(1, 1000)
    frozen = old.frozen() if end == "frozen" else contextlib.nullcontext(old.kill())
    with frozen:
        until_promoted(both, [plan(charges[place]), plan(charges[0])], lambda: serves(cluster, new))
        for door in both:
            assert back(door, *[plan(each) for each in charges]) < BACK_WITHIN
            assert ends(attempts(door, [plan(*charges)] * 5)) == [True] * 5
            assert settled(door, lambda door=door: door.store.healthy and ("127.0.0.1", old.port) not in nodes_of(door))
        assert door.store.replacements == 1
    counts = used(both[0], *charges)
    assert counts[place] >= 20, "what was replicated is still owed"


def serves(cluster: RedisCluster, node: RedisServer) -> bool:
    with node.client() as client:
        return client.info("replication")["role"] == "master" and cluster.info(node)["cluster_state"] == "ok"


# --- Sentinels --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    """Sentinels around a master with a replica. The last test leaves the replica as the master."""
    sentinels = Sentinels()
    yield sentinels
    sentinels.stop()


def test_sentinels_lead_to_the_master(doors: Callable[[str], list[Door]], sentinels: Sentinels) -> None:
    """A Sentinel URL leads to the master, in the database it names, and a closed store leaves no connection."""
    bucket = charge("sentinel", "50/day")
    for door in doors(sentinels.url + "/2"):
        assert ends(attempts(door, [plan(bucket)] * 20)) == [True] * 20
    with sentinels.master.client() as client:
        client.select(2)
        assert client.keys("*") == [b"sentinel"]


def test_an_unknown_name_is_a_store_error(doors: Callable[[str], list[Door]], sentinels: Sentinels) -> None:
    """Where Sentinels know no master of the name, requests fail and say so."""
    for door in doors(sentinels.url.replace("/limits", "/others")):
        (error,) = attempts_in(door, [plan(charge("unknown"))], PATIENT)
        assert error.fault == "connection"
        assert "no Sentinel knows" in str(error)


def test_a_silent_sentinel_first(doors: Callable[[str], list[Door]], sentinels: Sentinels) -> None:
    """With one Sentinel that is silent, the master is found through the next."""
    with sentinels.sentinels[0].frozen():
        for door in doors(sentinels.url):
            assert back(door, plan(charge("silent"))) < BACK_WITHIN


def test_a_master_that_became_a_replica(doors: Callable[[str], list[Door]], sentinels: Sentinels) -> None:
    """A master that can no longer write is left, and asked for again: it is used as soon as it can."""
    needs(REPLICAS)
    both, bucket = doors(sentinels.url), plan(charge("readonly", "90000 per 366 days"))
    for door in both:
        assert ends(attempts_in(door, [bucket], PATIENT)) == [True]
    with sentinels.master.client() as client:
        client.config_set("min-replicas-to-write", 5)
        assert {error.fault for door in both for error in attempts_in(door, [bucket] * 3, PATIENT)} == {"reply"}
        client.config_set("min-replicas-to-write", 0)
    for door in both:
        assert back(door, bucket) < BACK_WITHIN


def test_sentinels_replace_a_frozen_master(doors: Callable[[str], list[Door]], sentinels: Sentinels) -> None:
    """When the master freezes and another one is promoted, that is used soon."""
    both, bucket = doors(sentinels.url), charge("failover", "90000 per 366 days")
    for door in both:
        assert ends(attempts(door, [plan(bucket)] * 10)) == [True] * 10
    with sentinels.master.client() as client:
        client.wait(1, 1000)
    with sentinels.master.frozen():
        until_promoted(both, [plan(bucket)], sentinels.promoted)
        took = [back(door, plan(bucket)) for door in both]
        assert max(took) < BACK_WITHIN, took
        # Before the old master goes on: it may still answer who asked to connect meanwhile, which is one more.
        assert [door.store.replacements for door in both] == [1, 1]
    for door in both:
        assert ends(attempts(door, [plan(bucket)] * 5)) == [True] * 5
        assert used(door, bucket)[0] >= 25
    with sentinels.master.client() as client:  # what Sentinels do, too, but only after eight seconds
        client.replicaof("127.0.0.1", str(sentinels.replica.port))
        client.client_kill_filter(_type="normal", skipme=True)
    for door in both:
        assert back(door, plan(bucket)) < BACK_WITHIN
