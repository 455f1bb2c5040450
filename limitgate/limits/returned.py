"""What refunds have returned, and what that changes for later charges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from limitgate.algorithms import gcra
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading


class Returned(NamedTuple):
    """What a refund has returned to a GCRA bucket."""

    key: str
    charged_at: int
    """The store's clock in Unix µs at the refunded charge."""
    windows: Mapping[int, tuple[int, int]]
    """By window: the debt before the charge, and the ticks returned."""

    def lowered(self, charge: Charge, now: int, debts: Sequence[int]) -> Sequence[int]:
        """Return the debts before another charge, made at ``now``, as if the refunded one had never been made."""
        if charge.key != self.key or charge.bucket.algorithm is not gcra:
            return debts
        lowered = list(debts)
        for place, window in enumerate(charge.bucket.ids):
            before, ticks = self.windows.get(window, (0, 0))
            if (now, debts[place]) > (self.charged_at, before):
                lowered[place] = max(0, debts[place] - ticks)
        return debts if lowered == debts else lowered


def returned(correction: Plan, after: Reading, charges: Iterable[tuple[int, BucketReading]]) -> list[Returned]:
    """Return what a correction has returned, given its reading, and the time and reading of the corrected charges.

    Covers GCRA only: a refund of its debt moves every later turn up by the time in which the debt would have drained.
    """
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
