"""Algorithms that look at one limit at a time, as the rest of the code asks for them: for all windows of a bucket at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from limitgate.algorithms.base import MAX_USED, BucketNumbers, ChargeNumbers, LimitNumbers, Load, State


class ForOne(Protocol):
    """An algorithm for one window."""

    REPLY_FIELDS: int
    CAN_WAIT: bool

    def check(self, limit: LimitNumbers) -> str | None: ...  # noqa: D102 - these are as in `base.Algorithm`
    def load(self, limit: LimitNumbers) -> Load: ...  # noqa: D102
    def initial(self, now: int, limit: LimitNumbers) -> State: ...  # noqa: D102
    def opened(self, state: State, elapsed_us: int, now: int, limit: LimitNumbers) -> State: ...  # noqa: D102
    def drained(self, state: State, elapsed_us: int, limit: LimitNumbers) -> State: ...  # noqa: D102

    def charged(self, state: State, charge: ChargeNumbers) -> State:
        """The state once a charge is made, whether or not it fits."""

    def apply_adjustment(self, state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State: ...  # noqa: D102

    def grace_us(self, state: State, limit: LimitNumbers) -> int:
        """Microseconds for which a charge to a window in this state can be refunded, or what else `apply_adjustment` needs."""

    def refusal_is_stable(self, states: Sequence[State], charge: ChargeNumbers) -> bool: ...  # noqa: D102
    def remaining(self, state: State, limit: LimitNumbers) -> int: ...  # noqa: D102
    def used(self, state: State, limit: LimitNumbers) -> int: ...  # noqa: D102
    def wait_us(self, state: State, cost: int, limit: LimitNumbers) -> int | None: ...  # noqa: D102
    def refill_us(self, state: State, limit: LimitNumbers) -> int: ...  # noqa: D102
    def date(self, limit: LimitNumbers) -> int: ...  # noqa: D102
    def encode_charge(self, limit: LimitNumbers, cost: int, ahead_us: int, date: int) -> Sequence[int]: ...  # noqa: D102

    def decode_state(self, facts: Sequence[int]) -> State:
        """The state that the script has reported."""


class Each:
    """An algorithm for one window, as an `Algorithm`. Its states are in requests, so no other count changes them."""

    IS_LIMIT = True
    RESCALES = False

    def __init__(self, one: ForOne) -> None:
        self._one = one
        self.REPLY_FIELDS = one.REPLY_FIELDS
        self.CAN_WAIT = one.CAN_WAIT
        self.refusal_is_stable = one.refusal_is_stable
        self.check = one.check
        self.load = one.load
        self.remaining = one.remaining
        self.used = one.used
        self.wait_us = one.wait_us
        self.refill_us = self.ttl_us = one.refill_us
        self.date = one.date

    def initial(self, now: int, bucket: BucketNumbers) -> Sequence[State]:  # noqa: D102 - as in `base.Algorithm`, like all here
        return [self._one.initial(now, limit) for limit in bucket.limits]

    def opened(self, states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int) -> Sequence[State]:  # noqa: D102
        elapsed_us = max(0, elapsed_us)
        return [self._one.opened(state, elapsed_us, now, limit) for state, limit in zip(states, bucket.limits)]

    def drained(self, states: Sequence[State], elapsed_us: int, bucket: BucketNumbers) -> Sequence[State]:  # noqa: D102
        elapsed_us = max(0, elapsed_us)
        return [self._one.drained(state, elapsed_us, limit) for state, limit in zip(states, bucket.limits)]

    def rescaled(self, state: State, limit: LimitNumbers) -> State:  # noqa: D102
        return state

    def weighed(self, states: Sequence[State], charge: ChargeNumbers) -> Sequence[State] | None:  # noqa: D102
        for state, limit in zip(states, charge.bucket.limits):
            if charge.cost and self._one.wait_us(state, charge.cost, limit) != 0:
                return None
        return [self._one.charged(state, charge) for state in states] if charge.cost else states

    def apply_adjustment(  # noqa: D102
        self, states: Sequence[State], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[State]:
        windowed = zip(states, back, grace_us, bucket.limits)
        return [
            self._one.apply_adjustment(state, most, max(0, elapsed_us), grace, limit) for state, most, grace, limit in windowed
        ]

    def refund_amount(self, charge: ChargeNumbers, states: Sequence[State], cost: int) -> tuple[Sequence[int], Sequence[int]]:  # noqa: D102
        graces = [self._one.grace_us(state, limit) for state, limit in zip(states, charge.bucket.limits)]
        return [max(-MAX_USED, min(charge.cost - cost, MAX_USED))] * len(graces), graces

    def encode_charge(self, limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:  # noqa: D102
        return self._one.encode_charge(limit, cost, ahead_us, date)

    def encode_adjustment(self, limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:  # noqa: D102
        return back, grace_us

    def decode_state(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[Any]:  # noqa: D102
        return [
            self._one.decode_state(facts[at : at + self.REPLY_FIELDS])
            for at in range(0, self.REPLY_FIELDS * len(bucket.ids), self.REPLY_FIELDS)
        ]
