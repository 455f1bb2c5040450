"""The ASGI door to the letter of the specification: what goes through it comes out as it went in."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from limitgate import Adaptive, ConfigError, LimitGate, MemoryStore, RateLimited, Rule
from limitgate.errors import StoreError
from limitgate.exchange.base import EXCHANGE
from limitgate.exchange.in_flight import for_client
from limitgate.http.response import time_of
from tests.support.clock import Clock
from tests.support.doors import ASGISite, Wire, asgi_reply, asgi_through_httpx, handshake, http_scope, until, websocket_scope
from tests.support.redis_server import RedisServer

DENIAL: dict[str, Any] = {"websocket.http.response": {}}
START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b""}


def gated(app: Any, *rules: Rule, **options: Any) -> LimitGate:
    options.setdefault("store", MemoryStore(Clock()))
    return LimitGate(app, rules=rules or [Rule("api", "2/minute")], **options)


def hello(request: Any) -> PlainTextResponse:
    return PlainTextResponse("hello" * 500)


def sending(*messages: dict[str, Any]) -> Any:
    """An application that sends these very messages."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


def call(app: Any, scope: dict[str, Any] | None = None, *incoming: dict[str, Any]) -> Wire:
    return asyncio.run(Wire(*incoming).call(app, http_scope() if scope is None else scope))


class NeverAnswers:
    """A store that keeps everybody waiting."""

    async def aspend(self, plan: Any, timeout: float) -> Any:
        await asyncio.get_running_loop().create_future()

    async def aclose(self) -> None:
        """Nothing to let go of."""


class Down:
    """A store that is out of order."""

    async def aspend(self, plan: Any, timeout: float) -> Any:
        raise StoreError("down")

    async def aclose(self) -> None:
        """Nothing to let go of."""


# --- the scope --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_the_scope_is_not_changed(*, refused: bool) -> None:
    """The server's scope is as it was, but for what the application writes, the outcome and the id of a refusal.

    The application gets one of its own with the decision.
    """
    handed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handed.append(scope)
        scope["mine"] = True
        await sending(START, END)(scope, receive, send)

    gate = gated(app, Rule("api", "1/minute"))
    if refused:
        call(gate)
    scope = http_scope("/x?y=1", headers={"X-One": "1"}, state={"shared": []}, extensions={})
    before = copy.deepcopy(scope)
    call(gate, scope)
    if refused:
        time_of(scope.pop("limitgate.refusal_id"))
    assert scope.pop("limitgate.outcome") == ("refused" if refused else "admitted")
    assert scope == (before if refused else before | {"mine": True})
    assert handed[0] is not scope
    if not refused:
        assert {
            name: value for name, value in handed[0].items() if not name.startswith("limitgate") and name != "mine"
        } == before
        assert handed[0]["state"] is scope["state"]


@pytest.mark.parametrize("options", [{}, {"enabled": False}, {"rules": [Rule("free", exempt=True)]}])
def test_what_the_application_writes_is_seen_outside(options: Any) -> None:
    """Whatever is written into the scope or taken out, middleware outside sees it when the response begins, and at its end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["one"] = 1
        scope.update({"two": 2}, three=3)
        scope |= {"four": 4}
        assert scope.setdefault("five", 5) == scope.setdefault("five", 6) == 5
        scope["limitgate"] = scope["limitgate"]
        scope.update(gone=1, none=1)
        assert scope.pop("gone") == 1
        assert scope.pop("gone", 7) == 7
        del scope["none"]
        with pytest.raises(KeyError):
            scope.pop("gone")
        del scope["query_string"]
        await sending(START, END)(scope, receive, send)
        scope["six"] = 6

    async def send(message: Any) -> None:
        outside.append(dict(wrapped))

    outside: list[Any] = []
    wrapped = http_scope("/x")
    before = dict(wrapped)
    del before["query_string"]
    outcome = "unlimited" if "rules" in options else "admitted"
    gate: Any = LimitGate(app, **{"rules": [Rule("api", "9/minute")], **options})
    asyncio.run(gate(wrapped, None, send))
    written = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
    for scope in (outside[0], wrapped):
        assert scope.pop("limitgate.outcome", None) == (None if "enabled" in options else outcome)
    assert outside[0] == before | written
    assert wrapped == before | written | {"six": 6}


def test_middleware_outside_sees_the_route() -> None:
    """A router's findings are there for middleware around the gate, when the response starts and after it."""
    seen: list[Any] = []

    class Outside:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)
            if scope["type"] == "http":
                seen.append((scope["path_params"], scope["endpoint"].__name__, scope["path"], "limitgate" in scope))

    async def item(request: Any) -> Any:
        return JSONResponse({})

    inner = Starlette(routes=[Mount("/shop", routes=[Route("/items/{number:int}", item)])])
    app = Outside(LimitGate(inner, rules=[Rule("api", "9/minute")]))
    call(app, http_scope("/shop/items/7"))
    assert seen == [({"number": 7}, "item", "/shop/items/7", False)]


