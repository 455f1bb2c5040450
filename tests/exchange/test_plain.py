"""The short way of a request between application and server, and where it becomes like any other."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, settings, strategies as st

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.exchange.base import EXCHANGE
from tests.gate.test_prepared import General
from tests.support.clock import Clock
from tests.support.doors import PEER, Wire, http_scope, wsgi_environ
from tests.support.observed import Recorder
from tests.support.stored import buckets

RULES = [Rule("api", "9/minute", key=["ip"]), Rule("all", "20/minute")]

ASGI_STEPS: dict[str, Any] = {
    "start": {"type": "http.response.start", "status": 201, "headers": [(b"x-own", b"1")]},
    "start anew": {"type": "http.response.start", "status": 500},
    "part": {"type": "http.response.body", "body": b"part", "more_body": True},
    "end": {"type": "http.response.body", "body": b"end"},
    "early": {"type": "http.response.early_hint", "links": []},
    "trailers": {"type": "http.response.trailers", "headers": []},
    "receive": None,
    "ask": None,
    "settle": None,
    "settle a rule": None,
    "write": None,
    "raise": None,
}
WSGI_STEPS = ("start", "start anew", "chunk", "ask", "settle", "settle a rule", "raise")


def stepped(exchange: Any, decision: Any, step: str) -> None:
    """Do what applications of both kinds may."""
    if step == "ask":
        assert exchange.open_admission() is exchange.open_admission()
    elif step == "settle":
        decision.settle(3)
    elif step == "settle a rule":
        decision.settle(0, "all")
    elif step == "raise":
        raise LookupError("of the application")


def is_plain(exchange: Any) -> bool:
    """True if rate fields are all that is due so far."""
    return bool(vars(exchange)["_admission"].is_plain)


def kept(store: MemoryStore) -> dict[str, Any]:
    return {key: (written, cost, *owed) for key, (written, cost, _, owed) in buckets(store).items()}


def by_asgi(store: MemoryStore, steps: list[str], seen: list[Any], *, opens: bool) -> list[Any]:
    """All that a server, and middleware around, get to see of requests that take these steps."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if opens:
            scope[EXCHANGE].open_admission()
        seen.append(is_plain(scope[EXCHANGE]))
        for step in steps:
            if step == "write":
                scope["written"] = True
            elif step == "receive":
                await receive()
            elif ASGI_STEPS[step] is not None:
                await send(ASGI_STEPS[step])
            stepped(scope[EXCHANGE], scope["limitgate"], step)

    gate, found = LimitGate(app, rules=RULES, store=store), list[Any]()
    for _ in range(2):
        scope, wire = http_scope(), Wire({"type": "http.request", "body": b""}, {"type": "http.disconnect"})
        try:
            asyncio.run(wire.call(gate, scope))
        except LookupError:
            found.append("error")
        found += [wire.sent, {name: value for name, value in scope.items() if name != "state"}, kept(store)]
    return found


def by_wsgi(store: MemoryStore, steps: list[str], seen: list[Any], *, opens: bool) -> list[Any]:
    """The same of a WSGI application, whose steps behind the first chunk are taken while that is read."""

    def app(environ: Any, start_response: Any) -> Any:
        exchange, decision = environ[EXCHANGE], environ["limitgate"]
        if opens:
            exchange.open_admission()
        seen.append(is_plain(exchange))
        start_response("201 Created", [("x-own", "1")])

        def chunks() -> Any:
            for step in steps:
                if step == "start anew":
                    start_response("500 Oh", [], (None, None, None))
                yield step.encode()
                stepped(exchange, decision, step)

        for step in steps[:1]:
            stepped(exchange, decision, step)
        return chunks() if "chunk" in steps else [b"all"]

    gate, found = LimitGateWSGI(app, rules=RULES, store=store), list[Any]()
    for _ in range(2):
        try:
            body = gate(wsgi_environ(), lambda *given: found.append(given[:2]))
            found.append(list(body))
            getattr(body, "close", bool)()
        except LookupError:
            found.append("error")
        found.append(kept(store))
    return found


