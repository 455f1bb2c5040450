"""The service that verbs are about: what the application has in code, and the paths that people name."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from starlette.testclient import TestClient

from limitgate import Limiter, load_rules
from limitgate.command.applications import application
from limitgate.command.group import limitgate
from tests.support import forks
from tests.support.command_line import CliRunner
from tests.support.doors import PROCESS_PATIENCE
from tests.support.redis_server import RedisServer

SECRET = "a secret of tests"
IP = "2001:db8:0:1::7"
ANN = ["--ip", IP]
APPLICATIONS = f"""\
from limitgate import AsyncRedisStore, Caller, LimitGate, LimitGateWSGI, Rule, limit
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

RULES = [
    Rule("api", "2/day", path="/api/**", key=["path", "ip"]),
    Rule("users", "9/day", path="/api/users/**", key=["path", "ip"]),
    Rule("keyed", "2/day", path="/keyed", key=["api_key"]),
    Rule("plan", "2/day", path="/keyed", key=["caller"], tier="paid"),
]


def identify(request):
    return Caller("ann", tier="paid") if request.headers.get("x-api-key") == "anns" else None


async def aidentify(request):
    return identify(request)


async def hello(request):
    return PlainTextResponse("hello")


@limit("2/day", name="search")
async def search(request):
    return PlainTextResponse("found")


def options(url, prefix):
    return dict(rules=RULES, store=url, key_prefix=prefix, secret={SECRET!r}, ipv6_prefix=48, trusted_proxies=["10.0.0.1"])


def create_app(url="URL", prefix="PREFIX", by_object=False):
    paths = "/api/orders/special", "/api/orders/{{id}}", "/api/users/{{name}}", "/keyed"
    app = Starlette(routes=[*[Route(path, hello, methods=["GET"]) for path in paths], Route("/search", search)])
    given = options(AsyncRedisStore(url) if by_object else url, prefix)
    app.add_middleware(LimitGate, identify=aidentify, **given)
    return app


def create_flask_app():
    from flask import Flask
    from limitgate.flask import LimitGate as FlaskGate

    app = Flask("shop")
    for number, path in enumerate(["/api/orders/<int:id>", "/api/users/<name>", "/keyed"]):
        app.add_url_rule(path, str(number), lambda **_: "hello")
    FlaskGate(app, identify=identify, **options("URL", "PREFIX"))
    return app


app = create_app()
by_object = create_app(by_object=True)
around = LimitGate(Starlette(routes=app.routes), identify=aidentify, **options("URL", "PREFIX"))
NO_APP = 7
"""


class Shop:
    """A service with its options in code, whose module can be imported here."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.prefix, self.module = url, f"t{uuid.uuid4().hex}", f"shop_{uuid.uuid4().hex}"
        (folder / f"{self.module}.py").write_text(APPLICATIONS.replace("URL", url).replace("PREFIX", self.prefix))

    def run(self, *words: str) -> Result:
        """Run the command; ``SHOP:`` stands for the module."""
        words = tuple(word.replace("SHOP:", f"{self.module}:") for word in words)
        return CliRunner().invoke(limitgate, ["--", *words][1:], catch_exceptions=False)

    def json(self, *words: str, status: int = 0) -> Any:
        result = self.run(*words, "--timeout", "10", "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    def get(self, path: str, ip: str = IP, **headers: str) -> int:
        """Status of a request to the service."""
        app = application(f"{self.module}:app")

        async def proxied(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "client": ("10.0.0.1", 1)}, receive, send)

        with TestClient(proxied) as client:
            return client.get(path, headers={"X-Forwarded-For": ip, **headers}).status_code


@pytest.fixture
def shop(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in os.environ if name.startswith("LIMITGATE_") and name != "LIMITGATE_TIMEOUT"]:
        monkeypatch.delenv(name)
    return Shop(redis_server.url, tmp_path)


NAMES = ["SHOP:app", "SHOP:around", "SHOP:by_object", "SHOP:create_app", "SHOP:create_app()", "SHOP:create_app(by_object=True)"]


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_taken_from_the_gate(shop: Shop, name: str) -> None:
    """Store, key prefix, secret, proxies and networks, for each way to name the application."""
    url = "/api/orders/1"
    assert [shop.get(url) for _ in range(3)] == [200, 200, 429]
    whom = ["--rule", "api", "--ip", "2001:db8:0:2::9"]  # another address of the same network
    behind = "--ip", "10.0.0.1", "-H", f"X-Forwarded-For: {IP}"
    assert shop.json("explain", "GET", "/api/orders/2", "--app", name, *behind, status=1)["status"] == 429
    for option in ("--app", "--rules"):
        assert shop.json("peek", option, name, *whom, "--path", url, status=1)["remaining"] == 0
    assert shop.json("reset", "--app", name, *whom, "--path", url, "-y")["remaining"] == 2
    assert shop.json("peek", "--app", name, *whom, "--path", url)["remaining"] == 2


