from __future__ import annotations

import copy
import itertools
import pickle
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import Adaptive, Limit, Rule, RuleSet
from limitgate.errors import ConfigError
from limitgate.http.request import ASGIRequest
from limitgate.overload.options import Terms


def asked(method: str = "GET", path: str = "/", query: str = "") -> ASGIRequest:
    return ASGIRequest(
        {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": [], "client": None}
    )


def test_a_rule_is_what_the_contract_says_by_default() -> None:
    """A rule with nothing but a limit is for every path and method, by address, binding, at cost 1."""
    rule = Rule("api", "5/second")
    assert (rule.name, rule.limits, rule.path, rule.methods) == ("api", (Limit("5/second"),), "/**", None)
    assert (rule.key, rule.tier, rule.cost, rule.on_error) == (("ip",), None, 1, None)
    assert (rule.shadow, rule.exempt) == (False, False)
    assert (rule.lease, rule.buckets[0].lease) == (0, 0)
    assert (rule.charge_if, rule.per) == (None, "request")
    assert (rule.max_delay, rule.max_wait_us) == (None, 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("r", qps=5), ["5/second"]),
        (Rule("r", qpm=5), ["5/minute"]),
        (Rule("r", qph=5), ["5/hour"]),
        (Rule("r", qpd=5), ["5/day"]),
        (Rule("r", qpd=2000, qpm=100, qps=5), ["5/second", "100/minute", "2000/day"]),
        (Rule("r", "10/s burst 20"), ["10/second burst 20"]),
        (Rule("r", Limit("10/s"), "100/m"), ["10/second", "100/minute"]),
        (Rule("r", limits=["10/s", "100/m"]), ["10/second", "100/minute"]),
        (Rule("r", limits=("10/s",)), ["10/second"]),
        (Rule("r", "10/s", limits=["100/m"], qpd=9), ["10/second", "100/minute", "9/day"]),
        (Rule("r", "5 per 15 minutes", qps=1), ["5 per 900 seconds", "1/second"]),
        (Rule("r", limits=[{"limit": "10/s", "burst": 20}]), ["10/second burst 20"]),
    ],
)
def test_limits_and_quick_limits_are_windows_of_one_rule(rule: Rule, expected: list[str]) -> None:
    """The limits of a rule are its windows, then those of qps, qpm, qph and qpd."""
    assert [str(limit) for limit in rule.every_limit] == expected
    assert rule.buckets[0] is rule.buckets[0]


