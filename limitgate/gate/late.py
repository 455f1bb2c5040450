"""Decisions about running requests: further limits, WebSocket messages, and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from limitgate.errors import BodyError, ConfigError, HeadersTooLargeError
from limitgate.gate.admission import Admission, Turn
from limitgate.gate.charging import refuse_unread
from limitgate.gate.flow import Budget, Flow, PendingLimits, body_read, limits_awaited
from limitgate.gate.gate import Gate
from limitgate.gate.planning.planner import LateLimit
from limitgate.gate.planning.prepared import NO_CHARGES, RequestPlan
from limitgate.http.body import UNREAD
from limitgate.http.request import BodyWanted
from limitgate.http.response import Refusal
from limitgate.limits.decision import Window, decide
from limitgate.limits.plan import Plan
from limitgate.process import switch
from limitgate.process.clock import asyncio_loop
from limitgate.rules.decorators import EVERYTHING


def further(gate: Gate, admission: Admission, extra_rules: Sequence[LateLimit]) -> Flow[Turn | None]:
    """Charge further limits. Return the turn, if the request must wait. After a refusal, the caller refunds all charges."""
    if admission.marks is EVERYTHING or admission.refusal is not None or switch.null_store is not None:
        return None
    if admission.settlement.is_over:
        raise RuntimeError("further limits were applied after the request, expected this during the request")
    planner, request, identified = admission.rules.planner, admission.request, admission.identified
    reading = [each for each in extra_rules if each[0].reads_body and each[0].admits_client(request)]
    if request.document is UNREAD and any(rule.applies_to(request.method) for rule, _ in reading):
        try:
            yield from body_read(request, admission.rules.body_limit)
        except BodyError as error:
            if refuse_unread(admission, planner.compiled(request, reading), error):
                return None
    try:
        applying = [each for each in extra_rules if each[0].applies_to(request.method) and each[0].admits(request)]
        request_plan = yield from _completed(lambda: planner.further(request, identified, applying))
    except HeadersTooLargeError as error:
        refuse_unread(admission, planner.compiled(request, extra_rules), error)
        return None
    if request_plan.plan is None or admission.refusal is not None:
        return None
    return (yield from gate.charging.charge(admission, request_plan, request_plan.plan))


def usage(gate: Gate, admission: Admission, names: Sequence[str], path: str | None) -> Flow[tuple[Window, ...]]:
    """Return windows without charging, see `limitgate.usage`."""
    try:
        request_plan = yield from _completed(lambda: _plan_usage(admission, names, path))
    except HeadersTooLargeError:
        return _adaptive_windows(admission, names)
    except BodyWanted:
        message = (
            "usage of a rule that reads the body needs the body, expected a rule that the gate has applied to this request"
        )
        raise ConfigError(message) from None
    if request_plan.plan is None:
        return _adaptive_windows(admission, names)
    plan = Plan.peek(request_plan.plan.charges)
    return decide(plan, (yield plan, gate.timeout)).windows + _adaptive_windows(admission, names)


def message(gate: Gate, admission: Admission, messages: RequestPlan) -> asyncio.Future[Refusal | None]:
    """Charge a message, even if nothing awaits the result."""
    asyncio_loop("per: message")
    budget = Budget(gate.timeout, measured=admission.rules.is_measured)
    return gate.refunds.soon(_decide_message(gate, admission, messages), budget)


def _decide_message(gate: Gate, admission: Admission, messages: RequestPlan) -> Flow[Refusal | None]:
    if messages.plan is None or switch.null_store is not None:
        return None
    verdict = yield from gate.charging.decide(messages, messages.plan)
    if verdict.decision.allowed:
        if verdict.decision.shadow:
            gate.charging.note_shadows(admission, verdict.decision, verdict.now, messages)
        return None
    refusal = gate.charging.refuse(admission, verdict.decision, verdict.now, messages)
    if messages.bans:
        yield from gate.charging.bans.counting(admission, verdict.decision, messages.compiled_rules)
    yield from gate.refunds.apply([(each, [0] * len(each.plan.charges)) for each in verdict.charged])
    return refusal


def _plan_usage(admission: Admission, names: Sequence[str], path: str | None) -> RequestPlan | PendingLimits:
    request, identified, planner = admission.request, admission.identified, admission.rules.planner
    request.check_lines()
    plans = [charged.request_plan.plan for charged in admission.charged]
    charges = [charge for plan in plans if plan is not None for charge in plan.charges]
    if names:
        return planner.named(request, identified, names, path, charges)
    if charges or admission.marks is EVERYTHING:
        return RequestPlan(Plan.peek(charges), ()) if charges else NO_CHARGES
    return planner.plan(request, identified) or PendingLimits(request)


def _adaptive_windows(admission: Admission, names: Sequence[str]) -> tuple[Window, ...]:
    if admission.decision is None or admission.permits is None:
        return ()
    return tuple([window for window in admission.permits.windows() if not names or window.rule in names])


def _completed(planned: Callable[[], RequestPlan | PendingLimits]) -> Flow[RequestPlan]:
    while isinstance(request_plan := planned(), PendingLimits):
        yield limits_awaited(request_plan)
    return request_plan
