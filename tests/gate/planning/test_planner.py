from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from limitgate import Caller, Rule, RuleSet
from limitgate.gate.planning.identity import Identities
from limitgate.gate.planning.planner import Planner
from limitgate.gate.planning.prepared import RequestPlan
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import ASGIRequest, Request
from limitgate.routes import NoRoutes, Route, Routes
from limitgate.rules.callers import KnownCaller


class OneRoute(Routes):
    """Routes of an application in which every request takes the same one."""

    def __init__(self, template: str, marks: tuple[Any, ...] = ()) -> None:
        self._route = Route(template, marks)
        self.asked = 0

    def decorated(self) -> bool:
        return bool(self._route.marks)

    def find(self, request: Request) -> Route:
        self.asked += 1
        return self._route

    def version(self, _: Request) -> object:
        return self


def planner(
    *rules: Rule, callers: Iterable[KnownCaller] = (), routes: Any = None, trusted: tuple[str, ...] = (), **options: Any
) -> Planner:
    """A planner with everything at its default that is not given."""
    binding = {"key_prefix": "limitgate", "secret": b"", "shadow": False}
    asking = {"identifies": False, "api_key_header": "x-api-key", "ipv6_prefix": 64}
    binding |= {name: options.pop(name) for name in binding if name in options}
    rule_set, proxies = RuleSet(rules, callers), TrustedProxies(trusted, "x-forwarded-for")
    identities = Identities(rule_set.callers, proxies, rule_set.tiers, **(asking | options))
    return Planner(rule_set, routes or NoRoutes(), identities, **binding)


def asked(
    method: str = "GET", path: str = "/", peer: str | None = "192.0.2.1", kind: str = "http", **headers: str | bytes
) -> ASGIRequest:
    """A request with these headers, underscores for hyphens."""
    raw = [
        (name.replace("_", "-").encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in headers.items()
    ]
    scope = {"type": kind, "path": path, "headers": raw, "query_string": b"", "client": None if peer is None else (peer, 4711)}
    request = ASGIRequest(scope | ({"method": method} if kind == "http" else {}))
    request.resolve_client = lambda request: request.peer
    return request


def applied(request_plan: RequestPlan) -> list[str | None]:
    """The names of the rules in a plan, in their order."""
    return [] if request_plan.plan is None else [charge.rule for charge in request_plan.plan.charges]


def is_decided(gate: Planner, mark: Rule, request: Request) -> bool:
    """True if a decorator is taken into account for a request, so that it lets it pass."""
    found = gate.prepared(request, None)
    assert found is not None
    return mark in found[0].marks


def bucket(gate: Planner, identified: Caller | None = None, **asks: Any) -> str:
    """The key of the one bucket that a request touches."""
    plan = gate.plan(asked(**asks), identified).plan
    assert plan is not None
    (charge,) = plan.charges
    return charge.key


RULES = (
    Rule("all", "99/s"),
    Rule("api", "9/s", path="/api/**"),
    Rule("items", "8/s", path="/api/items/{id}"),
    Rule("write", "7/s", path="/api/**", methods=["POST", "PUT"]),
    Rule("login", "5/m", path="/login", methods=["POST"]),
    Rule("read", "6/s", path="/login", methods=["GET"]),
    Rule("health", path="/healthz", exempt=True),
    Rule("probe", path="/probe", methods=["GET"], exempt=True),
    Rule("static", path="/static/**", exempt=True),
)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", ["all"]),
        ("GET", "/api", ["all", "api"]),
        ("GET", "/api/items/1", ["all", "api", "items"]),
        ("PUT", "/api/items/1", ["all", "api", "items", "write"]),
        ("post", "/api/items/1/edit", ["all", "api", "write"]),
        ("POST", "/login", ["all", "login"]),
        ("POST", "//login/;x", ["all", "login"]),
        ("GET", "/login", ["all", "read"]),
        ("HEAD", "/login", ["all", "read"]),
        ("DELETE", "/login", ["all"]),
        ("GET", "/apix", ["all"]),
        ("GET", "/healthz", []),
        ("POST", "/healthz", []),
        ("GET", "/probe", []),
        ("HEAD", "/probe", []),
        ("POST", "/probe", ["all"]),
        ("GET", "/static/app.js", []),
    ],
)
def test_all_rules_that_match_apply_in_their_order(method: str, path: str, expected: list[str]) -> None:
    """Path and method choose the rules, all that match apply together, and one exempt rule switches all off."""
    assert applied(planner(*RULES).plan(asked(method, path), None)) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_is_that_of_writing(order: int) -> None:
    """Rules apply in the order they were written, whichever pattern is more particular."""
    rules = [
        Rule("a", "1/s", path="/x/y"),
        Rule("b", "1/s", path="/{any}/y"),
        Rule("c", "1/s", path="/x/**"),
        Rule("d", "1/s"),
    ][::order]
    assert applied(planner(*rules).plan(asked(path="/x/y"), None)) == [rule.name for rule in rules]


