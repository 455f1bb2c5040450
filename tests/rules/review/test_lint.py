"""What is found odd about rules: how much limits really admit, and which patterns cover which or meet."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit, Rule
from limitgate.algorithms import gcra
from limitgate.http.paths import ANY, PathIndex, covers, meet, segments
from limitgate.limits.bucket import bucket_of
from limitgate.rules.lint import most_within, overshooting


def greedy(period: int, *limits: Limit) -> int:
    """How many requests pass in so many seconds if each comes as soon as it may, from full buckets."""
    bucket, now, admitted = bucket_of(*limits), 0, 0
    debts = [0] * len(limits)
    while True:
        wait = max(gcra.wait_us(debt, 1, limit) or 0 for debt, limit in zip(debts, limits))
        now += wait
        if now >= period * 1_000_000:
            return admitted
        debts = gcra.try_charge(gcra.advance(debts, wait, bucket), bucket, 1)
        admitted += 1


few = st.builds(
    lambda count, period, burst: Limit(f"{count} per {period} seconds burst {burst}"),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 30),
)


@given(few)
def test_a_limit_admits_just_as_many_property(limit: Limit) -> None:
    """The most that is said to pass within a period is what the greediest client gets."""
    assert most_within(limit.period, [limit]) == limit.burst + limit.count - 1 == greedy(limit.period, limit)


@given(st.lists(few, min_size=1, max_size=3), st.integers(1, 9))
def test_several_limits_admit_no_more_property(limits: list[Limit], period: int) -> None:
    """Of limits that are checked together the greediest client never gets more than is said."""
    assert greedy(period, *limits) <= most_within(period, limits)


@given(few, st.integers(1, 12), st.integers(1, 20))
def test_shares_together_admit_no_more_property(limit: Limit, processes: int, period: int) -> None:
    """Where the burst has a request for each process, all of them together admit in no time more than the limit alone."""
    together = processes * greedy(period, limit.share(processes))
    spare = processes if limit.burst < processes else 0
    assert together <= most_within(period, [limit]) + spare


@pytest.mark.parametrize(
    ("limits", "cost", "found"),
    [
        (["60/minute"], 1, [("60/minute", 119, 1)]),
        (["60/minute burst 10"], 1, [("60/minute burst 10", 69, 1)]),
        (["60/minute burst 1"], 1, []),
        (["1/day"], 1, []),
        (["51/minute burst 10"], 1, [("51/minute burst 10", 60, 1)]),
        (["60/minute", "1/second burst 1"], 1, []),
        (["60/minute", "1/second burst 2"], 1, [("60/minute", 61, 1), ("1/second burst 2", 2, 1)]),
        (["60/minute burst 5"], 5, []),
        (["60/minute burst 6"], 5, [("60/minute burst 6", 65, 5)]),
        (["60/minute burst 2"], 0, [("60/minute burst 2", 61, 1)]),
        (["60/minute burst 2"], len, [("60/minute burst 2", 61, 1)]),
    ],
)
def test_limits_that_admit_more_than_they_seem_to(limits: list[str], cost: object, found: list[tuple[str, int, int]]) -> None:
    """A limit is reported if more than its count may pass in a period, the others considered, and a lower burst would help."""
    rule = Rule("r", *limits, cost=cost)
    assert [(str(limit), most, burst) for limit, most, burst in overshooting(rule)] == found


PATTERNS = ["/", "/**", "/a", "/a/**", "/{x}", "/{x}/**", "/a/b", "/a/{x}", "/{x}/b", "/a/b/**", "/a/{x}/**", "/{x}/{y}"]
PATHS = ["/", "/a", "/b", "/a/b", "/a/c", "/c/b", "/c/d", "/a/b/c", "/a/c/b", "/c/b/a", "/a/b/c/d", "/x/y/z/w"]


def matched(pattern: str) -> set[str]:
    """The paths that a pattern matches."""
    index: PathIndex[bool] = PathIndex()
    index.add(segments(pattern), True)
    return {path for path in PATHS if index.find(path)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_covers_another_if_it_matches_all_its_paths(pattern: str) -> None:
    """One pattern covers another just if every path that the other matches is one that it matches."""
    for other in PATTERNS:
        assert covers(segments(pattern), segments(other)) is (matched(other) <= matched(pattern)), other


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_meet_in_the_paths_that_they_share(pattern: str) -> None:
    """Where two patterns meet is a pattern that matches just the paths that both match; without such paths there is none."""
    for other in PATTERNS:
        common = meet(segments(pattern), segments(other))
        found = set() if common is None else matched("/" + "/".join({ANY: "{x}"}.get(segment, segment) for segment in common))
        assert found == matched(other) & matched(pattern), other
        assert (common is None) is (found == set()), other
