from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from limitgate.overload.shedding import PriorityLevel, RecentShare, retry_after_s


@pytest.mark.parametrize(
    ("reserve", "limit", "rooms"),
    [
        (None, 20, (20, 20, 20)),
        (Fraction(1, 10), 20, (20, 18, 16)),
        (Fraction(1, 10), 4, (4, 3, 3)),
        (Fraction(1, 10), 1, (1, 1, 1)),
        (Fraction(49, 100), 200, (200, 102, 4)),
        (Fraction(3, 10), 10, (10, 7, 4)),
    ],
)
def test_room(reserve, limit, rooms) -> None:
    levels = [PriorityLevel(priority) for priority in ("high", "normal", "low")]
    for level in levels:
        level.keep(reserve)
        level.make_room(limit)
    assert tuple(level.room for level in levels) == rooms


@pytest.mark.parametrize("kept", [0, 0.01, 0.3, 0.5, 0.99, 1])
def test_thinning_is_even(kept) -> None:
    level = PriorityLevel("low")
    level.kept = kept
    passed = [level.passes_thinning() for _ in range(1000)]
    for begin in range(0, 1000, 100):
        assert sum(passed[begin : begin + 100]) == pytest.approx(100 * kept, abs=1)


def test_counts() -> None:
    level = PriorityLevel("low")
    level.limit, level.lag, level.thinned = 1, 2, 4
    assert level.refused == 3


def test_the_share_of_the_last_second() -> None:
    share = RecentShare()
    assert share.of(0, 0) == 0
    for tenth in range(31):  # half of all are refused in the second second, none in the others
        now = tenth / 10
        share.note(now, 10 * tenth, 5 * min(10, max(0, tenth - 10)))
        if tenth == 20:
            assert share.of(200, 50) == pytest.approx(0.5)
    assert share.of(300, 50) == 0


def test_what_was_before_a_gap_does_not_count() -> None:
    share = RecentShare()
    share.note(0.0, 0, 0)
    share.note(0.1, 100, 100)
    share.note(3600.0, 100, 100)
    assert share.of(101, 100) == 0


def test_what_came_just_before_a_gap_does_not_count_either() -> None:
    """Those who were refused after the last look at the totals, an hour ago."""
    share = RecentShare()
    share.note(0.0, 0, 0)
    share.note(0.1, 100, 0)
    share.note(3600.0, 150, 50)
    assert share.of(151, 50) == 0


def test_it_keeps_a_second_of_totals() -> None:
    share = RecentShare()
    for tenth in range(1000):
        share.note(tenth / 10, tenth, 0)
    assert len(share._totals) <= 12


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 1, 1), (0.04, 1, 1), (0.5, 1, 6), (1.0, 1, 11)])
def test_retry_after_spreads_a_crowd(share, least, most) -> None:
    random = Random(1)
    seconds = [retry_after_s(share, random.random) for _ in range(5000)]
    assert (min(seconds), max(seconds)) == (least, most)
    assert all(isinstance(each, int) for each in seconds)
    if most > least:
        assert max(seconds.count(each) for each in set(seconds)) <= 1.3 * 5000 / most
