from __future__ import annotations

import math

import pytest

from limitgate.overload.lag import EVERY_S, LagGuard


def late(guard: LagGuard, lag_s: float, until: float, *, requests: int = 5) -> float:
    """Have heartbeats that are late by so much until a time; some requests ask in each iteration. Returns the time."""
    now = guard.due_at - EVERY_S
    while now < until:
        now = guard.due_at + lag_s
        for _ in range(requests):
            guard.refuses(guard.due_at - EVERY_S + 0.001)
        guard.beat(now)
    return now


def started() -> LagGuard:
    guard = LagGuard()
    guard.start(0.0)
    return guard


def test_without_heartbeats_nobody_is_refused() -> None:
    guard = LagGuard()
    assert guard.due_at == math.inf
    assert not guard.refuses(1e9)


def test_a_loop_in_time_refuses_nobody() -> None:
    guard = started()
    now = late(guard, 0.004, 10)
    assert not guard.is_hot
    assert not guard.refuses(now)


def test_it_gets_hot_after_a_tenth_of_a_second() -> None:
    guard = started()
    late(guard, 0.020, 0.03)
    assert not guard.refuses(guard.due_at + 0.02)
    now = late(guard, 0.020, 0.2)
    assert guard.refuses(guard.due_at + 0.02)
    assert guard.is_hot
    assert not guard.refuses(now), "the next iteration lets requests in"


@pytest.mark.parametrize(("over_s", "share", "is_refused"), [(0.009, 1, False), (0.011, 1, True), (0.009, 0.8, True)])
def test_a_hot_loop_lets_in_what_comes_in_its_budget(over_s, share, is_refused) -> None:
    guard = started()
    late(guard, 0.050, 0.3, requests=50)
    guard.refuses(guard.due_at)
    assert guard.refuses(guard.due_at + over_s, share) is is_refused


def test_one_heartbeat_in_time_calms_it() -> None:
    guard = started()
    late(guard, 0.050, 0.3)
    guard.refuses(guard.due_at + 0.02)
    guard.beat(guard.due_at + 0.001)
    assert not guard.is_hot
    assert not guard.refuses(guard.due_at + 0.05)


def test_a_single_stall_is_seen_before_its_heartbeat() -> None:
    """Requests that were read in a stall of 200 ms ask before the heartbeat could tell."""
    guard = started()
    assert guard.refuses(guard.due_at + 0.2)


def test_slow_handlers_are_no_lag() -> None:
    """Where one request keeps the loop for 40 ms, heartbeats are late by 40 ms, and nothing queues."""
    guard = started()
    now = late(guard, 0.030, 10, requests=1)
    assert guard.request_s == pytest.approx(0.04, rel=0.01)
    assert not guard.is_hot
    assert not guard.refuses(now)


def of_slow_handlers(request_s: float) -> LagGuard:
    """A guard that knows how long a request keeps its loop, with a heartbeat that is due at 0.01."""
    guard = started()
    guard.request_s = request_s
    return guard


def test_slow_handlers_take_ten_of_them_to_make_a_loop_hot() -> None:
    """A tenth of a second of lag is no more than two or three requests there."""
    guard = of_slow_handlers(0.040)
    assert not guard.refuses(0.01 + 0.399)
    assert guard.refuses(0.01 + 0.401)


@pytest.mark.parametrize(("over_s", "share", "is_refused"), [(0.079, 1, False), (0.081, 1, True), (0.065, 0.8, True)])
def test_a_hot_loop_of_slow_handlers_lets_in_two_of_them(over_s, share, is_refused) -> None:
    guard = of_slow_handlers(0.040)
    guard.is_hot = True
    assert guard.refuses(0.01 + over_s, share) is is_refused


def test_lag_of_one_slow_handler_calms_a_hot_loop() -> None:
    guard = of_slow_handlers(0.040)
    guard.refuses(0.01 + 0.5)
    guard.beat(0.01 + 0.5)
    assert guard.is_hot
    guard.beat(guard.due_at + 0.039)
    assert not guard.is_hot
    assert not guard.refuses(guard.due_at + 0.399), "lag is counted anew"


