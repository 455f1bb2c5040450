"""The lag guard: an event loop that is late has a queue, which stands in front of everything that could count requests. Pure.

A handler that does not await shows one request in flight however many wait in the sockets; only the loop itself is late. So a
heartbeat is due every 10 ms, and while it has been late for some time, each iteration of the loop lets in what comes in its
first 10 ms, and refuses the rest. Nothing has to be found out for that: the loop stays busy, and no iteration gets long.
Without a loop, what a trusted proxy says of the time that a request has waited takes the place of heartbeats.

uvloop accepts one connection in each iteration. Where each request comes on a connection of its own, its iterations are as
short as a handler and its heartbeats in time, while the queue stands in front of the listening socket. So the guard is told how
many wait there, too, and a hot loop lets requests in while no more wait than can be done in a long iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable

EVERY_S = 0.010
"""Seconds between two heartbeats."""
TARGET_S = 0.005
"""Lag that is none."""
INTERVAL_S = 0.100
"""Seconds of lag after which a loop is hot."""
INTERVAL_REQUESTS = 10
"""Requests of lag after which it is, where that is longer."""
BUDGET_S = 0.010
"""Seconds of an iteration in which a hot loop lets requests in."""
BUDGET_REQUESTS = 2
"""Requests that it lets in, where that is longer."""
WAITING_S = 0.030
"""Seconds by which more is let in where connections wait to be accepted: in their queue nothing has been done for them yet."""
LEARNED = 0.1
"""Weight of an iteration in the moving average of what a request keeps the loop for, which is never above a second."""
RESTS_AFTER = 100
"""Heartbeats without a request after which there need be none."""


class LagGuard:
    """Guard of an event loop, or of threads behind a proxy.

    A guard hears either of heartbeats (`start`, `beat`) or of waits (`waited`), never of both. ``unaccepted`` tells how many
    connections the event loop has yet to accept.
    """

    __slots__ = ("_begun", "_late_since", "_quiet", "_stands", "_unaccepted", "due_at", "is_hot", "lag_s", "request_s")

    def __init__(self, unaccepted: Callable[[], int] = int) -> None:
        self.due_at = math.inf
        """When the next heartbeat is due; infinite while there need be none, and the next request should call `start`."""
        self.is_hot = False
        """True while the loop has been late for some time."""
        self.lag_s = 0.0
        """Lag that was heard of last, in seconds."""
        self.request_s = 0.0
        """Seconds for which a request keeps the loop, 0 while the loop was never late."""
        self._begun = 0
        self._quiet = 0
        self._late_since: float | None = None
        self._unaccepted = unaccepted
        self._stands = False
        """True if connections waited at the last heartbeat, which was in time."""

    def start(self, now: float) -> float:
        """Begin to have heartbeats. Returns when the first is due."""
        self._begun = self._quiet = 0
        self.is_hot, self._late_since = False, None
        self.due_at = now + EVERY_S
        return self.due_at

    def beat(self, now: float) -> float | None:
        """Note a heartbeat. Returns when the next one is due, None if there need be none until a request comes."""
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
        """Note how long the request that comes now has waited, as the proxy in front of it says."""
        wait_s = max(0.0, wait_s)
        self.due_at = now - wait_s
        self._observe(now, wait_s)

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """True if a request that comes now is too much. ``share`` is the part of an iteration for requests of its priority.

        A request that is let in counts, so this is asked once for each.
        """
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
