"""Rules that read a request's body: what counts, what is refused, and that the application gets the bytes that were sent."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import pytest
from django.http import HttpResponse
from django.urls import path as url
from fastapi import Body, Depends, FastAPI, Form, Request as FastAPIRequest, UploadFile, WebSocket
from flask import Flask, request as flask_request
from hypothesis import given, settings, strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from limitgate import Adaptive, Caller, ConfigError, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule, ausage, limit
from limitgate.exchange.asgi import ReceiveBuffer
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.http import body as bodies
from limitgate.http.body import BODY_LIMIT
from tests.support.clock import Clock
from tests.support.django_app import WAYS
from tests.support.doors import PATIENCE, SITES, Reply, Site, Wire, asgi_reply, handshake, http_scope, wsgi_environ, wsgi_reply
from tests.support.effort import EXAMPLES
from tests.support.observed import Recorder
from tests.support.virtual import World

# isort: split
from rest_framework.response import Response as RestResponse
from rest_framework.views import APIView

from limitgate.django.rest import Throttle

BY_USER = Rule("users", "2/minute", key=["json:/user"])


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def opened(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens a site, with a clock that stands."""
    sites: list[Site] = []

    def opening(*rules: Any, **options: Any) -> Site:
        sites.append(request.param(*rules, store=MemoryStore(Clock()), **options))
        return sites[-1]

    yield opening
    for it in sites:
        it.close()


def posted(it: Site, *documents: Any, **more: Any) -> list[int]:
    """Statuses of requests with these bodies, as bytes or as what is to be JSON."""
    sent = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in documents]
    return [it.ask(method="POST", body=each, **more).status for each in sent]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_each_value_has_its_own_limit(opened: Any) -> None:
    it = opened(BY_USER)
    assert posted(it, {"user": "ann"}, {"user": "ann"}, {"user": "ann"}, {"user": "bob"}) == [200, 200, 429, 200]
    assert posted(it, {"user": 7}, {"user": "7"}, b'{"user": 7.0}') == [200, 200, 429]
    assert posted(it, {"user": True}, {"user": "true"}, {"user": True}) == [200, 200, 429]


ABSENT: list[Any] = [
    b"",
    b"user=ann",
    b"{",
    b'{"user": "\xff"}',
    {},
    {"user": None},
    {"user": ""},
    {"user": {"id": 1}},
    {"user": ["ann"]},
    ["ann"],
    "ann",
    7,
]


@pytest.mark.parametrize("document", ABSENT, ids=repr)
def test_the_address_replaces_a_value_that_is_absent(opened: Any, document: Any) -> None:
    """Whatever is not there: all of it counts together, and by address."""
    it = opened(BY_USER)
    assert posted(it, document, b"", document) == [200, 200, 429]
    assert posted(it, document, peer="192.0.2.9") == [200]


def test_a_compressed_body_is_no_json(opened: Any) -> None:
    it = opened(BY_USER)
    bodies = [gzip.compress(b'{"user": %d}' % user) for user in range(3)]
    assert posted(it, *bodies, headers={"Content-Encoding": "gzip"}) == [200, 200, 429]


@pytest.mark.parametrize("header", ["Content-Type", "Content-Encoding"])
def test_what_the_headers_call_the_content_does_not_matter(opened: Any, header: str) -> None:
    """Many applications do not look at it, so that another type would evade the limit."""
    it = opened(BY_USER)
    for kind, status in (("application/json", 200), ("gzip", 200), ("multipart/form-data", 429)):
        assert posted(it, {"user": 1}, headers={header: kind}) == [status]


def test_alternatives(opened: Any) -> None:
    it = opened(Rule("users", "1/minute", key=["json:/user|header:x-user|ip", "json:/params/0/a~1b"]))
    assert posted(it, {"user": 1}, {"user": 1, "params": [{"a/b": "x"}]}, {"user": 1}) == [200, 200, 429]
    assert posted(it, {}, {}, headers={"X-User": "ann"}) == [200, 429]
    assert posted(it, {}, {}, headers={"X-User": "bob"}) == [200, 429]
    assert posted(it, {}, {}) == [200, 429]


def test_methods_and_paths_to_which_no_such_rule_applies(opened: Any) -> None:
    """Their bodies are not read, so that they may be as large as they like."""
    it = opened(Rule("users", "1/minute", key=["json:/user"], path="/users", methods=["POST"]), Rule("all", "90/minute"))
    large = b"x" * (BODY_LIMIT + 1)
    assert [it.ask(path, method, body=large).status for path, method in (("/other", "POST"), ("/users", "PUT"))] == [200, 200]
    assert it.ask("/users", "POST", body=large).status == 413


