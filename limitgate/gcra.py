"""The arithmetic of GCRA (ITU-T I.371, the generic cell rate algorithm), in whole ticks. Knows no clock and no store.

A bucket's state is its *debt*: what was taken and is not yet earned back, in ticks of 1/count µs, as it stood when the
bucket was last written. One request weighs ``period_us`` ticks, a microsecond pays back ``count``. Keeping the debt instead
of GCRA's theoretical arrival time (which is the time of writing plus the debt) makes a changed count and a stepping clock
harmless: a tick is the same share of a request under any count, and time never counts backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.limits import Limit, Windows


def drained(debts: Sequence[int], elapsed_us: int, windows: Windows) -> Sequence[int]:
    """The debts in ticks, ``elapsed_us`` after they were written; an idle bucket earns nothing beyond its burst.

    Time that went backwards pays nothing back and takes nothing: what was owed is owed now.
    """
    if elapsed_us <= 0:
        return debts
    left = []
    for debt, count in zip(debts, windows.counts):
        paid = elapsed_us * count
        left.append(debt - paid if debt > paid else 0)
    return left


def put_right(
    debts: Sequence[int], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], windows: Windows
) -> Sequence[int]:
    """The debts in ticks after some is put back, ``elapsed_us`` after it was taken; in all but the grace it has drained.

    What is negative is taken on top instead, whether it fits or not, up to the ceiling; it would have drained just so.
    """
    right = []
    for debt, ticks, grace, limit in zip(debts, back, grace_us, windows.limits):
        drained_since = max(0, elapsed_us - grace) * limit.count
        left = max(0, ticks - drained_since) if ticks > 0 else min(0, ticks + drained_since)
        right.append(min(max(0, debt - left), limit.ceiling) if left else debt)
    return right


def rescaled(debt: int, limit: Limit) -> int:
    """A debt left by another count, under this limit: as many requests, so as many ticks, up to the ceiling."""
    return min(debt, limit.ceiling)


def charged(debts: Sequence[int], cost: int, windows: Windows) -> Sequence[int] | None:
    """The debts after ``cost`` requests; None if they do not fit into every window, decided on the state after them."""
    if not cost:
        return debts
    after = []
    for debt, weight, capacity in zip(debts, windows.weights, windows.capacities):
        owed = debt + cost * weight
        if owed > capacity:
            return None
        after.append(owed)
    return after


def wait_us(debt: int, cost: int, limit: Limit) -> int | None:
    """Microseconds until ``cost`` requests fit, rounded up; 0 if they fit now, None if they exceed the burst."""
    over = debt + cost * limit.period_us - limit.capacity
    if over <= 0 or not cost:
        return 0
    return None if cost > limit.burst else -(-over // limit.count)


def refill_us(debt: int, limit: Limit) -> int:
    """Microseconds until nothing is owed, rounded up."""
    return -(-debt // limit.count)


def remaining(debt: int, limit: Limit) -> int:
    """Whole requests that still fit; never negative."""
    return (limit.capacity - debt) // limit.period_us if debt < limit.capacity else 0


def used(debt: int, limit: Limit) -> int:
    """Requests owed, a begun one counted whole; more than the burst after a limit was lowered."""
    return -(-debt // limit.period_us)
