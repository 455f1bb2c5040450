"""Applications whose rules, those of ``LIMITGATE_RULES``, have a mistake: ``tests.e2e.mistaken:starlette``.

Each imports its own framework only, as a server in a process of its own imports this for every one of them.
"""

from __future__ import annotations

from typing import Any

from limitgate import LimitGate


def starlette() -> Any:
    from starlette.applications import Starlette

    app = Starlette()
    app.add_middleware(LimitGate)
    return app


def fastapi() -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.add_middleware(LimitGate)
    return app


def litestar() -> Any:
    from litestar import Litestar
    from litestar.middleware import DefineMiddleware

    return Litestar(middleware=[DefineMiddleware(LimitGate)])


def quart() -> Any:
    from quart import Quart

    app = Quart("app")
    app.asgi_app = LimitGate(app.asgi_app)  # type: ignore[method-assign]
    return app


def around() -> Any:
    from starlette.applications import Starlette

    return LimitGate(Starlette())
