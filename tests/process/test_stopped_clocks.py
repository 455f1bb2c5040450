"""Tests of applications that stop time with freezegun or time-machine: nothing hangs."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import pytest
import requests
import time_machine
from freezegun import freeze_time
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import limitgate.httpx
import limitgate.requests
from limitgate import (
    Adaptive,
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    Rule,
    StoreError,
)
from limitgate.gate import slot_keeper
from limitgate.process import clock
from limitgate.testing import FrozenClock, frozen
from tests.support.doors import PATIENCE, asgi_reply, wsgi_reply
from tests.support.redis_server import RedisServer

Stops = Callable[[], AbstractContextManager[Any]]
AT = "2026-01-01 12:00:00"
STOPS: dict[str, Stops] = {
    "freezegun": lambda: freeze_time(AT),
    "freezegun, asyncio excepted": lambda: freeze_time(AT, real_asyncio=True),
    "time-machine": lambda: time_machine.travel(AT, tick=False),
}
TICKS: dict[str, Stops] = {
    "freezegun": lambda: freeze_time(AT, tick=True),
    "time-machine": lambda: time_machine.travel(AT),
    "no longer": nullcontext,
}
AGAIN = "expected limitgate.testing.frozen"


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """Interrupts a test that hangs: no other clock is sure to go on."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, 2 * PATIENCE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=STOPS.values(), ids=STOPS)
def stops(request: pytest.FixtureRequest) -> Stops:
    found: Stops = request.param
    return found


@pytest.fixture
def silent() -> Iterator[str]:
    """URL of a Redis that lets everybody connect and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


def wsgi(**options: Any) -> Callable[[], int]:
    def answer(_: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("content-type", "text/plain")])
        return [b"hello"]

    app = LimitGateWSGI(answer, **options)
    return lambda: wsgi_reply(app).status


def asgi(**options: Any) -> Callable[[], int]:
    async def answer(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = LimitGate(Starlette(routes=[Route("/", answer)]), **options)
    return lambda: asyncio.run(asgi_reply(app)).status


DOORS = pytest.mark.parametrize("door", [wsgi, asgi])

# --- waits ------------------------------------------------------------------------------------------------------------


def test_waiting_for_a_turn_is_an_error(stops: Stops) -> None:
    """It says what to use instead, and leaves nothing charged; whatever need not wait works."""
    with stops(), Limiter("memory://") as limiter:
        assert limiter.wait("key", "1/minute").allowed
        for wait in (lambda: limiter.wait("key", "1/minute"), lambda: list(limiter.pace("ab", "1/minute", key="key"))):
            with pytest.raises(ConfigError, match=AGAIN):
                wait()
        assert not limiter.wait("key", "1/minute", timeout=59).allowed
        assert limiter.peek("key", "1/minute").reset_after == 60


def test_waiting_on_an_event_loop_is_an_error(stops: Stops) -> None:
    """The same there."""

    async def main() -> None:
        limiter = AsyncLimiter("memory://")
        assert (await limiter.wait("key", "1/minute")).allowed
        for _ in range(2):
            with pytest.raises(ConfigError, match=AGAIN):
                await limiter.wait("key", "1/minute")
        with pytest.raises(ConfigError, match=AGAIN):
            _ = [each async for each in limiter.pace("a", "1/minute", key="key")]
        assert (await limiter.peek("key", "1/minute")).reset_after == 60

    with stops():
        asyncio.run(main())


def test_waiting_for_the_end_of_a_ban_is_an_error(stops: Stops) -> None:
    """It never ends as long as the clock stands still."""

    async def main() -> None:
        limiter = AsyncLimiter("memory://")
        await limiter.ban("key", 1)
        with pytest.raises(ConfigError, match=AGAIN):
            await limiter.wait("key", "1/minute")

    with stops(), Limiter("memory://") as limiter:
        limiter.ban("key", 1)
        with pytest.raises(ConfigError, match=AGAIN):
            limiter.wait("key", "1/minute")
        asyncio.run(main())


@DOORS
def test_a_request_that_would_wait_is_an_error(stops: Stops, door: Callable[..., Callable[[], int]]) -> None:
    """Nothing of it stays charged."""
    store = MemoryStore()
    with stops():
        ask = door(rules=[Rule("slow", "1/minute", max_delay=60, key=["global"])], store=store)
        assert ask() == 200
        for _ in range(3):
            with pytest.raises(ConfigError, match=AGAIN):
                ask()
        with frozen() as moved:
            assert ask() == 200
            assert moved.now - time.time() == pytest.approx(60)


def test_a_wait_for_a_place_in_flight_ends(stops: Stops) -> None:
    """It is over in time, and the place is had by nobody: how long work takes is no matter of a test's clock."""

    async def main() -> list[int]:
        over = asyncio.Event()

        async def answer(_: Any) -> PlainTextResponse:
            await over.wait()
            return PlainTextResponse("hello")

        rule = Rule("all", adaptive=Adaptive(min=1, max=1), max_delay=0.1)
        app = LimitGate(Starlette(routes=[Route("/", answer)]), rules=[rule])
        first = asyncio.ensure_future(asgi_reply(app))
        await asyncio.sleep(0)
        second = (await asgi_reply(app)).status
        over.set()
        return [(await first).status, second]

    with stops():
        assert asyncio.run(main()) == [200, 503]


