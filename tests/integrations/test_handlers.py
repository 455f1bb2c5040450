"""The application's own handlers answer refusals: of `RateLimited` and of status 429, as each framework registers them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from flask import Blueprint, Flask, Response, jsonify
from litestar import Litestar, get
from litestar.middleware import DefineMiddleware
from litestar.response import Response as LitestarResponse
from quart import Blueprint as QuartBlueprint, Quart
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from werkzeug.exceptions import TooManyRequests
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, RateLimited, Rule
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from tests.support.clock import Clock
from tests.support.doors import Reply, Wire, asgi_reply, handshake, http_scope, wsgi_reply

RULE = Rule("api", "1/minute")
OWN = {"x-own": "yes"}


def hello(_: Any = None) -> Any:
    return PlainTextResponse("hello")


def options(**more: Any) -> dict[str, Any]:
    return {"rules": [RULE], "store": MemoryStore(Clock()), **more}


def replies(app: Any, path: str = "/", times: int = 2, **request: Any) -> list[Reply]:
    ask = asgi_reply if not isinstance(app, Flask | LimitGateWSGI) else None

    async def all_of_them() -> list[Reply]:
        return [await asgi_reply(app, path, **request) for _ in range(times)]

    return asyncio.run(all_of_them()) if ask else [wsgi_reply(app, path, **request) for _ in range(times)]


def own(_: Any, error: Any) -> JSONResponse:
    """A handler as people write it, for the error of the limiter or for one of HTTP."""
    return JSONResponse({"told": error.detail, "status": error.status_code, "wait": error.decision.retry_after}, 429, OWN)


async def own_async(request: Request, error: Any) -> JSONResponse:
    assert request.url.path
    return own(request, error)


class Answering:
    """A handler that is an object."""

    async def __call__(self, request: Request, error: Any) -> JSONResponse:
        return own(request, error)


def is_own(reply: Reply) -> None:
    assert reply.status == 429
    assert reply.headers["x-own"] == "yes"
    assert reply.headers["retry-after"] == "60"
    assert reply.headers["x-ratelimit-remaining"] == "0"
    assert b"60.0" in reply.body
    assert b"Try again in 60 s" in reply.body


def is_ours(reply: Reply) -> None:
    assert reply.status == 429
    assert reply.headers["content-type"] == "application/problem+json"
    assert "x-own" not in reply.headers


# --- Starlette and FastAPI --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [own, own_async, Answering()], ids=["plain", "async", "callable"])
@pytest.mark.parametrize("kind", [RateLimited, 429])
@pytest.mark.parametrize("framework", [Starlette, FastAPI])
@pytest.mark.parametrize("place", ["added", "around"])
def test_starlette(framework: Any, kind: Any, handler: Any, place: str) -> None:
    """Whether the gate was added or put around: the handler makes the response, and what it left out is added."""
    app = framework(routes=[Route("/", hello)])
    app.add_exception_handler(kind, handler)
    if place == "added":
        app.add_middleware(LimitGate, **options())
    gated: Any = app if place == "added" else LimitGate(app, **options())
    passed, refused = replies(gated)
    assert passed.status == 200
    is_own(refused)


def test_the_nearest_handler_is_asked() -> None:
    """That of the error before that of the status, and nobody who is registered for all errors or for all of HTTP."""
    app = Starlette(routes=[Route("/", hello)])
    app.add_exception_handler(Exception, lambda *_: PlainTextResponse("sorry", 500))
    app.add_exception_handler(StarletteHTTPException, lambda *_: PlainTextResponse("sorry", 400))
    app.add_middleware(LimitGate, **options())
    is_ours(replies(app)[1])
    app.add_exception_handler(429, lambda *_: PlainTextResponse("status", 429))
    assert replies(app)[1].body == b"status"
    app.add_exception_handler(RateLimited, lambda *_: PlainTextResponse("error", 429))
    assert replies(app)[1].body == b"error"


def test_on_denied_goes_before_handlers() -> None:
    """The option is the nearer of the two."""

    async def denied(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("denied", 429)(scope, receive, send)

    app = Starlette(routes=[Route("/", hello)], exception_handlers={429: own})
    app.add_middleware(LimitGate, **options(on_denied=denied))
    assert replies(app)[1].body == b"denied"


def test_fields_that_a_handler_has_set_stay() -> None:
    """No field is there twice, and the handler's word counts."""
    said = {"Retry-After": "7", "X-RateLimit-Remaining": "none"}
    app = Starlette(routes=[Route("/", hello)], exception_handlers={429: lambda *_: PlainTextResponse("x", 429, said)})
    app.add_middleware(LimitGate, **options())
    _, refused = replies(app)
    assert (refused.headers["retry-after"], refused.headers["x-ratelimit-remaining"]) == ("7", "none")
    assert refused.headers["x-ratelimit-limit"] == "1"


