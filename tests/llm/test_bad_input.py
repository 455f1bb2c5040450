"""What is sent and answered badly, through each client library: nothing raises, and no request is free."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests

import limitgate.aiohttp
import limitgate.httpx
import limitgate.httpx2
import limitgate.requests
import limitgate.urllib3
from limitgate import AsyncLimiter, Limit, Limiter, MemoryStore, RedisStore, StoreError
from limitgate.llm import Budget
from limitgate.llm.estimate import MEDIA_TOKENS
from tests.support.doors import PATIENCE, until
from tests.support.redis_server import RedisServer

DAY = "100000000/day"
USAGE = {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29}
ASKED = json.dumps({"model": "m", "messages": [{"role": "user", "content": "How many roads?"}], "max_tokens": 500}).encode()
EVENTS = [
    *[b"data: " + json.dumps({"choices": [{"delta": {"content": "\u00e4\u20ac\U0001f600"}}]}, ensure_ascii=False).encode()] * 5,
    b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode(),
    b"data: [DONE]",
]


class Provider:
    """Answers over a real connection with any bytes, in parts of any size."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {"content-type": "application/json"}
        self.body = json.dumps({"choices": [], "usage": USAGE}).encode()
        self.step = 1 << 20
        self.is_cut = False
        self.go = threading.Event()
        self.go.set()
        self.calls = 0
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.calls += 1
        handler.rfile.read(int(handler.headers["content-length"] or 0))
        assert self.go.wait(PATIENCE)
        handler.send_response_only(self.status)
        headers = {"content-length": str(len(self.body) + 10 * self.is_cut), **self.headers}
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        for place in range(0, len(self.body), self.step):
            handler.wfile.write(self.body[place : place + self.step])
            handler.wfile.flush()
        handler.close_connection = True


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with contextlib.suppress(OSError):
                provider.answer(self)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    provider.url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    yield provider
    provider.go.set()
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE)


Asks = Callable[[str, bytes, dict[str, str], Budget, Any], bytes]


def _httpx2(url: str, body: bytes, headers: dict[str, str], plan: Budget, store: Any) -> bytes:
    transport = limitgate.httpx2.RateLimitTransport(budget=plan, limiter=Limiter(store, timeout=0.5), timeout=0)
    client = httpx2.Client(transport=transport, timeout=PATIENCE)
    with client, client.stream("POST", url, content=body, headers=headers) as response:
        return b"".join(response.iter_raw())


def _httpx(url: str, body: bytes, headers: dict[str, str], plan: Budget, store: Any) -> bytes:
    transport = limitgate.httpx.RateLimitTransport(budget=plan, limiter=Limiter(store, timeout=0.5), timeout=0)
    client = httpx.Client(transport=transport, timeout=PATIENCE)
    with client, client.stream("POST", url, content=body, headers=headers) as response:
        return b"".join(response.iter_raw())


def _async_httpx2(url: str, body: bytes, headers: dict[str, str], plan: Budget, store: Any) -> bytes:
    async def main() -> bytes:
        transport = limitgate.httpx2.AsyncRateLimitTransport(budget=plan, limiter=AsyncLimiter(store), timeout=0)
        client = httpx2.AsyncClient(transport=transport, timeout=PATIENCE)
        async with client, client.stream("POST", url, content=body, headers=headers) as response:
            return b"".join([part async for part in response.aiter_raw()])

    return asyncio.run(main())


def _requests(url: str, body: bytes, headers: dict[str, str], plan: Budget, store: Any) -> bytes:
    with requests.Session() as session:
        adapter = limitgate.requests.RateLimitAdapter(budget=plan, limiter=Limiter(store, timeout=0.5), timeout=0)
        session.mount("http://", adapter)
        return session.post(url, data=body, headers=headers, timeout=PATIENCE).content


def _urllib3(url: str, body: bytes, headers: dict[str, str], plan: Budget, store: Any) -> bytes:
    limiter = Limiter(store, timeout=0.5)
    with limitgate.urllib3.RateLimitPoolManager(budget=plan, limiter=limiter, timeout=0) as manager:
        response = manager.request("POST", url, body=body, headers=headers, preload_content=False, retries=False)
        return b"".join(response.stream(7))


def _aiohttp(url: str, body: bytes, headers: dict[str, str], plan: Budget, store: Any) -> bytes:
    async def main() -> bytes:
        middleware = limitgate.aiohttp.RateLimitMiddleware(budget=plan, limiter=AsyncLimiter(store), timeout=0)
        session = aiohttp.ClientSession(middlewares=[middleware])
        async with session, session.post(url, data=body, headers=headers) as response:
            return b"".join([part async for part in response.content.iter_any()])

    return asyncio.run(main())


LIBRARIES: dict[str, Asks] = {
    "httpx": _httpx,
    "httpx2": _httpx2,
    "async httpx2": _async_httpx2,
    "requests": _requests,
    "urllib3": _urllib3,
    "aiohttp": _aiohttp,
}
every_library = pytest.mark.parametrize("library", LIBRARIES)


