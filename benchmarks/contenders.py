"""The contenders: one small application, bare and behind each limiter, set up as its documentation says.

Each is limited by client address under the same windows, LimitGate by route as well. Where one cannot do that by itself,
`Contender.remark` says what was done, and `Contender.without` what it leaves out. Limiters are imported by the function that
sets them up, so that one which cannot be imported fails alone, and so that a served application is not weighed down by others.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import LimitGate, LimitGateWSGI, Rule

Quotas = Mapping[str, int]
"""Requests that a client may make per "second", "minute", "hour" or "day"."""
Build = Callable[[str, Quotas], Any]
"""Makes the application; takes the URL of a Redis on a unix socket, or "" for the limiter's memory store, and the quotas."""

README: Quotas = {"second": 5, "minute": 100, "day": 2_000}
"""Those of the rule that README begins with."""
EASY: Quotas = {"second": 1_000, "minute": 5_000, "day": 10_000}
"""Nothing here is ever refused under these, and a bucket is not full again before its client's next request."""
PATH = "/api/hello"
_KEYS = 1_000_000
"""What throttled-py's memory store may hold; it forgets clients beyond 1,024 keys unless told otherwise."""
PATIENCE = 5.0
"""Seconds LimitGate may wait for Redis where CPU is measured, so that a pause of the machine's is not taken for a failure."""


@dataclass(frozen=True)
class Contender:
    """An application behind a limiter, and the bare application to compare it with."""

    name: str
    build: Build
    bare: str = "Starlette"
    remark: str = ""
    without: str = ""
    """What LimitGate does for the same request and this one does not."""


# --- bare applications ------------------------------------------------------------------------------------------------


def starlette() -> Starlette:
    """Starlette with one route."""

    async def hello(_: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return Starlette(routes=[Route(PATH, hello)])


def fastapi(*dependencies: Any) -> Any:
    """FastAPI with one route."""
    from fastapi import FastAPI

    app = FastAPI()

    @app.get(PATH, dependencies=dependencies, response_class=PlainTextResponse)
    async def hello() -> str:
        return "hello"

    return app


def flask() -> Any:
    """Flask with one route."""
    from flask import Flask

    app = Flask(__name__)

    @app.get(PATH)
    def hello() -> str:
        return "hello"

    return app


BARE: Mapping[str, Callable[[], Any]] = {"Starlette": starlette, "FastAPI": fastapi}


# --- LimitGate --------------------------------------------------------------------------------------------------------


def rule(quotas: Quotas, key: Sequence[str] = ("path", "ip"), **others: Any) -> Rule:
    """One rule that holds all windows; for the quotas of README, its rule."""
    return Rule("api", *quota_texts(quotas), path="/api/**", key=key, **others)


def limitgate(url: str, quotas: Quotas) -> Starlette:
    """LimitGate; a request that it could not decide is answered with 503, so that it shows up as an error."""
    app = starlette()
    app.add_middleware(
        LimitGate, rules=[rule(quotas)], store=url or "memory://", on_error="closed", timeout=PATIENCE if url else 0.1
    )
    return app


def limitgate_by_address(url: str, quotas: Quotas) -> Starlette:
    """The same, by address alone."""
    app = starlette()
    by_address = rule(quotas, ("ip",))
    app.add_middleware(LimitGate, rules=[by_address], store=url or "memory://", on_error="closed", timeout=PATIENCE)
    return app


def limitgate_with_defaults(url: str, quotas: Quotas) -> Starlette:
    """The same with the deadline that it has by default."""
    app = starlette()
    app.add_middleware(LimitGate, rules=[rule(quotas)], store=url or "memory://", on_error="closed")
    return app


def limitgate_wsgi(url: str, quotas: Quotas) -> Any:
    """LimitGate around Flask."""
    app = flask()
    store = url or "memory://"
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[rule(quotas)], store=store, on_error="closed", timeout=PATIENCE)
    return app


# --- its peers --------------------------------------------------------------------------------------------------------


async def _address(scope: Any) -> tuple[str, str]:
    return scope["client"][0], "default"


def asgi_ratelimit(
    url: str,
    quotas: Quotas,
    user: Callable[[Any], Awaitable[tuple[str, str]]] = _address,
    zone: str | None = None,
    app: Any = None,
) -> Any:
    """asgi-ratelimit: its own middleware, one rule with all windows, fixed windows; for each path if no zone is named."""
    from ratelimit import RateLimitMiddleware, Rule as PeerRule
    from ratelimit.backends.redis import RedisBackend
    from ratelimit.backends.simple import MemoryBackend

    backend = RedisBackend(_client(url)) if url else MemoryBackend()
    return RateLimitMiddleware(app or starlette(), user, backend, {"^/api/": [PeerRule(**quotas, zone=zone)]})


def throttled(url: str, quotas: Quotas, using: str = "gcra", timeout: float | None = None) -> Any:
    """throttled-py: a limiter for each window, since one holds one quota."""
    from throttled.asyncio import Throttled, store as stores

    store = stores.RedisStore(server=url) if url else stores.MemoryStore(options={"MAX_SIZE": _KEYS})
    limiters = [
        (unit, Throttled(using=using, quota=f"{count}/{unit}", store=store, timeout=timeout)) for unit, count in quotas.items()
    ]

    async def admits(scope: Any) -> bool:
        client = scope["client"][0]
        for unit, limiter in limiters:
            if (await limiter.limit(f"{unit}:{client}")).limited:
                return False
        return True

    return Asking(starlette(), admits)


def limits(url: str, quotas: Quotas) -> Any:
    """limits: its asyncio side on redis-py, fixed windows, one call for each window."""
    limiter, windows = limits_limiter(url, quotas)

    async def admits(scope: Any) -> bool:
        client = scope["client"][0]
        for window in windows:
            if not await limiter.hit(window, client):
                return False
        return True

    return Asking(starlette(), admits)


