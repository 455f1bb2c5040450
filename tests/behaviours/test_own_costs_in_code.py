"""Limits of decorators and dependencies with a cost of their own."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Depends, FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from limitgate import ConfigError, Limit, LimitGate, LimitGateWSGI, limit
from limitgate.fastapi import RateLimit


@pytest.mark.parametrize("given", [("1000/day", 500), {"limit": "1000/day", "cost": 500}, (Limit("1000/day"), lambda _: 500)])
def test_a_decorated_endpoint(given: Any) -> None:
    """On both kinds of applications."""

    @limit("10/minute", given, name="decorated")
    async def hello(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app: Any = LimitGate(Starlette(routes=[Route("/", hello)]), rules=[])
    client = TestClient(app)
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]
    flask_app = Flask("own_costs")

    @flask_app.route("/")
    @limit("10/minute", given, name="decorated-too")
    def greet() -> str:
        return "hello"

    wsgi: Any = flask_app
    wsgi.wsgi_app = LimitGateWSGI(flask_app.wsgi_app, rules=[])
    assert [flask_app.test_client().get("/").status_code for _ in range(3)] == [200, 200, 429]


def test_a_dependency() -> None:
    """Those of different costs do not share a bucket."""
    app = FastAPI()
    small, large = RateLimit("1000/day", ("900/day", 100)), RateLimit("1000/day", ("900/day", 450))
    assert small.rule.name != large.rule.name
    app.get("/small", dependencies=[Depends(small)])(lambda: "hello")
    app.get("/large", dependencies=[Depends(large)])(lambda: "hello")
    client = TestClient(LimitGate(app, rules=[]))
    assert [client.get("/large").status_code for _ in range(3)] == [200, 200, 429]
    assert client.get("/small").status_code == 200


@pytest.mark.parametrize("given", [("1000/day", -1), ("1000/day", 1.5), ("1000/day", 1001), ("nonsense", 5)])
def test_a_decorator_with_a_wrong_cost(given: Any) -> None:
    with pytest.raises((ConfigError, TypeError, ValueError), match=r"cost|nonsense"):
        limit("10/minute", given)(lambda request: request)
