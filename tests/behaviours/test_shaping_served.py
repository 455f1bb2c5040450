"""Waiting for a turn under frameworks, on real servers and on a real Redis: it takes real time, but little."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from urllib.parse import urlsplit
from uuid import uuid4

import fastapi
import httpx
import pytest
from django.http import HttpResponse
from django.urls import path

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule, limit, open_store, open_sync_store
from limitgate.fastapi import RateLimit
from tests.support.django_app import WAYS, Way
from tests.support.doors import Wire, asgi_reply, http_scope, threaded_wsgi, uvicorn_process, wsgi_reply
from tests.support.outcomes import END, START, owed
from tests.support.redis_server import RedisServer

# isort: split
from limitgate.django.rest import Throttle
from tests.integrations.test_django_rest import view

SPACING = 0.05
"""Seconds between two turns."""
EARLY = 0.001
"""Seconds by which a test may measure a pause as shorter than it was."""
SLACK = 3.0
"""Seconds that a busy machine may add."""
SLOW = Rule("r", "20/second burst 1", key=["global"], max_delay=5)


class Passing:
    """Notes when requests pass, and in which thread."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.at: list[float] = []
        self.names: list[str] = []
        self.threads: set[int] = set()

    def note(self, name: str = "") -> None:
        self.at.append(time.monotonic())
        self.names.append(name)
        self.threads.add(threading.get_ident())

    def begin(self) -> None:
        """The first request is about to come."""
        self.began = time.monotonic()

    def check(self, count: int, spacing: float = SPACING) -> None:
        """All have passed, none before its turn, and none of them much later."""
        assert len(self.at) == count
        for number, at in enumerate(sorted(self.at)):
            assert number * spacing - EARLY <= at - self.began < number * spacing + SLACK


@pytest.fixture
def passing() -> Passing:
    return Passing()


class Heartbeat:
    """Whether an event loop goes on meanwhile: how often something else had its turn, which wanted it every 2 ms."""

    beats = 0

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            self.beats += 1


# --- frameworks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("awaits", [True, False], ids=["async def", "def"])
@pytest.mark.parametrize("how", ["rule", "decorator", "dependency"])
def test_fastapi(passing: Passing, how: str, *, awaits: bool) -> None:
    """Endpoints of either kind run at their turns, whatever makes them wait, and the event loop goes on meanwhile."""
    app, options = fastapi.FastAPI(), {"key": ["global"], "max_delay": "5s"}
    app.add_middleware(LimitGate, rules=[SLOW] if how == "rule" else [], store=MemoryStore())
    depends = [fastapi.Depends(RateLimit("20/second burst 1", **options))] if how == "dependency" else []
    decorate = limit("20/second burst 1", **options) if how == "decorator" else lambda endpoint: endpoint

    async def waiting() -> str:
        passing.note()
        return "hello"

    def sleeping() -> str:
        passing.note()
        return "hello"

    app.get("/", dependencies=depends)(decorate(waiting if awaits else sleeping))

    async def main() -> int:
        passing.begin()
        async with Heartbeat() as heart:
            replies = await asyncio.gather(*[asgi_reply(app) for _ in range(8)])
        assert [reply.status for reply in replies] == [200] * 8
        return heart.beats

    assert asyncio.run(main()) > 20
    passing.check(8)
    assert (threading.get_ident() in passing.threads) == awaits


class Slowly(Throttle):
    limits = ("20/second burst 1",)
    key = ("global",)
    max_delay = "5s"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.mark.parametrize("how", ["rule", "decorator", "throttle"])
def test_django(way: Way, passing: Passing, how: str) -> None:
    """In threads and on an event loop, at the gate, under a decorator or a throttle: one after the other, at its turn."""

    def hello(request: Any) -> HttpResponse:
        passing.note()
        return HttpResponse("hello")

    views = {
        "rule": hello,
        "decorator": limit("20/second burst 1", key=["global"], max_delay=5)(hello),
        "throttle": view(Slowly),
    }
    rules = [SLOW] if how == "rule" else []
    with way.project(path("x", views[how]), rules=rules, store=MemoryStore()) as project:
        began = time.monotonic()
        assert [project.ask("/x").status_code for _ in range(4)] == [200] * 4
        assert 3 * SPACING - EARLY <= time.monotonic() - began < 3 * SPACING + SLACK


