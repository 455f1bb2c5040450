"""Baselines: the time that requests of a class take on an idle server, R0. Pure.

A baseline falls whenever requests are faster. It rises only by what was measured while nothing of ours queued, at most twofold
at a time and to at most four times the least of the last ten minutes: one that rises with the load would follow it without end.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

FIRST = 10
"""Requests of a class whose mean its baseline is at first."""
MOST_CLASSES = 64
"""Classes with a baseline of their own; all others share one."""
MEMORY_S = 600.0
"""Seconds for which the least baseline is remembered, twice that at most."""
MAX_STEP = 2.0
"""How many times itself a baseline may become at once."""
MAX_DRIFT = 4.0
"""How many times the least that is remembered a baseline may become."""
FEW = 3
"""The mean of n requests counts n/(n + 3) when a baseline is learned."""
QUIET_WEIGHT = 0.1
"""Weight of a window without load, in which requests were faster than the baseline."""


class Baseline:
    """R0 of a class, and the requests of the class that the window in progress has seen."""

    __slots__ = ("_least", "_least_before", "_least_since", "count", "known", "mean_s", "seconds")

    def __init__(self) -> None:
        self.mean_s = 0.0
        """R0."""
        self.known = 0
        """Requests that it is the mean of, up to `FIRST`."""
        self.count = 0
        """Requests of the window."""
        self.seconds = 0.0
        """Seconds that they took in all."""
        self._least = self._least_before = math.inf
        self._least_since = -math.inf

    @property
    def base_s(self) -> float:
        """Seconds that the requests of the window would have taken on an idle server."""
        return self.count * self.mean_s

    def begin_with(self, took_s: float) -> None:
        """Learn from one of the first requests."""
        self.known += 1
        self.mean_s += (took_s - self.mean_s) / self.known

    def learn(self, now: float) -> None:
        """Learn from requests of the window that did not queue here."""
        mean_s = self.seconds / self.count
        if (age_s := now - self._least_since) >= MEMORY_S:
            self._least_before = self._least if age_s < 2 * MEMORY_S else math.inf
            self._least, self._least_since = math.inf, now
        least = min(self._least, self._least_before)
        most = min(MAX_STEP * self.mean_s, MAX_DRIFT * least) if self.mean_s else mean_s
        self.mean_s += self.count / (self.count + FEW) * (min(mean_s, most) - self.mean_s)
        self._least = min(self._least, self.mean_s)

    def learn_quietly(self) -> None:
        """Learn from a window without load if its requests were faster."""
        mean_s = self.seconds / self.count
        if mean_s < self.mean_s:
            self.mean_s += QUIET_WEIGHT * (mean_s - self.mean_s)


class Baselines(dict[Hashable, Baseline]):
    """Baselines by classes of the requests of a limit: a new one for a class that is not there, if there is room for it."""

    def __init__(self) -> None:
        self._others = Baseline()

    def __missing__(self, request_class: Hashable) -> Baseline:
        """Baseline of a class that has none of its own so far."""
        if len(self) >= MOST_CLASSES:
            return self._others
        return self.setdefault(request_class, Baseline())

    def seen(self) -> Iterator[Baseline]:
        """Those of which the window has seen requests."""
        return (each for each in (*self.values(), self._others) if each.count)

    def forget_window(self) -> None:
        """Begin a window."""
        for each in (*self.values(), self._others):
            each.count, each.seconds = 0, 0.0

    @property
    def longest_s(self) -> float:
        """The largest of them, 0 while nothing is known."""
        return max(each.mean_s for each in (*self.values(), self._others))

    def by_class(self) -> dict[Hashable, float]:
        """R0 in seconds of each class that has one of its own."""
        return {name: each.mean_s for name, each in self.items() if each.known}
