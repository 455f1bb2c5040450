"""Suggests the smallest limits that would refuse no request of a log, or almost none."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from limitgate.limits.limit import SECONDS
from limitgate.limits.plan import BucketReading
from limitgate.limits.template import PlainSpend

UNITS = ("second", "minute", "hour", "day")
TOLERATED = 1000
"""One refusal per this many requests."""
_SECOND_US = 1_000_000


class Arrivals:
    """Times of requests per bucket: eight bytes each, plus 250 per bucket."""

    def __init__(self) -> None:
        self._of_rule: dict[str, dict[str, array[int]]] = {}
        """Times in µs, by rule and key."""

    def note(self, now: int, evidence: Sequence[BucketReading]) -> None:
        """Note a request for all its buckets, even if refused."""
        if isinstance(evidence, PlainSpend):
            charged = [(charge.rule, key) for charge, key in zip(evidence.template.charges, evidence.keys)]
        else:
            charged = [(bucket.charge.rule, bucket.charge.key) for bucket in evidence]
        for rule, key in dict.fromkeys(charged):
            if rule is None:
                continue
            times = self._of_rule.setdefault(rule, {}).get(key)
            if times is None:
                times = self._of_rule[rule][key] = array("q")
            times.append(now)

    def suggestions(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return two counts by rule and unit. The first refuses no request, the second one request in `TOLERATED`."""
        return {rule: _of_buckets(list(buckets.values())) for rule, buckets in self._of_rule.items()}


def _of_buckets(buckets: list[array[int]]) -> dict[str, tuple[int, int]]:
    buckets.sort(key=len, reverse=True)
    found = {}
    for unit in UNITS:
        period = SECONDS[unit] * _SECOND_US
        for_all = smallest_count(buckets, period)
        found[unit] = for_all, count_for_almost_all(buckets, period, for_all)
    return found


def smallest_count(buckets: Sequence[Sequence[int]], period: int) -> int:
    """Return the smallest count per ``period`` (µs) that refuses no request. The longest of ``buckets`` comes first."""
    count = 1
    for times in buckets:
        if len(times) <= count:
            break
        if refused(times, count, period, 0):
            # A burst of all arrivals admits all of them.
            count += 1 + bisect_left(range(count + 1, len(times)), True, key=partial(_fits, times, period))
    return count


def _fits(times: Sequence[int], period: int, count: int) -> bool:
    return not refused(times, count, period, 0)


def count_for_almost_all(buckets: Sequence[Sequence[int]], period: int, for_all: int) -> int:
    """Return the count that refuses one request in `TOLERATED`; ``for_all`` refuses none."""
    most = sum(map(len, buckets)) // TOLERATED

    def fits(count: int) -> bool:
        left = most
        for times in buckets:
            if len(times) <= count or left < 0:
                break
            left -= refused(times, count, period, left)
        return left >= 0

    return 1 + bisect_left(range(1, for_all), True, key=fits)


def refused(times: Sequence[int], count: int, period: int, most: int) -> int:
    """Return how many arrivals GCRA refuses, up to ``most + 1``.

    Uses the arithmetic of `limitgate.algorithms.gcra`, with the count as burst.
    """
    room, debt, last, number = (count - 1) * period, 0, times[0], 0
    for now in times:
        debt -= (now - last) * count
        last = now
        if debt <= 0:
            debt = period
        elif debt <= room:
            debt += period
        else:
            number += 1
            if number > most:
                break
    return number
