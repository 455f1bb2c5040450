"""Adaptive throttling of an overloaded host (SRE book, "Handling Overload"). Pure.

A request is refused locally with probability

    p = min(MOST, max(0, (requests - K accepts) / (requests + 1)))

where ``requests`` includes local refusals. Requests count when they end: pending ones must not look like refusals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

K = 2.0
"""Requests per accepted one. Lower values block a host after few failures."""
BUCKET_S = 1.0
BUCKETS = 10
"""A longer window detects recovery later."""
WINDOW_S = BUCKETS * BUCKET_S
LEAST = 10
"""Requests in the window before any is refused."""
MOST = 0.95
"""The rest detects recovery."""


class _Bucket:
    __slots__ = ("accepts", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.accepts = 0


class AdaptiveThrottle:
    """Requests of the last `WINDOW_S` seconds."""

    __slots__ = ("_accepts", "_buckets", "_requests")

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._requests = self._accepts = 0

    def refused_share(self, now: float) -> float:
        self._newest(now)
        if self._requests < LEAST:
            return 0.0
        return min(MOST, max(0.0, (self._requests - K * self._accepts) / (self._requests + 1)))

    def refuses(self, now: float, random: Callable[[], float]) -> bool:
        """A withheld request counts as refused. ``random`` is in [0, 1)."""
        if random() >= self.refused_share(now):
            return False
        self.count(now, accepted=False)
        return True

    def count(self, now: float, *, accepted: bool) -> None:
        """A slightly late time counts in the newest bucket."""
        bucket = self._newest(now)
        bucket.requests += 1
        bucket.accepts += accepted
        self._requests += 1
        self._accepts += accepted

    def _newest(self, now: float) -> _Bucket:
        number, buckets = int(now // BUCKET_S), self._buckets
        if not buckets or buckets[-1].number < number:
            buckets.append(_Bucket(number))
            while buckets[0].number <= number - BUCKETS:
                oldest = buckets.popleft()
                self._requests -= oldest.requests
                self._accepts -= oldest.accepts
        return buckets[-1]
