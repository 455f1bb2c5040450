"""Dips: moments in which the limit is held so low that nothing queues, and requests show the time that they take. Pure.

All processes dip at the same multiples of five seconds of the wall clock. If they took turns, those that share a bottleneck
would measure each other's queues.
"""

from __future__ import annotations

import math

EVERY_S = 5.0
SOON_S = 0.5
"""Where the last dip found requests much faster, the next one is at the next multiple of this, until 4 s after the mark."""
PRESSED_S = 1.0
"""Seconds of pressure before a dip."""
DEPTH = 0.7
"""The limit of a dip, as a share of what is in flight without a queue."""
ON_TIME_S = 0.1
"""A dip that begins within so many seconds after a mark of 5 s is one of all processes."""
LENGTH_S = 0.25
LENGTH_BASES = 5
"""A dip lasts at most `LENGTH_S` or so many times R0, whichever is longer."""
LEAST = 3
"""Requests from which a dip learns; where fewer have ended, it lasts for `GRACE_S` longer."""
GRACE_S = 0.5
ENOUGH = 10
"""Requests after which a dip is over at once, or twice its limit, whichever is more."""


class Schedule:
    """When dips begin. Times are those of the wall clock, which may step: any other five seconds are new ones."""

    __slots__ = ("_mark", "_soon_mark")

    def __init__(self) -> None:
        self._mark = self._soon_mark = -1

    def wait_s(self, wall: float, *, wants_dip: bool) -> float:
        """Seconds until the next dip, 0 if it is due."""
        mark, into = divmod(wall, EVERY_S)
        if mark != self._mark:
            return 0.0
        soon_mark, into_soon = divmod(wall, SOON_S)
        if wants_dip and into < EVERY_S - 2 * SOON_S:
            return 0.0 if soon_mark != self._soon_mark else SOON_S - into_soon
        return EVERY_S - into

    def begin(self, wall: float) -> bool:
        """Note that a dip begins. True if other processes begin one now, too."""
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
        """True if all processes dip now, so that what is measured is nobody's queue."""
        self.clean_at = math.inf
        """When in flight had fallen to the limit of the dip: requests that began earlier may have queued."""
        self.count = 0
        """Requests since then that have ended."""
        self._ends_at = now + max(LENGTH_S, LENGTH_BASES * base_s)
        self._enough = max(ENOUGH, 2 * self.limit)

    def note_in_flight(self, in_flight: int, now: float) -> None:
        """Note how many requests are in flight now."""
        if in_flight <= self.limit and self.clean_at == math.inf:
            self.clean_at = now

    def is_over(self, now: float) -> bool:
        """True if it has shown enough, or lasts too long."""
        return self.count >= self._enough or (now > self._ends_at and self.count >= LEAST) or now > self._ends_at + GRACE_S
