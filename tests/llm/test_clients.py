"""Budgets through the clients of every library, against a service on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
import urllib3

from limitgate import Limiter, MemoryStore, RateLimited
from limitgate.llm import Budget
from tests.support.clients import CLIENTS, Awaiting, Client, Interrupted
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer
from tests.support.service import Service, Told, serving, trickling

LIMIT = "1000000 per 300 days"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 1000}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"abcdefgh"}}]}\n\n'
"""Two tokens."""
INPUT = 100
ESTIMATE = 1100


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture(params=CLIENTS.values(), ids=CLIENTS)
def kind(request: pytest.FixtureRequest) -> type[Client]:
    return request.param


class Opened:
    """A client under a budget with one key. Its clock stands still, so nothing drains."""

    def __init__(self, kind: type[Client], **options: Any) -> None:
        self.store = MemoryStore(lambda: 1_790_000_000_000_000)
        limiter = kind.limiter(self.store)
        self.client = kind(budget=Budget(tokens=LIMIT, key=lambda _: "k"), **{"limiter": limiter, "timeout": 0, **options})

    def ask(self, service: Service, **options: Any) -> Any:
        return self.client.request("POST", service.url, json=ASKED, **options)

    @property
    def used(self) -> int:
        return Limiter(self.store).peek("k", LIMIT).windows[0].used

    @property
    def pause(self) -> float:
        return Limiter(self.store).banned("k").retry_after


@pytest.fixture
def opened(kind: type[Client]) -> Iterator[Callable[..., Opened]]:
    with contextlib.ExitStack() as stack:

        def opens(**options: Any) -> Opened:
            opened = Opened(kind, **options)
            stack.callback(opened.client.close)
            return opened

        yield opens


Opens = Callable[..., Opened]


# --- pauses -----------------------------------------------------------------------------------------------------------

NOTHING_LEFT = {
    "RateLimit": {"RateLimit": '"a";r=0;t=50'},
    "RateLimit of draft 07": {"RateLimit": "limit=10, remaining=0, reset=50"},
    "RateLimit-Remaining": {"RateLimit-Remaining": "0", "RateLimit-Reset": "50"},
    "X-RateLimit-Remaining": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50"},
}
EXHAUSTED = {
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "0",
    "x-ratelimit-reset-tokens": "6s",
}
WITH_ROOM = EXHAUSTED | {"x-ratelimit-remaining-tokens": "900"}


def paused(opened: Opens, service: Service, status: int, fields: dict[str, str]) -> float:
    """Ask once, and return the pause of the key."""
    service.answers = [Told(status, fields, b"{}")]
    client = opened()
    with contextlib.suppress(RateLimited):
        client.ask(service)
    return client.pause


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize("fields", NOTHING_LEFT.values(), ids=NOTHING_LEFT)
def test_fields_of_any_service_count_under_a_budget(
    opened: Opens, service: Service, status: int, fields: dict[str, str]
) -> None:
    """As without a budget."""
    assert paused(opened, service, status, fields) == 50


@pytest.mark.parametrize(
    ("status", "fields", "pause"),
    [
        (200, EXHAUSTED, 6),
        (429, EXHAUSTED, 6),
        (429, {"retry-after-ms": "3000"}, 3),
        (200, WITH_ROOM, 0),
        # The provider doesn't say when to return.
        (429, WITH_ROOM, 50),
    ],
)
def test_fields_of_the_provider_come_first(
    opened: Opens, service: Service, status: int, fields: dict[str, str], pause: float
) -> None:
    assert paused(opened, service, status, NOTHING_LEFT["RateLimit"] | fields) == pause


@pytest.mark.parametrize(("first", "second"), [("10", "20"), ("20", "10"), ("soon", "20")])
def test_of_two_waits_the_longest_applies(opened: Opens, service: Service, first: str, second: str) -> None:
    assert paused(opened, service, 429, {"Retry-After": first, "retry-after": second}) == 20


@pytest.mark.parametrize("name", EXHAUSTED)
def test_fields_of_the_provider_that_contradict_each_other_do_not_count(opened: Opens, service: Service, name: str) -> None:
    twice = EXHAUSTED | {name.upper(): "5s" if "reset" in name else "5"}
    assert paused(opened, service, 200, twice) == 0


# --- the end of a client ----------------------------------------------------------------------------------------------

ASYNC = {name: kind for name, kind in CLIENTS.items() if issubclass(kind, Awaiting)}
every_async_kind = pytest.mark.parametrize("kind", ASYNC.values(), ids=ASYNC)


@contextlib.asynccontextmanager
async def streaming(client: Any, url: str) -> AsyncIterator[AsyncIterator[bytes]]:
    """The body of a response, in parts."""
    if hasattr(client, "session"):
        async with client.session.post(url, json=ASKED) as response:
            yield response.content.iter_any()
    else:
        async with client.client.stream("POST", url, json=ASKED) as response:
            yield response.aiter_raw()


def leave_early(
    kind: type[Client], service: Service, server: RedisServer, *, raises: bool, steps: int | None = None, freezes: bool = False
) -> int:
    """Leave a response, close the client, and return the tokens that are charged.

    The task that leaves is cancelled after ``steps``. Redis doesn't answer from there on if it ``freezes``.
    """
    body = trickling(EVENT, 0.05)
    service.answers = [Told(200, {"Content-Type": "text/event-stream", "Connection": "close"}, body, "close")]
    client: Any = kind(budget=Budget(tokens=LIMIT, key=lambda _: f"k{steps}"), limiter=server.url)

    async def leave(begun: asyncio.Event, frozen: contextlib.ExitStack) -> None:
        async with streaming(client, service.url) as chunks:
            async for _ in chunks:
                begun.set()
                if freezes:
                    frozen.enter_context(server.frozen())
                if raises:
                    raise Interrupted
                break

    async def main() -> None:
        begun = asyncio.Event()
        with contextlib.ExitStack() as frozen:
            if steps is None:
                with contextlib.suppress(Interrupted):
                    await leave(begun, frozen)
            else:
                leaving = asyncio.create_task(leave(begun, frozen))
                await begun.wait()
                for _ in range(steps):
                    await asyncio.sleep(0)
                leaving.cancel()
                await asyncio.wait([leaving])
                assert leaving.cancelled() or isinstance(leaving.exception(), Interrupted | None)
            if hasattr(client, "session"):
                await client.session.close()
                await client.ourselves.aclose()
            else:
                await client.client.aclose()

    with contextlib.closing(client):
        client.go(main())
    with contextlib.closing(Limiter(server.url, timeout=PATIENCE)) as limiter:
        return limiter.peek(f"k{steps}", LIMIT).windows[0].used


@every_async_kind
@pytest.mark.parametrize("raises", [False, True], ids=["break", "raise"])
def test_a_client_that_is_closed_waits_for_settlements(
    kind: type[Client], service: Service, own_redis: RedisServer, *, raises: bool
) -> None:
    for steps in (None, *range(10)):
        assert INPUT < leave_early(kind, service, own_redis, raises=raises, steps=steps) < INPUT + 20


@every_async_kind
@pytest.mark.usefixtures("default_timeout")
def test_a_client_is_closed_while_the_store_does_not_answer(
    kind: type[Client], service: Service, own_redis: RedisServer
) -> None:
    """The timeout of the store ends the wait. Redis may still read the settlement later."""
    assert INPUT < leave_early(kind, service, own_redis, raises=False, freezes=True) <= ESTIMATE


def test_the_end_of_a_response_of_aiohttp_waits_for_its_settlement(service: Service) -> None:
    """The next request has what the estimate was too high."""
    service.answers = [Told(200, {"Content-Type": "text/event-stream"}, EVENT)]
    opened = Opened(CLIENTS["aiohttp"])
    client: Any = opened.client

    async def ask() -> int:
        async with client.session.post(service.url, json=ASKED):
            pass
        return opened.used

    with contextlib.closing(client):
        assert client.go(ask()) < INPUT + 10


def test_a_middleware_that_is_closed_waits_for_responses_that_were_closed(service: Service, own_redis: RedisServer) -> None:
    service.answers = [Told(200, {"Content-Type": "text/event-stream"}, EVENT)]
    client: Any = CLIENTS["aiohttp"](budget=Budget(tokens=LIMIT, key=lambda _: "k"), limiter=own_redis.url)

    async def ask() -> None:
        (await client.session.post(service.url, json=ASKED)).close()
        await client.ourselves.aclose()

    with contextlib.closing(client):
        client.go(ask())
    with contextlib.closing(Limiter(own_redis.url, timeout=PATIENCE)) as limiter:
        assert limiter.peek("k", LIMIT).windows[0].used < INPUT + 10


# --- responses that are not read --------------------------------------------------------------------------------------

REPORTED = Told(200, {"Content-Type": "application/json"}, b'{"usage": {"prompt_tokens": 5, "completion_tokens": 5}}')


def test_each_redirect_is_settled(opened: Opens, kind: type[Client], service: Service) -> None:
    service.answers = [Told(307, {"Location": "/there"}, b"moved"), REPORTED]
    client = opened()
    client.ask(service, **({"preload_content": False} if kind is CLIENTS["urllib3"] else {}))
    assert INPUT + 10 <= client.used < INPUT + 20


def urllib3_response(client: Client, url: str, **options: Any) -> Any:
    return client.ourselves.request("POST", url, json=ASKED, preload_content=False, **options)


def requests_response(client: Client, url: str, **options: Any) -> Any:
    session: Any = client
    return session.session.post(url, json=ASKED, stream=True, **options).raw


ENDS: dict[str, tuple[Callable[[Any], object], int]] = {
    "drained": (lambda response: response.drain_conn(), 10),
    "drained after a part": (lambda response: (response.read(7), response.drain_conn()), 10),
    "released": (lambda response: response.release_conn(), INPUT),
    "released after a part": (lambda response: (response.read(7), response.release_conn()), INPUT + 1),
    "read and released": (lambda response: (response.read(), response.release_conn()), 10),
    "closed": (lambda response: response.close(), INPUT),
}


@pytest.mark.parametrize(("library", "respond"), [("urllib3", urllib3_response), ("requests", requests_response)])
@pytest.mark.parametrize(("end", "used"), ENDS.values(), ids=ENDS)
def test_responses_of_urllib3_are_settled_however_they_end(
    service: Service, library: str, respond: Callable[..., Any], end: Callable[[Any], object], used: int
) -> None:
    service.answers = [REPORTED]
    opened = Opened(CLIENTS[library])
    with contextlib.closing(opened.client):
        end(respond(opened.client, service.url))
        assert opened.used == used


def test_a_body_without_a_byte_is_settled(service: Service) -> None:
    service.answers = [Told(200, {}, b"")]
    opened = Opened(CLIENTS["urllib3"])
    with contextlib.closing(opened.client):
        urllib3_response(opened.client, service.url).release_conn()
        assert opened.used == INPUT


def test_a_compressed_body_is_drained_as_it_is(service: Service) -> None:
    """urllib3 doesn't decompress what nobody reads."""
    body = gzip.compress(b"x" * 100_000)
    service.answers = [Told(200, {"Content-Encoding": "gzip"}, body)] * 2
    opened = Opened(CLIENTS["urllib3"])
    with contextlib.closing(opened.client):
        urllib3_response(opened.client, service.url).drain_conn()
        assert INPUT < opened.used < INPUT + len(body)
        begun = urllib3_response(opened.client, service.url)
        begun.read(40)
        begun.drain_conn()
        assert 2 * INPUT < opened.used < 2 * INPUT + 2 * len(body)


