"""Histories of requests, made by hand and at random, on a clock of the test's own."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from random import Random

import pytest

from limitgate.limits.bucket import RESERVES
from limitgate.overload.adaptive_limit import STUCK_BASES, STUCK_S, AdaptiveLimit, Permit
from limitgate.overload.baseline import MOST_CLASSES
from limitgate.overload.lag import LagGuard
from limitgate.overload.options import Adaptive
from tests.support.effort import EXAMPLES, FUZZED

pytestmark = pytest.mark.usefixtures("_unwatched")

WALL = 1000.0
"""What the wall clock is ahead; a multiple of five seconds, so that dips are at those of the test's clock, too."""
HISTORIES = 4 * EXAMPLES
"""A million of them where `make fuzz` asks for 100,000 examples."""
TENTH = Fraction(1, 10)


def make(options: Adaptive | None = None, **other) -> AdaptiveLimit:
    return AdaptiveLimit(options or Adaptive(), wall_offset=lambda: WALL, **other)


def fill(limit: AdaptiveLimit, now: float, request_class: object = "a", priority="normal") -> list[Permit]:
    """Requests at a time, as many as are let in, and one that is refused."""
    permits = []
    while isinstance(permit := limit.begin(now, request_class, priority), Permit) and not permit.waits:
        permits.append(permit)
    return permits


def working(limit: AdaptiveLimit, begin: float, end: float, took_s: float = 0.05, connections: int = 10) -> Iterator[float]:
    """Offer more requests than fit, which take so long on one of some connections each. Gives the times at which one ends."""
    free, running = [begin] * connections, deque()
    now = begin
    while now < end:
        for permit in fill(limit, now):
            heapq.heappush(free, max(now, heapq.heappop(free)) + took_s)
            running.append((max(free), permit))
        now, permit = running.popleft()
        limit.done(permit, now)
        yield now
    for _, permit in running:
        limit.done(permit, now, "untaught")


def work(limit: AdaptiveLimit, begin: float, end: float, **other) -> float:
    """Have requests work until a time; returns when the last of them ended."""
    return deque(working(limit, begin, end, **other), maxlen=1).pop()


def test_it_starts_with_twenty() -> None:
    limit = make()
    assert len(fill(limit, 0.0)) == 20
    assert (limit.limit, limit.in_flight) == (20, 20)
    assert limit.begin(0.0, "a") == "limit"


def test_a_place_comes_free_when_a_request_is_done() -> None:
    limit = make()
    permit, *_ = fill(limit, 0.0)
    limit.done(permit, 0.1)
    assert isinstance(limit.begin(0.1, "a"), Permit)
    assert limit.begin(0.1, "a") == "limit"


@pytest.mark.parametrize("outcome", ["ok", "failed", "untaught"])
def test_to_be_done_twice_changes_nothing(outcome) -> None:
    limit = make()
    permit, *_ = fill(limit, 0.0)
    for _ in range(3):
        limit.done(permit, 0.1, outcome)
    assert limit.in_flight == 19


def test_it_finds_what_the_work_can_do() -> None:
    limit = make()
    work(limit, 0, 29)
    assert limit.rate == pytest.approx(200, rel=0.05)
    assert limit.base_s_by_class["a"] == pytest.approx(0.05, rel=0.05)
    assert limit.limit == pytest.approx(21, abs=2)


def test_a_dip_at_each_mark_of_the_wall_clock() -> None:
    limit, dips = make(), []
    for now in working(limit, 0.0, 31.0):
        if limit._dip is not None and limit._dip not in [dip for _, dip in dips]:
            dips.append((now, limit._dip))
            assert limit.levels["high"].room == 7
            assert limit.limit > 15, "what is shown does not dip"
    assert [now for now, _ in dips if now > 4] == pytest.approx([5, 10, 15, 20, 25, 30], abs=0.05)


def test_no_dips_where_errors_do_no_harm() -> None:
    """Requests of 2 ms may queue for ten times as long anyway, so that the limit is the same whatever R0 is."""
    limit = make()
    work(limit, 0, 4, took_s=0.002, connections=1)
    assert 10 <= limit.limit <= 16
    assert all(limit._dip is None for _ in working(limit, 4, 16, took_s=0.002, connections=1))


