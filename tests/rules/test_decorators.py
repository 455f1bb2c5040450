"""``@limit`` and ``@exempt`` in every place where Starlette, FastAPI and Flask let a handler stand."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import sys
import textwrap
import tracemalloc
import types
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import fastapi
import flask
import flask.views
import pydantic
import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint, WebSocketEndpoint
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import Rule as URLRule

from limitgate import ConfigError, Limit, LimitGate, LimitGateWSGI, MemoryStore, Rule, exempt, limit
from limitgate.routes.flask import LOOK_EVERY
from limitgate.rules.decorators import marks_of
from tests.support.clock import Clock
from tests.support.doors import (
    Reply,
    Wire,
    asgi_reply,
    asgi_through_httpx,
    handshake,
    http_scope,
    run_wsgi,
    wsgi_environ,
    wsgi_reply,
)
from tests.support.versions import needs

Decorate = Callable[[Any], Any]
HELLO = b"hello"


class Place(NamedTuple):
    """An application with one decorated handler, and how to reach it."""

    build: Callable[[Decorate], Any]
    url: str = "/limited"
    door: str = "asgi"
    since: str = "0"
    """The first version of FastAPI that serves it."""

    def app(self, decorate: Decorate) -> Any:
        return self.build(decorate)

    def gated(self, decorate: Decorate, *rules: Rule, **options: Any) -> Any:
        return gated(self.build(decorate), *rules, **options)

    def ask(self, app: Any, **more: Any) -> Reply:
        if self.door == "websocket":
            return asyncio.run(handshake(app, self.url, **more))
        return ask(app, self.url, **more)

    def passes(self, reply: Reply) -> bool:
        if self.door == "websocket":
            return reply.status == 101
        return reply.status == 200 and HELLO in reply.body


def is_wsgi(app: Any) -> bool:
    return isinstance(app, flask.Flask | DispatcherMiddleware | ProxyFix | LimitGateWSGI)


def gated(app: Any, *rules: Rule, **options: Any) -> Any:
    """The application behind a gate with a clock that stands still."""
    options.setdefault("store", MemoryStore(Clock()))
    return (LimitGateWSGI if is_wsgi(app) else LimitGate)(app, rules=rules, **options)


def ask(app: Any, url: str = "/limited", **more: Any) -> Reply:
    return wsgi_reply(app, url, **more) if is_wsgi(app) else asyncio.run(asgi_reply(app, url, **more))


def statuses(app: Any, *urls: str, **more: Any) -> list[int]:
    return [ask(app, url, **more).status for url in urls]


def policies(reply: Reply) -> list[str]:
    assert reply.status == 429
    return reply.json()["violated-policies"]


# --- Starlette: kinds of endpoints ------------------------------------------------------------------------------------


def st_async(decorate: Decorate) -> Any:
    @decorate
    async def view(request: Any) -> Any:
        return PlainTextResponse(HELLO)

    return view


def st_def(decorate: Decorate) -> Any:
    @decorate
    def view(request: Any) -> Any:
        return PlainTextResponse(HELLO)

    return view


def st_class(decorate: Decorate) -> Any:
    @decorate
    class View(HTTPEndpoint):
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    return View


def st_method(decorate: Decorate) -> Any:
    class View(HTTPEndpoint):
        @decorate
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    return View


def st_def_method(decorate: Decorate) -> Any:
    class View(HTTPEndpoint):
        @decorate
        def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    return View


def st_dispatch(decorate: Decorate) -> Any:
    class View(HTTPEndpoint):
        @decorate
        async def dispatch(self) -> None:
            await super().dispatch()

        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    return View


def st_partial_of_limited(decorate: Decorate) -> Any:
    @decorate
    async def view(request: Any, words: bytes) -> Any:
        return PlainTextResponse(words)

    return functools.partial(view, words=HELLO)


def st_partial_of_partial(decorate: Decorate) -> Any:
    @decorate
    def view(request: Any, words: bytes, more: bytes) -> Any:
        return PlainTextResponse(words + more)

    return functools.partial(functools.partial(view, words=HELLO), more=b"!")


def st_limited_partial(decorate: Decorate) -> Any:
    async def view(request: Any, words: bytes) -> Any:
        return PlainTextResponse(words)

    return decorate(functools.partial(view, words=HELLO))


class Handlers:
    def __init__(self, words: bytes = HELLO) -> None:
        self.words = words

    async def view(self, request: Any) -> Any:
        return PlainTextResponse(self.words)


def st_bound_method(decorate: Decorate) -> Any:
    class Own(Handlers):
        @decorate
        async def view(self, request: Any) -> Any:
            return PlainTextResponse(self.words)

    return Own().view


def st_limited_bound_method(decorate: Decorate) -> Any:
    return decorate(Handlers().view)


def st_under_another(decorate: Decorate) -> Any:
    view = st_async(decorate)

    @functools.wraps(view)
    async def wrapper(request: Any) -> Any:
        return await view(request)

    return wrapper


def st_above_another(decorate: Decorate) -> Any:
    return decorate(st_under_another(lambda view: view))


ENDPOINTS = [
    *[
        st_async,
        st_def,
        st_class,
        st_method,
        st_def_method,
        st_dispatch,
        st_partial_of_limited,
        st_partial_of_partial,
    ],
    *[st_limited_partial, st_bound_method, st_limited_bound_method, st_under_another, st_above_another],
]


def routed(endpoint: Callable[[Decorate], Any]) -> Callable[[Decorate], Any]:
    return lambda decorate: Starlette(routes=[Route("/limited", endpoint(decorate))])


# --- Starlette: where a route may stand -------------------------------------------------------------------------------


def st_router(decorate: Decorate) -> Any:
    return Router(routes=[Route("/limited", st_async(decorate))])


def st_mount(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("/a", routes=[Route("/limited", st_async(decorate))])])


def st_nested_mount(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("/a", routes=[Mount("/{b}", routes=[Route("/{c:int}", st_def(decorate))])])])


def st_empty_mount(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("", routes=[Route("/limited", st_async(decorate))])])


def st_mount_root(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("/limited", routes=[Route("/", st_async(decorate))])])


def st_sub_app(decorate: Decorate) -> Any:
    sub = Starlette(routes=[Route("/limited", st_class(decorate))], middleware=[Middleware(GZipMiddleware)])
    return Starlette(routes=[Route("/limited", st_async(lambda view: view)), Mount("/a", app=sub)])


def st_sub_fastapi(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("/a", app=fa_included_twice(decorate))])


def st_mount_with_middleware(decorate: Decorate) -> Any:
    routes = [Route("/limited", st_async(decorate), middleware=[Middleware(GZipMiddleware)])]
    return Starlette(routes=[Mount("/a", routes=routes, middleware=[Middleware(GZipMiddleware)])])


def st_wrapped_sub_app(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("/a", app=GZipMiddleware(GZipMiddleware(routed(st_async)(decorate))))])


def st_host(decorate: Decorate) -> Any:
    routes = [Route("/limited", st_async(decorate))]
    return Starlette(routes=[Host("api.example", Router()), Host("{name}server", Router(routes=routes))])


def st_mount_in_host(decorate: Decorate) -> Any:
    return Starlette(routes=[Host("testserver", st_mount(decorate))])


def st_behind_wrappers(decorate: Decorate) -> Any:
    return GZipMiddleware(GZipMiddleware(routed(st_async)(decorate)))


def st_behind_base_http_middleware(decorate: Decorate) -> Any:
    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    routes = [Route("/limited", st_def(decorate))]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=dispatch)] * 2)


def st_other_method_first(decorate: Decorate) -> Any:
    return Starlette(
        routes=[
            Route("/limited", st_async(lambda view: view), methods=["POST"]),
            Route("/{anything}", st_async(decorate), methods=["GET"]),
            Route("/limited", st_async(lambda view: view)),
        ]
    )


def st_convertors(decorate: Decorate) -> Any:
    route = "/{i:int}/{f:float}/{u:uuid}/v{s}.x/{p:path}"
    return Starlette(routes=[Route(route, st_async(decorate))])


def st_websocket(decorate: Decorate) -> Any:
    @decorate
    async def view(websocket: Any) -> None:
        await websocket.accept()

    return Starlette(routes=[Route("/limited", st_async(lambda http: http)), WebSocketRoute("/limited", view)])


def st_nested_websocket(decorate: Decorate) -> Any:
    return Starlette(routes=[Mount("/a", app=st_websocket(decorate))])


def st_websocket_class(decorate: Decorate) -> Any:
    @decorate
    class View(WebSocketEndpoint):
        encoding = "text"

    return Starlette(routes=[WebSocketRoute("/limited", View)])


# --- FastAPI ----------------------------------------------------------------------------------------------------------


class Greeting(pydantic.BaseModel):
    words: str


def name_of_greeter(request: fastapi.Request) -> str:
    return request.headers.get("x-name", "nobody")


async def with_teardown() -> AsyncIterable[str]:
    yield "resource"


def fa_async(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited")
    @decorate
    async def view() -> str:
        return "hello"

    return app


def fa_def(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited")
    @decorate
    def view() -> str:
        return "hello"

    return app


def fa_above(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @decorate
    @app.get("/limited")
    async def view() -> str:
        return "hello"

    return app


def fa_dependencies(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited/{number}", dependencies=[fastapi.Depends(with_teardown)])
    @decorate
    async def view(number: int, name: Annotated[str, fastapi.Depends(name_of_greeter)], q: str = "-") -> str:
        return f"hello {name} {number + 1} {q}"

    return app


def fa_response_model(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited", response_model=Greeting)
    @decorate
    async def view() -> Any:
        return {"words": "hello", "secret": "left out"}

    return app


def fa_streaming(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited")
    @decorate
    def view() -> Any:
        return StreamingResponse(iter([HELLO, HELLO]))

    return app


def fa_async_generator(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited")
    @decorate
    async def view() -> AsyncIterable[Greeting]:
        yield Greeting(words="hello")
        yield Greeting(words="again")

    return app


def fa_generator(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.get("/limited")
    @decorate
    def view() -> Iterable[Greeting]:
        yield Greeting(words="hello")
        yield Greeting(words="again")

    return app


def fa_convertor(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.api_route("/limited/{number:int}/{rest:path}", methods=["GET", "POST"])
    @decorate
    async def view(number: int, rest: str) -> str:
        return f"hello {number} {rest}"

    return app


class Greeter:
    async def __call__(self, name: str = "you") -> str:
        return f"hello {name}"


def fa_callable_object(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()
    app.add_api_route("/limited", decorate(Greeter()))
    return app


def fa_included_twice(decorate: Decorate) -> Any:
    inner, outer, app = fastapi.APIRouter(prefix="/in"), fastapi.APIRouter(prefix="/out"), fastapi.FastAPI()

    @inner.get("/{name}")
    @decorate
    async def view(name: str) -> str:
        return f"hello {name}"

    outer.include_router(inner, prefix="/deep")
    app.include_router(outer, prefix="/api")
    return app


def fa_included_before_its_routes(decorate: Decorate) -> Any:
    router, app = fastapi.APIRouter(), fastapi.FastAPI()
    app.include_router(router, prefix="/api")

    @router.get("/limited")
    @decorate
    async def view() -> str:
        return "hello"

    return app


def fa_starlette_route_included(decorate: Decorate) -> Any:
    router, app = fastapi.APIRouter(), fastapi.FastAPI()
    router.add_route("/limited", st_class(decorate))
    app.include_router(router, prefix="/api")
    return app


def fa_mount(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()
    app.mount("/a", fa_included_twice(decorate))
    return app


def fa_mount_in_included(decorate: Decorate) -> Any:
    router, app = fastapi.APIRouter(), fastapi.FastAPI()
    router.mount("/a", fa_async(decorate))
    app.include_router(router, prefix="/api")
    return app


def fa_websocket(decorate: Decorate) -> Any:
    router, app = fastapi.APIRouter(), fastapi.FastAPI()

    @router.websocket("/limited/{name}")
    @decorate
    async def view(websocket: fastapi.WebSocket, name: str) -> None:
        await websocket.accept()

    app.include_router(router, prefix="/api")
    return app


# --- Flask ------------------------------------------------------------------------------------------------------------


def flask_app(name: str = "site") -> flask.Flask:
    app = flask.Flask(name)
    app.config["PROPAGATE_EXCEPTIONS"] = True
    return app


def fl_function(decorate: Decorate) -> Any:
    app = flask_app()

    @app.get("/limited")
    @decorate
    def view() -> Any:
        return HELLO

    return app


def fl_async(decorate: Decorate) -> Any:
    app = flask_app()

    @app.get("/limited")
    @decorate
    async def view() -> Any:
        await asyncio.sleep(0)
        return HELLO

    return app


def fl_above(decorate: Decorate) -> Any:
    app = flask_app()

    @decorate
    @app.get("/limited")
    def view() -> Any:
        return HELLO

    return app


def fl_generator(decorate: Decorate) -> Any:
    app = flask_app()

    @app.get("/limited")
    @decorate
    def view() -> Any:
        yield HELLO
        yield HELLO

    return app


def fl_streaming(decorate: Decorate) -> Any:
    app = flask_app()

    @app.get("/limited")
    @decorate
    def view() -> Any:
        return flask.Response(flask.stream_with_context(word for word in [HELLO, HELLO]))

    return app


class Greet(flask.views.View):
    def dispatch_request(self) -> Any:
        return HELLO


class GreetOnce(Greet):
    init_every_request = False


def with_view(view: Any, url: str = "/limited", **options: Any) -> flask.Flask:
    app = flask_app()
    app.add_url_rule(url, view_func=view, **options)
    return app


def fl_as_view(decorate: Decorate) -> Any:
    return with_view(decorate(Greet.as_view("greet")))


def fl_as_view_once(decorate: Decorate) -> Any:
    return with_view(decorate(GreetOnce.as_view("greet")))


def fl_view_class(decorate: Decorate) -> Any:
    @decorate
    class Own(Greet):
        pass

    return with_view(Own.as_view("greet"))


def fl_view_decorators(decorate: Decorate) -> Any:
    class Own(Greet):
        decorators = (decorate,)

    return with_view(Own.as_view("greet"))


def fl_dispatch_request(decorate: Decorate) -> Any:
    class Own(flask.views.View):
        @decorate
        def dispatch_request(self) -> Any:
            return HELLO

    return with_view(Own.as_view("greet"))


def fl_method(decorate: Decorate) -> Any:
    class Own(flask.views.MethodView):
        @decorate
        def get(self) -> Any:
            return HELLO

    return with_view(Own.as_view("greet"))


def fl_async_method(decorate: Decorate) -> Any:
    class Own(flask.views.MethodView):
        @decorate
        async def get(self) -> Any:
            return HELLO

    return with_view(Own.as_view("greet"))


def fl_method_view_class(decorate: Decorate) -> Any:
    @decorate
    class Own(flask.views.MethodView):
        def get(self) -> Any:
            return HELLO

    return with_view(Own.as_view("greet"))


def fl_nested_blueprints(decorate: Decorate) -> Any:
    inner, outer, app = flask.Blueprint("inner", "in"), flask.Blueprint("outer", "out"), flask_app()

    @inner.get("/<int:number>/<path:rest>")
    @decorate
    def view(number: int, rest: str) -> Any:
        return f"hello {number} {rest}"

    outer.register_blueprint(inner, url_prefix="/in")
    app.register_blueprint(outer, url_prefix="/out")
    return app


def fl_dispatcher(decorate: Decorate) -> Any:
    return DispatcherMiddleware(flask_app("other"), {"/a": flask_app("a"), "/a/b": fl_function(decorate)})


def fl_dispatcher_default(decorate: Decorate) -> Any:
    return DispatcherMiddleware(fl_function(decorate), {"/limit": flask_app("other")})


def fl_wrapped_in_dispatcher(decorate: Decorate) -> Any:
    return ProxyFix(DispatcherMiddleware(flask_app("other"), {"/a": ProxyFix(fl_function(decorate))}))


def fl_replaced(decorate: Decorate) -> Any:
    app = fl_function(lambda view: view)
    app.view_functions["view"] = decorate(app.view_functions["view"])
    return app


def fl_partial(decorate: Decorate) -> Any:
    @decorate
    def view(words: bytes) -> Any:
        return words

    return with_view(functools.partial(view, words=HELLO), endpoint="greet")


def fl_defaults(decorate: Decorate) -> Any:
    @decorate
    def view(page: int) -> Any:
        return f"hello {page}"

    app = with_view(view, "/pages/<int:page>")
    app.add_url_rule("/pages", view_func=view, defaults={"page": 1})
    return app


NUMBERS = "/1/2.5/12345678-1234-5678-1234-567812345678/va.x/b/c/"
BARE: dict[str, Place] = {
    **{endpoint.__name__: Place(routed(endpoint)) for endpoint in ENDPOINTS},
    "st_router": Place(st_router),
    "st_mount": Place(st_mount, "/a/limited"),
    "st_nested_mount": Place(st_nested_mount, "/a/b/7"),
    "st_empty_mount": Place(st_empty_mount),
    "st_mount_root": Place(st_mount_root, "/limited/"),
    "st_sub_app": Place(st_sub_app, "/a/limited"),
    "st_sub_fastapi": Place(st_sub_fastapi, "/a/api/out/deep/in/x"),
    "st_mount_with_middleware": Place(st_mount_with_middleware, "/a/limited"),
    "st_wrapped_sub_app": Place(st_wrapped_sub_app, "/a/limited"),
    "st_host": Place(st_host),
    "st_mount_in_host": Place(st_mount_in_host, "/a/limited"),
    "st_behind_wrappers": Place(st_behind_wrappers),
    "st_behind_base_http_middleware": Place(st_behind_base_http_middleware),
    "st_other_method_first": Place(st_other_method_first),
    "st_convertors": Place(st_convertors, NUMBERS),
    "st_newline": Place(routed(st_async), "/limited%0a"),
    "st_encoded": Place(routed(st_async), "/l%69mited?x=/other"),
    "st_websocket": Place(st_websocket, door="websocket"),
    "st_nested_websocket": Place(st_nested_websocket, "/a/limited", door="websocket"),
    "st_websocket_class": Place(st_websocket_class, door="websocket"),
    "fa_async": Place(fa_async),
    "fa_def": Place(fa_def),
    "fa_dependencies": Place(fa_dependencies, "/limited/41?q=why"),
    "fa_response_model": Place(fa_response_model),
    "fa_streaming": Place(fa_streaming),
    "fa_async_generator": Place(fa_async_generator, since="0.134"),
    "fa_generator": Place(fa_generator),
    "fa_convertor": Place(fa_convertor, "/limited/1/a/b/"),
    "fa_callable_object": Place(fa_callable_object, "/limited?name=me"),
    "fa_included_twice": Place(fa_included_twice, "/api/out/deep/in/x"),
    "fa_included_before_its_routes": Place(fa_included_before_its_routes, "/api/limited", since="0.137.2"),
    "fa_starlette_route_included": Place(fa_starlette_route_included, "/api/limited"),
    "fa_mount": Place(fa_mount, "/a/api/out/deep/in/x"),
    "fa_mount_in_included": Place(fa_mount_in_included, "/api/a/limited", since="0.137.2"),
    "fa_websocket": Place(fa_websocket, "/api/limited/x", door="websocket"),
    "fa_newline": Place(fa_async, "/limited%0a"),
    "fl_function": Place(fl_function),
    "fl_async": Place(fl_async),
    "fl_generator": Place(fl_generator),
    "fl_streaming": Place(fl_streaming),
    "fl_as_view": Place(fl_as_view),
    "fl_as_view_once": Place(fl_as_view_once),
    "fl_view_class": Place(fl_view_class),
    "fl_view_decorators": Place(fl_view_decorators),
    "fl_dispatch_request": Place(fl_dispatch_request),
    "fl_method": Place(fl_method),
    "fl_async_method": Place(fl_async_method),
    "fl_method_view_class": Place(fl_method_view_class),
    "fl_nested_blueprints": Place(fl_nested_blueprints, "/out/in/1/a/b"),
    "fl_dispatcher": Place(fl_dispatcher, "/a/b/limited"),
    "fl_dispatcher_default": Place(fl_dispatcher_default),
    "fl_wrapped_in_dispatcher": Place(fl_wrapped_in_dispatcher, "/a/limited"),
    "fl_replaced": Place(fl_replaced),
    "fl_partial": Place(fl_partial),
    "fl_defaults": Place(fl_defaults, "/pages"),
    "fl_double_slash": Place(fl_function, "//limited"),
}
PLACES = BARE | {"fa_above": Place(fa_above), "fl_above": Place(fl_above)}
"""Above the framework's own decorator, ours cannot put anything around the handler, only the gate can see it."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    needs("fastapi", PLACES[request.param].since)
    return PLACES[request.param]


