"""Requests in flight through the doors: each takes its place when it comes and gives it back once, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fastapi
import flask
import httpx
import pytest
import websockets.sync.client
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path as django_path
from fastapi import Depends
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import LimitGate, LimitGateWSGI, RateLimited, Rule, StoreError, limit
from limitgate.algorithms import concurrency
from limitgate.exchange.base import EXCHANGE
from limitgate.fastapi import RateLimit
from limitgate.http.request import ASGIRequest
from limitgate.limits.plan import Plan, Reading
from limitgate.rules.decorators import decided_marks
from tests.support.django_app import WAYS
from tests.support.doors import (
    MOMENT,
    PATIENCE,
    Wire,
    asgi_reply,
    http_scope,
    run_wsgi,
    threaded_wsgi,
    uvicorn_process,
    websocket_scope,
    wsgi_environ,
)
from tests.support.fastapi_doors import statuses
from tests.support.outcomes import END, PLAIN, START, Watched
from tests.support.proxy import until
from tests.support.redis_server import RedisServer
from tests.support.stored import buckets

PLACES = Rule("places", "2 at once")


class Counted(Watched):
    """A store that knows how many places are taken."""

    @property
    def taken(self) -> int:
        found = 0
        for written, _, bucket, states in buckets(self).values():
            if bucket.has_slots:
                found += concurrency.advance(states, self.clock() - written, bucket)[0].taken
        return found

    @property
    def owed_elsewhere(self) -> dict[str, int]:
        """Requests that the buckets of other limits owe."""
        found = {}
        for key, (_, _, bucket, states) in buckets(self).items():
            if not bucket.has_slots:
                found[key] = max(map(bucket.algorithm.used, states, bucket.limits))
        return found


class General(Counted):
    """One that takes no plain plans."""

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        return super().spend(plan, timeout)


@pytest.fixture(params=[Counted, General])
def store(request: pytest.FixtureRequest) -> Counted:
    return request.param()


def gated(app: Any, *rules: Rule, **options: Any) -> LimitGate:
    return LimitGate(app, rules=rules or (PLACES,), **options)


def held(gate: Any) -> int:
    """How many requests hold something, by what their gate knows of it."""
    return len(gate.refunds.slot_keeper) + len(gate.outages.local_slots)


async def over(gate: Any) -> None:
    """Wait until nobody has anything to do any more."""
    await gate.refunds.asettled()
    assert held(gate) == 0


# --- ASGI -------------------------------------------------------------------------------------------------------------


class Ends:
    """An application that ends in the way that the path says; notes how many places were taken meanwhile."""

    def __init__(self, store: Counted) -> None:
        self.store = store
        self.meanwhile: list[int] = []
        self.is_there = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.meanwhile.append(self.store.taken)
        await getattr(self, scope["path"].strip("/"))(scope, receive, send)

    async def answers(self, scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(END)

    async def streams(self, scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for _ in range(3):
            await send({**END, "more_body": True})
            self.meanwhile.append(self.store.taken)
        await send(END)

    async def fails(self, scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("the application's own")

    async def breaks_off(self, scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        raise LookupError("the application's own")

    async def says_nothing(self, scope: Any, receive: Any, send: Any) -> None:
        pass

    async def refuses(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        decision = await exchange.afurther([(Rule("never", "1/minute", cost=lambda _: 2), ())])
        self.meanwhile.append(self.store.taken)
        raise RateLimited(decision)

    async def takes_another(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        await exchange.afurther([(Rule("late", "1 at once"), ())])
        self.meanwhile.append(self.store.taken)
        await self.answers(scope, receive, send)

    async def refuses_another(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        for rule in (Rule("late", "1 at once"), Rule("never", "1/minute", cost=lambda _: 2)):
            await exchange.afurther([(rule, ())])
        await self.answers(scope, receive, send)

    async def settles(self, scope: Any, receive: Any, send: Any) -> None:
        scope["limitgate"].settle(0)
        await send(START)
        await send(END)
        self.meanwhile.append(self.store.taken)

    async def waits(self, scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        self.is_there.set()
        await asyncio.get_running_loop().create_future()


ENDINGS = {
    "answers": [1],
    "streams": [1, 1, 1, 1],
    "fails": [1],
    "breaks_off": [1],
    "says_nothing": [1],
    "refuses": [1, 0],
    "takes_another": [1, 2],
    "refuses_another": [1],
    "settles": [1, 0],
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_request_gives_its_place_back_once(store: Counted, ending: str) -> None:
    """However an ASGI application ends, the place is taken until then, and given back once."""

    async def scene() -> list[int]:
        app = Ends(store)
        gate = gated(app, PLACES, Rule("rate", "9/minute"), store=store)
        with contextlib.suppress(LookupError):
            await Wire().call(gate, http_scope(f"/{ending}"))
        assert store.taken == 0
        await over(gate.gate)
        return app.meanwhile

    assert asyncio.run(scene()) == ENDINGS[ending]
    given_back = [charge for plan in store.plans for charge in plan.charges if charge.bucket.has_slots and charge.adjustment]
    taken = [charge for plan in store.plans if plan.verb == "spend" for charge in plan.charges if charge.slot]
    assert sorted(charge.adjustment.grace for charge in given_back) == sorted([charge.slot] for charge in taken)


async def nobody(_: Any) -> None:
    """An ``identify`` that has to be awaited."""


@pytest.mark.parametrize("way", ["begun", "asked", "identified", "checked"])
def test_a_request_that_is_cancelled_gives_its_place_back(way: str) -> None:
    """Whether the response has begun or the store was still being asked, whoever has asked it."""

    class Slow(Counted):
        measures_silence = takes_plain = True

        async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
            reading = self.spend(plan)
            if plan.verb == "spend" and way != "begun":
                app.is_there.set()
                await asyncio.sleep(PATIENCE)
            return reading

    async def scene() -> None:
        nonlocal app
        store, gone = Slow(), 0.05
        app = Ends(store)
        gate = gated(app, store=store, identify=nobody if way == "identified" else None)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("limitgate.gate.slot_keeper.AGAIN", gone)
            scope = http_scope("/waits")
            asking: Any = Wire().call(gate, scope) if way != "checked" else gate.gate.acheck(ASGIRequest(scope))
            task = asyncio.create_task(asking)
            await app.is_there.wait()
            assert store.taken == 1
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(lambda: not store.taken)  # later, where nobody knew that it was taken
        await over(gate.gate)

    app: Any = None
    asyncio.run(scene())


def test_as_many_as_there_are_places(store: Counted) -> None:
    """Those who come while all places are taken are refused, with a hint for when to come again, and named policies."""

    async def scene() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await send(START)
            await send(END)

        gate = gated(app, store=store, headers=("x-ratelimit", "x-ratelimit-windows", "draft-11"))
        waiting = [asyncio.create_task(asgi_reply(gate)) for _ in range(2)]
        await until(lambda: store.taken == 2)
        refused = await asgi_reply(gate)
        assert (refused.status, refused.wait, refused.json()["violated-policies"]) == (429, 1, ["places"])
        assert refused.rate["ratelimit-policy"] == '"places";q=2;qu="concurrent-requests"'
        assert refused.rate["ratelimit"] == '"places";r=0;t=1'
        assert (refused.rate["x-ratelimit-limit"], refused.rate["x-ratelimit-remaining"]) == ("2", "0")
        assert not [name for name in refused.rate if name.startswith("x-ratelimit-limit-")]
        go.set()
        assert [(await task).rate["ratelimit"] for task in waiting] == ['"places";r=1', '"places";r=0']
        assert (await asgi_reply(gate)).status == 200
        await over(gate.gate)

    asyncio.run(scene())
    assert store.taken == 0


def test_all_or_nothing_with_other_limits(store: Counted) -> None:
    """A place is not taken where another limit refuses, and nothing else is charged where there is no place."""

    async def scene() -> None:
        app = Ends(store)
        gate = gated(app, Rule("places", "1 at once"), Rule("rate", "2/minute"), store=store)
        waiting = asyncio.create_task(Wire().call(gate, http_scope("/waits")))
        await app.is_there.wait()
        assert [(await asgi_reply(gate, "/answers")).status for _ in range(3)] == [429] * 3
        assert max(store.owed_elsewhere.values()) == 1
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert [(await asgi_reply(gate, "/answers")).status for _ in range(3)] == [200, 429, 429]
        assert store.taken == 0
        await over(gate.gate)

    asyncio.run(scene())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_waits_for_its_turn_is_in_flight(store: Counted, *, leaves: bool) -> None:
    """Shaping and places go together: who waits has a place already, and gives it back with the turn, or in the end."""

    async def scene() -> list[int]:
        app = Ends(store)
        gate = gated(app, PLACES, Rule("turns", "10/second burst 1", max_delay="5s"), store=store)
        assert (await asgi_reply(gate, "/answers")).status == 200
        waiting = asyncio.create_task(asgi_reply(gate, "/answers"))
        await until(lambda: store.taken == 1)
        found = [store.taken, len(app.meanwhile)]
        if leaves:
            waiting.cancel()
            await asyncio.wait([waiting])
        else:
            assert (await waiting).status == 200
        await over(gate.gate)
        return [*found, len(app.meanwhile)]

    assert asyncio.run(scene()) == [1, 1, 1 if leaves else 2]
    assert (store.taken, max(store.owed_elsewhere.values())) == (0, 1 if leaves else 2)


def test_policies_of_one_rule_are_told_apart(store: Counted) -> None:
    """Places and rates of one rule are policies of different names."""
    gate = gated(Ends(store), Rule("api", "5/second", concurrency=3), store=store, headers=("draft-11",))
    reply = asyncio.run(asgi_reply(gate, "/answers"))
    assert reply.rate["ratelimit-policy"] == '"api-second";q=5;w=1, "api-concurrent";q=3;qu="concurrent-requests"'
    assert reply.rate["ratelimit"] == '"api-second";r=4;t=1, "api-concurrent";r=2'


def test_a_shadow_counts_and_refuses_nobody(store: Counted) -> None:
    """Under a shadow rule all pass; only as many take a place as there are, and these give theirs back."""

    async def scene() -> int:
        app = Ends(store)
        gate = gated(app, Rule("places", "1 at once", shadow=True), store=store)
        waiting = asyncio.create_task(Wire().call(gate, http_scope("/waits")))
        await app.is_there.wait()
        assert [(await asgi_reply(gate, "/answers")).status for _ in range(3)] == [200] * 3
        found = store.taken
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await over(gate.gate)
        return found

    assert asyncio.run(scene()) == 1
    assert store.taken == 0


def test_a_request_is_one_place_whatever_it_costs(store: Counted) -> None:
    """A cost is about the other limits of a rule; one that costs nothing takes no place either."""
    app = Ends(store)
    gate = gated(
        app, Rule("tokens", "900/minute", concurrency=2, cost=lambda asked: int(asked.query.removeprefix("cost="))), store=store
    )
    statuses = [asyncio.run(asgi_reply(gate, f"/answers?cost={cost}")).status for cost in (300, 600, 0, 1)]
    assert (statuses, app.meanwhile) == ([200, 200, 200, 429], [1, 1, 0])


@pytest.mark.parametrize("ending", ["sent", "broken off", "cancelled"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_place_is_kept_until_the_last_message_is_sent(ending: str, chunks: int) -> None:
    """A client that reads slowly keeps its place while the server sends, also where the body is one piece."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for chunk in range(chunks):
            await send({**END, "more_body": chunk < chunks - 1})

    async def scene() -> None:
        gate, sending, is_read = gated(app, Rule("one", "1 at once")), asyncio.Event(), asyncio.Event()

        async def slow(message: Any) -> None:
            if message["type"] == "http.response.body" and not message["more_body"]:
                sending.set()
                await is_read.wait()
                if ending == "broken off":
                    raise OSError

        asked = asyncio.create_task(gate(http_scope("/"), Wire().receive, slow))
        await sending.wait()
        assert (await asgi_reply(gate)).status == 429
        if ending == "cancelled":
            asked.cancel()
        is_read.set()
        await asyncio.wait([asked])
        asked.cancelled() or asked.exception()
        await gate.gate.refunds.asettled()
        assert (await asgi_reply(gate)).status == 200

    asyncio.run(scene())


