"""What becomes of a request is counted once, with where it was decided, and told to access logs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import fastapi
import pytest

from limitgate import AsyncLimiter, Caller, Limit, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule, StoreError, limit
from limitgate.fastapi import RateLimit
from limitgate.observing.counts import LIMITER
from limitgate.rules.revision import revision
from tests.support.clock import Clock
from tests.support.doors import (
    SITES,
    Site,
    asgi_reply,
    handshake,
    http_scope,
    run_wsgi,
    until,
    websocket_scope,
    wsgi_environ,
    wsgi_reply,
)
from tests.support.observed import Recorder
from tests.support.redis_server import RedisServer

NOWHERE = "redis://127.0.0.1:1"
"""A store at which nobody answers."""
API = ("api", "default")


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def door(request: pytest.FixtureRequest) -> type[Site]:
    return request.param


def hello(_: Any, start_response: Any) -> list[bytes]:
    """A WSGI application."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def outcomes(door: type[Site], *asked: str, **options: Any) -> tuple[Recorder, list[int]]:
    """What is told of requests for these paths, and their statuses."""
    recorder = Recorder()
    with door(observers=[recorder], **options) as site:
        statuses = [site.ask(path).status for path in asked]
        recorder.of("requests")
    return recorder, statuses


def test_admitted_and_refused(door: type[Site]) -> None:
    """A rule's figures are those of the requests that it applies to."""
    rules = [Rule("api", "2/minute", path="/api")]
    recorder, statuses = outcomes(door, "/api", "/api", "/api", "/other", rules=rules, store=MemoryStore(Clock()))
    assert statuses == [200, 200, 429, 200]
    assert recorder.new("requests") == {("admitted", "store"): 2, ("refused", "store"): 1, ("unlimited", "nobody"): 1}
    assert recorder.new("rule.decisions") == {(*API, "admitted"): 2, (*API, "refused"): 1}
    assert recorder.of("rule.utilization") == {API: [0, 0, 1, 0, 0, 2, 0, 0, 0]}


def test_every_series_is_there_from_the_start(door: type[Site]) -> None:
    """With 0, or nobody sees the first refusal as a rate."""
    rules = [Rule("api", "2/minute", "9/day"), Rule("api", "3/second", concurrency=5, tier="vip"), Rule("health", exempt=True)]
    recorder, _ = outcomes(door, rules=rules, identify=lambda _: None)
    assert recorder.new("rule.decisions") == {}
    assert {labels[:2] for labels in recorder.of("rule.decisions")} == {API, ("api", "vip")}
    assert recorder.of("rule.utilization") == {API: [0] * 9, ("api", "vip"): [0] * 9}
    assert recorder.of("rule.limit") == {
        (*API, "minute"): 2,
        (*API, "day"): 9,
        ("api", "vip", "second"): 3,
        ("api", "vip", "at_once"): 5,
    }
    assert recorder.of("rule.in_flight") == {("api", "vip"): 0}
    assert set(recorder.of("requests")) >= {("refused", "cache"), ("admitted", "lease"), ("failed_open", "nobody")}
    assert recorder.of("config.loads") == {("ok",): 1, ("rejected",): 0}
    assert recorder.of("config.last_load_success") == {(): 1}
    assert recorder.of("store.up") == {("memory",): 1}
    assert recorder.of("store.outages") == {("memory",): 0}


def test_only_rules_that_were_charged_or_had_no_room_have_decided(door: type[Site]) -> None:
    """A rule with room is not charged for a request that another one refuses, and so has decided nothing."""
    rules = [Rule("tight", "1/minute"), Rule("wide", "9/minute"), Rule("shadow", "1/minute", shadow=True)]
    recorder, _ = outcomes(door, "/", "/", rules=rules, store=MemoryStore(Clock()))
    assert recorder.new("rule.decisions") == {
        ("tight", "default", "admitted"): 1,
        ("wide", "default", "admitted"): 1,
        ("shadow", "default", "admitted"): 1,
        ("tight", "default", "refused"): 1,
        ("shadow", "default", "shadow_refused"): 1,
    }


def test_shadows(door: type[Site]) -> None:
    """What only a shadow would have refused passes, and is told as that."""
    recorder, statuses = outcomes(door, "/", "/", rules=[Rule("api", "1/minute", shadow=True)])
    assert statuses == [200, 200]
    assert recorder.new("requests") == {("admitted", "store"): 1, ("shadow_refused", "store"): 1}
    assert recorder.new("rule.decisions") == {(*API, "admitted"): 1, (*API, "shadow_refused"): 1}


def test_denied(door: type[Site]) -> None:
    """A rule that denies has refused, and no store was asked."""
    recorder, statuses = outcomes(door, "/", rules=[Rule("api", deny=True)])
    assert statuses == [403]
    assert recorder.new("requests") == {("refused", "nobody"): 1}
    assert recorder.new("rule.decisions") == {(*API, "refused"): 1}


