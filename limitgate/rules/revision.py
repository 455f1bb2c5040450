"""Digest of a rule set, equal for YAML and Python, and differences between rule sets. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from limitgate.algorithms import STORED_AS
from limitgate.limits.limit import Limit
from limitgate.messages.text import listed
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller
from limitgate.rules.rule import Rule, RuleSet


class Changes(NamedTuple):
    """Names of changed rules and callers, with their tier, such as ``vip/api``."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    begun_anew: tuple[str, ...]
    """Rules with new buckets, with the reason."""
    callers: tuple[str, ...]

    def __str__(self) -> str:
        named = zip(("added", "removed", "changed", "buckets reset", "callers changed"), self)
        return "; ".join([f"{what} {listed(names)}" for what, names in named if names]) or "no rule has changed"


def changes(before: RuleSet, after: RuleSet) -> Changes:
    old, new = _by_name(before), _by_name(after)
    both = [name for name in new if name in old]
    changed = [name for name in both if old[name] != new[name]]
    reasons = [(name, _reason(old[name], new[name])) for name in changed]
    callers, callers_now = _by_id(before.listed_callers), _by_id(after.listed_callers)
    return Changes(
        tuple([name for name in new if name not in old]),
        tuple([name for name in old if name not in new]),
        tuple(changed),
        tuple([f"{name} ({reason})" for name, reason in reasons if reason]),
        tuple([each for each in {**callers, **callers_now} if callers.get(each) != callers_now.get(each)]),
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
    stored = {(limit.period, STORED_AS[limit.algorithm]) for limit in old.every_limit}  # identify usage in the store
    for limit in new.every_limit:
        if limit.period in before and (limit.period, STORED_AS[limit.algorithm]) not in stored:
            return f"{limit.algorithm} instead of {before[limit.period].algorithm}"
    return None


_DIGITS = 12
"""Hex digits of a revision: 48 bits are exact in a float."""
_IN_LIMITS = ("limits", "qps", "qpm", "qph", "qpd", "concurrency")
_OF_GIVEN_LIMITS = ("algorithm", "align", "lease")


def digest(rules: RuleSet) -> str:
    """Return the SHA-256 of the `canonical` form, in hex."""
    return sha256(canonical(rules).encode()).hexdigest()


_revisions: WeakKeyDictionary[RuleSet, int] = WeakKeyDictionary()
"""Cached, because 1,000 rules take about 50 ms."""


def revision(rules: RuleSet) -> int:
    """Return the first 12 hex digits of the `digest`."""
    if rules not in _revisions:
        _revisions[rules] = int(digest(rules)[:_DIGITS], 16)
    return _revisions[rules]


def canonical(rules: RuleSet) -> str:
    """Return JSON with sorted keys. Callables appear by name."""
    tiers = [f"{_text(tier)}:[{','.join(map(_rule, of_tier))}]" for tier, of_tier in sorted(rules.tiers.items())]
    callers = sorted(map(_caller, rules.listed_callers))
    return f'{{"callers":[{",".join(callers)}],"tiers":{{{",".join(tiers)}}}}}'


def _rule(rule: Rule) -> str:
    without = _IN_LIMITS if rule.limits_by is not None else (*_IN_LIMITS, *_OF_GIVEN_LIMITS)
    said = {name: getattr(rule, name) for name in Rule.model_fields if name not in without}
    for name in ("adaptive", "ban"):
        # Keep the digests of versions without these options.
        if said[name] is None:
            del said[name]
    if not rule.body:
        del said["body"]
    said |= {"path": rule.paths, "tier": rule.tier or DEFAULT_TIER}
    if rule.own_costs:
        said["own_costs"] = {str(place): cost for place, cost in rule.own_costs.items()}
    return _text({**said, "limits": rule.every_limit, "limits_by": rule.limits_by})


def _caller(caller: KnownCaller) -> str:
    said = {name: getattr(caller, name) for name in KnownCaller.model_fields}
    header = {name.lower(): value for name, value in (caller.header or {}).items()}
    return _text({**said, "header": header, "tier": caller.tier or DEFAULT_TIER})


def _text(form: object) -> str:
    return json.dumps(form, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Limit):
        return value.given
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if not callable(value):
        return str(value)
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
