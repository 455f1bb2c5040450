"""A ban: a key is refused for some time, whatever its limits say. The number that is kept is for how long it lasts, in µs."""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.algorithms.base import Load, always
from limitgate.algorithms.gcra import MAX_OWED_US

REPLY_FIELDS = 1
refusal_is_stable = always
LOAD = Load(2, 1, 1)
"""Measured: 4 µs to ask about one, 8 µs to set it, among 32 in a call."""

FOR_EVER = 100 * 366 * 86_400 * 1_000_000
"""Microseconds of a ban that has no end."""
MORE, AT_LEAST = 0, 1
"""How it is put right: made longer, or seen to that it lasts at least so long. It is cleared to be lifted."""


def later(number: int, elapsed_us: int) -> int:
    """What is left some time later."""
    return max(0, number - elapsed_us)


def changed(number: int, by: int, how: int) -> int:
    """The ban after so many microseconds are added to it, or made of it."""
    return min(number + by if how == MORE else max(number, by), MAX_OWED_US)


def wait_us(number: int) -> int:
    """Microseconds until it is over."""
    return number


def ttl_us(number: int) -> int:
    """Microseconds until it is over."""
    return number


def encode_adjustment(by: int, how: int) -> Sequence[int]:
    """Microseconds, and what to do with them."""
    return by, how


def decode_state(facts: Sequence[int]) -> int:
    """What the script has reported."""
    return facts[0]