def test_delayed(door: type[Site]) -> None:
    """A request that waited for its turn is told apart; more than the bucket holds is owed meanwhile."""
    rules = [Rule("api", "100/second burst 1", max_delay=5)]
    recorder, statuses = outcomes(door, "/", "/", rules=rules, store=MemoryStore(Clock()))
    assert statuses == [200, 200]
    assert recorder.new("requests") == {("admitted", "store"): 1, ("delayed", "store"): 1}
    assert recorder.of("rule.waiting") == {API: 0}
    assert recorder.of("rule.utilization")[API][-2:] == [1, 0]


@pytest.mark.parametrize(
    ("on_error", "status", "told"),
    [
        ("open", 200, ("failed_open", "nobody")),
        ("closed", 503, ("failed_closed", "nobody")),
        ("local", 200, ("admitted", "local")),
    ],
)
def test_the_store_fails(door: type[Site], on_error: str, status: int, told: tuple[str, str]) -> None:
    """What ``on_error`` has decided is told as that; calls that fail are told with how."""
    rules = [Rule("api", "2/minute")]
    recorder, statuses = outcomes(door, "/", rules=rules, store=NOWHERE, on_error=on_error, timeout=5.0)
    assert statuses == [status]
    assert recorder.new("requests") == {told: 1}
    assert recorder.new("rule.decisions") == ({(*API, "admitted"): 1} if on_error == "local" else {})
    durations = recorder.of("store.operation.duration")
    assert sum(durations["redis", "connection"]) >= 1
    assert sum(durations["redis", "ok"]) == 0


def test_refused_by_this_process_alone(door: type[Site]) -> None:
    """Under ``local``, too, refusals are the rule's."""
    recorder, _ = outcomes(door, "/", "/", rules=[Rule("api", "1/minute")], store=NOWHERE, on_error="local", timeout=5.0)
    assert recorder.new("requests") == {("admitted", "local"): 1, ("refused", "local"): 1}
    assert recorder.new("rule.decisions") == {(*API, "admitted"): 1, (*API, "refused"): 1}


def test_on_redis(door: type[Site], redis_server: RedisServer) -> None:
    """A refusal that holds and a request out of a lease are told apart, and need no call."""
    rules = [Rule("api", "2/minute", path="/api"), Rule("leased", "99/minute", path="/leased", lease=20)]
    asked = ["/api"] * 4 + ["/leased"] * 3
    recorder, _ = outcomes(door, *asked, rules=rules, store=redis_server.url, timeout=5.0, key_prefix=f"observed-{door.door}")
    scheme = redis_server.url.partition(":")[0]
    told = recorder.new("requests")
    assert told == {
        ("admitted", "store"): 3,
        ("admitted", "lease"): 2,
        ("refused", "store"): 1,
        ("refused", "cache"): 1,
    }
    assert sum(recorder.of("store.operation.duration")[scheme, "ok"]) >= 4
    assert recorder.of("store.up") == {(scheme,): 1}


def test_the_short_way_counts_as_the_long_one(door: type[Site]) -> None:
    """Whoever needs all of the engine has the same figures: an ``identify`` makes requests go the long way."""

    def told(**options: Any) -> dict[Any, Any]:
        clock = Clock()
        recorder = Recorder()
        rules = [
            Rule("api", "7/minute", "10/minute burst 4", "99/day", key=["ip"]),
            Rule("other", "3/second", "11/hour", path="/b", key=["global"]),
            Rule("shadow", "2/minute", shadow=True),
        ]
        with door(rules=rules, store=MemoryStore(clock), observers=[recorder], **options) as site:
            for number in range(60):
                site.ask("/b" if number % 3 else "/a", peer=f"192.0.2.{number % 2}")
                clock.advance(1.7 * (number % 5))
            return recorder.without("config.last_load_timestamp", "diagnostics", "config.revision")

    assert told() == told(identify=lambda _: Caller("somebody") and None)


def test_nothing_that_a_client_sends_makes_a_series(door: type[Site]) -> None:
    """Neither paths, methods, headers, hosts nor addresses."""
    rules = [Rule("api", "5/minute", key=["path", "ip", "header:X-Own", "host", "method", "api_key"])]
    recorder, _ = outcomes(door, "/", rules=rules)
    before = set(recorder.told)
    with door(rules=rules, observers=[recorder], new_buckets=3) as site:
        for number in range(20):
            headers = {"X-Own": f"own{number}", "Host": f"h{number}.example", "X-API-Key": f"k{number}"}
            site.ask(f"/p{number}", "PATCH" if number % 2 else "GET", headers, peer=f"2001:db8:{number}::1")
    recorder.of("requests")
    assert set(recorder.told) == before