@pytest.fixture(params=BARE)
def guarded_place(request: pytest.FixtureRequest) -> Place:
    needs("fastapi", BARE[request.param].since)
    return BARE[request.param]


def nested_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, or the one that is none."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from nested_errors(each)
    else:
        yield error


# --- in every place ---------------------------------------------------------------------------------------------------


def test_a_decorated_place_is_limited(place: Place) -> None:
    """Whatever the handler is and wherever it stands, its limit holds, and is named after the place."""
    app = place.gated(limit("2/minute"))
    first, second, third = (place.ask(app) for _ in range(3))
    assert place.passes(first)
    assert place.passes(second)
    assert [reply.rate["x-ratelimit-remaining"] for reply in (first, second, third)] == ["1", "0", "0"]
    (name,) = policies(third)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
    assert third.wait == 30


def test_how_a_decorator_counts() -> None:
    """``algorithm`` and ``align`` are for the limits of a decorator, as on rules."""

    @limit("2/day", qpm=9, algorithm="fixed_window", align="Europe/Berlin")
    def view() -> None:
        """A view."""

    (rule,) = marks_of(view)
    days, minutes = Limit("2/day", algorithm="fixed_window", align="Europe/Berlin"), Limit("9/minute", algorithm="fixed_window")
    assert rule.every_limit == (days, minutes)


