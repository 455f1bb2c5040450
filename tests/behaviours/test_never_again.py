"""Refusals that waiting cannot help against: no ``Retry-After``, valid JSON everywhere, and a body that says why."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, get
from litestar.response import Response as LitestarResponse
from quart import Quart
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from limitgate import AsyncLimiter, Decision, Limiter, LimitGate, LimitGateWSGI, MemoryStore, RateLimited, RedisStore, Rule
from limitgate.flask import LimitGate as FlaskLimitGate
from tests.support.clock import Clock
from tests.support.doors import PEER, Reply, asgi_reply, handshake, wsgi_reply
from tests.support.redis_server import RedisServer

TOO_DEAR = Rule("api", "1/minute", cost=lambda _: 2)
BANNED = Rule("api", "1/minute")
DAY = 86_400


def strict_json(body: bytes) -> Any:
    """Parse JSON as RFC 8259 has it, which Python's own parser alone does not."""

    def no_number(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    return json.loads(body, parse_constant=no_number)


def options(rule: Rule) -> dict[str, Any]:
    store = MemoryStore(Clock())
    Limiter(store).bucket(BANNED, ip=PEER).ban() if rule is BANNED else None
    return {"rules": [rule], "store": store}


def told(error: RateLimited) -> dict[str, Any]:
    return {"seconds": error.retry_after_header, "decision": error.decision._asdict()}


def starlette(options: dict[str, Any], kind: type = Starlette) -> Any:
    app = kind(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
    app.add_exception_handler(RateLimited, lambda _, error: JSONResponse(told(error), 429))
    app.add_middleware(LimitGate, **options)
    return app


def fastapi(options: dict[str, Any]) -> Any:
    return starlette(options, FastAPI)


def litestar(options: dict[str, Any]) -> Any:
    @get("/")
    async def view() -> str:
        return "hello"

    handlers: Any = {RateLimited: lambda _, error: LitestarResponse(told(error), status_code=429)}
    return LimitGate(Litestar([view], exception_handlers=handlers, logging_config=None), **options)


def quart(options: dict[str, Any]) -> Any:
    app = Quart("app")

    async def answer(error: Any) -> Any:
        return told(error), 429

    app.register_error_handler(RateLimited, answer)
    app.asgi_app = LimitGate(app.asgi_app, **options)  # type: ignore[method-assign]
    return app


def flask(options: dict[str, Any]) -> Any:
    app = Flask("app")
    app.register_error_handler(RateLimited, lambda error: (told(error), 429))
    FlaskLimitGate(app, **options)
    return app


def asgi(options: dict[str, Any]) -> Any:
    return LimitGate(Starlette(), **options)


def wsgi(options: dict[str, Any]) -> Any:
    return LimitGateWSGI(lambda _, start_response: start_response("200 OK", []) or [], **options)


def reply_of(app: Any) -> Reply:
    return wsgi_reply(app) if isinstance(app, Flask | LimitGateWSGI) else asyncio.run(asgi_reply(app))


RULES = pytest.mark.parametrize(
    ("rule", "detail"),
    [
        (TOO_DEAR, "This request is more than its limit ever allows. Waiting does not help."),
        (BANNED, "You are banned permanently. Waiting does not help."),
    ],
    ids=["cost", "ban"],
)


@RULES
@pytest.mark.parametrize("make", [asgi, wsgi])
def test_the_problem_says_why(make: Callable[[dict[str, Any]], Any], rule: Rule, detail: str) -> None:
    """Without ``Retry-After``, in the header and in the body."""
    refused = reply_of(make(options(rule)))
    assert refused.status == 429
    assert "retry-after" not in refused.headers
    assert strict_json(refused.body)["detail"] == detail
    assert ("x-ratelimit-reset" in refused.headers) is (rule is not BANNED)


@RULES
@pytest.mark.parametrize("make", [starlette, fastapi, litestar, quart, flask])
def test_a_handler_of_the_application_sends_valid_json(make: Callable[[dict[str, Any]], Any], rule: Rule, detail: str) -> None:
    """By ``retry_after_header`` and ``_asdict``; nothing is added that says when to come back."""
    refused = reply_of(make(options(rule)))
    assert refused.status == 429
    assert "retry-after" not in refused.headers
    body = strict_json(refused.body)
    assert body["seconds"] is body["decision"]["retry_after"] is None
    assert body["decision"]["windows"][0]["retry_after"] is None


@RULES
def test_a_websocket_is_told_the_same(rule: Rule, detail: str) -> None:
    """Where the server can send it a response."""
    denied = asyncio.run(handshake(asgi(options(rule)), "/"))
    assert "retry-after" not in denied.headers
    assert strict_json(denied.body)["detail"] == detail


@pytest.mark.parametrize("style", ["x-ratelimit", "x-ratelimit-windows", "draft-11"])
def test_every_style_of_fields_can_be_written(style: str) -> None:
    """Of a ban there is no time of return."""
    refused = reply_of(asgi(options(BANNED) | {"headers": [style]}))
    assert refused.status == 429
    assert refused.headers.get("ratelimit", '"api";r=0') == '"api";r=0'


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.2, 1), (1.0, 1), (1.001, 2), (59.5, 60), (40 * 365 * DAY, 40 * 365 * DAY), (math.inf, None)]
)
def test_the_value_of_the_field(seconds: float, header: int | None) -> None:
    """Whole seconds, rounded up, at least 1; the same of a decision and its error."""
    decision = Decision(False, 1, 0, seconds, 1.0, 0, "api")
    assert decision.retry_after_header == RateLimited(decision).retry_after_header == header


