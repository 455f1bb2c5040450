"""Polite clients of aiohttp: a middleware that waits its turn, obeys the service's rate fields, and comes back after a 429."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import AddressValueError, IPv6Address
from types import TracebackType
from typing import Self, Unpack

from limitgate.messages.extras import extra

with extra("aiohttp", "aiohttp", "http_sf"):
    import http_sf  # noqa: F401 - told here, by the name of this extra
    from aiohttp import (
        ClientConnectionError,
        ClientError,
        ClientHandlerType,
        ClientRequest,
        ClientResponse,
        ClientResponseError,
    )
    from aiohttp.payload import BytesPayload

from limitgate.errors import ConfigError
from limitgate.limiter.limiter import AsyncLimiter
from limitgate.limiter.stored_limits import Configured
from limitgate.limits.limit import Limit
from limitgate.outbound.options import ClientOptions
from limitgate.outbound.response_fields import Answer, answer_of
from limitgate.outbound.throttle import LONGEST_READ, MOST_READ, ClientThrottle, ThrottledClient, arun, is_idempotent
from limitgate.process import waiting

__all__ = ["RateLimitMiddleware", "host", "repeatable"]


def host(request: ClientRequest) -> str:
    """Default key: the host of a request, with its port if it is not that of the scheme."""
    url = request.url
    name = (url.host_subcomponent or "").lower().removesuffix(".")  # a name that ends in a dot is the same one
    if name.startswith("["):
        name = f"[{_as_written(name[1:-1])}]"
    return name if url.explicit_port is None or url.is_default_port() else f"{name}:{url.explicit_port}"


def _as_written(address: str) -> str:
    """An IPv6 address, as other libraries leave it: one that stands for an IPv4 address shows that one."""
    with suppress(AddressValueError):
        if mapped := IPv6Address(address).ipv4_mapped:
            return f"::ffff:{mapped}"
    return address


def repeatable(request: ClientRequest) -> bool:
    """True if a request may be sent twice: by its method, or since it has an ``Idempotency-Key``."""
    return is_idempotent(request.method, request.headers)


class RateLimitMiddleware(ThrottledClient):
    """Requests wait their turn: ``aiohttp.ClientSession(middlewares=[RateLimitMiddleware("10/second")])``.

    ``limits`` are counted for each ``key``, which a callable gives of a request, by default its host. They are counted by
    the ``limiter``, an `AsyncLimiter` or the URL of a store, which is opened here and closed with the middleware;
    ``memory://`` if not given. All who share the store share the budget. A request whose key is None passes untouched.
    Without limits only the service's ``Retry-After``, ``RateLimit`` and ``X-RateLimit`` fields are obeyed, for all requests
    of the key. Each redirect that is followed is a request.

    A request that is refused with 429 is sent again if ``repeatable`` is true of it, by default for methods that may be
    repeated, and its body is in memory. Raises `RateLimited` if not, if it would have to wait for too long, and for what an
    overloaded host is spared. ``options`` are `ClientOptions`: ``timeout``, ``on_error``, ``longest_pause``, ``strict``,
    ``adaptive``, ``throttle`` and ``observers``. Raises `ConfigError` for limits that book no turns, and with ``strict`` for
    those that cannot hold so, `TypeError` for an unknown option.

    A session does not close its middlewares: call `aclose`, or use ``async with``, if a store was opened here. The
    ``ClientTimeout(total=…)`` of a request includes its waiting.
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
        """Send a request in its turn. Raises `RateLimited`, `StoreError`, and whatever aiohttp raises.

        Raises `ConfigError` for anything but a request of a ``ClientSession``.
        """
        if not isinstance(request, ClientRequest):
            raise ConfigError(
                f"RateLimitMiddleware is for aiohttp.ClientSession(middlewares=[...]), was given {request!r:.80}; "
                "for requests that come in, expected LimitGate in an ASGI application"
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
        """Close the store if it was opened here."""
        if self._throttle.owned:
            await self._throttle.owned.aclose()

    close = aclose  # as aiohttp names it


class _Outbound:
    """The `Transport` of a request that is sent by one handler."""

    def __init__(self, handler: ClientHandlerType) -> None:
        self._handler = handler

    async def sleep(self, seconds: float) -> None:
        await waiting.asleep(seconds)

    async def send(self, request: ClientRequest) -> tuple[ClientResponse, Answer]:
        response = await self._handler(request)

        def field(name: str) -> str | None:
            lines = response.headers.getall(name, None)
            return None if lines is None else ", ".join(lines)

        return response, answer_of(response.status, field, time.time())

    async def discard(self, response: ClientResponse) -> ClientResponse:
        body = await _read(response)
        if body is None:
            response.close()
        # There is no public way to say that a response has been read.
        response._body, response._released = body or b"", False  # noqa: SLF001
        return response

    async def close(self, response: ClientResponse) -> None:
        response.close()

    def repeatable(self, request: ClientRequest) -> bool:
        """True if the body of a request is in memory, and does not wait for a ``100 Continue``, which comes once."""
        return (not request.body or isinstance(request.body, BytesPayload)) and "Expect" not in request.headers

    def is_unanswered(self, error: BaseException) -> bool:
        return isinstance(error, ClientConnectionError | ClientResponseError | ConnectionError | TimeoutError)


async def _read(response: ClientResponse) -> bytes | None:
    """Read a body as decoded; None if it is longer than `MOST_READ`, as sent or as decoded, late or broken."""
    if "," in response.headers.get("Content-Encoding", ""):  # which aiohttp does not decode
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
        if not deadline.expired():  # it is that of the whole request, by which aiohttp interrupts only once
            raise
        return None
    return body