def test_an_exempt_place_is_never_limited(guarded_place: Place) -> None:
    """``@exempt`` takes a place out of every rule: no decision, no field, no charge."""
    place, app = guarded_place, guarded_place.gated(exempt, Rule("all", "1/day"))
    for _ in range(3):
        reply = place.ask(app)
        assert place.passes(reply)
        assert not reply.rate


@pytest.mark.parametrize("order", [0, 1])
def test_exempt_beats_limit(guarded_place: Place, order: int) -> None:
    """A place that is limited and exempt is exempt, whichever stands above."""
    first, second = (exempt, limit("1/day")) if order else (limit("1/day"), exempt)
    app = guarded_place.gated(lambda view: first(second(view)))
    assert all(guarded_place.passes(guarded_place.ask(app)) for _ in range(3))


def test_a_subclass_is_limited_as_its_class() -> None:
    """What is made from a limited class shares its bucket."""
    view = st_class(limit("2/minute"))
    app = gated(Starlette(routes=[Route("/a", view), Route("/b", type("Derived", (view,), {}))]))
    assert statuses(app, "/a", "/b", "/a", "/b") == [200, 200, 429, 429]


def test_limits_stack(place: Place) -> None:
    """Of several limits on one place every one holds, and each is named when it refuses."""
    app = place.gated(lambda view: limit("9/hour")(limit("2/minute")(limit("2/day", name="daily")(view))), headers=["draft-11"])
    first, _, third = (place.ask(app) for _ in range(3))
    assert place.passes(first)
    assert len(first.rate["ratelimit"].split(", ")) == 3
    assert len(policies(third)) == 2
    assert "daily" in policies(third)


def test_a_decorator_and_rules_decide_together(place: Place) -> None:
    """A refusal by the decorator costs the rule nothing, and the other way round."""
    clock = Clock()
    rules = [Rule("minute", "3/minute"), Rule("day", "9/day")]
    app = place.gated(limit("2 per 5 minutes burst 1"), *rules, store=MemoryStore(clock), headers=["draft-11"])

    def left(reply: Reply) -> list[str]:
        return re.findall(r";r=(\d+)", reply.rate["ratelimit"])

    assert left(place.ask(app)) == ["2", "8", "0"]
    assert [left(place.ask(app)) for _ in range(5)] == [["2", "8", "0"]] * 5
    clock.advance(150)
    assert left(place.ask(app)) == ["2", "7", "0"]
    assert policies(place.ask(app))[0] not in ("minute", "day")


def test_a_refusal_by_a_rule_costs_the_decorator_nothing(place: Place) -> None:
    """What a rule refuses is not charged to the decorator."""
    clock = Clock()
    app = place.gated(limit("2/day"), Rule("minute", "1/minute"), store=MemoryStore(clock))
    results = []
    for _ in range(3):
        results += [place.passes(place.ask(app)) for _ in range(3)]
        clock.advance(60)
    assert results == [True, False, False, True, False, False, False, False, False]


def test_without_a_gate_a_place_raises(guarded_place: Place) -> None:
    """A decorated place in an application without a gate raises ConfigError at the first call."""
    app = guarded_place.app(limit("2/minute"))
    with pytest.raises((ConfigError, BaseExceptionGroup)) as raised:
        guarded_place.ask(app)
    assert [type(error) for error in nested_errors(raised.value)] == [ConfigError]
    assert "LimitGate" in str(next(nested_errors(raised.value)))


