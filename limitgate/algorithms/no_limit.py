"""Functions shared by `line`, `refusals` and `holds`, which don't limit requests.

States have a method ``later``.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, State, Straight, never

CAN_WAIT = False
MAX_TURNS = 0
STRAIGHT: Straight | None = None
IS_LIMIT = False
RESCALES = False
left_after = None
refusal_is_stable = never


def check(limit: LimitNumbers) -> str | None:
    return None


def advance(states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[State]:
    return [state.later(max(0, elapsed_us)) for state in states]


def rescaled(state: State, limit: LimitNumbers) -> State:
    return state


def try_charge(
    states: Sequence[State], bucket: BucketNumbers, cost: int, max_wait_us: int = 0, slot: int = 0, *, turn_us: int = 0
) -> Sequence[State] | None:
    return states


def refund_amount(
    states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
) -> tuple[Sequence[int], Sequence[int]]:
    return [0] * len(states), [0] * len(states)


def remaining(state: State, limit: LimitNumbers) -> int:
    return 0


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int:
    return 0


def date(limit: LimitNumbers) -> int:
    return 0