def test_the_outer_scope_may_be_any_mapping_with_least_content() -> None:
    """Only what the specification makes mandatory is needed."""
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/", "headers": []}
    assert call(gated(sending(START, END)), {**scope, "query_string": b""}).types == [
        "http.response.start",
        "http.response.body",
    ]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_chunks_arrive_one_by_one() -> None:
    """Each message is out before the application goes on, and the response starts once."""
    wire, order = Wire(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            order.append(len(wire.sent))
        await send(END)

    asyncio.run(wire.call(gated(app), http_scope()))
    assert order == [2, 3, 4]
    assert wire.types == ["http.response.start", *["http.response.body"] * 4]
    assert wire.reply().body == b"012"
    assert wire.reply().rate["x-ratelimit-remaining"] == "1"


def test_an_endless_stream_is_not_waited_for() -> None:
    """The first chunk of a Starlette stream is out while the stream still runs."""
    wire, more = Wire(), asyncio.Event()

    async def chunks() -> Any:
        yield b"first"
        await more.wait()
        yield b"last"

    async def scene() -> None:
        app = Starlette(routes=[Route("/", lambda _: StreamingResponse(chunks()))])
        running = asyncio.create_task(wire.call(gated(app), http_scope()))
        await wire.until_sent(2)
        assert [message.get("body") for message in wire.sent] == [None, b"first"]
        assert not running.done()
        more.set()
        await running

    asyncio.run(scene())
    assert wire.reply().body == b"firstlast"
    assert len(wire.reply().rate) == 3


OTHERS = [
    {"type": "http.response.body", "body": b"x" * 10, "more_body": True},
    {"type": "http.response.push", "path": "/style.css", "headers": []},
    {"type": "http.response.early_hint", "links": [b"</style.css>; rel=preload"]},
    {"type": "http.response.trailers", "headers": [(b"x-checksum", b"1")], "more_trailers": False},
    {"type": "http.response.pathsend", "path": "/etc/hostname"},
    {"type": "http.response.zerocopysend", "file": 7},
    {"type": "http.response.debug", "info": {}},
    {"type": "http.response.invented_tomorrow"},
    {"type": "websocket.send", "text": "hello"},
    {"type": "websocket.close", "code": 1000},
    {"type": "websocket.http.response.body", "body": b"no"},
]


@pytest.mark.parametrize("message", OTHERS, ids=lambda message: message["type"])
def test_other_messages_go_through_untouched(message: dict[str, Any]) -> None:
    """A message that carries no response headers is passed on, the very same object, unchanged."""
    before = copy.deepcopy(message)
    wire = call(gated(sending(START, message)))
    assert wire.sent[1] is message
    assert message == before


@pytest.mark.parametrize(
    "start",
    [
        {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")], "trailers": True},
        {"type": "websocket.accept", "subprotocol": "chat", "headers": [(b"x-own", b"1")]},
        {"type": "websocket.http.response.start", "status": 403, "headers": [(b"x-own", b"1")]},
    ],
    ids=lambda message: message["type"],
)
def test_a_start_is_passed_on_as_a_copy_with_more_headers(start: dict[str, Any]) -> None:
    """The application's message keeps its headers to itself; all else in it is passed on, the rate fields behind its own."""
    before = copy.deepcopy(start)
    wire = call(gated(sending(start)))
    assert start == before
    (sent,) = wire.sent
    assert {name: value for name, value in sent.items() if name != "headers"} == {
        name: value for name, value in before.items() if name != "headers"
    }
    assert sent["headers"][0] == (b"x-own", b"1")
    assert [name for name, _ in sent["headers"][1:]] == [b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset"]
    assert all(type(name) is type(value) is bytes for name, value in sent["headers"])


def _lines() -> Iterable[tuple[bytes, bytes]]:
    yield (b"x-own", b"1")
    yield (b"x-own", b"2")


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({"headers": [(b"x-own", b"1"), (b"x-own", b"2")]}, 2),
        ({"headers": [[b"x-own", b"1"], [b"x-own", b"2"]]}, 2),
        ({"headers": ((b"x-own", b"1"), (b"x-own", b"2"))}, 2),
        ({"headers": _lines}, 2),
        ({"headers": {b"x-own": b"1"}.items()}, 1),
        ({"headers": []}, 0),
        ({"headers": ()}, 0),
        ({}, 0),
    ],
    ids=["list", "lists", "tuple", "generator", "view", "empty", "nothing", "missing"],
)
@pytest.mark.parametrize("kind", ["http.response.start", "websocket.accept", "on_denied"])
def test_headers_of_any_shape(kind: str, headers: dict[str, Any], own: int) -> None:
    """Whatever iterable of pairs an application gives as headers, or none, the rate fields are added behind them."""
    if callable(headers.get("headers")):
        headers = {"headers": headers["headers"]()}
    if kind == "on_denied":
        gate = gated(
            sending(START),
            Rule("api", "1/minute"),
            on_denied=sending({"type": "http.response.start", "status": 429, **headers}),
        )
        call(gate)
    else:
        gate = gated(sending({"type": kind, "status": 200, **headers}))
    (sent,) = call(gate).sent
    assert isinstance(sent["headers"], list)
    assert [bytes(name) for name, _ in sent["headers"]].count(b"x-own") == own
    assert len(sent["headers"]) == own + 3 + (kind == "on_denied")


def test_one_message_sent_for_every_request_does_not_grow() -> None:
    """An application, or ``on_denied``, that keeps one start message for ever is not given more headers each time."""
    gate = gated(sending(START, END), Rule("api", "3/minute"), on_denied=sending(START, END))
    assert [len(call(gate).sent[0]["headers"]) for _ in range(6)] == [3, 3, 3, 4, 4, 4]
    assert START["headers"] == []


@pytest.mark.parametrize("name", [b"retry-after", b"Retry-After", bytearray(b"RETRY-AFTER")], ids=repr)
def test_on_denied_may_spell_its_headers_as_it_likes(name: Any) -> None:
    """A Retry-After of ``on_denied`` is recognised however it is spelled."""
    denied = sending({"type": "http.response.start", "status": 429, "headers": [(name, b"7")]}, END)
    gate = gated(sending(START, END), Rule("api", "1/minute"), on_denied=denied)
    call(gate)
    (sent, _) = call(gate).sent
    assert [bytes(name).lower() for name, _ in sent["headers"]].count(b"retry-after") == 1


def test_send_is_a_coroutine_function() -> None:
    """Adapters such as asgiref's ask whether what they are handed is one, and complain if it is not."""
    handed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handed.append(iscoroutinefunction(send))

    call(gated(app))
    call(gated(app, Rule("adaptive", "9/minute", adaptive=True)))
    call(gated(app, Rule("slots", "9 at once")))
    assert handed == [True] * 3


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_done_to_a_refusal_does_not_reach_the_next(*, broken: bool) -> None:
    """A server or a middleware further out may change the headers of a refusal in place: the next one is as it should be."""
    gate = gated(sending(START, END), Rule("api", "1/day", on_error="closed"), store=Down() if broken else MemoryStore(Clock()))
    if not broken:
        call(gate)
    told = call(gate).sent[0]
    expected = list(told["headers"])
    told["headers"].clear()
    assert call(gate).sent[0]["headers"] == expected != []


# --- lifespan and the unknown -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lifespan", "http3.datagram", "invented"])
def test_other_scopes_pass_through(kind: str) -> None:
    """A scope that is neither HTTP nor WebSocket is the application's: the same objects, unlooked at.

    Under lifespan, the gate wraps ``send`` to end before the last message.
    """
    handed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handed.append((scope, receive, send))

    scope, wire = {"type": kind}, Wire()
    asyncio.run(wire.call(gated(app), scope))
    assert handed[0][0] is scope
    assert handed[0][1] == wire.receive
    assert (handed[0][2] == wire.send) is (kind != "lifespan")
    assert scope == {"type": kind}


LIFE = ({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})


def _clients(server: RedisServer) -> int:
    """How many connections there are, besides the one that asks."""
    with server.client() as client:
        return len(client.client_list()) - 1


def test_a_store_of_its_own_is_closed_at_shutdown(own_redis: RedisServer) -> None:
    """A store that the gate opened by URL is closed when the lifespan ends, after the application's own shutdown."""
    during = []

    class Live(Wire):
        async def receive(self) -> dict[str, Any]:
            if self.received == 1:
                assert (await asgi_reply(gate)).status == 200
                during.append(_clients(own_redis))
            return await super().receive()

    app = Starlette(routes=[Route("/", hello)])
    gate = gated(app, store=own_redis.url, timeout=5)
    wire = asyncio.run(Live(*LIFE).call(gate, {"type": "lifespan", "state": {}}))
    assert wire.types == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert during == [1]
    until(lambda: _clients(own_redis) == 0)


def test_a_store_of_its_own_is_closed_where_the_lifespan_fails(own_redis: RedisServer) -> None:
    """What an application raises on lifespan reaches the server, and the store is closed all the same."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http" or (await asgi_reply(gate)).status == 200
        if scope["type"] == "lifespan":
            raise ValueError("no lifespan here")
        await sending(START, END)(scope, receive, send)

    gate = gated(app, store=own_redis.url, timeout=5)
    with pytest.raises(ValueError, match="no lifespan here"):
        asyncio.run(Wire(*LIFE).call(gate, {"type": "lifespan"}))
    until(lambda: _clients(own_redis) == 0)


def test_a_store_that_was_handed_over_stays_open() -> None:
    """A store object belongs to whoever made it: the lifespan's end does not close it."""
    closed = []

    class Store(MemoryStore):
        async def aclose(self) -> None:
            closed.append(True)

    asyncio.run(Wire(*LIFE).call(gated(Starlette(), store=Store()), {"type": "lifespan", "state": {}}))
    assert closed == []


def test_no_lifespan_is_needed(own_redis: RedisServer) -> None:
    """Without any lifespan event the store connects at the first request, in one event loop after the other."""
    gate = gated(sending(START, END), store=own_redis.url, timeout=5)

    async def one_loop() -> list[int]:
        replies = [(await asgi_reply(gate)).status for _ in range(2)]
        await gate.gate.store.aclose()
        return replies

    assert [asyncio.run(one_loop()), asyncio.run(one_loop())] == [[200, 200], [429, 429]]


def test_the_store_is_usable_again_after_a_lifespan(own_redis: RedisServer) -> None:
    """A second lifespan of the same application, as test clients run them, finds a working store."""
    gate = gated(Starlette(routes=[Route("/", hello)]), store=own_redis.url, timeout=5)
    statuses = []

    class Live(Wire):
        async def receive(self) -> dict[str, Any]:
            if self.received == 1:
                statuses.append((await asgi_reply(gate)).status)
            return await super().receive()

    for _ in range(3):
        asyncio.run(Live(*LIFE).call(gate, {"type": "lifespan", "state": {}}))
    assert statuses == [200, 200, 429]


def test_an_absent_store_does_not_keep_the_app_from_starting() -> None:
    """Connecting is not part of start-up: the lifespan goes well where nobody listens."""
    wire = asyncio.run(
        Wire(*LIFE).call(gated(Starlette(), store="unix:///nowhere/redis.sock"), {"type": "lifespan", "state": {}})
    )
    assert wire.types == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# --- websockets -------------------------------------------------------------------------------------------------------


async def accepting(scope: Any, receive: Any, send: Any) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept", "headers": [(b"x-own", b"1")]})
    await receive()


def test_a_websocket_is_refused_before_it_is_accepted() -> None:
    """With the denial extension a refused handshake gets the 429 of any other request."""
    gate = gated(accepting, Rule("api", "1/minute"))
    assert asyncio.run(handshake(gate)).status == 101
    refused = asyncio.run(handshake(gate))
    assert refused.status == 429
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["cache-control"] == "no-store"
    assert refused.wait == 60
    assert refused.rate["x-ratelimit-remaining"] == "0"
    assert refused.json()["violated-policies"] == ["api"]


@pytest.mark.parametrize("extensions", [{}, None, {"tls": {}}, "missing"])
def test_without_the_extension_a_websocket_is_closed(extensions: Any) -> None:
    """Where the server cannot send a response, a refused handshake is closed with 1013, try again later."""
    gate = gated(accepting, Rule("api", "1/minute"))
    asyncio.run(handshake(gate))
    scope = websocket_scope() if extensions == "missing" else websocket_scope(extensions=extensions)
    wire = call(gate, scope, {"type": "websocket.connect"})
    assert [(message["type"], message["code"]) for message in wire.sent] == [("websocket.close", 1013)]
    assert wire.received == 1


class Hangup(Wire):
    """A server whose client leaves before an answer goes out, or when it has begun."""

    def __init__(self, error: Exception, *incoming: dict[str, Any], sends: int = 0) -> None:
        super().__init__(*incoming)
        self.error = error
        self.sends = sends

    async def send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == self.sends:
            raise self.error
        await super().send(message)


GONE = pytest.mark.parametrize(
    "error", [OSError("the client is gone"), RuntimeError("Transport not initialized or closed")], ids=repr
)
MUCH = Rule("much", "1/minute", cost=lambda _: 2)
FULL = Rule("full", adaptive=Adaptive(min=1, max=1))


@GONE
@pytest.mark.parametrize("sends", [0, 1])
@pytest.mark.parametrize(
    ("rule", "headers"), [(MUCH, ()), (Rule("api", "1/minute"), [("A", "b")] * 2000), (FULL, ())], ids=["429", "431", "503"]
)
def test_a_client_that_is_gone_when_it_is_refused(rule: Rule, headers: Any, sends: int, error: Exception) -> None:
    """Is no error: the server has nothing to log."""
    hangup = Hangup(error, sends=sends)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hangup.call(gate, http_scope())  # for which there is no place
        await sending(START, END)(scope, receive, send)

    gate = gated(app, rule)
    asyncio.run((Wire() if rule is FULL else hangup).call(gate, http_scope(headers=headers)))
    assert len(hangup.sent) == sends


@GONE
def test_a_client_that_is_gone_when_it_is_refused_late(error: Exception) -> None:
    """The application has asked for a limit, and raises the refusal."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RateLimited(await scope[EXCHANGE].afurther([(MUCH, ())]))

    asyncio.run(Hangup(error).call(gated(app), http_scope()))


@GONE
@pytest.mark.parametrize("extensions", [DENIAL, {}], ids=["response", "close"])
def test_a_websocket_that_is_gone_when_it_is_refused(extensions: Any, error: Exception) -> None:
    wire = Hangup(error, {"type": "websocket.connect"})
    asyncio.run(wire.call(gated(accepting, MUCH), websocket_scope(extensions=extensions)))
    assert not wire.sent


def test_another_error_of_the_server_while_a_refusal_is_sent() -> None:
    """Is raised."""
    with pytest.raises(ValueError, match="a header of another's"):
        asyncio.run(Hangup(ValueError("a header of another's")).call(gated(sending(START, END), MUCH), http_scope()))


@GONE
def test_a_client_that_is_gone_when_the_application_answers(error: Exception) -> None:
    """Is told to the application, and whatever that does not catch to the server."""
    with pytest.raises(type(error)) as raised:
        asyncio.run(Hangup(error, sends=1).call(gated(sending(START, END)), http_scope()))
    assert raised.value is error


def test_a_websocket_under_a_closed_store() -> None:
    """Under ``on_error: closed`` a handshake gets the 503, or is closed with 1013."""
    gate = gated(accepting, store=Down(), on_error="closed")
    refused = asyncio.run(handshake(gate))
    assert (refused.status, refused.json()["status"]) == (503, 503)
    assert asyncio.run(handshake(gate, denial=False)).status == 1013


def test_rate_fields_on_an_accepted_websocket() -> None:
    """An accepted handshake carries the rate fields behind the application's own."""
    accepted = asyncio.run(handshake(gated(accepting)))
    assert (accepted.status, accepted.headers["x-own"]) == (101, "1")
    assert accepted.rate["x-ratelimit-remaining"] == "1"


def test_a_websocket_through_two_gates() -> None:
    """A handshake that is accepted, or refused by either gate, carries the fields of both once."""
    inner = gated(accepting, Rule("inner", "2/minute"), headers=["draft-11"])
    gate = gated(inner, Rule("outer", "3/minute"), headers=["x-ratelimit", "draft-11"])
    replies = [asyncio.run(handshake(gate)) for _ in range(4)]
    assert [reply.status for reply in replies] == [101, 101, 429, 429]
    assert [reply.rate["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0", "0"]
    assert replies[0].rate["ratelimit"] == '"outer";r=2;t=20, "inner";r=1;t=30'
    assert replies[2].rate["ratelimit"] == '"outer";r=0;t=60, "inner";r=0;t=30'
    assert replies[3].rate["ratelimit"] == '"outer";r=0;t=20'
    assert asyncio.run(handshake(gated(inner), denial=False)).status == 1013


def test_an_error_behind_two_gates() -> None:
    """The 500 that a server-side middleware makes between them has the fields of both."""

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("half way")

    inner = gated(failing, Rule("inner", "2/minute"))
    gate = gated(ServerErrorMiddleware(inner), Rule("outer", "3/minute"))
    wire = Wire()
    with pytest.raises(ValueError, match="half way"):
        asyncio.run(wire.call(gate, http_scope()))
    assert (wire.reply().status, wire.reply().rate["x-ratelimit-limit"]) == (500, "2")


def test_applications_that_are_tried_one_after_the_other() -> None:
    """Where one that has a gate of its own does not know the path, another one answers: all that was charged is told."""
    start = {"type": "http.response.start", "status": 200}
    tried = [gated(sending(start, END), Rule(name, "5/minute"), headers=["draft-11"]) for name in ("one", "two")]

    async def cascade(scope: Any, receive: Any, send: Any) -> None:
        await tried[0](scope, receive, Wire().send)
        await tried[1](scope, receive, send)

    gate = gated(cascade, Rule("outer", "7/minute"), headers=["draft-11"])
    assert asyncio.run(asgi_reply(gate)).rate["ratelimit"] == '"outer";r=6;t=9, "one";r=4;t=12, "two";r=4;t=12'
    gate = gated(cascade, Rule("outer", exempt=True))
    assert asyncio.run(asgi_reply(gate)).rate["ratelimit"] == '"two";r=3;t=24'


def test_requests_from_inside_have_fields_of_their_own() -> None:
    """A handler that sends requests through a gate again gets what is told of these alone, as any other client."""
    found = []

    async def batch(request: Any) -> Any:
        found.extend([await asgi_reply(gate, "/hello") for _ in range(2)])
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/batch", batch), Route("/hello", hello)])
    gate = gated(app, Rule("all", "9/minute"), headers=["draft-11"])
    assert asyncio.run(asgi_reply(gate, "/batch")).rate["ratelimit"] == '"all";r=8;t=7'
    assert [reply.rate["ratelimit"] for reply in found] == ['"all";r=7;t=14', '"all";r=6;t=20']


def test_a_websocket_counts_as_get() -> None:
    """A handshake is a GET: a rule for GET covers it, one for POST does not, and it has a decision."""
    handed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handed.append(scope["limitgate"])
        await accepting(scope, receive, send)

    gate = gated(app, Rule("read", "1/minute", methods=["GET"]), Rule("write", "1/minute", methods=["POST"]))
    assert [asyncio.run(handshake(gate)).status for _ in range(2)] == [101, 429]
    assert (handed[0].allowed, handed[0].rule) == (True, "read")


# --- body and disconnect ----------------------------------------------------------------------------------------------


def test_a_refused_request_is_not_read() -> None:
    """A refusal is sent without receiving anything: not a byte of the body is waited for."""
    gate = gated(sending(START, END), Rule("api", "1/minute"))
    call(gate)
    wire = call(gate, http_scope(method="POST"))
    assert wire.reply().status == 429
    assert wire.received == 0


def test_the_body_reaches_the_app_whole() -> None:
    """What the gate lets pass, the application receives message by message, the very same ones."""
    parts = [{"type": "http.request", "body": b"%d" % n, "more_body": n < 2} for n in range(3)]
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive() for _ in range(3)])
        await sending(START, END)(scope, receive, send)

    call(gated(app), http_scope(method="POST"), *parts)
    assert all(one is other for one, other in zip(got, parts, strict=True))


