"""A register: keeps a number for everybody who shares a store, for as long as somebody asks about it. Nothing is counted.

A state is the number. It may be large: a short text, see limitgate/configured.py. It is put right to be set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limitgate.limits import Limit
    from limitgate.plan import Charge

BITS, PARTS = 48, 96
"""A number is told to the script, and by it, in so many parts of so many bits, the lowest first."""
MAX_BYTES = BITS * PARTS // 8

FACTS = PARTS
BOOKS = False
HOLDS = False
SILENT = True

REPLACE, IF_EMPTY = 0, 1
"""How `put_right` sets it: in any case, or only if it is 0."""
_LIFETIME = 100 * 366 * 86_400 * 1_000_000
"""For how long it is kept, in µs."""

State = int


def check(limit: Limit) -> str | None:  # noqa: ARG001 - as every algorithm's
    """Nobody can write such a limit."""
    return None


def fresh(now: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """Nothing is kept."""
    return 0


def opened(state: State, elapsed_us: int, now: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """Time changes nothing."""
    return state


def drained(state: State, elapsed_us: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """Time changes nothing."""
    return state


def charged(state: State, charge: Charge) -> State:  # noqa: ARG001 - see above
    """No request changes it."""
    return state


def put_right(state: State, back: int, elapsed_us: int, how: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """What is kept from now on."""
    return state if how == IF_EMPTY and state else back


def grace_us(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Nothing was taken, so nothing is put back."""
    return REPLACE


def remaining(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """It refuses nothing."""
    return limit.burst


def used(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Nothing is counted."""
    return 0


def wait_us(state: State, cost: int, limit: Limit) -> int:  # noqa: ARG001 - see above
    """It refuses nothing."""
    return 0


def refill_us(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """For how long it is kept."""
    return _LIFETIME if state else 0


def date(limit: Limit) -> int:  # noqa: ARG001 - see above
    """No date matters."""
    return 0


def asked(limit: Limit, cost: int, ahead_us: int, date: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """Nothing."""
    return ()


def leased(limit: Limit, back: int, how: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """How to set it, and the number in parts."""
    return how, *[back >> (BITS * place) & (1 << BITS) - 1 for place in range(PARTS)]


def seen(facts: Sequence[int]) -> State:
    """The number that the script has reported in parts."""
    return sum([part << (BITS * place) for place, part in enumerate(facts)])
