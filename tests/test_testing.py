"""`limitgate.testing`: switches for whole processes, whatever is limited there and however it was made."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

import httpx
import pytest
import requests
import urllib3
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from flask import Flask
from requests.adapters import BaseAdapter
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

import limitgate.httpx
import limitgate.requests
import limitgate.urllib3
from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Configured,
    Limit,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RateLimited,
    RedisStore,
    Rule,
    StoreError,
    ausage,
    limit,
    usage,
)
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.gate.gate import Gate
from limitgate.limits.decision import Decision
from limitgate.process import waiting
from limitgate.testing import FrozenClock, frozen, off, reset
from tests.support.clock import Clock
from tests.support.django_app import WAYS, hello
from tests.support.doors import ASGISite, WSGISite, asgi_reply, wsgi_reply
from tests.support.proxy import in_a_loop
from tests.support.redis_server import RedisServer

# isort: split
from django.urls import path

NOWHERE = "redis://127.0.0.1:1"
TWICE = Rule("twice", "2/minute")

Ask = Callable[[], int]


# --- applications, each of which admits two requests a minute -----------------------------------------------------------


def starlette(**options: Any) -> Ask:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse(repr(request.scope["limitgate"]))

    app = LimitGate(Starlette(routes=[Route("/", answer)]), **{"rules": [TWICE], **options})
    return lambda: asyncio.run(asgi_reply(app)).status


def decorated(**options: Any) -> Ask:
    @limit("2/minute")
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("")

    app = LimitGate(Starlette(routes=[Route("/", answer)]), **{"rules": [], **options})
    return lambda: asyncio.run(asgi_reply(app)).status


def dependency(**options: Any) -> Ask:
    app = FastAPI()
    app.add_middleware(LimitGate, **{"rules": [], **options})

    @app.get("/")
    async def answer(decision: Annotated[Decision | None, Depends(RateLimit("2/minute"))]) -> str:
        return repr(decision)

    return lambda: asyncio.run(asgi_reply(app)).status


def flask(**options: Any) -> Ask:
    app = Flask(__name__)
    FlaskLimitGate(app, **{"rules": [], **options})
    app.route("/")(limit("2/minute")(lambda: ""))
    return lambda: wsgi_reply(app.wsgi_app).status


def wsgi(**options: Any) -> Ask:
    def answer(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("content-type", "text/plain")])
        return [repr(environ["limitgate"]).encode()]

    app = LimitGateWSGI(answer, **{"rules": [TWICE], **options})
    return lambda: wsgi_reply(app).status


APPS = {"starlette": starlette, "decorated": decorated, "dependency": dependency, "flask": flask, "wsgi": wsgi}


@pytest.fixture(params=APPS.values(), ids=APPS)
def make(request: pytest.FixtureRequest) -> Callable[..., Ask]:
    found: Callable[..., Ask] = request.param
    return found


def statuses(ask: Ask, count: int) -> list[int]:
    return [ask() for _ in range(count)]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Whatever a test replaced is back afterwards."""
    owners = (Gate, Limiter, AsyncLimiter, MemoryStore, RedisStore, AsyncRedisStore, waiting)
    before = [_attributes(owner) for owner in owners]
    yield
    assert [_attributes(owner) for owner in owners] == before


def _attributes(owner: Any) -> dict[str, Any]:
    """All but those that Python itself adds to a class in the course of time."""
    return {name: each for name, each in vars(owner).items() if not name.startswith(("__", "_abc"))}


# --- off --------------------------------------------------------------------------------------------------------------


def test_nothing_is_limited_while_it_is_off(make: Callable[..., Ask]) -> None:
    """An application made before is not limited, nothing is charged meanwhile, and afterwards it goes on where it was."""
    ask = make()
    assert statuses(ask, 1) == [200]
    with off():
        assert statuses(ask, 5) == [200] * 5
        with off():
            assert statuses(ask, 2) == [200] * 2
        assert statuses(ask, 2) == [200] * 2
    assert statuses(ask, 3) == [200, 429, 429]


def test_what_is_made_meanwhile_is_limited_afterwards(make: Callable[..., Ask]) -> None:
    """An application that was made while it was off is like any other."""
    with off():
        ask = make()
        assert statuses(ask, 3) == [200] * 3
    assert statuses(ask, 3) == [200, 200, 429]