def limits_limiter(url: str, quotas: Quotas, strategy: str = "fixed-window") -> tuple[Any, Sequence[Any]]:
    """What limits asks, and about which windows."""
    from limits import parse_many
    from limits.aio.storage import MemoryStorage, RedisStorage
    from limits.aio.strategies import STRATEGIES

    storage = RedisStorage(f"async+redis+{url}", implementation="redispy") if url else MemoryStorage()
    return STRATEGIES[strategy](storage), parse_many(";".join(quota_texts(quotas)))


def slowapi(url: str, quotas: Quotas) -> Any:
    """slowapi: its decorator on the route, fixed windows, no headers."""
    from slowapi import Limiter, _rate_limit_exceeded_handler
    from slowapi.errors import RateLimitExceeded
    from slowapi.util import get_remote_address

    limiter = Limiter(key_func=get_remote_address, storage_uri=f"redis+{url}" if url else "memory://")

    @limiter.limit(";".join(quota_texts(quotas)))  # type: ignore[untyped-decorator]
    async def hello(request: Request) -> PlainTextResponse:  # noqa: ARG001 - slowapi looks for this name
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route(PATH, hello)])
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)
    return app


def fastapi_limiter(url: str, quotas: Quotas) -> Any:
    """fastapi-limiter: its dependency, with one pyrate-limiter bucket for each client."""
    from fastapi import Depends
    from fastapi_limiter.depends import RateLimiter
    from pyrate_limiter import BucketFactory, Duration, InMemoryBucket, Limiter, Rate, RateItem, RedisBucket
    from pyrate_limiter.buckets.redis_bucket import LuaScript
    from pyrate_limiter.clocks import MonotonicClock

    rates = [Rate(count, Duration[unit.upper()]) for unit, count in quotas.items()]
    client = _client(url) if url else None
    now = MonotonicClock().now if client is None else _milliseconds  # the clocks of their buckets, by which those forget

    class PerClient(BucketFactory):  # type: ignore[misc]
        """PerNameFactory of pyrate-limiter's README, on either store."""

        def __init__(self) -> None:
            self.buckets: dict[str, Any] = {}
            self.script = ""

        def wrap_item(self, name: str, weight: int = 1) -> Any:
            return RateItem(name, now(), weight=weight)

        async def get(self, item: Any) -> Any:
            if item.name not in self.buckets:
                self.buckets[item.name] = await self._new(item.name)
            return self.buckets[item.name]

        async def _new(self, name: str) -> Any:
            if client is None:
                return self.create(InMemoryBucket, rates)
            self.script = self.script or await client.script_load(LuaScript.PUT_ITEM)
            return self.create(RedisBucket, rates, client, f"pyrate:{name}", self.script)

    return fastapi(Depends(RateLimiter(limiter=Limiter(PerClient()))))


def flask_limiter(url: str, quotas: Quotas, **others: Any) -> Any:
    """Flask-Limiter: default limits for all routes, fixed windows, no headers."""
    from flask_limiter import Limiter
    from flask_limiter.util import get_remote_address

    app = flask()
    storage = f"redis+{url}" if url else "memory://"
    Limiter(get_remote_address, app=app, default_limits=quota_texts(quotas), storage_uri=storage, **others)
    return app


LIMITGATE = Contender("LimitGate", limitgate, remark="One rule with three windows and rate headers: one script call.")
PEERS = (
    Contender(
        "asgi-ratelimit",
        asgi_ratelimit,
        remark="Its own middleware with one rule and fixed windows. It sends TTL and EVALSHA.",
        without="headers, smooth windows; in memory also a memory bound, all or nothing",
    ),
    Contender(
        "throttled-py",
        throttled,
        remark="GCRA. A limiter has one quota, so a minimal middleware calls three limiters in sequence. Its memory store is "
        "configured for a million keys; by default it drops clients beyond 1,024.",
        without="headers, all or nothing",
    ),
    Contender(
        "limits",
        limits,
        remark="Its asyncio API on redis-py with fixed windows, called by the same minimal middleware.",
        without="headers, smooth windows, all or nothing; in memory also a memory bound",
    ),
    Contender(
        "fastapi-limiter",
        fastapi_limiter,
        "FastAPI",
        "Sliding log. As set up in its README, all clients would share one bucket, so each client has its own, made by the "
        "factory in pyrate-limiter's README. Compared with the bare FastAPI application.",
        without="headers, a memory bound",
    ),
    Contender(
        "slowapi",
        slowapi,
        remark="Its decorator on the route. Fixed windows, no rate headers by default. It calls Redis synchronously.",
        without="headers, smooth windows, all or nothing; in memory also a memory bound",
    ),
)
WSGI = (
    Contender("LimitGate", limitgate_wsgi, "Flask", "LimitGateWSGI around the same application."),
    Contender(
        "Flask-Limiter",
        flask_limiter,
        "Flask",
        "Default limits. Fixed windows, no rate headers by default.",
        without="headers, smooth windows, all or nothing; in memory also a memory bound",
    ),
)


class Asking:
    """The thinnest middleware there can be: asks about the request, and answers 429 or passes it on."""

    def __init__(self, app: Any, admits: Callable[[Any], Awaitable[bool]]) -> None:
        self.app = app
        self.admits = admits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request."""
        if scope["type"] == "http" and not await self.admits(scope):
            await send({"type": "http.response.start", "status": 429, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


def quota_texts(quotas: Quotas) -> list[str]:
    """Quotas as limits are written."""
    return [f"{count}/{unit}" for unit, count in quotas.items()]


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _client(url: str) -> Any:
    from redis.asyncio import Redis

    return Redis.from_url(url)
