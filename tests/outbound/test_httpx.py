"""The transports for httpx against real servers on this machine: HTTP/1.1 byte by byte, uvicorn, and HTTP/2."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import itertools
import json
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Self
from uuid import uuid4

import httpx
import pytest

import limitgate.outbound.httpx_transports as door
from limitgate import Adaptive, AsyncLimiter, Limiter, LimitGate, MemoryStore, RateLimited, Rule
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport
from limitgate.outbound.throttle import MOST_READ
from tests.limiter.test_limiter import left
from tests.support.doors import PATIENCE, server_process, uvicorn_process
from tests.support.raw_server import Connection, RawServer, Script, raw_server, refusal, reply
from tests.support.redis_server import RedisServer
from tests.support.virtual import World

SOON = 0.2
"""Seconds for which a refusal is read at most in these tests, where it takes longer."""


class User:
    """Somebody who uses httpx with one of the transports, in code that does not wait otherwise."""

    kind, limiter, http = RateLimitTransport, Limiter, httpx.HTTPTransport

    def __init__(self, *limits: str, http: dict[str, Any] | None = None, client: dict[str, Any] | None = None, **options: Any):
        options.setdefault("transport", self.http(**http or {}))
        self.transport = self.kind(*limits, **options)
        self.client = self._client(client or {})

    def _client(self, options: dict[str, Any]) -> Any:
        return httpx.Client(transport=self.transport, **options)

    def go(self, doing: Any) -> Any:
        return doing

    def ask(self, method: str, url: str, **more: Any) -> httpx.Response:
        return self.go(self.client.request(method, url, **more))

    def get(self, url: str, **more: Any) -> httpx.Response:
        return self.ask("GET", url, **more)

    def refused(self, method: str, url: str, **more: Any) -> RateLimited:
        with pytest.raises(RateLimited) as refused:
            self.ask(method, url, **more)
        return refused.value

    def parts(self, url: str, between: Callable[[bytes], Any]) -> list[bytes]:
        """The parts of a streamed response, each of which is shown before the next is read."""
        with self.client.stream("GET", url) as response:
            return [between(part) or part for part in response.iter_raw()]

    @staticmethod
    def streamed(*parts: bytes) -> Any:
        """A body that comes in parts and is gone then."""
        return iter(parts)

    def end(self) -> None:
        self.client.close()

    def close(self) -> None:
        self.end()


class AsyncUser(User):
    """The same in code that awaits."""

    kind, limiter, http = AsyncRateLimitTransport, AsyncLimiter, httpx.AsyncHTTPTransport

    def _client(self, options: dict[str, Any]) -> Any:
        self.runner = asyncio.Runner()
        return httpx.AsyncClient(transport=self.transport, **options)

    def go(self, doing: Any) -> Any:
        async def finish() -> Any:
            async with asyncio.timeout(PATIENCE):
                return await doing

        return self.runner.run(finish())

    def parts(self, url: str, between: Callable[[bytes], Any]) -> list[bytes]:
        async def read() -> list[bytes]:
            async with self.client.stream("GET", url) as response:
                return [between(part) or part async for part in response.aiter_raw()]

        return self.go(read())

    @staticmethod
    async def streamed(*parts: bytes) -> Any:
        for part in parts:
            yield part

    def end(self) -> None:
        self.go(self.client.aclose())

    def close(self) -> None:
        self.end()
        self.runner.close()


Opens = Callable[..., Any]


@pytest.fixture(params=[User, AsyncUser], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[User]:
    return request.param


@pytest.fixture
def use(kind: type[User]) -> Iterator[Opens]:
    """Opens clients of one kind, closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda *limits, **options: opened.enter_context(contextlib.closing(kind(*limits, **options)))


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    """Opens servers with a script, closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda *script: opened.enter_context(raw_server(*script))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are not read for so long."""
    monkeypatch.setattr(door, "LONGEST_READ", SOON)


# --- turns ------------------------------------------------------------------------------------------------------------