@given(st.integers(1, 1_000_000), st.sampled_from([("qps", "second"), ("qpm", "minute"), ("qph", "hour"), ("qpd", "day")]))
def test_a_quick_limit_is_the_limit_it_abbreviates_property(count: int, quick: tuple[str, str]) -> None:
    """qps=5 is Limit("5/second"), and so on for every count and unit."""
    assert Rule("r", **{quick[0]: count}).every_limit == (Limit(f"{count}/{quick[1]}"),)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "a b"}, "name"),
    ({"name": "a/b"}, "name"),
    ({"name": "a\n"}, "name"),
    ({"name": 'a"'}, "name"),
    ({"name": "\u00e4"}, "name"),
    ({"name": "x" * 65}, "name"),
    ({"name": 5}, "name"),
    ({"limits": []}, "limits"),
    ({"limits": ()}, "limits"),
    ({"limits": ["often"]}, "limits"),
    ({"limits": ["1/s", "1/month"]}, "limits"),
    ({"limits": [5]}, "limits"),
    ({"limits": "5/s"}, "limits"),
    ({"limits": ["5/fortnight"]}, "limits"),
    ({"limits": ["1000001/second"]}, "limits"),
    ({"limits": ["1 per 367 days"]}, "limits"),
    ({"limits": [{"limit": "5/s", "brust": 9}]}, "limits"),
    ({"limits": [{"limit": "5/s", "burst": 0}]}, "limits"),
    ({"limits": [{"limit": "5/s", "burst": True}]}, "limits"),
    ({"limits": [{"limit": "5/s", "algorithm": "magic"}]}, "limits"),
    ({"qps": -1}, "qps"),
    ({"qpm": -1}, "qpm"),
    ({"qph": "5"}, "qph"),
    ({"qpd": 5.0}, "qpd"),
    ({"qps": True}, "qps"),
    ({"qps": 1_000_001}, "qps"),
    ({"qpd": 10**30}, "qpd"),
    ({"path": "login"}, "path"),
    ({"path": "/a*"}, "path"),
    ({"path": "/{id:int}"}, "path"),
    ({"path": ["/a", "b"]}, "path"),
    ({"path": None}, "path"),
    ({"methods": []}, "methods"),
    ({"methods": "GET"}, "methods"),
    ({"methods": ["G ET"]}, "methods"),
    ({"methods": [""]}, "methods"),
    ({"methods": [5]}, "methods"),
    ({"key": []}, "key"),
    ({"key": "ip"}, "key"),
    ({"key": ["cookie"]}, "key"),
    ({"key": [5]}, "key"),
    ({"tier": ""}, "tier"),
    ({"tier": 5}, "tier"),
    ({"limits": ["5/s"], "cost": 6}, "cost"),
    ({"limits": ["50/s", "5/m"], "cost": 6}, "cost"),
    ({"limits": ["5/s burst 3"], "cost": 4}, "cost"),
    ({"qps": 50, "qpm": 5, "cost": 6}, "cost"),
    ({"cost": -1}, "cost"),
    ({"on_error": "panic"}, "on_error"),
    ({"on_error": "OPEN"}, "on_error"),
    ({"shadow": "yes"}, "shadow"),
    ({"limits": [], "exempt": 1}, "exempt"),
    ({"exempt": True}, "exempt"),
    ({"limits": [], "qps": 1, "exempt": True}, "exempt"),
    ({"algorithm": "magic"}, "algorithm"),
    ({"algorithm": ""}, "algorithm"),
    ({"algorithm": 5}, "algorithm"),
    ({"algorithm": "ban"}, "algorithm"),
    ({"limits": [], "exempt": True, "algorithm": "gcra"}, "algorithm"),
    ({"align": "utc"}, "align"),
    ({"align": ""}, "align"),
    ({"algorithm": "fixed_window", "align": ""}, "align"),
    ({"algorithm": "fixed_window", "align": "Mars/Olympus"}, "align"),
    ({"algorithm": "fixed_window", "lease": 2}, "lease"),
    ({"lease": -1}, "lease"),
    ({"lease": 10}, "lease"),
    ({"lease": 1.0}, "lease"),
    ({"lease": "1"}, "lease"),
    ({"lease": True}, "lease"),
    ({"lease": None}, "lease"),
    ({"limits": ["50/s", "5/m"], "lease": 6}, "lease"),
    ({"qps": 50, "qpm": 5, "lease": 6}, "lease"),
    ({"limits": [{"limit": "5/s", "lease": 6}]}, "limits"),
    ({"limits": [{"limit": "5/s", "lease": -1}]}, "limits"),
    ({"limits": [{"limit": "5/s", "lease": True}]}, "limits"),
    ({"limits": [{"limit": "5/s", "lease": 5}, "9/m"]}, "limits"),
    ({"limits": [{"limit": "5/s", "lease": 5}], "qpm": 9}, "limits"),
    ({"burst": 5}, "burst"),
    ({"Path": "/x"}, "Path"),
    ({"charge_if": 401}, "charge_if"),
    ({"charge_if": [401]}, "charge_if"),
    ({"charge_if": "5xx"}, "charge_if"),
    ({"charge_if": {}}, "charge_if"),
    ({"charge_if": {"status": []}}, "charge_if"),
    ({"charge_if": {"status": [401], "status_not": [500]}}, "charge_if"),
    ({"charge_if": {"status": 401}}, "charge_if"),
    ({"charge_if": {"status": None}}, "charge_if"),
    ({"charge_if": {"status": "4xx"}}, "charge_if"),
    ({"charge_if": {"status": ["401"]}}, "charge_if"),
    ({"charge_if": {"status": [True]}}, "charge_if"),
    ({"charge_if": {"status": [401.0]}}, "charge_if"),
    ({"charge_if": {"status": [99]}}, "charge_if"),
    ({"charge_if": {"status": [600]}}, "charge_if"),
    ({"charge_if": {"status_not": ["6xx"]}}, "charge_if"),
    ({"charge_if": {"status_not": ["5XX"]}}, "charge_if"),
    ({"charge_if": {"status_not": [[]]}}, "charge_if"),
    ({"charge_if": {"state": [401]}}, "charge_if"),
    ({"charge_if": {"status": [401]}, "lease": 2}, "charge_if"),
    ({"charge_if": {"status": [401]}, "limits": [{"limit": "5/s", "lease": 5}]}, "charge_if"),
    ({"charge_if": {"status": [401]}, "per": "message"}, "charge_if"),
    ({"charge_if": {"status": [401]}, "limits": [], "exempt": True}, "charge_if"),
    ({"max_delay": 0}, "max_delay"),
    ({"max_delay": "0s"}, "max_delay"),
    ({"max_delay": -1}, "max_delay"),
    ({"max_delay": 60.001}, "max_delay"),
    ({"max_delay": "61s"}, "max_delay"),
    ({"max_delay": "2m"}, "max_delay"),
    ({"max_delay": "2 x"}, "max_delay"),
    ({"max_delay": "soon"}, "max_delay"),
    ({"max_delay": True}, "max_delay"),
    ({"max_delay": float("nan")}, "max_delay"),
    ({"max_delay": [2]}, "max_delay"),
    ({"max_delay": 2, "lease": 2}, "max_delay"),
    ({"max_delay": 2, "limits": [{"limit": "5/s", "lease": 2}]}, "max_delay"),
    ({"max_delay": 2, "limits": [], "exempt": True}, "max_delay"),
    ({"max_delay": 2, "per": "message"}, "max_delay"),
    ({"max_delay": 2, "shadow": True}, "max_delay"),
    ({"max_delay": 2, "limits": [{"limit": "5/s", "algorithm": "fixed_window"}]}, "max_delay"),
    ({"max_delay": 2, "limits": ["5/s", {"limit": "5/m", "algorithm": "fixed_window"}]}, "max_delay"),
    ({"per": "handshake"}, "per"),
    ({"per": "Message"}, "per"),
    ({"per": None}, "per"),
    ({"per": ["message"]}, "per"),
    ({"per": "message", "limits": [], "exempt": True}, "per"),
    ({"adaptive": 7}, "adaptive"),
    ({"adaptive": "yes"}, "adaptive"),
    ({"adaptive": {"min": 0}}, "adaptive"),
    ({"adaptive": {"min": 9, "max": 3}}, "adaptive"),
    ({"adaptive": {"most": 3}}, "adaptive"),
    ({"adaptive": True, "per": "message"}, "per"),
    ({"adaptive": True, "limits": [], "exempt": True}, "exempt"),
    ({"adaptive": False, "limits": []}, "limits"),
    ({"adaptive": True, "limits": [], "key": ["ip"]}, "key"),
    ({"adaptive": True, "limits": [], "cost": 2}, "cost"),
    ({"adaptive": True, "limits": [], "on_error": "open"}, "on_error"),
    ({"adaptive": True, "limits": [], "charge_if": {"status": [401]}}, "charge_if"),
    ({"adaptive": True, "limits": [], "lease": 2}, "lease"),
    ({"adaptive": True, "limits": [], "algorithm": "gcra"}, "algorithm"),
    ({"adaptive": True, "limits": [], "align": "UTC"}, "align"),
    ({"adaptive": True, "limits": [], "shadow": True, "max_delay": 1}, "max_delay"),
    ({"adaptive": True, "limits": [], "priority": "low"}, "priority"),
]


