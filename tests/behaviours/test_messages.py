"""Limits on the messages that a client sends over a WebSocket: ``per: message``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import fastapi
import httpx
import pytest
import websockets.exceptions
import websockets.sync.client
from starlette.applications import Starlette
from starlette.endpoints import WebSocketEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from limitgate import AsyncRedisStore, Caller, ConfigError, LimitGate, LimitGateWSGI, Rule, RuleSet, StoreError, limit
from limitgate.limits.plan import Plan, Reading
from tests.support.doors import PATIENCE, Wire, asgi_reply, uvicorn_process, websocket_scope, wsgi_environ
from tests.support.outcomes import Watched
from tests.support.redis_server import RedisServer

CONNECT = {"type": "websocket.connect"}
GONE = {"type": "websocket.disconnect", "code": 1000}
TOO_FAST = {"type": "websocket.close", "code": 1013, "reason": "Too Many Requests"}
MESSAGES = Rule("messages", "2/minute", per="message")

Open = Callable[..., LimitGate]


@pytest.fixture
def store() -> Watched:
    return Watched()


def gated(app: Any, *rules: Rule, **options: Any) -> LimitGate:
    return LimitGate(app, rules=rules, **options)


def text(number: int) -> dict[str, Any]:
    return {"type": "websocket.receive", "text": str(number)}


def connected(app: Any, count: int, path: str = "/", **more: Any) -> Wire:
    """A client that sends so many messages and then leaves."""
    incoming = [CONNECT, *[text(number) for number in range(count)], GONE]
    return asyncio.run(Wire(*incoming).call(app, websocket_scope(path, **more)))


def heard(wire: Wire) -> list[str]:
    """What was answered over the WebSocket."""
    return [message["text"] for message in wire.sent if message["type"] == "websocket.send"]


def closing(wire: Wire) -> list[dict[str, Any]]:
    return [message for message in wire.sent if message["type"] == "websocket.close"]


async def echo(websocket: WebSocket) -> None:
    """Sends back what it receives until the client leaves."""
    await websocket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            await websocket.send_text(await websocket.receive_text())


class Echo(WebSocketEndpoint):
    encoding = "text"

    async def on_receive(self, websocket: WebSocket, data: str) -> None:
        await websocket.send_text(data)


# --- what happens -----------------------------------------------------------------------------------------------------


def test_messages_are_counted_one_by_one(store: Watched) -> None:
    """As many messages as there is room for reach the application, then the WebSocket is closed with code 1013."""
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), MESSAGES, store=store)
    wire = connected(app, 5)
    assert heard(wire) == ["0", "1"]
    assert wire.sent[-1] == TOO_FAST
    assert len(closing(wire)) == 1
    assert store.owed == {"messages": 2}


def test_the_application_sees_a_disconnect(store: Watched) -> None:
    """It receives a disconnect, whatever it sends afterwards is an ``OSError``, and its own closing is swallowed."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            seen.append(message.get("text"))
        seen.append(message)
        for _ in range(2):
            with pytest.raises(OSError, match="too fast"):
                await send({"type": "websocket.send", "text": "late"})
            await send({"type": "websocket.close", "code": 1000})
        seen.append(await receive())

    wire = connected(gated(app, MESSAGES, store=store), 4)
    assert seen == [None, "0", "1", {"type": "websocket.disconnect", "code": 1013, "reason": "Too Many Requests"}, GONE]
    assert wire.sent[1:] == [TOO_FAST]


def test_starlette_makes_a_disconnect_of_it(store: Watched) -> None:
    """A task that sends while another one receives gets `WebSocketDisconnect`, as when the client had left."""
    met: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        for _ in range(2):
            await websocket.receive_text()
        with pytest.raises(WebSocketDisconnect) as told:
            await websocket.receive_text()
        met.append(told.value.code)
        with pytest.raises(WebSocketDisconnect):
            await websocket.send_text("late")

    connected(gated(app, MESSAGES, store=store), 3)
    assert met == [1013]


