"""Polite clients of httpx: transports that wait their turn, obey the service's rate fields, and come back after a 429."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import NoReturn, Self, Unpack, cast

from limitgate.messages.extras import extra

with extra("httpx", "httpx", "http_sf"):
    import http_sf  # noqa: F401 - told here, by the name of this extra
    import httpx

from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limiter.stored_limits import Configured
from limitgate.limits.limit import Limit
from limitgate.outbound.deadline import shut_after
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, answer_of
from limitgate.outbound.throttle import LONGEST_READ, MOST_READ, OF_BODIES, ClientThrottle, arun, is_idempotent, run
from limitgate.process import waiting

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport", "host", "repeatable"]

_OF_HTTPX = "the transports of limitgate.httpx are for httpx, expected RateLimitAdapter of limitgate.requests in a Session"
_UNANSWERED = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.ProxyError,
    httpx.RemoteProtocolError,
    ConnectionError,
    TimeoutError,
)
"""Errors of a request that the host did not answer; the builtin ones are those of transports that are not httpx's."""
_PIECE = 64
"""Bytes of a refusal's body that are decoded together."""


def host(request: httpx.Request) -> str:
    """Default key: the host of a request, with its port if it is not that of the scheme."""
    name = request.url.netloc.decode("ascii").lower()
    return name.replace(".:", ":").removesuffix(".")  # a name that ends in a dot is the same one


