"""The state of one request at one gate: decision, charges and refunds."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType

from limitgate.fleet.tally import MOST
from limitgate.gate.flow import Budget, Flow
from limitgate.gate.permits import Permits
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.gate.planning.costs_by_outcome import costs_by_outcome
from limitgate.gate.planning.prepared import PreparedPlan, RequestPlan
from limitgate.http.rate_fields import Fields, Numbers, RawFields, full_at, raw, raw_x_ratelimit, x_ratelimit
from limitgate.http.request import Request
from limitgate.http.response import Refusal, unavailable
from limitgate.limits.decision import OVER, Decision, DeferredDecision, FinalCosts, fewest_places
from limitgate.limits.plan import Charge, Plan, Reading, Source
from limitgate.limits.template import PlainRefund, PlainSpend
from limitgate.llm.metering import ResponseMeter
from limitgate.observing.counts import outweighs
from limitgate.observing.instruments import Outcome
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import Mark


class Receipt(NamedTuple):
    request_plan: RequestPlan
    plan: Plan
    """Partial if the store failed for some buckets."""
    reading: Reading
    is_local: bool = False

    @property
    def taken(self) -> list[Charge]:
        return [charge for charge, _, after in self.reading.buckets if after is not None]

    def having_cost(self, costs: Sequence[int]) -> Receipt:
        charges = tuple([charge._replace(cost=cost) for charge, cost in zip(self.plan.charges, costs)])
        return self._replace(plan=self.plan._replace(charges=charges))


class Turn(NamedTuple):
    """A booked time for a request."""

    due_us: int
    """Unix µs by the store's clock."""
    due_at: float
    """Monotonic seconds."""
    charged: tuple[Receipt, ...]


class PermitWait(NamedTuple):
    rest: Flow[None]


Refund = tuple[Receipt, Sequence[int]]
"""Charges and final costs."""


class Verdict(NamedTuple):
    decision: Decision
    now: int | None = None
    """Unix µs by the store's clock; None if no bucket was read."""
    charged: tuple[Receipt, ...] = ()
    """Charges to refund after a refusal."""
    source: Source = "nobody"

    @property
    def outcome(self) -> Outcome:
        if self.now is None:
            return "failed_open" if self.decision.allowed else "failed_closed"
        return outcome_of(self.decision)


def outcome_of(decision: Decision) -> Outcome:
    if not decision.allowed:
        return "refused"
    if decision.delay:
        return "delayed"
    return "shadow_refused" if decision.shadow else "admitted"