def test_options_that_go_with_an_adaptive_limit() -> None:
    """Alone it has no buckets; beside rates their options are about these."""
    rule = Rule("all", adaptive={"min": 2, "delay": "10ms"}, max_delay="50ms", reserve="10%", priority="low")
    assert rule.terms == Terms(Adaptive(min=2, delay=0.01), 0.05, Fraction(1, 10))
    assert (rule.has_limits, rule.has_counts, rule.buckets, rule.every_limit) == (True, False, (), ())
    assert Rule("all", adaptive=True, max_delay=1, priority="low").priority == "low"
    daily = Limit("9/day", algorithm="fixed_window")
    at_once = Rule("all", "9/minute", daily, adaptive=True, max_delay=0, reserve="10%", shadow=True)
    assert (at_once.terms.max_delay, at_once.max_wait_us) == (0.0, 0)
    both = Rule("api", "5/s", adaptive=True, key=["api_key"], cost=2, on_error="closed", charge_if={"status": [200]})
    assert (both.has_counts, both.terms) == (True, Terms(Adaptive()))
    assert Rule("api", "5/s", adaptive=False) == Rule("api", "5/s")


@pytest.mark.parametrize(("options", "field"), MISTAKES)
def test_rule_with_a_mistake_raises_config_error(options: dict[str, Any], field: str) -> None:
    """The error leads to the field, and says what would have been right."""
    with pytest.raises(ConfigError, match="expected") as caught:
        Rule(**{"name": "r", "limits": ["9/s"], **options})
    assert caught.value.field[:1] == (field,)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("r", "100/s", lease=50), [50]),
        (Rule("r", "100/s", Limit("200/m", lease=7), qpd=300, lease=50), [50, 7, 50]),
        (Rule("r", limits=[{"limit": "100/s", "lease": 50}, {"limit": "200/m", "lease": 7}]), [50, 7]),
        (Rule("r", Limit("100/s", lease=50)), [50]),
        (Rule("r", "100/s burst 50", lease=50), [50]),
        (Rule("r", "100/s", lease=0), [0]),
    ],
)
def test_the_lease_of_a_rule_is_for_limits_without_their_own(rule: Rule, expected: list[int]) -> None:
    """A rule's lease goes to all its limits, those of qps, qpm, qph and qpd too, but for those that have one."""
    assert [limit.lease for limit in rule.every_limit] == expected
    assert rule.buckets[0].lease == min(expected)


