"""Refunds: plans that put buckets right when a request turns out to have cost something else than it was charged, or nothing.

What it should have cost is for `limitgate.gate.admission` to say, which knows ``charge_if`` and `Decision.settle`.

What was charged too much is given back, and then a bucket is as if it had not been charged:

    the difference, less what of it drained meanwhile; and as long as the bucket had older debts to drain, that is nothing

That is exact, to the microsecond, while nobody else uses the bucket, and for one that owes more than drained meanwhile.

What was charged too little is owed from now on. In a bucket that ran empty meanwhile some of it would have drained; but the
bucket does not know of how many requests, and if each that was under way counted on the same time, together they would be
charged next to nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.limits.bucket import LEASE_SPARE_US
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading


def refund(plan: Plan, reading: Reading, costs: Sequence[int]) -> Plan:
    """Plan that corrects one that was admitted, given what each of its charges really cost; maybe without charges."""
    read = zip(plan.charges, reading.buckets, costs)
    took = [(charge, bucket, cost) for charge, bucket, cost in read if bucket.after is not None]
    wrong = [_corrected(charge, bucket, reading.now, cost) for charge, bucket, cost in took if cost != charge.cost]
    return Plan.adjust([charge for charge in wrong if charge.adjustment and charge.adjustment.gives_back])


def full_refund(plan: Plan, reading: Reading) -> Plan:
    """Plan that gives back all charges of one that was admitted; maybe without charges."""
    return refund(plan, reading, [0] * len(plan.charges))


def _corrected(charge: Charge, reading: BucketReading, now: int, cost: int) -> Charge:
    bucket, turn_us = charge.bucket, reading.charge.turn_us
    back, grace = bucket.algorithm.refund_amount(reading.before, bucket, charge.cost, cost, charge.slot, turn_us=turn_us)
    if bucket.lease and cost < charge.cost:  # it may come out of what was taken in advance, up to so long ago
        back = [max(0, ticks - LEASE_SPARE_US * count) for ticks, count in zip(back, bucket.counts)]
        grace = [0] * len(back)
    return charge._replace(slot=0).adjusted(back, grace, now)
