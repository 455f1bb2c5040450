"""What is counted of a plain plan is what is counted of any other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from limitgate import MemoryStore
from limitgate.limits.decision import decide
from limitgate.limits.plan import Charge
from limitgate.limits.template import PlainSpend, PlanTemplate
from limitgate.observing.counts import RuleSeries, count_decision
from limitgate.observing.plain_counter import PlainCounter
from tests.limits.test_template import STEPS, plain_charges
from tests.support.clock import Clock


@given(plain_charges(), st.lists(st.sampled_from(STEPS), min_size=1, max_size=12))
def test_a_plain_plan_is_counted_like_any_other(charges: Sequence[Charge], steps: Sequence[int]) -> None:
    """Property: outcomes and used shares by rule, whatever the algorithms of its limits."""
    template, clock = PlanTemplate(charges), Clock()
    store, keys = MemoryStore(clock), [str(place) for place in range(len(charges))]
    plain, general = ([RuleSeries(str(charge.rule)) for charge in charges[: len(template.buckets)]] for _ in range(2))
    rows = {charge.rule: row for charge, row in zip(charges, general)}
    counter = PlainCounter(template, plain)
    for step in steps:
        clock.advance(us=step)
        reading = store.spend(template.asked(keys))
        decision = template.decide(reading, None)
        if not isinstance(reading, PlainSpend) or decision is None:
            continue
        count = counter.charged if reading.admitted else counter.refused
        count(reading.states)
        count_decision(decide(reading.whole_plan, reading.whole), lambda charge: rows.get(charge.rule))
        assert [row.values for row in plain] == [pytest.approx(row.values) for row in general]
