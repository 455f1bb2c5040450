"""Plain admissions: those of requests that a prepared plan lets in, as almost all are. Until somebody wants to know more."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, final

from limitgate.gate.admission import Admission
from limitgate.gate.planning.request_plan import PreparedPlan
from limitgate.gate.planning.rules_in_force import RulesInForce
from limitgate.http.rate_fields import Fields, Numbers, RawFields, raw, raw_x_ratelimit, x_ratelimit
from limitgate.http.request import Request
from limitgate.http.response import Refusal
from limitgate.limits.decision import OVER, Decision, DeferredDecision, fewest_places, set_settlement
from limitgate.limits.plan import Source
from limitgate.limits.template import AnyReading, PlainSpend, PlanTemplate


class Unasked:
    """Stands for the reading of a request that has its places in flight, and for which no store was asked."""

    __slots__ = ("now",)
    source: Source = "nobody"
    waited = 0.0

    def __init__(self, now: int) -> None:
        self.now = now
        """Unix µs."""


@final
class PlainAdmission:
    """Admission of a request that was charged by a prepared plan: its rate fields are all that is due.

    No other gate takes part, it is not refused, waits for nothing, and holds no slot. What may change that asks for `whole`.
    """

    # without an `__init__`, which takes as long as all the rest
    __slots__ = ("coming", "decision", "keys", "prepared", "reading", "request", "rules")
    coming: Awaitable[AnyReading] | None
    """The reading of an `AsyncStore` that has to be awaited: nothing is decided until `Gate.answered` is told. Else None."""
    decision: Decision
    keys: Sequence[str]
    """Keys of what is asked, where a store is."""
    prepared: PreparedPlan
    reading: PlainSpend | Unasked
    request: Any
    """The `Request`; None once it is over, or an `Admission` has it."""
    rules: RulesInForce
    """The rules that it began with, and ends with."""

    @property
    def template(self) -> PlanTemplate:
        """The template of the plan that is asked for."""
        template = self.prepared.template
        if template is None:
            raise TypeError("the request is charged nothing, expected one for which a store was asked")
        return template

    def has_news(self) -> bool:
        """True if the decision was told a cost that is not put into effect yet. Nobody told one that nobody has looked at."""
        if type(self.decision) is DeferredDecision:
            return False
        request: Request | None = self.request
        return request is not None and request.open_settlement().has_news

    def end(self) -> bool:
        """Note that the request is over. False if a cost was heard of that is not put into effect yet, or nothing is left."""
        decision, request = self.decision, self.request
        if request is None:
            return False
        if type(decision) is DeferredDecision:
            request.is_over = True
            set_settlement(decision, OVER)  # a WSGI environ leads to the decision, and the request to the environ
        else:
            settlement = request.open_settlement()
            if settlement.has_news:
                return False
            request.is_over = settlement.is_over = True
        if self.prepared.adaptive is not None and request.in_flight.held:
            request.in_flight.end_unanswered(client_left=False)
        self.request = None
        return True

    def whole(self) -> Admission:
        """The same as an admission of any kind."""
        request = self.request
        settlement = OVER if request is None else request.open_settlement()
        admission = Admission(request, None if request is None else request.caller, self.prepared.marks, self.rules, settlement)
        if request is None:
            del admission.request
        else:
            set_settlement(self.decision, settlement)  # as in `end`; it would lead to the same one
        if self.reading.waited:
            admission.budget.left -= self.reading.waited
        if request is not None:
            admission.in_flight = request.in_flight
        if isinstance(self.reading, Unasked):
            admission.admit_in_flight(self.decision, self.reading.now)
        else:
            admission.admit(self.prepared, self.reading, self.decision)
        return admission

    def fields(self) -> Fields:
        """Rate fields."""
        rules, reading = self.rules, self.reading
        if isinstance(reading, Unasked) or not reading.template.is_enforced:
            return rules.fields(self.decision, reading.now)
        limit, remaining, full_at_us = self._tightest(reading)
        if rules.has_commonest_style:
            return x_ratelimit(limit, remaining, full_at_us)
        windows = reading.template.windows(reading.debts)
        return self.prepared.field_writer(rules.header_styles, rules.rule_names)(Numbers(limit, remaining, full_at_us, windows))

    def raw_fields(self) -> RawFields:
        """Rate fields as ASGI wants them."""
        reading = self.reading
        if self.rules.has_commonest_style and type(reading) is PlainSpend and reading.template.is_enforced:
            if self.prepared.adaptive is None:  # `_tightest` without its call, for almost every request
                tightest = reading.template.tightest
                limit, remaining, refill_us, _ = tightest(reading.debts)
                return raw_x_ratelimit(limit, remaining, reading.now + refill_us)
            return raw_x_ratelimit(*self._tightest(reading))
        return raw(self.fields())

    def _tightest(self, reading: PlainSpend) -> tuple[int, int, int]:
        """Burst and remaining of the tightest window, and the Unix µs at which it is full again."""
        tightest = reading.template.tightest  # a function in a slot: called by a name of its own, it takes less time
        limit, remaining, refill_us, _ = tightest(reading.debts)
        if self.prepared.adaptive is not None and (fewest := fewest_places(self.decision.in_force, remaining)) is not None:
            _, limit, remaining = fewest
            refill_us = 0
        return limit, remaining, reading.now + refill_us


class Shed:
    """A request that came straight, and for which there is no place in flight: nothing of it is known, and nothing is due."""

    __slots__ = ("refusal", "request", "rules")

    def __init__(self, request: Request, rules: RulesInForce, refusal: Refusal) -> None:
        self.request = request
        self.rules = rules
        self.refusal = refusal

    def whole(self) -> Admission:
        """The same as an admission of any kind."""
        admission = Admission(self.request, self.request.caller, (), self.rules)
        admission.in_flight = self.request.in_flight
        admission.shed()
        return admission

    def count(self) -> None:
        """Count the request, if anybody counts."""
        if self.rules.counts is not None:
            self.rules.counts.count("refused", "nobody")


AnyAdmission = Admission | PlainAdmission | Shed


def whole_admission(admission: AnyAdmission) -> Admission:
    """An admission as one of any kind."""
    return admission if isinstance(admission, Admission) else admission.whole()