def test_no_store_need_be_there(make: Callable[..., Ask]) -> None:
    """Stores are not asked, whatever ``on_error`` says."""
    ask = make(store=NOWHERE, on_error="closed")
    assert statuses(ask, 1) == [503]
    with off():
        assert statuses(ask, 2) == [200, 200]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_django(way: Any) -> None:
    """So it is in each of Django's ways."""
    with way.project(path("x", limit("1/minute")(hello)), rules=[TWICE]) as project, off():
        assert project.statuses(*["/x"] * 4) == [200] * 4
    with off(), way.project(path("x", hello), rules=[TWICE]) as project:
        assert project.statuses(*["/x"] * 4) == [200] * 4
    with off(), way.project(path("x", limit("1/minute")(hello)), gates=0) as project:
        assert project.statuses(*["/x"] * 4) == [200] * 4


def test_no_store_need_be_there_at_start() -> None:
    """Not even one that is required; whoever starts later is asked again."""

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("")

    def started() -> int:
        app = Starlette(routes=[Route("/", answer)])
        app.add_middleware(LimitGate, rules=[TWICE], store=NOWHERE, require_store=True)
        with TestClient(app) as client:
            return client.get("/").status_code

    with off():
        assert started() == 200
        assert wsgi(store=NOWHERE, require_store=True)() == 200
    for start in (started, lambda: wsgi(store=NOWHERE, require_store=True)):
        with pytest.raises(StoreError):
            start()


def test_a_request_is_like_an_exempt_one() -> None:
    """It has no decision and no rate fields."""

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse(repr(request.scope["limitgate"]))

    app = LimitGate(Starlette(routes=[Route("/", answer)]), rules=[TWICE])
    with off():
        reply = asyncio.run(asgi_reply(app))
    assert (reply.body, reply.rate) == (b"None", {})


def test_a_decorated_function_needs_no_gate() -> None:
    """A unit test may call a view as it is."""
    view = limit("1/minute")(lambda: "called")
    with pytest.raises(ConfigError):
        view()
    with off():
        assert [view(), view()] == ["called"] * 2
    with pytest.raises(ConfigError):
        view()


def test_messages_over_a_websocket() -> None:
    """They are not counted either, on a connection that was there before and on a new one."""

    @limit("1/minute", per="message")
    async def echo(websocket: Any) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)

    app = LimitGate(Starlette(routes=[WebSocketRoute("/", echo)]), rules=[])

    def said(websocket: Any) -> str:
        websocket.send_text("hello")
        text: str = websocket.receive_text()
        return text

    client = TestClient(app)
    with client.websocket_connect("/") as websocket:
        said(websocket)
        with off():
            assert [said(websocket) for _ in range(3)] == ["hello"] * 3
            with client.websocket_connect("/") as another:
                assert [said(another) for _ in range(3)] == ["hello"] * 3
                said(another)


def test_a_request_under_way_ends_as_it_began() -> None:
    """What was charged before is refunded by its outcome, and what began meanwhile is not charged afterwards."""
    store = MemoryStore(Clock())
    switch = off()
    app = FastAPI()
    app.add_middleware(LimitGate, store=store, rules=[Rule("failed", "2/minute", charge_if={"status": [404]})])

    @app.get("/on")
    async def on() -> None:
        switch.__enter__()

    @app.get("/off", dependencies=[Depends(lambda: switch.__exit__(None, None, None)), Depends(RateLimit("1/minute"))])
    async def then_off() -> None:
        pass

    client = TestClient(app)
    assert [client.get(url).status_code for url in ("/on", "/off", "/on", "/off", "/on", "/off")] == [200] * 6
    assert [client.get("/none").headers["x-ratelimit-remaining"] for _ in range(2)] == ["1", "0"]


def test_all_threads_and_event_loops() -> None:
    """The switch is for the process: a loop and threads that run already heed it, and it stays until all are done with it."""
    ask, inside, done = wsgi(), threading.Event(), threading.Event()

    def holding() -> None:
        with off():
            inside.set()
            done.wait(5)

    thread = threading.Thread(target=holding)
    thread.start()
    inside.wait(5)
    with off():
        assert statuses(ask, 3) == [200] * 3
    assert statuses(ask, 3) == [200] * 3
    done.set()
    thread.join()
    assert statuses(ask, 3) == [200, 200, 429]

    async def main() -> list[bool]:
        limiter, found = AsyncLimiter("memory://"), []

        async def asking() -> None:
            for _ in range(6):
                found.append((await limiter.hit("key", "1/minute")).allowed)
                await asyncio.sleep(0)

        task = asyncio.ensure_future(asking())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with off():
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await task
        return found

    assert asyncio.run(main()) == [True, False, True, True, False, False]


