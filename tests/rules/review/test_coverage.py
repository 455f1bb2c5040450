"""Rules that are found among many: those that a comparison with each of them finds, and few others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit, Rule, RuleSet
from limitgate.errors import ConfigError
from limitgate.rules import review
from limitgate.rules.review import Coverage

PATHS = ["/**", "/a", "/a/**", "/a/b", "/{x}/b", "/{x}/**", "/{x}", "/"]
SLIDING = [Limit(text, algorithm="sliding_window") for text in ("5/s", "9/s", "9/minute")]
LIMITS = ["5/s", "9/minute", "5/s burst 9", "7/s burst 2", "3 at once", "9 at once", *SLIDING]


class Each:
    """A coverage that finds every rule, as if it did not know better."""

    def __init__(self, rules: Iterable[Rule], kind: Any = lambda _: None) -> None:
        self._rules = [rule for rule in rules if rule.when is None]
        self._kind = kind

    def around(self, rule: Rule, _: str) -> list[Rule]:
        return [other for other in self._rules if other is not rule]

    def covering(self, rule: Rule) -> Iterator[Rule]:
        return iter(self.around(rule, ""))

    def groups(self, rule: Rule) -> Iterator[list[Rule]]:
        for other in self._rules:
            if self._kind(other) == self._kind(rule):
                yield [other]


class AnyOrder:
    """Rules that are all taken for as tight as any other one."""

    def __init__(self, rules: list[Rule]) -> None:
        self._rules = rules

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        return iter(self._rules)


def some(values: list[Any], most: int = 2) -> Any:
    return st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True)


fields = st.fixed_dictionaries(
    {"path": some(PATHS)},
    optional={
        "methods": some(["GET", "POST"]),
        "clients": some(["10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/17", "10.1.128.0/17", "10.1.2.3", "::1"], 3),
        "exclude": some(["/a/b", "/a"]),
        "key": st.sampled_from([["ip"], ["path", "ip"], ["header:X-A"]]),
        "shadow": st.booleans(),
        "replaces": st.sampled_from([["r0"], ["r0", "r1"], "*"]),
        "when": st.just(lambda _: True),
    },
)
kinds = st.sampled_from([{"exempt": True}, {"deny": True}, {}, {}, {}, {}])
drawn = st.lists(st.tuples(fields, kinds, some(LIMITS)), min_size=2, max_size=7)


def rule_set(drawn_rules: list[Any]) -> RuleSet | None:
    """The rules that are drawn; None where they contradict each other."""
    rules = []
    for number, (options, kind, limits) in enumerate(drawn_rules):
        try:
            rules.append(Rule(f"r{number}", *([] if kind else limits), **options, **kind))
        except ConfigError:  # an exempt rule that replaces others, say
            continue
    try:
        return RuleSet(rules)
    except ConfigError:
        return None


def told(rules: RuleSet) -> dict[str, Any]:
    """What is found out about rules that others leave nothing for; of idle ones only which, as several others may be why."""
    return {
        "shadowed": [(one.name, other.name) for one, other in review.shadowed(rules, {"default"})],
        "denied": [(one.name, other.name) for one, other in review.denied(rules, {"default"})],
        "replaced": [(one.name, other.name) for one, other in review.replaced(rules, {"default"})],
        "idle": [rule.name for rule, _ in review.idle_rules(rules.tiers["default"])],
        "invented": [(each.about.name, each.field) for each in review._inventable(rules, identifies=False)],
    }


@given(drawn)
def test_coverage_index_finds_every_covering_rule_property(drawn_rules: list[Any]) -> None:
    """By paths, methods, clients, exclusions, keys and limits: as if each rule was compared with each other one."""
    rules = rule_set(drawn_rules)
    if rules is None:
        return
    found = told(rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(review, "Coverage", Each)
        patch.setattr(review, "_Ranked", AnyOrder)
        assert found == told(rules)


@pytest.mark.parametrize(
    ("rule", "path", "found"),
    [
        (Rule("r", "5/s", path="/a", clients=["10.1.2.3"]), "/a", ["wide", "all"]),
        (Rule("r", "5/s", path="/a", clients=["10.1.0.0/17", "10.1.128.0/17"]), "/a", ["wide", "all"]),
        (Rule("r", "5/s", path="/a", clients=["10.1.2.3", "11.0.0.1"]), "/a", ["all"]),
        (Rule("r", "5/s", path="/a", clients=["11.0.0.1", "::1"]), "/a", ["all"]),
        (Rule("r", "5/s", path=["/a/x", "/b"]), "/b", ["b", "all"]),
        (Rule("r", "5/s", path=["/b", "/a"]), "/a", ["all"]),
        (Rule("r", "5/s", path="/{any}"), "/{any}", ["all"]),
    ],
)
def test_rules_around_another_one(rule: Rule, path: str, found: list[str]) -> None:
    """At one of its paths, and for all of its clients, in their order; of those for the same requests one."""
    others = [
        Rule("wide", exempt=True, path="/a/**", clients=["10.0.0.0/8"]),
        Rule("b", exempt=True, path="/b"),
        Rule("b-again", exempt=True, path="/b"),
        Rule("all", exempt=True),
        Rule("some", exempt=True, when=lambda _: True),
    ]
    assert [other.name for other in Coverage(others).around(rule, path)] == found


MANY = 400
SETS = {
    "tighter and tighter": lambda n: Rule(f"r{n}", f"{MANY - n}/hour"),
    "neither tighter": lambda n: Rule(f"r{n}", Limit(f"{n + 1}/second", burst=2 * MANY - n)),
    "of clients": lambda n: Rule(f"r{n}", "5/second", clients=[f"10.{n >> 8}.{n & 255}.0/24"]),
    "of headers": lambda n: Rule(f"r{n}", "5/second", key=[f"header:X-{n}"]),
    "of tenants": lambda n: Rule(f"r{n}", "5/second", path=f"/{{tenant}}/{n}/**"),
    "exempt": lambda n: Rule(f"r{n}", exempt=True, methods=["GET", "POST"][n % 2 :]),
    "replaced": lambda n: Rule(f"r{n}", f"{n + 1}/second", replaces=[f"r{n - 1}"] if n else "*"),
    "of a common path and one of its own": lambda n: Rule(f"r{n}", "5/second", path=["/api/**", f"/{n}"]),
    "of a common client and one of its own": lambda n: Rule(f"r{n}", "5/s", clients=["10.0.0.1", f"11.0.{n >> 8}.{n & 255}"]),
    "exempt or not": lambda n: Rule(f"r{n}", **[{"exempt": True}, {"qps": 5}][n % 2], path=["/api/**", f"/{n // 2}"]),
    "exempt for clients": lambda n: Rule(f"r{n}", **[{"exempt": True}, {"qps": 5}][n % 2], clients=["10.0.0.1", "11.0.0.1"]),
    "of two algorithms": lambda n: Rule(
        f"r{n}", f"{n + 1}/second" if n % 2 else Limit(f"{n + MANY}/second", algorithm="sliding_window")
    ),
    "fast for few, or slow for many": lambda n: Rule(f"r{n}", f"{n + 1}/second", f"{MANY - n} at once"),
}


@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_few_of_many_rules_are_compared(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each with each, whatever is different about them."""
    compared = []
    for name in ("is_for_all_of", "is_tighter", "covers"):
        monkeypatch.setattr(review, name, counting(getattr(review, name), compared))
    monkeypatch.setattr(review, "MOST_COMPARED", 4)
    list(review.review(RuleSet([make(number) for number in range(MANY)])))
    assert len(compared) < 16 * MANY


def counting(function: Any, calls: list[Any]) -> Any:
    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return counted


def test_a_service_starts_without_the_index() -> None:
    """`limitgate check` reports rules without effect."""
    code = "import sys, limitgate, limitgate.middleware, limitgate.gate.lifecycle.build; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "limitgate.rules.review" not in done.stdout.split()