@pytest.mark.parametrize("gate", ["no gate", "gate", "gate told so"])
def test_decorated_endpoint_with_limitgate_disabled_is_not_limited(
    place: Place, monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """``LIMITGATE_ENABLED=false`` switches decorators off with and without a gate, ``enabled=False`` behind that gate."""
    if gate == "gate told so":
        app = place.gated(limit("1/minute"), enabled=False)
    else:
        monkeypatch.setenv("LIMITGATE_ENABLED", "false")
        app = place.app(limit("1/minute")) if gate == "no gate" else place.gated(limit("1/minute"))
    for _ in range(3):
        reply = place.ask(app)
        assert place.passes(reply)
        assert not reply.rate


def test_undecorated_neighbours_are_not_limited(place: Place) -> None:
    """Limits on one place are no limits on others, nor on paths that do not exist."""
    app = place.gated(limit("1/day"))
    place.ask(app)
    assert {reply.status for reply in [ask(app, "/nowhere/at/all") for _ in range(3)]} == {404}


# --- where a gate may stand -------------------------------------------------------------------------------------------


def test_added_as_middleware() -> None:
    """The usual ways of adding the gate: ``add_middleware``, ``Middleware``, ``app.wsgi_app``."""
    options = {"rules": [], "store": MemoryStore(Clock())}
    added = fa_included_twice(limit("1/minute"))
    added.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    added.add_middleware(LimitGate, **options)
    added.add_middleware(GZipMiddleware)
    assert statuses(added, *["/api/out/deep/in/x"] * 2) == [200, 429]

    listed = Starlette(routes=[Route("/limited", st_async(limit("1/minute")))], middleware=[Middleware(LimitGate, **options)])
    assert statuses(listed, *["/limited"] * 2) == [200, 429]

    wrapped = fl_nested_blueprints(limit("1/minute"))
    wrapped.wsgi_app = LimitGateWSGI(ProxyFix(wrapped.wsgi_app), **options)
    assert statuses(wrapped, *["/out/in/1/a"] * 2) == [200, 429]

    mounted = flask_app()
    mounted.wsgi_app = DispatcherMiddleware(mounted.wsgi_app, {"/a": fl_function(limit("1/minute"))})
    mounted.wsgi_app = LimitGateWSGI(mounted.wsgi_app, **options)
    assert statuses(mounted, *["/a/limited"] * 2) == [200, 429]


def test_a_gate_inside_of_a_mounted_app() -> None:
    """A gate in a mounted application knows the routes below it, whatever the path above."""
    sub = Starlette(routes=[Route("/limited", st_async(limit("2/minute")))])
    sub.add_middleware(
        LimitGate, rules=[Rule("it", "9/day", path="/limited")], store=MemoryStore(Clock()), headers=["draft-11"]
    )
    app = Starlette(routes=[Mount("/a", app=sub), Route("/limited", st_async(lambda view: view))])
    assert statuses(app, *["/a/limited"] * 3, "/limited") == [200, 200, 429, 200]
    assert policies(ask(app, "/a/limited")) != ["it"]


@pytest.mark.parametrize("path", ["/v1/limited", "/limited"])
def test_behind_a_root_path(path: str) -> None:
    """Under a server's ``root_path`` a place is found whether the path includes it or not."""
    app = gated(routed(st_async)(limit("2/minute")))
    assert [ask(app, path, root_path="/v1").status for _ in range(3)] == [200, 200, 429]


class Late:
    """WSGI middleware that calls the application only when it is iterated."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.ended = 0

    def __call__(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        try:
            yield from self.app(environ, start_response)
        finally:
            self.ended += 1


def test_middleware_that_runs_the_app_late() -> None:
    """A Flask view behind WSGI middleware that calls it at the first iteration only is found, and seen to be."""
    late = Late(fl_streaming(limit("1/minute")))
    app = gated_wsgi(late)
    assert statuses(app, "/limited", "/limited") == [200, 429]
    assert late.ended == 1


def test_middleware_that_runs_the_app_late_is_closed() -> None:
    """A server that gives up half way closes it, and what the application raises half way comes out."""
    late = Late(fl_streaming(limit("9/minute")))
    chunks = gated_wsgi(late)(wsgi_environ("/limited"), lambda *_: None)
    assert next(iter(chunks)) == HELLO
    chunks.close()
    assert late.ended == 1

    def failing(environ: Any, start_response: Any) -> Iterator[bytes]:
        yield HELLO
        raise ValueError("half way")

    late.app.wsgi_app = failing
    with pytest.raises(ValueError, match="half way"):
        list(gated_wsgi(late)(wsgi_environ("/limited"), lambda *_: None))
    assert late.ended == 2


def gated_wsgi(app: Any) -> LimitGateWSGI:
    return LimitGateWSGI(app, rules=[], store=MemoryStore(Clock()))


def two_gates(build: Callable[[Decorate], Any], **outer: Any) -> Any:
    """An application with a gate of its own, mounted at /a in one with another gate on the same store."""
    options: dict[str, Any] = {"store": MemoryStore(Clock()), "headers": ["draft-11"]}
    inner = build(limit("2/minute"))
    if build is fl_function:
        inner.wsgi_app = LimitGateWSGI(inner.wsgi_app, rules=[], **options)
        return gated(DispatcherMiddleware(flask_app("outer"), {"/a": inner}), **options, **outer)
    inner.add_middleware(LimitGate, rules=[], **options)
    return gated(Starlette(routes=[Mount("/a", app=inner)]), **options, **outer)


@pytest.mark.parametrize("build", [fa_async, fl_function], ids=lambda build: build.__name__)
def test_a_place_under_two_gates_is_charged_once(build: Callable[[Decorate], Any]) -> None:
    """Where a mounted application has a gate of its own on the same store, its places keep the whole of their limits."""
    assert statuses(two_gates(build), *["/a/limited"] * 3) == [200, 200, 429]


@pytest.mark.parametrize("build", [fa_async, fl_function], ids=lambda build: build.__name__)
def test_a_place_under_two_gates_is_told_of_once(build: Callable[[Decorate], Any]) -> None:
    """Through a mount, too, a response has each field once, and names the place once."""
    app = two_gates(build)
    replies = [ask(app, "/a/limited") for _ in range(3)]
    assert [len(draft_names(reply)) for reply in replies] == [1] * 3
    assert [reply.rate["ratelimit"].partition(";")[2] for reply in replies] == ["r=1;t=30", "r=0;t=60", "r=0;t=30"]


@pytest.mark.parametrize("build", [fa_async, fl_function], ids=lambda build: build.__name__)
def test_a_gate_that_is_switched_off_switches_no_other_off(build: Callable[[Decorate], Any]) -> None:
    """Around a gate that limits, one that is switched off by its own option changes nothing."""
    assert statuses(two_gates(build, enabled=False), *["/a/limited"] * 3) == [200, 200, 429]


def test_a_request_from_inside_counts_like_any_other() -> None:
    """A handler that sends requests to its own application, as batch endpoints do, gets no free ones."""
    shared = limit("4/minute", name="shared")

    @shared
    async def batch(request: Any) -> Any:
        inside = [await asgi_reply(app, "/limited") for _ in range(2)]
        return PlainTextResponse(" ".join(str(reply.status) for reply in inside))

    app = gated(Starlette(routes=[Route("/batch", batch), Route("/limited", st_async(shared))]))
    assert [ask(app, "/batch").body for _ in range(2)] == [b"200 200", b"429 429"]


def test_limits_above_and_below_the_route() -> None:
    """A handler with one limit below the framework's decorator and one above it has both."""
    above, below = limit("3/hour", name="above"), limit("2/minute", name="below")
    for build in (fa_async, fl_function):
        framework = build(lambda view: view)

        def both() -> str:
            return "hello"

        above(framework.get("/both")(below(both)))
        app = gated(framework, headers=["draft-11"])
        first, _, third = (ask(app, "/both") for _ in range(3))
        assert {item.split(";")[0] for item in first.rate["ratelimit"].split(", ")} == {'"above"', '"below"'}
        assert policies(third) == ["below"]


def draft_names(reply: Reply) -> list[str]:
    """The names of the policies in a response, the same in both fields."""
    names = [item.split('"')[1] for item in reply.rate["ratelimit"].split(", ")]
    assert names == [item.split('"')[1] for item in reply.rate["ratelimit-policy"].split(", ")]
    return names


def test_the_names_of_policies_are_different() -> None:
    """A rule and a decorator, or two decorators, may have names of which one is that of the other's window."""
    several, single = limit(qps=5, qpm=9, name="several"), limit("7/s", name="several-minute")
    view = single(several(st_async(lambda view: view)))
    app = gated(Starlette(routes=[Route("/limited", view)]), Rule("several-second", "8/s"), headers=["draft-11"])
    assert draft_names(ask(app)) == ["several-second", "several-second-2", "several-minute-2", "several-minute"]
    assert policies(next(reply for reply in (ask(app) for _ in range(9)) if reply.status == 429)) == ["several"]


@pytest.mark.parametrize("own", [lambda view: view, limit("9/minute")], ids=["free", "limited"])
def test_a_handler_called_from_elsewhere_raises(own: Decorate) -> None:
    """A decorated handler that another one calls was not weighed for this request, and does not run unlimited."""
    elsewhere = st_async(limit("1/minute"))

    @own
    async def calls_it(request: Any) -> Any:
        return await elsewhere(request)

    app = gated(Starlette(routes=[Route("/limited", st_async(limit("9/minute"))), Route("/other", calls_it)]))
    assert ask(app, "/limited").status == 200
    with pytest.raises(ConfigError, match="LimitGate"):
        ask(app, "/other")


def test_a_gate_leaves_no_mark_behind() -> None:
    """After a request through a gate, a place outside of it still raises."""
    place = PLACES["fl_function"]
    app = place.gated(limit("9/minute"))
    assert place.passes(place.ask(app))
    with pytest.raises(ConfigError):
        place.ask(fl_function(limit("9/minute")))


# --- names and buckets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("st_async", "st_async.view"),
        ("st_class", "st_class.View"),
        ("st_method", "View.get"),
        ("st_limited_partial", "st_limited_partial.view"),
        ("st_limited_bound_method", "Handlers.view"),
        ("fa_included_twice", "fa_included_twice.view"),
        ("fl_function", "fl_function.view"),
        ("fl_as_view", "[Gg]reet"),
        ("fl_view_decorators", "Own|greet"),
        ("fl_method", "Own.get"),
    ],
)
def test_the_name_tells_the_place(name: str, told: str) -> None:
    """Whoever reads a refusal finds the handler by the name in it, a class-based view by its class or endpoint."""
    app = PLACES[name].gated(limit("1/minute"))
    PLACES[name].ask(app)
    assert re.search(told, policies(PLACES[name].ask(app))[0])


def test_handlers_of_one_name_do_not_share() -> None:
    """Two functions that a factory made under one name have a bucket and a name each."""
    decorate = limit("1/minute")
    app = gated(Starlette(routes=[Route("/a", st_async(decorate)), Route("/b", st_async(decorate))]))
    assert statuses(app, "/a", "/b") == [200, 200]
    assert policies(ask(app, "/a")) != policies(ask(app, "/b"))


MODULE = """
from limitgate import limit
@limit("1/minute")
async def index(request):
    from starlette.responses import PlainTextResponse
    return PlainTextResponse(__name__)
"""


def test_handlers_of_one_name_in_two_modules_do_not_share() -> None:
    """Two functions of one name in two modules have a bucket each, of different names that do not tell the modules."""
    modules = [types.ModuleType(name) for name in ("shop.cart", "shop.till")]
    for module in modules:
        exec(MODULE, module.__dict__)
    app = gated(Starlette(routes=[Route(f"/{module.__name__}", module.index) for module in modules]))
    assert statuses(app, "/shop.cart", "/shop.till") == [200, 200]
    names = [name for module in modules for name in policies(ask(app, f"/{module.__name__}"))]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"index-[0-9a-f]{6}(-\d+)?", name) for name in names)


