"""Rules that requests of one tier, method and path have in common: those that apply, by what else a request says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.http.request import Request
from limitgate.rules.rule import Rule, unreplaced

CompiledRules = tuple[CompiledRule, ...]


class RuleMatch:
    """The rules that are for requests of one tier, method, path and root path. Shared by all of them that have the same."""

    __slots__ = (
        "adaptive_rules",
        "asks_route",
        "compiled_rules",
        "denying",
        "exempting",
        "is_conditional",
        "limited_rules",
    )

    def __init__(self, compiled_rules: CompiledRules, exempting: tuple[CompiledRules, ...] = ()) -> None:
        self.compiled_rules = compiled_rules
        """All of them but exempt ones, in the order they were written, decorators last."""
        self.exempting = exempting
        """For each interpretation of the path, the rules that exempt it if the request is one of theirs; empty for none."""
        self.is_conditional = bool(exempting) or any(each.rule.is_conditional for each in compiled_rules)
        """True if it has to be `narrowed` to the rules that are for a request."""
        self.asks_route = any(each.places or each.rule.key_asks("path") for each in compiled_rules)
        """True if a key, or an adaptive limit, needs the route that the framework will take."""
        applying = _applying(compiled_rules)
        denying = [each for each in applying if each.rule.deny]
        self.denying = next((each for each in denying if each.enforced), denying[0] if denying else None)
        """A rule that denies, if possible one that is no shadow; None if nothing is denied."""
        self.limited_rules = tuple([each for each in applying if each.rule.has_limits])
        """Rules that limit requests."""
        adaptive_rules = [each for each in self.limited_rules if each.places is not None]
        self.adaptive_rules = tuple(sorted(adaptive_rules, key=lambda each: not each.enforced))
        """Rules with an adaptive limit, those that refuse before shadows."""

    def exempts(self, request: Request) -> bool:
        """True if exempt rules that are for a request cover every interpretation of its path."""
        admitting = {each for each in set(chain(*self.exempting)) if is_met(each.rule, request)}
        return bool(self.exempting) and not any(admitting.isdisjoint(one) for one in self.exempting)

    def conditions(self) -> list[Rule]:
        """The rules whose ``clients`` and ``when`` have to be asked."""
        return [each.rule for each in self.compiled_rules if each.rule.is_conditional]

    def narrowed(self, request: Request) -> CompiledRules:
        """The rules that are for a request, by ``clients`` and ``when``."""
        return tuple([each for each in self.compiled_rules if is_met(each.rule, request)])


def is_met(rule: Rule, request: Request) -> bool:
    """True if a request meets the conditions of a rule, which are asked once for it. Raises whatever ``when`` does."""
    met = request.met
    if met is None:
        met = request.met = {}
    key = id(rule)
    known = met.get(key)
    if known is None:
        known = met[key] = rule.admits(request)
    return known


def _applying(compiled_rules: Sequence[CompiledRule]) -> Sequence[CompiledRule]:
    """The rules that no other one replaces."""
    if not any(each.rule.replaces for each in compiled_rules):
        return compiled_rules
    listed = [each.rule for each in compiled_rules if not each.is_decorator]
    decorators = [each.rule for each in compiled_rules if each.is_decorator]
    applying = set(map(id, unreplaced(listed, decorators)))
    return [each for each in compiled_rules if id(each.rule) in applying]


EXEMPT = RuleMatch(())
"""Stands for requests to which no rule applies, and none of the decorators either."""
