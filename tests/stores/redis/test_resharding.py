"""Slots that move while requests come: nothing is lost, nothing is admitted twice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest

from limitgate import StoreError
from tests.stores.test_stores import Door, attempts
from tests.support.clusters import KINDS, MOVED, PLAIN_KINDS, charge, ends, key_on, owed, plan, settled, tagged, used
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

SLACK = 3.0
"""Seconds that a busy machine may add to a deadline."""


class Move(NamedTuple):
    """A slot, the node that holds it, and the one that will. Every test moves another slot."""

    slot: int
    source: RedisServer
    target: RedisServer


EVERY_KIND = {**KINDS, **PLAIN_KINDS}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster whose slots move."""
    cluster = RedisCluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def move(cluster: RedisCluster) -> Move:
    return Move(next(_slots), *cluster.masters[:2])


_slots = iter(MOVED)


@pytest.fixture(params=EVERY_KIND.values(), ids=EVERY_KIND)
def door(request: pytest.FixtureRequest, cluster: RedisCluster) -> Iterator[Door]:
    with contextlib.closing(request.param(cluster.url, local_refusals=False)) as door:
        yield door


def test_nothing_is_lost_while_a_slot_moves_to_and_fro(door: Door, cluster: RedisCluster, move: Move) -> None:
    """Under load a slot moves back and forth with its keys: every request is answered, and exactly the limit passes."""
    slot, source, target = move
    moving, still = charge(next(tagged(slot)), "300/day"), charge(key_on(2), "9000 per 366 days")
    many = [charge(key, "9000 per 366 days") for key in islice(tagged(slot), 30)]
    door.spend(plan(moving, still))
    done, failed = threading.Event(), []

    def keep_moving() -> None:
        try:
            while not done.is_set():
                for there, here in ((source, target), (target, source)):
                    cluster.begin_migration(slot, there, here)
                    time.sleep(0.02)
                    cluster.migrate_keys(slot, there, here)
                    time.sleep(0.02)
                    cluster.end_migration(slot, here)
        except Exception as error:  # noqa: BLE001 - told by the test
            failed.append(error)

    mover = threading.Thread(target=keep_moving)
    mover.start()
    try:
        answers: list[Any] = []
        for each in many:
            answers += attempts(door, [plan(moving, still)] * 20 + [plan(each)] * 5)
    finally:
        done.set()
        mover.join()
    assert not failed
    assert not [answer for answer in answers if isinstance(answer, StoreError)]
    assert ends(answers).count(True) == 299 + 150
    assert settled(door, lambda: used(door, moving, still) == [300, 300]), owed(door, moving, still)
    assert used(door, *many) == [5] * 30
    assert door.store.not_given_back == 0


def test_half_a_slot(door: Door, cluster: RedisCluster, move: Move) -> None:
    """While a slot moves, its buckets are asked where they are, and new ones where they will be."""
    slot, source, target = move
    here, moved, new = (charge(key, "5/day") for key in islice(tagged(slot), 3))
    for each in (here, moved):
        door.spend(plan(each))
    cluster.begin_migration(slot, source, target)
    cluster.say(source, "MIGRATE", "127.0.0.1", target.port, moved.key, 0, 5000)
    assert ends(attempts(door, [plan(each) for each in (here, moved, new) * 5])).count(True) == 13
    assert used(door, here, moved, new) == [5, 5, 5]
    assert [cluster.say(node, "CLUSTER", "COUNTKEYSINSLOT", slot) for node in (source, target)] == [1, 2]