def test_an_outbound_client_that_would_wait_raises_an_error(stops: Stops) -> None:
    """For its turn, and for the end of a pause."""
    refused = httpx.MockTransport(lambda _: httpx.Response(429, headers={"Retry-After": "1"}))
    turns, paused = (
        limitgate.httpx.RateLimitTransport("1/minute", transport=httpx.MockTransport(lambda _: httpx.Response(200))),
        limitgate.httpx.RateLimitTransport(transport=refused),
    )

    async def main() -> None:
        transport = limitgate.httpx.AsyncRateLimitTransport(transport=refused)
        async with httpx.AsyncClient(transport=transport) as client:
            with pytest.raises(ConfigError, match=AGAIN):
                await client.get("http://shop")

    with stops(), httpx.Client(transport=turns) as client, httpx.Client(transport=paused) as other:
        assert client.get("http://shop").status_code == 200
        with pytest.raises(ConfigError, match=AGAIN):
            client.get("http://shop")
        with pytest.raises(ConfigError, match=AGAIN):
            other.get("http://shop")
        asyncio.run(main())


def test_requests_that_would_wait_raise_an_error(stops: Stops) -> None:
    """Of the library requests, whose own adapter is not asked any more."""
    session = requests.Session()
    session.mount("http://", limitgate.requests.RateLimitAdapter("1/minute"))
    with stops(), suppress(requests.ConnectionError):
        session.get("http://127.0.0.1:1", timeout=5)
    with stops(), pytest.raises(ConfigError, match=AGAIN):
        session.get("http://127.0.0.1:1", timeout=5)


@pytest.mark.parametrize("ticks", TICKS.values(), ids=TICKS)
def test_waits_end_while_the_clock_ticks(ticks: Stops) -> None:
    """Time that was moved and goes on is as good as any."""

    async def main() -> None:
        limiter = AsyncLimiter("memory://")
        assert [(await limiter.wait("key", "50/second burst 1")).allowed for _ in range(3)] == [True] * 3

    with ticks(), Limiter("memory://") as limiter:
        assert [limiter.wait("key", "50/second burst 1").allowed for _ in range(3)] == [True] * 3
        asyncio.run(main())


def test_buckets_in_memory_go_by_the_clock_that_was_moved() -> None:
    """Who moves time on refills them."""
    with Limiter("memory://") as limiter:
        with freeze_time(AT) as moved:
            assert [limiter.hit("key", "1/minute").allowed for _ in range(2)] == [True, False]
            moved.tick(timedelta(seconds=60))
            assert [limiter.hit("key", "1/minute").allowed for _ in range(2)] == [True, False]
        with time_machine.travel(AT, tick=False) as traveller:
            assert [limiter.hit("other", "1/minute").allowed for _ in range(2)] == [True, False]
            traveller.shift(60)
            assert [limiter.hit("other", "1/minute").allowed for _ in range(2)] == [True, False]


def test_our_own_clock_moves_on_where_another_stands_still(stops: Stops, limitgate_clock: FrozenClock) -> None:
    """The fixture is what the error recommends."""
    with stops(), Limiter("memory://") as limiter:
        began = limitgate_clock.now
        assert [limiter.wait("key", "1/minute").allowed for _ in range(3)] == [True] * 3
        assert limitgate_clock.now - began == 120


# --- while Redis is down ----------------------------------------------------------------------------------------------


def test_a_silent_redis_is_waited_for_as_long_as_ever(stops: Stops, silent: str) -> None:
    """A limiter raises its error in time, and soon no longer waits."""
    with stops(), Limiter(silent, timeout=0.1) as limiter:
        began = clock.monotonic()
        for _ in range(12):
            with pytest.raises(StoreError):
                limiter.hit("key", "5/second")
        assert 0.1 < clock.monotonic() - began < PATIENCE


