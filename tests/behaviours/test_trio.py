"""Under trio no store on Redis can run: one error at start says so. In memory what is decided at once works, as does anyio."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import httpx2
import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from hypercorn.utils import LifespanFailureError

from limitgate import AsyncLimiter, AsyncRedisStore, ConfigError, LimitGate, Rule
from limitgate.httpx import AsyncRateLimitTransport
from limitgate.httpx2 import AsyncRateLimitTransport as AsyncRateLimitTransport2
from limitgate.testing import FrozenClock, frozen
from tests.support.doors import until
from tests.support.redis_server import RedisServer

RULES = [Rule("all", "1/day", key=["global"])]
CURE = re.escape("expected asyncio, such as hypercorn --worker-class asyncio or anyio's backend 'asyncio'")
URLS = ["redis://127.0.0.1:1", "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/m"]


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def ask(gate: LimitGate) -> int:
    """The status of a request."""
    got: list[Any] = []

    async def send(message: Any) -> None:
        got.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
    await gate(scope, None, send)
    status: int = got[0]["status"]
    return status


async def lifespan(gate: LimitGate) -> list[Any]:
    """What a server is told when it starts and ends."""
    told: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.shutdown" if told else "lifespan.startup"}

    async def send(message: Any) -> None:
        told.append(message)

    with contextlib.suppress(ConfigError):
        await gate({"type": "lifespan"}, receive, send)
    return told


def on_asyncio(function: Callable[[], Awaitable[Any]]) -> Any:
    """By anyio, as Starlette's tests and pytest plugins do."""
    return anyio.run(function, backend="asyncio")


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("url", URLS)
def test_the_start_fails(url: str, required: Any) -> None:
    """A server that sends lifespan events is told why, and ends; any other gets the same error for its requests."""
    gate = LimitGate(app, rules=RULES, store=url, require_store=required)
    (told,) = trio.run(lifespan, gate)
    assert told["type"] == "lifespan.startup.failed"
    assert re.search(f"needs asyncio, .*for example under trio; {CURE}", told["message"])
    with pytest.raises(ConfigError, match=CURE):
        trio.run(ask, gate)


def test_a_store_that_was_given() -> None:
    (told,) = trio.run(lifespan, LimitGate(app, rules=RULES, store=AsyncRedisStore(URLS[0])))
    assert told["type"] == "lifespan.startup.failed"


def test_hypercorn() -> None:
    """It ends with the reason instead of serving errors."""

    async def start() -> None:
        config = Config()
        config.bind = ["127.0.0.1:0"]
        with trio.fail_after(20):
            await serve(LimitGate(app, rules=RULES, store=URLS[0]), config)

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(start)
    failures = caught.value.subgroup((LifespanFailureError, ConfigError))
    assert failures is not None
    assert "needs asyncio" in repr(failures.exceptions)


def test_memory() -> None:
    """Requests that are decided at once need no event loop of asyncio, nor does a server's end."""
    gate = LimitGate(app, rules=RULES)

    async def served() -> list[int]:
        assert [each["type"] for each in await lifespan(gate)] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        return [await ask(gate), await ask(gate)]

    assert trio.run(served) == [200, 429]


NEEDING: dict[str, list[Rule]] = {
    "max_delay": [Rule("all", "1/hour", max_delay=5, key=["global"])],
    "body": [Rule("all", "1/hour", key=["json:/user"])],
    "adaptive": [Rule("all", adaptive=True)],
    "adaptive that waits": [Rule("all", adaptive=True, max_delay=5)],
    "per": [Rule("all", "1/day", per="message")],
}