def test_a_handler_that_fails_is_an_error_of_the_application() -> None:
    """Its error is not hidden, but the client is told what it would have been told without a handler."""
    app = Starlette(routes=[Route("/", hello)], exception_handlers={429: lambda *_: 1 / 0})
    app.add_middleware(LimitGate, **options())
    assert replies(app, times=1)[0].status == 200
    wire = Wire({"type": "http.request", "body": b""})
    with pytest.raises(ZeroDivisionError):
        asyncio.run(wire.call(app, http_scope()))
    is_ours(wire.reply())


def test_a_mounted_application_has_handlers_of_its_own() -> None:
    """Those of the application that the gate belongs to are asked."""
    inner = Starlette(routes=[Route("/", hello)], exception_handlers={429: own})
    inner.add_middleware(LimitGate, **options())
    around = {429: lambda *_: PlainTextResponse("around", 429)}
    is_own(replies(Starlette(routes=[Mount("/in", inner)], exception_handlers=around), "/in/")[1])
    gated = LimitGate(Starlette(routes=[Route("/", hello)], exception_handlers={429: own}), **options())
    is_own(replies(Starlette(routes=[Mount("/in", gated)], exception_handlers=around), "/in/")[1])


@pytest.mark.parametrize("kind", [RateLimited, 429, HTTPException])
def test_a_dependency_that_refuses(kind: Any) -> None:
    """What a dependency has raised a handler answers once; one of all HTTP errors does not."""
    times = []

    def counted(request: Any, error: Any) -> JSONResponse:
        times.append(error)
        return JSONResponse({"wait": error.decision.retry_after}, 429, OWN)

    app = FastAPI(dependencies=[Depends(RateLimit("1/minute", name="one"))])
    app.get("/")(lambda: "hello")
    app.add_exception_handler(kind, counted)
    app.add_middleware(LimitGate, rules=[Rule("all", "9/minute")], store=MemoryStore(Clock()))
    passed, refused, again = replies(app, times=3)
    assert (passed.status, refused.status) == (200, 429)
    if kind is HTTPException:
        is_ours(refused)
        return
    assert (refused.headers["x-own"], refused.headers["retry-after"]) == ("yes", "60")
    assert refused.headers["x-ratelimit-remaining"] == again.headers["x-ratelimit-remaining"] == "0"
    assert len(times) == 2
    assert isinstance(times[0], RateLimited)


def test_handler_that_removes_the_decision_from_the_scope_answers() -> None:
    """The decision comes from the gate, not from the scope, which the application may change."""

    def removes(request: Any, error: Any) -> JSONResponse:
        del request.scope["limitgate"]
        return own(request, error)

    app = FastAPI(dependencies=[Depends(RateLimit("1/minute", name="one"))], exception_handlers={429: removes})
    app.get("/")(lambda: "hello")
    app.add_middleware(LimitGate, rules=[Rule("all", "9/minute")], store=MemoryStore(Clock()))
    passed, refused = replies(app)
    assert (passed.status, refused.status) == (200, 429)
    assert (refused.headers["x-own"], refused.headers["retry-after"]) == ("yes", "60")


@pytest.mark.parametrize(("kind", "types"), [(429, []), (HTTPException, ["application/problem+json"])])
def test_the_document_says_what_is_known_of_the_answer(kind: Any, types: list[str]) -> None:
    """The body of a handler's response is its own, so OpenAPI describes none."""
    app = FastAPI(exception_handlers={kind: own})
    app.get("/")(lambda: "hello")
    app.add_middleware(LimitGate, **options())
    assert list(app.openapi()["paths"]["/"]["get"]["responses"]["429"].get("content", {})) == types


