"""The queue in front of a process, by what a proxy says of the time that requests have waited in it. Pure.

The clocks of two machines differ. So the least wait of the last seconds is taken off: at once as far as clocks that are kept in
time differ, and wholly once it has lasted for longer than a queue of ours can, as most of it is refused meanwhile.
"""

from __future__ import annotations

import math

CLOCKS_S = 0.050
"""Seconds that clocks which are kept in time may differ, and requests may be on their way."""
LASTS_S = 10.0
"""Seconds after which a least wait is no queue."""


class ProxyQueue:
    """Lag behind one proxy, or several that have the same clock."""

    __slots__ = ("_before_s", "_least_s", "_turns_at")

    def __init__(self) -> None:
        self._least_s = self._before_s = math.inf
        self._turns_at = -math.inf

    def lag_s(self, now: float, waited_s: float) -> float:
        """Seconds of queue in front of a request that comes now and has waited for so long."""
        if now >= self._turns_at:
            is_first = math.isinf(self._turns_at)
            self._before_s, self._least_s = math.inf if is_first else self._least_s, waited_s
            self._turns_at = now + LASTS_S
        elif waited_s < self._least_s:
            self._least_s = waited_s
        known_s = min(self._least_s, CLOCKS_S) if math.isinf(self._before_s) else min(self._least_s, self._before_s)
        return waited_s - known_s