def test_methods_of_two_classes_do_not_share() -> None:
    """``get`` of one class and ``get`` of another, and ``get`` and ``post`` of one, are different places."""

    class One(HTTPEndpoint):
        @limit("1/minute")
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

        @limit("1/minute")
        async def post(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    class Two(HTTPEndpoint):
        @limit("1/minute")
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

        async def put(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    app = gated(Starlette(routes=[Route("/1", One), Route("/2", Two)]))
    asked = [("/1", "GET"), ("/1", "POST"), ("/2", "GET"), ("/1", "GET"), ("/1", "POST"), ("/2", "GET"), ("/2", "PUT")]
    assert [ask(app, url, method=method).status for url, method in asked] == [200, 200, 200, 429, 429, 429, 200]


def test_long_names_stay_apart() -> None:
    """A place with a name too long for a rule gets a shorter one, still different from its neighbours'."""
    kinds = [type(f"{'Long' * 30}{n}", (st_class(lambda view: view),), {}) for n in range(2)]
    places = [limit("1/minute")(kind) for kind in kinds]
    app = gated(Starlette(routes=[Route(f"/{n}", place) for n, place in enumerate(places)]))
    statuses(app, "/0", "/1")
    names = [policies(ask(app, f"/{n}"))[0] for n in range(2)]
    assert len(set(names)) == 2
    assert all(len(name) <= 64 for name in names)


def test_places_of_one_given_name_share() -> None:
    """Places that are given the same name share a bucket, under that name."""
    decorate = limit("2/minute", name="exports")
    app = gated(
        Starlette(routes=[Route("/a", st_async(decorate)), Route("/b", st_class(decorate)), Route("/c", st_def(decorate))])
    )
    assert statuses(app, "/a", "/b", "/c", "/a") == [200, 200, 429, 429]
    assert policies(ask(app, "/c")) == ["exports"]


def test_the_name_of_a_rule_is_not_the_name_of_a_place() -> None:
    """A decorator that is given the name of a rule does not charge that rule's bucket."""
    app = gated(fl_function(limit("5/minute", name="api")), Rule("api", "5/minute"), headers=["draft-11"])
    assert [re.findall(r";r=(\d)", ask(app).rate["ratelimit"]) for _ in range(2)] == [["4", "4"], ["3", "3"]]


def test_one_function_on_two_routes_is_one_place() -> None:
    """A decorated function that is routed twice has one bucket."""
    view = st_async(limit("2/minute"))
    app = gated(Starlette(routes=[Route("/a", view), Mount("/m", routes=[Route("/b", view)])]))
    assert statuses(app, "/a", "/m/b", "/a", "/m/b") == [200, 200, 429, 429]


def test_one_function_limited_in_two_ways() -> None:
    """A function that is limited differently for different routes has each limit where it was put, and none elsewhere."""
    plain = st_async(lambda view: view)
    strict, loose = limit("1/minute")(plain), limit("2/minute")(plain)
    app = gated(Starlette(routes=[Route("/strict", strict), Route("/loose", loose), Route("/free", plain)]))
    assert statuses(app, *["/strict", "/loose", "/free"] * 3) == [200, 200, 200, 429, 200, 200, 429, 429, 200]


def test_a_limited_version_that_is_not_routed_changes_nothing() -> None:
    """Of two limited versions of a function only the routed one counts, and it is the one that was routed."""
    plain = st_async(lambda view: view)
    limit("1/minute")(plain)
    routed_one = limit("2/minute")(plain)
    limit("3/minute")(plain)
    assert statuses(gated(Starlette(routes=[Route("/x", routed_one)])), "/x", "/x", "/x") == [200, 200, 429]


def test_one_function_limited_in_two_ways_in_two_apps() -> None:
    """The same, where the routes are in different applications that know nothing of each other."""
    plain = st_async(lambda view: view)
    apps = [gated(Starlette(routes=[Route("/x", limit(rate)(plain))])) for rate in ("1/minute", "2/minute")]
    assert [statuses(app, "/x", "/x", "/x") for app in apps] == [[200, 429, 429], [200, 200, 429]]


def test_one_function_limited_in_two_ways_in_two_mounts() -> None:
    """The same, where the routes are in different mounts of one application."""
    plain = st_async(lambda view: view)
    mounts = [Mount(f"/{n}", routes=[Route("/x", limit(f"{n}/minute")(plain))]) for n in (1, 2)]
    app = gated(Starlette(routes=mounts))
    assert statuses(app, "/1/x", "/1/x", "/2/x", "/2/x", "/2/x") == [200, 429, 200, 200, 429]


@pytest.mark.parametrize("free_first", [False, True])
def test_a_function_limited_in_one_place_is_free_in_another(*, free_first: bool) -> None:
    """A handler that is routed as it is stays without a limit, though a limited version of it is routed elsewhere."""
    plain = st_async(lambda view: view)
    routes = [Route("/limited", limit("1/minute")(plain)), Mount("/m", routes=[Route("/free", plain)]), Route("/too", plain)]
    app = gated(Starlette(routes=routes[::-1] if free_first else routes))
    assert statuses(app, *["/m/free", "/too", "/limited"] * 2) == [200, 200, 200, 200, 200, 429]


def test_a_view_limited_in_one_place_is_free_in_another() -> None:
    """The same in Flask."""
    plain = Greet.as_view("greet")
    app = with_view(plain, "/free", endpoint="free")
    app.add_url_rule("/limited", view_func=limit("1/minute")(plain), endpoint="limited")
    assert statuses(gated(app), *["/free", "/limited"] * 2) == [200, 200, 200, 429]


def test_one_function_limited_in_two_ways_in_flask() -> None:
    """The same in Flask, with and without the other in the same application."""
    plain = Greet.as_view("greet")
    strict, loose = limit("1/minute")(plain), limit("2/minute")(plain)
    both = with_view(strict, "/strict", endpoint="strict")
    both.add_url_rule("/loose", view_func=loose, endpoint="loose")
    assert statuses(gated(both), "/strict", "/strict", "/loose", "/loose", "/loose") == [200, 429, 200, 200, 429]
    assert statuses(gated(with_view(loose, "/loose")), "/loose", "/loose", "/loose") == [200, 200, 429]


# --- exempt here, limited there ---------------------------------------------------------------------------------------

ALL = Rule("all", "1/day")


class Handler:
    """A callable object, as ASGI applications may be."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(HELLO)(scope, receive, send)

    async def view(self, request: Any) -> Any:
        return PlainTextResponse(HELLO)


@pytest.mark.parametrize(
    "view",
    [
        st_async(lambda view: view),
        st_def(lambda view: view),
        st_class(lambda view: view),
        Handler(),
        Handler().view,
        functools.partial(st_async(lambda view: view)),
        st_async(limit("9/minute")),
    ],
    ids=["async", "def", "class", "callable", "bound method", "partial", "limited"],
)
@pytest.mark.parametrize("exempt_first", [False, True])
def test_exempt_holds_for_the_route_that_has_it(view: Any, *, exempt_first: bool) -> None:
    """``exempt(view)`` on one route leaves the limits on for other routes of the same view."""
    routes = [Route("/free", exempt(view)), Mount("/m", routes=[Route("/limited", view)]), Route("/too", view)]
    app = gated(Starlette(routes=routes if exempt_first else routes[::-1]), ALL)
    assert statuses(app, *["/free", "/m/limited", "/too"] * 2) == [200, 200, 429, 200, 429, 429]


def test_exempt_holds_for_the_application_that_has_it() -> None:
    """A view that another application exempts is limited here, also before that application was ever asked."""
    plain = st_async(lambda view: view)
    elsewhere = Starlette(routes=[Route("/x", exempt(plain))])
    assert statuses(gated(Starlette(routes=[Route("/x", plain)]), ALL), "/x", "/x") == [200, 429]
    assert statuses(gated(elsewhere, ALL), "/x", "/x") == [200, 200]


def test_exempt_holds_for_the_route_that_has_it_in_flask() -> None:
    """The same in Flask, and where another decorator is around."""
    plain = Greet.as_view("greet")
    app = with_view(plain, "/limited", endpoint="limited")
    app.add_url_rule("/free", view_func=exempt(plain), endpoint="free")
    app.add_url_rule("/wrapped", view_func=functools.wraps(plain)(exempt(plain)), endpoint="wrapped")
    assert statuses(gated(app, ALL), *["/free", "/wrapped", "/limited"] * 2) == [200, 200, 200, 200, 200, 429]


@pytest.mark.parametrize(
    "own", [lambda view: view, limit("9/minute"), limit("9/minute", name="own")], ids=["no", "yes", "named"]
)
def test_subclasses_of_an_exempt_class_are_limited(own: Decorate) -> None:
    """``@exempt`` on a class is for this class: classes made from it are limited, by limits of their own and by rules."""

    @exempt
    class Health(HTTPEndpoint):
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

    @own
    class Report(Health):
        async def get(self, request: Any) -> Any:
            return await super().get(request)

    app = gated(Starlette(routes=[Route("/health", Health), Route("/report", Report)]), ALL)
    assert statuses(app, *["/health", "/report"] * 2) == [200, 200, 200, 429]


def module(source: str, monkeypatch: pytest.MonkeyPatch, **known: Any) -> Any:
    """A module of this source, which knows ``exempt``, ``limit`` and these objects by their names."""
    made = types.ModuleType("shop")
    vars(made).update(exempt=exempt, limit=limit, **known)
    monkeypatch.setitem(sys.modules, "shop", made)
    exec(textwrap.dedent(source), vars(made))
    return made


def test_exempt_above_the_route_of_a_module_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can have the function then. One that is defined in a function may be routed elsewhere, too."""
    app = fastapi.FastAPI()
    source = """
        @exempt
        @app.get("/x")
        async def view():
            return "hello"
    """
    module(source, monkeypatch, app=app)
    assert statuses(gated(app, ALL), "/x", "/x") == [200, 200]
    assert statuses(gated(fa_above(exempt), ALL), "/limited", "/limited") == [200, 429]


def test_subclasses_of_an_exempt_class_are_limited_in_flask() -> None:
    """The same in Flask."""

    @exempt
    class Health(Greet):
        pass

    class Report(Health):
        pass

    app = with_view(Health.as_view("health"), "/health")
    app.add_url_rule("/report", view_func=Report.as_view("report"))
    assert statuses(gated(app, ALL), *["/health", "/report"] * 2) == [200, 200, 200, 429]


def upper_route(app: Any) -> Decorate:
    """A route decorator; Flask takes one view of a name."""
    return app.get("/upper", endpoint="upper") if isinstance(app, flask.Flask) else app.get("/upper")


def wrapped(view: Any) -> Any:
    """The view with another decorator around it."""

    @functools.wraps(view)
    def around() -> Any:
        return view()

    return around


FRAMEWORKS = pytest.mark.parametrize("framework", [fastapi.FastAPI, lambda: flask.Flask("two")], ids=["fastapi", "flask"])


@pytest.mark.parametrize("around", [lambda view: view, wrapped], ids=["bare", "wrapped"])
@FRAMEWORKS
def test_exempt_between_two_routes(framework: Callable[[], Any], around: Decorate) -> None:
    """Between two route decorators ``@exempt`` is for the upper route, which is routed as exempt, and not for the lower one."""
    app = framework()

    @upper_route(app)
    @around
    @exempt
    @app.get("/lower")
    def view() -> str:
        return "hello"

    assert statuses(gated(app, ALL), *["/upper", "/lower"] * 2) == [200, 200, 200, 429]


# --- a limit between two route decorators -----------------------------------------------------------------------------


def own_decorator(view: Any) -> Any:
    """A limit with a name of the application's own."""
    return limit("2/minute")(view)


BETWEEN = """
    @upper
    @between
    @app.get("/lower")
    def view():
        return "hello"
"""


@pytest.mark.parametrize("between", [limit("2/minute"), own_decorator], ids=["limit", "own"])
@FRAMEWORKS
def test_a_limit_between_two_routes_of_a_module_limits_both(
    framework: Callable[[], Any], between: Decorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else can have the function then."""
    app = framework()
    module(BETWEEN, monkeypatch, app=app, upper=upper_route(app), between=between)
    assert statuses(gated(app), *["/upper", "/lower"] * 2) == [200, 200, 429, 429]


def test_limits_between_three_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is for all routes below it: the lowest route has every limit of the stack."""
    app = fastapi.FastAPI()
    source = """
        @app.get("/a")
        @limit("3/minute", name="upper")
        @app.get("/b")
        @limit("2/minute", name="lower")
        @app.get("/c")
        def view():
            return "hello"
    """
    module(source, monkeypatch, app=app)
    asked = gated(app, headers=["draft-11"])
    found = [re.findall('"(.+?)"', ask(asked, url).rate["ratelimit"]) for url in ("/a", "/b", "/c")]
    assert list(map(sorted, found)) == [["lower", "upper"]] * 3


def test_a_limit_between_two_routes_of_a_function_limits_the_upper_one() -> None:
    """The function may be meant for the lower route as it is."""
    app = fastapi.FastAPI()

    @app.get("/upper")
    @limit("1/minute")
    @app.get("/lower")
    def view() -> str:
        return "hello"

    assert statuses(gated(app), *["/upper", "/lower"] * 2) == [200, 200, 429, 200]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [fa_convertor, fl_method], ids=lambda build: build.__name__)
def test_methods(build: Callable[[Decorate], Any]) -> None:
    """With ``methods=`` only those are limited; the others pass, and are not taken for unseen."""
    app = gated(build(limit("1/minute", methods=["POST"])))
    url = "/limited/1/a" if build is fa_convertor else "/limited"
    assert statuses(app, url, url, url) == [200, 200, 200]
    if build is fa_convertor:
        assert [ask(app, url, method="POST").status for _ in range(2)] == [200, 429]


def test_head_is_a_get() -> None:
    """HEAD of a place counts as its GET."""
    for app in (gated(routed(st_method)(limit("2/minute"))), gated(fl_method(limit("2/minute")))):
        assert [ask(app, method=method).status for method in ("HEAD", "GET", "HEAD")] == [200, 200, 429]


def test_a_head_method_of_its_own() -> None:
    """A class that answers HEAD by a method of its own has that method's limit there."""

    class Starlet(HTTPEndpoint):
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

        @limit("1/minute")
        async def head(self, request: Any) -> Any:
            return PlainTextResponse(b"")

    class Flasket(flask.views.MethodView):
        def get(self) -> Any:
            return HELLO

        @limit("1/minute")
        def head(self) -> Any:
            return b""

    for app in (Starlette(routes=[Route("/limited", Starlet)]), with_view(Flasket.as_view("it"))):
        assert [ask(gated_app, method="HEAD").status for gated_app in [gated(app)] for _ in range(2)] == [200, 429]


def test_options_are_answered_by_flask_itself() -> None:
    """Flask's own answer to OPTIONS does not run the view, and a preflight is not counted."""
    app = gated(fl_function(limit("1/minute")))
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
    assert [ask(app, method="OPTIONS", headers=preflight).status for _ in range(3)] == [200, 200, 200]
    assert statuses(app, "/limited", "/limited") == [200, 429]


def test_a_method_the_router_refuses_costs_nothing() -> None:
    """A 405 never reaches the handler, and is not charged to its decorator."""
    for app in (
        gated(routed(st_async)(limit("1/minute"))),
        gated(fa_async(limit("1/minute"))),
        gated(fl_function(limit("1/minute"))),
    ):
        assert [ask(app, method="DELETE").status for _ in range(2)] == [405, 405]
        assert statuses(app, "/limited", "/limited") == [200, 429]


def test_cost_key_and_shadow() -> None:
    """A decorator takes what a rule takes: cost, key, on_error and shadow."""
    costly = limit("5/minute", key=["header:x-who"], cost=lambda request: int(request.headers.get("x-cost", "1")))
    app = gated(routed(st_async)(costly))
    asked = [{"X-Who": "a", "X-Cost": "4"}, {"X-Who": "a", "X-Cost": "2"}, {"X-Who": "b", "X-Cost": "5"}, {"X-Who": "a"}]
    assert [ask(app, headers=headers).status for headers in asked] == [200, 429, 200, 200]
    shady = gated(fl_function(limit("1/minute", shadow=True)))
    assert statuses(shady, "/limited", "/limited") == [200, 200]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: limit()(st_async(lambda view: view)), "no limit"),
        (lambda: limit("often")(st_async(lambda view: view)), "often"),
        (lambda: limit("1/minute", key=["shoe"])(st_async(lambda view: view)), "shoe"),
        (lambda: limit("1/minute", name="no spaces")(st_async(lambda view: view)), "name"),
        (lambda: limit("1/minute", name="")(st_async(lambda view: view)), "name"),
        (lambda: limit("1/minute", cost=2)(st_async(lambda view: view)), "cost"),
        (lambda: limit("1/minute", on_error="maybe")(st_async(lambda view: view)), "on_error"),
        (lambda: limit("1/minute")(Greeting), "Greeting"),
        (lambda: limit("1/minute", name="x")(limit("2/minute", name="x")(st_async(lambda view: view))), "twice"),
    ],
)
def test_mistakes_are_told_where_they_are_made(make: Callable[[], Any], message: str) -> None:
    """A limit that makes no sense raises ConfigError when the handler is defined."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_decorated_dependency_never_runs_unlimited() -> None:
    """A dependency is no route, so a limit on one cannot be weighed: it raises, and does not pass in silence."""

    @limit("1/minute")
    async def dependency() -> str:
        return "resource"

    app = fastapi.FastAPI(dependencies=[fastapi.Depends(dependency)])
    app.add_api_route("/limited", _fastapi_view(lambda view: view))
    with pytest.raises(ConfigError):
        ask(gated(app))


def test_decorated_functions_keep_their_looks() -> None:
    """Name, documentation and signature of a decorated handler are its own: FastAPI's schema differs by the 429 only."""
    schema = fa_dependencies(limit("1/minute")).openapi()
    plain = fa_dependencies(lambda view: view).openapi()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("429", None)
    schema["components"]["schemas"].pop("LimitGateProblem", None)
    assert schema == plain
    assert st_async(limit("1/minute")).__name__ == "view"


