"""Prepared plans: requests that have one get what requests get that are planned anew each time."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from functools import cache
from time import monotonic
from typing import Any
from weakref import ref

import pytest
from flask import Flask
from flask.views import MethodView
from hypothesis import given, settings, strategies as st
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.routing import Rule as URLRule

from limitgate import Caller, Limit, LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet, StoreError, exempt, limit
from limitgate.gate.planning.prepared import GivenPlans
from limitgate.limits.template import PlainSpend
from limitgate.rules.callers import KnownCaller
from tests.support.clock import Clock
from tests.support.doors import Reply, asgi_reply, http_scope, wsgi_reply
from tests.support.stored import buckets

KEY = "the key of a VIP"
PROXY = "10.0.0.1"

CALLERS = {
    "ann": Caller("ann"),
    "bob": Caller("bob", tier="vip"),
    "eve": Caller("eve", tier="of nobody", priority="high"),
    "own": Caller("own", limits={"all": "3/minute"}),
    "twin": Caller("twin", limits={"all": "3/minute", "of no rule": "1/minute"}),
    "odd": Caller("odd", limits={"all": "often", "api": {"a": "limit"}, "login": None, "costly": "2/minute"}),
    "mix": Caller(
        "mix",
        limits={
            "given": ["3/minute", "4/hour"],
            "also": None,
            "login": "2/minute",
            "shadow": "3/minute",
            "measured": "3 at once",
            "costly": Limit("9/minute", algorithm="fixed_window"),
        },
    ),
    "best": Caller("best", tier="vip", limits={"api": ("7/minute", Limit("9/hour"))}),
}
PLANS: dict[str, Any] = {
    "few": "2/minute",
    "many": Limit("5/minute burst 9"),
    "several": ["3/minute", "4/hour"],
    "tuple": ("4/hour", Limit("3/minute")),
    "none": None,
    "odd": "often",
    "no limits": [],
    "at once": "3 at once",
    "warm": Limit("3/minute", warm_up=60),
    "both": ["2/minute", Limit("9/minute", algorithm="fixed_window")],
    "unhashable": {"a": "limit"},
}


def by_plan(request: Any) -> Any:
    """Limits of the plan that a header names; the caller's is the best."""
    return "7/minute" if request.caller else PLANS[request.headers.get("x-plan", "few")]


RULES = [
    Rule("api", path="/api/**", key=["path", "ip"], qps=2, qpm=5, qpd=2000),
    Rule("all", "9/minute"),
    Rule("shadow", "1/minute", path="/api/**", shadow=True),
    Rule("free", path="/api/free", exempt=True),
    Rule("costly", "9/minute", path="/costly", cost=3, key=["method", "ip", "tier"]),
    Rule("measured", "9/minute", path="/measured", cost=lambda _: 2),
    Rule("slow", "9/minute", path="/slow", max_delay=0.001),
    Rule("counted", Limit("9/minute", algorithm="fixed_window"), path="/counted"),
    Rule("logged", Limit("4/minute", algorithm="sliding_log"), path="/logged", replaces=["all"], shadow=True),
    Rule("windows", "3/second", "5/minute", path="/windows", algorithm="sliding_window", cost=2, key=["path", "ip"]),
    Rule("mixed", "4/minute", Limit("9/hour", algorithm="fixed_window"), path="/windows"),
    Rule("several", "4/minute", path=["/health", "/sub/**"], exclude=["/sub/login"], replaces=["all"]),
    Rule("few", "2/minute", path="/few", clients=["192.0.2.0/31"], replaces="*"),
    Rule("no", path="/denied/**", exclude=["/denied/not"], deny=True),
    Rule("given", by_plan, qpm=3, path="/given/**", key=["ip", "path"]),
    Rule("also", by_plan, "3/minute", path="/given/also", key=["method", "caller|ip"]),
    Rule("api", path="/api/**", key=["caller"], qps=4, qpm=50, tier="vip"),
]
PATHS = (
    "/api/a",
    "/api/a",
    "/api/b",
    "/api/free",
    "/login",
    "/costly",
    "/measured",
    "/counted",
    "/logged",
    "/windows",
    "/health",
    "/nowhere",
    "/sub/x",
    "/sub/login",
    "/self/sub/login",
    "/views",
    "/few",
    "/denied",
    "/denied/not",
    "/given",
    "/given/also",
)


