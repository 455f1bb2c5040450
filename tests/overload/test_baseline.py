from __future__ import annotations

import pytest

from limitgate.overload.baseline import MOST_CLASSES, Baseline, Baselines


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


def test_without_load_it_only_falls_and_slowly() -> None:
    baseline = having(0.1)
    for took_s, mean_s in ((0.5, 0.1), (0.05, 0.095), (0.05, 0.0905)):
        baseline.count, baseline.seconds = 10, 10 * took_s
        baseline.learn_quietly()
        assert baseline.mean_s == pytest.approx(mean_s)


def test_classes_have_baselines_of_their_own() -> None:
    baselines = Baselines()
    baselines["slow"].begin_with(0.5)
    baselines["fast"].begin_with(0.005)
    assert baselines.by_class() == {"slow": 0.5, "fast": 0.005}
    assert baselines.longest_s == 0.5


def test_64_classes_have_one_and_all_others_share_one() -> None:
    baselines = Baselines()
    own = [baselines[n] for n in range(MOST_CLASSES)]
    others = {id(baselines[n]) for n in range(MOST_CLASSES, 10_000)}
    assert len({id(each) for each in own}) == MOST_CLASSES
    assert len(others) == 1
    assert [baselines[n] for n in range(MOST_CLASSES)] == own


def test_a_window_sees_those_of_which_requests_ended() -> None:
    baselines = Baselines()
    baselines["a"].count = 3
    baselines["b"].mean_s = 0.1
    assert list(baselines.seen()) == [baselines["a"]]
    baselines.forget_window()
    assert not list(baselines.seen())