def test_a_limiter_admits_everything() -> None:
    """Whatever it does, it does without its store, as if nobody had used the key."""
    limiter = Limiter(NOWHERE)
    with pytest.raises(StoreError):
        limiter.hit("key", "1/minute")
    with off():
        decisions = [
            *[limiter.hit("key", "2/minute", cost=3) for _ in range(3)],
            limiter.hit("key", "2/minute", Limit("1/day", algorithm="sliding_log")),
            limiter.wait("key", "2/minute", cost=9),
            limiter.peek("key", "2/minute"),
            limiter.hit_up_to("key", "2/minute", cost=7),
            limiter.refund("key", "2/minute"),
            limiter.reset("key", "2/minute"),
            limiter.ban("key"),
            limiter.penalize("key", 5),
            limiter.banned("key"),
            limiter.hit("key", Configured("unknown")),
        ]
        limiter.pardon("key")
        reservation = limiter.reserve("key", "2/minute", cost=5)
        with limiter.slot("key", 1) as first, limiter.slot("key", 1) as second:
            decisions += [first, second]
        assert limiter.configure("orders", "2/minute") == (Limit("2/minute"),)
        assert limiter.limited("1/minute")(lambda: "called")() == "called"
        assert list(limiter.pace("abc", "1/minute")) == ["a", "b", "c"]
        with pytest.raises(ConfigError):
            limiter.hit("key", "nonsense")
    reservation.settle(1)
    assert all(decision.allowed and not decision.retry_after and not decision.degraded for decision in decisions)
    first = decisions[0]
    assert (first.granted, first.limit, first.remaining, first.reset_after, len(first.windows)) == (3, 2, 2, 0.0, 1)
    assert decisions[6].granted == 7
    with pytest.raises(StoreError):
        limiter.hit("key", "1/minute")


@in_a_loop
async def test_of_async_limiter() -> None:
    """So does an async one."""
    limiter = AsyncLimiter(NOWHERE)
    with off():
        decisions = [
            *[await limiter.hit("key", "2/minute", cost=3) for _ in range(3)],
            await limiter.wait("key", "2/minute", cost=9),
            await limiter.hit_up_to("key", "2/minute", cost=7),
            await limiter.hit("key", Configured("unknown")),
            await limiter.ban("key"),
        ]
        reservation = await limiter.reserve("key", "2/minute", cost=5)
        async with limiter.slot("key", 1) as first, limiter.slot("key", 1) as second:
            decisions += [first, second]
        assert [item async for item in limiter.pace("abc", "1/minute")] == ["a", "b", "c"]
    await reservation.settle(1)
    assert all(decision.allowed for decision in decisions)
    with pytest.raises(StoreError):
        await limiter.hit("key", "1/minute")


def test_one_bucket_of_a_rule() -> None:
    """It is as if nobody had used it, and what is done to it meanwhile has no effect; whenever it was made."""
    limiter = Limiter(MemoryStore(Clock()))
    before = limiter.bucket(TWICE, ip="192.0.2.1")
    before.ban(60)
    with off():
        meanwhile = limiter.bucket(TWICE, ip="192.0.2.2")
        for bucket in (before, meanwhile):
            assert bucket.peek().allowed
            bucket.ban(60)
            bucket.pardon()
            assert bucket.reset().allowed
    assert not before.peek().allowed
    assert meanwhile.peek().allowed
    meanwhile.ban(60)
    assert not meanwhile.peek().allowed


def test_what_is_configured_meanwhile_has_no_effect() -> None:
    """Neither in the store nor in what a limiter remembers. Limits that were configured before are those of decisions."""
    with Limiter("memory://") as limiter:
        with off():
            limiter.configure("orders", "1/minute")
        with pytest.raises(ConfigError, match="no limits are configured"):
            limiter.hit("key", Configured("orders"))
        limiter.configure("orders", "5/minute")
        with off():
            assert limiter.hit("key", Configured("orders")).limit == 5
            limiter.configure("orders", "1/minute")
        assert limiter.hit("key", Configured("orders")).limit == 5