def test_a_slow_reader_of_one_piece_keeps_its_place(tmp_path: Path) -> None:
    """On uvicorn a body of 20 MB in one piece is in flight until the client has read it; then it is whole."""
    (tmp_path / "one_piece.py").write_text(
        "from limitgate import LimitGate, Rule\n"
        "SIZE = 20_000_000\n"
        "async def big(scope, receive, send):\n"
        "    headers = [(b'content-length', b'%d' % SIZE)]\n"
        "    await send({'type': 'http.response.start', 'status': 200, 'headers': headers})\n"
        "    await send({'type': 'http.response.body', 'body': bytes(SIZE)})\n"
        "app = LimitGate(big, rules=[Rule('one', '1 at once')], store='memory://')\n"
    )
    with uvicorn_process("one_piece:app", tmp_path, "--app-dir", str(tmp_path), "--lifespan", "off") as url:
        with httpx.stream("GET", url, timeout=PATIENCE) as slow:
            assert slow.status_code == 200
            assert [httpx.get(url, timeout=PATIENCE).status_code for _ in range(3)] == [429] * 3
            assert sum(map(len, slow.iter_bytes())) == 20_000_000
        asyncio.run(until(lambda: httpx.get(url, timeout=PATIENCE).status_code == 200))


def test_a_background_task_is_no_part_of_a_response(store: Counted) -> None:
    """A place is kept until the last of the response: whoever has it may come again, whatever else there is to do."""
    meanwhile: list[int] = []

    @limit(concurrency=3)
    def view(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello", background=BackgroundTask(lambda: meanwhile.append(store.taken)))

    app = Starlette(routes=[Route("/", view)])
    gate = LimitGate(app, rules=[], store=store)
    assert asyncio.run(asgi_reply(gate)).status == 200
    assert (meanwhile, store.taken) == ([0], 0)


@pytest.mark.parametrize("incoming", [[{"type": "websocket.disconnect", "code": 1000}], []], ids=["client", "server"])
def test_a_websocket_keeps_its_place_while_it_is_open(store: Counted, incoming: list[Any]) -> None:
    """Until it is closed, by either side."""
    meanwhile = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        meanwhile.append(store.taken)
        if incoming:
            await receive()
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def scene() -> None:
        gate = gated(app, store=store)
        await Wire({"type": "websocket.connect"}, *incoming).call(gate, websocket_scope())
        await over(gate.gate)

    asyncio.run(scene())
    assert (meanwhile, store.taken) == ([1], 0)


# --- WSGI -------------------------------------------------------------------------------------------------------------


class Chunks:
    """A body that has to be closed, of a known number of chunks or not."""

    def __init__(self, store: Counted, meanwhile: list[int], *, fails: bool = False) -> None:
        self.store, self.meanwhile, self.fails = store, meanwhile, fails

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(2):
            self.meanwhile.append(self.store.taken)
            yield b"x"
        if self.fails:
            raise LookupError("the application's own")

    def close(self) -> None:
        self.meanwhile.append(self.store.taken)


class SizedChunks(Chunks):
    def __len__(self) -> int:
        return 2


def wsgi_app(store: Counted, meanwhile: list[int]) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        meanwhile.append(store.taken)
        path = environ["PATH_INFO"]
        if path == "/fails":
            raise LookupError("the application's own")
        if path in ("/refuses", "/refuses_another"):
            exchange = environ[EXCHANGE]
            if path == "/refuses_another":
                exchange.further([(Rule("late", "1 at once"), ())])
            exchange.further([(Rule("never", "1/minute", cost=lambda _: 2), ())])
        start_response("200 OK", list(PLAIN))
        kinds = {"/streams": Chunks, "/sized": SizedChunks}
        if path in kinds:
            return kinds[path](store, meanwhile)
        if path == "/breaks_off":
            return Chunks(store, meanwhile, fails=True)
        return [b"hello"]

    return app


WSGI_ENDINGS = {
    "answers": [1],
    "streams": [1, 1, 1, 0],
    "sized": [1, 1, 1, 0],
    "breaks_off": [1, 1, 1, 1],
    "fails": [1],
    "refuses": [1],
    "refuses_another": [1],
}


@pytest.mark.parametrize("ending", WSGI_ENDINGS)
def test_a_wsgi_request_gives_its_place_back_once(store: Counted, ending: str) -> None:
    """However a WSGI application ends, the place is taken until its body is used up or closed, and given back once."""
    meanwhile: list[int] = []
    gate = LimitGateWSGI(wsgi_app(store, meanwhile), rules=[PLACES, Rule("rate", "9/minute")], store=store)
    with contextlib.suppress(LookupError):
        run_wsgi(gate, wsgi_environ(f"/{ending}"))
    assert (meanwhile, store.taken, held(gate.gate)) == (WSGI_ENDINGS[ending], 0, 0)
    given_back = [charge for plan in store.plans for charge in plan.charges if charge.bucket.has_slots and charge.adjustment]
    taken = [charge for plan in store.plans if plan.verb == "spend" for charge in plan.charges if charge.slot]
    assert sorted(charge.adjustment.grace for charge in given_back) == sorted([charge.slot] for charge in taken)


def test_a_body_that_nobody_reads_is_closed(store: Counted) -> None:
    """A client that has gone before the body began: the server closes it, and that is the end."""
    gate = LimitGateWSGI(wsgi_app(store, []), rules=[PLACES], store=store)
    chunks = gate(wsgi_environ("/streams"), lambda *_: None)
    assert store.taken == 1
    chunks.close()
    chunks.close()
    assert (store.taken, store.corrections) == (0, 1)


def test_the_length_of_a_body_stays_known(store: Counted) -> None:
    """Servers see how many chunks there are, where they could before, and nothing else pretends to have a length."""
    gate = LimitGateWSGI(wsgi_app(store, []), rules=[PLACES], store=store)
    assert len(gate(wsgi_environ("/answers"), lambda *_: None)) == 1
    assert len(gate(wsgi_environ("/sized"), lambda *_: None)) == 2
    other = LimitGateWSGI(wsgi_app(store, []), rules=[Rule("other", "1 at once")], store=store)
    assert not hasattr(other(wsgi_environ("/streams"), lambda *_: None), "__len__")


def test_a_flask_application(store: Counted) -> None:
    """Flask's views, decorated or under a rule, and streams; its test client closes nothing, but reads to the end."""
    app = flask.Flask(__name__)
    meanwhile: list[int] = []

    @app.get("/")
    @limit("1 at once", name="flask")
    def view() -> str:
        meanwhile.append(store.taken)
        return "hello"

    @app.get("/stream")
    def stream() -> Any:
        return flask.Response(str(meanwhile.append(store.taken)) for _ in range(2))

    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[Rule("stream", path="/stream", concurrency=1)], store=store)
    client = app.test_client()
    for path in ("/", "/stream", "/", "/stream"):
        response = client.get(path)
        assert (response.status_code, bool(response.data)) == (200, True)
    assert set(meanwhile) == {1}
    assert store.taken == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", ["answers", "fails", "streams"])