def test_both_readings_of_a_path_count_each_rule_once() -> None:
    """A path that can be read in two ways falls under the rules for both, and under none of them twice."""
    gate = planner(Rule("zzz", "1/s", path="/zzz"), Rule("all", "1/s"), Rule("api", "1/s", path="/api/**"))
    assert applied(gate.plan(asked(path="/api/files/../../zzz"), None)) == ["zzz", "all", "api"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/../healthz",
        "/api/x/../../healthz",
        "/healthz;x",
        "/;/healthz",
        "/heal\x00thz",
        "/static/../api/items",
        "/static/../login",
        "/api/items/1/../../../static/x",
    ],
)
def test_a_path_that_can_be_read_otherwise_is_not_exempt(path: str) -> None:
    """Nobody slips past the rules by a path that is exempt in one interpretation and limited in another."""
    assert "all" in applied(planner(*RULES).plan(asked(path=path), None))


SPELLINGS = (
    "/healthz",
    "//healthz",
    "/healthz;x",
    "/static/../login",
    "/api/items/1",
    "/api/x/../items/1/",
    "/probe",
    "/x" * 200,
)


def test_a_path_is_read_alike_every_time() -> None:
    """What applied to a path when it was first asked for applies ever after, to each spelling and method for itself."""
    gate = planner(*RULES)
    for path in SPELLINGS * 2:
        for method in ("GET", "POST", "head", "X" * 300):
            first = applied(planner(*RULES).plan(asked(method, path), None))
            assert applied(gate.plan(asked(method, path), None)) == first


def test_a_path_is_read_anew_under_another_mount_point() -> None:
    """The same path as sent is another one below another mount point."""
    gate = planner(*RULES)
    for root, expected in (
        ("", ["all", "api", "items"]),
        ("/api", ["all"]),
        ("/api/items", ["all"]),
        ("/x", ["all", "api", "items"]),
    ):
        request = asked(path="/api/items/1")
        request.root = root
        assert applied(gate.plan(request, None)) == expected


def test_a_path_is_read_anew_for_another_tier() -> None:
    """Two tiers ask for the same path in turn, and each gets its own rules."""
    gate = planner(*TIERS, identifies=True)
    for _ in range(2):
        for caller, expected in ((None, DEFAULT), (Caller("x", "vip"), VIP), (Caller("x", "staff"), [])):
            assert applied(gate.plan(asked(), caller)) == expected


@pytest.mark.usefixtures("_unwatched")
def test_a_flood_of_paths_is_not_remembered_whole() -> None:
    """Whatever clients send, what is remembered about them stays small: in number, and in length."""
    gate = planner(Rule("a", "5/s", key=["ip", "header:x-id"]))
    for n in range(600):
        gate.plan(asked(path=f"/{n}"), None)
        gate.plan(asked(f"X{n}"), None)
    assert len(gate._matches) == len(gate._ways) == 512
    for long in ({"path": "/" + "x" * 200}, {"method": "X" * 200}):
        before = gate._matches.copy(), gate._ways.copy()
        assert applied(gate.plan(asked(**long), None)) == ["a"]
        assert (gate._matches, gate._ways) == before
    assert len(gate._prepared) == 2, "one for GET, and one for all methods that were invented"