def test_what_is_left_is_not_shown() -> None:
    """No rule applies, so there is nothing to show."""
    found: list[Any] = []

    def answer(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("content-type", "text/plain")])
        found.append(usage(environ, "twice"))
        return [b""]

    async def aanswer(request: Any) -> PlainTextResponse:
        found.append(await ausage(request, "twice"))
        return PlainTextResponse("")

    apps = LimitGateWSGI(answer, rules=[TWICE]), LimitGate(Starlette(routes=[Route("/", aanswer)]), rules=[TWICE])
    with off():
        wsgi_reply(apps[0])
        asyncio.run(asgi_reply(apps[1]))
    wsgi_reply(apps[0])
    assert [len(windows) for windows in found] == [0, 0, 1]


def test_a_limiter_made_meanwhile_limits_afterwards() -> None:
    """It has a store of its own, and slots."""
    with off():
        limiter = Limiter("memory://")
        paced = limiter.pace("ab", "1/minute")
        assert next(paced) == "a"
        kept = limiter.reserve("key", "1/minute")
    assert [limiter.hit("key", "1/minute").allowed for _ in range(2)] == [True, False]
    kept.cancel()
    assert not limiter.hit("key", "1/minute").allowed
    with limiter.slot("key", 1), pytest.raises(RateLimited), limiter.slot("key", 1):
        pass


class Answering(BaseAdapter):
    """Answers without a network."""

    def send(self, request: Any, *_: Any, **__: Any) -> Any:
        response = requests.Response()
        response.status_code, response.headers["Retry-After"] = 429, "60"
        response.request, response.url = request, request.url
        return response

    def close(self) -> None:
        pass


def test_outbound_clients_send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for nothing, and give whatever was answered, a refusal too."""
    answering = httpx.MockTransport(lambda _: httpx.Response(429, headers={"Retry-After": "60"}))
    transport = limitgate.httpx.RateLimitTransport("1/minute", limiter=NOWHERE, transport=answering)
    session = requests.Session()
    session.mount("http://", limitgate.requests.RateLimitAdapter("1/minute", limiter=NOWHERE, adapter=Answering()))
    manager = limitgate.urllib3.RateLimitPoolManager("1/minute", limiter=NOWHERE)
    refused = lambda *_, **__: urllib3.HTTPResponse(status=429, headers={"Retry-After": "60"}, preload_content=False)  # noqa: E731
    monkeypatch.setattr(urllib3.HTTPConnectionPool, "urlopen", refused)
    with off(), httpx.Client(transport=transport) as client:
        assert [client.get("http://shop").status_code for _ in range(3)] == [429] * 3
        assert [session.get("http://shop").status_code for _ in range(3)] == [429] * 3
        assert [manager.request("GET", "http://shop", retries=False).status for _ in range(3)] == [429] * 3


def test_it_cannot_be_taken_for_a_decorator() -> None:
    """Around an async function that would do nothing, in silence."""
    with pytest.raises(TypeError):
        off()(lambda: None)  # type: ignore[operator]


# --- frozen -----------------------------------------------------------------------------------------------------------


def test_the_clock_goes_on_when_told(make: Callable[..., Ask]) -> None:
    """Stores made before and meanwhile go by it, those with a clock of their own, too."""
    before = make(), make(store=MemoryStore(Clock()))
    with frozen() as clock:
        for ask in (*before, make()):
            assert statuses(ask, 3) == [200, 200, 429]
            clock.advance(29.999_999)
            assert statuses(ask, 1) == [429]
            clock.advance(0.000_001)
            assert statuses(ask, 2) == [200, 429]


def test_the_clock_goes_on_when_told_on_redis(make: Callable[..., Ask]) -> None:
    """Whatever the ``store`` in code: Redis is not asked, and need not be there."""
    before = make(store=NOWHERE, on_error="closed")
    with frozen() as clock:
        for ask in (before, make(store=NOWHERE, on_error="closed", key_prefix="other")):
            assert statuses(ask, 3) == [200, 200, 429]
            clock.advance(29.999_999)
            assert statuses(ask, 1) == [429]
            clock.advance(0.000_001)
            assert statuses(ask, 2) == [200, 429]
            reset()
            assert statuses(ask, 3) == [200, 200, 429]
    assert statuses(before, 1) == [503]


class _Counted:
    """Credentials, which each new connection asks."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> tuple[str, str]:
        self.asked += 1
        return "app", "secret"


