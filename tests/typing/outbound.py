"""The transports for httpx and httpx2, and the middleware for aiohttp."""

from __future__ import annotations

from typing import Any, assert_type

import aiohttp
import httpx
import httpx2

import limitgate.aiohttp
import limitgate.httpx2
from limitgate import Adaptive, AsyncLimiter, Configured, Decision, Limit, Limiter, RateLimited
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport, host, repeatable


def by_tenant(request: httpx.Request) -> str | None:
    """Some key function."""
    return str(request.headers["X-Tenant"]) if "X-Tenant" in request.headers else None


async def on_asyncio(limiter: AsyncLimiter, blocking: Limiter) -> None:
    """An `AsyncRateLimitTransport` is one for an `AsyncClient`, and takes an `AsyncLimiter`."""
    transport = AsyncRateLimitTransport("10/second", Limit("1000/day"), limiter=limiter, key=by_tenant, timeout=None)
    inner: httpx.AsyncBaseTransport = transport
    AsyncRateLimitTransport(Configured("shop"), limiter="redis://localhost:6379/0", transport=inner, on_error="closed")
    AsyncRateLimitTransport(repeatable=lambda request: request.method == "POST", key=host)
    AsyncRateLimitTransport(strict=True, adaptive=True, throttle=True, longest_pause=60, observers=["prometheus"])
    AsyncRateLimitTransport(adaptive=Adaptive(max=50))
    async with httpx.AsyncClient(transport=transport) as client:
        assert_type(await client.get("https://example.com"), httpx.Response)
    assert_type(await transport.handle_async_request(httpx.Request("GET", "https://example.com")), httpx.Response)
    AsyncRateLimitTransport("10/second", limiter=blocking)  # type: ignore[arg-type]
    AsyncRateLimitTransport("10/second", transport=httpx.HTTPTransport())  # type: ignore[arg-type]
    AsyncRateLimitTransport(10)  # type: ignore[arg-type]
    AsyncRateLimitTransport("10/second", "redis://localhost:6379/0", on_error="ignore")  # type: ignore[arg-type]
    httpx.Client(transport=transport)  # type: ignore[arg-type]


def under_threads(limiter: Limiter, on_asyncio: AsyncLimiter) -> None:
    """A `RateLimitTransport` is one for a `Client`, and takes a `Limiter`."""
    transport = RateLimitTransport("10/second", limiter=limiter, key=by_tenant, timeout=2.5)
    inner: httpx.BaseTransport = transport
    with httpx.Client(transport=RateLimitTransport(transport=inner, repeatable=repeatable)) as client:
        assert_type(client.get("https://example.com"), httpx.Response)
    assert_type(transport.handle_request(httpx.Request("GET", "https://example.com")), httpx.Response)
    RateLimitTransport("10/second", limiter=on_asyncio)  # type: ignore[arg-type]
    RateLimitTransport("10/second", key=lambda _: 42)  # type: ignore[arg-type,return-value]
    RateLimitTransport("10/second", timeout=[5])  # type: ignore[arg-type]
    RateLimitTransport("10/second", retries=5)  # type: ignore[call-arg]
    RateLimitTransport("10/second", adaptive=20)  # type: ignore[arg-type]
    RateLimitTransport("10/second", throttle="yes")  # type: ignore[arg-type]
    httpx.AsyncClient(transport=transport)  # type: ignore[arg-type]


async def on_httpx2(limiter: AsyncLimiter, blocking: Limiter) -> None:
    """The same names for httpx2, whose transports and requests are others."""
    transport = limitgate.httpx2.AsyncRateLimitTransport("10/second", limiter=limiter, key=limitgate.httpx2.host)
    async with httpx2.AsyncClient(transport=transport) as client:
        assert_type(await client.get("https://example.com"), httpx2.Response)
    sync = limitgate.httpx2.RateLimitTransport("10/second", limiter=blocking, transport=httpx2.HTTPTransport(), strict=True)
    with httpx2.Client(transport=sync) as direct:
        assert_type(direct.get("https://example.com"), httpx2.Response)
    assert_type(sync.handle_request(httpx2.Request("GET", "https://example.com")), httpx2.Response)
    httpx.Client(transport=sync)  # type: ignore[arg-type]
    httpx2.Client(transport=RateLimitTransport())  # type: ignore[arg-type]
    httpx2.AsyncClient(transport=sync)  # type: ignore[arg-type]
    limitgate.httpx2.RateLimitTransport(transport=httpx.HTTPTransport())  # type: ignore[arg-type]
    limitgate.httpx2.RateLimitTransport(key=by_tenant)  # type: ignore[arg-type]
    sync.handle_request(httpx.Request("GET", "https://example.com"))  # type: ignore[arg-type]


def by_path(request: aiohttp.ClientRequest) -> str | None:
    """Some key function."""
    return request.url.path


async def on_aiohttp(limiter: AsyncLimiter, blocking: Limiter) -> None:
    """A `RateLimitMiddleware` is one for a `ClientSession`, and takes an `AsyncLimiter`."""
    polite = limitgate.aiohttp.RateLimitMiddleware("10/second", limiter=limiter, key=by_path, timeout=None)
    async with polite, aiohttp.ClientSession(middlewares=[polite]) as session, session.get("https://example.com") as response:
        assert_type(response, aiohttp.ClientResponse)
    await limitgate.aiohttp.RateLimitMiddleware(Limit("1000/day"), repeatable=limitgate.aiohttp.repeatable).aclose()
    limitgate.aiohttp.RateLimitMiddleware("10/second", limiter=blocking)  # type: ignore[arg-type]
    limitgate.aiohttp.RateLimitMiddleware("10/second", key=by_tenant)  # type: ignore[arg-type]
    limitgate.aiohttp.RateLimitMiddleware("10/second", retries=5)  # type: ignore[call-arg]


def refusals(refused: RateLimited) -> None:
    """What is raised: what was decided, and the response of whatever client it was."""
    assert_type(refused.decision, Decision)
    assert_type(refused.response, Any)
    assert_type(host(httpx.Request("GET", "https://example.com")), str)
    assert_type(repeatable(httpx.Request("GET", "https://example.com")), bool)
