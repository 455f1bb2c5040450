"""The example on ASGI: ``uvicorn example_app.main:app``. Its twin on WSGI is wsgi.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from example_app import content
from limitgate import LimitGate, limit


async def start(request: Request) -> HTMLResponse:
    """Say what to try."""
    return HTMLResponse(content.start_page(str(request.base_url)))


async def hello(request: Request) -> JSONResponse:
    """Say hello, and what the caller has left."""
    return JSONResponse(content.hello(request.scope["limitgate"]))


async def item(request: Request) -> JSONResponse:
    """Show one item."""
    return JSONResponse(content.item(request.path_params["id"]))


async def stream(_: Request) -> StreamingResponse:
    """Answer in several chunks."""

    async def chunks() -> AsyncIterator[str]:
        for number in range(1, content.CHUNKS + 1):
            yield content.chunk(number)
            await asyncio.sleep(content.PAUSE)

    return StreamingResponse(chunks(), media_type="text/plain")


# Besides the rule `login` in config/default.yaml: five per minute, three at once. Both have to have room.
@limit("20/hour", name="login-hourly", key=["ip"], on_error="closed")
async def login(_: Request) -> JSONResponse:
    """Log in."""
    return JSONResponse(content.logged_in())


async def healthz(_: Request) -> PlainTextResponse:
    """Say that the service is up."""
    return PlainTextResponse("ok")


def create_app(**options: Any) -> Starlette:
    """The application; ``options`` are those of `LimitGate`, unset ones come from ``LIMITGATE_*``."""
    app = Starlette(
        routes=[
            Route("/", start),
            Route("/api/hello", hello),
            Route("/api/items/{id}", item),
            Route("/api/stream", stream),
            Route("/login", login, methods=["POST"]),
            Route("/healthz", healthz),
        ]
    )
    app.add_middleware(LimitGate, **{"rules": content.rules(), **options})
    return app


app = create_app()
