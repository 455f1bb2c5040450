"""Suggests the smallest limits that would refuse no request of a log, or almost none."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.fixed_window import ALIGNED
from limitgate.errors import ConfigError
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.limits.bucket import Bucket
from limitgate.limits.limit import SECONDS, Limit
from limitgate.limits.plan import BucketReading
from limitgate.limits.template import PlainSpend
from limitgate.rules.options import Cost
from limitgate.rules.rule import Rule

UNITS = ("second", "minute", "hour", "day")
TOLERATED = 1000
"""One refusal per this many requests."""
_IN_FLIGHT = "it limits requests in flight, but a log has no durations"


class _Unknown(Exception):  # noqa: N818
    """No limit can be suggested. The text is the reason."""


class Terms(NamedTuple):
    """What a suggested limit has besides its count."""

    unit: str
    cost: int = 1
    algorithm: str = "gcra"
    align: str | None = None
    borrow: bool = False
    max_wait_us: int = 0

    def limit(self, count: int) -> Limit:
        """Raises `ConfigError` if the algorithm doesn't support the count."""
        return Limit(f"{count}/{self.unit}", algorithm=self.algorithm, align=self.align, borrow=self.borrow)

    @property
    def least(self) -> int:
        return 1 if self.borrow else max(1, self.cost)


class Suggestions(NamedTuple):
    counts: dict[str, dict[str, tuple[int, int]]]
    """Two counts by rule and unit. The first refuses no request, the second one request in `TOLERATED`."""
    left_out: dict[str, dict[str, list[str]]]
    """Units by rule and reason."""


class Arrivals:
    """Times of requests per bucket: eight bytes each, plus 250 per bucket."""

    def __init__(self, listed: Iterable[Rule] = ()) -> None:
        self._listed = list(listed)
        self._rules: dict[str, dict[int, Rule]] = {}
        """The rules of each name, which tiers may replace."""
        self._of_rule: dict[str, dict[str, array[int]]] = {}
        """Times in µs, by rule and key."""

    def note(self, now: int, rules: Iterable[CompiledRule], evidence: Sequence[BucketReading]) -> None:
        """Note a request once for each of its rules, even if refused."""
        if isinstance(evidence, PlainSpend):
            charged = [
                (charge.rule, key.removesuffix(charge.bucket.suffix))
                for charge, key in zip(evidence.template.charges, evidence.keys)
            ]
        else:
            charged = [(charge.rule, charge.key.removesuffix(charge.bucket.suffix)) for charge, *_ in evidence]
        for rule in rules:
            self._rules.setdefault(rule.name, {})[id(rule.written)] = rule.written
        for name, key in dict.fromkeys(charged):
            if name is None:
                continue
            times = self._of_rule.setdefault(name, {}).get(key)
            if times is None:
                times = self._of_rule[name][key] = array("q")
            times.append(now)

    def suggestions(self) -> Suggestions:
        found = Suggestions({}, {})
        for name, buckets in self._of_rule.items():
            longest_first = sorted(buckets.values(), key=len, reverse=True)
            for unit in UNITS:
                try:
                    counts = _counts(list(self._rules[name].values()), longest_first, unit)
                    found.counts.setdefault(name, {})[unit] = counts
                except _Unknown as reason:
                    found.left_out.setdefault(name, {}).setdefault(str(reason), []).append(unit)
        for rule in self._listed:
            if rule.has_limits and not (rule.limits_by or any(limit.period for limit in rule.every_limit)):
                found.left_out.setdefault(rule.name, {}).setdefault(_IN_FLIGHT, [*UNITS])
        return found


def _counts(rules: Sequence[Rule], buckets: Sequence[Sequence[int]], unit: str) -> tuple[int, int]:
    """Raises `_Unknown`."""
    every = {terms_of(rule, unit) for rule in rules}
    if len(every) > 1:
        raise _Unknown("tiers or endpoints have rules of this name that differ in algorithm, cost or max_delay")
    (terms,) = every
    for_all = smallest_count(buckets, terms)
    try:
        for rule in rules:
            rule.having_limits((terms.limit(for_all),))
    except ConfigError:
        raise _Unknown(f"the highest count that {terms.algorithm} supports is not enough") from None
    return for_all, count_for_almost_all(buckets, terms, for_all)


