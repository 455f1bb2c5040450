"""Shedding: who is refused, by priority; and after how many seconds those who are may come back. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from limitgate.limits.priority import RESERVES, Priority

Refusal = Literal["limit", "lag", "thinned"]
"""Why a request is refused: there is no room for its priority, the event loop is late, or it gives way to a higher priority."""

LATELY_S = 1.0
"""Seconds that count as lately."""
SPREAD_S = 10
"""Seconds over which those come back who were refused, if everybody was."""


class PriorityLevel:
    """A priority: the room that it has, and what has become of its requests. Counts only grow."""

    __slots__ = ("_credit", "admitted", "budget", "free", "kept", "lag", "limit", "priority", "room", "share", "thinned")

    def __init__(self, priority: Priority) -> None:
        self.priority: Priority = priority
        self.share = Fraction(1)
        """Share of the limit that it may use."""
        self.budget = 1.0
        """The same of an iteration of a hot loop."""
        self.room = 1
        """Requests in flight, of whatever priority, up to which it gets a place."""
        self.free = 0
        """The same, for requests of which nothing else has to be asked."""
        self.kept = 1.0
        """Share of its requests that are not thinned."""
        self.admitted = 0
        self.limit = 0
        """Requests refused for want of room, those that have waited for it in vain included."""
        self.lag = 0
        """Requests refused because the event loop is late."""
        self.thinned = 0
        """Requests refused in favour of those of higher priority."""
        self._credit = 0.5

    @property
    def refused(self) -> int:
        """Requests refused, but for those that were thinned."""
        return self.limit + self.lag

    @property
    def shed(self) -> int:
        """Requests refused, for whatever reason."""
        return self.limit + self.lag + self.thinned

    def keep(self, reserve: Fraction | None) -> None:
        """Leave ``reserve`` to high priority, and twice of it to high and normal."""
        self.share = 1 - RESERVES[self.priority] * (reserve or Fraction())
        self.budget = float(self.share)

    def make_room(self, limit: int) -> None:
        """Have the share of a limit, of which one request is always left."""
        self.room = max(1, int(limit * self.share))

    def passes_thinning(self) -> bool:
        """True for the share of requests that is kept, evenly spread."""
        credit = self._credit + self.kept
        passes = credit >= 1
        self._credit = credit - passes
        return passes


class RecentShare:
    """Share of requests that were refused lately, by totals that are heard from time to time."""

    __slots__ = ("_totals",)

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, came: int, shed: int) -> None:
        """Note how many have come and how many of them were refused, since ever."""
        totals = self._totals
        if totals and now - totals[-1][0] > LATELY_S:
            totals.clear()
        while len(totals) > 1 and now - totals[1][0] >= LATELY_S:
            totals.popleft()
        totals.append((now, came, shed))

    def of(self, came: int, shed: int) -> float:
        """The share, from 0 to 1, given the totals of now."""
        _, came_before, shed_before = self._totals[0] if self._totals else (0.0, 0, 0)
        return (shed - shed_before) / (came - came_before) if came > came_before else 0.0


def retry_after_s(share: float, random: Callable[[], float]) -> int:
    """Whole seconds after which to come back, spread so that a crowd does not come back at once.

    ``share`` is that of the requests refused lately, ``random`` gives numbers from 0 up to 1.
    """
    return 1 + int(random() * (round(SPREAD_S * share) + 1))