@pytest.mark.parametrize(
    "url", [f"{NOWHERE}/0", "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/m"], ids=["one", "cluster", "sentinel"]
)
def test_a_start_connects_to_no_redis(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a WSGI application that is made meanwhile nor ASGI's lifespan. Both stores are used afterwards."""
    credentials = _Counted()
    answer = Starlette(routes=[Route("/", lambda _: PlainTextResponse(""))])
    there = AsyncRedisStore(url, credentials=credentials)
    gate = LimitGate(answer, rules=[TWICE], store=there)
    with closing(RedisStore(url, credentials=credentials)) as store:
        with frozen():
            ask = wsgi(store=store, on_error="closed")
            with TestClient(gate) as client:
                assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]
                time.sleep(0.4)
            assert statuses(ask, 3) == [200, 200, 429]
            assert (credentials.asked, store.failures, there.failures, caplog.messages) == (0, 0, 0, [])
        assert statuses(ask, 1) == [503]
        with TestClient(gate) as client:
            client.get("/")
        assert store.failures
        assert there.failures


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_open_connections_are_not_used(is_async: Any, own_redis: RedisServer) -> None:
    """Neither to give back leases that end meanwhile, nor to agree on the key of refusals' ids."""
    leased = Rule("leased", Limit("20/minute", lease=9), key=["global"])
    closed = Rule("closed", "1/minute", path="/closed", key=["global"])
    kind: Any = ASGISite if is_async else WSGISite
    with kind(leased, closed, store=own_redis.url) as site, own_redis.client() as client:

        def commands() -> int:
            return int(client.info("stats")["total_commands_processed"])

        assert site.statuses(1) == [200]
        site.idle(0.2)
        with frozen():
            before = commands()
            assert site.statuses(2, "/closed") == [200, 429]
            site.idle(1.5)
            assert commands() == before + 1
        assert site.statuses(2, "/closed") == [200, 429]


def test_redis_is_as_it_was_afterwards(redis_server: RedisServer) -> None:
    """What was charged before stays charged, and nothing that happened in the block is known."""
    key = uuid4().hex
    with Limiter(redis_server.url) as limiter:
        assert limiter.hit(key, "2/minute").remaining == 1
        with frozen() as clock:
            assert [limiter.hit(key, "2/minute").allowed for _ in range(3)] == [True, True, False]
            limiter.ban(key, 3600)
            limiter.configure(key, "1/minute")
            clock.advance(60)
            with frozen() as inner:
                inner.advance(3600)
                assert limiter.hit(key, "2/minute").remaining == 1
            assert not limiter.hit(key, "2/minute").allowed
        assert limiter.hit(key, "2/minute").allowed


def test_stores_on_redis_share_buckets_by_their_url() -> None:
    """One bucket for all who would ask the same server, a bucket each for others; threads and event loops alike."""
    with frozen(), Limiter(NOWHERE) as limiter, Limiter(f"{NOWHERE}/2") as other:
        asynchronous = AsyncLimiter(AsyncRedisStore(NOWHERE))
        assert limiter.hit("key", "1/minute").allowed
        assert not asyncio.run(asynchronous.hit("key", "1/minute")).allowed
        assert other.hit("key", "1/minute").allowed
        limiter.configure("orders", "1/minute")
        assert asyncio.run(asynchronous.hit("key", Configured("orders"))).limit == 1
        with pytest.raises(ConfigError, match="no limits are configured"):
            other.hit("key", Configured("orders"))


def test_waits_and_slots_on_redis_take_no_time() -> None:
    """Turns, pauses and slots that are renewed go by the clock as they do in memory."""
    began = time.monotonic()

    async def waiting_there(clock: FrozenClock) -> None:
        limiter, at = AsyncLimiter(NOWHERE), clock.now
        assert all([(await limiter.wait("async", "1/minute")).allowed for _ in range(3)])
        assert clock.now - at == 120
        async with limiter.slot("slot", 1):
            clock.advance(3600)
            with pytest.raises(RateLimited):
                async with limiter.slot("slot", 1):
                    pass

    with frozen() as clock, Limiter(NOWHERE) as limiter:
        at = clock.now
        assert all(limiter.wait("key", "1/minute").allowed for _ in range(3))
        assert clock.now - at == 120
        with limiter.slot("key", 1):
            clock.advance(3600)
            with pytest.raises(RateLimited), limiter.slot("key", 1):
                pass
        asyncio.run(waiting_there(clock))
        ask = wsgi(rules=[Rule("slow", "1/minute", max_delay=60, key=["global"])], store=NOWHERE)
        assert statuses(ask, 2) == [200, 200]
    assert time.monotonic() - began < 30