def test_every_hop_counts(use: Opens, serve: Opens) -> None:
    """A redirect and a challenge are answered by requests of their own."""
    challenge = reply(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')
    server = serve(reply(302, Location="/b"), reply(), challenge)
    user = use("4/minute", timeout=0, client={"follow_redirects": True})
    assert user.get(f"{server.url}/a").text == "fine"
    assert user.get(f"{server.url}/c", auth=httpx.DigestAuth("ann", "secret")).text == "fine"
    user.refused("GET", f"{server.url}/d")
    assert server.paths == ["/a", "/b", "/c", "/c"]


def test_through_a_mount(kind: type[User], serve: Opens) -> None:
    """The transport may be for some hosts only."""
    server = serve()
    transport = kind.kind("1/minute", timeout=0)
    with contextlib.closing(kind(client={"mounts": {f"all://127.0.0.1:{server.port}": transport}})) as user:
        user.get(server.url)
        user.refused("GET", server.url)
        user.get(server.url.replace("127.0.0.1", "localhost"))
    assert len(server.asked) == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_long_refusal_is_not_read(use: Opens, serve: Opens) -> None:
    """A connection is cheaper than a megabyte."""
    server, user = serve(refusal(body=b"x" * 3_000_000)), use()
    assert user.get(server.url).text == "fine"
    assert server.connections == 2
    server.script[:] = [refusal(body=b"x" * 3_000_000)]
    response = user.refused("POST", server.url).response
    assert (response.status_code, response.content, response.headers["retry-after"]) == (429, b"", "0.05")
    assert "content-length" not in response.headers


def _trickling(connection: Connection) -> None:
    connection.send(refusal(length=100_000))
    with contextlib.suppress(OSError):
        for _ in range(100_000):
            time.sleep(0.02)
            connection.send(b"x")


def _stalling(connection: Connection) -> None:
    connection.send(refusal(length=1000))
    assert connection.is_left()


def _late(connection: Connection) -> bool:
    time.sleep(2 * SOON)
    connection.send(reply())
    return True


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("slow", [_trickling, _stalling])
@pytest.mark.parametrize("timeouts", [None, 1000], ids=str)
def test_a_slow_refusal_is_not_waited_for(use: Opens, serve: Opens, slow: Script, timeouts: float | None) -> None:
    """Whatever the timeouts are, which hold again for what comes after it: an answer may take longer than a refusal's body."""
    server, user = serve(slow, _late), use(client={"timeout": timeouts})
    response = user.get(server.url)
    assert server.connections == 2
    assert response.request.extensions["timeout"]["read"] == timeouts


def _resetting(connection: Connection) -> None:
    connection.send(refusal(length=1000))
    connection.reset()


def _ending(connection: Connection) -> None:
    connection.send(refusal(length=1000))


def _breaking_off(connection: Connection) -> None:
    connection.send(b"HTTP/1.1 429 No\r\nRetry-After: 0.05\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\nno chunk")


@pytest.mark.parametrize("broken", [_resetting, _ending, _breaking_off])
def test_a_refusal_that_breaks_off_is_one(use: Opens, serve: Opens, broken: Script) -> None:
    """Its status and its fields were whole."""
    server, user = serve(broken), use(http={"retries": 0})
    assert user.get(server.url).text == "fine"
    server.script[:] = [broken]
    response = user.refused("POST", server.url).response
    assert (response.status_code, response.content) == (429, b"")


def test_a_body_that_is_streamed_is_gone(use: Opens, serve: Opens, tmp_path: Path) -> None:
    """So is a file, and a form with files in it; unless it was read into memory before."""
    server, user = serve(), use()
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 10)
    with path.open("rb") as file:
        bodies: list[dict[str, Any]] = [{"content": user.streamed(b"a", b"b")}]
        if type(user) is User:
            bodies.append({"content": file})
        bodies.append({"files": {"f": b"abc"}})
        for body in bodies:
            server.script[:] = [refusal()]
            assert user.refused("PUT", server.url, **body).response.status_code == 429
        assert len(server.asked) == len(bodies)
    server.script[:] = [refusal()]
    request = user.client.build_request("PUT", server.url, files={"f": b"abc"})
    request.read()
    assert user.go(user.client.send(request)).text == "fine"
    assert server.bodies[-1] == server.bodies[-2] != b""


