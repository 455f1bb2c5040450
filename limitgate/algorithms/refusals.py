"""Counts the refusals of a bucket, and bans it after too many; see `limitgate.rules.options`.

Plans can only adjust this bucket. Refusals by a ban don't count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load
from limitgate.algorithms.no_limit import *  # noqa: F403 - what isn't below

REPLY_FIELDS = 1

TIMES = 100
"""Maximum of distinct times per period. Beyond it, refusals close to each other are merged."""
LOAD = Load(2, 1, 60)


class Amount(NamedTuple):
    """Number of refusals, and the resulting ban in µs."""

    refusals: int
    after: int
    within_us: int
    first_us: int
    growing: float
    most_us: int
    refusing: Any


class State(NamedTuple):
    """Durations are in µs."""

    last_us: int = 0
    """Length of the last ban; 0 for none."""
    kept_us: int = 0
    """Time until `last_us` is forgotten."""
    times: tuple[tuple[int, int], ...] = ()
    """Remaining time and count of refusals, the latest last."""
    began_us: int = 0
    """Length of the ban that the last adjustment started; 0 for none."""

    def later(self, elapsed_us: int) -> State:
        kept_us = max(0, self.kept_us - elapsed_us)
        times = tuple([(left - elapsed_us, number) for left, number in self.times if left > elapsed_us])
        return State(self.last_us if kept_us else 0, kept_us, times)

    def counting(self, amount: Amount) -> State:
        times = [*self.times]
        left_us, number = times[-1] if times else (0, 0)
        if times and amount.within_us - left_us < amount.within_us / TIMES:
            times[-1] = left_us, number + amount.refusals
        else:
            times.append((amount.within_us, amount.refusals))
        if sum([number for _, number in times]) < amount.after:
            return State(self.last_us, self.kept_us, tuple(times))
        us = min(amount.most_us, max(amount.first_us, int(self.last_us * amount.growing)))
        return State(us, us + amount.most_us, (), us) if amount.growing > 1 else State(began_us=us)


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:
    return [State()]


def apply_adjustment(
    states: Sequence[State], back: Sequence[Amount], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
) -> Sequence[State]:
    return [state.counting(amount) for state, amount in zip(states, back, strict=True)]


def used(state: State, limit: LimitNumbers) -> int:
    return sum([number for _, number in state.times])


def ttl_us(state: State, limit: LimitNumbers) -> int:
    return max(state.kept_us, state.times[-1][0] if state.times else 0)


refill_us = ttl_us


def encode_charge(limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
    return ()


def encode_adjustment(limit: LimitNumbers, back: Amount, grace_us: int) -> Sequence[float]:
    return back[:6]


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    return [State(began_us=facts[0])]
