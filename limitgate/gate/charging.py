"""Charges requests by plans. ``on_error`` decides during an outage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from limitgate.errors import BodyError, HeadersTooLargeError, StoreError
from limitgate.fleet.tally import Tally
from limitgate.gate import nesting
from limitgate.gate.admission import Admission, Receipt, Turn, Verdict
from limitgate.gate.bans import Bans
from limitgate.gate.flow import Flow
from limitgate.gate.load import end_undecided
from limitgate.gate.outage import Outages
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.prepared import RequestPlan
from limitgate.gate.refunds import Refunds
from limitgate.gate.refusals import Refusals
from limitgate.gate.turns import book
from limitgate.http.response import Refusal, body_unread, forbidden, headers_too_large, unavailable
from limitgate.limits.decision import Decision, FinalCosts, decide, denied, joined, under_bans
from limitgate.limits.plan import Plan, Reading
from limitgate.llm.metering import ResponseMeter
from limitgate.observing.counts import REFUSED, SHADOW_REFUSED, count_decision
from limitgate.rules.options import OnError


class Charging:
    """Charges the requests of one gate. The store has ``timeout`` seconds.

    ``on_error`` applies to rules that don't set it. ``processes`` share the limits during an outage.
    """

    def __init__(
        self, store: Any, timeout: float, refusals: Refusals, bans: Bans, *, on_error: OnError, processes: int
    ) -> None:
        self._timeout = timeout
        self.refusals = refusals
        self.bans = bans
        self.outages: Outages = Outages(store, on_error, processes, timeout=timeout, at_recovery=refusals.agree_soon)
        self.outages.at_first_answer.append(refusals.agree_at_first)
        self.refunds: Refunds = Refunds(store, self.outages, timeout)

    def charge(
        self, admission: Admission, request_plan: RequestPlan, plan: Plan, settlement: FinalCosts | None = None
    ) -> Flow[Turn | None]:
        """Charge a plan. Return the turn, if the request must wait."""
        verdict = yield from self.decide(request_plan, plan, settlement)
        turn = self.apply(admission, request_plan, verdict)
        if not verdict.decision.allowed and request_plan.bans:
            yield from self.count_refusal(admission, verdict.decision, request_plan.compiled_rules)
        return turn

    def charge_by_reading(
        self, admission: Admission, request_plan: RequestPlan, plan: Plan, reading: Reading
    ) -> Flow[None] | None:
        verdict = self._verdict(request_plan, plan, reading, admission.settlement)
        admission.turn = self.apply(admission, request_plan, verdict)
        if verdict.decision.allowed or not request_plan.bans:
            return None
        return self.count_refusal(admission, verdict.decision, request_plan.compiled_rules)

    def charge_without_store(self, admission: Admission, request_plan: RequestPlan, error: StoreError) -> Flow[None]:
        verdict = yield from self.outages.decide(request_plan, error)
        admission.turn = self.apply(admission, request_plan, _counted(request_plan, verdict))

    def decide(self, request_plan: RequestPlan, plan: Plan, settlement: FinalCosts | None = None) -> Flow[Verdict]:
        try:
            reading = yield plan, self._timeout
        except StoreError as error:
            return _counted(request_plan, (yield from self.outages.decide(request_plan, error)))
        except BaseException:
            self.outages.release_later(plan)
            raise
        return self._verdict(request_plan, plan, reading, settlement)

    def apply(self, admission: Admission, request_plan: RequestPlan, verdict: Verdict) -> Turn | None:
        """Return the turn to wait for. After a refusal, later charges are refunded."""
        first, decision, charged, turn = admission.decision, verdict.decision, verdict.charged, None
        self._note(admission, charged)
        if request_plan.compiled_rules and (tally := request_plan.compiled_rules[0].tally) is not None:
            note_clients(tally, admission, request_plan, verdict)
        if decision.delay and verdict.now is not None and admission.refusal is None:
            charged, turn = book(charged, verdict.now, decision.delay)
        admission.charged = charged if first is None else admission.charged + charged
        # A limit that ran at the same time has refused the request.
        if admission.refusal is not None:
            return None
        admission.decide(verdict.outcome, verdict.source)
        if not decision.allowed:
            admission.refusal = self.refuse(admission, decision, verdict.now, request_plan)
        else:
            if decision.shadow:
                self.note_shadows(admission, decision, verdict.now, request_plan)
            if first is not None:
                decision = joined(first, decision)
        settlement = admission.opened_settlement or admission.settlement
        if decision.settlement is not settlement:
            decision = replace(decision, settlement=settlement)
        admission.decision = decision
        if verdict.now is not None:
            admission.now = verdict.now
        elif first is None or not decision.allowed:
            admission.fields = []
        return turn

    def _note(self, admission: Admission, charged: Sequence[Receipt]) -> None:
        for each in charged:
            if each.request_plan.has_slots:
                self.refunds.hold(admission, each.taken, is_local=each.is_local)
            if each.request_plan.is_by_outcome:
                admission.is_by_outcome = True
                meter_response(admission, each.request_plan.compiled_rules)

    def count_refusal(self, admission: Admission, decision: Decision, compiled_rules: Sequence[CompiledRule]) -> Flow[None]:
        """Count a refusal for rules with a ``ban``, which may change the response."""
        banned = yield from self.bans.counting(admission, decision, compiled_rules)
        refusal = admission.refusal
        if not banned or refusal is None:
            return
        decision = under_bans(decision, banned, admission.settlement)
        admission.decision = decision
        if refusal.id is not None:
            whole = nesting.joined_with_outer(admission, decision)
            admission.refusal = self.refusals.banned(whole, refusal.id)

    def refuse(self, admission: Admission, decision: Decision, now: int | None, request_plan: RequestPlan) -> Refusal:
        if now is None:
            return unavailable()
        whole = nesting.joined_with_outer(admission, decision)
        return self.refusals.refuse(admission, whole, whole.refusing, whole.refusing_key, now, request_plan.compiled_rules)

    def note_shadows(self, admission: Admission, decision: Decision, now: int | None, request_plan: RequestPlan) -> None:
        if self.refusals.log is not None and now is not None:
            self.refusals.log.note_shadows(admission, decision, now, request_plan.compiled_rules)

    def _verdict(self, request_plan: RequestPlan, plan: Plan, reading: Reading, settlement: FinalCosts | None) -> Verdict:
        self.outages.answered()
        charged = (Receipt(request_plan, plan, reading),) if reading.admitted else ()
        return _counted(request_plan, Verdict(decide(plan, reading, settlement), reading.now, charged, reading.source))


def note_clients(tally: Tally, admission: Admission, request_plan: RequestPlan, verdict: Verdict) -> None:
    """Note which clients used the rules, and which were refused or would have been."""
    decision, now = verdict.decision, verdict.now
    noted: set[tuple[str, bool]] = set()
    behind = {compiled_rule.name: compiled_rule for compiled_rule in request_plan.compiled_rules}
    for charge, _, after in decision.evidence:
        compiled_rule = behind.get(charge.rule or "")
        is_refused = after is None
        if compiled_rule is None or compiled_rule.row is None or not (is_refused or decision.allowed):
            continue
        if (compiled_rule.name, is_refused) not in noted and compiled_rule.row.clients is not None:
            noted.add((compiled_rule.name, is_refused))
            tally.note(compiled_rule.row.clients, charge.key, compiled_rule.name_of, admission, now, is_refused=is_refused)


def _counted(request_plan: RequestPlan, verdict: Verdict) -> Verdict:
    if request_plan.compiled_rules and request_plan.compiled_rules[0].row is not None:
        tally = request_plan.compiled_rules[0].tally_that_defers
        if tally is None:
            count_decision(verdict.decision, request_plan.row)
        else:
            tally.count_later(partial(count_decision, verdict.decision, request_plan.row))
    return verdict


def deny(admission: Admission, denying: CompiledRule) -> None:
    if denying.row is not None:
        denying.row.count(REFUSED if denying.enforced else SHADOW_REFUSED, 1.0)
    _refuse_without_bucket(admission, forbidden(), denying.rule.name, enforced=denying.enforced)


def refuse_without_headers(admission: Admission, outer: Admission | None, error: HeadersTooLargeError) -> None:
    end_undecided(admission)
    admission.permits = None
    compiled_rules, admission.marks = admission.rules.planner.may_apply(admission.request)
    nesting.enter(admission, outer)
    refuse_unread(admission, compiled_rules, error)


def leave_out_shadows(admission: Admission, error: HeadersTooLargeError) -> bool:
    """Leave out shadow rules, which may be all that needs the unreadable headers. Return False if there are none left."""
    request = admission.request
    if request.leaves_out_shadows:
        return False
    request.leaves_out_shadows = True
    compiled_rules, _ = admission.rules.planner.may_apply(request)
    shadows = [each for each in compiled_rules if not each.enforced]
    if not shadows:
        return False
    refuse_unread(admission, shadows, error)
    request.given_limits = None  # An awaitable that has raised gives none.
    # Prevents a plain plan, which would replace the decision.
    request.is_outermost = False
    return True


def refuse_without_body(
    admission: Admission, outer: Admission | None, compiled_rules: Sequence[CompiledRule], error: BodyError
) -> None:
    if refuse_unread(admission, compiled_rules, error):
        nesting.enter(admission, outer)
    else:
        # Prevents a plain plan, which would replace the decision.
        admission.request.is_outermost = False


def refuse_unread(
    admission: Admission, compiled_rules: Sequence[CompiledRule], error: HeadersTooLargeError | BodyError
) -> bool:
    """Refuse for unreadable headers or body. Return False if only shadow rules apply."""
    is_enforced = any(each.enforced for each in compiled_rules)
    if compiled_rules:
        detail = str(error)
        refusal = body_unread(error.status, detail) if isinstance(error, BodyError) else headers_too_large(detail)
        _refuse_without_bucket(admission, refusal, None, enforced=is_enforced)
    return is_enforced


def _refuse_without_bucket(admission: Admission, refusal: Refusal, rule: str | None, *, enforced: bool) -> None:
    decision = denied(rule)
    admission.decide("refused" if enforced else "shadow_refused", "nobody")
    if enforced:
        admission.decision, admission.refusal, admission.fields = decision, refusal, []
    elif admission.decision is None:
        admission.decision, admission.fields = replace(decision, allowed=True, retry_after=0.0, shadow=True), []
    elif admission.decision.allowed:
        admission.decision = replace(admission.decision, shadow=True)


def meter_response(admission: Admission, compiled_rules: Sequence[CompiledRule]) -> None:
    """Read the response's usage if one of these rules charged tokens."""
    rules = list({id(each.rule): each.rule for each in compiled_rules if each.rule.token_kinds}.values())
    if not rules or admission.meter is not None:
        return
    request = admission.request
    expected = rules[0].estimates.of(request)
    # A request without a body, such as for a list of models, uses no model.
    if any(expected):
        answers = [rule.estimates.answers(request) for rule in rules]
        admission.meter = ResponseMeter(expected, answers, admission.settlement.note_usage)