def test_a_dip_that_nobody_ends_is_over() -> None:
    limit = make()
    now = work(limit, 0, 4.9)
    permits = fill(limit, now)
    while limit._dip is None:
        now += 0.01
        limit.begin(now, "a")
        assert now < 5.1
    assert limit.begin(now + 0.7, "a") == "limit"
    assert limit._dip is not None
    limit.begin(now + 0.8, "a")
    assert limit._dip is None
    assert limit.levels["high"].room == limit.limit == len(permits)


def test_a_first_baseline_that_was_loaded_falls_within_seconds() -> None:
    """As in a process that starts under load: a dip that finds requests faster is followed by a deeper one."""
    limit = make()
    for n in range(10):
        limit.done(limit.begin(0.0, "a"), 0.5 + n / 100)
    assert limit.base_s_by_class["a"] > 0.5
    work(limit, 1, 9)
    assert limit.base_s_by_class["a"] == pytest.approx(0.05, rel=0.1)


def test_an_hour_without_a_request_teaches_nothing() -> None:
    limit = make()
    now = work(limit, 0, 20)
    before = limit.limit, limit.rate, dict(limit.base_s_by_class)
    now += 3600
    permit = limit.begin(now, "a")
    limit.done(permit, now + 0.05)
    assert (limit.limit, limit.rate, dict(limit.base_s_by_class)) == before
    assert len(fill(limit, now + 0.1)) == limit.limit


def test_an_hour_in_flight_is_heard_of() -> None:
    limit = make()
    permits = fill(limit, 0.0)
    assert limit.begin(3600.0, "a") == "limit"
    for permit in permits:
        limit.done(permit, 3600.0)
    assert isinstance(limit.begin(3600.1, "a"), Permit)
    assert 4 <= limit.limit <= 200


def known(took_s: float = 0.05, **other) -> AdaptiveLimit:
    """A limit that knows how long work takes when nothing queues; nothing is in flight at 20 s."""
    limit = make(**other)
    for n in range(10):
        limit.done(limit.begin(float(n), "a"), n + took_s)
    return limit


def test_work_that_hangs_does_not_keep_others_out_for_ever() -> None:
    limit = known()
    hanging = fill(limit, 20.0)
    for second in range(int(STUCK_S)):
        assert limit.begin(20.0 + second, "a") == "limit"
    now = 20.0 + STUCK_S
    before = limit.limit, limit.rate, dict(limit.base_s_by_class)
    admitted = fill(limit, now)
    assert len(admitted) == limit.in_flight == len(hanging)
    for permit in hanging:  # after all
        limit.done(permit, now + 1)
    assert (limit.limit, limit.rate, dict(limit.base_s_by_class), limit.in_flight) == (*before, len(admitted))
    for permit in admitted:
        limit.done(permit, now + 1)
    assert limit.in_flight == 0


def test_work_that_hangs_makes_room_for_those_who_wait() -> None:
    limit = known(max_delay=1.0)
    hanging = fill(limit, 20.0)
    assert len(limit.serve(30.0).gave_way) == 1
    waiting = limit.begin(19.5 + STUCK_S, "a")
    assert limit.serve(19.5 + STUCK_S) == ([], [])
    assert limit.serve(20.0 + STUCK_S) == ([waiting], [])
    assert limit.in_flight == 1
    for permit in hanging:
        limit.done(permit, 21.0 + STUCK_S)
    assert limit.in_flight == 1
    limit.done(waiting, 21.0 + STUCK_S)
    assert limit.in_flight == 0


def test_work_of_which_some_ends_is_not_taken_for_lost() -> None:
    limit, now = known(took_s=0.005, options=Adaptive(max=10)), 20.0  # so few, and so fast, that there are no dips
    permits = fill(limit, now)
    for _ in range(100):
        limit.done(permits.pop(), now, "untaught")
        permits[:0] = fill(limit, now)
        now += STUCK_S - 1
        assert limit.begin(now, "a") == "limit"
        assert limit.in_flight == len(permits)


def test_work_that_keeps_nobody_out_is_not_taken_for_lost() -> None:
    limit = known()
    permits = [limit.begin(20.0, "a") for _ in range(5)]
    assert isinstance(limit.begin(4000.0, "a"), Permit)
    assert limit.in_flight == len(permits) + 1


def test_work_is_not_taken_for_lost_before_it_is_known_how_long_it_takes() -> None:
    limit = make()
    permits = fill(limit, 0.0)
    assert limit.begin(2 * STUCK_S, "a") == "limit"
    assert limit.in_flight == len(permits)


