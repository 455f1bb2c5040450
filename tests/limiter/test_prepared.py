"""Prepared plans of a limiter: hits that have one get what hits get that are planned anew each time."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import AsyncLimiter, Decision, Limit, Limiter, LimitGateError, MemoryStore, RedisStore
from limitgate.limiter.plans import Configured
from limitgate.limits.plan import Reading
from limitgate.limits.template import PlainSpend
from tests.gate.test_prepared import Counted, General, kept
from tests.limits.test_template import as_seen
from tests.support.clock import Clock
from tests.support.redis_server import RedisServer

LIMITS: tuple[tuple[Any, ...], ...] = (
    ("3/second", "5/minute"),
    (Limit("5/minute"),),
    ("9/second burst 2",),
    ("3/second", Limit("5/minute", algorithm="fixed_window")),
    (Limit("5/second", borrow=True),),
    (Limit("4/minute", algorithm="sliding_log"),),
    ("20 at once",),
    (Configured("nothing"),),
    (),
    ("5 bananas",),
    (["5/second"],),
)

MIXED = "9/second", Limit("9/minute", algorithm="fixed_window"), Limit("9/minute", algorithm="sliding_window")
LOGGED = (Limit("9/minute", algorithm="sliding_log"),)

calls = st.tuples(
    st.sampled_from(["hit"] * 12 + ["peek", "reset", "refund", "penalize", "pardon", "hit_up_to"]),
    st.sampled_from(["a", "b", ""]),
    st.sampled_from(LIMITS[:2] * 4 + LIMITS),
    st.sampled_from([1] * 6 + [2, 3, 0, 17, -1, True, 1.0, "1"]),
    st.sampled_from([0, 0, 0.1, 0.4, 3, 70, -1]),
)


class Awaited:
    """An `AsyncLimiter`, called like a `Limiter`."""

    def __init__(self, store: Any) -> None:
        self._limiter = AsyncLimiter(store)

    def __getattr__(self, verb: str) -> Any:
        return lambda *given, **options: asyncio.run(getattr(self._limiter, verb)(*given, **options))


BOTH = pytest.mark.parametrize("kind", [Limiter, Awaited])


def answer(limiter: Any, verb: str, key: str, limits: tuple[Any, ...], cost: Any) -> Any:
    """What a call returns or raises, in words."""
    given, options = (key, *limits), {"cost": cost}
    if verb in ("penalize", "pardon"):
        given, options = (key, 0.5) if verb == "penalize" else (key,), {}
    elif verb == "reset":
        options = {}
    try:
        decision = getattr(limiter, verb)(*given, **options)
    except (LimitGateError, TypeError, ValueError) as error:
        return repr(error)
    return (as_seen(decision), repr(decision)) if isinstance(decision, Decision) else decision


@BOTH
@given(visits=st.lists(calls, min_size=1, max_size=40))
def test_a_prepared_hit_is_what_would_have_been_planned(kind: Any, visits: list[Any]) -> None:
    """Property: decisions, errors and buckets are the same, whether a store takes plain plans or not."""
    clock = Clock()
    stores = MemoryStore(clock), General(clock)
    prepared, planned = map(kind, stores)
    for verb, key, limits, cost, step in visits:
        clock.advance(step)
        assert answer(prepared, verb, key, limits, cost) == answer(planned, verb, key, limits, cost)
        assert kept(stores[0], clock()) == kept(stores[1], clock())


@BOTH
@pytest.mark.parametrize("limits", [("9/second", "100/minute"), (Limit("9/second"),), MIXED, LOGGED])
@pytest.mark.parametrize("cost", [1, 3])
def test_hits_of_fixed_limits_have_prepared_plans(kind: Any, limits: Any, cost: int) -> None:
    """Limits of any algorithm, given as text or as a `Limit`, are on the short way."""
    store = Counted(Clock())
    limiter = kind(store)
    for number in range(5):
        assert limiter.hit(str(number), *limits, cost=cost).allowed
        assert limiter.wait(str(number), *limits, cost=cost, timeout=0).allowed
    assert (store.general, store.plain) == (0, 10)


@BOTH
@pytest.mark.parametrize(("limits", "cost"), [(LIMITS[4], 1), (("99/second",), 17), (("9/second",), 0)])
def test_what_needs_more_is_planned_anew(kind: Any, limits: Any, cost: int) -> None:
    """Borrowing, a cost of nothing and costs that are hardly ever equal have no prepared plan."""
    store = Counted(Clock())
    limiter = kind(store)
    for _ in range(3):
        limiter.hit("a", *limits, cost=cost)
    assert (store.general, store.plain) == (3, 0)


def test_a_ban_is_seen_on_redis_by_the_next_hit(redis_server: RedisServer) -> None:
    """A hit looks for a ban in the same call that charges it, even if another process has just set it."""
    with Limiter(redis_server.url) as one, Limiter(redis_server.url) as other:
        assert [one.hit("banned early", "5/day").remaining for _ in range(2)] == [4, 3]
        other.ban("banned early", 60)
        decision = one.hit("banned early", "5/day")
        assert not decision.allowed
        assert 59 < decision.retry_after <= 60
        other.pardon("banned early")
        assert other.hit("banned early", "5/day").remaining == 2


def test_a_hit_on_redis_is_a_plain_plan(redis_server: RedisServer) -> None:
    """Redis and memory store alike carry it out in a straight line."""
    store = RedisStore(redis_server.url)
    taken, spend = [], store.spend

    def noted(*given: Any) -> Any:
        taken.append(spend(*given))
        return taken[-1]

    store.spend = noted  # type: ignore[method-assign]
    with closing(store), Limiter(store) as limiter:
        assert [limiter.hit("plain on Redis", "2/day").allowed for _ in range(4)] == [True, True, False, False]
    assert [(type(reading), reading.source) for reading in taken] == [*[(PlainSpend, "store")] * 3, (Reading, "cache")]