def test_the_decision_comes_before_the_body() -> None:
    """The application is not started, nor the body received, until the store has answered."""
    wire = Wire({"type": "http.request", "body": b"x"})
    started = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started.append(scope)

    async def scene() -> None:
        task = asyncio.create_task(wire.call(gated(app, store=NeverAnswers()), http_scope()))
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert (started, wire.received, wire.sent) == ([], 0, [])


def test_cancellation_reaches_the_app_and_comes_back() -> None:
    """A server that cancels a request cancels the application, and sees CancelledError again."""
    met = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        try:
            await receive()
        except asyncio.CancelledError:
            met.append("cancelled")
            raise

    async def scene() -> None:
        wire = Wire()
        task = asyncio.create_task(wire.call(gated(app), http_scope()))
        await wire.until_sent(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert met == ["cancelled"]


def test_a_disconnect_is_the_apps_to_see() -> None:
    """``http.disconnect`` is handed on as it came, and what ``send`` then raises reaches the application."""
    gone = OSError("client is gone")
    met: list[Any] = []

    class Gone(Wire):
        async def send(self, message: dict[str, Any]) -> None:
            raise gone

    async def app(scope: Any, receive: Any, send: Any) -> None:
        met.append(await receive())
        try:
            await send(START)
        except OSError as error:
            met.append(error)
            raise

    with pytest.raises(OSError, match="client is gone"):
        asyncio.run(Gone({"type": "http.disconnect"}).call(gated(app), http_scope()))
    assert met == [{"type": "http.disconnect"}, gone]


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), asyncio.CancelledError(), StoreError("the app's own")]
)
@pytest.mark.parametrize("after_start", [False, True])
def test_exceptions_of_the_app_propagate(error: BaseException, *, after_start: bool) -> None:
    """What the application raises comes out as it is, before and after the response has started."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if after_start:
            await send(START)
        raise error

    async def scene() -> BaseException | None:
        try:
            await gated(app)(http_scope(), Wire().receive, Wire().send)
        except BaseException as raised:  # noqa: BLE001 - whatever it is
            return raised
        return None

    assert asyncio.run(scene()) is error


def test_context_variables_are_as_without_the_gate() -> None:
    """What the application sets in its context is seen by whoever called it, and the other way round."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    inside = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        inside.append(variable.get())
        variable.set("by the app")
        await sending(START, END)(scope, receive, send)

    async def scene() -> str:
        variable.set("by the server")
        await gated(app)(http_scope(), Wire().receive, Wire().send)
        return variable.get()

    assert asyncio.run(scene()) == "by the app"
    assert inside == ["by the server"]