def test_buckets_of_one_plan_on_two_sides_of_a_move(door: Door, cluster: RedisCluster, move: Move) -> None:
    """A plan whose buckets are on both sides of a move waits until they are together; others do not wait for it."""
    slot, source, target = move
    here, moved, other = (charge(key, "5/day") for key in islice(tagged(slot), 3))
    for each in (here, moved, other):
        door.spend(plan(each))
    cluster.begin_migration(slot, source, target)
    cluster.say(source, "MIGRATE", "127.0.0.1", target.port, moved.key, 0, 5000)
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        door.spend(plan(here, moved), 0.3)
    assert 0.25 < time.monotonic() - start < 0.3 + SLACK
    assert caught.value.fault == "timeout"
    assert ends(attempts(door, [plan(other)] * 2)) == [True] * 2
    mover = threading.Timer(0.1, lambda: (cluster.migrate_keys(slot, source, target), cluster.end_migration(slot, target)))
    mover.start()
    assert ends(attempts(door, [plan(here, moved)] * 5)).count(True) == 4  # they are resent in any order
    mover.join()
    assert used(door, here, moved, other) == [5, 5, 3]
    assert door.store.healthy


def test_new_buckets_of_one_plan_wait_for_the_end_of_a_move(door: Door, cluster: RedisCluster, move: Move) -> None:
    """Two buckets that do not exist yet can be asked together only when their slot has moved, or has not."""
    slot, source, target = move
    first, second = (charge(key, "5/day") for key in islice(tagged(slot), 2))
    cluster.begin_migration(slot, source, target)
    before = cluster.redirections()
    with pytest.raises(StoreError):
        door.spend(plan(first, second), 0.2)
    assert cluster.redirections() - before < 30, "asked without a pause"
    threading.Timer(0.1, lambda: cluster.end_migration(slot, target)).start()
    assert door.spend(plan(first, second)).admitted
    assert used(door, first, second) == [1, 1]


def test_a_script_that_one_node_forgot(door: Door, cluster: RedisCluster, move: Move) -> None:
    """A node that does not know the script gets it, also where a slot has just moved; a flush everywhere goes unnoticed."""
    slot, source, target = move
    buckets = [charge(key, "9/day") for key in islice(tagged(slot), 5)]
    charges = [charge(key_on(place), "9/day") for place in (0, 1, 2)]
    door.spend(plan(*charges))
    cluster.begin_migration(slot, source, target)
    for nodes in ([target], cluster.masters, [source]):
        for node in nodes:
            cluster.say(node, "SCRIPT", "FLUSH")
        assert ends(attempts(door, [plan(each) for each in buckets] + [plan(*charges)])) == [True] * 6
    assert used(door, *buckets, *charges) == [3] * 5 + [4] * 3
    cluster.end_migration(slot, target)


def test_redirections_without_end_end_at_the_deadline(door: Door, cluster: RedisCluster, move: Move) -> None:
    """Two nodes that send requests to each other cost a request its timeout, and asks neither of them without a pause."""
    slot, source, target = move
    bucket = charge(next(tagged(slot)), "9/day")
    for node, other in ((source, target), (target, source)):
        cluster.say(node, "CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(other))
    start, before = time.monotonic(), cluster.redirections()
    with pytest.raises(StoreError) as caught:
        door.spend(plan(bucket), 0.3)
    assert 0.25 < time.monotonic() - start < 0.3 + SLACK
    assert caught.value.fault == "timeout"
    assert cluster.redirections() - before < 50, "asked without a pause"
    assert door.store.healthy
    cluster.end_migration(slot, source)
    assert door.spend(plan(bucket)).admitted


def test_give_backs_find_a_bucket_that_has_moved(door: Door, cluster: RedisCluster, move: Move) -> None:
    """What a refused request took goes back to the bucket wherever its slot has moved."""
    slot, source, target = move
    loose, tight = charge(next(tagged(slot)), "9/day"), charge(key_on(2), "1/day")
    door.spend(plan(loose, tight))
    cluster.begin_migration(slot, source, target)
    for _ in range(3):
        assert not door.spend(plan(loose, tight)).admitted
    cluster.migrate_keys(slot, source, target)
    for _ in range(3):
        assert not door.spend(plan(loose, tight)).admitted
    cluster.end_migration(slot, target)
    for _ in range(3):
        assert not door.spend(plan(loose, tight)).admitted
    assert settled(door, lambda: used(door, loose, tight) == [1, 1])
    assert door.store.not_given_back == 0
