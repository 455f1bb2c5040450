"""The digest of a rule set, which processes compare.

The digest covers the rules and their order within a tier, not how they are written: YAML or Python, ``qps: 5`` or
``5/second``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from limitgate.limits.limit import Limit
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller
from limitgate.rules.rule import Rule, RuleSet

_DIGITS = 12
"""48 bits, which a float holds exactly."""
_IN_LIMITS = ("limits", "qps", "qpm", "qph", "qpd", "concurrency")
_OF_GIVEN_LIMITS = ("algorithm", "align", "lease")
"""Part of written limits, so omitted unless limits can be given at run time."""


def digest(rules: RuleSet) -> str:
    """Return the SHA-256 of the canonical form of a rule set, as 64 hex digits."""
    return sha256(canonical(rules).encode()).hexdigest()


_revisions: WeakKeyDictionary[RuleSet, int] = WeakKeyDictionary()
"""Cached, because a revision takes some 50 ms for 1,000 rules."""


def revision(rules: RuleSet) -> int:
    """Return the first 12 hex digits of the `digest` as a number."""
    known = _revisions.get(rules)
    if known is None:
        known = _revisions[rules] = int(digest(rules)[:_DIGITS], 16)
    return known


def canonical(rules: RuleSet) -> str:
    """Return the canonical form of a rule set: JSON with sorted keys, and callables by name."""
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
    said |= {"path": rule.paths, "tier": rule.tier or DEFAULT_TIER}
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
    return _name(value) if callable(value) else str(value)


def _name(function: Callable[..., Any]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
