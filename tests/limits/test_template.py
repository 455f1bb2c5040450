"""Plain plans, which almost all requests make: what follows from them is what any other plan's arithmetic says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit, MemoryStore, StoreError
from limitgate.algorithms.sliding_log import MAX_ENTRIES
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import FinalCosts, decide
from limitgate.limits.limit import kept_as
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, refund
from limitgate.limits.template import MAX_WINDOWS, PlainRefund, PlainSpend, PlanTemplate, RefundTemplate, whole_reading
from limitgate.stores.redis.wire import arguments
from tests.support.clock import Clock
from tests.support.interpreter import needs_gil
from tests.support.stored import buckets

COUNTS = (1, 2, 3, 5, 7, 60, 999, 99_991, 10**6)
PERIODS = (1, 7, 60, 86_400, 366 * 86_400)
MOST = 2**63 // 10**6
"""Requests times seconds up to which the debt of a window is kept in 64 bits."""
BAN = Charge("", Bucket((kept_as("ban"),)), 1, enforced=True, rule=None)
STEPS = (0, 0, 1, 999, 10**5, 10**6, 10**7, 86_400 * 10**6, -1, -(10**6))


STRAIGHT = ("gcra", "gcra", "fixed_window", "sliding_window")
"""Algorithms with straight lines of their own, the commonest one more often."""


@st.composite
def plain_charges(draw: st.DrawFn, algorithms: Sequence[str] = (*STRAIGHT, "sliding_log", "concurrency")) -> list[Charge]:
    """Charges of one to three rules, each with its windows, a cost that fits into an empty bucket, and maybe a shadow.

    Maybe another rule is like the first, requests may wait where their limit lets them, and a ban is looked for besides.
    """
    charges = []
    for number in range(draw(st.integers(1, 3))):
        algorithm = draw(st.sampled_from(algorithms))
        most = 3 if algorithm == "gcra" else 1
        periods = draw(st.lists(st.sampled_from(PERIODS), min_size=1, max_size=most))
        limits = tuple([draw(a_limit(algorithm, period)) for period in dict.fromkeys(periods)])
        cost = draw(st.integers(1, min(3, *[limit.burst for limit in limits])))
        bucket = Bucket(limits)
        wait = draw(st.sampled_from([0, 0, 0, 10**6, bucket.longest_wait_us])) if bucket.algorithm.CAN_WAIT else 0
        charges.append(Charge("", bucket, cost, draw(st.booleans()), f"rule {number}", None, wait))
    if draw(st.booleans()):
        charges.append(charges[0]._replace(rule="its twin"))
    return [*charges, BAN] if draw(st.booleans()) else charges


@st.composite
def a_limit(draw: st.DrawFn, algorithm: str, period: int) -> Limit:
    """A limit of an algorithm, whose numbers are within 64 bits."""
    if algorithm == "concurrency":
        return Limit(f"{draw(st.integers(1, 4))} at once")
    most = MAX_ENTRIES if algorithm == "sliding_log" else MOST // period
    count = draw(st.sampled_from([count for count in COUNTS if count <= most]))
    align = draw(st.sampled_from([None, "first-request"])) if algorithm == "fixed_window" else None
    return Limit(f"{count} per {period} seconds", algorithm=algorithm, align=align)


def as_seen(decision: Any) -> dict[str, Any]:
    """Everything that a decision says of itself."""
    names = [name for name in dir(decision) if not name.startswith("_") and name not in ("evidence", "settlement", "settle")]
    return {name: value for name in names if not callable(value := getattr(decision, name))}


def owing(store: MemoryStore, now: int) -> dict[str, Any]:
    """The buckets that owe anything: when those that do not are dropped depends on how often room was looked for."""
    return {
        key: entry
        for key, entry in buckets(store).items()
        if max(map(entry[2].algorithm.ttl_us, entry[3], entry[2].limits)) > now - entry[0]
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
        asked = template.asked(keys)
        plan = asked.whole_plan
        expected = general.spend(plan)
        found = plain.spend(asked)
        assert whole_reading(found) == expected
        decision = template.decide(found, FinalCosts())
        if decision is not None:
            whole = decide(plan, expected, FinalCosts())
            assert as_seen(decision) == as_seen(whole)
            assert repr(decision) == repr(whole)
            assert decision.allowed or template.refusing(decision, found) == (decision.refusing, whole.refusing_key)
            assert template.has_room(found.states) is template.fits(found.states)[1]
            if decision.allowed and (template.is_enforced or template.is_of_shadows):
                assert template.tightest(found.states)[:2] == (whole.limit, whole.remaining)
                resets = [round(each.reset_after * 1_000_000) if each.period else None for each in whole.windows]
                assert template.windows(found.states) == [*zip([each.remaining for each in whole.windows], resets)]
        elif isinstance(found, PlainSpend):
            assert expected.admitted
            assert None in [bucket.after for bucket in expected.buckets]
        assert owing(plain, clock()) == owing(general, clock())


VISITS = st.tuples(st.integers(0, 2), st.sampled_from(STEPS), st.integers(0, 7))
"""A client, how the clock goes on before it comes, and which of its charges are given back when the next one has come."""


@given(plain_charges(), st.lists(VISITS, min_size=1, max_size=25))
def test_a_plain_refund_is_carried_out_like_any_other(charges: list[Charge], visits: list[tuple[int, int, int]]) -> None:
    """Property: one plan says what is given back as its charges do, and two memory stores keep the same bytes after it."""
    template = PlanTemplate(charges)
    clock = Clock()
    plain, general = MemoryStore(clock), MemoryStore(clock)
    refunds: list[PlainRefund] = []
    for client, step, given_back in visits:
        clock.advance(us=step)
        asked = template.asked([f"{client} {number}" for number in range(len(charges))])
        expected, found = general.spend(asked.whole_plan), plain.spend(asked)
        for each in refunds:
            assert plain.spend(each).now == general.spend(each.whole_plan).now == clock()
        refunds = []
        if isinstance(found, PlainSpend) and template.fits(found.states)[1]:
            back = [given_back >> number & 1 and charge is not BAN for number, charge in enumerate(charges)]
            costs = [0 if is_back else charge.cost for is_back, charge in zip(back, charges)]
            refunds = [RefundTemplate(template, costs).of(found)]
            assert refunds[0].whole_plan == refund(asked.whole_plan, expected, costs)
            assert refunds[0].keys == [charge.key for charge in refunds[0].charges]
            assert arguments(refunds) == arguments([each.whole_plan for each in refunds])
        assert owing(plain, clock()) == owing(general, clock())


@pytest.mark.parametrize("bucket", [bucket_of("5/second", "100/minute"), bucket_of("3 at once")], ids=["gcra", "concurrency"])
def test_plain_refund_takes_the_fast_path(bucket: Bucket) -> None:
    """The reading of a refund is the refund itself, unless the bucket is not kept as the charge has left it."""
    store = MemoryStore(clock := Clock())
    template = PlanTemplate([Charge("", bucket, 1, enforced=True, rule="api")])
    readings = []
    for step in (1, -1):
        spent = store.spend(template.asked(["key"]))
        assert isinstance(spent, PlainSpend)
        clock.advance(us=step)
        readings.append(store.spend(RefundTemplate(template, [0]).of(spent)))
        assert not owing(store, clock())
    assert [type(reading) for reading in readings] == [PlainRefund, Reading]


KNOWN = [
    bucket_of("5/second", "100/minute"),
    *[bucket_of(Limit("5/second", algorithm=algorithm)) for algorithm in ("fixed_window", "sliding_window", "sliding_log")],
    bucket_of(Limit("5/day", algorithm="fixed_window", align="first-request")),
]


@pytest.mark.parametrize("max_wait_us", [0, 10**6])
@pytest.mark.parametrize("bucket", KNOWN, ids=lambda bucket: bucket.limits[0].algorithm)
def test_plain_charge_takes_the_fast_path(bucket: Bucket, max_wait_us: int) -> None:
    """Buckets, known or new, are charged without the way that all plans have."""
    store = MemoryStore(Clock())
    template = PlanTemplate([Charge("", bucket, 1, enforced=True, rule="api", max_wait_us=max_wait_us)])
    readings = [store.spend(template.asked([key])) for key in ("first", "first", "second", "second")]
    assert [type(reading) for reading in readings] == [PlainSpend] * 4
    assert all(reading.admitted for reading in readings)
    assert len(store) == 2


@pytest.mark.parametrize("bucket", [KNOWN[0], KNOWN[3]], ids=["gcra", "sliding_log"])
def test_a_request_that_has_to_wait_is_charged_once(bucket: Bucket) -> None:
    """It is booked like any other, and the next one behind it; whoever would have to wait for longer is refused."""
    store = MemoryStore(Clock())
    template = PlanTemplate([Charge("", bucket, 1, enforced=True, rule="api", max_wait_us=10**6)])
    decisions = []
    for _ in range(11):
        reading = store.spend(template.asked(["a"]))
        decisions.append(template.decide(reading, None) or decide(template.plan(["a"]), whole_reading(reading)))
    assert [decision.allowed for decision in decisions] == [True] * 10 + [False]
    assert [decision.delay > 0 for decision in decisions] == [False] * 5 + [True] * 5 + [False]


def test_plain_plan_in_a_full_store_or_with_another_cost_falls_back() -> None:
    """What has to be weighed against other buckets is not decided in haste."""
    store = MemoryStore(Clock(), max_buckets=1)
    one, two = (PlanTemplate([Charge("", bucket_of("5/second"), cost, enforced=True, rule=None)]) for cost in (1, 2))
    store.spend(one.plan(["a"]))
    assert not isinstance(store.spend(one.asked(["b"])), PlainSpend)
    reading = store.spend(two.asked(["b"]))
    assert not isinstance(reading, PlainSpend)
    assert reading.buckets[0].after == [3 * 10**6]


@pytest.mark.parametrize(
    "charge",
    [
        Charge("", bucket_of("5/second"), 0, enforced=True, rule=None),
        Charge("", bucket_of("5/second"), 6, enforced=True, rule=None),
        Charge("", bucket_of("5/second"), 1, enforced=True, rule=None, adjustment=Adjustment(1, 0, [0], [0])),
        Charge("", bucket_of(Limit("5/second", borrow=True)), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("5000/second", lease=10)), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("5/second", warm_up=5)), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("5/day", algorithm="fixed_window", align="Europe/Berlin")), 1, enforced=True, rule=None),
        Charge("", bucket_of(Limit("1000000/second", burst=10**13)), 1, enforced=True, rule=None),
        Charge("", Bucket(tuple(Limit(f"5 per {n + 1} seconds") for n in range(MAX_WINDOWS + 1))), 1, enforced=True, rule=None),
    ],
    ids=lambda charge: f"{charge.bucket.limits[0]} {charge.cost}",
)
def test_template_of_charges_that_are_not_plain_is_none(charge: Charge) -> None:
    """Costs of nothing, costs that never fit, leases, borrowing, dates, other algorithms, and numbers beyond 64 bits."""
    with pytest.raises(ValueError, match="are not plain, expected"):
        PlanTemplate([charge])


@pytest.mark.parametrize("bucket", [bucket_of("2/day"), *KNOWN[1:]], ids=lambda bucket: bucket.limits[0].algorithm)
def test_states_that_leave_no_room_have_no_tightest_window(bucket: Bucket) -> None:
    """Whoever asks what an admitted plan has left is told where it was not admitted."""
    store, template = MemoryStore(Clock()), PlanTemplate([Charge("", bucket, 1, enforced=True, rule="api")])
    readings = [store.spend(template.asked(["a"])) for _ in range(6)]
    assert isinstance(readings[-1], PlainSpend)
    with pytest.raises(ValueError, match="expected a plan that was admitted"):
        template.tightest(readings[-1].states)
    both = PlanTemplate([Charge("", each, 1, enforced=True, rule="api") for each in (bucket, KNOWN[1])])
    with pytest.raises(ValueError, match="expected a plan that was admitted"):
        both.tightest([*readings[-1].states, (0, 1)])


@pytest.mark.parametrize("charges", [[], [BAN], [BAN, Charge("", bucket_of("5/second"), 1, enforced=True, rule=None)]])
def test_a_template_of_no_charges_is_none(charges: list[Charge]) -> None:
    """Nothing to charge is no plan, and bans come last."""
    with pytest.raises(ValueError, match="expected"):
        PlanTemplate(charges)


def test_plain_plan_on_a_banned_bucket_falls_back_to_the_general_plan() -> None:
    """Whoever may be banned is not charged in haste."""
    store = MemoryStore(Clock())
    template = PlanTemplate([Charge("", bucket_of("5/second"), 1, enforced=True, rule=None), BAN])
    store.spend(template.plan(["a", "ban of a"]))
    assert store.spend(template.asked(["b", "ban of b"])).admitted
    store.spend(Plan.adjust([BAN._replace(key="ban of b", adjustment=Adjustment(0, 0, [10**6], [0]))]))
    before = buckets(store)
    assert not store.spend(template.asked(["b", "ban of b"])).admitted
    assert buckets(store) == before
    assert store.spend(template.asked(["a", "ban of a"])).admitted


def test_a_plain_plan_within_another_call_fails() -> None:
    """A clock that asks its own store is told so, as by a plan of any kind."""
    template = PlanTemplate([Charge("", bucket_of("5/second"), 1, enforced=True, rule=None)])

    def clock() -> int:
        with pytest.raises(StoreError) as caught:
            store.spend(template.asked(["a"]))
        faults.append(caught.value.fault)
        return Clock()()

    faults: list[str] = []
    store = MemoryStore(clock)
    assert store.spend(Plan.spend(template.plan(["a"]).charges)).admitted
    assert faults == ["timeout"]


def test_layout_freed_with_its_last_bucket_is_created_again() -> None:
    """Looking for room may drop the last bucket of a kind, and so its layout; what is written then can be read all the same."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=1000)
    second, day = bucket_of("1/second"), bucket_of("9/day")
    of = PlanTemplate([Charge("", second, 1, enforced=True, rule="a"), Charge("", day, 1, enforced=True, rule="b")])
    store.spend(of.plan(["a", "b"]))
    for number in range(30):
        clock.advance(10)
        assert store.spend(of.asked(["a", f"b {number}"])).admitted
        assert not store.spend(of.plan(["a", "another"])).admitted


@needs_gil
def test_template_without_users_is_freed() -> None:
    """Without the garbage collector, which would otherwise find those that are not remembered."""
    gc.disable()
    try:
        template = PlanTemplate([Charge("", bucket_of("5/second", "100/minute"), 1, enforced=True, rule="api")])
        tightest = ref(template.tightest)
        del template
        assert tightest() is None
    finally:
        gc.enable()
