"""Finds limits that admit more than they seem to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.limits.limit import SECONDS, Limit
from limitgate.rules.rule import Rule

_SHORTER = 3 * SECONDS["day"]


def most_within(period: int, limits: Sequence[Limit]) -> int:
    """Return the most requests in any half-open interval of ``period`` seconds."""
    return min(_most_within(period, limit) for limit in limits if limit.period)


def _most_within(period: int, limit: Limit) -> int:
    shortest = limit.period - _SHORTER if limit.months else limit.period
    periods = -(-period // shortest)
    if limit.algorithm == "sliding_log":
        return limit.count * periods
    # The periods overlap one more window of the calendar.
    if limit.algorithm in ("fixed_window", "sliding_window"):
        return limit.count * (periods + 1)
    return limit.burst + -(-period * limit.count // limit.period) - 1


def overshooting(rule: Rule) -> Iterator[tuple[Limit, int, int]]:
    """Yield limits that admit more than their count, with that number, and the largest burst that avoids it."""
    least = max(1, rule.cost) if isinstance(rule.cost, int) else 1
    for place, limit in enumerate(rule.every_limit):
        if not limit.period:
            continue
        # Other limits bound this one only if they count the same.
        most = most_within(limit.period, (limit,) if rule.own_costs else rule.every_limit)
        own = rule.own_costs.get(place)
        smallest = own if isinstance(own, int) and own else least
        if most > limit.count and limit.burst > smallest and ALGORITHMS[limit.algorithm] is gcra:
            yield limit, most, smallest
