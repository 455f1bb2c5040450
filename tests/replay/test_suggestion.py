"""Limits that would have fitted: the smallest ones, as the engine itself decides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from limitgate import Rule, RuleSet
from limitgate.replay.access_log import Entry
from limitgate.replay.engine import Engine
from limitgate.replay.suggestion import UNITS, Arrivals, count_for_almost_all, refused, smallest_count

SECOND = 1_000_000
TIMES = st.lists(st.lists(st.integers(0, 90 * SECOND), min_size=1, max_size=12).map(sorted), min_size=1, max_size=4)


def refused_by_engine(limit: str, clients: Sequence[Sequence[int]]) -> int:
    engine = Engine(RuleSet([Rule("all", limit)]))
    coming = sorted((at, number) for number, times in enumerate(clients) for at in times)
    return sum(not engine.decide(Entry(at, b"c%d" % number, "GET", "/")) for at, number in coming)


@given(TIMES, st.sampled_from([("second", SECOND), ("minute", 60 * SECOND)]))
def test_the_smallest_count_refuses_nobody(clients: list[list[int]], unit: tuple[str, int]) -> None:
    """With one request less, the engine refuses somebody."""
    name, period = unit
    count = smallest_count(sorted(clients, key=len, reverse=True), period)
    assert refused_by_engine(f"{count}/{name}", clients) == 0
    assert count == 1 or refused_by_engine(f"{count - 1}/{name}", clients) > 0


@given(TIMES, st.integers(1, 12))
def test_refusals_are_those_of_the_engine(clients: list[list[int]], count: int) -> None:
    """To the request."""
    found = sum(refused(times, count, SECOND, len(times)) for times in clients)
    assert found == refused_by_engine(f"{count}/second", clients)


def test_almost_all_leaves_one_in_a_thousand_out() -> None:
    """One client that asks for far more than 2,000 others does not make the limit."""
    many = [[0]] * 1995
    assert smallest_count([[0] * 5, *many], SECOND) == 5
    assert count_for_almost_all([[0] * 5, *many], SECOND, 5) == 3
    assert count_for_almost_all([[0] * 5], SECOND, 5) == 5
    assert count_for_almost_all([[0]], SECOND, 1) == 1


@pytest.mark.parametrize("limit", ["1/second", "1000/day"])
def test_every_arrival_counts_whether_it_was_admitted_or_not(limit: str) -> None:
    """By rule and bucket; a rule of another algorithm, too."""
    engine = Engine(RuleSet([Rule("all", limit), Rule("log", "1/hour", algorithm="sliding_log", path="/log")]))
    engine.arrivals = Arrivals()
    for number in range(120):
        engine.decide(Entry(number * SECOND, b"h", "GET", "/log" if number % 2 else "/"))
        engine.decide(Entry(number * SECOND, b"g", "GET", "/"))
    found = engine.arrivals.suggestions()
    assert list(found) == ["all", "log"]
    assert list(found["all"]) == list(UNITS)
    assert found["all"]["second"] == (1, 1)
    assert found["all"]["minute"][0] == smallest_count([range(0, 120 * SECOND, SECOND)], 60 * SECOND) == 41
    assert found["log"]["day"] == (60, 60)
