"""The applications that uvicorn serves: work that keeps the loop busy or waits for the backend, with and without a limit."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.overload.backend import connect
from benchmarks.overload.standin import Limited

CPU_S = 0.002
"""Seconds of CPU for which a handler keeps the loop."""
RESERVE = Fraction(1, 10)
"""Of the limit for higher priorities, where priorities are measured."""
NONE, ADAPTIVE, PRIORITIES = "none", "adaptive", "priorities"
"""Limits; any other is a number of requests at once."""


def served() -> Starlette:
    """The application that a server process is told to serve, through the environment."""
    work, limit, backend = (os.environ[f"BENCHMARK_{name}"] for name in ("WORK", "LIMIT", "BACKEND"))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.backend = await connect(backend)
        yield

    app = Starlette(routes=[Route("/{priority}", _WORK[work])], lifespan=lifespan)
    _limit(app, limit)
    return app


def _limit(app: Starlette, limit: str) -> None:
    if limit != NONE:
        app.add_middleware(Limited, limit=limit, reserve=RESERVE if limit == PRIORITIES else None)


async def _loop(request: Request) -> PlainTextResponse:
    until = time.thread_time() + CPU_S
    while time.thread_time() < until:
        pass
    return _answer(request)


async def _pool(request: Request) -> PlainTextResponse:
    await request.app.state.backend.use()
    return _answer(request)


def _answer(request: Request) -> PlainTextResponse:
    """Tell the limit in force, 0 without one."""
    return PlainTextResponse(f"{request.scope.get('limit', 0)}")


_WORK: dict[str, Callable[[Request], Awaitable[Any]]] = {"loop": _loop, "pool": _pool}