def assert_alike(door: Any, steps: list[str]) -> None:
    stores: tuple[MemoryStore, ...] = (MemoryStore(Clock()), General(Clock()), General(Clock()))
    seen: tuple[list[Any], ...] = ([], [], [])
    short, general, long = (door(store, steps, each, opens=each is seen[2]) for store, each in zip(stores, seen))
    assert short == general == long
    assert seen == ([True, True], [True, True], [False, False])


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.sampled_from([*ASGI_STEPS, "start", "end"]), max_size=6))
def test_both_ways_of_an_asgi_request_are_alike(steps: list[str]) -> None:
    """Property: messages, scopes, errors and buckets are the same, whatever an application does in whatever order."""
    assert_alike(by_asgi, steps)


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.sampled_from(WSGI_STEPS), max_size=6))
def test_both_ways_of_a_wsgi_request_are_alike(steps: list[str]) -> None:
    """Property: status, headers, chunks, errors and buckets are the same."""
    assert_alike(by_wsgi, steps)


@pytest.mark.parametrize("has_begun", [False, True])
def test_threads_are_given_one_admission(*, has_begun: bool) -> None:
    """However many ask at the same time; what was known before is known to it."""
    found: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        exchange, barrier = environ[EXCHANGE], Barrier(4)

        def ask(_: int) -> Any:
            barrier.wait()
            return exchange.open_admission()

        if has_begun:
            start_response("204 No Content", [])
        with ThreadPoolExecutor(4) as threads:
            found[:] = threads.map(ask, range(4))
        assert (found[0].has_begun, found[0].status) == ((True, 204) if has_begun else (False, None))
        start_response("204 No Content", [])
        return []

    gate = LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock()))
    for _ in range(2):
        gate(wsgi_environ(), lambda *_: None)
        assert len({id(each) for each in found}) == 1
        assert found[0].settlement.is_over
        assert found[0].status == 204


class Asking(dict[str, Any]):
    """A message in the midst of whose sending another thread asks for the admission."""

    exchange: Any

    def __getitem__(self, name: str) -> Any:
        assert self.exchange.open_admission()
        return super().__getitem__(name)


class AskingHeaders(list[Any]):
    """Headers with which it is the same."""

    exchange: Any

    def __iter__(self) -> Any:
        assert self.exchange.open_admission()
        return super().__iter__()


def test_another_thread_may_make_an_asgi_request_like_any_other_while_its_response_begins() -> None:
    """The response has its fields, and the admission knows of it."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        start = Asking(type="http.response.start", status=201, headers=[])
        start.exchange = scope[EXCHANGE]
        seen.append(is_plain(start.exchange))
        await send(start)
        seen.append(start.exchange.open_admission().status)
        await send(ASGI_STEPS["end"])

    gate, seen = LimitGate(app, rules=RULES, store=MemoryStore(Clock())), list[Any]()
    for _ in range(2):
        wire = Wire({"type": "http.request", "body": b""})
        asyncio.run(wire.call(gate, http_scope()))
        assert len(wire.sent[0]["headers"]) == 3
    assert seen[2:] == [True, 201]


def test_another_thread_may_make_a_wsgi_request_like_any_other_while_its_response_begins() -> None:
    """The same over WSGI."""

    def app(environ: Any, start_response: Any) -> Any:
        headers = AskingHeaders()
        headers.exchange = environ[EXCHANGE]
        seen.append(is_plain(headers.exchange))
        start_response("201 Created", headers)
        seen.append(headers.exchange.open_admission().status)
        return [b""]

    gate, seen, sent = LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock())), list[Any](), list[Any]()
    for _ in range(2):
        gate(wsgi_environ(), lambda *given: sent.append(given))
    assert seen[2:] == [True, 201]
    assert [len(headers) for _, headers in sent] == [3, 3]


def overtaken(step: str) -> dict[str, Any]:
    """Buckets after requests in the midst of whose step another thread asks for the admission, and settles the cost."""
    store, kinds = MemoryStore(Clock()), list[Any]()

    def app(environ: Any, start_response: Any) -> Any:
        exchange = environ[EXCHANGE]
        kinds.append(is_plain(exchange))
        start_response("200 OK", [])
        begun = getattr(exchange, step, bool)
        assert exchange.open_admission()
        environ["limitgate"].settle(3)
        assert not begun()
        return [b""]

    gate = LimitGateWSGI(app, rules=RULES, store=store)
    for _ in range(2):
        gate(wsgi_environ(), lambda *_: None)
    assert kinds[1]
    return kept(store)


@pytest.mark.parametrize("step", ["settle", "sent", "end"])
def test_another_thread_may_make_a_request_like_any_other_in_the_midst_of_a_step(step: str) -> None:
    """The step is taken all the same, and the cost is charged."""
    assert overtaken(step) == overtaken("nothing")


USES: dict[str, Any] = {
    "nothing": lambda _: None,
    "a look": lambda environ: environ["limitgate"].remaining,
    "a cost": lambda environ: environ["limitgate"].settle(3),
    "the admission": lambda environ: environ[EXCHANGE].open_admission(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_body_is_closed_twice(use: Any, *, is_adaptive: bool) -> None:
    """The second time nothing is left to end: servers and middleware around may both close it."""
    store = MemoryStore(Clock())

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        use(environ)
        yield b"chunk"

    gate = LimitGateWSGI(app, rules=[*RULES, Rule("load", adaptive=True)] if is_adaptive else RULES, store=store)
    for _ in range(2):
        body: Any = gate(wsgi_environ(), lambda *_: None)
        assert list(body) == [b"chunk"]
        body.close()
        once = kept(store)
        body.close()
        assert kept(store) == once


class Chunks:
    """Chunks whose number is not known, which note how often they are closed."""

    closed = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> bytes:
        return b"one"

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("read", [next, lambda body: next(iter(body))], ids=["itself", "its iterator"])
def test_chunks_are_closed_once_whoever_stops_reading_them(read: Any) -> None:
    """And not before the server does it, as their closing may be the application's work after the response."""
    given: list[Chunks] = []

    def app(_: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        given.append(Chunks())
        return given[-1]

    gate = LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock()))
    for _ in range(2):
        body: Any = gate(wsgi_environ(), lambda *_: None)
        assert read(body) == b"one"
        assert given[-1].closed == 0
        body.close()
        del body
        assert given[-1].closed == 1


