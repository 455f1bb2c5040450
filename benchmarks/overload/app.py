"""The applications that uvicorn serves: work that keeps the loop busy, awaits, or waits for the backend, with any limit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.overload.backend import connect
from limitgate import Caller, LimitGate, Rule
from limitgate.http.request import Request as Identified
from limitgate.limits.bucket import RESERVES

CPU_S = 0.002
"""Seconds of CPU for which a handler keeps the loop."""
AWAIT_S = 0.005
"""Seconds that a handler waits for others in the midst of that, if it does."""
KEPT = "10%"
"""Of the limit for higher priorities, where priorities are measured."""
CALLERS = {f"/{priority}": Caller(priority, priority=priority) for priority in RESERVES}
"""By path."""
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
    if limit == NONE:
        return
    if limit == PRIORITIES:
        rule = Rule("all", adaptive=True, reserve=KEPT)
    elif limit == ADAPTIVE:
        rule = Rule("all", adaptive=True)
    else:
        rule = Rule("all", concurrency=int(limit), key=["global"])
    app.add_middleware(LimitGate, rules=[rule], store="memory://", identify=_caller if limit == PRIORITIES else None)


def _caller(request: Identified) -> Caller:
    """Callers are named by their priorities."""
    return CALLERS[request.path]


async def _loop(request: Request) -> PlainTextResponse:
    _work(CPU_S)
    return _answer(request)


async def _awaiting(request: Request) -> PlainTextResponse:
    _work(CPU_S / 2)
    await asyncio.sleep(AWAIT_S)
    _work(CPU_S / 2)
    return _answer(request)


def _work(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


async def _pool(request: Request) -> PlainTextResponse:
    await request.app.state.backend.use()
    return _answer(request)


def _answer(request: Request) -> PlainTextResponse:
    """Tell the limit in force, 0 without one."""
    decision = request.scope.get("limitgate")
    return PlainTextResponse(f"{decision.limit if decision else 0}")


_WORK: dict[str, Callable[[Request], Awaitable[Any]]] = {"loop": _loop, "awaiting": _awaiting, "pool": _pool}