def test_limits_that_callables_give_are_put_in_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rule has a condition, too; of many, so many at least are remembered."""
    monkeypatch.setattr("limitgate.limits.bucket.MOST_REMEMBERED", 2)
    gate = planner(Rule("a", lambda request: json.loads(request.headers["x-limits"]), when=lambda _: True), Rule("b", "9/s"))

    def rules(limits: object) -> Sequence[Any]:
        return gate.plan(asked(x_limits=json.dumps(limits)), None).compiled_rules

    first = rules("5/s")
    assert [str(each.rule.limits[0]) for each in first] == ["5/second", "9/second"]
    assert all(one is other for one, other in zip(first, rules("5/s"), strict=True))
    assert [[str(limit) for limit in each.rule.limits] for each in rules(["6/s", "7/m"])] == [
        ["6/second", "7/minute"],
        ["9/second"],
    ]
    assert [each.name for each in rules(None)] == ["b"]
    for given in ("5/s", "6/s", "7/s", "8/s", "5/s" + " " * 300):
        assert len(rules(given)) == 2


def test_no_rule_no_plan() -> None:
    """Where nothing matches there is nothing to charge."""
    request_plan = planner(Rule("api", "1/s", path="/api/**")).plan(asked(), None)
    assert request_plan.plan is None
    assert list(request_plan.compiled_rules) == []


def test_a_websocket_handshake_counts_as_a_get() -> None:
    """Rules for GET apply to handshakes, rules for other methods do not."""
    gate = planner(Rule("get", "1/s", methods=["GET"]), Rule("post", "1/s", methods=["POST"]))
    assert applied(gate.plan(asked(kind="websocket"), None)) == ["get"]


def test_a_websocket_has_a_plan_of_its_own() -> None:
    """Whichever came first at a path, messages are limited over a WebSocket alone, each at the cost of the handshake."""
    gate = planner(Rule("all", "1/s"), Rule("said", "2/s", per="message", cost=lambda request: len(request.path)))
    for _ in range(2):
        http, _ = gate.prepared(asked(path="/ab"), None)
        assert http.messages is None
        request = asked(path="/ab", kind="websocket")
        opening, keys = gate.prepared(request, None)
        assert applied(opening.bound(keys, None)) == ["all"]
        assert [(charge.rule, charge.cost) for charge in gate.messages(opening.messages, request).plan.charges] == [("said", 3)]


def test_preflights_are_never_counted() -> None:
    """A browser's question for permission is free, whatever applies to its path; any other OPTIONS is not."""
    mark = Rule("mark", "1/s")
    gate = planner(Rule("all", "1/s"), Rule("options", "1/s", methods=["OPTIONS"]), routes=OneRoute("/", (mark,)))
    preflight = asked("OPTIONS", origin="https://a", access_control_request_method="PUT")
    assert gate.plan(preflight, None).plan is None
    assert is_decided(gate, mark, preflight)
    assert applied(gate.plan(asked("OPTIONS"), None)) == ["all", "options", "mark"]
    assert applied(gate.plan(asked("OPTIONS", origin="https://a"), None)) == ["all", "options", "mark"]
    assert applied(gate.plan(asked("GET", origin="https://a", access_control_request_method="PUT"), None)) == ["all", "mark"]


def test_a_charge_says_all_that_the_store_needs() -> None:
    """Each rule becomes a bucket with its windows, its cost and whether it may refuse."""
    rules = [
        Rule("a", "5/s", qpm=9),
        Rule("b", "7/s", shadow=True, cost=3),
        Rule("c", "7/s", cost=lambda request: len(request.path)),
    ]
    plan = planner(*rules).plan(asked(path="/12345"), None).plan
    assert plan is not None
    assert plan.verb == "spend"
    assert [(charge.rule, charge.cost, charge.enforced) for charge in plan.charges] == [
        ("a", 1, True),
        ("b", 3, False),
        ("c", 6, True),
    ]
    assert [charge.bucket.limits for charge in plan.charges] == [rule.every_limit for rule in rules]
    assert all(re.fullmatch(rf"limitgate:{charge.rule}:[0-9a-f]{{32}}", charge.key) for charge in plan.charges)