def terms_of(rule: Rule, unit: str) -> Terms:
    """Return the terms of the rule's limits with this unit. Without one, those that all its limits share, or its own.

    Raises `_Unknown`.
    """
    if rule.charge_if is not None:
        raise _Unknown("charge_if refunds requests")
    if rule.reserve is not None:
        raise _Unknown("the reserve depends on the caller's priority")
    terms = list(_each_terms(rule, unit))
    if not terms and not rule.limits_by and not any(limit.period for limit in rule.every_limit):
        raise _Unknown(_IN_FLIGHT)
    here = {each for limit, each in terms if limit.unit == unit}
    if len(here) > 1:
        raise _Unknown("its limits of this unit differ in algorithm or cost")
    shared = here or {each for _, each in terms}
    (found,) = shared if len(shared) == 1 else [_terms(rule, unit, rule.algorithm or "gcra", rule.align, rule.cost)]
    if found.algorithm == "warm_up":
        raise _Unknown("with warm_up, a larger count may refuse more requests")
    return found


def _each_terms(rule: Rule, unit: str) -> Iterator[tuple[Limit, Terms]]:
    costs = rule.bucket_costs or [None] * len(rule.buckets)
    for bucket, own in zip(rule.buckets, costs):
        cost = rule.cost if own is None else own
        for limit in bucket.limits:
            if limit.period and limit.count:
                yield limit, _terms(rule, unit, limit.algorithm, limit.align, cost, borrow=limit.borrow)


def _terms(rule: Rule, unit: str, algorithm: str, align: str | None, cost: Cost, *, borrow: bool = False) -> Terms:
    if not isinstance(cost, int):
        raise _Unknown("the cost depends on the request")
    algorithm = "gcra" if ALGORITHMS[algorithm] is gcra else algorithm
    is_unable = algorithm != "fixed_window" or (align not in ALIGNED and SECONDS[unit] % SECONDS["day"])
    return Terms(unit, cost, algorithm, None if is_unable else align, borrow, rule.max_wait_us)


def smallest_count(buckets: Sequence[Sequence[int]], terms: Terms) -> int:
    """Return the smallest count that refuses no request, or one that the algorithm doesn't support, see `Terms.limit`.

    The longest of ``buckets`` comes first.
    """
    count = terms.least
    for times in buckets:
        # A burst of all arrivals admits all of them.
        most = len(times) * terms.cost
        if most <= count:
            break
        if not _fits(times, terms, count):
            count += 1 + bisect_left(range(count + 1, most), True, key=partial(_fits, times, terms))
    return count


def _fits(times: Sequence[int], terms: Terms, count: int) -> bool:
    return not refused(times, terms, count, 0)


def count_for_almost_all(buckets: Sequence[Sequence[int]], terms: Terms, for_all: int) -> int:
    """Return the count that refuses one request in `TOLERATED`; ``for_all`` refuses none."""
    most = sum(map(len, buckets)) // TOLERATED

    def fits(count: int) -> bool:
        left = most
        for times in buckets:
            if len(times) * terms.cost <= count or left < 0:
                break
            left -= refused(times, terms, count, left)
        return left >= 0

    return terms.least + bisect_left(range(terms.least, for_all), True, key=fits)


@lru_cache(maxsize=64)
def _bucket(terms: Terms, count: int) -> Bucket | None:
    """None if the algorithm doesn't support the count."""
    try:
        return Bucket((terms.limit(count),))
    except ConfigError:
        return None


def refused(times: Sequence[int], terms: Terms, count: int, most: int) -> int:
    """Return how many arrivals the limit refuses, up to ``most + 1``. An unsupported count, which is too high, refuses none."""
    bucket, cost, max_wait_us = _bucket(terms, count), terms.cost, terms.max_wait_us
    if bucket is None:
        return 0
    if bucket.algorithm is gcra and not (bucket.borrow or max_wait_us):
        return _refused_by_gcra(times, bucket, cost, most)
    advance, try_charge = bucket.algorithm.advance, bucket.algorithm.try_charge
    last, number = times[0], 0
    states = bucket.algorithm.initial(last, bucket)
    for now in times:
        states = advance(states, now - last, bucket, now)
        last = now
        after = try_charge(states, bucket, cost, max_wait_us)
        if after is None:
            number += 1
            if number > most:
                break
        else:
            states = after
    return number


def _refused_by_gcra(times: Sequence[int], bucket: Bucket, cost: int, most: int) -> int:
    """The functions of `limitgate.algorithms.gcra` inline, ten times as fast."""
    (count,), (capacity,), ticks = bucket.counts, bucket.capacities, cost * bucket.weights[0]
    room, debt, last, number = capacity - ticks, 0, times[0], 0
    for now in times:
        debt -= (now - last) * count
        last = now
        if debt <= 0:
            debt = ticks
        elif debt <= room:
            debt += ticks
        else:
            number += 1
            if number > most:
                break
    return number