def test_rules_that_change(door: type[Site], tmp_path: Path) -> None:
    """Loads are counted, the revision is that of the rules in force, and a rule that stays goes on with its figures."""
    file, recorder = tmp_path / "rules.yaml", Recorder()
    file.write_text("rules:\n  - {name: api, qpm: 9}\n")
    with door(rules=str(tmp_path), reload=3600, observers=[recorder]) as site:
        site.ask()
        revisions = [recorder.of("config.revision")[()]]
        for text in ("rules:\n  - {name: api, qpm: 8}\n  - {name: new, qpm: 7}\n", "rules: nonsense\n"):
            file.write_text(text)
            until(lambda: (site.app.gate.poller.poll(), recorder.of("config.loads"))[1] != loads(revisions))
            revisions.append(recorder.of("config.revision")[()])
        site.ask()
        assert recorder.of("config.loads") == {("ok",): 2, ("rejected",): 1}
        assert recorder.of("config.last_load_success") == {(): 0}
    assert revisions[0] != revisions[1] == revisions[2] == revision(site.app.gate.rules.rule_set)
    assert recorder.new("rule.decisions") == {(*API, "admitted"): 2, ("new", "default", "admitted"): 1}
    assert recorder.of("rule.limit")[*API, "minute"] == 8


def loads(revisions: list[float]) -> dict[tuple[str, ...], int]:
    """Loads up to now."""
    return {("ok",): min(len(revisions), 2), ("rejected",): max(0, len(revisions) - 2)}


# --- the outcome in scope and environ ---------------------------------------------------------------------------------


@pytest.mark.parametrize("observers", [[], [Recorder()]])
def test_access_logs_find_the_outcome(door: type[Site], observers: list[Recorder]) -> None:
    """Whether anybody observes or not, admitted or refused."""
    rules = [Rule("api", "1/minute", path="/api"), Rule("no", path="/no", deny=True)]
    found = []
    with door(rules=rules, observers=observers) as site:
        found += [outcome_of(site, path) for path in ("/api", "/api", "/no", "/")]
    assert found == ["admitted", "refused", "refused", "unlimited"]


def outcome_of(site: Site, path: str) -> str:
    """What middleware around the gate finds after a request."""
    if site.door == "wsgi":
        environ = wsgi_environ(path)
        run_wsgi(site.app, environ)
        return environ["limitgate.outcome"]
    scope, seen = http_scope(path), []

    async def send(message: Any) -> None:
        seen.append(scope.get("limitgate.outcome"))

    async def receive() -> Any:
        return {"type": "http.request"}

    site.runner.run(site.app(scope, receive, send))
    assert len(set(seen)) == 1  # from the first message on
    return scope["limitgate.outcome"]


def test_a_late_refusal_is_the_outcome() -> None:
    """What a dependency refuses was admitted at first, and is counted as refused, once."""
    recorder, seen = Recorder(), []
    app = fastapi.FastAPI()
    app.add_middleware(LimitGate, rules=[Rule("api", "9/minute")], observers=[recorder])
    late = RateLimit("1/minute", name="late")

    @app.get("/", dependencies=[fastapi.Depends(late)])
    def index() -> str:
        return "hello"

    async def ask() -> int:
        scope = http_scope()

        async def around(scope_: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)

        reply = await asgi_reply(around)
        seen.append(scope["limitgate.outcome"])
        return reply.status

    async def twice() -> list[int]:
        return [await ask(), await ask()]

    assert asyncio.run(twice()) == [200, 429]
    assert seen == ["admitted", "refused"]
    assert recorder.new("requests") == {("admitted", "store"): 1, ("refused", "store"): 1}
    assert recorder.new("rule.decisions")["late", "default", "refused"] == 1


@pytest.mark.parametrize("counts_inside", [True, False])
def test_gates_in_gates_count_a_request_once(*, counts_inside: bool) -> None:
    """The outermost gate that counts does, with what any of them has decided; rules are counted by their own gate."""
    inside, outside = Recorder(), Recorder()

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    inner = LimitGate(app, rules=[Rule("inner", "1/minute")], observers=[inside] if counts_inside else [])
    outer = LimitGate(inner, rules=[Rule("outer", "9/minute")], observers=[outside])

    async def ask() -> list[str]:
        found = []
        for _ in range(2):
            scope = http_scope()

            async def around(_: Any, receive: Any, send: Any, scope: Any = scope) -> None:
                await outer(scope, receive, send)

            await asgi_reply(around)
            found.append(scope["limitgate.outcome"])
        return found

    assert asyncio.run(ask()) == ["admitted", "refused"]
    assert outside.new("requests") == {("admitted", "store"): 1, ("refused", "store"): 1}
    assert inside.new("requests") == {}
    assert inside.new("rule.decisions").keys() == (
        {("inner", "default", "admitted"), ("inner", "default", "refused")} if counts_inside else set()
    )


