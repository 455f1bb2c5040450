"""``usage`` and ``ausage``: what is left for the caller of a request, through every door, charged to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request as FastAPIRequest
from flask import Flask, request as flask_request
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from limitgate import (
    AsyncRedisStore,
    Caller,
    ConfigError,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Rule,
    RuleSet,
    StoreError,
    ausage,
    exempt,
    limit,
    usage,
)
from limitgate.fastapi import RateLimit
from tests.support.clock import Clock
from tests.support.doors import Reply, asgi_reply, wsgi_reply
from tests.support.redis_server import RedisServer

RULES = [
    Rule("api", "5/minute", "50/day", path="/api/**"),
    Rule("each", "9/minute", path="/api/**", key=["path", "ip"]),
    Rule("all", "100/minute"),
    Rule("free", path="/free", exempt=True),
    Rule("no", path="/no", deny=True),
]
Ask = Callable[..., Reply]


def starlette(store: Any, rules: Any = RULES, **options: Any) -> Ask:
    """An application that shows what ``?rule=`` names, and for ``?path=``."""

    async def show(request: Request) -> JSONResponse:
        names, path = request.query_params.getlist("rule"), request.query_params.get("path")
        try:
            windows = await ausage(request, *names, path=path)
        except ConfigError as error:
            return JSONResponse({"error": str(error)})
        return JSONResponse([[window.rule, window.period, window.used, window.remaining] for window in windows])

    @limit("3/minute", name="own")
    async def own(request: Request) -> JSONResponse:
        return await show(request)

    routes = [Route("/api/{item}", show), Route("/usage", show), Route("/own", own), Route("/free", show)]
    app = Starlette(routes=[*routes, Route("/exempt", exempt(show))])
    gate = LimitGate(app, rules=rules, store=store, **options)
    return lambda *given, **more: asyncio.run(asgi_reply(gate, *given, **more))


def flask(store: Any, rules: Any = RULES, **options: Any) -> Ask:
    app = Flask("app")

    def show(**_: Any) -> Any:
        names, path = flask_request.args.getlist("rule"), flask_request.args.get("path")
        try:
            windows = usage(flask_request, *names, path=path)
        except ConfigError as error:
            return {"error": str(error)}
        assert usage(flask_request.environ, *names, path=path) == windows
        return [[window.rule, window.period, window.used, window.remaining] for window in windows]

    for name, path in (("api", "/api/<item>"), ("usage", "/usage"), ("free", "/free")):
        app.add_url_rule(path, name, show)
    app.add_url_rule("/own", "own", limit("3/minute", name="own")(lambda: show()))  # noqa: PLW0108 - one of its own
    app.add_url_rule("/exempt", "exempt", exempt(lambda: show()))  # noqa: PLW0108
    gate = LimitGateWSGI(app, rules=rules, store=store, **options)
    return lambda *given, **more: wsgi_reply(gate, *given, **more)


DOORS = pytest.mark.parametrize("door", [starlette, flask])
TEMPLATES = {starlette: "/api/{item}", flask: "/api/<item>"}


@DOORS
def test_without_names_it_shows_what_applies(door: Any) -> None:
    """The request itself is counted already, and looking counts nothing."""
    ask = door(MemoryStore(Clock()))
    for used in (1, 2, 3):
        assert ask("/api/x").json() == [
            ["api", 60, used, 5 - used],
            ["api", 86400, used, 50 - used],
            ["each", 60, used, 9 - used],
            ["all", 60, used, 100 - used],
        ]
    assert ask("/own").json() == [["all", 60, 4, 96], ["own", 60, 1, 2]]


@DOORS
def test_named_rules_need_not_apply_to_the_request(door: Any) -> None:
    """They are shown for its caller, in the order of the names."""
    ask = door(MemoryStore(Clock()))
    ask("/api/x")
    ask("/api/x", peer="192.0.2.99") if door is starlette else ask("/api/x", REMOTE_ADDR="192.0.2.99")
    assert ask("/usage?rule=api").json() == [["api", 60, 1, 4], ["api", 86400, 1, 49]]
    assert ask("/usage?rule=all&rule=api&rule=all").json()[0] == ["all", 60, 3, 97]
    assert ask("/own?rule=own").json() == [["own", 60, 1, 2]]
    assert ask("/api/y?rule=each").json() == [["each", 60, 2, 7]]


@DOORS
def test_a_rule_by_path_is_shown_for_the_route_that_is_meant(door: Any) -> None:
    """Its bucket for another route is not known from this request."""
    ask = door(MemoryStore(Clock()))
    ask("/api/x")
    assert "counts by path, expected path= with a route's template" in ask("/usage?rule=each").json()["error"]
    assert ask(f"/usage?rule=each&path={TEMPLATES[door]}").json() == [["each", 60, 1, 8]]
    assert ask("/api/x?rule=each&path=/other").json() == [["each", 60, 0, 9]]


def test_where_no_routes_are_known_the_rule_itself_is() -> None:
    """A gate that knows no routes counts all paths of a rule together."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        windows = await ausage(scope, "each")
        await JSONResponse([window.used for window in windows])(scope, receive, send)

    gate = LimitGate(app, rules=RULES, store=MemoryStore(Clock()))
    for path in ("/api/a", "/api/b"):
        asyncio.run(asgi_reply(gate, path))
    assert asyncio.run(asgi_reply(gate, "/usage")).json() == [2]


