"""Turns that are booked ahead and given back: as a bucket books them, and in queues of waiters."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import Limit, MemoryStore
from limitgate.gate.admission import Receipt, Turn
from limitgate.gate.turns import TurnWaiter, WaitQueues
from limitgate.limits.bucket import MAX_AHEAD, Bucket, bucket_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading, full_refund, refund
from tests.support.clock import Clock
from tests.support.scripted import Scripted
from tests.support.virtual import World

SECOND = 1_000_000


class Booked(NamedTuple):
    plan: Plan
    reading: Reading
    decision: Decision


class StoredBucket:
    """One bucket in a store under a clock of its own."""

    def __init__(self, store: Any, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.key = uuid4().hex

    def ask(self, *limits: Limit | str, cost: int = 1, ahead: float = 60, binding: bool = True) -> Booked:
        """Book a turn up to so many seconds ahead."""
        charge = Charge(self.key, bucket_of(*limits), cost, binding, "rule", max_wait_us=round(ahead * SECOND))
        plan = Plan((charge,))
        reading = self.store.spend(plan, 5)
        return Booked(plan, reading, decide(plan, reading))

    def leave(self, booked: Booked) -> None:
        """Give a turn back."""
        self.store.spend(full_refund(booked.plan, booked.reading), 5)

    def delays(self, count: int, *limits: Limit | str, **more: Any) -> list[float | None]:
        """For how long requests would have to wait that come at once; None for those that are refused."""
        found = [self.ask(*limits, **more).decision for _ in range(count)]
        return [decision.delay if decision.allowed else None for decision in found]


@pytest.fixture(params=["memory", "script"])
def bucket(request: pytest.FixtureRequest, client: redis.Redis) -> StoredBucket:
    clock = Clock()
    return StoredBucket(MemoryStore(clock) if request.param == "memory" else Scripted(client, clock), clock)


# --- what a bucket makes of turns -------------------------------------------------------------------------------------


def test_turns_are_as_far_apart_as_requests_at_the_limit(bucket: StoredBucket) -> None:
    """What a full bucket holds passes at once, then a turn every period / count, up to the bound and no further."""
    assert bucket.delays(7, "10/second burst 3", ahead=0.3) == [0, 0, 0, 0.1, 0.2, 0.3, None]


def test_turns_are_exact_to_the_microsecond(bucket: StoredBucket) -> None:
    """A third of a second is rounded up, and does not add up."""
    assert bucket.delays(5, "3/second burst 1") == [0, 0.333334, 0.666667, 1, 1.333334]


def test_a_refusal_says_when_one_could_wait(bucket: StoredBucket) -> None:
    """The promised wait is until the bound is met: a microsecond less is not enough."""
    assert bucket.delays(4, "3/second burst 1", ahead=0.5) == [0, 0.333334, None, None]
    refused = bucket.ask("3/second burst 1", ahead=0.5).decision
    assert refused.retry_after == 0.166667
    bucket.clock.advance(us=166_666)
    assert not bucket.ask("3/second burst 1", ahead=0.5).decision.allowed
    bucket.clock.advance(us=1)
    assert bucket.ask("3/second burst 1", ahead=0.5).decision.delay == 0.5


def test_however_far_ahead_a_refusal_says_when(bucket: StoredBucket) -> None:
    """Even who would wait for a lifetime is told truly for how long to come back later."""
    slow, ahead = "1 per 366 days", MAX_AHEAD / SECOND
    delays = bucket.delays(73, slow, ahead=ahead)
    assert delays == [number * 366 * 86_400 for number in range(72)] + [None]
    wait = bucket.ask(slow, ahead=ahead).decision.retry_after
    bucket.clock.advance(us=round(wait * SECOND) - 1)
    assert not bucket.ask(slow, ahead=ahead).decision.allowed
    bucket.clock.advance(us=1)
    assert bucket.ask(slow, ahead=ahead).decision.delay == ahead


def test_the_slowest_window_says_when(bucket: StoredBucket) -> None:
    """With several limits the turn is when all have room, and refused is what one of them could not book."""
    limits = "10/second burst 2", "60/minute burst 4"
    assert bucket.delays(7, *limits, ahead=2) == [0, 0, 0.1, 0.2, 1, 2, None]


def test_a_cost_is_waited_for(bucket: StoredBucket) -> None:
    """A request of a higher cost waits longer, one of none passes, and one above the burst is refused for good."""
    assert bucket.ask("10/second", cost=10).decision.delay == 0
    assert bucket.ask("10/second", cost=5).decision.delay == 0.5
    assert bucket.ask("10/second", cost=0).decision.delay == 0
    assert bucket.ask("10/second", cost=10).decision.delay == 1.5
    refused = bucket.ask("10/second", cost=11).decision
    assert (refused.allowed, refused.retry_after) == (False, float("inf"))


def test_who_does_not_wait_sees_the_line(bucket: StoredBucket) -> None:
    """Without a bound a request is refused until the queue is gone; one that cannot refuse holds nobody up."""
    bucket.delays(3, "1/second")
    assert bucket.ask("1/second", ahead=0).decision.retry_after == 3
    shadow = bucket.ask("1/second", binding=False).decision
    assert (shadow.allowed, shadow.delay, shadow.granted) == (True, 0, 1)


def test_a_line_is_no_room(bucket: StoredBucket) -> None:
    """What is told of a bucket with a queue: nothing remains, more is used than it holds, and when all is gone."""
    bucket.delays(5, "10/second burst 2")
    (window,) = bucket.ask("10/second burst 2").decision.windows
    assert (window.limit, window.remaining, window.used, window.reset_after, window.retry_after) == (2, 0, 6, 0.6, 0)


def test_the_last_turn_can_be_given_back(bucket: StoredBucket) -> None:
    """Whoever comes next gets the turn that became free."""
    assert bucket.ask("1/second").decision.delay == 0
    left = bucket.ask("1/second")
    bucket.clock.advance(0.25)
    bucket.leave(left)
    assert bucket.ask("1/second").decision.delay == 0.75


def test_turns_are_given_back_from_the_last_on(bucket: StoredBucket) -> None:
    """All those that leave one after the other, the last one first, leave the bucket as if they had never come."""
    bucket.ask("1/second")
    line = [bucket.ask("1/second") for _ in range(5)]
    for booked in reversed(line):
        bucket.clock.advance(0.1)
        bucket.leave(booked)
    assert bucket.ask("1/second").decision.delay == 0.5


def test_a_turn_with_others_behind_it_lapses(bucket: StoredBucket) -> None:
    """Those behind it keep theirs, so whoever comes next must not get the last of these a second time."""
    _, first, second = (bucket.ask("1/second") for _ in range(3))
    bucket.leave(first)
    assert bucket.ask("1/second").decision.delay == second.decision.delay + 1


def test_only_the_limit_that_made_wait_keeps_the_turn(bucket: StoredBucket) -> None:
    """What a limit had room for is given back in any case, so nothing of it is lost."""
    limits = "1/second", "10/hour"
    _, first, _ = (bucket.ask(*limits) for _ in range(3))
    bucket.leave(first)
    assert [window.used for window in bucket.ask(*limits, cost=0).decision.windows] == [3, 2]


def test_a_turn_that_has_come_is_given_back_as_ever(bucket: StoredBucket) -> None:
    """Once it is under way, a request that turns out not to count gives back what it took."""
    _, first, _ = (bucket.ask("1/second") for _ in range(3))
    bucket.clock.advance(us=SECOND + 1)
    bucket.leave(first)
    assert bucket.ask("1/second").decision.delay == 1


def test_what_was_borrowed_is_given_back_whatever_came_on_top(bucket: StoredBucket) -> None:
    """A request that has passed owes as much as one that waits would, but it has no turn that could lapse."""
    limit = Limit("10/second", borrow=True)
    earlier, large = bucket.ask(limit, ahead=0), bucket.ask(limit, cost=50, ahead=0)
    assert (large.decision.allowed, large.decision.delay) == (True, 0)
    bucket.store.spend(refund(earlier.plan, earlier.reading, [6]), 5)
    bucket.leave(large)
    (window,) = bucket.ask(limit, cost=0).decision.windows
    assert window.used == 6


def _passes_no_more(limit: Limit, passed: list[tuple[int, int]]) -> None:
    """In no interval has more passed than burst and rate allow, but for the microsecond that a turn is rounded by."""
    passed.sort()
    for number, (began, _) in enumerate(passed):
        total = 0
        for at, cost in passed[number:]:
            total += cost
            assert total <= limit.burst + Fraction((at - began + 1) * limit.count, limit.period * SECOND)


steps = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 1000, 100_000, 333_333, SECOND]), st.integers(0, 3), st.integers(0, 9)), max_size=40
)
shaped = st.builds(
    lambda count, period, burst: Limit(f"{count} per {period} seconds", burst=burst),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 1, 2, 5]),
)


@given(limit=shaped, history=steps)
def test_whoever_leaves_nobody_passes_above_the_limit_property(limit: Limit, history: list[tuple[int, int, int]]) -> None:
    """However turns are booked and given back, what passes in any interval is within the limit."""
    clock = Clock()
    bucket = StoredBucket(MemoryStore(clock), clock)
    waiting: list[tuple[int, int, Booked]] = []
    passed: list[tuple[int, int]] = []
    for pause, what, which in history:
        clock.advance(us=pause)
        passed += [(at, cost) for at, cost, _ in waiting if at <= clock.now]
        waiting = [each for each in waiting if each[0] > clock.now]
        if what == 0 and waiting:
            bucket.leave(waiting.pop(which % len(waiting))[2])
        else:
            booked = bucket.ask(limit, cost=1 + which % limit.burst, ahead=20)
            if booked.decision.allowed:
                waiting.append((clock.now + round(booked.decision.delay * SECOND), 1 + which % limit.burst, booked))
    _passes_no_more(limit, passed + [(at, cost) for at, cost, _ in waiting])


# --- queues -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def turn(world: World, seconds: float, key: str = "k", bucket: Bucket = bucket_of("1/second"), cost: int = 1) -> Turn:  # noqa: B008 - the same one
    """A turn in so many seconds."""
    plan = Plan((Charge(key, bucket, cost, enforced=True, rule="r"),))
    taken = Receipt(None, plan, Reading(world(), [BucketReading(plan.charges[0], [seconds], [0])], True))
    return Turn(world() + round(seconds * SECOND), world.monotonic() + seconds, (taken,))


def names(turn: Turn) -> list[Any]:
    return [state for taken in turn.charged for _, (state,), _ in taken.reading.buckets]


def test_whoever_came_first_has_the_first_turn(world: World) -> None:
    """Everybody is called when the turn is there, in the order of coming, by one timer after the other."""

    async def main() -> list[tuple[float, int]]:
        queues, called = WaitQueues(), []

        async def wait(number: int) -> None:
            mine = turn(world, number + 1)
            waiter = queues.join(mine)
            await waiter
            called.append((world.now, number))
            assert names(queues.leave(mine, waiter)) == [number + 1]

        await asyncio.gather(*map(wait, range(5)))
        assert len(queues) == 0
        return called

    assert world.run(main()) == [(1.0, 0), (2.0, 1), (3.0, 2), (4.0, 3), (5.0, 4)]
    assert world.waits == 5


def test_those_behind_who_leaves_move_up(world: World) -> None:
    """Who leaves gives up the place; the turn that becomes free is the last one."""

    async def main() -> None:
        queues = WaitQueues()
        turns = [turn(world, number) for number in (1, 2, 3)]
        first, second, third = waiters = [queues.join(each) for each in turns]
        assert names(queues.leave(turns[0], first)) == [3]
        await asyncio.wait(waiters[1:])
        assert (names(second.result()), names(third.result())) == ([1], [2])
        assert [names(queues.leave(turns[n], waiters[n])) for n in (1, 2)] == [[1], [2]]
        assert world.now == 2
        assert len(queues) == 0

    world.run(main())


def test_those_who_are_called_at_once_leave_one_by_one(world: World) -> None:
    """A queue is gone when nobody waits in it any more, though some that were called have not left yet, or others come."""

    async def main() -> None:
        queues = WaitQueues()
        turns = [turn(world, number) for number in (1, 1, 1, 2)]
        waiters = [queues.join(each) for each in turns[:3]]
        await asyncio.wait(waiters)
        queues.leave(turns[0], waiters[0])
        assert len(queues) == 0
        queues.leave(turns[1], waiters[1])
        waiters.append(queues.join(turns[3]))
        queues.leave(turns[2], waiters[2])
        assert len(queues) == 1
        await waiters[3]
        queues.leave(turns[3], waiters[3])
        assert len(queues) == 0

    world.run(main())


def test_who_is_cancelled_is_passed_over(world: World) -> None:
    """A waiter that was cancelled takes no turn from those behind it, even if it is not left yet when the turn comes."""

    async def main() -> None:
        queues = WaitQueues()
        turns = [turn(world, number) for number in (1, 2)]
        waiters = [queues.join(each) for each in turns]
        waiters[0].cancel()
        await asyncio.sleep(1.5)
        assert names(waiters[1].result()) == [1]
        assert names(queues.leave(turns[0], waiters[0])) == [2]
        queues.leave(turns[1], waiters[1])
        assert len(queues) == 0

    world.run(main())


def test_a_line_in_which_nobody_stays_rings_no_more(world: World) -> None:
    """Once all have given up, their turns wake nobody."""

    async def main() -> None:
        queues = WaitQueues()
        turns = [turn(world, number) for number in (1, 2)]
        waiters = [queues.join(each) for each in turns]
        for waiter in waiters:
            waiter.cancel()
        await asyncio.sleep(1.5)
        for mine, waiter in zip(turns, waiters, strict=True):
            queues.leave(mine, waiter)
        waits = world.waits
        await asyncio.sleep(5)
        assert world.waits == waits + 1
        assert len(queues) == 0

    world.run(main())


def test_an_event_loop_that_has_ended_leaves_no_queue(world: World) -> None:
    """Who waited there will never leave, and keeps neither the loop nor a queue; late leavers find what they came with."""
    queues, first = WaitQueues(), turn(world, 1)

    async def join(mine: Turn) -> TurnWaiter:
        return queues.join(mine)

    def ended(mine: Turn) -> TurnWaiter:
        with asyncio.Runner() as runner:
            return runner.run(join(mine))

    waiters = [ended(first) for _ in range(3)]
    assert len(queues) == 1
    assert [queues.leave(first, waiter) for waiter in waiters] == [first] * 3
    assert len(queues) == 0


@pytest.mark.parametrize(
    "other", [{"key": "other"}, {"cost": 2}, {"bucket": bucket_of("2/second")}], ids=["bucket", "cost", "limits"]
)
def test_turns_of_another_kind_are_another_queue(world: World, other: dict[str, Any]) -> None:
    """Nobody moves up into a turn in another bucket, of another cost, or under another limit."""

    async def main() -> None:
        queues = WaitQueues()
        turns = [turn(world, 1), turn(world, 2, **other)]
        waiters = [queues.join(each) for each in turns]
        assert names(queues.leave(turns[0], waiters[0])) == [1]
        await waiters[1]
        assert world.now == 2
        queues.leave(turns[1], waiters[1])

    world.run(main())


def test_a_turn_whose_reply_came_late_is_in_order_all_the_same(world: World) -> None:
    """Turns are in the order of the store's clock, whichever reply was heard first."""

    async def main() -> None:
        queues = WaitQueues()
        turns = [turn(world, number) for number in (2, 1)]
        waiters = [queues.join(each) for each in turns]
        await asyncio.wait(waiters)
        assert (names(waiters[0].result()), world.now) == ([1], 2)

    world.run(main())


def test_a_timer_that_rings_early_is_set_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody passes before the turn, though an event loop's clock may be coarser."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        on_time = loop.call_later
        monkeypatch.setattr(loop, "call_later", lambda delay, *call, **options: on_time(delay * 0.9, *call, **options))
        mine = turn(world, 1)
        waiter = WaitQueues().join(mine)
        await waiter
        return world.monotonic() - mine.due_at

    assert 0 <= world.run(main()) < 0.001
    assert world.waits < 10
