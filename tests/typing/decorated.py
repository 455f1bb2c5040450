"""Decorators leave what they decorate as it was: signatures, coroutines, classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, assert_type

from fastapi import FastAPI
from flask import Flask
from flask.views import MethodView
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import limitgate
from limitgate import Limit, exempt, limit

app = FastAPI()
flask = Flask(__name__)


@limit("5/minute burst 3", Limit("20/hour"), name="login", key=["ip", "header:x-name"], methods=["POST"], on_error="closed")
async def login(request: Request, *, retry: bool = False) -> Response:
    """A coroutine function of two parameters."""
    return PlainTextResponse("again" if retry else "welcome")


@limit(adaptive={"max": 50})
@limit("9/minute", adaptive=True)
def exported() -> str:
    """A function held to what the process can do."""
    return "all of it"


@limit(qps=5, qpm=100, qph=1000, qpd=2000, cost=lambda request: len(request.path), shadow=True, charge_if={"status": ["4xx"]})
@exempt
def plain(item: int, note: str = "") -> dict[str, str]:
    """A function of two parameters."""
    return {note: str(item)}


@exempt
async def stream(count: int) -> AsyncIterator[bytes]:
    """A generator."""
    for _ in range(count):
        yield b"."


@limit("5/minute")
class View(HTTPEndpoint):
    """A class-based endpoint of Starlette."""

    @limit("1/minute")
    async def get(self, request: Request) -> Response:
        """A method."""
        return PlainTextResponse(request.method)


@exempt
class FlaskView(MethodView):
    """A class-based view of Flask."""

    def get(self, item: int) -> str:
        """A method."""
        return str(item)


@app.get("/items/{item}")
@limit("5/minute")
async def items(item: int) -> list[int]:
    """A route of FastAPI."""
    return [item]


@flask.get("/items/<int:item>")
@limit("5/minute")
def flask_items(item: int) -> Iterator[str]:
    """A route of Flask."""
    yield str(item)


def takes_coroutine_functions(function: Callable[[Request], Coroutine[Any, Any, Response]]) -> None:
    """What a framework may ask of a handler."""


def takes_endpoints(endpoint: type[HTTPEndpoint]) -> None:
    """What a framework may ask of a class."""


async def as_they_were(request: Request, view: View) -> None:
    """Calls are checked as if there was no decorator."""
    assert_type(await login(request, retry=True), Response)
    assert_type(plain(1, note="one"), dict[str, str])
    assert_type(stream(1), AsyncIterator[bytes])
    assert_type(await view.get(request), Response)
    assert_type(FlaskView().get(1), str)
    assert_type(await items(1), list[int])
    assert_type(flask_items(1), Iterator[str])
    takes_coroutine_functions(login)
    takes_endpoints(View)
    await login(request, retries=1)  # type: ignore[call-arg]
    plain("1")  # type: ignore[arg-type]
    stream()  # type: ignore[call-arg]
    await view.get()  # type: ignore[call-arg]


limit(5)  # type: ignore[arg-type]
limit("5/minute", qpx=5)  # type: ignore[call-arg]
limit("5/minute", on_error="sometimes")  # type: ignore[arg-type]
limit("5/minute", key=5)  # type: ignore[arg-type]
limit("5/minute", cost=lambda request: request.path)  # type: ignore[arg-type,return-value]
limit("5/minute")(5)  # type: ignore[type-var]
exempt(5)  # type: ignore[type-var]
limitgate.limits_of(login)  # type: ignore[attr-defined]
