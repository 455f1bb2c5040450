"""One request between an application and its server, as seen by one gate: whatever both sides of a server have in common."""

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
"""Name of the exchange in a scope or environ; None stands there where the gate is switched off."""
REFUSAL_ID = "limitgate.refusal_id"
"""Name of the id of a refusal in a scope or environ."""
OUTCOME = "limitgate.outcome"
"""Name of the outcome in a scope or environ."""


def admission_around(place: Mapping[str, Any]) -> Admission | None:
    """The admission to the nearest gate around that has not answered yet, by a scope or environ; None if there is none."""
    exchange = place.get(EXCHANGE)
    return unanswered(exchange.open_admission()) if isinstance(exchange, Exchange) else None


class Exchange:
    """A request on its way through a gate: asks the gate whatever has to be asked until the response is over."""

    gate: Gate
    _admission: Admission
    awaits = False
    """True on an event loop, where the store has to be awaited."""
    has_come_back = False
    """True if the application has called this gate again for it, see `Around.app_inside`."""

    def stand_between(self, gate: Gate, admission: Admission) -> None:
        """Stand between application and server for a request that was decided about."""
        self.gate = gate
        self._admission = admission
        if not admission.is_plain and admission.permits is not None:
            load.show(admission)

    def open_admission(self) -> Admission:
        """Have the gate do more for the request than add rate fields: its admission is not plain from now on."""
        admission = self._admission
        admission.is_plain = False
        return admission

    def show_outcome(self) -> None:
        """Write what has become of the request so far, and the id of a refusal, into its scope or environ.

        There handlers of refusals and access logs find it. One that is refused is in flight no more.
        """
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
        """Decide about further rules, see `limitgate.gate.late.further`, and wait for the turn.

        Returns the decision about the request as a whole; None if no rule applies.
        """
        gate, admission = self.gate, self.open_admission()
        turn = run(gate.store, late.further(gate, admission, extra_rules), admission.budget)
        if turn is not None:
            gate.turns.wait_for_further(admission, turn)
        gate.refunds.settle_refused(admission)
        self.show_outcome()
        return overall_decision(admission)

    async def afurther(self, extra_rules: Sequence[LateLimit]) -> Decision | None:
        """`further`, by an `AsyncStore`."""
        gate, admission = self.gate, self.open_admission()
        turn = await self.abudgeted(late.further(gate, admission, extra_rules))
        if turn is not None:
            await gate.turns.await_further(admission, turn, self.stays_until)
        await gate.refunds.asettle_refused(admission)
        self.show_outcome()
        return overall_decision(admission)

    async def abudgeted(self, flow: Flow[T]) -> T:
        """Run a flow within the time that the request has left to wait for its store; others may run at the same time."""
        admission = self.open_admission()
        budget = admission.budget
        own = Budget(budget.left, measured=admission.rules.is_measured)
        result = await arun(self.gate.store, flow, own)
        budget.left = min(budget.left, own.left)
        return result

    async def await_turn(self) -> bool:
        """Wait for the turn that is booked, if any. False if the client left before."""
        admission = self._admission
        if admission.turn is None:
            return True
        stays = await self.gate.turns.await_turn(admission, self.stays_until)
        if admission.permits is not None:  # there was nothing but a place to wait for so far
            load.show(admission)
            self.show_outcome()
        return stays

    async def stays_until(self, waiter: TurnWaiter) -> bool:
        """Wait for a turn. False if the client left before, which nobody hears of here."""
        await waiter
        return True

    @property
    def marks(self) -> Container[Mark]:
        """Decorators that the gate has decided about."""
        return self._admission.marks

    def sent(self) -> None:
        """Note that the application has given all of its response, and refund what has to be refunded."""
        self._admission.sent()
        self.settle()

    def settle(self) -> None:
        """Refund whatever is known by now to be charged wrongly."""
        if self._admission.may_need_refund():
            self.gate.refunds.settle(self._admission)

    async def asettle(self) -> None:
        """`settle`, by an `AsyncStore`."""
        if self._admission.may_need_refund():
            await self.gate.refunds.asettle(self._admission)

    def end(self) -> None:
        """End the request, and refund what has to be refunded: the application has nothing more to do."""
        if self._admission.end():
            self.gate.refunds.settle(self._admission)

    def close(self) -> None:
        """`end` a request whose response is complete, or is not read any more."""
        admission = self._admission
        if admission.permits is not None:
            admission.permits.end()
        if admission.end():
            self.gate.refunds.settle(admission)

    async def ashutdown(self) -> None:
        """`end`, by an `AsyncStore`."""
        if self._admission.end():
            await self.gate.refunds.asettle(self._admission)

    @property
    def decision(self) -> Decision | None:
        """The decision that the application is told."""
        return overall_decision(self._admission)