def test_messages_that_were_on_their_way_are_dropped(store: Watched) -> None:
    """What a client had sent before it learned that it is too fast reaches nobody, and costs nothing more."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while True:
            seen.append(await receive())
            if seen[-1] == GONE:
                return

    wire = connected(gated(app, MESSAGES, store=store), 50)
    assert [message["type"].split(".")[1] for message in seen] == ["connect", "receive", "receive", "disconnect", "disconnect"]
    assert closing(wire) == [TOO_FAST]
    assert len(store.plans) == 3


def test_the_bucket_is_there_when_the_client_comes_back(store: Watched) -> None:
    """A new connection gives no new limit, another client has one of its own."""
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), MESSAGES, store=store)
    assert [len(heard(connected(app, 5))) for _ in range(2)] == [2, 0]
    assert len(heard(connected(app, 5, peer="192.0.2.99"))) == 2
    store.clock.advance(30)
    assert len(heard(connected(app, 5))) == 1


def test_handshakes_and_messages_have_limits_of_their_own(store: Watched) -> None:
    """A limit on requests counts the handshake only, one on messages no handshake, and rate headers tell of the former."""
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), Rule("requests", "9/minute"), MESSAGES, store=store)
    wire = connected(app, 5)
    assert heard(wire) == ["0", "1"]
    assert dict(wire.sent[0]["headers"])[b"x-ratelimit-limit"] == b"9"
    assert store.owed == {"requests": 1, "messages": 2}
    only = gated(Starlette(routes=[WebSocketRoute("/", echo)]), MESSAGES, store=store)
    assert not connected(only, 0).sent[0]["headers"]


def test_http_requests_are_no_messages(store: Watched) -> None:
    """A limit on messages leaves HTTP alone, under ASGI and WSGI, and gives it no headers."""
    gate = gated(Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))]), MESSAGES, store=store)
    replies = [asyncio.run(asgi_reply(gate)) for _ in range(4)]
    assert [(reply.status, reply.rate) for reply in replies] == [(200, {})] * 4
    wsgi = LimitGateWSGI(lambda _, start: [b"hello", start("200 OK", [])][:1], rules=[MESSAGES], store=store)
    assert [wsgi(wsgi_environ(), lambda *_: bytes) for _ in range(4)] == [[b"hello"]] * 4
    assert store.plans == []


def test_a_message_is_charged_to_all_its_limits_or_to_none(store: Watched) -> None:
    """Several limits on messages are one decision, a cost counts as often as it says, and shadow rules refuse nobody."""
    rules = [
        Rule("many", "9/minute", per="message"),
        Rule("heavy", "9/minute", cost=lambda request: int(request.query.get("weight")), per="message"),
        Rule("seen", "1/minute", per="message", shadow=True),
    ]
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), *rules, store=store)
    assert len(heard(connected(app, 5, "/?weight=4"))) == 2
    assert store.owed == {"many": 2, "heavy": 8, "seen": 1}


def test_a_gate_in_shadow_closes_nothing(store: Watched) -> None:
    """``shadow`` counts messages and lets all of them pass."""
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), MESSAGES, store=store, shadow=True)
    assert len(heard(connected(app, 5))) == 5
    assert store.owed == {"messages": 2}


def test_messages_of_exempt_connections_and_switched_off_gates(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is exempt, or let through by a gate that is off, may send what they like."""
    app = Starlette(routes=[WebSocketRoute("/", echo)])
    assert len(heard(connected(gated(app, MESSAGES, Rule("free", exempt=True), store=store), 5))) == 5
    monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    assert len(heard(connected(gated(app, MESSAGES, store=store), 5))) == 5
    assert store.plans == []


# --- ends that cross --------------------------------------------------------------------------------------------------


def test_after_the_application_has_closed_nothing_is_counted(store: Watched) -> None:
    """What still arrives once the application has closed the WebSocket is not charged, and it is not closed again."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 1000})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    wire = connected(gated(app, MESSAGES, store=store), 5)
    assert closing(wire) == [{"type": "websocket.close", "code": 1000}]
    assert store.plans == []


class Slow(Watched):
    """A store that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Any = asyncio.Event()
        self.may_go_on: Any = asyncio.Event()

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        self.asked.set()
        await self.may_go_on.wait()
        return self.spend(plan)


