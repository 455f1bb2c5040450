"""The page about Flask is held to its word where statuses alone do not tell."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from limitgate import MemoryStore
from tests.support.clock import Clock
from tests.support.markdown import blocks
from tests.support.printed import imported

PAGE = "docs/flask.md"


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time stand still for stores that are not named."""
    monkeypatch.setattr("limitgate.stores.MemoryStore", lambda: MemoryStore(Clock()))


def test_the_first_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views find the decision, what is exempt has no fields, and the command prints what the page says that it prints."""
    monkeypatch.setattr("limitgate.rules.decorators._places", Counter())  # as in a process that has not imported it before
    app: Any = imported(PAGE, "shop.py", tmp_path, monkeypatch).app
    client = app.test_client()
    assert [client.get("/api/hello").json["remaining"] for _ in range(5)] == [4, 3, 2, 1, 0]
    assert "X-RateLimit-Limit" not in client.get("/healthz").headers
    (shown,) = blocks(PAGE, "text")
    assert app.test_cli_runner().invoke(args=["limitgate"]).output == shown.text


def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension of a factory is configured as printed, by Flask's variables too, and each application counts alone."""
    module: Any = imported(PAGE, "factory.py", tmp_path, monkeypatch)
    monkeypatch.setenv("FLASK_LIMITGATE_HEADERS", "draft-11")
    for app, field in ((module.app, "X-RateLimit-Limit"), (module.create_app(), "RateLimit")):
        replies = [app.test_client().get("/api/hello") for _ in range(11)]
        assert [reply.status_code for reply in replies] == [200] * 10 + [429]
        assert all(field in reply.headers for reply in replies)


def test_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is logged in has a bucket of its own, others go by their address."""
    app: Any = imported(PAGE, "accounts.py", tmp_path, monkeypatch).app
    for user in (None, "ann", "bob"):
        client = app.test_client()
        if user:
            assert client.get(f"/login/{user}").text == "welcome"
        replies = [client.get("/hello") for _ in range(11)]
        assert [reply.status_code for reply in replies] == [200] * 10 + [429]
        assert replies[0].text == f"hello {user or 'stranger'}"


def test_a_refusal_by_flask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is made by Flask, with what ``after_request`` functions add, and LimitGate's own fields."""
    app: Any = imported(PAGE, "refusals.py", tmp_path, monkeypatch).app
    client = app.test_client()
    *_, reply = [client.get("/hello") for _ in range(11)]
    assert (reply.status_code, reply.json) == (429, {"error": "slow down", "seconds": 6})
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    assert (reply.headers["Retry-After"], reply.headers["X-RateLimit-Remaining"]) == ("6", "0")