def test_a_flask_application_by_its_factory(shop: Shop) -> None:
    """Its identify runs in a request context, and its templates are Werkzeug's."""
    made = application(f"{shop.module}:create_flask_app")
    flask = made.test_client()
    given = {"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": IP, "HTTP_X_API_KEY": "anns"}
    assert [flask.get("/api/orders/1", environ_base=given).status_code for _ in range(3)] == [200, 200, 429]
    assert [flask.get("/keyed", environ_base=given).status_code for _ in range(3)] == [200, 200, 429]
    app = "--app", "SHOP:create_flask_app"
    explained = shop.json("explain", "GET", "/keyed", *app, *ANN, "-H", "X-API-Key: anns", status=1)
    assert (explained["status"], explained["caller"]) == (429, "ann")
    for path in ("/api/orders/2", "/api/orders/<int:id>"):
        assert shop.json("peek", *app, "--rule", "api", *ANN, "--path", path, status=1)["remaining"] == 0
    assert shop.json("peek", *app, "--rule", "api", *ANN, "--path", "/api/users/ann")["remaining"] == 2
    assert shop.json("peek", *app, "--rule", "plan", *ANN, "--api-key", "anns", status=1)["remaining"] == 0
    made.extensions["limitgate"].gate.store.close()


PATHS = ["/api/orders/1", "/api/orders/77?page=2", "https://shop.example/api/orders/x%2Dy#top", "/api/orders/{id}"]


def test_the_path_that_a_customer_names_is_that_of_its_route(shop: Shop) -> None:
    """For each verb; other routes are other buckets."""
    ips = [f"2001:db8:{number}:1::7" for number in range(len(PATHS))]
    for ip, path in zip(ips, PATHS):
        assert [shop.get("/api/orders/1", ip) for _ in range(3)] == [200, 200, 429]
        words = ["--app", "SHOP:app", "--rule", "api", "--ip", ip, "--path", path]
        assert shop.json("peek", *words, status=1)["remaining"] == 0
        assert shop.json("reset", *words, "-y")["remaining"] == 2
        shop.json("ban", *words, "-y")
        assert [shop.get(each, ip) for each in ("/api/orders/9", "/api/orders/special")] == [429, 200]
        shop.json("pardon", *words, "-y")
    time.sleep(1.1)  # a process may refuse for a second more
    assert [shop.get("/api/orders/3", ip) for ip in ips] == [200] * len(ips)


def test_a_path_without_a_route_counts_by_the_pattern(shop: Shop) -> None:
    """As it does in the service, which answers 404."""
    assert [shop.get("/api/nowhere") for _ in range(3)] == [404, 404, 429]
    words = ["peek", "--app", "SHOP:app", "--rule", "api", *ANN]
    assert shop.json(*words, "--path", "/api/another", status=1)["remaining"] == 0
    assert shop.json(*words, "--path", "/api/orders/1")["remaining"] == 2


@pytest.mark.parametrize("verb", ["peek", "reset", "ban", "pardon"])
@pytest.mark.parametrize("name", ["SHOP:app", "SHOP:create_flask_app"])
def test_a_path_without_a_route_is_said_to_have_none(shop: Shop, verb: str, name: str) -> None:
    """A client that is refused under another spelling would seem to have used nothing."""
    words = [verb, "--app", name, "--rule", "api", *ANN, *([] if verb == "peek" else ["-y"])]
    said = shop.run(*words, "--path", "https://shop.example/api/orders/1/?a=b").stderr
    assert "no route matches /api/orders/1/, so this is the bucket of /api/** for paths without a route; did you mean " in said
    assert "did you mean /api/orders/1?" in said
    said = shop.run(*words, "--path", "/api/nowhere").stderr
    assert "no route matches /api/nowhere, so this is the bucket of /api/** for paths without a route\n" in said
    assert "no route" not in shop.run(*words, "--path", "/api/orders/1").stderr