FIXED = {"algorithm": "fixed_window"}
BERLIN = {**FIXED, "align": "Europe/Berlin"}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("r", "5/s", algorithm="sliding_log"), [Limit("5/s", algorithm="sliding_log")]),
        (Rule("r", qps=5, qpd=9, **FIXED), [Limit("5/s", **FIXED), Limit("9/d", **FIXED)]),
        (Rule("r", "5/s", Limit("9/d", **FIXED)), [Limit("5/s"), Limit("9/d", **FIXED)]),
        (Rule("r", "5/s", Limit("9/d", algorithm="gcra"), **FIXED), [Limit("5/s", **FIXED), Limit("9/d")]),
        (Rule("r", Limit("9/m", lease=3), "5/s", algorithm="gcra", lease=2), [Limit("9/m", lease=3), Limit("5/s", lease=2)]),
        (Rule("r", qps=5, qpd=9, **BERLIN), [Limit("5/s", **FIXED), Limit("9/d", **BERLIN)]),
        (Rule("r", qpd=9, **FIXED, align="first-request"), [Limit("9/d", **FIXED, align="first-request")]),
        (
            Rule("r", "1/d", Limit("9/d", **FIXED), align="Asia/Beirut"),
            [Limit("1/d"), Limit("9/d", **FIXED, align="Asia/Beirut")],
        ),
        (
            Rule("r", Limit("1/d", **FIXED, align="utc"), "9/d", **BERLIN),
            [Limit("1/d", **FIXED, align="utc"), Limit("9/d", **BERLIN)],
        ),
    ],
    ids=itertools.count(),
)
def test_a_rule_says_how_limits_count_that_do_not(rule: Rule, expected: list[Limit]) -> None:
    """The algorithm and the alignment of a rule are for the limits that say nothing about them."""
    assert list(rule.every_limit) == expected


