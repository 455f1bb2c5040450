"""Another service, for clients: ``uvicorn tests.support.outbound_app:app``. Tells which connection a request came by."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

asked: Counter[str] = Counter()


async def fine(request: Request) -> JSONResponse:
    """Say by which connection the request came, after a moment."""
    await asyncio.sleep(0.05)
    return JSONResponse({"port": request.client.port, "version": request.scope["http_version"]})


async def once(request: Request) -> Response:
    """Refuse each name once, having read what came with it: hypercorn falls over whoever answers before."""
    await request.body()
    name = request.path_params["name"]
    asked[name] += 1
    if asked[name] > 1:
        return await fine(request)
    return JSONResponse({"why": "slow down"}, 429, {"Retry-After": "0.1"})


async def huge(_: Request) -> StreamingResponse:
    """Refuse at length."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 10_000

    return StreamingResponse(chunks(), 429, {"Retry-After": "0.1"})


async def echo(request: Request) -> Response:
    """Send the body back."""
    return Response(await request.body())


app = Starlette(
    routes=[
        Route("/", fine),
        Route("/once/{name}", once, methods=["GET", "POST"]),
        Route("/huge", huge),
        Route("/echo", echo, methods=["PUT"]),
    ]
)
