"""Limits that an application asks for while a request is under way: one decision with all others, all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, RateLimited, Rule, StoreError, limit
from limitgate.exchange.base import EXCHANGE
from limitgate.gate import late
from limitgate.keys import Value
from limitgate.limits.plan import Plan, Reading
from tests.support.doors import PATIENCE, Reply, Wire, asgi_reply, http_scope, run_wsgi, websocket_scope, wsgi_environ
from tests.support.outcomes import END, PLAIN, START, Watched

Ask = Callable[..., Reply]
FIRST = Rule("first", "10/minute")
LATE = Rule("late", "3/minute")
LATER = Rule("later", "2/minute")


@pytest.fixture
def store() -> Watched:
    return Watched()


class Late:
    """An application behind a gate, at either door, that weighs some rules one after the other before it answers."""

    def __init__(self, door: str, *late: Rule, rules: Any = (FIRST,), **options: Any) -> None:
        self.door = door
        self.late = late
        self.decisions: list[Any] = []
        """What the gate said each time."""
        self.exchanges: list[Any] = []
        """The exchange of each request."""
        self.heeds = True
        """Whether the application stops where it is told to."""
        make: Any = LimitGate if door == "asgi" else LimitGateWSGI
        self.app = make(self._asgi if door == "asgi" else self._wsgi, rules=rules, **options)

    def ask(self, path: str = "/", method: str = "GET", **more: Any) -> Reply:
        """The reply to one request."""
        self.decisions.clear()
        if self.door == "asgi":
            return asyncio.run(asgi_reply(self.app, path, method, **more))
        return run_wsgi(self.app, wsgi_environ(path, method, **more))

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        self.exchanges.append(exchange)
        for rule in self.late:
            self.decisions.append(await exchange.afurther([(rule, ())]))
            if exchange.open_admission().refusal and self.heeds:
                raise RateLimited(self.decisions[-1])
        await send(START)
        await send({**END, "body": b"" if scope["method"] == "HEAD" else b"hello"})

    def _wsgi(self, environ: Any, start_response: Any) -> Any:
        exchange = environ[EXCHANGE]
        self.exchanges.append(exchange)
        for rule in self.late:
            self.decisions.append(exchange.further([(rule, ())]))
        refusal = exchange.open_admission().refusal
        if refusal and self.heeds:
            start_response(f"{refusal.status} {refusal.reason}", list(refusal.fields))
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [refusal.body]
        start_response("200 OK", list(PLAIN))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [b"hello"]


@pytest.fixture(params=["asgi", "wsgi"])
def open_site(request: pytest.FixtureRequest, store: Watched) -> Callable[..., Late]:
    """Opens an application at one door on one store."""
    return lambda *late, **options: Late(request.param, *late, **{"store": store, **options})


# --- all or nothing ---------------------------------------------------------------------------------------------------


def test_limits_that_pass_are_one_decision_with_the_others(open_site: Callable[..., Late]) -> None:
    """Decision and rate fields are those of all rules together: of the window with the least remaining."""
    site = open_site(LATE, LATER, headers=["x-ratelimit", "draft-11"])
    reply = site.ask()
    assert reply.status == 200
    assert [(each.rule, each.limit, each.remaining) for each in site.decisions] == [("late", 3, 2), ("later", 2, 1)]
    assert [window.rule for window in site.decisions[-1].windows] == ["first", "late", "later"]
    assert (reply.headers["x-ratelimit-limit"], reply.headers["x-ratelimit-remaining"]) == ("2", "1")
    assert reply.headers["ratelimit-policy"] == '"first";q=10;w=60, "late";q=3;w=60, "later";q=2;w=60'


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_late_limits_inside_of_another_gate(door: str, store: Watched) -> None:
    """They are one decision with those of both gates; what they refuse is given back by their own gate."""
    styles = ["draft-11"]
    it = Late(door, LATE, store=store, headers=styles)
    gate: Any = LimitGate if door == "asgi" else LimitGateWSGI
    it.app = gate(it.app, rules=[Rule("outer", "9/minute")], store=MemoryStore(store.clock), headers=styles)
    assert it.ask().rate["ratelimit"] == '"outer";r=8;t=7, "first";r=9;t=6, "late";r=2;t=20'
    assert [window.rule for window in it.decisions[0].windows] == ["outer", "first", "late"]
    assert [it.ask().status for _ in range(3)] == [200, 200, 429]
    assert store.owed == {"first": 3, "late": 3}
    refused = it.ask()
    assert (refused.wait, refused.json()["violated-policies"]) == (20, ["late"])
    assert refused.rate["ratelimit"] == '"outer";r=4;t=34, "late";r=0;t=20'
    assert (it.decisions[0].allowed, it.decisions[0].rule) == (False, "late")


def test_the_tightest_may_be_the_first(open_site: Callable[..., Late]) -> None:
    """A limit that is looser than what was decided before changes nothing of what is told."""
    site = open_site(Rule("loose", "100/minute"))
    reply = site.ask()
    assert (site.decisions[0].rule, site.decisions[0].remaining) == ("first", 9)
    assert reply.rate["x-ratelimit-limit"] == "10"


def test_one_that_refuses_gives_back_everything(open_site: Callable[..., Late], store: Watched) -> None:
    """What the gate's rules and earlier limits have taken is given back, in one call, at whatever time it is refused."""
    site = open_site(LATE, LATER)
    assert [site.ask().status for _ in range(4)] == [200, 200, 429, 429]
    assert store.owed == {"first": 2, "late": 2, "later": 2}
    assert store.corrections == 2