def test_a_lease_above_the_burst_says_how_much_is_possible() -> None:
    """The message about a lease names the rule, the limit that it is too much for, and the most that it takes."""
    with pytest.raises(ConfigError, match=r"rule 'r': lease: limit 5 per 60 s, burst 5: expected a lease of 0 to 5 .* not 6"):
        Rule("r", "50/s", "5/m", lease=6)


def test_an_exempt_rule_may_name_a_lease() -> None:
    """Where there are no limits there is nothing to lease from."""
    assert Rule("r", exempt=True, lease=5).buckets == ()


@pytest.mark.parametrize(
    ("charge_if", "message"),
    [
        ({"state": [401]}, "charge_if.state: unknown field, did you mean 'status'[?] expected one of status, status_not"),
        (
            {"status": ["401"]},
            r"charge_if.status\[0\]: '401' is not a status, expected a number such as 401 or a class such as 5xx",
        ),
        ({"status": [401, 5]}, r"charge_if.status\[1\]: 5 is not a status"),
        ({}, r"charge_if: expected either status or status_not, for example {status: \[401, 403\]}"),
    ],
)
def test_a_mistake_in_what_is_charged_says_where_it_is(charge_if: Any, message: str) -> None:
    """The message leads to the very place inside of ``charge_if``, and names what is known there."""
    with pytest.raises(ConfigError, match=f"^rule 'r': {message}"):
        Rule("r", "5/s", charge_if=charge_if)


def test_a_mistake_beside_limits_is_told_with_the_fields_of_a_rule() -> None:
    """An unknown field of a rule is told with those of a rule, also where there is a ``charge_if``."""
    with pytest.raises(ConfigError, match=r"expected one of name, limits, .*, charge_if, ban, per"):
        Rule("r", "5/s", charge_if={"status": [401]}, statsu=[401])


def test_what_is_charged_can_be_handed_on() -> None:
    """One `ChargeIf` may serve several rules."""
    charge_if = Rule("one", "5/s", charge_if={"status": [401, "5xx"]}).charge_if
    assert charge_if is not None
    rule = Rule("two", "5/s", charge_if=charge_if)
    assert rule.charge_if == charge_if
    assert [status for status in (200, 401, 403, 500, 599) if charge_if.counts(status)] == [401, 500, 599]


@pytest.mark.parametrize("cost", [1.0, "1", None, True, [1]])
def test_a_fixed_cost_that_is_no_integer_is_a_type_error(cost: Any) -> None:
    """A cost is a whole number of requests; anything else is a TypeError, as it is from a callable."""
    with pytest.raises(TypeError, match="expected an integer"):
        Rule("r", "1/s", cost=cost)


def test_a_negative_fixed_cost_is_a_value_error() -> None:
    """Nobody is paid for a request."""
    with pytest.raises(ValueError, match="expected at least 0"):
        Rule("r", "1/s", cost=-1)


@pytest.mark.parametrize(
    ("given", "ahead"),
    [
        (None, 0),
        (2, 2_000_000),
        ("2s", 2_000_000),
        (0.0005, 500),
        ("1ms", 1000),
        ("1m", 60_000_000),
        (60, 60_000_000),
        (1e-9, 1),
    ],
)
def test_how_far_ahead_a_turn_may_be_booked(given: Any, ahead: int) -> None:
    """max_delay is seconds or text with a unit, and no delay is too short to be one."""
    assert Rule("r", "5/s", max_delay=given).max_wait_us == ahead


