"""The verb `explain`."""

from __future__ import annotations

import json
import shlex
import uuid
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from limitgate import LimitGateWSGI
from limitgate.command.verbs import limitgate
from tests.support.redis_server import RedisServer

CONFIG = str(Path(__file__).parents[2] / "config")


def run(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(limitgate, ["explain", *words], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def told(*words: str, status: int = 0) -> Any:
    return json.loads(run(*words, "--json", status=status).stdout)


def test_json() -> None:
    """Who, which rules and why, the decision, and the answer with its fields."""
    found = told("GET", "/api//hello?x=1", "--rules", CONFIG, "--ip", "203.0.113.7", "-H", "X-API-Key: demo-vip-key")
    assert {name: found[name] for name in ("client", "caller", "tier", "path", "status")} == {
        "client": "203.0.113.7",
        "caller": "acme",
        "tier": "vip",
        "path": "/api/hello",
        "status": 200,
    }
    assert [(rule["name"], rule["tier"], rule["applies"]) for rule in found["rules"]] == [
        ("api", "default", False),
        ("login", "default", False),
        ("health", "default", False),
        ("api", "vip", True),
    ]
    assert found["decision"]["allowed"] is True
    assert len(found["decision"]["windows"]) == 3
    assert ["X-RateLimit-Limit", "50"] in found["headers"]


def test_text() -> None:
    """The same for people."""
    text = run("POST", "/login", "--rules", CONFIG, "--ip", "2001:db8::1").stdout
    assert "Counted as 2001:db8::/64, nobody that is known, tier default, path /login" in text
    assert "limits POST /login: path /login, for POST" in text
    assert "X-RateLimit-Limit: 3" in text
    assert "rule health" not in run("GET", "/healthz", "--rules", CONFIG).stdout.split("health  ")[0]
    assert "no rule limits this request" in run("GET", "/healthz", "--rules", CONFIG).stdout


def test_behind_a_proxy() -> None:
    """The proxies that are trusted are those that are named, or those of the environment."""
    words = "GET", "/api/x", "--rules", CONFIG, "--ip", "10.0.0.1", "-H", "X-Forwarded-For: 203.0.113.7"
    assert told(*words)["client"] == "10.0.0.1"
    found = told(*words, "--trusted-proxy", "10.0.0.0/8")
    assert found["client"] == "203.0.113.7"
    assert [hop["address"] for hop in found["hops"]] == ["10.0.0.1", "203.0.113.7"]


@pytest.mark.parametrize("app", ["example_app.main:app", "example_app.wsgi:app"])
def test_routes_of_an_application(app: str) -> None:
    """Its templates are in the keys, and its decorators among the rules."""
    found = told("GET", "/api/items/5", "--rules", CONFIG, "--app", app)
    other = told("GET", "/api/items/6", "--rules", CONFIG, "--app", app)
    hello = told("GET", "/api/hello", "--rules", CONFIG, "--app", app)
    assert found["buckets"][0]["key"] == other["buckets"][0]["key"] != hello["buckets"][0]["key"]


def test_a_live_store(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is seen as the service gives it, exit status 1, and nothing is charged by asking."""
    prefix = f"t{uuid.uuid4().hex}"
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", prefix)
    gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules=CONFIG, store=redis_server.url, timeout=5)
    asked = {"REQUEST_METHOD": "POST", "PATH_INFO": "/login", "REMOTE_ADDR": "203.0.113.7"}
    words = "POST", "/login", "--rules", CONFIG, "--ip", "203.0.113.7", "--store", redis_server.url, "--timeout", "10"
    for left in (2, 1, 0):
        for _ in range(3):
            assert told(*words)["decision"]["remaining"] == left
        list(gate(dict(asked), lambda *_: None))
    found = told(*words, status=1)
    assert found["status"] == 429
    assert found["decision"]["allowed"] is False
    assert "Retry-After" in dict(found["headers"])
    assert "would be refused" in run(*words, status=1).stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["GET", "x", "--rules", CONFIG], 2, "expected one such as /api/hello"),
        (["GET", "/", "--rules", "missing"], 1, "missing"),
        (["GET", "/"], 2, "--rules"),
        (["GET", "/", "--rules", CONFIG, "-H", "nonsense"], 2, "expected 'Name: value'"),
        (["GET", "/", "--rules", CONFIG, "--app", "nonsense"], 2, "expected MODULE:APP"),
        (["GET", "/", "--rules", CONFIG, "--app", "no.such:app"], 2, "expected MODULE:APP"),
        (["GET", "/", "--rules", CONFIG, "--app", "json:nope"], 2, "expected MODULE:APP"),
        (["GET", "/", "--rules", CONFIG, "--store", "ftp://h"], 2, "ftp"),
        (["GET", "/", "--rules", CONFIG, "--trusted-proxy", "nowhere"], 1, "no address or CIDR"),
    ],
)
def test_mistakes_are_told(words: list[str], status: int, message: str) -> None:
    """Wrong words, options and files."""
    assert message in run(*words, status=status).stderr


def test_a_store_that_is_gone() -> None:
    """Exit status 3: what `on_error` would do is no explanation."""
    run("GET", "/api/x", "--rules", CONFIG, "--store", "redis://127.0.0.1:1", "--timeout", "1", status=3)


def test_the_documentation_shows_what_it_prints() -> None:
    """The page's command, but for the fields, which depend on the time."""
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    command = page.split("```sh\n")[1].split("\n```")[0].replace(" config/ ", f" {CONFIG} ")
    printed = page.split("```text\n")[1].split("```")[0]
    text = run(*shlex.split(command)[2:]).stdout
    assert text.startswith(printed)