def test_a_cost_is_asked_for_every_time() -> None:
    """A bucket that was charged one cost is charged another when the next request has another."""
    gate = planner(Rule("a", "9/s", cost=lambda request: int(request.query)), Rule("b", "9/s", cost=2))
    for cost in (1, 7, 1, 0):
        request = asked()
        request.scope["query_string"] = str(cost).encode()
        assert [charge.cost for charge in gate.plan(request, None).plan.charges] == [cost, 2]


def test_a_gate_in_shadow_binds_nothing() -> None:
    """With the option shadow, no rule may refuse and no decorator either."""
    gate = planner(Rule("a", "5/s"), Rule("b", "5/s", shadow=True), routes=OneRoute("/", (Rule("c", "5/s"),)), shadow=True)
    plan = gate.plan(asked(), None).plan
    assert plan is not None
    assert [charge.enforced for charge in plan.charges] == [False] * 3


def test_a_cost_is_asked_for_only_where_it_is_charged() -> None:
    """A callable cost is not called for requests that its rule is not for, or that are exempt."""
    called = []

    def cost(request: Request) -> int:
        called.append(request.path)
        return 1

    gate = planner(Rule("a", "5/s", path="/a", cost=cost), Rule("free", path="/a", methods=["PUT"], exempt=True))
    for method, path in (("GET", "/b"), ("PUT", "/a"), ("GET", "/a")):
        gate.plan(asked(method, path), None)
    assert called == ["/a"]


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({}, False),
        ({"key_prefix": "other"}, True),
        ({"secret": b"0123456789abcdef"}, True),
        ({"ipv6_prefix": 32}, True),
        ({"shadow": True}, False),
        ({"api_key_header": "authorization"}, False),
    ],
)
def test_the_options_reach_the_bucket(options: dict[str, Any], differs: object) -> None:
    """Key prefix, secret and IPv6 prefix change the bucket's key; other options leave it."""
    rule = Rule("a", "5/s")
    assert (bucket(planner(rule, **options), peer="2001:db8::1") != bucket(planner(rule), peer="2001:db8::1")) is differs


def digest_of(api_key: str) -> str:
    return f"sha256:{hashlib.sha256(api_key.encode()).hexdigest()}"


TIERS = (
    Rule("api", "5/s", key=["caller"]),
    Rule("rest", "9/s"),
    Rule("api", "50/s", tier="vip", key=["caller"]),
    Rule("extra", "7/s", tier="vip"),
    Rule("api", exempt=True, tier="staff"),
)
KNOWN = (
    KnownCaller(id="acme", api_key=digest_of("acme-key"), tier="vip"),
    KnownCaller(id="plain", api_key=digest_of("plain-key")),
    KnownCaller(id="billing", header={"X-Caller": "billing"}, tier="vip"),
    KnownCaller(id="admin", header={"X-Caller": "admin"}, tier="staff"),
)
DEFAULT, VIP = ["api", "rest"], ["api", "rest", "extra"]


@pytest.mark.parametrize(
    ("headers", "identified", "expected"),
    [
        ({}, None, DEFAULT),
        ({"x_api_key": "acme-key"}, None, VIP),
        ({"x_api_key": " acme-key "}, None, VIP),
        ({"x_api_key": "plain-key"}, None, DEFAULT),
        ({"x_api_key": "unknown"}, None, DEFAULT),
        ({"authorization": "Bearer acme-key"}, None, DEFAULT),
        ({"x_caller": "billing"}, None, VIP),
        ({"x_caller": "admin"}, None, []),
        ({}, Caller("x", "vip"), VIP),
        ({}, Caller("x"), DEFAULT),
        ({}, Caller("x", "staff"), []),
        # whom identify names is believed before keys, and keys before headers
        ({"x_api_key": "acme-key"}, Caller("x"), DEFAULT),
        ({"x_api_key": "plain-key", "x_caller": "billing"}, None, DEFAULT),
        # a tier that there is not
        ({}, Caller("x", "gold"), DEFAULT),
        ({"x_api_key": "acme-key"}, Caller("x", "gold"), DEFAULT),
        ({}, Caller("x", ""), DEFAULT),
    ],
)
def test_the_caller_decides_the_tier(headers: dict[str, str], identified: Caller | None, expected: list[str]) -> None:
    """Rules are those of the caller's tier, and the default's for everybody else and for unknown tiers."""
    gate = planner(*TIERS, callers=KNOWN, trusted=("192.0.2.1",), identifies=True)
    request_plan = gate.plan(asked(**headers), identified)
    assert applied(request_plan) == expected
    if expected:
        assert request_plan.plan.charges[0].bucket.limits[0].count == (50 if expected == VIP else 5)


