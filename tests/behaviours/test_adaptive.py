"""`adaptive` on a rule: who gets in, what a refusal is, and that every place is given back once, through both doors."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import (
    Adaptive,
    Caller,
    ConfigError,
    Decision,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RateLimited,
    Rule,
    Window,
    ausage,
    limit,
    load_rules,
    testing,
)
from limitgate.fastapi import RateLimit
from limitgate.gate.permits import ProxyGuard
from limitgate.http.request import WSGIRequest
from limitgate.overload.adaptive_limit import Permit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter, WaitingThread
from limitgate.overload.lag import CLOCKS_S
from tests.support.clock import Clock
from tests.support.doors import (
    PATIENCE,
    SITES,
    ASGISite,
    Reply,
    Site,
    Wire,
    WSGISite,
    asgi_reply,
    handshake,
    http_scope,
    wsgi_environ,
    wsgi_reply,
)
from tests.support.observed import Recorder

NOWHERE = "redis://127.0.0.1:1"
"""A store that fails whoever asks it."""
PROBLEM = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"


pytestmark = pytest.mark.usefixtures("punctual_loops")  # test_adaptive_loops.py tests late ones


def one_place(name: str = "all", **options: Any) -> Rule:
    return Rule(name, adaptive=Adaptive(min=1, max=1), **options)


def places_of(gated: Any, name: str = "all") -> ConcurrencyLimiter:
    """The places under the adaptive limit of a rule."""
    rules = gated.gate.rules.planner._every["default"]
    places = next(each.places for each in rules if each.rule.name == name)
    assert isinstance(places, ConcurrencyLimiter)
    return places


class Held:
    """An application that answers when it is told to, and keeps the decisions that it was handed."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.seen: list[Decision] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["limitgate"])
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


async def begun(app: Any, held: Held, path: str = "/", **more: Any) -> asyncio.Task[Reply]:
    """A request that is in the application."""
    before = len(held.seen)
    task = asyncio.create_task(asgi_reply(app, path, **more))
    async with asyncio.timeout(PATIENCE):
        while len(held.seen) == before:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
    return task


def check_refusal(reply: Reply) -> None:
    assert reply.status == 503
    assert 1 <= reply.wait <= 11
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.rate == {}
    assert {name: reply.json()[name] for name in ("type", "status")} == {"type": PROBLEM, "status": 503}


def test_whoever_finds_no_place_gets_503_and_no_store_is_asked() -> None:
    held = Held()
    app = LimitGate(held, rules=[one_place(), Rule("api", "5/second", on_error="closed")], store=NOWHERE, timeout=PATIENCE)

    async def main() -> None:
        places = places_of(app)
        assert app.gate is not None
        places.limit.begin(0.0, "other")
        check_refusal(await asgi_reply(app))
        assert app.gate.failures == 0
        assert places.limit.in_flight == 1

    asyncio.run(main())


def test_places_come_free_with_the_response() -> None:
    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=[one_place()])
        first = await begun(app, held)
        check_refusal(await asgi_reply(app))
        held.go.set()
        assert (await first).status == 200
        assert places_of(app).limit.in_flight == 0
        assert (await asgi_reply(app)).status == 200
        assert held.seen[0].windows == (Window("all", 1, 0, 0, 1, 0.0, 0.0),)

    asyncio.run(main())


def test_places_and_rates_of_a_gate_and_of_a_dependency_are_one_decision() -> None:
    """The tightest window is shown: first the places, then the rate of the dependency, which refuses."""
    app = FastAPI(dependencies=[Depends(RateLimit("3/minute", name="dependency"))])

    @app.get("/")
    async def hello(request: Request) -> dict[str, int]:
        return {window.rule: window.used for window in request.scope["limitgate"].windows}

    rules = [Rule("places", adaptive=Adaptive(min=3, max=3)), Rule("rate", "9/minute")]
    gated = LimitGate(app, rules=rules, store=MemoryStore(Clock()))
    replies = [asyncio.run(asgi_reply(gated)) for _ in range(4)]
    assert [(reply.status, reply.rate["x-ratelimit-limit"], reply.rate["x-ratelimit-remaining"]) for reply in replies] == [
        (200, "3", "2"),
        (200, "3", "1"),
        (200, "3", "0"),
        (429, "3", "0"),
    ]
    assert [reply.json() for reply in replies[:2]] == [{"rate": used, "dependency": used, "places": 1} for used in (1, 2)]
    assert (replies[3].json()["violated-policies"], replies[3].wait) == (["dependency"], 20)


@pytest.mark.parametrize("is_free", [True, False])
def test_the_places_of_a_gate_inside_join_the_rates_of_the_one_around(*, is_free: bool) -> None:
    """A refusal by the inner gate has the figures of its places; an admission those of the tightest window."""
    held = Held()
    held.go.set()
    inner = LimitGate(held, rules=[Rule("places", adaptive=Adaptive(min=3, max=3))])
    gated = LimitGate(inner, rules=[Rule("rate", "9/minute")], store=MemoryStore(Clock()))
    if not is_free:
        for _ in range(3):
            places_of(inner, "places").limit.begin(0.0, "other")
    reply = asyncio.run(asgi_reply(gated))
    if is_free:
        assert [(window.rule, window.used) for window in held.seen[0].windows] == [("rate", 1), ("places", 1)]
        assert (reply.status, reply.rate["x-ratelimit-limit"], reply.rate["x-ratelimit-remaining"]) == (200, "3", "2")
    else:
        assert reply.status == 503


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_the_decision_and_the_fields_are_those_of_the_tightest_window(door: type[Site]) -> None:
    """An adaptive limit is a window as those of requests in flight are."""
    for rates, expected in ((["5/second"], ("5", "4")), (["1000/second"], ("20", "19"))):
        with door(Rule("all", *rates, adaptive=True)) as site:
            reply = site.ask()
            assert (reply.rate["x-ratelimit-limit"], reply.rate["x-ratelimit-remaining"]) == expected
            decision = site.seen[-1]
            assert [(each.limit, each.period, each.remaining) for each in decision.windows][1] == (20, 0, 19)
            assert (decision.limit, decision.remaining) == (int(expected[0]), int(expected[1]))


@pytest.mark.parametrize("is_shadow", [False, True])
@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_the_reset_goes_by_the_clock_of_a_store_that_need_not_be_asked(door: type[Site], *, is_shadow: bool) -> None:
    """Of a store in memory, also for a request that only a shadow has no place for."""
    clock = Clock(1_700_000_000_250_000)
    with door(one_place(shadow=is_shadow), store=MemoryStore(clock)) as site:
        permit = places_of(site.app).limit.begin(0.0, "other") if is_shadow else None
        reply = site.ask()
        assert (reply.status, reply.rate["x-ratelimit-reset"]) == (200, "1700000001")
        assert (permit is not None, site.seen[0].shadow) == (is_shadow, is_shadow)


