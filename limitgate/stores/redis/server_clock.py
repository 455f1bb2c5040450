"""The clock of a server, compared from reply to reply with the time that has passed here."""

from __future__ import annotations

import math

APART = 2.0
"""Seconds by which a clock may leap ahead unreported."""
DRIFT = 0.001
"""By how much faster than ours a clock may run: one that is slewed, beside one that is wrong."""


class ServerClock:
    """Notices where the clock of a server, which log lines call by ``name``, leaps ahead."""

    __slots__ = ("_latest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._latest = math.inf, 0.0
        """Its last time, in Unix µs, and the moment at which that was asked for."""

    def leap(self, now: int, sent: float, heard: float) -> float:
        """By how many seconds it is ahead of what can have passed since the reply before, 0 if it is not.

        It said ``now``, in Unix µs, between two moments of ours, monotonic and in seconds.
        """
        earlier, since = self._latest
        self._latest = now, sent
        passed = heard - since
        ahead = (now - earlier) / 1_000_000 - passed
        if ahead <= APART:  # as of almost every reply
            return 0.0
        return ahead if ahead > APART + DRIFT * passed else 0.0