def test_the_refusal_names_what_refused(open_site: Callable[..., Late]) -> None:
    """It is the same 429 as of any rule, with the wait of the limit that refused, and the decision is about that one."""
    site = open_site(LATER, LATE)
    for _ in range(2):
        site.ask()
    reply = site.ask()
    assert (reply.status, reply.wait) == (429, 30)
    assert json.loads(reply.body)["violated-policies"] == ["later"]
    (decision, *_) = site.decisions
    assert (decision.allowed, decision.rule, decision.retry_after, decision.granted) == (False, "later", 30, 0)
    assert site.ask(method="HEAD").body == b""


def test_once_refused_nothing_more_is_asked(open_site: Callable[..., Late], store: Watched) -> None:
    """Limits after the one that refused take nothing and say the same."""
    site = open_site(LATER, LATE)
    site.heeds = False
    for _ in range(2):
        site.ask()
    asked = len(store.plans)
    site.ask()
    first, second = site.decisions
    assert first is second
    assert not first.allowed
    assert len(store.plans) == asked + 3  # the gate's rule, the late one, and what is given back


def test_exempt_requests_are_not_limited_late(open_site: Callable[..., Late], store: Watched) -> None:
    """Who is let through by an exempt rule is asked about nothing, and there is no decision."""
    site = open_site(LATE, rules=[FIRST, Rule("free", exempt=True)])
    assert [site.ask().status for _ in range(5)] == [200] * 5
    assert (site.decisions, store.plans) == ([None], [])


def test_a_limit_that_does_not_apply(open_site: Callable[..., Late], store: Watched) -> None:
    """One for other methods takes no part."""
    site = open_site(Rule("posts", "1/minute", methods=["POST"]))
    assert [site.ask().status for _ in range(3)] == [200] * 3
    assert site.decisions[0].rule == "first"
    assert store.owed == {"first": 3}


def test_where_nothing_was_limited_before(open_site: Callable[..., Late], store: Watched) -> None:
    """A late limit may be the only one; its rate fields are sent, and it refuses like any other."""
    site = open_site(LATER, rules=[Rule("other", "1/minute", path="/other")])
    assert site.ask().status == 200
    assert site.decisions[0].rule == "later"
    assert [site.ask().status for _ in range(2)] == [200, 429]
    assert store.owed == {"later": 2}


def test_a_shadow_limit_refuses_nobody(open_site: Callable[..., Late], store: Watched) -> None:
    """Weighed late, a shadow rule is charged when it fits and else only reported."""
    site = open_site(Rule("seen", "1/minute", shadow=True))
    assert [site.ask().status for _ in range(3)] == [200] * 3
    assert site.decisions[0].shadow
    assert store.owed == {"first": 3, "seen": 1}