def test_the_longer_work_takes_the_later_it_is_taken_for_lost() -> None:
    limit = known(took_s=20.0)
    fill(limit, 40.0)
    assert limit.begin(40.0 + STUCK_BASES * 20.0 - 0.5, "a") == "limit"
    assert isinstance(limit.begin(40.0 + STUCK_BASES * 20.0 + 0.5, "a"), Permit)


def test_a_clock_that_goes_back_changes_nothing_but_who_is_in_flight() -> None:
    limit = make()
    now = work(limit, 0, 20)
    before = limit.limit, limit.rate, dict(limit.base_s_by_class)
    permit = limit.begin(now, "a")
    limit.done(permit, now - 100)
    assert (limit.limit, limit.rate, dict(limit.base_s_by_class), limit.in_flight) == (*before, 0)
    assert isinstance(limit.begin(now - 50, "a"), Permit)
    work(limit, now, now + 2)
    assert limit.limit == pytest.approx(before[0], abs=2)


def test_a_wall_clock_that_steps_neither_stops_dips_nor_makes_many() -> None:
    wall = [WALL]
    limit = AdaptiveLimit(Adaptive(), wall_offset=lambda: wall[0])
    now = work(limit, 0, 12)
    wall[0] -= 3600.5
    marks = {(now + wall[0]) // 5 for now in working(limit, now, now + 20) if limit._dip is not None}
    assert len(marks) in (4, 5)


def test_what_was_learned_stays_under_other_options() -> None:
    limit = make()
    now = work(limit, 0, 18)
    rate, base = limit.rate, dict(limit.base_s_by_class)
    limit.reconfigure(Adaptive(max=8), reserve=TENTH)
    assert (limit.limit, limit.rate, dict(limit.base_s_by_class)) == (8, rate, base)
    assert [level.room for level in limit.levels.values()] == [8, 7, 6]
    limit.reconfigure(Adaptive(min=50))
    assert len(fill(limit, now)) == 50


def test_a_class_begins_with_its_first_sample() -> None:
    """Whatever was tried before, by a scanner say, takes no room from what is in use."""
    limit = make()
    for n in range(10_000):
        limit.done(limit.begin(n * 0.01, n), n * 0.01 + 0.001, "untaught" if n % 2 else "failed")
    assert not limit.base_s_by_class
    limit.done(limit.begin(100.0, "a"), 100.05)
    assert limit.base_s_by_class == {"a": pytest.approx(0.05)}


def test_many_classes_are_bounded() -> None:
    limit = make()
    for n in range(2 * MOST_CLASSES):
        limit.done(limit.begin(n * 0.1, n), n * 0.1 + 0.05)
    assert len(limit.base_s_by_class) == MOST_CLASSES


def test_a_request_that_waits_for_its_client_makes_room_for_others_after_a_while() -> None:
    limit = make(Adaptive(min=1, max=1))
    slow = limit.begin(0.0, "a")
    limit.idle(slow, 0.02)
    assert limit.begin(0.01, "a") == "limit"
    other = limit.begin(0.02, "a")
    assert isinstance(other, Permit)
    assert (limit.in_flight, slow.began) == (1, None)
    limit.busy(slow, 0.03)
    limit.done(slow, 0.04)
    assert limit.in_flight == 1
    limit.done(other, 0.05)
    assert limit.in_flight == 0


def test_a_request_that_has_lost_its_place_goes_on_beyond_the_limit() -> None:
    """Its work is counted and keeps others out; it counts as one request, and teaches the time of its work."""
    limit = make(Adaptive(min=1, max=1))
    slow = limit.begin(0.0, "a")
    limit.idle(slow, 0.02)
    other = limit.begin(0.02, "b")
    limit.busy(slow, 0.5)
    limit.resume(slow, 0.5)
    assert (limit.in_flight, limit.levels["normal"].admitted) == (2, 2)
    limit.done(other, 0.6)
    assert limit.begin(0.6, "a") == "limit"
    limit.done(slow, 0.6)
    assert limit.in_flight == 0
    assert limit.base_s_by_class["a"] == pytest.approx(0.1)


def test_a_request_that_waits_for_its_client_keeps_its_place_while_nobody_needs_it() -> None:
    """And the time that it has waited is not that of the work."""
    limit = make(Adaptive(min=1, max=1))
    slow = limit.begin(0.0, "a")
    limit.idle(slow, 0.02)
    limit.busy(slow, 0.9)
    limit.done(slow, 1.0)
    assert limit.base_s_by_class["a"] == pytest.approx(0.1)
    assert limit.in_flight == 0


def test_whoever_waits_for_a_place_is_called_where_another_waits_for_its_client() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    slow = limit.begin(0.0, "a")
    limit.idle(slow, 0.02)
    waits = limit.begin(0.01, "a")
    assert waits.waits
    assert limit.due_at(0.01) == pytest.approx(0.02)
    assert limit.serve(0.02).called == [waits]
    assert limit.due_at(0.02) == math.inf


@pytest.mark.parametrize("others", [True, False])
def test_one_client_whose_requests_fail_does_not_lower_the_limit_of_others(*, others: bool) -> None:
    """Unless it is the only one there is."""
    limit = make()
    for n in range(1000):
        permit = limit.begin(n * 0.01, "a")
        leaves = n % 2
        permit.client = "leaves" if leaves or not others else f"stays {n % 7}"
        limit.done(permit, n * 0.01 + 0.005, "failed" if leaves else "ok")
    assert limit.limit == (20 if others else 4)


def test_requests_that_teach_nothing_leave_no_baseline() -> None:
    limit = make()
    for outcome in ("failed", "untaught"):
        for n in range(100):
            limit.done(limit.begin(n * 0.1, "a"), n * 0.1 + 3.0, outcome)
    assert not limit.base_s_by_class
    assert limit.rate == 0


def test_counts_of_priorities() -> None:
    limit = make(Adaptive(min=10, max=10), reserve=TENTH)
    admitted = [len(fill(limit, 0.0, priority=priority)) for priority in ("low", "normal", "high")]
    assert admitted == [8, 1, 1]
    assert [(level.priority, level.admitted, level.limit) for level in limit.levels.values()] == [
        ("high", 1, 1),
        ("normal", 1, 1),
        ("low", 8, 1),
    ]


def test_a_hot_loop_refuses_whatever_is_in_flight() -> None:
    limit, guard = make(reserve=TENTH), LagGuard()
    guard.start(0.0)
    assert isinstance(limit.begin(0.005, "a", "normal", guard), Permit)
    assert limit.begin(0.3, "a", "normal", guard) == "lag"
    assert isinstance(limit.begin(0.3, "a", "normal"), Permit), "who is asked about it in another place is not asked here"
    assert limit.levels["normal"].lag == 1


def test_the_budget_of_a_hot_loop_is_that_of_the_priority() -> None:
    limit, guard = make(reserve=TENTH), LagGuard()
    guard.start(0.0)
    guard.beat(0.3)
    now = guard.due_at + 0.0085
    assert limit.begin(now, "a", "low", guard) == "lag"
    assert isinstance(limit.begin(now, "a", "high", guard), Permit)
    assert isinstance(limit.begin(now, "a", "normal", guard), Permit)


def test_without_load_baselines_only_fall() -> None:
    limit = make()
    for n, took_s in enumerate([0.1] * 10 + [0.3] * 30 + [0.02] * 100):
        limit.done(limit.begin(n * 0.1, "a"), n * 0.1 + took_s)
        assert n >= 40 or limit.base_s_by_class["a"] == pytest.approx(0.1)
    assert limit.base_s_by_class["a"] < 0.06


def test_retry_after_follows_what_was_refused() -> None:
    limit = make(Adaptive(min=1, max=1))
    assert limit.retry_after_s(lambda: 0.999) == 1
    limit.begin(0.0, "a")
    for n in range(20):
        limit.begin(n * 0.1, "a")
    assert limit.retry_after_s(lambda: 0.999) == 11
    assert limit.retry_after_s(lambda: 0.0) == 1


def test_waiting_and_being_called() -> None:
    limit = make(Adaptive(min=2, max=2), max_delay=0.5)
    first, second, third, fourth = (limit.begin(0.0, "a") for _ in range(4))
    assert [each.waits for each in (first, second, third, fourth)] == [False, False, True, True]
    assert (limit.in_flight, limit.waiting, limit.due_at(0.0)) == (2, 2, pytest.approx(0.5))
    limit.done(first, 0.03)
    assert limit.serve(0.03) == ([third], [])
    assert (third.began, limit.in_flight, limit.waiting) == (0.03, 2, 1)
    assert limit.serve(0.04) == ([], [])
    limit.done(third, 0.05)
    assert limit.serve(0.05) == ([fourth], [])
    assert (limit.levels["normal"].refused, limit.levels["normal"].thinned) == (0, 0)
    assert limit.base_s_by_class["a"] == pytest.approx(0.025), "waiting is no work"


def test_a_line_for_places_that_come_free_rarely() -> None:
    """Five a second: a line does not stand before ten of them, and nobody gives way within 100 ms."""
    limit = make(Adaptive(min=1, max=1))
    now = work(limit, 0, 20, took_s=0.2, connections=1)
    limit.reconfigure(Adaptive(min=1, max=1), max_delay=5.0)
    limit.begin(now, "a")
    waiters = [limit.begin(now, "a") for _ in range(2)]
    assert limit.due_at(now) == pytest.approx(now + 2, abs=0.1)
    assert limit.serve(now + 1.9).gave_way == []
    assert limit.serve(now + 2.1).gave_way == waiters


def test_waiting_in_vain() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.05)
    limit.begin(0.0, "a")
    waiter = limit.begin(0.0, "a", "low")
    due = limit.due_at(0.0)
    assert limit.serve(due) == ([], [waiter])
    assert (limit.levels["low"].limit, limit.waiting, limit.due_at(due)) == (1, 0, math.inf)
    limit.done(waiter, due)
    assert limit.in_flight == 1


