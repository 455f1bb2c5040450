"""The charge of a plain bucket, written out window by window: it says what the arithmetic of GCRA says."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit
from limitgate.algorithms import gcra
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.plan import Charge
from limitgate.limits.template import MAX_WINDOWS, PlanTemplate
from limitgate.stores.packed import Layout

NOW = 1_790_000_000_000_000


@given(st.data())
def test_the_straight_line_is_gcra(data: st.DataObject) -> None:
    """Property: for any number of windows, debts near their bounds, and times, debts and value are those of the algorithm."""
    counts = data.draw(st.lists(st.sampled_from([1, 3, 7, 999, 10**6]), min_size=1, max_size=MAX_WINDOWS))
    bucket = Bucket(tuple(Limit(f"{count} per {place + 1} seconds") for place, count in enumerate(counts)))
    cost = data.draw(st.integers(1, min(counts)))
    ((_, _, _, rows),) = PlanTemplate([Charge("", bucket, cost, enforced=True, rule=None)]).buckets
    fits = [capacity - increment for _, increment, capacity in rows]
    debts = [data.draw(st.sampled_from([0, 1, most, most + 1, most * 2]) | st.integers(0, most)) for most in fits]
    elapsed = data.draw(st.sampled_from([0, 1, 10**6, 10**9]) | st.integers(0, 10**7))
    layout = Layout(bucket)
    layout.number = 5
    charged = layout.charge(layout.pack(5, NOW - elapsed, cost, *debts), NOW, 5, cost, rows)
    before = gcra.advance(debts, elapsed, bucket)
    after = gcra.try_charge(before, bucket, cost)
    assert charged == (tuple(before), after and layout.pack(5, NOW, cost, *after))


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<Iqq2q", 6, NOW, 1, 0, 0),
        struct.pack("<Iqq2q", 5, NOW + 1, 1, 0, 0),
        struct.pack("<Iqq2q", 5, NOW, 2, 0, 0),
        struct.pack("<Iqq3q", 5, NOW, 1, 0, 0, 0),
        struct.pack("<Iqq", 5, NOW, 1),
    ],
    ids=["another layout", "of the future", "another cost", "other windows", "states beside"],
)
def test_a_value_that_is_not_as_expected_is_not_charged(value: bytes) -> None:
    """What has to be weighed is left to those who weigh it."""
    bucket = bucket_of("5/second", "100/minute")
    ((_, cost, _, rows),) = PlanTemplate([Charge("", bucket, 1, enforced=True, rule=None)]).buckets
    layout = Layout(bucket)
    layout.number = 5
    assert layout.charge(layout.opened(NOW, 1), NOW, 5, cost, rows) is not None
    assert layout.charge(value, NOW, 5, cost, rows) is None