def identify(request: Any) -> Caller | None:
    """The caller that a header names."""
    return CALLERS.get(request.headers.get("x-user"))


async def aidentify(request: Any) -> Caller | None:
    """`identify`, for which something is awaited."""
    await asyncio.sleep(0)
    return identify(request)


class General(MemoryStore):
    """A memory store that is asked for plans of any kind alone, as a user's own store is."""

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        return super().spend(plan, timeout)

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        return super().spend(plan, timeout)


class Counted(MemoryStore):
    """A memory store that counts how many plans were plain, and how many of any other kind."""

    measures_silence = takes_plain = True
    plain = general = 0

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        reading = super().spend(plan, timeout)
        if isinstance(reading, PlainSpend):
            self.plain += 1
        else:
            self.general += 1
        return reading

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        return self.spend(plan, timeout)


def kept(store: MemoryStore, now: int) -> dict[str, Any]:
    """The buckets that owe anything by key, their limits in place of the objects that each application has of its own."""
    return {
        key: (written, cost, bucket.limits, *owed)
        for key, (written, cost, bucket, owed) in buckets(store).items()
        if written + max(map(bucket.algorithm.ttl_us, owed, bucket.limits)) > now
    }


@cache
def rules() -> RuleSet:
    caller = KnownCaller(id="acme", api_key=f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", tier="vip")
    return RuleSet(RULES, callers=[caller])


def asgi(store: Any, **options: Any) -> Any:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse(repr(request.scope["limitgate"]))

    @limit("3/minute", key=["ip"], name="login")
    async def login(request: Any) -> PlainTextResponse:
        return await answer(request)

    class Views(HTTPEndpoint):
        async def get(self, request: Any) -> PlainTextResponse:
            return await answer(request)

        @limit("2/minute", name="head")
        async def head(self, request: Any) -> PlainTextResponse:
            return await answer(request)

    app = Starlette(
        routes=[
            Route("/api/{item}", answer),
            Route("/login", login, methods=["GET", "POST"]),
            Route("/health", exempt(answer)),
            Mount("/sub", routes=[Route("/x", login)]),
            Route("/views", Views),
            *[Route(path, answer) for path in ("/costly", "/measured", "/slow", "/counted", "/logged", "/windows")],
        ]
    )
    gate = LimitGate(app, store=store, **{"rules": rules(), "trusted_proxies": [PROXY], **options})
    return lambda *given, **more: asyncio.run(asgi_reply(gate, *given, **more))


def wsgi(store: Any, **options: Any) -> Any:
    return gated(shared_site("own"), store, **options)


def dispatched(store: Any, **options: Any) -> Any:
    """Two Flask applications behind Werkzeug's dispatcher, which is mounted once more in itself."""
    mounts: dict[str, Any] = {"/sub": shared_site("mounted")}
    mounts["/self"] = DispatcherMiddleware(shared_site("own"), mounts)
    return gated(mounts["/self"], store, **options)


def gated(app: Any, store: Any, **options: Any) -> Any:
    gate = LimitGateWSGI(app, **{"store": store, "rules": rules(), "trusted_proxies": [PROXY], **options})
    return lambda *given, **more: wsgi_reply(gate, *given, **more)


@cache
def shared_site(name: str) -> Flask:
    """One site for each name, for several gates in turn: they keep nothing in it, and it takes longer to make than to ask."""
    return site()


def site() -> Flask:
    from flask import request

    app = Flask(__name__)

    def answer(item: str = "") -> str:
        return repr(request.environ["limitgate"])

    @limit("3/minute", key=["ip"], name="login")
    def login() -> str:
        return answer()

    app.add_url_rule("/api/<item>", "api", answer)
    app.add_url_rule("/login", "login", login, methods=["GET", "POST"])
    app.add_url_rule("/health", "health", exempt(answer))
    for path in ("/costly", "/measured", "/slow", "/counted", "/logged", "/windows"):
        app.add_url_rule(path, path[1:], answer)

    class Views(MethodView):
        def get(self) -> str:
            return answer()

        @limit("2/minute", name="head")
        def head(self) -> str:
            return answer()

    app.add_url_rule("/views", view_func=Views.as_view("views"))
    return app


DOORS = pytest.mark.parametrize("door", [asgi, wsgi, dispatched])

requests = st.tuples(
    st.sampled_from(PATHS),
    st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "OPTIONS"]),
    st.sampled_from([{}, {}, {"x-api-key": KEY}, {"x-api-key": "invented"}, {"x-forwarded-for": "198.51.100.7, 203.0.113.9"}])
    | st.sampled_from([*PLANS]).map(lambda plan: {"x-plan": plan})
    | st.sampled_from([*CALLERS]).map(lambda name: {"x-user": name}),
    st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", PROXY, None]),
    st.sampled_from([0, 0, 0.3, 1, 20]),
)


