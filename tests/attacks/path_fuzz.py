"""Random paths at every framework: whatever reaches a handler is charged to the handler's rule.

``python -m tests.attacks.path_fuzz --paths 50000 [--seed N]`` prints a Markdown table; the status tells of findings.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote_to_bytes

import bottle
import falcon
import falcon.asgi
import fastapi
import flask
import litestar
import litestar.types
import quart
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from limitgate import LimitGate, LimitGateWSGI, Rule
from tests.attacks.mutations import TOKENS, mutated
from tests.attacks.paths import spellings
from tests.support.doors import Wire, http_scope, wsgi_environ

LONGEST = 700
"""Characters of a path; those beyond `limitgate.http.paths.LONG` are read in another way."""
ROUTES = {"login": "/login", "item": "/items/{id}", "file": "/files", "deep": "/v1/by/{who}/login", "under": "/v1/files"}
"""Handlers by name. Mounts, where a framework has them, are at ``/files`` and ``/v1/files``."""
RULES = [
    Rule(name, "1000000/second", path=path if "file" not in path else f"{path}/**", key=["global"])
    for name, path in ROUTES.items()
]
PLAIN = ["/login", "/items/7", "/files", "/files/a", "/v1/by/me/login", "/v1/files/a/b", "/filesadmin", "login", "h:login"]
PREFIXES = ["", "", "", "x", "h:", "//h", "http://h", "/app", "/x/app", "%3f", "/../", "\t", " "]
ROOTS = ["", "", "", "/app", "/app/", "/v1", "/"]
SPELLED = [form for path in PLAIN for form in (path, *(spellings(path) if path.startswith("/") else ()))]
EMPTY = ["/items/", "//items/", "/v1/by//login"]
"""Placeholders that stand for nothing, as Falcon has them."""
SEEDS = [
    *EMPTY,
    *dict.fromkeys(start + form.lstrip(cut) for start, cut in (("", ""), ("", "/"), ("h:", "/")) for form in SPELLED),
]
RAW = [*(seed.encode() for seed in SEEDS), *TOKENS]

Ran = list[str]
Reply = Callable[[str], Any]


def starlette_app(ran: Ran) -> Any:
    def endpoint(name: str) -> Any:
        async def handle(request: Any) -> PlainTextResponse:
            ran.append(name)
            return PlainTextResponse(name)

        return handle

    def mounted(name: str) -> Any:
        async def handle(scope: Any, receive: Any, send: Any) -> None:
            ran.append(name)
            await PlainTextResponse(name)(scope, receive, send)

        return handle

    below = [Mount("/files", app=mounted("under"))]
    routes = [Route(ROUTES[name], endpoint(name)) for name in ("login", "item", "deep")]
    return Starlette(routes=[*routes, Mount("/files", app=mounted("file")), Mount("/v1", routes=below)])


def fastapi_app(ran: Ran) -> Any:
    app, router = fastapi.FastAPI(), fastapi.APIRouter()

    def endpoint(name: str) -> Any:
        return lambda: ran.append(name)

    for name in ("login", "item"):
        app.get(ROUTES[name])(endpoint(name))
    app.get("/files/{rest:path}")(endpoint("file"))
    router.get("/by/{who}/login")(endpoint("deep"))
    router.get("/files/{rest:path}")(endpoint("under"))
    app.include_router(router, prefix="/v1")
    return app


def litestar_app(ran: Ran) -> Any:
    @litestar.get("/login")
    async def login() -> None:
        ran.append("login")

    @litestar.get("/items/{item:str}")
    async def item() -> None:
        ran.append("item")

    @litestar.get("/v1/by/{who:str}/login")
    async def deep() -> None:
        ran.append("deep")

    def mount(path: str, name: str) -> Any:
        async def mounted(scope: litestar.types.Scope, receive: litestar.types.Receive, send: litestar.types.Send) -> None:
            ran.append(name)
            await PlainTextResponse(name)(scope, receive, send)  # type: ignore[arg-type]

        mounted.__annotations__ = {"scope": litestar.types.Scope, "receive": litestar.types.Receive} | {
            "send": litestar.types.Send,
            "return": None,
        }
        return litestar.asgi(path, is_mount=True, copy_scope=True)(mounted)

    handlers = [login, item, deep, mount("/files", "file"), mount("/v1/files", "under")]
    return litestar.Litestar(handlers, openapi_config=None)


def _endpoint(ran: Ran, name: str) -> Any:
    """A handler that notes its name."""

    def handle(**_: str) -> str:
        ran.append(name)
        return name

    return handle


def _flask_routes(app: Any, ran: Ran) -> Any:
    for name, path in (("login", "/login"), ("item", "/items/<id>"), ("deep", "/v1/by/<who>/login")):
        app.add_url_rule(path, name, _endpoint(ran, name))
    for name, path in (("file", "/files"), ("under", "/v1/files")):
        app.add_url_rule(path, name, _endpoint(ran, name))
        app.add_url_rule(f"{path}/<path:rest>", f"{name} below", _endpoint(ran, name))
    return app


def flask_app(ran: Ran) -> Any:
    return _flask_routes(flask.Flask("fuzzed"), ran)


def quart_app(ran: Ran) -> Any:
    return _flask_routes(quart.Quart("fuzzed"), ran)


def bottle_app(ran: Ran) -> Any:
    app = bottle.Bottle()
    for name, path in (("login", "/login"), ("item", "/items/<id>"), ("deep", "/v1/by/<who>/login")):
        app.get(path, callback=_endpoint(ran, name))
    for name, path in (("file", "/files"), ("under", "/v1/files")):
        app.get(path, callback=_endpoint(ran, name))
        app.get(f"{path}/<rest:path>", callback=_endpoint(ran, name))
    return app


def _falcon_routes(app: Any, resource: Callable[[str], Any]) -> Any:
    for name in ("login", "item", "deep", "file", "under"):
        app.add_route(ROUTES[name], resource(name))
    for name in ("file", "under"):
        app.add_route(f"{ROUTES[name]}/{{rest:path}}", resource(name))
    return app


def falcon_app(ran: Ran) -> Any:
    class Resource:
        def __init__(self, name: str) -> None:
            self.name = name

        async def on_get(self, req: Any, resp: Any, **_: str) -> None:
            ran.append(self.name)

    return _falcon_routes(falcon.asgi.App(), Resource)


def falcon_wsgi_app(ran: Ran) -> Any:
    class Resource:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_get(self, req: Any, resp: Any, **_: str) -> None:
            ran.append(self.name)

    return _falcon_routes(falcon.App(), Resource)


ASGI: dict[str, Callable[[Ran], Any]] = {
    "Starlette": starlette_app,
    "FastAPI": fastapi_app,
    "Litestar": litestar_app,
    "Quart": quart_app,
    "Falcon": falcon_app,
}
WSGI: dict[str, Callable[[Ran], Any]] = {"Flask": flask_app, "Bottle": bottle_app, "Falcon (WSGI)": falcon_wsgi_app}
FRAMEWORKS = (*ASGI, *WSGI)


def paths(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Paths as a server decodes them, each with a mount point."""
    chosen = random.Random(seed)
    for place in range(count):
        is_seed = place < len(SEEDS)
        data = SEEDS[place].encode() if is_seed else chosen.choice(PREFIXES).encode() + mutated(chosen, RAW)
        text = unquote_to_bytes(data.partition(b"?")[0]).decode("utf-8", "replace")[:LONGEST]
        yield text or "/", chosen.choice(ROOTS)


