"""The effect of refunds on later charges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from limitgate.algorithms import gcra
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading


class Returned(NamedTuple):
    key: str
    charged_at: int
    """Unix µs of the store at the charge."""
    windows: Mapping[int, tuple[int, int]]
    """By window: debt before the charge, and returned ticks."""

    def lowered(self, charge: Charge, now: int, debts: Sequence[int]) -> Sequence[int]:
        """Return the debts before another charge at ``now``, as if the refunded charge had not been made."""
        if charge.key != self.key or charge.bucket.algorithm is not gcra:
            return debts
        lowered = list(debts)
        for place, window in enumerate(charge.bucket.ids):
            before, ticks = self.windows.get(window, (0, 0))
            if (now, debts[place]) > (self.charged_at, before):
                lowered[place] = max(0, debts[place] - ticks)
        return debts if lowered == debts else lowered


def returned(correction: Plan, after: Reading, charges: Iterable[tuple[int, BucketReading]]) -> list[Returned]:
    """Return the refunded part of a correction. GCRA only: its refunds move every later turn up."""
    given = []
    made = {(bucket.charge.key, bucket.charge.bucket.ids): (now, bucket.before) for now, bucket in charges}
    for charge, (_, debts, _) in zip(correction.charges, after.buckets):
        known = made.get((charge.key, charge.bucket.ids))
        if known is None or charge.adjustment is None or charge.bucket.algorithm is not gcra:
            continue
        ticks = gcra.refunded(
            debts, charge.adjustment.back, after.now - charge.adjustment.as_of, charge.adjustment.grace, charge.bucket
        )
        if any(ticks):
            given.append(Returned(charge.key, known[0], dict(zip(charge.bucket.ids, zip(known[1], ticks)))))
    return given