def test_a_path_that_names_no_bucket_is_refused(shop: Shop) -> None:
    """One that the rule is not for, and none where there are several routes: these are named."""
    words = ["peek", "--app", "SHOP:app", "--rule", "api", *ANN]
    missing = shop.run(*words)
    assert (missing.exit_code, "expected --path as one of /api/orders/special, /api/orders/{id}, " in missing.stderr) == (
        2,
        True,
    )
    for path in ("/search", "/search/"):
        other = shop.run(*words, "--path", path)
        assert (other.exit_code, "rule api " in other.stderr) == (2, True)
    users = ["peek", "--app", "SHOP:app", "--rule", "users", *ANN]
    of_another = shop.run(*users, "--path", "/api/orders/{id}")
    assert (of_another.exit_code, "expected --path as one of /api/users/{name}" in of_another.stderr) == (2, True)
    shop.get("/api/users/ann")
    assert shop.json(*users)["remaining"] == 8  # the only route that it is for


RULES = (
    "rules: [{name: api, path: /api/**, key: [path, ip], qpd: 3}, {name: item, path: '/items/{id}', key: [path, ip], qpd: 3}]"
)


@pytest.mark.parametrize("verb", ["peek", "reset", "ban", "pardon"])
@pytest.mark.parametrize(
    ("rule", "path", "template"),
    [
        ("api", "/api/orders/1", "/api/orders/{id}"),
        ("api", "https://shop.example/api/orders/1?x=y", "/api/orders/{id}"),
        ("api", "/api//orders/1/", "/api/orders/{id}"),
        ("api", "/api/v2/users/00f3c9aa-0d1e/orders", "/api/v2/users/{id}/orders"),
        ("api", "/api/users/ann@example.com", "/api/users/{id}"),
        ("item", "/items/special", "/items/{id}"),
    ],
)
def test_without_routes_a_path_of_one_request_is_refused(shop: Shop, verb: str, rule: str, path: str, template: str) -> None:
    """The template is named that it is probably of, and the way to have it looked up."""
    Path("rules.yaml").write_text(RULES)
    words = ["--store", shop.url, "--rules", "rules.yaml", "--rule", rule, *ANN]
    result = shop.run(verb, *words, "--path", path, *([] if verb == "peek" else ["-y"]))
    assert result.exit_code == 2
    assert f"such as '{template}'; expected that as --path, or --app MODULE:APP, which knows the routes" in result.stderr
    assert shop.run("peek", *words, "--path", template).exit_code == 0
    wrong = shop.run("peek", *words, "--path", "/login")
    assert (wrong.exit_code, f"rule {rule} does not match this path" in wrong.stderr) == (2, True)


def test_a_bucket_that_nobody_has_used_is_said_to_be_one(shop: Shop, tmp_path: Path) -> None:
    """Where the routes are not known it may be the wrong one: words look like templates."""
    (tmp_path / "rules.yaml").write_text(RULES)
    words = ["--store", shop.url, "--key-prefix", shop.prefix, "--rules", "rules.yaml", "--rule", "api", *ANN]
    said = "this client has no usage under /api/users/ann or /api/**; if the route has parameters"
    for verb in ("peek", "reset", "ban"):
        result = shop.run(verb, *words, "--path", "/api/users/ann", *([] if verb == "peek" else ["-y"]))
        assert (result.exit_code, said in result.stdout) == (0, True)
    assert said not in shop.run("peek", *words, "--path", "/api/users/ann").stdout  # banned
    (tmp_path / "rules.yaml").write_text("rules: [{name: api, path: /exact, key: [path, ip], qpd: 3}]")
    assert "has no usage under /exact; if" in shop.run("peek", *words, "--path", "/exact").stdout


def test_a_bucket_of_paths_without_a_route_is_said_to_be_one(shop: Shop, tmp_path: Path) -> None:
    """A ban of one route also holds for paths without a route. It does not hold for another route."""
    (tmp_path / "rules.yaml").write_text(RULES)
    words = ["--store", shop.url, "--key-prefix", shop.prefix, "--rules", "rules.yaml", "--rule", "api", *ANN]
    assert "this is the bucket" not in shop.run("ban", *words, "--path", "/api/orders/{id}", "-y").stdout
    said = "this is the bucket of /api/**, for paths without a route; if /api/hello is a route, its own bucket has more room"
    for verb in ("peek", "pardon"):
        result = shop.run(verb, *words, "--path", "/api/hello", *([] if verb == "peek" else ["-y"]))
        assert (result.exit_code, said in result.stdout) == (1 if verb == "peek" else 0, True)
    left = shop.run("peek", *words, "--path", "/api/orders/{id}")
    assert (left.exit_code, "this is the bucket" in left.stdout) == (1, False)