def test_what_can_wait_is_named_where_something_cannot() -> None:
    """An algorithm in which no turn can be booked is refused with those in which it can."""
    with pytest.raises(ConfigError, match=r"^rule 'r' has a fixed_window, .* expected gcra, token_bucket, leaky_bucket"):
        Rule("r", "5/s", Limit("9/day", algorithm="fixed_window"), max_delay=1)
    for able in ("gcra", "token_bucket", "leaky_bucket", "sliding_log"):
        assert Rule("r", Limit("5/s", algorithm=able), max_delay=1).max_delay == 1


def test_a_delay_longer_than_turns_are_booked_ahead() -> None:
    """A log remembers each turn, so there are only so many; a longer max_delay is refused with the longest."""
    with pytest.raises(ConfigError, match=r"^rule 'r' has a limit .*, expected a max_delay of at most 10 s"):
        Rule("r", Limit("1000/s", algorithm="sliding_log"), max_delay=11)
    assert Rule("r", Limit("1000/s", algorithm="sliding_log"), max_delay=10).max_wait_us == 10_000_000


def test_names_lead_no_further_than_64_characters() -> None:
    """Every name of the permitted characters is accepted, up to its full length."""
    for name in ("a", "A-b_c.9", "x" * 64, "-", "0"):
        assert Rule(name, "1/s").name == name


def test_an_error_of_a_rule_names_the_rule() -> None:
    """Of many rules, the message says which one is meant."""
    with pytest.raises(ConfigError, match="rule 'login'"):
        Rule("login", "5/s", methods=[])


@pytest.mark.parametrize("cost", [0, 1, 5])
def test_a_cost_up_to_the_burst_is_accepted(cost: int) -> None:
    """A fixed cost that fits into every limit is the rule's cost."""
    assert Rule("r", "5/s", "50/m", cost=cost).cost_of(asked()) == cost