# --- the path in a key ------------------------------------------------------------------------------------------------


def by_path(app: Any) -> Any:
    return gated(app, Rule("each", "1/minute", key=["path"]))


def fa_two_templates() -> Any:
    app, router = fastapi.FastAPI(), fastapi.APIRouter()
    for letter in "ab":
        router.add_api_route(f"/{letter}/{{id}}", _fastapi_view(lambda view: view))
    app.include_router(router, prefix="/api")
    app.mount("/m", fastapi.FastAPI(routes=list(router.routes)))
    return app


def st_two_templates() -> Any:
    routes = [Route(f"/{letter}/{{id:int}}", st_async(lambda view: view)) for letter in "ab"]
    return Starlette(routes=[Mount("/api", routes=routes), Mount("/m", app=Starlette(routes=routes))])


def fl_two_templates() -> Any:
    sub = with_view(Greet.as_view("a"), "/a/<int:id>")
    sub.view_functions["a"] = sub.view_functions["b"] = lambda id: HELLO  # noqa: A006, ARG005
    sub.add_url_rule("/b/<int:id>", endpoint="b")
    return DispatcherMiddleware(flask_app("other"), {"/api": sub, "/m": sub})


@pytest.mark.parametrize("build", [fa_two_templates, st_two_templates, fl_two_templates], ids=lambda build: build.__name__)
def test_the_path_of_a_key_is_the_template(build: Callable[[], Any]) -> None:
    """However many ids, one template is one bucket; another template, or the same one mounted elsewhere, is another."""
    app = by_path(build())
    assert statuses(app, *[f"/api/a/{number}" for number in range(20)]) == [200] + [429] * 19
    assert statuses(app, "/api/b/1", "/api/b/2") == [200, 429]
    assert statuses(app, "/m/a/1", "/m/a/2") == [200, 429]


@pytest.mark.parametrize("build", [fa_two_templates, st_two_templates, fl_two_templates], ids=lambda build: build.__name__)
def test_paths_without_a_route_are_one(build: Callable[[], Any]) -> None:
    """What the framework does not know goes by the rule's own pattern, so inventing paths opens no bucket."""
    app = by_path(build())
    assert statuses(app, *[f"/nowhere/{number}" for number in range(5)]) == [404] + [429] * 4


def test_a_method_that_a_route_refuses_goes_by_its_template() -> None:
    """What Starlette will answer with 405 is counted with the route that it names."""
    app = by_path(st_two_templates())
    assert [ask(app, f"/api/a/{number}", method="PUT").status for number in range(2)] == [405, 429]
    assert statuses(app, "/api/a/3", "/api/b/3", "/nowhere") == [429, 200, 404]


def st_in_itself(decorate: Decorate) -> Any:
    app = Starlette(routes=[Route("/limited/{id}", st_async(decorate))])
    app.mount("/again", app)
    return app


def st_in_one_another(decorate: Decorate) -> Any:
    app, other = Starlette(routes=[Route("/limited/{id}", st_async(decorate))]), Starlette()
    app.mount("/again", GZipMiddleware(other))
    other.mount("/", app)
    return app


def st_router_in_itself(decorate: Decorate) -> Any:
    router = Router(routes=[Route("/limited/{id}", st_async(decorate))])
    router.mount("/{again}", router)
    return Starlette(routes=[Mount("/", router)])


def fa_in_itself(decorate: Decorate) -> Any:
    app, router = fastapi.FastAPI(), fastapi.APIRouter()
    router.get("/limited/{id}")(_fastapi_view(decorate))
    app.include_router(router)
    app.mount("/again", app)
    return app


def fl_in_itself(decorate: Decorate) -> Any:
    app = flask_app()
    app.add_url_rule("/limited/<int:id>", view_func=decorate(lambda id: HELLO), endpoint="limited")  # noqa: A006, ARG005
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/again": ProxyFix(app)})
    return app


def fl_dispatcher_in_itself(decorate: Decorate) -> Any:
    app = flask_app()
    app.add_url_rule("/limited/<int:id>", view_func=decorate(lambda id: HELLO), endpoint="limited")  # noqa: A006, ARG005
    dispatcher = DispatcherMiddleware(app, {})
    dispatcher.mounts["/again"] = dispatcher
    return dispatcher


IN_ITSELF = [st_in_itself, st_in_one_another, st_router_in_itself, fa_in_itself, fl_in_itself, fl_dispatcher_in_itself]


