"""Applications whose rules, those of ``LIMITGATE_RULES``, have a mistake: ``tests.e2e.mistaken:starlette``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from litestar import Litestar
from litestar.middleware import DefineMiddleware
from quart import Quart
from starlette.applications import Starlette

from limitgate import LimitGate


def starlette() -> Any:
    app = Starlette()
    app.add_middleware(LimitGate)
    return app


def fastapi() -> Any:
    app = FastAPI()
    app.add_middleware(LimitGate)
    return app


def litestar() -> Any:
    return Litestar(middleware=[DefineMiddleware(LimitGate)])


def quart() -> Any:
    app = Quart("app")
    app.asgi_app = LimitGate(app.asgi_app)  # type: ignore[method-assign]
    return app


def around() -> Any:
    return LimitGate(Starlette())
