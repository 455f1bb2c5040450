"""Compares a server's clock with the local monotonic clock."""

from __future__ import annotations

import math

APART = 2.0
"""Seconds a clock may jump ahead unreported."""
DRIFT = 0.001
"""Allowed difference in rate, for slewing."""


class ServerClock:
    """Detects jumps of a server's clock. ``name`` is for log lines."""

    __slots__ = ("_latest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._latest = math.inf, 0.0

    def leap(self, now: int, sent: float, heard: float) -> float:
        """Return the seconds by which the clock has jumped ahead, or 0.

        ``now`` is its time in Unix µs, read between ``sent`` and ``heard``, monotonic seconds.
        """
        earlier, since = self._latest
        self._latest = now, sent
        passed = heard - since
        ahead = (now - earlier) / 1_000_000 - passed
        if ahead <= APART:
            return 0.0
        return ahead if ahead > APART + DRIFT * passed else 0.0
