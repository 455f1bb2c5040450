"""The arithmetic of GCRA (ITU-T I.371, the generic cell rate algorithm), in whole ticks. Knows no clock and no store.

A bucket's state is its *debt*: what was taken and is not yet earned back, in ticks of 1/count µs, as it stood when the
bucket was last written. One request weighs ``period_us`` ticks, a microsecond pays back ``count``. Keeping the debt instead
of GCRA's theoretical arrival time (which is the time of writing plus the debt) makes a changed count and a stepping clock
harmless: a tick is the same share of a request under any count, and time never counts backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight, StraightRefund, always

REPLY_FIELDS = 2
CAN_WAIT = True
MAX_TURNS = 0
refusal_is_stable = always
IS_LIMIT = True
RESCALES = True
LOAD = Load(1, 0.6, 1.5)
"""Measured, among 32 buckets in a call: 11 µs for a charge of one window, 34 µs for 16, 102 µs for 64, and 230 µs to give
something back to these."""
LOAD_OF_LEASE = 0.8
"""Microseconds for each bit of a lease, in each window. Measured: 15 µs for 10, 22 µs for 1,000, 39 µs for a million."""
MAX_OWED_US = 2**52
"""Microseconds (142 years) at which a debt is cut off that a lowered limit has stretched; keeps Lua's doubles exact."""


STRAIGHT: Straight | None = Straight(
    kept="debt{n},",
    state="debt{n},",
    row="count{n}, increment{n}, capacity{n},",
    row_of=lambda limit, cost: (limit.count, cost * limit.period_us, limit.capacity),
    advance="""
    if (debt{n} := debt{n} - elapsed * count{n}) < 0:
        debt{n} = 0
    after{n} = debt{n} + increment{n}
    """,
    fits="after{n} <= capacity{n}",
    charged="after{n},",
    refund=StraightRefund(
        grace="was_debt{n} // count{n}",
        refunded="""
        last{n} = increment{n} + (grace{n} + 1 - since) * count{n}
        if debt{n} < last{n} or last{n} <= capacity{n}:
            back{n} = increment{n} - (since - grace{n}) * count{n} if since > grace{n} else increment{n}
            if back{n} > 0:
                debt{n} = debt{n} - back{n} if debt{n} > back{n} else 0
        """,
    ),
    asked=lambda limit, window, cost: (
        window.to_bytes(6, "little")
        + limit.count.to_bytes(6, "little")
        + pack("<5d", *encode_charge(limit, window, cost, 0, 0)[1:])
    ),
    reported="whole{n}, rest{n},",
    reported_state="whole{n} * count{n} + rest{n},",
)


def load(limit: LimitNumbers) -> Load:
    """Load of a window at most: more with a lease, whose requests are found bit by bit."""
    return LOAD._replace(charge=LOAD.charge + LOAD_OF_LEASE * limit.lease.bit_length()) if limit.lease else LOAD


def advance(
    debts: Sequence[int],
    elapsed_us: int,
    bucket: BucketNumbers,
    now: int | None = None,  # noqa: ARG001 - see below
) -> Sequence[int]:
    """The debts in ticks, ``elapsed_us`` after they were written; an idle bucket earns nothing beyond its burst.

    Time that went backwards pays nothing back and takes nothing: what was owed is owed now. What time it is does not matter.
    """
    if elapsed_us <= 0:
        return debts
    left = []
    for debt, count in zip(debts, bucket.counts):
        paid = elapsed_us * count
        left.append(debt - paid if debt > paid else 0)
    return left


def apply_adjustment(
    debts: Sequence[int], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
) -> Sequence[int]:
    """The debts in ticks after some is put back, ``elapsed_us`` after it was taken; in all but the grace it has drained.

    What is negative is taken on top instead, whether it fits or not, up to the ceiling; it would have drained just so.

    A turn that is still ahead and has others behind it is not put back. They keep theirs, so whoever came next would get the
    last of these, a second time, and not the one that became free. Where a limit lets borrow it is put back all the same: a
    request that is under way may have left as high a debt.
    """
    right = []
    for debt, ticks, grace, limit in zip(debts, back, grace_us, bucket.limits):
        if ticks > 0 and not limit.borrow:
            last = ticks + (grace + 1 - max(0, elapsed_us)) * limit.count  # less would be owed if nobody had come since
            if last > limit.capacity and debt >= last:
                right.append(debt)
                continue
        drained_since = max(0, elapsed_us - grace) * limit.count
        left = max(0, ticks - drained_since) if ticks > 0 else min(0, ticks + drained_since)
        right.append(min(max(0, debt - left), limit.ceiling) if left else debt)
    return right


def rescaled(debt: int, limit: LimitNumbers) -> int:
    """A debt left by another count, under this limit: as many requests, so as many ticks, up to the ceiling."""
    return min(debt, limit.ceiling)


