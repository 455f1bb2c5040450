"""What README shows, as applications: its own rule, and its whole example with the requests that such an application gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.contenders import BARE, LIMITGATE, PATH, PATIENCE, PEERS, README, rule
from benchmarks.drive import address, scope
from limitgate import LimitGate, limit

RULE = rule(README)
"""The rule of README's first example."""
CONFIG = Path(__file__).parent.parent / "config"
PROXY = "192.0.2.1"
LAP = 32
"""Requests after which `visit` begins again with the first kind."""
_VIP = (b"x-api-key", b"demo-vip-key")
_LOGINS = 3
"""In a lap. Each is made by an address of its own, as nobody logs in every second."""


def served() -> Any:
    """The application that a server process is told to serve, by name and store, through the environment."""
    name, url = os.environ["BENCHMARK_APP"], os.environ["BENCHMARK_STORE"]
    if name in BARE:
        return BARE[name]()
    return next(contender for contender in (LIMITGATE, *PEERS) if contender.name == name).build(url, README)


def options(store: Any) -> dict[str, Any]:
    """Options of a middleware that is measured: a request that could not be decided shows up as a 503."""
    return {"store": "memory://" if store == "" else store, "on_error": "closed", "timeout": PATIENCE}


def bare_example() -> Starlette:
    """README's example without limits."""
    return _routes(_login)


def example(store: Any, **others: Any) -> Starlette:
    """README's example: the tiers of config/, a trusted proxy, a login that is decorated besides its rule."""
    app = _routes(limit("20/hour", key=["ip"])(_login))
    app.add_middleware(LimitGate, rules=str(CONFIG), trusted_proxies=[PROXY], **{**options(store), **others})
    return app


def visit(number: int, clients: int) -> dict[str, Any]:
    """Scope of a request to the example, behind the proxy: of 32 one is a VIP's, three are logins, one is a health check."""
    lap, place = divmod(number, LAP)
    if place < _LOGINS:
        client = f"172.{16 + (lap >> 14)}.{lap >> 6 & 255}.{(lap & 63) * _LOGINS + place}"
        return scope("/login", PROXY, "POST", [(b"x-forwarded-for", client.encode())])
    forwarded = (b"x-forwarded-for", address(number % clients).encode())
    if place == _LOGINS:
        return scope("/healthz", PROXY, "GET", [forwarded])
    return scope(PATH, PROXY, "GET", [forwarded, _VIP] if place == _LOGINS + 1 else [forwarded])


async def _answer(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def _login(_: Request) -> PlainTextResponse:
    return PlainTextResponse("welcome")


def _routes(login: Any) -> Starlette:
    return Starlette(
        routes=[Route(PATH, _answer), Route("/login", login, methods=["POST"]), Route("/healthz", _answer)],
    )
