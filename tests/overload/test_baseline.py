from __future__ import annotations

import pytest

from limitgate.overload.baseline import FIRST, MOST_CLASSES, MOST_OWN, RECENT, Baseline, Baselines


def having(mean_s: float) -> Baseline:
    baseline = Baseline()
    for _ in range(10):
        baseline.begin_with(mean_s)
    return baseline


def learn(baseline: Baseline, mean_s: float, count: int = 1000, now: float = 0.0) -> float:
    baseline.count, baseline.seconds = count, count * mean_s
    baseline.learn(now)
    return baseline.mean_s


def test_it_begins_with_the_mean_of_the_first_requests() -> None:
    baseline = Baseline()
    for took_s in (0.1, 0.2, 0.3):
        baseline.begin_with(took_s)
    assert baseline.mean_s == pytest.approx(0.2)
    assert baseline.known == 3


def test_it_falls_at_once() -> None:
    assert learn(having(0.3), 0.01) == pytest.approx(0.01, rel=0.1)


def test_few_requests_say_less() -> None:
    assert learn(having(0.3), 0.1, count=3) == pytest.approx(0.2)


def test_it_rises_at_most_twofold_at_once() -> None:
    assert learn(having(0.1), 0.9) == pytest.approx(0.2, rel=0.01)


def test_it_rises_at_most_fourfold_in_ten_minutes() -> None:
    baseline = having(0.1)
    learn(baseline, 0.1)
    risen = [learn(baseline, 9.0, now=5.0 * n) for n in range(1, 100)]
    assert max(risen) == pytest.approx(0.4)
    later = [learn(baseline, 9.0, now=600 + 5.0 * n) for n in range(100)]
    assert max(later) == pytest.approx(0.4), "the least is remembered for at least ten minutes"
    assert learn(baseline, 9.0, now=1205) > 0.79


def test_it_falls_back_whenever_requests_are_faster() -> None:
    baseline = having(0.1)
    for n in range(20):
        learn(baseline, 9.0, now=5.0 * n)
    assert learn(baseline, 0.05, now=100) == pytest.approx(0.05, rel=0.05)


def test_after_an_hour_without_learning_the_least_is_forgotten() -> None:
    baseline = having(0.1)
    learn(baseline, 0.1, now=0)
    assert learn(baseline, 0.2, now=3600) == pytest.approx(0.2, rel=0.01)
    assert learn(baseline, 0.4, now=3605) == pytest.approx(0.4, rel=0.01)
    assert learn(baseline, 0.8, now=3610) == pytest.approx(0.8, rel=0.01)


def quietly(baseline: Baseline, took_s: float, now: float = 0.0) -> float:
    baseline.count, baseline.seconds = 10, 10 * took_s
    baseline.learn_quietly(now)
    return baseline.mean_s


def test_without_load_it_only_falls_and_slowly() -> None:
    baseline = having(0.1)
    for took_s, mean_s in ((0.5, 0.1), (0.05, 0.095), (0.05, 0.0905)):
        assert quietly(baseline, took_s) == pytest.approx(mean_s)


def test_without_load_it_is_soon_what_it_was_before() -> None:
    """Requests that got cheaper for a while do not hold it down when the usual ones come back, which are as slow as before."""
    baseline = having(0.1)
    for _ in range(100):
        quietly(baseline, 0.001)
    assert baseline.mean_s < 0.002
    for _ in range(30):
        quietly(baseline, 0.2)
    assert 0.09 < baseline.mean_s <= 0.1


def test_where_requests_are_slow_it_is_at_once_what_it_was_before() -> None:
    """And no more than that."""
    baseline = having(0.1)
    for _ in range(100):
        quietly(baseline, 0.001)
    baseline.count, baseline.seconds = 10, 0.5
    baseline.rise_again(1.0)
    assert baseline.mean_s == pytest.approx(0.05)
    baseline.count, baseline.seconds = 10, 90.0
    baseline.rise_again(1.0)
    assert baseline.mean_s == pytest.approx(0.1)


def test_what_a_dip_has_shown_holds() -> None:
    baseline = having(0.1)
    fallen = learn(baseline, 0.02, now=1.0)
    baseline.count, baseline.seconds = 10, 90.0
    baseline.rise_again(2.0)
    assert baseline.mean_s == fallen == pytest.approx(0.02, rel=0.1)


