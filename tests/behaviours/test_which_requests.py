"""Which requests a rule is for: paths, clients and conditions, rules that replace others, exempt and denying ones."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from django.urls import path
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import Caller, ConfigError, LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet, exempt, limit
from limitgate.http.request import ASGIRequest
from limitgate.rules.rule import unreplaced
from tests.support.clock import Clock
from tests.support.django_app import WAYS, hello
from tests.support.doors import SITES, ASGISite, Site, WSGISite, asgi_reply, handshake, wsgi_reply

OFFICE, SCRAPER, OTHER = "198.51.100.7", "203.0.113.9", "192.0.2.1"


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def site(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def opened(site: type[Site]) -> Iterator[Any]:
    """Opens a site, with a clock that stands."""
    sites: list[Site] = []

    def opening(*rules: Rule, **options: Any) -> Site:
        sites.append(site(*rules, store=MemoryStore(Clock()), **options))
        return sites[-1]

    yield opening
    for it in sites:
        it.close()


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_rule_with_several_paths_has_one_bucket_for_all(opened: Any) -> None:
    """A list of paths is one rule: what is asked at one path counts at the others, and nowhere else."""
    it = opened(Rule("api", "2/minute", path=["/a", "/b/**"]))
    assert [it.ask(each).status for each in ("/a", "/b/x", "/b", "/a", "/c")] == [200, 200, 429, 429, 200]


def test_several_paths_are_one_pattern_in_a_key(opened: Any) -> None:
    """Where no route is known, the part ``path`` of a key is the rule's own, however a path is spelled."""
    it = opened(Rule("api", "2/minute", path=["/a", "/b"], key=["path", "ip"]))
    assert [it.ask(each).status for each in ("/a", "/b", "/x/../a", "//b")] == [200, 200, 429, 429]


def test_a_path_that_matches_twice_is_charged_once(opened: Any) -> None:
    """Patterns of one rule may overlap."""
    it = opened(Rule("api", "2/minute", path=["/a/**", "/{x}/b"]))
    assert it.statuses(3, "/a/b") == [200, 200, 429]


def test_a_list_of_one_path_is_that_path() -> None:
    """So a rule says of itself the same, and its buckets keep their names."""
    assert Rule("api", "1/minute", path=["/a"]) == Rule("api", "1/minute", path="/a")


def test_excluded_paths_are_none_of_a_rule(opened: Any) -> None:
    """They are free, by whatever spelling a framework would take for them."""
    it = opened(Rule("api", "1/minute", path="/api/**", exclude=["/api/health", "/api/v2/**"]))
    assert it.statuses(2, "/api/x") == [200, 429]
    assert [it.ask(each).status for each in ("/api/health", "/api/health/", "/api/v2", "/api/v2/x")] == [200] * 4
    assert it.ask("/api/health/x").status == 429


def test_a_spelling_that_may_be_another_path_is_not_excluded(opened: Any) -> None:
    """A path that only some frameworks take for the excluded one stays limited."""
    it = opened(Rule("api", "1/minute", path="/api/**", exclude=["/api/health"]))
    assert [it.ask(each).status for each in ("/api/health;x", "/api/x/../health")] == [200, 429]


def test_a_path_too_long_to_read_is_not_excluded(opened: Any) -> None:
    """Of a path that nobody reads to its end every rule applies."""
    it = opened(Rule("api", "1/minute", path="/api/**", exclude=["/api/health"]))
    assert it.statuses(2, "/api/health" + "/." * 9000) == [200, 429]


def test_an_exempt_rule_may_have_exceptions(opened: Any) -> None:
    it = opened(Rule("all", "1/minute"), Rule("static", path=["/static/**", "/x"], exclude=["/static/big"], exempt=True))
    assert [it.ask(each).status for each in ("/static/a", "/x", "/static/big", "/static/big", "/static/a")] == [
        200,
        200,
        200,
        429,
        200,
    ]


# --- clients and conditions -------------------------------------------------------------------------------------------


def test_a_rule_for_some_clients(opened: Any) -> None:
    """Addresses and networks of both kinds; everybody else is not counted."""
    it = opened(Rule("few", "1/minute", clients=["203.0.113.0/24", "2001:db8::/32"]))
    for peer, status in [(SCRAPER, 429), ("2001:db8::1", 429), (OTHER, 200), ("2001:db9::1", 200), (None, 200)]:
        assert it.statuses(2, peer=peer) == [200, status]