def try_charge(
    debts: Sequence[int],
    bucket: BucketNumbers,
    cost: int,
    max_wait_us: int = 0,
    slot: int = 0,  # noqa: ARG001 - as every algorithm's
    *,
    turn_us: int = 0,
) -> Sequence[int] | None:
    """The debts after ``cost`` requests; None if they do not fit into every window, decided on the state after them.

    They fit, too, if they will within ``max_wait_us``, unless they never do. Where a limit lets borrow, all fit where one does.
    """
    if not cost:
        return debts
    if turn_us:
        debts = _held(debts, turn_us, bucket)
    after = []
    capacities: Sequence[int] = bucket.capacities
    if max_wait_us or (cost > 1 and bucket.borrow):
        capacities = [_tolerance(limit, cost, max_wait_us) for limit in bucket.limits]
    for debt, weight, capacity in zip(debts, bucket.weights, capacities):
        owed = debt + cost * weight
        if owed > capacity:
            return None
        after.append(owed)
    return after


def _held(debts: Sequence[int], turn_us: int, bucket: BucketNumbers) -> Sequence[int]:
    """The debts where nothing passes before a turn: what would be earned until then is owed, so that it is paid by then."""
    return [max(debt, turn_us * count) for debt, count in zip(debts, bucket.counts)]


def _tolerance(limit: LimitNumbers, cost: int, max_wait_us: int) -> int:
    """Ticks that a window may owe after ``cost`` requests that may wait so long, borrowed ones included."""
    if cost > limit.most:
        return limit.capacity
    if limit.borrow and not cost:
        return limit.ceiling  # no debt tells the script that a turn is still ahead
    capacity = limit.capacity + (max(0, cost - 1) * limit.period_us if limit.borrow else 0)
    return max(capacity, min(capacity + max_wait_us * limit.count, limit.ceiling))


def wait_us(debt: int, cost: int, limit: LimitNumbers) -> int | None:
    """Microseconds until ``cost`` requests fit, rounded up; 0 if they fit now, None if they never do."""
    if not cost:
        return 0
    if cost > limit.most:
        return None
    over = debt + (1 if limit.borrow else cost) * limit.period_us - limit.capacity
    return -(-over // limit.count) if over > 0 else 0


def refill_us(debt: int, limit: LimitNumbers) -> int:
    """Microseconds until nothing is owed, rounded up."""
    return -(-debt // limit.count)


ttl_us = refill_us


def remaining(debt: int, limit: LimitNumbers) -> int:
    """Whole requests that still fit; never negative."""
    return (limit.capacity - debt) // limit.period_us if debt < limit.capacity else 0


def left_after(debt: int, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    """Requests that fit besides ``cost``, negative if that does not fit now, and then the µs until nothing counts any more."""
    owed = debt + cost * limit.period_us
    return (limit.capacity - owed) // limit.period_us, -(-owed // limit.count)


def used(debt: int, limit: LimitNumbers) -> int:
    """Requests owed, a begun one counted whole; more than the burst after a limit was lowered."""
    return -(-debt // limit.period_us)


def check(limit: LimitNumbers) -> str | None:
    """Return None: GCRA counts every limit."""


def initial(now: int, bucket: BucketNumbers) -> Sequence[int]:  # noqa: ARG001 - as every algorithm's
    """Nothing is owed."""
    return [0] * len(bucket.ids)


def refund_amount(
    debts: Sequence[int],
    bucket: BucketNumbers,
    cost: int,
    due: int,
    slot: int = 0,  # noqa: ARG001 - as every algorithm's
    *,
    turn_us: int = 0,
) -> tuple[Sequence[int], Sequence[int]]:
    """Ticks to give back per window, and for how long older debts drained, where a charge of ``cost`` should have been ``due``.

    What was charged too little is owed from now on. In a bucket that ran empty meanwhile some of it would have drained; but the
    bucket does not know of how many requests, and if each that was under way counted on the same time, together they would be
    charged next to nothing.
    """
    back = [
        max(-limit.ceiling, min((cost - due) * weight, limit.ceiling)) for weight, limit in zip(bucket.weights, bucket.limits)
    ]
    if due > cost:
        return back, [MAX_OWED_US] * len(back)
    held = _held(debts, turn_us, bucket)
    return back, [(debt + due * weight) // count for debt, weight, count in zip(held, bucket.weights, bucket.counts)]


def date(limit: LimitNumbers) -> int:  # noqa: ARG001 - as every algorithm's
    """No date matters."""
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """The number, count, tolerance and increment, the latter two as whole microseconds and a rest over count.

    A cost that never fits stays just above the burst, so that its numbers are as small as those of others.
    """
    increment = (cost if cost <= limit.most else limit.burst + 1) * limit.period_us
    tolerance = _tolerance(limit, cost, max_wait_us)
    return window, limit.count, *divmod(tolerance, limit.count), *divmod(increment, limit.count)


def encode_adjustment(limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:
    """One request, what is put back, and the grace."""
    return *divmod(limit.period_us, limit.count), *divmod(back, limit.count), grace_us


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[int]:
    """The debts, each reported as whole microseconds and a rest over count."""
    owed, at = [], 0
    for count in bucket.counts:
        owed.append(facts[at] * count + facts[at + 1])
        at += 2
    return owed
