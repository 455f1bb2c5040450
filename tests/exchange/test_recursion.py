"""``app.wsgi_app = LimitGateWSGI(app)`` and its like: the application that a gate is around calls that gate again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from flask import Flask
from litestar import Litestar, get
from quart import Quart
from werkzeug.middleware.proxy_fix import ProxyFix

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule
from tests.support.clock import Clock
from tests.support.doors import asgi_reply, handshake, wsgi_reply


class Noting:
    """WSGI middleware that counts requests."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.requests = 0

    def __call__(self, *arguments: Any) -> Any:
        self.requests += 1
        return self.app(*arguments)


def options(**more: Any) -> dict[str, Any]:
    return {"rules": [Rule("all", "2/minute")], "store": MemoryStore(Clock()), **more}


def flask_app() -> Flask:
    app = Flask("app")
    app.add_url_rule("/", view_func=lambda: "hello")
    return app


def of_flask(app: Any) -> list[int]:
    return [wsgi_reply(app).status for _ in range(4)]


@pytest.mark.parametrize("around", [False, True])
def test_flask(*, around: bool) -> None:
    """It limits like any other; middleware that stood there before runs once, and that which is put around it, too."""
    app = flask_app()
    app.wsgi_app = before = Noting(app.wsgi_app)  # type: ignore[method-assign,assignment]
    app.wsgi_app = LimitGateWSGI(app, **options())  # type: ignore[method-assign,assignment]
    if around:
        app.wsgi_app = ProxyFix(app.wsgi_app)  # type: ignore[method-assign]
    assert of_flask(app) == [200, 200, 429, 429]
    assert before.requests == 2


def test_flask_where_the_gate_is_served_itself() -> None:
    """The application as it is, with middleware that it is given later, does not recurse."""
    app = flask_app()
    gate = LimitGateWSGI(app, **options())
    app.wsgi_app = later = Noting(app.wsgi_app)  # type: ignore[method-assign,assignment]
    assert of_flask(gate) == [200, 200, 429, 429]
    assert later.requests == 2


def test_flask_switched_off() -> None:
    """Nothing is limited, and nothing recurses."""
    app = flask_app()
    app.wsgi_app = LimitGateWSGI(app, enabled=False)  # type: ignore[method-assign]
    assert of_flask(app) == [200] * 4


@pytest.mark.parametrize("inner_enabled", [True, False])
def test_flask_in_a_gate_that_is_switched_off(*, inner_enabled: bool) -> None:
    """A disabled gate around leaves the gate inside as it is."""
    app = flask_app()
    inner = options() if inner_enabled else {"enabled": False}
    app.wsgi_app = LimitGateWSGI(app, **inner)  # type: ignore[method-assign]
    outer = LimitGateWSGI(app, enabled=False)
    assert of_flask(outer) == ([200, 200, 429, 429] if inner_enabled else [200] * 4)


def test_flask_switched_off_in_a_gate() -> None:
    """A disabled gate inside neither recurses nor lifts the limits of the gate around."""
    app = flask_app()
    app.wsgi_app = LimitGateWSGI(app, enabled=False)  # type: ignore[method-assign]
    assert of_flask(LimitGateWSGI(app, **options())) == [200, 200, 429, 429]


@pytest.mark.parametrize(("outer_enabled", "inner_enabled"), [(False, True), (True, False), (False, False)])
def test_quart_in_another_gate(*, outer_enabled: bool, inner_enabled: bool) -> None:
    off = {"enabled": False}
    app = quart_app(**(options() if inner_enabled else off))
    outer = LimitGate(app, **(options() if outer_enabled else off))
    limited = [200, 200, 429, 429]
    assert asyncio.run(of_asgi(outer)) == (limited if outer_enabled or inner_enabled else [200] * 4)


@pytest.mark.parametrize("outer", [options(), {"enabled": False}], ids=["enabled", "disabled"])
def test_a_gate_around_starts_the_gate_inside(outer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lifespan events reach both."""
    started: list[object] = []

    async def note(gate: object) -> None:
        started.append(gate)

    monkeypatch.setattr("limitgate.middleware.astartup", note)
    app = quart_app()
    inner, around = app.asgi_app, LimitGate(app, **outer)

    async def main() -> None:
        events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

        async def receive() -> Any:
            return events.pop(0)

        async def send(_: object) -> None:
            pass

        await around({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)

    asyncio.run(main())
    assert started == [each.gate for each in (around, inner) if each.gate is not None]  # type: ignore[attr-defined]


def test_a_request_from_inside_counts() -> None:
    """What the application sends itself is a request of its own."""
    app = flask_app()
    inside: list[int] = []

    @app.get("/both")
    def both() -> str:
        from flask import request

        environ = {**request.environ, "PATH_INFO": "/"}
        app(environ, lambda status, *_: inside.append(int(status[:3])))
        return "hello"

    app.wsgi_app = LimitGateWSGI(app, **options())  # type: ignore[method-assign]
    assert [wsgi_reply(app, "/both").status for _ in range(2)] == [200, 429]
    assert inside == [200]


def litestar_app() -> Litestar:
    @get("/")
    async def hello() -> str:
        return "hello"

    app = Litestar([hello], logging_config=None)
    app.asgi_handler = LimitGate(app, **options())  # type: ignore[assignment]
    return app


def quart_app(**more: Any) -> Quart:
    app = Quart("app")

    @app.get("/")
    async def hello() -> str:
        return "hello"

    @app.websocket("/chat")
    async def chat() -> None:
        from quart import websocket

        await websocket.accept()

    app.asgi_app = LimitGate(app, **(more or options()))  # type: ignore[method-assign]
    return app


async def of_asgi(app: Any) -> list[int]:
    return [(await asgi_reply(app)).status for _ in range(4)]


@pytest.mark.parametrize("make", [litestar_app, quart_app])
def test_asgi(make: Any) -> None:
    """As Flask."""
    assert asyncio.run(of_asgi(make())) == [200, 200, 429, 429]


def test_asgi_switched_off() -> None:
    """As Flask."""
    assert asyncio.run(of_asgi(quart_app(enabled=False))) == [200] * 4


def test_websockets() -> None:
    """Each handshake is charged once."""
    app = quart_app()

    async def ask() -> list[int]:
        return [(await handshake(app, "/chat")).status for _ in range(3)]

    assert asyncio.run(ask()) == [101, 101, 429]


def test_lifespan() -> None:
    """The application starts and ends once."""
    app, told = quart_app(), list[str]()
    app.before_serving(lambda: told.append("begins"))
    app.after_serving(lambda: told.append("ends"))
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        told.append(message["type"])

    asyncio.run(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send))
    assert told == ["begins", "lifespan.startup.complete", "ends", "lifespan.shutdown.complete"]
