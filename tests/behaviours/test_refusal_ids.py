"""Every refusal by a bucket carries an id, through whichever door it goes and whoever answers it."""

from __future__ import annotations

import asyncio
import json
from base64 import urlsafe_b64decode
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import flask
import pytest
from django.urls import path
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

import limitgate.flask
from limitgate import Limit, LimitGate, LimitGateWSGI, MemoryStore, RateLimited, Rule
from limitgate.fastapi import RateLimit
from limitgate.http.response import URN, RefusalId, RefusalKey, tag_of
from tests.support.clock import Clock
from tests.support.django_app import WAYS, hello
from tests.support.doors import SITES, Reply, Site, asgi_reply, handshake, http_scope, wsgi_environ, wsgi_reply

START = Clock().now / 1e6
SECRET = "a secret of tests"
KEY = RefusalKey.derived(SECRET.encode())


def keyed() -> Any:
    """Options under which the test can read ids."""
    return {"store": MemoryStore(Clock()), "secret": SECRET}


def id_in(reply: Reply) -> RefusalId:
    assert reply.status == 429
    instance = reply.json()["instance"]
    assert instance.startswith(URN)
    return KEY.read(instance)


@pytest.mark.parametrize("door", SITES)
@pytest.mark.parametrize(
    "limits",
    [["1/minute"], [Limit("1/minute", algorithm="sliding_log")], [Limit("1/minute", algorithm="fixed_window"), "9/second"]],
    ids=["gcra", "sliding_log", "fixed_window"],
)
def test_the_id_names_time_rule_and_bucket(door: type[Site], limits: list[Any]) -> None:
    """It is read from the body alone: when, by which rule, and the digest in the keys of the bucket that refused."""
    clock = Clock()
    store = MemoryStore(clock)
    with door(Rule("wide", "99/minute", key=["global"]), Rule("api", *limits), store=store, secret=SECRET) as site:
        assert site.ask().status == 200
        clock.advance(7.5)
        refused = site.ask()
        assert int(refused.headers["content-length"]) == len(refused.body)
        found = id_in(refused)
        assert (found.at, found.tag) == (START + 7.5, tag_of("api"))
        names = [bucket.charge.key for bucket in site.seen[0].evidence if bucket.charge.rule == "api"]
        assert {name.split(":")[2] for name in names} == {found.digest}
        clock.advance(0.01)
        again = site.ask()
        assert again.headers["content-length"] == refused.headers["content-length"]
        assert again.json()["instance"] != refused.json()["instance"]


@pytest.mark.parametrize("door", SITES)
def test_of_several_rules_it_is_the_one_that_refuses_longest(door: type[Site]) -> None:
    """The one whose wait is told."""
    with door(Rule("a", "1/minute"), Rule("b", "1/hour"), **keyed()) as site:
        site.ask()
        assert id_in(site.ask()).tag == tag_of("b")


@pytest.mark.parametrize("door", SITES)
def test_a_refusal_without_a_bucket_has_none(door: type[Site]) -> None:
    """Where a rule denies, and where the store fails under ``closed``, no bucket has refused."""
    rules = Rule("no", path="/no", deny=True), Rule("api", "1/minute")
    with door(*rules, store="redis://127.0.0.1:1", on_error="closed") as site:
        assert (site.ask("/no").status, site.ask("/").status) == (403, 503)
        assert "instance" not in site.ask("/").json()
        assert "instance" not in site.ask("/no").json()


@pytest.mark.parametrize("door", SITES)
def test_a_refusal_by_this_process_alone_has_one(door: type[Site]) -> None:
    """Under ``on_error: local``, too."""
    with door(Rule("api", "1/minute"), store="redis://127.0.0.1:1", on_error="local", secret=SECRET) as site:
        assert site.ask().status == 200
        assert id_in(site.ask()).tag == tag_of("api")


def test_a_websocket_that_is_denied_has_one() -> None:
    """Where the server can send an answer to a handshake."""

    async def app(*_: Any) -> None:
        raise AssertionError

    gate = LimitGate(app, rules=[Rule("api", "1/minute", cost=lambda _: 2)], **keyed())
    assert id_in(asyncio.run(handshake(gate))).tag == tag_of("api")