def test_there_is_nothing_to_wait_for_where_a_request_passes() -> None:
    """And a store that fails is tried again soon."""
    assert Decision(True, 1, 1, 0.0, 0.0, 1, "api").retry_after_header is None
    assert Decision(False, 0, 0, 0.0, 0.0, 0, None, degraded=True).retry_after_header == 1


def test_a_ban_with_an_end_says_when() -> None:
    """Decades as well: only what was banned without seconds is banned permanently."""
    store = MemoryStore(Clock())
    Limiter(store).bucket(BANNED, ip=PEER).ban(40 * 365 * DAY)
    refused = reply_of(LimitGate(Starlette(), rules=[BANNED], store=store))
    assert refused.headers["retry-after"] == str(40 * 365 * DAY)
    assert b"banned" not in refused.body


def permanently_banned(limiter: Limiter) -> Decision:
    limiter.ban("ann")
    return limiter.hit("ann", "5/minute")


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_an_error_of_a_limiter(redis_server: RedisServer, kind: str) -> None:
    """It says what a person has to know, pickled as well; and ``banned`` and ``peek`` agree."""
    store = MemoryStore() if kind == "memory" else RedisStore(redis_server.url)
    with Limiter(store, timeout=5, key_prefix=f"never {kind}") as limiter:
        error = RateLimited(permanently_banned(limiter))
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == "rate limited, banned permanently"
        assert error.retry_after_header is None
        assert limiter.banned("ann").retry_after == limiter.peek("ann", "5/minute").retry_after == math.inf
        assert str(RateLimited(limiter.hit("bob", "5/minute", cost=6))) == "rate limited, the cost never fits"
        limiter.pardon("ann")
        assert limiter.hit("ann", "5/minute").allowed


def test_who_waits_as_long_as_it_takes_hears_of_a_pardon() -> None:
    """A ban may be lifted before its end; a permanent one is refused at once."""

    async def main() -> tuple[Decision, Decision]:
        limiter = AsyncLimiter(MemoryStore())
        await limiter.ban("ann")
        refused = await limiter.wait("ann", "5/minute", timeout=None)
        await limiter.pardon("ann")
        await limiter.ban("ann", 3600)
        waiting = asyncio.create_task(limiter.wait("ann", "5/minute", timeout=None))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await limiter.pardon("ann")
        return refused, await waiting

    refused, admitted = asyncio.run(main())
    assert (refused.allowed, refused.retry_after, admitted.allowed) == (False, math.inf, True)