def test_callers_are_those_that_the_service_identifies(shop: Shop) -> None:
    """By the key that a client sends, also where identify is async; a key that it does not know counts as none."""
    assert [shop.get("/keyed", **{"X-API-Key": "anns"}) for _ in range(3)] == [200, 200, 429]
    key = "--api-key", "anns"
    assert shop.json("peek", "--app", "SHOP:app", "--rule", "plan", *key, *ANN, status=1)["rule"] == "plan"
    assert shop.json("peek", "--app", "SHOP:app", "--rule", "keyed", *key, *ANN, status=1)["rule"] == "keyed"
    assert shop.json("peek", "--app", "SHOP:app", "--rule", "keyed", "--api-key", "other", *ANN)["remaining"] == 2
    shop.get("/keyed", **{"X-API-Key": "other"})
    assert shop.json("peek", "--app", "SHOP:app", "--rule", "keyed", *ANN)["remaining"] == 1


def test_limits_in_code_by_their_name(shop: Shop) -> None:
    assert [shop.get("/search") for _ in range(3)] == [200, 200, 429]
    assert shop.json("peek", "--app", "SHOP:app", "--rule", "search", *ANN, status=1)["remaining"] == 0


def test_options_of_the_command_line_are_stronger(shop: Shop) -> None:
    """As where one looks at another environment."""
    assert [shop.get("/api/users/x") for _ in range(3)] == [200, 200, 429]
    words = ["peek", "--app", "SHOP:app", "--rule", "api", *ANN, "--path", "/api/users/x"]
    assert shop.json(*words, status=1)["remaining"] == 0
    for option in (["--key-prefix", "other"], ["--secret", "another secret of tests"], ["--ipv6-prefix", "64"]):
        assert shop.json(*words, *option)["remaining"] == 2
    explain = "explain", "GET", "https://shop.example/api/users/y", "--app", "SHOP:app", *ANN
    assert shop.json(*explain, status=1)["status"] == 429
    assert shop.json(*explain, "--store", "memory://")["status"] == 200


def test_an_api_key_of_more_than_ascii(shop: Shop, tmp_path: Path) -> None:
    """It is what a server makes of the bytes."""
    (tmp_path / "rules.yaml").write_text(
        "rules: [{name: keyed, key: [api_key], qpd: 3}, {name: headed, key: ['header:X-Id'], qpd: 3}]"
    )
    words = ["--store", shop.url, "--key-prefix", shop.prefix, "--rules", "rules.yaml"]
    keyed, headed = load_rules("rules.yaml").tiers["default"]
    sent = "schlüssel".encode().decode("latin-1")
    with Limiter(shop.url, key_prefix=shop.prefix, timeout=5) as limiter:
        limiter.bucket(keyed, api_key=sent).ban(60)
        limiter.bucket(headed, headers={"X-Id": sent}).ban(60)
    assert not shop.json("peek", *words, "--rule", "keyed", "--api-key", "schlüssel", status=1)["allowed"]
    assert not shop.json("peek", *words, "--rule", "headed", "-H", "X-Id: schlüssel", status=1)["allowed"]


DJANGO = {
    "settings": """\
from limitgate import Caller
SECRET_KEY = "x"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
MIDDLEWARE = ["limitgate.django.LimitGateMiddleware"]

def identify(request):
    return Caller("ann") if request.headers.get("x-api-key") == "anns" else None

async def aidentify(request):
    return identify(request)

LIMITGATE = dict(rules="rules.yaml", store="AT", key_prefix="PREFIX", secret="sixteen letters.", identify=HOW)
""",
    "urls": """\
from django.http import HttpResponse
from django.urls import path

def yes(request, **found):
    return HttpResponse("yes")

urlpatterns = [path("orders/<int:id>/", yes), path("me/", yes)]
""",
    "wsgi": """\
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.wsgi import get_wsgi_application
application = get_wsgi_application()
""",
    "asgi": """\
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.asgi import get_asgi_application
application = get_asgi_application()
""",
    "visit": """\
from django.test import Client
import shop.wsgi
headers = {"REMOTE_ADDR": "203.0.113.7", "HTTP_X_API_KEY": "anns"}
print(*[Client().get(path, **headers).status_code for path in ["/orders/1/"] * 3 + ["/me/"] * 3])
""",
    "ask": """\
import json
import sys
from limitgate.command.group import limitgate
from tests.support.command_line import CliRunner
asked = [CliRunner().invoke(limitgate, words) for words in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in asked]))
""",
}


