"""Admissions: one request's passage through one gate, with its decision, its charges and its refunds.

What a charge should have been is decided here: by the outcome (``charge_if``), the real cost, or a refusal. It knows no gate
and no server.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType

from limitgate.gate.flow import Budget, Flow
from limitgate.gate.permits import Permits
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.gate.planning.prepared import PreparedPlan, RequestPlan, costs_by
from limitgate.http.rate_fields import Fields, Numbers, RawFields, full_at, raw, raw_x_ratelimit, x_ratelimit
from limitgate.http.request import Request
from limitgate.http.response import Refusal, unavailable
from limitgate.limits.decision import (
    OVER,
    Decision,
    DeferredDecision,
    FinalCosts,
    fewest_places,
    set_settlement,
)
from limitgate.limits.plan import Charge, Plan, Reading, Source
from limitgate.limits.template import PlainRefund, PlainSpend
from limitgate.observing.counts import Counts, outweighs
from limitgate.observing.instruments import Outcome
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import Mark


class Receipt(NamedTuple):
    """Charges that were made for a request."""

    request_plan: RequestPlan
    plan: Plan
    """The charges made; a part of those planned where the store failed for the rest."""
    reading: Reading
    is_local: bool = False
    """True if this process decided, as the store had failed."""

    @property
    def taken(self) -> list[Charge]:
        """The charges that fitted."""
        return [charge for charge, _, after in self.reading.buckets if after is not None]

    def having_cost(self, costs: Sequence[int]) -> Receipt:
        """The same with other costs of its charges."""
        charges = tuple([charge._replace(cost=cost) for charge, cost in zip(self.plan.charges, costs)])
        return self._replace(plan=self.plan._replace(charges=charges))


class Turn(NamedTuple):
    """A turn that was booked, which is yet to come."""

    due_us: int
    """Its moment by the store's clock, Unix µs."""
    due_at: float
    """Its moment by this process' monotonic clock, in seconds."""
    charged: tuple[Receipt, ...]
    """Charges that were booked for it."""


class PermitWait(NamedTuple):
    """A wait for places in flight; what is charged for the request is charged when it has them."""

    rest: Flow[None]
    """Decides about everything else."""


class Refund(NamedTuple):
    """A correction of charges, downwards or upwards."""

    charged: Receipt
    costs: Sequence[int]
    """Right cost of each of the charges."""


class Verdict(NamedTuple):
    """The decision about some rules, and its consequences."""

    decision: Decision
    now: int | None = None
    """Clock that the decision goes by, Unix µs; None if no bucket was looked at."""
    charged: tuple[Receipt, ...] = ()
    """Charges made, by the store or by this process; to be refunded if the decision is a refusal."""
    source: Source = "nobody"
    """Where the decision comes from."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of a request that nothing else is decided about."""
        if self.now is None:
            return "failed_open" if self.decision.allowed else "failed_closed"
        return outcome_of(self.decision)


def outcome_of(decision: Decision) -> Outcome:
    """Outcome of a request by a decision that somebody has made."""
    if not decision.allowed:
        return "refused"
    if decision.delay:
        return "delayed"
    return "shadow_refused" if decision.shadow else "admitted"


