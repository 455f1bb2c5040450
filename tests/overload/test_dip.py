from __future__ import annotations

import pytest

from limitgate.overload.baseline import Dip, Schedule


def begun_at(*walls: float) -> Schedule:
    schedule = Schedule()
    for wall in walls:
        schedule.begin(wall)
    return schedule


@pytest.mark.parametrize(
    ("walls", "now", "wants_dip", "wait_s"),
    [
        ((), 1000.0, False, 0),  # the first dip is due at once
        ((), 1003.2, False, 0),
        ((1000.0,), 1000.1, False, 4.9),
        ((1003.2,), 1003.3, False, 1.7),
        ((1000.0,), 1005.0, False, 0),
        ((1000.0,), 1000.3, True, 0.2),  # another soon
        ((1000.0,), 1000.6, True, 0),
        ((1000.0, 1000.6), 1000.7, True, 0.3),
        ((1000.0,), 1004.1, True, 0.9),  # but not shortly before the next mark
        ((1000.0,), 999.9, False, 0),  # the wall clock went back
        ((1000.0,), 10.0, False, 0),
    ],
)
def test_when_dips_are_due(walls, now, wants_dip, wait_s) -> None:
    assert begun_at(*walls).wait_s(now, wants_dip=wants_dip) == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("before", "wall", "is_shared"),
    [((), 1000.02, True), ((), 1000.2, False), ((1000.0,), 1000.05, False), ((1000.0, 1000.5), 1005.0, True)],
)
def test_dips_at_the_mark_are_those_of_all_processes(before, wall, is_shared) -> None:
    assert begun_at(*before).begin(wall) is is_shared


@pytest.mark.parametrize(("in_flight", "limit", "expected"), [(10, 20, 7), (10, 5, 4), (0.1, 20, 1), (1000, 200, 140)])
def test_how_deep(in_flight, limit, expected) -> None:
    assert Dip(0.0, in_flight, 0.05, limit, is_shared=True).limit == expected


def test_requests_count_once_in_flight_has_fallen() -> None:
    dip = Dip(0.0, 10, 0.05, 20, is_shared=True)
    dip.note_in_flight(8, 0.01)
    assert dip.clean_at == float("inf")
    dip.note_in_flight(7, 0.02)
    dip.note_in_flight(3, 0.03)
    assert dip.clean_at == 0.02


@pytest.mark.parametrize(
    ("count", "now", "is_over"),
    [
        (13, 0.1, False),
        (14, 0.1, True),  # twice its limit
        (2, 0.26, False),
        (3, 0.26, True),  # some, and its time is over
        (2, 0.74, False),
        (0, 0.76, True),  # nobody came
    ],
)
def test_when_it_is_over(count, now, is_over) -> None:
    dip = Dip(0.0, 10, 0.05, 20, is_shared=True)
    dip.count = count
    assert dip.is_over(now) is is_over


def test_slow_requests_have_more_time() -> None:
    dip = Dip(0.0, 10, 1.0, 20, is_shared=True)
    dip.count = 3
    assert not dip.is_over(4.9)
    assert dip.is_over(5.1)