def test_clients_are_those_behind_trusted_proxies(opened: Any) -> None:
    """The client that a trusted proxy names is judged, not the proxy, and nobody is who he says himself."""
    it = opened(Rule("no", deny=True, clients=[SCRAPER]), Rule("all", "9/minute"), trusted_proxies=["10.0.0.0/8"])
    sent = {"X-Forwarded-For": SCRAPER}
    assert it.ask(peer="10.0.0.1", headers=sent).status == 403
    assert it.ask(peer="10.0.0.1", headers={"X-Forwarded-For": f"{SCRAPER}, {OTHER}"}).status == 200
    assert it.ask(peer=OTHER, headers=sent).status == 200
    assert it.ask(peer=SCRAPER, headers={"X-Forwarded-For": OTHER}).status == 403


def test_a_condition_is_a_function_of_the_request(opened: Any) -> None:
    """Where it says no, the rule does not apply; it is called once for each request that the rule is for."""
    asked = []

    def is_search(request: Any) -> bool:
        asked.append(request.path)
        return request.query.get("q") is not None

    it = opened(Rule("search", "1/minute", path="/s", when=is_search))
    assert [it.ask(each).status for each in ("/s", "/s", "/s?q=1", "/s?q=2", "/s", "/other?q=1")] == [
        200,
        200,
        200,
        429,
        200,
        200,
    ]
    assert asked == ["/s"] * 5


def test_what_a_condition_raises_is_the_applications(opened: Any) -> None:
    """It is not taken for a yes or a no."""

    def broken(_: Any) -> bool:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        opened(Rule("r", "1/minute", when=broken)).ask()


def test_a_condition_that_turns_out_async_is_told(opened: Any) -> None:
    """An awaitable is true, whatever would come of it."""

    async def later(_: Any) -> bool:
        return False

    class Later:
        __call__ = staticmethod(later)

    def undecided(request: Any) -> Any:
        return later(request)

    with pytest.raises(TypeError, match="when of rule 'r' is async, expected a plain function"):
        opened(Rule("r", "1/minute", when=undecided)).ask()
    for condition in (later, Later()):
        with pytest.raises(ConfigError, match="is async, expected a plain function"):
            Rule("r", "1/minute", when=condition)  # type: ignore[arg-type]


def test_a_condition_is_asked_once_however_a_path_may_be_read(opened: Any) -> None:
    asked = []
    it = opened(Rule("all", "1/minute"), Rule("free", exempt=True, when=lambda request: asked.append(request) or True))
    assert it.statuses(2, "/a/../b;c") == [200, 200]
    assert len(asked) == 2


def test_an_allow_list(opened: Any) -> None:
    """The office is never limited, counted or told anything; all others are."""
    it = opened(Rule("all", "1/minute", key=["global"]), Rule("office", exempt=True, clients=[OFFICE]))
    assert it.statuses(3, peer=OFFICE) == [200] * 3
    assert it.seen == [None] * 3
    assert it.ask(peer=OFFICE).rate == {}
    assert it.statuses(2, peer=OTHER) == [200, 429]