# --- in the company of others -----------------------------------------------------------------------------------------


def test_the_user_of_an_authentication_middleware() -> None:
    """With authentication outside of the gate, ``user`` is who it found; strangers go by their address."""

    class Backend(AuthenticationBackend):
        async def authenticate(self, conn: Any) -> Any:
            name = conn.headers.get("x-user")
            return (AuthCredentials(["authenticated"]), SimpleUser(name)) if name else None

    app = Starlette(
        routes=[Route("/", hello)],
        middleware=[
            Middleware(AuthenticationMiddleware, backend=Backend()),
            Middleware(LimitGate, rules=[Rule("api", "1/minute", key=["user"])], store=MemoryStore(Clock())),
        ],
    )

    async def scene() -> list[int]:
        named = [{"X-User": name} if name else {} for name in ("ann", "bob", "ann", "", "")]
        return [(await asgi_reply(app, headers=headers)).status for headers in named]

    assert asyncio.run(scene()) == [200, 200, 429, 200, 429]


def test_refusals_pass_through_cors_and_compression() -> None:
    """With the gate inside of CORS and compression, a 429 carries what they add, and stays readable."""
    app = Starlette(
        routes=[Route("/", hello)],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=["https://a.example"], expose_headers=["Retry-After"]),
            Middleware(GZipMiddleware, minimum_size=10),
            Middleware(LimitGate, rules=[Rule("api", "1/minute")], store=MemoryStore(Clock())),
        ],
    )
    headers = {"Origin": "https://a.example", "Accept-Encoding": "gzip"}

    async def scene() -> list[Any]:
        return [await asgi_through_httpx(app, headers=headers) for _ in range(2)]

    allowed, refused = asyncio.run(scene())
    assert (allowed.status, refused.status, refused.wait) == (200, 429, 60)
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert refused.headers["content-encoding"] == "gzip"


