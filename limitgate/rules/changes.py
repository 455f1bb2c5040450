"""Differences between two rule sets, for log lines and command output. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from limitgate.algorithms import STORED_AS
from limitgate.limits.limit import Limit
from limitgate.messages.text import listed
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller
from limitgate.rules.rule import Rule, RuleSet


class Changes(NamedTuple):
    """Names of rules and callers that differ. Rules of tiers other than ``default`` appear as ``vip/api``."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    begun_anew: tuple[str, ...]
    """Rules that use new buckets, with the reason. Usage in the old buckets is lost."""
    callers: tuple[str, ...]
    """Callers that were added, removed or changed."""

    def __str__(self) -> str:
        named = {
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "buckets reset": self.begun_anew,
            "callers changed": self.callers,
        }
        return "; ".join([f"{what} {listed(names)}" for what, names in named.items() if names]) or "no rule has changed"


def changes(before: RuleSet, after: RuleSet) -> Changes:
    """Return the differences between two rule sets."""
    old, new = _by_name(before), _by_name(after)
    both = [name for name in new if name in old]
    changed = [name for name in both if old[name] != new[name]]
    reasons = [(name, _reason(old[name], new[name])) for name in changed]
    listed = _by_id(before.listed_callers), _by_id(after.listed_callers)
    return Changes(
        tuple([name for name in new if name not in old]),
        tuple([name for name in old if name not in new]),
        tuple(changed),
        tuple([f"{name} ({reason})" for name, reason in reasons if reason]),
        tuple([each for each in {**listed[0], **listed[1]} if listed[0].get(each) != listed[1].get(each)]),
    )


def _by_name(rules: RuleSet) -> dict[str, Rule]:
    return {
        rule.name if tier == DEFAULT_TIER else f"{tier}/{rule.name}": rule
        for tier, of_tier in rules.tiers.items()
        for rule in of_tier
        if (rule.tier or DEFAULT_TIER) == tier
    }


def _by_id(callers: Iterable[KnownCaller]) -> Mapping[str, list[KnownCaller]]:
    by_id: dict[str, list[KnownCaller]] = {}
    for caller in callers:
        by_id.setdefault(caller.id, []).append(caller)
    return by_id


def _reason(old: Rule, new: Rule) -> str | None:
    if old.key != new.key:
        return f"key {', '.join(new.key)} instead of {', '.join(old.key)}"
    if old.paths != new.paths and new.key_asks("path"):
        return "path, which is part of its key"
    before = {limit.period: limit for limit in old.every_limit}
    stored = {_stored_as(limit) for limit in old.every_limit}
    for limit in new.every_limit:
        if limit.period in before and _stored_as(limit) not in stored:
            return f"{limit.algorithm} instead of {before[limit.period].algorithm}"
    return None


def _stored_as(limit: Limit) -> tuple[int, int]:
    """Period and algorithm identify the usage of a limit in the store."""
    return limit.period, STORED_AS[limit.algorithm]
