"""A ban refuses a key for some time. Its state is the remaining µs, or a `Rest`; 0 is no ban."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight
from limitgate.algorithms.gcra import MAX_OWED_US

REPLY_FIELDS = 1
CAN_WAIT = False
MAX_TURNS = 0
left_after = None
STRAIGHT: Straight | None = None
IS_LIMIT = False
RESCALES = False

FOR_EVER = 100 * 366 * 86_400 * 1_000_000
"""Duration of a permanent ban, in µs."""
PERMANENT = FOR_EVER // 2
"""A ban with at least this many µs left is permanent."""
MORE, AT_LEAST = 0, 1
"""Kinds of adjustment: lengthen a ban, or ban for a minimum time."""
PLENTY = 10**15
"""Reported as remaining requests without a ban: more than any limit."""
LOAD = Load(2, 1, 1)
"""Measured in calls of 32: 4 µs to read a ban, 8 µs to set one."""


class Rest(int):
    """Remaining ban of a bucket, and the waits of one limit, in µs."""

    limit_used: int
    """Requests in use when the store was asked."""
    limit_wait_us: int | None
    """µs until the limit admits the charge; None for never."""
    limit_refill_us: int
    cost: int

    @classmethod
    def of(cls, left_us: int, limit_wait_us: int | None, limit_refill_us: int, limit_used: int, cost: int) -> Self:
        rest = cls(max(0, left_us))
        rest.limit_wait_us, rest.limit_refill_us, rest.limit_used, rest.cost = limit_wait_us, limit_refill_us, limit_used, cost
        return rest

    def later(self, elapsed_us: int) -> Self:
        wait_us = None if self.limit_wait_us is None else self.limit_wait_us - elapsed_us
        return self.of(self - elapsed_us, wait_us, self.limit_refill_us - elapsed_us, self.limit_used, self.cost)


def microseconds(seconds: float | None) -> int:
    """Convert seconds; None is a permanent ban. Raises `ValueError` for an invalid duration."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= FOR_EVER / 1e6):
        raise ValueError(f"seconds is {seconds!r:.40}, expected a number above 0, at most 100 years")
    return FOR_EVER if seconds is None else max(1, round(seconds * 1e6))


def check(limit: LimitNumbers) -> str | None:
    return None


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[int]:
    return [0] * len(bucket.ids)


def advance(states: Sequence[int], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[int]:
    elapsed_us = max(0, elapsed_us)
    return [left.later(elapsed_us) if isinstance(left, Rest) else max(0, left - elapsed_us) for left in states]


def rescaled(state: int, limit: LimitNumbers) -> int:
    return state


def try_charge(
    states: Sequence[int], bucket: BucketNumbers, cost: int, max_wait_us: int = 0, slot: int = 0, *, turn_us: int = 0
) -> Sequence[int] | None:
    return None if cost and any(states) else states


def apply_adjustment(
    states: Sequence[int], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
) -> Sequence[int]:
    return [
        min(left + us if way == MORE else max(left, us), MAX_OWED_US)
        for left, us, way in zip(states, back, grace_us, strict=True)
    ]


def refund_amount(
    states: Sequence[int], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
) -> tuple[Sequence[int], Sequence[int]]:
    return [0] * len(states), [0] * len(states)


def remaining(state: int, limit: LimitNumbers) -> int:
    return 0 if state else PLENTY


def used(state: int, limit: LimitNumbers) -> int:
    return state.limit_used if isinstance(state, Rest) else 0


def wait_us(state: int, cost: int, limit: LimitNumbers) -> int | None:
    if state > PERMANENT:
        return None
    if not isinstance(state, Rest):
        return state
    return None if state.limit_wait_us is None else max(int(state), state.limit_wait_us)


def refill_us(state: int, limit: LimitNumbers) -> int:
    return max(int(state), state.limit_refill_us) if isinstance(state, Rest) else state


def ttl_us(state: int, limit: LimitNumbers) -> int:
    return state


def refusal_is_stable(states: Sequence[int], bucket: BucketNumbers, cost: int) -> bool:
    return all(state.cost == cost for state in states if isinstance(state, Rest))


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
    return ()


def encode_adjustment(limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:
    return back, grace_us


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[int]:
    return facts
