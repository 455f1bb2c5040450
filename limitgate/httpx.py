"""Throttled transports for httpx: wait for a turn, obey the service's rate fields, and retry after a 429."""

from __future__ import annotations

from limitgate.messages.text import extra

with extra("httpx", "httpx", "http_sf"):
    import http_sf  # noqa: F401 - raises here if the extra is missing
    import httpx

from limitgate.outbound.httpx_transports import AsyncTransport, SyncTransport, host, repeatable

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport", "host", "repeatable"]


class AsyncRateLimitTransport(
    AsyncTransport[httpx.Request, httpx.Response, httpx.AsyncBaseTransport], httpx.AsyncBaseTransport
):
    """Rate-limited transport: ``httpx.AsyncClient(transport=AsyncRateLimitTransport("10/second"))``. For asyncio.

    ``limits`` count by ``key``, a callable that returns the key of a request, by default the host; requests with the key None
    aren't limited. Without ``limits``, only the service's ``Retry-After``, ``RateLimit`` and ``X-RateLimit`` fields apply.
    ``limiter`` is an `AsyncLimiter` or a store URL, by default ``memory://``; the transport closes a store that it opened.

    After a 429, the transport repeats the request if ``repeatable`` returns True (by default for idempotent methods) and its
    body is in memory. Otherwise, or if the wait would be too long or the host is overloaded, it raises `RateLimited`.
    ``options`` are `ClientOptions`. ``transport`` is the wrapped transport, by default a new one of httpx.

    Raises `ConfigError` for limits that can't book turns or can't be ``strict``, and `TypeError` for an unknown option.
    """

    _library = httpx


class RateLimitTransport(SyncTransport[httpx.Request, httpx.Response, httpx.BaseTransport], httpx.BaseTransport):
    """Rate-limited transport: ``httpx.Client(transport=RateLimitTransport("10/second"))``. Thread-safe.

    ``limiter`` is a `Limiter` or a store URL. ``limits``, ``key``, ``repeatable``, ``transport``, ``options`` and errors
    are as in `AsyncRateLimitTransport`.
    """

    _library = httpx
