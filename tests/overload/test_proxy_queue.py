"""Lag by the word of a proxy, whose clock is another one."""

from __future__ import annotations

import pytest

from limitgate.overload.lag import CLOCKS_S, LASTS_S, ProxyQueue


def test_the_least_wait_is_no_queue_as_far_as_clocks_differ() -> None:
    queue = ProxyQueue()
    assert queue.lag_s(0.0, 0.02) == 0
    assert queue.lag_s(0.1, 0.12) == pytest.approx(0.1)
    assert queue.lag_s(0.2, 0.01) == 0
    assert queue.lag_s(0.3, 0.02) == pytest.approx(0.01)


def test_a_long_wait_is_a_queue_until_it_has_lasted() -> None:
    """A clock that is a second wrong refuses for as long as a queue could explain it, and no longer."""
    queue = ProxyQueue()
    assert queue.lag_s(0.0, 1.0) == pytest.approx(1 - CLOCKS_S)
    assert queue.lag_s(LASTS_S - 0.1, 1.0) == pytest.approx(1 - CLOCKS_S)
    assert queue.lag_s(LASTS_S, 1.02) == pytest.approx(0.02)
    assert queue.lag_s(LASTS_S + 1, 1.5) == pytest.approx(0.5)


def test_what_was_least_is_forgotten_when_it_is_old() -> None:
    queue = ProxyQueue()
    queue.lag_s(0.0, 0.0)
    assert queue.lag_s(LASTS_S, 0.3) == pytest.approx(0.3)
    assert queue.lag_s(LASTS_S * 2, 0.3) == 0


def test_a_queue_that_drains_is_seen() -> None:
    """Other than with a wrong clock, its least wait is soon none."""
    queue = ProxyQueue()
    assert queue.lag_s(0.0, 2.0) > 1
    queue.lag_s(1.0, 0.0)
    assert queue.lag_s(LASTS_S + 1, 0.4) == pytest.approx(0.4)
