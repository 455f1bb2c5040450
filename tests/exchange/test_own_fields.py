"""Rate fields that an application sets itself: ours replace them, so that no name is there twice; and names of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpResponse
from django.urls import path
from fastapi import FastAPI

from limitgate import ConfigError, LimitGate, LimitGateWSGI, MemoryStore, Rule, Settings
from limitgate.flask import LimitGate as FlaskLimitGate
from tests.support.clock import Clock
from tests.support.django_app import WAYS
from tests.support.doors import Wire, asgi_reply, http_scope, websocket_scope, wsgi_reply

ALL = ("x-ratelimit", "x-ratelimit-windows", "draft-11")
Pairs = list[tuple[str, str]]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rules": [Rule("api", "9/minute")]},
    "every style": {"rules": [Rule("api", "9/minute")], "headers": ALL},
    "outcome": {"rules": [Rule("api", "9/minute", charge_if={"status": [401]})], "headers": ALL},
    "slots": {"rules": [Rule("api", "9 at once", "9/minute")], "headers": ALL},
}


def asgi_pairs(own: Pairs, *, is_websocket: bool = False, **options: Any) -> Pairs:
    raw = [(name.encode(), value.encode()) for name, value in own]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = "websocket.accept" if is_websocket else "http.response.start"
        await send({"type": kind, "headers": iter(raw)} | ({} if is_websocket else {"status": 200}))
        if not is_websocket:
            await send({"type": "http.response.body", "body": b"hello"})

    wire = Wire({"type": "websocket.connect"} if is_websocket else {"type": "http.request", "body": b""})
    gate = LimitGate(app, store=MemoryStore(Clock()), **options)
    asyncio.run(wire.call(gate, websocket_scope() if is_websocket else http_scope()))
    return [(name.decode(), value.decode()) for name, value in wire.sent[0]["headers"]]


def wsgi_pairs(own: Pairs, **options: Any) -> Pairs:
    found: Pairs = []

    def app(_: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", list(own))
        return [b"hello"]

    def start_response(_: str, headers: Pairs, *__: Any) -> Any:
        found.extend((name.lower(), value) for name, value in headers)

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}
    list(LimitGateWSGI(app, store=MemoryStore(Clock()), **options)(environ, start_response))
    return found


def handshake_pairs(own: Pairs, **options: Any) -> Pairs:
    return asgi_pairs(own, is_websocket=True, **options)


def django_pairs(own: Pairs, way: str = "wsgi", **options: Any) -> Pairs:
    def view(_: Any) -> HttpResponse:
        return HttpResponse("hello", headers=dict(own))

    with WAYS[way].project(path("", view), store=MemoryStore(Clock()), **options) as project:
        return [(name.lower(), value) for name, value in project.ask("/").items()]


DOORS: dict[str, Callable[..., Pairs]] = {
    "asgi": asgi_pairs,
    "wsgi": wsgi_pairs,
    "websocket": handshake_pairs,
    "django": django_pairs,
}
OWN = [
    ("x-ratelimit-limit", "theirs"),
    ("X-RateLimit-Remaining", "theirs"),
    ("X-Ratelimit-Remaining-Minute", "theirs"),
    ("ratelimit", "theirs"),
    ("RateLimit-Policy", "theirs"),
    ("Retry-After", "7"),
    ("x-request-id", "1"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_what_the_application_has_set_is_replaced(door: str, kind: str) -> None:
    """Each name is there once, however it is spelled; what we do not send stands, its ``Retry-After`` as well."""
    pairs = DOORS[door](OWN, **KINDS[kind])
    names = [name.lower() for name, _ in pairs]
    assert len(set(names)) == len(names)
    shown = {name.lower(): value for name, value in pairs}
    ours = {name.lower(): value for name, value in DOORS[door]([], **KINDS[kind])}
    assert {name: shown[name] for name in ours} == ours
    assert (shown["retry-after"], shown["x-request-id"]) == ("7", "1")
    assert shown["ratelimit"] == ("theirs" if kind == "plain" else ours["ratelimit"])


@pytest.mark.parametrize("door", DOORS)
def test_where_nothing_is_limited_theirs_stand(door: str) -> None:
    """As there are no fields of ours."""
    shown = {name.lower(): value for name, value in DOORS[door](OWN, rules=[Rule("api", "9/minute", path="/other")])}
    assert shown | {name.lower(): value for name, value in OWN} == shown


@pytest.mark.parametrize("door", DOORS)
def test_other_fields_of_the_application_take_nothing_away(door: str) -> None:
    """Whatever begins like one of ours."""
    shown = dict(
        DOORS[door]([("X-Request-Id", "1"), ("Referrer-Policy", "no-referrer")], headers=ALL, rules=[Rule("api", "9/minute")])
    )
    assert (shown["x-ratelimit-limit"], shown["ratelimit-policy"]) == ("9", '"api";q=9;w=60')


def test_the_fields_of_a_gate_inside_are_there_once() -> None:
    """One that the gate around does not know of, as it is in another process."""
    own = [("x-ratelimit-limit", "5"), ("x-ratelimit-remaining", "4"), ("x-ratelimit-reset", "1")]
    pairs = asgi_pairs(own, rules=[Rule("api", "9/minute")])
    assert [name for name, _ in pairs] == [name for name, _ in own]
    assert dict(pairs)["x-ratelimit-limit"] == "9"


# --- names of one's own -----------------------------------------------------------------------------------------------

NAMES = {"X-RateLimit-Limit": "Quota", "x-ratelimit-reset": "X-Quota-Reset", "RateLimit": "Our-RateLimit"}


@pytest.mark.parametrize("kind", ["every style", "outcome", "slots"])
@pytest.mark.parametrize("door", DOORS)
def test_names(door: str, kind: str) -> None:
    """They are sent instead of the others, so that the application's own stand beside ours."""
    shown = dict(DOORS[door]([], header_names=NAMES, **KINDS[kind]))
    assert shown["quota"] == "9"
    assert {"x-quota-reset", "our-ratelimit", "ratelimit-policy", "x-ratelimit-remaining"} <= shown.keys()
    assert not {"x-ratelimit-limit", "x-ratelimit-reset", "ratelimit"} & shown.keys()
    pairs = DOORS[door]([("Quota", "theirs")], header_names=NAMES, **KINDS[kind])
    assert [value for name, value in pairs if name.lower() == "quota"] == ["9"]
    both = dict(DOORS[door]([("x-ratelimit-limit", "theirs")], header_names=NAMES, **KINDS[kind]))
    assert (both["x-ratelimit-limit"], both["quota"]) == ("theirs", "9")