def repeatable(request: httpx.Request) -> bool:
    """True if a request may be sent twice: by its method, or since it has an ``Idempotency-Key``."""
    return is_idempotent(request.method, request.headers)


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """Requests wait their turn: ``httpx.AsyncClient(transport=AsyncRateLimitTransport("10/second"))``. For asyncio.

    ``limits`` are counted for each ``key``, which a callable gives of a request, by default its host. They are counted by
    the ``limiter``, an `AsyncLimiter` or the URL of a store, which is opened here and closed with the transport;
    ``memory://`` if not given. All who share the store share the budget. A request whose key is None passes untouched.
    Without limits only the service's ``Retry-After``, ``RateLimit`` and ``X-RateLimit`` fields are obeyed, for all requests
    of the key.

    A request that is refused with 429 is sent again if ``repeatable`` is true of it, by default for methods that may be
    repeated, and its body is in memory. Raises `RateLimited` if not, if it would have to wait for too long, and for what an
    overloaded host is spared. ``options`` are `ClientOptions`: ``timeout``, ``on_error``, ``longest_pause``, ``strict``,
    ``adaptive``, ``throttle`` and ``observers``. Raises `ConfigError` for limits that book no turns, and with ``strict`` for
    those that cannot hold so, `TypeError` for an unknown option.

    ``transport`` sends; a new one of httpx if not given.
    """

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: AsyncLimiter | str = "memory://",
        transport: httpx.AsyncBaseTransport | None = None,
        key: Callable[[httpx.Request], str | None] = host,
        repeatable: Callable[[httpx.Request], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._throttle = ClientThrottle(limits, limiter, AsyncLimiter, key=key, repeatable=repeatable, **options)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self._outbound = _AsyncOutbound(self._transport)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and whatever the inner transport raises."""
        response: httpx.Response = await arun(self._throttle.exchange(self._outbound, request))
        return response

    def handle_request(self, request: httpx.Request | None = None) -> NoReturn:
        """Say that this transport is for an `httpx.AsyncClient`. Raises `TypeError`."""
        raise TypeError("AsyncRateLimitTransport is for httpx.AsyncClient, expected RateLimitTransport in httpx.Client")

    __enter__ = handle_request

    def send(self, *_: object, **__: object) -> NoReturn:
        """Say that this transport is for httpx. Raises `TypeError`."""
        raise TypeError(_OF_HTTPX)

    async def __aenter__(self) -> Self:
        """Enter the inner transport, which may have something to open."""
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        try:
            await self._transport.__aexit__(exc_type, exc_value, traceback)
        finally:
            await self._close_store()

    async def aclose(self) -> None:
        """Close the inner transport, and the store if it was opened here."""
        try:
            await self._transport.aclose()
        finally:
            await self._close_store()

    async def _close_store(self) -> None:
        if self._throttle.owned:
            await self._throttle.owned.aclose()


class RateLimitTransport(httpx.BaseTransport):
    """Requests wait their turn: ``httpx.Client(transport=RateLimitTransport("10/second"))``. Safe under threads.

    ``limits`` are counted for each ``key``, which a callable gives of a request, by default its host. They are counted by
    the ``limiter``, a `Limiter` or the URL of a store, which is opened here and closed with the transport;
    ``memory://`` if not given. All who share the store share the budget. A request whose key is None passes untouched.
    Without limits only the service's ``Retry-After``, ``RateLimit`` and ``X-RateLimit`` fields are obeyed, for all requests
    of the key.

    A request that is refused with 429 is sent again if ``repeatable`` is true of it, by default for methods that may be
    repeated, and its body is in memory. Raises `RateLimited` if not, if it would have to wait for too long, and for what an
    overloaded host is spared. ``options`` are `ClientOptions`: ``timeout``, ``on_error``, ``longest_pause``, ``strict``,
    ``adaptive``, ``throttle`` and ``observers``. Raises `ConfigError` for limits that book no turns, and with ``strict`` for
    those that cannot hold so, `TypeError` for an unknown option.

    ``transport`` sends; a new one of httpx if not given.
    """

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: Limiter | str = "memory://",
        transport: httpx.BaseTransport | None = None,
        key: Callable[[httpx.Request], str | None] = host,
        repeatable: Callable[[httpx.Request], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._throttle = ClientThrottle(limits, limiter, Limiter, key=key, repeatable=repeatable, **options)
        self._transport = httpx.HTTPTransport() if transport is None else transport
        self._outbound = _SyncOutbound(self._transport)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and whatever the inner transport raises."""
        response: httpx.Response = run(self._throttle.exchange(self._outbound, request))
        return response

    async def handle_async_request(self, request: httpx.Request | None = None) -> NoReturn:
        """Say that this transport is for an `httpx.Client`. Raises `TypeError`."""
        raise TypeError("RateLimitTransport is for httpx.Client, expected AsyncRateLimitTransport in httpx.AsyncClient")

    __aenter__ = handle_async_request

    def send(self, *_: object, **__: object) -> NoReturn:
        """Say that this transport is for httpx. Raises `TypeError`."""
        raise TypeError(_OF_HTTPX)

    def __enter__(self) -> Self:
        """Enter the inner transport, which may have something to open."""
        self._transport.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        try:
            self._transport.__exit__(exc_type, exc_value, traceback)
        finally:
            self._close_store()

    def close(self) -> None:
        """Close the inner transport, and the store if it was opened here."""
        try:
            self._transport.close()
        finally:
            self._close_store()

    def _close_store(self) -> None:
        if self._throttle.owned:
            self._throttle.owned.close()


def _answer(response: httpx.Response) -> Answer:
    return answer_of(response.status_code, response.headers.get, time.time())


def _is_unanswered(error: BaseException) -> bool:
    """True for no connection, no answer, or none in time. That no connection of the pool came free is not the host's doing."""
    return isinstance(error, _UNANSWERED) and not isinstance(error, httpx.PoolTimeout)


def _in_memory(request: httpx.Request) -> bool:
    """True if a request's body can be sent again; one that is streamed cannot."""
    try:
        _ = request.content
    except httpx.RequestNotRead:
        return False
    return True


def _having_read(response: httpx.Response, body: bytes | None) -> httpx.Response:
    """Response with its body as it was on the wire; without one if that is not known, or cannot be decoded."""
    same = partial(httpx.Response, response.status_code, request=response.request, extensions=response.extensions)
    headers = response.headers.raw
    if body is not None and _is_readable(response.headers, body):
        return same(headers=headers, content=body)
    return same(headers=[each for each in headers if each[0].lower().decode("latin-1") not in OF_BODIES])


def _is_readable(headers: httpx.Headers, body: bytes) -> bool:
    """True if a body can be decoded to no more bytes than may be read from the wire."""
    encoding = headers.get("content-encoding", "")
    if not encoding:
        return True
    if "," in encoding:  # a byte that was encoded twice may stand for a million
        return False
    pieces = (body[at : at + _PIECE] for at in range(0, len(body), _PIECE))
    size = 0
    with suppress(httpx.DecodingError):
        for part in httpx.Response(200, headers={"content-encoding": encoding}, content=pieces).iter_bytes():
            size += len(part)
            if size > MOST_READ:
                return False
        return True
    return False


@contextmanager
def _reading_briefly(request: httpx.Request) -> Iterator[None]:
    """Shorten the read timeout of a request, which transports look up in it, to that of a refusal's body."""
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {**timeouts, "read": min(timeouts.get("read") or LONGEST_READ, LONGEST_READ)}
    try:
        yield
    finally:
        request.extensions["timeout"] = timeouts


def _deadline(response: httpx.Response) -> AbstractContextManager[None]:
    """End the reading of a response of HTTP/1 after `LONGEST_READ` seconds; a connection of HTTP/2 has others on it."""
    stream = response.extensions.get("network_stream")
    line = stream.get_extra_info("socket") if stream and response.http_version.startswith("HTTP/1") else None
    return shut_after(LONGEST_READ, line.fileno()) if line else nullcontext()


class _AsyncOutbound:
    """The `Transport` of an async transport."""

    repeatable = staticmethod(_in_memory)
    is_unanswered = staticmethod(_is_unanswered)

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def sleep(self, seconds: float) -> None:
        await waiting.asleep(seconds)

    async def send(self, request: httpx.Request) -> tuple[httpx.Response, Answer]:
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response, _answer(response)

    async def discard(self, response: httpx.Response) -> httpx.Response:
        body = b""
        try:
            async with asyncio.timeout(LONGEST_READ):
                async for chunk in cast("httpx.AsyncByteStream", response.stream):
                    body += chunk
                    if len(body) > MOST_READ:
                        return _having_read(response, None)
        except (TimeoutError, httpx.TransportError):
            return _having_read(response, None)
        finally:
            await response.aclose()
        return _having_read(response, body)

    async def close(self, response: httpx.Response) -> None:
        await response.aclose()


class _SyncOutbound:
    """The `Transport` of a sync transport."""

    repeatable = staticmethod(_in_memory)
    is_unanswered = staticmethod(_is_unanswered)

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def sleep(self, seconds: float) -> None:
        waiting.sleep(seconds)

    def send(self, request: httpx.Request) -> tuple[httpx.Response, Answer]:
        response = self._transport.handle_request(request)
        response.request = request
        return response, _answer(response)

    def discard(self, response: httpx.Response) -> httpx.Response:
        body, until = b"", time.monotonic() + LONGEST_READ
        try:
            with _reading_briefly(response.request), _deadline(response):
                for chunk in cast("httpx.SyncByteStream", response.stream):
                    body += chunk
                    if len(body) > MOST_READ or time.monotonic() > until:
                        return _having_read(response, None)
        except httpx.TransportError:
            return _having_read(response, None)
        finally:
            response.close()
        return _having_read(response, body if time.monotonic() <= until else None)  # its end may be that of the deadline

    def close(self, response: httpx.Response) -> None:
        response.close()