def test_clients_to_which_no_such_rule_applies(opened: Any) -> None:
    it = opened(Rule("users", "1/minute", key=["json:/user"], clients=["10.0.0.0/8"]))
    large = b"x" * (BODY_LIMIT + 1)
    assert [it.ask("/", "POST", body=large, peer=peer).status for peer in ("192.0.2.1", "10.0.0.1")] == [200, 413]


def test_keys_that_clients_invent_are_bounded(opened: Any) -> None:
    it = opened(Rule("users", "1/minute", key=["json:/user"]), new_buckets=4)
    assert posted(it, *[{"user": number} for number in range(6)]) == [200] * 4 + [429] * 2


def test_a_rule_with_its_value_is_masked_in_the_log(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "limitgate"):
        posted(opened(Rule("users", "1/minute", key=["json:/user"])), {"user": "ann@example.org"}, {"user": "ann@example.org"})
    assert "json:/user=ann…org" in caplog.text
    assert "example" not in caplog.text


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "status"), [(0, 200), (BODY_LIMIT, 200), (BODY_LIMIT + 1, 413), (10_000_000, 413)], ids=str)
def test_sizes(opened: Any, size: int, status: int) -> None:
    it = opened(BY_USER)
    reply = it.ask("/", "POST", body=b" " * size)
    assert reply.status == status
    if status == 413:
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json() == {
            "type": "about:blank",
            "title": "Content Too Large",
            "status": 413,
            "detail": "The request's body has more than 65,536 bytes, so its limit cannot be determined.",
        }
        assert not reply.rate
        assert not it.seen


def test_a_limit_of_ones_own(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert posted(opened(BY_USER, body_limit=10), b" " * 10, b" " * 11) == [200, 413]
    monkeypatch.setenv("LIMITGATE_BODY_LIMIT", "20")
    assert posted(opened(BY_USER), b" " * 20, b" " * 21) == [200, 413]
    with pytest.raises(ConfigError, match="body_limit"):
        opened(BY_USER, body_limit=0)


@pytest.mark.parametrize(
    "document", [b"[" * 101 + b"]" * 101, b"[" * 30_000, b'{"user": ' + b"1" * 5000 + b"}", b" " * (BODY_LIMIT + 1)]
)
def test_too_much_is_not_absent(opened: Any, document: bytes) -> None:
    """It is refused and not charged, whatever else applies."""
    it = opened(BY_USER, Rule("all", "3/minute"))
    assert posted(it, document, document, b"", b"") == [413, 413, 200, 200]
    assert posted(it, {"user": 1}, {"user": 2}) == [200, 429]


def test_too_much_under_a_shadow(opened: Any) -> None:
    """A shadow refuses nothing. It counts by address, and what is enforced is enforced."""
    it = opened(Rule("users", "1/minute", key=["json:/user"], shadow=True), Rule("all", "2/minute"))
    large = b" " * (BODY_LIMIT + 1)
    replies = [it.ask("/", "POST", body=large) for _ in range(3)]
    assert [each.status for each in replies] == [200, 200, 429]
    assert replies[0].rate["x-ratelimit-remaining"] == "1"
    assert [decision.shadow for decision in it.seen] == [True, True]


def test_too_much_where_everything_is_a_shadow(opened: Any) -> None:
    it = opened(BY_USER, shadow=True)
    assert posted(it, b" " * (BODY_LIMIT + 1), b"[" * 200, {"user": 1}) == [200, 200, 200]
    assert [decision.shadow for decision in it.seen] == [True, True, False]


def test_a_rule_that_is_replaced_needs_no_body_of_a_size(opened: Any) -> None:
    replacing = Rule("office", "90/minute", clients=["10.0.0.0/8"], replaces=["users"])
    it = opened(BY_USER, replacing)
    large = b" " * (BODY_LIMIT + 1)
    assert [it.ask("/", "POST", body=large, peer=peer).status for peer in ("10.0.0.1", "192.0.2.1")] == [200, 413]


# --- callables --------------------------------------------------------------------------------------------------------


def test_callables_of_a_rule_that_asks(opened: Any) -> None:
    """Cost, condition and limits see the parsed body, None without one."""
    seen: list[Any] = []

    def cost(request: Any) -> int:
        seen.append(request.json)
        return len(request.json["queries"])

    def limits(request: Any) -> str:
        return f"{request.json['limit']}/minute"

    def when(request: Any) -> bool:
        return isinstance(request.json, dict)

    it = opened(Rule("batches", limits, cost=cost, when=when, body=True))
    batch = {"queries": [1, 2, 3], "limit": 7}
    assert posted(it, batch, batch, batch, b"", b"[]") == [200, 200, 429, 200, 200]
    assert seen[0] == batch


def test_a_denial_by_the_body(opened: Any) -> None:
    it = opened(Rule("no", deny=True, when=lambda request: request.json == "no", body=True))
    assert posted(it, "no", "yes", b"x", b" " * (BODY_LIMIT + 1)) == [403, 200, 200, 413]


@pytest.mark.parametrize(
    "rule",
    [
        Rule("all", "9/minute", cost=lambda request: request.json),
        Rule("all", "9/minute", when=lambda request: request.json),
        Rule("all", lambda request: request.json),
    ],
    ids=["cost", "when", "limits"],
)
def test_callables_of_a_rule_that_does_not_ask(opened: Any, rule: Rule) -> None:
    """The error names the option, also where another rule has the body read."""
    for it in (opened(rule), opened(BY_USER, rule)):
        with pytest.raises(ConfigError, match="expected body=True on the rule"):
            posted(it, {"user": 1})


def test_a_key_part_asks_implicitly(opened: Any) -> None:
    it = opened(Rule("users", "5/minute", key=["json:/user"], cost=lambda request: request.json["size"]))
    assert posted(it, {"user": 1, "size": 5}, {"user": 1, "size": 1}, {"user": 2, "size": 1}) == [200, 429, 200]


def test_other_callables_have_no_body(opened: Any) -> None:
    def identify(request: Any) -> Caller | None:
        return request.json

    with pytest.raises(ConfigError, match="expected body=True on the rule"):
        posted(opened(BY_USER, identify=identify), {"user": 1})


def test_async_limits_see_the_body() -> None:
    async def limits(request: Any) -> str:
        await asyncio.sleep(0)
        return f"{request.json['limit']}/minute"

    async def main() -> list[int]:
        gated = LimitGate(echo, rules=[Rule("all", limits, body=True)], store=MemoryStore(Clock()))
        return [(await asgi_reply(gated, method="POST", body=b'{"limit": 2}')).status for _ in range(3)]

    assert asyncio.run(main()) == [200, 200, 429]


def test_an_async_identify_before_the_body() -> None:
    async def identify(request: Any) -> Caller:
        await asyncio.sleep(0)
        return Caller("ann")

    async def main() -> list[int]:
        rules = [Rule("all", "1/minute", key=["caller", "json:/user"])]
        gated = LimitGate(echo, rules=rules, identify=identify, store=MemoryStore(Clock()))
        return [
            (await asgi_reply(gated, method="POST", body=body)).status for body in (b'{"user":1}', b'{"user":2}', b'{"user":1}')
        ]

    assert asyncio.run(main()) == [200, 200, 429]


def test_yaml(tmp_path: Any, opened: Any) -> None:
    (tmp_path / "rules.yaml").write_text("rules:\n  - {name: users, limits: [1/minute], key: ['json:/user|ip'], body: true}\n")
    assert posted(opened(rules=tmp_path), {"user": 1}, {"user": 2}, {"user": 1}) == [200, 200, 429]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": ["json:user"]}, "'user' is not a JSON pointer"),
        ({"key": ["json:"]}, "'' is not a JSON pointer"),
        ({"key": ["json:/a~2"]}, "with ~1 for a slash"),
        ({"key": ["json"]}, "json:/POINTER"),
        ({"exempt": True, "limits": (), "body": True}, "is exempt, so it reads no body"),
        (
            {"per": "message", "key": ["json:/user"]},
            "counts messages, so it reads no body, expected no per, or a key without it",
        ),
        ({"body": 1}, "body"),
    ],
)
def test_rules_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rule("users", **{"limits": ["1/minute"], **options})


