"""Throttled middleware for aiohttp clients: waits for a turn, obeys the service's rate fields, and retries after a 429."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import AddressValueError, IPv6Address
from operator import attrgetter
from types import TracebackType
from typing import Any, Self, Unpack

from limitgate.messages.text import extra

with extra("aiohttp", "aiohttp", "http_sf"):
    import http_sf  # noqa: F401 - raises here if the extra is missing
    from aiohttp import (
        ClientConnectionError,
        ClientError,
        ClientHandlerType,
        ClientRequest,
        ClientResponse,
        ClientResponseError,
        StreamReader,
    )
    from aiohttp.payload import BytesPayload
    from multidict import CIMultiDict, CIMultiDictProxy

from limitgate.errors import ConfigError
from limitgate.limiter.limiter import AsyncLimiter
from limitgate.limiter.plans import Configured
from limitgate.limits.limit import Limit
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, Field, answer_of, without_encoding
from limitgate.outbound.throttle import (
    LONGEST_READ,
    MOST_READ,
    AsyncTransport,
    ClientThrottle,
    Reading,
    Target,
    ThrottledClient,
    afinish,
    arun,
    begin_to_finish,
    by_method,
    is_idempotent,
)

__all__ = ["RateLimitMiddleware", "host", "repeatable"]


def host(request: ClientRequest) -> str:
    """Return the default key: the host of a request, with a non-default port."""
    url = request.url
    # A trailing dot doesn't change the host.
    name = (url.host_subcomponent or "").lower().removesuffix(".")
    if name.startswith("["):
        name = f"[{_as_written(name[1:-1])}]"
    return name if url.explicit_port is None or url.is_default_port() else f"{name}:{url.explicit_port}"


def _as_written(address: str) -> str:
    with suppress(AddressValueError):
        if mapped := IPv6Address(address).ipv4_mapped:
            return f"::ffff:{mapped}"
    return address


@by_method
def repeatable(request: ClientRequest) -> bool:
    """True for idempotent methods, and for requests with an ``Idempotency-Key``."""
    return is_idempotent(request.method, request.headers)


class RateLimitMiddleware(ThrottledClient):
    """Rate-limited client: ``aiohttp.ClientSession(middlewares=[RateLimitMiddleware("10/second")])``.

    ``limits``, ``limiter`` (an `AsyncLimiter` or a store URL), ``key``, ``repeatable``, ``options`` and errors are as in
    `limitgate.httpx.AsyncRateLimitTransport`. Each followed redirect is a request.

    A session doesn't close its middlewares: call `aclose` or use ``async with``. ``ClientTimeout(total=…)`` includes the wait.
    """

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: AsyncLimiter | str = "memory://",
        key: Callable[[ClientRequest], str | None] = host,
        repeatable: Callable[[ClientRequest], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._throttle = ClientThrottle(limits, limiter, AsyncLimiter, key=key, repeatable=repeatable, **options)

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and errors of aiohttp.

        Raises `ConfigError` for anything but a request of a ``ClientSession``.
        """
        if not isinstance(request, ClientRequest):
            raise ConfigError(
                f"RateLimitMiddleware is for aiohttp.ClientSession(middlewares=[...]), but got {request!r:.80}; "
                "for incoming requests, expected LimitGate around an ASGI application"
            )
        response: ClientResponse = await arun(self._throttle.exchange(_Outbound(handler), request))
        return response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for settlements under way, and close the store if this middleware opened it."""
        await self._aclose_store()

    close = aclose  # The name in aiohttp.


def _field_of(headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> Field:
    def field(name: str) -> str | None:
        lines = headers.getall(name, None)
        return None if lines is None else ", ".join(lines)

    return field


class _Outbound(AsyncTransport):
    def __init__(self, handler: ClientHandlerType) -> None:
        self._handler = handler

    async def send(self, request: ClientRequest) -> tuple[ClientResponse, Answer]:
        response = await self._handler(request)
        return response, answer_of(response.status, _field_of(response.headers), time.time())

    async def discard(self, response: ClientResponse) -> ClientResponse:
        body = await _read(response)
        if body is None:
            response.close()
        # aiohttp has no public way to mark a response as read.
        response._body, response._released = body or b"", False  # noqa: SLF001
        return response

    async def close(self, response: ClientResponse) -> None:
        response.close()

    def field(self, response: ClientResponse) -> Field:
        return without_encoding(_field_of(response.headers))

    def target(self, request: ClientRequest) -> Target:
        body = request.body
        content = bytes(body._value) if isinstance(body, BytesPayload) else None if body else b""  # noqa: SLF001
        return Target(content, request.url.path, _field_of(request.headers))

    async def along(self, response: ClientResponse, reading: Reading) -> ClientResponse:
        stream = response.content
        if response._body is not None or stream.at_eof():  # noqa: SLF001 - set if it is read
            reading.feed(response._body or b"")  # noqa: SLF001
            await afinish(reading.over())
            return response
        response.content = content = _Along(stream, reading)

        def ending(end: Callable[[], Any]) -> Callable[[], Any]:
            def ended() -> Any:
                content.settle()
                return end()

            return ended

        wait_for_close = response.wait_for_close

        async def settled() -> None:
            await wait_for_close()
            await asyncio.shield(content.settle())

        # The end of ``async with`` calls `wait_for_close`.
        vars(response).update(close=ending(response.close), release=ending(response.release), wait_for_close=settled)
        return response

    def repeatable(self, request: ClientRequest) -> bool:
        """A request can be repeated if its body is in memory and it doesn't use ``100 Continue``."""
        return (not request.body or isinstance(request.body, BytesPayload)) and "Expect" not in request.headers

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, ClientConnectionError | ClientResponseError | ConnectionError | TimeoutError)


