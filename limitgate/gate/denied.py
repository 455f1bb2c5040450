"""Refusals without a bucket: deny rules, and headers that are too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from limitgate.errors import HeadersTooLargeError
from limitgate.gate import nesting
from limitgate.gate.admission import Admission
from limitgate.gate.load import end_undecided
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.http.response import Refusal, forbidden, headers_too_large
from limitgate.limits.decision import denied
from limitgate.observing.counts import REFUSED, SHADOW_REFUSED


def deny(admission: Admission, denying: CompiledRule) -> None:
    """Refuse a request. A shadow rule only records it."""
    if denying.row is not None:
        denying.row.count(REFUSED if denying.enforced else SHADOW_REFUSED, 1.0)
    _refuse(admission, forbidden(), denying.rule.name, enforced=denying.enforced)


def refuse_without_headers(admission: Admission, outer: Admission | None, error: HeadersTooLargeError) -> None:
    """Decide without headers. The request passes only if no enforced rule may apply."""
    end_undecided(admission)
    admission.permits = None
    compiled_rules, admission.marks = admission.rules.planner.may_apply(admission.request)
    nesting.enter(admission, outer)
    refuse_unread(admission, compiled_rules, error)


def refuse_unread(admission: Admission, compiled_rules: Sequence[CompiledRule], error: HeadersTooLargeError) -> None:
    """Refuse a request with too large headers. Shadow rules only record it."""
    if compiled_rules:
        is_enforced = any(each.enforced for each in compiled_rules)
        _refuse(admission, headers_too_large(str(error)), None, enforced=is_enforced)


def _refuse(admission: Admission, refusal: Refusal, rule: str | None, *, enforced: bool) -> None:
    decision = denied(rule)
    admission.decide("refused" if enforced else "shadow_refused", "nobody")
    if enforced:
        admission.decision, admission.refusal, admission.fields = decision, refusal, []
    elif admission.decision is None:
        admission.decision, admission.fields = replace(decision, allowed=True, retry_after=0.0, shadow=True), []
    elif admission.decision.allowed:
        admission.decision = replace(admission.decision, shadow=True)