def test_keys_with_parts_of_the_applications_own(store: Watched) -> None:
    """What the application has found out tells buckets apart; one part more is another bucket, and none of them leaks."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        user = scope["query_string"].decode() or None
        decision = await exchange.afurther([(Rule("user", "1/minute", key=["global"]), [Value("user", user)])])
        if not decision.allowed:
            raise RateLimited(decision)
        await send(START)
        await send(END)

    gate = LimitGate(app, rules=[], store=store)
    assert [asyncio.run(asgi_reply(gate, f"/?{user}")).status for user in ("ann", "bob", "ann", "")] == [200, 200, 429, 200]
    assert not any("ann" in charge.key for plan in store.plans for charge in plan.charges)


def test_beside_a_decorator(store: Watched) -> None:
    """What a decorated endpoint was charged for is given back, too."""

    @limit("9/minute", name="decorated")
    async def endpoint(request: Any) -> Any:
        exchange = request.scope[EXCHANGE]
        decision = await exchange.afurther([(LATER, ())])
        if not decision.allowed:
            raise RateLimited(decision)
        return PlainTextResponse("hello")

    gate = LimitGate(Starlette(routes=[Route("/", endpoint)]), rules=[FIRST], store=store)
    assert [asyncio.run(asgi_reply(gate)).status for _ in range(4)] == [200, 200, 429, 429]
    assert store.owed == {"first": 2, "decorated": 2, "later": 2}


def test_outcomes_and_costs_count_for_late_limits_too(
    open_site: Callable[..., Late], store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``charge_if`` and ``settle`` are about all rules of a request, whenever they were weighed."""
    site = open_site(Rule("failed", "9/minute", charge_if={"status": [401]}), Rule("cost", "9/minute", cost=2))
    further = late.further

    def settling(gate: Any, admission: Any, rules: Any) -> Any:
        turn = yield from further(gate, admission, rules)
        admission.decision.settle(7, rule=admission.decision.windows[-1].rule)
        return turn

    monkeypatch.setattr(late, "further", settling)
    assert site.ask().status == 200
    assert store.owed == {"first": 1, "cost": 7}
    assert store.corrections == 1


# --- answers in the application's place -------------------------------------------------------------------------------


@pytest.mark.parametrize("heeds", [False, True])
def test_whatever_the_application_says_the_refusal_goes_out(store: Watched, *, heeds: bool) -> None:
    """An application may raise `RateLimited`, or go on as if nothing were: its answer is the refusal."""
    site = Late("asgi", LATER, store=store)
    site.heeds = heeds
    assert [site.ask().status for _ in range(3)] == [200, 200, 429]
    refused = site.ask()
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.rate["x-ratelimit-remaining"] == "0"
    assert site.ask(method="HEAD").body == b""


@pytest.mark.parametrize(
    ("scope", "incoming", "sent"),
    [
        (http_scope(), [], ["http.response.start", "http.response.body"]),
        (websocket_scope(), [{"type": "websocket.connect"}], ["websocket.close"]),
        (websocket_scope(), [{"type": "websocket.disconnect", "code": 1006}], []),
    ],
)
def test_the_refusal_goes_out_where_the_application_says_nothing(store: Watched, scope: Any, incoming: Any, sent: Any) -> None:
    """An application may return without an answer once it is refused; only to a client that has left nothing is sent."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        if incoming:
            await receive()
        await exchange.afurther([(Rule("none", "1/minute", cost=lambda _: 2), ())])

    wire = Wire(*incoming)
    asyncio.run(wire.call(LimitGate(app, rules=[FIRST], store=store), scope))
    assert wire.types == sent
    assert store.owed == {}


def test_on_denied_answers_late_refusals_too(store: Watched) -> None:
    """An ``on_denied`` is asked, finds the decision that refused, and gets the rate fields and the wait."""

    async def on_denied(scope: Any, receive: Any, send: Any) -> None:
        assert not scope["limitgate"].allowed
        await send({**START, "status": 429})
        await send({**END, "body": scope["limitgate"].rule.encode()})

    site = Late("asgi", LATER, store=store, on_denied=on_denied)
    assert [site.ask().status for _ in range(2)] == [200, 200]
    refused = site.ask()
    assert (refused.status, refused.body, refused.wait, refused.rate["x-ratelimit-limit"]) == (429, b"later", 30, "2")


@pytest.mark.parametrize(
    ("extensions", "sent"),
    [
        ({}, ["websocket.close"]),
        ({"websocket.http.response": {}}, ["websocket.http.response.start", "websocket.http.response.body"]),
    ],
)
@pytest.mark.parametrize("heeds", [False, True])
def test_a_websocket_is_refused_late(store: Watched, extensions: Any, sent: list[str], *, heeds: bool) -> None:
    """As long as it is not accepted a WebSocket is refused as by any other rule."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        decision = await exchange.afurther([(Rule("none", "1/minute", cost=lambda _: 2), ())])
        if heeds:
            raise RateLimited(decision)
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hello"})
        await send({"type": "websocket.close"})

    wire = Wire({"type": "websocket.connect"})
    asyncio.run(wire.call(LimitGate(app, rules=[FIRST], store=store), websocket_scope(extensions=extensions)))
    assert wire.types == sent
    assert store.owed == {}


