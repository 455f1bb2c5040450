"""Frameworks that LimitGate has no integration for, by the examples in docs/frameworks.md as they are printed there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import bottle
import falcon
import falcon.asgi
import falcon.testing
import httpx
import litestar
import litestar.exceptions
import litestar.middleware
import litestar.testing
import pytest
import quart
import quart.testing.connections
import websockets.exceptions
import websockets.sync.client
import werkzeug.test
from starlette.middleware.cors import CORSMiddleware

from limitgate import ConfigError, LimitGate, LimitGateWSGI, MemoryStore, Rule, limit
from limitgate.routes import NoRoutes
from limitgate.routes.starlette import asgi_routes
from tests.attacks.path_fuzz import litestar_app
from tests.exchange.test_wsgi import Server
from tests.http.test_paths import SPELLINGS_OF_LOGIN
from tests.support.clock import Clock
from tests.support.doors import PATIENCE, Wire, asgi_reply, http_scope, threaded_wsgi, uvicorn_process, wsgi_environ, wsgi_reply
from tests.support.printed import imported, printed

PAGE = "docs/frameworks.md"
ACCEPTED = 1000
"""What counts as the answer to a handshake that was accepted: the code with which the connection ends."""


class Reply(NamedTuple):
    """A response as any of the clients shows it."""

    status: int
    headers: httpx.Headers
    text: str


Ask = Callable[[str], Reply]


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let time stand still for stores that are not named; leave logging as it was, for Litestar sets it up anew."""
    monkeypatch.setattr("limitgate.stores.MemoryStore", lambda: MemoryStore(Clock()))
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


# --- each framework's own test client ---------------------------------------------------------------------------------


def ask_litestar(app: Any, path: str) -> Reply:
    with litestar.testing.TestClient(app) as client:
        reply = client.get(path)
    return Reply(reply.status_code, reply.headers, reply.text)


def ask_quart(app: Any, path: str) -> Reply:
    async def ask() -> Reply:
        reply = await app.test_client().get(path)
        return Reply(reply.status_code, httpx.Headers(list(reply.headers)), await reply.get_data(as_text=True))

    return asyncio.run(ask())


def ask_falcon(app: Any, path: str) -> Reply:
    reply = falcon.testing.TestClient(app).simulate_get(path)
    return Reply(reply.status_code, httpx.Headers(reply.headers), reply.text)


def ask_bottle(app: Any, path: str) -> Reply:
    reply = werkzeug.test.Client(app).get(path)
    return Reply(reply.status_code, httpx.Headers(list(reply.headers)), reply.text)


def shake_litestar(app: Any) -> int:
    try:
        with litestar.testing.TestClient(app) as client, client.websocket_connect("/chat") as socket:
            return ACCEPTED if socket.receive_text() == "hello" else 0
    except litestar.exceptions.WebSocketDisconnect as refused:
        return refused.code


def shake_quart(app: Any) -> int:
    async def shake() -> int:
        async with app.test_client().websocket("/chat") as socket:
            await socket.send("are you there?")
            try:
                return ACCEPTED if await socket.receive() == "hello" else 0
            except quart.testing.connections.WebsocketResponseError as refused:
                return refused.response.status_code

    return asyncio.run(shake())


def shake_falcon(app: Any) -> int:
    async def shake() -> int:
        async with falcon.testing.ASGIConductor(app) as conductor:
            try:
                async with conductor.simulate_ws("/chat") as socket:
                    return ACCEPTED if await socket.receive_text() == "hello" else 0
            except falcon.WebSocketDisconnected as ended:
                return ended.code

    return asyncio.run(shake())


LITESTAR, QUART, FALCON, FALCON_WSGI, BOTTLE = (
    "litestar_app.py",
    "quart_app.py",
    "falcon_asgi.py",
    "falcon_wsgi.py",
    "bottle_app.py",
)
"""The files that the page shows."""
ASKING: dict[str, Callable[[Any, str], Reply]] = {
    LITESTAR: ask_litestar,
    QUART: ask_quart,
    FALCON: ask_falcon,
    FALCON_WSGI: ask_falcon,
    BOTTLE: ask_bottle,
}
ASGI, WSGI = (LITESTAR, QUART, FALCON), (FALCON_WSGI, BOTTLE)


