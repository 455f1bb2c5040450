"""The middleware for aiohttp: what is the library's own way. What all clients do alike is in test_clients.py."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from limitgate import Adaptive, AsyncLimiter, ConfigError, RateLimited
from limitgate.aiohttp import RateLimitMiddleware, _Outbound, repeatable
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer
from tests.support.service import SOON, Service, Told, held_port, refusal, serving, trickling


@pytest.fixture
def service() -> Any:
    with serving() as service:
        yield service


@contextlib.asynccontextmanager
async def polite(*limits: str, session: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with one connection, whose requests take turns: a connection that is not given back is missed."""
    async with (
        RateLimitMiddleware(*limits, **options) as middleware,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1),
            middlewares=[middleware],
            **{"timeout": aiohttp.ClientTimeout(total=PATIENCE), **(session or {})},
        ) as client,
    ):
        yield client


def awaited(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


async def text_of(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> str:
    async with session.request(method, url, **options) as response:
        return await response.text()


BODIES: dict[str, tuple[Callable[[], Any], dict[str, Any], bool]] = {
    "none": (lambda: None, {}, True),
    "bytes": (lambda: b"abc", {}, True),
    "text": (lambda: "abc", {}, True),
    "a form": (lambda: {"a": "b"}, {}, True),
    "compressed": (lambda: b"abc" * 1000, {"compress": "deflate"}, True),
    "in chunks": (lambda: b"abc", {"chunked": True}, True),
    "a file in a form": (lambda: aiohttp.FormData({"a": io.BytesIO(b"b")}), {}, False),
    "waiting for 100": (lambda: b"abc", {"expect100": True}, False),
}


@pytest.mark.parametrize(("body", "options", "again"), BODIES.values(), ids=BODIES)
def test_bodies_in_memory_are_sent_again(service: Service, body: Any, options: dict[str, Any], *, again: bool) -> None:
    """The same bytes, however they are framed; what cannot be sent twice is refused."""

    async def main() -> None:
        async with polite() as session:
            if again:
                assert await text_of(session, "PUT", service.url, data=body(), **options) == "hello"
            else:
                with pytest.raises(RateLimited):
                    await session.put(service.url, data=body(), **options)
            assert await text_of(session, "GET", service.url) == "hello"

    service.answers = [SOON]
    awaited(main)
    assert [each.method for each in service.asked] == ["PUT"] * (1 + again) + ["GET"]
    assert len({each.body for each in service.asked[:-1]}) == 1
    assert service.lines == 1


def test_refusals_can_be_read_as_any_response(service: Service) -> None:
    """Once, twice, as text and as JSON, with its status and its fields."""

    async def main() -> None:
        async with polite(timeout=0, key=lambda request: request.url.path) as session:
            for path, body in {"/a": SOON.body, "/b": b""}.items():
                with pytest.raises(RateLimited) as refused:
                    await session.get(service.url + path)
                response = refused.value.response
                assert (await response.read(), await response.read(), await response.text()) == (body, body, body.decode())
                assert (response.status, response.headers["Retry-After"] in {"0.2", "3600"}) == (429, True)
                with pytest.raises(aiohttp.ClientResponseError):
                    response.raise_for_status()

    service.answers = [SOON, refusal(b"x" * 100_000)]
    awaited(main)


@pytest.mark.parametrize("during", ["turn", "pause", "send", "discard"])
@pytest.mark.parametrize("by", ["cancelling", "ClientTimeout"])
def test_whoever_goes_away_gives_everything_back(service: Service, during: str, by: str) -> None:
    """Turn and connection, wherever it is cancelled, by its task or by the timeout of its session."""
    ends = threading.Event()
    answers = {
        "pause": refusal(b""),
        "send": Told(body=iter([])),
        "discard": refusal(trickling(), Content_Length="1000"),
    }

    def script(asked: Any) -> Told:
        if asked.target == "/late" and during == "send":
            ends.wait(PATIENCE)
        return answers.get(during, Told()) if asked.target == "/late" else Told()

    service.script = script

    async def main() -> None:
        limits = ["1/second burst 1"] if during == "turn" else []
        timeouts = {"timeout": aiohttp.ClientTimeout(total=0.1)} if by == "ClientTimeout" else {}
        async with polite(*limits, key=lambda request: request.url.path, timeout=None) as session:
            if during == "turn":
                await text_of(session, "GET", f"{service.url}/late")
            task = asyncio.create_task(session.get(f"{service.url}/late", **timeouts))
            await asyncio.sleep(0.05)
            if by == "cancelling":
                task.cancel()
            done, _ = await asyncio.wait([task], timeout=PATIENCE / 4)
            ends.set()
            assert done, "it is not interrupted"
            with pytest.raises(asyncio.CancelledError if by == "cancelling" else TimeoutError):
                await task
            assert await text_of(session, "GET", f"{service.url}/other") == "hello"
            if during == "turn":  # the next one has the turn that was given back: one second after the first, not two
                async with asyncio.timeout(1.5):
                    assert await text_of(session, "GET", f"{service.url}/late") == "hello"

    awaited(main)


def test_each_redirect_takes_a_turn_and_a_websocket_one(service: Service) -> None:
    async def main() -> None:
        async with polite("2/hour", timeout=0) as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):  # it answers 200, but it was asked
                await session.ws_connect(service.url)
            await text_of(session, "GET", service.url)
            with pytest.raises(RateLimited):
                await session.ws_connect(service.url)

    awaited(main)
    assert len(service.asked) == 2


def test_fields_on_several_lines_are_one(service: Service) -> None:
    """As any list of HTTP may be sent."""

    class Lines(dict[str, str]):
        def items(self) -> Any:
            return [("RateLimit", '"a";r=5;t=9'), ("RateLimit", '"b";r=0;t=100')]

    async def main() -> None:
        async with polite(timeout=0) as session:
            await text_of(session, "GET", service.url)
            with pytest.raises(RateLimited) as refused:
                await session.get(service.url)
            assert 90 < refused.value.decision.retry_after <= 100

    service.answers = [Told(200, Lines())]
    awaited(main)


async def _never(_: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "is_unanswered"),
    [
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ServerTimeoutError(), True),
        (aiohttp.ClientOSError(), True),
        (aiohttp.ClientResponseError(None, (), status=400), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (aiohttp.InvalidURL("x"), False),
        (ValueError(), False),
        (asyncio.CancelledError(), False),
    ],
    ids=repr,
)
def test_what_means_that_there_was_no_answer(error: BaseException, *, is_unanswered: bool) -> None:
    """What is wrong with the request or given up is no fault of the host."""
    assert _Outbound(_never).is_unanswered(error) is is_unanswered