def test_leases_and_sliding_logs_on_redis() -> None:
    """Limits that Redis would keep in another way are kept as well."""
    with frozen() as clock, Limiter(NOWHERE) as limiter:
        for limit_ in (Limit("2/minute", lease=2), Limit("2/minute", algorithm="sliding_log"), Limit("2/minute", lease=2)):
            assert [limiter.hit("key", limit_).allowed for _ in range(3)] == [True, True, False]
            clock.advance(60)


def test_a_store_made_meanwhile_has_its_own_clock_afterwards() -> None:
    """Nothing of the clock stays behind."""
    own = Clock()
    with frozen(at=1_000_000_000):
        stores = MemoryStore(), MemoryStore(own)
        assert [store._clock() for store in stores] == [1_000_000_000_000_000] * 2
    assert abs(stores[0]._clock() / 1e6 - time.time()) < 5
    assert stores[1]._clock is own


@pytest.mark.parametrize(
    ("at", "now"),
    [
        (1_700_000_000, 1_700_000_000),
        (1_700_000_000.25, 1_700_000_000.25),
        (datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC), 1_700_000_000),
        (datetime(2023, 11, 14, 22, 13, 20), 1_700_000_000),  # noqa: DTZ001 - it is taken as UTC
        (0, 0),
    ],
)
def test_where_the_clock_begins(at: Any, now: float) -> None:
    """Unix time or a datetime; whoever aligns windows to the calendar needs to choose."""
    with frozen(at) as clock:
        assert (clock.now, clock()) == (now, now * 1_000_000)
        assert repr(clock) == f"FrozenClock({clock.now!r})"


def test_it_begins_now() -> None:
    """Without a moment the clock stops where it is; inside of another, where that one is."""
    with frozen() as clock:
        assert abs(clock.now - time.time()) < 5
        clock.advance(1000)
        with frozen() as inner:
            assert inner() == clock()
            inner.advance(5)
        limiter = Limiter("memory://")
        limiter.hit("key", "1/second")
        assert not limiter.hit("key", "1/second").allowed
        clock.advance(1)
        assert limiter.hit("key", "1/second").allowed


@pytest.mark.parametrize("at", ["2026-01-01", True, float("nan"), float("inf"), -1, 1_700_000_000_000_000])
def test_a_wrong_moment(at: Any) -> None:
    """What is no moment is told so."""
    with pytest.raises(ValueError, match="expected Unix time in seconds, a datetime or None"), frozen(at):
        pass


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_wrong_step(seconds: Any) -> None:
    """Time goes on, by some seconds."""
    with frozen() as clock, pytest.raises(ValueError, match="expected a number of at least 0"):
        clock.advance(seconds)


@pytest.mark.parametrize("seconds", [0, 1, 1.1, 0.1 + 0.2, 29.999_999, 86_400 * 365])
def test_steps_are_exact(seconds: float) -> None:
    """To the microsecond, rounded up: ``advance(decision.retry_after)`` is enough."""
    with frozen(1_700_000_000) as clock:
        clock.advance(seconds)
        assert clock() == 1_700_000_000_000_000 + round(seconds * 1_000_000)
        clock.advance(0.000_000_1)
        assert clock() == 1_700_000_000_000_000 + round(seconds * 1_000_000) + 1


def test_to_wait_takes_no_time() -> None:
    """Who waits for a turn finds the clock moved on to it, and goes on at once."""
    began = time.monotonic()
    with frozen(1_700_000_000) as clock, Limiter("memory://") as limiter:
        moments = []
        for _ in range(4):
            assert limiter.wait("key", "1/minute").allowed
            moments.append(clock.now - 1_700_000_000)
        assert moments == [0, 60, 120, 180]
        assert not limiter.wait("key", "1/minute", timeout=59).allowed
        assert clock.now == 1_700_000_180
        assert [(item, clock.now - 1_700_000_180) for item in limiter.pace("abc", "1/minute", key="other")] == [
            ("a", 0),
            ("b", 60),
            ("c", 120),
        ]
        limiter.ban("third", 30)
        assert next(iter(limiter.pace("a", "1/minute", key="third"))) == "a"
        assert clock.now == 1_700_000_330
    assert time.monotonic() - began < 30


