"""What examples of other limiters do, by LimitGate: rows of docs/migrating.md that have no pair of programs there."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Depends, FastAPI, WebSocket
from fastapi.testclient import TestClient
from flask import Blueprint, Flask, request
from flask.testing import FlaskClient

from limitgate import AsyncLimiter, Limiter, MemoryStore, RateLimited, Rule, exempt, limit, usage
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.middleware import LimitGate
from limitgate.testing import FrozenClock, off, reset
from tests.support.fastapi_doors import client as called_from

Options = Any


def flask(*rules: Rule, **options: Options) -> tuple[Flask, FlaskClient]:
    app = Flask(__name__)
    FlaskLimitGate(app, rules=rules, **options)
    return app, app.test_client()


def fastapi(*rules: Rule, **options: Options) -> tuple[FastAPI, TestClient]:
    app = FastAPI()
    app.add_middleware(LimitGate, rules=rules, **options)
    return app, TestClient(app)


def statuses(client: Any, count: int, url: str = "/", method: str = "GET", **more: Any) -> list[int]:
    return [client.open(url, method=method, **more).status_code for _ in range(count)]


def astatuses(client: TestClient, count: int, url: str = "/", method: str = "GET", **more: Any) -> list[int]:
    return [client.request(method, url, **more).status_code for _ in range(count)]


# --- slowapi ------------------------------------------------------------------------------------------------------------


def test_application_limits_and_a_key_that_is_always_the_same() -> None:
    """``application_limits`` count all routes of a client together, a constant ``key_func`` all clients."""
    app, client = fastapi(Rule("all", "3/minute", key=["ip"]), Rule("page", "9/minute", key=["path", "ip"]))
    app.get("/a")(app.get("/b")(lambda: ""))
    assert [*astatuses(client, 2, "/a"), *astatuses(client, 2, "/b")] == [200, 200, 200, 429]
    app, _ = fastapi(Rule("everybody", "2/minute", key=["global"]))
    app.get("/")(lambda: "")
    clients = [called_from(app, address) for address in ("192.0.2.1", "192.0.2.2", "192.0.2.3")]
    assert [client.get("/").status_code for client in clients] == [200, 200, 429]


def test_the_handler_knows_what_was_broken() -> None:
    """``RateLimitExceeded`` has a detail, `RateLimited` its decision; the view finds what is left."""
    app, client = fastapi(Rule("page", "1/minute"))

    @app.exception_handler(RateLimited)
    async def too_many(_: Any, error: RateLimited) -> Any:
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse(f"{error.decision.rule}: {error.decision.limit}", 418)

    app.get("/")(lambda: "")
    assert [client.get("/").status_code for _ in range(2)] == [200, 418]
    refused = client.get("/")
    assert (refused.text, refused.headers["retry-after"], refused.headers["x-ratelimit-remaining"]) == ("page: 1", "60", "0")


def test_reset_and_switching_off() -> None:
    """``limiter.reset()`` and ``limiter.enabled = False``, as tests use them."""
    app, client = fastapi(Rule("page", "1/minute"))
    app.get("/")(lambda: "")
    assert astatuses(client, 2) == [200, 429]
    reset()
    assert astatuses(client, 2) == [200, 429]
    with off():
        assert astatuses(client, 3) == [200] * 3
    assert astatuses(client, 1) == [429]


def test_cost_by_the_request() -> None:
    """``cost`` as a function of the request, shared by several routes."""
    shared = limit("4/minute", name="shared", cost=lambda request: int(request.query.get("n", 1)))
    app, client = fastapi()
    app.get("/a")(shared(lambda: ""))
    app.get("/b")(shared(lambda: ""))
    assert [*astatuses(client, 1, "/a?n=3"), *astatuses(client, 1, "/b?n=2"), *astatuses(client, 2, "/b")] == [
        200,
        429,
        200,
        429,
    ]


# --- fastapi-limiter ----------------------------------------------------------------------------------------------------


def test_dependencies_by_method_several_and_skipped(limitgate_clock: FrozenClock) -> None:
    """One for ``GET`` and another for ``POST``, two on a route, and a route that skips them."""
    app, client = fastapi()
    app.get("/", dependencies=[Depends(RateLimit("2 per 5 seconds"))])(lambda: "")
    app.post("/", dependencies=[Depends(RateLimit("1 per 5 seconds"))])(lambda: "")
    two = [Depends(RateLimit("1 per 5 seconds")), Depends(RateLimit("2 per 15 seconds"))]
    app.get("/multiple", dependencies=two)(lambda: "")
    app.get("/skip", dependencies=[Depends(RateLimit("1 per 5 seconds"))])(exempt(lambda: ""))
    assert (astatuses(client, 3), astatuses(client, 2, method="POST")) == ([200, 200, 429], [200, 429])
    assert astatuses(client, 3, "/skip") == [200] * 3
    assert astatuses(client, 2, "/multiple") == [200, 429]
    limitgate_clock.advance(5)
    assert astatuses(client, 2, "/multiple") == [200, 429]
    limitgate_clock.advance(5)
    assert astatuses(client, 1, "/multiple") == [200]


def test_milliseconds(limitgate_clock: FrozenClock) -> None:
    """``times=1, milliseconds=200`` is ``5/second burst 1``."""
    app, client = fastapi()
    app.get("/", dependencies=[Depends(RateLimit("5/second burst 1"))])(lambda: "")
    assert astatuses(client, 2) == [200, 429]
    limitgate_clock.advance(0.199)
    assert astatuses(client, 1) == [429]
    limitgate_clock.advance(0.001)
    assert astatuses(client, 2) == [200, 429]


def test_messages_by_what_they_say() -> None:
    """``context_key``: each message counts by its own text, and is answered instead of ending the connection."""
    app, client = fastapi()
    limiter = AsyncLimiter("memory://")

    @app.websocket("/ws")
    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            decision = await limiter.hit(f"chat:{text}", "1 per 5 seconds")
            await websocket.send_text("hello" if decision.allowed else "slow down")

    with client.websocket_connect("/ws") as websocket:
        answers = []
        for text in ("a", "a", "b", "b"):
            websocket.send_text(text)
            answers.append(websocket.receive_text())
    assert answers == ["hello", "slow down", "hello", "slow down"]


# --- Flask-Limiter ------------------------------------------------------------------------------------------------------


def test_the_first_steps() -> None:
    """A default of two windows, a stricter view, one with its own on top, one that is exempt."""
    app, client = flask(Rule("default", "200/day", "5/hour", key=["path", "ip"]))
    app.get("/slow")(limit("1/day", replaces=["default"])(lambda: ""))
    app.get("/medium", endpoint="medium")(limit("1/second")(lambda: ""))
    app.get("/fast", endpoint="fast")(lambda: "")
    app.get("/ping", endpoint="ping")(exempt(lambda: ""))
    assert statuses(client, 2, "/slow") == [200, 429]
    assert statuses(client, 2, "/medium") == [200, 429]
    assert statuses(client, 6, "/fast") == [*[200] * 5, 429]
    assert statuses(client, 9, "/ping") == [200] * 9


def test_blueprints() -> None:
    """A limit for all routes of a blueprint and those nested in it, and a blueprint that is exempt."""
    app, client = flask(
        Rule("all", "9/minute"), Rule("shop", "2/minute", path="/shop/**"), Rule("health", path="/health/**", exempt=True)
    )
    shop, cart, health = (Blueprint(name, __name__, url_prefix=f"/{name}") for name in ("shop", "cart", "health"))
    for blueprint in (shop, cart, health):
        blueprint.get("/")(lambda: "")
    shop.register_blueprint(cart)
    app.register_blueprint(shop)
    app.register_blueprint(health)
    assert [*statuses(client, 1, "/shop/"), *statuses(client, 2, "/shop/cart/")] == [200, 200, 429]
    assert statuses(client, 12, "/health/") == [200] * 12


def test_counted_by_what_came_out() -> None:
    """``deduct_when`` looks at the whole response; `charge_if` at its status, ``settle`` at whatever the application likes."""
    app, client = flask(Rule("default", "2/minute", key=["path", "ip"]))

    @app.after_request
    def settle(response: Any) -> Any:
        if response.headers.get("X-Cached"):
            request.environ["limitgate"].settle(0)
        return response

    app.get("/report")(lambda: ("", 200, {"X-Cached": request.args.get("cached", "")}))
    app.get("/found", endpoint="found")(
        limit("1/minute", replaces=["default"], charge_if={"status": [200]})(lambda: ("", int(request.args["status"])))
    )
    assert [*statuses(client, 5, "/report?cached=1"), *statuses(client, 3, "/report")] == [*[200] * 7, 429]
    assert [*statuses(client, 3, "/found?status=404"), *statuses(client, 2, "/found?status=200")] == [404, 404, 404, 200, 429]


def test_on_breach_of_one_view() -> None:
    """A limit is told from the others by its name."""
    app, client = flask(Rule("default", "1/minute", key=["path", "ip"]))

    @app.errorhandler(RateLimited)
    def too_many(error: RateLimited) -> Any:
        return ({"limit": "resource"}, 429) if error.decision.rule == "resource" else ("too many", 429)

    app.get("/resource")(limit("1/minute", name="resource", replaces="*")(lambda: ""))
    app.get("/other", endpoint="other")(lambda: "")
    for _ in range(2):
        replies = client.get("/resource"), client.get("/other")
    assert [reply.status_code for reply in replies] == [429, 429]
    assert (replies[0].json, replies[1].text) == ({"limit": "resource"}, "too many")


def test_shared_by_host() -> None:
    """A ``scope`` that is a function of the request's host."""
    app, client = flask()
    shared = limit("2/minute", name="shared", key=["host"])
    app.get("/a")(shared(lambda: ""))
    app.get("/b", endpoint="b")(shared(lambda: ""))
    for host in ("http://one.example", "http://two.example"):
        asked = [client.get(url, base_url=host).status_code for url in ("/a", "/b", "/a")]
        assert asked == [200, 200, 429]


