"""Load: adaptive limits on the way of a request. It enters them first, and gives its permits back when it is over.

To refuse here is cheap and keeps the process alive: of a request that is shed no key is made, and no store is asked.
"""

from __future__ import annotations

from dataclasses import replace

from limitgate.gate import nesting
from limitgate.gate.admission import Admission, PermitWait
from limitgate.gate.permits import Permits, ProxyGuard
from limitgate.gate.planning.prepared import GivenPlans, PreparedPlan
from limitgate.gate.refusal_log import RefusalLog
from limitgate.http.request_start import HEADER as REQUEST_START
from limitgate.http.response import unavailable
from limitgate.limits.decision import Decision, admitted_in_flight, under_places
from limitgate.overload.adaptive_limit import Guard
from limitgate.overload.concurrency_limiter import WaitingTask, WaitingThread
from limitgate.overload.heartbeat import heartbeats
from limitgate.rules.callers import Caller


class Load:
    """The adaptive limits of one gate, as its requests meet them."""

    def __init__(self, log: RefusalLog | None) -> None:
        self._proxy_guard = ProxyGuard()
        self._log = log

    def enter(
        self, admission: Admission, outer: Admission | None, plan: PreparedPlan | GivenPlans, caller: Caller | None
    ) -> bool:
        """Have a request that goes by a plan take its permits, and in a thread wait for them.

        False if it has to wait on an event loop, or is refused.
        """
        admission.marks = plan.marks
        permits = admission.permits
        if permits is not None:  # it has waited for them, or with them for something else
            return self._goes_on(permits) if permits.would_refuse else permits.goes_on
        request, adaptive = admission.request, plan.adaptive
        if adaptive is None:
            return True
        guard: Guard | None = None
        if outer is None or outer.permits is None:  # else it has been asked about this request
            guard = heartbeats.guard() if request.awaits else None
            planner = admission.rules.planner
            if planner.trusts_proxies and planner.believes(request, REQUEST_START):
                guard = self._proxy_guard.of(request, guard)
        admission.permits = permits = Permits()  # first, so that they are given back if anything raises
        if request.awaits:
            goes_on = permits.begin(request, adaptive, caller, guard, WaitingTask)
            return self._goes_on(permits) if permits.would_refuse else goes_on
        permits.begin(request, adaptive, caller, guard, WaitingThread)
        if permits.waits is not None:
            permits.wait()
        return self._goes_on(permits) if permits.would_refuse else permits.goes_on

    def _goes_on(self, permits: Permits) -> bool:
        """True if a request has its permits. Logs that shadow rules had none."""
        if self._log is not None and permits.goes_on:
            self._log.note_shed_by_shadows(permits)
        return permits.goes_on

    def shed(self, admission: Admission, outer: Admission | None) -> None:
        """Refuse a request for which there is no place, at once."""
        self._note_shed(admission)
        admission.refusal = (admission.permits and admission.permits.refusal) or unavailable()
        admission.is_shed = True
        if not admission.request.is_outermost:
            show_shed(admission)
            nesting.enter(admission, outer)

    def shed_late(self, admission: Admission) -> None:
        """Refuse a request that has waited, as there is no place for it."""
        show_shed(admission)
        self._note_shed(admission)

    def _note_shed(self, admission: Admission) -> None:
        if self._log is not None and admission.permits is not None:
            self._log.note_shed(admission.permits)


def show_shed(admission: Admission) -> None:
    """Make the decision about a request for which there is no place."""
    permits = admission.permits
    if permits is not None and permits.refusal is not None:
        admission.is_shed, admission.refusal = False, permits.refusal
        admission.decision, admission.fields = permits.refused(permits.refusal), []
        admission.decide("refused", "nobody")


def show(admission: Admission) -> None:
    """Add the adaptive limits to a decision, once everything else is decided; give the permits back if it is a refusal."""
    permits, decision = admission.permits, admission.decision
    if permits is None or permits.refusal is not None or isinstance(admission.turn, PermitWait):
        return
    if decision is not None and decision.in_force is permits.in_force:
        return  # it is shown already
    if admission.refusal is not None:
        permits.end("untaught")
    elif admission.rules.counts is not None:
        permits.count()
    if decision is None:
        admission.decision = decision = admitted_in_flight(permits.in_force, admission.settlement)
        admission.now = admission.rules.clock()
        admission.decide("admitted", "nobody")
    else:
        under_places(decision, permits.in_force)
        if decision.allowed and not decision.degraded:
            admission.now = admission.now  # its tightest window may be another one now, so the fields are written anew
    if admission.refusal is None and permits.is_to_be_told:
        _show_waiting(admission, permits, decision)


def _show_waiting(admission: Admission, permits: Permits, decision: Decision) -> None:
    """Add to a decision that shadows had no place for the request, and how long it has waited for those of others."""
    delay, is_shadow = decision.delay + permits.waited_s, decision.shadow or bool(permits.would_refuse)
    admission.decision = replace(decision, delay=delay, shadow=is_shadow)
    if permits.would_refuse:
        admission.decide("shadow_refused", "nobody")
    if permits.waited_s and admission.outcome != "delayed":  # else it has waited for its turn, too
        admission.decide("delayed", "nobody")


def end_refused(admission: Admission) -> None:
    """Give back the permits of a refused request, here and around: its response tells nothing of the work."""
    gate: Admission | None = admission
    while gate is not None:
        if gate.permits is not None:
            gate.permits.end("untaught")
        gate = gate.outer


def end_undecided(admission: Admission) -> None:
    """Give back the permits of a request about which a gate could not decide, for whatever error is being handled."""
    if admission.permits is not None:
        admission.permits.end_unanswered(client_left=False)