class Receipt:
    """Stands between a gate and an application, and remembers by which rules the last request was decided."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.rules: set[str | None] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._note(scope)
        await self.app(scope, receive, send)

    def _note(self, scope: Any) -> None:
        decision = scope["limitgate"]
        self.rules = {window.rule for window in decision.windows} if decision else set()


class ChargedWSGI(Receipt):
    def __call__(self, environ: Any, start_response: Any) -> Any:
        self._note(environ)
        return self.app(environ, start_response)


def found_by(framework: str, count: int, seed: int) -> tuple[int, list[tuple[str, str]]]:
    """How often a handler ran, and the paths that reached one without a charge to its rule, each with its mount point."""
    ran: Ran = []
    reached, findings = 0, []

    def note(path: str, root: str) -> None:
        nonlocal reached
        reached += bool(ran)
        if not charged.rules.issuperset(ran):
            findings.append((path, root))
        ran.clear()

    async def through(gate: Any) -> None:
        for path, root in paths(count, seed):
            root = "" if framework == "Falcon" else root  # it does not look at mount points  # noqa: PLW2901
            wire = Wire({"type": "http.request", "body": b""})
            with suppress(Exception):  # it is the framework's own
                await wire.call(gate, {**http_scope("/"), "path": path, "raw_path": b"/", "root_path": root})
            note(path, root)

    if framework in ASGI:
        charged = Receipt(ASGI[framework](ran))
        asyncio.run(through(LimitGate(charged, rules=RULES, store="memory://")))
    else:
        charged = ChargedWSGI(WSGI[framework](ran))
        gate = LimitGateWSGI(charged, rules=RULES, store="memory://")
        for path, root in paths(count, seed):
            native = path.encode("utf-8", "surrogatepass").decode("latin-1")
            with suppress(Exception):
                chunks = gate({**wsgi_environ("/"), "PATH_INFO": native, "SCRIPT_NAME": root}, lambda *_: lambda _: None)
                list(chunks)
                getattr(chunks, "close", bool)()
            note(path, root)
    return reached, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", type=int, default=50_000, help="paths for each framework")
    parser.add_argument("--seed", type=int, default=None, help="a number, to repeat a run")
    told = parser.parse_args()
    seed = random.randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}\n\n| framework | paths | reached a handler | seconds | not charged |\n|---|---|---|---|---|")
    total = 0
    for framework in FRAMEWORKS:
        began = time.monotonic()
        reached, findings = found_by(framework, told.paths, seed)
        print(f"| {framework} | {told.paths:,} | {reached:,} | {time.monotonic() - began:.1f} | {len(findings)} |", flush=True)
        for finding in findings[:10]:
            print(f"{framework}: {finding!r:.400}", file=sys.stderr)
        total += len(findings)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
