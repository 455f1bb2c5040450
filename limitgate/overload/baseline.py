"""Baselines: the unloaded duration R0 of a request class, and dips of the limit that reveal it. Pure.

Faster requests lower a baseline. A baseline rises only by measurements without a local queue, at most fourfold in ten minutes,
so that it doesn't follow the load. For ten minutes, a fall without load can be reversed, if no dip confirms it. A client with
many requests has its own baseline.

All processes dip at the same multiples of five seconds of the wall clock, so that they don't measure each other's queues.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

FIRST = 10
"""Number of requests that make a class's first baseline."""
MOST_CLASSES = 1000
"""Maximum of classes. The least used class is dropped."""
MEMORY_S = 600.0
"""Measurements are remembered for this many seconds, or up to twice as long."""
MAX_STEP = 2.0
MAX_DRIFT = 4.0
FEW = 3
"""A new mean of n requests has weight n/(n + 3)."""
QUIET_WEIGHT = 0.1
RECENT = 64
"""Number of requests by which frequent clients are found. Then the counts are halved."""
MANY = 4
"""A client is frequent if it sends more than a fourth of the recent requests."""
SEVERAL = 3
"""The first baseline needs one request from each of this many clients."""
MOST_OWN = 8
"""Clients per class with a baseline."""


class Baseline:
    __slots__ = ("_largest", "_largest_before", "_least", "_least_before", "_since", "count", "known", "mean_s", "seconds")

    def __init__(self) -> None:
        self.mean_s: float = 0.0
        self.known: int = 0
        """Number of samples, up to `FIRST`."""
        self.count: int = 0
        self.seconds: float = 0.0
        self._least = self._least_before = math.inf
        self._largest = self._largest_before = 0.0
        self._since = -math.inf

    @property
    def base_s(self) -> float:
        return self.count * self.mean_s

    def copy(self) -> Baseline:
        made = Baseline()
        made.mean_s, made.known, made._since = self.mean_s, self.known, self._since
        made._least, made._least_before = self._least, self._least_before
        made._largest, made._largest_before = self._largest, self._largest_before
        return made

    def begin_with(self, took_s: float) -> None:
        self.known += 1
        self.mean_s += (took_s - self.mean_s) / self.known
        self._largest = self.mean_s

    def learn(self, now: float) -> None:
        """Learn from requests that did not queue here."""
        self._forget(now)
        mean_s = self.seconds / self.count
        least = min(self._least, self._least_before)
        most = min(MAX_STEP * self.mean_s, MAX_DRIFT * least) if self.mean_s else mean_s
        self.mean_s += self.count / (self.count + FEW) * (min(mean_s, max(most, self._known_s)) - self.mean_s)
        self._least = min(self._least, self.mean_s)
        self._largest, self._largest_before = self.mean_s, 0.0

    def learn_quietly(self, now: float) -> None:
        """Learn from a window without load."""
        self._forget(now)
        self.mean_s += QUIET_WEIGHT * (min(self.seconds / self.count, self._known_s) - self.mean_s)

    def rise_again(self, now: float) -> None:
        """Rise towards the earlier maximum if requests are as slow again."""
        self._forget(now)
        self.mean_s = max(self.mean_s, min(self.seconds / self.count, self._known_s))

    @property
    def _known_s(self) -> float:
        return max(self._largest, self._largest_before)

    def _forget(self, now: float) -> None:
        age_s = now - self._since
        if age_s >= MEMORY_S:
            is_recent = age_s < 2 * MEMORY_S
            self._least_before, self._largest_before = (self._least, self._largest) if is_recent else (math.inf, 0.0)
            self._least, self._largest, self._since = math.inf, self.mean_s, now


