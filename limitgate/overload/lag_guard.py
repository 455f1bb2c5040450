"""Detects a late event loop, whose queue is in front of any counter of requests. Pure.

A heartbeat is due every 10 ms. While it is late for some time, each iteration of the loop admits only requests of its first 10
ms. Without a loop, the waits reported by a trusted proxy replace heartbeats.

uvloop accepts one connection per iteration, so heartbeats can be on time while the queue is in the listening socket. Therefore
the number of unaccepted connections also counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

EVERY_S = 0.010
"""Seconds between heartbeats."""
TARGET_S = 0.005
"""Tolerated lag in seconds."""
INTERVAL_S = 0.100
"""Seconds of lag that make a loop hot."""
INTERVAL_REQUESTS = 10
"""Requests during lag that make a loop hot, if that takes longer."""
BUDGET_S = 0.010
"""Part of an iteration, in seconds, that admits requests while the loop is hot."""
BUDGET_REQUESTS = 2
"""Requests that an iteration admits, if they take longer."""
WAITING_S = 0.030
"""Additional seconds to admit while connections wait to be accepted, because they have caused no work yet."""
LEARNED = 0.1
"""Weight of an iteration in the moving average of the loop time per request, which is capped at a second."""
RESTS_AFTER = 100
"""Heartbeats pause after this many without a request."""


class LagGuard:
    """Guard of an event loop, or of threads behind a proxy.

    It receives either heartbeats or waits. ``unaccepted`` returns the number of connections that the loop hasn't accepted.
    """

    __slots__ = ("_begun", "_late_since", "_quiet", "_stands", "_unaccepted", "due_at", "is_hot", "lag_s", "request_s")

    def __init__(self, unaccepted: Callable[[], int] = int) -> None:
        self.due_at = math.inf
        """Time of the next heartbeat; infinite while heartbeats pause, when the next request calls `start`."""
        self.is_hot = False
        self.lag_s = 0.0
        self.request_s = 0.0
        """Loop time per request in seconds; 0 if the loop was never late."""
        self._begun = 0
        self._quiet = 0
        self._late_since: float | None = None
        self._unaccepted = unaccepted
        self._stands = False
        """True if connections waited at the last heartbeat, which was on time."""

    def start(self, now: float) -> float:
        """Start heartbeats. Returns the time of the first one."""
        self._begun = self._quiet = 0
        self.is_hot, self._late_since = False, None
        self.due_at = now + EVERY_S
        return self.due_at

    def beat(self, now: float) -> float | None:
        """Record a heartbeat; return the time of the next one, None to pause until a request."""
        lag_s = max(0.0, now - self.due_at)
        stood, waiting = self._stands, 0 if lag_s > TARGET_S else self._unaccepted()
        self._stands = waiting > 0
        if (lag_s > TARGET_S or (stood and waiting)) and self._begun:
            self.request_s += LEARNED * (min(1.0, (lag_s + EVERY_S) / self._begun) - self.request_s)
        self._quiet = 0 if self._begun else self._quiet + 1
        self._begun = 0
        self._observe(now, max(lag_s, waiting * self.request_s))
        self.due_at = now + EVERY_S if self._quiet < RESTS_AFTER or self.is_hot else math.inf
        return None if self.due_at == math.inf else self.due_at

    def waited(self, now: float, wait_s: float) -> None:
        """Record the wait of the current request, reported by a proxy."""
        wait_s = max(0.0, wait_s)
        self.due_at = now - wait_s
        self._observe(now, wait_s)

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """Return True to refuse a request now; call once per request. ``share`` is its priority's part of an iteration."""
        over_s = now - self.due_at
        if not self.is_hot and (over_s > 0 or self._late_since is not None):
            since = self.due_at if self._late_since is None else self._late_since
            self.is_hot = now - since >= max(INTERVAL_S, INTERVAL_REQUESTS * self.request_s)
        if self.is_hot:
            budget_s = max(BUDGET_S, BUDGET_REQUESTS * self.request_s) * share
            if over_s > budget_s or (self._stands and self._unaccepted() * self.request_s > WAITING_S * share + budget_s):
                return True
        self._begun += 1
        return False

    def _observe(self, now: float, lag_s: float) -> None:
        self.lag_s = lag_s
        if lag_s <= max(TARGET_S, self.request_s):
            self._late_since, self.is_hot = None, False
        elif self._late_since is None:
            self._late_since = now - lag_s
