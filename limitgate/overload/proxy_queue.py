"""The queue in front of a process, from the waiting times that a proxy reports. Pure.

Clocks differ, so the minimum of recent waits is subtracted: up to the usual difference immediately, in full if it lasts longer
than a queue can.
"""

from __future__ import annotations

import math

CLOCKS_S = 0.050
"""Usual difference of synchronized clocks, plus network delay, in seconds."""
LASTS_S = 10.0
"""A minimum wait of more than this many seconds isn't a queue."""


class ProxyQueue:
    """Lag behind one proxy, or several with the same clock."""

    __slots__ = ("_before_s", "_least_s", "_turns_at")

    def __init__(self) -> None:
        self._least_s = self._before_s = math.inf
        self._turns_at = -math.inf

    def lag_s(self, now: float, waited_s: float) -> float:
        """Return the seconds of queueing before a request that arrives now and has waited ``waited_s``."""
        if now >= self._turns_at:
            is_first = math.isinf(self._turns_at)
            self._before_s, self._least_s = math.inf if is_first else self._least_s, waited_s
            self._turns_at = now + LASTS_S
        elif waited_s < self._least_s:
            self._least_s = waited_s
        known_s = min(self._least_s, CLOCKS_S) if math.isinf(self._before_s) else min(self._least_s, self._before_s)
        return waited_s - known_s
