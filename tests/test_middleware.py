"""What both doors do alike: every test runs behind LimitGate and behind LimitGateWSGI."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from limitgate import Caller, ConfigError, Decision, Limit, LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet
from limitgate.gate.admission import Admission
from tests.support.clock import Clock
from tests.support.doors import PEER, SITES, ASGISite, Site, WSGISite, asgi_reply, wsgi_reply

Open = Callable[..., Site]

NOW = 1_790_000_000  # when a Clock starts, in Unix seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def site(request: pytest.FixtureRequest, clock: Clock) -> Iterator[Open]:
    """Opens sites of one door, on a store with the test's clock unless it is given another."""
    with contextlib.ExitStack() as opened:

        def open_site(*rules: Any, **options: Any) -> Site:
            options.setdefault("store", MemoryStore(clock))
            return opened.enter_context(request.param(*rules, **options))

        yield open_site


def is_asgi(site: Site) -> bool:
    return isinstance(site, ASGISite)


# --- the refusal ------------------------------------------------------------------------------------------------------


def test_a_refusal_is_a_429_with_a_problem_body(site: Open) -> None:
    """A request over the limit gets exactly what the contract says, and nothing else."""
    it = site(Rule("login", "1/minute", path="/login"))
    assert it.ask("/login").status == 200
    refused = it.ask("/login")
    assert refused.status == 429
    assert refused.json() == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Quota Exceeded",
        "status": 429,
        "detail": refused.json()["detail"],
        "instance": refused.json()["instance"],
        "violated-policies": ["login"],
    }
    assert dict(refused.headers) == {
        "content-type": "application/problem+json",
        "content-length": str(len(refused.body)),
        "cache-control": "no-store",
        "retry-after": "60",
        "x-ratelimit-limit": "1",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": str(NOW + 60),
    }
    assert len(refused.json()["detail"]) > 10
    assert len(it.seen) == 1


def test_an_allowed_response_stays_as_the_app_made_it(site: Open) -> None:
    """Status, body and fields of the application's response are its own, the rate fields come on top."""
    allowed = site(Rule("api", "5/second")).ask()
    assert (allowed.status, allowed.body) == (200, b"hello")
    assert dict(allowed.headers) == {"content-type": "text/plain", "x-own": "1", **allowed.rate}
    assert len(allowed.rate) == 3


def test_the_body_names_the_rules_that_refused(site: Open) -> None:
    """All rules that refused are named, in their order; those with room and those in shadow are not."""
    it = site(
        Rule("roomy", "9/minute"), Rule("b", "1/minute"), Rule("shady", "1/minute", shadow=True), Rule("a", "1/hour", "1/day")
    )
    assert it.ask().status == 200
    assert it.ask().json()["violated-policies"] == ["b", "a"]


def test_what_a_client_sent_is_not_echoed(site: Open) -> None:
    """Neither the body nor the fields of a refusal repeat anything of the request."""
    it = site(Rule("all", "1/minute", key=["header:x-who"]), headers=["x-ratelimit", "x-ratelimit-windows", "draft-11"])
    for _ in range(2):
        reply = it.ask("/marker-path?marker-query", headers={"X-Who": "marker-header", "User-Agent": "marker-agent"})
    assert reply.status == 429
    assert b"marker" not in reply.body
    assert "marker" not in str(reply.headers)
    assert PEER.encode() not in reply.body


@pytest.mark.parametrize(
    ("limit", "waits"),
    [
        ("1/second", 1),
        ("3/second", 1),
        ("1000000/second burst 1", 1),
        ("7/minute", 9),
        ("333/minute", 1),
        ("2 per 7 seconds burst 1", 4),
        ("1/hour", 3600),
        ("1000/day", 87),
        ("1 per 366 days", 31622400),
    ],
)
def test_obeying_retry_after_exactly_is_enough(site: Open, clock: Clock, limit: str, waits: int) -> None:
    """Retry-After is the wait in whole seconds, rounded up, at least 1: a second less is refused, just that is enough."""
    clock.advance(us=123_457)
    it = site(Rule("api", limit))
    burst = Limit(limit).burst
    assert it.statuses(burst) == [200] * burst
    refused = it.ask()
    assert (refused.status, refused.wait) == (429, waits)
    if waits > 1:
        clock.advance(waits - 1)
        assert it.ask().status == 429
        clock.advance(1)
    else:
        clock.advance(waits)
    assert it.ask().status == 200


def test_retry_after_is_the_longest_of_all_that_refused(site: Open) -> None:
    """Of several windows and rules that refuse, the one that refuses longest is the one to wait for."""
    it = site(Rule("short", "1/second", "1/minute"), Rule("long", "1/hour"), Rule("roomy", "9/day"))
    it.ask()
    assert it.ask().wait == 3600


def test_head_gets_no_body(site: Open) -> None:
    """A refused HEAD has the fields of the refused GET and an empty body."""
    it = site(Rule("api", "1/minute"))
    it.ask()
    get, head = it.ask(method="GET"), it.ask(method="HEAD")
    assert (head.status, head.body) == (429, b"")
    assert head.headers == get.headers
    assert int(head.headers["content-length"]) == len(get.body) > 0


def test_a_request_that_can_never_fit_is_told_no_time(site: Open) -> None:
    """A cost above the burst is refused without Retry-After, charged nothing, and the body says that waiting is no use."""
    it = site(Rule("api", "5/minute", cost=lambda request: int(request.headers["x-cost"])), headers=["x-ratelimit", "draft-11"])
    refused = it.ask(headers={"X-Cost": "6"})
    assert refused.status == 429
    assert "retry-after" not in refused.headers
    assert "t=" not in refused.rate["ratelimit"]
    assert "not help" in refused.json()["detail"]
    assert it.ask(headers={"X-Cost": "5"}).status == 200


# --- rate fields ------------------------------------------------------------------------------------------------------

ONE = ("x-ratelimit",)
WINDOWS = ("x-ratelimit-windows",)
DRAFT = ("draft-11",)