def test_the_current_limit_and_checks_inside_of_a_view() -> None:
    """``limiter.current_limit`` and ``with limiter.limit(...)``."""
    store = MemoryStore()
    limiter = Limiter(store)
    app, client = flask(Rule("default", "9/minute"), store=store)

    @app.get("/")
    def view() -> Any:
        allowed = limiter.hit("expensive", "2/minute").allowed
        return {"left": usage(request)[0].remaining, "decided": request.environ["limitgate"].remaining, "allowed": allowed}

    answers = [client.get("/").json for _ in range(3)]
    assert answers == [
        {"left": 8, "decided": 8, "allowed": True},
        {"left": 7, "decided": 7, "allowed": True},
        {"left": 6, "decided": 6, "allowed": False},
    ]


@pytest.mark.parametrize("evil", [False, True])
def test_limits_and_costs_by_the_request(evil: bool) -> None:  # noqa: FBT001
    """Default limits and a default cost that are functions."""
    rule = Rule(
        "default",
        lambda request: "4/minute" if request.headers.get("x-evil") else "6/minute",
        key=["path", "ip"],
        cost=lambda request: 2 if request.headers.get("x-evil") else 1,
    )
    app, client = flask(rule)
    app.get("/")(lambda: "")
    admitted = 2 if evil else 6
    assert statuses(client, admitted + 1, headers={"X-Evil": "1"} if evil else {}) == [*[200] * admitted, 429]
