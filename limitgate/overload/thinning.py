"""Thinning: requests of low priority, and then of normal, are refused evenly until those above them are served. Pure.

A reserve alone does little on an event loop, where the order of arrival decides who is there in time. The level says what is
refused: from 0 to 1 that share of low, from 1 to 2 all of low and the rest of normal. High is never thinned.
"""

from __future__ import annotations

from collections.abc import Mapping

from limitgate.limits.priority import Priority

EVERY_S = 0.1
"""Seconds between two steps."""
GAIN = 0.1
GOAL = 0.05
"""Share of requests of a priority that may be refused before those below it are thinned."""
WEIGHT = 0.2
"""Weight of a step in the moving averages of refused shares."""
FALLS = 0.05
"""How much the level falls at most in a step."""


QUIET_STEPS = 10
"""Steps without a request of a priority after which none of it counts as refused."""


class _Refused:
    """Share of the requests of a priority that were refused, a moving average."""

    __slots__ = ("_admitted", "_quiet", "_refused", "share")

    def __init__(self) -> None:
        self.share = 0.0
        self._admitted = self._refused = self._quiet = 0

    def step(self, admitted: int, refused: int) -> None:
        new, new_refused = admitted - self._admitted + refused - self._refused, refused - self._refused
        self._admitted, self._refused = admitted, refused
        self._quiet = 0 if new else self._quiet + 1
        if new or self._quiet >= QUIET_STEPS:
            self.share += WEIGHT * (new_refused / max(1, new) - self.share)


class Thinning:
    """The level, and the shares that are refused of those it protects."""

    __slots__ = ("_high", "_normal", "level")

    def __init__(self) -> None:
        self.level = 0.0
        self._high, self._normal = _Refused(), _Refused()

    def step(self, totals: Mapping[Priority, tuple[int, int]]) -> None:
        """Take a step: requests of each priority that were admitted and that were refused, but not thinned, since ever."""
        self._high.step(*totals["high"])
        self._normal.step(*totals["normal"])
        step = GAIN * (self._high.share - GOAL)
        if self.level < 1:  # low goes so that normal is served, normal only so that high is
            step = max(step, min(1 - self.level, GAIN * (self._normal.share - GOAL)))
        self.level = min(2.0, max(0.0, self.level + max(step, -FALLS)))

    def kept(self, priority: Priority) -> float:
        """Share of the requests of a priority that are not thinned."""
        if priority == "high":
            return 1.0
        return 1 - min(1.0, self.level if priority == "low" else max(0.0, self.level - 1))