@pytest.mark.parametrize(("door", "identify"), [("wsgi", "identify"), ("asgi", "identify"), ("asgi", "aidentify")])
def test_a_project_of_django(shop: Shop, tmp_path: Path, door: str, identify: str) -> None:
    """Options in its settings, its templates and its identify, in a process of its own: Django has one project in each."""
    (tmp_path / "rules.yaml").write_text(
        "rules: [{name: api, path: /orders/**, key: [path, ip], qpd: 2}, {name: me, path: /me, key: [caller], qpd: 2}]"
    )
    (tmp_path / "shop").mkdir()
    for name, text in DJANGO.items():
        code = text.replace('"AT"', repr(shop.url)).replace('"PREFIX"', repr(shop.prefix)).replace("HOW", identify)
        (tmp_path / "shop" / f"{name}.py").write_text(code)

    def run(module: str, *words: str) -> str:
        command = [sys.executable, "-m", module, *words]
        said = forks.ended(command, tmp_path / "said", os.environ, PROCESS_PATIENCE, cwd=tmp_path, imported=forks.DJANGO)
        return said[1]

    visited = run("shop.visit")
    if identify == "identify":
        assert visited == "200 200 429 200 200 429\n"

    known = "--ip", "203.0.113.7", "-H", "X-API-Key: anns"
    verbs = [
        ["explain", "GET", "/me/", *known],
        ["peek", "--rule", "api", "--ip", "203.0.113.7", "--path", "/orders/77/"],
        ["peek", "--rule", "me", *known, "--path", "/me/"],
    ]
    options = "--app", f"shop.{door}:application", "--json", "--timeout", "10"
    asked = run("shop.ask", json.dumps([[*words, *options] for words in verbs]))
    (explained, said), (orders, of_orders), (me, of_me) = [
        (status, json.loads(stdout or "null") or stderr) for status, stdout, stderr in json.loads(asked)
    ]
    assert (said["caller"], said["tier"], explained) == ("ann", "default", int(identify == "identify"))
    assert (of_orders["remaining"], orders) == ((0, 1) if identify == "identify" else (2, 0))
    assert (of_me["remaining"], me) == ((0, 1) if identify == "identify" else (2, 0))


def test_without_a_store_it_is_said(shop: Shop, tmp_path: Path) -> None:
    """All buckets are full then, whatever the service has."""
    (tmp_path / "rules.yaml").write_text(RULES)
    words = "explain", "GET", "/api/x", "--rules", "rules.yaml"
    assert "no store is given, so every bucket counts as full" in shop.run(*words).stderr
    assert "no store is given" not in shop.run(*words, "--store", "memory://").stderr
    assert "no store is given" not in shop.run(*words, "--store", shop.url).stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("SHOP:create_app(", "expected a call with literal arguments"),
        ("SHOP:create_app(url)", "expected a call with literal arguments"),
        (
            "SHOP:create_app(1, 2, 3, 4)",
            "the factory does not take these arguments: too many positional arguments, expected some of: url",
        ),
        ("SHOP:nothing()", "has no attribute 'nothing'"),
        ("SHOP:RULES", "is a list of rules, expected an application"),
        ("SHOP:NO_APP", "is an object of int, expected MODULE:APP"),
    ],
)
def test_what_is_no_application_is_told(shop: Shop, name: str, told: str) -> None:
    result = shop.run("explain", "GET", "/", "--app", name)
    assert (result.exit_code, told in result.stderr) == (2, True), result.stderr


