"""Exceptions that nobody foresaw, put into every place where others wait for what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from limitgate import AsyncLimiter, AsyncRedisStore, Limit, Limiter, MemoryStore, RedisStore, StoreError, internal_errors
from limitgate.gate import slot_keeper
from limitgate.limits.plan import Plan
from limitgate.stores import base
from limitgate.stores.redis import breaker, replies
from limitgate.stores.redis.aio import batcher, cluster, listening
from limitgate.stores.redis.dialer import Resolver, Spare
from limitgate.stores.redis.threads import cluster as cluster_threads, node, pool as connections, store as threads
from tests.support.clusters import KINDS, charge, key_on, plan, settled
from tests.support.crowds import a_plan, ask, begin
from tests.support.proxy import PATIENT, in_a_loop, until
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer


class UnforeseenError(Exception):
    """What nobody foresaw."""


@pytest.fixture(autouse=True)
def _nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_errors, "_reported", set())


class Broken:
    """In place of a function: raises for the first calls, then does what the function does."""

    def __init__(self, original: Callable[..., Any], times: int) -> None:
        self.original, self.left = original, times
        self.times = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            self.times += 1
            raise UnforeseenError("a secret of a client")
        return self.original(*args, **options)


def broken(patch: pytest.MonkeyPatch, where: Any, name: str, times: int = 1) -> Broken:
    mistake = Broken(getattr(where, name), times)

    def raising(*args: Any, **options: Any) -> Any:
        return mistake(*args, **options)

    patch.setattr(where, name, raising)
    if where is breaker.Breaker:  # which is told of answers only while there is trouble
        patch.setattr(where, "in_trouble", property(lambda _: True, lambda *_: None), raising=False)
    return mistake


# --- requests that share what breaks ----------------------------------------------------------------------------------

PLACES: dict[str, tuple[Any, str]] = {
    "what a reply means": (replies.RedisStoreBase, "understood"),
    "what is sent": (replies.RedisStoreBase, "outgoing"),
    "what is known to be refused": (replies.RedisStoreBase, "refused"),
    "room in a call": (base.Room, "takes"),
    "an answer for the breaker": (breaker.Breaker, "succeeded"),
}
ON_ASYNCIO = PLACES | {
    "handing out": (batcher.Batcher, "_hand_out"),
    "a connection": (batcher.AsyncConnection, "__init__"),
    "sending": (batcher.AsyncConnection, "send"),
    "looking at the time": (batcher.Batcher, "listened"),
}
ON_A_CLUSTER = ON_ASYNCIO | {
    "calls by slots": (cluster.AsyncCluster, "apart"),
    "what becomes of a plan": (cluster, "concluded"),
    "what is told already": (cluster.AsyncCluster, "told_already"),
    "asking for a part": (cluster.AsyncCluster, "ask"),
    "giving back": (cluster, "full_refund"),
    "what others refused": (replies.RedisStoreBase, "refused_elsewhere"),
}
OF_THREADS = PLACES | {
    "a connection": (connections.SyncConnection, "__init__"),
    "sending": (connections.SyncConnection, "send"),
    "a reply": (connections.SyncConnection, "next_event"),
}


async def all_answered(store: AsyncRedisStore, plans: list[Plan]) -> list[Any]:
    requests = begin(store, *plans, timeout=0.5)
    done, pending = await asyncio.wait(requests, timeout=5)
    assert not pending, f"{len(pending)} of {len(requests)} were never answered"
    return [request.exception() for request in done]


@pytest.mark.parametrize("place", ON_ASYNCIO.values(), ids=ON_ASYNCIO)
@in_a_loop
async def test_nobody_waits_for_ever_on_asyncio(
    redis_server: RedisServer, place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks, every request is answered, by the store or by a `StoreError`, and the next ones as ever."""
    with redis_server.client() as client:
        before = len(client.client_list())
        async with contextlib.aclosing(AsyncRedisStore(redis_server.url)) as store:
            mistake = broken(monkeypatch, *place)
            errors = await all_answered(store, [a_plan() for _ in range(100)])
            await until(lambda: mistake.times == 1)
            assert all(error is None or isinstance(error, StoreError | UnforeseenError) for error in errors)
            assert sum(isinstance(error, UnforeseenError) for error in errors) <= 1  # it was the one's own call
            assert "secret" not in "".join(str(error) for error in errors if isinstance(error, StoreError))
            assert await ask(store, *[a_plan() for _ in range(100)]) == [True] * 100
            assert len(client.client_list()) <= before + 1
        await until(lambda: len(client.client_list()) == before)


