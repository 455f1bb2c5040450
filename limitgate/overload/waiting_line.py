"""A line of those who wait for a place in flight, under CoDel's rule of a standing queue (RFC 8289). Pure.

A line that is empty now and then takes up a burst: whoever came first is called first, and waits for at most ``max_delay``. A
line that stands only makes everybody late: then whoever came last is called first, who may still be in time, and whoever has
waited for more than a moment gives way, as in Facebook's "Fail at Scale". Higher priorities are called before lower ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from limitgate.limits.priority import RESERVES, Priority

W = TypeVar("W", bound=Hashable)

INTERVAL_S = 0.100
"""Seconds after which a line stands that was never empty."""
INTERVAL_PLACES = 10
"""Places that come free in that time, where it is longer."""
MOMENT_S = 0.005
"""Seconds that somebody may wait in a line that stands."""
MOMENT_PLACES = 2
"""Places that come free in that time, where it is longer."""
MOST = 1000
"""Waiters; more would not be called in time, and each is memory."""


class WaitingLine(Generic[W]):
    """A line, in which every waiter is once."""

    def __init__(self, max_delay: float) -> None:
        self.max_delay = max_delay
        """Seconds that somebody waits at most."""
        self.place_s = math.inf
        """Seconds in which a place comes free, on average; infinite while that is not known, and then no line stands."""
        self._waiting: dict[Priority, OrderedDict[W, float]] = {priority: OrderedDict() for priority in RESERVES}
        self._since = math.inf

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_before(self, priority: Priority) -> bool:
        """True if anybody of this priority or of a higher one waits."""
        return any(line for each, line in self._waiting.items() if RESERVES[each] <= RESERVES[priority])

    def join(self, now: float, waiter: W, priority: Priority) -> W | None:
        """Wait, too. Returns who gives way where the line is full: the oldest of the lowest priority, maybe the newcomer."""
        if not self:
            self._since = now
        self._waiting[priority][waiter] = now
        if len(self) <= MOST:
            return None
        lowest = next(line for line in reversed(self._waiting.values()) if line)
        return lowest.popitem(last=False)[0]

    def leave(self, waiter: W, priority: Priority) -> None:
        """Wait no more; who does not wait may leave, too."""
        self._waiting[priority].pop(waiter, None)

    def call(self, now: float, priority: Priority) -> W | None:
        """Take out who is next of a priority, None if nobody waits who has it."""
        line = self._waiting[priority]
        return line.popitem(last=self._stands(now))[0] if line else None

    def overdue(self, now: float) -> list[W]:
        """Take out those who have waited for too long."""
        patience_s, gone = self._patience_s(now), []
        for line in self._waiting.values():
            while line and next(iter(line.values())) + patience_s <= now:
                gone.append(line.popitem(last=False)[0])
        return gone

    def due_at(self, now: float) -> float:
        """When somebody will have waited for too long, infinite if nobody waits."""
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
