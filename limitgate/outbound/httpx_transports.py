"""Throttled transports for httpx and httpx2, which have one API but no common classes."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, Protocol, Self, TypeVar, Unpack

from limitgate.errors import ConfigError
from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limiter.plans import Configured
from limitgate.limits.decision import RateLimited
from limitgate.limits.limit import Limit
from limitgate.outbound import throttle
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, Field, answer_of, without_encoding
from limitgate.outbound.throttle import (
    LONGEST_READ,
    MOST_READ,
    OF_BODIES,
    ClientThrottle,
    Reading,
    Target,
    ThrottledClient,
    Transport,
    afinish,
    arun,
    by_method,
    is_idempotent,
    run,
    shut_after,
)
from limitgate.process.clock import monotonic

_LIBRARIES = ("httpx", "httpx2")
_READABLE = {"", "gzip", "deflate", "identity"}
_PIECE = 64
"""Bytes decoded together."""


class AnyRequest(Protocol):
    method: str

    @property
    def url(self) -> Any: ...

    @property
    def headers(self) -> Iterable[str]: ...


Request = TypeVar("Request", bound=AnyRequest)
Response = TypeVar("Response")
Inner = TypeVar("Inner")


def host(request: AnyRequest) -> str:
    """Return the default key: the host of a request, with a non-default port."""
    name: str = request.url.netloc.decode("ascii").lower()
    # A trailing dot doesn't change the host.
    return name.replace(".:", ":").removesuffix(".")


@by_method
def repeatable(request: AnyRequest) -> bool:
    """True for idempotent methods, and for requests with an ``Idempotency-Key``."""
    return is_idempotent(request.method, request.headers)


class _Transport(ThrottledClient, Generic[Request, Response, Inner]):
    _library: Any
    _kind: ClassVar[str]
    _other: ClassVar[str]

    def _wrong_client(self, request: Request | None) -> Exception:
        mixed = None if request is None else self._mixed(request, self._other)
        ours, theirs = _transport_in(self._kind), _transport_in(self._other)
        library = self._library.__name__
        return mixed or TypeError(f"{ours} is for {library}.{self._kind}, expected {theirs} in {library}.{self._other}")

    def _mixed(self, request: object, client: str) -> ConfigError | None:
        theirs = _foreign(request, self._library)
        if theirs is None:
            return None
        transport, library = _transport_in(self._kind), self._library.__name__
        return ConfigError(
            f"{transport} of limitgate.{library} is for {library} and was given a request of {theirs}, "
            f"expected {_transport_in(client)} of limitgate.{theirs} in {theirs}.{client}"
        )

    def _inner(self, transport: Any, method: str, base: str) -> Any:
        library, own = self._library.__name__, base.replace("Base", "HTTP")
        if transport is None:
            return getattr(self._library, own)()
        if theirs := _foreign(transport, self._library):
            raise ConfigError(
                f"transport is {transport!r:.80} of {theirs}, expected one of {library} such as {library}.{own}(), "
                f"or limitgate.{theirs} for clients of {theirs}"
            )
        if isinstance(transport, type) or not callable(getattr(transport, method, None)):
            raise ConfigError(f"transport is {transport!r:.80}, expected {library}.{base}, such as {library}.{own}()")
        return transport

    def send(self, *_: object, **__: object) -> NoReturn:
        library = self._library.__name__
        cure = "expected RateLimitAdapter of limitgate.requests in a Session"
        raise TypeError(f"the transports of limitgate.{library} are for {library}, {cure}")


class AsyncTransport(_Transport[Request, Response, Inner]):
    _kind, _other = "AsyncClient", "Client"

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: AsyncLimiter | str = "memory://",
        transport: Inner | None = None,
        key: Callable[[Request], str | None] = host,
        repeatable: Callable[[Request], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._throttle = ClientThrottle(limits, limiter, AsyncLimiter, key=key, repeatable=repeatable, **options)
        self._transport = self._inner(transport, "handle_async_request", "AsyncBaseTransport")
        self._outbound = _AsyncOutbound(self._library, self._transport)

    async def handle_async_request(self, request: Request) -> Response:
        """See `SyncTransport.handle_request`."""
        if mixed := self._mixed(request, self._kind):
            raise mixed
        response: Response = await arun(self._throttle.exchange(self._outbound, request))
        return response

    def handle_request(self, request: Request | None = None) -> NoReturn:
        """Raise `TypeError`, because this is for ``AsyncClient``; `ConfigError` for a request of the other library."""
        raise self._wrong_client(request)

    __enter__ = handle_request

    async def __aenter__(self) -> Self:
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
            await self._aclose_store()

    async def aclose(self) -> None:
        try:
            await self._transport.aclose()
        finally:
            await self._aclose_store()


class SyncTransport(_Transport[Request, Response, Inner]):
    _kind, _other = "Client", "AsyncClient"

    def __init__(
        self,
        *limits: Limit | str | Configured,
        limiter: Limiter | str = "memory://",
        transport: Inner | None = None,
        key: Callable[[Request], str | None] = host,
        repeatable: Callable[[Request], bool] = repeatable,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._throttle = ClientThrottle(limits, limiter, Limiter, key=key, repeatable=repeatable, **options)
        self._transport = self._inner(transport, "handle_request", "BaseTransport")
        self._outbound = _SyncOutbound(self._library, self._transport)

    def handle_request(self, request: Request) -> Response:
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and errors of the wrapped transport.

        Raises `ConfigError` for a request of the other library, httpx or httpx2.
        """
        if mixed := self._mixed(request, self._kind):
            raise mixed
        response: Response = run(self._throttle.exchange(self._outbound, request))
        return response

    async def handle_async_request(self, request: Request | None = None) -> NoReturn:
        """Raise `TypeError`, because this is for ``Client``; `ConfigError` for a request of the other library."""
        raise self._wrong_client(request)

    __aenter__ = handle_async_request

    def __enter__(self) -> Self:
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
        try:
            self._transport.close()
        finally:
            self._close_store()

    def _close_store(self) -> None:
        if self._throttle.owned:
            self._throttle.owned.close()


