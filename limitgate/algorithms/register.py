"""A register: keeps a number for everybody who shares a store, for as long as somebody asks about it.

The number may be large: a short text, see limitgate/limiter/stored_limits.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.algorithms.base import Load, never

BITS, PARTS = 48, 96
"""A number is told to the script, and by it, in so many parts of so many bits, the lowest first."""
MAX_BYTES = BITS * PARTS // 8

REPLY_FIELDS = PARTS
refusal_is_stable = never
LOAD = Load(15, 15, 15)
"""Measured: 17 µs to read one, 38 µs to set it, among 32 in a call."""

REPLACE, IF_EMPTY = 0, 1
"""How it is put right: in any case, or only if it is 0."""
_LIFETIME = 100 * 366 * 86_400 * 1_000_000
"""For how long it is kept, in µs."""


def later(number: int, elapsed_us: int) -> int:  # noqa: ARG001 - as of every number that is kept
    """Time changes nothing."""
    return number


def changed(number: int, by: int, how: int) -> int:
    """What is kept from now on."""
    return number if how == IF_EMPTY and number else by


def wait_us(number: int) -> int:  # noqa: ARG001 - see above
    """It refuses nothing."""
    return 0


def ttl_us(number: int) -> int:
    """For how long it is kept."""
    return _LIFETIME if number else 0


def encode_adjustment(by: int, how: int) -> Sequence[int]:
    """How to set it, and the number in parts."""
    return how, *[by >> (BITS * place) & (1 << BITS) - 1 for place in range(PARTS)]


def decode_state(facts: Sequence[int]) -> int:
    """The number that the script has reported in parts."""
    return sum([part << (BITS * place) for place, part in enumerate(facts)])
