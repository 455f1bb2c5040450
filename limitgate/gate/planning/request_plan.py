"""The charges of one request: those of any rules, and plans prepared for all requests that differ in who asks alone."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.identity import Subject
from limitgate.http.rate_fields import Style, Writer, prepared_fields
from limitgate.http.request import Request
from limitgate.keys import PreparedKey
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.priority import NORMAL
from limitgate.limits.template import PlainRefund, PlainSpend, PlanTemplate, RefundTemplate
from limitgate.observing.counts import RuleSeries
from limitgate.observing.plain_counter import PlainCounter
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import Mark

CompiledRules = tuple[CompiledRule, ...]


class RequestPlan(NamedTuple):
    """The charges of one request, and the rules behind them."""

    plan: Plan | None
    """None where no rule applies."""
    compiled_rules: Sequence[CompiledRule]
    """The rules behind the plan's charges, in their order."""
    is_by_outcome: bool = False
    """True if a rule is charged by the outcome."""
    has_slots: bool = False
    """True if it takes slots for requests in flight, which have to be given back."""

    @property
    def bans(self) -> bool:
        """True if a rule bans clients that it refuses too often."""
        return any(each.rule.ban is not None for each in self.compiled_rules)

    def row(self, charge: Charge) -> RuleSeries | None:
        """The figures of the rule behind a charge; None without observers."""
        charges = self.plan.charges if self.plan else ()
        rows = (each.row for known, each in zip(charges, self.compiled_rules) if known.rule == charge.rule)
        return next(rows, None)


NO_CHARGES = RequestPlan(None, ())


def costs_by(
    charges: Sequence[Charge],
    compiled_rules: Sequence[CompiledRule],
    status: int | None,
    *,
    is_sent: bool,
    told: Mapping[str | None, int] = MappingProxyType({}),
    any_has_own_cost: bool = False,
) -> list[int]:
    """What charges cost by the outcome of their request, and by the costs that `Decision.settle` was ``told``.

    ``compiled_rules`` are those behind the charges, and ``status`` is that of the response, None while it is unknown. A slot
    costs nothing once the response is sent. A cost told without a rule is that of the rules with a cost of their own, or of
    all if ``any_has_own_cost`` is false.
    """
    costs = []
    for charge, compiled_rule in zip(charges, compiled_rules):
        rule, cost = compiled_rule.rule, charge.cost
        if charge.bucket.has_slots:
            cost = 0 if is_sent else cost
        elif rule.charge_if and status is not None and not rule.charge_if.counts(status):
            cost = 0
        elif told:
            unnamed = told.get(None, cost) if rule.has_own_cost or not any_has_own_cost else cost
            cost = told.get(rule.name, unnamed)
        costs.append(cost)
    return costs


@dataclass(frozen=True, slots=True)
class AdaptiveMatch:
    """The adaptive limits of requests of one tier, method and route, which take about the same time."""

    compiled_rules: Sequence[CompiledRule]
    """Those that refuse before shadows."""
    request_class: Hashable


class PlansByLimits(Protocol):
    """Finds the prepared plan of requests whose limits are given at run time."""

    def with_limits(self, request: Request, own: Mapping[str, Any] | None) -> PreparedPlan | None:
        """The plan of a request whose caller has these limits of its own; None where limits have yet to be awaited."""


