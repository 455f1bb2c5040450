"""What Guava's SmoothWarmingUp should answer, in exact fractions and in its own terms: stored permits, intervals, a slope.

It shares no arithmetic with the package.

Two things are ours. What stored permits cost above the stable interval is summed from the cold and rounded up to a tick of
1/count µs. And a limit that is changed goes on with as many requests owed, and as many permits taken from what it stores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from limitgate.limits.limit import Limit

COLD_FACTOR = 3
LONGEST_US = 2**52


@dataclass(frozen=True)
class Rate:
    """What follows from a limit, as Guava's ``doSetRate`` works it out; times in µs."""

    count: int
    stable: Fraction
    threshold: Fraction
    most: Fraction
    slope: Fraction
    cool_down: Fraction

    def interval(self, above: Fraction) -> Fraction:
        """What a permit costs with so many stored above the threshold."""
        return self.stable + above * self.slope

    def time_of_stored(self, stored: Fraction, taken: Fraction) -> Fraction:
        """What it takes to take permits out of those that are stored: the area below the line."""
        above = max(Fraction(0), stored - self.threshold)
        dear = min(above, taken)
        return dear * (self.interval(above) + self.interval(above - dear)) / 2 + (taken - dear) * self.stable

    def toll(self, taken: Fraction) -> int:
        """Ticks, rounded up, that permits cost above the stable interval if they are taken from all that can be stored."""
        return math.ceil((self.time_of_stored(self.most, taken) - taken * self.stable) * self.count)


@lru_cache(maxsize=10_000)
def rate_of(limit: Limit) -> Rate:
    warm_up = round(Fraction(limit.warm_up) * 1_000_000)
    stable = Fraction(limit.period * 1_000_000, limit.count)
    threshold = Fraction(warm_up) / 2 / stable
    most = threshold + 2 * warm_up / (stable + COLD_FACTOR * stable)
    slope = (COLD_FACTOR * stable - stable) / (most - threshold)
    return Rate(limit.count, stable, threshold, most, slope, warm_up / most)


@dataclass
class Guava:
    """One limiter. ``owed`` is the time until the next free permit in requests, ``taken`` what is missing of stored permits."""

    limit: Limit
    now: int
    owed: Fraction = Fraction(0)
    taken: Fraction = Fraction(0)

    def at(self, now: int) -> None:
        """Guava's ``resync``; time that went backwards is no time."""
        rate, elapsed = rate_of(self.limit), max(0, now - self.now)
        idle = elapsed - self.owed * rate.stable
        self.now = now
        self.owed = max(Fraction(0), -idle / rate.stable)
        self.taken = max(Fraction(0), self.taken - max(Fraction(0), idle) / rate.cool_down)

    def under(self, limit: Limit) -> None:
        """Another rate, as many requests."""
        self.limit = limit
        self.owed = min(self.owed, LONGEST_US / rate_of(limit).stable)
        self.taken = min(self.taken, rate_of(limit).most)

    def wait_us(self, cost: int) -> float:
        """Microseconds until ``cost`` permits can be had, infinity if they would be owed for too long."""
        rate = rate_of(self.limit)
        if cost * rate.stable + rate.most * rate.stable > LONGEST_US:
            return math.inf
        return math.ceil(self.owed * rate.stable) if cost else 0

    def take(self, cost: Fraction, permits: Fraction | None = None) -> None:
        """Reserve permits, so many of them out of the store if there are; none are owed for longer than can be remembered."""
        rate = rate_of(self.limit)
        before, self.taken = self.taken, min(rate.most, self.taken + (cost if permits is None else permits))
        self.owed += cost + self._requests(rate.toll(self.taken) - rate.toll(before))
        self.owed = min(self.owed, LONGEST_US / rate.stable)

    def put_back(
        self, cost: Fraction, permits: Fraction, since_us: int, grace_us: int, turn_us: int, *, warmest: Fraction
    ) -> None:
        """Give back the last that was taken, which has been paid for by the time since: that has cooled the limiter instead.

        It has paid the toll of a limiter that was at least so warm before it cooled. A turn that is still ahead stays taken if
        more is owed than there would be if it were the last one.
        """
        rate = rate_of(self.limit)
        other = max(Fraction(0), self.taken - permits)
        paid_at = min(rate.most, max(self.taken, warmest))
        cost += self._requests(rate.toll(paid_at) - rate.toll(max(Fraction(0), paid_at - permits)))
        if turn_us > since_us and self.owed >= cost + (grace_us + 1 - since_us) / rate.stable:
            return
        self.taken = other
        paid = min(cost, max(0, since_us - grace_us) / rate.stable)
        self.owed = max(Fraction(0), self.owed - (cost - paid))
        self.taken = max(Fraction(0), self.taken - paid)

    def _requests(self, ticks: int) -> Fraction:
        return Fraction(ticks, self.limit.period * 1_000_000)
