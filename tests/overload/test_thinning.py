from __future__ import annotations

import pytest

from limitgate.overload.shedding import PriorityLevel, Thinning


def levels() -> dict:
    return {priority: PriorityLevel(priority) for priority in ("high", "normal", "low")}


def step(thinning: Thinning, of: dict, times: int, *, high: float = 0.0, normal: float = 0.0, came: int = 100) -> float:
    """Take steps in which such shares of 100 requests are refused."""
    for _ in range(times):
        for priority, share in (("high", high), ("normal", normal)):
            of[priority].limit += round(came * share)
            of[priority].admitted += came - round(came * share)
        thinning.step()
    return thinning.level


def kept(thinning: Thinning) -> tuple[float, ...]:
    return tuple(thinning.kept(priority) for priority in ("high", "normal", "low"))


@pytest.mark.parametrize(
    ("level", "shares"), [(0, (1, 1, 1)), (0.3, (1, 1, 0.7)), (1, (1, 1, 0)), (1.25, (1, 0.75, 0)), (2, (1, 0, 0))]
)
def test_low_goes_before_normal_and_high_never(level, shares) -> None:
    thinning = Thinning(levels())
    thinning.level = level
    assert kept(thinning) == pytest.approx(shares)


def test_a_few_refusals_thin_nothing() -> None:
    of = levels()
    assert step(Thinning(of), of, 1000, high=0.05, normal=0.05) == 0


def test_low_makes_way_for_normal_but_normal_does_not() -> None:
    of = levels()
    assert step(Thinning(of), of, 1000, normal=0.9) == pytest.approx(1)


def test_all_make_way_for_high() -> None:
    of = levels()
    assert step(Thinning(of), of, 1000, high=0.9) == 2


def test_it_falls_when_nobody_is_refused() -> None:
    of = levels()
    thinning = Thinning(of)
    step(thinning, of, 1000, high=0.9)
    falling = [step(thinning, of, 1) for _ in range(80)]
    assert max(before - after for before, after in zip([2, *falling], falling)) <= 0.05 + 1e-9
    assert falling[39] > 0
    assert falling[-1] == 0, "8 seconds later all pass"


def test_what_was_refused_before_a_quiet_second_does_not_count_after_it() -> None:
    """Else the next few refusals, far below the goal, would thin as if the load had never ended."""
    of = levels()
    thinning = Thinning(of)
    step(thinning, of, 1000, high=0.9)
    while thinning.level:
        step(thinning, of, 1, came=0)
    assert step(thinning, of, 1, high=0.02) == 0
    assert step(thinning, of, 1, normal=0.02) == 0


def test_it_falls_when_those_that_it_protects_come_no_more() -> None:
    """Else nobody but them could ever pass again."""
    of = levels()
    thinning = Thinning(of)
    step(thinning, of, 1000, high=0.9, normal=0.9)
    assert step(thinning, of, 1000, came=0) == 0


def test_rare_requests_are_not_forgotten_between_two() -> None:
    of = levels()
    thinning = Thinning(of)
    for _ in range(300):
        step(thinning, of, 1, high=1.0, came=1)
        step(thinning, of, 5, came=0)
    assert thinning.level == 2


def test_what_was_before_it_does_not_count() -> None:
    of = levels()
    of["high"].limit = 10**6
    assert step(Thinning(of), of, 1) == 0