# --- what the application receives ------------------------------------------------------------------------------------


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body that it receives."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    data, more = b"", True
    while more:
        message = await receive()
        data, more = data + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": data})


def parts(*data: bytes) -> list[dict[str, Any]]:
    return [{"type": "http.request", "body": each, "more_body": place < len(data)} for place, each in enumerate(data, 1)]


async def received(app: Any, messages: list[dict[str, Any]], count: int, **options: Any) -> tuple[list[dict[str, Any]], int]:
    """What an application behind a gate receives first, and how often the server was asked."""
    got: list[dict[str, Any]] = []

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive() for _ in range(count)])
        await app(scope, receive, send)

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gated = LimitGate(reading if app else answering, store=MemoryStore(Clock()), **options)
    app = answering
    wire = await Wire(*messages).call(gated, http_scope(method="POST"))
    assert wire.reply().status == 200
    return got, wire.received


def test_messages_come_as_they_were_sent() -> None:
    """Split anywhere, with empty ones, and the end of the connection after them."""
    messages = [*parts(b'{"us', b"", b'er": "\xc3', b'\xa4"}', b""), {"type": "http.disconnect"}]
    got, asked = asyncio.run(received(echo, messages, 6, rules=[BY_USER]))
    assert got == messages
    assert all(one is other for one, other in zip(got, messages))
    assert asked == 6


def test_a_large_body_under_a_shadow_is_passed_on() -> None:
    """It is read no further than necessary."""
    messages = parts(*[b"x" * 30_000] * 5)
    got, _ = asyncio.run(received(echo, messages, 5, rules=[BY_USER], shadow=True))
    assert got == messages