def test_access_logs_and_on_denied_find_it_in_the_scope() -> None:
    """``limitgate.refusal_id`` is there for whoever answers, and outside afterwards; not for who is admitted."""
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.append(scope.get("limitgate.refusal_id"))
        await send({"type": "http.response.start", "status": 200 + 218 * len(told[1:]), "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = LimitGate(app, rules=[Rule("api", "1/minute")], **keyed(), on_denied=app)

    async def outside() -> list[Any]:
        scopes = [http_scope(), http_scope()]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        for scope in scopes:
            await gate(scope, None, send)  # type: ignore[arg-type]
        return [scope.get("limitgate.refusal_id") for scope in scopes]

    seen = asyncio.run(outside())
    assert seen == told
    assert seen[0] is None
    assert KEY.read(seen[1]).tag == tag_of("api")


def test_on_denied_finds_it_in_the_environ() -> None:
    """Under WSGI."""

    def app(environ: Any, start_response: Callable[..., Any]) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(environ.get("limitgate.refusal_id")).encode()]

    gate = LimitGateWSGI(app, rules=[Rule("api", "1/minute")], **keyed(), on_denied=app)
    assert wsgi_reply(gate).json() is None
    environ = wsgi_environ()
    (body,) = gate(environ, lambda *_: bytes)  # type: ignore[arg-type, return-value]
    assert KEY.read(json.loads(body)).tag == tag_of("api")
    assert environ["limitgate.refusal_id"] == json.loads(body)


def starlette() -> Any:
    def answer(_: Request, error: Any) -> JSONResponse:
        return JSONResponse(error.refusal_id, 429)

    app = Starlette(exception_handlers={RateLimited: answer})
    return LimitGate(app, rules=[Rule("api", "1/minute")], **keyed())


def fastapi_dependency() -> Any:
    app = FastAPI(dependencies=[Depends(RateLimit("1/minute", name="api"))])
    app.get("/")(lambda: "hello")

    @app.exception_handler(RateLimited)
    async def answer(request: Request, error: RateLimited) -> JSONResponse:
        assert request.scope["limitgate.refusal_id"] == error.refusal_id
        return JSONResponse(error.refusal_id, 429)

    return LimitGate(app, rules=[Rule("wide", "99/minute")], **keyed())


def flask_handler() -> Any:
    app = flask.Flask(__name__)

    @app.errorhandler(RateLimited)
    def answer(error: RateLimited) -> Any:
        return flask.jsonify(error.refusal_id), 429

    limitgate.flask.LimitGate(app, rules=[Rule("api", "1/minute")], **keyed())
    return app


@pytest.mark.parametrize("build", [starlette, fastapi_dependency, flask_handler])
def test_handlers_of_the_application_are_given_it(build: Callable[[], Any]) -> None:
    """``RateLimited.refusal_id`` is that of the refusal which they answer."""
    app = build()
    if isinstance(app, LimitGate):

        async def both() -> Reply:
            await asgi_reply(app)
            return await asgi_reply(app)

        reply = asyncio.run(both())
    else:
        wsgi_reply(app)
        reply = wsgi_reply(app)
    assert KEY.read(reply.json()).tag == tag_of("api")


@pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
def test_django_has_it_too(way: Any) -> None:
    """In the body, and where a view that answers refusals finds it."""
    with way.project(path("hello", hello), rules=[Rule("api", "1/minute")], **keyed()) as project:
        assert project.ask("/hello").status_code == 200
        assert KEY.read(project.ask("/hello").json()["instance"]).tag == tag_of("api")


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("door", SITES)
def test_no_address_is_found_by_an_id(door: type[Site]) -> None:
    """A log line masks the client beside it, and there are few addresses to try: without the key, none of them fits."""
    with door(Rule("api", "1/minute"), store=MemoryStore(Clock())) as site:
        site.ask(peer="10.0.77.7")
        written = site.ask(peer="10.0.77.7").json()["instance"].removeprefix(URN)
        own = site.app.gate.refusals._key
    guessed = {bucket_of(f"10.0.{third}.{fourth}") for third in range(256) for fourth in range(256)}
    assert len(guessed) == 65_536
    assert own.read(written).digest in guessed
    raw = urlsafe_b64decode(written)
    public = [b"", bytes(32), b"limitgate", b"limitgate:refusal-ids", b"api", raw[:5]]
    keys = [*map(RefusalKey, public), *map(RefusalKey.derived, public[:5])]
    read = [raw[-16:].hex(), raw[:16].hex(), raw[3:19].hex(), raw[5:21].hex(), *[key.read(written).digest for key in keys]]
    assert not guessed & {*read, *[each[::-1] for each in read]}
    assert tag_of("api") not in raw


def bucket_of(address: str) -> str:
    """The digest in the bucket's key of a client of rule ``api``, as anybody can work it out."""
    return blake2b(f"owner:8:rule api,ip:{len(address)}:{address},".encode(), digest_size=16).hexdigest()