@pytest.mark.parametrize(
    ("door", "options"),
    [
        *[(door, {}) for door in (asgi, wsgi, dispatched)],
        *[(door, {"identify": identify}) for door in (asgi, wsgi)],
        (asgi, {"identify": aidentify}),
    ],
)
@settings(deadline=None, max_examples=20)
@given(visits=st.lists(requests, min_size=1, max_size=30))
def test_a_prepared_plan_is_what_would_have_been_planned(door: Any, options: Any, visits: list[Any]) -> None:
    """Property: responses, decisions and buckets are the same, whether a store takes plain plans or not."""
    clock = Clock()
    stores = MemoryStore(clock), General(clock)
    prepared, planned = [door(store, **{"secret": "one key for all ids"} | options) for store in stores]
    for path, method, headers, peer, step in visits:
        clock.advance(step)
        one, other = (ask(path, method, headers, peer=peer) for ask in (prepared, planned))
        assert (one.status, one.headers, one.body) == (other.status, other.headers, other.body)
        assert kept(stores[0], clock()) == kept(stores[1], clock())


@DOORS
@pytest.mark.parametrize(
    ("path", "headers", "options"),
    [
        ("/api/a", {}, {}),
        ("/api/a", {"x-api-key": KEY}, {}),
        ("/login", {}, {}),
        ("/costly", {}, {}),
        ("/nowhere", {}, {}),
        ("/api/a", {"x-forwarded-for": "203.0.113.9"}, {"peer": PROXY}),
        ("/given", {"x-plan": "many"}, {}),
        ("/given/also", {"x-plan": "several"}, {}),
        ("/given/also", {"x-plan": "none"}, {}),
        ("/given/also", {"x-plan": "odd"}, {}),
        ("/given/also", {"x-api-key": KEY}, {}),
    ],
)
def test_what_people_run_has_prepared_plans(door: Any, path: str, headers: Any, options: Any) -> None:
    """Several rules, tiers of API keys, decorators, shadow rules, fixed costs, refusals and proxies are all prepared."""
    store = Counted(Clock())
    ask = door(store)
    for _ in range(12):
        ask(path, headers=headers, **options)
    assert (store.general, store.plain) == (0, 12)


@pytest.mark.parametrize(("door", "finds"), [(asgi, identify), (asgi, aidentify), (wsgi, identify)])
@pytest.mark.parametrize("name", ["ann", "bob", "eve", "nobody", "own"])
def test_who_is_identified_has_prepared_plans(door: Any, finds: Any, name: str) -> None:
    """By the rules of the caller's tier, and by the caller's own limits."""
    store = Counted(Clock())
    ask = door(store, identify=finds)
    for _ in range(4):
        ask("/api/a", headers={"x-user": name})
    assert (store.general, store.plain) == (0, 4)


