"""What a request is charged by how it ends: ``charge_if``, and ``settle`` for a cost that is known afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import socket
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import fastapi
import flask
import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.websockets import WebSocket

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RateLimited,
    RedisStore,
    Rule,
    StoreError,
    exempt,
    limit,
)
from limitgate.exchange.base import EXCHANGE
from limitgate.gate.admission import Admission
from limitgate.limits.decision import FinalCosts
from limitgate.limits.plan import Plan, Reading
from tests.support.doors import (
    PATIENCE,
    Wire,
    asgi_reply,
    handshake,
    http_scope,
    run_wsgi,
    until,
    uvicorn_process,
    websocket_scope,
    wsgi_environ,
)
from tests.support.outcomes import END, PLAIN, START, ASGIOutcomes, Watched, WSGIOutcomes
from tests.support.redis_server import RedisServer

Open = Callable[..., Any]

FAILED = {"status": [401, 403]}
SERVED = {"status_not": ["5xx"]}


@pytest.fixture(params=[ASGIOutcomes, WSGIOutcomes], ids=attrgetter("door"))
def site(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens sites of one door."""
    with contextlib.ExitStack() as opened:
        yield lambda *rules, **options: opened.enter_context(request.param(*rules, **options))


@pytest.fixture
def store() -> Watched:
    return Watched()


def gated(app: Any, *rules: Rule, **options: Any) -> LimitGate:
    return LimitGate(app, rules=rules, **options)


def call(app: Any, scope: dict[str, Any] | None = None, *incoming: dict[str, Any]) -> Wire:
    return asyncio.run(Wire(*incoming).call(app, http_scope() if scope is None else scope))