class PreparedPlan:
    """Plan of requests of one tier, method, path and root path; what who asks contributes to the keys is all that is missing.

    ``keys`` are those of the rules, and ``costs`` what each rule charges, None for one that works it out for each request.
    """

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
        "is_ready",
        "is_simple",
        "keys",
        "marks",
        "messages",
        "suffixes",
        "template",
    )

    def __init__(
        self,
        compiled_rules: CompiledRules,
        keys: Sequence[PreparedKey],
        costs: tuple[int | None, ...],
        marks: Container[Mark],
        adaptive: AdaptiveMatch | None = None,
        *,
        denying: CompiledRule | None = None,
        messages: PreparedPlan | None = None,
    ) -> None:
        self.compiled_rules = compiled_rules
        """The rules behind the charges; none where nothing is charged."""
        self.keys = keys
        """The keys less what the client contributes."""
        self.costs = costs
        self.is_ready = None not in costs
        """True unless `with_costs` has to be asked before anything is charged."""
        self.marks = marks
        """Decorators that were taken into account."""
        self.adaptive = adaptive
        """Adaptive limits to ask before; None for none."""
        self.denying = denying
        """A rule that denies the requests, or if that is a shadow, would; None if nothing is denied."""
        self.messages = messages
        """The plan of each message over a WebSocket; None where these are not limited."""
        self.charged_rules = compiled_rules
        """The rule behind each charge of the template."""
        self.suffixes: Sequence[Sequence[str]] | None = None
        """Per rule the ends of its buckets' keys, for `spread`; None where each rule has a bucket whose key has none."""
        self.template = self._template()
        """The charges, if they are plain and all that is due; else None. See `limitgate.limits.template`."""
        rows = [each.row for each in self.charged_rules if each.row is not None]
        self.counter = PlainCounter(self.template, rows) if self.template and rows else None
        """Counts the decisions of plain plans; None without observers."""
        self.guarded = tuple([(place, each) for place, each in enumerate(compiled_rules) if each.is_guarded])
        """Rules whose keys clients may make up, with their places."""
        self.is_by_address = bool(keys) and all(key.is_by_address for key in keys)
        """True if there are keys, and nothing of a request but its client's address is in them."""
        self.is_by_outcome = any(each.is_by_outcome for each in compiled_rules)
        """True if a rule is charged by the outcome."""
        self.has_slots = any(each.has_slots for each in compiled_rules)
        """True if it takes slots for requests in flight, which have to be given back."""
        is_settled = not (self.is_by_outcome or self.has_slots)
        self.bans = any(each.rule.ban is not None for each in compiled_rules)
        """True if a rule bans clients that it refuses too often."""
        self.is_simple = self.template is not None and self.template.is_enforced and is_settled
        """True if rate fields are all that is due where the template is carried out."""
        self.given: PlansByLimits | None = None
        """Finds the plans of callers with limits of their own; None where nothing of these is limited."""
        self._field_writer: Writer | None = None
        self._refunds: dict[tuple[int | None, bool], RefundTemplate] | None = None
        """Refunds by the status of the response, and by whether all of it is sent."""
        self._by_costs: dict[tuple[int, ...], PreparedPlan | None] = _NO_COSTS if self.is_ready else {}
        """Plans by what the rules charge; None for costs that were met once."""

    def with_limits(self, request: Request, own: Mapping[str, Any] | None) -> PreparedPlan | None:
        """The plan of a request whose caller has these limits of its own; None where limits have yet to be awaited."""
        return self if self.given is None else self.given.with_limits(request, own)

    def with_costs(self, request: Request) -> PreparedPlan:
        """The plan at the costs of a request. Each callable is called once for it; raises whatever one does.

        Costs that come again are prepared. Others, such as numbers of tokens, would each take longer to prepare than to charge.
        """
        costs = tuple([each.rule.cost_of(request) for each in self.compiled_rules])
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

    def keys_of(self, subject: Subject) -> Sequence[str]:
        """Keys for a subject of the same tier."""
        keys = [key.of(subject) for key in self.keys]
        for place, compiled_rule in self.guarded:
            keys[place] = compiled_rule.admitted_key(keys[place], subject)
        return keys

    def spread(self, keys: Iterable[str]) -> Sequence[str]:
        """The keys of all buckets, by those of the rules."""
        return [key + suffix for key, suffixes in zip(keys, self.suffixes or ()) for suffix in suffixes]

    def field_writer(self, styles: tuple[Style, ...], rules: frozenset[str]) -> Writer:
        """The function that writes the rate fields of these requests, in the styles and beside the rules of their gate."""
        if self._field_writer is None:
            buckets = tuple([(each.name, each.rule.buckets) for each in self.compiled_rules])
            self._field_writer = prepared_fields(styles, buckets, rules)
        return self._field_writer

    def refund(self, spent: PlainSpend, status: int | None, *, is_sent: bool) -> PlainRefund:
        """The refund of a plan of the template, by the status of the response. It may be one of no charge."""
        if self._refunds is None:
            self._refunds = {}
        found = self._refunds.get((status, is_sent))
        if found is None:
            charges = spent.template.charges
            found = RefundTemplate(spent.template, costs_by(charges, self.charged_rules, status, is_sent=is_sent))
            keep(self._refunds, (status, is_sent), found, most=_MOST_REFUNDS)
        return found.of(spent)

    def request_plan(self, plan: Plan) -> RequestPlan:
        """The plan of one request, made of the template with its keys."""
        return RequestPlan(plan, self.charged_rules, self.is_by_outcome, has_slots=self.has_slots)

    def bound(self, keys: Sequence[str], caller: Caller | None) -> RequestPlan:
        """The plan of one request of a caller, with its keys."""
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
        """The template of the charges; None if there is none. Notes which rules are behind them."""
        rules, costs = self.compiled_rules, self.costs
        if not rules or self.denying is not None or None in costs or any(each.is_graded for each in rules):
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


_NO_COSTS: dict[tuple[int, ...], PreparedPlan | None] = {}
"""That of all plans that never ask, so that none of them has one for itself."""
_MOST_COSTS = 256
"""Costs of a plan that are remembered."""
_MOST_REFUNDS = 64
"""Statuses of responses whose refunds are remembered."""


def keep(kept: dict[Any, Any], key: object, value: object, *, most: int) -> None:
    """Remember a value, in the place of the oldest one where there are as many as may be already."""
    if len(kept) >= most:
        with suppress(RuntimeError):  # another thread was faster
            kept.pop(next(iter(kept)), None)
    kept[key] = value
