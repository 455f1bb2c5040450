"""Each host's load, learned from responses, with clock and lock."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from limitgate.overload.adaptive_limit import AdaptiveLimit, Outcome, Permit
from limitgate.overload.options import Adaptive
from limitgate.overload.shedding import retry_after_s
from limitgate.process import waiting
from limitgate.process.forking import reset_in_children

MOST_HOSTS = 1000
"""The least recently used one is dropped."""

_log = logging.getLogger("limitgate.outbound")


K = 2.0
"""Multiple of the accepted requests that may be sent. Lower values block a host after few failures."""
BUCKET_S = 1.0
BUCKETS = 10
"""Buckets of the window. A longer window would detect recovery later."""
WINDOW_S = BUCKETS * BUCKET_S
LEAST = 10
"""Minimum of requests in the window before one is refused."""
MOST = 0.95
"""Maximum probability of a refusal; the other requests detect recovery."""


class _Bucket:
    __slots__ = ("accepts", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.accepts = 0


class AdaptiveThrottle:
    """Throttles requests to an overloaded host by its last `WINDOW_S` seconds (SRE book, "Handling Overload"). Pure.

    A request is refused locally with probability

        p = min(MOST, max(0, (requests - K accepts) / (requests + 1)))

    where ``requests`` includes local refusals. Requests count when they end, because pending ones must not look like refusals.
    """

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
        """Return True to refuse a request, which then counts as refused. ``random`` is in [0, 1)."""
        if random() >= self.refused_share(now):
            return False
        self.count(now, accepted=False)
        return True

    def count(self, now: float, *, accepted: bool) -> None:
        """Count a request. A slightly late request counts in the newest bucket."""
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


class Refusal(NamedTuple):
    retry_after: int
    """Seconds, randomized."""
    limit: int = 0
    """The limit on requests in flight, if reached; 0 if the host accepts too few requests."""


def outcome_of(method: str | None, status: int, content_type: str | None) -> Outcome:
    """Classify a response by its headers, because the reader determines how long the body takes."""
    if status in (429, 503):
        return "failed"
    is_head, is_stream = (method or "").upper() == "HEAD", (content_type or "").lower().startswith("text/event-stream")
    return "untaught" if status >= 400 or status in (101, 304) or is_head or is_stream else "ok"


class Place(NamedTuple):
    limit: AdaptiveLimit
    permit: Permit


class _Ended(NamedTuple):
    at: float
    place: Place | None
    outcome: Outcome
    is_accepted: bool | None


class HostLoad:
    def __init__(self, name: str, adaptive: Adaptive | None, *, throttles: bool) -> None:
        self._name = name
        self._adaptive = adaptive
        self._throttles = throttles
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        self._lock = Lock()
        self._forget()

    def _forget(self) -> None:
        self._now, self._refused_at = -math.inf, -math.inf
        self._ended: deque[_Ended] = deque()
        self._throttle = AdaptiveThrottle() if self._throttles else None
        self._limit = None if self._adaptive is None else AdaptiveLimit(self._adaptive, wall_offset=_wall_offset)

    def refusal(self) -> Refusal | None:
        """Refuse at random if the host accepts too few requests."""
        with self._lock:
            now = self._learn()
            if self._throttle is None or not self._throttle.refuses(now, random.random):
                return None
            share = self._throttle.refused_share(now)
        return self._logged(Refusal(retry_after_s(share, random.random)))

    def begin(self, method: str | None) -> Place | Refusal | None:
        """Begin a request; None without a limit in flight."""
        with self._lock:
            now = self._learn()
            if self._limit is None:
                return None
            permit = self._limit.begin(now, method)
            if isinstance(permit, Permit):
                return Place(self._limit, permit)
            refusal = Refusal(self._limit.retry_after_s(random.random), self._limit.limit)
        return self._logged(refusal)

    def end(self, place: Place | None, outcome: Outcome, *, is_accepted: bool | None) -> None:
        """End a request; ``is_accepted`` is None if the host didn't decide.

        Takes no lock, because the garbage collector may call this.
        """
        self._ended.append(_Ended(waiting.monotonic(), place, outcome, is_accepted))

    def _learn(self) -> float:
        latest = self._now
        while self._ended:
            at, place, outcome, is_accepted = self._ended.popleft()
            latest = max(latest, at)
            if self._throttle is not None and is_accepted is not None:
                self._throttle.count(at, accepted=is_accepted)
            if place is not None:
                place.limit.done(place.permit, at, outcome)
        now = waiting.monotonic()
        # A frozen test clock has ended; discard its samples.
        if now < latest:
            self._forget()
        self._now = now
        return now

    def _logged(self, refusal: Refusal) -> Refusal:
        """Log a first refusal. Don't hold the lock, because a log handler may send to this host."""
        now, before = waiting.monotonic(), self._refused_at
        self._refused_at = now
        if now - before > WINDOW_S:
            why = f"{refusal.limit} requests are in flight" if refusal.limit else "few requests succeed"
            _log.info("%.260r is overloaded, so requests to it are refused here: %s", self._name, why)
        return refusal


class HostLoads:
    def __init__(self, adaptive: Adaptive | None, *, throttles: bool) -> None:
        self._adaptive = adaptive
        self._throttles = throttles
        self._lock = Lock()
        self._hosts: OrderedDict[str, HostLoad] = OrderedDict()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = Lock()
        for host in self._hosts.values():
            host.reset_after_fork()
        self._hosts.clear()

    def forget(self) -> None:
        with self._lock:
            self._hosts.clear()

    def __getitem__(self, key: str) -> HostLoad:
        with self._lock:
            host = self._hosts.get(key)
            if host is None:
                host = self._hosts[key] = HostLoad(key, self._adaptive, throttles=self._throttles)
                if len(self._hosts) > MOST_HOSTS:
                    self._hosts.popitem(last=False)
            else:
                self._hosts.move_to_end(key)
            return host


def _wall_offset() -> float:
    return time.time() - waiting.monotonic()