def test_who_leaves_frees_its_place_in_line_at_once() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    running, gone, staying = (limit.begin(0.0, "a") for _ in range(3))
    limit.done(gone, 0.01, "failed")
    limit.done(running, 0.02)
    assert limit.serve(0.02) == ([staying], [])
    assert (limit.levels["normal"].refused, limit.levels["normal"].thinned) == (0, 0)


def test_who_comes_later_does_not_overtake_those_who_wait() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    running, waiting = limit.begin(0.0, "a"), limit.begin(0.0, "a")
    limit.done(running, 0.01)
    late = limit.begin(0.01, "a")
    assert late.waits
    assert limit.serve(0.01) == ([waiting], [])


def test_higher_priority_overtakes() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    running = limit.begin(0.0, "a")
    low, high = limit.begin(0.0, "a", "low"), limit.begin(0.01, "a", "high")
    limit.done(running, 0.02)
    assert limit.serve(0.02) == ([high], [])
    limit.done(high, 0.03)
    assert not limit.begin(0.03, "a", "normal").waits, "nobody of its priority waits, and there is room"
    assert low.waits


def test_who_waits_gives_way_where_nobody_may_any_more() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    limit.begin(0.0, "a")
    waiter = limit.begin(0.0, "a")
    limit.reconfigure(Adaptive(min=1, max=1))
    assert limit.due_at(0.01) <= 0.01
    assert limit.serve(0.01) == ([], [waiter])


