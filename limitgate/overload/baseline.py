"""Baselines: the time that requests of a class take on an idle server, R0. Pure.

A baseline falls whenever requests are faster. It rises only by what was measured while nothing of ours queued, at most twofold
at a time and to at most four times the least of the last ten minutes: one that rises with the load would follow it without end.
A fall without load can be undone for ten minutes, until a dip has confirmed it: cheap requests may give way to the usual ones.

One client must not decide how long the requests of others take. A client that makes many of the requests of a class has a
baseline of its own, and all others share one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

FIRST = 10
"""Requests of a class whose mean its baseline is at first."""
MOST_CLASSES = 1000
"""Classes with a baseline. Of more, the least used one is forgotten."""
MEMORY_S = 600.0
"""Seconds for which the least and the largest baseline are remembered, twice that at most."""
MAX_STEP = 2.0
"""How many times itself a baseline may become at once."""
MAX_DRIFT = 4.0
"""How many times the least that is remembered a baseline may become."""
FEW = 3
"""The mean of n requests counts n/(n + 3) when a baseline is learned."""
QUIET_WEIGHT = 0.1
"""Weight of a window without load."""
RECENT = 64
"""Requests of a class by which it is known who makes many; then half of what each client has made is forgotten."""
MANY = 4
"""A client has made many of them if it has made more than a fourth."""
SEVERAL = 3
"""Clients of which one request each is the first that all others are measured by."""
MOST_OWN = 8
"""Clients of a class with a baseline of their own."""


class Baseline:
    """R0 of some requests, and those of them that the window in progress has seen."""

    __slots__ = ("_largest", "_largest_before", "_least", "_least_before", "_since", "count", "known", "mean_s", "seconds")

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
        self._largest = self._largest_before = 0.0
        self._since = -math.inf

    @property
    def base_s(self) -> float:
        """Seconds that the requests of the window would have taken on an idle server."""
        return self.count * self.mean_s

    def copy(self) -> Baseline:
        """The same R0, for other requests."""
        made = Baseline()
        made.mean_s, made.known, made._since = self.mean_s, self.known, self._since
        made._least, made._least_before = self._least, self._least_before
        made._largest, made._largest_before = self._largest, self._largest_before
        return made

    def begin_with(self, took_s: float) -> None:
        """Learn from one of the first requests."""
        self.known += 1
        self.mean_s += (took_s - self.mean_s) / self.known
        self._largest = self.mean_s

    def learn(self, now: float) -> None:
        """Learn from requests of the window that did not queue here."""
        self._forget(now)
        mean_s = self.seconds / self.count
        least = min(self._least, self._least_before)
        most = min(MAX_STEP * self.mean_s, MAX_DRIFT * least) if self.mean_s else mean_s
        self.mean_s += self.count / (self.count + FEW) * (min(mean_s, max(most, self._known_s)) - self.mean_s)
        self._least = min(self._least, self.mean_s)
        self._largest, self._largest_before = self.mean_s, 0.0

    def learn_quietly(self, now: float) -> None:
        """Learn from a window without load: requests that are faster, or as slow as they have been before."""
        self._forget(now)
        self.mean_s += QUIET_WEIGHT * (min(self.seconds / self.count, self._known_s) - self.mean_s)

    def rise_again(self, now: float) -> None:
        """Go back to what it has been, as far as requests are that slow again."""
        self._forget(now)
        self.mean_s = max(self.mean_s, min(self.seconds / self.count, self._known_s))

    @property
    def _known_s(self) -> float:
        """The largest that is remembered; no less than it is."""
        return max(self._largest, self._largest_before)

    def _forget(self, now: float) -> None:
        """Forget what is too long ago."""
        age_s = now - self._since
        if age_s >= MEMORY_S:
            is_recent = age_s < 2 * MEMORY_S
            self._least_before, self._largest_before = (self._least, self._largest) if is_recent else (math.inf, 0.0)
            self._least, self._largest, self._since = math.inf, self.mean_s, now


class RequestClass:
    """Requests that take about the same time, such as those of a route, and who has made the last ones of them."""

    __slots__ = ("_own", "_total", "made", "shared", "uses")

    def __init__(self) -> None:
        self.shared = Baseline()
        """That of all clients but those that make many requests."""
        self.uses = 0
        """How often it was used, fewer the longer ago."""
        self._own: dict[Hashable, Baseline] = {}
        """Those of clients that do, or did."""
        self._total = 0
        """The last requests."""
        self.made: dict[Hashable, int] = {}
        """How many of them each client has made."""

    def sampled(self, client: Hashable) -> Baseline:
        """The baseline that a request of a client counts for."""
        if self._total >= RECENT:
            self._total //= 2
            self.made = {each: number // 2 for each, number in self.made.items() if number > 1}
        self._total += 1
        made = self.made
        made[client] = number = made.get(client, 0) + 1
        if client in self._own:
            return self._own[client]
        makes_many = number > 1 if self.shared.known < SEVERAL else number * MANY > self._total
        return self._begin_own(client) if makes_many else self.shared

    def _begin_own(self, client: Hashable) -> Baseline:
        """Give a client a baseline of its own, in the place of one that has made none of the last requests."""
        if len(self._own) >= MOST_OWN:
            gone = next((each for each in self._own if each not in self.made), None)
            if gone is None:
                return self.shared
            del self._own[gone]
        own = self._own[client] = self.shared.copy() if self.shared.known >= FIRST else Baseline()
        return own

    def mean_s(self, client: Hashable) -> float:
        """R0 of the requests of a client, in seconds; 0 while nothing is known."""
        return (self._own.get(client) or self.shared).mean_s

    @property
    def overall_s(self) -> float:
        """R0 of the last requests, whoever has made them, in seconds."""
        if not self.made:
            return self.shared.mean_s
        return sum([made * self.mean_s(client) for client, made in self.made.items()]) / sum(self.made.values())


class Baselines:
    """Baselines of the requests of a limit, by their classes. A class begins with its first request that is a sample."""

    def __init__(self) -> None:
        self.seen: list[Baseline] = []
        """Those for which requests count that the window in progress has seen."""
        self._classes: dict[Hashable, RequestClass] = {}
        self._aged_at = -math.inf

    def sampled(self, request_class: Hashable, client: Hashable, now: float) -> Baseline:
        """The baseline that a request which is a sample counts for."""
        found = self._classes.get(request_class)
        if found is None:
            if len(self._classes) >= MOST_CLASSES:
                self._make_room(now)
            found = self._classes[request_class] = RequestClass()
        found.uses += 1
        return found.shared if client is None else found.sampled(client)

    def note(self, baseline: Baseline, took_s: float) -> None:
        """Have a request count for its baseline in this window."""
        if not baseline.count:
            self.seen.append(baseline)
        baseline.count += 1
        baseline.seconds += took_s

    def mean_s(self, request_class: Hashable, client: Hashable) -> float:
        """R0 of the requests of a client, in seconds; 0 while nothing is known."""
        found = self._classes.get(request_class)
        return 0.0 if found is None else found.mean_s(client)

    def forget_window(self) -> None:
        """Begin a window."""
        for each in self.seen:
            each.count, each.seconds = 0, 0.0
        self.seen = []

    @property
    def have_many_clients(self) -> bool:
        """True if more than one client has made requests lately."""
        return len({client for each in self._classes.values() for client in each.made}) > 1

    @property
    def longest_s(self) -> float:
        """The largest R0 of any class, 0 while nothing is known."""
        return max(self.by_class().values(), default=0.0)

    def by_class(self) -> dict[Hashable, float]:
        """R0 in seconds of each class."""
        return {name: each.overall_s for name, each in self._classes.items()}

    def _make_room(self, now: float) -> None:
        """Forget the class that is used least."""
        if now - self._aged_at >= MEMORY_S:
            self._aged_at = now
            for each in self._classes.values():
                each.uses //= 2
        del self._classes[min(self._classes, key=lambda name: self._classes[name].uses)]