def test_what_it_was_is_forgotten_after_ten_minutes() -> None:
    baseline = having(0.1)
    for now in range(1300):
        quietly(baseline, 0.001, now)
    baseline.count, baseline.seconds = 10, 90.0
    baseline.rise_again(1300)
    assert baseline.mean_s == pytest.approx(0.001, rel=0.1)


def sampled(baselines: Baselines, request_class: object, client: object, now: float) -> Baseline:
    return (baselines.classes.get(request_class) or baselines.open(request_class, now)).sampled(client)


def take(baselines: Baselines, request_class: object, client: object, took_s: float, number: int = 1) -> Baseline:
    """Requests of a client that were samples. Returns the baseline of the last."""
    for _ in range(number):
        baseline = sampled(baselines, request_class, client, 0.0)
        if baseline.known < FIRST:
            baseline.begin_with(took_s)
        baselines.note(baseline, took_s)
    return baseline


def test_classes_have_baselines_of_their_own() -> None:
    baselines = Baselines()
    take(baselines, "slow", None, 0.5)
    take(baselines, "fast", None, 0.005)
    assert baselines.by_class() == {"slow": 0.5, "fast": 0.005}
    assert baselines.longest_s == 0.5
    assert (baselines.mean_s("slow", "any"), baselines.mean_s("unknown", "any")) == (0.5, 0.0)


def test_the_class_that_is_used_least_makes_room() -> None:
    baselines = Baselines()
    for n in range(MOST_CLASSES):
        take(baselines, n, None, 0.1, number=1 if n == 7 else 2)
    take(baselines, "new", None, 0.5)
    assert baselines.mean_s(7, None) == 0
    assert (baselines.mean_s(8, None), baselines.mean_s("new", None)) == (0.1, 0.5)
    assert len(baselines.by_class()) == MOST_CLASSES


def test_a_class_that_was_used_much_long_ago_makes_room_for_those_of_today() -> None:
    baselines = Baselines()
    take(baselines, "yesterday", None, 0.1, number=1000)
    for n in range(MOST_CLASSES - 1):
        take(baselines, n, None, 0.1, number=20)
    for day in range(20):
        sampled(baselines, f"new {day}", None, 10_000.0 * day)
        for n in range(MOST_CLASSES - 1):
            take(baselines, n, None, 0.1, number=20)
    assert baselines.mean_s("yesterday", None) == 0


def test_a_window_sees_those_of_which_requests_ended() -> None:
    baselines = Baselines()
    baseline = take(baselines, "a", None, 0.1, number=3)
    sampled(baselines, "b", None, 0.0)
    assert baselines.seen == [baseline]
    assert (baseline.count, baseline.base_s) == (3, pytest.approx(0.3))
    baselines.forget_window()
    assert not baselines.seen
    assert baseline.count == 0


def test_a_client_that_makes_many_of_the_requests_has_a_baseline_of_its_own() -> None:
    """So its cheap requests say nothing of those of others, whether these were here before or come later."""
    baselines = Baselines()
    for n in range(40):
        take(baselines, "a", f"client {n % 8}", 0.1)
    for _ in range(1000):
        take(baselines, "a", "many", 0.001)
    assert baselines.mean_s("a", "client 1") == pytest.approx(0.1, rel=0.3)
    first = Baselines()
    take(first, "a", "many", 0.001, number=1000)
    for n in range(40):
        take(first, "a", f"client {n % 8}", 0.1)
        take(first, "a", "many", 0.001, number=10)
    assert first.mean_s("a", "client 1") == pytest.approx(0.1, rel=0.2), "its first request counts for all"


def test_a_baseline_of_its_own_begins_with_that_of_all() -> None:
    baselines = Baselines()
    for n in range(40):
        shared = take(baselines, "a", f"client {n}", 0.1)
    own = take(baselines, "a", "many", 0.1, number=20)
    assert own is not shared
    assert (own.mean_s, own.known) == (shared.mean_s, FIRST)
    assert baselines.by_class() == {"a": pytest.approx(0.1)}


def test_few_clients_have_a_baseline_of_their_own() -> None:
    baselines = Baselines()
    for n in range(40):
        take(baselines, "a", f"client {n}", 0.1)
    for n in range(100):
        take(baselines, "a", f"many {n}", 0.001, number=RECENT)
    assert baselines.mean_s("a", "many 0") == pytest.approx(0.1, rel=0.2)
    assert baselines.mean_s("a", "many 99") == pytest.approx(0.1, rel=0.2)
    assert len(baselines.classes["a"]._own) == MOST_OWN