def test_a_django_application(store: Counted, way: str, ending: str) -> None:
    """In each of the ways in which requests come to Django the place is taken in the view and while it streams, then free."""
    meanwhile: list[int] = []

    @limit(concurrency=1, name="django")
    def view(request: Any) -> Any:
        meanwhile.append(store.taken)
        if ending == "fails":
            raise LookupError("the application's own")
        if ending == "streams":
            return StreamingHttpResponse(b"x" for _ in range(2) if not meanwhile.append(store.taken))
        return HttpResponse("hello")

    with WAYS[way].project(django_path("x", view), store=store) as project:
        project.client.raise_request_exception = False
        statuses = [project.ask("/x").status_code for _ in range(3)]
    assert statuses == [500 if ending == "fails" else 200] * 3
    assert (set(meanwhile), store.taken) == ({1}, 0)


def test_a_dependency_of_fastapi(store: Counted) -> None:
    """A place that is taken by a dependency is given back with the others, and with them where one refuses."""
    app = fastapi.FastAPI()
    meanwhile: list[int] = []

    @app.get("/", dependencies=[Depends(RateLimit(concurrency=1, key=["global"]))])
    def view() -> str:
        meanwhile.append(store.taken)
        return "hello"

    never = [Depends(RateLimit("1/minute", cost=lambda _: 2)), Depends(RateLimit(concurrency=1, key=["ip"]))]
    app.get("/never", dependencies=never[::-1])(view)
    app.add_middleware(LimitGate, rules=[PLACES], store=store)
    assert statuses(app, "/", "/never", "/", "/never") == [200, 429, 200, 429]
    assert (meanwhile, store.taken) == ([2, 2], 0)