def test_a_refusal_after_the_response_has_begun(store: Watched) -> None:
    """It is too late for another answer, and to undo the request: the error goes on to the server, what was taken is kept."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        exchange = scope[EXCHANGE]
        raise RateLimited(await exchange.afurther([(Rule("none", "1/minute", cost=lambda _: 2), ())]))

    wire = Wire()
    with pytest.raises(RateLimited) as told:
        asyncio.run(wire.call(LimitGate(app, rules=[FIRST], store=store), http_scope()))
    assert told.value.decision.rule == "none"
    assert wire.types == ["http.response.start"]
    assert store.owed == {"first": 1}


def test_an_error_after_a_refusal_is_the_servers(store: Watched) -> None:
    """Where the application makes another error of it, the client gets the refusal and the server the error."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        await exchange.afurther([(Rule("none", "1/minute", cost=lambda _: 2), ())])
        raise LookupError

    wire = Wire()
    with pytest.raises(LookupError):
        asyncio.run(wire.call(LimitGate(app, rules=[FIRST], store=store), http_scope()))
    assert (wire.reply().status, store.owed) == (429, {})


def test_once_the_request_is_over_no_limit_can_be_asked(open_site: Callable[..., Late], store: Watched) -> None:
    """A task that outlives its request is told so, and nothing is charged that nobody could put right."""
    site = open_site()
    site.ask()
    (exchange,) = site.exchanges
    ask = {
        "asgi": lambda: asyncio.run(exchange.afurther([(LATE, ())])),
        "wsgi": lambda: exchange.further([(LATE, ())]),
    }
    with pytest.raises(RuntimeError, match="after the request"):
        ask[site.door]()
    assert store.owed == {"first": 1}


# --- at the same time -------------------------------------------------------------------------------------------------


class Slow(Watched):
    """A store that lets others go on meanwhile, and may be kept waiting."""

    hold: Any = None

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        if self.hold is not None and plan.verb == "adjust":
            await self.hold.wait()
        await asyncio.sleep(0)
        return self.spend(plan)