@pytest.mark.parametrize("door", [asgi, wsgi])
def test_callers_with_the_same_limits_share_a_plan(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what is given to the rules that apply, not who it is given to."""
    made: list[object] = []
    prepared = GivenPlans._prepared
    monkeypatch.setattr(GivenPlans, "_prepared", lambda self, limited: made.append(limited) or prepared(self, limited))
    ask = door(Counted(Clock()), identify=identify)
    ask("/nowhere", headers={"x-user": "own"})
    made.clear()
    assert ask("/nowhere", headers={"x-user": "twin"}).headers["x-ratelimit-remaining"] == "1"
    assert not made


@pytest.mark.parametrize("door", [asgi, wsgi])
@pytest.mark.parametrize("limits", [{"all": "2/minute"}, {"all": None}, {"all": "2/minute", "when": "1/minute"}])
def test_own_limits_stand_beside_adaptive_ones_and_conditions(door: Any, limits: Any) -> None:
    """A rule without counts is counted by the limits of a caller, by any way."""
    rules = [Rule("all", adaptive=True), Rule("when", "5/minute", when=lambda request: "x-paid" in request.headers)]
    replies = {}
    for kind in (Counted, General):
        ask = door(kind(Clock()), rules=rules, identify=lambda _: Caller("me", limits=limits))
        asked = [ask("/costly", headers=headers) for headers in [{}, {"x-paid": "1"}] * 2]
        replies[kind] = [(each.status, each.headers.get("x-ratelimit-limit")) for each in asked]
    assert replies[Counted] == replies[General]
    assert (429 in [status for status, _ in replies[Counted]]) is (limits["all"] is not None)


@DOORS
def test_head_is_told_from_get(door: Any) -> None:
    """A view may serve HEAD by a handler of its own, with limits of its own, whichever came first."""
    ask = door(MemoryStore(Clock()), rules=[Rule("all", "99/minute")])
    assert [ask("/views", method).status for method in ("GET", "HEAD", "GET", "HEAD", "HEAD", "GET")] == [*[200] * 4, 429, 200]


def test_applications_behind_a_dispatcher_have_prepared_plans() -> None:
    """Each is led by its own routes, and a route that comes later is seen."""
    store = Counted(Clock())
    late = site()
    gate = LimitGateWSGI(
        DispatcherMiddleware(site(), {"/sub": late}), store=store, rules=[Rule("all", "99/minute", key=["path"])]
    )
    asked = lambda path: wsgi_reply(gate, path).headers["x-ratelimit-limit"]  # noqa: E731
    assert [asked(path) for path in ("/login", "/sub/login", "/sub/costly", "/sub/late")] == ["3", "3", "99", "99"]
    late.view_functions["late"] = limit("5/minute", name="late")(lambda: "")
    late.url_map.add(URLRule("/late", endpoint="late"))
    assert [asked(path) for path in ("/sub/late", "/sub/late", "/costly")] == ["5", "5", "99"]
    assert (store.general, store.plain) == (0, 7)


def test_where_a_mounted_application_goes_by_the_host_each_request_has_its_own_route() -> None:
    """Which is looked up for it."""
    store, mounted = Counted(Clock()), site()
    mounted.config["TRUSTED_HOSTS"] = ["testserver"]
    ask = gated(DispatcherMiddleware(site(), {"/sub": mounted}), store, rules=[Rule("all", "99/minute")])
    assert [ask(path).headers["x-ratelimit-remaining"] for path in ("/costly", "/sub/costly", "/costly")] == ["98", "97", "96"]
    assert [ask(path).headers["x-ratelimit-remaining"] for path in ("/login", "/sub/login", "/login")] == ["2", "1", "0"]
    assert (store.general, store.plain) == (0, 6)


def test_costs_that_come_again_are_prepared() -> None:
    """Each request has its own cost, by a callable that is called once for it; no two costs are taken for each other."""
    store, costs = Counted(Clock()), [2, 3, 2, 2, 0, 2, 90]
    given = iter(costs)
    ask = gated(site(), store, rules=[Rule("all", "99/minute", cost=lambda _: next(given))])
    left = [ask("/costly").headers["x-ratelimit-remaining"] for _ in costs]
    assert left == ["97", "94", "92", "90", "90", "88", "88"]  # the last one was refused
    assert store.plain == 2  # all but costs that are met for the first time, and what they are when they are met again
    assert next(given, None) is None


def test_a_condition_is_asked_once_and_its_rules_are_prepared() -> None:
    """Requests that meet other conditions have other plans, whatever the plan is."""
    store, asked = Counted(Clock()), []

    def is_paid(request: Any) -> bool:
        asked.append(request.path)
        return "x-paid" in request.headers

    rules = [
        Rule("paid", "9/minute", when=is_paid, replaces=["all"]),
        Rule("slow", "9/minute", path="/slow", when=is_paid, max_delay=1, replaces=["all", "paid"]),
        Rule("all", "5/minute"),
    ]
    ask = gated(site(), store, rules=rules)
    each = [(path, headers) for path in ("/costly", "/slow", "/costly") for headers in ({"x-paid": "1"}, {})]
    limits = [ask(path, headers=headers).headers["x-ratelimit-limit"] for path, headers in each]
    assert limits == ["9", "5", "9", "5", "9", "5"]
    assert asked == ["/costly"] * 2 + ["/slow"] * 4 + ["/costly"] * 2
    assert (store.plain, store.general) == (6, 0)


def test_keys_that_clients_make_up_are_prepared() -> None:
    """The guard on new buckets is asked once the key is known, and its overflow bucket is the same by any way."""
    replies = {}
    for kind in (Counted, General):
        store = kind(Clock())
        ask = gated(site(), store, rules=[Rule("all", "5/minute", key=["header:x-id"])], new_buckets=4)
        headers = [{"x-id": str(number)} for number in (1, 2, 3, 4, 5, 1, 2, 6)]
        replies[kind] = [ask("/costly", headers=each).headers["x-ratelimit-remaining"] for each in headers], kept(store, 0)
    assert replies[Counted] == replies[General]
    assert replies[Counted][0] == ["4", "4", "4", "4", "3", "3", "3", "2"]


@DOORS
@pytest.mark.parametrize("path", ["/slow", "/counted", "/logged", "/windows"])
def test_all_algorithms_and_delays_have_plain_plans(door: Any, path: str) -> None:
    """As long as nobody has to wait."""
    store = Counted(Clock())
    ask = door(store)
    for _ in range(3):
        ask(path)
    assert (store.general, store.plain) == (0, 3)


@pytest.mark.parametrize("door", [asgi, wsgi])
def test_a_request_that_has_to_wait_waits_for_its_turn(door: Any) -> None:
    """Its plan is plain until it does not fit: then it is booked, and one that would have to wait for longer is refused."""
    store = Counted(Clock())
    ask = door(store, rules=[Rule("slow", "20/second burst 1", max_delay=0.06)])
    began = monotonic()
    replies = [ask("/slow") for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert "delay=0.05" in replies[1].body.decode()
    assert 0.05 <= monotonic() - began < 5
    assert (store.general, store.plain) == (2, 1)


@DOORS
def test_limits_that_need_more_are_planned_anew(door: Any) -> None:
    """Though others that the same callable gives are prepared."""
    store = Counted(Clock())
    ask = door(store)
    plain = []
    for each in ("many", "warm", "many"):
        for _ in range(3):
            ask("/given", headers={"x-plan": each})
        plain.append(store.plain)
    assert plain[0] == plain[1] == 3
    assert plain[2] > 3


@DOORS
def test_policies_of_one_rule_are_told_apart(door: Any) -> None:
    """Limits of several algorithms, each in a bucket of its own, are named as those of one bucket are."""
    limits = "5/minute", Limit("100/hour", algorithm="fixed_window"), "3 at once"
    reply = door(Counted(Clock()), rules=[Rule("api", *limits)], headers=["draft-11"])("/costly")
    policies = '"api-minute";q=5;w=60, "api-hour";q=100;w=3600, "api-concurrent";q=3;qu="concurrent-requests"'
    assert reply.headers["ratelimit-policy"] == policies


@DOORS
def test_a_callable_is_asked_once_for_a_request(door: Any) -> None:
    """Whether its limits are known, have to be read, or are not plain."""
    asked: list[str] = []
    rule = Rule("given", lambda request: asked.append(request.path) or by_plan(request), "9/minute")
    ask = door(Counted(Clock()), rules=[rule])
    for plan in [*PLANS, *PLANS]:
        ask("/costly", headers={"x-plan": plan})
    assert len(asked) == 2 * len(PLANS)


def test_plans_of_limits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many limits a callable gives, long ones among them."""
    monkeypatch.setattr("limitgate.limits.bucket.MOST_REMEMBERED", 3)
    gate = LimitGateWSGI(site(), rules=[Rule("given", lambda request: request.headers["x-limit"])], store=MemoryStore(Clock()))
    limits = [f"{number}/minute" for number in range(1, 10)] + [f"9/minute{' ' * 300}", "2/minute"]
    assert [wsgi_reply(gate, "/costly", headers={"X-Limit": each}).status for each in limits[:9]] == [200] * 9
    assert [wsgi_reply(gate, "/costly", headers={"X-Limit": each}).status for each in limits[9:]] == [429, 429]
    assert gate.gate is not None
    (plans,) = gate.gate.rules.planner._prepared.values()
    assert len(plans._plans) <= 3


@DOORS
def test_nothing_is_asked_where_no_rule_applies(door: Any) -> None:
    """An exempt route and an exempt path cost no question, and have no decision."""
    store = Counted(Clock())
    ask = door(store)
    assert [ask(path).body for path in ("/health", "/api/free", "/health", "/api/free")] == [b"None"] * 4
    assert (store.general, store.plain) == (0, 0)


@pytest.mark.parametrize("more", [{}, {"charge_if": {"status": [200]}}], ids=["prepared", "planned anew"])
def test_routes_that_come_later_are_seen(more: Any) -> None:
    """A route that is added, or decorated anew, is limited from its first request on."""
    store = Counted(Clock())

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("")

    app = Starlette(routes=[])
    gate = LimitGate(app, rules=[Rule("api", "9/minute", key=["path", "ip"], **more)], store=store)
    ask = lambda path: asyncio.run(asgi_reply(gate, path)).headers.get("x-ratelimit-limit")  # noqa: E731
    assert [ask("/later/1"), ask("/later/2")] == ["9", "9"]
    app.router.routes.append(Route("/later/{n}", limit("2/minute")(answer)))
    assert [ask("/later/1"), ask("/later/2"), ask("/later/3")] == ["2", "2", "2"]
    assert len(store) == 3


@DOORS
def test_a_route_in_the_midst_of_a_key_is_that_of_the_request(door: Any) -> None:
    """Each route has a bucket of its own, wherever the path stands in the key, and the one that other ways lead to."""
    store, general = Counted(Clock()), General(Clock())
    both = [door(each, rules=[Rule("each", "1/minute", key=["caller|ip", "path", "ip"])]) for each in (store, general)]
    for ask in both:
        assert [ask(path).status for path in ("/costly", "/measured", "/costly")] == [200, 200, 429]
    assert store.plain
    assert buckets(store).keys() == buckets(general).keys()


@DOORS
@pytest.mark.filterwarnings("ignore:Unknown REQUEST_METHOD")  # says the validator
def test_methods_that_clients_invent_are_prepared(door: Any) -> None:
    """They are charged like any other."""
    store = Counted(Clock())
    ask = door(store, rules=[Rule("all", "9/minute")])
    assert [ask("/", f"X{number}").headers["x-ratelimit-remaining"] for number in range(5)] == ["8", "7", "6", "5", "4"]
    assert (store.general, store.plain) == (0, 5)


@DOORS
def test_a_route_stands_for_what_is_absent_before_it(door: Any) -> None:
    """Who sends no API key is counted by the route, as `limitgate ban` and the like do it, not by the rule's pattern."""
    ask = door(MemoryStore(Clock()), rules=[Rule("all", "2/minute", key=["api_key|path"])])
    assert [ask(path).status for path in ("/api/a", "/api/b", "/costly", "/api/c")] == [200, 200, 200, 429]


def test_limits_that_are_awaited_are_prepared() -> None:
    """There is one plan for all requests that are given the same."""
    store, asked = Counted(Clock()), []

    async def given(request: Any) -> str:
        asked.append(request)
        await asyncio.sleep(0)
        return request.headers["x-limit"]

    ask = asgi(store, rules=[Rule("all", given)])
    replies = [ask("/costly", headers={"x-limit": "5/minute"}) for _ in range(3)]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["4", "3", "2"]
    assert (store.general, store.plain, len(asked)) == (0, 3, 3)


@DOORS
def test_who_is_denied_asks_no_store(door: Any) -> None:
    """A rule that only would deny is noted beside what is charged."""
    for shadow, status, charged in ((False, 403, 0), (True, 200, 1)):
        store = Counted(Clock())
        ask = door(store, rules=[Rule("all", "9/minute"), Rule("deny", deny=True, shadow=shadow)])
        assert ask("/costly").status == status
        assert store.general + store.plain == charged


def test_a_request_that_passed_a_gate_has_no_plain_plan() -> None:
    """What a gate around has decided about is left out of such a request's plan, which is that of no other request."""
    store = Counted(Clock())
    ask = asgi(store)
    for _ in range(3):
        ask("/login", limitgate=None)
    assert (store.general, store.plain) == (3, 0)
    ask("/login", peer="192.0.2.99")
    assert (store.general, store.plain) == (3, 1)


@pytest.mark.parametrize("more", [{}, {"charge_if": {"status": [200]}}], ids=["plain", "by outcome"])
def test_a_route_by_host_is_not_taken_from_another_request(more: Any) -> None:
    """Where a route depends on more than method and path, it is looked up for each request."""

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("")

    inner = Starlette(routes=[Route("/{n}", limit("2/minute", name="inner")(answer))])
    app = Starlette(routes=[Host("a.example", inner), Route("/{n}", answer)])
    store = Counted(Clock())
    gate = LimitGate(app, rules=[Rule("api", "9/minute", key=["path", "ip"], **more)], store=store)

    def ask(host: str) -> Reply:
        return asyncio.run(asgi_reply(gate, "/x", headers={"host": host}))

    assert [ask(host).headers["x-ratelimit-limit"] for host in ("a.example", "b.example", "a.example")] == ["2", "9", "2"]
    assert (store.general, store.plain) == (0, 3)


class Failing(MemoryStore):
    """A memory store that fails after a while."""

    measures_silence = takes_plain = True
    is_down = False

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        self.check()
        return super().spend(plan, timeout)

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        return self.spend(plan, timeout)

    def check(self) -> None:
        if self.is_down:
            raise StoreError("down")


class FailingLater(Failing):
    """A memory store that says so by a future, as Redis does."""

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        return super().spend(plan, timeout)

    def aspend(self, plan: Any, timeout: float = 0) -> Any:
        return asyncio.ensure_future(super().aspend(plan, timeout))


class Held:
    """Something that a request leads to."""


@pytest.mark.parametrize("is_down", [False, True])
def test_an_asgi_request_leaves_no_circle_behind(*, is_down: bool) -> None:
    """What it leads to is gone with it, without the garbage collector, also where the store fails while it waits."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    async def held_by_the_last() -> Held | None:
        store, left = FailingLater(Clock()), []
        gate = LimitGate(app, rules=rules(), store=store)
        await gate(http_scope("/api/a"), receive, send)
        store.is_down = is_down
        for _ in range(2):
            scope = http_scope("/api/b")
            scope["server.held"] = held = Held()
            left.append(ref(held))
            await gate(scope, receive, send)
            del held, scope
            await asyncio.sleep(0)
        return left[-1]()  # the failure of the first is told in the log, which keeps it

    gc.disable()
    try:
        assert asyncio.run(held_by_the_last()) is None
    finally:
        gc.enable()


@DOORS
@pytest.mark.parametrize(("on_error", "statuses"), [("open", [200] * 3), ("closed", [503] * 3), ("local", [200, 200, 429])])
def test_where_the_store_fails_on_error_decides(door: Any, on_error: str, statuses: list[int]) -> None:
    """A plain plan that the store did not carry out is dealt with like any other."""
    store = Failing(Clock())
    ask = door(store, on_error=on_error)
    assert [ask("/api/a").status for _ in range(2)] == [200, 200]
    store.is_down = True
    assert [ask("/api/a").status for _ in range(3)] == statuses
    store.is_down = False
    assert ask("/api/a").status == 429


def test_a_request_by_outcome_has_a_plain_plan() -> None:
    """What is charged by the status of the response is charged as anything else, and seen to the end."""
    store = Counted(Clock())
    ask = asgi(store, rules=[Rule("api", "2/minute", charge_if={"status": [404]})])
    assert [ask("/nowhere").status for _ in range(3)] == [404, 404, 429]
    assert store.plain == 3


def test_where_nobody_waits_the_store_is_not_awaited() -> None:
    """On the memory store no coroutine runs for a prepared plan; a store that says nothing of the kind is awaited."""

    class Awaited(Counted):
        awaited = 0

        measures_silence = takes_plain = True

        async def aspend(self, plan: Any, timeout: float = 0) -> Any:
            self.awaited += 1
            return self.spend(plan, timeout)

    class AtOnce(Awaited):
        answers_at_once = measures_silence = takes_plain = True

        def spend(self, plan: Any, timeout: float = 0) -> Any:
            return super().spend(plan, timeout)

    def found(store: Awaited) -> tuple[Any, int]:
        ask = asgi(store)
        return [ask("/api/a").headers["x-ratelimit-remaining"] for _ in range(2)], store.awaited

    assert (found(AtOnce(Clock())), found(Awaited(Clock()))) == ((["1", "0"], 0), (["1", "0"], 2))
