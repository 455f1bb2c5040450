"""Thinning: requests of low priority, and then of normal, are refused evenly until those above them are served. Pure.

A reserve alone does little on an event loop, where the order of arrival decides who is there in time. The level says what is
refused: from 0 to 1 that share of low, from 1 to 2 all of low and the rest of normal. High is never thinned.
"""

from __future__ import annotations

from collections.abc import Mapping

from limitgate.limits.priority import Priority
from limitgate.overload.shedding import PriorityLevel

GAIN = 0.1
"""How much the level rises in a step, for each share of requests that is refused above the goal."""
GOAL = 0.05
"""Share of requests of a priority that may be refused before those below it are thinned."""
WEIGHT = 0.2
"""Weight of a step in the moving averages of refused shares."""
QUIET_STEPS = 10
"""Steps in which nobody was refused but by thinning, after which the load is over."""
FALLS = 0.05
"""How much the level falls in a step then."""


class _RefusedShare:
    """Share of the requests of a priority that were refused, a moving average, from its totals."""

    __slots__ = ("_admitted", "_level", "_refused", "value")

    def __init__(self, level: PriorityLevel) -> None:
        self.value = 0.0
        self._level = level
        self._admitted, self._refused = level.admitted, level.refused

    def step(self) -> bool:
        """Take a step. True if any were refused."""
        level = self._level
        refused = level.refused - self._refused
        came = level.admitted - self._admitted + refused
        self._admitted, self._refused = level.admitted, level.refused
        if came:
            self.value += WEIGHT * (refused / came - self.value)
        return bool(refused)


class Thinning:
    """What is thinned so that the higher of some priorities are served."""

    __slots__ = ("_high", "_normal", "_quiet", "level")

    def __init__(self, levels: Mapping[Priority, PriorityLevel]) -> None:
        self.level = 0.0
        """From 0, where all requests pass, to 2, where only those of high priority do."""
        self._high, self._normal = _RefusedShare(levels["high"]), _RefusedShare(levels["normal"])
        self._quiet = 0

    def step(self) -> None:
        """Take a step by what has become of requests since the last."""
        has_refused = [share.step() for share in (self._high, self._normal)]
        self._quiet = 0 if any(has_refused) else self._quiet + 1
        step = GAIN * (self._high.value - GOAL)
        if self.level < 1:  # low goes so that normal is served, normal only so that high is
            step = max(step, min(1 - self.level, GAIN * (self._normal.value - GOAL)))
        if self._quiet >= QUIET_STEPS:
            self._high.value = self._normal.value = 0.0
            step = -FALLS
        self.level = min(2.0, max(0.0, self.level + step))

    def kept(self, priority: Priority) -> float:
        """Share of the requests of a priority that are not thinned."""
        if priority == "high":
            return 1.0
        return 1 - min(1.0, self.level if priority == "low" else max(0.0, self.level - 1))
