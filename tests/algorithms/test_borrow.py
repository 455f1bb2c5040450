"""Limits that let borrow: a request of any cost passes where one request fits, and the next ones pay for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import ConfigError, Limit, Limiter, MemoryStore, Rule, load_rules
from limitgate.algorithms import gcra
from limitgate.limits.bucket import bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.limit import MAX_OWED_US, as_limit
from limitgate.limits.plan import Charge, Plan, refund
from limitgate.stores.redis.deny_cache import DenyCache
from tests.support.clock import Clock
from tests.support.scripted import Scripted

SECOND = 1_000_000
TEN = Limit("10/second", borrow=True)


@pytest.fixture(params=["memory", "script"])
def limiter(request: pytest.FixtureRequest, client: redis.Redis) -> Limiter:
    """A limiter under a clock of the test's own, which is its ``clock``; its ``key`` is one that nobody has used."""
    clock = Clock()
    limiter = Limiter(MemoryStore(clock) if request.param == "memory" else Scripted(client, clock))
    limiter.clock, limiter.key = clock, uuid4().hex
    return limiter


def test_a_large_request_passes_and_the_next_one_pays(limiter: Limiter) -> None:
    """What costs three times the burst passes at once; then nobody does until all but one of it is earned back."""
    taken = limiter.hit(limiter.key, TEN, cost=30)
    assert (taken.allowed, taken.granted, taken.limit, taken.remaining, taken.reset_after) == (True, 30, 10, 0, 3)
    assert taken.windows[0].used == 30
    for cost in (1, 30, 1000):
        refused = limiter.hit(limiter.key, TEN, cost=cost)
        assert (refused.allowed, refused.retry_after) == (False, 2.1)  # until 9 of the 10 are owed
    limiter.clock.advance(us=2_100_000 - 1)
    assert not limiter.hit(limiter.key, TEN).allowed
    limiter.clock.advance(us=1)
    assert limiter.hit(limiter.key, TEN, cost=1000).allowed
    assert limiter.peek(limiter.key, TEN).retry_after == 100


@pytest.mark.parametrize("left", range(11))
def test_one_that_fits_is_enough(limiter: Limiter, left: int) -> None:
    """A large request is only refused where the smallest one is, too."""
    limiter.hit(limiter.key, TEN, cost=10 - left)
    assert limiter.peek(limiter.key, TEN, cost=1).allowed is limiter.peek(limiter.key, TEN, cost=99).allowed is (left > 0)


def test_what_costs_nothing_borrows_nothing(limiter: Limiter) -> None:
    """A cost of 0 passes, whatever is owed."""
    limiter.hit(limiter.key, TEN, cost=100)
    assert limiter.hit(limiter.key, TEN, cost=0).allowed
    assert limiter.peek(limiter.key, TEN).retry_after == 9.1


@pytest.mark.parametrize("text", ["1/day", "10/second", "1000000/second", "7 per 13 seconds burst 99"])
def test_nobody_owes_more_than_can_be_remembered(limiter: Limiter, text: str) -> None:
    """What would be owed for more than 142 years is refused for ever; one request less passes, and what it owes is exact."""
    limit = Limit(text, borrow=True)
    assert limiter.hit(limiter.key, limit, cost=limit.most + 1).retry_after == math.inf
    limiter.hit(limiter.key, limit, cost=limit.burst - 1)
    taken = limiter.hit(limiter.key, limit, cost=limit.most)
    assert taken.allowed
    assert taken.windows[0].used == limit.burst - 1 + limit.most
    assert MAX_OWED_US - math.ceil(limit.period_us / limit.count) <= round(taken.reset_after * SECOND) <= MAX_OWED_US


def test_every_limit_of_a_bucket_has_its_own_say(limiter: Limiter) -> None:
    """Beside one that lets borrow, one that does not refuses what it has no room for, and then nothing is borrowed."""
    limits = TEN, Limit("50/minute")
    assert limiter.hit(limiter.key, *limits, cost=51).retry_after == math.inf
    assert limiter.hit(limiter.key, *limits, cost=50).allowed
    refused = limiter.hit(limiter.key, *limits, cost=2)
    assert [window.retry_after for window in refused.windows] == [4.1, 2.4]
    assert refused.retry_after == 4.1