@pytest.mark.parametrize("first_refuses", [False, True])
def test_limits_that_are_asked_at_the_same_time(*, first_refuses: bool) -> None:
    """Where several are weighed side by side and one refuses, the others are given back whenever they are heard of."""
    store = Slow()
    none = Rule("none", "1/minute", cost=lambda _: 2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        asked = [none, LATE, LATER] if first_refuses else [LATE, LATER, none]
        found = await asyncio.gather(*[exchange.afurther([(rule, ())]) for rule in asked])
        assert not found[-1].allowed
        raise RateLimited(found[-1])

    reply = asyncio.run(asgi_reply(LimitGate(app, rules=[FIRST], store=store)))
    assert json.loads(reply.body)["violated-policies"] == ["none"]
    assert store.owed == {}


def test_a_refusal_that_is_cancelled_gives_everything_back() -> None:
    """A client that leaves while its request is being refused does not stay charged for it."""
    store = Slow()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        await exchange.afurther([(LATE, ())])
        await send({"type": "something else"})
        await exchange.afurther([(Rule("none", "1/minute", cost=lambda _: 2), ())])

    async def scene() -> None:
        store.hold = asyncio.Event()
        gate = LimitGate(app, rules=[FIRST], store=store)
        wire = Wire()
        task = asyncio.create_task(wire.call(gate, http_scope()))
        await wire.until_sent(1)
        for _ in range(5):
            await asyncio.sleep(0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        store.hold.set()
        await gate.gate.refunds.asettled()

    asyncio.run(scene())
    assert store.owed == {}


# --- the store fails --------------------------------------------------------------------------------------------------


class Failing(Watched):
    """A store that fails to decide about some rules, wholly or for their buckets only."""

    def __init__(self, *rules: str, partly: bool = False) -> None:
        super().__init__()
        self.rules = rules
        self.partly = partly

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        gone = [charge.key for charge in plan.charges if charge.rule in self.rules]
        if gone and plan.verb == "spend":
            raise StoreError("out of order", keys=frozenset(gone if self.partly else ()))
        return super().spend(plan, timeout)


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(
    ("policy", "statuses", "left"),
    [
        ("open", [200, 200, 200], {"first": 3}),
        ("local", [200, 200, 429], {"first": 2}),
        ("closed", [503, 503, 503], {}),
    ],
)
def test_a_store_that_fails_late(
    open_site: Callable[..., Late], policy: Any, statuses: list[int], left: dict[str, float], *, partly: bool
) -> None:
    """A limit that the store cannot decide about goes by its ``on_error``, and a refusal gives back what was taken before."""
    store = Failing("later", partly=partly)
    site = open_site(Rule("later", "2/minute", on_error=policy), store=store)
    replies = [site.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == statuses
    assert store.owed == left
    assert site.decisions[-1].degraded
    assert site.app.gate.uncorrected == 0


def test_a_503_tells_no_rates(store: Watched) -> None:
    """Where a late limit is closed, nothing is told of others that were decided before and are given back."""
    store = Failing("later")
    site = Late("asgi", Rule("later", "2/minute", on_error="closed"), store=store)
    assert (site.ask().status, site.ask().rate) == (503, {})


def test_rates_under_open_are_those_that_were_decided(open_site: Callable[..., Late]) -> None:
    """What is known of the rules that the store did decide about is told, though a late one passed unseen."""
    site = open_site(Rule("later", "2/minute", on_error="open"), store=Failing("later"))
    assert site.ask().rate["x-ratelimit-limit"] == "10"
    assert (site.decisions[0].allowed, site.decisions[0].degraded, site.decisions[0].rule) == (True, True, "first")


def test_a_store_that_failed_first_and_answers_late(open_site: Callable[..., Late]) -> None:
    """A decision that was made without the store is joined with one that was made with it, and is still degraded."""
    store = Failing("first")
    site = open_site(LATER, store=store)
    assert [site.ask().status for _ in range(3)] == [200, 200, 429]
    assert store.owed == {"later": 2}
    store = Failing("first")
    site = open_site(LATER, rules=[Rule("first", "9/minute", on_error="local")], store=store)
    assert [site.ask().status for _ in range(2)] == [200, 200]
    assert site.decisions[0].degraded
    assert [window.rule for window in site.decisions[0].windows] == ["first", "later"]
    assert [site.ask().status for _ in range(9)] == [429] * 9  # and this process gets its part back each time
    store.clock.advance(60)
    assert site.ask().status == 200


def test_what_cannot_be_given_back_stays(open_site: Callable[..., Late], store: Watched) -> None:
    """Where the store fails when a refusal is to give back, the answer is the refusal, and it is counted."""
    site = open_site(LATER)
    for _ in range(2):
        site.ask()
    store.fails = ("correct",)
    assert site.ask().status == 429
    assert store.owed == {"first": 3, "later": 2}
    assert site.app.gate.uncorrected == 1


def test_a_request_waits_for_the_store_once_its_timeout(open_site: Callable[..., Late]) -> None:
    """However many limits are asked for, a request gives the store its ``timeout`` once; then ``on_error`` decides at once."""
    given: list[float] = []

    class Hanging(MemoryStore):
        def spend(self, plan: Plan, timeout: float = 0) -> Reading:
            given.append(timeout)
            time.sleep(timeout)
            raise StoreError("too late", "timeout")

        async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
            return self.spend(plan, timeout)

    site = open_site(LATE, LATER, store=Hanging(), timeout=0.05)
    began = time.monotonic()
    assert site.ask().status == 200
    assert [decision.degraded for decision in site.decisions] == [True, True]
    assert given[0] == 0.05
    assert sum(given) < 0.06
    assert time.monotonic() - began < PATIENCE


def test_a_request_that_has_waited_waits_less(open_site: Callable[..., Late]) -> None:
    """A limit that is asked for later has what is left of the ``timeout``."""
    given: list[float] = []

    class Slow(MemoryStore):
        def spend(self, plan: Plan, timeout: float = 0) -> Reading:
            given.append(timeout)
            time.sleep(0.02)
            return super().spend(plan)

        async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
            return self.spend(plan, timeout)

    assert open_site(LATE, store=Slow(), timeout=5).ask().status == 200
    first, second = given
    assert first == 5
    assert 0 < second <= 4.98
