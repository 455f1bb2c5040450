"""Limits and exemptions that are not on the endpoint itself: on the method of an object, or below wrappers that hide them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI
from flask import Flask, url_for
from flask.views import MethodView
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint, WebSocketEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from limitgate import ConfigError, LimitGate, LimitGateWSGI, MemoryStore, Rule, exempt, limit
from tests.support.clock import Clock
from tests.support.django_app import WAYS, Project
from tests.support.doors import asgi_reply, handshake, wsgi_reply
from tests.support.versions import needs

Decorate = Callable[[Any], Any]
RULES = [Rule("all", "3/minute")]


def bare(view: Any) -> Any:
    """A decorator as people write it: without `functools.wraps`."""

    def wrapper(*args: Any) -> Any:
        return view(*args)

    return wrapper


def bare_async(view: Any) -> Any:
    async def wrapper(request: Request) -> Any:
        return await view(request)

    return wrapper


def named(view: Any) -> Any:
    @functools.wraps(view)
    def wrapper(*args: Any) -> Any:
        return view(*args)

    return wrapper


class Timed:
    """A decorator that is a class."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.times = 0

    def __call__(self, *args: Any) -> Any:
        self.times += 1
        return self.view(*args)


def below(wrapper: Decorate) -> Callable[[Decorate, Any], Any]:
    """Our decorator on the view, and this wrapper around it."""
    return lambda own, view: wrapper(own(view))


def as_object(own: Decorate, view: Any) -> Any:
    """Our decorator on the ``__call__`` of an object."""

    class Endpoint:
        @own
        def __call__(self, *args: Any) -> Any:
            return view(*args)

    return Endpoint()


def on_object(own: Decorate, view: Any) -> Any:
    """Our decorator on an object."""

    class Endpoint:
        def __call__(self, *args: Any) -> Any:
            return view(*args)

    return own(Endpoint())


KINDS: dict[str, Callable[[Decorate, Any], Any]] = {
    "object": as_object,
    "on an object": on_object,
    "object below a wrapper": lambda own, view: bare(as_object(own, view)),
    "wrapped object method": lambda own, view: as_object(lambda call: bare_method(own(call)), view),
    "bare wrapper": below(bare),
    "two bare wrappers": below(lambda view: bare(bare(view))),
    "named around bare": below(lambda view: named(bare(view))),
    "bare around named": below(lambda view: bare(named(view))),
    "class as a decorator": below(Timed),
    "partial": below(functools.partial),
    "on a partial": lambda own, view: own(functools.partial(view)),
    "partial below a wrapper": below(lambda view: bare(functools.partial(view))),
    "wrapper in a partial": below(lambda view: functools.partial(bare(view))),
    "bound method": lambda own, view: as_object(own, view).__call__,
}


def bare_method(method: Any) -> Any:
    def wrapper(self: Any, *args: Any) -> Any:
        return method(self, *args)

    return wrapper


def statuses(app: Any, path: str = "/", times: int = 4) -> list[int]:
    if isinstance(app, LimitGateWSGI):
        return [wsgi_reply(app, path).status for _ in range(times)]

    async def ask() -> list[int]:
        return [(await asgi_reply(app, path)).status for _ in range(times)]

    return asyncio.run(ask())


def flask(endpoint: Any) -> Any:
    app = Flask("app")
    app.add_url_rule("/", "view", endpoint)
    return LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock()))


def gated(app: Any) -> Any:
    return LimitGate(app, rules=RULES, store=MemoryStore(Clock()))


def fastapi(endpoint: Any) -> Any:
    app = FastAPI()
    app.add_api_route("/", endpoint)
    return gated(app)


def django(endpoint: Any) -> Project:
    from django.urls import path

    return WAYS["wsgi"].project(path("", endpoint), rules=RULES, store=MemoryStore(Clock()))


def flask_view(*_: Any) -> str:
    return "hello"


def request_view(*_: Any) -> Any:
    return PlainTextResponse("hello")


