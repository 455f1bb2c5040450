from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from limitgate.overload.shedding import MOST, WaitingLine


def line_of(waiters: Iterable[str], *, every_s: float = 0.01, max_delay: float = 0.25) -> WaitingLine[str]:
    """Waiters of normal priority that have come one after another, the first at 0, for places that come free all the time."""
    line: WaitingLine[str] = WaitingLine(max_delay)
    line.place_s = 0.0
    for n, waiter in enumerate(waiters):
        line.join(n * every_s, waiter, "normal")
    return line


def called(line: WaitingLine[str], now: float) -> list[str]:
    return [waiter for _ in range(len(line)) if (waiter := line.call(now, "normal")) is not None]


def test_whoever_came_first_is_called_first() -> None:
    assert called(line_of("abc"), 0.05) == ["a", "b", "c"]


def test_whoever_came_last_is_called_first_in_a_line_that_stands() -> None:
    assert called(line_of("abc"), 0.1) == ["c", "b", "a"]


def test_a_line_that_was_empty_stands_no_more() -> None:
    line = line_of("ab")
    called(line, 0.2)
    for waiter in "cd":
        line.join(0.3, waiter, "normal")
    assert called(line, 0.39) == ["c", "d"]


def test_nobody_waits_for_longer_than_max_delay() -> None:
    line = line_of("abc", every_s=0.02, max_delay=0.05)
    assert line.overdue(0.049) == []
    assert line.due_at(0.049) == 0.05
    assert line.overdue(0.05) == ["a"]
    assert line.overdue(0.09) == ["b", "c"]
    assert line.due_at(0.09) == math.inf


def test_in_a_line_that_stands_nobody_waits_for_more_than_a_moment() -> None:
    line = line_of("abcdef", every_s=0.0198)
    assert line.overdue(0.0999) == []
    assert line.due_at(0.0999) == pytest.approx(0.1)
    assert line.overdue(0.1) == ["a", "b", "c", "d", "e"]
    assert line.due_at(0.1) == pytest.approx(0.104)
    assert line.overdue(0.105) == ["f"]


def test_where_places_come_free_rarely_it_takes_longer_to_stand() -> None:
    """Ten places have to come free, and a moment is that of two: else nobody would be there when a place is."""
    line = line_of("ab", every_s=0.15, max_delay=1.0)
    line.place_s = 0.02
    assert line.overdue(0.199) == []
    assert line.overdue(0.2) == ["a", "b"]
    line.join(0.3, "c", "normal")
    line.join(0.48, "d", "normal")
    assert line.overdue(0.5) == ["c"]
    assert line.due_at(0.5) == pytest.approx(0.52)


def test_while_nothing_is_known_of_places_everybody_may_wait_for_max_delay() -> None:
    line: WaitingLine[str] = WaitingLine(5.0)
    line.join(0.0, "a", "normal")
    line.join(1.0, "b", "normal")
    assert line.due_at(2.0) == 5.0
    assert line.overdue(4.9) == []
    assert called(line, 4.9) == ["a", "b"]


@pytest.mark.parametrize("max_delay", [0.0, 0.001, 0.05, 0.25, 3.0])
@pytest.mark.parametrize("place_s", [0.0, 0.0001, 0.007, 0.3])
def test_when_it_is_due_somebody_is_overdue_or_it_stands(max_delay, place_s) -> None:
    """Else whoever waits for its time would be called again and again at the same."""
    line = line_of("abcdefghij", every_s=0.013, max_delay=max_delay)
    line.place_s = place_s
    now, looks = 0.117, 0
    while line:
        looks += 1
        assert looks <= 12
        assert line.due_at(now) <= max(now, 0.117) + max_delay + 1e-9
        now = max(now, line.due_at(now))
        line.overdue(now)
    assert now <= 0.117 + max_delay + 1e-9


def test_priorities_have_lines_of_their_own() -> None:
    line: WaitingLine[str] = WaitingLine(0.25)
    line.join(0.0, "low", "low")
    assert not line.is_before("normal")
    assert line.is_before("low")
    line.join(0.0, "high", "high")
    assert all(line.is_before(priority) for priority in ("high", "normal", "low"))
    assert line.call(0.0, "normal") is None
    assert (line.call(0.0, "high"), line.call(0.0, "low"), len(line)) == ("high", "low", 0)


def test_whoever_leaves_is_not_called() -> None:
    line = line_of("abc")
    line.leave("b", "normal")
    line.leave("b", "normal")
    line.leave("nobody", "high")
    assert called(line, 0.02) == ["a", "c"]


def test_a_full_line_lets_the_oldest_of_the_lowest_priority_go() -> None:
    line: WaitingLine[int] = WaitingLine(0.25)
    for n in range(MOST - 2):
        assert line.join(0.0, n, "normal") is None
    assert line.join(0.0, -1, "low") is line.join(0.0, -2, "low") is None
    assert line.join(0.0, -3, "low") == -1
    assert line.join(0.0, -4, "high") == -2
    assert line.join(0.0, -5, "normal") == -3
    assert line.join(0.0, -6, "normal") == 0
    assert line.join(0.0, -7, "low") == -7
    assert len(line) == MOST