def test_threads_through_a_real_wsgi_server() -> None:
    """On a threaded server no more than the count are ever in the application, and all can be had afterwards."""
    inside, go, statuses = threading.Semaphore(0), threading.Event(), []

    def app(environ: Any, start_response: Any) -> Any:
        inside.release()
        assert go.wait(PATIENCE)
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
        return [b"hello"]

    gate = LimitGateWSGI(app, rules=[Rule("places", "3 at once", key=["global"])], store="memory://")
    with threaded_wsgi(gate) as url:

        def client() -> None:
            statuses.append(httpx.get(url, timeout=PATIENCE).status_code)

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE
        while len(statuses) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert all(inside.acquire(timeout=PATIENCE) for _ in range(3))  # who was let in may come after all refusals
        assert not inside.acquire(blocking=False)
        go.set()
        for thread in threads:
            thread.join(PATIENCE)
        while held(gate.gate):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert httpx.get(url, timeout=PATIENCE).status_code == 200
    assert statuses == [429] * 5 + [200] * 3


# --- a store that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_a_place_that_cannot_be_given_back_goes_back_later(store: Counted, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails then is counted and asked again soon, until it answers."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", 0.01)
    store.fails = ("correct",)

    async def scene() -> Any:
        gate = gated(Ends(store), store=store)
        assert (await asgi_reply(gate, "/answers")).status == 200
        await asyncio.sleep(0.03)
        found = gate.gate.uncorrected, store.taken
        store.fails = ()
        await until(lambda: not store.taken)
        return found

    if door == "asgi":
        assert asyncio.run(scene()) == (1, 1)
        return
    gate = LimitGateWSGI(wsgi_app(store, []), rules=[PLACES], store=store)
    assert run_wsgi(gate, wsgi_environ("/answers")).status == 200
    assert (gate.gate.uncorrected, store.taken) == (1, 1)
    store.fails, deadline = (), time.monotonic() + PATIENCE
    while store.taken:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("policy", "statuses"), [("open", [200, 200]), ("local", [200, 429]), ("closed", [503, 503])])
