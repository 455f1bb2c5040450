"""Buckets that are put right when a cost is known afterwards, on the memory store and by the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import redis
from hypothesis import assume, given, settings, strategies as st

from limitgate import Limit, MemoryStore
from limitgate.limits.bucket import LEASE_SPARE_US, Bucket, bucket_of
from limitgate.limits.limit import MAX_OWED_US
from limitgate.limits.plan import Charge, Plan, Reading, full_refund, refund
from tests.support.clock import Clock
from tests.support.effort import EXAMPLES
from tests.support.scripted import Scripted

SECOND = 1_000_000


class Taken(NamedTuple):
    """A charge that was made."""

    plan: Plan
    reading: Reading


class StoredBucket:
    """One bucket in a store under a clock of its own."""

    def __init__(self, store: Any, clock: Clock, bucket: Bucket) -> None:
        self.store = store
        self.clock = clock
        self.bucket = bucket
        self.key = uuid4().hex

    def charge(self, cost: int, bucket: Bucket | None = None) -> Taken:
        """Charge a cost, whether it is admitted or not."""
        charge = Charge(self.key, bucket or self.bucket, cost, enforced=True, rule="rule")
        plan = Plan((charge,))
        return Taken(plan, self.store.spend(plan, 5))

    def refund(self, taken: Taken, cost: int) -> Taken:
        """Correct a charge to another cost; what is taken now."""
        plan = refund(taken.plan, taken.reading, [cost])
        if plan.charges:
            self.store.spend(plan, 5)
        (charge,) = taken.plan.charges
        return Taken(Plan((charge._replace(cost=cost),)), taken.reading)

    def owed(self, bucket: Bucket | None = None) -> Sequence[int]:
        """Ticks per window, now."""
        charge = Charge(self.key, bucket or self.bucket, 0, enforced=False, rule=None)
        return self.store.spend(Plan((charge,), "peek"), 5).buckets[0].before

    def requests(self, bucket: Bucket | None = None) -> list[float]:
        """What is owed now, in requests per window."""
        bucket = bucket or self.bucket
        return [debt / weight for debt, weight in zip(self.owed(bucket), bucket.weights, strict=True)]


Open = Callable[[Bucket], StoredBucket]


@pytest.fixture(scope="module", params=["memory", "script"])
def open_bucket(request: pytest.FixtureRequest, client: redis.Redis) -> Open:
    """Opens buckets that nobody has used, under a clock of the test's own, which begins anew."""
    clock = Clock()
    store = MemoryStore(clock) if request.param == "memory" else Scripted(client, clock)

    def opened(bucket: Bucket) -> StoredBucket:
        clock.now = Clock().now
        return StoredBucket(store, clock, bucket)

    return opened


