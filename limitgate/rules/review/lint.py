"""Finds limits that admit more than they seem to, and rules that never apply. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.http.paths import covers, segments
from limitgate.limits.bucket import Priority
from limitgate.limits.limit import SECONDS, Limit
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.rule import Rule, RuleSet

_SHORTER = 3 * SECONDS["day"]
"""Maximum difference in seconds between calendar months."""


def most_within(period: int, limits: Sequence[Limit]) -> int:
    """Return the maximum that limits, checked together, admit in any half-open interval of ``period`` seconds."""
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
    """Yield ``(limit, most, burst)`` for each limit that admits more than its count in one period.

    ``burst`` is the largest that avoids it. Omits limits whose algorithm has no burst, and bursts that the cost requires.
    """
    least = max(1, rule.cost) if isinstance(rule.cost, int) else 1
    for limit in [limit for limit in rule.every_limit if limit.period]:
        most = most_within(limit.period, rule.every_limit)
        if most > limit.count and limit.burst > least and ALGORITHMS[limit.algorithm] is gcra:
            yield limit, most, least


def tiers_of_nobody(rules: RuleSet, known: Collection[str]) -> list[str]:
    """Return the tiers whose rules never apply. ``known`` are the tiers that callers can have."""
    return [tier for tier in rules.tiers if tier != DEFAULT_TIER and tier not in known]


def reserves_of_nobody(rules: RuleSet, known: Collection[Priority]) -> list[str]:
    """Return the names of rules with a reserve for high priority if no caller has it."""
    every = [] if "high" in known else [rule for of_tier in rules.tiers.values() for rule in of_tier]
    high = {rule.name for rule in every if rule.priority == "high"}
    return list(dict.fromkeys(rule.name for rule in every if rule.reserve and rule.name not in high))


Find = Callable[[Rule, str], Sequence[Rule]]
"""Finds rules that may cover a rule at one of its paths, in the order of the tier."""


def shadowed(rules: RuleSet, known: Collection[str], index: Callable[[Sequence[Rule]], Find]) -> Iterator[tuple[Rule, Rule]]:
    """Yield each rule that exempt rules cover in all its tiers, and the first of these exempt rules.

    Ignores tiers that are not ``known``, because nothing applies there. ``index`` makes the search for exempt rules.
    """

    def finder(of_tier: Sequence[Rule]) -> Find:
        find = index([rule for rule in of_tier if rule.exempt])
        return lambda rule, path: [] if rule.exempt else find(rule, path)

    return switched_off(rules, known, finder)


def switched_off(
    rules: RuleSet, known: Collection[str], finder: Callable[[Sequence[Rule]], Find]
) -> Iterator[tuple[Rule, Rule]]:
    """Yield each rule that others cover in all its tiers, and the first of these.

    ``finder`` makes the search for covering rules among the rules of a tier.
    """
    found: dict[int, tuple[Rule, list[Rule | None]]] = {}
    for tier, of_tier in rules.tiers.items():
        if tier == DEFAULT_TIER or tier in known:
            find = finder(of_tier)
            for rule in of_tier:
                found.setdefault(id(rule), (rule, []))[1].append(_shadow_of(rule, find))
    for rule, by in found.values():
        if by[0] is not None and None not in by:
            yield rule, by[0]


def admits_clients_of(rule: Rule, other: Rule) -> bool:
    """True if ``rule`` matches all clients that ``other`` matches."""
    return not rule.clients or (bool(other.clients) and rule.networks.cover(other.networks))


def _shadow_of(rule: Rule, find: Find) -> Rule | None:
    first = None
    for path in rule.paths:
        others = [other for other in find(rule, path) if not (other.when or other.exclude) and admits_clients_of(other, rule)]
        shadow = _shadow_at(segments(path), rule, others)
        if shadow is None:
            return None
        first = first or shadow
    return first


def _shadow_at(pattern: Sequence[str], rule: Rule, others: Sequence[Rule]) -> Rule | None:
    around = [other for other in others if any(covers(segments(path), pattern) for path in other.paths)]
    for other in around:
        if other.methods is None:
            return other
    methods = rule.methods or ()
    covered = [next((other for other in around if other.applies_to(method)), None) for method in methods]
    return covered[0] if covered and None not in covered else None