@pytest.mark.parametrize("build", IN_ITSELF, ids=lambda build: build.__name__)
def test_an_application_mounted_in_itself_is_limited_at_every_depth(build: Callable[[Decorate], Any]) -> None:
    """However deep a client goes, a decorated place is the same place, and its path the same template."""
    deep = [f"{'/again' * depth}/limited/{depth}" for depth in (0, 1, 2, 3, 20)]
    assert statuses(gated(build(limit("4/minute"))), *deep) == [200] * 4 + [429]
    assert statuses(gated(build(limit("4/minute", key=["path"]))), *deep) == [200] * 4 + [429]
    assert statuses(gated(build(lambda view: view), Rule("each", "4/minute", key=["path"])), *deep) == [200] * 4 + [429]
    assert statuses(gated(build(exempt), Rule("all", "1/minute")), *deep) == [200] * 5


@pytest.mark.parametrize("build", IN_ITSELF, ids=lambda build: build.__name__)
def test_an_application_mounted_in_itself_has_few_templates(build: Callable[[Decorate], Any]) -> None:
    """What no route is for at any depth is one, and opens no bucket for each depth."""
    gate = gated(build(lambda view: view), Rule("each", "1/minute", key=["path"]))
    replies = statuses(gate, *[f"{'/again' * depth}/nowhere" for depth in range(20)])
    assert replies.count(429) >= 18


@pytest.mark.parametrize("build", [fa_in_itself, fl_in_itself], ids=lambda build: build.__name__)
def test_a_gate_in_an_application_mounted_in_itself(build: Callable[[Decorate], Any]) -> None:
    """It is passed at each depth and charges its rules each time, a place once; the response has each field once."""
    app = build(limit("9/minute", name="place"))
    options: dict[str, Any] = {"rules": [Rule("all", "9/minute")], "store": MemoryStore(Clock()), "headers": ["draft-11"]}
    if isinstance(app, flask.Flask):
        app.wsgi_app = LimitGateWSGI(app.wsgi_app, **options)
    else:
        app.add_middleware(LimitGate, **options)
    told = [ask(app, f"{'/again' * depth}/limited/1").rate["ratelimit"] for depth in (0, 1, 2)]
    assert told == [
        '"all";r=8;t=7, "place";r=8;t=7',
        '"all";r=6;t=20, "place";r=7;t=14',
        '"all";r=3;t=40, "place";r=6;t=20',
    ]


def test_a_depth_that_no_router_reaches_is_refused_like_any_other() -> None:
    """A path of thousands of mounts takes no longer than the router needs to give up, and is charged."""
    gate = gated(fa_in_itself(limit("9/minute")), Rule("all", "1/minute"))
    with pytest.raises(RecursionError):
        ask(gate, "/again" * 10_000 + "/limited/1")
    assert statuses(gate, "/limited/1") == [429]


def test_a_template_goes_back_to_where_the_request_came_by() -> None:
    """Two applications that are mounted in one another: each place has the template of the shortest way to it."""
    one, two = Starlette(), Starlette()
    for app in (one, two):
        app.add_route("/x", st_async(lambda view: view))
    one.mount("/two", two)
    two.mount("/one", one)
    routes = gated(Starlette(routes=[Mount("/in", one)])).gate.rules.planner._routes
    asked = ["/x", "/two/x", "/two/one/x", "/two/one/two/x", "/two/one/nowhere", "/two/one/two/one/two/nowhere"]
    found = [routes.find(_request(f"/in{url}")).template for url in asked]
    assert found == ["/in/x", "/in/two/x", "/in/x", "/in/two/x", "/in/**", "/in/two/**"]


@pytest.mark.parametrize("replaced", [False, True])
def test_routes_that_come_later_to_an_application_mounted_in_itself(*, replaced: bool) -> None:
    """The lists of routes are compared each once, though they lead to themselves."""
    app = st_in_itself(limit("9/minute"))
    gate = gated(app)
    assert statuses(gate, "/again/again/limited/1", "/again/late") == [200, 404]
    routes = [*app.routes, Route("/late", st_async(limit("1/minute")))]
    app.routes[:] = routes[-1:] if replaced else routes
    assert statuses(gate, "/late", "/late") == [200, 429]
    assert statuses(gate, "/again/again/late") == [404 if replaced else 429]


class OnItsOwn:
    """A WSGI application of no framework, as the tutorial of Werkzeug makes one."""

    url_map = None

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        return self.wsgi_app(environ, start_response)

    def wsgi_app(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [HELLO]


@pytest.mark.parametrize("around", [lambda app: app, ProxyFix])
def test_application_mounted_behind_itself_is_served(around: Callable[[Any], Any]) -> None:
    """Where ``wsgi_app`` is a method of the application, or middleware around that, the search for routes ends."""
    app: Any = OnItsOwn()
    if around is ProxyFix:
        app.wsgi_app = ProxyFix(app.wsgi_app)
    gate = LimitGateWSGI(app, rules=[Rule("all", "1/minute")], store=MemoryStore(Clock()))
    assert statuses(gate, "/", "/") == [200, 429]


def test_what_is_around_a_flask_application_is_seen_from_outside() -> None:
    """A gate around a Flask application knows of what was mounted by its ``wsgi_app``."""
    app = flask_app()
    app.wsgi_app = ProxyFix(DispatcherMiddleware(app.wsgi_app, {"/a": fl_function(limit("1/minute"))}))
    assert statuses(gated(app), "/a/limited", "/a/limited") == [200, 429]


def test_without_a_known_framework_the_path_is_the_pattern() -> None:
    """Behind a plain application ``path`` is the rule's pattern, never the path that was sent."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(HELLO)(scope, receive, send)

    one = gated(app, Rule("each", "1/minute", path="/items/{id}", key=["path"]))
    assert statuses(one, "/items/1", "/items/2", "/free", "/free") == [200, 429, 200, 200]


def test_the_path_of_a_decorators_key() -> None:
    """A decorator's ``path`` tells the routes of one handler apart, by template."""
    view = st_async(limit("1/minute", key=["path"]))
    app = gated(Starlette(routes=[Route("/a/{id}", view), Route("/b/{id}", view)]))
    assert statuses(app, "/a/1", "/a/2", "/b/1", "/b/2") == [200, 429, 200, 429]


# --- the body ---------------------------------------------------------------------------------------------------------


def st_reader(decorate: Decorate) -> Any:
    @decorate
    async def view(request: Any) -> Any:
        return PlainTextResponse(await request.body())

    return Starlette(routes=[Route("/limited", view, methods=["POST"])])


def fa_reader(decorate: Decorate) -> Any:
    app = fastapi.FastAPI()

    @app.post("/limited")
    @decorate
    async def view(greeting: Greeting) -> str:
        return greeting.words

    return app


@pytest.mark.parametrize("build", [st_reader, fa_reader], ids=lambda build: build.__name__)
def test_the_body_of_a_refused_request_is_not_read(build: Callable[[Decorate], Any]) -> None:
    """A decorated handler that wants the body is refused before anything is received, on a malformed one just the same."""
    app = gated(build(limit("1/minute")))
    headers = {"Content-Type": "application/json"}
    assert ask(app, method="POST", headers=headers, body=b'{"words": "hello"}').status == 200
    wire = Wire()
    asyncio.run(wire.call(app, http_scope("/limited", "POST", headers)))
    assert (wire.reply().status, wire.received) == (429, 0)


def test_a_malformed_body_counts() -> None:
    """A request that FastAPI will turn down for its body is charged like any other."""
    app = gated(fa_reader(limit("1/minute")))
    headers = {"Content-Type": "application/json"}
    assert [ask(app, method="POST", headers=headers, body=b"{nonsense").status for _ in range(2)] == [422, 429]


def test_flask_does_not_read_the_body_of_a_refused_request() -> None:
    """The same in Flask, where finding the route must not touch ``wsgi.input`` either."""

    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of wsgi.input was asked for")

    app = flask_app()
    app.add_url_rule("/limited", view_func=limit("1/minute")(lambda: flask.request.data), methods=["POST"], endpoint="it")
    gate = gated(app)
    assert run_wsgi(gate, wsgi_environ("/limited", "POST", body=b"hello")).body == HELLO
    environ = {**wsgi_environ("/limited", "POST", headers={"Content-Length": "9"}), "wsgi.input": Untouched()}
    started: list[Any] = []
    list(gate(environ, lambda *args: started.append(args)))
    assert started[0][0] == "429 Too Many Requests"


def test_flask_route_lookup_leaves_no_context() -> None:
    """Looking for the view puts nothing into the server's environ, where decision, exchange and outcome are."""
    app = gated(fl_function(limit("1/minute")))
    ask(app)
    environ = wsgi_environ("/limited")
    before = set(environ)
    list(app(environ, lambda *_: None))
    assert not environ["limitgate"].allowed
    ours = {"limitgate", "limitgate.exchange", "limitgate.outcome", "limitgate.refusal_id"}
    assert set(environ) - before == ours


# --- spellings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", ["/limited%0a", "/limited", "/l%69mited", "/limited?x", "//limited", "/limited/", "/limited;x"]
)
@pytest.mark.parametrize("build", [fa_async, routed(st_async), fl_function], ids=["fastapi", "starlette", "flask"])
def test_path_in_every_spelling_that_reaches_the_handler_is_limited(build: Callable[[Decorate], Any], spelling: str) -> None:
    """However a path is spelled, what the framework's router takes to the handler has been counted."""
    app = gated(build(limit("1/minute")))
    assert ask(app).status == 200
    reply = ask(app, spelling)
    assert HELLO not in reply.body
    assert reply.status in (429, 404, 307, 308)


def test_a_url_that_httpx_encodes() -> None:
    """The same through httpx, which percent-encodes a newline by itself."""
    app = gated(fa_async(limit("1/minute")))
    urls = ["/limited", "/limited%0a", "/limited%0A"]
    assert [asyncio.run(asgi_through_httpx(app, url)).status for url in urls] == [200, 429, 429]


# --- many routes, late routes, hostile paths --------------------------------------------------------------------------


class CountingRoute(Route):
    asked = 0

    def matches(self, scope: Any) -> Any:
        CountingRoute.asked += 1
        return super().matches(scope)


