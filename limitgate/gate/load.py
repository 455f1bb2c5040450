"""Adaptive limits at the gate, which come first: a request shed here computes no key and makes no store call."""

from __future__ import annotations

from dataclasses import replace

from limitgate.gate import nesting
from limitgate.gate.admission import Admission, PermitWait
from limitgate.gate.permits import Permits, ProxyGuard, group_of
from limitgate.gate.planning.prepared import AdaptiveMatch, GivenPlans, PreparedPlan
from limitgate.gate.refusals import RefusalLog
from limitgate.http.request import REQUEST_START
from limitgate.http.response import unavailable
from limitgate.limits.bucket import NORMAL
from limitgate.limits.decision import Decision, admitted_in_flight, under_places
from limitgate.overload.adaptive_limit import Guard
from limitgate.overload.concurrency_limiter import WaitingTask, WaitingThread
from limitgate.overload.lag import heartbeats
from limitgate.rules.callers import Caller


class Load:
    def __init__(self, log: RefusalLog | None) -> None:
        self._proxy_guard = ProxyGuard()
        self._log = log

    def enter(  # noqa: C901 - each extra call slows down all requests
        self, admission: Admission, outer: Admission | None, plan: PreparedPlan | GivenPlans, caller: Caller | None
    ) -> bool:
        """Take permits. In a thread, wait for them.

        Return False if the request is refused, or has to wait on an event loop.
        """
        admission.marks = plan.marks
        permits = admission.permits
        # Otherwise, the request has waited, with or without permits.
        if permits is None:
            adaptive: AdaptiveMatch = plan.adaptive  # type: ignore[assignment]  # Only plans with one come here.
            request = admission.request
            awaits = request.awaits
            proxies = admission.rules.planner.proxies
            trusts_proxies = not proxies.take_peers
            guard: Guard | None = None
            # Otherwise, the outer gate has asked the guard.
            if outer is None or outer.permits is None:
                if awaits:
                    guard = heartbeats
                if trusts_proxies and admission.rules.planner.believes(request, REQUEST_START):
                    guard = self._proxy_guard.of(request, guard)
            # Assign first, so that the permits are released if anything raises.
            admission.permits = permits = Permits()
            permits.held = []
            permits.in_force = ()
            permits.is_to_be_told = False
            permits.idle_since = None
            permits.outcome = "untaught" if request.sent_method == "HEAD" else "ok"
            permits.adaptive = adaptive
            if caller is None:
                permits.priority = NORMAL
                peer = None
                if not trusts_proxies:
                    peer = request.peer
                    # A sample for LG006, even if no key needs the client.
                    if not next(proxies.unsampled, False):
                        request.resolved_client()
                permits.client = peer if peer is None or ":" not in peer else group_of(peer)
            else:
                permits.priority, permits.client = caller.priority, caller.id
            is_whole = permits.take(adaptive.compiled_rules, WaitingTask if awaits else WaitingThread, guard)
            if trusts_proxies and caller is None and permits.held:
                permits.resolve_client(request)
            if is_whole:
                return True
            permits.wait()
        if permits.would_refuse:
            self._note_shadows(permits)
        return permits.goes_on

    def _note_shadows(self, permits: Permits) -> None:
        if self._log is not None and permits.goes_on:
            self._log.note_shed_by_shadows(permits)

    def shed(self, admission: Admission, outer: Admission | None) -> None:
        self._note_shed(admission)
        admission.refusal = (admission.permits and admission.permits.refusal) or unavailable()
        admission.is_shed = True
        if not admission.request.is_outermost:
            show_shed(admission)
            nesting.enter(admission, outer)

    def shed_late(self, admission: Admission) -> None:
        show_shed(admission)
        self._note_shed(admission)

    def _note_shed(self, admission: Admission) -> None:
        if self._log is not None and admission.permits is not None:
            self._log.note_shed(admission.permits)


def show_shed(admission: Admission) -> None:
    permits = admission.permits
    if permits is not None and permits.refusal is not None:
        admission.is_shed, admission.refusal = False, permits.refusal
        admission.decision, admission.fields = permits.refused(permits.refusal), []
        admission.decide("refused", "nobody")


def show(admission: Admission) -> None:
    """Add the adaptive limits to the decision. A refusal releases the permits."""
    permits, decision = admission.permits, admission.decision
    if permits is None or permits.refusal is not None or isinstance(admission.turn, PermitWait):
        return
    if decision is not None and decision.in_force is permits.in_force:
        return
    if admission.refusal is not None:
        permits.end("untaught")
    elif permits.adaptive.counts:
        permits.count()
    # A shadow rule that denies, or that needs unreadable input, has decided without a bucket.
    is_of_shadow = decision is not None and decision.shadow and not (decision.evidence or decision.degraded)
    if decision is None or is_of_shadow:
        decision = admitted_in_flight(permits.in_force, admission.settlement)
        admission.decision = decision = replace(decision, shadow=True) if is_of_shadow else decision
        admission.now = admission.rules.clock()
        admission.decide("admitted", "nobody")
    else:
        under_places(decision, permits.in_force)
        if decision.allowed and not decision.degraded:
            # Recompute the fields for a new tightest window.
            admission.now = admission.now
    if admission.refusal is None and permits.is_to_be_told:
        _show_waiting(admission, permits, decision)


def _show_waiting(admission: Admission, permits: Permits, decision: Decision) -> None:
    delay, is_shadow = decision.delay + permits.waited_s, decision.shadow or bool(permits.would_refuse)
    admission.decision = replace(decision, delay=delay, shadow=is_shadow)
    if permits.would_refuse:
        admission.decide("shadow_refused", "nobody")
    # A booked turn may already have delayed it.
    if permits.waited_s and admission.outcome != "delayed":
        admission.decide("delayed", "nobody")


def end_refused(admission: Admission) -> None:
    """Release permits at all gates, without a sample for the limits."""
    gate: Admission | None = admission
    while gate is not None:
        if gate.permits is not None:
            gate.permits.end("untaught")
        gate = gate.outer


def end_undecided(admission: Admission) -> None:
    if admission.permits is not None:
        admission.permits.end_unanswered(client_left=False)
