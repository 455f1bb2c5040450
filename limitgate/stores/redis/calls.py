"""Decides which plans share a call to Redis, without importing the Redis client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limitgate.limits.plan import Plan
from limitgate.limits.template import AnyPlan

MAX_BATCH = 64
"""Maximum plans per call, which take well under a millisecond."""
MAX_LOAD = 2_000
"""Maximum estimated microseconds of a call, by `Bucket.load`, except for a single plan."""


class Room:
    """Remaining room in a call, always enough for one plan."""

    __slots__ = ("_keys", "_left", "_plans")

    def __init__(self) -> None:
        self._plans = MAX_BATCH
        self._left: float = MAX_LOAD
        self._keys: set[str] = set()

    def takes(self, plan: AnyPlan) -> bool:
        """Add a plan if there is room. Do not call again after False."""
        keys, left = self._keys, self._left
        if not isinstance(plan, Plan):
            left -= plan.template.load  # Plain plans rarely share buckets.
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
    """Group plans into calls, in order."""
    room, together = Room(), list[Plan]()
    for plan in plans:
        if not room.takes(plan):
            yield together
            room, together = Room(), []
            room.takes(plan)
        together.append(plan)
    if together:
        yield together