def test_a_refusal_in_the_middle_of_an_upload(use: Opens, serve: Opens) -> None:
    """It is heard once all has been sent, and is about the whole."""

    def early(connection: Connection) -> None:
        assert connection.chunk() == b"a" * 10
        connection.send(refusal("3", Connection="close"))
        while connection.input.read1():
            pass

    server, user = serve(early), use()
    server.early.add("/upload")
    refused = user.refused("PUT", f"{server.url}/upload", content=user.streamed(b"a" * 10, *[b"b" * 60_000] * 20))
    assert refused.decision.retry_after == 3


def test_informational_responses_are_none(use: Opens, serve: Opens) -> None:
    """They say nothing about limits."""
    hints = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 99\r\n\r\n"
    server, user = serve(hints + refusal(), hints + reply()), use()
    assert user.get(server.url).text == "fine"
    assert len(server.asked) == 2


def test_a_refused_head_has_no_body(use: Opens, serve: Opens) -> None:
    """Whatever its length says."""
    head = refusal(body=b"", length=20, Content_Encoding="gzip")
    server, user = serve(head, reply(body=b"", length=4), head), use(timeout=1)
    assert user.ask("HEAD", server.url).headers["content-length"] == "4"
    refused = use(timeout=0).refused("HEAD", server.url)
    assert (refused.response.content, refused.response.headers["content-length"]) == (b"", "20")
    assert server.connections == 2


def test_a_proxy_that_refuses(use: Opens, serve: Opens) -> None:
    """It is no answer of the host, and httpx raises what it always does."""
    proxy = serve(refusal("5"))
    with pytest.raises(httpx.ProxyError):
        use(http={"proxy": proxy.url}).get("https://example.invalid")
    assert proxy.asked[0].method == "CONNECT"


# --- what is raised ---------------------------------------------------------------------------------------------------

BODY = json.dumps({"why": "slow down"}).encode()


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (refusal("5", BODY), BODY),
        (refusal("5", gzip.compress(BODY), Content_Encoding="gzip"), BODY),
        (refusal("5", gzip.compress(b"x" * MOST_READ), Content_Encoding="gzip"), b"x" * MOST_READ),
        (refusal("5", gzip.compress(b"x" * (MOST_READ + 1)), Content_Encoding="gzip"), b""),
        (refusal("5", gzip.compress(gzip.compress(BODY)), Content_Encoding="gzip, gzip"), b""),
        (refusal("5", BODY, Content_Encoding="klingon"), BODY),
        (refusal("5", b"no gzip", Content_Encoding="gzip"), b""),
        (refusal("5", gzip.compress(BODY)[:-12], Content_Encoding="gzip"), None),
        (refusal("5", b""), b""),
        (refusal("5", BODY, X_Why=b"\xfcberlastet", X_More="ü"), BODY),
    ],
    ids=[
        "plain",
        "gzip",
        "gzip of as much as is read",
        "gzip of more",
        "twice",
        "unknown",
        "no gzip",
        "half",
        "empty",
        "not ASCII",
    ],
)
def test_the_refusal_can_be_read(use: Opens, serve: Opens, answer: bytes, body: bytes | None) -> None:
    """As any response: its body, its fields, and what it answers. What cannot be decoded, or becomes too large, is left out."""
    server, user = serve(answer), use()
    response = user.refused("POST", f"{server.url}/a").response
    assert response.content == body or (body is None and BODY.startswith(response.content))
    assert response.text == response.content.decode()
    assert (response.status_code, response.reason_phrase, response.headers["retry-after"]) == (429, "As Told", "5")
    assert (response.request.method, response.url.path) == ("POST", "/a")
    with pytest.raises(httpx.HTTPStatusError):
        response.raise_for_status()
    if body == BODY:
        assert response.json() == {"why": "slow down"}


