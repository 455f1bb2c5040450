"""Nested gates charge separately. The outermost gate with rate fields adds the fields for all gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import chain
from weakref import ref

from limitgate.gate.admission import Admission
from limitgate.http.rate_fields import Fields, RawFields, rate_fields, raw
from limitgate.limits.decision import Decision, joined
from limitgate.observing.counts import outweighs
from limitgate.observing.instruments import Outcome
from limitgate.rules.decorators import EVERYTHING


def enter(inner: Admission, outer: Admission | None) -> None:
    if outer is None or inner.outer_ref is not None:
        return
    inner.outer_ref = ref(outer)
    inner.outer_decision = overall_decision(outer)
    inner.settlement.others = (outer.settlement, *outer.settlement.others)
    outer.inner = [*outer.inner, inner]
    outer.is_nested = inner.is_nested = True


def pass_by(admission: Admission, outer: Admission | None) -> None:
    admission.marks = EVERYTHING
    enter(admission, outer)


def unanswered(admission: Admission | None) -> Admission | None:
    while admission is not None and (admission.has_begun or admission.settlement.is_over):
        admission = admission.outer
    return admission


def overall_decision(admission: Admission) -> Decision | None:
    decision = admission.decision
    return admission.outer_decision if decision is None else joined_with_outer(admission, decision)


def overall_outcome(admission: Admission) -> Outcome:
    outcome = admission.outcome
    for outer in _outers(admission):
        outcome = outcome if outweighs(outcome, outer.outcome) else outer.outcome
    return outcome


def joined_with_outer(admission: Admission, decision: Decision) -> Decision:
    outer = admission.outer_decision
    return decision if outer is None else joined(outer, decision)


def raw_response_fields(admission: Admission) -> RawFields:
    if not admission.is_nested:
        return admission.raw_fields()
    return raw(response_fields(admission))


def response_fields(admission: Admission) -> Fields:
    """Return the fields of this gate and inner gates, unless an outer gate adds them."""
    if not admission.is_nested:
        return admission.fields
    if not admission.fields or any(outer.fields for outer in _outers(admission)):
        return []
    having = [(each, each.decision) for each in (admission, *_inner(admission)) if each.fields]
    if len(having) == 1:
        return admission.fields
    decided = [(each, decision) for each, decision in having if decision is not None]
    tightest, _ = min(decided, key=lambda pair: (pair[1].remaining, -pair[1].reset_after))
    styles = dict.fromkeys(chain.from_iterable(each.rules.header_styles for each, _ in having))
    rules = frozenset().union(*[each.rules.rule_names for each, _ in having])
    return rate_fields(styles, reduce(joined, [decision for _, decision in decided]), tightest.now, rules)


def _of_same_request(admission: Admission) -> Iterator[Admission]:
    yield admission
    yield from _outers(admission)
    yield from _inner(admission)


def _outers(admission: Admission) -> Iterator[Admission]:
    outer = admission.outer
    while outer is not None:
        yield outer
        outer = outer.outer


def _inner(admission: Admission) -> Iterator[Admission]:
    waiting = list(admission.inner)
    for inner in waiting:
        waiting += inner.inner
        yield inner


def any_has_own_cost(admission: Admission) -> bool:
    """True if a charging rule counts something other than requests."""
    return any(
        compiled_rule.rule.has_own_cost
        for each in _of_same_request(admission)
        for charged in each.charged
        for compiled_rule in charged.request_plan.compiled_rules
    )