# --- bodies that break off --------------------------------------------------------------------------------------------

STREAM = {"Content-Type": "text/event-stream"}
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
MANY = EVENT * 5
BROKEN = {
    "between chunks": ({"Transfer-Encoding": "chunked"}, [CHUNK] * 5),
    "in a chunk": ({"Transfer-Encoding": "chunked"}, [b"fff\r\n", *[EVENT] * 5]),
    "before its length": ({"Content-Length": "4000"}, [EVENT] * 5),
}


@pytest.mark.parametrize(("headers", "body"), BROKEN.values(), ids=BROKEN)
def test_a_stream_that_breaks_off_costs_what_arrived(
    opened: Opens, service: Service, headers: dict[str, str], body: list[bytes]
) -> None:
    """Although the client reads it in one call, which raises."""
    service.answers = [Told(200, STREAM | headers, body, "close")]
    client = opened()
    with pytest.raises(Exception, match=r"(?i)incomplete|closed|payload|connection|prematurely"):
        client.ask(service, **({"retries": False} if isinstance(client.client, CLIENTS["urllib3"]) else {}))
    assert client.used == INPUT + 10


@pytest.mark.parametrize(("library", "respond"), [("urllib3", urllib3_response), ("requests", requests_response)])
@pytest.mark.parametrize("size", [None, 4000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_stream_that_stalls_costs_what_arrived(
    service: Service, library: str, respond: Callable[..., Any], size: int | None, *, is_chunked: bool
) -> None:
    """The parts before the timeout count."""
    is_sent, is_over = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield b"fff\r\n" + MANY if is_chunked else MANY
        is_sent.set()
        is_over.wait(PATIENCE)

    headers = {"Transfer-Encoding": "chunked"} if is_chunked else {"Content-Length": "5000"}
    service.answers = [Told(200, STREAM | headers, body(), "close")]
    opened = Opened(CLIENTS[library])
    with contextlib.closing(opened.client):
        response = respond(opened.client, service.url)
        assert is_sent.wait(PATIENCE)
        response.connection.sock.settimeout(0.05)
        with pytest.raises(urllib3.exceptions.ReadTimeoutError):
            response.read(size)
        is_over.set()
        assert opened.used == INPUT + 10


LAST = b'data: {"choices":[],"usage":{"prompt_tokens":111,"completion_tokens":22}}\n\n'
AIOHTTP_READS: dict[str, Callable[[aiohttp.StreamReader], Any]] = {
    "exactly": lambda content: content.readexactly(len(MANY + LAST) + 1),
    "until": lambda content: content.readuntil(b"\0"),
    "a line that is too long": lambda content: content.readuntil(b"\0", max_size=100),
    "nothing": lambda content: content.wait_eof(),
}


@pytest.mark.parametrize("read", AIOHTTP_READS.values(), ids=AIOHTTP_READS)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_usage_in_a_part_that_aiohttp_does_not_return_counts(
    service: Service, read: Callable[[aiohttp.StreamReader], Any], *, is_zipped: bool
) -> None:
    body, headers = MANY + LAST, {"Content-Encoding": "gzip"} if is_zipped else {}
    service.answers = [Told(200, STREAM | headers, gzip.compress(body) if is_zipped else body)]
    opened = Opened(CLIENTS["aiohttp"])
    client: Any = opened.client

    async def ask() -> None:
        async with client.session.post(service.url, json=ASKED) as response:
            await response.content.wait_eof()
            with contextlib.suppress(asyncio.IncompleteReadError, ValueError, aiohttp.http_exceptions.LineTooLong):
                await read(response.content)

    with contextlib.closing(client):
        client.go(ask())
        assert opened.used == 133


def test_budgets_around_each_other_read_the_same_response_of_aiohttp(service: Service) -> None:
    service.answers = [Told(200, STREAM, MANY + LAST)]
    inner = Opened(CLIENTS["aiohttp"])
    outer = Opened(CLIENTS["aiohttp"])

    async def ask() -> None:
        async with (
            aiohttp.ClientSession(middlewares=[outer.client.ourselves, inner.client.ourselves]) as session,
            session.post(service.url, json=ASKED) as response,
        ):
            assert await response.read() == MANY + LAST

    with contextlib.closing(inner.client), contextlib.closing(outer.client):
        asyncio.run(ask())
    assert (inner.used, outer.used) == (133, 133)


ZIPPED = gzip.compress(MANY * 300)
RESPONSES: dict[str, Told] = {
    "with a length": Told(200, STREAM, MANY * 300),
    "in chunks": Told(200, STREAM | {"Transfer-Encoding": "chunked"}, [CHUNK] * 300 + [b"0\r\n\r\n"]),
    "until it is closed": Told(200, STREAM | {"Connection": "close"}, [MANY * 300], "close"),
    "empty": Told(200, STREAM, b""),
    "zipped": Told(200, STREAM | {"Content-Encoding": "gzip"}, ZIPPED),
    "zipped wrongly": Told(200, STREAM | {"Content-Encoding": "gzip"}, MANY),
    "zipped and cut": Told(200, STREAM | {"Content-Encoding": "gzip", "Content-Length": "4000"}, [ZIPPED], "close"),
    **{name: Told(200, STREAM | headers, body, "close") for name, (headers, body) in BROKEN.items()},
}
READS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "data": lambda response: iter([response.data, response.data, response.read(), response.read(3)]),
    "read": lambda response: iter([response.read(), response.read(), response.data]),
    "read a part, then data": lambda response: iter([response.read(7), response.data, response.data]),
    "read as it is": lambda response: iter([response.read(decode_content=False)]),
    "read parts as they are": lambda response: (response.read(300, decode_content=False) for _ in range(1000)),
    "read negatively": lambda response: iter([response.read(-1), response.read(0)]),
    "read parts": lambda response: (response.read(100) for _ in range(10_000)),
    "read large parts": lambda response: (response.read(100_000) for _ in range(3)),
    "stream": lambda response: iter([b"".join(response.stream(50))]),
    "lines": iter,
    "closed, then read": lambda response: (each() for each in (response.close, response.read, lambda: response.data)),
    "drained, then read": lambda response: (each() for each in (response.drain_conn, response.read)),
}


def outcome(response: Any, read: Callable[[Any], Iterator[Any]]) -> list[Any]:
    """What the application gets, until an error."""
    found: list[Any] = []
    try:
        for each in read(response):
            found.append(each)
            if len(found) > 3 and not each:
                break
    except Exception as error:  # noqa: BLE001 - any
        found.append(type(error))
    response.close()
    return found


@pytest.mark.parametrize("told", RESPONSES.values(), ids=RESPONSES)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_responses_are_read_as_without_a_budget(service: Service, told: Told, read: Callable[[Any], Iterator[Any]]) -> None:
    service.answers = [told] * 2
    opened = Opened(CLIENTS["urllib3"])
    with contextlib.closing(opened.client), urllib3.PoolManager() as plain:
        ours = outcome(urllib3_response(opened.client, service.url, retries=False), read)
        theirs = outcome(plain.request("POST", service.url, json=ASKED, preload_content=False, retries=False), read)
        assert ours == theirs
