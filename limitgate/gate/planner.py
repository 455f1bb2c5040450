"""From a request to a plan: which rules apply, which buckets they mean, what each would be charged. Pure, compiled at start."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

from limitgate.diagnostics import Diagnosis, Once
from limitgate.errors import ConfigError
from limitgate.gate.cardinality import CardinalityGuard
from limitgate.gate.compiled_rule import ChargeSpec, CompiledRule
from limitgate.gate.identity import Identities, Subject
from limitgate.http.paths import PathIndex, Reach, beyond, segments
from limitgate.http.request import Request
from limitgate.keys import Value
from limitgate.limits.plan import Plan
from limitgate.routes import Routes, mounts_of
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import EVERYTHING, Mark, seen_by_gate
from limitgate.rules.lint import overshooting
from limitgate.rules.rule import Rule, RuleSet

_PATHS, _SHORT = 512, 200
"""Paths that a planner remembers the rules of, and the characters of one that it remembers: clients choose both."""
_PLANS, _CHARGES = 8192, 32_768
"""Plans that a planner remembers, and the charges in them if every rule of a tier applied: about half a kilobyte each."""
_LONG = 250
"""Characters for each key of a plan from which on it is not remembered: clients choose them."""

ExtraRule = tuple[Rule, Sequence[Value]]
"""A rule that is weighed while a request is under way, and the further parts of its key."""


class RequestPlan(NamedTuple):
    """What the planner made of a request."""

    plan: Plan | None
    """None where no rule applies."""
    compiled_rules: Sequence[CompiledRule]
    """The rules behind the plan's charges, in their order."""
    seen: Container[Mark]
    """The decorators that were taken into account."""
    is_by_outcome: bool = False
    """True if a rule is charged by the outcome."""
    messages: RequestPlan | None = None
    """What each message over a WebSocket is to be charged, None for nothing."""
    has_slots: bool = False
    """True if it takes places for requests in flight, which have to be given back."""

    def named(self) -> RequestPlan:
        """The same with names for the slots that one request takes."""
        return self._replace(plan=self.plan.named()) if self.plan else self


UNLIMITED = RequestPlan(None, (), EVERYTHING)
"""No rule applies, and none of the decorators either."""


def _charging(compiled_rules: tuple[CompiledRule, ...], asked: tuple[ChargeSpec, ...]) -> RequestPlan:
    """The plan that charges what is asked of each rule; made once for requests that ask the same."""
    charges = [
        (compiled_rule, charge) for compiled_rule, ask in zip(compiled_rules, asked) for charge in compiled_rule.charges(*ask)
    ]
    by_outcome = any(compiled_rule.rule.charge_if for compiled_rule in compiled_rules)
    has_slots = any(charge.bucket.has_slots for _, charge in charges)
    plan, compiled_rules = (
        Plan(tuple([charge for _, charge in charges])),
        tuple([compiled_rule for compiled_rule, _ in charges]),
    )
    return RequestPlan(plan, compiled_rules, (), by_outcome, has_slots=has_slots)


def _in_order(found: Iterable[tuple[int, CompiledRule]]) -> list[CompiledRule]:
    """Rules in the order of their places."""
    return [compiled_rule for _, compiled_rule in sorted(found, key=itemgetter(0))]


