"""The application that `make soak` serves: routes, streams, WebSockets, slots, forks, and a look at its own process.

With ``SOAK_CONTROL`` it is the same application without LimitGate.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from limitgate import Limiter, LimitGate, StoreError

PAGE = os.sysconf("SC_PAGE_SIZE")
IS_CONTROL = "SOAK_CONTROL" in os.environ
LIMITER = None if IS_CONTROL else Limiter(os.environ["SOAK_STORE"])


async def hello(_: Any) -> PlainTextResponse:
    """Answer at once."""
    return PlainTextResponse("hello")


async def slow(_: Any) -> StreamingResponse:
    """Answer in parts, over 0.4 seconds."""

    async def parts() -> Any:
        for _ in range(20):
            yield b"x" * 1000
            await asyncio.sleep(0.02)

    return StreamingResponse(parts())


async def login(request: Any) -> PlainTextResponse:
    """Refuse with ?fail=1."""
    return PlainTextResponse("no", status_code=401 if request.query_params.get("fail") else 200)


async def chat(websocket: Any) -> None:
    """Repeat what the client says."""
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


def fork(_: Any) -> PlainTextResponse:
    """Fork from a thread. Parent and child then use the same limiter; a child that hangs is ended by a signal."""
    child = os.fork()
    status = 1
    try:
        if not child:
            signal.alarm(20)
        if LIMITER is not None:
            with contextlib.suppress(StoreError):
                LIMITER.hit("forks", "1000/minute")
        status = 0
    finally:
        if not child:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return PlainTextResponse(f"the child ended with {status}", status_code=500 if status else 200)


async def process(_: Any) -> JSONResponse:
    """What this process holds. Collects garbage first, so that only what is kept counts."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE  # noqa: ASYNC240 - no file on a disk
    return JSONResponse(
        {
            "pid": os.getpid(),
            "memory": resident,
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - counts entries
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "objects": len(gc.get_objects()),
        }
    )


served = Starlette(
    routes=[
        Route("/hello", hello),
        Route("/slow", slow),
        Route("/login", login, methods=["POST"]),
        Route("/fork", fork),
        Route("/process", process),
        WebSocketRoute("/chat", chat),
    ]
)
app: Any = served
if not IS_CONTROL:
    app = LimitGate(served, rules=os.environ["SOAK_RULES"], store=os.environ["SOAK_STORE"], reload=1.0, on_error="local")