def check_http(ask: Ask) -> None:
    """Five requests below /api pass, whatever they are for; fields, refusals, streams and 404 are as they have to be."""
    replies = [ask(path) for path in ("/api/hello", "/api/stream", "/api/nowhere", "/api/hello", "/api/hello", "/api/hello")]
    assert [reply.status for reply in replies] == [200, 200, 404, 200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["4", "3", "2", "1", "0", "0"]
    hello, stream, *_, refused = replies
    assert '"remaining":4' in hello.text.replace(" ", "")
    assert (stream.text, stream.headers["content-type"].partition(";")[0]) == ("one two three", "text/plain")
    assert refused.headers["content-type"] == "application/problem+json"
    assert 0 < int(refused.headers["retry-after"]) <= 12
    assert '"violated-policies": ["api"]' in refused.text
    elsewhere = ask("/elsewhere")
    assert (elsewhere.status, "x-ratelimit-limit" in elsewhere.headers) == (404, False)


@pytest.mark.parametrize("framework", ASKING)
def test_an_example_by_its_own_client(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits, refusals, streams, the framework's own 404 and the decision are what they are elsewhere."""
    app = imported(PAGE, framework, tmp_path, monkeypatch).app
    check_http(lambda path: ASKING[framework](app, path))


@pytest.mark.parametrize(
    ("framework", "shake", "refusal"),
    [(LITESTAR, shake_litestar, 1013), (QUART, shake_quart, 429), (FALCON, shake_falcon, 3403)],
)
def test_websockets_by_its_own_client(
    framework: str, shake: Callable[[Any], int], refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second handshake in a minute is refused: with a 429, or close code 1013, for which Falcon's client shows a 403."""
    app = imported(PAGE, framework, tmp_path, monkeypatch).app
    assert [shake(app), shake(app)] == [ACCEPTED, refusal]


# --- real servers -----------------------------------------------------------------------------------------------------


def over_http(url: str) -> Ask:
    def ask(path: str) -> Reply:
        reply = httpx.get(url + path, timeout=PATIENCE)
        return Reply(reply.status_code, reply.headers, reply.text)

    return ask


@pytest.mark.parametrize("framework", ASGI)
def test_an_example_on_uvicorn(framework: str, tmp_path: Path) -> None:
    """The printed program as a module of its own serves under uvicorn, lifespan events and WebSockets included."""
    (tmp_path / framework).write_text(printed(PAGE, framework))
    with uvicorn_process(f"{framework.removesuffix('.py')}:app", tmp_path, "--app-dir", str(tmp_path)) as url:
        check_http(over_http(url))
        chat = url.replace("http", "ws", 1) + "/chat"
        with websockets.sync.client.connect(chat, proxy=None) as socket:
            assert socket.recv(timeout=PATIENCE) == "hello"
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            websockets.sync.client.connect(chat, proxy=None)
        assert refused.value.response.status_code == 429
        assert b'"violated-policies": ["chat"]' in refused.value.response.body


@pytest.mark.parametrize("framework", WSGI)
def test_an_example_on_a_wsgi_server(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed program serves on a server with threads."""
    with threaded_wsgi(imported(PAGE, framework, tmp_path, monkeypatch).app) as url:
        check_http(over_http(url))


# --- hostile spellings ------------------------------------------------------------------------------------------------


def open_app(file: str, ran: list[str]) -> Any:
    """An application of the framework of an example, with a view for /login, which notes that it ran."""

    def ran_now() -> str:
        ran.append("login")
        return "welcome"

    if file == LITESTAR:

        @litestar.get("/login")
        async def login() -> str:
            return ran_now()

        return litestar.Litestar([login], openapi_config=None)
    if file == QUART:
        app = quart.Quart("quart")
        app.add_url_rule("/login", "login", ran_now)
        return app
    if file == BOTTLE:
        app = bottle.Bottle()
        app.get("/login", callback=ran_now)
        return app

    class Sync:
        def on_get(self, req: Any, resp: Any) -> None:
            resp.text = ran_now()

    class Async:
        async def on_get(self, req: Any, resp: Any) -> None:
            resp.text = ran_now()

    app = falcon.asgi.App() if file == FALCON else falcon.App()
    app.add_route("/login", Async() if file == FALCON else Sync())
    return app


@pytest.mark.parametrize("mount", ["", "/app"])
@pytest.mark.parametrize("file", ASGI)
def test_whatever_asgi_frameworks_make_of_a_path_is_counted(file: str, mount: str) -> None:
    """However a path is spelled, and with whatever in front of the mount point, what runs the view was charged to its rule."""
    ran: list[str] = []
    app = LimitGate(open_app(file, ran), rules=[Rule("login", "100000/day", path="/login", key=["global"])])

    async def ask(path: str) -> tuple[bool, bool]:
        """Whether the view ran, and whether it was charged for."""
        before = len(ran)
        scope = {**http_scope("/"), "path": path, "raw_path": b"/", "root_path": mount}
        reply = (await Wire({"type": "http.request"}).call(app, scope)).reply()
        return len(ran) > before, "x-ratelimit-limit" in reply.headers

    async def uncounted() -> list[str]:
        prefixes = {"", mount, f"/x{mount}", f"{mount}/x{mount}", f"x{mount}"}
        paths = [prefix + path for prefix in prefixes for path in SPELLINGS_OF_LOGIN]
        return [path for path in paths if await ask(path) == (True, False)]

    assert asyncio.run(uncounted()) == []
    assert ran


@pytest.mark.parametrize("file", WSGI)
def test_whatever_wsgi_frameworks_make_of_a_path_is_counted(file: str) -> None:
    """The same for WSGI, where a path may hold bytes that are no UTF-8."""
    ran: list[str] = []
    app = LimitGateWSGI(open_app(file, ran), rules=[Rule("login", "100000/day", path="/login", key=["global"])])

    def ask(path: str) -> tuple[bool, bool]:
        """Whether the view ran, and whether it was charged for."""
        before = len(ran)
        server = Server()
        getattr(app({**wsgi_environ("/"), "PATH_INFO": path}, server), "close", bool)()
        return len(ran) > before, "X-RateLimit-Limit" in server.names

    paths = [path.replace("\N{REPLACEMENT CHARACTER}", "\xff") for path in SPELLINGS_OF_LOGIN]
    paths += ["/log\xc3in", "/login\xed\xa0\x80", "/lo\xf0\x9fgin", "/\xc0\xaflogin", "\xff/login"]
    assert [path for path in paths if ask(path) == (True, False)] == []
    assert ran


@pytest.mark.parametrize("target", ["login%3fx", "login%23x", "h:login%3fx", "h:login", "%0alogin%3fx"])
def test_a_target_without_a_slash_is_counted(target: str) -> None:
    """Quart takes a target without a leading slash for a URL and routes its path: that is charged as the path itself."""
    ran: list[str] = []
    app = LimitGate(open_app(QUART, ran), rules=[Rule("login", "1/day", path="/login")])

    async def statuses() -> list[int]:
        scopes = [{**http_scope("/"), "path": unquote(target)} for _ in range(3)]
        return [(await Wire({"type": "http.request"}).call(app, scope)).reply().status for scope in scopes]

    assert asyncio.run(statuses()) == [200, 429, 429]
    assert len(ran) == 1


@pytest.mark.parametrize(
    "around", [lambda app: app, lambda app: app.asgi_handler, CORSMiddleware], ids=["app", "handler", "CORS"]
)
@pytest.mark.parametrize("path", ["/filesadmin", "/files/x", "/files", "/files%0aadmin", "//filesadmin/x"])
def test_a_mount_of_litestar_is_counted(path: str, around: Callable[[Any], Any]) -> None:
    """Litestar takes to a mount whatever begins with its path; that is charged to the rule for all below the mount."""
    ran: list[str] = []
    app = litestar_app(ran)
    gate = LimitGate(around(app), rules=[Rule("files", "1/day", path="/files/**")])

    async def statuses() -> list[int]:
        return [(await asgi_reply(gate, path)).status for _ in range(3)]

    assert asyncio.run(statuses()) == [200, 429, 429]
    assert ran == ["file"]


# --- decorators -------------------------------------------------------------------------------------------------------


def decorated(framework: str) -> Any:
    """An application with a decorated handler at /limited, which answers a ConfigError with its text."""
    own = limit("1/minute", name="own")
    if framework == LITESTAR:

        @litestar.get("/limited")
        @own
        async def limited() -> str:
            return "hello"

        def told(_: Any, error: Exception) -> litestar.Response[str]:
            return litestar.Response(str(error), status_code=500, media_type="text/plain")

        return litestar.Litestar([limited], exception_handlers={ConfigError: told})
    if framework == QUART:
        app = quart.Quart("quart")
        app.add_url_rule("/limited", "limited", own(lambda: "hello"))
        app.register_error_handler(ConfigError, lambda error: (str(error), 500))
        return app
    if framework == BOTTLE:
        app = bottle.Bottle()
        app.get("/limited", callback=own(lambda: "hello"))
        app.error(500)(lambda error: str(error.exception))
        return app
    return decorated_falcon(own, is_async=framework == FALCON)


def decorated_falcon(own: Callable[[Any], Any], *, is_async: bool) -> Any:
    class Sync:
        @own
        def on_get(self, req: Any, resp: Any) -> None:
            resp.text = "hello"

    class Async:
        @own
        async def on_get(self, req: Any, resp: Any) -> None:
            resp.text = "hello"

    def told(req: Any, resp: Any, error: Exception, params: Any) -> None:
        resp.status, resp.text = 500, str(error)

    async def told_later(*args: Any) -> None:
        told(*args)

    app: Any = falcon.asgi.App() if is_async else falcon.App()
    app.add_route("/limited", Async() if is_async else Sync())
    app.add_error_handler(ConfigError, told_later if is_async else told)
    return app


@pytest.mark.parametrize("framework", ASKING)
def test_a_decorator_raises_where_routes_are_not_known(framework: str) -> None:
    """``@limit`` on a framework whose routes LimitGate cannot read raises ConfigError, and never runs unlimited."""
    gate = LimitGateWSGI if framework in WSGI else LimitGate
    app = gate(decorated(framework), rules=[Rule("all", "100/minute")])
    reply = wsgi_reply(app, "/limited") if framework in WSGI else asyncio.run(asgi_reply(app, "/limited"))
    assert reply.status == 500
    assert b"own is limited, but no LimitGate has checked this request" in reply.body
    assert reply.rate["x-ratelimit-remaining"] == "99"


# --- what the page says besides ---------------------------------------------------------------------------------------


def test_litestars_own_middleware_is_no_place_for_it() -> None:
    """As the page warns, by DefineMiddleware every route has a limit of its own, and what has no route has none."""

    @litestar.get(["/a", "/b"])
    async def hello() -> str:
        return "hello"

    middleware = litestar.middleware.DefineMiddleware(LimitGate, rules=[Rule("all", "1/minute")])
    app = litestar.Litestar([hello], middleware=[middleware])
    paths = ("/a", "/a", "/b", "/b", "/c", "/c")
    assert [ask_litestar(app, path).status for path in paths] == [200, 429, 200, 429, 404, 404]


def test_litestars_hooks_see_refusals() -> None:
    """Around ``asgi_handler``, what Litestar does before it sends anything it does with refusals, too."""
    seen: list[int] = []

    async def before_send(message: Any, _: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    app = litestar.Litestar([], before_send=[before_send])
    app.asgi_handler = LimitGate(app.asgi_handler, rules=[Rule("all", "1/minute")])
    assert [ask_litestar(app, "/").status for _ in range(2)] == seen == [404, 429]


def test_cors_goes_around() -> None:
    """With CORS middleware around the gate, pages of other origins can read refusals, and preflights are not counted."""
    gate = LimitGate(falcon.asgi.App(), rules=[Rule("all", "1/minute")])
    app = CORSMiddleware(gate, allow_origins=["*"], allow_methods=["*"], expose_headers=["Retry-After"])
    origin = {"Origin": "https://page.example"}

    async def ask() -> list[Any]:
        preflight = await asgi_reply(app, "/", "OPTIONS", {**origin, "Access-Control-Request-Method": "GET"})
        return [preflight, await asgi_reply(app, "/", headers=origin), await asgi_reply(app, "/", headers=origin)]

    replies = asyncio.run(ask())
    assert [reply.status for reply in replies] == [200, 404, 429]
    assert [reply.headers["access-control-allow-origin"] for reply in replies] == ["*"] * 3
    assert replies[2].headers["access-control-expose-headers"] == "Retry-After"


def test_path_in_a_key_is_the_pattern() -> None:
    """Elsewhere ``path`` is the rule's own pattern: all that falls under it shares a bucket."""
    gate = LimitGateWSGI(bottle.Bottle(), rules=[Rule("items", "2/minute", path="/items/{id}", key=["path", "ip"])])
    assert [wsgi_reply(gate, f"/items/{number}").status for number in range(4)] == [404, 404, 429, 429]


def test_the_default_application_of_bottle() -> None:
    """Bottle's default application is limited where it is wrapped, routes that are added later included."""
    stack = bottle.AppStack([bottle.Bottle()])
    gate = LimitGateWSGI(stack(), rules=[Rule("all", "1/minute")])
    stack[-1].get("/hello", callback=lambda: "hello")
    assert [wsgi_reply(gate, "/hello").status for _ in range(2)] == [200, 429]


def test_litestar_is_not_taken_for_starlette() -> None:
    """That an application has a list called ``routes`` does not make it one whose routes can be read."""

    @litestar.get("/hello")
    async def hello() -> str:
        return "hello"

    app = litestar.Litestar([hello], openapi_config=None)
    assert isinstance(asgi_routes(app), NoRoutes)
    assert isinstance(asgi_routes(app.asgi_handler), NoRoutes)