def test_django_on_an_event_loop_holds_nobody_up(passing: Passing) -> None:
    """The event loop goes on while requests wait in Django."""

    async def hello(request: Any) -> HttpResponse:
        passing.note()
        return HttpResponse("hello")

    async def main(project: Any) -> int:
        passing.begin()
        async with Heartbeat() as heart:
            responses = await asyncio.gather(*[project.aask("/x") for _ in range(8)])
        assert [response.status_code for response in responses] == [200] * 8
        return heart.beats

    with WAYS["asgi"].project(path("x", hello), rules=[SLOW], store=MemoryStore()) as project:
        assert asyncio.run(main(project)) > 20
    passing.check(8)


def test_who_leaves_django_gives_the_turn_back() -> None:
    """Django cancels a request whose client has left, and that gives its turn back."""
    from django.core.asgi import get_asgi_application

    store = MemoryStore()
    slow = Rule("r", "1/minute", key=["global"], max_delay=60)
    with WAYS["asgi"].project(path("x", lambda _: HttpResponse("hello")), rules=[slow], store=store):
        app = get_asgi_application()

        async def main() -> None:
            first = await Wire({"type": "http.request"}).call(app, http_scope("/x"))
            assert first.sent[0]["status"] == 200
            left = Wire({"type": "http.request"}, {"type": "http.disconnect"})
            await left.call(app, http_scope("/x"))
            assert not left.sent

        asyncio.run(main())
    assert sum(owed(store, time.time_ns() // 1000).values()) <= 1


# --- Redis ------------------------------------------------------------------------------------------------------------


def test_a_crowd_on_redis_passes_in_order(redis_server: RedisServer, passing: Passing) -> None:
    """Turns are booked by the server's clock in the order of arrival; nobody waits for the store meanwhile."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passing.note(scope["path"])
        await send(START)
        await send(END)

    async def main() -> None:
        gate = LimitGate(app, rules=[SLOW], store=open_store(redis_server.url), key_prefix=uuid4().hex, timeout=5)
        passing.begin()
        replies = await asyncio.gather(*[asgi_reply(gate, f"/{number:02}") for number in range(20)])
        assert [reply.status for reply in replies] == [200] * 20
        await gate.gate.store.aclose()

    asyncio.run(main())
    passing.check(20)
    assert passing.names == sorted(passing.names)


def test_threads_on_redis_pass_evenly(redis_server: RedisServer, passing: Passing) -> None:
    """Threads sleep until their turns, each by itself, and leave the store to the others."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        passing.note()
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello"]

    store = open_sync_store(redis_server.url)
    gate = LimitGateWSGI(app, rules=[SLOW], store=store, key_prefix=uuid4().hex, timeout=5)
    passing.begin()
    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(lambda _: wsgi_reply(gate), range(12)))
    store.close()
    assert [reply.status for reply in replies] == [200] * 12
    passing.check(12)


def test_processes_share_a_line(redis_server: RedisServer, passing: Passing) -> None:
    """What one gate has booked, another one waits behind, and what it gives back, the other one may have."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passing.note(scope["path"])
        await send(START)
        await send(END)

    async def main() -> None:
        rule, prefix = Rule("r", "1/second burst 1", key=["global"], max_delay=5), uuid4().hex
        stores = [open_store(redis_server.url) for _ in range(2)]
        one, two = [LimitGate(app, rules=[rule], store=store, key_prefix=prefix, timeout=5) for store in stores]
        await asgi_reply(one, "/first")
        left = asyncio.create_task(asgi_reply(one, "/left"))
        await asyncio.sleep(0.05)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await asgi_reply(two, "/second")
        for store in stores:
            await store.aclose()

    asyncio.run(main())
    assert passing.names == ["/first", "/second"]
    assert 0.9 < passing.at[1] - passing.at[0] < 1.9, "later if nothing was given back"


def test_a_redis_that_fails_meanwhile_lets_pass_who_waits(own_redis: RedisServer, passing: Passing) -> None:
    """A turn that is booked needs no store any more; what cannot be given back lapses."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passing.note(scope["path"])
        await send(START)
        await send(END)

    async def main() -> None:
        rule = Rule("r", "1/second burst 1", key=["global"], max_delay=5)
        gate = LimitGate(app, rules=[rule], store=open_store(own_redis.url), timeout=5)
        await asgi_reply(gate, "/first")
        waiting, leaving = [asyncio.create_task(asgi_reply(gate, f"/{name}")) for name in ("waiting", "leaving")]
        await asyncio.sleep(0.05)
        own_redis.stop()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await waiting).status == 200
        await gate.gate.store.aclose()

    asyncio.run(main())
    assert passing.names == ["/first", "/waiting"]


