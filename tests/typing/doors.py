"""The middlewares, as frameworks and servers take them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from wsgiref.simple_server import make_server
from wsgiref.types import WSGIApplication

from fastapi import FastAPI
from flask import Flask
from litestar import Litestar
from litestar.middleware import DefineMiddleware
from quart import Quart
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from limitgate import (
    AsyncRedisStore,
    Caller,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Request,
    Rule,
    RuleSet,
    open_store,
    open_sync_store,
)
from limitgate.django import LimitGateMiddleware
from limitgate.flask import LimitGate as FlaskLimitGate

Message = MutableMapping[str, Any]
RULES = [Rule("api", "5/second")]


def identify(request: Request) -> Caller | None:
    """Who asks."""
    return Caller(request.headers["x-name"]) if "x-name" in request.headers else None


async def identify_later(request: Request) -> Caller | None:
    """Who asks, where that takes a while."""
    return identify(request)


def name_only(request: Request) -> str:
    """No caller."""
    return request.path


async def denied(scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Message]], send: Any) -> None:
    """An ASGI application that refuses."""
    await send({"type": "http.response.start", "status": 429, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def denied_wsgi(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """A WSGI application that refuses."""
    start_response("429 Too Many Requests", [])
    return [b""]


# --- Starlette and FastAPI --------------------------------------------------------------------------------------------

app = Starlette(middleware=[Middleware(LimitGate, rules="config/", store="redis://localhost:6379/0")])
app.add_middleware(LimitGate, rules=RULES, store=MemoryStore(), headers=["draft-11"], trusted_proxies=("10.0.0.0/8",))
app.add_middleware(LimitGate, rules=RuleSet(RULES), store=AsyncRedisStore("redis://localhost:6379/0"), identify=identify)
app.add_middleware(LimitGate, rules=RULES, store=open_store("memory://"), identify=identify_later, on_denied=denied)
app.add_middleware(LimitGate)
FastAPI().add_middleware(LimitGate, rules=RULES, on_error="closed", timeout=0.5, processes=4, shadow=True, strict=True)
served: ASGIApp = LimitGate(app, rules=RULES, key_prefix="shop", secret="0123456789abcdef", new_buckets=0, ipv6_prefix=56)
LimitGate(served, rules=RULES, enabled=False, forwarded_header="forwarded", api_key_header="authorization")
LimitGate(served, rules=RULES, headers=["x-ratelimit"], header_names={"X-RateLimit-Limit": "X-Quota"})

app.add_middleware(LimitGate, rulez=RULES)  # type: ignore[call-arg]
app.add_middleware(LimitGate, rules=RULES, on_error="sometimes")  # type: ignore[arg-type]
app.add_middleware(LimitGate, rules=RULES, timeout="0.1")  # type: ignore[arg-type]
app.add_middleware(LimitGate, rules=["5/second"])  # type: ignore[list-item]
app.add_middleware(LimitGate, rules=RULES, identify=name_only)  # type: ignore[arg-type]
app.add_middleware(LimitGate, rules=RULES, store=RedisStore("redis://localhost:6379/0"))  # type: ignore[arg-type]
app.add_middleware(LimitGate, rules=RULES, on_denied=denied_wsgi)  # type: ignore[arg-type]
app.add_middleware(LimitGateWSGI, rules=RULES)  # type: ignore[arg-type]
Middleware(LimitGate, rulez=RULES)  # type: ignore[call-arg]

quart = Quart(__name__)
quart.asgi_app = LimitGate(quart.asgi_app, rules=RULES, on_denied=denied)  # type: ignore[method-assign] # as in Quart's own
litestar = Litestar()
litestar.asgi_handler = LimitGate(litestar.asgi_handler, rules=RULES)
Litestar(middleware=[DefineMiddleware(LimitGate, rules=RULES)])

# --- WSGI -------------------------------------------------------------------------------------------------------------

flask = Flask(__name__)
flask.wsgi_app = LimitGateWSGI(flask.wsgi_app, rules=RULES)  # type: ignore[method-assign] # as in Flask's own documentation
gate = LimitGateWSGI(flask, rules=RULES, store=open_sync_store("memory://"), identify=identify, on_denied=denied_wsgi)
application: WSGIApplication = gate
make_server("127.0.0.1", 8000, gate)
LimitGateWSGI(application, rules="config/", store=RedisStore("redis://localhost:6379/0"))
LimitGateWSGI(application, rules=RULES, store=MemoryStore())

LimitGateWSGI(application, rulez=RULES)  # type: ignore[call-arg]
LimitGateWSGI(application, rules=RULES, store=AsyncRedisStore("redis://localhost:6379/0"))  # type: ignore[arg-type]
LimitGateWSGI(application, rules=RULES, on_denied=denied)  # type: ignore[arg-type]
LimitGateWSGI(application, rules=RULES, identify=identify_later)  # type: ignore[arg-type]
LimitGateWSGI(app, rules=RULES)  # type: ignore[arg-type]

# --- Flask's extension ------------------------------------------------------------------------------------------------

FlaskLimitGate(flask, rules=RULES, store=MemoryStore(), identify=identify)
extension = FlaskLimitGate(rules="config/", trusted_proxies=["10.0.0.0/8"])
extension.init_app(flask)

FlaskLimitGate(flask, rulez=RULES)  # type: ignore[call-arg]
FlaskLimitGate(app)  # type: ignore[arg-type]
extension.init_app(gate)  # type: ignore[arg-type]

# --- Django -----------------------------------------------------------------------------------------------------------

LimitGateMiddleware(lambda request: request)
LimitGateMiddleware()  # type: ignore[call-arg]
LimitGateMiddleware("shop.views.index")  # type: ignore[arg-type]