def test_heartbeats_rest_a_second_after_the_last_request() -> None:
    guard, beats = started(), 0
    guard.refuses(0.005)
    while (due := guard.beat(guard.due_at)) is not None:
        beats += 1
        assert due == guard.due_at
    assert beats == 100
    assert guard.due_at == math.inf
    assert not guard.refuses(5000)
    assert guard.start(5000) == 5000.01


def test_a_clock_that_goes_back_is_no_lag() -> None:
    guard = started()
    guard.beat(-100)
    assert guard.lag_s == 0
    assert not guard.is_hot


def test_an_hour_of_sleep_is_over_with_the_next_heartbeat() -> None:
    guard = started()
    guard.refuses(0.001)
    guard.beat(3600)
    assert not guard.refuses(3600.001)
    guard.beat(3600.01)
    assert not guard.is_hot
    assert guard.request_s <= 0.1


def accepting(waiting: list[int]) -> LagGuard:
    """A guard with heartbeats in time, that knows of requests of 2 ms; then 30 connections wait to be accepted for 0.2 s."""
    guard = LagGuard(lambda: waiting[0])
    now, waiting[0] = guard.start(0.0), 1
    while now < 1.2:
        for _ in range(5):
            guard.refuses(now - 0.005)
        now = guard.beat(now)
        waiting[0] = 1 if now < 1 else 30
    return guard


def test_connections_that_wait_to_be_accepted_are_lag() -> None:
    """Where the loop accepts one in each iteration no heartbeat is late; of 2 ms each, 30 requests wait for 60 ms."""
    guard = accepting(waiting := [0])
    assert guard.request_s == pytest.approx(0.002, rel=0.01)
    assert guard.lag_s == pytest.approx(0.060, rel=0.01)
    assert guard.refuses(guard.due_at - 0.005)
    assert guard.is_hot
    waiting[0] = 19
    assert not guard.refuses(guard.due_at - 0.005), "no more wait than can be done in 40 ms"
    waiting[0] = 12
    assert guard.refuses(guard.due_at - 0.005, 0.5)


def test_a_few_connections_that_wait_are_none() -> None:
    guard = accepting(waiting := [0])
    waiting[0] = 2
    for _ in range(100):
        guard.beat(guard.due_at)
        assert [guard.refuses(guard.due_at) for _ in range(5)] == [False] * 5
    assert not guard.is_hot


def test_a_queue_that_is_empty_calms_a_hot_loop() -> None:
    guard = accepting(waiting := [0])
    assert guard.refuses(guard.due_at - 0.005)
    waiting[0] = 0
    guard.beat(guard.due_at)
    waiting[0] = 30
    assert not guard.is_hot
    assert not guard.refuses(guard.due_at - 0.005)


def test_connections_that_come_in_a_late_iteration_wait_for_the_next() -> None:
    """They are all accepted at once there, so that only the lag counts: a hot loop is to be busy."""
    guard = LagGuard(lambda: 1000)
    guard.start(0.0)
    late(guard, 0.050, 0.3, requests=50)
    assert guard.lag_s == pytest.approx(0.050)
    assert guard.refuses(guard.due_at + 0.011)
    assert not guard.refuses(guard.due_at + 0.009)


def test_the_queue_is_looked_at_once_in_a_heartbeat_while_nobody_is_refused() -> None:
    looks = []
    guard = LagGuard(lambda: looks.append(1) or 1)
    now = guard.start(0.0)
    for _ in range(10):
        for _ in range(100):
            guard.refuses(now - 0.005)
        now = guard.beat(now)
    assert len(looks) == 10


def test_waits_that_a_proxy_tells_take_the_place_of_heartbeats() -> None:
    guard = LagGuard()
    refused = []
    for n in range(40):
        guard.waited(n * 0.01, 0.08)
        refused.append(guard.refuses(n * 0.01))
    assert refused == [False] * 2 + [True] * 38
    guard.waited(1.0, 0.001)
    assert not guard.refuses(1.0)
    guard.waited(2.0, -5)
    assert guard.lag_s == 0
