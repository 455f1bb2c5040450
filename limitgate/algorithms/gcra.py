"""GCRA (generic cell rate algorithm, ITU-T I.371) in integer ticks.

The state is the *debt*: undrained charges at the last write, in ticks of 1/count µs. A request costs ``period_us`` ticks; a
microsecond drains ``count`` ticks. GCRA's theoretical arrival time is the last write plus the debt. Storing the debt makes
changed counts and clock steps harmless.
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
"""Measured in calls of 32. A charge of 1, 16 or 64 windows takes 11, 34 or 102 µs; a refund of 64 takes 230 µs."""
LOAD_OF_LEASE = 0.8
"""µs per window and bit of its lease. Measured: 15 µs for 10 requests, 39 µs for a million."""
MAX_OWED_US = 2**52
"""Maximum debt, 142 years in µs; keeps Lua's doubles exact."""


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
    return LOAD._replace(charge=LOAD.charge + LOAD_OF_LEASE * limit.lease.bit_length()) if limit.lease else LOAD


def advance(debts: Sequence[int], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[int]:
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
    """Refund what was charged ``elapsed_us`` ago and hasn't drained since.

    A negative amount is charged even if it doesn't fit, up to `MAX_OWED_US`. A turn with other turns behind it isn't
    refunded, or the next request would get a turn that is taken. With ``borrow`` it is refunded.
    """
    right = []
    for debt, ticks, grace, limit in zip(debts, back, grace_us, bucket.limits):
        if ticks > 0 and not limit.borrow:
            last = ticks + (grace + 1 - max(0, elapsed_us)) * limit.count  # Without later requests, the debt is lower.
            if last > limit.capacity and debt >= last:
                right.append(debt)
                continue
        drained_since = max(0, elapsed_us - grace) * limit.count
        left = max(0, ticks - drained_since) if ticks > 0 else min(0, ticks + drained_since)
        right.append(min(max(0, debt - left), limit.ceiling) if left else debt)
    return right


def refunded(
    debts: Sequence[int], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
) -> Sequence[int]:
    """Return the ticks that `apply_adjustment` refunded. ``debts`` are those after the refund."""
    ticks = []
    elapsed_us = max(0, elapsed_us)
    for debt, most, grace, limit in zip(debts, back, grace_us, bucket.limits):
        last = most + (grace + 1 - elapsed_us) * limit.count
        is_kept = not limit.borrow and last > limit.capacity and debt >= last
        ticks.append(0 if is_kept else max(0, most - max(0, elapsed_us - grace) * limit.count))
    return ticks


def rescaled(debt: int, limit: LimitNumbers) -> int:
    return min(debt, limit.ceiling)


def try_charge(
    debts: Sequence[int], bucket: BucketNumbers, cost: int, max_wait_us: int = 0, slot: int = 0, *, turn_us: int = 0
) -> Sequence[int] | None:
    """If any limit has ``borrow``, one window with room is enough."""
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
    """Raise each debt so that no request is admitted before ``turn_us``."""
    return [max(debt, turn_us * count) for debt, count in zip(debts, bucket.counts)]


def _tolerance(limit: LimitNumbers, cost: int, max_wait_us: int) -> int:
    """Return the maximum debt of a window in ticks, including the wait and borrowed requests."""
    if cost > limit.most:
        return limit.capacity
    if limit.borrow and not cost:
        return limit.ceiling  # Without a debt, the script can't see a future turn.
    capacity = limit.capacity + (max(0, cost - 1) * limit.period_us if limit.borrow else 0)
    return max(capacity, min(capacity + max_wait_us * limit.count, limit.ceiling))


def wait_us(debt: int, cost: int, limit: LimitNumbers) -> int | None:
    if not cost:
        return 0
    if cost > limit.most:
        return None
    over = debt + (1 if limit.borrow else cost) * limit.period_us - limit.capacity
    return -(-over // limit.count) if over > 0 else 0


def refill_us(debt: int, limit: LimitNumbers) -> int:
    return -(-debt // limit.count)


ttl_us = refill_us


def remaining(debt: int, limit: LimitNumbers) -> int:
    return (limit.capacity - debt) // limit.period_us if debt < limit.capacity else 0


def left_after(debt: int, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    owed = debt + cost * limit.period_us
    return (limit.capacity - owed) // limit.period_us, -(-owed // limit.count)


def used(debt: int, limit: LimitNumbers) -> int:
    return -(-debt // limit.period_us)


def check(limit: LimitNumbers) -> str | None:
    """Return None: GCRA supports every limit."""


def initial(now: int, bucket: BucketNumbers) -> Sequence[int]:
    return [0] * len(bucket.ids)


def refund_amount(
    debts: Sequence[int], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
) -> tuple[Sequence[int], Sequence[int]]:
    """Charge a shortfall in full, even if the bucket was empty since, because concurrent requests share that time."""
    back = [
        max(-limit.ceiling, min((cost - due) * weight, limit.ceiling)) for weight, limit in zip(bucket.weights, bucket.limits)
    ]
    if due > cost:
        return back, [MAX_OWED_US] * len(back)
    held = _held(debts, turn_us, bucket)
    return back, [(debt + due * weight) // count for debt, weight, count in zip(held, bucket.weights, bucket.counts)]


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:
    """Return window number, count, tolerance, and increment as whole µs and a remainder over count."""
    increment = (cost if cost <= limit.most else limit.burst + 1) * limit.period_us
    tolerance = _tolerance(limit, cost, max_wait_us)
    return window, limit.count, *divmod(tolerance, limit.count), *divmod(increment, limit.count)


def encode_adjustment(limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:
    return *divmod(limit.period_us, limit.count), *divmod(back, limit.count), grace_us


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[int]:
    """Decode debts from whole µs and a remainder over count."""
    owed, at = [], 0
    for count in bucket.counts:
        owed.append(facts[at] * count + facts[at + 1])
        at += 2
    return owed
