"""Limits with a cost of their own: requests and tokens in one decision."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from limitgate import AsyncLimiter, ConfigError, Limit, Limiter, MemoryStore, RedisStore
from tests.limiter.test_operations import Subject, opened
from tests.support.clock import Clock
from tests.support.redis_server import RedisServer

FIXED = Limit("200000/day", algorithm="fixed_window")
SIZES = ["200000/week", FIXED, Limit("200000/day", algorithm="sliding_window")]
"""Limits that don't drain by a request while a test runs."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[(kind, store) for kind in ("sync", "async") for store in ("memory", "redis")], ids=" ".join)
def either(request: pytest.FixtureRequest, clock: Clock, redis_server: RedisServer) -> Iterator[Subject]:
    with opened(*request.param, clock, redis_server) as subject:
        yield subject


def used(subject: Subject, *limits: Any) -> list[int]:
    return [window.used for window in subject.peek("key", *limits).windows]


@pytest.mark.parametrize("tokens", SIZES, ids=repr)
def test_hit_charges_each_limit_its_own_cost(either: Subject, tokens: Any) -> None:
    decision = either.hit("key", "500/day", (tokens, 900))
    assert decision.allowed
    assert [window.remaining for window in decision.windows] == [499, 199_100]
    either.hit("key", (tokens, 1_100), "500/day", cost=2)
    assert used(either, "500/day", tokens) == [3, 2_000]
    assert used(either, tokens) == [2_000]
    assert used(either, "500/day") == [3]


@pytest.mark.parametrize("tokens", SIZES, ids=repr)
@pytest.mark.parametrize("full", ["requests", "tokens"])
def test_hit_charges_all_limits_or_none(either: Subject, tokens: Any, full: str) -> None:
    either.hit("key", "5/day", (tokens, 199_000), cost=5 if full == "requests" else 1)
    before = used(either, "5/day", tokens)
    refused = either.hit("key", "5/day", (tokens, 900 if full == "requests" else 1_001))
    assert not refused.allowed
    assert refused.retry_after > 0
    assert used(either, "5/day", tokens) == before


def test_a_cost_that_never_fits_is_refused_for_good(either: Subject) -> None:
    assert either.hit("key", "5/day", ("1000/week", 1_001)).retry_after == math.inf
    assert used(either, "5/day", "1000/week") == [0, 0]


def test_a_cost_of_zero_is_charged_nothing(either: Subject) -> None:
    assert either.hit("key", "5/day", ("1000/week", 0)).allowed
    assert used(either, "5/day", "1000/week") == [1, 0]
    either.hit("key", ("1000/week", 7), "5/day", cost=0)
    assert used(either, "5/day", "1000/week") == [1, 7]


def test_a_ban_refuses_costs_of_limits_where_the_request_costs_nothing(either: Subject) -> None:
    either.ban("key", 60)
    assert not either.hit("key", ("1000/week", 7), cost=0).allowed


def test_three_limits_of_one_period_keep_apart(either: Subject) -> None:
    limits = "500/day", ("30000/day", 900), ("8000/day", 500)
    for _ in range(3):
        either.hit("key", *limits)
    assert used(either, "500/day", "30000/day", "8000/day") == [3, 2_700, 1_500]
    assert not either.hit("key", "500/day", ("30000/day", 1), ("8000/day", 6_501)).allowed
    assert used(either, "500/day", "30000/day", "8000/day") == [3, 2_700, 1_500]


@pytest.mark.parametrize("tokens", SIZES, ids=repr)
@pytest.mark.parametrize("final", [0, 400, 900, 2_000])
def test_a_reservation_settles_the_limit_with_its_own_cost(either: Subject, tokens: Any, final: int) -> None:
    reservation = either.reserve("key", "500/day", (tokens, 900))
    either.run(reservation.settle(final))
    assert used(either, "500/day", tokens) == [1, final]


def test_a_reservation_settles_several_limits_in_their_order(either: Subject) -> None:
    limits = ("3000/week", 900), "500/day", (FIXED, 500)
    reservation = either.reserve("key", *limits)
    for wrong in (7, [7], [1, 2, 3], []):
        with pytest.raises(ValueError, match="expected a list of 2, one for each limit with its own cost"):
            either.run(reservation.settle(wrong))
    either.run(reservation.settle([100, 600]))
    assert used(either, "3000/week", "500/day", FIXED) == [100, 1, 600]


def test_a_cost_that_is_no_integer_settles_nothing(either: Subject) -> None:
    """A reservation that a wrong call has left open can still be settled."""
    one, none = either.reserve("key", "500/day", ("3000/week", 900)), either.reserve("key", "500/day")
    for reservation in (one, none):
        for wrong in (1.5, None, True):
            with pytest.raises(TypeError, match="expected an integer"):
                either.run(reservation.settle(wrong))
        with pytest.raises(ValueError, match="expected at least 0"):
            either.run(reservation.settle(-1))
        either.run(reservation.settle(1))
        with pytest.raises(RuntimeError, match="cannot be cancelled: it was settled"):
            either.run(reservation.cancel())
    assert used(either, "500/day", "3000/week") == [2, 1]


def test_a_reservation_without_own_costs_settles_for_one_integer(either: Subject) -> None:
    reservation = either.reserve("key", "500/day", cost=9)
    with pytest.raises(TypeError, match="expected one integer"):
        either.run(reservation.settle([1]))
    either.run(reservation.settle(4))
    assert used(either, "500/day") == [4]


def test_cancelling_gives_back_requests_and_tokens(either: Subject) -> None:
    reservation = either.reserve("key", "500/day", ("3000/week", 900), (FIXED, 500))
    either.run(reservation.cancel())
    assert used(either, "500/day", "3000/week", FIXED) == [0, 0, 0]