@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_flask_view_is_limited(kind: str) -> None:
    """The limit holds, and what is exempt is exempt."""
    assert statuses(flask(KINDS[kind](limit("1/minute"), flask_view))) == [200, 429, 429, 429]
    assert statuses(flask(KINDS[kind](exempt, flask_view))) == [200] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_django_view_is_limited(kind: str) -> None:
    """As Flask."""
    from django.http import HttpResponse

    def view(*_: Any) -> Any:
        return HttpResponse("hello")

    for own, expected in ((limit("1/minute"), [200, 429, 429, 429]), (exempt, [200] * 4)):
        with django(KINDS[kind](own, view)) as project:
            assert [project.ask("/").status_code for _ in range(4)] == expected


@pytest.fixture(params=["types", "names of types"])
def annotated(request: pytest.FixtureRequest) -> Decorate:
    """Gives a function the annotations that FastAPI is to read."""
    if request.param == "names of types":
        needs("fastapi", "0.123.7")  # earlier ones cannot read them on objects and partials

    def decorate(function: Any) -> Any:
        if request.param == "types":
            function.__annotations__ = get_type_hints(function)
        return function

    return decorate


@pytest.mark.parametrize("kind", ["object", "on an object", "partial", "on a partial", "bound method"])
def test_wrapped_fastapi_endpoint_is_limited(annotated: Decorate, kind: str) -> None:
    """Where FastAPI can read the signature, in threads."""

    class Free:
        @annotated
        def __call__(self, request: Request) -> str:
            return "hello"

    class Endpoint(Free):
        __call__ = limit("1/minute")(Free.__call__)

    @annotated
    def view(request: Request) -> str:
        return "hello"

    made = {"object": Endpoint(), "on an object": limit("1/minute")(Free()), "bound method": Endpoint().__call__}
    endpoint = made[kind] if kind in made else KINDS[kind](limit("1/minute"), view)
    assert statuses(fastapi(endpoint)) == [200, 429, 429, 429]


def test_fastapi_on_the_event_loop(annotated: Decorate) -> None:
    """An object that is called like an async function is awaited."""

    class Endpoint:
        @annotated
        async def __call__(self, request: Request) -> str:
            return "hello"

    class Limited(Endpoint):
        __call__ = limit("1/minute")(Endpoint.__call__)

    class Exempt(Endpoint):
        __call__ = exempt(Endpoint.__call__)

    assert statuses(fastapi(Limited())) == [200, 429, 429, 429]
    assert statuses(fastapi(limit("1/minute")(Endpoint()))) == [200, 429, 429, 429]
    assert statuses(fastapi(Exempt())) == [200] * 4
    assert statuses(fastapi(exempt(Endpoint()))) == [200] * 4
    assert statuses(fastapi(Endpoint())) == [200, 200, 200, 429]
    assert statuses(fastapi(bare_async(limit("1/minute")(Endpoint().__call__)))) == [200, 429, 429, 429]