def budget(**options: Any) -> Budget:
    return Budget(**{"requests": "1000/day", "tokens": DAY, "key": lambda _: "k", **options})


class Asked:
    """Requests of a library to a provider, under one budget."""

    def __init__(self, library: str, provider: Provider, **options: Any) -> None:
        self.library, self.provider, self.options = library, provider, options
        self.store = MemoryStore(lambda: 1_790_000_000_000_000)

    def __call__(self, body: bytes = ASKED, **headers: str) -> bytes:
        url: str = self.provider.url
        headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return LIBRARIES[self.library](url, body, headers, budget(**self.options), self.store)

    @property
    def used(self) -> tuple[int, int]:
        limit = Limit(DAY).in_series(1) if self.options.get("limits") == "told" else DAY
        requests, tokens = Limiter(self.store).peek("k", "1000/day", limit).windows
        return requests.used, tokens.used


BODIES: list[tuple[str, bytes, dict[str, str], int]] = [
    ("empty", b"", {}, 0),
    ("text", b"hello there", {}, 3),
    ("cut JSON", b'{"messages": "hel', {}, 5),
    ("bytes", b"\xff\xfe\x00" * 4, {}, 3),
    ("gzip", gzip.compress(b'{"messages": "hello"}', mtime=0), {"content_encoding": "gzip"}, 41),
    ("multipart", b"--b\r\n" * 500, {"content_type": "multipart/form-data; boundary=b"}, MEDIA_TOKENS),
    ("10 MB", b'{"messages": "' + b"x" * 10_000_000 + b'"}', {}, 2_500_000),
    ("deep", b"[" * 100_000, {}, 25_000),
]


@every_library
@pytest.mark.parametrize(("body", "headers", "estimate"), [each[1:] for each in BODIES], ids=[each[0] for each in BODIES])
def test_bodies_of_requests(library: str, provider: Provider, body: bytes, headers: dict[str, str], estimate: int) -> None:
    """They count by their estimate where the response reports nothing, and are sent as they are."""
    ask = Asked(library, provider)
    provider.body = b""
    # aiohttp warns of large bodies.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        ask(body, **headers)
    assert ask.used == (1, pytest.approx(estimate, rel=0.1, abs=1))


USAGES: list[Any] = [
    None,
    5,
    "many",
    [],
    {"prompt_tokens": -9, "completion_tokens": 20},
    {"prompt_tokens": 9, "completion_tokens": -20},
    {"prompt_tokens": 9.5, "completion_tokens": 20},
    {"prompt_tokens": 9, "completion_tokens": 1e300},
    {"prompt_tokens": True, "completion_tokens": 20},
    {"prompt_tokens": 9, "completion_tokens": "20"},
    {"prompt_tokens": 9, "completion_tokens": 10**15},
    {"prompt_tokens": 10**400, "completion_tokens": 1},
    {"usage": {"usage": {}}},
]


@every_library
@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: repr(usage)[:40])
def test_usage_in_responses(library: str, provider: Provider, usage: Any) -> None:
    """Wrong numbers are no usage, and absurd ones are cut to ten times the estimate."""
    ask = Asked(library, provider)
    provider.body = json.dumps({"choices": [{"message": {"content": "forty-two"}}], "usage": usage}).encode()
    assert ask() == provider.body
    requests, tokens = ask.used
    assert requests == 1
    assert 4 <= tokens <= 4 + 10 * 500 or tokens == pytest.approx(10 * 500 + 9, abs=9)


@every_library
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"], ids=repr)
def test_events_that_are_split_anywhere(library: str, provider: Provider, step: int, ends: bytes) -> None:
    """Inside of a character, too. The caller reads the same bytes."""
    ask = Asked(library, provider)
    provider.headers = {"content-type": "text/event-stream"}
    provider.body, provider.step = ends.join([*EVENTS, b""]), step
    assert ask() == provider.body
    assert ask.used == (1, 29)


@every_library
def test_a_stream_that_breaks_off(library: str, provider: Provider) -> None:
    ask = Asked(library, provider)
    provider.headers = {"content-type": "text/event-stream"}
    provider.body, provider.is_cut = b"\n\n".join([*EVENTS[:3], b""]), True
    with contextlib.suppress(Exception):
        ask()
    requests, tokens = ask.used
    assert (requests, 5 <= tokens <= 20) == (1, True), tokens


