"""Dips: short reductions of the limit that reveal unloaded durations. Pure.

All processes dip at the same multiples of five seconds of the wall clock, so that they don't measure each other's queues.
"""

from __future__ import annotations

import math

EVERY_S = 5.0
SOON_S = 0.5
"""If a dip found much faster requests, the next one follows at the next multiple of this, up to 4 s after the mark."""
PRESSED_S = 1.0
"""Seconds of pressure before a dip."""
DEPTH = 0.7
"""Limit during a dip, as a share of the requests in flight without a queue."""
ON_TIME_S = 0.1
"""A dip that begins within this time after a 5 s mark is shared by all processes."""
LENGTH_S = 0.25
LENGTH_BASES = 5
"""A dip lasts at most `LENGTH_S` or this many times R0, whichever is longer."""
LEAST = 3
"""Requests needed to learn from a dip; with fewer, it lasts `GRACE_S` longer."""
GRACE_S = 0.5
ENOUGH = 10
"""Requests that end a dip, or twice its limit, whichever is more."""


class Schedule:
    """Start times of dips on the wall clock, which may step: each 5 s interval other than the last one is new."""

    __slots__ = ("_mark", "_soon_mark")

    def __init__(self) -> None:
        self._mark = self._soon_mark = -1

    def wait_s(self, wall: float, *, wants_dip: bool) -> float:
        """Return the seconds until the next dip, 0 if it is due."""
        mark, into = divmod(wall, EVERY_S)
        if mark != self._mark:
            return 0.0
        soon_mark, into_soon = divmod(wall, SOON_S)
        if wants_dip and into < EVERY_S - 2 * SOON_S:
            return 0.0 if soon_mark != self._soon_mark else SOON_S - into_soon
        return EVERY_S - into

    def begin(self, wall: float) -> bool:
        """Record the start of a dip. True if other processes dip too."""
        mark, into = divmod(wall, EVERY_S)
        is_first = mark != self._mark
        self._mark, self._soon_mark = int(mark), int(wall // SOON_S)
        return is_first and into < ON_TIME_S


class Dip:
    """A dip in progress."""

    __slots__ = ("_ends_at", "_enough", "clean_at", "count", "is_shared", "limit")

    def __init__(self, now: float, base_in_flight: float, base_s: float, limit: float, *, is_shared: bool) -> None:
        self.limit = max(1, round(DEPTH * min(base_in_flight, limit)))
        self.is_shared = is_shared
        """True if all processes dip, so that no process causes a queue."""
        self.clean_at = math.inf
        """When requests in flight fell to the limit of the dip; earlier requests may have queued."""
        self.count = 0
        self._ends_at = now + max(LENGTH_S, LENGTH_BASES * base_s)
        self._enough = max(ENOUGH, 2 * self.limit)

    def note_in_flight(self, in_flight: int, now: float) -> None:
        """Record the number of requests in flight."""
        if in_flight <= self.limit and self.clean_at == math.inf:
            self.clean_at = now

    def is_over(self, now: float) -> bool:
        """True if the dip has enough samples or lasts too long."""
        return self.count >= self._enough or (now > self._ends_at and self.count >= LEAST) or now > self._ends_at + GRACE_S
