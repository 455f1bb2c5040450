"""Changes from one rule set to another, for people: which rules are new, gone or other than before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from limitgate.algorithms import STORED_AS
from limitgate.limits.limit import Limit
from limitgate.messages.text import listed
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller
from limitgate.rules.rule import Rule, RuleSet


class Changes(NamedTuple):
    """Rules and callers by their names; rules of another tier than ``default`` as ``vip/api``."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    begun_anew: tuple[str, ...]
    """Rules whose buckets are other ones now, with the reason: what was owed in the old ones is not owed in these."""
    callers: tuple[str, ...]
    """Callers that are new, gone or other than before."""

    def __str__(self) -> str:
        named = {
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "begun anew": self.begun_anew,
            "callers changed": self.callers,
        }
        return "; ".join([f"{what} {listed(names)}" for what, names in named.items() if names]) or "no rule has changed"


def changes(before: RuleSet, after: RuleSet) -> Changes:
    """Compare two rule sets."""
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
    """The rules of all tiers, each where it was written."""
    return {
        rule.name if tier == DEFAULT_TIER else f"{tier}/{rule.name}": rule
        for tier, of_tier in rules.tiers.items()
        for rule in of_tier
        if (rule.tier or DEFAULT_TIER) == tier
    }


def _by_id(callers: Iterable[KnownCaller]) -> Mapping[str, list[KnownCaller]]:
    """The callers by their ids: one may be listed several times, with several keys."""
    by_id: dict[str, list[KnownCaller]] = {}
    for caller in callers:
        by_id.setdefault(caller.id, []).append(caller)
    return by_id


def _reason(old: Rule, new: Rule) -> str | None:
    """The reason why the buckets of a rule are other ones than before; None where they are the same."""
    if old.key != new.key:
        return f"key {', '.join(new.key)} instead of {', '.join(old.key)}"
    if old.paths != new.paths and new.key_asks("path"):
        return "path, by which it counts"
    before = {limit.period: limit for limit in old.every_limit}
    stored = {_stored_as(limit) for limit in old.every_limit}
    for limit in new.every_limit:
        if limit.period in before and _stored_as(limit) not in stored:
            return f"{limit.algorithm} instead of {before[limit.period].algorithm}"
    return None


def _stored_as(limit: Limit) -> tuple[int, int]:
    """Period and algorithm as the store knows them: by these a limit finds what was owed before."""
    return limit.period, STORED_AS[limit.algorithm]
