"""Limits and rules that never refuse, because others always refuse first. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, islice
from math import inf

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.fixed_window import ALIGNED
from limitgate.http.paths import ANY, REST, covers, segments
from limitgate.limits.limit import Limit
from limitgate.rules.review.coverage import Coverage
from limitgate.rules.review.lint import admits_clients_of, most_within
from limitgate.rules.rule import Rule

_AT_A_BORDER = ("fixed_window", "sliding_window")
"""Algorithms that can admit two counts at the border of two windows."""
MOST_COMPARED = 100
"""Bounded, because each of thousands may be tighter in another way."""
_FIXED_LENGTHS = (None, *ALIGNED)
"""Alignments with windows of equal length, unlike days in a time zone."""


def idle_limits(limits: Sequence[Limit]) -> Iterator[tuple[int, Limit]]:
    """Yield the index of each limit that never refuses, and a limit that refuses first: the earlier of two equal ones."""
    for place, limit in enumerate(limits):
        for other_place, other in enumerate(limits):
            if other_place != place and is_tighter(other, limit) and (other_place < place or not is_tighter(limit, other)):
                yield place, other
                break


def is_tighter(limit: Limit, other: Limit) -> bool:
    """True if ``limit`` never admits what ``other`` refuses, given the same requests and costs. False if unknown.

    A bucket that drains faster never has more debt than a slower one. So it has room when the other has, if its burst is at
    least what the other can admit at once.
    """
    if not (limit.count and other.count and limit.period and other.period):
        return not limit.count or (not (limit.period or other.period) and limit.burst <= other.burst)
    if limit.borrow or other.borrow or limit.warm_up or other.warm_up:
        return False
    if _window(limit) == _window(other):
        return limit.count <= other.count and limit.burst <= other.burst
    if not (_has_fixed_length(limit) and _has_fixed_length(other)):
        return False
    if ALGORITHMS[other.algorithm] is gcra:
        at_once = limit.burst if ALGORITHMS[limit.algorithm] is gcra else limit.count
        if limit.algorithm in _AT_A_BORDER:
            at_once *= 2
        return at_once <= other.burst and limit.count * other.period <= other.count * limit.period
    return other.algorithm != "sliding_window" and most_within(other.period, [limit]) <= other.count


def _has_fixed_length(limit: Limit) -> bool:
    return limit.align in _FIXED_LENGTHS and not limit.months


def _window(limit: Limit) -> tuple[str, int, int, str | None]:
    return limit.algorithm, limit.period, limit.months, limit.align


def idle_rules(of_tier: Sequence[Rule]) -> Iterator[tuple[Rule, Rule]]:
    """Yield each rule of a tier that never refuses, and a rule that refuses first: the earlier of two equal ones."""
    compared = [rule for rule in of_tier if _is_compared(rule)]
    places = {id(rule): place for place, rule in enumerate(compared)}
    coverage = Coverage([rule for rule in compared if not rule.shadow], _kind)
    ranked: dict[int, _Ranked] = {}
    for rule in compared:
        if rule.adaptive:  # it refuses when the limits of others don't
            continue
        for group in coverage.groups(rule):
            if id(group) not in ranked:
                ranked[id(group)] = _Ranked(group)
            nearest = islice(ranked[id(group)].tighter(rule), MOST_COMPARED)
            other = next((other for other in nearest if _goes_before(other, rule, places)), None)
            if other is not None:
                yield rule, other
                break


def _is_compared(rule: Rule) -> bool:
    if not (rule.has_limits and rule.every_limit) or rule.limits_by is not None:
        return False
    return not (rule.replaces or rule.charge_if or rule.ban or rule.max_delay or callable(rule.cost))


def _kind(rule: Rule) -> tuple[object, ...]:
    return rule.key, rule.cost, rule.per, rule.reserve


def _goes_before(other: Rule, rule: Rule, places: Mapping[int, int]) -> bool:
    if other is rule or not _precedes(other, rule):
        return False
    return places[id(other)] < places[id(rule)] or rule.shadow or other.adaptive is not None or not _precedes(rule, other)


class _Ranked:
    def __init__(self, rules: Sequence[Rule]) -> None:
        sorts: dict[_Sorts, list[Rule]] = {}
        for rule in rules:
            sorts.setdefault(_sorts(rule), []).append(rule)
        self._by_sorts = {each: _ByTightness(of_sorts) for each, of_sorts in sorts.items()}

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        needed = _sorts(rule)
        if needed in self._by_sorts:
            yield from self._by_sorts[needed].tighter(rule)
        for sorts, ranked in self._by_sorts.items():
            if needed < sorts:
                yield from ranked.tighter(rule)


_Sorts = frozenset[object]


def _sorts(rule: Rule) -> _Sorts:
    """Sliding windows and limits in flight are tighter only than their own sort. See `is_tighter`."""
    limits = [limit for limit in rule.every_limit if not limit.period or limit.algorithm == "sliding_window"]
    return frozenset([_window(limit) if limit.period else None for limit in limits])


class _ByTightness:
    """Rules by their slowest rate and smallest burst, neither of which is higher in a tighter rule."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = sorted(rules, key=lambda rule: (*_tightness(rule), _places(rule)))
        self._keys = [_tightness(rule) for rule in self._rules]
        self._least = list(accumulate([burst for _, burst in self._keys], min))

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        if not any(limit.period for limit in rule.every_limit):  # rules with a rate may also have its limits
            yield from self._rules
            return
        key = _tightness(rule)
        end = bisect_left(self._keys, key)
        if end and self._least[end - 1] <= key[1]:
            yield from (self._rules[place] for place in range(end) if self._keys[place][1] <= key[1])
        yield from (self._rules[place] for place in range(end, bisect_right(self._keys, key)))


def _tightness(rule: Rule) -> tuple[Fraction | float, float]:
    rates = [Fraction(limit.count, limit.period) for limit in rule.every_limit if limit.period]
    bursts = [limit.burst for limit in rule.every_limit if limit.period]
    return (min(rates), min(bursts)) if rates else (inf, inf)


def _places(rule: Rule) -> float:
    return min([limit.burst for limit in rule.every_limit if not limit.period], default=inf)


def _precedes(rule: Rule, other: Rule) -> bool:
    if len(rule.paths) > 1 and rule.key_asks("path"):  # it may count in several buckets what the other counts in one
        return False
    tighter = all(any(is_tighter(limit, each) for limit in rule.every_limit) for each in other.every_limit)
    return tighter and is_for_all_of(rule, other)


def is_for_all_of(rule: Rule, other: Rule) -> bool:
    """True if ``rule`` certainly matches every request that ``other`` matches."""
    if rule.when is not None or (rule.exclude and rule.exclude != other.exclude):
        return False
    if not admits_clients_of(rule, other):
        return False
    if rule.methods is not None and (other.methods is None or not other.methods <= rule.methods):
        return False
    around = {segments(path) for path in rule.paths}
    patterns = [each for each in around if ANY in each or REST in each]
    return all(each in around or any(covers(pattern, each) for pattern in patterns) for each in map(segments, other.paths))