class RequestClass:
    """Requests of similar duration, and their recent clients."""

    __slots__ = ("_own", "_total", "made", "shared", "uses")

    def __init__(self) -> None:
        self.shared: Baseline = Baseline()
        self.uses: int = 0
        self._own: dict[Hashable, Baseline] = {}
        self._total = 0
        self.made: dict[Hashable, int] = {}

    def sampled(self, client: Hashable) -> Baseline:
        """Return the baseline for a client. Without a client, return the shared one."""
        self.uses += 1
        shared = self.shared
        if client is None:
            return shared
        made, total = self.made, self._total
        if total >= RECENT:
            total //= 2
            self.made = made = {each: number // 2 for each, number in made.items() if number > 1}
        self._total = total = total + 1
        made[client] = number = made.get(client, 0) + 1
        if client in self._own:
            return self._own[client]
        makes_many = number > 1 if shared.known < SEVERAL else number * MANY > total
        return self._begin_own(client) if makes_many else shared

    def _begin_own(self, client: Hashable) -> Baseline:
        """Begin a client's baseline. May replace the baseline of a client without recent requests."""
        if len(self._own) >= MOST_OWN:
            gone = next((each for each in self._own if each not in self.made), None)
            if gone is None:
                return self.shared
            del self._own[gone]
        own = self._own[client] = self.shared.copy() if self.shared.known >= FIRST else Baseline()
        return own

    def mean_s(self, client: Hashable) -> float:
        return (self._own.get(client) or self.shared).mean_s

    @property
    def overall_s(self) -> float:
        if not self.made:
            return self.shared.mean_s
        return sum([made * self.mean_s(client) for client, made in self.made.items()]) / sum(self.made.values())


class Baselines:
    def __init__(self) -> None:
        self.seen: list[Baseline] = []
        """Baselines with samples in this window."""
        self.classes: dict[Hashable, RequestClass] = {}
        self._aged_at = -math.inf

    def open(self, request_class: Hashable, now: float) -> RequestClass:
        if len(self.classes) >= MOST_CLASSES:
            self._make_room(now)
        found = self.classes[request_class] = RequestClass()
        return found

    def note(self, baseline: Baseline, took_s: float) -> None:
        if not baseline.count:
            self.seen.append(baseline)
        baseline.count += 1
        baseline.seconds += took_s

    def mean_s(self, request_class: Hashable, client: Hashable) -> float:
        found = self.classes.get(request_class)
        return 0.0 if found is None else found.mean_s(client)

    def forget_window(self) -> None:
        for each in self.seen:
            each.count, each.seconds = 0, 0.0
        self.seen = []

    @property
    def have_many_clients(self) -> bool:
        return len({client for each in self.classes.values() for client in each.made}) > 1

    @property
    def longest_s(self) -> float:
        return max(self.by_class().values(), default=0.0)

    def by_class(self) -> dict[Hashable, float]:
        return {name: each.overall_s for name, each in self.classes.items()}

    def _make_room(self, now: float) -> None:
        if now - self._aged_at >= MEMORY_S:
            self._aged_at = now
            for each in self.classes.values():
                each.uses //= 2
        del self.classes[min(self.classes, key=lambda name: self.classes[name].uses)]


EVERY_S = 5.0
SOON_S = 0.5
"""Seconds until the next dip, if the last one found much faster requests. Only until 4 s after the mark."""
PRESSED_S = 1.0
DEPTH = 0.7
"""Limit during a dip, as a share of the requests in flight without a queue."""
ON_TIME_S = 0.1
"""All processes dip together if a dip begins within this many seconds after a mark."""
LENGTH_S = 0.25
LENGTH_BASES = 5
"""A dip lasts at most `LENGTH_S` or this many R0."""
LEAST = 3
"""Minimum of requests to learn from. With fewer, a dip lasts `GRACE_S` longer."""
GRACE_S = 0.5
ENOUGH = 10
"""A dip ends after this many requests, or after twice its limit if that is more."""


class Schedule:
    """Dips by the wall clock, which may be changed. Each new interval of 5 s has one dip."""

    __slots__ = ("_mark", "_soon_mark")

    def __init__(self) -> None:
        self._mark = self._soon_mark = -1

    def wait_s(self, wall: float, *, wants_dip: bool) -> float:
        mark, into = divmod(wall, EVERY_S)
        if mark != self._mark:
            return 0.0
        soon_mark, into_soon = divmod(wall, SOON_S)
        if wants_dip and into < EVERY_S - 2 * SOON_S:
            return 0.0 if soon_mark != self._soon_mark else SOON_S - into_soon
        return EVERY_S - into

    def begin(self, wall: float) -> bool:
        """Begin a dip. Return True if all processes dip now."""
        mark, into = divmod(wall, EVERY_S)
        is_first = mark != self._mark
        self._mark, self._soon_mark = int(mark), int(wall // SOON_S)
        return is_first and into < ON_TIME_S


class Dip:
    __slots__ = ("_ends_at", "_enough", "clean_at", "count", "is_shared", "limit")

    def __init__(self, now: float, base_in_flight: float, base_s: float, limit: float, *, is_shared: bool) -> None:
        self.limit: int = max(1, round(DEPTH * min(base_in_flight, limit)))
        self.is_shared: bool = is_shared
        """True if all processes dip."""
        self.clean_at: float = math.inf
        """Time when the requests in flight had fallen to the limit. Earlier requests may have queued."""
        self.count: int = 0
        self._ends_at = now + max(LENGTH_S, LENGTH_BASES * base_s)
        self._enough = max(ENOUGH, 2 * self.limit)

    def note_in_flight(self, in_flight: int, now: float) -> None:
        if in_flight <= self.limit and self.clean_at == math.inf:
            self.clean_at = now

    def is_over(self, now: float) -> bool:
        """True if the dip has enough samples or lasts too long."""
        return self.count >= self._enough or (now > self._ends_at and self.count >= LEAST) or now > self._ends_at + GRACE_S
