"""What tests/e2e/test_observed.py serves: an ASGI and a WSGI application with metrics, each for several workers."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import LimitGate, LimitGateWSGI, Rule
from limitgate.prometheus import MultiProcessCollector, generate_latest

RULES = [
    Rule("api", "20/day", "1000/second", path="/api"),
    Rule("around", path="/metrics", exempt=True),
    Rule("pid", path="/pid", exempt=True),
]
registry = CollectorRegistry()
MultiProcessCollector(registry)  # that of prometheus-client fails at a file that another worker is just making


def metrics() -> bytes:
    """The figures of all workers."""
    return generate_latest(registry)


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse(body(request.url.path))


def body(path: str) -> bytes:
    return metrics() if path == "/metrics" else str(os.getpid()).encode()


app = Starlette(routes=[Route(path, answer) for path in ("/api", "/pid", "/metrics")])
app.add_middleware(LimitGate, rules=RULES, observers=["prometheus"])


def wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [body(environ["PATH_INFO"])]


application = LimitGateWSGI(wsgi, rules=RULES, observers=["prometheus"])