def test_a_store_that_cannot_be_asked(store: Counted, policy: Any, statuses: list[int]) -> None:
    """``on_error`` decides as about any limit; under local the places of this process count, and go back, too."""
    store.fails = ("take", "correct")

    async def scene() -> Any:
        app = Ends(store)
        gate = gated(app, Rule("places", "1 at once"), store=store, on_error=policy)
        task = asyncio.create_task(Wire().call(gate, http_scope("/waits")))
        await until(lambda: task.done() or app.is_there.is_set())
        first = task.result().reply().status if task.done() else 200
        found = [first, (await asgi_reply(gate, "/answers")).status]
        assert held(gate.gate) == (policy == "local")
        task.cancel()
        await asyncio.wait([task])
        if policy == "local":
            assert [(await asgi_reply(gate, "/answers")).status for _ in range(3)] == [200] * 3
        await over(gate.gate)
        return found

    assert asyncio.run(scene()) == statuses


def test_a_take_that_nobody_heard_of_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store has taken a place but its answer came too late, the place does not stay taken for half a minute."""

    class Late(Counted):
        measures_silence = takes_plain = True

        def spend(self, plan: Plan, timeout: float = 0) -> Reading:
            reading = super().spend(plan)
            if plan.verb == "spend":
                raise StoreError("no answer in time", "timeout")
            return reading

    async def scene() -> int:
        store = Late()
        gate = gated(Ends(store), store=store)
        assert (await asgi_reply(gate, "/answers")).status == 200
        before = store.taken
        await until(lambda: not store.taken)
        return before

    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", 0.01)
    assert asyncio.run(scene()) == 1


@pytest.mark.parametrize("partly", [False, True])
def test_a_second_question_that_fails_or_is_cancelled(monkeypatch: pytest.MonkeyPatch, *, partly: bool) -> None:
    """Where a store fails for one bucket and then for the rest, whatever it may have taken is taken back."""

    class Broken(Counted):
        measures_silence = takes_plain = True

        async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
            reading = self.spend(plan)
            if plan.verb != "spend":
                return reading
            if len(plan.charges) == 2:
                raise StoreError("a node is away", keys=frozenset({plan.charges[0].key}))
            asked_again.set()
            if partly:
                raise StoreError("now the other, too")
            return await asyncio.get_running_loop().create_future()

    async def scene() -> None:
        nonlocal asked_again
        store, asked_again = Broken(), asyncio.Event()
        gate = gated(Ends(store), Rule("one", "1 at once"), Rule("two", "1 at once"), store=store)
        task = asyncio.create_task(asgi_reply(gate, "/answers"))
        await asked_again.wait()
        assert store.taken == 2
        if partly:
            assert (await task).status == 200
        else:
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: store.taken == 0)

    asked_again: Any = None
    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", 0.01)
    asyncio.run(scene())


@pytest.mark.parametrize("further", [False, True])
def test_a_thread_that_is_interrupted(monkeypatch: pytest.MonkeyPatch, *, further: bool) -> None:
    """A signal's handler that raises while the store is asked does not leave a place taken."""

    class Interrupted(Counted):
        measures_silence = takes_plain = True

        def spend(self, plan: Plan, timeout: float = 0) -> Reading:
            reading = super().spend(plan)
            if plan.verb == "spend" and plan.charges[0].rule == ("late" if further else "places"):
                raise KeyboardInterrupt
            return reading

    def app(environ: Any, _: Any) -> Any:
        environ[EXCHANGE].further([(Rule("late", "1 at once"), ())])

    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", 0.01)
    store = Interrupted()
    gate = LimitGateWSGI(app, rules=[PLACES], store=store)
    with pytest.raises(KeyboardInterrupt):
        gate(wsgi_environ(), lambda *_: None)
    assert (store.taken, held(gate.gate)) == (1, 0)
    deadline = time.monotonic() + PATIENCE
    while store.taken:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rules_without_places_have_nothing_to_do_with_it(store: Counted) -> None:
    """No names are made, nothing is held and nothing is given back; the same question has the same plan."""
    gate = gated(Ends(store), Rule("rate", "9/minute"), store=store)
    for _ in range(2):
        asyncio.run(asgi_reply(gate, "/answers"))
    assert store.plans[0].charges == store.plans[1].charges
    assert ([plan.verb for plan in store.plans], store.plans[0].charges[0].slot) == (["spend", "spend"], 0)


