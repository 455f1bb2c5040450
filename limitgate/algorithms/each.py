"""Adapts algorithms for a single window to `Algorithm`, which covers all windows of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from limitgate.algorithms.base import MAX_USED, BucketNumbers, LimitNumbers, Load, State, Straight


class ForOne(Protocol):
    """An algorithm for a single window."""

    REPLY_FIELDS: int
    CAN_WAIT: bool
    MAX_TURNS: int
    STRAIGHT: Straight | None

    def check(self, limit: LimitNumbers) -> str | None: ...
    def load(self, limit: LimitNumbers) -> Load: ...
    def initial(self, now: int, limit: LimitNumbers) -> State: ...
    def advance(self, state: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State: ...

    def charged(self, state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:
        """Return the state after ``cost`` requests, even if they don't fit, with a turn in ``turn_us``."""

    def apply_adjustment(self, state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State: ...

    def grace_us(self, state: State, limit: LimitNumbers) -> int:
        """Return how long a charge in this state is refundable, in µs, or another value for `apply_adjustment`."""

    def refusal_is_stable(self, states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool: ...
    def remaining(self, state: State, limit: LimitNumbers) -> int: ...
    def left_after(self, state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]: ...
    def used(self, state: State, limit: LimitNumbers) -> int: ...
    def wait_us(self, state: State, cost: int, limit: LimitNumbers) -> int | None: ...
    def refill_us(self, state: State, limit: LimitNumbers) -> int: ...
    def date(self, limit: LimitNumbers) -> int: ...
    def encode_charge(self, limit: LimitNumbers, cost: int, date: int) -> Sequence[int]: ...

    def decode_state(self, facts: Sequence[int]) -> State:
        """Decode the reported state."""


class Each:
    """An algorithm for a single window, as an `Algorithm`. Its states are in requests, independent of the count."""

    IS_LIMIT = True
    RESCALES = False

    def __init__(self, one: ForOne) -> None:
        self._one = one
        self.REPLY_FIELDS = one.REPLY_FIELDS
        self.CAN_WAIT = one.CAN_WAIT
        self.MAX_TURNS = one.MAX_TURNS
        self.STRAIGHT = one.STRAIGHT
        self.refusal_is_stable = one.refusal_is_stable
        self.check = one.check
        self.load = one.load
        self.remaining = one.remaining
        self.left_after = one.left_after
        self.used = one.used
        self.wait_us = one.wait_us
        self.refill_us = self.ttl_us = one.refill_us
        self.date = one.date

    def initial(self, now: int, bucket: BucketNumbers) -> Sequence[State]:
        return [self._one.initial(now, limit) for limit in bucket.limits]

    def advance(
        self, states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None
    ) -> Sequence[State]:
        elapsed_us = max(0, elapsed_us)
        return [self._one.advance(state, elapsed_us, limit, now) for state, limit in zip(states, bucket.limits)]

    def rescaled(self, state: State, limit: LimitNumbers) -> State:
        return state

    def try_charge(
        self,
        states: Sequence[State],
        bucket: BucketNumbers,
        cost: int,
        max_wait_us: int = 0,
        slot: int = 0,
        *,
        turn_us: int = 0,
    ) -> Sequence[State] | None:
        if not cost:
            return states
        after = []
        for state, limit in zip(states, bucket.limits):
            wait = self._one.wait_us(state, cost, limit)
            if wait is None or wait > max_wait_us:
                return None
            after.append(self._one.charged(state, cost, limit, max(wait, turn_us)))
        return after

    def apply_adjustment(
        self, states: Sequence[State], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[State]:
        windowed = zip(states, back, grace_us, bucket.limits)
        return [
            self._one.apply_adjustment(state, most, max(0, elapsed_us), grace, limit) for state, most, grace, limit in windowed
        ]

    def refund_amount(
        self, states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
    ) -> tuple[Sequence[int], Sequence[int]]:
        graces = [turn_us + self._one.grace_us(state, limit) for state, limit in zip(states, bucket.limits)]
        return [max(-MAX_USED, min(cost - due, MAX_USED))] * len(graces), graces

    def encode_charge(self, limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:
        return self._one.encode_charge(limit, cost, date)

    def encode_adjustment(self, limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:
        return back, grace_us

    def decode_state(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[Any]:
        return [
            self._one.decode_state(facts[at : at + self.REPLY_FIELDS])
            for at in range(0, self.REPLY_FIELDS * len(bucket.ids), self.REPLY_FIELDS)
        ]
