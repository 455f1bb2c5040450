"""The application that `make soak` serves: routes, streams, WebSockets, outcomes and slots, and a look at its own process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from limitgate import LimitGate

PAGE = os.sysconf("SC_PAGE_SIZE")


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


app = LimitGate(
    Starlette(
        routes=[
            Route("/hello", hello),
            Route("/slow", slow),
            Route("/login", login, methods=["POST"]),
            Route("/process", process),
            WebSocketRoute("/chat", chat),
        ]
    ),
    rules=os.environ["SOAK_RULES"],
    store=os.environ["SOAK_STORE"],
    reload=1.0,
    on_error="local",
)