@pytest.mark.parametrize(
    ("cost", "error", "message"),
    [
        (lambda _: -1, ValueError, "expected at least 0"),
        (lambda _: 1.0, TypeError, "expected an integer"),
        (lambda _: "1", TypeError, "expected an integer"),
        (lambda _: None, TypeError, "expected an integer"),
        (lambda _: True, TypeError, "expected an integer"),
        (lambda request: 1 // len(request.query), ZeroDivisionError, "by zero"),
    ],
)
def test_a_callable_cost_is_checked_each_time(cost: Any, error: type[Exception], message: str) -> None:
    """A callable that gives no valid cost is an error that says so; one that fails is not silenced."""
    rule = Rule("r", "5/s", cost=cost)
    with pytest.raises(error, match=message):
        rule.cost_of(asked())


def test_a_callable_cost_sees_the_request() -> None:
    """A cost may depend on all that the request shows, and may exceed the burst."""
    rule = Rule("r", "5/s", cost=lambda request: int(request.query.get("n", "1")) * (2 if request.method == "POST" else 1))
    assert rule.cost_of(asked()) == 1
    assert rule.cost_of(asked("POST", query="n=50")) == 100
    assert rule.cost_of(asked(query="n=0")) == 0


class Awaited:
    async def __call__(self, request: Any) -> int:
        return 1


@pytest.mark.parametrize("option", ["cost", "when"])
@pytest.mark.parametrize("value", [Awaited(), Awaited().__call__, partial(Awaited.__call__, Awaited())])
def test_a_callable_that_is_async_is_a_mistake(option: str, value: Any) -> None:
    """At start, not in each request; an object is one by its ``__call__``."""
    with pytest.raises(ConfigError, match=f"rule 'r': {option}: .* is async, expected a plain function"):
        Rule("r", "5/minute", **{option: value})


def test_clients_have_no_zones() -> None:
    """A zone would be ignored."""
    with pytest.raises(ConfigError, match="has a zone"):
        Rule("r", "5/minute", clients=["fe80::1%eth0"])


@pytest.mark.parametrize(
    ("methods", "for_", "not_for"),
    [
        (None, {"GET", "POST", "OPTIONS", "PURGE"}, set()),
        (["GET"], {"GET"}, {"POST", "OPTIONS"}),
        (["get", "Post"], {"GET", "POST"}, {"PUT"}),
        (["HEAD"], {"GET"}, {"POST"}),
        (["HEAD", "POST"], {"GET", "POST"}, {"PUT"}),
        (("PURGE",), {"PURGE"}, {"GET"}),
        ({"PUT"}, {"PUT"}, {"GET"}),
    ],
)
def test_a_rule_is_for_its_methods(methods: Any, for_: set[str], not_for: set[str]) -> None:
    """Methods may be written in any case, and GET and HEAD are one."""
    rule = Rule("r", "1/s", methods=methods)
    assert all(rule.applies_to(asked(method).method) for method in for_)
    assert not any(rule.applies_to(asked(method).method) for method in not_for)
    assert rule.applies_to(asked("HEAD").method) is rule.applies_to("GET")


@pytest.mark.parametrize("kind", ["exempt", "deny"])
@pytest.mark.parametrize("methods", [["HEAD"], {"head"}, ("POST", "HEAD")])
def test_what_opens_or_closes_head_alone_is_a_mistake(kind: str, methods: Any) -> None:
    """It would open or close GET as well."""
    with pytest.raises(ConfigError, match="rule 'r': methods: HEAD counts as GET"):
        Rule("r", methods=methods, **{kind: True})
    assert Rule("r", methods=[*methods, "get"], **{kind: True}).applies_to("GET")


@pytest.mark.parametrize("method", ["M-SEARCH", "VERSION-CONTROL"])
def test_registered_methods_with_a_hyphen_can_be_limited(method: str) -> None:
    """A method is an HTTP token, so it may have more than letters."""
    assert Rule("r", "1/s", methods=[method]).applies_to(asked(method).method)


def test_a_rule_cannot_be_changed() -> None:
    """What was checked at start-up stays as it was."""
    rule = Rule("r", "1/s")
    with pytest.raises(ValueError, match="frozen"):
        rule.path = "/other"


def names(rules: RuleSet, tier: str) -> list[tuple[str, str]]:
    """The rules of a tier in their order, each with its first limit."""
    return [(rule.name, str(rule.every_limit[0]) if rule.every_limit else "exempt") for rule in rules.tiers[tier]]


def test_a_tier_is_laid_over_the_default() -> None:
    """In a tier a rule of the same name replaces the default's in its place, others stay, new ones come after."""
    rules = RuleSet(
        [
            Rule("a", "1/s"),
            Rule("b", "2/s", tier="default"),
            Rule("c", "3/s"),
            Rule("b", "20/s", tier="vip"),
            Rule("d", "40/s", tier="vip"),
            Rule("a", exempt=True, tier="free"),
        ],
        tiers=["empty"],
    )
    assert set(rules.tiers) == {"default", "vip", "free", "empty"}
    assert names(rules, "default") == [("a", "1/second"), ("b", "2/second"), ("c", "3/second")]
    assert names(rules, "vip") == [("a", "1/second"), ("b", "20/second"), ("c", "3/second"), ("d", "40/second")]
    assert names(rules, "free") == [("a", "exempt"), ("b", "2/second"), ("c", "3/second")]
    assert names(rules, "empty") == names(rules, "default")


def test_a_tier_may_have_rules_where_the_default_has_none() -> None:
    """Without default rules, everybody else is unlimited."""
    rules = RuleSet([Rule("a", "1/s", tier="vip")])
    assert names(rules, "default") == []
    assert names(rules, "vip") == [("a", "1/second")]


def test_an_empty_rule_set_limits_nobody() -> None:
    """No rules are a rule set too."""
    assert RuleSet([]).tiers == {"default": ()}


def test_the_order_of_rules_does_not_matter_for_the_overlay() -> None:
    """A tier's rules may be given before the default's."""
    rules = [Rule("a", "1/s"), Rule("b", "2/s"), Rule("a", "10/s", tier="vip")]
    assert names(RuleSet(reversed(rules)), "vip") == [("b", "2/second"), ("a", "10/second")]


@pytest.mark.parametrize("tier", ["default", "vip"])
def test_two_rules_of_one_name_in_a_tier_are_a_mistake(tier: str) -> None:
    """A name is unique within a tier, since it names the bucket; the message says which and where."""
    rules = [Rule("a", "1/s"), Rule("x", "1/s", tier=tier), Rule("x", "2/s", tier=tier)]
    with pytest.raises(ConfigError, match=f"'x'.*duplicated.*'{tier}'.*expected") as caught:
        RuleSet(rules)
    assert caught.value.field == ("rules", 2, "name")


def test_a_rule_of_no_tier_is_of_the_default_tier() -> None:
    """Leaving the tier out and writing default are the same, so one name cannot be in both."""
    with pytest.raises(ConfigError, match="duplicated"):
        RuleSet([Rule("a", "1/s"), Rule("a", "2/s", tier="default")])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"key": "ip"}, r"key: expected a list such as \['path', 'ip'\], not 'ip'"),
        ({"methods": "POST"}, r"methods: expected a list such as \['POST'\], not 'POST'"),
        ({"key": [{"header": "x"}]}, r"key\[0\]: a mapping, expected text without a space .*, such as header:X-Id"),
        ({"charge_if": [401]}, r"charge_if: expected a mapping, for example \{status: \[401, 403\]\}, not \[401\]"),
        ({"charge_if": {"status": 401}}, r"charge_if.status: expected a list such as \[401, 403\], not 401"),
        ({"path": "/items/<int:id>"}, r"path: .*'<int:id>' that no request can match, expected '/items/\{id\}'"),
        ({"name": "3/minute"}, "name: expected 1 to 64 letters.*, not '3/minute': the name of a rule comes before its limits$"),
        ({"name": "log in"}, "name: expected 1 to 64 letters, digits, '.', '_' or '-', not 'log in'$"),
    ],
    ids=str,
)
def test_what_was_expected_is_said_in_plain_words(options: dict[str, Any], expected: str) -> None:
    """Mistakes that are easily made are answered with what to write, not with the names of Python's types."""
    with pytest.raises(ConfigError, match=expected):
        Rule(**{"name": "a", "qpm": 5, **options})