@DOORS
def test_mistakes_are_said(door: Any) -> None:
    """A name that no rule has, or only one without limits."""
    ask = door(MemoryStore(Clock()))
    for name in ("nope", "free", "no"):
        error = ask(f"/usage?rule={name}").json()["error"]
        assert error == f"there is no rule '{name}' for this caller, expected one of all, api, each"


@DOORS
@pytest.mark.parametrize("path", ["/free", "/exempt"])
def test_an_exempt_request_has_no_windows_but_named_ones(door: Any, path: str) -> None:
    """No rule applies to it; those that are named are its caller's."""
    ask = door(MemoryStore(Clock()))
    ask("/api/x")
    assert ask(path).json() == []
    assert ask(f"{path}?rule=api").json()[0] == ["api", 60, 1, 4]


@DOORS
def test_where_it_is_switched_off_nothing_is_shown(door: Any) -> None:
    """The application runs as if there were no limits."""
    assert door(MemoryStore(), enabled=False)("/usage?rule=api").json() == []


def test_without_a_gate_it_is_an_error() -> None:
    """So is what is no request."""
    with pytest.raises(ConfigError, match="usage was called for a request that no LimitGate has admitted"):
        usage({"REQUEST_METHOD": "GET"})
    with pytest.raises(ConfigError, match="ausage was called for a request that no LimitGate"):
        asyncio.run(ausage({"type": "http"}))
    with pytest.raises(TypeError, match="request is a str, expected a framework's request, a scope or an environ"):
        usage("api")


def test_each_door_has_its_own(redis_server: RedisServer) -> None:
    """What would block an event loop, or need one, says so, in memory as well, where it would do."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(ConfigError, match=r"expected await ausage\(request\)"):
            usage(scope)
        await JSONResponse("ok")(scope, receive, send)

    def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
        with pytest.raises(ConfigError, match=r"expected usage\(request\)"):
            asyncio.run(ausage(environ))
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"ok"]

    async def under_asgi(store: Any) -> None:
        assert (await asgi_reply(LimitGate(app, rules=RULES, store=store, timeout=5))).status == 200
        await store.aclose()

    for store in (MemoryStore(), AsyncRedisStore(redis_server.url)):
        asyncio.run(under_asgi(store))
    for of_threads in (MemoryStore(), RedisStore(redis_server.url)):
        assert wsgi_reply(LimitGateWSGI(wsgi_app, rules=RULES, store=of_threads, timeout=5)).status == 200
        of_threads.close()


def test_after_the_request_it_is_an_error() -> None:
    """Nothing is known of it any more."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await JSONResponse("ok")(scope, receive, send)

    asyncio.run(asgi_reply(LimitGate(app, rules=RULES, store=MemoryStore())))
    with pytest.raises(ConfigError, match="after the request"):
        asyncio.run(ausage(seen[0]))


def test_tiers_and_limits_of_the_caller() -> None:
    """The rules are those of the caller's tier, with limits that a callable or the caller gives."""

    async def given(_: object) -> str:
        return "7/minute"

    plain, vip = Rule("api", "5/minute", key=["caller"]), Rule("api", "50/minute", key=["caller"], tier="vip")
    rules = RuleSet([plain, vip, Rule("data", given, path="/x")])
    callers = {"a": Caller("ann"), "v": Caller("vic", "vip"), "o": Caller("own", limits={"api": "9/minute"})}
    ask = starlette(MemoryStore(Clock()), rules, identify=lambda request: callers[request.headers["x-who"]])
    remaining = {who: ask("/usage", headers={"x-who": who}).json()[0][3] for who in callers}
    assert remaining == {"a": 4, "v": 49, "o": 8}
    assert ask("/usage?rule=data", headers={"x-who": "a"}).json() == [["data", 60, 0, 7]]


def test_dependencies_are_shown() -> None:
    """Limits that were asked for in the midst of the request, by what other dependencies have found out."""
    app = FastAPI()

    async def current_user() -> str:
        return "ann"

    @app.get("/", dependencies=[Depends(RateLimit("4/minute", key=[current_user], name="user"))])
    async def home(request: FastAPIRequest) -> list[tuple[str | None, int]]:
        windows = await ausage(request)
        assert await ausage(request, "user") == windows[1:]
        return [(window.rule, window.remaining) for window in windows]

    app.add_middleware(LimitGate, rules=[Rule("all", "9/minute")], store=MemoryStore(Clock()))
    assert asyncio.run(asgi_reply(app)).json() == [["all", 8], ["user", 3]]


@pytest.mark.parametrize("on_error", ["open", "local"])
def test_a_store_that_fails_is_told(on_error: Any) -> None:
    """Whatever the policy for requests is: the application knows best what to show then."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(StoreError):
            await ausage(scope, "api")
        with pytest.raises(StoreError):
            await ausage(scope)
        await JSONResponse("ok")(scope, receive, send)

    gate = LimitGate(app, rules=RULES, store="redis://127.0.0.1:1/0", on_error=on_error)
    assert asyncio.run(asgi_reply(gate)).status == 200


def test_one_call_to_redis(redis_server: RedisServer) -> None:
    """All rules are read together."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with redis_server.client() as client:
            await ausage(scope, "api", "all")  # the script may have to be sent
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert len(await ausage(scope, "api", "all")) == 3
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1
        await JSONResponse("ok")(scope, receive, send)

    async def once() -> None:
        store = AsyncRedisStore(redis_server.url)
        gate = LimitGate(app, rules=RULES, store=store, timeout=5)
        assert (await asgi_reply(gate)).status == 200
        await store.aclose()

    asyncio.run(once())
