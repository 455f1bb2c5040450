"""Load shedding by priority, and the Retry-After of refused requests. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from limitgate.limits.bucket import RESERVES, Priority

Refusal = Literal["limit", "lag", "thinned"]
"""Reason of a refusal: no room for its priority, a late event loop, or preference for a higher priority."""

LATELY_S = 1.0
"""Length of the recent period in seconds."""
SPREAD_S = 10
"""Seconds over which retries are spread if all requests are refused."""


class PriorityLevel:
    """A priority: its share of the limit, and counts of its requests, which only increase."""

    __slots__ = ("_credit", "admitted", "budget", "free", "kept", "lag", "limit", "priority", "room", "share", "thinned")

    def __init__(self, priority: Priority) -> None:
        self.priority: Priority = priority
        self.share = Fraction(1)
        """Share of the limit that it may use."""
        self.budget = 1.0
        """Share of an iteration of a hot loop."""
        self.room = 1
        """Maximum total of requests in flight that still admits this priority."""
        self.free = 0
        """The same on the fast path."""
        self.kept = 1.0
        """Share of its requests that pass thinning."""
        self.admitted = 0
        self.limit = 0
        """Requests refused for lack of room, immediately or after waiting."""
        self.lag = 0
        self.thinned = 0
        self._credit = 0.5

    @property
    def refused(self) -> int:
        """Refused requests, without thinned ones."""
        return self.limit + self.lag

    @property
    def shed(self) -> int:
        """All refused requests."""
        return self.limit + self.lag + self.thinned

    def keep(self, reserve: Fraction | None) -> None:
        """Reserve ``reserve`` for high priority, and twice that for high and normal."""
        self.share = 1 - RESERVES[self.priority] * (reserve or Fraction())
        self.budget = float(self.share)

    def make_room(self, limit: int) -> None:
        """Apply the share to a limit, leaving at least one request."""
        self.room = max(1, int(limit * self.share))

    def passes_thinning(self) -> bool:
        """Return True for the share of requests that passes, evenly spaced."""
        credit = self._credit + self.kept
        passes = credit >= 1
        self._credit = credit - passes
        return passes


class RecentShare:
    """Share of recently refused requests, from occasional totals."""

    __slots__ = ("_totals",)

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, came: int, shed: int) -> None:
        """Record the total numbers of requests and refusals."""
        totals = self._totals
        if totals and now - totals[-1][0] > LATELY_S:
            totals.clear()
        while len(totals) > 1 and now - totals[1][0] >= LATELY_S:
            totals.popleft()
        totals.append((now, came, shed))

    def of(self, came: int, shed: int) -> float:
        """Return the share, from 0 to 1, for the current totals."""
        _, came_before, shed_before = self._totals[0] if self._totals else (0.0, 0, 0)
        return (shed - shed_before) / (came - came_before) if came > came_before else 0.0


def retry_after_s(share: float, random: Callable[[], float]) -> int:
    """Return randomized whole seconds until a retry for a share of recent refusals; ``random`` returns [0, 1)."""
    return 1 + int(random() * (round(SPREAD_S * share) + 1))