def test_a_websocket_that_the_application_closes_while_the_store_is_asked() -> None:
    """It is closed once: a server takes a second close for a mistake."""

    async def scene() -> Wire:
        store = Slow()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})
            receiving = asyncio.create_task(receive())
            await store.asked.wait()
            await send({"type": "websocket.close", "code": 1000})
            store.may_go_on.set()
            await receiving

        rule = Rule("heavy", "1/minute", cost=lambda _: 2, per="message")
        return await Wire(text(0)).call(gated(app, rule, store=store), websocket_scope())

    assert closing(asyncio.run(scene())) == [{"type": "websocket.close", "code": 1000}]


@pytest.mark.parametrize("error", [OSError("the client is gone"), RuntimeError("Unexpected ASGI message 'websocket.close'")])
def test_a_server_that_has_closed_already(store: Watched, error: Exception) -> None:
    """Where the client left meanwhile, or did not answer a ping, the application sees a disconnect and no error."""
    seen: list[str] = []

    class Closed(Wire):
        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            if message["type"] == "websocket.close":
                raise error

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            seen.append(message["type"])
        seen.append(message["type"])

    rule = Rule("heavy", "1/minute", cost=lambda _: 2, per="message")
    asyncio.run(Closed(text(0), GONE).call(gated(app, rule, store=store), websocket_scope()))
    assert seen == ["websocket.disconnect"]


def test_who_stops_waiting_for_a_message_finds_it_when_asking_again() -> None:
    """Servers keep a message that nobody waits for any more, and so does the gate; it is charged once."""

    async def scene() -> tuple[list[str], int]:
        store, heard_of = Slow(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})
            for _ in range(3):
                receiving = asyncio.create_task(receive())
                await store.asked.wait()
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
            store.may_go_on.set()
            while (message := await receive())["type"] == "websocket.receive":
                heard_of.append(message["text"])

        await Wire(text(0), text(1), GONE).call(gated(app, MESSAGES, store=store), websocket_scope())
        return heard_of, len(store.plans)

    assert asyncio.run(scene()) == (["0", "1"], 2)