class Admission:
    """The state of one request at one gate. `Gate.begin` sets the attributes that have no default."""

    request: Any
    rules: ActiveRules
    marks: Container[Mark] = ()
    is_plain: bool
    """True if rate fields are all that this request still needs."""
    prepared: PreparedPlan | None = None
    plan: PlainSpend | None
    rest: Flow[None] | None
    decision: Decision | None = None
    reading: PlainSpend | None = None
    permits: Permits | None
    has_begun: bool
    is_counted: bool = False
    sent_status: int | str | None = None
    waited: float = 0.0
    """Seconds without a reply that ``budget`` doesn't count yet."""
    refusal: Refusal | None = None
    is_shed = False
    turn: Turn | PermitWait | None = None
    """A booked turn, whose charges aren't in ``charged`` yet."""
    is_nested = False
    outer_decision: Decision | None = None
    outer_ref: ReferenceType[Admission] | None = None
    inner: Sequence[Admission] = ()
    messages: RequestPlan | None = None
    client_left = False
    """If True, a later response doesn't decide the outcome."""
    is_sent: bool = False
    is_by_outcome = False
    meter: ResponseMeter | None = None
    """Reads the response's usage if a rule charged tokens."""
    has_slots: bool = False
    opened_settlement: FinalCosts | None = None
    _now: int | None = None
    _outcome: Outcome | None = None
    _decided_by: Source = "nobody"
    _charged: tuple[Receipt, ...] | None = None
    _plain_costs: Sequence[int] | None = None
    _fields: Fields | None = None
    _settled_by: int | None = None
    _budget: Budget | None = None

    def refuse(self, reading: PlainSpend, decision: Decision, refusal: Refusal, rules: Sequence[str | None]) -> None:
        """Record a refusal, which outweighs any other outcome."""
        pending = self.prepared.pending  # type: ignore[union-attr]  # A reading belongs to a prepared plan.
        if pending is not None:
            pending.refusals.append((reading, rules))
            if not pending.tally.known.issuperset(reading.keys) or len(pending.refusals) > MOST:
                pending.look(reading.keys, self)
            self.is_counted = pending.defers
        self.decision = decision
        self._now = reading.now
        self.refusal = refusal
        self._outcome, self._decided_by = "refused", reading.source

    @property
    def now(self) -> int:
        """Store clock, Unix µs. Setting it recomputes the rate fields."""
        if self._now is None:
            return 0 if self.reading is None else self.reading.now
        return self._now

    @now.setter
    def now(self, now: int) -> None:
        self._now, self._fields = now, None

    @property
    def outcome(self) -> Outcome:
        """Outcome so far; final once a response has begun."""
        if self._outcome is None:
            return "unlimited" if self.reading is None else "admitted"
        return self._outcome

    @property
    def decided_by(self) -> Source:
        return self._decided_by if self._outcome is not None or self.reading is None else self.reading.source

    @property
    def status(self) -> int | None:
        status = self.sent_status
        if isinstance(status, str):
            code = status[:3]
            return int(code) if code.isdecimal() else None
        return status

    @property
    def identified(self) -> Caller | None:
        """The caller; None if unknown, or if the request has ended."""
        if self.prepared is not None and self.request is not None:
            caller: Caller | None = self.request.caller
            return caller
        return None

    @property
    def settlement(self) -> FinalCosts:
        if self.opened_settlement is None:
            request: Request | None = self.request
            if request is None:
                return OVER
            self.opened_settlement = request.open_settlement()
        return self.opened_settlement

    @property
    def has_news(self) -> bool:
        return not (type(self.decision) is DeferredDecision and self.opened_settlement is None) and self.settlement.has_news

    def decide(self, outcome: Outcome, source: Source) -> None:
        """Record an outcome, unless the known one outweighs it."""
        if outweighs(outcome, self.outcome):
            self._outcome, self._decided_by = outcome, source

    def count_once(self) -> None:
        """Count the final outcome. Nested gates count a request once."""
        self.is_counted = True
        reading, is_plain = self.reading, self.is_plain
        if reading is not None and (pending := self.prepared.pending) is not None:  # type: ignore[union-attr]  # It has one.
            queue = pending.queue if is_plain else pending.others
            queue.append(reading)
            is_known = pending.is_known
            if (is_known is not None and not is_known(reading.keys)) or len(queue) > MOST:
                pending.look(reading.keys, self)
            if is_plain and pending.defers:
                return
        if self.is_nested and not is_plain:
            outer = self.outer
            while outer is not None:
                if outer.rules.counts is not None:
                    return
                outer = outer.outer
            within = list(self.inner)
            for inner in within:
                within += inner.inner
                self.decide(inner.outcome, inner.decided_by)
        if self.rules.counts is not None:
            self.rules.counts.count(self.outcome, self.decided_by)

    @property
    def needs_only_fields(self) -> bool:
        """True if admitted without further work."""
        if self._outcome != "admitted" or self.turn is not None or self.is_by_outcome or self.has_slots:
            return False
        return self.permits is None and self.messages is None and bool(self.request.is_outermost)

    @property
    def budget(self) -> Budget:
        if self._budget is None:
            self._budget = Budget(self.rules.timeout, measured=self.rules.is_measured)
            self._budget.left -= self.waited if self.reading is None else self.reading.waited
        return self._budget

    @property
    def charged(self) -> tuple[Receipt, ...]:
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
        decision = self.decision
        if type(decision) is DeferredDecision:
            reading: Any = self.reading
            tightest = reading.template.tightest
            limit, remaining, refill_us, _ = tightest(reading.states)
            full_at_us = reading.now + refill_us
            if self.permits is not None:
                fewest = fewest_places(self.permits.in_force, remaining)
                if fewest is not None:
                    _, limit, remaining = fewest
                    full_at_us = reading.now
            if self.rules.has_commonest_style:
                return x_ratelimit(limit, remaining, full_at_us)
            windows = reading.template.windows(reading.states)
            return self._written(Numbers(limit, remaining, full_at_us, windows, reading.now))
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
        """`fields` in ASGI form."""
        decision = self.decision
        if self.rules.has_commonest_style:
            if type(decision) is DeferredDecision:
                reading: Any = self.reading
                tightest = reading.template.tightest
                limit, remaining, refill_us, _ = tightest(reading.states)
                if self.permits is not None:
                    fewest = fewest_places(self.permits.in_force, remaining)
                    if fewest is not None:
                        return raw_x_ratelimit(fewest[1], fewest[2], reading.now)
                return raw_x_ratelimit(limit, remaining, reading.now + refill_us)
            if self._fields is None and decision is not None:
                now = self._now
                if now is None:
                    now = self.now
                return raw_x_ratelimit(decision.limit, decision.remaining, full_at(decision, now))
        return raw(self.fields)

    def _written(self, numbers: Numbers) -> Fields:
        prepared: Any = self.prepared
        fields: Fields = prepared.field_writer(self.rules.header_styles, self.rules.rule_names)(numbers)
        return fields

    @property
    def outer(self) -> Admission | None:
        return None if self.outer_ref is None else self.outer_ref()

    def begun(self, status: int | str | None) -> None:
        if self.is_plain or not self.client_left:
            # Set this before `has_begun`, because other threads read it afterwards.
            self.sent_status = status
        self.has_begun = True
        if not self.is_counted and self.rules.counts is not None:
            self.count_once()

    def failed(self) -> None:
        """Note an application's error: a 500, unless a response has begun or the client left."""
        if not (self.has_begun or self.client_left):
            self.sent_status = 500

    def sent(self) -> None:
        self.is_sent = True
        if self.permits is not None:
            self.permits.end()

    def end(self) -> bool:
        """End the request. Return True if a refund may be needed."""
        request: Request | None = self.request
        if request is not None:
            if self.permits is not None and self.permits.held:
                self.permits.end_unanswered(client_left=self.client_left)
            request.is_over = self.is_sent = True
            if not self.is_counted and self.rules.counts is not None:
                self.count_once()
            reading: Any = self.reading
            is_deferred = type(self.decision) is DeferredDecision
            if is_deferred and self.opened_settlement is None:
                # Break the cycle WSGI environ -> decision -> request -> environ.
                reading.owner = OVER
                self.request = None
                return not self.is_plain and self.may_need_refund()
            settlement = self.opened_settlement
            if settlement is None:
                settlement = self.settlement
            if self.meter is not None:
                self.meter.over(self.status)
            settlement.is_over = True
            if is_deferred:
                reading.owner = settlement
            self.request = None
        if self._charged is None and self.reading is None:
            return False
        return self.may_need_refund()

    def turn_ended(self, turn: Turn, *, stays: bool) -> None:
        """Note that the turn has come. If the client left before, the request is refused."""
        self.charged += turn.charged
        if not stays:
            self.refusal = unavailable()

    def abandon(self) -> None:
        if self.permits is not None:
            self.permits.abandon()
        self.charged = ()
        self.has_slots = False

    @property
    def is_undone(self) -> bool:
        """True if the request was refused before its response began, so that all charges are refunded."""
        return self.refusal is not None and not self.has_begun

    @property
    def gives_slots_back(self) -> bool:
        return self.has_slots and self.is_sent

    @property
    def has_to_refund(self) -> bool:
        if self._charged is None and self.reading is None:
            return False
        if not (self.is_undone or self.gives_slots_back):
            return False
        return self._charged is None or bool(self._charged)

    def may_need_refund(self) -> bool:
        if self.is_plain and type(self.decision) is DeferredDecision:
            return False
        if self._charged is None and self.reading is None:
            return False
        if self.is_by_outcome and self.status != self._settled_by:
            return True
        if not (self.has_slots or self.refusal or self.has_news):
            return False
        return self.has_to_refund or (self.has_news and (self._charged is None or bool(self._charged)))

    def plain_refund(self) -> PlainRefund | None:
        """Return the correction of a plain plan; None if returned before, or if `refunds` must make it."""
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
        """``any_has_own_cost`` is True if a cost was reported and a rule of any gate has its own cost."""
        self.settlement.has_news = False
        self._settled_by = self.status
        refunds: list[Refund] = []
        corrected = []
        for charged in self.charged:
            costs = self._costs(charged, any_has_own_cost=any_has_own_cost)
            if costs == [charge.cost for charge in charged.plan.charges]:
                corrected.append(charged)
            else:
                refunds.append((charged, costs))
                corrected.append(charged.having_cost(costs))
        self.charged = () if self.is_undone else tuple(corrected)
        self.has_slots = self.has_slots and not (self.is_undone or self.is_sent)
        return refunds

    def _costs(self, charged: Receipt, *, any_has_own_cost: bool) -> list[int]:
        if self.is_undone:
            return [0] * len(charged.plan.charges)
        request_plan = charged.request_plan
        planned = request_plan.plan.charges if request_plan.plan else ()
        costs = costs_by_outcome(
            planned,
            request_plan.compiled_rules,
            self._settled_by,
            is_sent=self.is_sent,
            told=self.settlement.costs,
            usage=self.settlement.usage,
            any_has_own_cost=any_has_own_cost,
        )
        by_part = {(charge.key, charge.bucket.ids): cost for charge, cost in zip(planned, costs)}
        return [by_part[charge.key, charge.bucket.ids] for charge in charged.plan.charges]
