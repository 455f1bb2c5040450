"""`limitgate routes`: every route of an application of each framework, with its limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from limitgate.command.group import limitgate
from tests.support.command_line import CliRunner

STARLETTE = """\
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from limitgate import LimitGate, Rule, exempt, limit

async def hello(request):
    return PlainTextResponse("hello")

@limit("5/minute", name="slow")
async def slow(request):
    return PlainTextResponse("hello")

class Cart(HTTPEndpoint):
    async def get(self, request):
        return PlainTextResponse("hello")

    @limit("2/minute", name="order")
    async def post(self, request):
        return PlainTextResponse("hello")

async def files(scope, receive, send):
    await PlainTextResponse("hello")(scope, receive, send)

RULES = [
    Rule("items", "10/second", path="/items/{id}", methods=["GET"], key=["path", "ip"]),
    Rule("gone", "1/minute", path="/old/**"),
]
ROUTES = [
    Route("/items/{id:int}", hello, methods=["GET", "PUT"]),
    Route("/cart", Cart),
    Route("/free", exempt(hello)),
    WebSocketRoute("/chat", hello),
    Mount("/sub", routes=[Route("/slow", slow, methods=["POST"])]),
    Mount("/files", app=files),
]
app = Starlette(routes=ROUTES, middleware=[Middleware(LimitGate, rules=RULES)])
bare = Starlette(routes=ROUTES)
around = LimitGate(bare, rules=RULES)
FRONT = [Rule("all", "9/second"), Rule("carts", "1/second", path="/carts/**")]
twice = LimitGate(app, rules=FRONT)
added = Starlette(routes=ROUTES)
added.add_middleware(LimitGate, rules=RULES)
added.add_middleware(LimitGate, rules=FRONT)
"""
FASTAPI = """\
from fastapi import APIRouter, Depends, FastAPI
from limitgate import LimitGate, Rule, limit
from limitgate.fastapi import RateLimit

router = APIRouter(prefix="/items")

def account(): ...

@router.get("/{id}", dependencies=[Depends(RateLimit("3/minute", name="dep", key=[account, "ip"]))])
def item(id: int): ...

@router.post("/")
@limit("2/minute", name="new")
def new(): ...

app = FastAPI(openapi_url=None)
app.include_router(router)
app.add_middleware(LimitGate, rules=[Rule("items", "10/second", path="/items/**")])
"""
FLASK = """\
from flask import Flask
from limitgate import LimitGateWSGI, Rule, limit

plain = Flask("shop")

@plain.get("/items/<int:id>")
@limit("5/minute", name="slow")
def item(id): ...

RULES = [Rule("items", "10/second", path="/items/**")]
app = LimitGateWSGI(plain, rules=RULES)
plain.wsgi_app = LimitGateWSGI(plain.wsgi_app, rules=RULES)
"""
SETTINGS = """\
SECRET_KEY = "x"
ROOT_URLCONF = "shop.urls"
MIDDLEWARE = ["limitgate.django.LimitGateMiddleware"]
LIMITGATE = {"RULES": "rules.yaml"}
"""
URLS = """\
from django.http import HttpResponse
from django.urls import include, path, re_path
from django.views import View
from limitgate import limit

def hello(request, **found):
    return HttpResponse("hello")

class Cart(View):
    def get(self, request): ...
    @limit("2/minute", name="order")
    def post(self, request): ...

below = [path("<int:id>/", limit("5/minute", name="slow")(hello)), path("special/", hello)]
urlpatterns = [path("items/", include(below)), path("cart/", Cart.as_view()), re_path(r"^old/(?P<year>[0-9]+)$", hello)]
"""
WSGI = """\
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.wsgi import get_wsgi_application
application = get_wsgi_application()
"""

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Write a module and list the routes of an application in it; gives the exit status and the JSON."""

    def listed(code: str, name: str, *words: str) -> tuple[int, Any]:
        module = f"shop_{abs(hash(code))}"
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        result = CliRunner().invoke(limitgate, ["routes", f"{module}:{name}", "--json", *words], catch_exceptions=False)
        return result.exit_code, json.loads(result.stdout)

    return listed


