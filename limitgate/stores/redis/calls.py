"""Which plans share a call to Redis. Pure, and without its client, as the gate gives places in flight back by this, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limitgate.limits.plan import Plan
from limitgate.limits.template import AnyPlan

MAX_BATCH = 64
"""Plans that share a call: with a bucket each, the script, and so everybody else's call, takes well under a millisecond."""
MAX_LOAD = 2_000
"""Microseconds that the plans of a call may cost Redis at most, by their `Bucket.load`; a plan that costs more goes alone."""


class Room:
    """Room in a call: for one plan, and for others up to `MAX_BATCH` that cost Redis `MAX_LOAD` together."""

    __slots__ = ("_keys", "_left", "_plans")

    def __init__(self) -> None:
        self._plans = MAX_BATCH
        self._left: float = MAX_LOAD
        self._keys: set[str] = set()
        """Buckets that are opened anyway."""

    def takes(self, plan: AnyPlan) -> bool:
        """True if there is room for a plan, which has it from now on. Once there is none it is not to be asked again."""
        keys, left = self._keys, self._left
        if not isinstance(plan, Plan):
            left -= plan.template.load  # hardly ever of the same buckets
        else:
            for charge in plan.charges:
                opening, each, correction = charge.bucket.load
                left -= each if charge.adjustment is None else each + correction
                if charge.key not in keys:
                    keys.add(charge.key)
                    left -= opening
        if self._plans < MAX_BATCH and (left < 0 or not self._plans):
            return False
        self._left = left
        self._plans -= 1
        return True


def calls_of(plans: Iterable[Plan]) -> Iterator[list[Plan]]:
    """Plans, in their order, as those that share a call each."""
    room, together = Room(), list[Plan]()
    for plan in plans:
        if not room.takes(plan):
            yield together
            room, together = Room(), []
            room.takes(plan)
        together.append(plan)
    if together:
        yield together
