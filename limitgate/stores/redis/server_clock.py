"""Compares a server's clock with the local monotonic clock at each reply."""

from __future__ import annotations

import math

APART = 2.0
"""Seconds a clock may jump ahead unreported."""
DRIFT = 0.001
"""Allowed rate difference to the local clock, which covers slewing."""


class ServerClock:
    """Detects jumps of a server's clock. ``name`` is for log lines."""

    __slots__ = ("_latest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._latest = math.inf, 0.0
        """Its last time in Unix µs, and the local time at which that call was sent."""

    def leap(self, now: int, sent: float, heard: float) -> float:
        """Return the seconds by which the clock has jumped ahead since the last reply, or 0.

        ``now`` is the server's time in Unix µs, read between ``sent`` and ``heard``, monotonic seconds.
        """
        earlier, since = self._latest
        self._latest = now, sent
        passed = heard - since
        ahead = (now - earlier) / 1_000_000 - passed
        # The normal case.
        if ahead <= APART:
            return 0.0
        return ahead if ahead > APART + DRIFT * passed else 0.0
