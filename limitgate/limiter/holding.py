"""Plans of reservations with a hold, see `limitgate.algorithms.holds`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from limitgate.algorithms import holds
from limitgate.errors import StoreError
from limitgate.limits.bucket import MAX_AHEAD, Bucket
from limitgate.limits.limit import Duration, as_seconds, kept_as
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, full_refund, new_slot


class NotHeldError(StoreError):
    """A reservation can't be held. Its charge was refunded."""


LONGEST = 366 * 86_400
"""Seconds."""
_HOLDS = Bucket((kept_as("holds"),))

Made = Sequence[tuple[Plan, Reading]]


def hold_us(hold: Duration | None) -> int:
    """µs, 0 for none. Raises `ConfigError` or `ValueError`."""
    if hold is None:
        return 0
    seconds = as_seconds(hold, "hold")
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
        raise ValueError(f"hold is {hold!r:.40}, expected seconds above 0, at most {LONGEST:,}, or None")
    return max(1, round(seconds * 1_000_000))


class Hold:
    def __init__(self, charges: Iterable[Charge], us: int) -> None:
        self._covered = [
            charge._replace(cost=0, enforced=False, max_wait_us=0) for charge in charges if charge.bucket.algorithm.IS_LIMIT
        ]
        self._name = new_slot()
        self._ends_us = 0
        """Unix µs of the store."""
        self.kept_at = 0
        self._us = us
        self._first = Charge(_key(self._covered), _HOLDS, len(self._covered), enforced=False, rule=None)

    def charging(self, plan: Plan) -> Plan:
        return plan._replace(charges=(self._first, *plan.charges))

    def registering(self, made: Made, now: int) -> Plan:
        undone = Plan.adjust([charge for plan, reading in made for charge in full_refund(plan, reading).charges])
        needed = max([_drain_us(reading) for _, reading in made])
        self._ends_us = now + self._us
        action = holds.Action(holds.REGISTER, self._name, self._us, min(needed, MAX_AHEAD), now + holds.BARRED_US)
        return self._acting(action, undone)

    def releasing(self, correction: Plan) -> Plan:
        """End the hold and correct its charges, unless the store has refunded them."""
        return self._acting(holds.Action(holds.RELEASE, self._name, place=self.kept_at), correction)

    def undoing(self, correction: Plan) -> Plan:
        """Correct charges if the hold may have begun. Do nothing if the hold may have ended."""
        return self._acting(holds.Action(holds.UNDO, self._name, latest=self._ends_us), correction)

    def renewing(self) -> Plan:
        return self._acting(holds.Action(holds.RENEW, self._name, self._us, place=self.kept_at), Plan.adjust(()))

    def _acting(self, action: holds.Action, correction: Plan) -> Plan:
        corrected = {(charge.key, charge.bucket.ids): charge for charge in correction.charges}
        covered = [corrected.get((charge.key, charge.bucket.ids), charge) for charge in self._covered]
        first = self._first._replace(adjustment=Adjustment(0, 0, [action], [0]))
        return Plan.adjust([first, *covered])


def state_of(reading: Reading) -> holds.State:
    state: holds.State = reading.buckets[0].before[0]
    return state


def without_hold(reading: Reading) -> Reading:
    return reading._replace(buckets=reading.buckets[1:])


def is_full(state: holds.State, charges: Iterable[Charge]) -> bool:
    return state.held >= holds.most_entries(
        sum([len(charge.bucket.ids) for charge in charges if charge.bucket.algorithm.IS_LIMIT])
    )


def _key(charges: Sequence[Charge]) -> str:
    """Return the key of holds, in the hash slot of the charges.

    A key is for one set of windows, so that all entries have the same form.
    """
    (key, bucket, *_), *_ = charges
    # See `limitgate.limiter.plans.bucket_key`.
    name = key[: (len(key) - len(bucket.suffix) - 3) // 2] if bucket.suffix else key
    windows = repr([charge.bucket.ids for charge in charges]).encode()
    return f"{name}:holds:{blake2b(windows, digest_size=8).hexdigest()}:{{{name}}}"


def _drain_us(reading: Reading) -> int:
    return max(
        [
            charge.bucket.algorithm.ttl_us(state, limit)
            for charge, _, after in reading.buckets
            if after is not None and charge.bucket.algorithm.IS_LIMIT
            for state, limit in zip(after, charge.bucket.limits)
        ],
        default=0,
    )
