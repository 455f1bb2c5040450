"""The overview says of each route just what the gate will do with its requests."""

from __future__ import annotations

from typing import Any

import pytest

from limitgate import Rule, RuleSet
from limitgate.http.paths import segments
from limitgate.routes.overview import Applied, Listed, applied, overview, unmatched


def listed(template: str = "/items/{id}", methods: str = "GET", marks: Any = (), **more: Any) -> Listed:
    """A route whose template is written like a rule's pattern."""
    options = {"marks": lambda _: marks, "takes": lambda _: True, **more}
    return Listed(template, segments(template), tuple(methods.split()), **options)


@pytest.mark.parametrize(
    ("path", "template", "wholly"),
    [
        ("/**", "/items/{id}", True),
        ("/items/**", "/items", True),
        ("/items/{x}", "/items/{id}", True),
        ("/items/{x}", "/items/special", True),
        ("/items/special", "/items/{id}", False),
        ("/items/special", "/items/**", False),
        ("/{x}/special", "/items/{id}", False),
        ("/items/**", "/**", False),
        ("/", "/", True),
        ("/", "/items", None),
        ("/items", "/items/{id}", None),
        ("/items/{id}/more", "/items/{id}", None),
        ("/other/**", "/items/{id}", None),
    ],
)
def test_a_rule_is_for_all_paths_of_a_route_or_some_or_none(path: str, template: str, *, wholly: bool | None) -> None:
    """A rule is listed with a route if it is for any of the route's paths, and said to be for some only if it is."""
    rule = Rule("r", "1/minute", path=path)
    assert applied([rule], listed(template), "GET") == (() if wholly is None else (Applied(rule, wholly),))


def test_a_path_that_another_route_takes_is_none_of_this_route() -> None:
    """Where the router takes the one path of a rule elsewhere, the rule is not said to be for a part of this route."""
    rule = Rule("r", "1/minute", path="/items/special")
    assert applied([rule], listed(takes={"/items/other"}.__contains__), "GET") == ()
    assert applied([rule], listed(takes={"/items/special"}.__contains__), "GET") == (Applied(rule, wholly=False),)
    rule = Rule("r", "1/minute", path="/{x}/special")
    assert applied([rule], listed(takes={"/items/other"}.__contains__), "GET") == ()
    assert applied([rule], listed(takes={"/items/special"}.__contains__), "GET") == (Applied(rule, wholly=False),)


@pytest.mark.parametrize(("method", "found"), [("GET", True), ("HEAD", True), ("POST", False)])
def test_methods(method: str, *, found: bool) -> None:
    """A rule or decorator for GET is for HEAD, too, and for no other method."""
    rule, mark = Rule("rule", "1/minute", methods=["GET"]), Rule("mark", "1/minute", methods=["GET"])
    assert [each.rule for each in applied([rule], listed(marks=(mark,)), method)] == ([rule, mark] if found else [])


def test_what_exempts_a_route_stands_alone() -> None:
    """Nothing else is listed where a rule or a decorator exempts a whole route; a rule that exempts some paths is one more."""
    rule = Rule("all", "1/minute")
    health, item = Rule("health", path="/items/**", exempt=True), Rule("item", path="/items/1", exempt=True)
    assert applied([rule, health], listed(), "GET") == (Applied(health, wholly=True),)
    assert applied([rule], listed(marks=("exempt",)), "GET") == (Applied("exempt", wholly=True),)
    assert applied([rule, item], listed(), "GET") == (Applied(rule, wholly=True), Applied(item, wholly=False))


def test_no_name_breaks_a_line() -> None:
    """A line of its own might be an order to CI, as ``##[`` is anywhere."""
    rules = RuleSet([Rule("a", "1/minute"), Rule("b", "1/minute", path="/x", tier="t\n::error::##[error]")])
    shown = overview([rules], [listed()])
    assert "t\\n::error::#\\x23[error]" in shown
    assert not [line for line in shown.split("\n") if line.startswith("::") or "##[" in line]


def test_rules_that_match_no_route() -> None:
    """A rule is said to match no route if none of its paths and methods is one, once, in the first tier that has it."""
    rules = [
        Rule("all", "1/minute"),
        Rule("old", "1/minute", path="/old"),
        Rule("put", "1/minute", methods=["PUT"]),
        Rule("options", "1/minute", methods=["OPTIONS"]),
        Rule("shadowed", "1/minute", path="/healthz"),
        Rule("health", path="/healthz", exempt=True),
        Rule("vips", "1/minute", path="/vip", tier="vip"),
        Rule("old", "2/minute", path="/older", tier="vip"),
    ]
    routes = [listed(methods="GET OPTIONS"), listed("/healthz")]
    assert unmatched(RuleSet(rules), routes) == [
        ("default", rules[1]),
        ("default", rules[2]),
        ("vip", rules[7]),
        ("vip", rules[6]),
    ]


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"charge_if": {"status": [401, "5xx"]}}, "charged if 401, 5xx"),
        ({"charge_if": {"status_not": ["5xx"]}}, "charged unless 5xx"),
        ({"per": "message"}, "per message"),
        ({"max_delay": "500ms"}, "waits up to 0.5 s"),
        ({"cost": 3}, "cost 3"),
        ({"clients": ["10.0.0.0/8", "::1"]}, "only clients 10.0.0.0/8, ::1"),
        ({"when": callable}, "only when callable"),
        ({"replaces": ["one", "two"]}, "replaces one, two"),
        ({"path": ["/items/a", "/items/b"]}, "only /items/a, /items/b"),
        ({"exclude": ["/items/a"]}, "only /** but not /items/a"),
    ],
)
def test_what_is_unusual_about_a_rule_is_noted(options: dict[str, Any], note: str) -> None:
    """The last column says what a rule counts, if it is not each request as one."""
    others = [Rule(name, "9/minute", path="/other", methods=["PUT"]) for name in ("one", "two")]
    table = overview([RuleSet([Rule("all", "9/minute", **options), *others])], [listed(), listed("/other")])
    assert any(line.endswith(f"  {note}") for line in table.splitlines())


