"""Algorithms that look at one limit at a time, as the rest of the code asks for them: for all windows of a bucket at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from limitgate.algorithms.base import MAX_USED, BucketNumbers, ChargeNumbers, LimitNumbers, Load, State


class ForOne(Protocol):
    """An algorithm for one window."""

    FACTS: int
    BOOKS: bool

    def check(self, limit: LimitNumbers) -> str | None: ...  # noqa: D102 - these are as in `base.Algorithm`
    def load(self, limit: LimitNumbers) -> Load: ...  # noqa: D102
    def fresh(self, now: int, limit: LimitNumbers) -> State: ...  # noqa: D102
    def opened(self, state: State, elapsed_us: int, now: int, limit: LimitNumbers) -> State: ...  # noqa: D102
    def drained(self, state: State, elapsed_us: int, limit: LimitNumbers) -> State: ...  # noqa: D102

    def charged(self, state: State, charge: ChargeNumbers) -> State:
        """The state once a charge is made, whether or not it fits."""

    def put_right(self, state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State: ...  # noqa: D102

    def grace_us(self, state: State, limit: LimitNumbers) -> int:
        """For how long something that was charged to a window in this state can be put back, or what else `put_right` needs."""

    def holds(self, states: Sequence[State], charge: ChargeNumbers) -> bool: ...  # noqa: D102
    def remaining(self, state: State, limit: LimitNumbers) -> int: ...  # noqa: D102
    def used(self, state: State, limit: LimitNumbers) -> int: ...  # noqa: D102
    def wait_us(self, state: State, cost: int, limit: LimitNumbers) -> int | None: ...  # noqa: D102
    def refill_us(self, state: State, limit: LimitNumbers) -> int: ...  # noqa: D102
    def date(self, limit: LimitNumbers) -> int: ...  # noqa: D102
    def asked(self, limit: LimitNumbers, cost: int, ahead_us: int, date: int) -> Sequence[int]: ...  # noqa: D102

    def seen(self, facts: Sequence[int]) -> State:
        """The state that the script has reported."""


class Each:
    """An algorithm for one window, as an `Algorithm`. Its states are in requests, so no other count changes them."""

    SILENT = False
    BY_COUNT = False

    def __init__(self, one: ForOne) -> None:
        self._one = one
        self.FACTS = one.FACTS
        self.BOOKS = one.BOOKS
        self.holds = one.holds
        self.check = one.check
        self.load = one.load
        self.remaining = one.remaining
        self.used = one.used
        self.wait_us = one.wait_us
        self.refill_us = self.lasts_us = one.refill_us
        self.date = one.date

    def fresh(self, now: int, bucket: BucketNumbers) -> Sequence[State]:  # noqa: D102 - as in `base.Algorithm`, like all here
        return [self._one.fresh(now, limit) for limit in bucket.limits]

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

    def put_right(  # noqa: D102
        self, states: Sequence[State], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[State]:
        windowed = zip(states, back, grace_us, bucket.limits)
        return [self._one.put_right(state, most, max(0, elapsed_us), grace, limit) for state, most, grace, limit in windowed]

    def owed_back(self, charge: ChargeNumbers, states: Sequence[State], cost: int) -> tuple[Sequence[int], Sequence[int]]:  # noqa: D102
        graces = [self._one.grace_us(state, limit) for state, limit in zip(states, charge.bucket.limits)]
        return [max(-MAX_USED, min(charge.cost - cost, MAX_USED))] * len(graces), graces

    def asked(self, limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:  # noqa: D102
        return self._one.asked(limit, cost, ahead_us, date)

    def leased(self, limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:  # noqa: D102
        return back, grace_us

    def seen(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[Any]:  # noqa: D102
        return [self._one.seen(facts[at : at + self.FACTS]) for at in range(0, self.FACTS * len(bucket.ids), self.FACTS)]
