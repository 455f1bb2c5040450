"""A request on its way through a gate: what has been decided about it so far, and what was taken for it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from limitgate.gate.flow import Budget
from limitgate.gate.planner import RequestPlan
from limitgate.http.request import Request
from limitgate.http.response import Fields, Refusal, rate_fields, unavailable
from limitgate.limits.decision import Decision, Settlement, joined
from limitgate.limits.plan import Plan, Reading
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import Mark

ADMISSION = "limitgate.admission"
"""Where the admission is found in a scope or environ; None where the gate is switched off."""


def admission_around(found: Mapping[str, Any]) -> Admission | None:
    """The admission to the gate around that waits for the response to a scope or environ; None if there is none."""
    admission = found.get(ADMISSION)
    while isinstance(admission, Admission) and (admission.has_begun or admission.settlement.is_over):
        admission = admission.outer
    return admission if isinstance(admission, Admission) else None


class Charged(NamedTuple):
    """Something that was taken for a request."""

    request_plan: RequestPlan
    plan: Plan
    """What was taken; a part of what was considered where the store failed for the rest."""
    reading: Reading
    is_local: bool = False
    """True if this process decided, as the store had failed."""

    def having_cost(self, costs: Sequence[int]) -> Charged:
        """The same with other costs of its charges."""
        charges = tuple([charge._replace(cost=cost) for charge, cost in zip(self.plan.charges, costs)])
        return self._replace(plan=self.plan._replace(charges=charges))


class Booking(NamedTuple):
    """A turn that was booked, which is yet to come."""

    due: int
    """When it comes by the store's clock, Unix µs."""
    at: float
    """When it comes by this process' monotonic clock, in seconds."""
    charged: tuple[Charged, ...]
    """What was booked for it."""


class Refund(NamedTuple):
    """Something that was charged otherwise than it should have been."""

    charged: Charged
    costs: Sequence[int]
    """What each of its charges should have been."""