def test_what_a_rule_with_several_paths_is_for() -> None:
    """All of a route if one of its patterns covers that; no more than some of it where anything is excluded."""
    rule = Rule("r", "1/minute", path=["/items/**", "/items/1", "/x"])
    assert applied([rule], listed(), "GET") == (Applied(rule, wholly=True),)
    assert applied([rule], listed("/x"), "GET") == (Applied(rule, wholly=True),)
    rule = Rule("r", "1/minute", path="/items/**", exclude=["/items/1"])
    assert applied([rule], listed(), "GET") == (Applied(rule, wholly=False),)
    assert applied([rule], listed("/items/2"), "GET") == (Applied(rule, wholly=True),)
    assert applied([rule], listed("/items/1"), "GET") == ()


def test_what_is_surely_replaced_is_not_listed() -> None:
    """A rule is left out where another one always stands in its place, by name or by a star, but not if that may not apply."""
    rule, other = Rule("all", "1/minute"), Rule("other", "1/minute", replaces=["all"])
    some = Rule("some", "1/minute", path="/items/1", replaces=["all"])
    office = Rule("office", "1/minute", clients=["::1"], replaces=["all"])
    mark = Rule("mark", "1/minute", replaces="*")

    def shown(*rules: Rule, marks: Any = ()) -> list[Any]:
        return [each.rule for each in applied(rules, listed(marks=marks), "GET")]

    assert shown(rule, other) == [other]
    assert shown(rule, some) == [rule, some]
    assert shown(rule, office) == [rule, office]
    assert shown(rule, other, marks=(mark,)) == [mark]
    assert shown(rule, marks=(mark, "exempt")) == ["exempt"]


def test_lists_of_clients_in_the_table() -> None:
    """What denies says so; what exempts some requests leaves the rules for the others."""
    rules = [
        Rule("all", "1/minute"),
        Rule("office", exempt=True, clients=["::1"]),
        Rule("no", deny=True, clients=["::2"]),
    ]
    table = overview([RuleSet(rules)], [listed()])
    assert [line.split("  ")[-1].strip() for line in table.splitlines()[2:]] == ["ip", "only clients ::1", "only clients ::2"]
    assert " denied " in table
    assert " exempt " in table


def test_the_table() -> None:
    """Each route once, with its methods, tiers and rules grouped, in columns that are as wide as they have to be."""
    rules = RuleSet(
        [
            Rule("api", path="/items/**", qps=5, qpm=100, key=["path", "ip"]),
            Rule("api", path="/items/**", qps=50, key=["caller"], tier="vip", on_error="local", shadow=True),
            Rule("one", "10/minute burst 2", path="/items/1", cost=2),
            Rule("health", path="/healthz", exempt=True),
            Rule("old", "1/day", path="/old/**", methods=["POST", "PUT"]),
        ],
        tiers=["gold"],
    )
    mark = Rule("shop.buy", "1/hour", cost=lambda _: 1, methods=["POST"])
    routes = [
        listed("/items/{id}", "GET OPTIONS POST PUT", marks=(mark,)),
        listed("/healthz", "OPTIONS"),
        listed("/"),
        listed("/about", marks=("exempt",)),
    ]
    assert overview([rules], routes).splitlines() == [
        "Route        Methods   Tier           Rule      Limits                Key       Notes",
        "-----------  --------  -------------  --------  --------------------  --------  ----------------------",
        "/            GET       all            -",
        "/about       GET       all            @exempt   exempt",
        "/healthz     OPTIONS   all            health    exempt",
        "/items/{id}  GET, PUT  default, gold  api       5/second, 100/minute  path, ip",
        "                                      one       10/minute burst 2     ip        only /items/1, cost 2",
        "                       vip            api       50/second             caller    shadow, on_error local",
        "                                      one       10/minute burst 2     ip        only /items/1, cost 2",
        "             POST      default, gold  api       5/second, 100/minute  path, ip",
        "                                      one       10/minute burst 2     ip        only /items/1, cost 2",
        "                                      shop.buy  1/hour                ip        cost varies",
        "                       vip            api       50/second             caller    shadow, on_error local",
        "                                      one       10/minute burst 2     ip        only /items/1, cost 2",
        "                                      shop.buy  1/hour                ip        cost varies",
        "",
        "These rules match no route:",
        "",
        "Rule  Path     Methods    Tier",
        "----  -------  ---------  -------",
        "old   /old/**  POST, PUT  default",
    ]


def test_columns_in_which_nothing_stands_are_left_out() -> None:
    """Without tiers and without anything unusual there are no columns for them, and without routes there is no table."""
    rules = RuleSet([Rule("all", "1/minute")])
    assert overview([rules], [listed("/a"), listed("/a/b")]).splitlines() == [
        "Route  Methods  Rule  Limits    Key",
        "-----  -------  ----  --------  ---",
        "/a     GET      all   1/minute  ip",
        "/a/b   GET      all   1/minute  ip",
    ]
    assert overview([rules], []).splitlines() == ["These rules match no route:", "", "Rule  Path", "----  ----", "all   /**"]
    assert overview([RuleSet([])], []) == ""