def test_a_factory_is_called_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a verb wants of its application; and its gate is not reported as one that nobody has kept."""
    calls: list[object] = []
    factory = application(f"{shop.module}:create_app")
    assert factory is application(f"{shop.module}:create_app")
    module = sys.modules[shop.module]
    made: Callable[..., Any] = module.create_app

    def counted(url: str = shop.url) -> Any:
        calls.append(url)
        return made(url, shop.prefix)

    monkeypatch.setattr(module, "create_app", counted)
    result = shop.run("explain", "GET", "/api/orders/1", "--app", "SHOP:create_app", "--timeout", "10")
    assert (result.exit_code, len(calls), "LG039" in result.output) == (0, 1, False)


BYTES = b"caf\xe9".decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "GET", f"/{BYTES}", "--rules", "rules.yaml"],
        ["explain", "GET", "/", "--rules", "rules.yaml", "-H", f"X-Id: {BYTES}"],
        ["explain", "--id", BYTES, "--rules", "rules.yaml"],
        ["explain", BYTES, "/", "--rules", "rules.yaml"],
        ["ban", "key", "-y", "--reason", BYTES],
        ["ban", "key", "-y", f"--reason={BYTES}"],
        ["reset", BYTES, "1/day", "-y"],
        ["pardon", BYTES, "-y"],
        ["peek", "--rules", "rules.yaml", "--rule", "api", "--ip", IP, "--path", BYTES],
        ["peek", BYTES],
        ["bans", "--key-prefix", BYTES],
        ["check", BYTES],
        ["replay", BYTES, "--rules", "rules.yaml"],
        ["routes", f"{BYTES}:app"],
        ["schema", BYTES],
        [BYTES],
    ],
    ids=lambda words: words[0] if isinstance(words, list) else None,
)
def test_bytes_that_are_not_utf_8_are_wrong_usage(shop: Shop, tmp_path: Path, words: list[str]) -> None:
    """No traceback, and no ban without its journal entry."""
    (tmp_path / "rules.yaml").write_text(RULES)
    store = ["--store", shop.url] if words[0] in ("ban", "reset", "pardon", "peek", "bans") else []
    result = shop.run(*words[:1], *store, *words[1:])
    assert (result.exit_code, "is not UTF-8, expected text in UTF-8" in result.stderr) == (2, True), result.output
    assert shop.json("peek", "--store", shop.url, "key")["allowed"]


def test_files_may_have_any_name(shop: Shop, tmp_path: Path) -> None:
    """Names of files are bytes."""
    (tmp_path / f"{BYTES}.yaml").write_text(RULES)
    assert shop.run("check", f"{BYTES}.yaml").exit_code == 0
    assert shop.run("explain", "GET", "/", f"--rules={BYTES}.yaml").exit_code == 0


PLANS = """\
from limitgate import Caller, LimitGate, Rule
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

RULES = [
    Rule("api", "5/day", path="/api", key=["caller"]),
    Rule("plan", lambda request: "2/day", path="/plan", key=["caller"]),
    Rule("dated", "5/day", path="/dated", key=["caller"], algorithm="fixed_window"),
    Rule("given", lambda request: "2/day", path="/given", key=["caller"], algorithm="fixed_window"),
]


def identify(request):
    key = request.headers.get("x-api-key")
    return None if key is None else Caller(key, limits={"api": {"broken": "often", "free": None}.get(key, "2/hour")})


async def hello(request):
    return PlainTextResponse("hello")


