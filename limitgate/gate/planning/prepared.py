"""Prepared plans for requests that differ only in caller and results of callables.

`RuleMatch` has the rules, and `PreparedPlan` binds them to keys. `ConditionalPlans` selects plans by conditions,
`GivenPlans` by limits from run time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

from limitgate.fleet.tally import Place, Queue, Tally
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.costs_by_outcome import costs_by_outcome
from limitgate.gate.planning.given_limits import AS_WRITTEN, GivenLimits, is_short
from limitgate.gate.planning.identity import Subject
from limitgate.http.body import UNREAD
from limitgate.http.rate_fields import Style, Writer, prepared_fields
from limitgate.http.request import BodyWanted, Request
from limitgate.keys import PreparedKey
from limitgate.limits.bucket import NORMAL, Remembered
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.template import PlainRefund, PlainSpend, PlanTemplate, RefundTemplate
from limitgate.observing.counts import Counts, RuleSeries
from limitgate.observing.plain_counter import PlainCounter
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import Mark
from limitgate.rules.rule import Rule, unreplaced

CompiledRules = tuple[CompiledRule, ...]


class RuleMatch:
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
        self.compiled_rules: CompiledRules = compiled_rules
        """Rules that aren't exempt, decorators last."""
        self.exempting: tuple[CompiledRules, ...] = exempting
        """Exempt rules for each interpretation of the path."""
        self.is_conditional: bool = bool(exempting)
        self.asks_route: bool = False
        for each in compiled_rules:
            self.is_conditional |= each.is_conditional
            self.asks_route |= each.asks_route
        applying = _applying(compiled_rules)
        denying = [each for each in applying if each.rule.deny]
        self.denying: CompiledRule | None = max(denying, key=_is_enforced, default=None)
        self.limited_rules: tuple[CompiledRule, ...] = tuple([each for each in applying if each.rule.has_limits])
        adaptive_rules = [each for each in self.limited_rules if each.places is not None]
        self.adaptive_rules: tuple[CompiledRule, ...] = tuple(sorted(adaptive_rules, key=_is_enforced, reverse=True))

    def exempts(self, request: Request) -> bool:
        """True if every interpretation is exempt."""
        admitting = {each for each in set(chain(*self.exempting)) if is_met(each.rule, request)}
        return bool(self.exempting) and not any(admitting.isdisjoint(one) for one in self.exempting)

    def read_body(self, request: Request) -> None:
        """Raise `BodyWanted` if a rule may need an unread body."""
        if request.document is not UNREAD:
            return
        found = [each for each in self.compiled_rules if each.rule.reads_body and each.rule.admits_client(request)]
        if found:
            others = [each for each in self.compiled_rules if not each.rule.reads_body and is_met(each.rule, request)]
            applying = _applying([each for each in self.compiled_rules if each in found or each in others])
            raise BodyWanted([each for each in applying if each in found])

    def conditions(self) -> list[Rule]:
        return [each.rule for each in self.compiled_rules if each.rule.is_conditional]

    def narrowed(self, request: Request) -> CompiledRules:
        return tuple([each for each in self.compiled_rules if is_met(each.rule, request)])


def is_met(rule: Rule, request: Request) -> bool:
    """Evaluate ``when`` once per request. Errors propagate."""
    met = request.met
    if met is None:
        met = request.met = {}
    key = id(rule)
    known = met.get(key)
    if known is None:
        known = met[key] = rule.admits(request)
    return known


_is_enforced: Callable[[CompiledRule], bool] = attrgetter("enforced")


def _applying(compiled_rules: Sequence[CompiledRule]) -> Sequence[CompiledRule]:
    if not any(each.rule.replaces for each in compiled_rules):
        return compiled_rules
    listed = [each.rule for each in compiled_rules if not each.is_decorator]
    decorators = [each.rule for each in compiled_rules if each.is_decorator]
    applying = set(map(id, unreplaced(listed, decorators)))
    return [each for each in compiled_rules if id(each.rule) in applying]


EXEMPT = RuleMatch(())


class RequestPlan(NamedTuple):
    plan: Plan | None
    compiled_rules: Sequence[CompiledRule]
    is_by_outcome: bool = False
    has_slots: bool = False

    @property
    def bans(self) -> bool:
        return any(each.rule.ban is not None for each in self.compiled_rules)

    def row(self, charge: Charge) -> RuleSeries | None:
        charges = self.plan.charges if self.plan else ()
        rows = (each.row for known, each in zip(charges, self.compiled_rules) if known.rule == charge.rule)
        return next(rows, None)


NO_CHARGES = RequestPlan(None, ())
Costs = tuple[int | tuple[int, ...] | None, ...]
"""Cost of each rule: a tuple if limits have their own costs, None if it depends on the request."""