def test_a_store_that_raises_something_else(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised to the application for each message that the store was asked about, and no more often."""
    seen: list[str] = []

    async def broken(*_: Any) -> Reading:
        raise LookupError("the store's own")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(2):
            with pytest.raises(LookupError):
                await receive()
        seen.append((await receive())["type"])

    monkeypatch.setattr(store, "aspend", broken)
    connected(gated(app, MESSAGES, store=store), 2)
    assert seen == ["websocket.disconnect"]


def test_a_connection_that_is_cancelled_while_the_store_is_asked() -> None:
    """Cancellation reaches the application, and nothing is sent."""

    async def scene() -> list[str]:
        store = Slow()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()

        wire = Wire(text(0))
        task = asyncio.create_task(wire.call(gated(app, MESSAGES, store=store), websocket_scope()))
        await store.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return wire.types

    assert asyncio.run(scene()) == []


# --- where such limits stand ------------------------------------------------------------------------------------------

per_message = limit("2/minute", per="message")


def starlette_function() -> Any:
    return Starlette(routes=[WebSocketRoute("/chat", per_message(echo))])


def starlette_class() -> Any:
    return Starlette(routes=[WebSocketRoute("/chat", per_message(type("Limited", (Echo,), {})))])


def starlette_mount() -> Any:
    inner = Starlette(routes=[WebSocketRoute("/", per_message(echo))])
    return Starlette(routes=[Mount("/chat", inner)])


def fastapi_route() -> Any:
    app = fastapi.FastAPI()

    @app.websocket("/chat")
    @per_message
    async def chat(websocket: fastapi.WebSocket) -> None:
        await echo(websocket)

    return app


def fastapi_included_router() -> Any:
    app, router = fastapi.FastAPI(), fastapi.APIRouter(prefix="/chat")

    @router.websocket("")
    @per_message
    async def chat(websocket: fastapi.WebSocket) -> None:
        await echo(websocket)

    app.include_router(router)
    return app


PLACES = [starlette_function, starlette_class, starlette_mount, fastapi_route, fastapi_included_router]


@pytest.mark.parametrize("build", PLACES)
@pytest.mark.parametrize("beside", [[], [Rule("requests", "9/minute")]], ids=["alone", "beside a rule"])
def test_decorators(store: Watched, build: Callable[[], Any], beside: list[Rule]) -> None:
    """A decorator counts messages wherever a WebSocket endpoint may stand."""
    path = "/chat/" if build is starlette_mount else "/chat"
    wire = connected(gated(build(), *beside, store=store), 5, path)
    assert heard(wire) == ["0", "1"]
    assert wire.sent[-1] == TOO_FAST


def test_decorators_for_handshakes_and_messages_on_one_endpoint(store: Watched) -> None:
    """Both may stand on the same endpoint, and each counts its own."""
    endpoint = limit("2/minute", name="handshakes")(limit("3/minute", name="messages", per="message")(echo))
    app = gated(Starlette(routes=[WebSocketRoute("/", endpoint)]), store=store)
    assert [len(heard(connected(app, 2))) for _ in range(2)] == [2, 1]
    assert connected(app, 2, extensions={}).types == ["websocket.close"]
    assert store.owed == {"handshakes": 2, "messages": 3}


def test_on_an_http_endpoint_such_a_limit_is_a_mistake(store: Watched) -> None:
    """Whoever puts a limit on messages where there are none is told so at the first call."""

    @limit("2/minute", name="misplaced", per="message")
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = gated(Starlette(routes=[Route("/", view)]), store=store)
    with pytest.raises(ConfigError, match=r"'misplaced' is per message, expected it on a WebSocket endpoint"):
        asyncio.run(asgi_reply(app))


def test_rules_in_yaml_by_path_and_tier(store: Watched, tmp_path: Path) -> None:
    """Written in rule files, limits on messages go by path, key and tier like all others."""
    (tmp_path / "default.yaml").write_text(
        "rules:\n  - {name: chat, path: /chat/**, key: [header:x-user], limits: [2/minute], per: message}\n"
    )
    (tmp_path / "vip.yaml").write_text(
        "tier: vip\nrules:\n  - {name: chat, path: /chat/**, key: [header:x-user], limits: [4/minute], per: message}\n"
    )
    app = LimitGate(
        Starlette(routes=[WebSocketRoute("/chat/{room}", echo), WebSocketRoute("/other", echo)]),
        rules=str(tmp_path),
        identify=lambda request: Caller("acme", tier="vip") if request.headers.get("x-vip") else None,
        store=store,
    )
    assert len(heard(connected(app, 6, "/chat/one", headers={"x-user": "a"}))) == 2
    assert len(heard(connected(app, 6, "/chat/two", headers={"x-user": "a"}))) == 0
    assert len(heard(connected(app, 6, "/chat/one", headers={"x-user": "b"}))) == 2
    assert len(heard(connected(app, 6, "/chat/one", headers={"x-user": "c", "x-vip": "1"}))) == 4
    assert len(heard(connected(app, 6, "/other", headers={"x-user": "a"}))) == 6


def test_gates_within_gates(store: Watched) -> None:
    """Each of two gates counts the messages by its own rules; a decorator is counted once."""
    inner = Starlette(routes=[WebSocketRoute("/", limit("9/minute", name="decorated", per="message")(echo))])
    inner.add_middleware(LimitGate, rules=[Rule("inner", "3/minute", per="message")], store=store)
    app = gated(Starlette(routes=[Mount("/in", inner)]), Rule("outer", "9/minute", per="message"), store=store)
    assert len(heard(connected(app, 5, "/in/"))) == 3
    assert store.owed == {"inner": 3, "decorated": 4, "outer": 4}


def test_a_rule_set_with_messages_only(store: Watched) -> None:
    """Nothing else has to be limited."""
    app = LimitGate(Starlette(routes=[WebSocketRoute("/", echo)]), rules=RuleSet([MESSAGES]), store=store)
    assert len(heard(connected(app, 5))) == 2


# --- the store fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "passed", "reason"), [("open", 5, None), ("local", 2, "Too Many Requests"), ("closed", 0, "Service Unavailable")]
)
def test_a_store_that_fails(store: Watched, policy: Any, passed: int, reason: str | None) -> None:
    """Messages pass, are counted by this process, or end the connection, as ``on_error`` says."""
    rule = Rule("messages", "2/minute", per="message", on_error=policy)
    store.fails = ("take",)
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), rule, store=store)
    wire = connected(app, 5)
    assert len(heard(wire)) == passed
    assert [(close["code"], close["reason"]) for close in closing(wire)] == ([(1013, reason)] if reason else [])
    assert app.gate.uncorrected == 0


class Halves(Watched):
    """A cluster without the node that has the buckets of the rule ``gone``; others may fill up behind its back."""

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        if gone := [charge.key for charge in plan.charges if charge.rule == "gone"]:
            raise StoreError("a part is out of order", keys=frozenset(gone))
        return super().spend(plan)


def test_a_message_that_is_refused_by_halves_is_charged_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store admits a message and this process then refuses it, the store gets its part back."""
    store = Halves()
    rules = [Rule("there", "9/minute", per="message"), Rule("gone", "1/minute", per="message", on_error="local")]
    app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), *rules, store=store)
    here = app.gate.outages._local_store
    spend = here.spend

    def overtaken(plan: Plan, timeout: float = 0) -> Reading:
        reading = spend(plan)
        if plan.verb == "peek" and reading.admitted:
            spend(plan._replace(verb="spend"))  # another message is quicker
        return reading

    monkeypatch.setattr(here, "spend", overtaken)
    assert heard(connected(app, 1)) == []
    assert store.owed == {}