def test_a_full_line_tells_who_gives_way() -> None:
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    limit.begin(0.0, "a")
    first, *_ = [limit.begin(0.0, "a", "low") for _ in range(1000)]
    assert limit.begin(0.0, "a", "low").waits
    assert limit.due_at(0.0) == 0.0
    assert limit.serve(0.0) == ([], [first])
    assert limit.waiting == 1000


def test_who_was_displaced_and_left_does_not_give_way_too() -> None:
    """Its client is gone before anybody has looked; it is neither refused nor due."""
    limit = make(Adaptive(min=1, max=1), max_delay=0.5)
    limit.begin(0.0, "a")
    first, second, *_ = [limit.begin(0.0, "a", "low") for _ in range(1002)]
    limit.done(first, 0.0)
    assert limit.serve(0.0) == ([], [second])
    assert limit.levels["low"].limit == 1
    assert limit.due_at(0.0) > 0


def test_a_dip_is_not_kept_over_idleness() -> None:
    """Whoever comes first after it finds the whole limit; with requests of 0.5 s the dip would last for seconds yet."""
    limit = make()
    now, permits = work(limit, 0, 14.4, took_s=0.5), []
    while limit._dip is None:
        now += 0.01
        permits += fill(limit, now)
        assert now < 15.6
    dip = limit._dip
    for permit in permits:
        limit.done(permit, now, "untaught")
    now += 1.1
    assert not dip.is_over(now)
    assert isinstance(limit.begin(now, "a"), Permit)
    assert limit._dip is None
    assert limit.levels["high"].room == limit.limit