def table(found: Any) -> list[tuple[str, str, str | None]]:
    return [(each["route"], " ".join(each["methods"]), each["rule"]) for each in found["routes"]]


EXPECTED = [
    ("/cart", "GET", None),
    ("/cart", "POST", "order"),
    ("/chat", "GET", None),
    ("/files/**", "DELETE GET PATCH POST PUT", None),
    ("/free", "GET", "@exempt"),
    ("/items/{id:int}", "GET", "items"),
    ("/items/{id:int}", "PUT", None),
    ("/sub/slow", "POST", "slow"),
]


@pytest.mark.parametrize("name", ["app", "around"])
def test_the_routes_of_starlette(run: Run, name: str) -> None:
    """Mounts, class-based endpoints, WebSockets and opaque applications; the gate among the middleware, or around it all."""
    status, found = run(STARLETTE, name)
    assert table(found) == EXPECTED
    assert (status, found["unmatched"]) == (1, [{"rule": "gone", "tier": "default", "path": ["/old/**"], "methods": None}])
    item = next(each for each in found["routes"] if each["rule"] == "items")
    assert (item["limits"], item["key"], item["tiers"], item["notes"]) == (["10/second"], ["path", "ip"], ["default"], [])


@pytest.mark.parametrize("name", ["twice", "added"])
def test_all_gates_around_an_application(run: Run, name: str) -> None:
    """The rules of each that apply, the outermost one's first, decorators once, and what no route meets of any."""
    status, found = run(STARLETTE, name)
    assert table(found) == [
        ("/cart", "GET", "all"),
        ("/cart", "POST", "all"),
        ("/cart", "POST", "order"),
        ("/chat", "GET", "all"),
        ("/files/**", "DELETE GET PATCH POST PUT", "all"),
        ("/free", "GET", "@exempt"),
        ("/items/{id:int}", "GET PUT", "all"),
        ("/items/{id:int}", "GET", "items"),
        ("/sub/slow", "POST", "all"),
        ("/sub/slow", "POST", "slow"),
    ]
    assert (status, [each["rule"] for each in found["unmatched"]]) == (1, ["carts", "gone"])


MOUNTED = """
inner = Starlette(routes=[Route("/slow", slow), Route("/free", exempt(hello)), Mount("/deep", LimitGate(bare, rules=RULES))])
inner.add_middleware(LimitGate, rules=[Rule("inner", "3/second", path="/slow"), Rule("never", "1/second", path="/sub/slow")])
outer = Starlette(routes=[Route("/slow", hello), Mount("/sub", inner)])
"""


def test_gates_around_mounted_applications(run: Run) -> None:
    """Their rules are for paths below the mount, and routes are told with it; decorators once, whoever decides about them."""
    status, found = run(STARLETTE + MOUNTED, "outer")
    assert [row for row in table(found) if "/deep" not in row[0]] == [
        ("/slow", "GET", None),
        ("/sub/free", "GET", "@exempt"),
        ("/sub/slow", "GET", "slow"),
        ("/sub/slow", "GET", "inner"),
    ]
    assert ("/sub/deep/items/{id:int}", "GET", "items") in table(found)
    assert (status, [each["rule"] for each in found["unmatched"]]) == (1, ["never", "gone"])


def test_a_gate_inside_rules_what_the_one_around_it_leaves(run: Run) -> None:
    """Nobody is told that nothing applies where something does."""
    code = STARLETTE + "outer = LimitGate(app, rules=[Rule('put', '1/s', path='/items/{id}', methods=['PUT'])])\n"
    items = [row for row in table(run(code, "outer")[1]) if row[0] == "/items/{id:int}"]
    assert items == [("/items/{id:int}", "PUT", "put"), ("/items/{id:int}", "GET", "items")]