def test_a_caller_header_from_a_stranger_is_nothing() -> None:
    """Headers name a caller only if they come from a trusted peer."""
    gate = planner(*TIERS, callers=KNOWN, trusted=("10.0.0.0/8",))
    assert applied(gate.plan(asked(x_caller="billing"), None)) == DEFAULT
    assert applied(gate.plan(asked(x_caller="billing", peer="10.0.0.1"), None)) == VIP


def test_a_caller_of_an_unknown_tier_is_in_the_default_tiers_buckets() -> None:
    """Inventing tiers opens no buckets: the part tier is then default."""
    gate = planner(Rule("a", "5/s", key=["tier"]), Rule("b", "5/s", tier="vip"), identifies=True)
    first = [gate.plan(asked(), caller).plan.charges[0].key for caller in (None, Caller("x", "gold"), Caller("y", "silver"))]
    assert len(set(first)) == 1
    assert gate.plan(asked(), Caller("x", "vip")).plan.charges[0].key != first[0]


def test_one_caller_is_one_however_it_is_known() -> None:
    """A caller's bucket goes by its id, from wherever it comes and whether identify, a key or a header names it."""
    callers = (KnownCaller(id="acme", api_key=digest_of("k")), KnownCaller(id="acme", header={"X-Caller": "acme"}))
    gate = planner(Rule("a", "5/s", key=["caller"]), callers=callers, trusted=("10.0.0.1",), identifies=True)
    assert (
        bucket(gate, Caller("acme"))
        == bucket(gate, x_api_key="k")
        == bucket(gate, peer="10.0.0.1", x_caller="acme")
        == bucket(gate, Caller("acme"), peer="203.0.113.9")
    )
    assert bucket(gate) != bucket(gate, peer="203.0.113.9")


BY_KEY = Rule("a", "5/s", key=["api_key"])


def test_without_a_list_each_key_is_a_bucket() -> None:
    """Where no keys are listed and nobody is identified, every key counts for itself, wherever it comes from."""
    gate = planner(BY_KEY)
    assert bucket(gate, x_api_key="one") != bucket(gate, x_api_key="two")
    assert bucket(gate, x_api_key="one") == bucket(gate, x_api_key=" one ", peer="203.0.113.9")
    assert bucket(gate) == bucket(gate, x_api_key="") == bucket(gate, x_api_key="  ") != bucket(gate, x_api_key="one")
    assert bucket(gate) != bucket(gate, peer="203.0.113.9")


@pytest.mark.parametrize("identifies", [False, True])
def test_where_keys_are_listed_an_unknown_key_is_no_key(identifies: object) -> None:
    """Inventing keys opens no buckets; each listed key has its own."""
    callers = (KnownCaller(id="one", api_key=digest_of("one")), KnownCaller(id="two", api_key=digest_of("two")))
    gate = planner(BY_KEY, callers=callers, identifies=identifies)
    nobody = bucket(gate)
    assert bucket(gate, x_api_key="invented") == bucket(gate, x_api_key="another") == nobody
    assert bucket(gate, Caller("x"), x_api_key="invented") == nobody
    assert len({nobody, bucket(gate, x_api_key="one"), bucket(gate, x_api_key="two")}) == 3
    assert bucket(gate, x_api_key="one") == bucket(gate, x_api_key="one", peer="203.0.113.9")


def test_where_callers_are_listed_without_keys_each_key_is_a_bucket() -> None:
    """A list of callers that are known by headers says nothing about API keys."""
    gate = planner(BY_KEY, callers=(KnownCaller(id="billing", header={"X-Caller": "billing"}),))
    assert bucket(gate, x_api_key="one") != bucket(gate, x_api_key="two") != bucket(gate)