def test_a_silent_redis_is_waited_for_as_long_as_ever_on_an_event_loop(stops: Stops, silent: str) -> None:
    """The same there, where the loop's own timers never ring."""

    async def main() -> None:
        limiter = AsyncLimiter(silent, timeout=0.1)
        for _ in range(12):
            with pytest.raises(StoreError):
                await limiter.hit("key", "5/second")
        assert not limiter._store.healthy  # type: ignore[union-attr]
        await limiter.aclose()

    with stops():
        began = clock.monotonic()
        asyncio.run(main())
        assert 0.1 < clock.monotonic() - began < PATIENCE


@DOORS
@pytest.mark.parametrize(("on_error", "statuses"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 200, 429])])
def test_on_error_decides_in_time(
    stops: Stops, silent: str, door: Callable[..., Callable[[], int]], on_error: str, statuses: list[int]
) -> None:
    """Requests get what they would get under a running clock."""
    with stops():
        ask = door(rules=[Rule("two", "2/minute")], store=silent, on_error=on_error, timeout=0.1)
        assert [ask() for _ in range(3)] == statuses


def test_redis_is_found_back(stops: Stops) -> None:
    """While the clock stands still, and in the same event loop when it runs again."""

    async def main(server: RedisServer) -> None:
        limiter = AsyncLimiter(server.url, timeout=0.1)

        async def answers() -> bool:
            with suppress(StoreError):
                return (await limiter.hit("key", "1000/second")).allowed
            await asyncio.to_thread(time.sleep, 0.05)
            return False

        async def is_found_back() -> bool:
            return any([await answers() for _ in range(60)])

        with stops():
            assert await answers()
            with server.frozen():
                assert not any([await answers() for _ in range(8)])
            assert await is_found_back()
            with server.frozen():
                assert not any([await answers() for _ in range(8)])
        assert await is_found_back()
        await limiter.aclose()

    server = RedisServer()
    try:
        asyncio.run(main(server))
    finally:
        server.stop()


def test_a_process_that_begins_with_a_stopped_clock(silent: str) -> None:
    """LimitGate may be imported while time stands still, too."""
    lines = f"""
from freezegun import freeze_time
with freeze_time("2026-01-01"):
    from limitgate import Limiter, StoreError
    limiter = Limiter({silent!r}, timeout=0.1)
    try:
        limiter.hit("key", "1/second")
    except StoreError:
        print("an error")
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=PATIENCE * 3, check=True)
    assert done.stdout == "an error\n"


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_place_that_is_held_is_renewed(
    stops: Stops, store: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Redis it would otherwise expire, whose clock goes on."""
    monkeypatch.setattr(slot_keeper, "RENEW", 0.02)
    monkeypatch.setattr(slot_keeper._Renewer, "_note", lambda *_: renewed.append(1))
    renewed: list[int] = []

    async def main() -> None:
        limiter = AsyncLimiter("memory://" if store == "memory" else redis_server.url, timeout=10)
        async with limiter, limiter.slot("exports", "1 at once"):
            began = clock.monotonic()
            while len(renewed) < 3 and clock.monotonic() - began < PATIENCE:
                await asyncio.to_thread(time.sleep, 0.01)

    with stops():
        asyncio.run(main())
    assert len(renewed) >= 3


def test_a_timer_that_is_cancelled_or_late_does_nothing() -> None:
    fired: list[str] = []
    before = set(threading.enumerate())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = [clock.call_later(loop, 0.01, partial(fired.append, name)) for name in ("a", "b")]
        timers[0].cancel()
        clock.call_later(loop, 3600, partial(fired.append, "c")).cancel()
        await asyncio.to_thread(time.sleep, 0.05)
        while "b" not in fired:
            await asyncio.to_thread(time.sleep, 0.01)
        clock.call_later(loop, 0.5, partial(fired.append, "after the loop"))

    with freeze_time(AT):
        asyncio.run(main())
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    assert fired == ["b"]


@pytest.mark.parametrize("gives", [lambda: time.sleep(PATIENCE / 4), lambda: asyncio.sleep(PATIENCE)], ids=["plain", "async"])
def test_a_login_that_does_not_come_is_not_waited_for(stops: Stops, gives: Any, silent: str) -> None:
    async def main() -> float:
        began = clock.monotonic()
        async with AsyncLimiter(AsyncRedisStore(silent, credentials=gives), timeout=0.2) as limiter:
            with pytest.raises(StoreError):
                await limiter.hit("user", "5/second")
            return clock.monotonic() - began

    with stops():
        assert asyncio.run(main()) < PATIENCE / 5