def test_an_application_without_a_gate_has_its_decorators(run: Run, tmp_path: Path) -> None:
    """And any rules that are named in the place of its own."""
    status, found = run(STARLETTE, "bare")
    assert (status, [rule for *_, rule in table(found) if rule]) == (0, ["order", "@exempt", "slow"])
    (tmp_path / "rules.yaml").write_text(
        "rules: [{name: all, qps: 5, path: /items/**}, {name: bad, deny: true, path: /wp-login}]"
    )
    status, found = run(STARLETTE, "bare", "--rules", "rules.yaml")
    assert (status, ("/items/{id:int}", "GET PUT", "all") in table(found)) == (0, True)


def test_the_routes_of_fastapi(run: Run) -> None:
    """With included routers, and limits among dependencies, whose keys have what these find."""
    found = run(FASTAPI, "app")[1]
    assert [each["key"] for each in found["routes"] if each["rule"] == "dep"] == [["ip", "account"]]
    assert table(found) == [
        ("/items/", "POST", "items"),
        ("/items/", "POST", "new"),
        ("/items/{id}", "GET", "items"),
        ("/items/{id}", "GET", "dep"),
    ]


@pytest.mark.parametrize("name", ["app", "plain"])
def test_the_routes_of_flask(run: Run, name: str) -> None:
    """The gate around the application, or in the place of its `wsgi_app`."""
    found = run(FLASK, name)[1]
    assert ("/items/<int:id>", "GET", "items") in table(found)
    assert ("/items/<int:id>", "GET", "slow") in table(found)
    assert [rule for *_, rule in table(found) if rule] == ["items", "slow"]


@pytest.mark.parametrize("name", ["shop.settings", "shop.wsgi:application"])
def test_the_routes_of_django(tmp_path: Path, name: str) -> None:
    """By the settings, or by what a server is given. A process of its own, as settings are for good."""
    folder = tmp_path / "shop"
    folder.mkdir()
    for file, text in {"__init__": "", "settings": SETTINGS, "urls": URLS, "wsgi": WSGI}.items():
        (folder / f"{file}.py").write_text(text)
    (tmp_path / "rules.yaml").write_text(
        "rules: [{name: special, qps: 5, path: /items/special}, {name: gone, qps: 1, path: /new}]"
    )
    environment = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    words = [sys.executable, "-m", "limitgate", "routes", name, "--json"]
    process = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode in {0, 1}, process.stderr
    found = json.loads(process.stdout)
    assert table(found) == [
        ("/cart/", "GET", None),
        ("/cart/", "POST", "order"),
        ("/items/<int:id>/", "DELETE GET PATCH POST PUT", "slow"),
        ("/items/special/", "DELETE GET PATCH POST PUT", "special"),
        ("/old/(?P<year>[0-9]+)$", "DELETE GET PATCH POST PUT", None),
    ]
    assert [each["rule"] for each in found["unmatched"]] == ["gone"]
    assert process.returncode == 1


@pytest.mark.parametrize("name", ["nowhere:app", "json:nothing", "json:", ":app", "json:dumps"])
def test_what_names_no_application_is_wrong_usage(name: str) -> None:
    """Nothing there, or nothing that shows routes: told with what is accepted."""
    result = CliRunner().invoke(limitgate, ["routes", name], catch_exceptions=False)
    assert result.exit_code == 2
    assert "expected" in result.stderr


def test_settings_that_are_not_there_are_wrong_usage() -> None:
    """Those of Django, too, which are for good, so in a process of its own."""
    words = [sys.executable, "-m", "limitgate", "routes", "nowhere.settings"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "expected" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("code", "name", "told"),
    [
        ("shop = 1", "shop", "shop has no ROOT_URLCONF"),
        ("def broken(:", "shop:app", "SyntaxError during the import"),
        ("raise RuntimeError('no database')", "shop:app", "RuntimeError during the import: no database"),
    ],
)
def test_a_module_that_is_no_application(tmp_path: Path, code: str, name: str, told: str) -> None:
    """A line says what is wrong with it, and the traceback is to be had from python -c."""
    (tmp_path / "shop.py").write_text(code)
    words = [sys.executable, "-m", "limitgate", "routes", name]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_people_get_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without colours or frames, where there is no terminal."""
    (tmp_path / "shop_table.py").write_text(dedent(STARLETTE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(limitgate, ["routes", "shop_table:app"])
    assert result.exit_code == 1
    assert result.stdout.startswith("Route ")
    assert "These rules match no route:" in result.stdout
    assert "\x1b" not in result.stdout


BROKEN = """
from limitgate import LimitGate, Rule
from starlette.applications import Starlette

