"""What outlives a request: it has nothing of the request's context, and no connection outlives the store that made it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context, ContextVar
from typing import Any
from weakref import ref

import pytest

from limitgate import AsyncLimiter, Limit, LimitGate, Rule, StoreError
from limitgate.gate import slot_keeper
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

PATIENT = 20.0
REQUEST: ContextVar[object] = ContextVar("request", default=None)


class Request:
    """What an application keeps in a context variable: the log of the request, its session, its body."""


async def _app(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _asked(gate: Any) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": [], "query_string": b""}
    await gate({**scope, "client": ("192.0.2.1", 5), "scheme": "http", "server": ("host", 80)}, receive, send)
    assert sent[0]["status"] == 200


def _gate(url: str, **options: Any) -> Any:
    return LimitGate(_app, rules=[Rule("all", **{"qpd": 1000, **options})], store=url)


async def _gated(url: str, **options: Any) -> object:
    gate = _gate(url, **options)
    await _asked(gate)
    return gate


async def _hit(url: str) -> object:
    limiter = AsyncLimiter(url)
    await limiter.hit("key", "1000/day")
    return limiter


async def _hit_several(url: str) -> object:
    """Ask for buckets that are on several nodes of a cluster."""
    limiter = AsyncLimiter(url)
    await asyncio.gather(*[limiter.hit(f"key {n}", "1000/day", Limit("9/day", algorithm="sliding_log")) for n in range(20)])
    return limiter


async def _hit_leased(url: str) -> object:
    limiter = AsyncLimiter(url)
    await limiter.hit("leased", Limit("1000/day", lease=10))
    return limiter


async def _waited(url: str) -> object:
    limiter = AsyncLimiter(url)
    await asyncio.gather(*[limiter.wait("turns", "50/second burst 1", timeout=PATIENT) for _ in range(3)])
    return limiter


async def _configured(url: str) -> object:
    limiter = AsyncLimiter(url)
    async with limiter.slot("slot", 1000):
        pass
    return limiter


USES: dict[str, Callable[[str], Awaitable[object]]] = {
    "limiter": _hit,
    "buckets on several nodes": _hit_several,
    "lease": _hit_leased,
    "turns": _waited,
    "slot": _configured,
    "gate": _gated,
    "adaptive": lambda url: _gated(url, adaptive=True),
    "places in flight": lambda url: _gated(url, limits=["9 at once"]),
}


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "server":
        return str(request.getfixturevalue("redis_server").url)
    return str(request.getfixturevalue("redis_cluster").url)


@pytest.fixture(autouse=True)
def _timers_ring_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of slots keeps its store until it rings, and asyncio keeps cancelled timers that would ring later."""
    monkeypatch.setattr(slot_keeper, "RENEW", 0.5)


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT
    for looks in itertools.count():
        if condition():
            break
        assert time.monotonic() < deadline
        if looks % 50 == 9:
            gc.collect()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_connection_keeps_the_context_of_the_request_that_made_it(url: str, use: Callable[[str], Awaitable[object]]) -> None:
    """What a request has in context variables is free once it is over, however long the connection is used."""

    async def first() -> tuple[object, ref[Request]]:
        REQUEST.set(request := Request())
        return await use(url), ref(request)

    async def serve() -> None:
        store, request = await asyncio.create_task(first())
        await _until(lambda: request() is None)
        assert store is not None

    asyncio.run(serve())


CROWDS: dict[str, Callable[[AsyncLimiter], Awaitable[object]]] = {
    "of requests": lambda limiter: limiter.hit("crowd", "100000/day"),
    "that waits for turns": lambda limiter: limiter.wait("crowd", "1000/second burst 1", timeout=PATIENT),
    "of buckets on several nodes": lambda limiter: limiter.hit(
        "crowd", "100000/day", Limit("100000/day", algorithm="sliding_window"), "100000/hour"
    ),
}


