"""Limits that would have fitted: the smallest ones, as the engine itself decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit, Rule, RuleSet
from limitgate.replay.access_log import Entry
from limitgate.replay.engine import Engine
from limitgate.replay.suggestion import UNITS, Arrivals, Suggestions, Terms, count_for_almost_all, refused, smallest_count

SECOND = 1_000_000
START = 1_790_000_000 * SECOND
TIMES = st.lists(st.lists(st.integers(0, 90 * SECOND), min_size=1, max_size=12).map(sorted), min_size=1, max_size=4)
"""Of several clients, in µs."""
ALGORITHMS = ("gcra", "token_bucket", "fixed_window", "sliding_window", "sliding_log")
BY_DAY = {"algorithm": "fixed_window", "align": "Europe/Berlin"}


def engine_of(*rules: Rule) -> Engine:
    engine = Engine(RuleSet(rules))
    engine.arrivals = Arrivals(rules)
    return engine


def refused_by_engine(engine: Engine, clients: Sequence[Sequence[int]]) -> int:
    coming = sorted((at, number) for number, times in enumerate(clients) for at in times)
    return sum(not engine.decide(Entry(at, b"c%d" % number, "GET", "/")) for at, number in coming)


def suggested(rules: Sequence[Rule], clients: Sequence[Sequence[int]]) -> Suggestions:
    engine = engine_of(*rules)
    refused_by_engine(engine, clients)
    assert engine.arrivals is not None
    return engine.arrivals.suggestions()


@given(
    clients=TIMES,
    spread=st.integers(1, 2000),
    unit=st.sampled_from(UNITS),
    cost=st.sampled_from([0, 1, 2, 3, 800]),
    has_own_cost=st.booleans(),
    options=st.sampled_from([*[{"algorithm": name} for name in ALGORITHMS], BY_DAY]),
)
def test_a_suggestion_applied_refuses_nobody_property(
    *, clients: list[list[int]], spread: int, unit: str, cost: int, has_own_cost: bool, options: dict[str, str]
) -> None:
    """With one less, the engine refuses somebody: for every algorithm, cost and unit, whatever the limits were."""
    clients = [[START + at * spread for at in times] for times in clients]
    if options is BY_DAY and unit != "day":
        options = {"algorithm": "fixed_window"}

    def rule(count: int) -> Rule:
        if has_own_cost:
            limits: Any = [{"limit": f"{count}/{unit}", "cost": cost, **options}]
            return Rule("all", limits=limits, cost=7)
        return Rule("all", Limit(f"{count}/{unit}", **options), cost=cost)

    count, almost = suggested([rule(1000)], clients).counts["all"][unit]
    assert refused_by_engine(engine_of(rule(count)), clients) == 0
    assert almost == count
    assert count == max(1, cost) or refused_by_engine(engine_of(rule(count - 1)), clients) > 0


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=12).map(sorted),
    st.sampled_from(UNITS),
    st.sampled_from([1, 3]),
    st.sampled_from(ALGORITHMS),
)
def test_almost_all_are_admitted_property(crowd: list[int], unit: str, cost: int, algorithm: str) -> None:
    """At most one request in 1,000 is refused; with one less, more are."""
    clients = [[START + at * SECOND for at in crowd], *[[START]] * (2000 - len(crowd))]

    def rule(count: int) -> Rule:
        return Rule("all", f"{count}/{unit}", cost=cost, algorithm=algorithm)

    count, almost = suggested([rule(3)], clients).counts["all"][unit]
    assert almost <= count
    assert refused_by_engine(engine_of(rule(almost)), clients) <= 2
    assert almost == cost or refused_by_engine(engine_of(rule(almost - 1)), clients) > 2


@given(
    TIMES,
    st.integers(1, 12),
    st.sampled_from([1, 2]),
    st.sampled_from([("gcra", 0, False), ("gcra", 2, False), ("gcra", 0, True), ("gcra", 2, True), ("sliding_log", 2, False)]),
)
def test_refusals_are_those_of_the_engine_property(
    clients: list[list[int]], count: int, cost: int, algorithm: tuple[str, int, bool]
) -> None:
    """To the request, with turns and borrowed requests too."""
    name, delay, borrows = algorithm
    count = max(cost, count)
    limit = Limit(f"{count}/second", algorithm=name, borrow=borrows)
    terms = Terms("second", cost, name, None, borrows, delay * SECOND)
    rule = Rule("all", limit, cost=cost, max_delay=delay or None)
    found = sum(refused(times, terms, count, len(times)) for times in clients)
    assert found == refused_by_engine(engine_of(rule), clients)
    assert suggested([rule], clients).counts["all"]["second"][0] == smallest_count(sorted(clients, key=len)[::-1], terms)


def test_almost_all_leaves_one_in_a_thousand_out() -> None:
    """One client that asks for far more than 2,000 others does not make the limit."""
    many, terms = [[0]] * 1995, Terms("second")
    assert smallest_count([[0] * 5, *many], terms) == 5
    assert count_for_almost_all([[0] * 5, *many], terms, 5) == 3
    assert count_for_almost_all([[0] * 5], terms, 5) == 5
    assert count_for_almost_all([[0]], terms, 1) == 1


@pytest.mark.parametrize("limit", ["1/second", "1000/day"])
def test_every_arrival_counts_whether_it_was_admitted_or_not(limit: str) -> None:
    """By rule and bucket; a rule of another algorithm, too."""
    engine = engine_of(Rule("all", limit), Rule("log", "1/hour", algorithm="sliding_log", path="/log"))
    for number in range(120):
        engine.decide(Entry(number * SECOND, b"h", "GET", "/log" if number % 2 else "/"))
        engine.decide(Entry(number * SECOND, b"g", "GET", "/"))
    assert engine.arrivals is not None
    found = engine.arrivals.suggestions()
    assert not found.left_out
    assert list(found.counts) == ["all", "log"]
    assert list(found.counts["all"]) == list(UNITS)
    assert found.counts["all"]["second"] == (1, 1)
    assert found.counts["all"]["minute"][0] == smallest_count([range(0, 120 * SECOND, SECOND)], Terms("minute")) == 41
    assert found.counts["log"]["day"] == (60, 60)


AT_ONCE = [[START] * 3]


def test_a_rule_with_different_limits() -> None:
    """A unit has the terms of the rule's limit with this unit, others have those of the rule. A request counts once."""
    limits = ["5/second", {"limit": "900/day", "algorithm": "fixed_window", "cost": 100}]
    found = suggested([Rule("all", limits=limits, cost=2)], AT_ONCE)
    assert {unit: count for unit, (count, _) in found.counts["all"].items()} == {
        "second": 6,
        "minute": 6,
        "hour": 6,
        "day": 300,
    }
    crowd = [*AT_ONCE, *[[START]] * 997]
    assert suggested([Rule("all", limits=limits, cost=2)], crowd).counts["all"]["second"] == (6, 4)
    both = ["500/minute", {"limit": "200000/minute", "cost": 900}]
    found = suggested([Rule("all", limits=both)], AT_ONCE)
    assert list(found.counts["all"]) == ["second", "hour", "day"]
    assert found.left_out == {"all": {"its limits of this unit differ in algorithm or cost": ["minute"]}}


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([Rule("all", "5/minute", cost=lambda _: 3)], "the cost depends on the request"),
        ([Rule("all", "5/minute", reserve="20%")], "the reserve depends on the caller's priority"),
        ([Rule("all", "5/minute", charge_if={"status": [401]})], "charge_if refunds requests"),
        ([Rule("all", Limit("5/minute", warm_up="10s"))], "with warm_up, a larger count may refuse more requests"),
        ([Rule("all", concurrency=5)], "it limits requests in flight, but a log has no durations"),
        ([Rule("all", adaptive=True)], "it limits requests in flight, but a log has no durations"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_figured_is_said(rules: list[Rule], reason: str) -> None:
    """Instead of a wrong number."""
    found = suggested(rules, AT_ONCE)
    assert (found.counts, found.left_out) == ({}, {"all": {reason: [*UNITS]}})


def test_tiers_whose_rules_differ() -> None:
    """One number can't be right for both."""
    engine = engine_of(Rule("all", "5/minute"), Rule("vip", "5/minute"))
    other = engine_of(Rule("all", "5/minute", cost=2))
    assert engine.arrivals is not None
    for each in (engine, other):
        each.arrivals = engine.arrivals
        each.decide(Entry(START, b"h", "GET", "/"))
    found = engine.arrivals.suggestions()
    assert list(found.counts) == ["vip"]
    assert [*found.left_out["all"].values()] == [[*UNITS]]


def test_a_count_beyond_the_algorithm() -> None:
    """A sliding log keeps at most 10,000 requests."""
    rule = Rule("all", "9000/minute", algorithm="sliding_log", cost=4000)
    found = suggested([rule], [[START, START, START + 30 * 60 * SECOND]])
    assert found.counts["all"] == dict.fromkeys(UNITS[:2], (8000, 8000))
    assert found.left_out == {"all": {"the highest count that sliding_log supports is not enough": ["hour", "day"]}}