def test_with_identify_only_an_identified_callers_key_counts() -> None:
    """A key that identify does not vouch for is no key, so inventing keys opens no buckets."""
    gate = planner(BY_KEY, identifies=True)
    nobody = bucket(gate)
    assert bucket(gate, x_api_key="invented") == bucket(gate, x_api_key="another") == nobody
    acme = bucket(gate, Caller("acme"), x_api_key="k")
    assert acme not in (nobody, bucket(gate, Caller("initech"), x_api_key="j"))
    assert acme == bucket(gate, Caller("acme"), x_api_key="k", peer="203.0.113.9")
    assert bucket(gate, Caller("acme")) == nobody


@pytest.mark.parametrize(
    ("value", "same_as"),
    [
        ("Bearer k", "k"),
        ("bearer k", "k"),
        ("BEARER k", "k"),
        ("Bearer   k  ", "k"),
        ("Bearer K", "K"),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic k", None),
        ("k", None),
        ("Bearerk", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("spelling", ["authorization", "Authorization"])
def test_authorization_holds_a_bearer_token(spelling: str, value: str, same_as: str | None) -> None:
    """With the header authorization the key is the Bearer token, and other schemes hold none."""
    gate, plain = planner(BY_KEY, api_key_header=spelling), planner(BY_KEY)
    expected = bucket(plain) if same_as is None else bucket(plain, x_api_key=same_as)
    assert bucket(gate, authorization=value) == expected
    assert bucket(gate, authorization=value, x_api_key="other") == expected


def test_an_api_key_is_the_bytes_that_were_sent() -> None:
    """A listed digest is that of the key's bytes, whatever letters they spell."""
    gate = planner(*TIERS, callers=(KnownCaller(id="a", api_key=digest_of("cl\u00e9"), tier="vip"),))
    assert applied(gate.plan(asked(x_api_key="cl\u00e9".encode()), None)) == VIP


SPACED = pytest.mark.parametrize("part", ["api_key|ip", "api_key | ip", " api_key|ip", "user|api_key", "user | api_key"])


@SPACED
def test_alternatives_may_be_spaced(part: str) -> None:
    """However the alternatives of a part are spaced, an API key among them is read."""
    gate = planner(Rule("a", "5/s", key=[part]))
    assert bucket(gate, x_api_key="one") != bucket(gate, x_api_key="two")


@pytest.mark.parametrize("part", ["path", " path ", "api_key | path"])
def test_the_route_is_asked_for_where_a_key_needs_it(part: str) -> None:
    """The part path is the framework's template where it can be known."""
    routes = [OneRoute("/a/{id}"), OneRoute("/b/{id}")]
    one, other = (bucket(planner(Rule("r", "5/s", key=[part]), routes=route), path="/a/1") for route in routes)
    assert one != other
    assert [route.asked for route in routes] == [1, 1]


def test_the_route_is_not_asked_for_in_vain() -> None:
    """Where neither a key nor a decorator needs it, the framework's routes are left alone."""
    routes = OneRoute("/a/{id}")
    planner(Rule("a", "5/s"), routes=routes).plan(asked(), None)
    planner(Rule("a", "5/s", key=["path"], path="/api/**"), routes=routes).plan(asked(path="/other"), None)
    assert routes.asked == 0


def test_a_decorated_route_takes_part_with_the_rules() -> None:
    """The limits on an endpoint come after the rules, in one plan, for their methods, in buckets of their own."""
    marks = (Rule("api", "1/s"), Rule("post", "2/s", methods=["POST"]))
    gate = planner(Rule("api", "5/s"), routes=OneRoute("/a", marks))
    request_plan = gate.plan(asked(), None)
    assert applied(request_plan) == ["api", "api"]
    assert len({charge.key for charge in request_plan.plan.charges}) == 2
    assert applied(gate.plan(asked("POST"), None)) == ["api", "api", "post"]
    assert all(is_decided(gate, mark, asked()) for mark in marks)
    assert applied(planner(routes=OneRoute("/a", marks)).plan(asked(), None)) == ["api"]


def test_an_exempt_endpoint_switches_every_rule_off() -> None:
    """Neither rules nor other decorators apply to an endpoint that is exempt."""
    limited = Rule("mark", "1/s")
    gate = planner(Rule("a", "5/s"), routes=OneRoute("/a", (limited, "exempt")))
    assert gate.plan(asked(), None).plan is None
    assert is_decided(gate, limited, asked())


def test_an_exempt_rule_switches_decorators_off() -> None:
    """An endpoint under an exempt rule runs without its own limit, and its decorator knows."""
    limited = Rule("mark", "1/s")
    gate = planner(Rule("free", exempt=True), routes=OneRoute("/a", (limited,)))
    assert gate.plan(asked(), None).plan is None
    assert is_decided(gate, limited, asked())


@SPACED
def test_a_decorator_may_go_by_api_key(part: str) -> None:
    """A decorator's key counts API keys like a rule's, though no rule asks for them."""
    gate = planner(routes=OneRoute("/a", (Rule("mark", "5/s", key=[part]),)))
    assert bucket(gate, x_api_key="one") != bucket(gate, x_api_key="two")


def test_a_decorator_that_goes_by_unlisted_keys_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """Where only a decorator goes by API keys that anybody can invent, its first request says so, and no other."""
    gate = planner(routes=OneRoute("/a", (Rule("mark", "5/s", key=["api_key"]),)))
    with caplog.at_level(logging.WARNING, "limitgate"):
        gate.plan(asked(), None)
        gate.plan(asked(), None)
    assert ["API key" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("rules", "options", "warns"),
    [
        ([BY_KEY], {}, True),
        ([Rule("a", "5/s", key=["api_key|ip"])], {}, True),
        ([Rule("a", "5/s", key=["path", "ip|api_key"])], {}, True),
        ([Rule("a", "5/s", key=["user | api_key"])], {}, True),
        ([Rule("a", "5/s"), Rule("a", "5/s", tier="vip", key=["api_key"])], {}, True),
        ([BY_KEY, Rule("b", "5/s", key=["api_key"])], {}, True),
        ([BY_KEY], {"callers": KNOWN[2:]}, True),
        ([BY_KEY], {"callers": KNOWN}, False),
        ([BY_KEY], {"identifies": True}, False),
        ([Rule("a", "5/s", key=["header:x-api_key"])], {}, False),
        ([Rule("a", "5/s", key=["caller", "user"])], {}, False),
        ([Rule("a", "5/s")], {}, False),
        ([], {}, False),
    ],
)
def test_unlisted_keys_are_pointed_out_at_start(
    rules: list[Rule], options: dict[str, Any], warns: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a rule goes by API keys that anybody can invent, a warning at start says so, once."""
    with caplog.at_level(logging.WARNING, "limitgate"):
        gate = planner(*rules, **options)
    assert (len(caplog.messages) == 1) is bool(warns)
    assert all("API key" in message for message in caplog.messages)
    caplog.clear()
    gate.plan(asked(x_api_key="k"), None)
    assert caplog.records == []


@pytest.mark.parametrize("path", ["/x/" + "../x/" * 200 + "..", "/" + "/;" * 300, "/healthz/" + ";/" * 9000])
def test_a_path_that_may_be_any_falls_under_every_rule(path: str) -> None:
    """Where it would take too long to tell what a path is, every rule for its method applies, and none that exempts."""
    gate = planner(*RULES)
    assert applied(gate.plan(asked(path=path), None)) == ["all", "api", "items", "read"]
    assert applied(gate.plan(asked("POST", path), None)) == ["all", "api", "items", "write", "login"]


@pytest.mark.parametrize("path", ["/api/items/{}", "/api//items/{}/", "/api;v=1/items/{}"])
def test_a_long_path_falls_under_its_own_rules(path: str) -> None:
    """A long path is matched as a short one is."""
    assert applied(planner(*RULES).plan(asked(path=path.format("x" * 5000)), None)) == ["all", "api", "items"]


def test_a_long_path_is_exempt_as_a_short_one_is() -> None:
    """Exempt rules are for long paths, too, where every interpretation of the path is exempt."""
    gate = planner(Rule("all", "9/s"), Rule("files", path="/files/**", exempt=True))
    assert applied(gate.plan(asked(path="/files/" + "x" * 5000), None)) == []
    assert applied(gate.plan(asked(path="/files/../" + "x" * 5000 + "/.."), None)) == ["all"]
    assert applied(gate.plan(asked(path="http://h/files/" + "x" * 5000), None)) == ["all"]
