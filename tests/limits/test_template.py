"""Plain plans, which almost all requests make: what follows from them is what any other plan's arithmetic says."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit, MemoryStore
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import Settlement, decide
from limitgate.limits.limit import kept_as
from limitgate.limits.plan import Adjustment, Charge, Plan
from limitgate.limits.template import DECLINED, MAX_WINDOWS, PlanTemplate, whole_reading
from tests.support.clock import Clock
from tests.support.stored import buckets

COUNTS = (1, 2, 3, 5, 7, 60, 999, 99_991, 10**6)
PERIODS = (1, 7, 60, 86_400, 366 * 86_400)
MOST = 2**63 // 10**6
"""Requests times seconds up to which the debt of a window is kept in 64 bits."""
BAN = Charge("", Bucket((kept_as("ban"),)), 1, enforced=True, rule=None)
STEPS = (0, 0, 1, 999, 10**5, 10**6, 10**7, 86_400 * 10**6, -1, -(10**6))


@st.composite
def plain_charges(draw: st.DrawFn) -> list[Charge]:
    """Charges of one to three rules, each with its windows, a cost that fits into an empty bucket, and maybe a shadow.

    Maybe a ban is looked for besides.
    """
    charges = []
    for number in range(draw(st.integers(1, 3))):
        periods = draw(st.lists(st.sampled_from(PERIODS), min_size=1, max_size=3))
        counts = {period: draw(st.sampled_from([count for count in COUNTS if count <= MOST // period])) for period in periods}
        limits = tuple(Limit(f"{count} per {period} seconds") for period, count in counts.items())
        cost = draw(st.integers(1, min(3, *[limit.burst for limit in limits])))
        charges.append(Charge("", Bucket(limits), cost, draw(st.booleans()), f"rule {number}"))
    return [*charges, BAN] if draw(st.booleans()) else charges


def as_seen(decision: Any) -> dict[str, Any]:
    """Everything that a decision says of itself."""
    names = [name for name in dir(decision) if not name.startswith("_") and name not in ("evidence", "settlement", "settle")]
    return {name: value for name in names if not callable(value := getattr(decision, name))}


def owing(store: MemoryStore, now: int) -> dict[str, Any]:
    """The buckets that owe anything: when those that do not are dropped depends on how often room was looked for."""
    return {
        key: entry
        for key, entry in buckets(store).items()
        if any(debt > (now - entry[0]) * count for debt, count in zip(entry[3], entry[2].counts))
    }


@given(plain_charges(), st.lists(st.tuples(st.integers(0, 2), st.sampled_from(STEPS)), min_size=1, max_size=25))
def test_a_plain_plan_is_carried_out_like_any_other(charges: list[Charge], visits: list[tuple[int, int]]) -> None:
    """Property: two memory stores, one of which is asked for plain plans, decide alike and keep the same bytes."""
    template = PlanTemplate(charges)
    clock = Clock()
    plain, general = MemoryStore(clock), MemoryStore(clock)
    for client, step in visits:
        clock.advance(us=step)
        keys = [f"{client} {number}" for number in range(len(charges))]
        plan = template.plan(keys)
        expected = general.spend(plan)
        found = plain.spend_plain(template, keys)
        if found is DECLINED:
            assert plain.spend(plan) == expected
        else:
            assert whole_reading(found) == expected
            decision = template.decide(found, Settlement())
            if decision is None:
                assert expected.admitted
                assert None in [bucket.after for bucket in expected.buckets]
            else:
                assert as_seen(decision) == as_seen(decide(plan, expected, Settlement()))
                assert repr(decision) == repr(decide(plan, expected, Settlement()))
                assert decision.allowed or template.refusing(decision) == decision.refusing
        assert owing(plain, clock()) == owing(general, clock())


def test_nobody_else_is_asked_where_buckets_are_known() -> None:
    """Once a bucket of these windows is there, further ones, known or new, are charged without the way that all plans have."""
    store = MemoryStore(Clock())
    template = PlanTemplate([Charge("", bucket_of("5/second", "100/minute"), 1, enforced=True, rule="api")])
    assert store.spend_plain(template, ["first"]) is DECLINED
    store.spend(template.plan(["first"]))
    for key in ("first", "second", "second"):
        assert store.spend_plain(template, [key]) is not DECLINED
    assert len(store) == 2


def test_a_full_store_and_another_cost_are_for_the_general_way() -> None:
    """What has to be weighed against other buckets is not decided in haste; nothing is charged then."""
    store = MemoryStore(Clock(), max_buckets=1)
    one, two = (PlanTemplate([Charge("", bucket_of("5/second"), cost, enforced=True, rule=None)]) for cost in (1, 2))
    store.spend(one.plan(["a"]))
    before = buckets(store)
    assert store.spend_plain(one, ["b"]) is DECLINED
    assert store.spend_plain(two, ["a"]) is DECLINED
    assert buckets(store) == before


@pytest.mark.parametrize(
    "charge",
    [
        Charge("", bucket_of("5/second"), 0, enforced=True, rule=None),
        Charge("", bucket_of("5/second"), 6, enforced=True, rule=None),
        Charge("", bucket_of("5/second"), 1, enforced=True, rule=None, max_wait_us=1),
        Charge("", bucket_of("5/second"), 1, enforced=True, rule=None, adjustment=Adjustment(1, 0, [0], [0])),
        Charge("", bucket_of(Limit("5/second", borrow=True)), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("5000/second", lease=10)), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("5/second", algorithm="fixed_window")), 1, enforced=True, rule=None),
        Charge("", bucket_of("20 at once"), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("1000000/second", burst=10**13)), 1, enforced=True, rule=None),
        Charge("", Bucket(tuple(Limit(f"5 per {n + 1} seconds") for n in range(MAX_WINDOWS + 1))), 1, enforced=True, rule=None),
    ],
    ids=lambda charge: f"{charge.bucket.limits[0]} {charge.cost}",
)
def test_what_is_not_plain_is_no_template(charge: Charge) -> None:
    """Costs of nothing, costs that never fit, delays, leases, borrowing, other algorithms, and numbers beyond 64 bits."""
    with pytest.raises(ValueError, match="are not plain, expected"):
        PlanTemplate([charge])


@pytest.mark.parametrize("charges", [[], [BAN], [BAN, Charge("", bucket_of("5/second"), 1, enforced=True, rule=None)]])
def test_a_template_of_no_charges_is_none(charges: list[Charge]) -> None:
    """Nothing to charge is no plan, and bans come last."""
    with pytest.raises(ValueError, match="expected"):
        PlanTemplate(charges)


def test_a_ban_is_for_the_general_way() -> None:
    """Whoever may be banned is not charged in haste."""
    store = MemoryStore(Clock())
    template = PlanTemplate([Charge("", bucket_of("5/second"), 1, enforced=True, rule=None), BAN])
    store.spend(template.plan(["a", "ban of a"]))
    assert store.spend_plain(template, ["b", "ban of b"]).admitted
    store.spend(Plan.adjust([BAN._replace(key="ban of b", adjustment=Adjustment(0, 0, [10**6], [0]))]))
    before = buckets(store)
    assert store.spend_plain(template, ["b", "ban of b"]) is DECLINED
    assert buckets(store) == before
    assert not store.spend(template.plan(["b", "ban of b"])).admitted
    assert store.spend_plain(template, ["a", "ban of a"]).admitted


def test_a_plain_plan_within_another_call_is_for_the_general_way() -> None:
    """A clock that asks its own store is told nothing in haste."""
    found: list[object] = []
    template = PlanTemplate([Charge("", bucket_of("5/second"), 1, enforced=True, rule=None)])

    def clock() -> int:
        found.append(store.spend_plain(template, ["a"]))
        return Clock()()

    store = MemoryStore(clock)
    store.spend(Plan.spend(template.plan(["a"]).charges))
    assert found == [DECLINED]


def test_a_layout_that_goes_with_its_last_bucket_is_made_anew() -> None:
    """Looking for room may drop the last bucket of a kind, and so its layout; what is written then can be read all the same."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=1000)
    second, day = bucket_of("1/second"), bucket_of("9/day")
    of = PlanTemplate([Charge("", second, 1, enforced=True, rule="a"), Charge("", day, 1, enforced=True, rule="b")])
    store.spend(of.plan(["a", "b"]))
    for number in range(30):
        clock.advance(10)
        found = store.spend_plain(of, ["a", f"b {number}"])
        if found is DECLINED:
            found = store.spend(of.plan(["a", f"b {number}"]))
        assert found.admitted
        assert not store.spend(of.plan(["a", "another"])).admitted


def test_a_template_is_gone_with_its_last_use() -> None:
    """Without the garbage collector, which would otherwise find those that are not remembered."""
    gc.disable()
    try:
        template = PlanTemplate([Charge("", bucket_of("5/second", "100/minute"), 1, enforced=True, rule="api")])
        tightest = ref(template.tightest)
        del template
        assert tightest() is None
    finally:
        gc.enable()