@in_a_loop
async def test_to_wait_on_an_event_loop_takes_no_time() -> None:
    """All who wait have their turns in order, each at its moment."""
    with frozen(1_700_000_000) as clock:
        limiter, moments = AsyncLimiter("memory://"), []

        async def waiting_for(name: str) -> None:
            await limiter.wait("key", "1/minute")
            moments.append((name, clock.now - 1_700_000_000))

        await asyncio.wait_for(asyncio.gather(*map(waiting_for, "abcd")), 30)
        assert moments == [("a", 0), ("b", 60), ("c", 120), ("d", 180)]
        await limiter.ban("other", 30)
        assert [clock.now async for _ in limiter.pace("a", "1/minute", key="other")] == [1_700_000_210]


@pytest.mark.parametrize("make", [starlette, wsgi], ids=["asgi", "wsgi"])
def test_delayed_requests_take_no_time(make: Callable[..., Ask]) -> None:
    """Nor does ``max_delay``."""
    with frozen(1_700_000_000) as clock:
        ask = make(rules=[Rule("slow", "1/minute", max_delay=59.5)])
        assert statuses(ask, 2) == [200, 429]
        clock.advance(1)
        assert statuses(ask, 1) == [200]
        assert clock.now == 1_700_000_060


def test_many_threads_wait_side_by_side() -> None:
    """The clock moves on to the turn of each, not by the sum of their waits."""
    with frozen(1_700_000_000) as clock, Limiter("memory://") as limiter:
        threads = [threading.Thread(target=limiter.wait, args=("key", "1/second")) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert clock.now == 1_700_000_019


def test_a_pause_of_an_outbound_client_takes_no_time() -> None:
    """A 429 is obeyed by moving the clock on."""
    began, answers = time.monotonic(), [httpx.Response(429, headers={"Retry-After": "90"}), httpx.Response(200)]
    transport = limitgate.httpx.RateLimitTransport(
        "1/minute", limiter="memory://", transport=httpx.MockTransport(lambda _: answers.pop(0))
    )
    with frozen(1_700_000_000) as clock, httpx.Client(transport=transport) as client:
        assert client.get("http://shop").status_code == 200
        assert 90 <= clock.now - 1_700_000_000 < 91
    assert time.monotonic() - began < 30


def test_slots_in_flight_stay_taken() -> None:
    """They are renewed as they would be in that time, and end when their holder does."""
    with frozen() as clock, Limiter("memory://") as limiter:
        with limiter.slot("key", 1):
            clock.advance(3600)
            with pytest.raises(RateLimited), limiter.slot("key", 1):
                pass
        with limiter.slot("key", 1):
            pass


def test_slots_in_flight_are_renewed_once_however_far_the_clock_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the new time, before other threads see it. In steps of a renewal, ten years took minutes."""
    spend = MemoryStore.spend
    seen: list[tuple[int, int]] = []

    def noting(store: MemoryStore, *rest: Any) -> Any:
        if store is own:  # other tests may have left slots held
            with ThreadPoolExecutor(1) as other:
                seen.append((clock(), other.submit(clock).result()))
        return spend(store, *rest)

    own = MemoryStore()
    with frozen(1_700_000_000) as clock, Limiter(own) as limiter, limiter.slot("key", 1):
        monkeypatch.setattr(MemoryStore, "spend", noting)
        clock.advance(3_650 * 86_400)
        monkeypatch.undo()
        assert seen == [(2_015_360_000_000_000, 1_700_000_000_000_000)]
        assert clock() == 2_015_360_000_000_000
        with pytest.raises(RateLimited), limiter.slot("key", 1):
            pass


def test_calendar_windows() -> None:
    """A window that is aligned to the calendar ends when the clock says."""
    daily = Limit("1/day", algorithm="fixed_window", align="Europe/Berlin")
    with frozen(datetime(2026, 7, 1, 21, 59, 59, tzinfo=UTC)) as clock, Limiter("memory://") as limiter:
        assert [limiter.hit("key", daily).allowed for _ in range(2)] == [True, False]
        clock.advance(1)
        assert limiter.hit("key", daily).allowed


# --- reset ------------------------------------------------------------------------------------------------------------


def test_every_bucket_is_forgotten(make: Callable[..., Ask]) -> None:
    """Each application begins anew."""
    ask = make()
    assert statuses(ask, 3) == [200, 200, 429]
    reset()
    assert statuses(ask, 3) == [200, 200, 429]


def test_bans_are_forgotten_and_configurations_stay() -> None:
    """What an application configured when it started is no bucket."""
    with Limiter("memory://") as limiter:
        limiter.configure("orders", "1/minute")
        limiter.ban("key")
        assert not limiter.hit("key", Configured("orders")).allowed
        reset()
        assert [limiter.hit("key", Configured("orders")).allowed for _ in range(2)] == [True, False]


def test_buckets_beyond_the_room_are_forgotten() -> None:
    """Overflow buckets and logs as well, and there is room again."""
    store = MemoryStore(Clock(), max_buckets=2)
    limiter = Limiter(store)
    log = Limit("1/minute", algorithm="sliding_log")
    for kind in ("1/minute", log) * 2:
        for key in "abcd":
            limiter.hit(key, kind)
            limiter.hit(key, kind)
        reset()
        assert (len(store), store._overflow, store._beside) == (0, {}, {})
        assert [limiter.hit("d", kind).allowed for _ in range(2)] == [True, False]


def test_sources_of_too_many_buckets_are_forgotten() -> None:
    """Whoever opened too many may open new ones."""

    def answer(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("content-type", "text/plain")])
        return [b""]

    rule = Rule("keys", "1/minute", key=["api_key"])
    app = LimitGateWSGI(answer, rules=[rule], new_buckets=4, api_key_header="x-key")
    for _ in range(2):
        assert [wsgi_reply(app, headers={"x-key": str(number)}).status for number in range(6)] == [200] * 4 + [429] * 2
        reset()


def test_pauses_of_outbound_clients_are_forgotten() -> None:
    """A service that refused in one test may be asked in the next."""
    answers = [httpx.Response(429, headers={"Retry-After": "600"}), httpx.Response(200)]
    transport = limitgate.httpx.RateLimitTransport(
        "1/minute", limiter="memory://", timeout=0, transport=httpx.MockTransport(lambda _: answers.pop(0))
    )
    with httpx.Client(transport=transport) as client:
        for _ in range(2):
            with pytest.raises(RateLimited):
                client.get("http://shop")
        reset()
        assert client.get("http://shop").status_code == 200


def test_stores_come_and_go_meanwhile() -> None:
    """Other threads make stores and use them while all is forgotten."""
    over = threading.Event()
    errors: list[BaseException] = []

    def working() -> None:
        try:
            while not over.is_set():
                limiter = Limiter("memory://")
                for number in range(50):
                    limiter.hit(str(number), "1/minute")
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=working) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        reset()
    over.set()
    for thread in threads:
        thread.join()
    assert not errors


# --- as fixtures ------------------------------------------------------------------------------------------------------


def test_the_fixture_that_switches_off(limitgate_off: None) -> None:
    """``limitgate_off`` is `off` around a test."""
    assert statuses(wsgi(), 4) == [200] * 4


def test_the_fixture_of_the_clock(limitgate_clock: FrozenClock) -> None:
    """``limitgate_clock`` is `frozen` around a test."""
    ask = wsgi()
    assert statuses(ask, 3) == [200, 200, 429]
    limitgate_clock.advance(30)
    assert statuses(ask, 2) == [200, 429]


PROJECT = """
import asyncio, sys
import pytest

def test_nothing_is_imported():
    assert not [name for name in sys.modules if name.split(".")[0] in ("limitgate", "redis", "pydantic")]

def test_clock(limitgate_clock):
    from limitgate import Limiter
    limiter = Limiter("memory://")
    assert [limiter.hit("key", "1/minute").allowed for _ in range(2)] == [True, False]
    limitgate_clock.advance(60)
    assert limiter.hit("key", "1/minute").allowed

@pytest.mark.anyio
async def test_async(limitgate_off):
    from limitgate import AsyncLimiter
    limiter = AsyncLimiter("memory://")
    assert [(await limiter.hit("key", "1/minute")).allowed for _ in range(2)] == [True, True]

@pytest.fixture
def anyio_backend():
    return "asyncio"

def test_nothing_is_on_afterwards():
    from limitgate import Limiter
    limiter = Limiter("memory://")
    assert [limiter.hit("key", "1/minute").allowed for _ in range(2)] == [True, False]
"""


@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["", "xdist"])
def test_in_a_project_of_its_own(tmp_path: Any, more: list[str]) -> None:
    """The fixtures are there without an import, cost nothing where they are not used, and work in async tests and processes."""
    (tmp_path / "test_it.py").write_text(PROJECT)
    unneeded = [word for name in ("cacheprovider", "cov", "faker", "hypothesispytest") for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", *unneeded, *more, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert "4 passed" in done.stdout, done.stdout
