"""The charges of one request: those of any rules, and plans prepared for all requests that differ in who asks alone."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.identity import Subject
from limitgate.http.rate_fields import Writer, prepared_fields
from limitgate.keys import PreparedKey
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.template import PlanTemplate
from limitgate.observing.counts import RuleSeries
from limitgate.observing.plain_counter import PlainCounter
from limitgate.rules.decorators import EVERYTHING, Mark


class RequestPlan(NamedTuple):
    """The charges of one request, and the rules behind them."""

    plan: Plan | None
    """None where no rule applies."""
    compiled_rules: Sequence[CompiledRule]
    """The rules behind the plan's charges, in their order."""
    marks: Container[Mark]
    """Decorators that were taken into account."""
    is_by_outcome: bool = False
    """True if a rule is charged by the outcome."""
    messages: RequestPlan | None = None
    """Charges of each message over a WebSocket, None for none."""
    has_slots: bool = False
    """True if it takes slots for requests in flight, which have to be given back."""
    denying: CompiledRule | None = None
    """A rule that denies the request, or if that is a shadow, would."""

    def row(self, charge: Charge) -> RuleSeries | None:
        """The figures of the rule behind a charge; None without observers."""
        charges = self.plan.charges if self.plan else ()
        rows = (each.row for known, each in zip(charges, self.compiled_rules) if known.rule == charge.rule)
        return next(rows, None)

    def named(self) -> RequestPlan:
        """The same with names for the slots that one request takes."""
        return self._replace(plan=self.plan.named()) if self.plan else self


@dataclass(frozen=True, slots=True)
class AdaptiveMatch:
    """The adaptive limits of requests of one tier, method and route, which take about the same time."""

    compiled_rules: Sequence[CompiledRule]
    """Those that refuse before shadows."""
    request_class: Hashable


UNLIMITED = RequestPlan(None, (), EVERYTHING)
"""No rule applies, and none of the decorators either."""


class PreparedPlan:
    """Plan of requests of one tier, method, path and root path, of which the key of who asks is all that is missing.

    Almost every request has one: its charges are plain, see `limitgate.limits.template`, or there are none. Raises `ValueError`
    for charges that are not plain.
    """

    __slots__ = (
        "_field_writer",
        "adaptive",
        "compiled_rules",
        "counter",
        "guarded",
        "is_by_address",
        "keys",
        "marks",
        "template",
    )

    def __init__(
        self,
        compiled_rules: Sequence[CompiledRule],
        subject: Subject | None,
        marks: Container[Mark],
        adaptive: AdaptiveMatch | None = None,
    ) -> None:
        prepared = [compiled_rule.prepared(subject) for compiled_rule in compiled_rules] if subject is not None else []
        self.template = PlanTemplate([charge for _, charges in prepared for charge in charges]) if prepared else None
        """The charges; None where no rule applies."""
        self._field_writer: Writer | None = None
        rows = [each.row for each, (_, charges) in zip(compiled_rules, prepared) for _ in charges if each.row is not None]
        self.counter = PlainCounter(self.template, rows) if self.template and rows else None
        """Counts the decisions of the rules; None without observers."""
        self.adaptive = adaptive
        """Adaptive limits to ask before; None for none."""
        self.marks = marks
        """Decorators that were taken into account."""
        self.compiled_rules = tuple(compiled_rules)
        """The rules behind the charges."""
        self.keys: list[PreparedKey] = [key for key, _ in prepared]
        """The keys less what the client contributes."""
        self.guarded = [(place, each) for place, each in enumerate(self.compiled_rules) if each.is_guarded] if prepared else []
        """Rules whose keys clients may make up, with their places."""
        self.is_by_address = all(key.is_by_address for key in self.keys)
        """True if nothing of a request but its client's address is in the keys."""

    def keys_of(self, subject: Subject) -> Sequence[str]:
        """Keys for a subject of the same tier."""
        keys = [key.of(subject) for key in self.keys]
        for place, compiled_rule in self.guarded:
            keys[place] = compiled_rule.admitted_key(keys[place], subject)
        return keys

    def field_writer(self, styles: tuple[str, ...], rules: frozenset[str]) -> Writer:
        """The function that writes the rate fields of these requests, in the styles and beside the rules of their gate."""
        if self._field_writer is None:
            charges = () if self.template is None else self.template.charges
            self._field_writer = prepared_fields(styles, tuple([(each.rule or "", (each.bucket,)) for each in charges]), rules)
        return self._field_writer

    def request_plan(self, plan: Plan) -> RequestPlan:
        """The plan of one request, made of the template with its keys."""
        return RequestPlan(plan, self.compiled_rules, self.marks)


def keep(kept: dict[Any, Any], key: object, value: object, *, most: int) -> None:
    """Remember a value, in the place of the oldest one where there are as many as may be already."""
    if len(kept) >= most:
        with suppress(RuntimeError):  # another thread was faster
            kept.pop(next(iter(kept)), None)
    kept[key] = value
