"""Load shedding: priorities, thinning, the queue for permits, and Retry-After. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Generic, Literal, TypeVar

from limitgate.limits.bucket import RESERVES, Priority

Refusal = Literal["limit", "lag", "thinned"]
"""Why a request is refused: no room for its priority, a late event loop, or thinning in favour of higher priorities."""

LATELY_S = 1.0
SPREAD_S = 10
"""Seconds over which retries are spread if all requests are refused."""


class PriorityLevel:
    """A priority's share of the limit. Its counts only increase."""

    __slots__ = ("_credit", "admitted", "budget", "free", "kept", "lag", "limit", "priority", "room", "share", "thinned")

    def __init__(self, priority: Priority) -> None:
        self.priority: Priority = priority
        self.share: Fraction = Fraction(1)
        """Share of the limit."""
        self.budget: float = 1.0
        """Share of a hot loop's iteration."""
        self.room: int = 1
        """Maximum of requests in flight at which this priority is admitted."""
        self.free: int = 0
        """`room` for the fast path."""
        self.kept: float = 1.0
        """Share of requests that pass thinning."""
        self.admitted: int = 0
        self.limit: int = 0
        self.lag: int = 0
        self.thinned: int = 0
        self._credit = 0.5

    @property
    def refused(self) -> int:
        return self.limit + self.lag

    def keep(self, reserve: Fraction | None) -> None:
        """Reserve ``reserve`` for high priority, and twice as much for high and normal priority."""
        self.share = 1 - RESERVES[self.priority] * (reserve or Fraction())
        self.budget = float(self.share)

    def make_room(self, limit: int) -> None:
        """Apply the share. At least one request has room."""
        self.room = max(1, int(limit * self.share))

    def passes_thinning(self) -> bool:
        """True if a request passes. Admitted requests are evenly spaced."""
        credit = self._credit + self.kept
        passes = credit >= 1
        self._credit = credit - passes
        return passes


class RecentShare:
    """The recent share of refused requests, from totals noted now and then."""

    __slots__ = ("_totals",)

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, came: int, shed: int) -> None:
        totals = self._totals
        if totals and now - totals[-1][0] > LATELY_S:
            totals.clear()
        while len(totals) > 1 and now - totals[1][0] >= LATELY_S:
            totals.popleft()
        totals.append((now, came, shed))

    def of(self, came: int, shed: int) -> float:
        _, came_before, shed_before = self._totals[0] if self._totals else (0.0, 0, 0)
        return (shed - shed_before) / (came - came_before) if came > came_before else 0.0


def retry_after_s(share: float, random: Callable[[], float]) -> int:
    """Return randomized whole seconds, which grow with the refusals. ``random`` is in [0, 1)."""
    return 1 + int(random() * (round(SPREAD_S * share) + 1))


GAIN = 0.1
"""Rise of the level per step, for each unit above the goal."""
GOAL = 0.05
"""Share of refusals that is tolerated before lower priorities are thinned."""
WEIGHT = 0.2
"""Weight of a step in the averages."""
QUIET_STEPS = 10
"""Number of steps without other refusals after which the load is over."""
FALLS = 0.05
"""Fall of the level in a step without other refusals."""


class _RefusedShare:
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
    """Refuses low priority, then normal priority, evenly, until higher priorities are served.

    A level from 0 to 1 is the refused share of low priority. From 1 to 2, all of low and a share of normal priority are
    refused.
    """

    __slots__ = ("_high", "_normal", "_quiet", "level")

    def __init__(self, levels: Mapping[Priority, PriorityLevel]) -> None:
        self.level: float = 0.0
        """At 0, all requests pass. At 2, only high priority passes."""
        self._high, self._normal = _RefusedShare(levels["high"]), _RefusedShare(levels["normal"])
        self._quiet = 0

    def step(self) -> None:
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
        if priority == "high":
            return 1.0
        return 1 - min(1.0, self.level if priority == "low" else max(0.0, self.level - 1))


W = TypeVar("W", bound=Hashable)

INTERVAL_S = 0.100
"""A queue is standing if it hasn't been empty for this many seconds."""
INTERVAL_PLACES = 10
"""Minimum number of released permits: the longer of both applies."""
MOMENT_S = 0.005
"""Maximum wait in a standing queue."""
MOMENT_PLACES = 2
"""Minimum number of released permits: the longer of both applies."""
MOST = 1000
"""Maximum of waiting requests. More would take memory and time out."""


class WaitingLine(Generic[W]):
    """A queue for permits with CoDel's rule of a standing queue (RFC 8289).

    Usually first come, first served. A standing queue only adds latency, so it serves the newest request first, and refuses
    requests after a short wait (Facebook, "Fail at Scale").
    """

    def __init__(self, max_delay: float) -> None:
        self.max_delay = max_delay
        self.place_s: float = math.inf
        """Mean seconds per permit; infinite if unknown."""
        self._waiting: dict[Priority, OrderedDict[W, float]] = {priority: OrderedDict() for priority in RESERVES}
        self._since = math.inf

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_before(self, priority: Priority) -> bool:
        """True if a request of the same or a higher priority waits."""
        return any(line for each, line in self._waiting.items() if RESERVES[each] <= RESERVES[priority])

    def join(self, now: float, waiter: W, priority: Priority) -> W | None:
        """Add a waiter. A full queue displaces the oldest one of the lowest priority, which is returned."""
        if not self:
            self._since = now
        self._waiting[priority][waiter] = now
        if len(self) <= MOST:
            return None
        lowest = next(line for line in reversed(self._waiting.values()) if line)
        return lowest.popitem(last=False)[0]

    def leave(self, waiter: W, priority: Priority) -> None:
        self._waiting[priority].pop(waiter, None)

    def call(self, now: float, priority: Priority) -> W | None:
        line = self._waiting[priority]
        return line.popitem(last=self._stands(now))[0] if line else None

    def overdue(self, now: float) -> list[W]:
        patience_s, gone = self._patience_s(now), []
        for line in self._waiting.values():
            while line and next(iter(line.values())) + patience_s <= now:
                gone.append(line.popitem(last=False)[0])
        return gone

    def due_at(self, now: float) -> float:
        """Return when the next waiting request is overdue; infinite without one."""
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