class Application:
    """To Starlette, an endpoint that is an object is an ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("hello")(scope, receive, send)


class LimitedApplication(Application):
    @limit("1/minute")
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)


class ExemptApplication(Application):
    @exempt
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("routed", [lambda app: Route("/", app), lambda app: Mount("/", app)], ids=["route", "mount"])
def test_wrapped_starlette_endpoint_is_limited(routed: Callable[[Any], Any]) -> None:
    """As a route, and mounted."""

    def asked(app: Any) -> list[int]:
        return statuses(gated(Starlette(routes=[routed(app)])))

    assert asked(LimitedApplication()) == asked(limit("1/minute")(Application())) == [200, 429, 429, 429]
    assert asked(ExemptApplication()) == asked(exempt(Application())) == [200] * 4
    assert asked(Application()) == [200, 200, 200, 429]


@pytest.mark.parametrize("kind", ["bare wrapper", "two bare wrappers", "named around bare", "wrapper in a partial"])
def test_starlette_s_functions(kind: str) -> None:
    """Below wrappers."""
    assert statuses(gated(Starlette(routes=[Route("/", KINDS[kind](limit("1/minute"), request_view))]))) == [200, 429, 429, 429]
    assert statuses(gated(Starlette(routes=[Route("/", KINDS[kind](exempt, request_view))]))) == [200] * 4


def test_methods_of_classes_below_wrappers() -> None:
    """Those of Starlette's endpoints and Flask's views, whose other methods are free of it."""

    class Here(HTTPEndpoint):
        @bare_method
        @limit("1/minute")
        def get(self, request: Request) -> Any:
            return PlainTextResponse("hello")

        def post(self, request: Request) -> Any:
            return PlainTextResponse("hello")

    class There(MethodView):
        @bare_method
        @limit("1/minute")
        def get(self) -> str:
            return "hello"

    assert statuses(gated(Starlette(routes=[Route("/", Here)]))) == [200, 429, 429, 429]
    assert asyncio.run(asgi_reply(gated(Starlette(routes=[Route("/", Here)])), method="POST")).status == 200
    assert statuses(flask(There.as_view("there"))) == [200, 429, 429, 429]


def test_a_websocket_s_endpoint() -> None:
    """Each WebSocket comes by ``on_connect``."""

    class Chat(WebSocketEndpoint):
        @limit("1/minute")
        async def on_connect(self, websocket: Any) -> None:
            await websocket.accept()

    gate = gated(Starlette(routes=[WebSocketRoute("/", Chat)]))

    async def ask() -> list[int]:
        return [(await handshake(gate, "/")).status for _ in range(2)]

    assert asyncio.run(ask()) == [101, 429]


# --- what is no wrapper -----------------------------------------------------------------------------------------------


def test_a_view_that_mentions_another_one_is_none_of_it() -> None:
    """Views of an application factory see each other: nothing of one is for the other."""
    app = Flask("app")

    @app.get("/limited")
    @limit("1/minute")
    def limited() -> str:
        return "hello"

    @app.get("/free")
    @exempt
    def free() -> str:
        return "hello"

    @app.get("/")
    def index() -> str:
        return url_for(limited.__name__) + url_for(free.__name__)

    gate = LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock()))
    assert statuses(gate, "/") == [200, 200, 200, 429]
    assert statuses(gate, "/free") == [200] * 4


def otherwise(other: Any) -> Decorate:
    """A decorator with another view to fall back on."""

    def decorate(view: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            return view(*args) or other(*args)

        return wrapper

    return decorate


def test_one_of_several_views_exempts_nothing() -> None:
    """Any of them may run, so all limits hold, and the rules."""
    assert statuses(flask(otherwise(exempt(flask_view))(flask_view))) == [200, 200, 200, 429]
    assert statuses(flask(otherwise(limit("1/minute")(flask_view))(flask_view))) == [200, 429, 429, 429]


def test_wrapped_endpoint_without_wraps_raises_with_the_fix() -> None:
    """A wrapper that is found nowhere has the guard of the limit say what to do."""
    hidden: dict[str, Any] = {}
    exec("def bare(view):\n    def wrapper(*args):\n        return view(*args)\n    return wrapper\n", hidden)
    with pytest.raises(ConfigError, match=r"functools\.wraps in the decorators above"):
        flask_raising(hidden["bare"](limit("1/minute")(flask_view)))


def flask_raising(endpoint: Any) -> None:
    app = Flask("app")
    app.testing = True
    app.add_url_rule("/", "view", endpoint)
    wsgi_reply(LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock())))


@pytest.mark.parametrize("kind", ["partial", "object"])
def test_what_is_decorated_has_a_name_for_its_route(kind: str) -> None:
    """Frameworks call routes by it: two partial objects are not one."""
    made = functools.partial(flask_view) if kind == "partial" else Application()
    expected = "flask_view" if kind == "partial" else "Application"
    for own in (limit("1/minute"), exempt):
        decorated = own(made)
        assert getattr(decorated, "__name__", type(decorated).__name__) == expected