def test_a_body_in_too_many_parts() -> None:
    async def main() -> list[int]:
        gated = LimitGate(echo, rules=[BY_USER], store=MemoryStore(Clock()))
        counts = (bodies.MOST_PARTS, bodies.MOST_PARTS + 1)
        wires = [await Wire(*parts(*[b" "] * count)).call(gated, http_scope(method="POST")) for count in counts]
        return [wire.reply().status for wire in wires]

    assert asyncio.run(main()) == [200, 413]


def test_a_websocket_has_no_body() -> None:
    """Nothing is read of it, and it counts by address."""

    async def main() -> list[int]:
        gated = LimitGate(echo, rules=[BY_USER], store=MemoryStore(Clock()))
        return [(await handshake(gated)).status for _ in range(3)]

    assert asyncio.run(main()) == [101, 101, 429]


def test_gates_within_gates() -> None:
    """Each reads the body, and the application too."""

    async def main() -> list[Any]:
        inner = LimitGate(echo, rules=[Rule("inner", "2/minute", key=["json:/user"])], store=MemoryStore(Clock()))
        gated = LimitGate(inner, rules=[Rule("outer", "3/minute", key=["json:/tenant"])], store=MemoryStore(Clock()))
        sent = b'{"tenant": 1, "user": 1}'
        return [await asgi_reply(gated, method="POST", body=sent) for _ in range(3)]

    replies = asyncio.run(main())
    assert [each.status for each in replies] == [200, 200, 429]
    assert replies[0].body == b'{"tenant": 1, "user": 1}'


def test_a_body_that_the_inner_gate_refuses_is_counted_once() -> None:
    """The outer gate has admitted the request, but knows its outcome."""
    recorder = Recorder()
    inner = LimitGate(echo, rules=[Rule("inner", "9/minute", key=["json:/user"])], observers=[recorder])
    gated = LimitGate(inner, rules=[Rule("outer", "9/minute")], observers=[recorder])
    scope = http_scope(method="POST")
    wire = Wire({"type": "http.request", "body": b" " * (BODY_LIMIT + 1)})
    assert asyncio.run(wire.call(gated, scope)).reply().status == 413
    assert scope["limitgate.outcome"] == "refused"
    assert recorder.new("requests") == {("refused", "nobody"): 1}


FUZZED = st.lists(
    st.binary(max_size=40) | st.sampled_from([b'{"user":', b" 1}", b"{}", b"[[[[", b"\xff"]), min_size=1, max_size=6
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(FUZZED, st.sampled_from([8, 40, BODY_LIMIT]), st.booleans())
def test_an_asgi_application_gets_the_bytes_that_were_sent(data: list[bytes], most: int, shadow: bool) -> None:  # noqa: FBT001
    async def main() -> Reply:
        gated = LimitGate(echo, rules=[BY_USER], store=MemoryStore(Clock()), body_limit=most, shadow=shadow)
        return (await Wire(*parts(*data)).call(gated, http_scope(method="POST"))).reply()

    reply, sent = asyncio.run(main()), b"".join(data)
    assert reply.status == (200 if shadow or len(sent) <= most else 413)
    assert reply.status == 413 or reply.body == sent


@settings(max_examples=EXAMPLES, deadline=None)
@given(FUZZED, st.sampled_from([8, 40, BODY_LIMIT]), st.sampled_from(["length", "end"]), st.booleans())
def test_a_wsgi_application_gets_the_bytes_that_were_sent(data: list[bytes], most: int, way: str, shadow: bool) -> None:  # noqa: FBT001
    sent = b"".join(data)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        lines = environ["wsgi.input"].readlines() if way == "end" else [environ["wsgi.input"].read(len(sent))]
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"".join(lines)]

    gated = LimitGateWSGI(app, rules=[BY_USER], store=MemoryStore(Clock()), body_limit=most, shadow=shadow)
    more = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True} if way == "end" else {}
    reply = wsgi_reply(gated, method="POST", body=sent, **more)
    assert reply.status == (200 if shadow or len(sent) <= most else 413)
    assert reply.status == 413 or reply.body == sent


def test_a_wsgi_application_reads_a_stream_on() -> None:
    """Of a body that is too large for a shadow, the rest still comes from the server."""
    data = b"x" * 100_000 + b"\nend"

    def app(environ: Any, start_response: Any) -> list[bytes]:
        stream = environ["wsgi.input"]
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [stream.read(10), stream.readline(), *stream]

    more = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    gated = LimitGateWSGI(app, rules=[BY_USER], store=MemoryStore(Clock()), shadow=True)
    assert wsgi_reply(gated, method="POST", body=data, **more).body == data


