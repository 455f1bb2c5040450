"""Gates inside of gates: one decision, one set of rate fields, by admissions alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from limitgate import MemoryStore
from limitgate.gate.admission import Admission, Receipt
from limitgate.gate.nesting import any_has_own_cost, enter, overall_decision, response_fields, unanswered
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.http.rate_fields import rate_fields
from limitgate.limits.decision import decide
from limitgate.rules.rule import Rule
from tests.gate.planning.test_planner import asked, planner


def admitted(rule: Rule | None, *styles: str) -> Admission:
    """The admission of a request to a gate with one rule, or with none that applies."""
    gate, request = planner(*[rule] if rule else []), asked()
    request_plan = gate.plan(request, None)
    admission = Admission()
    admission.request, admission.rules = request, ActiveRules(gate, styles, timeout=0.1, is_measured=True)
    admission.decision = admission.reading = admission.prepared = admission.permits = None
    admission.is_plain = admission.has_begun = False
    if request_plan.plan is not None:
        reading = MemoryStore().spend(request_plan.plan)
        admission.decision, admission.now = decide(request_plan.plan, reading, admission.settlement), reading.now
        admission.fields = rate_fields(styles, admission.decision, reading.now, gate.names)
        admission.charged = (Receipt(request_plan, request_plan.plan, reading),)
    return admission


def nested(*admissions: Admission) -> None:
    """Have each of these be inside of the one before it."""
    for outer, inner in pairwise(admissions):
        enter(inner, outer)


def named(fields: Any) -> list[str]:
    """The names of rate fields, and the first value."""
    return [*[name for name, _ in fields], *[value for _, value in fields[:1]]]


def test_the_innermost_knows_of_all() -> None:
    """The application is told one decision, of the tightest window of all gates around it."""
    outer, middle, inner = (admitted(Rule(name, limit)) for name, limit in (("a", "9/s"), ("b", "3/s"), ("c", "7/s")))
    nested(outer, middle, inner)
    decision = overall_decision(inner)
    assert decision is not None
    assert (decision.rule, decision.limit, [window.rule for window in decision.windows]) == ("b", 3, ["a", "b", "c"])
    assert overall_decision(outer) == outer.decision


def test_without_a_rule_of_its_own_the_decision_is_that_around() -> None:
    """A gate that nothing applies in tells what was decided around it; None if nothing was."""
    outer, inner, alone = admitted(Rule("a", "9/s")), admitted(None), admitted(None)
    nested(outer, inner)
    assert overall_decision(inner) == outer.decision
    assert overall_decision(alone) is None


@pytest.mark.parametrize(
    ("styles", "at"),
    [((["x-ratelimit"], ["x-ratelimit"]), 0), (([], ["x-ratelimit"]), 1), ((["x-ratelimit"], []), 0)],
)
def test_the_outermost_gate_that_has_fields_adds_them(styles: Any, at: int) -> None:
    """A response has one set of rate fields, of all gates that have some."""
    admissions = [admitted(Rule("a", "9/s"), *styles[0]), admitted(Rule("b", "3/s"), *styles[1])]
    nested(*admissions)
    every = ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"]
    expected = [*every, "3"] if all(styles) else [*every, "9" if styles[0] else "3"]
    assert [named(response_fields(each)) for each in admissions] == [expected if n == at else [] for n in range(2)]


def test_a_gate_that_has_answered_is_passed_over() -> None:
    """A request that an application makes of itself while it answers is inside of the next gate that has not."""
    outer, inner = admitted(Rule("a", "9/s")), admitted(Rule("b", "9/s"))
    nested(outer, inner)
    assert unanswered(inner) is inner
    inner.begun(200)
    assert unanswered(inner) is outer
    outer.end()
    assert unanswered(inner) is None


def test_what_a_request_costs_is_asked_of_all_gates() -> None:
    """One rule that counts something else than requests, in any gate, is what an unnamed cost is about."""
    outer, inner = admitted(Rule("a", "9/s", cost=2)), admitted(Rule("b", "9/s"))
    assert [any_has_own_cost(each) for each in (outer, inner)] == [True, False]
    nested(outer, inner)
    assert [any_has_own_cost(each) for each in (outer, inner)] == [True, True]


def test_an_inner_admission_does_not_keep_the_outer_one() -> None:
    """A gate that is gone is not around any more."""
    outer, inner = admitted(Rule("a", "9/s")), admitted(Rule("b", "9/s"))
    nested(outer, inner)
    del outer
    assert inner.outer is None
    decision = overall_decision(inner)
    assert decision is not None
    assert [window.rule for window in decision.windows] == ["a", "b"]