@pytest.mark.parametrize("place", ON_A_CLUSTER.values(), ids=ON_A_CLUSTER)
@in_a_loop
async def test_nobody_waits_for_ever_on_a_cluster(
    redis_cluster: RedisCluster, place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where plans are carried out in several parts, and many wait for the same buckets."""
    shared, full = [key_on(0), key_on(1)], key_on(2)
    async with contextlib.aclosing(AsyncRedisStore(redis_cluster.url, local_refusals=False)) as store:
        both = plan(*[charge(key, "1000/day") for key in shared])
        refused = plan(charge(shared[0], "1000/day"), charge(full, "1/day"))
        assert await ask(store, both, refused) == [True, True]
        broken(monkeypatch, *place)
        errors = await all_answered(store, [both] * 100 + [refused] * 100)
        assert all(error is None or isinstance(error, StoreError | UnforeseenError) for error in errors)
        await until(lambda: not store._loops[asyncio.get_running_loop()].servers._crowds)  # type: ignore[attr-defined]
        assert await ask(store, *[both] * 100) == [True] * 100


@pytest.mark.parametrize("place", ON_ASYNCIO.values(), ids=ON_ASYNCIO)
@in_a_loop
async def test_what_breaks_every_time_fails_every_request(
    redis_server: RedisServer, place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that always raises makes no request wait, and none is tried again without end."""
    async with contextlib.aclosing(AsyncRedisStore(redis_server.url)) as store:
        mistake = broken(monkeypatch, *place, times=10_000)
        await all_answered(store, [a_plan() for _ in range(100)])
        await until(lambda: mistake.times > 0)
        assert mistake.times < 1000


@pytest.mark.parametrize("kind", ["one", "cluster"])
@pytest.mark.parametrize("place", OF_THREADS.values(), ids=OF_THREADS)
def test_no_thread_waits_for_ever(
    request: pytest.FixtureRequest, kind: str, place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for threads that share calls; connections go back to where they lie."""
    server = request.getfixturevalue("redis_server" if kind == "one" else "redis_cluster")
    with contextlib.closing(RedisStore(server.url)) as store, ThreadPoolExecutor(20) as pool:
        keys = [key_on(place) for place in range(3)]

        def asked(number: int) -> BaseException | None:
            try:
                store.spend(plan(charge(keys[number % 3], "1000/day"), charge(keys[0], "1000/day")), 1.0)
            except Exception as error:  # noqa: BLE001 - looked at below
                return error
            return None

        asked(0)
        if place[1] == "__init__":
            store.close()  # so that the next call connects
        mistake = broken(monkeypatch, *place)
        errors = list(pool.map(asked, range(200), timeout=PATIENT))
        assert mistake.times == 1
        assert all(error is None or isinstance(error, StoreError | UnforeseenError) for error in errors)
        assert sum(isinstance(error, UnforeseenError) for error in errors) <= 1
        assert list(pool.map(asked, range(200), timeout=PATIENT)) == [None] * 200


@in_a_loop
async def test_a_lost_connection_is_told_to_all(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while calls are made ready to be sent again fails its call; those behind it are answered."""
    async with contextlib.aclosing(AsyncRedisStore(own_redis.url)) as store:
        await ask(store, a_plan())
        here: Any = store._loops[asyncio.get_running_loop()].servers
        requests = []
        with own_redis.frozen():
            for _ in range(3):
                requests += begin(store, a_plan())
                await asyncio.sleep(0)
            await until(lambda: len(here._connection.session.flying) == 3)
            mistake = broken(monkeypatch, replies.RedisStoreBase, "unanswered")
            here._connection._transport.abort()
            await until(lambda: mistake.times == 1)
        done, pending = await asyncio.wait(requests, timeout=5)
        assert not pending
        assert sum(request.exception() is not None for request in done) == 1


# --- what goes on in the background -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 3])
def test_probes_go_on(own_redis: RedisServer, kind: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a probe ends by an exception, even by having no room here, the next one finds Redis all the same."""
    with contextlib.closing(KINDS[kind](own_redis.url)) as door:
        door.spend(a_plan())
        own_redis.kill()
        where = (node.Node, "_ask") if kind == "threads" else (batcher.Batcher, "spend")
        while door.store.healthy:
            with contextlib.suppress(StoreError):
                door.spend(a_plan())
        mistake = broken(monkeypatch, *where, times=times)
        own_redis.start()
        assert settled(door, lambda: mistake.times == times and door.store.healthy, 10)
        assert door.spend(a_plan()).admitted


def test_leases_go_on_being_given_back(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that gives back leases outlives an exception."""
    monkeypatch.setattr(threads, "LONGEST", 0.1)
    monkeypatch.setattr("limitgate.stores.redis.leases.LONGEST", 0.1)
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        mistake = broken(monkeypatch, threads.RedisStore, "_give_back")
        limit = Limit("1000/day", lease=10)
        for _ in range(2):
            store.spend(a_plan(limit, key=uuid4().hex), 1)  # type: ignore[arg-type]
        deadline = time.monotonic() + PATIENT
        while len(store.leases) or not mistake.times:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_map_of_a_cluster_goes_on_being_learnt(redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks for slots outlives an exception."""
    monkeypatch.setattr(cluster_threads, "MAP_PAUSE", 0.01)
    with contextlib.closing(RedisStore(redis_cluster.url)) as store:
        here: Any = store._servers
        mistake = broken(monkeypatch, cluster_threads.SyncCluster, "_learn")
        for _ in range(2):
            here._look()
            deadline = time.monotonic() + PATIENT
            while here._looks:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert mistake.times == 1
        assert here._map.known() != []


def test_what_a_thread_cannot_give_back_is_counted(redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not given back for an exception is counted, and the request is refused as it should be."""
    with contextlib.closing(RedisStore(redis_cluster.url, local_refusals=False)) as store:
        free, full = key_on(0), key_on(1)
        store.spend(plan(charge(full, "1/day")), 1)
        original = cluster_threads.SyncCluster._carry_out

        def carry_out(self: Any, parts: Any, listen_deadline: Any) -> Any:
            if parts[0].plan.verb == "adjust":
                raise UnforeseenError
            return original(self, parts, listen_deadline)

        monkeypatch.setattr(cluster_threads.SyncCluster, "_carry_out", carry_out)
        assert not store.spend(plan(charge(free), charge(full, "1/day")), 1).admitted
        assert store.not_given_back == 1


@pytest.mark.parametrize("door", ["threads", "asyncio"])
def test_slots_go_on_being_renewed(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What renews slots outlives an exception, and tries again."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", 0.02)
    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", 0.02)
    mistake = broken(monkeypatch, slot_keeper, "calls_of", 2)
    renewed = threading.Event()

    class Noted(MemoryStore):
        def spend(self, plan: Plan, timeout: float = 0) -> Any:
            if plan.charges[0].adjustment is not None and plan.charges[0].adjustment.back[0] < 0:
                renewed.set()
            return super().spend(plan)

    if door == "threads":
        with Limiter(Noted()).slot("key", 1):
            assert renewed.wait(PATIENT)
    else:

        async def hold() -> None:
            async with AsyncLimiter(Noted()).slot("key", 1):
                async with asyncio.timeout(PATIENT):
                    while not renewed.is_set():  # noqa: ASYNC110 - set by a timer of the library
                        await asyncio.sleep(0.01)

        asyncio.run(hold())
    assert mistake.times == 2


@in_a_loop
async def test_time_goes_on_for_those_who_wait() -> None:
    """One who fails at being told of the time takes it from nobody else."""
    clock = listening.ListeningClock()

    class Failing:
        def listened(self) -> float | None:
            raise UnforeseenError

    clock.watch(Failing())
    with pytest.raises(TimeoutError):
        async with clock.within(0.05):
            await asyncio.sleep(PATIENT)


@in_a_loop
async def test_a_name_that_is_none() -> None:
    """A name that cannot be looked up at all is an error at once, every time, and not only an `OSError`."""
    resolver = Resolver()
    for _ in range(2):
        async with asyncio.timeout(PATIENT / 4):
            with pytest.raises((UnicodeError, OSError)):
                await resolver.addresses("a" * 64 + ".example")


def test_no_descriptor_is_closed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that need the spare descriptor at the same time close it once: it may be somebody else's a moment later."""
    closed: list[int] = []
    monkeypatch.setattr("limitgate.stores.redis.dialer.os.close", closed.append)
    spare = Spare()
    spare.fill()
    gate = threading.Barrier(8)

    def release(_: int) -> bool:
        gate.wait()
        return spare.release()

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(release, range(8))) == 1
    assert len(closed) == 1


# --- the case that was found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["asyncio", "threads"])
def test_a_banned_key_on_a_cluster_with_leases(redis_cluster: RedisCluster, door: str) -> None:
    """A ban is a part of its own on a cluster: such a key is refused while this process holds leases of others."""
    name = uuid4().hex
    leased = Limit("1000/day", lease=50)

    async def on_asyncio() -> list[bool]:
        async with AsyncLimiter(redis_cluster.url, timeout=2) as limiter:
            await limiter.hit(f"{name}:leased", leased)
            for number in range(8):
                await limiter.ban(f"{name}:{number}", 60)
            hits = [limiter.hit(f"{name}:{number}", "50/day") for number in range(8)]
            return [decision.allowed for decision in await asyncio.wait_for(asyncio.gather(*hits), PATIENT)]

    def in_threads() -> list[bool]:
        with Limiter(redis_cluster.url, timeout=2) as limiter, ThreadPoolExecutor(8) as pool:
            limiter.hit(f"{name}:leased", leased)
            for number in range(8):
                limiter.ban(f"{name}:{number}", 60)
            return list(pool.map(lambda number: limiter.hit(f"{name}:{number}", "50/day").allowed, range(8)))

    assert (asyncio.run(on_asyncio()) if door == "asyncio" else in_threads()) == [False] * 8


def test_what_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake is reported once for its place, without its text; a failure of the store is none."""
    for _ in range(2):
        with internal_errors.logged_errors():
            raise UnforeseenError("a secret of a client")
    [message] = caplog.messages
    assert message.startswith("LG020 internal error in LimitGate: UnforeseenError at tests.behaviours.test_internal_errors:")
    assert "secret" not in message
    failure = StoreError("no answer", "timeout")
    assert internal_errors.internal_error(failure) is failure


@pytest.fixture(autouse=True)
def _no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dead: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: dead.append(args.exc_value))
    yield
    assert dead == []