# --- served -----------------------------------------------------------------------------------------------------------

APP = """
from limitgate import LimitGate, Rule


async def app(scope, receive, send):
    size, more = 0, scope["type"] == "http"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})

rule = Rule("r", "1/second burst 1", path="/{who}", key=["path", "header:x-who"], max_delay=5)
app = LimitGate(app, rules=[rule], timeout=5)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[str]:
    """A uvicorn with a gate on Redis, that makes requests of one ``x-who`` pass a second apart."""
    folder = tmp_path_factory.mktemp("shaped")
    (folder / "shaped.py").write_text(APP)
    environment = {"LIMITGATE_STORE": redis_server.url, "LIMITGATE_KEY_PREFIX": uuid4().hex}
    with uvicorn_process("shaped:app", folder, "--app-dir", str(folder), "--lifespan", "off", **environment) as url:
        yield url


def test_uvicorn(url: str) -> None:
    """Requests through a real server pass at their turns, by Redis' clock."""
    who = uuid4().hex
    with httpx.Client(base_url=url, headers={"x-who": who}) as client:
        began = time.monotonic()
        assert [client.get("/x").status_code for _ in range(2)] == [200, 200]
        assert 1 - EARLY - 0.05 <= time.monotonic() - began < 1 + SLACK


def test_an_upload_through_uvicorn(url: str) -> None:
    """A chunked upload, much of which comes while the request waits, is whole, with Expect: 100-continue or without."""
    who, parts = uuid4().hex, [b"x" * 50_000] * 20

    def slowly() -> Iterator[bytes]:
        for part in parts:
            yield part
            time.sleep(0.005)

    with httpx.Client(base_url=url, headers={"x-who": who}) as client:
        client.get("/x")
        assert client.post("/x", content=slowly()).text == "1000000"


def test_who_leaves_uvicorn_gives_the_turn_back(url: str, redis_server: RedisServer) -> None:
    """A connection that is closed while its request waits is noticed at once, and whoever comes next has the turn."""
    who = uuid4().hex
    address = urlsplit(url)
    with httpx.Client(base_url=url, headers={"x-who": who}) as client:
        client.get("/x")
        began = time.monotonic()
        for _ in range(5):
            with socket.create_connection((address.hostname, address.port)) as connection:
                connection.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nX-Who: %s\r\n\r\n" % who.encode())
                time.sleep(0.01)
            time.sleep(0.01)
        assert client.get("/x").status_code == 200
        assert time.monotonic() - began < 1.9, "later if a turn was not given back"


def test_a_threaded_server(passing: Passing) -> None:
    """Each request sleeps in a thread of its own."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        passing.note()
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello"]

    gate = LimitGateWSGI(app, rules=[SLOW], store=MemoryStore())
    passing.begin()
    with threaded_wsgi(gate) as url, ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(lambda _: httpx.get(url).status_code, range(8)))
    assert statuses == [200] * 8
    passing.check(8)
