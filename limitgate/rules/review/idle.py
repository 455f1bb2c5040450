"""Limits and rules that never refuse, since others that count the same requests always do so before. Pure."""

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
"""Algorithms of which two counts may pass at the border of two windows."""
MOST_COMPARED = 100
"""Rules of a group that one is compared with, the tightest first: of thousands each may be tighter in another way."""
_FIXED_LENGTHS = (None, *ALIGNED)
"""Values of ``align`` whose windows all have the same length; days of a time zone have not."""


def idle_limits(limits: Sequence[Limit]) -> Iterator[tuple[int, Limit]]:
    """Places of limits that never refuse, with a limit beside each that always does so before; of equal ones the latter."""
    for place, limit in enumerate(limits):
        for other_place, other in enumerate(limits):
            if other_place != place and is_tighter(other, limit) and (other_place < place or not is_tighter(limit, other)):
                yield place, other
                break


def is_tighter(limit: Limit, other: Limit) -> bool:
    """True if another limit never refuses what this one admits, where both count the same requests at the same cost.

    A bucket that drains faster owes no more than one that drains slower, whatever comes. So it has room where the other one
    has, if it also holds at least as much as that can have admitted at once. False as well where that is not known.
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
    """Rules of a tier that never refuse, with a rule that always does so before; of equal ones the latter."""
    compared = [rule for rule in of_tier if _is_compared(rule)]
    places = {id(rule): place for place, rule in enumerate(compared)}
    coverage = Coverage([rule for rule in compared if not rule.shadow], _kind)
    ranked: dict[int, _Ranked] = {}
    for rule in compared:
        if rule.adaptive:  # which refuses where the limits of others would not
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
    """What has to be the same for two rules to count the same."""
    return rule.key, rule.cost, rule.per, rule.reserve


def _goes_before(other: Rule, rule: Rule, places: Mapping[int, int]) -> bool:
    """True if another rule always refuses before this one does; of two that are equal the first one."""
    if other is rule or not _precedes(other, rule):
        return False
    return places[id(other)] < places[id(rule)] or rule.shadow or other.adaptive is not None or not _precedes(rule, other)


class _Ranked:
    """Rules by what only limits of the same sort are tighter than, and then by their tightness."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        sorts: dict[_Sorts, list[Rule]] = {}
        for rule in rules:
            sorts.setdefault(_sorts(rule), []).append(rule)
        self._by_sorts = {each: _ByTightness(of_sorts) for each, of_sorts in sorts.items()}

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        """The rules that may be as tight as this one or tighter, beginning with those of the same sorts of limits."""
        needed = _sorts(rule)
        if needed in self._by_sorts:
            yield from self._by_sorts[needed].tighter(rule)
        for sorts, ranked in self._by_sorts.items():
            if needed < sorts:
                yield from ranked.tighter(rule)


_Sorts = frozenset[object]


def _sorts(rule: Rule) -> _Sorts:
    """Of a rule's limits, the windows that slide, and whether there are places in flight: see `is_tighter`."""
    limits = [limit for limit in rule.every_limit if not limit.period or limit.algorithm == "sliding_window"]
    return frozenset([_window(limit) if limit.period else None for limit in limits])


class _ByTightness:
    """Rules by the slowest rate and the least burst of their limits: one that is tighter than another has neither above it."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = sorted(rules, key=lambda rule: (*_tightness(rule), _places(rule)))
        self._keys = [_tightness(rule) for rule in self._rules]
        self._least = list(accumulate([burst for _, burst in self._keys], min))
        """The least burst up to each place."""

    def tighter(self, rule: Rule) -> Iterator[Rule]:
        """The rules that may be as tight as this one or tighter, the tightest first."""
        if not any(limit.period for limit in rule.every_limit):  # those with a rate as well may have its limits, too
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
    """True if a rule is for every request that another one of its kind is for, and is as tight throughout."""
    if len(rule.paths) > 1 and rule.key_asks("path"):  # it may count in several buckets what the other counts in one
        return False
    tighter = all(any(is_tighter(limit, each) for limit in rule.every_limit) for each in other.every_limit)
    return tighter and is_for_all_of(rule, other)


def is_for_all_of(rule: Rule, other: Rule) -> bool:
    """True if a rule is certain to be for every request that another one is for."""
    if rule.when is not None or (rule.exclude and rule.exclude != other.exclude):
        return False
    if not admits_clients_of(rule, other):
        return False
    if rule.methods is not None and (other.methods is None or not other.methods <= rule.methods):
        return False
    around = {segments(path) for path in rule.paths}
    patterns = [each for each in around if ANY in each or REST in each]
    return all(each in around or any(covers(pattern, each) for pattern in patterns) for each in map(segments, other.paths))
