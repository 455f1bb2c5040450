"""Throttled transports for httpx2: wait for a turn, obey the service's rate fields, and retry after a 429."""

from __future__ import annotations

from limitgate.messages.text import extra

with extra("httpx2", "httpx2", "http_sf"):
    import http_sf  # noqa: F401 - raises here if the extra is missing
    import httpx2

from limitgate.outbound.httpx_transports import AsyncTransport, SyncTransport, host, repeatable

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport", "host", "repeatable"]


class AsyncRateLimitTransport(
    AsyncTransport[httpx2.Request, httpx2.Response, httpx2.AsyncBaseTransport], httpx2.AsyncBaseTransport
):
    """Rate-limited transport: ``httpx2.AsyncClient(transport=AsyncRateLimitTransport("10/second"))``. For asyncio.

    ``limits``, ``limiter``, ``key``, ``repeatable``, ``transport`` and ``options`` are as in
    `limitgate.httpx.AsyncRateLimitTransport`.
    """

    _library = httpx2


class RateLimitTransport(SyncTransport[httpx2.Request, httpx2.Response, httpx2.BaseTransport], httpx2.BaseTransport):
    """Rate-limited transport: ``httpx2.Client(transport=RateLimitTransport("10/second"))``. Thread-safe.

    ``limits``, ``limiter``, ``key``, ``repeatable``, ``transport`` and ``options`` are as in
    `limitgate.httpx.RateLimitTransport`.
    """

    _library = httpx2
