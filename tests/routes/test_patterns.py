"""Rules whose paths no route has are told of (LG030), and nothing is told where that is not certain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from django.urls import include, path, re_path
from fastapi import APIRouter, FastAPI
from flask import Blueprint, Flask
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

import limitgate.flask
from limitgate import LimitGate, LimitGateWSGI, Rule
from tests.support.django_app import AUTHENTICATION, SESSIONS, WAYS, hello
from tests.support.doors import asgi_reply, wsgi_reply

REAL = ("/", "/login", "/items/7", "/items/{id}", "/files/**", "/sub/login", "/sub/**", "/**", "/{x}/login")
"""Paths of rules that some route has."""
WRONG = ("/logn", "/items", "/login/now", "/sub/logn", "/files", "/item/{id}")
"""Paths of rules that no route has."""


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith(("LG030", "LG020"))]


def ruled(paths: Any) -> list[Rule]:
    return [Rule(f"rule{number}", "9/minute", path=each) for number, each in enumerate(paths)]


async def asked(app: Any) -> None:
    for each in ("/nowhere", "/login", "/login", "/else"):
        await asgi_reply(app, each)


def asgi(app: Any) -> None:
    asyncio.run(asked(app))


def wsgi(app: Any) -> None:
    for each in ("/nowhere", "/login", "/login", "/else"):
        wsgi_reply(app, each)


def cors_inside(app: Any) -> Any:
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    app.add_middleware(LimitGate, rules=ruled(["/login"]))
    return app


def cors_around(app: Any) -> Any:
    app.add_middleware(LimitGate, rules=ruled(["/login"]))
    app.add_middleware(GZipMiddleware)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    return app


def cors_of_the_application(app: Any) -> Any:
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    return LimitGate(app, rules=ruled(["/login"]))


@pytest.mark.parametrize("kind", [Starlette, FastAPI])
@pytest.mark.parametrize(("made", "times"), [(cors_inside, 1), (cors_of_the_application, 1), (cors_around, 0)])
def test_cors_inside_of_the_gate_is_told_once(
    caplog: pytest.LogCaptureFixture, kind: Callable[..., Any], made: Callable[[Any], Any], times: int
) -> None:
    """Where it cannot add its fields to a refusal."""
    asgi(made(kind(routes=[Route("/login", answer)])))
    assert len([message for message in caplog.messages if message.startswith("LG037")]) == times


async def answer(request: Any) -> PlainTextResponse:
    return PlainTextResponse("hello")


def routes() -> list[Any]:
    return [
        Route("/", answer),
        Route("/login", answer, methods=["POST"]),
        Route("/items/{id:int}", answer),
        WebSocketRoute("/files/{name}.json", answer),
        Mount("/sub", routes=[Route("/login", answer)]),
    ]


def starlette(rules: list[Rule]) -> None:
    app = Starlette()
    app.add_middleware(LimitGate, rules=rules)
    app.add_middleware(GZipMiddleware)
    app.router.routes.extend(routes())  # routes are added when the gate is there already
    asgi(app)


def starlette_within(rules: list[Rule]) -> None:
    """The gate around the whole application, and one of the usual functions inside."""
    app = Starlette(routes=routes(), middleware=[Middleware(BaseHTTPMiddleware, dispatch=passing), Middleware(GZipMiddleware)])
    asgi(LimitGate(app, rules=rules))


async def passing(request: Any, call_next: Any) -> Any:
    return await call_next(request)


def nothing() -> None:
    """Answer with nothing."""


def fastapi(rules: list[Rule]) -> None:
    app, within, sub = FastAPI(openapi_url=None), APIRouter(prefix="/items"), FastAPI(openapi_url=None)
    app.add_middleware(LimitGate, rules=rules)
    app.get("/")(nothing)
    within.get("/{id}")(nothing)
    app.include_router(within)
    app.post("/login")(nothing)
    app.get("/files/{name}")(nothing)
    sub.get("/login")(nothing)
    app.mount("/sub", sub)
    asgi(app)


def blueprint(*paths: str) -> Blueprint:
    made = Blueprint("within", __name__)
    for number, each in enumerate(paths):
        made.add_url_rule(each, f"view{number}", lambda **_: "hello")
    return made


def flask(rules: list[Rule]) -> None:
    app = Flask(__name__, static_url_path="/files")
    app.wsgi_app = ProxyFix(app.wsgi_app)  # type: ignore[method-assign]
    limitgate.flask.LimitGate(app, rules=rules)
    app.register_blueprint(blueprint("/", "/login", "/items/<int:id>"))
    app.register_blueprint(blueprint("/login/"), name="sub", url_prefix="/sub")
    wsgi(app)


def dispatched(rules: list[Rule]) -> None:
    app, sub = Flask(__name__, static_url_path="/files"), Flask(__name__)
    app.register_blueprint(blueprint("/", "/login", "/items/<id>"))
    sub.register_blueprint(blueprint("/login"))
    wsgi(LimitGateWSGI(DispatcherMiddleware(app, {"/sub": sub}), rules=rules))


DJANGO = (
    path("", hello),
    path("login/", hello),
    path("items/<int:id>", hello),
    path("files/<slug:name>.json", hello),
    path("sub/", include([path("login", hello)])),
)


def django(way: str) -> Callable[[list[Rule]], None]:
    def project(rules: list[Rule]) -> None:
        with WAYS[way].project(*DJANGO, rules=rules, before=(SESSIONS,), behind=(AUTHENTICATION,)) as opened:
            opened.statuses("/nowhere", "/login", "/login", "/else")

    return project


APPLICATIONS = {
    "starlette": starlette,
    "starlette within": starlette_within,
    "fastapi": fastapi,
    "flask": flask,
    "dispatcher": dispatched,
    "django, wsgi": django("wsgi"),
    "django, asgi": django("asgi"),
}
frameworks = pytest.mark.parametrize("application", APPLICATIONS.values(), ids=APPLICATIONS)


@frameworks
def test_rules_of_no_route(application: Callable[[list[Rule]], None], caplog: pytest.LogCaptureFixture) -> None:
    """Rules without a route are told of in one line, with their paths, and others are not."""
    is_flask = application in (flask, dispatched)  # its static files have a path of any length
    wrong = [each for each in WRONG if not (is_flask and each == "/files")]
    application(ruled([*REAL, ("/logn", "/login"), *wrong]))
    (message,) = told(caplog)
    first = len(REAL) + 1
    assert f": {'; '.join(f'rule{first + n} ({each})' for n, each in enumerate(wrong))} (docs/" in message


@frameworks
def test_rules_of_some_route(application: Callable[[list[Rule]], None], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is told where each rule with limits has a route; others may be for what is answered elsewhere, or never."""
    others = [Rule("free", path="/static/**", exempt=True), Rule("scanners", path="/wp-admin/**", deny=True)]
    application([*ruled([*REAL, ("/logn", "/login")]), *others])
    assert told(caplog) == []


