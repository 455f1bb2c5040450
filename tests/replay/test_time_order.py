"""Requests of a log, put in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from limitgate.replay import access_log
from limitgate.replay.access_log import LATE, Entry, TimeOrder

SECOND = 1_000_000


def ordered(times: list[int]) -> list[tuple[int, int]]:
    """Times in the order in which they are given out, each with its place in the log."""
    order, given_out = TimeOrder(), []
    for place, at in enumerate(times):
        given_out += order.push(Entry(at, b"%d" % place, "GET", "/"))
    given_out += order.rest()
    return [(entry.at, int(entry.client)) for entry in given_out]


@given(st.lists(st.integers(0, (LATE - 1) * SECOND)), st.integers(0, 10**16))
def test_lines_are_sorted(offsets: list[int], start: int) -> None:
    """As `sorted` does it, which keeps the order of equals, as far as no line is too late."""
    times = [start + offset for offset in offsets]
    assert ordered(times) == sorted((at, place) for place, at in enumerate(times))


def test_little_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long log is given out as it is read, and no second is held longer than lines may be late."""
    order, times = TimeOrder(), [number * SECOND + random.Random(number).randrange(50 * SECOND) for number in range(5000)]
    waiting = 0
    for number, at in enumerate(times):
        waiting += 1 - len(order.push(Entry(at, b"", "GET", "/")))
        assert waiting <= 2 * LATE, number
    monkeypatch.setattr(access_log, "MOST", 10)
    crowd = TimeOrder()
    assert sum(len(crowd.push(Entry(number % 7 * SECOND, b"", "GET", "/"))) for number in range(1000)) >= 989


def test_a_line_that_is_too_late_comes_as_soon_as_it_can() -> None:
    """It is not lost."""
    times = [0, 500 * SECOND, 3, 501 * SECOND]
    assert [at for at, _ in ordered(times)] == [0, 3, 500 * SECOND, 501 * SECOND]