app = LimitGate(Starlette(), rules=[Rule("api", qpm=9)])
number = 5
class Shop:
    def __getattr__(self, name): raise RuntimeError("no context")
    async def __call__(self, scope, receive, send): pass
shop = Shop()
def raising(): raise ValueError("no database")
def leaving(): raise SystemExit(3)
def giving_none(): return None
def needing(url): return app
"""
MISTAKES = {
    "nowhere:app": "nowhere:app: No module named 'nowhere' in ",
    "shop_broken:gone": "has no attribute 'gone', expected MODULE:APP",
    "shop_broken.py:app": "expected the module without .py: shop_broken",
    "shop_broken:number": "is an object of int, expected MODULE:APP",
    "shop_broken:number()": "TypeError in number(): 'int' object is not callable",
    "shop_broken:raising": "ValueError in raising(): no database, expected a factory",
    "shop_broken:leaving": "SystemExit in leaving(): 3, expected a factory",
    "shop_broken:giving_none": "is an object of NoneType",
    "shop_broken:needing": "is a function of (url), expected an application, or a call: shop_broken:needing(...)",
    "shop_broken:Shop": "is a class, expected an application, or shop_broken:Shop() to make one",
    "shop_leaving:app": "SystemExit during the import: no config, expected a module that python -c",
    "shop_lacking:app": "ModuleNotFoundError during the import: No module named 'nowhere'",
}
VERBS = {
    "routes": ["routes", "NAME"],
    "explain --app": ["explain", "GET", "/", "--app", "NAME"],
    "explain --rules": ["explain", "GET", "/", "--rules", "NAME"],
    "explain --id": ["explain", "--id", "a" * 32, "--app", "NAME"],
    "peek": ["peek", "--app", "NAME", "--rule", "api", "--ip", "192.0.2.1"],
    "ban": ["ban", "--rules", "NAME", "--rule", "api", "--ip", "192.0.2.1", "-y"],
    "replay": ["replay", "access.log", "--app", "NAME"],
    "replay --against": ["replay", "access.log", "--rules", "shop_broken:app", "--against", "NAME"],
    "check": ["check", "NAME"],
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a verb beside modules that fail in several ways."""
    (tmp_path / "shop_broken.py").write_text(BROKEN)
    (tmp_path / "shop_leaving.py").write_text("import sys; sys.exit('no config')")
    (tmp_path / "shop_lacking.py").write_text("import nowhere")
    (tmp_path / "access.log").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda words, name: CliRunner().invoke(limitgate, [name if word == "NAME" else word for word in words])


@pytest.mark.parametrize("verb", VERBS)
def test_no_application_is_one_line_for_every_verb(broken: Callable[..., Any], verb: str) -> None:
    for name, words in MISTAKES.items():
        result = broken(VERBS[verb], name)
        assert isinstance(result.exception, SystemExit), name
        assert (result.exit_code, words in result.stderr) == (2, True), (name, result.stderr)
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert "expected " in line


@pytest.mark.parametrize("verb", ["routes", "explain --app", "explain --id", "peek"])
def test_an_application_that_cannot_be_looked_into(broken: Callable[..., Any], verb: str) -> None:
    result = broken(VERBS[verb], "shop_broken:shop")
    assert (result.exit_code, "RuntimeError: no context, expected an application of" in result.stderr) == (2, True)


@pytest.mark.parametrize("verb", ["routes", "explain --app"])
def test_a_path_for_a_module(broken: Callable[..., Any], verb: str) -> None:
    assert "did you mean shop_broken? expected MODULE:APP" in broken(VERBS[verb], "./shop_broken:app").stderr


def test_an_empty_name(broken: Callable[..., Any]) -> None:
    assert "the name of the application is empty, expected MODULE:APP" in broken(VERBS["routes"], "").stderr