def test_a_chunked_body_whose_end_a_wsgi_server_does_not_tell() -> None:
    environ = wsgi_environ("/", "POST", {"Transfer-Encoding": "chunked"})
    gated = LimitGateWSGI(lambda *_: [], rules=[BY_USER], store=MemoryStore(Clock()))
    statuses: list[str] = []
    gated(environ, lambda status, _: statuses.append(status))
    assert statuses == ["411 Length Required"]


# --- slow clients -----------------------------------------------------------------------------------------------------


class Stalling:
    """A server that hands out messages at their times, and then nothing."""

    def __init__(self, *messages: tuple[float, Any]) -> None:
        self.messages = list(messages)
        self.cancelled = 0

    async def receive(self) -> Any:
        try:
            pause, message = self.messages.pop(0) if self.messages else (3600, {"type": "http.disconnect"})
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return message


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def start(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def stalled(world: World, server: Stalling, *rules: Any, **options: Any) -> tuple[list[Any], float]:
    """What is sent, and when, if a server's messages come slowly."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> float:
        gated = LimitGate(echo, rules=rules or [BY_USER], store=MemoryStore(world), **options)
        await gated(http_scope(method="POST"), server.receive, send)
        await asyncio.sleep(0)
        return world.now

    return sent, world.run(main())


@pytest.mark.parametrize("messages", [(), ((1, start(b'{"us')),), tuple([(3, start(b" "))] * 9)], ids=["none", "one", "drips"])
def test_a_body_that_stalls_is_refused_in_time(world: World, messages: Any) -> None:
    """The whole body has its time, not each part of it."""
    server = Stalling(*messages)
    sent, now = stalled(world, server)
    assert (sent[0]["status"], now) == (408, pytest.approx(bodies.LONGEST_READ_S))
    assert server.cancelled == 1


def test_a_body_that_comes_slowly(world: World) -> None:
    sent, now = stalled(world, Stalling((4, start(b'{"user":')), (4, start(b"1}", more=False))))
    assert (sent[0]["status"], sent[1]["body"], now) == (200, b'{"user":1}', pytest.approx(8))


def test_a_stalling_body_under_a_shadow(world: World) -> None:
    """The application waits on for what the gate has been waiting for; no message is lost."""
    server = Stalling((1, start(b"a")), (20, start(b"b", more=False)))
    sent, now = stalled(world, server, shadow=True)
    assert (sent[0]["status"], sent[1]["body"], now) == (200, b"ab", pytest.approx(21))
    assert not server.cancelled


@pytest.mark.parametrize("shadow", [False, True])
def test_a_client_that_leaves_in_the_middle(world: World, *, shadow: bool) -> None:
    """It is not charged, and the application does not run unless under a shadow, where it is told."""
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.extend([(await receive())["type"] for _ in range(2)])

    async def main() -> int:
        store = MemoryStore(world)
        gated = LimitGate(app, rules=[Rule("all", "1/minute", key=["json:/user", "global"])], store=store, shadow=shadow)
        server = Stalling((0, start(b"{")), (1, {"type": "http.disconnect"}))
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await gated(http_scope(method="POST"), server.receive, send)
        return len(sent)

    assert (world.run(main()) > 0) is not shadow
    assert told == (["http.request", "http.disconnect"] if shadow else [])


def test_a_server_whose_receive_fails(world: World) -> None:
    async def receive() -> Any:
        raise OSError("gone")

    server = Stalling()
    server.receive = receive  # type: ignore[method-assign]
    assert stalled(world, server)[0][0]["status"] == 400


def test_a_request_that_is_cancelled_leaves_nothing(world: World) -> None:
    server = Stalling()

    async def main() -> int:
        gated = LimitGate(echo, rules=[BY_USER], store=MemoryStore(world))
        task = asyncio.create_task(gated(http_scope(method="POST"), server.receive, echo))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert world.run(main()) == 1
    assert server.cancelled == 1


def test_a_slow_body_holds_no_place(world: World) -> None:
    """Permits of adaptive limits are taken once the body has come."""
    rules = [Rule("all", "90/minute", key=["json:/user"], adaptive=Adaptive(min=1, max=1))]

    async def main() -> list[int]:
        gated = LimitGate(echo, rules=rules, store=MemoryStore(world))
        slow = asyncio.create_task(gated(http_scope(method="POST"), Stalling((5, start(b"{}", more=False))).receive, ignored))
        await asyncio.sleep(1)
        statuses = [(await asgi_reply(gated, method="POST", body=b"{}")).status for _ in range(3)]
        assert not slow.done()
        await slow
        return statuses

    async def ignored(_: Any) -> None: ...

    assert world.run(main()) == [200, 200, 200]


def test_a_place_is_waited_for_with_the_body_at_hand(world: World) -> None:
    """The request waits for its permit and is counted by its body afterwards."""

    async def slowly(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)
        await echo(scope, receive, send)

    rules = [Rule("all", "1/minute", key=["json:/user"], adaptive=Adaptive(min=1, max=1), max_delay=9)]

    async def main() -> list[Any]:
        gated = LimitGate(slowly, rules=rules, store=MemoryStore(world))
        sent = (b'{"user":1}', b'{"user":2}', b'{"user":1}')
        return await asyncio.gather(*[asgi_reply(gated, method="POST", body=each) for each in sent])

    replies = world.run(main())
    assert [each.status for each in replies] == [200, 200, 429]
    assert replies[1].body == b'{"user":2}'


@pytest.mark.parametrize("count", [1, 20])
def test_a_client_that_leaves_while_it_waits_for_its_turn(world: World, count: int) -> None:
    """However many messages its body had, its end is noticed."""
    ran: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(1)
        await echo(scope, receive, send)

    async def main() -> float:
        rules = [Rule("all", "1 per 10 seconds", key=["json:/user"], max_delay=30)]
        gated = LimitGate(app, rules=rules, store=MemoryStore(world))
        await asgi_reply(gated, method="POST", body=b"{}")
        server = Stalling(*[(0, start(b" "))] * (count - 1), (0, start(b"{}", more=False)), (2, {"type": "http.disconnect"}))
        await gated(http_scope(method="POST"), server.receive, ignored)
        return world.now

    async def ignored(_: Any) -> None: ...

    assert world.run(main()) == pytest.approx(2, abs=0.1)
    assert ran == [1]


# --- frameworks -------------------------------------------------------------------------------------------------------


def test_starlette_reads_a_stream() -> None:
    """As a stream, whole, and after the limit of an endpoint."""

    async def stream(request: Request) -> Response:
        return PlainTextResponse(b"".join([chunk async for chunk in request.stream()]))

    @limit("1/minute", name="own", key=["json:/user"])
    async def own(request: Request) -> Response:
        return PlainTextResponse((await request.json())["user"])

    app = Starlette(routes=[Route("/stream", stream, methods=["POST"]), Route("/own", own, methods=["POST"])])
    app.add_middleware(LimitGate, rules=[Rule("all", "9/minute", key=["json:/user"])], store=MemoryStore(Clock()))

    async def main() -> list[tuple[int, bytes]]:
        replies = [
            await asgi_reply(app, path, "POST", body=b'{"user": "%s"}' % user)
            for path, user in (("/stream", b"ann"), ("/own", b"ann"), ("/own", b"bob"), ("/own", b"ann"))
        ]
        return [(each.status, each.body) for each in replies]

    found = asyncio.run(main())
    assert [status for status, _ in found] == [200, 200, 200, 429]
    assert [body for _, body in found[:3]] == [b'{"user": "ann"}', b"ann", b"bob"]


def fastapi_app() -> FastAPI:
    app = FastAPI()
    by_user = Depends(RateLimit("2/minute", name="user", key=["json:/user"]))
    by_cost = Depends(RateLimit("5/minute", name="cost", key=["global"], cost=lambda request: request.json["size"], body=True))

    @app.post("/parsed", dependencies=[by_user])
    async def parsed(user: Annotated[int | str, Body(embed=True)]) -> Any:
        return user

    @app.post("/raw", dependencies=[by_user])
    async def raw(request: FastAPIRequest) -> Any:
        return Response(b"".join([chunk async for chunk in request.stream()]))

    @app.post("/form", dependencies=[by_user])
    async def form(user: Annotated[str, Form()]) -> Any:
        return user

    @app.post("/file", dependencies=[by_user])
    async def file(upload: UploadFile) -> Any:
        return (await upload.read()).decode()

    @app.post("/cost", dependencies=[by_cost])
    async def cost() -> str:
        return "hello"

    @app.post("/shadow", dependencies=[Depends(RateLimit("1/minute", name="shadow", key=["json:/user"], shadow=True))])
    async def shadow(request: FastAPIRequest) -> Any:
        return len(await request.body())

    app.add_middleware(LimitGate, rules=[Rule("all", "90/minute")], store=MemoryStore(Clock()))
    return app


def test_a_dependency_counts_by_the_body() -> None:
    """Whether FastAPI has read it before or the endpoint reads it afterwards, as a stream too."""
    app = fastapi_app()

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

            async def post(path: str, *users: Any) -> list[int]:
                return [(await client.post(path, json={"user": user})).status_code for user in users]

            assert await post("/parsed", 1, 1, 2, "1") == [200, 200, 200, 429]
            assert await post("/raw", 2, 2, 3) == [200, 429, 200]
            assert (await client.post("/raw", content=b'{"user":  4}')).content == b'{"user":  4}'
            chunked = client.build_request("POST", "/raw", content=chunks())
            assert (await client.send(chunked)).content == b'{"user":  4}'
            assert (await client.post("/raw", json={"user": 4})).status_code == 429
            assert [(await client.post("/cost", json={"size": size})).status_code for size in (3, 3, 2)] == [200, 429, 200]

    async def chunks() -> Any:
        yield b'{"user"'
        yield b":  4}"

    asyncio.run(main())


def test_a_dependency_behind_forms() -> None:
    """A form is no JSON: it counts by address, also where FastAPI has read it as a stream."""
    app = fastapi_app()

    async def main() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            replies = [
                await client.post("/form", data={"user": "ann"}),
                await client.post("/file", files={"upload": b"x" * 100_000}, headers={}),
                await client.post("/form", data={"user": "bob"}),
            ]
            return [each.status_code for each in replies]

    assert asyncio.run(main()) == [200, 413, 200]


def test_a_dependency_refuses_what_is_too_large() -> None:
    """With the charge of other rules given back; a shadow passes it on whole."""
    app = fastapi_app()

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            large = b" " * 70_000 + b'{"user": 1}'
            for path in ("/raw", "/parsed"):
                refused = await client.post(path, content=large, headers={"Content-Type": "application/json"})
                assert (refused.status_code, refused.json()["title"]) == (413, "Content Too Large")
            assert (await client.post("/shadow", content=large)).json() == len(large)
            # What has been charged is given back: two of the three requests do not count.
            assert (await client.post("/raw", json={"user": 9})).headers["x-ratelimit-remaining"] == "1"

    asyncio.run(main())


def test_a_dependency_behind_a_stream_that_was_read() -> None:
    """What the body was can no longer be found, which is an error instead of a way round the limit."""
    app = FastAPI()

    async def reading(request: FastAPIRequest) -> None:
        async for _ in request.stream():
            pass

    by_user = RateLimit("2/minute", name="user", key=["json:/user"])

    @app.post("/", dependencies=[Depends(reading), Depends(by_user)])
    async def endpoint() -> str:
        return "hello"

    app.add_middleware(LimitGate, rules=[Rule("all", "90/minute")], store=MemoryStore(Clock()))
    with pytest.raises(RuntimeError, match="was read as a stream before a RateLimit"):
        asyncio.run(asgi_reply(app, method="POST", body=b"{}"))


def test_a_dependency_of_a_websocket() -> None:
    """It has no body, and counts by address."""
    app = FastAPI()

    @app.websocket("/", dependencies=[Depends(RateLimit("1/minute", name="user", key=["json:/user"]))])
    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()

    app.add_middleware(LimitGate, rules=[Rule("all", "90/minute")], store=MemoryStore(Clock()))

    async def main() -> list[int]:
        return [(await handshake(app)).status for _ in range(2)]

    assert asyncio.run(main()) == [101, 429]


def test_flask() -> None:
    """A view, and the limit of one, read what was sent."""
    app = Flask(__name__)

    @app.post("/json")
    def json_view() -> Any:
        return flask_request.get_json()["user"]

    @app.post("/stream")
    @limit("1/minute", name="own", key=["json:/user"])
    def stream_view() -> Any:
        return flask_request.stream.read()

    FlaskLimitGate(app, rules=[Rule("users", "3/minute", key=["json:/user"])], store=MemoryStore(Clock()))
    client = app.test_client()
    assert [client.post("/json", json={"user": "ann"}).text for _ in range(2)] == ["ann", "ann"]
    assert client.post("/stream", data=b'{"user": "ann"}').data == b'{"user": "ann"}'
    assert client.post("/json", json={"user": "ann"}).status_code == 429
    assert [client.post("/stream", json={"user": "bob"}).status_code for _ in range(2)] == [200, 429]
    chunked = {"wsgi.input": io.BytesIO(b'{"user": "eve"}'), "wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    reply = client.post("/stream", environ_overrides={**chunked, "HTTP_TRANSFER_ENCODING": "chunked"})
    assert reply.data == b'{"user": "eve"}'


def body_view(request: Any) -> HttpResponse:
    """A view that reads the body as a stream."""
    return HttpResponse(request.read())


def form_view(request: Any) -> HttpResponse:
    return HttpResponse(request.POST.get("user", "nobody"))


@pytest.mark.parametrize("way", WAYS)
def test_django(way: str) -> None:
    with WAYS[way].project(url("read", body_view), url("form", form_view), rules=[BY_USER]) as project:

        def post(path: str, data: bytes, kind: str = "application/json") -> Any:
            return project.ask(path, "POST", data=data, content_type=kind)

        assert post("/read", b'{"user":  1}').body == b'{"user":  1}'
        assert [post("/read", b'{"user": %d}' % user).status_code for user in (1, 1, 2)] == [200, 429, 200]
        assert post("/form", b"user=ann", "application/x-www-form-urlencoded").body == b"ann"
        assert post("/read", b" " * (BODY_LIMIT + 1)).status_code == 413
        assert post("/read", b"[" * 200).status_code == 413
        assert post("/read", b"").status_code == 200


@pytest.mark.parametrize("way", WAYS)
def test_djangos_own_limit(way: str) -> None:
    with WAYS[way].project(url("read", body_view), rules=[BY_USER], DATA_UPLOAD_MAX_MEMORY_SIZE=10) as project:
        statuses = [project.ask("/read", "POST", data=b" " * size).status_code for size in (10, 11)]
    assert statuses == [200, 413]


def test_django_behind_asgi_without_a_length() -> None:
    """The body is in a file already, which is read only if it is small enough."""
    with WAYS["asgi"].project(url("read", body_view), rules=[BY_USER]):
        from django.core.asgi import get_asgi_application

        app = get_asgi_application()

        async def ask(*data: bytes) -> Reply:
            wire = await Wire(*parts(*data)).call(app, http_scope("/read", "POST"))
            head, *rest = wire.sent
            return Reply(head["status"], httpx.Headers(head["headers"]), b"".join(each.get("body", b"") for each in rest))

        async def main() -> list[Reply]:
            return [
                await ask(b'{"user"', b": 1}"),
                await ask(b'{"user": 1}'),
                await ask(b'{"user":', b"1}"),
                await ask(*[b" " * 40_000] * 2),
            ]

        replies = asyncio.run(main())
    assert [each.status for each in replies] == [200, 200, 429, 413]
    assert replies[0].body == b'{"user": 1}'


@pytest.mark.parametrize("way", WAYS)
def test_a_throttle_counts_by_the_body(way: str) -> None:
    """REST framework parses the same body afterwards."""
    throttle = type("Tool", (Throttle,), {"limits": ("1/minute",), "name": "tool", "key": ("json:/tool",)})

    def post(self: Any, request: Any) -> RestResponse:
        return RestResponse(request.data)

    names = {"throttle_classes": (throttle,), "authentication_classes": (), "post": post}
    view = type("Limited", (APIView,), names)
    with WAYS[way].project(url("x", view.as_view()), rules=[Rule("all", "9/minute")]) as project:

        def ask(data: bytes) -> Any:
            return project.ask("/x", "POST", data=data, content_type="application/json")

        first = ask(b'{"tool": "search"}')
        assert (first.status_code, json.loads(first.body)) == (200, {"tool": "search"})
        assert [ask(data).status_code for data in (b'{"tool": "search"}', b'{"tool": "read"}')] == [429, 200]
        large = ask(b" " * (BODY_LIMIT + 1))
        assert (large.status_code, json.loads(large.body)["detail"]) == (413, large.json()["detail"])


# --- operations -------------------------------------------------------------------------------------------------------


def test_the_bucket_of_a_client() -> None:
    store = MemoryStore(Clock())
    rule = Rule("users", "3/minute", key=["json:/user/id", "ip"])
    gated = LimitGate(echo, rules=[rule], store=store)
    asyncio.run(asgi_reply(gated, method="POST", body=b'{"user": {"id": 7}}'))
    limiter = Limiter(store)
    for document in ({"user": {"id": 7}}, {"user": {"id": "7", "name": "ann"}}):
        assert limiter.bucket(rule, json=document, ip="192.0.2.1").peek().remaining == 2
    assert limiter.bucket(rule, json={"user": {"id": 8}}, ip="192.0.2.1").peek().remaining == 3
    with pytest.raises(ConfigError, match="counts by json:/user/id, expected json= with /user/id, or ip="):
        limiter.bucket(Rule("users", "3/minute", key=["json:/user/id"]))
    with pytest.raises(ConfigError, match="which is not JSON"):
        limiter.bucket(rule, json={"user": object()}, ip="192.0.2.1")


def test_usage_of_a_rule_that_has_read_the_body() -> None:
    """What a rule that applies has counted is known; of others the body is not."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append([window.remaining for window in await ausage(scope)])
        with pytest.raises(ConfigError, match="usage of a rule that reads the body"):
            await ausage(scope, "other")
        await echo(scope, receive, send)

    rules = [Rule("all", "9/minute"), Rule("other", "5/minute", key=["json:/user"], path="/other")]
    gated = LimitGate(app, rules=rules, store=MemoryStore(Clock()))
    assert asyncio.run(asgi_reply(gated, method="POST", body=b'{"user": 1}')).status == 200
    assert found == [[8]]


def test_the_buffer_reads_no_more_than_it_has_to() -> None:
    """A second wait goes on where the body has ended."""

    async def main() -> tuple[bytes, int, list[Any]]:
        wire = Wire(*parts(b"a", b"b"), {"type": "http.disconnect"})
        buffer = ReceiveBuffer(wire.receive)
        data, asked = await buffer.read(10), wire.received
        async with asyncio.timeout(PATIENCE):
            return data, asked, [await buffer.receive() for _ in range(3)]

    data, asked, messages = asyncio.run(main())
    assert (data, asked) == (b"ab", 2)
    assert messages == [*parts(b"a", b"b"), {"type": "http.disconnect"}]