class _Along(StreamReader):
    """A decoded body. A read that ends it waits for the settlement."""

    __slots__ = ("_reading", "_settled", "_stream")

    def __init__(self, stream: StreamReader, reading: Reading) -> None:
        self._stream = stream
        self._reading = reading
        self._settled: asyncio.Future[Any] | None = None
        buffer = stream._buffer  # noqa: SLF001 - there is no public way to see what arrives
        if not isinstance(buffer, _Arriving):
            stream._buffer = buffer = _Arriving(buffer)  # noqa: SLF001
        buffer.tell(reading)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def settle(self) -> asyncio.Future[Any]:
        if self._settled is None:
            self._settled = begin_to_finish(self._reading.over())
        return self._settled

    async def _settle_at_end(self) -> None:
        if self._stream.at_eof() or self._stream.exception() is not None:
            await asyncio.shield(self.settle())


def _settling(name: str) -> Callable[..., Any]:
    async def read(self: _Along, *args: Any, **options: Any) -> Any:
        try:
            found = await getattr(self._stream, name)(*args, **options)
        except Exception:
            await self._settle_at_end()
            raise
        await self._settle_at_end()
        return found

    return read


for _name in ("read", "readany", "readchunk", "readexactly", "readline", "readuntil"):
    setattr(_Along, _name, _settling(_name))
for _name in (
    *("at_eof", "exception", "get_read_buffer_limits", "is_eof", "on_eof", "read_nowait", "set_exception"),
    *("set_read_chunk_size", "total_bytes", "total_raw_bytes", "unread_data", "wait_eof"),
):
    # These use the state of the body.
    setattr(_Along, _name, property(attrgetter(f"_stream.{_name}")))


class _Arriving(deque[bytes]):
    """The buffer of a body: LimitGate reads the chunks that arrive. An error drops those that the application didn't read."""

    def __init__(self, arrived: Iterable[bytes]) -> None:
        super().__init__(arrived)
        self._readings: list[Reading] = []

    def tell(self, reading: Reading) -> None:
        self._readings.append(reading)
        for chunk in self:
            reading.feed(chunk)

    def append(self, chunk: bytes) -> None:
        super().append(chunk)
        for reading in self._readings:
            reading.feed(chunk)


async def _read(response: ClientResponse) -> bytes | None:
    # aiohttp doesn't decode nested encodings.
    if "," in response.headers.get("Content-Encoding", ""):
        return None
    body, deadline = b"", asyncio.timeout(LONGEST_READ)
    try:
        async with deadline:
            while chunk := await response.content.read(MOST_READ + 1 - len(body)):
                body += chunk
                if len(body) > MOST_READ:
                    return None
    except (ClientError, ConnectionError):
        return None
    except TimeoutError:
        # The timeout of the whole request fired, which aiohttp raises only once.
        if not deadline.expired():
            raise
        return None
    return body