def test_names_of_refusals() -> None:
    """At both doors; ``Retry-After`` has its own name."""
    options: dict[str, Any] = {"rules": [Rule("api", "1/minute")], "header_names": {"X-RateLimit-Limit": "X-Quota"}}

    def wsgi(_: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return []

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = LimitGateWSGI(wsgi, store=MemoryStore(Clock()), **options)
    async_gate = LimitGate(asgi, store=MemoryStore(Clock()), **options)

    async def ask() -> list[Any]:
        return [await asgi_reply(async_gate) for _ in range(2)]

    for replies in ([wsgi_reply(gate) for _ in range(2)], asyncio.run(ask())):
        for reply in replies:
            assert (reply.headers["x-quota"], "x-ratelimit-limit" in reply.headers) == ("1", False)
        assert replies[1].headers["retry-after"] == "60"


@pytest.mark.parametrize(
    "text",
    [
        "X-RateLimit-Limit=X-Quota, X-RateLimit-Reset = X-Reset",
        '{"X-RateLimit-Limit": "X-Quota", "X-RateLimit-Reset": "X-Reset"}',
    ],
)
def test_names_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """As pairs, or as JSON."""
    monkeypatch.setenv("LIMITGATE_HEADER_NAMES", text)
    assert Settings().header_names == {"X-RateLimit-Limit": "X-Quota", "X-RateLimit-Reset": "X-Reset"}
    assert "x-quota" in dict(asgi_pairs([], rules=[Rule("api", "9/minute")]))


def test_names_from_flask_and_django() -> None:
    """By their own settings."""
    from flask import Flask

    app = Flask("app")
    app.config["LIMITGATE_HEADER_NAMES"] = {"X-RateLimit-Limit": "X-Quota"}
    app.add_url_rule("/", view_func=lambda: "hello")
    FlaskLimitGate(app, rules=[Rule("api", "9/minute")])
    assert wsgi_reply(app).headers["x-quota"] == "9"
    assert dict(django_pairs([], "asgi", rules=[Rule("api", "9/minute")], header_names={"X-RateLimit-Limit": "Q"}))["q"] == "9"


def test_names_in_a_document() -> None:
    """Of FastAPI."""
    app = FastAPI()
    app.get("/")(lambda: "hello")
    app.add_middleware(LimitGate, rules=[Rule("api", "9/minute")], header_names={"X-RateLimit-Limit": "X-Quota"})
    headers = app.openapi()["paths"]["/"]["get"]["responses"]["429"]["headers"]
    assert list(headers) == ["Retry-After", "X-Quota", "X-RateLimit-Remaining", "X-RateLimit-Reset"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"header_names": {"X-RateLimit-Limits": "Q"}}, "did you mean 'X-RateLimit-Limit'?"),
        ({"header_names": {"RateLimit": "Q"}}, "header_names.RateLimit: no style in headers has the field"),
        ({"header_names": {"Retry-After": "Q"}}, "no style in headers has the field, expected"),
        (
            {"header_names": {"X-RateLimit-Limit": "Q"}, "headers": []},
            "it is of the style x-ratelimit, expected 'x-ratelimit' in headers",
        ),
        ({"header_names": {"X-RateLimit-Limit": "X-RateLimit-Reset"}}, "already the name of X-RateLimit-Limit"),
        ({"header_names": {"X-RateLimit-Limit": "Q", "X-RateLimit-Reset": "q"}}, "already the name of X-RateLimit-Limit"),
        ({"header_names": {"X-RateLimit-Limit": "retry-after"}}, "already the name of a refusal"),
        ({"header_names": {"X-RateLimit-Limit": "a b"}}, "'a b' is not a header name"),
        ({"header_names": {"X-RateLimit-Limit": ""}}, "'' is not a header name"),
        ({"header_names": ["X-Quota"]}, "expected a mapping such as {X-RateLimit-Limit: X-Quota}"),
        ({"header_names": "X-Quota"}, "expected a mapping such as A=B, C=D"),
        ({"header_names": "{X"}, "expected a mapping, as JSON"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    """Each says what was expected."""
    with pytest.raises(ConfigError) as told:
        Settings(**options)
    assert message in str(told.value)
    assert "header_names" in str(told.value)
