"""A ban: a key is refused for some time, whatever its limits say. A state is the time left, in µs; 0 is no ban.

No request changes a ban, and no limit can be written with it: it is in a bucket alone, beside those of the key's limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight, always
from limitgate.algorithms.gcra import MAX_OWED_US

REPLY_FIELDS = 1
CAN_WAIT = False
MAX_TURNS = 0
refusal_is_stable = always
left_after = None
STRAIGHT: Straight | None = None
IS_LIMIT = False
RESCALES = False

FOR_EVER = 100 * 366 * 86_400 * 1_000_000
"""Microseconds of a ban that has no end."""
PERMANENT = FOR_EVER // 2
"""Remaining microseconds above which a ban counts as permanent. A permanent ban begins with `FOR_EVER`, and time passes."""
MORE, AT_LEAST = 0, 1
"""Ways of an adjustment: make the ban longer, or have it last at least so long. A reset lifts it."""
PLENTY = 10**15
"""Requests that fit while there is no ban: more than any limit has."""
LOAD = Load(2, 1, 1)
"""Measured: 4 µs to read one, 8 µs to set it, among 32 in a call."""


def microseconds(seconds: float | None) -> int:
    """Microseconds of a ban, of one for ever if None. Raises `ValueError` for what is no time."""
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds <= FOR_EVER / 1e6):
        raise ValueError(f"seconds is {seconds!r:.40}, expected a number above 0, at most 100 years")
    return FOR_EVER if seconds is None else max(1, round(seconds * 1e6))


def check(limit: LimitNumbers) -> str | None:  # noqa: ARG001, D103 - these are as in `base.Algorithm`
    return None


def load(limit: LimitNumbers) -> Load:  # noqa: ARG001, D103
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[int]:  # noqa: ARG001, D103
    return [0] * len(bucket.ids)


def advance(states: Sequence[int], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[int]:  # noqa: ARG001, D103
    return [max(0, left - max(0, elapsed_us)) for left in states]


def rescaled(state: int, limit: LimitNumbers) -> int:  # noqa: ARG001, D103
    return state


def try_charge(  # noqa: D103
    states: Sequence[int],
    bucket: BucketNumbers,  # noqa: ARG001
    cost: int,
    max_wait_us: int = 0,  # noqa: ARG001
    slot: int = 0,  # noqa: ARG001
    *,
    turn_us: int = 0,  # noqa: ARG001
) -> Sequence[int] | None:
    return None if cost and any(states) else states


def apply_adjustment(  # noqa: D103
    states: Sequence[int],
    back: Sequence[int],
    elapsed_us: int,  # noqa: ARG001
    grace_us: Sequence[int],
    bucket: BucketNumbers,  # noqa: ARG001
) -> Sequence[int]:
    return [
        min(left + us if way == MORE else max(left, us), MAX_OWED_US)
        for left, us, way in zip(states, back, grace_us, strict=True)
    ]


def refund_amount(  # noqa: D103
    states: Sequence[int],
    bucket: BucketNumbers,  # noqa: ARG001
    cost: int,  # noqa: ARG001
    due: int,  # noqa: ARG001
    slot: int = 0,  # noqa: ARG001
    *,
    turn_us: int = 0,  # noqa: ARG001
) -> tuple[Sequence[int], Sequence[int]]:
    return [0] * len(states), [0] * len(states)


def remaining(state: int, limit: LimitNumbers) -> int:  # noqa: ARG001, D103
    return 0 if state else PLENTY


def used(state: int, limit: LimitNumbers) -> int:  # noqa: ARG001, D103
    return 0


def wait_us(state: int, cost: int, limit: LimitNumbers) -> int | None:  # noqa: ARG001
    """The rest of the ban; None if it is permanent."""
    return None if state > PERMANENT else state


def ttl_us(state: int, limit: LimitNumbers) -> int:  # noqa: ARG001, D103
    return state


refill_us = ttl_us


def date(limit: LimitNumbers) -> int:  # noqa: ARG001, D103
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:  # noqa: ARG001, D103
    return ()


def encode_adjustment(limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:  # noqa: ARG001
    """Microseconds, and the way to apply them."""
    return back, grace_us


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[int]:  # noqa: ARG001, D103
    return facts