routes = [Route(path, hello) for path in ("/api", "/plan", "/dated", "/given")]
app = LimitGate(Starlette(routes=routes), rules=RULES, identify=identify, store="URL", key_prefix="PREFIX")
"""


@pytest.fixture
def plans(shop: Shop, tmp_path: Path) -> Shop:
    (tmp_path / f"{shop.module}.py").write_text(PLANS.replace("URL", shop.url).replace("PREFIX", shop.prefix))
    return shop


def test_own_limits_of_a_caller_that_only_identify_knows(plans: Shop) -> None:
    """A reset by those of the rule would miss its windows, so it is refused; a peek says so."""
    ann = {"X-API-Key": "ann"}
    assert [plans.get("/api", **ann) for _ in range(3)] == [200, 200, 429]
    whom = "--app", "SHOP:app", "--rule", "api", "--caller", "ann"
    told = "the application's identify may give this caller other limits than those of rule api, 5/day; "
    result = plans.run("reset", *whom, "-y")
    assert result.exit_code == 2
    assert " ".join(result.stderr.split()).count(f"{told}expected --limits") == 1
    assert f"{told}if they differ, expected --limits" in plans.run("peek", *whom).stderr
    assert plans.json("peek", *whom, "--limits", "2/hour", status=1)["remaining"] == 0
    by_key = "--app", "SHOP:app", "--rule", "api", "--api-key", "ann", "--ip", IP
    assert not plans.run("peek", *by_key).stderr
    assert plans.json("reset", *whom, "--limits", "2/hour", "-y")["remaining"] == 2
    time.sleep(1.1)  # a process that has refused may do so for a second more
    assert plans.get("/api", **ann) == 200


@pytest.mark.parametrize("verb", ["peek", "reset", "ban", "pardon"])
def test_own_limits_that_are_invalid_are_those_of_the_rule(plans: Shop, verb: str) -> None:
    """As in the service, which logs that."""
    broken = {"X-API-Key": "broken"}
    assert plans.get("/api", **broken) == 200
    whom = "--app", "SHOP:app", "--rule", "api", "--api-key", "broken", "--ip", IP
    result = plans.run(verb, *whom, *([] if verb == "peek" else ["-y"]))
    assert result.exit_code == (1 if verb == "pardon" else 0)
    assert "own limits are invalid, so those of rule api apply: 'often' is not a limit" in " ".join(result.stderr.split())
    if verb == "peek":
        assert plans.json("peek", *whom)["remaining"] == 4
    if verb == "ban":
        assert plans.get("/api", **broken) == 429


def test_a_caller_that_a_rule_does_not_limit(plans: Shop) -> None:
    whom = "--app", "SHOP:app", "--rule", "api", "--api-key", "free", "--ip", IP
    assert "rule api does not limit this caller, whose own limits for it are None" in plans.run("peek", *whom).stderr


def test_a_ban_needs_no_limits(plans: Shop) -> None:
    """Neither those of a caller nor those of a callable, and it keeps the usage."""
    ann = {"X-API-Key": "ann"}
    for rule in ("api", "plan"):
        assert plans.get(f"/{rule}", **ann) == 200
        whom = "--app", "SHOP:app", "--rule", rule, "--caller", "ann"
        banned = plans.run("ban", *whom, "--for", "1h", "-y")
        assert (banned.exit_code, banned.stderr) == (0, "")
        assert plans.get(f"/{rule}", **ann) == 429
        pardoned = plans.run("pardon", *whom, "-y")
        assert (pardoned.exit_code, pardoned.stderr) == (0, "")
    time.sleep(1.1)  # a process that has refused may do so for a second more
    for rule in ("api", "plan"):
        assert [plans.get(f"/{rule}", **ann) for _ in range(2)] == [200, 429]


def test_a_ban_that_depends_on_the_windows_says_so(plans: Shop) -> None:
    """Only limits of GCRA share a bucket."""
    whom = "--app", "SHOP:app", "--caller", "ann", "-y"
    assert "may give this caller other limits" in plans.run("ban", *whom, "--rule", "dated").stderr
    result = plans.run("ban", *whom, "--rule", "given")
    assert (result.exit_code, "has its limits from a callable, expected --limits" in result.stderr) == (2, True)


DEPENDENCIES = """\
from fastapi import Depends, FastAPI
from limitgate import LimitGate, Rule
from limitgate.fastapi import RateLimit

async def current_user():
    return "ann"

app = FastAPI()
app.add_middleware(LimitGate, rules=[Rule("login", "5/minute", path="/login")])

@app.get("/mine", dependencies=[Depends(RateLimit("5/minute", name="per-user", key=[current_user]))])
async def mine(): ...

@app.get("/open/{name}", dependencies=[Depends(RateLimit("5/minute", name="per-route", key=["path", "ip"]))])
async def open_to_all(name): ...

@app.get("/shut", dependencies=[Depends(RateLimit("0/minute", name="never"))])
async def shut(): ...

@app.get("/free")
async def free(): ...

@app.get("/both", dependencies=[Depends(RateLimit("5/minute", name="for-get", key=["ip"]))])
async def both(): ...

@app.head("/both", dependencies=[Depends(RateLimit("5/minute", name="for-head", key=["ip"]))])
async def both_head(): ...