def test_a_bomb_is_not_decoded(use: Opens, serve: Opens) -> None:
    """A refusal that nobody has asked for takes no memory to speak of."""
    bomb = gzip.compress(gzip.compress(b"x" * 100_000_000))
    server, user = serve(refusal("5", bomb, Content_Encoding="gzip, gzip")), use(timeout=1)
    tracemalloc.start()
    try:
        assert user.refused("GET", server.url).response.content == b""
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_fields_that_are_not_ascii_do_not_spoil_a_retry(use: Opens, serve: Opens) -> None:
    """They are passed on as they came."""
    server, user = serve(refusal(X_Why=b"\xfcberlastet")), use()
    assert user.get(server.url).text == "fine"


class Odd(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that cannot be read, for a reason that is none of the network's."""

    closed = 0

    def __iter__(self) -> Iterator[bytes]:
        raise LookupError("odd")

    async def __aiter__(self) -> Any:
        raise LookupError("odd")
        yield b""

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1


def test_a_body_that_raises_is_closed(use: Opens) -> None:
    """What it raises is raised."""
    body = Odd()
    user = use(transport=httpx.MockTransport(lambda _: httpx.Response(429, stream=body)))
    with pytest.raises(LookupError, match="odd"):
        user.get("http://example.com")
    assert body.closed == 1


HOSTILE = [
    "1e308",
    "-5",
    "NaN",
    "9" * 5000,
    "Mon, 01 Jan 2024 00:00:00 +99999999999999999",
    "\u0665",
    "\x7f",
    "",
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
def test_hostile_fields_are_ignored(use: Opens, serve: Opens, value: str) -> None:
    """Whoever sends nonsense is left alone for a second at most."""
    server, user = serve(refusal(value)), use(timeout=0)
    assert 0.5 <= user.refused("GET", server.url).decision.retry_after <= 1


@pytest.mark.parametrize(
    "refused",
    [
        refusal(None, X_RateLimit_Remaining="0", X_RateLimit_Reset="999999999999"),
        refusal(None, X_RateLimit_Remaining="0", X_RateLimit_Reset="1" + "0" * 30),
        refusal("1" + "0" * 30),
        refusal("9" * 4096),
    ],
    ids=["reset", "long reset", "long", "longest"],
)
def test_the_far_future_is_a_year(use: Opens, serve: Opens, refused: bytes) -> None:
    """However far it is, nobody sleeps for longer, and who has a timeout does not sleep at all; the next hears of an hour."""
    server, user = serve(refused), use()
    assert user.refused("GET", server.url).decision.retry_after == 366 * 86_400
    assert 3590 < user.refused("GET", server.url).decision.retry_after <= 3600


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_streamed_response_comes_part_by_part(use: Opens, serve: Opens) -> None:
    """Each part is there before the server has said the next one."""
    read = threading.Semaphore(0)

    def slowly(connection: Connection) -> bool:
        connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b"one", b"two", b"six"):
            connection.send(b"3\r\n" + part + b"\r\n")
            assert read.acquire(timeout=PATIENCE)
        connection.send(b"0\r\n\r\n")
        return True

    server, user = serve(slowly), use("100/second")
    assert user.parts(server.url, lambda _: read.release()) == [b"one", b"two", b"six"]
    user.get(server.url)
    assert server.connections == 1


def test_a_streamed_request_goes_part_by_part(use: Opens, serve: Opens) -> None:
    """Each part has arrived before the caller makes the next one."""
    arrived = threading.Semaphore(0)
    got: list[bytes] = []

    def reading(connection: Connection) -> bool:
        while part := connection.chunk():
            got.append(part)
            arrived.release()
        connection.send(reply())
        return True

    def parts() -> Iterator[bytes]:
        for part in (b"one", b"two"):
            yield part
            assert arrived.acquire(timeout=PATIENCE)

    async def aparts() -> Any:
        for part in parts():
            yield part

    server, user = serve(reading), use("100/second")
    server.early.add("/upload")
    user.ask("PUT", f"{server.url}/upload", content=parts() if type(user) is User else aparts())
    assert got == [b"one", b"two"]


def test_a_request_is_in_flight_until_its_response_begins() -> None:
    """However slowly that is read."""

    def service(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/within":
            with pytest.raises(RateLimited) as refused:
                client.get("http://shop/")
            assert refused.value.decision.limit == 1
        return httpx.Response(200, content=iter([b"one", b"two"]))

    polite = RateLimitTransport(adaptive=Adaptive(min=1, max=1), transport=httpx.MockTransport(service))
    with httpx.Client(transport=polite) as client, client.stream("GET", "http://shop/within") as slow:
        assert client.get("http://shop/").content == slow.read() == b"onetwo"


def test_several_event_loops_know_one_load() -> None:
    """What one of them has learned, and what it has in flight, counts for the others."""
    began, goes_on = threading.Event(), threading.Event()

    async def service(_: httpx.Request) -> httpx.Response:
        began.set()
        await asyncio.to_thread(goes_on.wait, PATIENCE)
        return httpx.Response(200)

    polite = AsyncRateLimitTransport(adaptive=Adaptive(min=1, max=1), transport=httpx.MockTransport(service))

    async def ask() -> int:
        return (await polite.handle_async_request(httpx.Request("GET", "http://shop/"))).status_code

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asyncio.run, ask())
        assert began.wait(PATIENCE)
        with pytest.raises(RateLimited):
            asyncio.run(ask())
        goes_on.set()
        assert first.result(PATIENCE) == 200
    assert asyncio.run(ask()) == 200


@pytest.mark.parametrize(
    ("error", "is_unanswered"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ConnectTimeout("late"), True),
        (httpx.ReadTimeout("late"), True),
        (httpx.ReadError("reset"), True),
        (httpx.RemoteProtocolError("gone"), True),
        (httpx.ProxyError("gone"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (httpx.PoolTimeout("busy"), False),
        (httpx.LocalProtocolError("wrong"), False),
        (httpx.UnsupportedProtocol("ftp"), False),
        (ValueError(), False),
        (asyncio.CancelledError(), False),
    ],
    ids=repr,
)
def test_what_means_that_there_was_no_answer(error: BaseException, *, is_unanswered: bool) -> None:
    """What is wrong with the request, full here or given up is no fault of the host."""
    for outbound in (door._AsyncOutbound(httpx, httpx.AsyncHTTPTransport()), door._SyncOutbound(httpx, httpx.HTTPTransport())):
        assert outbound.is_unanswered(error) is is_unanswered


# --- what belongs to whom ---------------------------------------------------------------------------------------------


class Inner(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """An inner transport that never sends anything; it may fail to close."""

    closed = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __bool__(self) -> bool:
        return False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200)

    def close(self) -> None:
        self.closed += 1
        if self.error:
            raise self.error

    async def aclose(self) -> None:
        self.close()


class Refusing(Inner):
    """An inner transport that refuses everything for a while."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers={"Retry-After": "20"})


class Hanging(Inner):
    """An inner transport that never gets an answer."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await asyncio.get_running_loop().create_future()


class Entered(Inner):
    """An inner transport that has something to open, and is told how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def __enter__(self) -> Self:
        self.told.append("entered")
        return self

    def __exit__(self, *how: object) -> None:
        self.told.append(how[1])

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *how: object) -> None:
        self.__exit__(*how)


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=str)
def test_an_inner_transport_is_entered(kind: type[User], own_redis: RedisServer, error: Exception | None) -> None:
    """As it would be without ours around it; and the store is closed at the end."""
    user = kind("9/second", limiter=own_redis.url, transport=Entered())
    with contextlib.suppress(ValueError):
        if kind is User:
            with user.client:
                user.get("http://example.com")
                _raise(error)
        else:
            user.go(_within(user.client, error))
    assert user.transport._transport.told == ["entered", error]
    assert left(own_redis)
    if kind is AsyncUser:
        user.runner.close()


async def _within(client: httpx.AsyncClient, error: Exception | None) -> None:
    async with client:
        await client.get("http://example.com")
        _raise(error)


def _raise(error: Exception | None) -> None:
    if error:
        raise error


# --- awaiting ---------------------------------------------------------------------------------------------------------


def awaited(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


def single(*limits: str, **options: Any) -> httpx.AsyncClient:
    """A client with one connection: one that is not given back is missed."""
    inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=1))
    return httpx.AsyncClient(
        transport=AsyncRateLimitTransport(*limits, transport=inner, **options), timeout=httpx.Timeout(5, pool=2)
    )


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _until(ready: Callable[[], Any]) -> None:
    while not ready():  # noqa: ASYNC110 - another thread says so
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("during", ["pause", "send", "discard"])
def test_whoever_is_cancelled_gives_the_connection_back(serve: Opens, during: str) -> None:
    """During a pause, while the request is on its way, while the refusal is read."""
    scripts: dict[str, Script] = {
        "pause": refusal("1"),
        "send": lambda connection: connection.is_left() and False,
        "discard": _stalling,
    }
    server = serve(scripts[during])

    async def main() -> None:
        async with single() as client:
            task = asyncio.create_task(client.get(server.url))
            await _until(lambda: server.asked)
            await asyncio.sleep(0.1)
            await _cancelled(task)
            assert (await client.get(server.url)).text == "fine"

    awaited(main)
    assert server.connections == (1 if during == "pause" else 2)


def test_a_limiter_serves_several_event_loops(serve: Opens) -> None:
    """With a transport for each; they share the budget, and what was heard."""
    server = serve()
    limiter = AsyncLimiter("memory://")

    def one() -> None:
        async def main() -> None:
            async with httpx.AsyncClient(transport=AsyncRateLimitTransport("50/second burst 1", limiter=limiter)) as client:
                await asyncio.gather(*[client.get(server.url) for _ in range(10)])

        awaited(main)

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one) for _ in range(2)]:
            done.result()
    assert len(server.asked) == 20
    assert all(at - began >= number / 50 for number, at in enumerate(sorted(each.at for each in server.asked)))


def test_an_event_loop_that_ends_in_the_middle() -> None:
    """Whoever waits for a turn, in a pause or for an answer is dropped in silence; others go on elsewhere."""
    limiter, loop = AsyncLimiter("memory://"), asyncio.new_event_loop()
    complaints: list[str] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    tasks: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        kinds = [(Inner(), "5/second burst 1")] * 4, [(Refusing(), "20/second")], [(Hanging(), "20/second")]
        for inner, limit in itertools.chain(*kinds):
            transport = AsyncRateLimitTransport(limit, limiter=limiter, transport=inner)
            request = httpx.Request("GET", f"http://{type(inner).__name__}")
            tasks.append(asyncio.create_task(transport.handle_async_request(request)))
        await asyncio.sleep(0.02)

    loop.run_until_complete(begin())
    loop.close()
    assert [task.done() for task in tasks] == [True, False, False, False, False, False]
    tasks.clear()

    async def main() -> None:
        transport = AsyncRateLimitTransport("5/second burst 1", limiter=limiter, transport=Inner())
        await asyncio.gather(*[transport.handle_async_request(httpx.Request("GET", "http://Inner")) for _ in range(2)])

    awaited(main)
    gc.collect()
    assert complaints == ["Task was destroyed but it is pending!"] * 5  # as asyncio says of any
    assert len(limiter._wait_queues) == 0


# --- real servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uvicorn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with uvicorn_process("tests.support.outbound_app:app", tmp_path_factory.mktemp("uvicorn")) as url:
        yield url


@pytest.fixture(scope="module")
def hypercorn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("hypercorn") / "log"
    command = [sys.executable, "-m", "hypercorn", "tests.support.outbound_app:app", "--bind", "127.0.0.1:0"]
    with server_process(command, log, lambda text: "Running on" in text, {}) as url:
        yield url


def test_on_uvicorn(use: Opens, uvicorn: str) -> None:
    """Refused once, and then served over the same connection; a long refusal costs one."""
    user = use("100/second")
    port = user.get(uvicorn).json()["port"]
    name = uuid4().hex
    assert user.get(f"{uvicorn}/once/{name}").json()["port"] == port
    assert user.refused("POST", f"{uvicorn}/once/{name}-post").response.json() == {"why": "slow down"}
    assert user.ask("PUT", f"{uvicorn}/echo", content=user.streamed(b"one", b"two")).content == b"onetwo"
    user.refused("POST", f"{uvicorn}/once/{name}-gone", content=user.streamed(b"one", b"two"))
    assert use(timeout=0).refused("GET", f"{uvicorn}/huge").response.content == b""


def test_over_http_2(use: Opens, hypercorn: str) -> None:
    """The same over HTTP/2, where one connection serves all, whatever is left unread."""
    user = use("100/second", http={"http1": False, "http2": True}, timeout=1)
    said = user.get(hypercorn).json()
    assert said["version"] == "2"
    name = uuid4().hex
    assert user.get(f"{hypercorn}/once/{name}").json() == said
    assert user.refused("POST", f"{hypercorn}/once/{name}-post").response.json() == {"why": "slow down"}
    assert user.ask("PUT", f"{hypercorn}/echo", content=user.streamed(b"one", b"two")).content == b"onetwo"
    assert user.refused("GET", f"{hypercorn}/huge").response.content == b""
    time.sleep(1)
    assert user.get(hypercorn).json() == said


def test_http_2_is_multiplexed(hypercorn: str) -> None:
    """Many at once over one connection, each of them refused once, and nobody waits for another's answer."""

    async def main() -> None:
        inner = httpx.AsyncHTTPTransport(http1=False, http2=True)
        async with httpx.AsyncClient(transport=AsyncRateLimitTransport("1000/second", transport=inner)) as client:
            name = uuid4().hex
            began = time.monotonic()
            urls = [f"{hypercorn}/once/{name}-{number}" for number in range(90)]
            responses = await asyncio.gather(*[client.get(url) for url in urls])
            assert time.monotonic() - began < 90 * 0.05
            assert {response.http_version for response in responses} == {"HTTP/2"}
            assert len({response.json()["port"] for response in responses}) == 1

    awaited(main)


# --- our own refusals -------------------------------------------------------------------------------------------------


class Slow(httpx.AsyncBaseTransport):
    """Takes some time to LimitGate and back, longer as long as it has to connect; notes when who was refused and served."""

    def __init__(self, world: World) -> None:
        app = LimitGate(empty_app, rules=[Rule("all", "50/second", "1000/minute")], store=MemoryStore(world))
        self.world, self.inner, self.chance = world, httpx.ASGITransport(app), Random(0)
        self.refused: Counter[httpx.Request] = Counter()
        self.served: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        began = self.world.now
        await asyncio.sleep(self.chance.uniform(0.001, 0.03) + (0 if self.served else 0.05))
        response = await self.inner.handle_async_request(request)
        await asyncio.sleep(self.chance.uniform(0.001, 0.03))
        if response.status_code == 429:
            self.refused[request] += 1
        else:
            self.served.append(began)
        return response


async def empty_app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def keep_asking(world: World, workers: int, seconds: float, *limits: str) -> Slow:
    """Many workers, one request after the other each, for so many seconds."""
    inner = Slow(world)
    limiter = AsyncLimiter(MemoryStore(world))

    async def main() -> None:
        async with httpx.AsyncClient(transport=AsyncRateLimitTransport(*limits, limiter=limiter, transport=inner)) as client:

            async def work() -> None:
                while world.now < seconds:
                    assert (await client.get("http://example.com/")).status_code == 200

            await asyncio.gather(*[work() for _ in range(workers)])

    world.run(main())
    inner.served.sort()
    return inner


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_at_our_own_limit(world: World) -> None:
    """Against LimitGate itself, at exactly its limits: nobody is refused twice, and nothing is left unused.

    Their bucket is found empty a little later than ours, by as much as the first requests were slower than the others, and then
    somebody is refused: once, by a second. From then on it has a second's worth more than ours.
    """
    side = keep_asking(world, 50, 7.5, "50/second", "1000/minute")
    assert max(side.refused.values()) == 1
    assert len(side.refused) <= 50
    assert len([at for at in side.served if 3 <= at < 7]) == pytest.approx(4 * 50, abs=2)


def test_a_little_below_our_own_burst(world: World) -> None:
    """With a burst that leaves room for requests that are not equally fast nobody is refused at all."""
    side = keep_asking(world, 20, 4, "50/second burst 35", "1000/minute")
    assert not side.refused
    assert len([at for at in side.served if at < 4]) == pytest.approx(35 + 4 * 50, abs=2)