def test_every_request_has_a_name_of_its_own(store: Counted) -> None:
    """Requests that ask for the same have different slots."""
    gate = gated(Ends(store), Rule("one", "9 at once"), Rule("two", "9 at once"), store=store)
    for _ in range(2):
        asyncio.run(asgi_reply(gate, "/answers"))
    first, second = [[charge.slot for charge in plan.charges] for plan in store.plans if plan.verb == "spend"]
    assert len({*first, *second}) == 2
    assert all(0 < slot < 2**52 for slot in (*first, *second))


# --- a real server ----------------------------------------------------------------------------------------------------

SERVED = """
import asyncio
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from limitgate import AsyncLimiter, LimitGate, Rule

async def stream(request):
    async def chunks():
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0.01)
    return StreamingResponse(chunks())

async def breaks_off(request):
    async def chunks():
        yield b"x"
        raise LookupError("on purpose")
    return StreamingResponse(chunks())

async def chat(websocket):
    await websocket.accept()
    if await websocket.receive_text() == "close":
        await websocket.close()
    else:
        await websocket.receive()

site = Starlette(routes=[
    Route("/stream", stream),
    Route("/breaks_off", breaks_off),
    Route("/hello", lambda request: PlainTextResponse("hello")),
    WebSocketRoute("/chat", chat),
])
site.add_middleware(LimitGate, rules=[Rule("places", "1 at once", key=["global"])])

async def app(scope, receive, send):
    try:
        await site(scope, receive, send)
    except LookupError:
        pass
"""


