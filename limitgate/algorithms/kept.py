"""Numbers that are kept like limits and count nothing: a ban, a register. As the rest of the code asks for algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load

PLENTY = 10**15
"""Requests that fit where nothing refuses: more than any limit has."""


class Number(Protocol):
    """What a kept number stands for; 0 is none."""

    REPLY_FIELDS: int
    LOAD: Load

    def later(self, number: int, elapsed_us: int) -> int:
        """The number some time later."""

    def changed(self, number: int, by: int, how: int) -> int:
        """The number after it is put right."""

    def refusal_is_stable(self, states: Sequence[int], bucket: BucketNumbers, cost: int) -> bool:
        """As in `base.Algorithm`."""

    def wait_us(self, number: int) -> int:
        """For how long it refuses, in µs."""

    def ttl_us(self, number: int) -> int:
        """For how long it is kept, in µs."""

    def encode_adjustment(self, by: int, how: int) -> Sequence[int]:
        """What the script is told about putting it right."""

    def decode_state(self, facts: Sequence[int]) -> int:
        """The number that the script has reported."""


class Kept:
    """A number, as an `Algorithm`. No request changes it, and nobody can write a limit of it."""

    CAN_WAIT = False
    IS_LIMIT = False
    RESCALES = False

    def __init__(self, kind: Number) -> None:
        self._kind = kind
        self.REPLY_FIELDS = kind.REPLY_FIELDS
        self.refusal_is_stable = kind.refusal_is_stable

    def check(self, limit: LimitNumbers) -> str | None:  # noqa: D102 - as in `base.Algorithm`, like all here
        return None

    def load(self, limit: LimitNumbers) -> Load:  # noqa: D102
        return self._kind.LOAD

    def initial(self, now: int, bucket: BucketNumbers) -> Sequence[int]:  # noqa: D102
        return [0] * len(bucket.ids)

    def advance(  # noqa: D102
        self, states: Sequence[int], elapsed_us: int, bucket: BucketNumbers, now: int | None = None
    ) -> Sequence[int]:
        return [self._kind.later(number, max(0, elapsed_us)) for number in states]

    def rescaled(self, state: int, limit: LimitNumbers) -> int:  # noqa: D102
        return state

    def try_charge(  # noqa: D102
        self, states: Sequence[int], bucket: BucketNumbers, cost: int, max_wait_us: int = 0, slot: int = 0
    ) -> Sequence[int] | None:
        return None if cost and any(map(self._kind.wait_us, states)) else states

    def apply_adjustment(  # noqa: D102
        self, states: Sequence[int], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[int]:
        return [self._kind.changed(number, by, how) for number, by, how in zip(states, back, grace_us)]

    def refund_amount(  # noqa: D102
        self, states: Sequence[int], bucket: BucketNumbers, cost: int, due: int, slot: int = 0
    ) -> tuple[Sequence[int], Sequence[int]]:
        return [0] * len(states), [0] * len(states)

    def remaining(self, state: int, limit: LimitNumbers) -> int:  # noqa: D102
        return 0 if self._kind.wait_us(state) else PLENTY

    def used(self, state: int, limit: LimitNumbers) -> int:  # noqa: D102
        return 0

    def wait_us(self, state: int, cost: int, limit: LimitNumbers) -> int:  # noqa: D102
        return self._kind.wait_us(state)

    def ttl_us(self, state: int, limit: LimitNumbers) -> int:  # noqa: D102
        return self._kind.ttl_us(state)

    refill_us = ttl_us

    def date(self, limit: LimitNumbers) -> int:  # noqa: D102
        return 0

    def encode_charge(self, limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:  # noqa: D102
        return ()

    def encode_adjustment(self, limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:  # noqa: D102
        return self._kind.encode_adjustment(back, grace_us)

    def decode_state(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[int]:  # noqa: D102
        return [self._kind.decode_state(facts)]