# --- charge_if --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("charge_if", "status", "counts"),
    [
        (FAILED, 200, False),
        (FAILED, 401, True),
        (FAILED, 403, True),
        (FAILED, 404, False),
        ({"status": ["4xx"]}, 404, True),
        ({"status": ["4xx", 200]}, 200, True),
        ({"status": ["4xx"]}, 500, False),
        (SERVED, 200, True),
        (SERVED, 503, False),
        ({"status_not": [404, "5xx"]}, 404, False),
        ({"status_not": [404, "5xx"]}, 400, True),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_only_outcomes_that_count_are_charged(
    site: Open, charge_if: dict[str, Any], status: int, method: str, *, counts: bool
) -> None:
    """One whose status does not count leaves the bucket as if it had never come, however long it took."""
    it = site(Rule("api", "5/minute", charge_if=charge_if))
    assert it.ask(f"/?wait=3&status={status}", method).status == status
    assert it.store.owed == ({"api": pytest.approx(1 - 3 / 12)} if counts else {})
    assert it.store.corrections == (not counts)


def test_a_limit_on_failed_logins(site: Open) -> None:
    """Any number of logins that succeed; five that fail, then none at all."""
    it = site(Rule("logins", "5/minute", charge_if=FAILED))
    assert it.statuses(20) == [200] * 20
    assert it.statuses(7, "/?status=401") == [401] * 5 + [429] * 2
    assert it.ask().status == 429


def test_the_reserve_is_shown_as_taken(site: Open) -> None:
    """What an answer tells to remain includes the request itself, whose outcome was not known when it was decided."""
    it = site(Rule("logins", "5/minute", charge_if=FAILED))
    assert [it.ask().rate["x-ratelimit-remaining"] for _ in range(3)] == ["4", "4", "4"]


def test_each_rule_goes_by_its_own_outcomes(site: Open) -> None:
    """Of several rules in one decision those get it back whose outcomes do not count, by one call to the store."""
    it = site(
        Rule("all", "9/minute"),
        Rule("failed", "9/minute", charge_if=FAILED),
        Rule("served", "9/minute", charge_if=SERVED, cost=3),
        Rule("missing", "9/minute", charge_if={"status": [404]}),
    )
    it.ask("/?status=404")
    assert it.store.owed == {"all": 1, "served": 3, "missing": 1}
    it.ask("/?status=500")
    assert it.store.owed == {"all": 2, "served": 3, "missing": 1}
    assert it.store.corrections == 2


def test_a_refusal_by_another_rule_charges_none(site: Open) -> None:
    """A request that is refused is charged to no rule, so there is nothing to give back, and its 429 is nobody's outcome."""
    it = site(Rule("tight", "1/minute"), Rule("refused", "9/minute", charge_if={"status": [429]}))
    assert it.statuses(3) == [200, 429, 429]
    assert it.store.owed == {"tight": 1}
    assert it.store.corrections == 1


def test_shadow_rules_are_charged_by_outcome_too(site: Open) -> None:
    """A shadow rule gets back what it was charged, and nothing where it did not fit and so was not charged."""
    it = site(Rule("seen", "2/minute", charge_if=FAILED, shadow=True))
    assert it.statuses(2, "/?status=401") == [401, 401]
    assert it.statuses(3) == [200] * 3
    assert it.store.owed == {"seen": 2}


def test_a_gate_in_shadow_charges_by_outcome(site: Open) -> None:
    """``shadow`` changes who is refused, not what is counted."""
    it = site(Rule("failed", "2/minute", charge_if=FAILED), shadow=True)
    it.statuses(3)
    assert it.statuses(4, "/?status=401") == [401] * 4
    assert it.store.owed == {"failed": 2}


def test_a_cost_that_depends_on_the_request_is_given_back_whole(site: Open) -> None:
    """All of a cost comes back, and of a cost of nothing there is nothing to give."""
    it = site(Rule("cost", "9/minute", charge_if=FAILED, cost=lambda request: len(request.path)))
    it.ask("/long")
    assert it.store.owed == {}
    it = site(Rule("free", "9/minute", charge_if=FAILED, cost=0))
    it.ask()
    assert it.store.corrections == 0


def test_where_nothing_is_limited_nothing_is_put_right(site: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exempt requests, others that no rule is for, and gates that are switched off have no outcome."""
    it = site(Rule("failed", "1/minute", path="/login", charge_if=FAILED), Rule("free", path="/login/free", exempt=True))
    assert it.statuses(3, "/login/free") == it.statuses(3, "/other") == [200] * 3
    assert it.store.plans == []
    monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    assert site(Rule("failed", "1/minute", charge_if=FAILED)).app.gate is None


@pytest.mark.parametrize(("charge_if", "left"), [(SERVED, {}), ({"status": [500]}, {"api": 1}), ({"status": [401]}, {})])
def test_an_exception_counts_as_a_500(site: Open, charge_if: Any, left: dict[str, float]) -> None:
    """An error that leaves the application is the server's 500, and reaches the server as it is."""
    it = site(Rule("api", "5/minute", charge_if=charge_if))
    with pytest.raises(LookupError, match="own"):
        it.ask("/?raise=1")
    assert it.store.owed == left


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_a_limit_of_the_applications_own_that_refuses_counts_as_a_500(store: Watched, door: str) -> None:
    """`RateLimited` out of a Limiter is an error like any other, and nothing that the gate would answer."""
    rule = Rule("api", "5/minute", charge_if=SERVED)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        async with AsyncLimiter(MemoryStore(store.clock)) as limiter:
            raise RateLimited(await limiter.hit("key", "1/minute"))

    def wsgi(environ: Any, start_response: Any) -> Iterable[bytes]:
        raise RateLimited(Limiter(MemoryStore(store.clock)).hit("key", "1/minute"))

    ask = {
        "asgi": lambda: call(gated(asgi, rule, store=store)),
        "wsgi": lambda: run_wsgi(LimitGateWSGI(wsgi, rules=[rule], store=store), wsgi_environ()),
    }
    with pytest.raises(RateLimited):
        ask[door]()
    assert store.owed == {}


def test_no_answer_at_all_counts_as_a_500(store: Watched) -> None:
    """An application that returns without a word makes the server say 500."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    call(gated(app, Rule("api", "5/minute", charge_if=SERVED), store=store), None, {"type": "http.request"})
    assert store.owed == {}


def test_an_error_after_the_response_has_begun_changes_no_status(site: Open, store: Watched) -> None:
    """What was said counts, whatever happens to the rest of the response."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        raise LookupError

    def wsgi(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", list(PLAIN))
        yield b"half"
        raise LookupError

    rule = Rule("api", "5/minute", charge_if={"status": [500]})
    with pytest.raises(LookupError):
        call(gated(asgi, rule, store=store))
    with pytest.raises(LookupError):
        run_wsgi(LimitGateWSGI(wsgi, rules=[rule], store=store), wsgi_environ())
    assert store.owed == {}


# --- while the outcome is unknown -------------------------------------------------------------------------------------


def test_a_crowd_cannot_get_above_a_limit_while_outcomes_are_unknown(store: Watched) -> None:
    """Of a hundred guesses at once five get through. Once they turn out not to count there is room for five more."""

    async def scene() -> list[list[int]]:
        answers = []
        for status in (200, 200, 401, 200):
            known = asyncio.Event()

            async def app(scope: Any, receive: Any, send: Any, status: int = status, known: Any = known) -> None:
                await known.wait()
                await send({**START, "status": status})
                await send(END)

            gate.app = app
            crowd = [asyncio.create_task(asgi_reply(gate)) for _ in range(100)]
            for _ in range(5):
                await asyncio.sleep(0)
            assert sum(task.done() for task in crowd) >= 95
            known.set()
            answers.append(sorted(reply.status for reply in await asyncio.gather(*crowd)))
        return answers

    gate = gated(None, Rule("logins", "5/minute", charge_if=FAILED), store=store)
    assert asyncio.run(scene()) == [
        [200] * 5 + [429] * 95,
        [200] * 5 + [429] * 95,
        [401] * 5 + [429] * 95,
        [429] * 100,
    ]


def test_threads_get_everything_back(store: Watched) -> None:
    """Under many threads at once nothing is given back twice and nothing is forgotten."""
    site = WSGIOutcomes(Rule("api", "1000/day", charge_if=FAILED), Rule("all", "1000/day"), store=store)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: site.ask().status, range(300))) == {200}
    assert store.owed == {"all": 300}


# --- the client goes away ---------------------------------------------------------------------------------------------

NEVER = Rule("api", "5/minute", charge_if={"status": [418]})
"""Counts nothing that ever happens here: what is owed was kept because nothing was known."""


async def reads_its_body(scope: Any, receive: Any, send: Any) -> None:
    await Request(scope, receive).body()


async def fails_without_its_client(scope: Any, receive: Any, send: Any) -> None:
    if (await receive())["type"] == "http.disconnect":
        raise LookupError


async def reads_the_body(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def answers_without_its_client(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({**START, "status": 500})
    await send(END)


async def gives_up_without_its_client(scope: Any, receive: Any, send: Any) -> None:
    await receive()


@pytest.mark.parametrize(
    ("app", "error"),
    [
        (reads_its_body, ClientDisconnect),
        (fails_without_its_client, LookupError),
        (Starlette(routes=[Route("/", reads_the_body)]), ClientDisconnect),
        (answers_without_its_client, None),
        (gives_up_without_its_client, None),
    ],
)
def test_a_client_that_goes_before_there_is_a_status_stays_charged(store: Watched, app: Any, error: Any) -> None:
    """Hanging up is no way to be charged nothing, whatever the application makes of it."""
    with pytest.raises(error) if error else contextlib.nullcontext():
        call(gated(app, NEVER, store=store), None, {"type": "http.disconnect"})
    assert store.owed == {"api": 1}


READS: dict[str, Callable[[Any], Any]] = {
    "read": lambda body: body.read(5),
    "readline": lambda body: body.readline(),
    "readlines": lambda body: body.readlines(),
    "iterate": list,
}


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_wsgi_client_that_goes_while_it_sends_stays_charged(store: Watched, read: Any, *, answers: bool) -> None:
    """That the body breaks off is an error to the application, and would count as a 500."""

    class BrokenOff(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise ConnectionResetError

        readline = readlines = read  # type: ignore[assignment]

    def app(environ: Any, start_response: Any) -> Any:
        try:
            read(environ["wsgi.input"])
        except OSError:
            if not answers:
                raise
        start_response("500 Internal Server Error", list(PLAIN))
        return []

    gate = LimitGateWSGI(app, rules=[NEVER], store=store)
    with contextlib.nullcontext() if answers else pytest.raises(ConnectionResetError):
        run_wsgi(gate, {**wsgi_environ("/", "POST"), "wsgi.input": BrokenOff()})
    assert store.owed == {"api": 1}


def test_a_wsgi_body_is_read_as_the_server_gives_it(store: Watched) -> None:
    """With an eye on it, it has what the server's stream has."""
    seen: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"]
        seen.extend([body.read(2), body.readline(), body.tell(), list(body), body.seek(0), body.readlines()])
        start_response("200 OK", list(PLAIN))
        return []

    environ = {**wsgi_environ("/", "POST"), "wsgi.input": io.BytesIO(b"one\ntwo\nthree")}
    LimitGateWSGI(app, rules=[NEVER], store=store)(environ, lambda *_: None)
    assert seen == [b"on", b"e\n", 4, [b"two\n", b"three"], 0, [b"one\n", b"two\n", b"three"]]


def test_a_websocket_client_that_goes_before_it_is_accepted_stays_charged(store: Watched) -> None:
    """A handshake that its client gives up has no outcome."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass
        raise LookupError

    left = {"type": "websocket.disconnect", "code": 1006}
    with pytest.raises(LookupError):
        call(gated(app, NEVER, store=store), websocket_scope(), {"type": "websocket.connect"}, left)
    assert store.owed == {"api": 1}


async def cancelled(app: Any, wire: Wire, *, sent: int, times: int = 1) -> None:
    """Cancel a request, once something was sent, some times in a row."""
    task = asyncio.create_task(wire.call(app, http_scope()))
    await wire.until_sent(sent)
    await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_request_that_is_cancelled_before_there_is_a_status_stays_charged(store: Watched) -> None:
    """A server that cancels the application because the client has left does not set it free."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    asyncio.run(cancelled(gated(app, NEVER, store=store), Wire(), sent=0))
    assert store.owed == {"api": 1}


class Slow(Watched):
    """A store that takes its time to put things right."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on: Any = None

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        if plan.verb == "adjust" and self.may_go_on is not None:
            await self.may_go_on.wait()
        return self.spend(plan)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_is_to_be_put_right_is_put_right_though_the_request_is_cancelled(times: int) -> None:
    """Once there is a status it counts, however often the request is cancelled while the store is asked."""
    store, met = Slow(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["limitgate"].settle(5, rule="cost")
        await send(START)
        await receive()

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: met.append(context))
        store.may_go_on = asyncio.Event()
        gate = gated(app, NEVER, Rule("cost", "9/minute", cost=2), store=store)
        await cancelled(gate, Wire(), sent=1, times=times)
        store.may_go_on.set()
        await gate.gate.refunds.asettled()

    asyncio.run(scene())
    gc.collect()
    assert store.owed == {"cost": 5}
    assert store.corrections == 1
    assert met == []


class Forever:
    """What is awaited for ever, by whatever loop."""

    def __await__(self) -> Iterator[None]:
        while True:
            yield


def test_a_request_that_is_thrown_away_with_its_event_loop(store: Watched) -> None:
    """Where the event loop is gone nobody can be asked any more: what was charged stays, and nothing is complained of."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        scope["limitgate"].settle(3)
        await Forever()

    wire = Wire()
    request = gated(app, Rule("api", "5/minute"), store=store)(http_scope(), wire.receive, wire.send)
    request.send(None)
    request.close()
    assert wire.types == ["http.response.start"]
    assert store.owed == {"api": 1}


@pytest.mark.parametrize("owns_store", [True, False])
def test_a_shutdown_waits_for_what_is_being_put_right(monkeypatch: pytest.MonkeyPatch, *, owns_store: bool) -> None:
    """Corrections that nobody waits for any more are made before the store is closed, and before the event loop ends."""
    store = Slow()
    closed = []
    monkeypatch.setattr(store, "aclose", lambda: closed.append(dict(store.owed)) or asyncio.sleep(0))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send(START)
            await receive()

    async def scene() -> None:
        store.may_go_on = asyncio.Event()
        gate = gated(app, NEVER, store=store)
        gate._owns_store = owns_store
        await cancelled(gate, Wire(), sent=1, times=2)
        end = asyncio.create_task(gate({"type": "lifespan"}, Wire().receive, Wire().send))
        await asyncio.sleep(0)
        store.may_go_on.set()
        await end

        assert store.owed == {}

    asyncio.run(scene())
    assert closed == [{}] * owns_store


# --- when it is put right ---------------------------------------------------------------------------------------------


def test_a_response_that_takes_long_is_put_right_at_its_beginning(store: Watched) -> None:
    """Once there is a status that does not count, a stream or a background task keeps nothing from others."""
    seen: list[dict[str, float]] = []

    async def chunks() -> AsyncIterator[str]:
        for _ in range(2):
            seen.append(store.owed)
            yield "chunk"

    def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(chunks(), background=BackgroundTask(lambda: seen.append(store.owed)))

    app = Starlette(routes=[Route("/", stream)])
    asyncio.run(asgi_reply(gated(app, Rule("api", "5/minute", charge_if=FAILED), store=store)))
    assert seen == [{}, {}, {}]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_has_its_answer_finds_everything_put_right(store: Watched, *, streams: bool) -> None:
    """The last of a response goes out when its charges are right, also what was only known at the end of a stream."""
    seen: list[dict[str, float]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not streams:
            scope["limitgate"].settle(4, rule="cost")
        await send(START)
        if streams:
            await send({**END, "more_body": True})
            scope["limitgate"].settle(4, rule="cost")
        await send(END)

    class Watching(Wire):
        async def send(self, message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                seen.append(store.owed)
            await super().send(message)

    gate = gated(app, Rule("api", "5/minute", charge_if=FAILED), Rule("cost", "9/minute"), store=store)
    asyncio.run(Watching().call(gate, http_scope()))
    assert seen == [{"cost": 4}]


def test_a_flask_client_that_closes_nothing(store: Watched) -> None:
    """Flask's test client closes no response unless asked to, and yet everything is put right."""
    app = flask.Flask(__name__)

    @app.get("/")
    @limit("2/minute", charge_if=FAILED)
    def view() -> str:
        flask.request.environ["limitgate"].settle(3, rule="cost")
        return "hello"

    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[Rule("cost", "9/minute")], store=store)
    with app.test_client() as client:
        assert [client.get("/").status_code for _ in range(4)] == [200, 200, 200, 429]
    assert store.owed == {"cost": 9}


def test_the_chunks_of_a_generator_may_be_the_application(store: Watched) -> None:
    """A WSGI application that is a generator says its status, and what it costs, while it is read."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", list(PLAIN))
        yield b"one"
        environ["limitgate"].settle(4, rule="cost")
        yield b"two"

    rules = [Rule("api", "5/minute", charge_if=FAILED), Rule("cost", "9/minute")]
    chunks = LimitGateWSGI(app, rules=rules, store=store)(wsgi_environ(), lambda *_: bytes)
    steps = [store.owed for _ in chunks]
    assert steps == [{"api": 1, "cost": 1}] * 2
    assert store.owed == {"cost": 4}
    chunks.close()
    assert store.corrections == 1


def test_an_iterable_that_begins_when_it_is_read(store: Watched) -> None:
    """The application of PEP 3333 that is a class has its status, and its errors, when its chunks are read."""

    class App:
        def __init__(self, environ: Any, start_response: Any) -> None:
            self.start_response = start_response

        def __iter__(self) -> Iterator[bytes]:
            raise LookupError

    gate = LimitGateWSGI(App, rules=[Rule("api", "5/minute", charge_if=SERVED)], store=store)
    with pytest.raises(LookupError):
        run_wsgi(gate, wsgi_environ())
    assert store.owed == {}


def test_what_runs_when_a_response_is_closed_still_counts(store: Watched) -> None:
    """A cost may be known as late as in ``close``, and closing twice settles nothing twice."""

    class Chunks:
        def __init__(self, decision: Any) -> None:
            self.decision = decision

        def __iter__(self) -> Iterator[bytes]:
            return iter([b"hello"])

        def close(self) -> None:
            if not self.decision.settlement.is_over:
                self.decision.settle(5)

    def app(environ: Any, start_response: Any) -> Chunks:
        start_response("200 OK", list(PLAIN))
        return Chunks(environ["limitgate"])

    chunks = LimitGateWSGI(app, rules=[Rule("api", "9/minute")], store=store)(wsgi_environ(), lambda *_: bytes)
    list(chunks)
    chunks.close()
    chunks.close()
    assert store.owed == {"api": 5}
    assert store.corrections == 1


def test_a_wsgi_response_that_nobody_reads_is_settled_when_it_is_closed(store: Watched) -> None:
    """A server whose client has left closes a generator that never began: there was no status, so it stays charged."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", list(PLAIN))
        yield b"hello"

    gate = LimitGateWSGI(app, rules=[NEVER], store=store)
    gate(wsgi_environ(), lambda *_: bytes).close()
    assert store.owed == {"api": 1}
    half_read = gate(wsgi_environ(), lambda *_: bytes)
    next(iter(half_read))
    half_read.close()
    assert store.owed == {"api": 1}


class Killed(BaseException):
    """What gevent and signal handlers raise where a thread stands."""


@pytest.mark.parametrize(("begun", "left"), [(False, {"api": 1, "cost": 3}), (True, {"cost": 3})])
def test_a_thread_that_is_killed(store: Watched, *, begun: bool, left: dict[str, float]) -> None:
    """What was known by then counts: a cost that was told, and the status if there was one."""

    def app(environ: Any, start_response: Any) -> Any:
        environ["limitgate"].settle(3, rule="cost")
        if begun:
            start_response("200 OK", list(PLAIN))
        raise Killed

    gate = LimitGateWSGI(app, rules=[NEVER, Rule("cost", "9/minute")], store=store)
    with pytest.raises(Killed):
        gate(wsgi_environ(), lambda *_: bytes)
    assert store.owed == left


def test_the_status_that_a_wsgi_server_took_counts(store: Watched) -> None:
    """With ``exc_info`` a status may be replaced until the server has sent the first; then the first one stays."""
    rule = Rule("api", "5/minute", charge_if={"status": [500]})

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", list(PLAIN))
        start_response("500 Oops", list(PLAIN), (LookupError, LookupError(), None))
        return [b"sorry"]

    run_wsgi(LimitGateWSGI(app, rules=[rule], store=store), wsgi_environ())
    assert store.owed == {"api": 1}

    def sent_already(status: str, headers: Any, exc_info: Any = None) -> Any:
        if exc_info:
            raise exc_info[1]
        return bytes

    with pytest.raises(LookupError):
        LimitGateWSGI(app, rules=[rule], store=store)(wsgi_environ(), sent_already)
    assert store.owed == {"api": 1}


def test_a_status_line_that_is_none_is_the_servers_to_judge(store: Watched) -> None:
    """What does not begin with a number is passed on as it is, and counts for nothing."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("fine", list(PLAIN))
        return [b"hello"]

    told: list[str] = []
    gate = LimitGateWSGI(app, rules=[NEVER], store=store)
    assert gate(wsgi_environ(), lambda status, _: told.append(status)) == [b"hello"]
    assert told == ["fine"]
    assert store.owed == {"api": 1}


def test_a_file_that_the_server_sends_is_returned_as_it_is(store: Watched, tmp_path: Path) -> None:
    """Where ``wsgi.file_wrapper`` is a function, as in uWSGI, what it gives reaches the server untouched."""
    (tmp_path / "file").write_bytes(b"hello")
    with (tmp_path / "file").open("rb") as file:

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", list(PLAIN))
            return environ["wsgi.file_wrapper"](file)

        environ = wsgi_environ() | {"wsgi.file_wrapper": lambda file: file}
        gate = LimitGateWSGI(app, rules=[Rule("api", "5/minute", charge_if=FAILED)], store=store)
        assert gate(environ, lambda *_: bytes) is file
    assert store.owed == {}


# --- WebSockets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([{"type": "websocket.accept"}, {"type": "websocket.close"}], 101),
        ([{"type": "websocket.close", "code": 4000}], 403),
        (
            [
                {**START, "type": "websocket.http.response.start", "status": 401},
                {**END, "type": "websocket.http.response.body"},
            ],
            401,
        ),
        ([], 500),
    ],
    ids=["accepted", "closed", "denied", "not answered"],
)
def test_the_status_of_a_handshake(store: Watched, answers: list[dict[str, Any]], status: int) -> None:
    """A WebSocket that is accepted is a 101, closed before it is a 403, a denial has its own status, silence is a 500."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for answer in answers:
            await send(answer)

    rules = [Rule(f"is-{known}", "5/minute", charge_if={"status": [known]}) for known in (101, 401, 403, 500)]
    call(gated(app, *rules, store=store), websocket_scope())
    assert store.owed == {f"is-{status}": 1}


def test_a_websocket_is_put_right_when_it_is_accepted(store: Watched) -> None:
    """A connection that lasts keeps nothing back that only failed handshakes are charged."""
    seen: list[dict[str, float]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        seen.append(store.owed)
        await websocket.close()

    asyncio.run(handshake(gated(app, Rule("failed", "5/minute", charge_if={"status_not": [101]}), store=store)))
    assert seen == [{}]


# --- where limits stand -----------------------------------------------------------------------------------------------


def test_decorators_by_outcome(store: Watched) -> None:
    """A decorator may go by the outcome, in Starlette, FastAPI and Flask, and beside rules that do not."""

    @limit("2/minute", name="starlette", charge_if=FAILED)
    async def of_starlette(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello", int(request.query_params["status"]))

    of_fastapi = fastapi.FastAPI()

    @of_fastapi.get("/fastapi")
    @limit("2/minute", name="fastapi", charge_if=FAILED)
    def view(status: int, response: fastapi.Response) -> str:
        if status == 401:
            raise fastapi.HTTPException(401)
        return "hello"

    @of_fastapi.get("/free")
    @exempt
    @limit("1/minute", name="free", charge_if=FAILED)
    def free() -> str:
        return "hello"

    of_flask = flask.Flask(__name__)

    @of_flask.get("/flask")
    @limit("2/minute", name="flask", charge_if=FAILED)
    def flask_view() -> tuple[str, int]:
        return "hello", int(flask.request.args["status"])

    rule = Rule("all", "1000/minute")
    app = Starlette(routes=[Route("/starlette", of_starlette), Mount("/", of_fastapi)])
    gate = gated(app, rule, store=store)
    for path in ("starlette", "fastapi"):
        found = [asyncio.run(asgi_reply(gate, f"/{path}?status={status}")).status for status in (200, 200, 200, 401, 401, 401)]
        assert found == [200, 200, 200, 401, 401, 429]
    assert asyncio.run(asgi_reply(gate, "/free")).status == 200
    of_flask.wsgi_app = LimitGateWSGI(of_flask.wsgi_app, rules=[rule], store=store)
    with of_flask.test_client() as client:
        found = [client.get(f"/flask?status={status}").status_code for status in (200, 200, 200, 401, 401, 401)]
    assert found == [200, 200, 200, 401, 401, 429]
    assert store.owed == {"all": 15, "starlette": 2, "fastapi": 2, "flask": 2}


def test_gates_within_gates(store: Watched) -> None:
    """Each of two gates goes by the outcome that it sees; the outer one sees the refusals of the inner."""
    inner = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello", 401))])
    inner.add_middleware(LimitGate, rules=[Rule("inner", "1/minute", charge_if=FAILED)], store=store)
    app = Starlette(routes=[Mount("/in", inner)])
    rules = [Rule("failed", "9/minute", charge_if=FAILED), Rule("refused", "9/minute", charge_if={"status": [429]})]
    gate = gated(app, *rules, store=store)
    assert [asyncio.run(asgi_reply(gate, "/in/")).status for _ in range(3)] == [401, 429, 429]
    assert store.owed == {"inner": 1, "failed": 1, "refused": 2}


def test_other_middleware_around_and_within(store: Watched) -> None:
    """Starlette's ``BaseHTTPMiddleware``, outside and inside of the gate, and its test client, change nothing."""

    class Passing(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Any:
            return await call_next(request)

    async def view(request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            yield "hello"
            request.scope["limitgate"].settle(7, rule="cost")

        if "raise" in request.query_params:
            raise LookupError
        return StreamingResponse(chunks(), int(request.query_params["status"]))

    rules = [Rule("failed", "9/minute", charge_if=FAILED), Rule("broken", "9/minute", charge_if={"status": ["5xx"]})]
    around = [Middleware(Passing), Middleware(LimitGate, rules=[*rules, Rule("cost", "99/minute")], store=store)]
    app = Starlette(routes=[Route("/", view)], middleware=[*around, Middleware(Passing)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather have another httpx than ours
        from starlette.testclient import TestClient
    with TestClient(app, raise_server_exceptions=False) as client:
        assert [client.get(f"/?status={status}").status_code for status in (200, 401)] == [200, 401]
        assert client.get("/?raise=1").status_code == 500
    assert store.owed == {"failed": 1, "broken": 1, "cost": 15}


# --- settle -----------------------------------------------------------------------------------------------------------

TOKENS = Rule("tokens", "1000/minute", cost=lambda _: 100)
REQUESTS = Rule("requests", "60/minute")


@pytest.mark.parametrize(
    ("rules", "told", "left"),
    [
        ([REQUESTS], "settle=5", {"requests": 5}),
        ([REQUESTS], "settle=0", {}),
        ([TOKENS], "settle=30", {"tokens": 30}),
        ([TOKENS], "settle=100", {"tokens": 100}),
        ([TOKENS], "settle=5000", {"tokens": 5000}),
        ([REQUESTS, TOKENS], "settle=30", {"requests": 1, "tokens": 30}),
        ([REQUESTS, TOKENS], "settle=30/requests", {"requests": 30, "tokens": 100}),
        ([REQUESTS, TOKENS], "settle=30/requests&settle=7", {"requests": 30, "tokens": 7}),
        ([REQUESTS, TOKENS], "settle=7&settle=30/tokens", {"requests": 1, "tokens": 30}),
        ([REQUESTS, Rule("other", "60/minute")], "settle=4", {"requests": 4, "other": 4}),
        ([TOKENS, Rule("bytes", "60/minute", cost=2)], "settle=4", {"tokens": 4, "bytes": 4}),
        ([Rule("free", "60/minute", cost=0)], "settle=4", {"free": 4}),
        ([REQUESTS], "settle=50&settle=9&settle=3", {"requests": 3}),
        ([Rule("seen", "60/minute", shadow=True)], "settle=4", {"seen": 4}),
        ([Rule("failed", "60/minute", charge_if=FAILED)], "settle=4", {}),
        ([Rule("failed", "60/minute", charge_if=FAILED)], "settle=4&status=401", {"failed": 4}),
    ],
)
def test_a_cost_that_is_known_afterwards(site: Open, rules: list[Rule], told: str, left: dict[str, float]) -> None:
    """A rule owes what was said last for it by name, else what was said for those with a cost of their own, or for all."""
    it = site(*rules)
    it.ask(f"/?{told}")
    assert it.store.owed == left
    assert it.store.corrections <= 1


def test_what_was_too_much_was_never_charged(site: Open) -> None:
    """However long a request takes, its bucket then owes what it would owe if the lower cost had been charged when it came."""
    it = site(Rule("tokens", "60/minute", cost=lambda _: 30))
    it.ask("/?wait=10&settle=20")
    assert it.store.owed == {"tokens": 10}
    it.ask("/?wait=5&settle=25")
    assert it.store.owed == {"tokens": 30}


def test_a_crowd_that_costs_more_than_it_seemed_is_charged_all_of_it(store: Watched) -> None:
    """Of responses that take their time together, each is charged what it turned out to cost on top of its estimate."""

    async def scene() -> None:
        known = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await known.wait()
            scope["limitgate"].settle(1000)
            await send(START)
            await send(END)

        gate = gated(app, Rule("tokens", "10000/minute", cost=1), store=store)
        crowd = [asyncio.create_task(asgi_reply(gate)) for _ in range(100)]
        for _ in range(5):
            await asyncio.sleep(0)
        store.clock.advance(30)
        known.set()
        await asyncio.gather(*crowd)
        assert (await asgi_reply(gate)).status == 429

    asyncio.run(scene())
    assert store.owed == {"tokens": 99_900}


def test_what_does_not_fit_is_owed(site: Open) -> None:
    """A cost above the burst makes the next request wait until it is paid, to the second."""
    it = site(Rule("tokens", "60/minute", cost=1))
    it.ask("/?settle=180")
    refused = it.ask()
    assert (refused.status, refused.wait, refused.rate["x-ratelimit-remaining"]) == (429, 121, "0")
    it.store.clock.advance(120)
    assert it.ask().status == 429
    it.store.clock.advance(1)
    assert it.ask().status == 200


def test_no_cost_is_too_high(site: Open) -> None:
    """A cost beyond all measure is owed, and answers go on being sensible."""
    it = site(Rule("tokens", "60/minute", cost=1))
    it.ask(f"/?settle={10**30}")
    assert it.ask().status == 429
    it.store.clock.advance(366 * 86_400)
    assert it.ask().status == 429


def test_settling_where_it_makes_no_sense(site: Open) -> None:
    """What is no cost, or names a rule that took no part, is an error of the caller, and the request stays as it was."""
    it = site(REQUESTS)
    it.ask()
    decision = it.seen[0]
    with pytest.raises(RuntimeError, match="outside of a request"):
        decision.settle(5)
    assert it.store.owed == {"requests": 1}
    decision = replace(decision, settlement=FinalCosts())
    with pytest.raises(ValueError, match="at least 0"):
        decision.settle(-1)
    with pytest.raises(TypeError, match="integer"):
        decision.settle(1.5)
    with pytest.raises(ValueError, match="expected one of 'requests'"):
        decision.settle(5, rule="typo")
    assert not decision.settlement.costs


def test_a_limiters_decision_has_nothing_to_settle() -> None:
    """Without a request there is nothing whose end could be waited for."""
    with Limiter(MemoryStore()) as limiter, pytest.raises(RuntimeError, match="outside of a request"):
        limiter.hit("key", "1/second").settle(1)


def test_a_refused_request_has_nothing_to_settle(site: Open) -> None:
    """What an ``on_denied`` says about the cost of a refusal has no effect: nothing was taken."""
    it = site(Rule("api", "1/minute"), on_denied=(told := Told(site)))
    assert it.statuses(3) == [200, 429, 429]
    assert len(told.decisions) == 2
    assert it.store.owed == {"api": 1}


class Told:
    """An ``on_denied``, for either door, that settles what it was refused for."""

    def __init__(self, site: Open) -> None:
        self.decisions: list[Any] = []

    def __call__(self, request: dict[str, Any], *rest: Any) -> Any:
        self.decisions.append(request["limitgate"])
        request["limitgate"].settle(5)
        if len(rest) == 1:
            rest[0]("429 Slow Down", list(PLAIN))
            return [b"slow down"]
        return self._answer(rest[1])

    @staticmethod
    async def _answer(send: Any) -> None:
        await send({**START, "status": 429})
        await send(END)


def test_settling_from_anywhere(store: Watched) -> None:
    """A cost may be told by a coroutine, a thread, a generator that streams, and a background task; the last one counts."""
    steps: list[dict[str, float]] = []

    def endpoint(request: Request) -> StreamingResponse:
        decision = request.scope["limitgate"]
        thread = threading.Thread(target=decision.settle, args=[2])
        thread.start()
        thread.join()

        async def chunks() -> AsyncIterator[str]:
            steps.append(store.owed)
            yield "hello"
            decision.settle(3)

        def afterwards() -> None:
            steps.append(store.owed)
            decision.settle(4)

        return StreamingResponse(chunks(), background=BackgroundTask(afterwards))

    gate = gated(Starlette(routes=[Route("/", endpoint)]), REQUESTS, store=store)
    asyncio.run(asgi_reply(gate))
    assert steps == [{"requests": 1}, {"requests": 3}]
    assert store.owed == {"requests": 4}


def test_many_threads_tell_costs_at_once() -> None:
    """No thread's word gets lost because another one speaks at the same time."""
    rules = [Rule(f"rule{number}", "9999/minute") for number in range(8)]
    store = Watched()
    barrier = threading.Barrier(len(rules))

    def app(environ: Any, start_response: Any) -> list[bytes]:
        def tell(number: int) -> None:
            barrier.wait()
            environ["limitgate"].settle(number + 2, rule=f"rule{number}")

        with ThreadPoolExecutor(len(rules)) as threads:
            list(threads.map(tell, range(len(rules))))
        start_response("200 OK", list(PLAIN))
        return [b"hello"]

    for _ in range(20):
        run_wsgi(LimitGateWSGI(app, rules=rules, store=store), wsgi_environ())
    assert store.owed == {f"rule{number}": 20 * (number + 2) for number in range(8)}


@pytest.mark.parametrize(("told", "fewest"), [(3, 9), (1, 20), (0, 20)])
def test_under_a_lease_nothing_is_used_unpaid(redis_server: RedisServer, told: int, fewest: int) -> None:
    """Where requests are taken in advance, what they turn out to cost is owed in Redis in the end."""
    name = uuid4().hex
    rule = Rule(name, "30/day", lease=10)
    with WSGIOutcomes(rule, store=RedisStore(redis_server.url), timeout=5) as site:
        passed = site.statuses(40, f"/?settle={told}").count(200)
        (charge,) = [bucket.charge for bucket in site.seen[0].evidence]
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        reading = store.spend(Plan((charge._replace(cost=0),), "peek"), 5)
    assert passed >= fewest
    assert reading.buckets[0].before[0] / charge.bucket.weights[0] > passed * told - 0.1


# --- the store fails --------------------------------------------------------------------------------------------------

POLICIES = ["open", "local", "closed"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_that_fails_to_put_right(site: Open, policy: str) -> None:
    """The charge stays and is counted as such; nobody is answered otherwise, whatever ``on_error`` says."""
    it = site(Rule("api", "5/minute", charge_if=FAILED), Rule("cost", "99/minute"), on_error=policy)
    it.store.fails = ("correct",)
    assert it.statuses(2, "/?settle=7/cost") == [200, 200]
    assert it.store.owed == {"api": 2, "cost": 2}
    assert it.gate.uncorrected == it.gate.failures == 2
    it.store.fails = ()
    assert it.ask("/?settle=7/cost").status == 200
    assert it.store.owed == {"api": 2, "cost": 9}
    assert it.gate.uncorrected == 2


@pytest.mark.parametrize("fails", [("take",), ("take", "correct")])
def test_a_store_that_fails_to_decide_open(site: Open, fails: tuple[str, ...]) -> None:
    """What passes unseen is charged nowhere, so there is nothing to put right, and ``settle`` may be called all the same."""
    it = site(Rule("api", "1/minute", charge_if=FAILED), Rule("cost", "1/minute"), on_error="open")
    it.store.fails = fails
    assert it.statuses(3, "/?settle=7&settle=8/cost&settle=9/typo") == [200] * 3
    assert (it.store.owed, it.store.corrections, it.gate.uncorrected) == ({}, 0, 0)


@pytest.mark.parametrize("fails", [("take",), ("take", "correct")])
def test_a_store_that_fails_to_decide_local(site: Open, fails: tuple[str, ...]) -> None:
    """What this process has decided it puts right itself."""
    it = site(Rule("api", "2/minute", charge_if=FAILED), Rule("cost", "9/minute"), on_error="local")
    it.store.fails = fails
    assert it.statuses(4, "/?settle=2/cost") == [200] * 4
    assert it.statuses(3, "/?status=401&settle=0/cost") == [401, 401, 429]
    assert (it.store.owed, it.gate.uncorrected) == ({}, 0)


def test_a_store_that_fails_to_decide_closed(site: Open) -> None:
    """A 503 is charged nowhere."""
    it = site(Rule("api", "2/minute", charge_if=FAILED), on_error="closed")
    it.store.fails = ("take",)
    assert it.statuses(3) == [503] * 3
    assert (it.store.owed, it.store.corrections) == ({}, 0)


def test_a_generator_may_settle_while_the_store_is_down(store: Watched) -> None:
    """A WSGI stream that tells its cost meets no error because the store had failed when it came."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", list(PLAIN))
        yield b"hello"
        environ["limitgate"].settle(5)

    store.fails = ("take", "correct")
    reply = run_wsgi(LimitGateWSGI(app, rules=[Rule("api", "5/minute")], store=store), wsgi_environ())
    assert reply.body == b"hello"


def test_a_part_of_the_store_that_fails(site: Open) -> None:
    """Where only some buckets are out of reach, others are put right, and every rule may be named all the same."""
    store = HalfDown()
    it = site(Rule("there", "9/minute", charge_if=FAILED), Rule("cost", "9/minute"), Rule("gone", "9/minute"), store=store)
    assert it.ask("/?settle=5/gone&settle=3/cost").status == 200
    assert store.owed == {"cost": 3}
    assert it.seen[0].degraded
    assert it.gate.uncorrected == 0


class HalfDown(Watched):
    """A cluster of which the node with the buckets of the rule ``gone`` is out of order."""

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        if gone := [charge.key for charge in plan.charges if charge.rule == "gone"]:
            raise StoreError("a part is out of order", keys=frozenset(gone))
        return super().spend(plan)


def test_an_error_of_the_application_is_not_hidden(site: Open) -> None:
    """Where the store fails to put things right after an error, it is the error that the server sees."""
    it = site(Rule("api", "5/minute", charge_if=SERVED))
    it.store.fails = ("correct",)
    with pytest.raises(LookupError, match="own"):
        it.ask("/?raise=1")
    assert it.gate.uncorrected == 1


# --- nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "status=401", "settle=5", "raise=1", "refused=1"])
def test_nothing_is_left_of_a_request(site: Open, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is over is freed at once, whatever became of it: nothing in it leads back to itself."""
    it = site(Rule("api", "2/minute", charge_if=FAILED), Rule("all", "2/minute"))
    if query.startswith("refused"):
        it.statuses(2)
    admissions: list[weakref.ref[Any]] = []

    class Seen(Admission):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            admissions.append(weakref.ref(self))

    monkeypatch.setattr("limitgate.gate.gate.Admission", Seen)
    it.app = _forgiving(it.app, it.door)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(AssertionError, ValueError):  # where there was an error there is no whole response
            it.ask(f"/?{query}")
        it.seen.clear()
        assert [admission() for admission in admissions] == [None]
    finally:
        gc.enable()


def _forgiving(app: Any, door: str) -> Any:
    """An application whose errors go no further: an event loop that is told of one makes a cycle of it."""

    def of_wsgi(environ: Any, start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except LookupError:
            return []

    async def of_asgi(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(LookupError):
            await app(scope, receive, send)

    forgiving: Any = of_asgi if door == "asgi" else of_wsgi
    forgiving.gate = app.gate
    return forgiving


def test_an_exchange_leads_nowhere_once_it_is_over(store: Watched) -> None:
    """A WSGI environ has its exchange in it, which lets go of the environ in the end, also where the request was refused."""
    gate = LimitGateWSGI(lambda _, start: [start("200 OK", [])][:0], rules=[Rule("api", "1/minute")], store=store)
    for _ in range(2):
        environ = wsgi_environ()
        gate(environ, lambda *_: bytes)
        assert environ[EXCHANGE].open_admission().request is None


# --- Redis ------------------------------------------------------------------------------------------------------------


def test_on_redis_a_client_meets_its_own_requests_put_right(redis_server: RedisServer) -> None:
    """A client that asks one worker after the other, each time once it has its answer, is never refused for its own past."""
    rule = Rule(uuid4().hex, "1/day", charge_if=FAILED)
    key = f"limitgate:{rule.name}:*"

    async def scene() -> list[int]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(END)

        stores = [AsyncRedisStore(redis_server.url) for _ in range(2)]
        workers = [gated(app, rule, store=store, timeout=5) for store in stores]
        found = [(await answered(workers[number % 2])).status for number in range(20)]
        for store in stores:
            await store.aclose()
        return found

    async def answered(gate: Any) -> Any:
        wire = Wire()
        request = asyncio.create_task(wire.call(gate, http_scope()))
        await wire.until_sent(2)
        reply = wire.reply()
        with redis_server.client() as client:
            assert not list(client.scan_iter(key))
        await request
        return reply

    assert asyncio.run(scene()) == [200] * 20


def test_on_redis_by_threads(redis_server: RedisServer) -> None:
    """The synchronous store gives back and takes on top, as the memory store does."""
    name = uuid4().hex
    rules = [Rule(f"f{name}", "2/day", charge_if=FAILED), Rule(f"t{name}", "50/day", cost=2)]
    with WSGIOutcomes(*rules, store=RedisStore(redis_server.url), timeout=5) as site:
        assert site.statuses(3, "/?settle=10") == [200] * 3
        assert site.statuses(3, "/?settle=9&status=401") == [401, 401, 429]
        assert site.seen[-1].windows[1].used == 41


def test_rules_in_yaml(site: Open, tmp_path: Path) -> None:
    """``charge_if`` is written in a rule file as in Python."""
    file = tmp_path / "rules.yaml"
    file.write_text("rules: [{name: failed, qpm: 2, charge_if: {status: [401, 5xx]}}]")
    it = site(rules=str(file))
    assert [it.ask(f"/?status={status}").status for status in (200, 404, 401, 503, 200)] == [200, 404, 401, 503, 429]


# --- served -----------------------------------------------------------------------------------------------------------

SERVED_APP = """
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from limitgate import LimitGate, Rule

async def nothing(scope, receive, send):
    pass

async def answer(request):
    print(request.method, "is admitted", flush=True)
    try:
        await request.body()
    except ClientDisconnect:
        return nothing
    if cost := request.query_params.get("cost"):
        request.scope["limitgate"].settle(int(cost))
    return PlainTextResponse("hello", int(request.query_params["status"]))

limited = Starlette(routes=[Route("/{kind}", answer, methods=["GET", "POST"])])
limited.add_middleware(LimitGate, rules=[
    Rule("failed", "1/day", path="/login", key=["header:x-who"], charge_if={"status": [401]}),
    Rule("tokens", "1000/day", path="/tokens", key=["header:x-who"], cost=10),
])

async def app(scope, receive, send):
    await limited(scope, receive, send)
    print(scope.get("method"), "is over", flush=True)
"""


def test_through_uvicorn(redis_server: RedisServer, tmp_path: Path) -> None:
    """With two workers on Redis, a client that asks again as soon as it has its answer is never refused for its own past.

    One that hangs up before it has an answer stays charged. Nothing is asked about it meanwhile: that would be a charge, too,
    for which it could be refused itself.
    """
    log = tmp_path / "uvicorn.log"
    (tmp_path / "served.py").write_text(SERVED_APP)
    environment = {"LIMITGATE_STORE": redis_server.url, "LIMITGATE_TIMEOUT": "10", "PYTHONPATH": str(tmp_path)}
    with uvicorn_process("served:app", tmp_path, workers=2, **environment) as url:
        with httpx.Client(base_url=url, timeout=PATIENCE, headers={"x-who": uuid4().hex, "connection": "close"}) as client:
            statuses = [200] * 30 + [401, 200]
            assert [client.get(f"/login?status={status}").status_code for status in statuses] == [200] * 30 + [401, 429]
            assert [client.get(f"/tokens?status=200&cost={cost}").status_code for cost in (400, 3, 5, 600, 1)] == [200] * 4 + [
                429
            ]
        who = uuid4().hex
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), PATIENCE) as hung_up:
            head = f"POST /login?status=200 HTTP/1.1\r\nhost: x\r\nx-who: {who}\r\ncontent-length: 5\r\n\r\nhe"
            hung_up.sendall(head.encode())
            until(lambda: "POST is admitted" in log.read_text())
        until(lambda: "POST is over" in log.read_text())
        assert httpx.get(f"{url}/login?status=200", headers={"x-who": who}, timeout=PATIENCE).status_code == 429
    assert "Unexpected" not in log.read_text()
