"""`Silence` on a clock of the test's own."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import Mock

import pytest

from limitgate.stores.redis.aio.batch import Batch
from limitgate.stores.redis.aio.listening import GRAIN, LONGEST, ListeningClock, Silence


class _Clock:
    seconds = 0.0

    def __init__(self, *, was_away: bool) -> None:
        self.was_away = was_away

    def now(self) -> float:
        return self.seconds

    def watch(self, _: Any) -> None:
        """Nobody is told."""


def _silence(*looks: float, connecting: float = math.inf, was_away: bool = False) -> float:
    """Seconds of silence after so many looks, each so many seconds after the one before."""
    clock: Any = _Clock(was_away=was_away)
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
    assert _silence(*[LONGEST] * 5, connecting=timeout, was_away=True) == pytest.approx(5 * counts)


def test_all_of_it_counts_where_there_is_a_connection() -> None:
    assert _silence(GRAIN, LONGEST) == pytest.approx(GRAIN + LONGEST)


def test_time_in_which_something_is_heard_is_no_silence() -> None:
    """An answer ends the silence until the next look, and no longer."""
    clock: Any = _Clock(was_away=False)
    silence = Silence(clock)
    silence.watch(clock)
    counted = []
    for is_heard in (False, True, False, True, True):
        clock.seconds += GRAIN
        if is_heard:
            silence.break_()
        counted.append(silence.go_on())
    assert counted == [True, False, True, False, False]
    assert silence.seconds == pytest.approx(2 * GRAIN)


def test_a_loop_that_was_away_is_known_to_have_been() -> None:
    """A loop that other threads kept from the GIL for 5 ms was away, and it still is where it comes in time once."""

    async def looks() -> list[bool]:
        clock, now, were_away = ListeningClock(), 0.0, []
        clock._loop, clock._time = Mock(), lambda: now
        clock.watch(Mock())
        for late in (0.0, 0.005, 0.0, 0.0):
            now += GRAIN + late
            clock._look()
            were_away.append(clock.was_away)
        return were_away

    assert asyncio.run(looks()) == [False, True, True, False]


def test_what_is_sent_again_has_waited_for_what_was_counted() -> None:
    """Redis has answered that it does not know the script: what the loop has not looked at by then was no silence."""
    batch = Batch([])
    batch.since, batch.silence = 1.0, 0.25
    batch.heard(1.0, 1.5)
    assert batch.silence_at(1.5) == pytest.approx(0.25)
    batch.heard(2.0, 2.5)
    assert batch.silence_at(2.75) == pytest.approx(0.25 + 0.5 + 0.25)
