"""The routes of Starlette and FastAPI as a gate looks them up."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.routing import Host, Mount, Route

from limitgate.http.request import ASGIRequest
from limitgate.routes.starlette import asgi_routes
from tests.support.doors import http_scope


def nothing() -> None:
    """Answer with nothing."""


def fastapi() -> FastAPI:
    app, within = FastAPI(), APIRouter(prefix="/items")
    within.get("/{id}")(nothing)
    app.include_router(within)
    app.mount("/sub", Starlette(routes=[Route("/", nothing)]))
    return app


def own_kind() -> Starlette:
    class Own(Route):
        def matches(self, scope: Any) -> Any:
            return super().matches(scope)

    return Starlette(routes=[Own("/", nothing)])


@pytest.mark.parametrize(
    ("app", "is_by_path"),
    [
        (Starlette(routes=[Route("/", nothing), Mount("/sub", routes=[Route("/", nothing)])]), True),
        (fastapi(), True),
        (Starlette(routes=[Host("a.example", FastAPI())]), False),
        (own_kind(), False),
    ],
    ids=["starlette", "fastapi", "host", "own kind"],
)
def test_routes_that_are_chosen_by_method_and_path_alone(app: Any, *, is_by_path: bool) -> None:
    """Where that is so a version is known, by which plans can be prepared, FastAPI's contexts of routes included."""
    routes = asgi_routes(app)
    versions = [routes.version(ASGIRequest(http_scope(path))) for path in ("/items/1", "/items/2")]
    assert (versions[0] is not None) is is_by_path
    assert versions[0] is versions[1]