def test_a_limit_may_begin_and_cease_to_let_borrow(limiter: Limiter) -> None:
    """It is the same bucket: what was borrowed is owed under the plain limit, and the other way round."""
    limiter.hit(limiter.key, TEN, cost=30)
    plain = limiter.peek(limiter.key, "10/second", cost=5)
    assert (plain.retry_after, plain.windows[0].used) == (2.5, 30)
    limiter.clock.advance(2.5)
    assert limiter.peek(limiter.key, TEN, cost=50).allowed
    assert limiter.hit(limiter.key, "10/second", cost=5).allowed


@given(
    limit=st.builds(
        lambda count, burst: Limit(f"{count}/second burst {burst}", borrow=True), st.integers(1, 20), st.integers(1, 20)
    ),
    asking=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2_000_000)), max_size=30),
)
def test_the_worst_case_property(limit: Limit, asking: list[tuple[int, int]]) -> None:
    """In any interval at most burst - 1, the largest cost, and what is earned meanwhile pass; and waits are exact."""
    limiter, passed = Limiter(MemoryStore(clock := Clock())), []
    for cost, us in asking:
        clock.advance(us=us)
        decision = limiter.hit("key", limit, cost=cost)
        if decision.allowed:
            passed.append((clock.now, cost))
        else:
            wait = round(decision.retry_after * SECOND)
            clock.advance(us=wait - 1)
            assert not limiter.peek("key", limit, cost=cost).allowed
            clock.advance(us=1)
            assert limiter.peek("key", limit, cost=cost).allowed
    largest = max([1, *[cost for _, cost in passed]])
    for place, (began, _) in enumerate(passed):
        total = 0
        for at, cost in passed[place:]:
            total += cost
            assert total * SECOND <= (limit.burst - 1 + largest) * SECOND + (at - began) * limit.count


@pytest.mark.parametrize("truth", [0, 1, 12, 29, 30, 31, 99])
def test_what_was_borrowed_too_much_is_given_back(limiter: Limiter, truth: int) -> None:
    """A large request that turns out to cost something else leaves what it would have left, had it cost that at once."""
    bucket, clock, store = bucket_of(TEN), limiter.clock, limiter._store
    plan = Plan((Charge(limiter.key, bucket, 30, enforced=True, rule=None),))
    reading = store.spend(plan, 5)
    clock.advance(0.5)
    store.spend(refund(plan, reading, [truth]), 5)
    owed = max(0, truth * SECOND - 5 * SECOND) if truth <= 30 else 25 * SECOND + (truth - 30) * SECOND
    assert store.spend(plan._replace(verb="peek"), 5).buckets[0].before == [owed]


@pytest.mark.parametrize(("cost", "ahead", "passes"), [(1, 2.1, True), (50, 2.1, True), (50, 2.099_999, False), (1, 0, False)])
def test_a_turn_can_be_booked(limiter: Limiter, cost: int, ahead: float, *, passes: bool) -> None:
    """Where requests may wait, a large one waits for as long as a small one would, and then all of it is owed."""
    bucket, store = bucket_of(TEN), limiter._store
    limiter.hit(limiter.key, TEN, cost=30)
    plan = Plan(
        (
            Charge(
                limiter._plans.name(limiter.key),
                bucket,
                cost,
                True,
                None,
                max_wait_us=round(ahead * SECOND),
            ),
        )
    )
    decision = decide(plan, store.spend(plan, 5))
    assert decision.allowed is passes
    assert decision.delay == (2.1 if passes else 0)
    assert limiter.peek(limiter.key, TEN).windows[0].used == (30 + cost if passes else 30)


def test_a_bucket_that_refuses_since_something_was_borrowed_is_not_dropped() -> None:
    """However many new keys come, whoever has borrowed pays it back."""
    limiter = Limiter(MemoryStore(Clock(), max_buckets=3))
    limiter.hit("borrower", TEN, cost=30)
    for number in range(100):
        limiter.hit(f"new {number}", "10/day", cost=5)
    assert limiter.hit("borrower", TEN).retry_after == 2.1


