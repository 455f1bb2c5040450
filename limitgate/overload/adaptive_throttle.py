"""Adaptive throttling: a client keeps to itself what an overloaded host would refuse (SRE book, "Handling overload"). Pure.

Of the requests of the last seconds, a client's own refusals included, the host has accepted some. The next one is refused here
with a probability of

    p = min(MOST, max(0, (requests - K accepts) / (requests + 1)))

so about K times as many are sent as the host accepts, and those tell when it accepts more. A request is counted when its end
is known, beside whether it was accepted. Were it counted when it is sent, those under way would look like refusals: a burst,
or the first requests to a slow host, would be refused for nothing, and the window would have to be longer than any answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

K = 2.0
"""Requests that are sent for each that is accepted. With fewer, a few failures hold a host shut."""
BUCKET_S = 1.0
BUCKETS = 10
"""Buckets of the window. A longer window finds a host later again."""
WINDOW_S = BUCKETS * BUCKET_S
LEAST = 10
"""Requests of a window from which on any are refused."""
MOST = 0.95
"""Largest share that is refused: the others are sent, else nobody would hear that a host is back."""


class _Bucket:
    __slots__ = ("accepts", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.accepts = 0


class AdaptiveThrottle:
    """Requests to one host in the last `WINDOW_S` seconds, and which of the next ones are refused here."""

    __slots__ = ("_accepts", "_buckets", "_requests")

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._requests = self._accepts = 0

    def refused_share(self, now: float) -> float:
        """Share of requests that is refused at a time in seconds, 0 while nothing is wrong."""
        self._newest(now)
        if self._requests < LEAST:
            return 0.0
        return min(MOST, max(0.0, (self._requests - K * self._accepts) / (self._requests + 1)))

    def refuses(self, now: float, random: Callable[[], float]) -> bool:
        """True if a request is not to be sent, and counts as one that was refused. ``random`` gives numbers from 0 up to 1."""
        if random() >= self.refused_share(now):
            return False
        self.count(now, accepted=False)
        return True

    def count(self, now: float, *, accepted: bool) -> None:
        """Count a request that has ended. One that comes late by a moment counts in the newest bucket."""
        bucket = self._newest(now)
        bucket.requests += 1
        bucket.accepts += accepted
        self._requests += 1
        self._accepts += accepted

    def _newest(self, now: float) -> _Bucket:
        """The bucket in progress. Forgets those that are older than the window."""
        number, buckets = int(now // BUCKET_S), self._buckets
        if not buckets or buckets[-1].number < number:
            buckets.append(_Bucket(number))
            while buckets[0].number <= number - BUCKETS:
                oldest = buckets.popleft()
                self._requests -= oldest.requests
                self._accepts -= oldest.accepts
        return buckets[-1]
