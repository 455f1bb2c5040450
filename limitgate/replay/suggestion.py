"""The smallest limits under which nobody in a log, or almost nobody, would have been refused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from limitgate.limits.limit import SECONDS
from limitgate.limits.plan import BucketReading
from limitgate.limits.template import PlainSpend

UNITS = ("second", "minute", "hour", "day")
TOLERATED = 1000
"""One request of so many may be refused by limits for almost everybody."""
_SECOND_US = 1_000_000


class Arrivals:
    """When the requests of each bucket came: eight bytes for each, and some 250 for each bucket."""

    def __init__(self) -> None:
        self._of_rule: dict[str, dict[str, array[int]]] = {}
        """Per rule and key the times in microseconds."""

    def note(self, now: int, evidence: Sequence[BucketReading]) -> None:
        """Note a request for all its buckets, whether it was admitted or not."""
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
        """Per rule and unit the smallest counts that refuse nobody, and at most one request in `TOLERATED`."""
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
    """The smallest count per ``period`` in microseconds that refuses none of these arrivals; the longest of them come first."""
    count = 1
    for times in buckets:
        if len(times) <= count:
            break
        if not refused(times, count, period, 0):
            continue
        low, high = count, len(times)  # a burst of all of them holds them all
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if refused(times, middle, period, 0) else (low, middle)
        count = high
    return count


def count_for_almost_all(buckets: Sequence[Sequence[int]], period: int, for_all: int) -> int:
    """The smallest count that refuses at most one request in `TOLERATED`, given the one that refuses none."""
    most = sum(map(len, buckets)) // TOLERATED
    low, high = 0, for_all
    while high - low > 1:
        middle = (low + high) // 2
        left = most
        for times in buckets:
            if len(times) <= middle or left < 0:
                break
            left -= refused(times, middle, period, left)
        low, high = (low, middle) if left >= 0 else (middle, high)
    return high


def refused(times: Sequence[int], count: int, period: int, most: int) -> int:
    """Number of arrivals that GCRA of ``count`` per ``period`` refuses; no more than ``most + 1`` are looked for.

    The arithmetic is that of `limitgate.algorithms.gcra`, in ticks of 1/count microseconds, for a burst of the count.
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