def test_a_refusal_is_repeated_as_long_as_it_holds() -> None:
    """What was refused is refused without asking until one request fits, and then asked about, whatever it costs."""
    bucket, store, refusals = bucket_of(TEN), MemoryStore(Clock()), DenyCache()

    def plan(cost: int) -> Plan:
        return Plan((Charge("key", bucket, cost, enforced=True, rule=None),))

    store.spend(plan(15))
    refusals.learn(plan(7), store.spend(plan(7)), 100.0, 100.0)
    for cost in (1, 7, 1000):
        assert decide(plan(cost), refusals.answer(plan(cost), 100.0)).retry_after == 0.6
        assert decide(plan(cost), refusals.answer(plan(cost), 100.5)).retry_after == pytest.approx(0.1)
        assert refusals.answer(plan(cost), 100.6) is None


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"borrow": 1}, "expected true or false for borrow, not 1"),
    ({"borrow": "yes"}, "expected true or false"),
    ({"borrow": None}, "expected true or false"),
    ({"borrow": True, "lease": 5}, "expected borrow without a lease"),
    ({"borrow": True, "algorithm": "fixed_window"}, "expected borrow for gcra only, not for fixed_window"),
    ({"borrow": True, "warm_up": 5}, "expected borrow for gcra only, not for warm_up"),
]


@pytest.mark.parametrize(("options", "expected"), MISTAKES, ids=str)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], expected: str) -> None:
    """What borrowing contradicts is a ConfigError."""
    with pytest.raises(ConfigError, match=expected):
        as_limit({"limit": "10/second", **options})


def test_a_rules_lease_is_none_for_a_limit_that_lets_borrow() -> None:
    """A lease for all limits of a rule cannot be had, either."""
    with pytest.raises(ConfigError, match=r"rule 'r': lease: .* expected borrow without a lease"):
        Rule("r", TEN, lease=5)


def test_in_a_rule_file(tmp_path: Path) -> None:
    """A rule may cost more than the burst where that can be borrowed, up to what can be remembered."""
    file = tmp_path / "rules.yaml"
    text = "rules:\n  - name: batch\n    cost: {}\n    limits: [{{limit: 10/second, borrow: true}}]"
    file.write_text(text.format(500))
    (rule,) = load_rules(file).tiers["default"]
    assert rule.every_limit == (TEN,)
    file.write_text(text.format(10**30))
    with pytest.raises(ConfigError, match=f"exceeds 10/second, expected at most {TEN.most}"):
        load_rules(file)


@pytest.mark.parametrize("algorithm", ["gcra", "token_bucket", "leaky_bucket"])
def test_a_limit_that_lets_borrow(algorithm: str) -> None:
    """It prints what leads back to it, and is another limit than the one that does not, under every name of the algorithm."""
    limit = Limit("10/second burst 3", borrow=True, algorithm=algorithm)
    assert eval(repr(limit)) == as_limit(limit.given) == limit != Limit("10/second burst 3", algorithm=algorithm)
    assert bucket_of(limit).ids == bucket_of(limit.having(borrow=False)).ids
    assert (limit.most > 10**9, limit.having(borrow=False).most) == (True, 3)


@pytest.mark.parametrize("cost", [1, 2, 5, 30, 10**6])
def test_a_share_lets_borrow_too(cost: int) -> None:
    """Of several processes each has its share of the burst, whatever a request costs, as it can be borrowed."""
    bucket = bucket_of(TEN)
    assert bucket.share(3, cost) is bucket.share(3)
    (share,) = bucket.share(3).limits
    assert (share.count, share.period, share.burst, share.borrow) == (10, 3, 3, True)


def test_only_what_borrows_is_looked_at_more_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one, and limits that do not let borrow, are weighed just as before."""
    calls: list[int] = []
    tolerance: Callable[..., int] = gcra._tolerance
    monkeypatch.setattr(gcra, "_tolerance", lambda limit, cost, wait: calls.append(cost) or tolerance(limit, cost, wait))
    limiter = Limiter(MemoryStore(Clock()))
    limiter.hit("key", TEN)
    limiter.hit("key", "10/second", cost=5)
    assert calls == []
    limiter.hit("key", TEN, cost=5)
    assert calls == [5]