def test_a_refusal_by_a_rate_gives_the_place_back_and_is_429() -> None:
    with ASGISite(Rule("all", "1/hour", adaptive=True)) as site:
        assert site.statuses(3) == [200, 429, 429]
        assert places_of(site.app).limit.in_flight == 0


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_a_refusal_by_a_rate_has_the_rate_fields_of_that_rate(door: type[Site]) -> None:
    """Whether its own rule adapts, another one does, or a shadow."""
    rate = Rule("api", "1/hour")
    for rules in ([Rule("api", "1/hour", adaptive=True)], [rate, one_place(shadow=True)], [rate, one_place()]):
        with door(*rules) as site:
            assert site.ask().rate["x-ratelimit-limit"] == "1"
            refused = site.ask()
            assert (refused.status, refused.rate["x-ratelimit-limit"], refused.rate["x-ratelimit-remaining"]) == (429, "1", "0")
            assert set(refused.rate) == {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_draft_11_tells_of_rates_alone(door: type[Site]) -> None:
    """A list without members is not sent."""
    rules = [one_place(), Rule("api", "1/hour", path="/api", adaptive=True)]
    with door(*rules, headers="draft-11") as site:
        assert site.ask().rate == {}
        replies = [site.ask("/api") for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 429]
        assert [reply.rate["ratelimit-policy"] for reply in replies] == ['"api";q=1;w=3600'] * 2


def test_rules_of_files_and_decorators_adapt(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - {name: all, path: /ruled, adaptive: {min: 1, max: 1}}\n  - {name: every, adaptive: true}\n")
    rules = load_rules(file)
    assert [rule.adaptive for rule in rules.tiers["default"]] == [Adaptive(min=1, max=1), Adaptive()]

    async def main() -> None:
        go = asyncio.Event()

        async def ruled(request: Any) -> PlainTextResponse:
            await go.wait()
            return PlainTextResponse("done")

        decorated = limit(adaptive={"min": 1, "max": 1})(ruled)
        both = limit("2/hour", adaptive={"min": 1, "max": 1})(ruled)
        app = Starlette(routes=[Route("/ruled", ruled), Route("/decorated", decorated), Route("/both", both)])
        gated = LimitGate(app, rules=rules)
        for path in ("/ruled", "/decorated", "/both"):
            go.clear()
            tasks = [asyncio.create_task(asgi_reply(gated, path)) for _ in range(3)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
            assert done
            go.set()
            assert sorted([(await task).status for task in tasks]) == [200, 503, 503]
        assert [(await asgi_reply(gated, "/both")).status for _ in range(2)] == [200, 429]

    asyncio.run(main())


def test_a_websocket_is_closed_with_1013_and_leaves_its_place_when_accepted() -> None:
    in_flight = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        in_flight.append(places_of(gated).limit.in_flight)
        await receive()
        await send({"type": "websocket.accept"})
        in_flight.append(places_of(gated).limit.in_flight)
        await receive()

    gated = LimitGate(app, rules=[one_place()])

    async def main() -> None:
        assert (await handshake(gated)).status == 101
        assert in_flight == [1, 0]
        places_of(gated).limit.begin(0.0, "other")
        assert (await handshake(gated, denial=False)).status == 1013
        assert (await handshake(gated)).status == 503

    asyncio.run(main())


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
@pytest.mark.parametrize(
    "rules", [[Rule("real", "9/minute")], [Rule("real", "9/minute"), Rule("wide", adaptive=Adaptive(min=50))]]
)
def test_a_shadow_does_not_replace_the_numbers_of_others(
    door: type[Site], rules: list[Rule], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it has a place or not; that it has none is logged once."""
    caplog.set_level("INFO", "limitgate.refusals")
    with door(one_place("shadow", shadow=True), *rules, store=MemoryStore(Clock())) as site:
        for left in (8, 7, 6):
            shown = site.ask().rate
            assert (shown["x-ratelimit-limit"], shown["x-ratelimit-remaining"]) == ("9", str(left))
            assert (site.seen[-1].rule, site.seen[-1].shadow) == ("real", left < 8)
            if left == 8:
                places_of(site.app, "shadow").limit.begin(0.0, "other")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "limitgate.refusals"]
    assert line == "rule shadow begins to refuse requests beyond the capacity of this process (shadow: these requests pass)"


def test_a_shadow_and_what_is_exempt_always_pass() -> None:
    async def main() -> None:
        held = Held()
        held.go.set()
        rules = [one_place("shadow", shadow=True), one_place("real", path="/real"), Rule("ok", path="/real", exempt=True)]
        app = LimitGate(held, rules=rules)
        places_of(app, "shadow").limit.begin(0.0, "other")
        places_of(app, "real").limit.begin(0.0, "other")
        assert (await asgi_reply(app)).status == 200
        assert held.seen[-1].shadow
        assert (await asgi_reply(app, "/real")).status == 200
        assert held.seen[-1] is None

    asyncio.run(main())


def test_wsgi_gives_places_back() -> None:
    def app(environ: Any, start_response: Any) -> Any:
        assert places_of(gated).limit.in_flight == 1
        length = [("Content-Length", "4")] if environ["PATH_INFO"] == "/sized" else []
        start_response("200 OK", [("Content-Type", "text/plain"), *length])
        return (each for each in [b"do", b"ne"]) if environ["PATH_INFO"] != "/list" else [b"done"]

    gated = LimitGateWSGI(app, rules=[one_place()])
    for path in ("/list", "/sized", "/stream"):
        assert wsgi_reply(gated, path).status == 200
        assert places_of(gated).limit.in_flight == 0
    places_of(gated).limit.begin(0.0, "other")
    check_refusal(wsgi_reply(gated))
    environ = wsgi_environ()
    b"".join(gated(environ, lambda *_: bytes.join))
    assert environ["limitgate.outcome"] == "refused"
    assert environ["limitgate"].windows[0][:5] == ("all", 1, 0, 0, 1)
    assert environ["limitgate"].windows[0].retry_after == environ["limitgate"].retry_after >= 1
    assert not environ["limitgate"].allowed


def test_a_refusal_under_wsgi_is_whole() -> None:
    """HEAD has no body, a server finds nothing amiss, and whoever stands around may write into its fields."""
    gated = LimitGateWSGI(lambda *_: pytest.fail("let in"), rules=[one_place()])
    places_of(gated).limit.begin(0.0, "other")

    def around(environ: Any, start_response: Any) -> Any:
        def start(status: str, headers: Any, *more: Any) -> Any:
            headers.append(("X-Around", "1"))
            return start_response(status, headers, *more)

        return gated(environ, start)

    written = wsgi_reply(around)
    assert written.headers["x-around"] == "1"
    check_refusal(written)
    refused = wsgi_reply(gated)
    check_refusal(refused)
    assert "x-around" not in refused.headers
    head = wsgi_reply(gated, method="HEAD")
    assert (head.status, head.body) == (503, b"")
    assert head.headers["content-length"] == str(len(refused.body))


def test_refusals_are_logged_when_they_begin_and_cease(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "limitgate.refusals")
    with ASGISite(one_place()) as site:
        places_of(site.app).limit.begin(0.0, "other")
        assert site.statuses(3) == [503] * 3
    (line,) = [record.getMessage() for record in caplog.records if record.name == "limitgate.refusals"]
    assert line == "rule all begins to refuse requests beyond the capacity of this process"


def test_the_outcome_is_there_for_access_logs() -> None:
    """And whoever stands around may write into the fields of a refusal."""

    async def main() -> None:
        app = LimitGate(Held(), rules=[one_place()])
        places_of(app).limit.begin(0.0, "other")
        for method in ("GET", "HEAD"):
            scope, wire = http_scope("/", method), Wire()
            await wire.call(app, scope)
            assert scope["limitgate.outcome"] == "refused"
            wire.sent[0]["headers"].append((b"x-around", b"1"))
            assert (wire.sent[1]["body"] == b"") is (method == "HEAD")
        assert "x-around" not in (await asgi_reply(app)).headers

    asyncio.run(main())


RESPONSES: dict[str, tuple[list[tuple[bytes, bytes]], int, list[bytes], int, int]] = {
    # fields, status, parts of the body, samples, in flight after the first part
    "whole": ([], 200, [b"done"], 1, 0),
    "in parts of a known length": ([(b"content-length", b"4")], 200, [b"do", b"ne"], 1, 1),
    "all of a known length, and its end": ([(b"content-length", b"4")], 200, [b"done", b""], 1, 0),
    "a length as Django writes it": ([(b"Content-Length", b"4")], 200, [b"do", b"ne"], 1, 1),
    "no length": ([(b"content-length", b"four")], 200, [b"do", b"ne"], 0, 0),
    "a stream": ([], 200, [b"do", b"ne"], 0, 0),
    "events": ([(b"content-type", b"text/event-stream; charset=utf-8")], 200, [b"do", b"ne"], 0, 0),
    "events in capitals": ([(b"Content-Type", b"Text/Event-Stream")], 200, [b"do", b"ne"], 0, 0),
    "long": ([(b"content-length", b"70000")], 200, [b"x" * 65_537, b"x" * 4463], 0, 0),
    "not modified": ([], 304, [b""], 0, 0),
    "moved": ([], 302, [b""], 1, 0),
    "not found": ([], 404, [b""], 0, 0),
    "an error": ([], 500, [b""], 0, 0),
}


@pytest.mark.parametrize("case", RESPONSES, ids=list(RESPONSES))
def test_what_is_a_sample(case: str) -> None:
    """Streams and what takes long to send gives its place back at once, and teaches nothing."""
    fields, status, parts, samples, in_flight = RESPONSES[case]
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": fields})
        for place, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": place < len(parts) - 1})
            seen.append(places_of(gated).limit.in_flight)

    gated = LimitGate(app, rules=[one_place()])
    wire = Wire()
    asyncio.run(wire.call(gated, http_scope()))
    assert wire.sent[0]["status"] == status
    assert seen[0] == in_flight
    assert places_of(gated).limit.in_flight == 0
    assert len(places_of(gated).limit.base_s_by_class) == samples


@pytest.mark.parametrize(
    ("parts", "samples"), [([b"x" * 70_000], 1), ([b"x" * 60_000, b"x" * 10_000], 1), ([b"x" * 3500] * 20, 0)]
)
def test_what_is_a_sample_under_wsgi(parts: list[bytes], samples: int) -> None:
    """Where nobody says which part is the last one, the length does."""

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Length", "70000")])
        return iter(parts)

    gated = LimitGateWSGI(app, rules=[one_place()])
    chunks = iter(gated(wsgi_environ(), lambda *_: bytes.join))
    assert [next(chunks) for _ in parts] == parts
    assert places_of(gated).limit.in_flight == 0
    assert len(places_of(gated).limit.base_s_by_class) == samples


ODD = [
    {"status": "200", "headers": []},
    {"status": None, "headers": []},
    {"status": 200, "headers": [(b"content-length", b"9" * 5000)]},
    {"status": 200, "headers": [(b"content-length", "²".encode())]},
]
"""Starts of responses as no application should send them."""


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_response_is_handed_on_as_without_a_limit(odd: dict[str, Any]) -> None:
    """What to make of it is for the server to say. It is no sample."""
    messages = [{"type": "http.response.start", **odd}]
    messages += [{"type": "http.response.body", "body": b"done", "more_body": more} for more in (True, False)]

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    gated = LimitGate(app, rules=[one_place()], headers=())
    wire = Wire({"type": "http.request"})
    asyncio.run(wire.call(gated, http_scope()))
    assert wire.sent == messages
    assert (places_of(gated).limit.in_flight, places_of(gated).limit.base_s_by_class) == (0, {})


def test_an_odd_length_is_handed_on_under_wsgi() -> None:
    def app(_environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "9" * 5000)])
        return iter([b"do", b"ne"])

    gated = LimitGateWSGI(app, rules=[one_place()], headers=())
    assert wsgi_reply(gated).body == b"done"
    assert places_of(gated).limit.in_flight == 0


def test_a_head_is_no_sample() -> None:
    """Its time is not that of a GET, whose class it shares."""
    with ASGISite(one_place()) as site:
        for method, samples in (("HEAD", 0), ("GET", 1)):
            assert site.ask(method=method).status == 200
            assert places_of(site.app).limit.in_flight == 0
            assert len(places_of(site.app).limit.base_s_by_class) == samples


def test_a_head_is_no_sample_under_wsgi() -> None:
    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "4")])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [b"done"]

    gated = LimitGateWSGI(app, rules=[one_place()])
    for method, samples in (("HEAD", 0), ("GET", 1)):
        assert wsgi_reply(gated, method=method).status == 200
        assert places_of(gated).limit.in_flight == 0
        assert len(places_of(gated).limit.base_s_by_class) == samples


@pytest.mark.parametrize("status", [503, 504])
def test_overload_of_the_work_is_a_failure(status: int) -> None:
    with ASGISite(one_place()) as site:
        site.app.app = ASGISite.answering(status, [], b"", [])
        limit = places_of(site.app).limit
        outcomes = noted(limit)
        assert site.ask().status == status
        assert outcomes == ["failed"]


def noted(limit: Any) -> list[str]:
    """The outcomes by which requests end from now on."""
    outcomes: list[str] = []
    done = limit.done

    def noting(permit: Any, now: float, outcome: str = "ok") -> None:
        outcomes.append(outcome)
        done(permit, now, outcome)

    limit.done = noting
    return outcomes


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ValueError(), "untaught"), (TimeoutError(), "failed"), (ConnectionResetError(), "failed")],
    ids=["any", "timeout", "connection"],
)
def test_errors_of_the_application_free_the_place(error: Exception, outcome: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    def wsgi(environ: Any, start_response: Any) -> Any:
        raise error

    gated = LimitGate(app, rules=[one_place()])
    outcomes = noted(places_of(gated).limit)
    with pytest.raises(type(error)):
        asyncio.run(asgi_reply(gated))
    gated_wsgi = LimitGateWSGI(wsgi, rules=[one_place()])
    outcomes_wsgi = noted(places_of(gated_wsgi).limit)
    with pytest.raises(type(error)):
        wsgi_reply(gated_wsgi)
    assert outcomes == outcomes_wsgi == [outcome]


def test_a_client_that_leaves_has_failed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    async def main() -> None:
        gated = LimitGate(app, rules=[one_place()])
        outcomes = noted(places_of(gated).limit)
        await Wire({"type": "http.disconnect"}).call(gated, http_scope())
        assert outcomes == ["failed"]

    asyncio.run(main())


def test_a_request_that_is_cancelled_has_failed() -> None:
    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=[one_place()])
        outcomes = noted(places_of(app).limit)
        task = await begun(app, held)
        task.cancel()
        await asyncio.wait([task])
        assert outcomes == ["failed"]

    asyncio.run(main())


def test_a_body_that_nobody_closes_gives_the_place_back() -> None:
    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Length", "4")])
        return (each for each in [b"do", b"ne"])

    gated = LimitGateWSGI(app, rules=[one_place()])
    chunks = iter(gated(wsgi_environ(), lambda *_: bytes.join))
    assert next(chunks) == b"do"
    assert places_of(gated).limit.in_flight == 1
    del chunks
    gc.collect()
    assert places_of(gated).limit.in_flight == 0


@pytest.mark.parametrize("rates", [(), ("9/hour",)], ids=["alone", "beside rates"])
def test_the_end_of_a_body_gives_the_place_back(rates: tuple[str, ...]) -> None:
    """Hardly any test client closes it."""

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Length", "4")])
        return (each for each in [b"do", b"ne"])

    gated = LimitGateWSGI(app, rules=[Rule("all", *rates, adaptive=Adaptive(min=1, max=1))])
    chunks = gated(wsgi_environ(), lambda *_: bytes.join)
    assert b"".join(chunks) == b"done"
    assert places_of(gated).limit.in_flight == 0


def test_an_event_loop_that_is_gone_gives_places_back() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()  # what never comes

    gated = LimitGate(app, rules=[one_place()])
    loop, wire = asyncio.new_event_loop(), Wire()
    task = loop.create_task(gated(http_scope(), wire.receive, wire.send))
    while not wire.received:
        loop.run_until_complete(asyncio.sleep(0))
    assert places_of(gated).limit.in_flight == 1
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()
    assert places_of(gated).limit.in_flight == 0


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_a_proxy_says_how_long_a_request_has_waited(door: type[Site]) -> None:
    """Believed of trusted ones only; threads have no other lag. What makes no sense is passed over."""
    late, peer = {"X-Request-Start": f"t={time.time() - 5:.3f}"}, "10.0.0.1"
    with door(Rule("all", adaptive=True), trusted_proxies=["10.0.0.0/8"]) as site:
        assert site.ask(headers=late).status == 200
        assert site.ask(headers={"X-Request-Start": "soon"}, peer=peer).status == 200
        assert site.ask(peer=peer).status == 200
        check_refusal(site.ask(headers=late, peer=peer))
        assert places_of(site.app).limit.levels["normal"].lag == 1
        in_time = {"X-Request-Start": f"t={time.time():.3f}"}
        assert site.ask(headers=in_time, peer=peer).status == 200
        assert places_of(site.app).limit.in_flight == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)


def test_a_request_waits_for_its_place() -> None:
    """What else is decided about it is decided then."""

    async def main() -> None:
        held = Held()
        rules = [one_place(max_delay=60), Rule("api", "2/hour"), Rule("deny", path="/deny", deny=True)]
        app = LimitGate(held, rules=rules)
        limit = places_of(app).limit
        first = await begun(app, held)
        others = [asyncio.create_task(asgi_reply(app)) for _ in range(2)]
        await until(lambda: limit.waiting == 2)
        assert len(held.seen) == 1
        held.go.set()
        assert (await first).status == 200
        second, third = sorted([await other for other in others], key=lambda reply: reply.status)
        assert (second.status, third.status) == (200, 429)
        assert [window[:4] for window in held.seen[1].windows] == [("api", 2, 3600, 0), ("all", 1, 0, 0)]
        assert second.rate["x-ratelimit-remaining"] == "0"
        assert (limit.in_flight, limit.waiting) == (0, 0)

    asyncio.run(main())


def test_a_request_waits_for_its_place_and_for_its_limits() -> None:
    """For these only when it has the place, and the decision says for how long it has waited for that."""
    asked = []

    async def given(request: Any) -> str:
        asked.append(request.path)
        await asyncio.sleep(0)
        return "9/hour"

    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=[one_place(max_delay=60), Rule("api", given)], identify=lambda _: Caller("me"))
        first = await begun(app, held)
        other = asyncio.create_task(asgi_reply(app, "/other"))
        await until(lambda: places_of(app).limit.waiting == 1)
        assert asked == ["/"]
        held.go.set()
        assert (await first).status == (await other).status == 200
        assert [decision.delay > 0 for decision in held.seen] == [False, True]
        assert [window[:4] for window in held.seen[1].windows] == [("api", 9, 3600, 7), ("all", 1, 0, 0)]

    asyncio.run(main())
    assert asked == ["/", "/other"]


def test_whoever_waits_for_too_long_is_refused() -> None:
    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=[one_place(max_delay="5ms")])
        first = await begun(app, held)
        check_refusal(await asgi_reply(app))
        held.go.set()
        await first
        assert places_of(app).limit.in_flight == places_of(app).limit.waiting == 0

    asyncio.run(main())


def test_whoever_waits_for_a_second_place_in_vain_gives_the_first_one_back() -> None:
    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=[Rule("wide", adaptive=Adaptive(min=9, max=9)), one_place(max_delay="5ms")])
        first = await begun(app, held)
        check_refusal(await asgi_reply(app))
        assert (places_of(app, "wide").limit.in_flight, places_of(app).limit.in_flight) == (1, 1)
        held.go.set()
        await first
        assert places_of(app, "wide").limit.in_flight == 0

    asyncio.run(main())


def test_a_client_that_leaves_while_it_waits_gives_up_its_place_in_the_line() -> None:
    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=[one_place(max_delay=60)])
        limit = places_of(app).limit
        first = await begun(app, held)
        leaving = Wire({"type": "http.request"}, {"type": "http.disconnect"})
        await leaving.call(app, http_scope())
        assert leaving.sent == []
        cancelled = asyncio.create_task(asgi_reply(app))
        await until(lambda: limit.waiting == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert (limit.in_flight, limit.waiting) == (1, 0)
        held.go.set()
        assert (await first).status == 200
        assert len(held.seen) == 1

    asyncio.run(main())


@pytest.mark.parametrize("rules", [(), (Rule("api", "9/hour"),)], ids=["places alone", "a limit"])
def test_threads_wait_for_their_places(rules: Sequence[Rule]) -> None:
    go, began, seen = threading.Event(), threading.Event(), []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        seen.append(environ["limitgate"])
        began.set()
        assert go.wait(PATIENCE)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]

    gated = LimitGateWSGI(app, rules=[one_place(max_delay=60), *rules])
    limit = places_of(gated).limit
    with ThreadPoolExecutor() as threads:
        first = threads.submit(wsgi_reply, gated)
        assert began.wait(PATIENCE)
        others = [threads.submit(wsgi_reply, gated) for _ in range(3)]
        while limit.waiting < 3:
            time.sleep(0.001)
        go.set()
        assert [each.result().status for each in (first, *others)] == [200] * 4
    assert (limit.in_flight, limit.waiting) == (0, 0)
    assert [decision.delay > 0 for decision in seen] == [False, True, True, True]


def test_a_request_that_waits_for_its_turn_holds_no_place() -> None:
    """It takes one when its turn comes; if there is none then, it gets its charge back."""

    async def main() -> None:
        held = Held()
        held.go.set()
        store = MemoryStore(Clock())
        rules = [one_place(), Rule("turns", "1/minute burst 1", path="/turn", key=["global"], max_delay=60)]
        app = LimitGate(held, rules=rules, store=store)
        limit = places_of(app).limit
        assert (await asgi_reply(app, "/turn")).status == 200
        waiting = asyncio.create_task(asgi_reply(app, "/turn"))
        await until(lambda: len(app.gate.turns.queues) == 1)  # type: ignore[union-attr]
        assert limit.in_flight == 0
        assert (await asgi_reply(app)).status == 200
        waiting.cancel()
        await asyncio.wait([waiting])
        assert limit.in_flight == 0

    asyncio.run(main())


def lose_next(places: ConcurrencyLimiter) -> list[Permit]:
    """Have somebody else take the place that a request gives back next. Returns who has."""
    end, others = places.end, []

    def ended(permit: Permit, outcome: Any = "untaught") -> None:
        end(permit, outcome)
        if not others:
            others.append(places.limit.begin(0.0, "other"))

    places.end = ended  # type: ignore[method-assign]
    return others


TURNS = [Rule("hourly", "2/hour"), Rule("turns", "20/second burst 1", key=["global"], max_delay=60)]
"""The second request waits for its turn for 50 ms, if the clock of the store stands."""


def test_who_is_cancelled_between_turn_and_place_has_its_charges_back() -> None:
    async def main() -> None:
        held = Held()
        held.go.set()
        app = LimitGate(held, rules=[one_place(max_delay=60), *TURNS], store=MemoryStore(Clock()))
        places = places_of(app)
        assert (await asgi_reply(app)).status == 200
        others = lose_next(places)
        task = asyncio.create_task(asgi_reply(app))
        await until(lambda: places.limit.waiting == 1)
        task.cancel()
        await asyncio.wait([task])
        assert (places.limit.in_flight, places.limit.waiting) == (1, 0)
        places.end(others[0])
        assert [(await asgi_reply(app)).status for _ in range(2)] == [200, 429]

    asyncio.run(main())


def test_a_thread_that_is_interrupted_between_turn_and_place_has_its_charges_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: WaitingThread, seconds: float) -> None:
        raise KeyboardInterrupt(seconds)

    with WSGISite(one_place(max_delay=60), *TURNS, store=MemoryStore(Clock())) as site, monkeypatch.context() as patched:
        places = places_of(site.app)
        assert site.ask().status == 200
        others = lose_next(places)
        patched.setattr(WaitingThread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            site.ask()
        assert (places.limit.in_flight, places.limit.waiting) == (1, 0)
        places.end(others[0])
        assert site.statuses(2) == [200, 429]


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_who_finds_no_place_after_a_turn_is_logged_and_counted_once(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """By a shadow, too, that had none before."""
    caplog.set_level("INFO", "limitgate.refusals")
    recorder = Recorder()
    rules = [one_place(), one_place("shadow", shadow=True), *TURNS]
    with door(*rules, observers=[recorder], store=MemoryStore(Clock())) as site:
        assert site.ask().status == 200
        places_of(site.app, "shadow").limit.begin(0.0, "other")
        lose_next(places_of(site.app))
        check_refusal(site.ask())
    told = [record.getMessage() for record in caplog.records if record.name == "limitgate.refusals"]
    (line,) = [line for line in told if "shadow" not in line]
    assert line == "rule all begins to refuse requests beyond the capacity of this process"
    decisions = recorder.of("rule.decisions")
    assert decisions["all", "default", "refused"] == decisions["shadow", "default", "shadow_refused"] == 1


@pytest.mark.parametrize("is_free", [True, False], ids=["free", "taken"])
@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_a_shadow_counts_a_request_once_whatever_it_finds_after_its_turn(door: type[Site], *, is_free: bool) -> None:
    recorder = Recorder()
    rules = [Rule("real", adaptive=True), one_place("shadow", shadow=True), *TURNS]
    with door(*rules, observers=[recorder], store=MemoryStore(Clock())) as site:
        assert site.ask().status == 200
        places, shadow = places_of(site.app, "real"), places_of(site.app, "shadow")
        other, end = shadow.limit.begin(0.0, "other"), places.end

        def ended(permit: Permit, outcome: Any = "untaught") -> None:
            end(permit, outcome)
            if is_free and isinstance(other, Permit):
                shadow.end(other)

        places.end = ended  # type: ignore[method-assign]
        assert site.ask().status == 200
    decisions = recorder.new("rule.decisions")
    assert decisions["shadow", "default", "admitted"] == decisions["shadow", "default", "shadow_refused"] == 1


def test_a_turn_without_a_place_is_given_back() -> None:
    """The line of the refused request is the next one's."""

    async def main() -> None:
        held = Held()
        held.go.set()
        rules = [one_place(), Rule("turns", "1/second", path="/turn", key=["global"], max_delay=60)]
        app = LimitGate(held, rules=rules)
        assert (await asgi_reply(app, "/turn")).status == 200
        waiting = asyncio.create_task(asgi_reply(app, "/turn"))
        await until(lambda: len(app.gate.turns.queues) == 1)  # type: ignore[union-attr]
        permit = places_of(app).limit.begin(0.0, "other")
        check_refusal(await waiting)
        assert isinstance(permit, Permit)
        places_of(app).limit.done(permit, 0.0)
        assert places_of(app).limit.in_flight == 0

    asyncio.run(main())


def test_usage_shows_the_limit_in_force() -> None:
    found = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(await ausage(scope))
        found.append(await ausage(scope, "all"))
        found.append(await ausage(scope, "api"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gated = LimitGate(app, rules=[one_place(), Rule("api", "5/hour")], store=MemoryStore(Clock()))
    asyncio.run(asgi_reply(gated))
    in_force = Window("all", 1, 0, 0, 1, 0.0, 0.0)
    assert [[window[:4] for window in windows] for windows in found] == [
        [("api", 5, 3600, 4), in_force[:4]],
        [in_force[:4]],
        [("api", 5, 3600, 4)],
    ]


def test_there_is_no_bucket_of_a_client() -> None:
    limiter = Limiter("memory://")
    with pytest.raises(ConfigError, match="rule 'all' is adaptive: it counts requests in flight in each process, not clients"):
        limiter.bucket(one_place(), ip="192.0.2.1")
    assert limiter.bucket(Rule("api", "5/hour", adaptive=True), ip="192.0.2.1").peek().limit == 5


def test_what_was_learned_is_forgotten_between_tests() -> None:
    app = LimitGate(Held(), rules=[one_place()])
    places_of(app).limit.begin(0.0, "other")
    assert asyncio.run(asgi_reply(app)).status == 503
    testing.reset()
    assert places_of(app).limit.in_flight == 0


def test_nothing_is_refused_where_tests_want_it_so() -> None:
    for door in SITES:
        with door(one_place()) as site, testing.off():
            places_of(site.app).limit.begin(0.0, "other")
            assert site.ask().status == 200


def test_a_reload_keeps_what_was_learned(tmp_path: Path) -> None:
    """Of a rule whose name stays; requests under way end where they have begun."""
    file = tmp_path / "rules.yaml"
    file.write_text("rules: [{name: all, adaptive: {min: 2, max: 2}}, {name: other, path: /other, adaptive: true}]")

    async def main() -> None:
        held = Held()
        app = LimitGate(held, rules=str(file), reload=3600)
        assert app.gate is not None
        assert app.gate.poller is not None
        before = places_of(app)
        first = await begun(app, held)
        file.write_text("rules: [{name: all, adaptive: {min: 1, max: 1}, methods: [GET]}]")
        for _ in range(2):  # the second look finds that it changes no more
            await asyncio.to_thread(app.gate.poller.poll)
        assert places_of(app) is before
        assert (before.limit.limit, before.limit.in_flight) == (1, 1)
        check_refusal(await asgi_reply(app))
        held.go.set()
        assert (await first).status == 200
        assert before.limit.in_flight == 0
        file.write_text("rules: [{name: all, adaptive: {min: 0}}]")
        for _ in range(2):  # the second look finds that it changes no more
            await asyncio.to_thread(app.gate.poller.poll)
        assert (await asgi_reply(app)).status == 200

    asyncio.run(main())


def test_gates_inside_of_gates_have_limits_of_their_own_and_ask_the_loop_once() -> None:
    async def main() -> None:
        held = Held()
        inner = LimitGate(held, rules=[one_place("inner")])
        outer = LimitGate(inner, rules=[Rule("outer", adaptive=True)])
        first = await begun(outer, held)
        assert [window.rule for window in held.seen[0].windows] == ["outer", "inner"]
        assert (await asgi_reply(outer)).status == 503
        held.go.set()
        assert (await first).status == 200
        assert places_of(inner, "inner").limit.in_flight == places_of(outer, "outer").limit.in_flight == 0

    asyncio.run(main())


def test_identify_and_priorities() -> None:
    """Who has a high priority finds room where nobody else does; async callers, too."""

    async def identify(request: Any) -> Caller | None:
        name = request.headers.get("x-name")
        return None if name is None else Caller(name, priority=name)

    async def main() -> None:
        held = Held()
        rule = Rule("all", adaptive=Adaptive(min=4, max=4), reserve="25%")
        app = LimitGate(held, rules=[rule], identify=identify)
        for _ in range(3):
            places_of(app).limit.begin(0.0, "other", "high")
        check_refusal(await asgi_reply(app))
        check_refusal(await asgi_reply(app, headers={"X-Name": "low"}))
        first = await begun(app, held, headers={"X-Name": "high"})
        held.go.set()
        assert (await first).status == 200

    asyncio.run(main())


async def answer_somehow(chance: random.Random, receive: Any, send: Any) -> None:
    """Answer as an application may, or not at all."""
    for _ in range(chance.randrange(3)):
        await asyncio.sleep(0)
    kind = chance.choice(["whole", "parts", "stream", "nothing", "error", "silent"])
    if kind == "error":
        raise chance.choice([ValueError(), TimeoutError()])
    if kind == "silent":
        await receive()
    if kind in ("silent", "nothing"):
        return
    fields = [(b"content-length", b"2")] if kind == "parts" else []
    await send({"type": "http.response.start", "status": chance.choice([200, 404, 503]), "headers": fields})
    if kind != "whole":
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0)
    if kind != "stream":
        await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_place_comes_back_once(seed: int) -> None:
    """Answers, streams, errors, cancellations, clients that leave, waits, further refusals; on two limits at a time."""
    chance = random.Random(seed)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        most.append(max(places_of(gated, name).limit.in_flight for name in ("all", "some")))
        await answer_somehow(chance, receive, send)

    async def ask() -> None:
        messages = [{"type": "http.disconnect"}] if chance.random() < 0.3 else []
        with suppress(ValueError, TimeoutError):
            await gated(http_scope(chance.choice(["/", "/some"])), Wire(*messages).receive, Wire().send)

    async def main() -> None:
        tasks = [asyncio.create_task(ask()) for _ in range(60)]
        for task in tasks:
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                task.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        for task in tasks:  # what is silent until now stays so
            task.cancel()
        await asyncio.wait(tasks)

    most: list[int] = []
    rules = [
        Rule("all", adaptive=Adaptive(min=5, max=5), max_delay=chance.choice([None, 60])),
        Rule("some", "40/hour", path="/some", adaptive=Adaptive(min=3, max=3)),
        Rule("shadow", adaptive=Adaptive(min=1, max=1), shadow=True),
    ]
    gated = LimitGate(app, rules=rules)
    asyncio.run(main())
    assert max(most) <= 5
    for name in ("all", "some", "shadow"):
        limit = places_of(gated, name).limit
        assert (limit.in_flight, limit.waiting) == (0, 0)


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_a_gate_that_is_a_shadow_holds_nobody_up(door: type[Site]) -> None:
    """Under other rules neither."""
    with door(one_place(max_delay=60), shadow=True) as site:
        places_of(site.app).limit.begin(0.0, "other")
        assert site.ask().status == 200
        site.app.gate.enforce(site.app.gate.rules)
        assert site.ask().status == 200
        assert [decision.shadow for decision in site.seen] == [True, True]


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_a_rule_that_becomes_a_shadow_holds_nobody_up(door: type[Site], tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("rules: [{name: all, adaptive: {min: 1, max: 1}, max_delay: 60s}]")
    with door(rules=str(file), reload=3600) as site:
        file.write_text("rules: [{name: all, adaptive: {min: 1, max: 1}, shadow: true}]")
        for _ in range(2):  # the second look finds that it changes no more
            site.app.gate.poller.poll()
        places_of(site.app).limit.begin(0.0, "other")
        assert site.ask().status == 200
        assert site.seen[0].shadow


class Silent:
    """A store that never answers."""

    async def aspend(self, plan: Any, timeout: float) -> Any:
        return await asyncio.get_running_loop().create_future()

    async def aclose(self) -> None:
        return


def test_a_request_that_is_cancelled_while_it_waits_for_the_store_gives_its_place_back() -> None:
    """As a failure, and at once: whoever keeps the task keeps everything else of the request."""

    async def main() -> None:
        app = LimitGate(Held(), rules=[one_place(), Rule("api", "5/hour")], store=Silent())
        places, outcomes = places_of(app), []
        end = places.end

        def noted(permit: Permit, outcome: Any = None) -> None:
            outcomes.append(outcome)
            end(permit, outcome)

        places.end = noted  # type: ignore[method-assign]
        task = asyncio.create_task(asgi_reply(app))
        await until(lambda: places.limit.in_flight == 1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (places.limit.in_flight, outcomes) == (0, ["failed"])

    asyncio.run(main())


def test_an_event_loop_that_is_gone_while_the_store_is_asked_gives_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for a lock, as the garbage collector may come while somebody has it."""
    app = LimitGate(Held(), rules=[one_place(), Rule("api", "5/hour")], store=Silent())
    places, locked = places_of(app), []
    monkeypatch.setattr(places, "end", lambda *ended: locked.append(ended))
    loop = asyncio.new_event_loop()
    task = loop.create_task(asgi_reply(app))
    while not places.limit.in_flight:
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()
    assert places.limit.in_flight == 0
    assert locked == []


@pytest.mark.parametrize("door", SITES, ids=[site.door for site in SITES])
def test_an_error_of_a_rule_gives_places_back_whoever_keeps_it(door: type[Site]) -> None:
    def cost(request: Any) -> int:
        raise ZeroDivisionError(request.path)

    with door(one_place(), Rule("api", "5/second", cost=cost)) as site:
        with pytest.raises(ZeroDivisionError) as kept:
            site.ask()
        assert places_of(site.app).limit.in_flight == 0
        assert kept.traceback


def test_a_signal_that_ends_the_wait_of_a_thread_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: WaitingThread, seconds: float) -> None:
        raise KeyboardInterrupt(seconds)

    monkeypatch.setattr(WaitingThread, "wait", interrupted)
    with WSGISite(one_place(max_delay=60)) as site:
        limit = places_of(site.app).limit
        limit.begin(0.0, "other")
        with pytest.raises(KeyboardInterrupt) as kept:
            site.ask()
        assert (limit.in_flight, limit.waiting) == (1, 0)
        assert kept.traceback


@pytest.mark.parametrize("has_place", [True, False])
def test_a_wait_that_another_thread_ends_before_it_has_begun(monkeypatch: pytest.MonkeyPatch, *, has_place: bool) -> None:
    """By a place that comes free, or as somebody gives way; for rules and for a limiter's work."""
    begin = ConcurrencyLimiter.begin

    def begin_late(self: ConcurrencyLimiter, *given: Any) -> Any:
        permit = begin(self, *given)
        if permit is not None and permit.waits:
            if has_place:
                self.end(permits[id(self)])
            else:
                self.limit.reconfigure(Adaptive(min=1, max=1), max_delay=0)  # nobody may wait any more
                self.look(permit)
        elif permit is not None:
            permits[id(self)] = permit
        return permit

    monkeypatch.setattr(ConcurrencyLimiter, "begin", begin_late)
    permits: dict[int, Permit] = {}
    with ASGISite(one_place(max_delay=60)) as site:
        places = places_of(site.app)
        places.begin("other", "normal", None, WaitingThread)
        assert site.ask().status == (200 if has_place else 503)
        assert places.limit.in_flight == (0 if has_place else 1)
    work = Limiter("memory://").adaptive("db", min=1, max=1, max_delay=60)
    work._work.begin("other", "normal", None, WaitingThread)
    with nullcontext() if has_place else pytest.raises(RateLimited), work:
        pass
    assert work.in_flight == (0 if has_place else 1)


def test_the_lag_of_a_proxy_is_that_of_the_last_request() -> None:
    now = [1_700_000_000.0]
    guard = ProxyGuard(lambda: now[0])
    assert guard.lag_s is None
    request = WSGIRequest(wsgi_environ(headers={"X-Request-Start": f"t={now[0] - 5:.3f}"}))
    of_request = guard.of(request, None)
    assert of_request is not None
    assert of_request.refuses(100.0)
    assert guard.lag_s == pytest.approx(5 - CLOCKS_S)
    now[0] += 2
    assert guard.lag_s is None


@pytest.mark.parametrize("inner", [one_place(), Rule("api", "5/second", on_error="closed")], ids=["adaptive", "closed"])
def test_a_refusal_by_a_gate_inside_tells_nothing_of_the_work(inner: Rule) -> None:
    """It is a 503 as that of a work that is overloaded, which would cut the limit of the gate around."""
    asgi = LimitGate(Held(), rules=[inner], store=NOWHERE, timeout=PATIENCE)
    wsgi = LimitGateWSGI(lambda *_: pytest.fail("called"), rules=[inner], store=NOWHERE, timeout=PATIENCE)
    around, around_wsgi = LimitGate(asgi, rules=[one_place("around")]), LimitGateWSGI(wsgi, rules=[one_place("around")])
    for gated in (asgi, wsgi):
        if inner.adaptive:
            places_of(gated).limit.begin(0.0, "other")
    outcomes, outcomes_wsgi = (noted(places_of(each, "around").limit) for each in (around, around_wsgi))
    assert asyncio.run(asgi_reply(around)).status == wsgi_reply(around_wsgi).status == 503
    assert outcomes == outcomes_wsgi == ["untaught"]


def test_each_proxy_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come in turns from two proxies, of which one is 30 ms behind, have not waited. A few proxies are known."""

    def refuses(now: float, behind_s: float, peer: str) -> bool:
        headers = {"X-Request-Start": f"t={wall[0] - behind_s:.3f}"}
        of_request = guard.of(WSGIRequest(wsgi_environ(headers=headers, peer=peer)), None)
        return of_request is not None and of_request.refuses(now)

    wall = [1_700_000_000.0]
    guard = ProxyGuard(lambda: wall[0])
    refused = 0
    for n in range(1000):
        wall[0] += 0.002
        refused += refuses(n * 0.002, *((0.001, "10.0.0.1"), (0.031, "10.0.0.2"))[n // 150 % 2])
    assert refused == 0
    assert refuses(2.0, 5.0, "10.0.0.1")
    monkeypatch.setattr("limitgate.gate.permits.MOST_PROXIES", 2)
    for n in range(3, 9):
        refuses(2.0, 0.001, f"10.0.0.{n}")
    assert len(guard._queues) == 2


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_a_client_that_is_slow_to_send_its_body_has_no_place_meanwhile(*, has_room: bool) -> None:
    """If somebody needs it. The wait teaches nothing, the work that comes then does. It is counted, beyond the limit, too."""
    rule = Rule("all", adaptive=Adaptive(min=1, max=1, delay=0.000_001))
    at_work = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        at_work.append(places_of(gated).limit.in_flight)
        listening = asyncio.create_task(receive())  # as for a client that leaves
        for _ in range(3):
            await asyncio.sleep(0.001)
        at_work.append(places_of(gated).limit.in_flight)
        listening.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        limit = places_of(gated).limit
        outcomes, parts, wire = noted(limit), asyncio.Queue[Any](), Wire()
        parts.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
        task = asyncio.create_task(gated(http_scope(method="POST"), parts.get, wire.send))
        await until(lambda: bool(limit._idle))
        await asyncio.sleep(0.001)
        assert limit.in_flight == 1
        other = limit.begin(time.monotonic(), "other")
        assert (outcomes, limit.in_flight) == (["untaught"], 1)
        if has_room:
            limit.done(other, time.monotonic(), "failed")
        parts.put_nowait({"type": "http.request", "body": b"x"})
        async with asyncio.timeout(PATIENCE):
            await task
        assert wire.sent[0]["status"] == 200
        assert at_work == ([1, 1] if has_room else [2, 2])
        assert outcomes == (["untaught", "failed", "ok"] if has_room else ["untaught", "ok"])
        assert limit.in_flight == (0 if has_room else 1)

    gated = LimitGate(app, rules=[rule])
    asyncio.run(main())


def test_an_answer_to_half_a_body_leaves_no_place_behind() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        limit, rest = places_of(gated).limit, asyncio.create_task(receive())
        await until(lambda: bool(limit._idle))
        await asyncio.sleep(0.001)
        limit.done(limit.begin(time.monotonic(), "other"), time.monotonic())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more.put_nowait({"type": "http.request", "body": b"x"})
        await rest
        in_flight.append(places_of(gated).limit.in_flight)
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            await gated(http_scope(method="POST"), more.get, Wire().send)
        assert in_flight == [0]

    in_flight: list[int] = []
    more: asyncio.Queue[Any] = asyncio.Queue()
    gated = LimitGate(app, rules=[Rule("all", adaptive=Adaptive(min=1, max=1, delay=0.000_001))])
    asyncio.run(main())


def test_decorators_of_one_name_agree_on_their_adaptive_limit() -> None:
    def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("done")

    routes = [
        Route(path, limit(name="db", adaptive=Adaptive(min=1, max=most), **more)(answer))
        for path, most, more in (("/", 9, {}), ("/same", 9, {}), ("/most", 8, {}), ("/delay", 9, {"max_delay": 1}))
    ]
    gated = LimitGate(Starlette(routes=routes), rules=[])
    assert [asyncio.run(asgi_reply(gated, path)).status for path in ("/", "/same")] == [200, 200]
    for path in ("/most", "/delay"):
        with pytest.raises(ConfigError, match="limit 'db' already has a different adaptive"):
            asyncio.run(asgi_reply(gated, path))


def test_whoever_waits_gives_way_where_everything_is_forgotten() -> None:
    """In threads as on event loops: nobody would call them."""

    async def main() -> None:
        gated = LimitGate(Held(), rules=[one_place(max_delay=60)])
        in_thread = LimitGateWSGI(lambda *_: pytest.fail("called"), rules=[one_place(max_delay=60)])
        for each in (gated, in_thread):
            places_of(each).limit.begin(0.0, "other")
        asked = [asyncio.create_task(asgi_reply(gated)), asyncio.create_task(asyncio.to_thread(wsgi_reply, in_thread))]
        await until(lambda: places_of(gated).limit.waiting == places_of(in_thread).limit.waiting == 1)
        testing.reset()
        async with asyncio.timeout(PATIENCE):
            assert [(await each).status for each in asked] == [503, 503]

    asyncio.run(main())
