"""Common base for ASGI and WSGI."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from limitgate.gate import late, load
from limitgate.gate.admission import Admission
from limitgate.gate.flow import Budget, Flow, T, arun, run
from limitgate.gate.gate import Gate
from limitgate.gate.nesting import overall_decision, overall_outcome, unanswered
from limitgate.gate.planning.planner import LateLimit
from limitgate.gate.turns import TurnWaiter
from limitgate.limits.decision import Decision
from limitgate.rules.decorators import Mark

EXCHANGE = "limitgate.exchange"
"""Key in a scope or environ; None if the gate is disabled."""
PASSED = "limitgate.passed"
"""Key of the middleware that forwarded the request without a decision."""
REFUSAL_ID = "limitgate.refusal_id"
OUTCOME = "limitgate.outcome"


def admission_around(place: Mapping[str, Any]) -> Admission | None:
    """Return the admission at the nearest outer gate; None after the start of its response."""
    exchange = place.get(EXCHANGE)
    return unanswered(exchange.open_admission()) if isinstance(exchange, Exchange) else None


class Exchange:
    """A request at a gate, from the decision to the end of its response."""

    gate: Gate
    _admission: Admission
    awaits = False
    has_come_back = False

    def stand_between(self, gate: Gate, admission: Admission) -> None:
        self.gate = gate
        self._admission = admission
        if not admission.is_plain and admission.permits is not None:
            load.show(admission)

    def open_admission(self) -> Admission:
        """Return the admission, no longer plain, for use beyond rate fields."""
        admission = self._admission
        admission.is_plain = False
        return admission

    def show_outcome(self) -> None:
        """Write outcome and refusal id into the scope or environ."""
        admission = self._admission
        request, refusal = admission.request, admission.refusal
        if refusal is not None and (admission.is_nested or admission.permits is not None):
            load.end_refused(admission)
        place = request.scope if request.environ is None else request.environ
        if place is None:
            return
        place[OUTCOME] = overall_outcome(admission) if admission.is_nested else admission.outcome
        if refusal is not None and refusal.id is not None:
            place[REFUSAL_ID] = refusal.id

    def further(self, extra_rules: Sequence[LateLimit]) -> Decision | None:
        """Apply further rules and wait, see `limitgate.gate.late.further`. Return the joined decision; None without rules."""
        gate, admission = self.gate, self.open_admission()
        turn = run(gate.store, late.further(gate, admission, extra_rules), admission.budget)
        if turn is not None:
            gate.turns.wait_for_further(admission, turn)
        gate.refunds.settle_refused(admission)
        self.show_outcome()
        return overall_decision(admission)

    async def afurther(self, extra_rules: Sequence[LateLimit]) -> Decision | None:
        gate, admission = self.gate, self.open_admission()
        turn = await self.abudgeted(late.further(gate, admission, extra_rules))
        if turn is not None:
            await gate.turns.await_further(admission, turn, self.stays_until)
        await gate.refunds.asettle_refused(admission)
        self.show_outcome()
        return overall_decision(admission)

    async def abudgeted(self, flow: Flow[T]) -> T:
        """Run a flow. Store calls share the request's ``timeout``, also in nested flows."""
        admission = self.open_admission()
        budget = admission.budget
        own = Budget(budget.left, measured=admission.rules.is_measured)
        result = await arun(self.gate.store, flow, own)
        budget.left = min(budget.left, own.left)
        return result

    async def await_turn(self) -> bool:
        admission = self._admission
        if admission.turn is None:
            return True
        stays = await self.gate.turns.await_turn(admission, self.stays_until)
        # So far, the request was waiting for a permit only.
        if admission.permits is not None:
            load.show(admission)
            self.show_outcome()
        return stays

    async def stays_until(self, waiter: TurnWaiter) -> bool:
        await waiter
        return True

    @property
    def marks(self) -> Container[Mark]:
        return self._admission.marks

    def sent(self) -> None:
        """Note that the response was sent, and refund."""
        self._admission.sent()
        self.settle()

    def settle(self) -> None:
        if self._admission.may_need_refund():
            self.gate.refunds.settle(self._admission)

    async def asettle(self) -> None:
        if self._admission.may_need_refund():
            await self.gate.refunds.asettle(self._admission)

    def end(self) -> None:
        if self._admission.end():
            self.gate.refunds.settle(self._admission)

    def close(self) -> None:
        """End a request whose response is complete or no longer read."""
        admission = self._admission
        if admission.permits is not None:
            admission.permits.end()
        if admission.end():
            self.gate.refunds.settle(admission)

    async def ashutdown(self) -> None:
        if self._admission.end():
            await self.gate.refunds.asettle(self._admission)

    @property
    def decision(self) -> Decision | None:
        return overall_decision(self._admission)