@st.composite
def limits(draw: Any) -> Limit:
    period = draw(st.sampled_from([1, 7, 60, 3600, 86_400, 366 * 86_400]))
    count = min(draw(st.sampled_from([1, 2, 3, 7, 333, 99_991, 1_000_003])), 1_000_000 * period)
    burst = draw(st.sampled_from([1, 2, 10, 333, 10**6]))
    return Limit(f"{count} per {period} seconds", burst=max(1, min(burst, 3660 * 86_400 * count // period)))


all_buckets = st.lists(limits(), min_size=1, max_size=3).map(lambda found: Bucket(tuple(found)))
costs = st.one_of(st.integers(0, 12), st.integers(0, 10**6), st.just(10**30))
shares = st.integers(0, 8)
"""Eighths of how long a window takes to drain."""


def wait(stored: StoredBucket, eighths: int, more: int) -> int:
    """Go on, by a part of what the slowest or the fastest window needs to drain; how many microseconds that was."""
    drains = [-(-debt // count) for debt, count in zip(stored.owed(), stored.bucket.counts, strict=True)]
    us = min(sorted(drains)[more % len(drains)] * eighths // 7 + more, 10**15)
    stored.clock.advance(us=us)
    return us


@settings(max_examples=EXAMPLES // 2)
@given(bucket=all_buckets, charged=st.tuples(costs, costs, costs), pauses=st.tuples(shares, shares, st.integers(0, 3)))
def test_refund_without_other_requests_is_exact_property(
    open_bucket: Open, bucket: Bucket, charged: tuple[int, int, int], pauses: tuple[int, int, int]
) -> None:
    """Where nobody else uses the bucket it owes what it would with the lower cost, and on top what the higher costs more."""
    older, first, right = charged
    stored = open_bucket(bucket)
    stored.charge(older)
    wait(stored, pauses[0], pauses[2])
    before = stored.owed()
    taken = stored.charge(first)
    assume(taken.reading.admitted)
    elapsed = wait(stored, pauses[1], pauses[2])
    stored.refund(taken, right)
    for owed, debt, limit in zip(stored.owed(), before, bucket.limits, strict=True):
        left = max(0, debt + min(first, right) * limit.period_us - elapsed * limit.count)
        ideal = min(left + max(0, right - first) * limit.period_us, limit.ceiling)
        assert ideal <= owed < ideal + limit.count


@settings(max_examples=EXAMPLES // 2)
@given(bucket=all_buckets, costs=st.lists(st.integers(0, 12), min_size=2, max_size=5), pauses=st.tuples(shares, shares))
def test_refund_after_several_corrections_uses_the_last_property(
    open_bucket: Open, bucket: Bucket, costs: list[int], pauses: tuple[int, int]
) -> None:
    """Put right several times is as put right once; but what was charged on top may be given back in part only."""
    several, once = open_bucket(bucket), open_bucket(bucket)
    taken, same = several.charge(costs[0]), once.charge(costs[0])
    assume(taken.reading.admitted)
    wait(several, *pauses)
    for cost in costs[1:]:
        taken = several.refund(taken, cost)
    once.refund(same, costs[-1])
    one_way = costs in (sorted(costs), sorted(costs, reverse=True))
    for left, right, count in zip(several.owed(), once.owed(), bucket.counts, strict=True):
        assert left > right - len(costs) * count
        assert left < right + len(costs) * count or not one_way


users = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(0, 3_000_000)), min_size=1, max_size=6)


@settings(max_examples=EXAMPLES // 2)
@given(
    asked=users, order=st.randoms(use_true_random=False), limit=st.sampled_from(["10/second", "100/minute", "3 per 7 seconds"])
)
def test_settlement_above_the_estimate_charges_all_used_property(
    open_bucket: Open, asked: list[tuple[int, int, int]], order: Any, limit: str
) -> None:
    """However many use a bucket at once, what they used and the time since has not paid is still owed in the end."""
    bucket = bucket_of(Limit(limit, burst=1000))
    stored = open_bucket(bucket)
    began = stored.clock.now
    under_way: list[tuple[Taken, int]] = []
    for reserved, cost, pause in asked:
        under_way.append((stored.charge(reserved), cost))
        stored.clock.advance(us=pause)
        if order.random() < 0.5:
            stored.refund(*under_way.pop(order.randrange(len(under_way))))
    for taken, cost in under_way:
        stored.refund(taken, cost)
    used = sum(cost for _, cost, _ in asked) * bucket.weights[0]
    assert stored.owed()[0] >= used - (stored.clock.now - began) * bucket.counts[0]


# --- examples ---------------------------------------------------------------------------------------------------------


def test_refund_at_once_restores_the_bucket(open_bucket: Open) -> None:
    """A charge that is undone at once leaves the bucket as it was."""
    bucket = open_bucket(bucket_of("7/minute", "333/hour"))
    bucket.charge(3)
    before = bucket.owed()
    taken = bucket.charge(4)
    bucket.refund(taken, 0)
    assert list(bucket.owed()) == list(before)


def test_refund_of_a_drained_charge_returns_nothing(open_bucket: Open) -> None:
    """What others have taken stays when something is given back that has drained long since."""
    bucket = open_bucket(bucket_of("60/minute"))
    taken = bucket.charge(5)
    bucket.clock.advance(10)
    bucket.charge(4)
    bucket.refund(taken, 0)
    assert bucket.requests() == [4]


def test_refund_while_older_debts_drain_is_complete(open_bucket: Open) -> None:
    """As long as the bucket drains what was owed before, all of a charge is given back."""
    bucket = open_bucket(bucket_of("60/minute"))
    bucket.charge(20)
    taken = bucket.charge(10)
    bucket.clock.advance(15)
    bucket.refund(taken, 0)
    assert bucket.requests() == [5]


def test_undercharge_is_charged_from_now_on(open_bucket: Open) -> None:
    """Of requests that were under way together, each is charged what it cost more, though the bucket lay idle meanwhile."""
    bucket = open_bucket(bucket_of("60/minute"))
    under_way = [bucket.charge(1) for _ in range(5)]
    bucket.clock.advance(30)
    for taken in under_way:
        bucket.refund(taken, 20)
    assert bucket.requests() == [95]


def test_a_bucket_may_owe_more_than_its_burst(open_bucket: Open) -> None:
    """What turns out to have cost more than fits is owed, drains at the rate, and refuses until it is paid."""
    bucket = open_bucket(bucket_of("60/minute"))
    taken = bucket.charge(1)
    bucket.refund(taken, 600)
    assert bucket.requests() == [600]
    bucket.clock.advance(us=541 * SECOND - 1)
    assert not bucket.charge(1).reading.admitted
    bucket.clock.advance(us=1)
    assert bucket.charge(1).reading.admitted


def test_no_cost_is_too_high_to_be_owed(open_bucket: Open) -> None:
    """A cost beyond all measure is owed as long as anything is remembered, and can be put right again."""
    bucket = open_bucket(bucket_of("1/second"))
    taken = bucket.refund(bucket.charge(1), 10**30)
    assert bucket.owed() == [MAX_OWED_US]
    bucket.refund(taken, 2)
    assert bucket.owed()[0] < MAX_OWED_US


def test_a_changed_count_changes_nothing(open_bucket: Open) -> None:
    """A charge is put right by as many requests as it was wrong, though servers with another count use the bucket too."""
    old, new = bucket_of("10/minute"), bucket_of("25/minute")
    bucket = open_bucket(old)
    bucket.charge(2)
    taken = bucket.charge(5)
    assert bucket.requests(new) == [7]
    bucket.refund(taken, 1)
    assert bucket.requests(new) == [3]
    bucket.refund(bucket.charge(1), 4)
    assert bucket.requests(new) == bucket.requests(old) == [7]


def test_refund_of_several_charges_corrects_only_changed_costs() -> None:
    """Charges that were right, that did not fit, or that have nothing to give back any more, are not asked about."""
    bucket, leased = bucket_of("5/minute"), Bucket((Limit("100/second", lease=10),))
    plan = Plan(
        (
            Charge("right", bucket, 1, enforced=True, rule="a"),
            Charge("wrong", bucket, 2, enforced=True, rule="b"),
            Charge("shadow", bucket, 9, enforced=False, rule="c"),
            Charge("nothing", bucket, 0, enforced=True, rule="d"),
            Charge("leased", leased, 1, enforced=True, rule="e"),
        )
    )
    reading = MemoryStore(Clock()).spend(plan)
    assert reading.admitted
    assert [charge.key for charge in refund(plan, reading, [1, 3, 0, 0, 0]).charges] == ["wrong"]
    assert [charge.key for charge in full_refund(plan, reading).charges] == ["right", "wrong"]


def test_refund_of_a_leased_charge_returns_less(open_bucket: Open) -> None:
    """Where a charge may come out of what was taken in advance, what a lease's time drains of it stays; on top comes all."""
    bucket = Bucket((Limit("2/second burst 10", lease=2),))
    stored = open_bucket(bucket)
    taken = stored.charge(9)
    taken = stored.refund(taken, 4)
    kept = LEASE_SPARE_US * 2 / (1 * SECOND)
    assert stored.requests() == pytest.approx([4 + kept], abs=1e-6)
    stored.refund(taken, 8)
    assert stored.requests() == pytest.approx([8 + kept], abs=1e-6)