class Admission:
    """One request's passage through one gate: what is decided, charged and still to be refunded. Data: no gate, no server.

    `Gate.begin` sets the attributes that every request needs. The others are the class's until a request has its own.
    """

    request: Any
    """The `Request`; None once it is over."""
    rules: ActiveRules
    """The rules that it began with, and ends with."""
    marks: Container[Mark] = ()
    """Decorators that the gate has decided about."""
    is_plain: bool
    """True while the request needs nothing but rate fields. Code that wants more sets it to False."""
    prepared: PreparedPlan | None
    """The prepared plan of requests of this kind; None where there is none."""
    plan: PlainSpend | None
    """The plain plan for the store to carry out; None if there is none."""
    rest: Flow[None] | None
    """Decides about the request if a plain plan alone cannot; None if it can."""
    decision: Decision | None
    """Decision of this gate, None where no rule applies."""
    reading: PlainSpend | None
    """Reading of the plain plan that has let the request in; None if there is none."""
    permits: Permits | None
    """Its places under adaptive limits; None where none is for it."""
    has_begun: bool
    """True if a response has begun, so that it is too late to refuse."""
    is_counted: bool
    """True if it was counted by its outcome. It is counted once."""
    sent_status: int | str | None
    """The status that the response has begun with, or the line that begins with that."""
    waited = 0.0
    """Seconds for which the store was silent so far, as far as these are not deducted from the ``budget`` yet."""
    refusal: Refusal | None = None
    """The response to send instead of the application's; None to let the request pass."""
    is_shed = False
    """True if that is the answer to a request for which there is no place in flight, so that nothing else is known of it."""
    turn: Turn | PermitWait | None = None
    """What the request has to wait for; the charges of a turn are not among ``charged`` yet."""
    is_nested = False
    """True if there is a gate around this one, or inside of it."""
    outer_decision: Decision | None = None
    """Decision of the gates around this one, see `limitgate.gate.nesting`."""
    outer_ref: ReferenceType[Admission] | None = None
    """The admission to the gate around this one."""
    inner: Sequence[Admission] = ()
    """The admissions to gates right inside of this one."""
    messages: RequestPlan | None = None
    """Charges of each message over a WebSocket, None for none."""
    client_left = False
    """True if the client is known to have hung up. An answer after that is not an outcome."""
    is_sent = False
    """True if the application has given all of its response, so that it is in flight no longer."""
    is_by_outcome = False
    """True if some of the charges depend on the outcome."""
    has_slots = False
    """True if some of the charges are slots for requests in flight, which it keeps until it is over."""
    opened_settlement: FinalCosts | None = None
    """Its ``settlement``, once there is one."""
    _now: int | None = None
    _outcome: Outcome | None = None
    _decided_by: Source = "nobody"
    _charged: tuple[Receipt, ...] | None = None
    """None while it follows from ``reading``."""
    _plain_costs: Sequence[int] | None = None
    """What the charges of ``reading`` cost once they were corrected; None for what was charged."""
    _fields: Fields | None = None
    """None while they follow from ``decision``."""
    _settled_by: int | None = None
    """Status at the last refund."""
    _budget: Budget | None = None

    def refuse(self, reading: PlainSpend, decision: Decision, refusal: Refusal) -> None:
        """Note that a plain plan was not carried out, as a rule of it refuses."""
        self.decision = decision
        self._now = reading.now
        self.refusal = refusal
        self._outcome, self._decided_by = "refused", reading.source

    @property
    def now(self) -> int:
        """Clock of the store that the fields go by, Unix µs. Once it is set, the fields follow from the decision."""
        if self._now is None:
            return 0 if self.reading is None else self.reading.now
        return self._now

    @now.setter
    def now(self, now: int) -> None:
        self._now, self._fields = now, None

    @property
    def outcome(self) -> Outcome:
        """What has become of the request so far; final once a response has begun."""
        if self._outcome is None:
            return "unlimited" if self.reading is None else "admitted"
        return self._outcome

    @property
    def decided_by(self) -> Source:
        """Where that was decided."""
        return self._decided_by if self._outcome is not None or self.reading is None else self.reading.source

    @property
    def status(self) -> int | None:
        """Response status; None before the response starts, if the client disconnected first, and if it is no number."""
        status = self.sent_status
        if isinstance(status, str):
            code = status[:3]
            return int(code) if code.isdecimal() else None
        return status

    @property
    def identified(self) -> Caller | None:
        """The caller. None if the caller is unknown, or the request is over."""
        if self.prepared is not None and self.request is not None:
            caller: Caller | None = self.request.caller
            return caller
        return None

    @property
    def settlement(self) -> FinalCosts:
        """The costs that the application tells for the request."""
        if self.opened_settlement is None:
            request: Request | None = self.request
            if request is None:
                return OVER
            self.opened_settlement = request.open_settlement()
        return self.opened_settlement

    @property
    def has_news(self) -> bool:
        """True if the application told a cost that is not in effect yet. To tell one, it has to look at the decision first."""
        return not (type(self.decision) is DeferredDecision and self.opened_settlement is None) and self.settlement.has_news

    def decide(self, outcome: Outcome, source: Source) -> None:
        """Note an outcome, unless the one that was known weighs more."""
        if outweighs(outcome, self.outcome):
            self._outcome, self._decided_by = outcome, source

    def count_once(self, counts: Counts) -> None:
        """Count the request by its outcome, which is final; the outermost of several gates that count does so."""
        self.is_counted = True
        if not self.is_plain and self.is_nested:
            outer = self.outer
            while outer is not None:
                if outer.rules.counts is not None:
                    return
                outer = outer.outer
            within = list(self.inner)
            for inner in within:
                within += inner.inner
                self.decide(inner.outcome, inner.decided_by)
        counts.count(self.outcome, self.decided_by)

    @property
    def budget(self) -> Budget:
        """Time left to wait for the store."""
        if self._budget is None:
            self._budget = Budget(self.rules.timeout, measured=self.rules.is_measured)
            self._budget.left -= self.waited if self.reading is None else self.reading.waited
        return self._budget

    @property
    def charged(self) -> tuple[Receipt, ...]:
        """Charges made for the request so far."""
        if self._charged is None:
            reading, prepared = self.reading, self.prepared
            if reading is None or prepared is None:
                return ()
            plan = reading.whole_plan
            charged = Receipt(prepared.request_plan(plan), plan, reading.whole)
            self._charged = (charged if self._plain_costs is None else charged.having_cost(self._plain_costs),)
        return self._charged

    @charged.setter
    def charged(self, charged: tuple[Receipt, ...]) -> None:
        self._charged = charged

    @property
    def fields(self) -> Fields:
        """Rate fields of this gate's own decision."""
        decision = self.decision
        if type(decision) is DeferredDecision:
            reading: Any = self.reading
            tightest = reading.template.tightest  # a local name makes the call of a function in a slot faster
            limit, remaining, refill_us, _ = tightest(reading.states)
            full_at_us = reading.now + refill_us
            if self.permits is not None:
                limit, remaining, full_at_us = self._under_places(limit, remaining, full_at_us)
            if self.rules.has_commonest_style:
                return x_ratelimit(limit, remaining, full_at_us)
            return self._written(Numbers(limit, remaining, full_at_us, reading.template.windows(reading.states)))
        if self._fields is None and decision is not None:
            now = self._now
            if now is None:
                now = self.now
            if self.rules.has_commonest_style:
                return x_ratelimit(decision.limit, decision.remaining, full_at(decision, now))
            self._fields = self.rules.fields(decision, now)
        return self._fields or []

    @fields.setter
    def fields(self, fields: Fields) -> None:
        self._fields = fields

    def raw_fields(self) -> RawFields:
        """The `fields` as ASGI wants them."""
        decision = self.decision
        if self.rules.has_commonest_style:
            if type(decision) is DeferredDecision:
                reading: Any = self.reading
                tightest = reading.template.tightest  # a local name makes the call of a function in a slot faster
                limit, remaining, refill_us, _ = tightest(reading.states)
                if self.permits is None:
                    return raw_x_ratelimit(limit, remaining, reading.now + refill_us)
                return raw_x_ratelimit(*self._under_places(limit, remaining, reading.now + refill_us))
            if self._fields is None and decision is not None:
                now = self._now
                if now is None:
                    now = self.now
                return raw_x_ratelimit(decision.limit, decision.remaining, full_at(decision, now))
        return raw(self.fields)

    def _written(self, numbers: Numbers) -> Fields:
        """Rate fields of the prepared plan."""
        prepared: Any = self.prepared
        fields: Fields = prepared.field_writer(self.rules.header_styles, self.rules.rule_names)(numbers)
        return fields

    def _under_places(self, limit: int, remaining: int, full_at_us: int) -> tuple[int, int, int]:
        """The tightest of this window and the adaptive limits of the request."""
        decision: Any = self.decision
        fewest = fewest_places(decision.in_force, remaining)
        return (limit, remaining, full_at_us) if fewest is None else (*fewest[1:], self.now)

    @property
    def outer(self) -> Admission | None:
        """The admission to the gate around this one."""
        return None if self.outer_ref is None else self.outer_ref()

    def begun(self, status: int | str | None) -> None:
        """Note that a response has begun with this status, or a line that begins with it."""
        if self.is_plain or not self.client_left:
            self.sent_status = status  # first, as other threads read it once a response has begun
        self.has_begun = True
        counts = self.rules.counts
        if counts is not None and not self.is_counted:
            self.count_once(counts)

    def failed(self) -> None:
        """Note that the application raised an error: a 500, unless a response has begun or the client has left."""
        if not (self.has_begun or self.client_left):
            self.sent_status = 500

    def sent(self) -> None:
        """Note that the application has given all of its response."""
        self.is_sent = True
        if self.permits is not None:
            self.permits.end()

    def end(self) -> bool:
        """Note that the request is over, so that nothing more can be said about it. True if a refund may be needed."""
        request: Request | None = self.request
        if request is not None:
            if self.permits is not None and self.permits.held:
                self.permits.end_unanswered(client_left=self.client_left)
            request.is_over = self.is_sent = True
            if self.rules.counts is not None and not self.is_counted:
                self.count_once(self.rules.counts)
            decision = self.decision
            if type(decision) is DeferredDecision and self.opened_settlement is None:  # no code has asked for the settlement
                set_settlement(decision, OVER)  # a WSGI environ leads to the decision, and the request to the environ
                self.request = None
                return not self.is_plain and self.may_need_refund()
            settlement = self.opened_settlement
            if settlement is None:
                settlement = self.settlement
            settlement.is_over = True
            if type(decision) is DeferredDecision:
                set_settlement(decision, settlement)
            self.request = None
        if self._charged is None and self.reading is None:
            return False  # nothing was charged
        return self.may_need_refund()

    def turn_ended(self, turn: Turn, *, stays: bool) -> None:
        """Note that the turn has come, or that it was given up; then the request is refused, as if it had never come."""
        self.charged += turn.charged
        if not stays:
            self.refusal = unavailable()

    def abandon(self) -> None:
        """Forget the charges: no store can be asked any more to refund them. Places in flight are given back all the same."""
        if self.permits is not None:
            self.permits.abandon()
        self.charged = ()
        self.has_slots = False

    @property
    def is_undone(self) -> bool:
        """True if it is refused, as if it had never come; not where that is too late, as a response has begun already."""
        return self.refusal is not None and not self.has_begun

    @property
    def gives_slots_back(self) -> bool:
        """True if it still has slots, though it is in flight no longer."""
        return self.has_slots and self.is_sent

    @property
    def has_to_refund(self) -> bool:
        """True if there are charges that must not stay."""
        if self._charged is None and self.reading is None:
            return False  # nothing was charged
        if not (self.is_undone or self.gives_slots_back):
            return False
        return self._charged is None or bool(self._charged)

    def may_need_refund(self) -> bool:
        """True if, by what is known now, a charge may be too high or too low."""
        if self.is_plain and type(self.decision) is DeferredDecision:
            return False  # almost all requests
        if self._charged is None and self.reading is None:
            return False
        if self.is_by_outcome and self.status != self._settled_by:
            return True
        if not (self.has_slots or self.refusal or self.has_news):
            return False
        return self.has_to_refund or (self.has_news and (self._charged is None or bool(self._charged)))

    def plain_refund(self) -> PlainRefund | None:
        """Take the correction that a plain plan needs, by its outcome or because it is over. None if `refunds` has to be asked.

        From now on it counts as made.
        """
        if self._charged is not None or self._plain_costs is not None or self.refusal is not None or self.has_news:
            return None
        reading, prepared = self.reading, self.prepared
        if reading is None or prepared is None:
            return None
        self._settled_by = status = self.status
        refund = prepared.refund(reading, status, is_sent=self.is_sent)
        self._plain_costs = refund.template.costs
        return refund

    def refunds(self, *, any_has_own_cost: bool) -> list[Refund]:
        """Take out the refunds that are due by what is known now; from now on they count as made.

        ``any_has_own_cost`` is true if costs were told, and a rule that the request was charged for by any gate has a cost of
        its own.
        """
        self.settlement.has_news = False
        self._settled_by = self.status
        refunds, corrected = [], []
        for charged in self.charged:
            costs = self._costs(charged, any_has_own_cost=any_has_own_cost)
            if costs == [charge.cost for charge in charged.plan.charges]:
                corrected.append(charged)
            else:
                refunds.append(Refund(charged, costs))
                corrected.append(charged.having_cost(costs))
        self.charged = () if self.is_undone else tuple(corrected)
        self.has_slots = self.has_slots and not (self.is_undone or self.is_sent)
        return refunds

    def _costs(self, charged: Receipt, *, any_has_own_cost: bool) -> list[int]:
        """The right cost of each charge, by what is known now."""
        if self.is_undone:
            return [0] * len(charged.plan.charges)
        request_plan = charged.request_plan
        planned = request_plan.plan.charges if request_plan.plan else ()
        costs = costs_by(
            planned,
            request_plan.compiled_rules,
            self._settled_by,
            is_sent=self.is_sent,
            told=self.settlement.costs,
            any_has_own_cost=any_has_own_cost,
        )
        by_key = {charge.key: cost for charge, cost in zip(planned, costs)}
        return [by_key[charge.key] for charge in charged.plan.charges]