@pytest.mark.parametrize("rules", NEEDING.values(), ids=NEEDING)
def test_rules_that_need_asyncio(rules: list[Rule]) -> None:
    """The start fails with the reason, which names the rule."""
    (told,) = trio.run(lifespan, LimitGate(app, rules=rules))
    assert told["type"] == "lifespan.startup.failed"
    assert re.search(f"(max_delay|adaptive|per|body) of rule 'all' needs asyncio, .*under trio; {CURE}", told["message"])
    told_on_asyncio = on_asyncio(lambda: lifespan(LimitGate(app, rules=rules)))
    assert [each["type"] for each in told_on_asyncio] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


WAITING = Rule("all", "1 per 2 seconds", max_delay=5, key=["global"])
READING = Rule("all", "1/hour", key=["json:/user"])


@pytest.mark.parametrize("rule", [WAITING, Rule("all", adaptive=True), READING])
def test_without_lifespan_events_requests_fail(rule: Rule) -> None:
    """With the same error, and without a charge for a turn."""
    gate = LimitGate(app, rules=[rule])

    async def served() -> None:
        for _ in range(3):
            await ask(gate)

    with pytest.raises(ConfigError, match=CURE):
        trio.run(served)


def test_a_turn_that_cannot_be_waited_for_is_given_back() -> None:
    """Other requests don't queue behind it."""
    gate = LimitGate(app, rules=[Rule("all", "1 per 2 seconds", max_delay=3, key=["global"])])

    async def served() -> None:
        assert await ask(gate) == 200
        for _ in range(5):
            with pytest.raises(ConfigError, match=CURE):
                await ask(gate)

    trio.run(served)


