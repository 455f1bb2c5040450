"""The transports for httpx."""

from __future__ import annotations

from typing import Any, assert_type

import httpx

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
    RateLimitTransport("10/second", timeout="5")  # type: ignore[arg-type]
    RateLimitTransport("10/second", retries=5)  # type: ignore[call-arg]
    RateLimitTransport("10/second", adaptive=20)  # type: ignore[arg-type]
    RateLimitTransport("10/second", throttle="yes")  # type: ignore[arg-type]
    httpx.AsyncClient(transport=transport)  # type: ignore[arg-type]


def refusals(refused: RateLimited) -> None:
    """What is raised: what was decided, and the response of whatever client it was."""
    assert_type(refused.decision, Decision)
    assert_type(refused.response, Any)
    assert_type(host(httpx.Request("GET", "https://example.com")), str)
    assert_type(repeatable(httpx.Request("GET", "https://example.com")), bool)