def test_no_handler_answers_the_failure_of_a_store() -> None:
    """A 503 is no refusal of a limit."""

    class Down(MemoryStore):
        async def aspend(self, *_: Any) -> Any:
            from limitgate import StoreError

            raise StoreError("down")

    app = Starlette(routes=[Route("/", hello)], exception_handlers={429: own, RateLimited: own})
    app.add_middleware(LimitGate, **options(store=Down(), on_error="closed"))
    assert [reply.status for reply in replies(app)] == [503, 503]


def test_a_websocket_is_refused_without_handlers() -> None:
    """They make responses to requests."""
    app = Starlette(routes=[WebSocketRoute("/", hello)], exception_handlers={429: own})
    gate = LimitGate(app, rules=[Rule("none", "1/day", cost=lambda _: 2)], store=MemoryStore(Clock()))
    assert asyncio.run(handshake(gate, "/", denial=False)).status == 1013
    denied = asyncio.run(handshake(gate, "/"))
    assert (denied.status, denied.headers["content-type"]) == (429, "application/problem+json")


# --- Flask and Quart --------------------------------------------------------------------------------------------------


def flask_app(**more: Any) -> Flask:
    app = Flask("app")
    blueprint = Blueprint("part", "part", url_prefix="/part")
    app.add_url_rule("/", view_func=lambda: "hello")
    blueprint.add_url_rule("/", "hello", view_func=lambda: "hello")
    app.register_blueprint(blueprint)
    FlaskLimitGate(app, **options(**more))
    return app


def flask_own(error: Any) -> Any:
    assert isinstance(error, RateLimited)
    assert isinstance(error, TooManyRequests)
    return jsonify(told=error.description, status=error.code, wait=error.decision.retry_after), 429, OWN


@pytest.mark.parametrize("kind", [RateLimited, 429, TooManyRequests])
@pytest.mark.parametrize("trap", [False, True])
def test_flask(kind: Any, *, trap: bool) -> None:
    """The handler runs in a context of the application, and functions after the request run, too."""
    app = flask_app()
    app.config["TRAP_HTTP_EXCEPTIONS"] = trap
    app.register_error_handler(kind, flask_own)
    app.after_request(lambda response: response.headers.set("x-after", "yes") or response)
    passed, refused = replies(app)
    assert passed.status == 200
    is_own(refused)
    assert refused.headers["x-after"] == "yes"


def test_flask_without_a_handler_of_ours() -> None:
    """Handlers of all errors, and of all of HTTP, make no answers to refusals."""
    app = flask_app()
    app.register_error_handler(Exception, lambda _: ("sorry", 500))
    is_ours(replies(app)[1])


@pytest.mark.parametrize("trap", [False, True])
def test_the_handler_of_a_blueprint(*, trap: bool) -> None:
    """It answers refusals of its own routes; others get the application's, or ours."""
    app = flask_app()
    app.config["TRAP_HTTP_EXCEPTIONS"] = trap
    app.error_handler_spec["part"][429][TooManyRequests] = flask_own  # as a blueprint does before it is registered
    is_own(replies(app, "/part/")[1])
    is_ours(replies(app, "/", times=1)[0])


def test_what_runs_before_requests_does_not_run_for_refusals() -> None:
    """The application's own functions do nothing for a request that is refused, and the view is not called."""
    app, ran = flask_app(), []
    app.register_error_handler(429, flask_own)
    app.before_request(lambda: ran.append("before"))
    replies(app, times=3)
    assert ran == ["before"]


def test_flask_behind_middleware_of_its_own() -> None:
    """However little of a request reaches the application, a refused one is answered, and by nobody else."""
    app = Flask("app")
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/other": Response("secret")})  # type: ignore[method-assign]
    FlaskLimitGate(app, **options())
    app.register_error_handler(429, flask_own)
    replies(app, "/other/x", times=1)
    is_own(replies(app, "/other/x", times=1)[0])


def test_one_flask_inside_of_another() -> None:
    """Each has its own handlers, and a request that one has admitted is not refused by what the other left."""
    inner, outer = flask_app(), flask_app(rules=[Rule("outer", "9/minute")])
    inner.register_error_handler(429, flask_own)
    outer.wsgi_app = DispatcherMiddleware(outer.wsgi_app, {"/in": inner})  # type: ignore[method-assign]
    assert replies(outer, "/in/", times=1)[0].status == 200
    is_own(replies(outer, "/in/", times=1)[0])
    assert replies(outer, "/", times=1)[0].status == 200