@dataclass(frozen=True, slots=True)
class AdaptiveMatch:
    """A match under adaptive limits, for requests of about the same duration."""

    compiled_rules: Sequence[CompiledRule]
    request_class: Hashable
    counts: bool
    """True if permits count requests, because a rule has only an adaptive limit."""


class PreparedPlan:
    """A plan without the client's key parts. ``costs`` has None for unknown costs."""

    __slots__ = (
        "_by_costs",
        "_field_writer",
        "_refunds",
        "adaptive",
        "bans",
        "charged_rules",
        "compiled_rules",
        "costs",
        "counter",
        "denying",
        "given",
        "guarded",
        "has_slots",
        "is_by_address",
        "is_by_outcome",
        "is_direct",
        "is_ready",
        "is_simple",
        "keys",
        "marks",
        "messages",
        "pending",
        "suffixes",
        "template",
    )

    def __init__(
        self,
        compiled_rules: CompiledRules,
        keys: Sequence[PreparedKey],
        costs: Costs,
        marks: Container[Mark],
        adaptive: AdaptiveMatch | None = None,
        *,
        denying: CompiledRule | None = None,
        messages: PreparedPlan | None = None,
    ) -> None:
        self.compiled_rules: CompiledRules = compiled_rules
        self.keys: Sequence[PreparedKey] = keys
        self.costs: Costs = costs
        self.is_ready: bool = None not in costs
        self.is_direct: bool = self.is_ready and adaptive is None
        self.marks: Container[Mark] = marks
        self.adaptive: AdaptiveMatch | None = adaptive
        self.denying: CompiledRule | None = denying
        self.messages: PreparedPlan | None = messages
        self.charged_rules: CompiledRules = compiled_rules
        self.suffixes: Sequence[Sequence[str]] | None = None
        self.template: PlanTemplate | None = self._template()
        """None if a charge isn't plain."""
        rows = [each.row for each in self.charged_rules if each.row is not None]
        self.counter: PlainCounter | None = None
        """None if ``pending`` counts for metrics."""
        self.pending: Queue | None = None
        """Readings to count; None outside a fleet."""
        if self.template and rows:
            counts, counter = self.charged_rules[0].counts, partial(PlainCounter, self.template, rows)
            defers = counts is not None and counts.defers
            if not defers:
                self.counter = counter()
            if counts is not None and counts.tally is not None:
                self.pending = self._queue(counts.tally, counter if defers else None, counts)
        self.guarded: tuple[tuple[int, CompiledRule], ...] = tuple(
            [(place, each) for place, each in enumerate(compiled_rules) if each.is_guarded]
        )
        """Positions and rules with inventable keys."""
        self.is_by_address: bool = bool(keys) and all(key.is_by_address for key in keys)
        self.is_by_outcome: bool = False
        self.has_slots: bool = False
        self.bans: bool = False
        for each in compiled_rules:
            self.is_by_outcome |= each.is_by_outcome
            self.has_slots |= each.has_slots
            self.bans |= each.rule.ban is not None
        is_settled = not (self.is_by_outcome or self.has_slots)
        self.is_simple: bool = self.template is not None and self.template.is_enforced and is_settled
        self.given: GivenPlans | None = None
        self._field_writer: Writer | None = None
        self._refunds: dict[tuple[int | None, bool], RefundTemplate] | None = None
        self._by_costs: dict[Costs, PreparedPlan | None] = _NO_COSTS if self.is_ready else {}
        """Plans by costs. The value is None for costs seen once."""

    def _queue(self, tally: Tally, counter: Callable[[], PlainCounter] | None, counts: Counts) -> Queue:
        places: dict[str, Place] = {}
        for place, each in enumerate(self.charged_rules):
            if each.row is not None and each.row.clients is not None:
                places.setdefault(each.name, (place, each.name, each.row.clients, each.name_of))
        return Queue(tally, counter, list(places.values()), counts.count_many)

    def with_limits(self, request: Request, own: Mapping[str, Any] | None) -> PreparedPlan | None:
        """Return the plan; None if limits must be awaited."""
        return self if self.given is None else self.given.with_limits(request, own)

    def with_costs(self, request: Request) -> PreparedPlan:
        """Return the plan with a request's costs. Errors of callables propagate.

        Recurring costs are prepared. Others, such as tokens, take longer to prepare than to charge.
        """
        costs = tuple([each.rule.costs_of(request) for each in self.compiled_rules])
        known = self._by_costs.get(costs, self)
        if known is None:
            known = self._by_costs[costs] = PreparedPlan(
                self.compiled_rules,
                self.keys,
                costs,
                self.marks,
                self.adaptive,
                denying=self.denying,
                messages=self.messages,
            )
        elif known is self:
            keep(self._by_costs, costs, None, most=_MOST_COSTS)
            known = copy(self)
            known.costs, known.is_ready = costs, True
        return known

    def costing(self, cost: int) -> PreparedPlan:
        """Return this plan with another cost for every limit. It isn't plain, because such costs seldom recur."""
        known = copy(self)
        known.costs = tuple([(cost,) * len(each) if isinstance(each, tuple) else cost for each in self.costs])
        known.template = known.counter = known.suffixes = None
        known.charged_rules = self.compiled_rules
        known.is_simple = False
        return known

    def keys_of(self, subject: Subject) -> Sequence[str]:
        keys = [key.of(subject) for key in self.keys]
        for place, compiled_rule in self.guarded:
            keys[place] = compiled_rule.admitted_key(keys[place], subject)
        return keys

    def spread(self, keys: Iterable[str]) -> Sequence[str]:
        return [key + suffix for key, suffixes in zip(keys, self.suffixes or ()) for suffix in suffixes]

    def field_writer(self, styles: tuple[Style, ...], rules: frozenset[str]) -> Writer:
        if self._field_writer is None:
            buckets = tuple([(each.name, each.rule.buckets) for each in self.compiled_rules])
            self._field_writer = prepared_fields(styles, buckets, rules)
        return self._field_writer

    def refund(self, spent: PlainSpend, status: int | None, *, is_sent: bool) -> PlainRefund:
        if self._refunds is None:
            self._refunds = {}
        found = self._refunds.get((status, is_sent))
        if found is None:
            charges = spent.template.charges
            found = RefundTemplate(spent.template, costs_by_outcome(charges, self.charged_rules, status, is_sent=is_sent))
            keep(self._refunds, (status, is_sent), found, most=_MOST_REFUNDS)
        return found.of(spent)

    def request_plan(self, plan: Plan) -> RequestPlan:
        return RequestPlan(plan, self.charged_rules, self.is_by_outcome, has_slots=self.has_slots)

    def bound(self, keys: Sequence[str], caller: Caller | None) -> RequestPlan:
        if self.template is not None:
            return self.request_plan(self.template.asked(keys).whole_plan)
        if not self.compiled_rules:
            return NO_CHARGES
        priority = NORMAL if caller is None else caller.priority
        charges: list[Charge] = []
        behind: list[CompiledRule] = []
        for compiled_rule, key, cost in zip(self.compiled_rules, keys, self.costs):
            of_rule = compiled_rule.charges(key, cost or 0, priority if compiled_rule.is_graded else NORMAL)
            charges += of_rule
            behind += [compiled_rule] * len(of_rule)
        plan = Plan.spend(charges)
        return RequestPlan(plan.named() if self.has_slots else plan, behind, self.is_by_outcome, self.has_slots)

    def _template(self) -> PlanTemplate | None:
        rules, costs = self.compiled_rules, self.costs
        # Parts of one stored bucket are not plain.
        is_parted = tuple in map(type, costs)
        if not rules or self.denying is not None or None in costs or is_parted or any(each.is_graded for each in rules):
            return None
        charges = [charge for rule, cost in zip(rules, costs) for charge in rule.charges("", cost or 0, NORMAL)]
        try:
            template = PlanTemplate([charge._replace(key="") for charge in charges])
        except ValueError:
            return None
        if len(charges) > len(rules) or not template.is_of_debts:
            self.charged_rules = tuple([rule for rule in rules for _ in rule.rule.buckets])
            self.suffixes = [[bucket.suffix for bucket in rule.rule.buckets] for rule in rules]
        return template