def test_an_on_denied_that_streams_and_reads() -> None:
    """``on_denied`` is a whole ASGI application: it may read the body and stream its answer."""

    async def denied(scope: Any, receive: Any, send: Any) -> None:
        told = (await receive())["body"]
        await send({"type": "http.response.start", "status": 429})
        for word in (told, b" is", b" too much"):
            await send({"type": "http.response.body", "body": word, "more_body": True})
        await send(END)

    with ASGISite(Rule("api", "1/minute"), store=MemoryStore(Clock()), on_denied=denied) as it:
        it.ask()
        refused = it.ask(method="POST", body=b"this")
        head = it.ask(method="HEAD", body=b"this")
    assert (refused.status, refused.body, refused.wait) == (429, b"this is too much", 60)
    assert (head.status, head.body, head.wait) == (429, b"", 60)


def test_a_starlette_response_serves_as_on_denied() -> None:
    """A ready-made Starlette response is an ASGI application too."""
    denied = PlainTextResponse("slow down", status_code=429, headers={"Retry-After": "90"})
    with ASGISite(Rule("api", "1/minute"), store=MemoryStore(Clock()), on_denied=denied) as it:
        it.ask()
        refused = it.ask()
        again = it.ask()
    assert (refused.body, refused.wait) == (b"slow down", 90)
    assert again.headers == refused.headers