def test_a_host_that_does_not_answer_in_time_is_overloaded(service: Service) -> None:
    """By the timeouts that aiohttp itself has, of the whole request or of a silence."""
    goes_on = threading.Event()
    service.script = lambda _: goes_on.wait(PATIENCE) and Told()

    async def main() -> None:
        for timeout in (aiohttp.ClientTimeout(total=0.02), aiohttp.ClientTimeout(sock_read=0.02)):
            async with polite(throttle=True, adaptive=Adaptive(min=1), session={"timeout": timeout}) as session:
                errors = []
                for _ in range(60):
                    try:
                        await session.get(service.url)
                    except (RateLimited, TimeoutError) as error:
                        errors.append(type(error))
                assert RateLimited in errors

    try:
        awaited(main)
    finally:
        goes_on.set()


def test_a_limiter_may_be_shared_and_stays_open(service: Service, redis_server: RedisServer) -> None:
    """By sessions and by event loops; who made it closes it."""

    async def main() -> None:
        async with AsyncLimiter(redis_server.url, timeout=PATIENCE) as limiter:
            for expected in ("hello", None):
                async with polite("1/hour", limiter=limiter, timeout=0, key=lambda _: service.host) as session:
                    if expected:
                        assert await text_of(session, "GET", service.url) == expected
                    else:
                        with pytest.raises(RateLimited):
                            await session.get(service.url)

    awaited(main)


def test_a_host_that_is_gone_raises_what_aiohttp_raises() -> None:
    async def main() -> None:
        async with polite("5/second") as session:
            with held_port() as port, pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://127.0.0.1:{port}/")

    awaited(main)


def test_a_middleware_for_requests_that_come_in_is_another(service: Service) -> None:
    """As that of ``aiohttp.web``, or a request of another library."""

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"for aiohttp.ClientSession.*expected LimitGate around an ASGI application"):
            await RateLimitMiddleware("5/second")(object(), _never)  # type: ignore[arg-type]

    awaited(main)


def test_repeatable_goes_by_method_and_key(service: Service) -> None:
    found: list[bool] = []

    def key(request: aiohttp.ClientRequest) -> None:
        found.append(repeatable(request))

    async def main() -> None:
        async with polite(key=key) as session:
            for method, headers in (("GET", {}), ("POST", {}), ("POST", {"idempotency-KEY": "1"})):
                await text_of(session, method, service.url, headers=headers)

    awaited(main)
    assert found == [True, False, True]