@pytest.mark.parametrize("asks", CROWDS.values(), ids=CROWDS)
def test_no_crowd_keeps_the_context_of_the_request_that_began_it(url: str, asks: Callable[[AsyncLimiter], Any]) -> None:
    """Timers and queues that go on as long as somebody waits have nothing of who was the first to wait."""

    async def keep_asking(limiter: AsyncLimiter) -> None:
        while True:
            await asks(limiter)

    async def first(limiter: AsyncLimiter) -> tuple[list[Any], ref[Request]]:
        REQUEST.set(request := Request())
        asking = asyncio.create_task(asks(limiter))
        await asyncio.sleep(0)
        empty = Context()
        others = [asyncio.create_task(keep_asking(limiter), context=empty.copy()) for _ in range(200)]
        await asking
        return others, ref(request)

    async def serve() -> None:
        async with AsyncLimiter(url) as limiter:
            others, request = await asyncio.create_task(first(limiter))
            await _until(lambda: request() is None)
            for other in others:
                other.cancel()
            await asyncio.wait(others)

    asyncio.run(serve())


@asynccontextmanager
async def _listening() -> AsyncIterator[list[tuple[str, object]]]:
    """The lines of the log of the store, and the request in whose context each was written."""
    lines: list[tuple[str, object]] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.getMessage(), REQUEST.get()))

    log, handler = logging.getLogger("limitgate.store"), Noted()
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def test_lines_about_an_outage_are_of_no_request(own_redis: RedisServer) -> None:
    """An outage that is seen by a connection or a probe is logged in no request's context, as none is under way."""

    async def serve() -> None:
        async with _listening() as lines, AsyncLimiter(own_redis.url, timeout=0.5) as limiter:

            async def ask(number: int) -> None:
                REQUEST.set(number)
                await limiter.hit("key", "1000/day")

            await asyncio.create_task(ask(1))
            own_redis.kill()
            for number in range(2, 30):
                await asyncio.gather(asyncio.create_task(ask(number)), return_exceptions=True)
            await _until(lambda: any("does not answer" in line for line, _ in lines))
            own_redis.start()
            await _until(lambda: any("answers again" in line for line, _ in lines))
            assert {request for _, request in lines} == {None}

    asyncio.run(serve())


def _connections(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("clients")["connected_clients"]) - 1


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_store_that_is_dropped_closes_its_connection(own_redis: RedisServer, use: Callable[[str], Awaitable[object]]) -> None:
    """In an event loop that runs on, no connection is left of limiters and gates that nobody has any more."""

    async def serve() -> None:
        stores = [await use(own_redis.url) for _ in range(5)]
        assert _connections(own_redis) == 5
        stores.clear()
        await _until(lambda: not _connections(own_redis))

    asyncio.run(serve())


def test_a_dropped_store_of_a_cluster_closes_its_connections(redis_cluster: RedisCluster) -> None:
    """So do those to the nodes of a cluster."""

    async def serve() -> None:
        before = [_connections(node) for node in redis_cluster.nodes]
        store = await _hit_several(redis_cluster.url)
        assert sum(_connections(node) for node in redis_cluster.nodes) > sum(before)
        del store
        await _until(lambda: [_connections(node) for node in redis_cluster.nodes] <= before)

    asyncio.run(serve())


@pytest.mark.parametrize("hangs", [False, True], ids=["refused", "hangs"])
def test_a_store_that_is_dropped_in_an_outage_looks_for_redis_no_more(own_redis: RedisServer, *, hangs: bool) -> None:
    """Neither probes nor attempts to connect keep a store for which nobody waits."""

    async def serve() -> None:
        limiter = AsyncLimiter(own_redis.url, timeout=0.05)
        await _failing(limiter)
        store = ref(limiter._store)
        del limiter
        await _until(lambda: store() is None)

    async def _failing(limiter: AsyncLimiter) -> None:
        while limiter._store.healthy:  # type: ignore[attr-defined]
            with pytest.raises(StoreError):
                await limiter.hit("key", "1000/day")

    if hangs:
        with own_redis.frozen():
            asyncio.run(serve())
    else:
        own_redis.kill()
        asyncio.run(serve())


def test_a_request_under_way_keeps_its_store(own_redis: RedisServer) -> None:
    """A store is not closed before whoever waits has an answer."""

    async def serve() -> None:
        limiter = AsyncLimiter(own_redis.url)
        await limiter.hit("key", "1000/day")
        with own_redis.frozen():
            asking = asyncio.ensure_future(limiter.hit("key", "1000/day"))
            del limiter
            for _ in range(5):
                await asyncio.sleep(0.01)
                gc.collect()
            assert not asking.done()
        assert (await asking).allowed

    asyncio.run(serve())
