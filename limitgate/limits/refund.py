"""Corrects the charges of a request after its final cost is known. Pure.

A refund returns the difference, less the part that has drained since. Nothing counts as drained while the bucket drained older
charges. This is exact to the microsecond if no other request uses the bucket, or if the bucket still owes more than has
drained.

An undercharge is owed from now on. Otherwise, concurrent requests could all claim the same idle time.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.limits.bucket import LEASE_SPARE_US
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading


def refund(plan: Plan, reading: Reading, costs: Sequence[int]) -> Plan:
    """Return the correction of an admitted plan, given the final costs. It may be empty."""
    read = zip(plan.charges, reading.buckets, costs)
    took = [(charge, bucket, cost) for charge, bucket, cost in read if bucket.after is not None]
    wrong = [_corrected(charge, bucket, reading.now, cost) for charge, bucket, cost in took if cost != charge.cost]
    return Plan.adjust([charge for charge in wrong if charge.adjustment and charge.adjustment.gives_back])


def full_refund(plan: Plan, reading: Reading) -> Plan:
    """Return the complete refund of an admitted plan. It may be empty."""
    return refund(plan, reading, [0] * len(plan.charges))


def _corrected(charge: Charge, reading: BucketReading, now: int, cost: int) -> Charge:
    bucket, turn_us = charge.bucket, reading.charge.turn_us
    back, grace = bucket.algorithm.refund_amount(reading.before, bucket, charge.cost, cost, charge.slot, turn_us=turn_us)
    # The charge may come from an older lease.
    if bucket.lease and cost < charge.cost:
        back = [max(0, ticks - LEASE_SPARE_US * count) for ticks, count in zip(back, bucket.counts)]
        grace = [0] * len(back)
    return charge._replace(slot=0).adjusted(back, grace, now)
