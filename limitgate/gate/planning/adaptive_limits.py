"""The adaptive limits of a gate, which survive reloads."""

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
    """Adaptive limits by kind, tier and rule name. With ``shadow``, requests never wait."""

    def __init__(self, *, shadow: bool = False) -> None:
        self._shadow = shadow
        self._places: dict[tuple[Kind, str, str], ConcurrencyLimiter] = {}

    def of(self, rule: Rule, kind: Kind) -> ConcurrencyLimiter:
        """Same names share a limit. Raises `ConfigError` for different options."""
        name = kind, rule.tier or DEFAULT_TIER, rule.name
        terms = self._terms(rule)
        places = self._places.get(name)
        if places is None:
            # Another thread may have created it.
            places = self._places.setdefault(name, ConcurrencyLimiter(terms))
        # `keep` reconfigures rules of a set.
        if kind == "limit" and places.terms != terms:
            raise ConfigError(
                f"limit {rule.name!r} already has another adaptive, max_delay or reserve, expected the same on each "
                "@limit of that name, or another name"
            )
        return places

    def keep(self, rules: Iterable[Rule]) -> None:
        """Apply reloaded options; drop removed rules."""
        left = {("rule", rule.tier or DEFAULT_TIER, rule.name): rule for rule in rules if rule.adaptive is not None}
        for name, places in list(self._places.items()):
            if name in left:
                places.reconfigure(self._terms(left[name]))
            elif name[0] == "rule":
                del self._places[name]

    def _terms(self, rule: Rule) -> Terms:
        return rule.terms._replace(max_delay=0.0) if self._shadow else rule.terms