def test_a_refund_gives_each_limit_its_own_cost(either: Subject) -> None:
    either.hit("key", "500/day", ("3000/week", 900), cost=5)
    either.refund("key", "500/day", ("3000/week", 300), cost=2)
    assert used(either, "500/day", "3000/week") == [3, 600]


def test_wait_books_a_turn_for_own_costs(clock: Clock, redis_server: RedisServer) -> None:
    with opened("sync", "redis", clock, redis_server) as limiter:
        assert limiter.wait("key", "500/day", ("100/second", 100), timeout=5).delay == 0
        assert 0 < limiter.wait("key", "500/day", ("100/second", 100), timeout=5).delay <= 1
        refused = limiter.wait("key", "500/day", ("100/second", 100), timeout=0.1)
        assert not refused.allowed
        assert limiter.peek("key", "500/day").windows[0].used == 2


def test_peek_and_reset_take_own_costs(either: Subject) -> None:
    either.hit("key", "5/day", ("1000/week", 900))
    assert not either.peek("key", "5/day", ("1000/week", 101)).allowed
    assert either.peek("key", "5/day", ("1000/week", 50)).allowed
    either.reset("key", "5/day", ("1000/week", 900))
    assert used(either, "5/day", "1000/week") == [0, 0]


def test_mappings_may_have_a_cost(either: Subject) -> None:
    either.hit("key", "5/day", {"limit": "1000/week", "cost": 900})
    assert used(either, "5/day", "1000/week") == [1, 900]


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (("1000/week", -1), ValueError, "cost is -1"),
        (("1000/week", 1.5), TypeError, "cost is a float"),
        (("1000/week", True), TypeError, "cost is a bool"),
        (("1000/week", None), TypeError, "cost is a NoneType"),
        ({"limit": "1000/week", "cost": None}, TypeError, "cost is a NoneType"),
        (("1000/week", "9"), ConfigError, "expected each limit separately"),
        ((1000, 60), ConfigError, "expected text such as '1000 per 60 seconds'"),
        (("nonsense", 9), ConfigError, "is not a limit"),
        (("5/day", 9, 9), ConfigError, "expected each limit separately"),
        ((Limit("1000/week", lease=10), 9), ConfigError, "a lease and its own cost"),
    ],
    ids=repr,
)
def test_what_is_no_own_cost_is_an_error(limit: Any, error: type[Exception], message: str) -> None:
    limiter = Limiter(MemoryStore())
    with pytest.raises(error, match=message):
        limiter.hit("key", "5/day", limit)
    assert limiter.peek("key", "5/day").remaining == 5


def test_hit_up_to_needs_limits_without_own_costs() -> None:
    with pytest.raises(ConfigError, match=r"expected .*hit or reserve"):
        Limiter(MemoryStore()).hit_up_to("key", ("1000/week", 9), cost=3)


def test_own_costs_equal_separate_keys_property() -> None:
    """A random history of one key with own costs decides as one key per limit does."""
    dice, clock = random.Random(37), Clock()
    limiter = Limiter(MemoryStore(clock))
    requests, tokens, day = "20/minute", "3000/minute burst 4000", Limit("30000/day", algorithm="fixed_window")
    for _ in range(2_000):
        clock.now += dice.randrange(0, 4_000_000)
        count, size = dice.choice([0, 1, 1, 1, 3]), dice.choice([0, 10, 200, 1_500, 4_001])
        parts = [("r", requests, count), ("t", tokens, size), ("d", day, size)]
        apart = [limiter.peek(key, limit, cost=cost) for key, limit, cost in parts]
        decision = limiter.hit("key", requests, (tokens, size), (day, size), cost=count)
        assert decision.allowed is all(each.allowed for each in apart)
        assert decision.retry_after == max(each.retry_after for each in apart)
        if decision.allowed:
            apart = [limiter.hit(key, limit, cost=cost) for key, limit, cost in parts]
        assert [each.remaining for each in decision.windows] == [each.windows[0].remaining for each in apart]


def test_memory_and_redis_agree_on_own_costs(redis_server: RedisServer) -> None:
    """With limits so slow that the time between two calls changes nothing that is compared."""
    dice = random.Random(38)
    limits = Limit("300/52 weeks"), Limit("90000/52 weeks"), Limit("90000/52 weeks", algorithm="fixed_window")
    memory = Limiter(MemoryStore())
    store = RedisStore(redis_server.url)
    redis = Limiter(store, timeout=5, key_prefix="agree")
    for _ in range(400):
        sizes = [dice.choice([0, 1, 300, 2_000]) for _ in limits]
        given = [(limit, size) if dice.random() < 0.7 else limit for limit, size in zip(limits, sizes)]
        verb = dice.choice(["hit", "hit", "peek", "refund"])
        decisions = [getattr(limiter, verb)("key", *given, cost=2) for limiter in (memory, redis)]
        assert len({each.allowed for each in decisions}) == 1
        assert len({tuple(window.used for window in each.windows) for each in decisions}) == 1
    store.close()


async def crowd(limiter: AsyncLimiter) -> int:
    answers = await asyncio.gather(*[limiter.hit("key", "500/week", ("1000/day", 10 + n % 5)) for n in range(200)])
    return sum(10 + n % 5 for n, each in enumerate(answers) if each.allowed)


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_crowd_never_exceeds_the_tokens(store: str, clock: Clock, redis_server: RedisServer) -> None:
    with opened("async", store, clock, redis_server) as subject:
        total = subject.run(crowd(subject._limiter))
        assert 986 <= total <= 1_000
        assert used(subject, "1000/day") == [total]