@app.head("/head", dependencies=[Depends(RateLimit("5/minute", name="only-head", key=["ip"]))])
async def only_head(): ...
"""


@pytest.fixture
def depending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = f"depending_{uuid.uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(DEPENDENCIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{module}:app"


def test_explain_knows_the_limits_of_dependencies(depending: str) -> None:
    """Those whose keys need no dependency are evaluated, others are named."""

    def explain(path: str, *words: str) -> Result:
        return CliRunner().invoke(limitgate, ["explain", "GET", path, "--app", depending, *words], catch_exceptions=False)

    mine = explain("/mine")
    assert "also limited by the dependency per-user: not evaluated, because it counts by current_user" in mine.stdout
    assert "no rule limits this request" not in mine.stdout
    assert json.loads(explain("/mine", "--json").stdout)["unevaluated"] == ["per-user"]
    opened = json.loads(explain("/open/a", "--json").stdout)
    assert (opened["decision"]["rule"], opened["decision"]["remaining"], opened["unevaluated"]) == ("per-route", 4, [])
    assert [rule["name"] for rule in opened["rules"] if rule["applies"]] == ["per-route"]
    shut = explain("/shut")
    assert (shut.exit_code, "would be refused" in shut.stdout) == (1, True)
    assert "no rule limits this request" in explain("/free").stdout


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [("HEAD", "/head", "only-head"), ("HEAD", "/both", "for-head"), ("GET", "/both", "for-get")],
)
def test_explain_knows_the_limits_of_dependencies_for_head(depending: str, method: str, path: str, rule: str) -> None:
    """Those of the route that answers the method."""
    words = ["explain", method, path, "--app", depending, "--json"]
    found = json.loads(CliRunner().invoke(limitgate, words, catch_exceptions=False).stdout)
    assert [each["name"] for each in found["rules"] if each["applies"]] == [rule]


def test_replay_names_the_limits_of_dependencies(depending: str, tmp_path: Path) -> None:
    """It cannot call them."""
    line = '203.0.113.7 - - [28/Nov/2026:10:05:03 +0000] "GET /mine HTTP/1.1" 200 1\n'
    (tmp_path / "log").write_text(line)
    words = ["replay", "log", "--app", depending]
    text = CliRunner().invoke(limitgate, words, catch_exceptions=False).stdout
    assert "also limited by the dependency per-user: not evaluated\n" in text
    found = json.loads(CliRunner().invoke(limitgate, [*words, "--json"], catch_exceptions=False).stdout)
    assert found["unevaluated"] == ["per-user", "per-route", "never", "for-get", "for-head", "only-head"]


def test_a_client_of_a_dependency(depending: str, redis_server: RedisServer) -> None:
    """By the result of the dependency, as the message says."""
    words = ["--app", depending, "--rule", "per-user", "--store", redis_server.url, "--key-prefix", f"t{uuid.uuid4().hex}"]

    def run(verb: str, *more: str) -> Result:
        return CliRunner().invoke(limitgate, [verb, *words, *more], catch_exceptions=False)

    missing = run("peek")
    assert (missing.exit_code, "expected --given current_user=..., or --ip" in missing.stderr) == (2, True)
    ann, bob = ("--given", "current_user=ann"), ("--given", "current_user=bob")
    banned = run("ban", *ann, "-y")
    assert banned.stdout.startswith("per-user given=current_user:…: banned permanently")
    assert [run("peek", *whom).exit_code for whom in (ann, bob)] == [1, 0]
    assert run("pardon", *ann, "-y").exit_code == run("reset", *ann, "-y").exit_code == 0
    assert run("peek", *ann).exit_code == 0
    for wrong in ("current_user", "=ann", "user="):
        assert "expected NAME=VALUE" in run("peek", "--given", wrong).stderr
    assert "has no key part 'user' for given" in run("peek", "--given", "user=ann", "--ip", IP).stderr


def test_explain_does_not_announce_its_gate(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Its store only reads, and is none of the service."""
    caplog.set_level("INFO", "limitgate")
    shop.run("explain", "GET", "/api/orders/1", "--app", "SHOP:app")
    assert "LookingStore" not in caplog.text


HANDLERS = """\
from flask import Flask
from limitgate import LimitGate, Rule
from limitgate.flask import LimitGate as FlaskGate
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

RULES = [Rule("api", "0/minute")]
plain = LimitGate(Starlette(), rules=RULES)
handled = Starlette(exception_handlers={429: lambda request, error: PlainTextResponse("slow down")})
handled.add_middleware(LimitGate, rules=RULES)
denied = LimitGate(Starlette(), rules=RULES, on_denied=PlainTextResponse("slow down"))
flask_plain, flask_handled = Flask("plain"), Flask("handled")
flask_handled.register_error_handler(429, lambda error: "slow down")
for each in (flask_plain, flask_handled):
    FlaskGate(each, rules=RULES)
"""


@pytest.mark.parametrize(
    ("app", "is_told"),
    [("plain", False), ("handled", True), ("denied", True), ("flask_plain", False), ("flask_handled", True)],
)
def test_explain_says_that_a_handler_answers(shop: Shop, tmp_path: Path, app: str, is_told: bool) -> None:  # noqa: FBT001
    (tmp_path / f"{shop.module}.py").write_text(HANDLERS)
    result = shop.run("explain", "GET", "/", "--app", f"SHOP:{app}")
    assert (result.exit_code, "a handler of the application (or on_denied) makes the body" in result.stdout) == (1, is_told)
