"""The doors for requests and urllib3."""

from __future__ import annotations

from typing import assert_type

import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter

from limitgate import AsyncLimiter, Configured, Limit, Limiter
from limitgate.requests import RateLimitAdapter, host, repeatable
from limitgate.urllib3 import RateLimitPoolManager, Request, host as host_of, repeatable as is_repeatable


def tenant(request: requests.PreparedRequest) -> str | None:
    """What a request is counted by: the types of requests itself say that fields may be bytes, those of typeshed do not."""
    tenant = request.headers.get("X-Tenant")
    return tenant if isinstance(tenant, str) else None


def tenant_of(request: Request) -> str | None:
    """The same for urllib3."""
    assert_type(request.method, str)
    assert_type(request.url, str)
    return request.headers.get("X-Tenant")


# --- requests ---------------------------------------------------------------------------------------------------------

session = requests.Session()
session.mount("https://", RateLimitAdapter("10/second"))
adapter: BaseAdapter = RateLimitAdapter("10/second", Limit("1000/day"), limiter="redis://localhost:6379/0", timeout=None)
session.mount("http://", RateLimitAdapter(Configured("api"), limiter=Limiter("memory://"), adapter=HTTPAdapter(), key=tenant))
RateLimitAdapter(adapter=adapter, on_error="closed", repeatable=lambda request: request.method != "PATCH")
assert_type(adapter.send(requests.Request("GET", "https://example.com").prepare(), stream=True), requests.Response)
assert_type(host(requests.PreparedRequest()), str)
assert_type(repeatable(requests.PreparedRequest()), bool)

RateLimitAdapter("10/second", limits="10/second")  # type: ignore[call-arg]
RateLimitAdapter(10)  # type: ignore[arg-type]
RateLimitAdapter("10/second", limiter=AsyncLimiter("memory://"))  # type: ignore[arg-type]
RateLimitAdapter("10/second", adapter=urllib3.PoolManager())  # type: ignore[arg-type]
RateLimitAdapter("10/second", key=tenant_of)  # type: ignore[arg-type]
RateLimitAdapter("10/second", timeout=[1])  # type: ignore[arg-type]
RateLimitAdapter("10/second", on_error="sometimes")  # type: ignore[arg-type]

# --- urllib3 ----------------------------------------------------------------------------------------------------------

with RateLimitPoolManager("10/second") as http:
    assert_type(http, RateLimitPoolManager)
    assert_type(http.request("GET", "https://example.com", preload_content=False), urllib3.BaseHTTPResponse)
    assert_type(http.close(), None)
manager: urllib3.PoolManager = RateLimitPoolManager("10/second", Limit("1000/day"), limiter=Limiter("memory://"), key=tenant_of)
RateLimitPoolManager(Configured("api"), manager=urllib3.ProxyManager("http://localhost:3128"), timeout=None, on_error="open")
RateLimitPoolManager(manager=manager, repeatable=lambda request: request.method != "PATCH")
assert_type(host_of(Request("GET", "https://example.com", {}, None)), str)
assert_type(is_repeatable(Request("GET", "https://example.com", {}, None)), bool)

RateLimitPoolManager("10/second", adapter=HTTPAdapter())  # type: ignore[call-arg]
RateLimitPoolManager("10/second", num_pools=5)  # type: ignore[call-arg]
RateLimitPoolManager("10/second", limiter=AsyncLimiter("memory://"))  # type: ignore[arg-type]
RateLimitPoolManager("10/second", manager=session)  # type: ignore[arg-type]
RateLimitPoolManager("10/second", key=tenant)  # type: ignore[arg-type]
RateLimitPoolManager("10/second", on_error="sometimes")  # type: ignore[arg-type]
