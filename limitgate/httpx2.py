"""Polite clients of httpx2: transports that wait their turn, obey the service's rate fields, and come back after a 429."""

from __future__ import annotations

from limitgate.messages.extras import extra

with extra("httpx2", "httpx2", "http_sf"):
    import http_sf  # noqa: F401 - told here, by the name of this extra
    import httpx2

from limitgate.outbound.httpx_transports import AsyncTransport, SyncTransport, host, repeatable

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport", "host", "repeatable"]


class AsyncRateLimitTransport(
    AsyncTransport[httpx2.Request, httpx2.Response, httpx2.AsyncBaseTransport], httpx2.AsyncBaseTransport
):
    """Requests wait their turn: ``httpx2.AsyncClient(transport=AsyncRateLimitTransport("10/second"))``. For asyncio.

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

    ``transport`` sends; a new one of httpx2 if not given.
    """

    _library = httpx2


class RateLimitTransport(SyncTransport[httpx2.Request, httpx2.Response, httpx2.BaseTransport], httpx2.BaseTransport):
    """Requests wait their turn: ``httpx2.Client(transport=RateLimitTransport("10/second"))``. Safe under threads.

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

    ``transport`` sends; a new one of httpx2 if not given.
    """

    _library = httpx2
