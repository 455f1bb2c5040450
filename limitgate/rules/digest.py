"""The digest of a rule set, by which processes find out whether they limit by the same rules.

It is that of the canonical form: what the rules say, however they are written. So it does not matter whether they stand in
YAML or in Python, in which files, with ``qps: 5`` or ``5/second``. Their order within a tier does matter, as it may decide
which one applies.
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
"""Hexadecimal digits of a digest that make the `revision`: 48 bits, which a float holds exactly."""
_IN_LIMITS = ("limits", "qps", "qpm", "qph", "qpd", "concurrency")
_OF_GIVEN_LIMITS = ("algorithm", "align", "lease")
"""Options that are a part of the limits that are written, and so are left out where no other limits can be given."""


def digest(rules: RuleSet) -> str:
    """SHA-256 of the canonical form of a rule set, as 64 hexadecimal digits."""
    return sha256(canonical(rules).encode()).hexdigest()


_revisions: WeakKeyDictionary[RuleSet, int] = WeakKeyDictionary()
"""Revisions of rule sets that are in use: to work one out takes some 50 ms for 1,000 rules."""


def revision(rules: RuleSet) -> int:
    """The number that the first 12 hexadecimal digits of the `digest` make."""
    known = _revisions.get(rules)
    if known is None:
        known = _revisions[rules] = int(digest(rules)[:_DIGITS], 16)
    return known


def canonical(rules: RuleSet) -> str:
    """The canonical form of a rule set: JSON with sorted keys. Callables stand in it by their names."""
    tiers = [f"{_text(tier)}:[{','.join(map(_rule, of_tier))}]" for tier, of_tier in sorted(rules.tiers.items())]
    callers = sorted(map(_caller, rules.listed_callers))
    return f'{{"callers":[{",".join(callers)}],"tiers":{{{",".join(tiers)}}}}}'


def _rule(rule: Rule) -> str:
    without = _IN_LIMITS if rule.limits_by is not None else (*_IN_LIMITS, *_OF_GIVEN_LIMITS)
    said = {name: getattr(rule, name) for name in Rule.model_fields if name not in without}
    for name in ("adaptive", "ban"):
        if said[name] is None:  # whose digest is that of versions which did not know it
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
    """What stands in JSON for a value that it does not know."""
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
    """Name of a callable that is the same in every process: where it was defined, of an object without a name its class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
