"""The charge of a plain bucket, written out window by window: it says what the arithmetic of its algorithm says."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit
from limitgate.algorithms import gcra
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.plan import Charge
from limitgate.limits.template import MAX_WINDOWS, PlanTemplate
from limitgate.stores.packed import HEAD, Layout

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


USED = st.integers(0, 12) | st.sampled_from([2**50 - 1, 2**50])


@pytest.mark.parametrize(
    "how",
    [{"algorithm": "fixed_window"}, {"algorithm": "fixed_window", "align": "first-request"}, {"algorithm": "sliding_window"}],
    ids=lambda how: how.get("align", how["algorithm"]),
)
@given(data=st.data())
def test_the_straight_line_is_that_of_windows(how: dict[str, str], data: st.DataObject) -> None:
    """Property: whatever is used and however long the window lasts, states and value are those of the algorithm."""
    period = data.draw(st.sampled_from([1, 60, 86_400]))
    bucket = bucket_of(Limit(f"9 per {period} seconds", **how))  # type: ignore[arg-type]
    cost, now = data.draw(st.integers(1, 9)), NOW + data.draw(st.integers(0, period * 10**6))
    ((_, _, _, rows),) = PlanTemplate([Charge("", bucket, cost, enforced=True, rule=None)]).buckets
    length = period * 10**6
    left = data.draw(st.sampled_from([1, length]) | st.integers(1, length))
    steps = [0, left - 1, left, left + length - 1, left + length]
    elapsed = data.draw(st.sampled_from(steps) | st.integers(0, 3 * length))
    state = (data.draw(USED), *([data.draw(USED)] if how["algorithm"] == "sliding_window" else []), left)
    layout = Layout(bucket)
    layout.number = 5
    charged = layout.charge(layout.packed(now - elapsed, cost, [state]), now, 5, cost, rows)
    before = bucket.algorithm.advance([state], elapsed, bucket, now)
    after = bucket.algorithm.try_charge(before, bucket, cost)
    assert charged == (tuple(before), after and layout.packed(now, cost, after))


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


def test_a_log_that_is_not_as_expected_is_not_charged() -> None:
    """As above: of another layout, of another cost, of the future, and one that is banned."""
    layout = Layout(bucket_of(Limit("5/second", algorithm="sliding_log")))
    layout.number = 5
    value = layout.opened(NOW, 1)
    assert layout.charge(value, NOW, 5, 1, ()) is not None
    for odd in ((value, NOW, 6, 1), (value, NOW, 5, 2), (value, NOW - 1, 5, 1), (value[: HEAD.size], NOW, 5, 1)):
        assert layout.charge(*odd, ()) is None
