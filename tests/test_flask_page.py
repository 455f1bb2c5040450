"""The page about Flask is held to its word."""

from __future__ import annotations

from typing import Any

import pytest

from limitgate import MemoryStore
from tests.clock import Clock
from tests.pages import code_below, run_code


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time stand still for stores that are not named."""
    monkeypatch.setattr("limitgate.stores.MemoryStore", lambda: MemoryStore(Clock()))


def app_below(heading: str, name: str = "page") -> Any:
    return run_code(code_below("flask.md", heading), name).app


def test_set_up() -> None:
    """Rules from the configuration, a decorator, an exemption and the decision work as printed."""
    client = app_below("Flask").test_client()
    replies = [client.get("/api/hello") for _ in range(6)]
    assert [reply.status_code for reply in replies] == [200] * 5 + [429]
    assert [reply.json["remaining"] for reply in replies[:5]] == [4, 3, 2, 1, 0]
    assert [client.post("/login").status_code for _ in range(4)] == [200, 200, 200, 429]
    assert "X-RateLimit-Limit" not in client.get("/healthz").headers


def test_the_command() -> None:
    """What the page says that the command prints is what it prints."""
    result = app_below("Flask", "shop").test_cli_runner().invoke(args=["limitgate"])
    assert result.output == code_below("flask.md", "Which limits apply", "text")


def test_a_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension of a factory is configured as printed, by Flask's variables too, and each application counts alone."""
    module = run_code(code_below("flask.md", "With an application factory"), "factory")
    monkeypatch.setenv("FLASK_LIMITGATE_HEADERS", "draft-11")
    for app, field in ((module.app, "X-RateLimit-Limit"), (module.create_app(), "RateLimit")):
        replies = [app.test_client().get("/api/hello") for _ in range(11)]
        assert [reply.status_code for reply in replies] == [200] * 10 + [429]
        assert all(field in reply.headers for reply in replies)


def test_sessions() -> None:
    """Whoever is logged in has a bucket of its own, others go by their address."""
    app = app_below("Who is asking")
    for user in (None, "ann", "bob"):
        client = app.test_client()
        if user:
            assert client.get(f"/login/{user}").text == "welcome"
        replies = [client.get("/hello") for _ in range(11)]
        assert [reply.status_code for reply in replies] == [200] * 10 + [429]
        assert replies[0].text == f"hello {user or 'stranger'}"


def test_a_refusal_by_flask() -> None:
    """The refusal is made by Flask, with what ``after_request`` functions add, and LimitGate's own fields."""
    client = app_below("What a refused request gets").test_client()
    *_, reply = [client.get("/hello") for _ in range(11)]
    assert (reply.status_code, reply.json) == (429, {"error": "slow down", "seconds": 6})
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    assert (reply.headers["Retry-After"], reply.headers["X-RateLimit-Remaining"]) == ("6", "0")