def thinning() -> tuple[AdaptiveLimit, Permit]:
    """A limit of one that thins all of low priority after 20 seconds, and the only request in flight."""
    limit = make(Adaptive(min=1, max=1), reserve=TENTH)
    running = limit.begin(0.0, "a", "high")
    for n in range(200):
        limit.begin(n * 0.1, "a", "high")
    assert limit.begin(20.0, "a", "low") == "thinned"
    assert isinstance(running, Permit)
    return limit, running


def test_nobody_is_thinned_after_idleness() -> None:
    """Thinning falls step by step while requests come; where none came for seconds, the load is over at once."""
    limit, running = thinning()
    limit.done(running, 20.0)
    assert isinstance(limit.begin(25.0, "a", "low"), Permit)


@pytest.mark.parametrize("reserve", [None, TENTH])
def test_nobody_is_thinned_under_other_options(reserve) -> None:
    """Without a reserve nothing would ever let them in again."""
    limit, _ = thinning()
    limit.reconfigure(Adaptive(min=50), reserve=reserve)
    assert isinstance(limit.begin(20.0, "a", "low"), Permit)


def check_priorities(limit: AdaptiveLimit, guard: LagGuard, now: float, random: Random) -> list[Permit]:
    """Once a priority is refused, all lower ones are refused in the same state; returns who was let in before."""
    begun = [limit.begin(now, 0, priority, guard) for priority in list(RESERVES)[random.randrange(2) :]]
    let_in = [isinstance(each, Permit) and not each.waits for each in begun]
    assert let_in == sorted(let_in, reverse=True)
    return [each for each in begun if isinstance(each, Permit)]


def live_through_a_history(random: Random) -> None:
    """Some random requests, with all that can go wrong on a clock. In each state the bounds hold, and high comes before low."""
    least = random.randrange(1, 30)
    options = Adaptive(min=least, max=least + random.choice([0, 1, 5, 100]), tolerance=random.uniform(1.01, 5))
    reserve = random.choice([None, TENTH, Fraction(49, 100)])
    limit, unaccepted = make(options, reserve=reserve, max_delay=random.choice([0.0, 0.0, 0.05])), [0]
    guard = LagGuard(lambda: unaccepted[0])
    now, in_flight = random.choice([0.0, 12345.6]), []
    guard.start(now)
    for _ in range(random.randrange(30)):
        now += random.choice([0.0, 0.0, 0.001, 0.013, 0.05, 0.2, 1.1, 5.0, 3600.0, -0.01])
        unaccepted[0] = random.choice([0, 0, 3, 50, 1000])
        for _ in range(random.choice([0, 1, 3, 40])):
            begun = limit.begin(now, random.randrange(3), random.choice(list(RESERVES)), random.choice([None, guard]))
            in_flight += [begun] if isinstance(begun, Permit) else []
        in_flight += check_priorities(limit, guard, now, random)
        for _ in range(min(len(in_flight), random.choice([0, 1, 3, 40]))):
            permit = in_flight.pop(random.randrange(len(in_flight)))
            limit.done(permit, now + random.choice([0.0, 0.01]), random.choice(["ok", "ok", "failed", "untaught"]))
        if random.random() < 0.2:
            guard.beat(now)
        gave_way = limit.serve(now).gave_way
        in_flight = [permit for permit in in_flight if permit not in gave_way]
        assert options.min <= limit.limit <= options.max
        eras = [permit.era for permit in in_flight if not permit.waits]
        assert limit.in_flight == eras.count(limit._era)
        assert limit.waiting == sum(permit.waits for permit in in_flight)
        assert 1 <= limit.levels["low"].room <= limit.levels["normal"].room <= limit.levels["high"].room <= options.max


@pytest.mark.parametrize("part", range(4))
def test_no_history_leads_out_of_the_bounds_or_lets_low_in_before_high_property(part) -> None:
    """The limit stays within ``min`` and ``max``, nobody is lost, and wherever low is let in high is."""
    random = Random() if FUZZED else Random(part)
    for _ in range(HISTORIES // 4):
        seed = random.getrandbits(64)
        try:
            live_through_a_history(Random(seed))
        except AssertionError as error:
            error.add_note(f"history of seed {seed}")
            raise