class Admission:
    """A request on its way: what the door does with it, and what the gate remembers of it until it is over.

    It may come by gates inside of the gate, such as that of a mounted application. Each takes and gives back for itself, but
    the application sees one decision, and a response has one set of rate fields, which the outermost gate adds that has any.
    """

    decision: Decision | None = None
    """That of this gate, None where no rule applies."""
    now: int = 0
    """The clock that the fields go by, Unix µs."""
    around: Decision | None = None
    """The decision of the gates around this one."""
    inside: Sequence[Admission] = ()
    """The admissions to gates right inside of this one."""
    refusal: Refusal | None = None
    """The response to send instead of the application's; None to let the request pass."""
    messages: RequestPlan | None = None
    """What each message over a WebSocket is to be charged, None for nothing."""
    has_begun = False
    """True if a response has begun, so that it is too late to refuse."""
    client_left = False
    """True if the client is known to have hung up; what is answered then is no outcome."""
    status: int | None = None
    """That of the response, None as long as there is none, or none that the client waited for."""
    charged: tuple[Charged, ...] = ()
    """What was taken for it so far."""
    is_by_outcome = False
    """True if some of that is charged by the outcome only."""
    has_slots = False
    """True if some of that are places for requests in flight, which it keeps until it is over."""
    is_sent = False
    """True if the application has given all of its response, so that it is in flight no longer."""
    booking: Booking | None = None
    """What it has to wait for before it goes on; what was booked for that is not yet among what was taken."""
    receive_buffer: Any = None
    """What the server said while it waited, to be closed when it is over; None if it did not wait."""
    listener: Any = None
    """Whatever hears that a client leaves while it waits, see `Exchange.stays_until`; None where nobody does."""

    _outer: ReferenceType[Admission] | None = None
    _settled_by: int | None = None
    """The status by which charges were put right the last time."""

    def __init__(self, gate: Any, request: Request, identified: Caller | None, seen: Container[Mark], budget: Budget) -> None:
        self.gate = gate
        """The `Gate` that it is an admission to."""
        self.request = request
        """Gone once it is over."""
        self.identified = identified
        self.seen = seen
        """The decorators that were taken into account."""
        self.fields: Fields = []
        """Rate fields by what this gate alone has decided."""
        self.settlement = Settlement()
        self.budget = budget
        """How long it may still wait for the store."""

    def enter(self, outer: Admission) -> None:
        """This is inside of another admission, by the same request."""
        self._outer = ref(outer)
        self.around = outer.told
        self.settlement.others = (outer.settlement, *outer.settlement.others)
        outer.inside = [*outer.inside, self]

    @property
    def outer(self) -> Admission | None:
        """The admission to the gate around this one."""
        return None if self._outer is None else self._outer()

    @property
    def told(self) -> Decision | None:
        """The decision that the application is told: that of all gates together so far."""
        return self.around if self.decision is None else self.among_others(self.decision)

    def among_others(self, decision: Decision) -> Decision:
        """A decision of this gate together with that of those around it."""
        return decision if self.around is None else joined(self.around, decision)

    @property
    def rate_fields(self) -> Fields:
        """Rate fields for whatever response is sent: by all gates inside, too; none where a gate around adds them."""
        if self._outer is None and not self.inside:
            return self.fields  # almost all requests
        if not self.fields or any(outer.fields for outer in self._outers()):
            return []
        admissions = [admission for admission in (self, *self._inner()) if admission.fields]
        if len(admissions) == 1:
            return self.fields
        found = [(admission, admission.decision) for admission in admissions if admission.decision is not None]
        tightest, _ = min(found, key=lambda each: (each[1].remaining, -each[1].reset_after))
        styles = dict.fromkeys(chain.from_iterable(admission.gate.styles for admission in admissions))
        rules = frozenset().union(*[admission.gate.rules for admission in admissions])
        return rate_fields(styles, reduce(joined, [decision for _, decision in found]), tightest.now, rules)

    def _outers(self) -> Iterator[Admission]:
        """The admissions to all gates around this one, of this request."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer

    def _inner(self) -> Iterator[Admission]:
        """The admissions to all gates inside of this one, of this request."""
        waiting = list(self.inside)
        for admission in waiting:
            waiting += admission.inside
            yield admission

    def begun(self, status: int | None) -> None:
        """A response has begun with this status, None if it is none."""
        self.has_begun, self.status = True, None if self.client_left else status

    def failed(self) -> None:
        """The application has raised an error: the response is a 500 if there is none yet, and somebody to send it to."""
        if not (self.has_begun or self.client_left):
            self.status = 500

    def end(self) -> bool:
        """The request is over: nothing more can be said about it. Returns whether something may still have to be put right."""
        self.settlement.is_over = self.is_sent = True
        vars(self).pop("request", None)  # a WSGI environ has this admission in it
        self.listener = None  # so has an exchange
        if self.receive_buffer is not None:
            self.receive_buffer.close()
        return self.may_need_refund

    def booking_ended(self, turn: Booking, *, stays: bool) -> None:
        """Its turn has come, or it was given up: then the request is refused, as if it had never come."""
        self.charged += turn.charged
        if not stays:
            self.refusal = unavailable()

    def abandon(self) -> None:
        """Nobody can be asked any more to put anything right, so what was charged stays."""
        self.charged = ()
        self.has_slots = False

    @property
    def is_undone(self) -> bool:
        """True if it is refused, as if it had never come; not where that is too late, as a response has begun already."""
        return self.refusal is not None and not self.has_begun

    @property
    def has_to_give_back(self) -> bool:
        """True if something was taken for it that it must not keep."""
        return bool(self.charged) and (self.is_undone or (self.has_slots and self.is_sent))

    @property
    def may_need_refund(self) -> bool:
        """True if by what is known now something may have been charged that should not have been, or too little."""
        if not (self.settlement.has_news or self.is_by_outcome or self.refusal or self.has_slots):
            return False  # almost all requests
        return self.has_to_give_back or (
            bool(self.charged) and (self.settlement.has_news or (self.is_by_outcome and self.status != self._settled_by))
        )

    def refunds(self) -> list[Refund]:
        """What was charged otherwise than it should have been, by what is known now. From now on it counts as put right."""
        self.settlement.has_news = False
        self._settled_by = self.status
        taken_anywhere = chain.from_iterable(admission.charged for admission in (self, *self._outers(), *self._inner()))
        compiled_rules = [compiled_rule for taken in taken_anywhere for compiled_rule in taken.request_plan.compiled_rules]
        any_has_own_cost = any(compiled_rule.rule.has_own_cost for compiled_rule in compiled_rules)
        wrong, right = [], []
        for taken in self.charged:
            costs = self._costs(taken, any_has_own_cost=any_has_own_cost)
            if costs != [charge.cost for charge in taken.plan.charges]:
                wrong.append(Refund(taken, costs))
                taken = taken.having_cost(costs)  # noqa: PLW2901
            right.append(taken)
        self.charged = () if self.is_undone else tuple(right)
        self.has_slots = self.has_slots and not (self.is_undone or self.is_sent)
        return wrong

    def _costs(self, taken: Charged, *, any_has_own_cost: bool) -> list[int]:
        """What each charge of what was taken should have been."""
        if self.is_undone:
            return [0] * len(taken.plan.charges)
        told, status = self.settlement.costs, self.status
        request_plan = taken.request_plan
        asked = zip(request_plan.plan.charges if request_plan.plan else (), request_plan.compiled_rules)
        costs = {}
        for charge, compiled_rule in asked:
            rule = compiled_rule.rule
            if charge.bucket.has_slots:
                costs[charge.key] = 0 if self.is_sent else charge.cost
            elif rule.charge_if and status is not None and not rule.charge_if.counts(status):
                costs[charge.key] = 0
            else:
                unnamed = told.get(None, charge.cost) if rule.has_own_cost or not any_has_own_cost else charge.cost
                costs[charge.key] = told.get(rule.name, unnamed)
        return [costs[charge.key] for charge in taken.plan.charges]
