"""Limits and rules that never refuse, since others that count the same requests always do so before. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.fixed_window import ALIGNED
from limitgate.http.paths import ANY, REST, covers, segments
from limitgate.limits.limit import Limit
from limitgate.rules.lint import admits_clients_of, most_within
from limitgate.rules.rule import Rule

_AT_A_BORDER = ("fixed_window", "sliding_window")
"""Algorithms of which two counts may pass at the border of two windows."""
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
    if not (limit.period and other.period):
        return not (limit.period or other.period) and limit.burst <= other.burst
    if limit.borrow or other.borrow or limit.warm_up or other.warm_up:
        return False
    if _window(limit) == _window(other):
        return limit.count <= other.count and limit.burst <= other.burst
    if limit.align not in _FIXED_LENGTHS or other.align not in _FIXED_LENGTHS:
        return False
    if ALGORITHMS[other.algorithm] is gcra:
        at_once = limit.burst if ALGORITHMS[limit.algorithm] is gcra else limit.count
        if limit.algorithm in _AT_A_BORDER:
            at_once *= 2
        return at_once <= other.burst and limit.count * other.period <= other.count * limit.period
    return other.algorithm != "sliding_window" and most_within(other.period, [limit]) <= other.count


def _window(limit: Limit) -> tuple[str, int, str | None]:
    return limit.algorithm, limit.period, limit.align


def idle_rules(of_tier: Sequence[Rule]) -> Iterator[tuple[Rule, Rule]]:
    """Rules of a tier that never refuse, with a rule that always does so before; of equal ones the latter."""
    limited = [rule for rule in of_tier if rule.has_limits and rule.every_limit and rule.limits_by is None]
    places = {id(rule): place for place, rule in enumerate(limited)}
    around = _Around(limited)
    for rule in limited:
        for other in around.find(rule):
            is_first = places[id(other)] < places[id(rule)]
            if other is not rule and _precedes(other, rule) and (is_first or not _precedes(rule, other)):
                yield rule, other
                break


class _Around:
    """Finds the rules that may be for all requests of another one: their literal segments are the first ones of its path."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_beginning: dict[tuple[str, ...], list[Rule]] = {}
        for rule in rules:
            beginnings = {tuple(takewhile(lambda each: each not in (ANY, REST), segments(path))) for path in rule.paths}
            for beginning in beginnings:
                self._by_beginning.setdefault(beginning, []).append(rule)

    def find(self, rule: Rule) -> Iterator[Rule]:
        """The rules whose patterns begin as a path of the rule does, or shorter."""
        path = segments(rule.paths[0])
        for length in range(len(path) + 1):
            yield from self._by_beginning.get(path[:length], ())


def _precedes(rule: Rule, other: Rule) -> bool:
    """True if a rule is for every request that another one is for, counts it by the same key, and is as tight throughout."""
    if rule.shadow or any(each.replaces or each.charge_if or each.max_delay or callable(each.cost) for each in (rule, other)):
        return False
    if other.adaptive:  # which refuses where the limits of both would not
        return False
    if (rule.key, rule.cost, rule.per, rule.reserve) != (other.key, other.cost, other.per, other.reserve) or callable(
        rule.cost
    ):
        return False
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
    around = [segments(path) for path in rule.paths]
    return all(any(covers(each, segments(path)) for each in around) for path in other.paths)