def test_through_uvicorn(redis_server: RedisServer, tmp_path: Path) -> None:
    """On two workers and Redis: one client at a time, and its place is free again however it goes."""
    (tmp_path / "served.py").write_text(SERVED)
    environment = {
        "LIMITGATE_STORE": redis_server.url,
        "LIMITGATE_TIMEOUT": "10",
        "LIMITGATE_KEY_PREFIX": tmp_path.name,
        "LIMITGATE_FLEET": "false",  # all keys are then those of clients
        "PYTHONPATH": str(tmp_path),
    }
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(uvicorn_process("served:app", tmp_path, workers=2, **environment))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE, headers={"connection": "close"}))
        redis = stack.enter_context(redis_server.client())

        def is_free() -> bool:
            return client.get("/hello").status_code == 200

        def until_free() -> None:
            deadline = time.monotonic() + PATIENCE
            while redis.keys(f"{tmp_path.name}:*:*"):  # a request that looks would take the place itself for a moment
                assert time.monotonic() < deadline
                time.sleep(MOMENT)

        with client.stream("GET", "/stream") as response:
            assert response.status_code == 200
            assert not is_free()
        until_free()
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), PATIENCE) as hangs_up:
            hangs_up.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" in hangs_up.recv(100)
            assert not is_free()
        until_free()
        with contextlib.suppress(httpx.HTTPError):
            client.get("/breaks_off")
        until_free()
        for last in ("close", "stay"):
            with websockets.sync.client.connect(url.replace("http", "ws") + "/chat", open_timeout=PATIENCE) as chat:
                assert not is_free()
                chat.send(last)
                if last == "close":
                    until_free()
            until_free()
            assert is_free()
            until_free()


