from __future__ import annotations

import pytest

from limitgate.overload.littles_law import LittlesLaw, Window
from limitgate.overload.options import Adaptive


def window(took_s: float = 0.05, base_s: float = 0.05, *, rate: float = 200, span_s: float = 0.1, **other) -> Window:
    """Requests that took so long at a rate, in a window."""
    count = round(rate * span_s)
    options = {"longest_base_s": base_s, **other}
    return Window(span_s=span_s, count=count, seconds=count * took_s, base_s=count * base_s, **options)


def run(law: LittlesLaw, windows: int, each: Window, now: float = 0.0) -> list[float]:
    """The limit after each of some windows."""
    values = []
    for _ in range(windows):
        now += each.span_s
        law.update(each, now)
        values.append(law.value)
    return values


def test_the_limit_is_rate_times_time_and_what_may_queue() -> None:
    law = LittlesLaw(Adaptive())
    law.update(window(), 0.1)
    assert (law.rate, law.base_in_flight, law.base_s) == (200, 10, 0.05)
    assert law.goal == 10 + 10 + 1
    law = LittlesLaw(Adaptive(tolerance=3))
    law.update(window(), 0.1)
    assert law.goal == 10 + 20 + 1


def test_fast_requests_may_queue_for_the_delay() -> None:
    law = LittlesLaw(Adaptive())
    law.update(window(0.001, 0.001, rate=1000), 0.1)
    assert law.goal == 1 + 20 + 1


def test_a_service_without_load_teaches_no_limit() -> None:
    law = LittlesLaw(Adaptive())
    assert run(law, 100, window(rate=1000, most_in_flight=10)) == [20] * 100
    assert law.pressed_since is None


def test_steps_up() -> None:
    """The limit doubles within a window while requests are fast, and then goes on by a tenth; never beyond ``max``."""
    law = LittlesLaw(Adaptive(min=1, max=200))
    law.value = 1.0
    values = run(law, 40, window(rate=2000, is_full=True))
    assert values[:6] == [2, 4, 8, 16, 32, 64]
    assert values[-1] == 200
    assert values == sorted(values)


def test_steps_down() -> None:
    """Four tenths of the way in each window."""
    law = LittlesLaw(Adaptive())
    law.update(window(), 0.1)
    law.value = 100.0
    values = run(law, 10, window(0.5, is_full=True))
    assert values[:3] == pytest.approx([21 + 79 * 0.6**n for n in (1, 2, 3)])
    assert values[-1] == pytest.approx(21, abs=1)


def test_requests_as_slow_as_they_may_be_keep_the_limit() -> None:
    law = LittlesLaw(Adaptive())
    law.value = 21.0
    assert run(law, 50, window(0.1, is_full=True)) == pytest.approx([21] * 50)


def test_slow_requests_press_though_nothing_is_refused() -> None:
    law = LittlesLaw(Adaptive(max=500))
    law.value = 200.0
    values = run(law, 20, window(0.9, most_in_flight=180))
    assert values[-1] == pytest.approx(21, abs=1)


def test_slow_requests_that_are_few_do_not() -> None:
    law = LittlesLaw(Adaptive())
    assert run(law, 20, window(0.9, most_in_flight=15)) == [20] * 20


def test_more_than_a_tenth_of_failures_cut_the_limit() -> None:
    law = LittlesLaw(Adaptive())
    assert run(law, 1, window(failed=2)) == [20]
    assert run(law, 3, window(failed=3)) == pytest.approx([18, 16.2, 14.58])
    assert run(law, 100, Window(span_s=0.1, failed=10))[-1] == 4
    assert law.rate == 200, "they teach nothing else"


def test_a_window_without_requests_teaches_nothing() -> None:
    law = LittlesLaw(Adaptive())
    run(law, 10, Window(span_s=1.0))
    assert (law.value, law.rate, law.base_s, law.goal) == (20, None, 0, 1)


def test_requests_of_which_nothing_is_learned_need_places_too() -> None:
    law = LittlesLaw(Adaptive())
    law.update(window(untaught_s=1.0), 0.1)
    assert law.base_in_flight == 20


@pytest.mark.parametrize(("base_s", "tau_s"), [(0.001, 0.3), (0.5, 1.0), (9.0, 3.0)])
def test_averages_take_twice_the_time_of_a_request(base_s, tau_s) -> None:
    law = LittlesLaw(Adaptive())
    law.update(window(base_s, base_s, rate=100), 0.1)
    law.update(window(base_s, base_s, rate=200, span_s=tau_s), 1.0)
    assert law.rate == pytest.approx(200 - 100 / 2.718281828)


def slow_elsewhere(law: LittlesLaw, begin: float, end: float) -> list[float]:
    """When requests that stay slow whatever the limit is are said not to queue here."""
    times = []
    now = begin
    while now < end:
        now = round(now + 0.1, 6)
        if law.update(window(0.5, rate=40, has_refused=True, is_full=True), now):
            times.append(now)
    return times


def test_requests_that_stay_slow_do_not_queue_here() -> None:
    """Once in 30 seconds, after the limit was cut and nothing became faster."""
    law = LittlesLaw(Adaptive())
    law.value = 100.0
    first, *more = slow_elsewhere(law, 0, 100)
    assert 0.75 < first < 2
    assert all(later - earlier >= 30 for earlier, later in zip([first, *more], more))


def test_requests_that_get_faster_for_the_cut_do_queue_here() -> None:
    law = LittlesLaw(Adaptive())
    law.value = 100.0
    now = 0.0
    for _ in range(1000):
        now += 0.1
        assert not law.update(window(law.value / 200, has_refused=True, is_full=True), now)
    assert law.value == pytest.approx(21, abs=1)


def test_it_stays_within_its_bounds_under_other_options() -> None:
    law = LittlesLaw(Adaptive())
    law.update(window(), 0.1)
    law.reconfigure(Adaptive(max=10))
    assert (law.whole, law.rate) == (10, 200)
    law.reconfigure(Adaptive(min=50))
    assert law.whole == 50