def test_a_copy_is_not_what_its_original_was() -> None:
    """What was worked out of the fields that differ is worked out anew, whatever was asked of the original before."""
    rule = Rule("api", "5/second", path="/a")
    assert (rule.paths, len(rule.every_limit), rule.rule_set.tiers["default"]) == (("/a",), 1, (rule,))
    copied = rule.placed(("user",)).model_copy(update={"path": "/b", "qpm": 3})
    assert (copied.paths, len(copied.every_limit), copied.rule_set.tiers["default"]) == (("/b",), 2, (copied,))
    assert (copied.kind, copied.given_parts) == ("limit", ("user",))


@pytest.mark.parametrize(
    "options",
    [
        {"qps": 5, "qpm": 100},
        {"limits": ["5/minute burst 9", Limit("9/day", algorithm="sliding_log"), "3 at once"], "key": ["path", "ip"]},
        {"qpm": 100, "reserve": "20%"},
        {"limits": [Limit("100/minute", lease=5)]},
        {"adaptive": Adaptive(min=4, max=9)},
        {"exempt": True, "clients": ["192.0.2.0/24"]},
    ],
)
def test_a_rule_goes_to_another_process(options: dict[str, Any]) -> None:
    """It is the same there, with the same buckets; and so is a copy."""
    rule = Rule("api", **options)
    for other in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule), copy.copy(rule)):
        assert other == rule
        assert [(bucket.limits, bucket.ids, bucket.load) for bucket in other.buckets] == [
            (bucket.limits, bucket.ids, bucket.load) for bucket in rule.buckets
        ]
