"""Text that stores keep under a key: one suite for every store, and the replies that are none."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from limitgate import AsyncRedisStore, MemoryStore, RedisStore, StoreError
from limitgate.stores.base import AsyncConfigStore, ConfigRequest, StoredConfig, SyncConfigStore
from limitgate.stores.redis import wire
from limitgate.stores.redis.cluster import hash_slot
from tests.stores.test_stores import REDIS, STORES, AsyncDoor, Door
from tests.support.clock import Clock
from tests.support.doors import until
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

PATIENT = 20.0


def ask(door: Door, key: str, text: str | None = None, version: int | None = None, timeout: float = PATIENT) -> tuple[Any, ...]:
    """Version and text after a request."""
    request = ConfigRequest(key, text, version)
    store = door.store
    stored = door.run(store.aconfig(request, timeout)) if isinstance(door, AsyncDoor) else store.config(request, timeout)
    return stored[:2]


@pytest.fixture(params=STORES.values(), ids=STORES)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Every store, on the Redis or the cluster that all tests share."""
    kind, server = request.param
    with contextlib.closing(kind(request.getfixturevalue(server).url)) as door:
        yield door


@pytest.fixture
def key() -> str:
    """A key that nobody has used."""
    return uuid4().hex


def test_every_store_keeps_configuration() -> None:
    """The protocols hold for the stores of this package."""
    assert isinstance(MemoryStore(), SyncConfigStore)
    assert isinstance(MemoryStore(), AsyncConfigStore)
    assert issubclass(RedisStore, SyncConfigStore)
    assert issubclass(AsyncRedisStore, AsyncConfigStore)


def test_a_text_is_read_as_it_was_written(door: Door, key: str) -> None:
    """Nothing is there at first; each change counts one version up, whatever the text is."""
    assert ask(door, key) == (0, None)
    for version, text in enumerate(["first", "", "a space, a line\nand ünïcode \0", "x" * 100_000], start=1):
        assert ask(door, key, text) == (version, text)
        assert ask(door, key) == (version, text)
    assert ask(door, key + "?") == (0, None)


def test_only_the_expected_version_is_replaced(door: Door, key: str) -> None:
    """A change that expects another version than is there changes nothing, and is told what is there."""
    assert ask(door, key, "too early", 1) == (0, None)
    assert ask(door, key, "first", 0) == (1, "first")
    assert ask(door, key, "late", 0) == (1, "first")
    assert ask(door, key, "second", 1) == (2, "second")
    assert ask(door, key, "late", 1) == (2, "second")
    assert ask(door, key) == (2, "second")


def test_a_text_lasts_as_long_as_its_request_says(door: Door, key: str) -> None:
    """It is deleted then, and its version begins anew; another text lasts as long as its own request says."""

    def keep(text: str, version: int | None, lasts: float | None) -> tuple[Any, ...]:
        request = ConfigRequest(key, text, version, lasts)
        store = door.store
        return (door.run(store.aconfig(request, PATIENT)) if isinstance(door, AsyncDoor) else store.config(request, PATIENT))[
            :2
        ]

    assert keep("first", 0, 60) == (1, "first")
    assert keep("late", 0, 60) == (1, "first")
    assert keep("second", None, 0.05) == (2, "second")
    until(lambda: ask(door, key) == (0, None))
    assert keep("third", 0, 0.001) == (1, "third")
    assert keep("for ever", None, None)[1] == "for ever"
    time.sleep(0.01)
    assert ask(door, key)[1] == "for ever"


def test_memory_does_not_keep_texts_that_have_ended() -> None:
    store = MemoryStore(Clock())
    for number in range(10_000):
        store.config(ConfigRequest(str(number), "text", None, 60))
        store._clock.advance(1)  # type: ignore[attr-defined]
    assert len(store._configs) < 500