def _transport_in(client: str) -> str:
    return client.replace("Client", "RateLimitTransport")


def _foreign(thing: object, library: Any) -> str | None:
    """Return the name of the other library if the object belongs to it.

    Checks base classes, because openai renames the module of httpx2 classes.
    """
    if isinstance(thing, _kinds(library)):
        return None
    others = [(name, sys.modules.get(name)) for name in _LIBRARIES]
    return next((name for name, other in others if other not in (None, library) and isinstance(thing, _kinds(other))), None)


def _kinds(library: Any) -> tuple[type, ...]:
    return (
        library.Request,
        library.Response,
        library.BaseTransport,
        library.AsyncBaseTransport,
        library.Client,
        library.AsyncClient,
    )


class _Outbound(Transport):
    def __init__(self, library: Any, transport: Any) -> None:
        self._library = library
        self._transport = transport
        self._unanswered = (
            library.TimeoutException,
            library.NetworkError,
            library.ProxyError,
            library.RemoteProtocolError,
            ConnectionError,
            TimeoutError,
        )
        """Errors without a response. Third-party transports raise builtin errors."""

    def is_unanswered(self, error: BaseException) -> bool:
        """True if there was no response. A full connection pool doesn't count."""
        return isinstance(error, self._unanswered) and not isinstance(error, self._library.PoolTimeout)

    def repeatable(self, request: Any) -> bool:
        try:
            _ = request.content
        except self._library.RequestNotRead:
            return False
        return True

    def field(self, response: Any) -> Field:
        get: Field = response.headers.get
        return without_encoding(get) if response.is_closed else get

    def target(self, request: Any) -> Target:
        # Accept only encodings that LimitGate can decode without another library.
        if not set(request.headers.get("accept-encoding", "").replace(" ", "").split(",")) <= _READABLE:
            request.headers["accept-encoding"] = "gzip, deflate"
        body = request.content if self.repeatable(request) else None
        return Target(body, request.url.path, request.headers.get)

    def is_unsent(self, error: BaseException) -> bool:
        library = self._library
        return isinstance(error, library.PoolTimeout | library.LocalProtocolError | library.UnsupportedProtocol)

    def refused(self, request: Any, error: RateLimited) -> Any:
        wait = error.retry_after_header
        headers = (
            {}
            if wait is None
            else {"retry-after": str(wait), "retry-after-ms": str(math.ceil(1000 * error.decision.retry_after))}
        )
        problem = {
            "type": "rate_limit_error",
            "code": "rate_limit_exceeded",
            "message": f"{error}, by the budget of this client",
        }
        return self._library.Response(429, headers=headers, json={"type": "error", "error": problem}, request=request)

    def _answered(self, request: Any, response: Any) -> tuple[Any, Answer]:
        library = self._library
        if theirs := _foreign(response, library):
            raise ConfigError(
                f"transport {self._transport!r:.80} answered with a response of {theirs}, expected one of {library.__name__}"
            )
        response.request = request
        return response, answer_of(response.status_code, response.headers.get, time.time())

    def _having_read(self, response: Any, body: bytes | None) -> Any:
        same = partial(self._library.Response, response.status_code, request=response.request, extensions=response.extensions)
        headers = response.headers.raw
        if body is not None and self._is_readable(response.headers, body):
            return same(headers=headers, content=body)
        return same(headers=[each for each in headers if each[0].lower().decode("latin-1") not in OF_BODIES])

    def _is_readable(self, headers: Any, body: bytes) -> bool:
        encoding = headers.get("content-encoding", "")
        if not encoding:
            return True
        # With nested encodings, one byte can expand to a million.
        if "," in encoding:
            return False
        pieces = (body[at : at + _PIECE] for at in range(0, len(body), _PIECE))
        size = 0
        with suppress(self._library.DecodingError):
            for part in self._library.Response(200, headers={"content-encoding": encoding}, content=pieces).iter_bytes():
                size += len(part)
                if size > MOST_READ:
                    return False
            return True
        return False