# --- what is not certain ----------------------------------------------------------------------------------------------


class Other:
    """ASGI middleware that might answer by itself, or change paths."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class OwnStarlette(Starlette):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__({**scope, "path": scope["path"].removeprefix("/v1")}, receive, send)


class OwnRoute(Route):
    def matches(self, scope: Any) -> Any:
        return super().matches({**scope, "path": scope["path"].lower()})


async def generic(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


def itself() -> Starlette:
    """An application that is mounted in itself."""
    app = Starlette(routes=routes())
    app.mount("/deeper", app)
    return app


def with_root_path() -> FastAPI:
    app = FastAPI()
    app.root_path = "/v1"
    return app


def with_frontend() -> FastAPI:
    app = FastAPI()
    app.frontend("/app", directory=".")
    return app


def with_included_frontend() -> FastAPI:
    app = FastAPI()
    app.include_router(with_frontend().router)
    return app


UNCERTAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "no framework": (lambda: generic, "/logn"),
    "catch-all route": (lambda: Starlette(routes=[*routes(), Route("/{rest:path}", answer)]), "/logn"),
    "catch-all mount": (lambda: Starlette(routes=[*routes(), Mount("/", app=generic)]), "/logn"),
    "files": (lambda: Starlette(routes=[Mount("/static", StaticFiles(directory="."))]), "/static/logn.css"),
    "mounted application": (lambda: Starlette(routes=[Mount("/other", app=generic)]), "/other/logn"),
    "mounted in middleware": (
        lambda: Starlette(routes=[Mount("/other", routes=routes(), middleware=[Middleware(Other)])]),
        "/other/logn",
    ),
    "in itself": (itself, "/deeper/deeper/deeper/login"),
    "own router's default": (lambda: Router(routes(), default=generic), "/logn"),
    "host": (lambda: Starlette(routes=[Host("a.example", Router(routes()))]), "/logn"),
    "own kind of route": (lambda: Starlette(routes=[OwnRoute("/login", answer)]), "/LOGIN"),
    "middleware": (lambda: Starlette(routes=routes(), middleware=[Middleware(Other)]), "/logn"),
    "middleware around it": (lambda: Other(Starlette(routes=routes())), "/logn"),
    "own application": (lambda: OwnStarlette(routes=routes()), "/v1/login"),
    "behind a proxy that leaves its prefix": (with_root_path, "/v1/docs"),
    "documentation": (FastAPI, "/docs"),
    "frontend": (with_frontend, "/app/logn"),
    "frontend of an included router": (with_included_frontend, "/app/logn"),
}


@pytest.mark.parametrize(("made", "where"), UNCERTAIN.values(), ids=UNCERTAIN)
def test_asgi_applications_that_may_answer(made: Callable[[], Any], where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is told where something else than a route may answer."""
    asgi(LimitGate(made(), rules=ruled([where])))
    assert told(caplog) == []


def test_a_gate_of_a_mounted_application(caplog: pytest.LogCaptureFixture) -> None:
    """Its rules are for paths below the mount."""
    inner = Starlette(routes=routes())
    inner.add_middleware(LimitGate, rules=ruled(["/login", "/sub/login"]))
    asgi(Starlette(routes=[Mount("/login", app=inner), Mount("/", app=inner)]))
    assert told(caplog) == []


