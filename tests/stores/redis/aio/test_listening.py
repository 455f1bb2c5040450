"""`Silence` on a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from limitgate.stores.redis.aio.listening import GRAIN, LONGEST, Silence


class _Clock:
    seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def watch(self, _: Any) -> None:
        """Nobody is told."""


def _silence(*looks: float, connecting: float = math.inf) -> float:
    """Seconds of silence after so many looks, each so many seconds after the one before."""
    clock: Any = _Clock()
    silence = Silence(clock)
    silence.watch(clock)
    for seconds in looks:
        clock.seconds += seconds
        silence.go_on(connecting=connecting)
    return silence.seconds


@pytest.mark.parametrize("timeout", [0.01, 0.1, 1.0])
def test_a_server_that_is_not_reached_has_the_time_of_its_requests(timeout: float) -> None:
    """The loop looks in time, so that nothing but the server is slow."""
    assert _silence(*[GRAIN] * 3, connecting=timeout) == pytest.approx(3 * GRAIN)


@pytest.mark.parametrize(("timeout", "counts"), [(0.01, 0.001), (0.05, 0.005), (0.1, GRAIN), (10.0, GRAIN)])
def test_to_connect_takes_a_loop_that_is_away_several_turns(timeout: float, counts: float) -> None:
    """However short the timeout, it takes ten of them until it is over: the server is there, and the loop is late."""
    assert _silence(*[LONGEST] * 5, connecting=timeout) == pytest.approx(5 * counts)


def test_all_of_it_counts_where_there_is_a_connection() -> None:
    assert _silence(GRAIN, LONGEST) == pytest.approx(GRAIN + LONGEST)