def test_on_denied_is_not_asked_about_a_websocket() -> None:
    """A handshake is refused by the gate itself, since ``on_denied`` speaks HTTP."""
    gate = gated(accepting, Rule("api", "1/minute"), on_denied=PlainTextResponse("slow down", status_code=420))
    assert [asyncio.run(handshake(gate)).status for _ in range(2)] == [101, 429]


@pytest.mark.parametrize(
    "app", [sending(START, END), Starlette(), GZipMiddleware(Starlette())], ids=["plain", "Starlette", "around Starlette"]
)
def test_a_mistake_is_told_to_servers_that_go_on(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where a server builds the middleware, and might go on in silence after an error in that, the mistake is logged."""

    async def start() -> None:
        with pytest.raises(ConfigError, match="rules are missing"):
            LimitGate(app)

    asyncio.run(start())
    assert [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records] == [
        ("CRITICAL", "LimitGate cannot be set up, so the server ends or every request fails")
    ]
    caplog.clear()
    with pytest.raises(ConfigError):
        LimitGate(sending(START, END))
    assert not caplog.records


@pytest.mark.parametrize("inside", [(), (GZipMiddleware, CORSMiddleware)], ids=["alone", "around others"])
@pytest.mark.parametrize("framework", [Starlette, FastAPI])
@pytest.mark.parametrize("options", [{"rules": "no/such/folder"}, {"rules": [Rule("api", "1/minute")], "unknown": 1}])
def test_a_mistake_in_middleware_that_a_framework_makes(
    framework: Any, options: dict[str, Any], inside: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """It fails the start by lifespan events. A server that sends none gets the error at each request, and it is logged once."""
    app = framework()
    for each in inside:
        app.add_middleware(each)
    app.add_middleware(LimitGate, **options)
    sent = []

    async def serve() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        with pytest.raises((ConfigError, TypeError)) as failed:
            await app({"type": "lifespan", "app": app, "state": {}}, receive, send)
        assert sent == [{"type": "lifespan.startup.failed", "message": str(failed.value)}]
        for scope in (http_scope(), http_scope(), websocket_scope()):
            with pytest.raises(type(failed.value)) as again:
                await app(scope, receive, send)
            assert again.value is failed.value

    asyncio.run(serve())
    assert [record.levelname for record in caplog.records if "cannot be set up" in record.getMessage()] == ["CRITICAL"]


# --- calls that wait for the client -----------------------------------------------------------------------------------


class Noted:
    """Places of a request that note for how long it waits for its client."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def idle(self) -> None:
        self.notes.append("idle")

    def busy(self) -> None:
        self.notes.append("busy")


class Steps:
    """An awaitable that is no coroutine, as servers in other languages have."""

    def __init__(self, *steps: Any) -> None:
        self._steps = iter(steps)

    def __await__(self) -> Any:
        return self._steps


def test_a_call_of_the_server_that_returns_at_once_waits_for_nobody() -> None:
    async def call() -> str:
        return "done"

    noted: Any = Noted()
    assert asyncio.run(for_client(call(), noted)) == "done"
    assert not noted.notes


@pytest.mark.parametrize("ends", ["returns", "raises", "is cancelled", "outlives that"])
def test_a_call_of_the_server_that_waits_is_awaited_as_ever(ends: str) -> None:
    async def call() -> str:
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(60 if "is cancelled" in ends or "outlives" in ends else 0)
            if ends == "raises":
                raise OSError("closed")
        except asyncio.CancelledError:
            seen.append("cancelled")
            if ends == "outlives that":
                await asyncio.sleep(0)
                return "late"
            raise
        return "done"

    async def main() -> Any:
        task = asyncio.create_task(for_client(call(), noted))
        for _ in range(3):
            await asyncio.sleep(0)
        if ends in ("is cancelled", "outlives that"):
            assert noted.notes == ["idle"]
            task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    noted: Any = Noted()
    seen: list[str] = []
    result = asyncio.run(main())
    assert noted.notes == ["idle", "busy"]
    assert {"returns": "done", "outlives that": "late"}.get(ends, result) == result
    assert isinstance(result, {"raises": OSError, "is cancelled": asyncio.CancelledError}.get(ends, str))
    assert seen == (["cancelled"] if ends in ("is cancelled", "outlives that") else [])


def test_an_awaitable_that_is_no_coroutine_is_awaited_as_ever() -> None:
    async def main() -> None:
        await for_client(Steps(None, None), noted)
        task = asyncio.create_task(for_client(Steps(None, None, None, None), noted))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    noted: Any = Noted()
    asyncio.run(main())
    assert noted.notes == ["idle", "busy"] * 2
