"""What tests/e2e serves: ``uvicorn tests.e2e.app:app``, and a Flask twin. The store and the rest come from ``LIMITGATE_*``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import flask
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from limitgate import LimitGate, LimitGateWSGI, Rule, limit

WHO = ["header:x-who"]
RULES = [
    Rule("daily", "50/day", path="/daily", key=WHO),
    Rule("seconds", "1 per 2 seconds", path="/seconds", key=WHO),
    Rule("chat", "1/day", path="/chat", key=WHO),
    Rule("client", "1/day", path="/client", key=["ip"]),
    Rule("pid", path="/pid", exempt=True),
]


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def pid(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(os.getpid()))


@limit("2/day", name="stream", key=WHO)
async def stream(request: Request) -> StreamingResponse:
    async def words() -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word

    return StreamingResponse(words())


async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.close()


app = Starlette(
    routes=[
        *[Route(path, hello) for path in ("/daily", "/seconds", "/client")],
        Route("/daily", echo, methods=["POST"]),
        Route("/pid", pid),
        Route("/stream", stream),
        WebSocketRoute("/chat", chat),
    ]
)
app.add_middleware(LimitGate, rules=RULES)


def flask_twin(**options: Any) -> flask.Flask:
    """The same rules behind the other door."""
    twin = flask.Flask(__name__)
    twin.add_url_rule("/daily", "daily", lambda: "hello")
    twin.wsgi_app = LimitGateWSGI(twin.wsgi_app, rules=RULES, **options)
    return twin