LIES = [
    {"x-ratelimit-limit-tokens": "5", "x-ratelimit-remaining-tokens": "99999999", "x-ratelimit-reset-tokens": "1s"},
    {"x-ratelimit-limit-tokens": "-5", "x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "-1s"},
    {"x-ratelimit-limit-requests": "9" * 300, "x-ratelimit-remaining-requests": "1e9"},
    {"x-ratelimit-limit-tokens": "5", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "99999999h"},
    {"anthropic-ratelimit-tokens-limit": "0", "anthropic-ratelimit-tokens-remaining": "0"},
    {"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "9999-99-99T99:99:99Z"},
    {"retry-after": "never", "retry-after-ms": "nan", "x-should-retry": "perhaps"},
    {"ratelimit": '"p";r=0;t=99999999999999999999', "x-ratelimit-remaining": "0", "x-ratelimit-reset": "soon"},
]


@every_library
@pytest.mark.parametrize("told", ["given", "told"])
def test_a_provider_that_lies(library: str, provider: Provider, told: Any) -> None:
    """Fields that contradict each other, or say nothing possible, change nothing."""
    ask = Asked(library, provider, limits=told)
    for fields in LIES:
        provider.headers = {"content-type": "application/json", **fields}
        ask()
    assert ask.used == (len(LIES), 29 * len(LIES))
    assert provider.calls == len(LIES)


@every_library
@pytest.mark.parametrize("skew", [-600, 600])
def test_clocks_ten_minutes_apart(library: str, provider: Provider, skew: int) -> None:
    """A reset is by the provider's clock: the key is not paused for ten minutes, nor for none."""
    ask = Asked(library, provider)
    reset = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + skew + 40))
    provider.headers = {
        "content-type": "application/json",
        "date": formatdate(time.time() + skew, usegmt=True),
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": reset,
    }
    ask()
    pause = Limiter(ask.store).banned("k").retry_after
    assert 30 <= pause <= 45


@pytest.mark.parametrize("library", ["httpx", "httpx2", "requests", "urllib3"])
@pytest.mark.parametrize("when", ["reserve", "between", "settle"])
def test_redis_is_away(library: str, provider: Provider, when: str, own_redis: RedisServer) -> None:
    """No request fails for it: it counts in the process, or its estimate stays charged until the hold ends."""
    store = RedisStore(own_redis.url)
    url: str = provider.url
    slow = "10000/week"  # drains a token a minute
    plan = budget(hold="1m", tokens=slow)
    answers: list[bytes] = []
    if when == "reserve":
        own_redis.kill()
    else:
        provider.go.clear()

    def ask() -> None:
        answers.append(LIBRARIES[library](url, ASKED, {"content-type": "application/json"}, plan, store))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    if when != "reserve":
        until(lambda: provider.calls == 1)
        own_redis.kill()
        if when == "between":
            own_redis.start()
            until(lambda: _answers(store))
        provider.go.set()
    thread.join(PATIENCE)
    assert answers == [provider.body]
    if when == "between":
        # Redis came back without the reservation, so that the end charges what was used.
        assert Limiter(store, timeout=5).peek("k", "1000/day", slow).windows[1].used == pytest.approx(29, abs=1)
    store.close()


def _answers(store: Any) -> bool:
    with contextlib.suppress(StoreError):
        return Limiter(store, timeout=0.5).banned("k").allowed
    return False


@pytest.mark.parametrize("library", ["aiohttp", "httpx2"])
def test_a_task_that_is_cancelled_at_every_await(library: str, provider: Provider) -> None:  # noqa: C901 - two libraries
    """Over a real connection: all is given back, or the input and what arrived is settled, and nothing stays reserved."""
    provider.headers = {"content-type": "text/event-stream"}
    provider.body, provider.step = b"\n\n".join([*EVENTS, b""]), 40
    url: str = provider.url
    ends = set()

    async def once(steps: int) -> bool:
        limiter = AsyncLimiter(MemoryStore(lambda: 1_790_000_000_000_000))
        plan = budget(hold="1h")
        if library == "aiohttp":
            middleware = limitgate.aiohttp.RateLimitMiddleware(budget=plan, limiter=limiter)
            session: Any = aiohttp.ClientSession(middlewares=[middleware])
        else:
            session = httpx2.AsyncClient(transport=limitgate.httpx2.AsyncRateLimitTransport(budget=plan, limiter=limiter))

        async def ask() -> None:
            if library == "aiohttp":
                async with session.post(url, data=ASKED) as response:
                    async for _ in response.content.iter_any():
                        pass
            else:
                async with session.stream("POST", url, content=ASKED) as response:
                    async for _ in response.aiter_raw():
                        pass

        task = asyncio.create_task(ask())
        for _ in range(steps):
            await asyncio.sleep(0)
            if task.done():
                break
        was_over = task.done()
        task.cancel()
        await asyncio.wait([task])
        await (session.close() if library == "aiohttp" else session.aclose())
        for _ in range(50):
            await asyncio.sleep(0)
        requests, tokens = (await limiter.peek("k", "1000/day", DAY)).windows
        held = await limiter.reserve("k", ("1000/day", 0), (DAY, 0), hold=1)
        assert held.decision.allowed
        assert (requests.used, tokens.used) == (0, 0) or (requests.used == 1 and 4 <= tokens.used <= 40), tokens
        ends.add(tokens.used)
        return was_over

    async def main() -> None:
        steps = 0
        while not await once(steps):
            steps += 1 + steps // 20

    asyncio.run(main())
    assert {0, 29} <= ends


@every_library
def test_absurd_usage_is_logged(library: str, provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    ask = Asked(library, provider)
    provider.body = json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 10**9}}).encode()
    with caplog.at_level(logging.WARNING, "limitgate.outbound"):
        ask()
    assert [each for each in caplog.messages if "implausible usage" in each]
