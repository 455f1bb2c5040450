"""Rules that the command is told of: files, and rules in Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from limitgate.command.group import limitgate
from tests.support.command_line import CliRunner
from tests.support.redis_server import RedisServer

SHOP = """\
from flask import Flask
from limitgate import LimitGate, Rule, RuleSet
from limitgate.flask import LimitGate as FlaskGate
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

def hello(request):
    return PlainTextResponse("hello")

RULES = [Rule("api", "5/minute", path="/api/**")]
SET = RuleSet(RULES)
ODD = [Rule("api", "10/second", "5/minute"), Rule("mine", "9/minute", path="/me", key=["caller"])]
TWICE = Starlette()
TWICE.add_middleware(LimitGate, rules=[*RULES, *RULES])
BY_CODE = [Rule("plan", lambda request: None)]
star = Starlette(routes=[Route("/api/{id}", hello)])
star.add_middleware(LimitGate, rules=RULES)
around = LimitGate(Starlette(), rules=RULES)
flask = Flask("shop")
FlaskGate(flask, rules=RULES)
bare = Starlette()
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command where ``shop_in_python`` can be imported."""
    (tmp_path / "shop_in_python.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop_in_python", raising=False)
    monkeypatch.delenv("LIMITGATE_RULES", raising=False)
    return lambda *words: CliRunner().invoke(limitgate, list(words), catch_exceptions=False)


@pytest.mark.parametrize("name", ["RULES", "SET", "star", "around", "flask"])
def test_rules_in_python(run: Run, name: str) -> None:
    """A list, a rule set, or an application with a gate around it."""
    found: Any = json.loads(run("explain", "GET", "/api/x", "--rules", f"shop_in_python:{name}", "--json").stdout)
    assert [(rule["name"], rule["applies"]) for rule in found["rules"]] == [("api", True)]
    assert found["decision"]["remaining"] == 4


def test_an_application_brings_its_own_rules(run: Run) -> None:
    found: Any = json.loads(run("explain", "GET", "/api/x", "--app", "shop_in_python:star", "--json").stdout)
    assert ([rule["name"] for rule in found["rules"]], found["decision"]["remaining"]) == (["api"], 4)


def test_one_client_under_rules_in_python(run: Run, redis_server: RedisServer) -> None:
    words = ["--store", redis_server.url, "--rules", "shop_in_python:star", "--rule", "api", "--ip", "203.0.113.7"]
    result = run("peek", *words)
    assert (result.exit_code, "5 of 5 remaining" in result.stdout) == (0, True)


def test_limits_from_code_are_said(run: Run, redis_server: RedisServer) -> None:
    """What they are for this client only the application knows."""
    words = ["peek", "--store", redis_server.url, "--rules", "shop_in_python:BY_CODE", "--rule", "plan", "--ip", "203.0.113.7"]
    missing = run(*words)
    assert (missing.exit_code, "expected --limits with those of this client" in missing.stderr) == (2, True)
    given = run(*words, "--limits", "7/minute", "--limits", "9/day")
    assert (given.exit_code, "7 of 7 remaining" in given.stdout) == (0, True)
    wrong = run(*words, "--limits", "7/fortnight")
    assert (wrong.exit_code, "'fortnight' is not a unit" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rules", "shop_in_python:bare"], "no LimitGate found around the application, expected one"),
        (["--rules", "shop_in_python:gone"], "has no attribute 'gone', expected MODULE:APP"),
        (["--app", "shop_in_python:bare"], "no LimitGate found around the application"),
        ([], "expected --rules, or --app with its own rules"),
    ],
)
def test_what_leads_to_no_rules_is_wrong_usage(run: Run, words: list[str], told: str) -> None:
    result = run("explain", "GET", "/api/x", *words)
    assert (result.exit_code, told in result.stderr) == (2, True)


def test_rules_in_python_are_checked(run: Run) -> None:
    """What is odd is told with the rule's name, as there are no lines; and mistakes, too."""
    assert run("check", "--strict", "shop_in_python:RULES").exit_code == 0
    odd = run("check", "--strict", "shop_in_python:ODD")
    assert odd.exit_code == 1
    assert "shop_in_python:ODD: warning: rule 'api': limits[0]: 10/second never refuses" in odd.stdout
    assert "rule 'mine': key: counts by caller, but no callers are listed" in odd.stdout
    assert "counts by caller" not in run("check", "--identify", "shop_in_python:ODD").stdout
    twice = run("check", "shop_in_python:TWICE")
    assert (twice.exit_code, "shop_in_python:TWICE: rules[1].name: rule 'api' is duplicated" in twice.stdout) == (1, True)


def test_a_file_with_a_colon_in_its_name_is_a_file(run: Run) -> None:
    Path("a:b.yaml").write_text("rules: [{name: api, qpm: 5}]")
    assert json.loads(run("explain", "GET", "/", "--rules", "a:b.yaml", "--json").stdout)["decision"]["limit"] == 5