# --- served -----------------------------------------------------------------------------------------------------------


def test_on_redis_across_event_loops(redis_server: RedisServer) -> None:
    """On Redis all connections of a key share one limit, whichever worker they reach."""
    rule = Rule(uuid4().hex, "4/day", per="message")

    async def scene() -> list[int]:
        stores = [AsyncRedisStore(redis_server.url) for _ in range(2)]
        found = []
        for store in stores:
            app = gated(Starlette(routes=[WebSocketRoute("/", echo)]), rule, store=store, timeout=5)
            found.append(len(heard(await Wire(CONNECT, *map(text, range(3)), GONE).call(app, websocket_scope()))))
        for store in stores:
            await store.aclose()
        return found

    assert asyncio.run(scene()) == [3, 1]


def test_through_uvicorn(redis_server: RedisServer, tmp_path: Path) -> None:
    """A real client is disconnected with 1013 by a real server, told why, and the server logs no error."""
    (tmp_path / "served.py").write_text(SERVED)
    log = tmp_path / "uvicorn.log"
    environment = {
        "LIMITGATE_STORE": redis_server.url,
        "LIMITGATE_TIMEOUT": "10",
        "PYTHONPATH": str(tmp_path),
        "WHO": uuid4().hex,
    }
    with uvicorn_process("served:app", tmp_path, **environment) as url:
        with websockets.sync.client.connect(url.replace("http", "ws") + "/chat", open_timeout=PATIENCE) as client:
            for number in range(6):
                client.send(str(number))
            echoes = [client.recv(timeout=PATIENCE) for _ in range(3)]
            with pytest.raises(websockets.exceptions.ConnectionClosedError) as closed:
                client.recv(timeout=PATIENCE)
        assert echoes == ["0", "1", "2"]
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "Too Many Requests")
        assert httpx.get(f"{url}/ends").json() == ["WebSocketDisconnect 1013"]
    assert "ERROR" not in log.read_text()
    assert "Traceback" not in log.read_text()


SERVED = """
import os
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from limitgate import LimitGate, limit

ends = []

@limit("3/day", name=os.environ["WHO"], per="message")
async def chat(websocket):
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except Exception as error:
        ends.append(f"{type(error).__name__} {error.code}")

app = Starlette(routes=[WebSocketRoute("/chat", chat), Route("/ends", lambda _: JSONResponse(ends))])
app.add_middleware(LimitGate, rules=[])
"""
