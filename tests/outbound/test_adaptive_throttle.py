from __future__ import annotations

import heapq
from collections import Counter
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from limitgate.outbound.host_load import LEAST, MOST, WINDOW_S, AdaptiveThrottle

OFFERED = 100.0
"""Requests per second."""
FINE_S = 120.0
"""Seconds for which a host is fine before it is not."""
ANSWERS_S = 0.05


class Trouble(NamedTuple):
    """What becomes of a host in trouble."""

    sent: float
    """Requests per second that it was sent in the last third of its trouble."""
    back_s: float
    """Seconds after it until nine tenths of the requests were answered again, as means of three seconds."""


def trouble(seed: int, length_s: float, *, takes: float = 0.0, refuses_s: float = ANSWERS_S) -> Trouble:
    """Poisson requests to a host that takes so many per second for a while, and lets the others know after ``refuses_s``."""
    random, throttle, now, tokens, topped_up = Random(seed), AdaptiveThrottle(), 0.0, 1.0, FINE_S
    under_way: list[tuple[float, bool]] = []
    sent, taken = Counter[int](), Counter[int]()
    while now < FINE_S + length_s + 60:
        now += random.expovariate(OFFERED)
        while under_way and under_way[0][0] <= now:
            at, is_taken = heapq.heappop(under_way)
            throttle.count(at, accepted=is_taken)
        if throttle.refuses(now, random.random):
            continue
        is_taken = True
        if FINE_S <= now < FINE_S + length_s:
            tokens, topped_up = min(max(1.0, takes), tokens + (now - topped_up) * takes), now
            is_taken = tokens >= 1
            tokens -= is_taken
        sent[int(now)] += 1
        taken[int(now)] += is_taken
        heapq.heappush(under_way, (now + (ANSWERS_S if is_taken else refuses_s), is_taken))
    end = int(FINE_S + length_s)
    last_third = range(int(end - length_s / 3), end)
    good = (each for each in range(end, end + 57) if sum(taken[each + more] for more in range(3)) >= 0.9 * 3 * OFFERED)
    return Trouble(sum(sent[each] for each in last_third) / len(last_third), next(good) - end)


@pytest.mark.parametrize(
    ("length_s", "takes", "refuses_s", "sent", "back_s"),
    [
        pytest.param(30, 0, ANSWERS_S, 5, 20, id="dead for 30 s"),
        pytest.param(30, 0, 5.0, 5, 20, id="times out for 30 s"),
        pytest.param(300, 0, ANSWERS_S, 5, 26, id="dead for 300 s"),
        pytest.param(300, 0, 5.0, 5, 26, id="times out for 300 s"),
        pytest.param(300, 20, ANSWERS_S, 39, 5, id="takes 20 a second"),
        pytest.param(300, 20, 5.0, 39, 8, id="takes 20 a second, the others time out"),
    ],
)
def test_a_host_in_trouble(length_s: float, takes: float, refuses_s: float, sent: float, back_s: float) -> None:
    """A dead host costs next to nothing, one that takes some gets about twice as many, and both are found again soon."""
    found = [trouble(seed, length_s, takes=takes, refuses_s=refuses_s) for seed in range(2)]
    assert sum(each.sent for each in found) / len(found) == pytest.approx(sent, rel=0.1)
    assert sum(each.back_s for each in found) / len(found) <= back_s + 2
    assert max(each.back_s for each in found) < 30


def counted(requests: int, accepts: int, now: float = 0.0) -> AdaptiveThrottle:
    throttle = AdaptiveThrottle()
    for each in range(requests):
        throttle.count(now, accepted=each < accepts)
    return throttle


@pytest.mark.parametrize(
    ("requests", "accepts", "share"),
    [(0, 0, 0), (LEAST - 1, 0, 0), (10, 0, 10 / 11), (10, 2, 6 / 11), (100, 50, 0), (100, 49, 2 / 101), (100, 0, MOST)],
)
def test_the_share_by_requests_and_accepts(requests: int, accepts: int, share: float) -> None:
    """Nothing below ten requests, nor while half of them are accepted; never all."""
    throttle = counted(requests, accepts)
    assert throttle.refused_share(0) == share
    assert not throttle.refuses(0, lambda: share)
    assert throttle.refuses(0, lambda: max(0.0, share - 1e-9)) is (share > 0)


def test_own_refusals_count() -> None:
    """So that the share follows what is wanted, and not what little is sent."""
    throttle = counted(12, 4)
    assert throttle.refused_share(0) == 4 / 13
    assert throttle.refuses(0, lambda: 0.0)
    assert throttle.refused_share(0) == 5 / 14


def test_a_burst_under_way_is_no_evidence() -> None:
    """A slow host is not taken for a dead one: whatever is sent before the first answer passes."""
    throttle = AdaptiveThrottle()
    assert not any(throttle.refuses(now / 100, Random(now).random) for now in range(1000))


def test_what_is_older_than_the_window_is_forgotten() -> None:
    throttle = counted(100, 0, now=5.5)
    throttle.count(WINDOW_S + 4.9, accepted=True)
    assert throttle.refused_share(WINDOW_S + 4.9) == MOST
    assert throttle.refused_share(WINDOW_S + 5) == 0
    for _ in range(9):
        throttle.count(WINDOW_S + 5, accepted=False)
    assert throttle.refused_share(WINDOW_S + 5) == 8 / 11


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans(), st.booleans()), max_size=300), st.randoms(use_true_random=False))
def test_whatever_happens_some_are_sent_property(steps: list[tuple[float, bool, bool]], random: Random) -> None:
    """Clocks that stand still or step back included, a share is one, and it is over once nothing has come for a window."""
    throttle = AdaptiveThrottle()
    for now, is_taken, is_drawn in steps:
        if not is_drawn or not throttle.refuses(now, random.random):
            throttle.count(now, accepted=is_taken)
        assert 0 <= throttle.refused_share(now) <= MOST
    assert throttle.refused_share(30 + WINDOW_S) == 0
    assert (throttle._requests, throttle._accepts) == (0, 0)