def test_decorators_are_counted_from_their_first_request(door: type[Site]) -> None:
    """By their names, as rules of tier default."""
    recorder = Recorder()
    app = fastapi.FastAPI()
    app.add_middleware(LimitGate, rules=[], observers=[recorder])

    @app.get("/")
    @limit("1/minute", name="front")
    def index() -> str:
        return "hello"

    async def twice() -> None:
        for _ in range(2):
            await asgi_reply(app)

    asyncio.run(twice())
    assert recorder.new("rule.decisions") == {("front", "default", "admitted"): 1, ("front", "default", "refused"): 1}
    assert recorder.of("rule.limit") == {("front", "default", "minute"): 1}


def test_websockets_are_counted_when_they_begin() -> None:
    """Not when they end, which may take days; messages are decisions of their rule."""
    recorder = Recorder()
    began, end = asyncio.Event(), asyncio.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        began.set()
        await end.wait()

    gate = LimitGate(app, rules=[Rule("api", concurrency=5)], observers=[recorder])

    async def connect() -> tuple[Any, Any]:
        task = asyncio.ensure_future(handshake(gate))
        await began.wait()
        told = recorder.new("requests"), recorder.of("rule.in_flight")
        end.set()
        await task
        await gate.gate.refunds.asettled()
        return told

    requests, in_flight = asyncio.run(connect())
    assert requests == {("admitted", "store"): 1}
    assert in_flight == {API: 1}
    assert recorder.of("rule.in_flight") == {API: 0}
    assert websocket_scope()["type"] == "websocket"


def test_requests_that_wait_are_counted_while_they_do() -> None:
    """Under threads they sleep; the gauge goes down when they go on."""
    recorder, store = Recorder(), MemoryStore()
    gate = LimitGateWSGI(
        hello,
        rules=[Rule("api", "1/second burst 1", max_delay=30)],
        store=store,
        observers=[recorder],
    )
    threads = [threading.Thread(target=wsgi_reply, args=[gate]) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: recorder.of("rule.waiting") == {API: 2})
    for thread in threads:
        thread.join()
    assert recorder.of("rule.waiting") == {API: 0}
    assert recorder.new("requests") == {("admitted", "store"): 1, ("delayed", "store"): 2}


# --- limiters ---------------------------------------------------------------------------------------------------------


def test_a_limiter_counts_what_it_charges() -> None:
    """Hits, waits, reservations and slots, and nothing that charges nothing. It has no rules, so all count as one."""
    recorder = Recorder()
    limiter = Limiter(MemoryStore(Clock()), observers=[recorder])
    for _ in range(3):
        limiter.hit("a", "2/minute")
    limiter.hit("a", "2/minute", "3/minute burst 1", cost=100 // 50)
    limiter.hit_up_to("b", "2/minute", cost=9)
    limiter.reserve("c", "2/minute")
    limiter.wait("d", "100/second burst 1")
    limiter.wait("d", "100/second burst 1")
    limiter.wait("d", Limit("1/minute"), timeout=0)
    limiter.peek("a", "2/minute")
    limiter.reset("a", "2/minute")
    limiter.refund("a", "2/minute")
    limiter.ban("x", 60)
    limiter.hit("x", "2/minute")
    with limiter.slot("e", 1):
        assert recorder.new("requests") == {("admitted", "store"): 7, ("delayed", "store"): 1, ("refused", "store"): 3}
    assert recorder.new("rule.decisions") == {(LIMITER, "default", "admitted"): 8, (LIMITER, "default", "refused"): 3}


def test_an_async_limiter_counts_the_same() -> None:
    """Its hits, waits, reservations and slots."""
    recorder = Recorder()

    async def use() -> None:
        limiter = AsyncLimiter(MemoryStore(Clock()), observers=[recorder])
        for _ in range(3):
            await limiter.hit("a", "2/minute")
        await limiter.hit_up_to("b", "2/minute", cost=9)
        await limiter.reserve("c", "2/minute")
        await limiter.wait("d", "100/second burst 1")
        await limiter.wait("d", "100/second burst 1")
        async with limiter.slot("e", 1):
            pass

    asyncio.run(use())
    assert recorder.new("requests") == {("admitted", "store"): 6, ("delayed", "store"): 1, ("refused", "store"): 1}


def test_a_limiter_whose_store_fails() -> None:
    """Whoever gets a `StoreError` was not let through."""
    recorder = Recorder()
    limiter = Limiter(NOWHERE, timeout=5.0, observers=[recorder])
    for ask in (limiter.hit, limiter.reserve, limiter.peek):
        with pytest.raises(StoreError):
            ask("a", "2/minute")
    with pytest.raises(StoreError), limiter.slot("a", 1):
        pass
    assert recorder.new("requests") == {("failed_closed", "nobody"): 3}