@pytest.mark.parametrize(
    ("styles", "limits", "allowed", "refused"),
    [
        (
            ONE,
            ["2/minute"],
            {"x-ratelimit-limit": "2", "x-ratelimit-remaining": "1", "x-ratelimit-reset": str(NOW + 30)},
            {"x-ratelimit-limit": "2", "x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW + 60)},
        ),
        (
            ONE,  # of two with as little left, the one that takes longer; the reset is rounded up
            ["2/second", "100/minute burst 2"],
            {"x-ratelimit-limit": "2", "x-ratelimit-remaining": "1", "x-ratelimit-reset": str(NOW + 1)},
            {"x-ratelimit-limit": "2", "x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW + 2)},
        ),
        (
            WINDOWS,
            ["2/second", "100/minute", "3000/hour", "9999/day"],
            {
                "x-ratelimit-limit-second": "2",
                "x-ratelimit-remaining-second": "1",
                "x-ratelimit-limit-minute": "100",
                "x-ratelimit-remaining-minute": "99",
                "x-ratelimit-limit-hour": "3000",
                "x-ratelimit-remaining-hour": "2999",
                "x-ratelimit-limit-day": "9999",
                "x-ratelimit-remaining-day": "9998",
            },
            {
                "x-ratelimit-limit-second": "2",
                "x-ratelimit-remaining-second": "0",
                "x-ratelimit-limit-minute": "100",
                "x-ratelimit-remaining-minute": "98",
                "x-ratelimit-limit-hour": "3000",
                "x-ratelimit-remaining-hour": "2998",
                "x-ratelimit-limit-day": "9999",
                "x-ratelimit-remaining-day": "9997",
            },
        ),
        (
            WINDOWS,  # of one unit the tightest, other periods left out
            ["9/second burst 3", "50/second burst 2", "7 per 5 minutes"],
            {"x-ratelimit-limit-second": "2", "x-ratelimit-remaining-second": "1"},
            {"x-ratelimit-limit-second": "2", "x-ratelimit-remaining-second": "0"},
        ),
        (
            DRAFT,
            ["2/minute"],
            {"ratelimit-policy": '"api";q=2;w=60', "ratelimit": '"api";r=1;t=30'},
            {"ratelimit-policy": '"api";q=2;w=60', "ratelimit": '"api";r=0;t=30'},
        ),
        (
            DRAFT,  # q is the count, also where the burst is another
            ["10/minute burst 2"],
            {"ratelimit-policy": '"api";q=10;w=60', "ratelimit": '"api";r=1;t=6'},
            {"ratelimit-policy": '"api";q=10;w=60', "ratelimit": '"api";r=0;t=6'},
        ),
        (
            DRAFT,
            ["2/second", "100/minute", "2000/day"],
            {
                "ratelimit-policy": '"api-second";q=2;w=1, "api-minute";q=100;w=60, "api-day";q=2000;w=86400',
                "ratelimit": '"api-second";r=1;t=1, "api-minute";r=99;t=1, "api-day";r=1999;t=44',
            },
            {
                "ratelimit-policy": '"api-second";q=2;w=1, "api-minute";q=100;w=60, "api-day";q=2000;w=86400',
                "ratelimit": '"api-second";r=0;t=1, "api-minute";r=98;t=2, "api-day";r=1998;t=87',
            },
        ),
        ((), ["2/minute"], {}, {}),
    ],
)
def test_rate_fields(site: Open, styles: Any, limits: list[str], allowed: dict[str, str], refused: dict[str, str]) -> None:
    """Each style sends exactly its fields, on allowed and on refused responses alike."""
    it = site(Rule("api", *limits), headers=styles)
    first, second, third = (it.ask() for _ in range(3))
    assert [first.status, second.status, third.status] == [200, 200, 429]
    assert first.rate == allowed
    assert third.rate == refused


def test_styles_add_up(site: Open) -> None:
    """Several styles are sent side by side."""
    it = site(Rule("api", "1/minute"), headers=[*DRAFT, *ONE, *WINDOWS])
    assert len(it.ask().rate) == len(it.ask().rate) == 7


def test_several_rules_in_one_field(site: Open) -> None:
    """The draft's fields list every rule that applies; the convention's three describe the tightest."""
    it = site(
        Rule("wide", "9/minute"), Rule("narrow", "2/minute"), Rule("other", "1/day", path="/other"), headers=[*DRAFT, *ONE]
    )
    assert it.ask().rate == {
        "ratelimit-policy": '"wide";q=9;w=60, "narrow";q=2;w=60',
        "ratelimit": '"wide";r=8;t=7, "narrow";r=1;t=30',
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "1",
        "x-ratelimit-reset": str(NOW + 30),
    }


@pytest.mark.parametrize("limits", [["1/minute"], ["3/second", "3/hour"], ["2 per 7 seconds burst 1", "1/day"]])
def test_retry_after_is_never_earlier_than_what_the_draft_fields_say(site: Open, limits: list[str]) -> None:
    """``t`` of a policy that refused is its own wait, rounded up, so that Retry-After is the largest of them."""
    it = site(Rule("api", *limits), headers=DRAFT)
    while (reply := it.ask()).status == 200:
        pass
    times = [int(item.partition(";t=")[2]) for item in reply.rate["ratelimit"].split(", ") if ";r=0;" in item]
    assert reply.wait == max(times)


# --- what is counted --------------------------------------------------------------------------------------------------


def test_all_rules_or_none(site: Open, clock: Clock) -> None:
    """A request that one rule refuses is charged to none, whichever stands first."""
    it = site(Rule("before", "9/day"), Rule("tight", "1/minute", path="/tight"), Rule("after", "9/day"), headers=DRAFT)
    assert it.statuses(20, "/tight") == [200] + [429] * 19
    assert it.ask("/free").rate["ratelimit"].startswith('"before";r=7;')
    assert it.ask("/free").rate["ratelimit"].endswith('"after";r=6;t=28800')
    clock.advance(60)
    assert it.ask("/tight").status == 200


def test_a_refusal_by_one_window_leaves_the_others(site: Open, clock: Clock) -> None:
    """Requests refused by the second do not eat up the day."""
    it = site(Rule("api", "2/second", "4/day"))
    statuses = []
    for _ in range(3):
        statuses += it.statuses(10)
        clock.advance(1)
    assert [place for place, status in enumerate(statuses) if status == 200] == [0, 1, 10, 11]


@pytest.mark.parametrize(
    ("method", "headers", "counted"),
    [
        ("OPTIONS", {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT"}, False),
        ("OPTIONS", {"Origin": "https://a.example"}, True),
        ("OPTIONS", {"Access-Control-Request-Method": "PUT"}, True),
        ("OPTIONS", {}, True),
        ("GET", {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT"}, True),
    ],
)
def test_preflights_are_not_counted(site: Open, method: str, headers: dict[str, str], *, counted: bool) -> None:
    """A CORS preflight always passes and is charged nothing; anything that is not quite one counts."""
    it = site(Rule("api", "2/minute"))
    first = it.ask(method=method, headers=headers)
    assert bool(first.rate) == counted
    assert [it.ask().status, it.ask().status] == [200, 429 if counted else 200]
    assert it.ask(method=method, headers=headers).status == (429 if counted else 200)


def test_an_exempt_rule_switches_every_rule_off(site: Open) -> None:
    """Where an exempt rule matches there is no decision, no field and no charge, for no rule."""
    it = site(Rule("all", "2/minute"), Rule("health", path="/healthz", exempt=True))
    replies = [it.ask("/healthz") for _ in range(5)]
    assert {reply.status for reply in replies} == {200}
    assert not any(reply.rate for reply in replies)
    assert it.seen == [None] * 5
    assert it.ask().rate["x-ratelimit-remaining"] == "1"


def test_head_counts_as_get(site: Open) -> None:
    """A rule for GET covers HEAD, one for POST does not."""
    it = site(Rule("read", "2/minute", methods=["GET"]), Rule("write", "1/minute", methods=["post"]))
    assert [it.ask(method=method).status for method in ("HEAD", "GET", "HEAD", "POST", "POST", "PUT")] == [
        *[200, 200, 429],
        *[200, 429, 200],
    ]


@pytest.mark.parametrize(
    "spelling",
    [
        *["/login", "//login", "/login/", "/./login", "/login;x", "/login;x/", "/;x/login", "/login%0a", "/login%00"],
        *["/log%69n", "/login?next=/", "/%2e/login", "//x//..//login//", "/login%0d%0a", "/login/.", "/login/x/.."],
        *["/x/../login", "/login%09", "/login%7f"],
    ],
)
def test_no_spelling_slips_past_a_rule(site: Open, spelling: str) -> None:
    """However a path is spelled that some framework takes for ``/login``, the rule for ``/login`` applies."""
    it = site(Rule("login", "1/minute", path="/login"))
    assert it.ask("/login").status == 200
    assert it.ask(spelling).status == 429


@pytest.mark.parametrize("other", ["/logins", "/log", "/login/x", "/xlogin", "/", "/x/login", "/login.html"])
def test_other_paths_are_not_taken_for_it(site: Open, other: str) -> None:
    """A rule for ``/login`` has no say about its neighbours."""
    it = site(Rule("login", "1/minute", path="/login"))
    it.ask("/login")
    assert it.ask(other).status == 200
    assert it.seen[-1] is None


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("/api/**", ["/api", "/api/", "/api/x", "/api/x/y", "//api//x"], ["/apix", "/", "/v1/api"]),
        ("/items/{id}", ["/items/1", "/items/abc/", "/items/%20"], ["/items", "/items/", "/items/1/2"]),
        ("/a/{x}/b/**", ["/a/1/b", "/a/2/b/c"], ["/a/b", "/a/1/c"]),
        ("/**", ["/", "/x", "/x/y"], []),
        ("/", ["/", "//"], ["/x"]),
        ("/caf\u00e9", ["/caf%C3%A9", "/caf%C3%A9/"], ["/cafe", "/caf%E9"]),
    ],
)
def test_patterns(site: Open, pattern: str, matching: list[str], other: list[str]) -> None:
    """A pattern covers what the contract says it covers, and no more."""
    it = site(Rule("it", "999/day", path=pattern))
    for path in matching + other:
        it.ask(path)
    assert [decision is not None for decision in it.seen] == [True] * len(matching) + [False] * len(other)


def test_patterns_match_below_the_mount_point(site: Open) -> None:
    """Where the server has mounted the application under a prefix, patterns match what is below it."""
    it = site(Rule("login", "1/minute", path="/login"))
    assert it.ask("/login", mount="/v1").status == 200
    assert it.ask("//login", mount="/v1").status == 429
    assert it.ask("/v1/login", mount="/v1").status == 200


def test_no_rule_no_decision(site: Open) -> None:
    """Where no rule matches, the decision is None and nothing is added."""
    it = site(Rule("login", "1/minute", path="/login"))
    assert not it.ask("/").rate
    assert it.seen == [None]


def test_the_decision_is_handed_to_the_app(site: Open) -> None:
    """The application finds the whole decision of its request."""
    it = site(Rule("api", "2/second", "100/minute"))
    it.ask()
    (decision,) = it.seen
    assert isinstance(decision, Decision)
    assert decision == Decision(True, 2, 1, 0.0, 0.5, 1, "api")
    assert [(window.rule, window.limit, window.period, window.remaining) for window in decision.windows] == [
        ("api", 2, 1, 1),
        ("api", 100, 60, 99),
    ]
    assert not decision.degraded
    assert not decision.shadow


# --- shadow -----------------------------------------------------------------------------------------------------------


def test_a_shadow_rule_never_refuses(site: Open) -> None:
    """Where only a shadow rule would refuse, the request passes, says so, and gets no Retry-After."""
    it = site(Rule("strict", "1/minute", shadow=True), Rule("real", "3/minute"))
    replies = [it.ask() for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429]
    assert not any("retry-after" in reply.headers for reply in replies[:3])
    assert [(decision.allowed, decision.shadow) for decision in it.seen] == [(True, False), (True, True), (True, True)]
    assert replies[3].json()["violated-policies"] == ["real"]


def test_a_shadow_rule_is_charged_when_it_fits(site: Open, clock: Clock) -> None:
    """A shadow rule counts what it would have let through, and does not keep the others from being charged."""
    it = site(Rule("strict", "2/minute", shadow=True), Rule("real", "9/day"), headers=DRAFT)
    fields = [it.ask().rate["ratelimit"] for _ in range(4)]
    assert [field.split(";t=")[0] for field in fields] == ['"strict";r=1', *['"strict";r=0'] * 3]
    assert [field.split('"real";')[1].split(";")[0] for field in fields] == ["r=8", "r=7", "r=6", "r=5"]
    clock.advance(30)
    it.ask()
    assert not it.seen[-1].shadow


def test_a_shadow_rule_is_charged_as_if_it_were_enforced(site: Open) -> None:
    """In all its windows or in none, whatever their algorithms."""
    limits = [Limit("2/minute", algorithm="fixed_window"), Limit("9/day", algorithm="sliding_log"), "8/hour"]
    it = site(Rule("strict", *limits, shadow=True), Rule("real", "9/week"), headers=["draft-11"])
    it.statuses(5)
    assert [(each.rule, each.used) for each in it.seen[-1].windows] == [("strict", 2)] * 3 + [("real", 5)]


def test_a_shadow_rule_pays_nothing_for_what_others_refused(site: Open) -> None:
    """A request refused by a rule is charged to the shadow rules neither."""
    it = site(Rule("strict", "9/day", shadow=True), Rule("real", "1/day", path="/real"), headers=DRAFT)
    it.statuses(5, "/real")
    assert '"strict";r=7' in it.ask("/").rate["ratelimit"]


REAL = [
    Rule("real", "9/minute"),
    Rule("real", Limit("9/minute", algorithm="fixed_window")),
    Rule("real", "9/minute", "99/minute burst 50"),
]


@pytest.mark.parametrize("shadow_first", [True, False])
@pytest.mark.parametrize("real", REAL)
def test_a_shadow_rule_does_not_replace_the_numbers_of_others(site: Open, real: Rule, *, shadow_first: bool) -> None:
    """In headers and decision, whether it has room or not, and where the request is refused."""
    shadow = Rule("shadow", "2/minute", "3/hour", shadow=True)
    rules = [shadow, real] if shadow_first else [real, shadow]
    it = site(*rules, headers=["x-ratelimit", "x-ratelimit-windows"])
    replies = [it.ask() for _ in range(10)]
    assert [reply.status for reply in replies] == [200] * 9 + [429]
    for left, reply in zip([*range(8, -1, -1), 0], replies, strict=True):
        shown = {name: reply.rate[name] for name in ("x-ratelimit-limit", "x-ratelimit-remaining")}
        assert shown == {"x-ratelimit-limit": "9", "x-ratelimit-remaining": str(left)}
        assert reply.rate["x-ratelimit-remaining-minute"] == str(left)
        assert "x-ratelimit-remaining-hour" not in reply.rate
    assert [(decision.rule, decision.remaining) for decision in it.seen] == [("real", left) for left in range(8, -1, -1)]
    assert {window.rule for window in it.seen[0].windows} == {"shadow", "real"}


def test_the_shadow_option_puts_every_rule_in_shadow(site: Open) -> None:
    """With ``shadow=True`` everything is decided and reported, nothing is refused."""
    it = site(Rule("api", "1/minute"), shadow=True)
    replies = [it.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert [reply.rate["x-ratelimit-remaining"] for reply in replies] == ["0", "0", "0"]
    assert not any("retry-after" in reply.headers for reply in replies)
    assert [decision.shadow for decision in it.seen] == [False, True, True]


# --- cost -------------------------------------------------------------------------------------------------------------


def by_header(request: Any) -> Any:
    return {"none": 0, "two": 2, "five": 5, "minus": -1, "text": "2", "half": 0.5}[request.headers["x-cost"]]


def test_a_cost_that_depends_on_the_request(site: Open) -> None:
    """A callable says what a request costs; the cost is charged whole or not at all, 0 always passes."""
    it = site(Rule("api", "5/day", cost=by_header))
    costs = ["two", "two", "two", "none", "five", "none"]
    replies = [it.ask(headers={"X-Cost": cost}) for cost in costs]
    assert [reply.status for reply in replies] == [200, 200, 429, 200, 429, 200]
    assert [reply.rate["x-ratelimit-remaining"] for reply in replies] == ["3", "1", "1", "1", "1", "1"]
    assert [decision.granted for decision in it.seen] == [2, 2, 0, 0]


def test_a_fixed_cost(site: Open) -> None:
    """A rule's fixed cost is what each request takes."""
    assert site(Rule("api", "7/day", cost=3)).statuses(3) == [200, 200, 429]


@pytest.mark.parametrize(("cost", "error"), [("minus", ValueError), ("text", TypeError), ("half", TypeError)])
def test_a_cost_that_makes_no_sense_is_the_callables_mistake(site: Open, cost: str, error: type[Exception]) -> None:
    """A negative cost is a ValueError, one that is no integer a TypeError; neither reaches the application."""
    it = site(Rule("api", "5/day", cost=by_header))
    with pytest.raises(error, match="cost"):
        it.ask(headers={"X-Cost": cost})
    assert it.seen == []


# --- on_denied --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [[], [("retry-after", "7")], [("Retry-After", "7")], [("RETRY-AFTER", "7"), ("X-Why", "you")]])
def test_on_denied_makes_the_refusal(site: Open, request: pytest.FixtureRequest, own: list[tuple[str, str]]) -> None:
    """The callable's answer is sent with the rate fields, and with Retry-After only where it set none."""
    kind: type[Site] = request.node.callspec.params["site"]
    handed: list[Decision] = []
    denied = kind.answering(420, [("Content-Type", "text/plain"), *own], b"calm down", handed)
    it = site(Rule("api", "1/minute"), on_denied=denied)
    assert it.ask().status == 200
    refused = it.ask()
    assert (refused.status, refused.body) == (420, b"calm down")
    assert refused.headers.get_list("retry-after") == (["7"] if own else ["60"])
    assert refused.rate["x-ratelimit-remaining"] == "0"
    assert refused.headers["content-type"] == "text/plain"
    assert refused.headers.get("x-why") == dict(own).get("X-Why")
    assert "cache-control" not in refused.headers
    (decision,) = handed
    assert (decision.allowed, decision.rule, decision.retry_after) == (False, "api", 60.0)


def test_on_denied_is_not_told_to_wait_where_waiting_cannot_help(site: Open, request: pytest.FixtureRequest) -> None:
    """A cost above the burst gives ``on_denied`` no Retry-After either."""
    denied = request.node.callspec.params["site"].answering(429, [("Content-Type", "text/plain")], b"no", handed := [])
    it = site(Rule("api", "1/minute", cost=lambda _: 2), on_denied=denied)
    assert "retry-after" not in it.ask().headers
    assert handed[0].retry_after == math.inf


def test_on_denied_is_not_asked_for_what_passes(site: Open, request: pytest.FixtureRequest) -> None:
    """``on_denied`` is called for refusals only, and not in shadow."""
    denied = request.node.callspec.params["site"].answering(500, [("Content-Type", "text/plain")], b"", handed := [])
    assert site(Rule("api", "1/minute"), on_denied=denied, shadow=True).statuses(3) == [200, 200, 200]
    assert handed == []


# --- who asks ---------------------------------------------------------------------------------------------------------

DEFAULT_YAML = """
tier: default
rules:
  - {name: api, path: /api/**, key: [ip], qpm: 1}
  - {name: other, path: /other, key: [ip], qpm: 1}
"""
VIP_YAML = f"""
tier: vip
callers:
  - {{id: acme, api_key: "sha256:{hashlib.sha256(b"acme-key").hexdigest()}"}}
  - {{id: beta, api_key: "sha256:{hashlib.sha256(b"beta-key").hexdigest()}"}}
  - {{id: billing, header: {{X-Caller: billing}}}}
rules:
  - {{name: api, path: /api/**, key: [caller], qpm: 3}}
"""


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """A folder with the files of two tiers."""
    (tmp_path / "default.yaml").write_text(DEFAULT_YAML)
    (tmp_path / "vip.yaml").write_text(VIP_YAML)
    return tmp_path


def test_an_api_key_gives_its_tier(site: Open, tiers: Path) -> None:
    """A listed key is of its tier, wherever it comes from; each caller has a bucket of its own."""
    it = site(rules=str(tiers))
    assert [it.ask("/api/x", headers={"X-API-Key": "acme-key"}, peer=f"192.0.2.{n}").status for n in range(1, 5)] == [
        *[200, 200, 200],
        429,
    ]
    assert it.ask("/api/x", headers={"x-api-key": "beta-key"}).status == 200
    assert it.statuses(2, "/api/x") == [200, 429]


def test_an_unknown_api_key_counts_as_none(site: Open, tiers: Path) -> None:
    """Inventing keys gives neither a tier nor a fresh bucket."""
    it = site(rules=str(tiers))
    keys = [None, "guess", "guess-2", "", "acme-key "]
    statuses = [it.ask("/api/x", headers={"X-API-Key": key} if key is not None else {}).status for key in keys]
    assert statuses == [200, 429, 429, 429, 200]


def test_other_rules_of_the_default_tier_stay(site: Open, tiers: Path) -> None:
    """A tier replaces the rules that it names, the others still apply to its callers."""
    it = site(rules=tiers)
    assert it.statuses(2, "/other", headers={"X-API-Key": "acme-key"}) == [200, 429]


def test_the_api_key_may_be_a_bearer_token(site: Open, tiers: Path) -> None:
    """With ``api_key_header="authorization"`` the key is the Bearer token, in any case of the scheme."""
    it = site(rules=tiers, api_key_header="authorization")
    assert it.statuses(3, "/api/x", headers={"Authorization": "Bearer acme-key"}) == [200, 200, 200]
    assert it.ask("/api/x", headers={"Authorization": "bearer acme-key"}).status == 429
    assert it.statuses(2, "/api/x", headers={"Authorization": "Basic acme-key"}) == [200, 429]
    assert it.ask("/api/x", headers={"X-API-Key": "beta-key"}).status == 429


def test_a_callers_header_is_believed_only_of_a_trusted_client(site: Open, tiers: Path) -> None:
    """A header that names a caller counts of a client in ``trusted_proxies``, and of nobody else behind a proxy."""
    it = site(rules=tiers, trusted_proxies=["10.0.0.0/8"])
    named = {"X-Caller": "billing"}
    assert it.statuses(4, "/api/x", headers=named, peer="10.1.2.3") == [200, 200, 200, 429]
    assert it.statuses(2, "/api/x", headers=named, peer="192.0.2.7") == [200, 429]
    behind = {**named, "X-Forwarded-For": "192.0.2.8"}
    assert it.statuses(2, "/api/x", headers=behind, peer="10.1.2.3") == [200, 429]


def test_a_callers_header_is_believed_of_a_proxy_that_sets_it(site: Open, tiers: Path) -> None:
    """With ``set_by_proxy`` a header counts for any client behind a peer in ``trusted_proxies``."""
    told = VIP_YAML.replace("header: {X-Caller: billing}", "set_by_proxy: true, header: {X-Caller: billing}")
    (tiers / "vip.yaml").write_text(told)
    it = site(rules=tiers, trusted_proxies=["10.0.0.0/8"])
    behind = {"X-Caller": "billing", "X-Forwarded-For": "192.0.2.8"}
    assert it.statuses(4, "/api/x", headers=behind, peer="10.1.2.3") == [200, 200, 200, 429]
    assert it.statuses(2, "/api/x", headers=behind, peer="192.0.2.7") == [200, 429]


def test_identify_gives_the_tier(site: Open, tiers: Path) -> None:
    """``identify`` says who asks; None and a caller of an unknown tier get the default rules."""

    def identify(request: Any) -> Caller | None:
        who, _, tier = request.headers.get("x-who", "").partition("@")
        return Caller(who, tier) if who else None

    it = site(rules=tiers, identify=identify)
    assert it.statuses(4, "/api/x", headers={"X-Who": "acme@vip"}) == [200, 200, 200, 429]
    assert it.statuses(2, "/api/x", headers={"X-Who": "acme@nowhere"}) == [200, 429]
    assert it.statuses(2, "/api/x", peer="192.0.2.9") == [200, 429]


def test_identify_sees_the_request(site: Open) -> None:
    """``identify`` and a callable cost get a request with everything that the contract names."""
    seen = []

    def look(request: Any) -> Any:
        seen.append(
            (
                request.method,
                request.path,
                request.headers.get("X-One"),
                request.headers.get("x-none", "-"),
                request.client,
                str(request.query),
                (request.scope is None, request.environ is None),
            )
        )

    it = site(Rule("api", "9/day", cost=lambda request: look(request) or 1), identify=look, trusted_proxies=["192.0.2.0/24"])
    it.ask("//a/./b/?x=1&y=%20", "HEAD", headers={"x-ONE": "1", "X-Forwarded-For": "198.51.100.4"})
    assert seen[0][:6] == ("GET", "/a/b", "1", "-", "198.51.100.4", "x=1&y=%20")
    assert seen[0][6] == ((False, True) if is_asgi(it) else (True, False))
    assert seen[1] == seen[0]


def test_an_async_identify(tiers: Path, clock: Clock) -> None:
    """On ASGI, ``identify`` may be async."""

    async def identify(request: Any) -> Caller:
        return Caller("acme", "vip")

    with ASGISite(rules=tiers, store=MemoryStore(clock), identify=identify) as it:
        assert it.statuses(4, "/api/x") == [200, 200, 200, 429]


def test_an_async_identify_is_refused_where_nothing_can_await_it(tiers: Path, clock: Clock) -> None:
    """On WSGI, an async ``identify`` is an error that says what is wrong."""

    async def identify(request: Any) -> Caller:
        return Caller("acme", "vip")

    with pytest.raises((ConfigError, TypeError), match="identify"), WSGISite(rules=tiers, identify=identify) as it:
        it.ask("/api/x")


def test_an_api_key_that_identify_does_not_vouch_for_counts_as_none(site: Open) -> None:
    """With ``identify``, inventing API keys opens no buckets; a key that it knows goes by the caller."""
    known = {"one": Caller("acme"), "other": Caller("acme"), "third": Caller("beta")}
    it = site(Rule("api", "1/minute", key=["api_key"]), identify=lambda request: known.get(request.headers.get("x-api-key")))
    asked = ["guess", "guess-2", "one", "other", "third"]
    assert [it.ask(headers={"X-API-Key": key}).status for key in asked] == [200, 429, 200, 429, 200]


@pytest.mark.parametrize(
    ("key", "identify", "warned"),
    [(["api_key"], None, True), (["api_key|ip"], None, True), (["ip"], None, False), (["api_key"], lambda _: None, False)],
)
def test_unlisted_api_keys_are_warned_of(
    site: Open, caplog: pytest.LogCaptureFixture, key: list[str], identify: Any, *, warned: bool
) -> None:
    """Where any key that a client invents is a bucket of its own, a warning at start says so."""
    site(Rule("api", "1/minute", key=key), identify=identify)
    assert [("key" in line, record.levelname) for line, record in zip(caplog.messages, caplog.records, strict=True)] == (
        [(True, "WARNING")] if warned else []
    )


def test_what_identify_raises_is_not_swallowed(site: Open) -> None:
    """An error in ``identify`` is the application's own, and no request passes unlimited because of it."""

    def identify(request: Any) -> Caller:
        raise LookupError("no such user")

    it = site(Rule("api", "9/day"), identify=identify)
    with pytest.raises(LookupError, match="no such user"):
        it.ask()
    assert it.seen == []


# --- keys -------------------------------------------------------------------------------------------------------------

A, B = "192.0.2.1", "192.0.2.2"


@pytest.mark.parametrize(
    ("key", "first", "second", "shared"),
    [
        (["ip"], {"peer": A}, {"peer": A, "path": "/other"}, True),
        (["ip"], {"peer": A}, {"peer": B}, False),
        (["global"], {"peer": A}, {"peer": B}, True),
        (["path"], {"peer": A, "path": "/x"}, {"peer": B, "path": "/y"}, True),
        (["method"], {"method": "GET"}, {"method": "HEAD"}, True),
        (["method"], {"method": "GET"}, {"method": "POST"}, False),
        (["method"], {"method": "BREW"}, {"method": "STEEP"}, True),
        (["host"], {"headers": {"Host": "a.example"}}, {"headers": {"Host": "A.EXAMPLE:8000"}}, True),
        (["host"], {"headers": {"Host": "a.example"}}, {"headers": {"Host": "b.example"}}, False),
        (["header:x-tenant"], {"headers": {"X-Tenant": "a"}}, {"headers": {"x-tenant": "a"}, "peer": B}, True),
        (["header:x-tenant"], {"headers": {"X-Tenant": "a"}}, {"headers": {"X-Tenant": "b"}}, False),
        (["header:x-tenant"], {}, {"headers": {"X-Tenant": ""}}, True),
        (["header:x-tenant"], {"peer": A}, {"peer": B}, False),
        (["header:x-tenant"], {"peer": A}, {"peer": B, "headers": {"X-Tenant": A}}, False),
        (["header:x-tenant"], {"peer": A}, {"peer": A, "headers": {"X-Other": "1"}}, True),
        (["ip", "header:x-tenant"], {"headers": {"X-Tenant": "a"}}, {"headers": {"X-Tenant": "a"}, "peer": B}, False),
        (["header:x-a", "header:x-b"], {"headers": {"X-A": "1", "X-B": "23"}}, {"headers": {"X-A": "12", "X-B": "3"}}, False),
        (["header:x-a", "header:x-b"], {"headers": {"X-A": "1,2"}}, {"headers": {"X-A": "1", "X-B": "2"}}, False),
        (["api_key"], {"headers": {"X-API-Key": "k"}}, {"headers": {"X-API-Key": "k"}, "peer": B}, True),
        (["api_key"], {"headers": {"X-API-Key": "k"}}, {"headers": {"X-API-Key": "l"}}, False),
        (["api_key|ip"], {"headers": {"X-API-Key": "k"}, "peer": A}, {"peer": A}, False),
        (["api_key|ip"], {"headers": {"X-API-Key": "k"}, "peer": A}, {"headers": {"X-API-Key": "k"}, "peer": B}, True),
        (["api_key|header:x-tenant"], {"headers": {"X-Tenant": "k"}}, {"headers": {"X-API-Key": "k"}}, False),
        (["tier", "caller"], {"peer": A}, {"peer": A}, True),
        (["ip"], {"peer": "2001:db8::1"}, {"peer": "2001:db8:0:0:ffff::2"}, True),
        (["ip"], {"peer": "2001:db8::1"}, {"peer": "2001:db8:0:1::1"}, False),
        (["ip"], {"peer": A}, {"peer": f"::ffff:{A}"}, True),
        (["ip"], {"peer": f"::ffff:{A}"}, {"peer": f"::ffff:{B}"}, False),
        (["ip"], {"peer": None}, {"peer": None}, True),
        (["ip"], {"peer": None}, {"peer": "127.0.0.1"}, False),
        (["ip"], {"peer": ""}, {"peer": "127.0.0.1"}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:Unknown REQUEST_METHOD")  # the validator's word on methods that HTTP does not define
def test_keys(site: Open, key: list[str], first: dict[str, Any], second: dict[str, Any], *, shared: bool) -> None:
    """Two requests are in one bucket exactly when every part of the key is the same for both."""
    it = site(Rule("api", "1/minute", key=key))
    assert it.ask(**first).status == 200
    assert it.ask(**second).status == (429 if shared else 200)


def test_ipv6_clients_are_grouped_by_the_prefix_asked_for(site: Open) -> None:
    """``ipv6_prefix`` decides how much of an IPv6 network is one client."""
    it = site(Rule("api", "1/minute"), ipv6_prefix=48)
    assert [it.ask(peer=peer).status for peer in ("2001:db8::1", "2001:db8:0:9::1", "2001:db8:1::1")] == [200, 429, 200]


CHAIN = {"trusted_proxies": ["10.0.0.0/8", "192.0.2.1"]}


@pytest.mark.parametrize(
    ("options", "peer", "headers", "client"),
    [
        ({}, A, {"X-Forwarded-For": "198.51.100.4"}, A),
        (CHAIN, B, {"X-Forwarded-For": "198.51.100.4"}, B),
        (CHAIN, A, {"X-Forwarded-For": "198.51.100.4"}, "198.51.100.4"),
        (CHAIN, A, {"X-Forwarded-For": "203.0.113.9, 198.51.100.4, 10.9.9.9"}, "198.51.100.4"),
        (CHAIN, A, [("X-Forwarded-For", "203.0.113.9"), ("X-Forwarded-For", "198.51.100.4")], "198.51.100.4"),
        (CHAIN, A, [("X-Forwarded-For", "198.51.100.4"), ("X-Forwarded-For", "10.9.9.9")], "198.51.100.4"),
        (CHAIN, A, {"X-Forwarded-For": "198.51.100.4, not-an-address, 10.9.9.9"}, "10.9.9.9"),
        (CHAIN, A, {"X-Forwarded-For": "10.1.1.1, 10.2.2.2"}, "10.1.1.1"),
        (CHAIN, A, {"X-Forwarded-For": "198.51.100.4:1234"}, "198.51.100.4"),
        (CHAIN, A, {"X-Forwarded-For": ""}, A),
        (CHAIN, A, {"Forwarded": "for=198.51.100.4"}, A),
        (CHAIN, A, {"X-Real-IP": "198.51.100.4"}, A),
        (CHAIN, f"::ffff:{A}", {"X-Forwarded-For": "198.51.100.4"}, "198.51.100.4"),
        ({**CHAIN, "forwarded_header": "forwarded"}, A, {"Forwarded": 'for="[2001:db8::1]:99";proto=https'}, "2001:db8::1"),
        ({**CHAIN, "forwarded_header": "forwarded"}, A, {"X-Forwarded-For": "198.51.100.4"}, A),
        ({**CHAIN, "forwarded_header": "cf-connecting-ip"}, A, {"CF-Connecting-IP": "198.51.100.4"}, "198.51.100.4"),
        ({"trusted_proxies": ["unix"]}, None, {"X-Forwarded-For": "198.51.100.4"}, "198.51.100.4"),
        (CHAIN, None, {"X-Forwarded-For": "198.51.100.4"}, None),
        ({"trusted_proxies": ["unix"]}, A, {"X-Forwarded-For": "198.51.100.4"}, A),
    ],
)
def test_trusted_proxies(site: Open, options: dict[str, Any], peer: str | None, headers: Any, client: str | None) -> None:
    """The client is the first address from the right that is no trusted proxy; nobody else's word is taken."""
    found = []
    it = site(Rule("api", "1/minute", cost=lambda request: found.append(request.client) or 1), **options)
    assert it.ask(peer=peer, headers=headers).status == 200
    assert found == [client]
    assert it.ask(peer=client).status == 429


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_gate_that_is_switched_off(site: Open, monkeypatch: pytest.MonkeyPatch, *, by_environment: bool) -> None:
    """With ``enabled=False`` or ``LIMITGATE_ENABLED=false`` every request passes untouched; the decision is None."""
    options = {}
    if by_environment:
        monkeypatch.setenv("LIMITGATE_ENABLED", "false")
    else:
        options["enabled"] = False
    it = site(Rule("api", "1/minute"), **options)
    replies = [it.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert not any(reply.rate for reply in replies)
    assert it.seen == [None, None, None]


def test_options_come_from_the_environment(site: Open, tiers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not passed is read from ``LIMITGATE_*``; lists are JSON or separated by commas."""
    monkeypatch.setenv("LIMITGATE_RULES", str(tiers))
    monkeypatch.setenv("LIMITGATE_HEADERS", "x-ratelimit, draft-11")
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", '["10.0.0.0/8", "unix"]')
    monkeypatch.setenv("LIMITGATE_API_KEY_HEADER", "x-token")
    it = site()
    first = it.ask("/api/x", headers={"X-Token": "acme-key"})
    assert first.rate["x-ratelimit-limit"] == "3"
    assert first.rate["ratelimit-policy"] == '"api";q=3;w=60'
    assert it.ask("/api/x", peer="10.0.0.1", headers={"X-Forwarded-For": "198.51.100.4"}).status == 200
    assert it.ask("/api/x", peer="198.51.100.4").status == 429


def test_the_store_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIMITGATE_STORE`` is opened by each door for itself; without it the memory store is used."""
    for kind in SITES:
        with kind(Rule("api", "1/minute")) as it:
            assert it.statuses(2) == [200, 429]
        monkeypatch.setenv("LIMITGATE_STORE", "nonsense://")
        with pytest.raises(ConfigError, match="store"):
            kind(Rule("api", "1/minute"))
        monkeypatch.delenv("LIMITGATE_STORE")


def test_what_is_passed_beats_the_environment(site: Open, tiers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option in the code wins over the environment variable."""
    monkeypatch.setenv("LIMITGATE_RULES", str(tiers))
    monkeypatch.setenv("LIMITGATE_HEADERS", "draft-11")
    assert site(Rule("mine", "9/day"), headers=["x-ratelimit"]).ask().rate["x-ratelimit-limit"] == "9"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, "rules"),
        ({"rules": "/no/such/folder"}, ConfigError, "no/such/folder"),
        ({"rules": ["5/minute"]}, ConfigError, "rules"),
        ({"rules": 7}, ConfigError, "rules"),
        ({"colour": "red"}, (TypeError, ConfigError), "colour"),
        ({"trusted_proxies": ["10.0.0.0/99"]}, ConfigError, "trusted_proxies"),
        ({"trusted_proxies": ["10.0.0.1/8"]}, ConfigError, "trusted_proxies"),
        ({"headers": ["x-rate"]}, ConfigError, "headers"),
        ({"on_error": "maybe"}, ConfigError, "on_error"),
        ({"ipv6_prefix": 31}, ConfigError, "ipv6_prefix"),
        ({"ipv6_prefix": 129}, ConfigError, "ipv6_prefix"),
        ({"timeout": 0}, ConfigError, "timeout"),
        ({"timeout": -1}, ConfigError, "timeout"),
        ({"identify": "no such thing"}, ConfigError, "identify"),
        ({"on_denied": 7}, ConfigError, "on_denied"),
        ({"store": "mongodb://x"}, ConfigError, "store"),
        ({"store": 7}, (ConfigError, TypeError), "store"),
        ({"key_prefix": ""}, ConfigError, "key_prefix"),
    ],
)
@pytest.mark.parametrize("door", [LimitGate, LimitGateWSGI])
def test_a_mistake_is_told_at_start(door: Any, options: dict[str, Any], error: Any, message: str) -> None:
    """A missing or senseless option stops the application from starting, and the message names it."""
    if options.keys() - {"rules"}:
        options = {"rules": [Rule("api", "1/minute")], **options}
    with pytest.raises(error, match=message):
        door(lambda *_: None, **options)


def test_rules_may_be_a_rule_set_or_any_iterable(site: Open) -> None:
    """``rules`` takes a RuleSet, a list, a tuple or a generator of rules."""
    rule = Rule("api", "1/minute")
    for rules in (RuleSet([rule]), [rule], (rule,), (each for each in [rule])):
        assert site(rules=rules).statuses(2) == [200, 429]


def test_two_doors_on_one_store_share_its_buckets(clock: Clock) -> None:
    """The same rule and key is the same bucket, whether a request came through ASGI or WSGI."""
    store, rule = MemoryStore(clock), Rule("api", "3/minute", key=["ip", "header:x-tenant"])
    with ASGISite(rule, store=store) as one, WSGISite(rule, store=store) as other:
        tenant = {"X-Tenant": "caf\u00e9".encode().decode("latin-1")}
        statuses = [it.ask(headers=tenant).status for it in (one, other, one, other, one)]
    assert statuses == [200, 200, 200, 429, 429]


def test_key_prefixes_keep_gates_apart(site: Open, clock: Clock) -> None:
    """Two gates with different prefixes on one store have nothing to do with each other."""
    store, rule = MemoryStore(clock), Rule("api", "1/minute")
    one, other = site(rule, store=store, key_prefix="one"), site(rule, store=store, key_prefix="other")
    assert [one.ask().status, other.ask().status, one.ask().status] == [200, 200, 429]


def test_many_at_once_admit_exactly_the_limit(site: Open) -> None:
    """However many requests come at the same moment, no more pass than fit."""
    import asyncio

    it = site(Rule("api", "20/day"))
    counted: Counter[int] = Counter()
    if is_asgi(it):

        async def crowd() -> None:
            counted.update(reply.status for reply in await asyncio.gather(*[asgi_reply(it.app) for _ in range(100)]))

        it.runner.run(crowd())
    else:
        threads = [threading.Thread(target=lambda: counted.update([wsgi_reply(it.app).status])) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counted == {200: 20, 429: 80}


# --- gates in gates ---------------------------------------------------------------------------------------------------


def around(it: Site, clock: Clock, *rules: Rule, **options: Any) -> Site:
    """A site with one more gate around it, on a store of its own."""
    it.app = it._gated(it.app, {"store": MemoryStore(clock), "rules": list(rules), **options})
    return it


def test_a_response_has_the_fields_of_two_gates_once(site: Open, clock: Clock) -> None:
    """The tightest window of both, all policies in one list, whichever gate it is that has less left."""
    styles = ["x-ratelimit", "x-ratelimit-windows", "draft-11"]
    for many, few in ((9, 5), (5, 9)):
        it = site(Rule("inner", f"{few}/minute"), headers=styles)
        it = around(it, clock, Rule("outer", qpm=many, qph=99), headers=styles)
        reply = it.ask()
        assert reply.rate == {
            "x-ratelimit-limit": "5",
            "x-ratelimit-remaining": "4",
            "x-ratelimit-reset": str(NOW + 12),
            "x-ratelimit-limit-minute": "5",
            "x-ratelimit-remaining-minute": "4",
            "x-ratelimit-limit-hour": "99",
            "x-ratelimit-remaining-hour": "98",
            "ratelimit-policy": f'"outer-minute";q={many};w=60, "outer-hour";q=99;w=3600, "inner";q={few};w=60',
            "ratelimit": f'"outer-minute";r={many - 1};t={60 // many + (60 % many > 0)}, "outer-hour";r=98;t=37, '
            f'"inner";r={few - 1};t={60 // few + (60 % few > 0)}',
        }
        (decision,) = it.seen
        assert (decision.rule, decision.limit, decision.remaining) == ("inner" if few == 5 else "outer", 5, 4)
        assert [(window.rule, window.limit) for window in decision.windows] == [("outer", many), ("outer", 99), ("inner", few)]


@pytest.mark.parametrize(
    ("outer", "inner", "names"),
    [
        (["x-ratelimit"], ["draft-11"], {"x-ratelimit": ["7"], "draft-11": ['"outer"', '"inner"']}),
        (["draft-11"], ["x-ratelimit"], {"x-ratelimit": ["7"], "draft-11": ['"outer"', '"inner"']}),
        (["draft-11"], [], {"draft-11": ['"outer"']}),
        ([], ["draft-11", "x-ratelimit"], {"draft-11": ['"inner"'], "x-ratelimit": ["7"]}),
        ([], [], {}),
    ],
)
def test_two_gates_of_different_styles(site: Open, clock: Clock, outer: Any, inner: Any, names: dict[str, list[str]]) -> None:
    """Each style of either is there once and tells of both; a gate that has none is not told of."""
    it = around(site(Rule("inner", "7/minute"), headers=inner), clock, Rule("outer", "9/minute"), headers=outer)
    rate = it.ask().rate
    assert rate.get("x-ratelimit-limit") == dict(names).get("x-ratelimit", [None])[0]
    listed = [item.split(";")[0] for item in rate.get("ratelimit", "").split(", ") if item]
    assert listed == names.get("draft-11", [])


def test_a_refusal_inside_of_another_gate(site: Open, clock: Clock) -> None:
    """It has one Retry-After, names the rules that refused, and is told with what the outer gate has left."""
    options: dict[str, Any] = {"headers": ["x-ratelimit", "draft-11"]}
    it = around(site(Rule("inner", "2/minute"), **options), clock, Rule("outer", "9/minute"), **options)
    assert it.statuses(2) == [200, 200]
    refused = it.ask()
    assert (refused.status, refused.headers.get_list("retry-after")) == (429, ["30"])
    assert refused.json()["violated-policies"] == ["inner"]
    assert refused.rate == {
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": str(NOW + 60),
        "ratelimit-policy": '"outer";q=9;w=60, "inner";q=2;w=60',
        "ratelimit": '"outer";r=6;t=20, "inner";r=0;t=30',
    }
    assert len(it.seen) == 2


def test_a_refusal_by_the_outer_gate_reaches_no_inner_one(site: Open, clock: Clock) -> None:
    """What the outer gate refuses charges nothing inside and tells nothing of it."""
    inner = site(Rule("inner", "5/minute"), headers=["draft-11"])
    it = around(inner, clock, Rule("outer", "1 per 20 seconds"), headers=["draft-11"])
    assert it.ask().rate["ratelimit"] == '"outer";r=0;t=20, "inner";r=4;t=12'
    refused = it.ask()
    assert (refused.status, refused.wait, refused.rate["ratelimit"]) == (429, 20, '"outer";r=0;t=20')
    clock.advance(20)
    assert it.ask().rate["ratelimit"] == '"outer";r=0;t=20, "inner";r=4;t=12'


def test_obeying_the_refusal_of_an_inner_gate_is_enough(site: Open, clock: Clock) -> None:
    """An outer gate that has nothing left by then is waited for, too, as it was charged for what was refused."""
    it = around(site(Rule("inner", "1 per 10 seconds")), clock, Rule("outer", "2/minute"))
    assert it.ask().status == 200
    refused = it.ask()
    assert (refused.status, refused.wait) == (429, 30)
    assert "30 s" in refused.json()["detail"]
    clock.advance(30)
    assert it.ask().status == 200


def test_on_denied_of_an_inner_gate(site: Open, request: pytest.FixtureRequest, clock: Clock) -> None:
    """It is handed what all gates have decided, and its answer gets their fields once."""
    kind: type[Site] = request.node.callspec.params["site"]
    denied = kind.answering(420, [("Content-Type", "text/plain")], b"calm down", handed := [])
    it = around(site(Rule("inner", "1/minute"), on_denied=denied), clock, Rule("outer", "9/minute"), headers=["draft-11"])
    it.ask()
    refused = it.ask()
    assert (refused.status, refused.headers.get_list("retry-after")) == (420, ["60"])
    assert refused.rate["ratelimit"] == '"outer";r=7;t=14, "inner";r=0;t=60'
    (decision,) = handed
    assert (decision.allowed, decision.rule, decision.retry_after, decision.granted) == (False, "inner", 60.0, 0)
    assert [window.rule for window in decision.windows] == ["outer", "inner"]


@pytest.mark.parametrize("idle", ["outer", "inner"])
def test_a_gate_without_a_rule_for_the_request(site: Open, clock: Clock, idle: str) -> None:
    """Where one of the gates limits nothing, the other one is told of as if it were alone."""
    rules = {"outer": Rule("outer", "9/minute"), "inner": Rule("inner", "9/minute")}
    other = "inner" if idle == "outer" else "outer"
    for rule in (Rule(idle, "1/minute", path="/other"), Rule(idle, exempt=True)):
        rules[idle] = rule
        it = around(site(rules["inner"]), clock, rules["outer"])
        assert it.ask().rate["x-ratelimit-remaining"] == "8"
        assert [decision.rule for decision in it.seen] == [other]


@pytest.mark.parametrize("off", ["outer", "inner"])
def test_a_gate_that_is_switched_off_beside_another(site: Open, clock: Clock, off: str) -> None:
    """It is as if it were not there."""
    enabled = {"outer": off != "outer", "inner": off != "inner"}
    it = site(Rule("inner", "9/minute"), enabled=enabled["inner"])
    it = around(it, clock, Rule("outer", "9/minute"), enabled=enabled["outer"])
    other = "inner" if off == "outer" else "outer"
    assert it.ask().rate["x-ratelimit-remaining"] == "8"
    assert [decision.rule for decision in it.seen] == [other]


def test_three_gates(site: Open, clock: Clock) -> None:
    """However many gates there are, whatever stands between those that have something to tell."""
    it = around(site(Rule("a", "9/minute"), headers=["draft-11"], key_prefix="other"), clock, Rule("b", exempt=True))
    it = around(around(it, clock, Rule("c", "8/minute"), headers=["draft-11"]), clock, Rule("d", "7/s", path="/other"))
    it = around(around(it, clock, Rule("e", "1/s"), enabled=False), clock, Rule("a", "7/minute"), headers=["draft-11"])
    assert it.ask().rate["ratelimit"] == '"a";r=6;t=9, "c";r=7;t=8, "a-2";r=8;t=7'
    assert [window.rule for window in it.seen[0].windows] == ["a", "c", "a"]


def test_two_gates_on_one_bucket(site: Open, clock: Clock) -> None:
    """A bucket that both gates charge is told of once, as the second one left it."""
    store, rule = MemoryStore(clock), Rule("same", "9/minute")
    it = around(site(rule, store=store, headers=["draft-11"]), clock, rule, store=store, headers=["draft-11"])
    assert it.ask().rate["ratelimit"] == '"same";r=7;t=14'
    assert len(it.seen[0].windows) == 1
    assert [it.ask().status for _ in range(4)] == [200, 200, 200, 429]
    assert it.ask().json()["violated-policies"] == ["same"]


def test_the_clocks_of_two_gates(site: Open, clock: Clock) -> None:
    """``X-RateLimit-Reset`` is by the clock of the store that has the tightest window."""
    late = Clock()
    late.advance(1000)
    for outer, inner, reset in (("9/minute", "6/minute", NOW + 10), ("6/minute", "9/minute", NOW + 1010)):
        it = around(site(Rule("inner", inner)), late, Rule("outer", outer))
        assert it.ask().rate["x-ratelimit-reset"] == str(reset)


def test_each_gate_goes_by_the_outcome_for_itself(site: Open, clock: Clock) -> None:
    """What does not count is given back in the gate whose rule says so, and a refusal inside is an outcome outside."""
    outer = Rule("outer", "5/minute", charge_if={"status_not": [429]})
    inner = Rule("inner", "3/minute", charge_if={"status": [404]})
    it = around(site(inner, Rule("strict", "2/minute"), headers=["draft-11"]), clock, outer, headers=["draft-11"])
    assert it.ask().rate["ratelimit"] == '"outer";r=4;t=12, "inner";r=2;t=20, "strict";r=1;t=30'
    assert it.ask().rate["ratelimit"] == '"outer";r=3;t=24, "inner";r=2;t=20, "strict";r=0;t=60'
    for _ in range(3):
        refused = it.ask()
        assert (refused.status, refused.rate["ratelimit"]) == (429, '"outer";r=2;t=36, "inner";r=3;t=0, "strict";r=0;t=30')


@pytest.mark.parametrize("rule", [None, "tokens", "also"])
def test_what_a_request_has_cost_is_settled_in_every_gate(site: Open, clock: Clock, rule: str | None) -> None:
    """``settle`` on what the application sees is about the rules of all gates: those with a cost, or the one that is named."""
    settled: list[Any] = []

    class Settling(list[Any]):
        def append(self, decision: Any) -> None:
            decision.settle(5, rule)
            settled.append(decision)

    options: dict[str, Any] = {"headers": ["draft-11"]}
    it = site(Rule("also", "10/minute", cost=lambda _: 2), **options)
    kind = type(it)
    app = kind.answering(200, [("Content-Type", "text/plain")], b"hello", Settling())
    it.app = it._gated(app, {**options, "store": MemoryStore(clock), "rules": [Rule("also", "10/minute", cost=lambda _: 2)]})
    it = around(it, clock, Rule("requests", "10/minute"), Rule("tokens", "10/minute", cost=3), **options)
    it.ask()
    left = {window.rule: window.remaining for window in (it.ask(), settled[-1])[1].windows}
    assert left == {"requests": 8, "tokens": 2 if rule != "also" else 4, "also": 3 if rule != "tokens" else 6}


def test_fields_of_the_applications_own_are_replaced(site: Open, request: pytest.FixtureRequest, clock: Clock) -> None:
    """What the application itself says about rates gives way to the gates' fields, which are there once."""
    kind: type[Site] = request.node.callspec.params["site"]
    own = kind.answering(200, [("Content-Type", "text/plain"), ("X-RateLimit-Limit", "own")], b"hello", [])
    it = site(Rule("inner", "7/minute"))
    it.app = it._gated(own, {"store": MemoryStore(clock), "rules": [Rule("inner", "7/minute")]})
    reply = around(it, clock, Rule("outer", "9/minute")).ask()
    assert reply.headers.get_list("x-ratelimit-limit") == ["7"]
    assert reply.headers.get_list("x-ratelimit-remaining") == ["6"]


def test_visits_of_two_gates_are_no_garbage(site: Open, clock: Clock) -> None:
    """When a request is over, nothing that was remembered of it waits to be collected."""
    it = around(site(Rule("inner", "7/minute")), clock, Rule("outer", "9/minute"))
    it.ask()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is Admission for each in gc.get_objects())
        it.ask()
        assert sum(type(each) is Admission for each in gc.get_objects()) == before
    finally:
        gc.enable()
