"""The example on ASGI: ``uvicorn example_app.main:app``. Its twin on WSGI is wsgi.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from example_app import content, demo
from limitgate import AsyncLimiter, ConfigError, LimitGate, RateLimited, StoreError, ausage, limit
from limitgate.page import Page, this_machine

_LONGEST_CROWD = 10
"""Seconds."""


async def start(request: Request) -> HTMLResponse:
    """Show a rate limiter at work."""
    text, headers = content.start_page(str(request.base_url))
    return HTMLResponse(text, headers=headers)


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
async def login(request: Request) -> JSONResponse:
    """Log in."""
    answer, status = demo.login(await request.body())
    return JSONResponse(answer, status)


async def healthz(_: Request) -> PlainTextResponse:
    """Say that the service is up."""
    return PlainTextResponse("ok")


def one_at_a_time() -> Callable[[Request], Awaitable[JSONResponse]]:
    """Work that is done one at a time: further requests wait in line."""
    desk = asyncio.Semaphore(1)

    async def work(_: Request) -> JSONResponse:
        async with desk:
            await asyncio.sleep(demo.WORK)
        return JSONResponse(content.worked())

    return work


def guarded(work: Callable[[Request], Awaitable[JSONResponse]]) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Work behind the overload guard, which admits what can be done soon. It learns from their latency how many that are."""
    guard = AsyncLimiter("memory://").adaptive("guard", min=2, max=8)

    async def guarded_work(request: Request) -> JSONResponse:
        try:
            async with guard:
                return await work(request)
        except RateLimited:
            return JSONResponse(*content.busy())

    return guarded_work


async def state(request: Request) -> JSONResponse:
    """Show the caller's buckets. Charges nothing."""
    try:
        windows = await ausage(request, *demo.SHOWN, path=demo.HELLO)
    except (ConfigError, StoreError):  # other rules, or no answer: nothing to show
        windows = ()
    return JSONResponse(demo.State(windows).fields(content.rules()), headers={"Cache-Control": "no-store"})


def crowds() -> Callable[[Request], Awaitable[Response]]:
    """Crowds of requests that this service sends itself, one crowd of each kind at a time."""
    busy_until: dict[str, float] = {}  # in case a client leaves before its crowd has begun

    async def crowd(request: Request) -> Response:
        path = demo.work_path(request.url.query)
        if perf_counter() < busy_until.get(path, 0):
            return PlainTextResponse("Another crowd is under way.", 409)
        busy_until[path] = perf_counter() + _LONGEST_CROWD
        return StreamingResponse(
            answers(request, path), media_type="application/x-ndjson", headers={"Cache-Control": "no-store"}
        )

    async def answers(request: Request, path: str) -> AsyncIterator[str]:
        try:
            asking = [asyncio.create_task(_ask(request, path, number)) for number in range(demo.CROWD)]
            try:
                for answer in asyncio.as_completed(asking):
                    yield await answer
            finally:
                for each in asking:
                    each.cancel()
        finally:
            busy_until.pop(path, None)

    return crowd


async def _ask(request: Request, path: str, number: int) -> str:
    """Send this service a request, in its turn, as the client of another one."""
    await asyncio.sleep(number * demo.BETWEEN)
    root = request.scope.get("app_root_path", request.scope.get("root_path", ""))
    whole = root + path
    names = ("type", "asgi", "http_version", "scheme", "server", "client", "state")
    scope = {name: request.scope[name] for name in names if name in request.scope}
    scope |= {"method": "GET", "path": whole, "raw_path": whole.encode(), "root_path": root}
    scope |= {"query_string": b"", "headers": [(b"host", b"localhost")]}
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    began = perf_counter()
    await request.app(scope, receive, send)
    return demo.answered(number, statuses[0], perf_counter() - began)


async def document(request: Request) -> PlainTextResponse:
    """Show a page of the documentation as it is written."""
    text = demo.document(request.path_params["name"])
    return PlainTextResponse("There is no such page.", 404) if text is None else PlainTextResponse(text)


def create_app(**options: Any) -> Starlette:
    """The application; ``options`` are those of `LimitGate`, unset ones come from ``LIMITGATE_*``."""
    store = content.store(options)
    app = Starlette(
        routes=[
            Route("/", start),
            Route("/api/hello", hello),
            Route("/api/items/{id}", item),
            Route("/api/stream", stream),
            Route("/login", login, methods=["POST"]),
            Route("/work", guarded(one_at_a_time())),
            Route("/work/unguarded", one_at_a_time()),
            Route("/healthz", healthz),
            Route("/demo/state", state),
            Route("/demo/crowd", crowds()),
            Route("/docs/{name}", document),
            Mount(demo.LIVE, Page(store, guard=this_machine, actions=True)),
        ]
    )
    app.add_middleware(LimitGate, **{"rules": content.rules(), **options, "store": store})
    return app


app = create_app()
