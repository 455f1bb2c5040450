"""Counts the Prometheus series of rules. Light, since `limitgate check` imports it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Final

from limitgate.limits.limit import Limit
from limitgate.observing.instruments import (
    RULE_ADAPTIVE_BASE,
    RULE_ADAPTIVE_LIMIT,
    RULE_DECISIONS,
    RULE_SHED,
    RULE_UTILIZATION,
)
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.rule import Rule, RuleSet

_OUTCOMES: Final = len(RULE_DECISIONS.values["outcome"])
_HISTOGRAM: Final = len(RULE_UTILIZATION.bounds) + len(("infinity", "sum", "count"))
_ADAPTIVE: Final = prod(map(len, RULE_SHED.values.values())) + len((RULE_ADAPTIVE_LIMIT, RULE_ADAPTIVE_BASE))


def count_series(rules: RuleSet) -> int:
    rest = _OUTCOMES + _HISTOGRAM
    return sum(rest + len(windows_of(rule.every_limit)) + _gauges(rule) for rule in written(rules).values())


def _gauges(rule: Rule) -> int:
    adapts = rule.adaptive is not None
    return (takes_slots(rule) or adapts) + bool(rule.max_delay) + bool(rule.ban) + (_ADAPTIVE if adapts else 0)


def windows_of(limits: Iterable[Limit]) -> dict[str, int]:
    """Return the count for each period. If periods are equal, the lowest count."""
    windows: dict[str, int] = {}
    for limit in limits:
        window = (limit.unit or f"{limit.period}s") if limit.period else "at_once"
        windows[window] = min(limit.count, windows.get(window, limit.count))
    return windows


def written(rules: RuleSet) -> dict[tuple[str, str], Rule]:
    """Return the rules that have metrics, by their labels."""
    of_tiers = rules.tiers.values()
    return {(rule.name, rule.tier or DEFAULT_TIER): rule for of_tier in of_tiers for rule in of_tier if not rule.exempt}


def takes_slots(rule: Rule) -> bool:
    return any(bucket.has_slots for bucket in rule.buckets)