def test_a_place_is_kept_for_as_long_as_a_request_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes longer than a lease lasts keeps its place all the time, as it is renewed."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", 0.05)
    monkeypatch.setattr("limitgate.algorithms.concurrency.HELD_US", 200_000)

    async def scene() -> list[int]:
        found = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/long":
                await asyncio.sleep(0.5)
            await send(START)
            await send(END)

        gate = LimitGate(app, rules=[Rule("places", "1 at once")], store="memory://")
        task = asyncio.create_task(asgi_reply(gate, "/long"))
        while not task.done():
            await asyncio.sleep(0.02)
            found.append((await asgi_reply(gate)).status)
        assert len(asyncio.all_tasks()) == 1
        return found

    *statuses, _ = asyncio.run(scene())
    assert (set(statuses), len(statuses) > 10) == ({429}, True)


def test_a_request_that_outlives_its_event_loop(store: Counted, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that nobody ends is thrown away with its event loop, in silence, and keeps nothing alive."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    gate = gated(app, PLACES, store=store)
    loop = asyncio.new_event_loop()
    task = loop.create_task(Wire().call(gate, http_scope("/")))
    loop.run_until_complete(asyncio.wait([task], timeout=0.05))
    coroutine = task.get_coro()
    loop.close()
    coroutine.close()
    task._log_destroy_pending = False
    del task, coroutine
    gc.collect()
    assert "Traceback" not in capsys.readouterr().err


def test_a_request_that_is_thrown_away_leaves_nothing_set(store: Counted) -> None:
    """Where its context lives on, what was set for the request does not."""

    class Never:
        def __await__(self) -> Any:
            yield

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Never()

    for gate in (gated(app, Rule("rate", "9/minute"), store=store), LimitGate(app, rules=[], enabled=False)):
        call = gate(http_scope("/"), None, None)
        call.send(None)
        assert decided_marks.get() is not None
        call.close()
        assert decided_marks.get() is None