class _AsyncOutbound(_Outbound, throttle.AsyncTransport):
    async def send(self, request: Any) -> tuple[Any, Answer]:
        return self._answered(request, await self._transport.handle_async_request(request))

    async def discard(self, response: Any) -> Any:
        body = b""
        try:
            async with asyncio.timeout(LONGEST_READ):
                async for chunk in response.stream:
                    body += chunk
                    if len(body) > MOST_READ:
                        return self._having_read(response, None)
        except (TimeoutError, self._library.TransportError):
            return self._having_read(response, None)
        finally:
            await response.aclose()
        return self._having_read(response, body)

    async def close(self, response: Any) -> None:
        await response.aclose()

    async def along(self, response: Any, reading: Reading) -> Any:
        if response.is_closed:
            reading.feed(_content(response))
            await afinish(reading.over())
        else:
            response.stream = _along(self._library.AsyncByteStream)(response.stream, reading)
        return response


class _SyncOutbound(_Outbound, throttle.SyncTransport):
    def send(self, request: Any) -> tuple[Any, Answer]:
        return self._answered(request, self._transport.handle_request(request))

    def discard(self, response: Any) -> Any:
        body, until = b"", monotonic() + LONGEST_READ
        try:
            with _reading_briefly(response.request), _deadline(response):
                for chunk in response.stream:
                    body += chunk
                    if len(body) > MOST_READ or monotonic() > until:
                        return self._having_read(response, None)
        except self._library.TransportError:
            return self._having_read(response, None)
        finally:
            response.close()
        # The deadline may have ended the body.
        return self._having_read(response, body if monotonic() <= until else None)

    def close(self, response: Any) -> None:
        response.close()

    def along(self, response: Any, reading: Reading) -> Any:
        if response.is_closed:
            reading.feed(_content(response))
            run(reading.over())
        else:
            response.stream = _along(self._library.SyncByteStream)(response.stream, reading)
        return response


def _content(response: Any) -> bytes:
    return getattr(response, "_content", b"")


class _Along:
    """A stream, sync or async: LimitGate reads the chunks that the application reads."""

    def __init__(self, stream: Any, reading: Reading) -> None:
        self._stream = stream
        self._reading = reading

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._reading.feed(chunk)
            yield chunk
        await afinish(self._reading.over())

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await afinish(self._reading.over())

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._reading.feed(chunk)
            yield chunk
        run(self._reading.over())

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            run(self._reading.over())


@cache
def _along(stream: type) -> Any:
    return type(_Along.__name__, (_Along, stream), {})


@contextmanager
def _reading_briefly(request: Any) -> Iterator[None]:
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {**timeouts, "read": min(timeouts.get("read") or LONGEST_READ, LONGEST_READ)}
    try:
        yield
    finally:
        request.extensions["timeout"] = timeouts


def _deadline(response: Any) -> AbstractContextManager[None]:
    """Stop reading an HTTP/1 response in time. HTTP/2 connections are shared."""
    stream = response.extensions.get("network_stream")
    line = stream.get_extra_info("socket") if stream and response.http_version.startswith("HTTP/1") else None
    return shut_after(LONGEST_READ, line.fileno()) if line else nullcontext()
