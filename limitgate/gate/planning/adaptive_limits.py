"""Adaptive limits of one gate: one for each rule, which stays while other rules come into force."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from limitgate.errors import ConfigError
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.overload.options import Terms
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.rule import Rule

Kind = Literal["rule", "limit"]


class AdaptiveLimits:
    """The places under each adaptive limit, by kind, tier and name of its rule. Under ``shadow`` nobody waits for one."""

    def __init__(self, *, shadow: bool = False) -> None:
        self._shadow = shadow
        self._places: dict[tuple[Kind, str, str], ConcurrencyLimiter] = {}

    def of(self, rule: Rule, kind: Kind) -> ConcurrencyLimiter:
        """The places under the limit of a rule: those of a rule of this name that was there before, if any.

        Decorators of one name share theirs. Raises `ConfigError` where they do not agree on what they share.
        """
        name = kind, rule.tier or DEFAULT_TIER, rule.name
        terms = self._terms(rule)
        places = self._places.get(name)
        if places is None:
            places = self._places.setdefault(name, ConcurrencyLimiter(terms))  # another thread may have made some meanwhile
        if kind == "limit" and places.terms != terms:  # rules of a set have names of their own, and come into force anew
            raise ConfigError(
                f"limit {rule.name!r} is there with another adaptive, max_delay or reserve,"
                " expected the same on each @limit of that name, or another name"
            )
        return places

    def keep(self, rules: Iterable[Rule]) -> None:
        """Go on under the terms of rules that have come into force, and forget all others but decorators."""
        left = {("rule", rule.tier or DEFAULT_TIER, rule.name): rule for rule in rules if rule.adaptive is not None}
        for name, places in list(self._places.items()):
            if name in left:
                places.reconfigure(self._terms(left[name]))
            elif name[0] == "rule":
                del self._places[name]

    def _terms(self, rule: Rule) -> Terms:
        return rule.terms._replace(max_delay=0.0) if self._shadow else rule.terms