def test_conditions_narrow_decorators_too() -> None:
    """`@limit` takes ``clients`` and ``when``, and is decided all the same where they say no."""

    @limit("1/minute", clients=[SCRAPER])
    async def view(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = LimitGate(Starlette(routes=[Route("/", view)]), rules=[], store=MemoryStore(Clock()))

    async def statuses(peer: str) -> list[int]:
        return [(await asgi_reply(app, peer=peer)).status for _ in range(2)]

    assert asyncio.run(statuses(OTHER)) == [200, 200]
    assert asyncio.run(statuses(SCRAPER)) == [200, 429]


def test_conditions_of_one_tier_only(opened: Any) -> None:
    """``tier`` narrows a rule as everything else does."""
    rules = [Rule("all", "1/minute"), Rule("all", "3/minute", tier="paid", clients=[OFFICE])]
    it = opened(*rules, identify=lambda request: Caller("me", tier=request.headers.get("x-tier", "default")))
    assert it.statuses(4, peer=OFFICE, headers={"X-Tier": "paid"}) == [200, 200, 200, 429]
    assert it.statuses(2, peer=OTHER, headers={"X-Tier": "paid"}) == [200, 200]
    assert it.statuses(2, peer=OTHER) == [200, 429]


# --- rules that replace others ----------------------------------------------------------------------------------------


def test_a_rule_replaces_another_where_it_applies(opened: Any) -> None:
    it = opened(Rule("all", "1/minute"), Rule("download", "3/minute", path="/d", replaces=["all"]))
    assert it.statuses(4, "/d") == [200, 200, 200, 429]
    assert it.statuses(2, "/") == [200, 429]
    assert [window.rule for window in it.seen[0].windows] == ["download"]


def test_a_star_replaces_all_rules_with_limits(opened: Any) -> None:
    """Neither allow nor deny lists are among them."""
    it = opened(
        Rule("all", "1/minute"),
        Rule("more", "1/minute", path="/d/**"),
        Rule("d", "3/minute", path="/d/**", replaces="*"),
        Rule("no", deny=True, clients=[SCRAPER]),
        Rule("office", exempt=True, clients=[OFFICE]),
    )
    assert it.statuses(4, "/d") == [200, 200, 200, 429]
    assert it.ask("/d", peer=SCRAPER).status == 403
    assert it.statuses(5, "/d", peer=OFFICE) == [200] * 5


def test_a_rule_that_does_not_apply_replaces_nothing(opened: Any) -> None:
    """Where its condition says no, the rule in its place holds: nobody is left without a limit."""
    it = opened(Rule("all", "1/minute"), Rule("big", "3/minute", clients=[OFFICE], replaces=["all"]))
    assert it.statuses(4, peer=OFFICE) == [200, 200, 200, 429]
    assert it.statuses(2, peer=OTHER) == [200, 429]


def test_a_denying_rule_may_be_replaced_by_name(opened: Any) -> None:
    it = opened(Rule("no", deny=True), Rule("robots", "1/minute", path="/robots.txt", replaces=["no"]))
    assert [it.ask(each).status for each in ("/", "/robots.txt", "/robots.txt")] == [403, 200, 429]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_a_replaced_rule_replaces_nothing(order: tuple[str, ...]) -> None:
    """In whatever order they are written: c applies, as b, which would replace it, does not."""
    rules = {
        "a": Rule("a", "1/minute", replaces=["b"]),
        "b": Rule("b", "1/minute", replaces=["c"]),
        "c": Rule("c", "1/minute"),
    }
    assert {rule.name for rule in unreplaced([rules[name] for name in order])} == {"a", "c"}


def test_of_rules_that_replace_each_other_the_first_applies() -> None:
    """One of them always does, so nobody gets away without a limit."""
    rules = [Rule("a", "1/minute", replaces=["*"]), Rule("b", "1/minute", replaces="*"), Rule("c", "1/minute")]
    assert [rule.name for rule in unreplaced(rules)] == ["a"]
    assert [rule.name for rule in unreplaced(rules[::-1])] == ["b"]


def _decorated(kind: str, *decorators: Any) -> Any:
    """A view of a framework behind a gate with the rule ``all``; gives the statuses of several requests to it."""
    rules = [Rule("all", "2/minute"), Rule("no", deny=True, clients=[SCRAPER])]

    def asgi_view(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    def wsgi_view() -> str:
        return "hello"

    view: Any = asgi_view if kind == "starlette" else wsgi_view
    for decorator in reversed(decorators):
        view = decorator(view)
    if kind == "starlette":
        app = LimitGate(Starlette(routes=[Route("/", view)]), rules=rules, store=MemoryStore(Clock()))

        async def ask(count: int, peer: str) -> list[int]:
            return [(await asgi_reply(app, peer=peer)).status for _ in range(count)]

        return lambda count, peer=OTHER: asyncio.run(ask(count, peer))
    flask = Flask(__name__)
    flask.add_url_rule("/", "view", view)
    flask.wsgi_app = LimitGateWSGI(flask.wsgi_app, rules=rules, store=MemoryStore(Clock()))  # type: ignore[method-assign]
    return lambda count, peer=OTHER: [wsgi_reply(flask, peer=peer).status for _ in range(count)]


KINDS = pytest.mark.parametrize("kind", ["starlette", "flask"])


@KINDS
@pytest.mark.parametrize("replaces", [["all"], "*", ["*"]])
def test_a_decorator_replaces_rules(kind: str, replaces: Any) -> None:
    statuses = _decorated(kind, limit("3/minute", replaces=replaces))
    assert statuses(4) == [200, 200, 200, 429]
    assert statuses(1, SCRAPER) == [403]


@KINDS
def test_decorators_on_one_view_apply_together_whatever_they_replace(kind: str) -> None:
    """A star is about rules, so that one decorator of a stack does not switch off the others."""
    statuses = _decorated(kind, limit("5/minute", replaces="*"), limit("3 per 2 minutes", replaces="*"))
    assert statuses(4) == [200, 200, 200, 429]


@KINDS
def test_a_decorator_replaces_another_one_by_name(kind: str) -> None:
    statuses = _decorated(kind, limit("5/minute", name="big", replaces=["small", "all"]), limit("1/minute", name="small"))
    assert statuses(6) == [200] * 5 + [429]


@KINDS
def test_a_decorator_that_replaces_an_unknown_rule_is_a_mistake(kind: str) -> None:
    statuses = _decorated(kind, limit("5/minute", name="big", replaces=["all", "al"]))
    with pytest.raises(ConfigError, match="limit 'big': replaces: there is no rule 'al', did you mean 'all'"):
        statuses(1)


@KINDS
def test_exempt_views_are_open_to_all(kind: str) -> None:
    """What is exempt knows no rules, those that deny included."""
    assert _decorated(kind, exempt)(2, SCRAPER) == [200, 200]


# --- rules that deny --------------------------------------------------------------------------------------------------


def test_a_denied_request_is_answered_and_charges_nothing(opened: Any) -> None:
    """403 with a problem body; the application never hears of it, and no bucket either."""
    it = opened(Rule("all", "1/minute", key=["global"]), Rule("no", deny=True, clients=["203.0.113.0/24"]))
    denied = it.ask(peer=SCRAPER)
    assert denied.status == 403
    assert denied.headers["content-type"] == "application/problem+json"
    assert denied.headers["cache-control"] == "no-store"
    assert "retry-after" not in denied.headers
    assert denied.rate == {}
    assert denied.json() == {
        "type": "about:blank",
        "title": "Forbidden",
        "status": 403,
        "detail": "This request is not permitted.",
    }
    assert it.ask(peer=SCRAPER, method="HEAD").body == b""
    assert not it.seen
    assert it.statuses(2) == [200, 429]


def test_a_denied_path(opened: Any) -> None:
    """Without conditions a denying rule is known by the path alone."""
    it = opened(Rule("no", deny=True, path="/.git/**"), Rule("all", "2/minute"))
    assert [it.ask(each).status for each in ("/.git", "/.git/config", "/x/../.git", "/", "/", "/")] == [
        403,
        403,
        403,
        200,
        200,
        429,
    ]


def test_what_a_decision_says_of_it() -> None:
    """Whoever logs decisions finds the rule, that nothing was granted, and that waiting does not help."""
    scope: dict[str, Any] = {}

    async def app(*_: Any) -> None:
        raise AssertionError

    async def outside(inner: Any, receive: Any, send: Any) -> None:
        admission = await gate.gate.acheck(ASGIRequest(inner))
        scope["decision"] = admission.decision
        await gate(inner, receive, send)

    gate = LimitGate(app, rules=[Rule("no", deny=True)], store=MemoryStore(Clock()))
    asyncio.run(asgi_reply(outside))
    decision = scope["decision"]
    assert (decision.allowed, decision.granted, decision.rule) == (False, 0, "no")
    assert decision.retry_after == math.inf
    assert decision.windows == ()


def test_on_denied_is_for_limits(opened: Any) -> None:
    """Who is told to wait has a page of its own; who may not come has none."""

    def unused(*_: Any) -> None:
        raise AssertionError

    assert opened(Rule("no", deny=True), on_denied=unused).ask().status == 403


@pytest.mark.parametrize("by_option", [True, False])
def test_a_shadow_only_says_that_it_would_deny(opened: Any, *, by_option: bool) -> None:
    """The request passes, with and without limits of its own."""
    shadow = {"shadow": True} if by_option else {}
    no = Rule("no", deny=True, shadow=not by_option, clients=[SCRAPER])
    it = opened(no, Rule("all", "1/minute", path="/limited"), **shadow)
    assert it.ask(peer=SCRAPER).status == it.ask("/limited", peer=SCRAPER).status == it.ask("/limited").status == 200
    alone, limited, other = it.seen
    assert (alone.allowed, alone.shadow, alone.rule, alone.retry_after) == (True, True, "no", 0)
    assert (limited.allowed, limited.shadow, limited.rule, limited.limit) == (True, True, "all", 1)
    assert (other.allowed, other.shadow) == (True, False)


@pytest.mark.parametrize(("denial", "status"), [(True, 403), (False, 1008)])
def test_a_denied_websocket(*, denial: bool, status: int) -> None:
    """The handshake is denied with the whole response, or closed as a violation of policy."""

    async def app(*_: Any) -> None:
        raise AssertionError

    gate = LimitGate(app, rules=[Rule("no", deny=True)], store=MemoryStore(Clock()))
    assert asyncio.run(handshake(gate, denial=denial)).status == status


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_django(way: Any) -> None:
    """The same by each way into Django."""
    rules = [
        Rule("all", "1/minute"),
        Rule("no", deny=True, clients=[SCRAPER]),
        Rule("office", exempt=True, clients=[OFFICE]),
        Rule("big", "2/minute", path=["/x", "/y"], replaces=["all"]),
    ]
    with way.project(path("hello", hello), path("x", hello), rules=rules, trusted_proxies=["127.0.0.1"]) as project:

        def ask(where: str, peer: str) -> Any:
            return project.ask(where, headers={"X-Forwarded-For": peer})

        denied = ask("/hello", SCRAPER)
        assert (denied.status_code, denied.headers["content-type"]) == (403, "application/problem+json")
        assert not denied.has_header("retry-after")
        assert [ask("/hello", OFFICE).status_code for _ in range(3)] == [200] * 3
        assert [ask("/x", OTHER).status_code for _ in range(3)] == [200, 200, 429]
        assert [ask("/hello", OTHER).status_code for _ in range(2)] == [200, 429]


def test_a_gate_inside_denies(site: type[Site]) -> None:
    """What the gates around have charged stays: the request did come."""
    seen: list[Any] = []
    app = site.answering(200, [("Content-Type", "text/plain")], b"", seen)
    cls: Any = LimitGate if site is ASGISite else LimitGateWSGI
    inner = cls(app, rules=[Rule("no", deny=True, path="/x")], store=MemoryStore(Clock()))
    gate = cls(inner, rules=[Rule("all", "2/minute")], store=MemoryStore(Clock()))

    def ask(where: str) -> int:
        return wsgi_reply(gate, where).status if site is WSGISite else asyncio.run(asgi_reply(gate, where)).status

    assert [ask("/x"), ask("/"), ask("/")] == [403, 200, 429]


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"path": []}, "path", "is not a path, expected for example '/api/\\*\\*', or a list"),
    ({"path": ["/a", 5]}, "path", "5 is not a path, expected text"),
    ({"path": ["/a", "b"]}, "path", "does not begin with '/'"),
    ({"exclude": "/a"}, "exclude", "expected a list"),
    ({"exclude": ["a"]}, "exclude", "does not begin with '/'"),
    ({"exclude": []}, "exclude", "empty, expected values, or no exclude"),
    ({"path": ["/a/b", "/a/{x}"], "exclude": ["/a/**"]}, "exclude", "excludes all of its path, expected some paths to remain"),
    ({"clients": "10.0.0.1"}, "clients", "expected a list"),
    ({"clients": []}, "clients", "empty, expected values, or no clients"),
    ({"clients": ["10.0.0.1/8"]}, "clients", "is not an address or CIDR, expected '10.0.0.0/8', without"),
    ({"clients": ["localhost"]}, "clients", "is not an address or CIDR"),
    ({"when": "app:is_search"}, "when", "is not callable, expected a plain function"),
    ({"replaces": "all"}, "replaces", "expected a list"),
    ({"replaces": []}, "replaces", "empty, expected values, or no replaces"),
    ({"replaces": ["a b"]}, "replaces", "expected"),
    ({"replaces": ["r"]}, "replaces", "replaces itself, expected other rules"),
    ({"deny": 1}, "deny", "expected"),
    ({"deny": True}, "deny", "denies and has limits, expected one or the other"),
    ({"deny": True, "exempt": True, "limits": []}, "deny", "is exempt and denies, expected one or the other"),
    ({"deny": True, "limits": [], "per": "message"}, "per", "denies, expected no per"),
    ({"deny": True, "limits": [], "charge_if": {"status": [401]}}, "charge_if", "denies, expected no charge_if"),
    ({"deny": True, "limits": [], "max_delay": 1}, "max_delay", "denies, expected no max_delay"),
    ({"deny": True, "limits": [], "reserve": 0.1}, "reserve", "denies, expected no reserve"),
    ({"exempt": True, "limits": [], "replaces": "*"}, "replaces", "is exempt, expected no replaces"),
]


@pytest.mark.parametrize(("options", "field", "expected"), MISTAKES)
def test_a_mistake_is_told_with_what_was_expected(options: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        Rule("r", **{"limits": ["1/minute"], **options})
    assert caught.value.field[0] == field


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        (["al"], "there is no rule 'al', did you mean 'all'[?] expected one of [*], all, free"),
        (["all", "free"], "rule 'free' is exempt, so nothing can replace it, expected exclude on that rule"),
    ],
)
def test_a_replaced_rule_has_to_be_there(replaced: list[str], expected: str) -> None:
    rules = [Rule("all", "1/minute"), Rule("free", path="/f", exempt=True), Rule("r", "1/minute", replaces=replaced)]
    with pytest.raises(ConfigError, match=expected) as caught:
        RuleSet(rules)
    assert caught.value.field == ("rules", 2, "replaces", len(replaced) - 1)
