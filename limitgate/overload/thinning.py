"""Thinning: refuses low and then normal priority evenly until higher priorities are served. Pure.

The level determines refusals: from 0 to 1 that share of low, from 1 to 2 all of low and the remainder of normal.
"""

from __future__ import annotations

from collections.abc import Mapping

from limitgate.limits.bucket import Priority
from limitgate.overload.shedding import PriorityLevel

GAIN = 0.1
"""Rise of the level per step, for each unit of refused share above the goal."""
GOAL = 0.05
"""Refused share of a priority that is tolerated before lower ones are thinned."""
WEIGHT = 0.2
"""Weight of a step in the moving averages of refused shares."""
QUIET_STEPS = 10
"""The load is over after this many steps without refusals other than thinning."""
FALLS = 0.05
"""Fall of the level per step after that."""


class _RefusedShare:
    """Moving average of the refused share of a priority, from its totals."""

    __slots__ = ("_admitted", "_level", "_refused", "value")

    def __init__(self, level: PriorityLevel) -> None:
        self.value = 0.0
        self._level = level
        self._admitted, self._refused = level.admitted, level.refused

    def step(self) -> bool:
        level = self._level
        refused = level.refused - self._refused
        came = level.admitted - self._admitted + refused
        self._admitted, self._refused = level.admitted, level.refused
        if came:
            self.value += WEIGHT * (refused / came - self.value)
        return bool(refused)


class Thinning:
    """The thinning level for some priorities."""

    __slots__ = ("_high", "_normal", "_quiet", "level")

    def __init__(self, levels: Mapping[Priority, PriorityLevel]) -> None:
        self.level = 0.0
        """From 0, all requests pass, to 2, only high priority passes."""
        self._high, self._normal = _RefusedShare(levels["high"]), _RefusedShare(levels["normal"])
        self._quiet = 0

    def step(self) -> None:
        """Take a step based on the requests since the last one."""
        has_refused = [share.step() for share in (self._high, self._normal)]
        self._quiet = 0 if any(has_refused) else self._quiet + 1
        step = GAIN * (self._high.value - GOAL)
        # Thinning of low also serves normal, thinning of normal serves only high.
        if self.level < 1:
            step = max(step, min(1 - self.level, GAIN * (self._normal.value - GOAL)))
        if self._quiet >= QUIET_STEPS:
            self._high.value = self._normal.value = 0.0
            step = -FALLS
        self.level = min(2.0, max(0.0, self.level + step))

    def kept(self, priority: Priority) -> float:
        """Return the share of a priority that passes."""
        if priority == "high":
            return 1.0
        return 1 - min(1.0, self.level if priority == "low" else max(0.0, self.level - 1))
