"""Applications of three frameworks that keep a list of which of their handlers ran, and calls that any bytes can be sent in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import fastapi
import flask
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from limitgate import LimitGate, LimitGateWSGI, limit
from tests.attacks.world import ATTACKER, LIMIT
from tests.support.doors import Wire, http_scope, websocket_scope, wsgi_environ

Call = Callable[..., None]


class Framework:
    """The same routes in each framework: login, items, files, one between placeholders, a marked one, and all below /v1."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self.ran: list[str] = []

    def close(self) -> None:
        """Let go of what is open."""

    def gate(self, rules: Sequence[Any], **options: Any) -> Call:
        """A call through a gate of its own: ``call(path, method, headers)``."""
        raise NotImplementedError

    def reached(self, call: Call, path: str, method: str = "GET", **more: Any) -> list[str]:
        """The handlers that ran for one request."""
        self.ran.clear()
        call(path, method, **more)
        return list(self.ran)


class StarletteApp(Framework):
    name = "Starlette"

    def __init__(self) -> None:
        super().__init__()
        self.app: Any = self._made()
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def gate(self, rules: Sequence[Any], **options: Any) -> Call:
        gated = LimitGate(self.app, rules=list(rules), store="memory://", **options)

        def call(path: str, method: str = "GET", **more: Any) -> None:
            headers = more.pop("headers", ())
            peer = more.pop("peer", ATTACKER)
            if method == "WEBSOCKET":
                wire = Wire({"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000})
                scope = websocket_scope(path, headers, peer, **more)
            else:
                wire = Wire({"type": "http.request", "body": b""})
                scope = http_scope(path, method, headers, peer, **more)
            self._runner.run(wire.call(gated, scope))

        return call

    def _handler(self, name: str) -> Any:
        async def handler(request: Any) -> PlainTextResponse:
            self.ran.append(name)
            return PlainTextResponse(name)

        return handler

    def _routes(self) -> list[Any]:
        return [
            Route("/login", self._handler("login"), methods=["GET", "POST"]),
            Route("/items/{id}", self._handler("item")),
            Route("/files/{rest:path}", self._handler("file")),
            Route("/by/{who}/login", self._handler("by")),
            Route("/marked", limit(LIMIT, name="marked")(self._handler("marked"))),
        ]

    def _made(self) -> Any:
        ran = self.ran

        class Seat(HTTPEndpoint):
            async def get(self, request: Any) -> PlainTextResponse:
                ran.append("seat")
                return PlainTextResponse("seat")

        async def chat(websocket: WebSocket) -> None:
            ran.append("chat")
            await websocket.accept()
            await websocket.close()

        own = [*self._routes(), Route("/seat", Seat), WebSocketRoute("/chat", chat)]
        return Starlette(routes=[*own, Mount("/v1", routes=self._routes()), Mount("/of/{who}", routes=self._routes())])


class FastAPIApp(StarletteApp):
    name = "FastAPI"

    def _made(self) -> Any:
        app = fastapi.FastAPI()
        router = fastapi.APIRouter()
        for place in (app, router):
            for path, name in (("/login", "login"), ("/items/{id}", "item"), ("/files/{rest:path}", "file")):
                place.get(path)(self._plain(name))
            place.get("/by/{who}/login")(self._plain("by"))
            place.get("/marked")(limit(LIMIT, name="marked")(self._plain("marked")))
        app.include_router(router, prefix="/v1")
        return app

    def _plain(self, name: str) -> Any:
        def handler() -> str:
            self.ran.append(name)
            return name

        return handler


class FlaskApp(Framework):
    name = "Flask"

    def __init__(self) -> None:
        super().__init__()
        self.app = self._made()

    def gate(self, rules: Sequence[Any], **options: Any) -> Call:
        gated = LimitGateWSGI(self.app, rules=list(rules), store="memory://", **options)

        def call(path: str, method: str = "GET", **more: Any) -> None:
            headers = more.pop("headers", ())
            peer = more.pop("peer", ATTACKER)
            chunks = gated(wsgi_environ(path, method, headers, peer, **more), lambda *_: lambda _: None)
            list(chunks)
            getattr(chunks, "close", bool)()

        return call

    def _made(self) -> Any:
        made = self._flask()
        return DispatcherMiddleware(made, {"/v1": self._flask()})

    def _flask(self) -> flask.Flask:
        app = flask.Flask("attacked")
        for path, name in (("/login", "login"), ("/items/<id>", "item"), ("/files/<path:rest>", "file")):
            app.add_url_rule(path, name, self._plain(name), methods=["GET", "POST"])
        app.add_url_rule("/by/<who>/login", "by", self._plain("by"))
        app.add_url_rule("/marked", "marked", limit(LIMIT, name="marked")(self._plain("marked")))
        return app

    def _plain(self, name: str) -> Any:
        def handler(**_: str) -> str:
            self.ran.append(name)
            return name

        return handler


@contextlib.contextmanager
def frameworks() -> Iterator[list[Framework]]:
    """One application of each framework."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(contextlib.closing(made())) for made in (StarletteApp, FastAPIApp, FlaskApp)]
