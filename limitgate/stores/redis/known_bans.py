"""Bans that this process has seen in Redis, for as long as they last: they hold, too, while Redis cannot be asked.

Whoever asks Redis learns how a bucket stands, so a ban that was lifted is forgotten with the next reading of its bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from threading import RLock

from limitgate.algorithms import ban
from limitgate.limits.template import AnyReading

MAX_BANS = 10_000
"""Bans that are remembered; those that were seen first go first."""


class KnownBans:
    """Remembers bans by the keys of their buckets. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[float, int]] = {}
        """By key when the ban ends, and the ``now`` of the reading that said so, Redis' clock in Unix µs."""
        self._next_end = math.inf
        self._lock = RLock()

    def learn(self, reading: AnyReading, heard: float) -> None:
        """Remember the bans in a reading that was heard at a time, and forget those of buckets that it shows without."""
        for charge, states, _ in reading.buckets:
            if not charge.cost:  # a reading of it shows no ban
                continue
            if charge.bucket.algorithm is ban and any(states):
                self._note(charge.key, heard + max(states) / 1e6, reading.now)
            else:
                self.forget([charge.key], reading.now)

    def forget(self, keys: Iterable[str], now: int) -> None:
        """Forget the bans of buckets that had none at a time by Redis' clock, Unix µs."""
        for key in keys:
            known = self.ends.get(key)
            if known is not None and now >= known[1]:  # else it was read before the ban
                with self._lock:
                    self.ends.pop(key, None)

    def drop_ended(self, at: float) -> None:
        """Forget the bans that have ended at a time, so that nobody looks for them any more."""
        if at < self._next_end:
            return
        with self._lock:
            self.ends = {key: known for key, known in self.ends.items() if known[0] > at}
            self._next_end = min([end for end, _ in self.ends.values()], default=math.inf)

    def left_us(self, key: str, at: float) -> int:
        """Microseconds for which a bucket is still banned at a time; 0 if that is not known."""
        known = self.ends.get(key)
        return max(0, round((known[0] - at) * 1e6)) if known else 0

    def _note(self, key: str, until: float, now: int) -> None:
        with self._lock:
            self.ends.pop(key, None)
            self.ends[key] = until, now
            self._next_end = min(self._next_end, until)
            while len(self.ends) > MAX_BANS:
                del self.ends[next(iter(self.ends))]