_NO_COSTS: dict[Costs, PreparedPlan | None] = {}
_MOST_COSTS = 256
_MOST_REFUNDS = 64
_MOST_MET = 256


def keep(kept: dict[Any, Any], key: object, value: object, *, most: int) -> None:
    """Keep a value. A full cache drops its oldest entry."""
    if len(kept) >= most:
        with suppress(RuntimeError):
            kept.pop(next(iter(kept)), None)
    kept[key] = value


@final
class GivenPlans:
    """Selects plans by limits from run time."""

    __slots__ = (
        "_callables",
        "_compiled_rules",
        "_denying",
        "_every_key",
        "_given",
        "_keys",
        "_plans",
        "_remember",
        "_sources",
        "adaptive",
        "marks",
    )
    is_direct: Final = False
    is_ready: Final = False

    def __init__(
        self,
        given: GivenLimits,
        compiled_rules: CompiledRules,
        keys: Iterable[PreparedKey],
        marks: Container[Mark],
        adaptive: AdaptiveMatch | None,
        *,
        denying: CompiledRule | None,
    ) -> None:
        self.adaptive: AdaptiveMatch | None = adaptive
        self._given = given
        self._compiled_rules = compiled_rules
        self._every_key = tuple(keys)
        self._keys = {id(each.written): key for each, key in zip(compiled_rules, self._every_key)}
        self.marks: Container[Mark] = marks
        self._denying = denying
        self._sources = [(each.name, id(each.written), each.limits_by) for each in compiled_rules]
        self._callables = [(key, limits_by) for _, key, limits_by in self._sources if limits_by is not None]
        remembered = Remembered[tuple[Any, ...], PreparedPlan]()
        self._remember = remembered.add
        self._plans = remembered.values
        """Plans by the results of callables, or by individual limits."""

    @property
    def as_written(self) -> PreparedPlan | GivenPlans:
        """Return the plan for callers without individual limits. If callables decide, return this object."""
        if self._callables:
            return self
        prepared = self._prepared(self._compiled_rules)
        prepared.given = self
        return prepared

    def with_limits(self, request: Request, own: Mapping[str, Any] | None) -> PreparedPlan | None:
        """Return the plan; None if limits must be awaited."""
        given = request.given_limits
        if given is None:
            given = request.given_limits = {}
        if own:
            limits = self._limits(request, own, given)
        else:
            for key, limits_by in self._callables:
                if key not in given:
                    given[key] = limits_by(request)
            limits = tuple([given[key] for key, _ in self._callables])
        try:
            return self._plans[limits]
        except KeyError:
            pass
        # Lists cannot be hashed.
        except TypeError:
            limits = tuple([tuple(each) if isinstance(each, list) else each for each in limits])
            with suppress(KeyError, TypeError):
                return self._plans[limits]
        return self._plan_with(request, own, limits)

    def _limits(self, request: Request, own: Mapping[str, Any], given: dict[int, Any]) -> tuple[Any, ...]:
        limits: list[Any] = []
        for name, key, limits_by in self._sources:
            if name in own:
                limits.append(own[name])
            elif limits_by is None:
                limits.append(AS_WRITTEN)
            else:
                if key not in given:
                    given[key] = limits_by(request)
                limits.append(given[key])
        return tuple(limits)

    def _plan_with(self, request: Request, own: Mapping[str, Any] | None, limits: tuple[Any, ...]) -> PreparedPlan | None:
        applied = self._given.applied(self._compiled_rules, request, own, remembers=False)
        if applied.pending:
            return None
        prepared = self._prepared(applied.compiled_rules)
        if is_short(limits) and not applied.is_open:
            with suppress(TypeError):
                self._remember(limits, prepared)
        return prepared

    def _prepared(self, limited: CompiledRules) -> PreparedPlan:
        counted = tuple([each for each in limited if each.rule.has_counts])
        of_messages = tuple([each for each in counted if each.rule.per == "message"])
        messages = PreparedPlan(of_messages, *self._keys_and_costs(of_messages), self.marks) if of_messages else None
        if of_messages:
            counted = tuple([each for each in counted if each.rule.per == "request"])
        keys, costs = self._keys_and_costs(counted)
        return PreparedPlan(counted, keys, costs, self.marks, self.adaptive, denying=self._denying, messages=messages)

    def _keys_and_costs(self, compiled_rules: CompiledRules) -> tuple[Sequence[PreparedKey], Costs]:
        keys = self._every_key
        if len(compiled_rules) < len(keys):
            keys = tuple([self._keys[id(each.written)] for each in compiled_rules])
        return keys, tuple([each.cost for each in compiled_rules])


@final
class ConditionalPlans:
    """Selects plans by conditions. ``unlimited`` is for exempt requests."""

    __slots__ = ("_conditions", "_match", "_plans", "_prepare", "_reads_body", "_unlimited")
    is_direct: Final = False

    def __init__(
        self,
        match: RuleMatch,
        prepare: Callable[[Request, tuple[CompiledRule, ...]], PreparedPlan | GivenPlans],
        unlimited: PreparedPlan,
    ) -> None:
        self._match = match
        self._conditions = match.conditions()
        self._reads_body = any(each.rule.reads_body for each in match.compiled_rules)
        self._prepare = prepare
        self._unlimited = unlimited
        self._plans: dict[tuple[bool, ...], PreparedPlan | GivenPlans] = {}

    def plan_of(self, request: Request) -> PreparedPlan | GivenPlans:
        match = self._match
        if match.exempting and match.exempts(request):
            return self._unlimited
        if self._reads_body:
            match.read_body(request)
        met = tuple([is_met(rule, request) for rule in self._conditions])
        try:
            return self._plans[met]
        except KeyError:
            prepared = self._prepare(request, match.narrowed(request))
            keep(self._plans, met, prepared, most=_MOST_MET)
            return prepared