class Held:
    """Something that a request leads to."""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_wsgi_request_leaves_no_circle_behind(use: Any, *, is_adaptive: bool, is_stream: bool) -> None:
    """What it leads to is gone with it, without the garbage collector, also where its headers are looked at."""

    def app(environ: Any, start_response: Any) -> Any:
        seen.append(is_plain(environ[EXCHANGE]))
        start_response("200 OK", [])
        use(environ)
        return (chunk for chunk in [b"chunk"]) if is_stream else [b"chunk"]

    seen: list[Any] = []
    rules = [*RULES, Rule("load", adaptive=True)] if is_adaptive else RULES
    gate, gone = LimitGateWSGI(app, rules=rules, store=MemoryStore(Clock()), trusted_proxies=[PEER]), []
    gc.disable()
    try:
        for _ in range(3):
            environ: Any = wsgi_environ(headers={"x-forwarded-for": "192.0.2.7"})
            environ["server.held"] = held = Held()
            body: Any = gate(environ, lambda *_: None)
            assert list(body) == [b"chunk"]
            getattr(body, "close", bool)()
            gone.append(ref(held))
            del environ, held, body
    finally:
        gc.enable()
    assert seen[1:] == [True] * 2
    assert [each() for each in gone[1:]] == [None, None]  # the first plan of a kind is carried out like any other


def test_an_admission_that_is_asked_for_when_the_request_is_over_has_no_request_left() -> None:
    """And is over."""
    kept_exchange: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        kept_exchange[:] = [environ[EXCHANGE]]
        start_response("200 OK", [])
        return [b""]

    gate = LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock()))
    for _ in range(2):
        gate(wsgi_environ(), lambda *_: None)
    admission = kept_exchange[0].open_admission()
    assert (admission.settlement.is_over, admission.is_sent, admission.has_begun) == (True, True, True)
    assert admission.request is None
    assert not admission.end()


def test_a_task_that_answers_when_its_request_was_cancelled_leaves_the_scope_as_it_is() -> None:
    """Middleware outside with a time limit still finds the request in its scope, which is counted once."""
    recorder, tasks = Recorder(), set[Any]()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        async def answer() -> None:
            await goes_on.wait()
            await send(ASGI_STEPS["start"])
            await send(ASGI_STEPS["end"])

        tasks.add(asyncio.ensure_future(answer()))
        began.set()
        await asyncio.shield(*tasks)

    async def run() -> None:
        scope, wire = http_scope(), Wire()
        gate = LimitGate(app, rules=RULES, store=MemoryStore(Clock()), observers=[recorder])
        request = asyncio.ensure_future(wire.call(gate, scope))
        await began.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        before = {**scope}
        goes_on.set()
        await asyncio.gather(*tasks)
        assert scope == before
        assert [message["type"] for message in wire.sent] == ["http.response.start", "http.response.body"]

    goes_on, began = asyncio.Event(), asyncio.Event()
    asyncio.run(run())
    assert recorder.new("requests") == {("admitted", "store"): 1}