class Planner:
    """Makes plans for the requests that come through one gate."""

    def __init__(
        self,
        rules: RuleSet,
        routes: Routes,
        identities: Identities,
        *,
        key_prefix: str,
        secret: bytes,
        shadow: bool,
        strict: bool = False,
        newcomers: CardinalityGuard | None = None,
    ) -> None:
        self.newcomers = newcomers
        """Counts the buckets that each source opens, None where nobody does."""
        self._routes = routes
        self._identities = identities
        self._compile = partial(
            CompiledRule,
            key_prefix=key_prefix,
            secret=secret,
            shadow=shadow,
            newcomers=newcomers,
            inventable=self._is_inventable,
        )
        self._rules_of = lru_cache(maxsize=_PATHS)(self._find_rules)
        most = max(map(len, rules.tiers.values()), default=0)
        self._remembered = lru_cache(maxsize=min(_PLANS, _CHARGES // (most + 1)))(_charging)
        self._decorated: dict[int, CompiledRule] = {}
        self._tiers = {tier: self._index(of_tier, exempt=False) for tier, of_tier in rules.tiers.items()}
        self._exempt = {tier: self._index(of_tier, exempt=True) for tier, of_tier in rules.tiers.items()}
        self._every = {tier: _in_order(index.values()) for tier, index in self._tiers.items()}
        every = list({id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values())
        self.names = frozenset([rule.name for rule in every])
        """The names of all rules, of whatever tier."""
        self._exempts = any(rule.exempt for rule in every)
        self._reach = Reach.of([segments(rule.path) for rule in every])
        self._count_messages = any(rule.per == "message" for rule in every)
        self._asks_route = any(rule.key_asks("path") for rule in every)
        self._strict = strict
        self._unlisted = Once(Diagnosis.UNLISTED_KEYS)
        for rule in every:
            self._review(rule)

    def plan(self, request: Request, identified: Caller | None) -> RequestPlan:
        """The plan for a request from the caller that ``identify`` found, if any."""
        if request.method == "OPTIONS" and request.is_preflight:
            return UNLIMITED
        subject = self._identities.subject(request, identified)
        compiled_rules = self._applying(subject.tier, request.method, request.sent, request.root)
        if compiled_rules is None:
            return UNLIMITED
        marks: tuple[Mark, ...] = ()
        if self._routes.decorated() or (self._asks_route and compiled_rules):
            route = self._routes.find(request)
            if route is not None:
                subject.route, marks = route.template, route.marks
                compiled_rules += self._compiled_marks(marks, request)
        if "exempt" in marks:
            return UNLIMITED
        messages: tuple[CompiledRule, ...] = ()
        if self._count_messages or marks:
            messages = tuple([compiled_rule for compiled_rule in compiled_rules if compiled_rule.rule.per == "message"])
            compiled_rules = tuple([compiled_rule for compiled_rule in compiled_rules if compiled_rule.rule.per == "request"])
        request_plan = self._charged(compiled_rules, subject) if compiled_rules else RequestPlan(None, (), marks)
        if messages and request.is_websocket:
            return request_plan._replace(seen=marks, messages=self._charged(messages, subject))
        return request_plan._replace(seen=marks) if marks else request_plan

    def further(self, request: Request, identified: Caller | None, asked: Sequence[ExtraRule]) -> RequestPlan:
        """The plan for rules that are weighed while a request is under way."""
        subject = self._identities.subject(request, identified)
        applying = [(rule, values) for rule, values in asked if rule.applies_to(request.method)]
        if any(rule.key_asks("path") for rule, _ in applying):
            route = self._routes.find(request)
            subject.route = route.template if route else None
        compiled_rules = tuple([self._compiled(rule) for rule, _ in applying])
        if not compiled_rules:
            return RequestPlan(None, (), ())
        found = self._charging(
            compiled_rules,
            [compiled_rule.spec(subject, values) for compiled_rule, (_, values) in zip(compiled_rules, applying)],
        )
        return found.named() if found.has_slots else found

    def _charged(self, compiled_rules: tuple[CompiledRule, ...], subject: Subject) -> RequestPlan:
        found = self._charging(compiled_rules, [compiled_rule.spec(subject) for compiled_rule in compiled_rules])
        return found.named() if found.has_slots else found

    def _charging(self, compiled_rules: tuple[CompiledRule, ...], asked: list[ChargeSpec]) -> RequestPlan:
        """The plan that charges what is asked of each rule, remembered unless its keys are long."""
        length = 0
        for text, _, _ in asked:
            length += len(text)
        return (self._remembered if length < _LONG * len(asked) else _charging)(compiled_rules, tuple(asked))

    def _index(self, rules: Sequence[Rule], *, exempt: bool) -> PathIndex[tuple[int, CompiledRule]]:
        """The rules of a tier that are exempt, or those that are not, by path and with their places in the tier."""
        index: PathIndex[tuple[int, CompiledRule]] = PathIndex()
        for place, rule in enumerate(rules):
            if rule.exempt is exempt:
                index.add(segments(rule.path), (place, self._compile(rule, "rule")))
        return index

    def _applying(self, tier: str, method: str, sent: str, root: str) -> tuple[CompiledRule, ...] | None:
        """The rules of a tier that apply to a path, in the order they were written; None where it is exempt."""
        find = self._rules_of if len(method) + len(sent) + len(root) <= _SHORT else self._find_rules
        return find(tier, method, sent, root)

    def _find_rules(self, tier: str, method: str, sent: str, root: str) -> tuple[CompiledRule, ...] | None:
        paths = self._reach.readings(sent, root)
        if paths is None:
            return self._for_any_path(tier, method)
        if mounts := mounts_of(self._routes):
            paths = (*paths, *beyond(mounts, paths))
        if self._exempts and self._is_exempt(tier, method, paths):
            return None
        return self._matching(tier, method, paths)

    def _for_any_path(self, tier: str, method: str) -> tuple[CompiledRule, ...]:
        """All rules of a tier that are for a method, but for exempt ones: those of a path that may be any."""
        return tuple([compiled_rule for compiled_rule in self._every[tier] if compiled_rule.rule.applies_to(method)])

    def _is_exempt(self, tier: str, method: str, paths: Sequence[str]) -> bool:
        """True if exempt rules cover every reading of the path: one that may be read otherwise is not let off."""
        index = self._exempt[tier]
        return all(any(compiled_rule.rule.applies_to(method) for _, compiled_rule in index.find(path)) for path in paths)

    def _matching(self, tier: str, method: str, paths: Sequence[str]) -> tuple[CompiledRule, ...]:
        """The rules of a tier that apply to any reading of the path, in the order they were written."""
        index = self._tiers[tier]
        found = index.find(paths[0])
        for other in paths[1:]:
            found += [entry for entry in index.find(other) if entry not in found]
        return tuple([compiled_rule for compiled_rule in _in_order(found) if compiled_rule.rule.applies_to(method)])

    def _compiled_marks(self, marks: Sequence[Mark], request: Request) -> tuple[CompiledRule, ...]:
        """The decorators that apply to a request, but for those that a gate around this one has weighed for it."""
        compiled_rules: list[CompiledRule] = []
        seen = seen_by_gate.get() if request.passed_a_gate else None
        weighed = seen if isinstance(seen, tuple) else ()
        for rule in marks:
            if isinstance(rule, Rule) and rule.applies_to(request.method) and rule not in weighed:
                if rule.per == "message" and not request.is_websocket:
                    raise ConfigError(f"limit {rule.name!r} is per message, expected it on a WebSocket endpoint only")
                if any(compiled_rule.rule.name == rule.name for compiled_rule in compiled_rules):
                    raise ConfigError(f"limit {rule.name!r} applies twice to one request, expected different names")
                compiled_rules.append(self._compiled(rule))
        return tuple(compiled_rules)

    def _compiled(self, rule: Rule) -> CompiledRule:
        """A rule that is not from the rule set, made ready when it is first met."""
        compiled_rule = self._decorated.get(id(rule))
        if compiled_rule is None:
            compiled_rule = self._decorated[id(rule)] = self._compile(rule, "limit")
            self._review(rule)
        return compiled_rule

    def _is_inventable(self, label: str) -> bool:
        """True if a client may make up values of a key's part. Methods are no such part: invented ones are all one."""
        return label == "host" or label.startswith("header:") or (label == "api_key" and not self._identities.vouch_for_keys)

    def _review(self, rule: Rule) -> None:
        """Tell what is odd about a rule by itself."""
        if rule.key_asks("api_key") and not self._identities.vouch_for_keys:
            self._unlisted.log(rule.name)
        for limit, most, burst in overshooting(rule) if self._strict else ():
            Diagnosis.OVERSHOOTS.log(rule.name, limit, most, burst, limit.count)