def around(app: Any) -> Callable[..., Any]:
    """WSGI middleware that says nothing of what it does."""

    def wrapper(environ: Any, start_response: Any) -> Any:
        return app(environ, start_response)

    return wrapper


class Rewriting:
    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, environ: Any, start_response: Any) -> Any:
        return self.app({**environ, "PATH_INFO": environ["PATH_INFO"].removeprefix("/v1")}, start_response)


class OwnFlask(Flask):
    def wsgi_app(self, environ: Any, start_response: Any) -> Any:
        return super().wsgi_app({**environ, "PATH_INFO": environ["PATH_INFO"].removeprefix("/v1")}, start_response)


def extended(wrap: Callable[[Any], Any]) -> Flask:
    """An application whose extension is put around middleware that is there already."""
    app = Flask(__name__)
    app.wsgi_app = wrap(app.wsgi_app)  # type: ignore[method-assign]
    limitgate.flask.LimitGate(app, rules=ruled(["/v1/static/x", "/logn"]))
    return app


def nested() -> Any:
    return DispatcherMiddleware(DispatcherMiddleware(Flask(__name__), {}), {"/other": Flask(__name__)})


WSGI_UNCERTAIN: dict[str, Callable[[], Any]] = {
    "no framework": lambda: around(Flask(__name__)),
    "rewritten": lambda: Rewriting(Flask(__name__)),
    "rewritten before it is dispatched": lambda: Rewriting(DispatcherMiddleware(Flask(__name__), {})),
    "own application": lambda: OwnFlask(__name__),
    "mounted application": lambda: DispatcherMiddleware(Flask(__name__), {"/logn": around(Flask(__name__))}),
    "dispatched to no framework": lambda: DispatcherMiddleware(around(Flask(__name__)), {"/sub": Flask(__name__)}),
    "dispatchers in each other": nested,
    "extension, rewritten": lambda: extended(Rewriting),
    "extension, hidden": lambda: extended(around),
}


@pytest.mark.parametrize("made", WSGI_UNCERTAIN.values(), ids=WSGI_UNCERTAIN)
def test_wsgi_applications_that_may_answer(made: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is told where something else than a route may answer."""
    app = made()
    wsgi(app if getattr(app, "extensions", None) else LimitGateWSGI(app, rules=ruled(["/logn"])))
    assert told(caplog) == []


def by_regex() -> Any:
    return re_path(r"^(logn|login)$", hello)


FLATPAGES = "django.contrib.flatpages.middleware.FlatpageFallbackMiddleware"
OWN = "tests.support.django_app.Changing"


def other_urls(request: Any) -> None:
    request.urlconf = (path("logn", hello),)


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{OWN}.change", other_urls)


@pytest.mark.parametrize(
    ("patterns", "options"),
    [
        ([by_regex()], {}),
        ([path("<path:rest>", hello)], {}),
        ([path("sub/", hello), *DJANGO], {"behind": (OWN,)}),
        (DJANGO, {"behind": (FLATPAGES,), "INSTALLED_APPS": ["django.contrib.sites", "django.contrib.flatpages"]}),
    ],
    ids=["regular expression", "path", "middleware", "flatpages"],
)
def test_django_projects_that_may_answer(patterns: Any, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is told where a pattern may match anything, or middleware may answer."""
    with WAYS["wsgi"].project(*patterns, rules=ruled(["/logn"]), **options) as opened:
        opened.client.raise_request_exception = False
        opened.statuses("/nowhere")
    assert told(caplog) == []


@pytest.mark.usefixtures("changing")
def test_urls_that_middleware_chooses(caplog: pytest.LogCaptureFixture) -> None:
    """A project whose requests may have other URLconfs is not judged by ROOT_URLCONF."""
    with WAYS["wsgi"].project(*DJANGO, rules=ruled(["/logn"]), before=(OWN,)) as opened:
        opened.statuses("/logn", "/login")
    assert told(caplog) == []


def test_urls_that_cannot_be_imported(caplog: pytest.LogCaptureFixture) -> None:
    """It is Django's to say so."""
    project = WAYS["wsgi"].project(rules=ruled(["/logn"]), ROOT_URLCONF="tests.no_such_module")
    with contextlib.suppress(ModuleNotFoundError), project as opened:
        opened.statuses("/logn")
    assert told(caplog) == []


# --- once -------------------------------------------------------------------------------------------------------------


def test_it_is_told_once_under_threads(caplog: pytest.LogCaptureFixture) -> None:
    """Threads whose requests are the first ones at the same time tell it once."""
    app = Flask(__name__)
    limitgate.flask.LimitGate(app, rules=ruled(["/logn"]))
    together = Barrier(8)

    def ask(number: int) -> None:
        together.wait()
        wsgi_reply(app, f"/{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert len(told(caplog)) == 1


def test_nothing_is_told_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    """Routes may be added until then."""
    app = Flask(__name__)
    limitgate.flask.LimitGate(app, rules=ruled(["/logn"]))
    assert told(caplog) == []
    app.add_url_rule("/logn", "late", lambda: "hello")
    wsgi(app)
    assert told(caplog) == []