def _in_threads(works: list[Callable[[], Any]]) -> None:
    begin = threading.Barrier(len(works))
    threads = [threading.Thread(target=lambda work=work: (begin.wait(PATIENT), work())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT)


@pytest.mark.parametrize("expects_version", [False, True])
def test_writers_at_once(
    redis_server: RedisServer,
    redis_cluster: RedisCluster,
    key: str,
    expects_version: bool,  # noqa: FBT001
) -> None:
    """Of writers who expect the same version one succeeds, and all hear of its text; of others each counts."""
    memory, servers = MemoryStore(), (redis_server.url, redis_cluster.url)
    kinds = {"memory": [Door(memory) for _ in range(4)]}
    kinds |= {url: [kind(url) for kind in REDIS.values() for _ in range(2)] for url in servers}
    for doors in kinds.values():
        outcomes: list[tuple[Any, ...]] = []

        def write(door: Door, text: str, outcomes: list[tuple[Any, ...]] = outcomes) -> None:
            outcomes.append(ask(door, key, text, 0 if expects_version else None))

        _in_threads([lambda door=door, place=place: write(door, str(place)) for place, door in enumerate(doors)])
        version, text = ask(doors[0], key)
        if expects_version:
            assert outcomes == [(1, text)] * 4
        else:
            assert sorted(outcome[0] for outcome in outcomes) == [1, 2, 3, 4]
            assert (version, text) in outcomes
        for door in doors:
            door.close()


@pytest.mark.parametrize("kind", REDIS)
@pytest.mark.parametrize("value", [b"", b"text", b" 1 text", b"1", b"-1 text", b"1.5 text", b"\xff", b"1e3 x", None])
def test_a_value_that_no_store_wrote(redis_server: RedisServer, key: str, kind: str, value: bytes | None) -> None:
    """It is reported as empty text of version 0, replaced by none who expect a version, and no fault of the server's."""
    with contextlib.closing(REDIS[kind](redis_server.url)) as door, redis_server.client() as client:
        if value is None:
            client.rpush(key, "a list")
        else:
            client.set(key, value)
        assert ask(door, key) == (0, "")
        assert ask(door, key, "mine", 0) == (0, "")
        assert door.store.failures == 0
        assert ask(door, key, "mine") == (1, "mine")
        assert client.get(key) == b"1 mine"
        assert client.ttl(key) == -1


@pytest.mark.parametrize("kind", REDIS)
def test_without_redis(own_redis: RedisServer, key: str, kind: str) -> None:
    """Readers and writers get a StoreError, and open the breaker, until Redis is found again."""
    with contextlib.closing(REDIS[kind](own_redis.url)) as door:
        assert ask(door, key, "kept") == (1, "kept")
        own_redis.kill()
        for text in [None, "new"] * 3:
            with pytest.raises(StoreError):
                ask(door, key, text, timeout=0.5)
        assert door.store.failures >= 5
        assert not door.store.healthy
        own_redis.start()
        with contextlib.suppress(StoreError):
            ask(door, key)
        for _ in range(100):
            if door.store.healthy:
                break
            door.idle(0.1)
        assert ask(door, key) == (0, None)
        assert ask(door, key, "new") == (1, "new")


@pytest.mark.parametrize("kind", REDIS)
def test_a_frozen_redis(own_redis: RedisServer, key: str, kind: str) -> None:
    """A request fails when its timeout is over."""
    with contextlib.closing(REDIS[kind](own_redis.url)) as door:
        ask(door, key, "kept")
        with own_redis.frozen(), pytest.raises(StoreError) as failure:
            ask(door, key, timeout=0.1)
        assert failure.value.fault == "timeout"
        assert failure.value.waited > 0
        assert ask(door, key) == (1, "kept")


@pytest.mark.parametrize("kind", REDIS)
def test_a_script_that_redis_has_forgotten(own_redis: RedisServer, key: str, kind: str) -> None:
    """NOSCRIPT is answered by the script's text."""
    with contextlib.closing(REDIS[kind](own_redis.url)) as door, own_redis.client() as client:
        assert ask(door, key, "kept") == (1, "kept")
        client.script_flush()
        assert ask(door, key) == (1, "kept")


@pytest.mark.parametrize("kind", REDIS)
def test_a_connection_that_was_closed(own_redis: RedisServer, key: str, kind: str) -> None:
    """A request whose connection turns out to be dead goes out on another one."""
    with contextlib.closing(REDIS[kind](own_redis.url)) as door, own_redis.client() as client:
        assert ask(door, key, "kept") == (1, "kept")
        client.client_kill_filter(_type="normal", skipme=True)
        assert ask(door, key) == (1, "kept")


@pytest.mark.parametrize("kind", REDIS)
def test_a_moving_hash_slot(redis_cluster: RedisCluster, kind: str) -> None:
    """MOVED and ASK are followed."""
    key = uuid4().hex
    with (
        contextlib.closing(REDIS[kind](redis_cluster.url)) as door,
        contextlib.closing(REDIS[kind](redis_cluster.url)) as other,
    ):
        assert ask(door, key, "kept") == (1, "kept")
        assert ask(other, key) == (1, "kept")
        slot = hash_slot(key)
        source = redis_cluster.master_of(key)
        target = next(node for node in redis_cluster.nodes if node is not source and redis_cluster.is_master(node))
        redis_cluster.begin_migration(slot, source, target)
        redis_cluster.migrate_keys(slot, source, target)
        assert ask(door, key) == (1, "kept")
        redis_cluster.end_migration(slot, target)
        assert ask(other, key, "new") == (2, "new")
        redis_cluster.begin_migration(slot, target, source)
        redis_cluster.migrate_keys(slot, target, source)
        redis_cluster.end_migration(slot, source)
        assert ask(door, key) == (2, "new")


def test_another_shape_of_reply() -> None:
    """What is neither text nor nothing is a failure of the store."""
    assert wire.stored_config(None) == StoredConfig(0, None)
    assert wire.stored_config(b"12 text") == StoredConfig(12, "text")
    for reply in ([], 5, "text", {}):
        with pytest.raises(StoreError, match="expected text"):
            wire.stored_config(reply)


def test_in_the_child_of_a_fork(key: str) -> None:
    """What a memory store keeps is there in a child of the process as well."""
    store = MemoryStore()
    store.config(ConfigRequest(key, "kept"))
    child = os.fork()
    if not child:
        os._exit(store.config(ConfigRequest(key)) != (1, "kept", 0.0))
    assert os.waitpid(child, 0)[1] == 0