def quart_app(handler_of: Callable[[Quart, QuartBlueprint], None]) -> Quart:
    app, blueprint = Quart("app"), QuartBlueprint("part", "part", url_prefix="/part")

    async def view() -> str:
        return "hello"

    app.add_url_rule("/", "hello", view)
    blueprint.add_url_rule("/", "hello", view)
    handler_of(app, blueprint)
    app.register_blueprint(blueprint)
    app.asgi_app = LimitGate(app.asgi_app, **options())  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize("kind", [RateLimited, 429])
def test_quart(kind: Any) -> None:
    """As Flask, on an event loop."""

    async def own(error: Any) -> Any:
        return {"told": error.description, "wait": error.decision.retry_after}, 429, OWN

    app = quart_app(lambda app, _: app.register_error_handler(kind, own))
    is_own(replies(app)[1])
    app = quart_app(lambda _, blueprint: blueprint.register_error_handler(kind, own))
    is_own(replies(app, "/part/")[1])
    is_ours(replies(app, "/", times=1)[0])
    is_ours(replies(quart_app(lambda *_: None))[1])


# --- Litestar ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RateLimited, 429])
@pytest.mark.parametrize("place", ["added", "around"])
def test_litestar(kind: Any, place: str) -> None:
    """The application's handler, given Litestar's request and an error of its own."""

    @get("/")
    async def view() -> str:
        return "hello"

    def handler(request: Any, error: Any) -> LitestarResponse[Any]:
        assert request.url.path == "/"
        content = {"told": error.detail, "wait": error.decision.retry_after}
        return LitestarResponse(content, status_code=429, headers=OWN)

    added = [DefineMiddleware(LimitGate, **options())] if place == "added" else []
    app = Litestar([view], exception_handlers={kind: handler}, middleware=added, logging_config=None)
    passed, refused = replies(app if added else LimitGate(app, **options()))
    assert passed.status == 200
    is_own(refused)


@pytest.mark.parametrize("place", ["added", "around"])
@pytest.mark.parametrize("status", [200, 400, 429, 500, 503, None])
@pytest.mark.parametrize("kind", [RateLimited, 429])
def test_a_handler_runs_once_for_a_refusal_by_a_dependency(kind: Any, status: int | None, place: str) -> None:
    """The framework runs it, whatever status it chooses; one that fails or answers 500 leaves the answer to the gate."""
    ran = []

    def handler(_: Request, error: Any) -> JSONResponse:
        ran.append(error)
        if status is None:
            raise ValueError
        return JSONResponse({}, status, OWN)

    app = FastAPI(dependencies=[Depends(RateLimit("1/minute"))])
    app.get("/")(lambda: "hello")
    app.add_exception_handler(kind, handler)
    if place == "added":
        app.add_middleware(LimitGate, **options(rules=[Rule("all", "9/minute")]))
    gated: Any = app if place == "added" else LimitGate(app, **options(rules=[Rule("all", "9/minute")]))

    async def ask() -> Wire:
        wire = Wire({"type": "http.request", "body": b""})
        with contextlib.suppress(ValueError):
            await wire.call(gated, http_scope("/"))
        return wire

    async def all_of_them() -> list[Wire]:
        return [await ask(), await ask()]

    refused = asyncio.run(all_of_them())[1].reply()
    assert len(ran) == 1
    assert refused.status == (429 if status in {None, 500} else status)
    assert ("x-own" in refused.headers) == (status not in {None, 500})


@pytest.mark.parametrize("has_handler", [True, False])
def test_a_refusal_that_the_application_swallows_stands(*, has_handler: bool) -> None:
    """An endpoint that catches everything, as GraphQL servers do, answers no refusal, whatever handlers there are."""
    app, rate_limit = FastAPI(), RateLimit("1/minute")

    @app.get("/")
    async def view(request: Request) -> dict[str, str]:
        try:
            await rate_limit(request)
        except Exception as error:  # noqa: BLE001 - as people write it
            return {"error": str(error)}
        return {}

    if has_handler:
        app.add_exception_handler(RateLimited, lambda *_: JSONResponse({}, 200))
    passed, refused = replies(LimitGate(app, **options(rules=[Rule("all", "9/minute")])))
    assert (passed.status, refused.status) == (200, 429)
