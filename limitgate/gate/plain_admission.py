"""Plain admissions: those of requests that a prepared plan lets in, as almost all are. Until somebody wants to know more."""

from __future__ import annotations

from typing import Any

from limitgate.gate.admission import Admission
from limitgate.gate.request_plan import PreparedPlan
from limitgate.gate.rules_in_force import RulesInForce
from limitgate.http.request import Request
from limitgate.http.response import Fields, RawFields, raw, raw_x_ratelimit
from limitgate.limits.decision import Decision, Settlement
from limitgate.limits.template import PlainReading


class PlainAdmission:
    """Admission of a request that was charged by a prepared plan: its rate fields are all that is due.

    No other gate takes part, it is not refused, waits for nothing, and holds nothing. What may change that asks for `whole`.
    """

    # without an `__init__`, which takes as long as all the rest
    __slots__ = ("decision", "prepared", "reading", "request", "rules", "settlement")
    decision: Decision
    prepared: PreparedPlan
    reading: PlainReading
    request: Request
    """Gone once it is over."""
    rules: RulesInForce
    """The rules that it began with, and ends with."""
    settlement: Settlement

    def whole(self) -> Admission:
        """The same as an admission of any kind."""
        request: Any = getattr(self, "request", None)
        admission = Admission(request, None, self.prepared.marks, self.rules)
        if request is None:
            del admission.request
        admission.settlement = self.settlement
        if self.reading.waited:
            admission.budget.left -= self.reading.waited
        admission.admit(self.prepared, self.reading, self.decision)
        return admission

    def fields(self) -> Fields:
        """Rate fields."""
        return self.rules.fields(self.decision, self.reading.now)

    def raw_fields(self) -> RawFields:
        """Rate fields as ASGI wants them."""
        rules = self.rules
        if rules.has_commonest_style:
            return raw_x_ratelimit(self.decision, self.reading.now)
        return raw(self.fields())


AnyAdmission = Admission | PlainAdmission


def whole_admission(admission: AnyAdmission) -> Admission:
    """An admission as one of any kind."""
    return admission.whole() if isinstance(admission, PlainAdmission) else admission
