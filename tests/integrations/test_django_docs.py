"""What docs/django.md shows works as it is printed there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.test import Client, override_settings
from django.urls import path

import limitgate.django.apps
from limitgate import Limiter, MemoryStore, Rule
from tests.support.clock import Clock
from tests.support.django_app import AUTHENTICATION, SESSIONS, WAYS, Project, hello
from tests.support.versions import needs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "django.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(text: str) -> dict[str, Any]:
    """The names that the one block with this text in it defines."""
    (code,) = [each for each in BLOCKS if text in each]
    namespace: dict[str, Any] = {"__name__": "shown"}
    exec(compile(code, "docs/django.md", "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def in_memory(limitgate: dict[str, Any]) -> dict[str, Any]:
    """``LIMITGATE`` as shown, but for the store."""
    return {**limitgate, "STORE": MemoryStore(Clock())}


def test_the_settings_have_no_mistakes() -> None:
    """The settings pass the checks, and what they name exists."""
    shown = block("# settings.py")
    with override_settings(**{name: shown[name] for name in ("MIDDLEWARE", "LIMITGATE")}, ROOT_URLCONF=()):
        assert not [message for message in run_checks() if message.id.startswith("limitgate")]
    with override_settings(MIDDLEWARE=shown["MIDDLEWARE"], LIMITGATE=in_memory(shown["LIMITGATE"]), ROOT_URLCONF=()):
        assert "X-RateLimit-Limit" in Project("wsgi").ask("/api/x")


SHOP = """
import shop
from django.test import Client
client = Client()
statuses = [client.post("/login").status_code for _ in range(4)]
assert statuses == [200, 200, 200, 429], statuses
assert [client.get("/api/items/7").json()["remaining"] for _ in range(2)] == [99, 98]
assert client.get("/health").status_code == 200
"""


def test_the_project_in_one_file(tmp_path: Path) -> None:
    """The file is a project: its checks find nothing, it serves, and it limits."""
    (code,) = [each for each in BLOCKS if "execute_from_command_line" in each]
    (tmp_path / "shop.py").write_text(code)
    commands = [["-c", SHOP], ["shop.py", "check", "--fail-level", "WARNING"]]
    running = [
        subprocess.Popen(
            [sys.executable, *each], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for each in commands
    ]
    for each in running:
        _, errors = each.communicate(timeout=60)
        assert each.returncode == 0, errors.decode()


def test_rules_by_user() -> None:
    """The rules go by the user."""
    shown = in_memory(block('Rule("upload"')["LIMITGATE"])
    with WAYS["asgi"].project(path("upload", hello), before=(SESSIONS, AUTHENTICATION), LIMITGATE=shown) as it:
        assert [it.ask("/upload", "POST").status_code for _ in range(21)] == [200] * 20 + [429]


def test_identify() -> None:
    """Tokens make callers of two tiers, on either kind of server."""
    shown = block("def identify")
    for way in WAYS.values():
        with way.project(path("x", hello), LIMITGATE=in_memory(shown["LIMITGATE"])) as it:
            limits = [it.ask("/x", headers={"Authorization": f"Token token-of-{who}"}) for who in ("ann", "bob")]
            assert [response["X-RateLimit-Limit"] for response in limits] == ["100", "10"]


def test_decorators() -> None:
    """The views are limited as they say."""
    needs("django", "5.0")  # its csrf_exempt takes coroutines since then
    shown = block("class Reports")
    urls = [path(name, shown[name]) for name in ("login", "feed", "health")]
    with WAYS["asgi"].project(*urls, path("reports", shown["Reports"].as_view())) as it:
        found = [it.ask(url, method) for url, method in [("/login", "POST"), ("/feed", "GET"), ("/reports", "POST")]]
        assert [response["X-RateLimit-Limit"] for response in found] == ["3", "100", "2"]
        assert it.ask("/reports")["X-RateLimit-Limit"] == "1000"
        assert not any("X-RateLimit-Limit" in it.ask(url) for url in ("/login", "/health"))


def test_rates_in_the_settings() -> None:
    """The three throttles find their rates."""
    from rest_framework.response import Response
    from rest_framework.views import APIView

    framework = block("DEFAULT_THROTTLE_RATES")["REST_FRAMEWORK"]
    with override_settings(REST_FRAMEWORK=framework):
        attributes = {"throttle_classes": APIView.settings.DEFAULT_THROTTLE_CLASSES, "get": lambda *_: Response()}
        uploads = type("Uploads", (APIView,), {**attributes, "throttle_scope": "uploads"}).as_view()
        others = type("Others", (APIView,), attributes).as_view()
        with WAYS["wsgi"].project(path("x", others), path("y", uploads)) as it:
            assert it.statuses("/x", "/y", "/y", "/x", "/x") == [200, 200, 429, 429, 429]


def test_logins_by_account() -> None:
    """Each account has its failures, and who has used them up is told when to come back; logins that were right are free."""
    shown = block("# logins.py")
    shown["limiter"] = Limiter(MemoryStore(Clock()))
    shown["authenticate"] = lambda _, *, username, password: username if password == "right" else None
    shown["login"] = lambda *_: None
    with WAYS["wsgi"].project(path("login", shown["log_in"])):

        def replies(password: str, *users: str) -> list[Any]:
            return [Client().post("/login", {"user": user, "password": password}) for user in users]

        right = replies("right", *["ann"] * 9)
        wrong = replies("wrong", "ann", "Ann", "ann ", "ANN", "ann", "ann", "bob")
    assert [reply.status_code for reply in right] == [200] * 9
    assert [reply.status_code for reply in wrong] == [401] * 5 + [429, 401]
    assert wrong[5]["Retry-After"] == "12"


def test_on_denied() -> None:
    """The view answers whoever is refused."""
    shown = block("def too_many")
    with WAYS["wsgi"].project(path("api/x", hello), LIMITGATE=in_memory(shown["LIMITGATE"])) as it:
        replies = [it.ask("/api/x") for _ in range(6)]
    assert (replies[-1].status_code, replies[-1].body) == (429, b"Too much for api.")


def test_switching_off_in_tests() -> None:
    """The test case switches limits off."""
    limited = []

    def test(_: Any) -> None:
        limited.append("X-RateLimit-Limit" in Project("wsgi").ask("/x"))

    with WAYS["wsgi"].project(path("x", hello), rules=[Rule("all", "9/minute")]):
        test(None)
        assert type("Case", (block("Unlimited")["Unlimited"],), {"test": test})("test").run().wasSuccessful()
        test(None)
    assert limited == [True, False, True]


def test_every_block_is_tested() -> None:
    """There is no block that none of these tests is about."""
    assert len(BLOCKS) == 10
    assert PAGE.count("```") == 2 * len(BLOCKS)


def test_the_table_of_checks_is_complete() -> None:
    """Every id that is in the code is in the table, in order."""
    code = Path(limitgate.django.apps.__file__).read_text()
    assert re.findall(r"^\| `(limitgate\.[EW]\d{3})` \|", PAGE, re.MULTILINE) == sorted(
        set(re.findall(r'"(limitgate\.[EW]\d{3})"', code))
    )