@pytest.mark.parametrize("url", ["/r499/x", "/r0/x", "/nowhere/x", "/deep/9/tail"])
def test_finding_a_route_among_many_asks_few(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """With 500 routes the gate asks a handful of them whether they match, where the router tries them in order."""
    view = st_async(limit("99/minute"))
    routes = [CountingRoute(f"/r{number}/{{id}}", view) for number in range(500)]
    routes += [CountingRoute("/deep/{n:int}/tail", view), CountingRoute("/deep/{rest:path}", view)]
    gate = gated(Starlette(routes=routes))
    ask(gate, url)
    monkeypatch.setattr(CountingRoute, "asked", 0)
    gate.gate.rules.planner._routes.find(_request(url))
    assert CountingRoute.asked <= 2


def test_finding_an_included_route_among_many_asks_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with FastAPI's routes, in routers that are included in one another."""
    needs("fastapi", "0.137.2")
    asked = []

    class CountingAPIRoute(fastapi.routing.APIRoute):
        pass

    app, outer = fastapi.FastAPI(), fastapi.APIRouter(route_class=CountingAPIRoute)
    for part in range(10):
        inner = fastapi.APIRouter(route_class=CountingAPIRoute)
        for number in range(50):
            inner.add_api_route(f"/r{number}/{{id}}", _fastapi_view(limit("99/minute")))
        outer.include_router(inner, prefix=f"/part{part}")
    app.include_router(outer, prefix="/api")
    gate = gated(app)
    assert ask(gate, "/api/part9/r49/x").status == 200
    contexts = fastapi.routing._EffectiveRouteContext
    monkeypatch.setattr(contexts, "matches", _recording(contexts.matches, asked))
    route = gate.gate.rules.planner._routes.find(_request("/api/part9/r49/x"))
    assert route.template == "/api/part9/r49/{id}"
    assert len(asked) <= 2


@pytest.mark.parametrize("name", ["fa_websocket", "fa_starlette_route_included", "fa_mount_in_included", "fa_included_twice"])
def test_included_routes_are_known_as_before_fastapi_0_143(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where the context of an included route that is not FastAPI's own has neither path nor endpoint, its limit holds."""
    needs("fastapi", "0.137.2")

    def effective_route(context: Any) -> Any:
        return context._route_context or context.route

    monkeypatch.setattr(fastapi.routing.RouteContext, "_effective_route", property(effective_route))
    place = PLACES[name]
    app = place.gated(limit("1/minute"))
    assert place.passes(place.ask(app))
    assert not place.passes(place.ask(app))


def _recording(function: Any, calls: list[Any]) -> Any:
    @functools.wraps(function)
    def recorded(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return recorded


def _request(url: str) -> Any:
    from limitgate.http.request import ASGIRequest

    return ASGIRequest(http_scope(url))


def test_without_decorators_and_path_keys_no_route_is_looked_for() -> None:
    """Where neither a key nor a decorator needs the route, the router's price is not paid twice."""
    routes = [CountingRoute(f"/r{number}", st_async(lambda view: view)) for number in range(50)]
    before = CountingRoute.asked
    assert ask(gated(Starlette(routes=routes), Rule("all", "9/minute")), "/r49").status == 200
    assert CountingRoute.asked - before == 50


def late_starlette() -> tuple[Any, Callable[[str, Any], None]]:
    app = Starlette()
    return app, lambda path, view: app.routes.append(Route(path, view))


def late_mount() -> tuple[Any, Callable[[str, Any], None]]:
    sub = Starlette()
    return Starlette(routes=[Mount("/sub", app=sub)]), lambda path, view: sub.routes.append(Route(path, view))


def late_fastapi() -> tuple[Any, Callable[[str, Any], None]]:
    app = fastapi.FastAPI()
    return app, app.add_api_route


def late_included() -> tuple[Any, Callable[[str, Any], None]]:
    needs("fastapi", "0.137.2")
    app, router = fastapi.FastAPI(), fastapi.APIRouter()
    app.include_router(router, prefix="/sub")
    return app, router.add_api_route


def late_instead() -> tuple[Any, Callable[[str, Any], None]]:
    app = Starlette(routes=[Route("/old", st_async(lambda view: view))])

    def put(path: str, view: Any) -> None:
        app.router.routes[:] = [Route(path, view)]

    return app, put


def test_a_list_of_routes_that_takes_the_place_of_another_is_seen() -> None:
    """An application may be given a new list of routes while it serves."""
    app, _ = late_starlette()
    gate = gated(app, Rule("all", "9/minute"))
    ask(gate, "/early")
    app.router.routes = [Route("/late", _fastapi_view(limit("1/minute")))]
    assert statuses(gate, "/late", "/late") == [200, 429]


@pytest.mark.parametrize(
    ("late", "prefix"),
    [(late_starlette, ""), (late_mount, "/sub"), (late_fastapi, ""), (late_included, "/sub"), (late_instead, "")],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("already_decorated", [False, True])
def test_routes_added_after_the_first_request_are_seen(late: Any, prefix: str, *, already_decorated: bool) -> None:
    """A decorated route that comes while the application serves is limited, and its path is known to keys."""
    app, add = late()
    if already_decorated and late is not late_instead:
        add("/early", _fastapi_view(limit("9/minute")))
    gate = gated(app, Rule("each", "2/minute", path="/**", key=["path"]))
    ask(gate, f"{prefix}/early")
    add("/late/{id}", _fastapi_view(limit("1/minute")))
    assert statuses(gate, f"{prefix}/late/1", f"{prefix}/late/2") == [200, 429]
    add("/later/{id}", _fastapi_view(lambda view: view))
    assert statuses(gate, *[f"{prefix}/later/{number}" for number in range(3)]) == [200, 200, 429]


def _fastapi_view(decorate: Decorate) -> Any:
    @decorate
    async def view(request: fastapi.Request) -> fastapi.Response:
        return PlainTextResponse(HELLO)

    return view


def test_a_view_replaced_in_flask_is_seen() -> None:
    """A view that is limited after the first request, by putting another function in its place, is limited."""
    app = fl_function(lambda view: view)
    gate = gated(app)
    assert ask(gate).status == 200
    app.view_functions["view"] = limit("1/minute")(app.view_functions["view"])
    assert statuses(gate, "/limited", "/limited") == [200, 429]


def test_a_view_replaced_in_flask_while_requests_come_is_seen_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """All views are not looked at for each request; one that is added, or a URL rule of any, counts at once."""
    now = 100.0
    monkeypatch.setattr("limitgate.routes.flask.monotonic", lambda: now)
    app = fl_function(lambda view: view)
    gate = gated(app)
    assert statuses(gate, "/limited", "/limited") == [200, 200]
    app.view_functions["added"] = limit("1/minute")(lambda: HELLO)
    app.url_map.add(URLRule("/added", endpoint="added"))
    assert statuses(gate, "/added", "/added", "/again", "/limited") == [200, 429, 404, 200]
    app.url_map.add(URLRule("/again", endpoint="added"))
    assert statuses(gate, "/again") == [429]
    app.view_functions["view"] = limit("1/minute")(app.view_functions["view"])
    now += LOOK_EVERY
    assert statuses(gate, "/limited", "/limited") == [200, 429]


@pytest.mark.parametrize("build", [fa_included_twice, st_nested_mount, fl_nested_blueprints], ids=lambda build: build.__name__)
def test_route_lookup_with_hostile_paths_uses_bounded_memory(build: Callable[[Decorate], Any]) -> None:
    """Paths that were never asked for before take the memory of others once a few hundred have come, routed or not."""
    store = MemoryStore(Clock())
    gate = gated(build(limit("9/minute")), Rule("each", "5/minute", key=["path", "ip"]), store=store)
    prefix = {fa_included_twice: "/api/out/deep/in", st_nested_mount: "/a", fl_nested_blueprints: "/out/in/1"}[build]

    async def flood(start: int) -> None:
        for number in range(start, start + 120):
            for url in (f"{prefix}/x{number}", f"/nowhere/{number}/{number}", f"/{number}"):
                if is_wsgi(gate):
                    run_wsgi(gate, wsgi_environ(url))
                else:
                    await asgi_reply(gate, url)

    ours = [tracemalloc.Filter(inclusive=True, filename_pattern="*/limitgate/*", all_frames=False)]

    async def traced(start: int) -> tracemalloc.Snapshot:
        await flood(start)
        gc.collect()
        return tracemalloc.take_snapshot().filter_traces(ours)

    async def grown() -> list[int]:
        """Bytes in each round, until it is few: other threads of the process may keep something meanwhile."""
        await flood(10_000)
        tracemalloc.start()
        try:
            rounds, before = [], await traced(20_000)
            for start in (30_000, 40_000, 50_000):
                after = await traced(start)
                rounds.append(sum(change.size_diff for change in after.compare_to(before, "filename")))
                if rounds[-1] < 4096:
                    break
                before = after
        finally:
            tracemalloc.stop()
        return rounds

    rounds = asyncio.run(grown())
    assert min(rounds) < 4096, rounds
    assert len(store) <= 3


def test_one_name_on_a_class_and_on_its_method_is_a_mistake() -> None:
    """A class-based endpoint and its method cannot be charged twice to one bucket."""
    shared = limit("4/minute", name="shared")

    class View(HTTPEndpoint):
        @shared
        async def get(self, request: Any) -> Any:
            return PlainTextResponse("hello")

    with pytest.raises(ConfigError, match="twice"):
        shared(View)


@pytest.mark.parametrize("dispatcher", ["dispatch", "get"])
def test_one_name_twice_on_the_way_of_a_request_is_a_mistake(dispatcher: str) -> None:
    """Two limits of one name would be one bucket, charged twice: a class with one on dispatcher and method says so."""

    class View(HTTPEndpoint):
        @limit("4/hour", name="shared")
        async def get(self, request: Any) -> Any:
            return PlainTextResponse(HELLO)

        @limit("4/hour", name="shared" if dispatcher == "dispatch" else "own")
        async def dispatch(self) -> None:
            await super().dispatch()

    app = gated(Starlette(routes=[Route("/limited", View)]))
    if dispatcher == "get":
        assert ask(app).status == 200
    else:
        with pytest.raises(ConfigError, match="'shared' applies twice to one request"):
            ask(app)