def test_requests_in_flight() -> None:
    """Places are taken and released, also by requests that are cancelled."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await trio.sleep(0.05)
        await app(scope, receive, send)

    gate = LimitGate(slow, rules=[Rule("all", concurrency=2, key=["global"])])

    async def served() -> list[int]:
        got: list[int] = []

        async def one() -> None:
            got.append(await ask(gate))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        for _ in range(3):
            with trio.move_on_after(0.01):
                await ask(gate)
        return [*got, await ask(gate)]

    assert trio.run(served) == [429, 200, 200, 200]


CALLS: dict[str, Callable[[AsyncLimiter], Awaitable[Any]]] = {
    "hit": lambda limiter: limiter.hit("a", "9/day"),
    "several limits": lambda limiter: limiter.hit("a", "9/day", "99/day"),
    "peek": lambda limiter: limiter.peek("a", "9/day"),
    "refund": lambda limiter: limiter.refund("a", "9/day"),
    "reset": lambda limiter: limiter.reset("a", "9/day"),
    "hit_up_to": lambda limiter: limiter.hit_up_to("a", "9/day", cost=2),
    "reserve": lambda limiter: limiter.reserve("a", "9/day"),
    "ban": lambda limiter: limiter.ban("b", 1),
    "banned": lambda limiter: limiter.banned("b"),
    "pardon": lambda limiter: limiter.pardon("b"),
    "penalize": lambda limiter: limiter.penalize("b", 1),
    "configure": lambda limiter: limiter.configure("c", "9/day"),
    "configuration": lambda limiter: limiter.configuration("c"),
}
WAITING: dict[str, Callable[[AsyncLimiter], Awaitable[Any]]] = {
    "wait": lambda limiter: limiter.wait("a", "9/day"),
    "limited": lambda limiter: limiter.limited("9/day", key="a", timeout=1)(nothing)(),
    "pace": lambda limiter: anext(limiter.pace([1, 2], "9/second")),
    "adaptive": lambda limiter: limiter.adaptive("a")(nothing)(),
    "slot": lambda limiter: enter(limiter.slot("a", 2)),
}
"""What needs an event loop of asyncio in memory, too."""


async def nothing() -> None:
    """Work."""


async def enter(block: contextlib.AbstractAsyncContextManager[Any]) -> None:
    async with block:
        pass


async def called(call: Callable[[AsyncLimiter], Awaitable[Any]], url: str) -> None:
    limiter = AsyncLimiter(url)
    await call(limiter)
    await limiter.aclose()


@pytest.mark.parametrize("call", (CALLS | WAITING).values(), ids=CALLS | WAITING)
def test_a_limiter_on_redis(call: Any) -> None:
    """Each call says what is wrong."""
    with pytest.raises(ConfigError, match=CURE):
        trio.run(called, call, URLS[0])


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
def test_what_waits_in_memory(call: Any) -> None:
    with pytest.raises(ConfigError, match=CURE):
        trio.run(called, call, "memory://")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_decided_at_once_in_memory(call: Any) -> None:
    trio.run(called, call, "memory://")


def test_a_limiter_that_is_entered() -> None:
    """The error comes first of all, and to leave and to close raise nothing in its place."""

    async def enter() -> None:
        async with AsyncLimiter(URLS[0]):
            raise AssertionError

    async def close() -> None:
        await AsyncLimiter(URLS[0]).aclose()

    async def enter_memory() -> bool:
        async with AsyncLimiter("memory://") as limiter:
            return (await limiter.hit("a", "1/day")).allowed

    with pytest.raises(ConfigError, match=CURE):
        trio.run(enter)
    trio.run(close)
    assert trio.run(enter_memory)


@pytest.mark.parametrize("url", ["memory://", *URLS])
@pytest.mark.parametrize(
    ("library", "transport"), [(httpx, AsyncRateLimitTransport), (httpx2, AsyncRateLimitTransport2)], ids=["httpx", "httpx2"]
)
def test_a_client(library: Any, transport: Any, url: str) -> None:
    """Requests wait their turn, which needs asyncio."""
    inner = library.MockTransport(lambda _: library.Response(200))

    async def get() -> int:
        async with library.AsyncClient(transport=transport("9/day", limiter=url, transport=inner)) as client:
            status: int = (await client.get("http://a.example/")).status_code
            return status

    with pytest.raises(ConfigError, match=CURE):
        trio.run(get)
    if url == "memory://":
        assert on_asyncio(get) == 200


def test_anyio_on_asyncio(redis_server: RedisServer) -> None:
    """It is asyncio: everything works."""
    gate = LimitGate(app, rules=RULES, store=redis_server.url, key_prefix="anyio")

    async def served() -> list[int]:
        async with AsyncLimiter(redis_server.url) as limiter, anyio.create_task_group() as group:
            group.start_soon(limiter.wait, "a", "9/day")
        told = [each["type"] for each in await lifespan(gate)]
        assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        return [await ask(gate), await ask(gate)]

    assert on_asyncio(served) == [200, 429]


@pytest.mark.parametrize("url", URLS)
def test_a_store_that_is_replaced_needs_no_asyncio(url: str, monkeypatch: Any, caplog: Any) -> None:
    """While clocks are frozen, also for slots in flight, refunds and lifespans."""
    rules = [Rule("slots", "1 at once", key=["global"]), Rule("failures", "2/minute", charge_if={"status": ["5xx"]})]
    got: list[int] = []

    async def requests(clock: FrozenClock) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            clock.advance(3600)
            if not got:
                got.append(await ask(gate))
                await trio.sleep(0.3)
            await app(scope, receive, send)

        gate = LimitGate(answer, rules=rules, store=url, on_error="closed")
        assert await lifespan(LimitGate(app, rules=rules, store=url)) == [
            {"type": "lifespan.startup.complete"},
            {"type": "lifespan.shutdown.complete"},
        ]
        got.extend([await ask(gate) for _ in range(3)])

    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", 0.1)
    before = set(threading.enumerate())
    with frozen() as clock:
        trio.run(requests, clock)
        # A renewal that is under way would meet the next test's clock.
        until(lambda: not set(threading.enumerate()) - before)
    # Slots that other tests have left in memory are renewed meanwhile, and see the clock go back.
    told = [message for message in caplog.messages if not message.startswith("LG011")]
    assert (got, told) == ([429, 200, 200, 200], [])
