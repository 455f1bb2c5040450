"""A ban: a key is refused for some time, whatever its limits say. Nothing is counted, and where there is none nothing is said.

A state is for how long the ban lasts, in µs. It is put right to be longer, and cleared to be lifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from limitgate.algorithms.gcra import MAX_OWED_US

if TYPE_CHECKING:
    from limitgate.limits import Limit
    from limitgate.plan import Charge

FACTS = 1
BOOKS = False
HOLDS = True
SILENT = True

FOR_EVER = 100 * 366 * 86_400 * 1_000_000
"""Microseconds of a ban that has no end."""
PLENTY = 10**15
"""Requests that fit where there is no ban: more than any limit has."""
MORE, AT_LEAST = 0, 1
"""What `put_right` does: makes a ban longer, or sees to it that it lasts at least so long."""

State = int


def check(limit: Limit) -> str | None:  # noqa: ARG001 - as every algorithm's
    """Nobody can write such a limit."""
    return None


def fresh(now: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """No ban."""
    return 0


def opened(state: State, elapsed_us: int, now: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """What is left some time later."""
    return max(0, state - elapsed_us)


def drained(state: State, elapsed_us: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """What is left some time later."""
    return max(0, state - elapsed_us)


def charged(state: State, charge: Charge) -> State:  # noqa: ARG001 - see above
    """No request changes it."""
    return state


def put_right(state: State, back: int, elapsed_us: int, how: int, limit: Limit) -> State:  # noqa: ARG001 - see above
    """The ban after so many microseconds are added to it, or made of it."""
    return min(state + back if how == MORE else max(state, back), MAX_OWED_US)


def grace_us(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Nothing was taken, so nothing is put back."""
    return MORE


def remaining(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Requests that fit: as many as the limits say, or none."""
    return 0 if state else PLENTY


def used(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Nothing is counted."""
    return 0


def wait_us(state: State, cost: int, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Microseconds until it is over."""
    return state


def refill_us(state: State, limit: Limit) -> int:  # noqa: ARG001 - see above
    """Microseconds until it is over."""
    return state


def date(limit: Limit) -> int:  # noqa: ARG001 - see above
    """No date matters."""
    return 0


def asked(limit: Limit, cost: int, ahead_us: int, date: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """Nothing."""
    return ()


def seen(facts: Sequence[int]) -> State:
    """The state that the script has reported."""
    return facts[0]
