"""A queue for permits with CoDel's rule of a standing queue (RFC 8289). Pure.

A queue that is sometimes empty is first come, first served. A standing queue only adds latency, so it serves the newest request
first, and refuses requests after a short wait (Facebook, "Fail at Scale").
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from limitgate.limits.bucket import RESERVES, Priority

W = TypeVar("W", bound=Hashable)

INTERVAL_S = 0.100
"""A queue is standing after this many seconds without being empty."""
INTERVAL_PLACES = 10
"""Released permits in that time, if that takes longer."""
MOMENT_S = 0.005
"""Maximum wait in a standing queue, in seconds."""
MOMENT_PLACES = 2
"""Released permits in that time, if that takes longer."""
MOST = 1000
"""Maximum number of waiters; more would take memory and time out."""


class WaitingLine(Generic[W]):
    """A queue that contains each waiter at most once."""

    def __init__(self, max_delay: float) -> None:
        self.max_delay = max_delay
        self.place_s = math.inf
        """Mean seconds per released permit; infinite if unknown, when no queue is standing."""
        self._waiting: dict[Priority, OrderedDict[W, float]] = {priority: OrderedDict() for priority in RESERVES}
        self._since = math.inf

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_before(self, priority: Priority) -> bool:
        """Return True if a request of this or a higher priority waits."""
        return any(line for each, line in self._waiting.items() if RESERVES[each] <= RESERVES[priority])

    def join(self, now: float, waiter: W, priority: Priority) -> W | None:
        """Add a waiter. If the queue is full, return the displaced one: the oldest of the lowest priority."""
        if not self:
            self._since = now
        self._waiting[priority][waiter] = now
        if len(self) <= MOST:
            return None
        lowest = next(line for line in reversed(self._waiting.values()) if line)
        return lowest.popitem(last=False)[0]

    def leave(self, waiter: W, priority: Priority) -> None:
        """Remove a waiter, if present."""
        self._waiting[priority].pop(waiter, None)

    def call(self, now: float, priority: Priority) -> W | None:
        """Remove and return the next waiter of a priority, or None."""
        line = self._waiting[priority]
        return line.popitem(last=self._stands(now))[0] if line else None

    def overdue(self, now: float) -> list[W]:
        """Remove and return the waiters that waited too long."""
        patience_s, gone = self._patience_s(now), []
        for line in self._waiting.values():
            while line and next(iter(line.values())) + patience_s <= now:
                gone.append(line.popitem(last=False)[0])
        return gone

    def due_at(self, now: float) -> float:
        """Return the time when the next waiter will have waited too long, infinite if none waits."""
        oldest = min((next(iter(line.values())) for line in self._waiting.values() if line), default=math.inf)
        soonest = oldest + self._patience_s(now)
        return soonest if self._stands(now) or not self else min(soonest, max(self._stands_at, oldest + self._moment_s))

    @property
    def _stands_at(self) -> float:
        return self._since + max(INTERVAL_S, INTERVAL_PLACES * self.place_s)

    @property
    def _moment_s(self) -> float:
        return min(self.max_delay, max(MOMENT_S, MOMENT_PLACES * self.place_s))

    def _stands(self, now: float) -> bool:
        return now >= self._stands_at

    def _patience_s(self, now: float) -> float:
        return self._moment_s if self._stands(now) else self.max_delay
