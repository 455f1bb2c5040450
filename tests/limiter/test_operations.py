"""What a Limiter can do beyond asking: give back, take a part, wait, reserve, ban, and limit plain functions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, strategies as st

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Decision,
    Limit,
    Limiter,
    MemoryStore,
    RateLimited,
    RedisStore,
    StoreError,
)
from limitgate.limits.limit import NAMES
from limitgate.process import waiting
from tests.support.clock import Clock
from tests.support.doors import PATIENCE
from tests.support.outcomes import Watched
from tests.support.redis_server import RedisServer
from tests.support.virtual import World

SLACK = 3.0
"""Seconds that a busy machine may add."""

FIXED = Limit("10/day", algorithm="fixed_window")
ALGORITHMS: list[Any] = ["10/minute", *[Limit("10/day", algorithm=name) for name in NAMES if name.endswith(("window", "log"))]]


class Subject:
    """A limiter of either kind, its methods called alike."""

    def __init__(self, limiter: Limiter | AsyncLimiter, run: Callable[[Any], Any]) -> None:
        self._limiter = limiter
        self.run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._limiter, name)
        return lambda *args, **kwargs: self.run(method(*args, **kwargs))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextlib.contextmanager
def opened(kind: str, store: str, clock: Clock, server: RedisServer) -> Iterator[Subject]:
    """A limiter of a kind on a memory store with the test's clock, or on a real Redis with a prefix of its own."""
    options = {"timeout": 5, "key_prefix": uuid4().hex}
    if kind == "sync":
        with contextlib.closing(MemoryStore(clock) if store == "memory" else RedisStore(server.url)) as opened:
            yield Subject(Limiter(opened, **options), lambda answer: answer)
        return
    with asyncio.Runner() as runner:
        opened = MemoryStore(clock) if store == "memory" else AsyncRedisStore(server.url)
        yield Subject(AsyncLimiter(opened, **options), runner.run)
        runner.run(opened.aclose())


@pytest.fixture(params=["sync", "async"])
def limiter(request: pytest.FixtureRequest, clock: Clock, redis_server: RedisServer) -> Iterator[Subject]:
    """A limiter of either kind on a memory store with the test's clock."""
    with opened(request.param, "memory", clock, redis_server) as subject:
        yield subject


@pytest.fixture(params=["sync", "async"])
def on_redis(request: pytest.FixtureRequest, clock: Clock, redis_server: RedisServer) -> Iterator[Subject]:
    """A limiter of either kind on a real Redis."""
    with opened(request.param, "redis", clock, redis_server) as subject:
        yield subject


@pytest.fixture(params=[(kind, store) for kind in ("sync", "async") for store in ("memory", "redis")], ids=" ".join)
def either(request: pytest.FixtureRequest, clock: Clock, redis_server: RedisServer) -> Iterator[Subject]:
    """A limiter of either kind on either store."""
    with opened(*request.param, clock, redis_server) as subject:
        yield subject


# --- refund -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ALGORITHMS, ids=repr)
def test_a_refund_gives_back(either: Subject, limit: Any) -> None:
    """What is refunded can be taken again; the decision shows the bucket after it."""
    either.hit("key", limit, cost=9)
    refunded = either.refund("key", limit, cost=4)
    assert (refunded.remaining, refunded.granted, refunded.allowed) == (5, 0, True)
    assert either.peek("key", limit).windows[0].used in (5, 6)  # a begun one counts whole


@pytest.mark.parametrize("limit", ALGORITHMS, ids=repr)
def test_a_refund_never_exceeds_the_burst(either: Subject, limit: Any) -> None:
    """Whatever is given back, a full bucket holds no more than its burst."""
    either.hit("key", limit, cost=2)
    assert either.refund("key", limit, cost=10**12).remaining == 10
    assert either.hit("key", limit, cost=10).allowed
    assert not either.hit("key", limit, cost=9).allowed


def test_a_refund_is_for_the_limits_named(limiter: Subject) -> None:
    """Limits that are not named keep what they owe; several of any algorithm are refunded together."""
    limits = "10/minute", "20/hour", FIXED
    limiter.hit("key", *limits, cost=5)
    assert [window.used for window in limiter.refund("key", "20/hour", FIXED, cost=3).windows] == [2, 2]
    assert [window.used for window in limiter.peek("key", *limits).windows] == [5, 2, 2]


def test_a_refund_frees_a_caller_that_was_refused(on_redis: Subject) -> None:
    """A refusal that is remembered here is forgotten when something is given back."""
    on_redis.hit("key", "1/day")
    assert not on_redis.hit("key", "1/day").allowed
    on_redis.refund("key", "1/day")
    assert on_redis.hit("key", "1/day").allowed


# --- hit_up_to --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ALGORITHMS, ids=repr)
def test_a_part_is_granted(either: Subject, limit: Any) -> None:
    """What fits is granted and taken; where nothing is left the wait is the one for a single request."""
    assert either.hit_up_to("key", limit, cost=7).granted == 7
    part = either.hit_up_to("key", limit, cost=7)
    assert (part.allowed, part.granted, part.remaining) == (True, 3, 0)
    nothing, one = either.hit_up_to("key", limit, cost=7), either.peek("key", limit)
    assert (nothing.allowed, nothing.granted) == (False, 0)
    assert nothing.retry_after == pytest.approx(one.retry_after, abs=1)


def test_a_part_larger_than_the_burst(limiter: Subject) -> None:
    """A cost that never fits as a whole is granted as far as it does."""
    assert limiter.hit_up_to("key", "10/minute", cost=10**30).granted == 10


def test_the_tightest_limit_bounds_the_part(limiter: Subject) -> None:
    """Of several limits the one with the least left says how much is granted, and all are charged the same."""
    decision = limiter.hit_up_to("key", "10/minute", "5 per 7 seconds", Limit("3/day", algorithm="fixed_window"), cost=8)
    assert decision.granted == 3
    assert [window.used for window in decision.windows] == [3, 3, 3]


def test_asking_for_nothing_grants_nothing(limiter: Subject) -> None:
    """A cost of 0 passes, as everywhere, and takes nothing."""
    assert limiter.hit_up_to("key", "1/day", cost=0).allowed
    assert limiter.peek("key", "1/day").remaining == 1


def test_a_crowd_shares_what_there_is(redis_server: RedisServer) -> None:
    """Threads that want more than there is get just what there is, together."""
    with contextlib.closing(RedisStore(redis_server.url)) as store, ThreadPoolExecutor(16) as pool:
        limiter, key = Limiter(store, timeout=5), uuid4().hex
        granted = pool.map(lambda cost: limiter.hit_up_to(key, "100/day", cost=cost).granted, [7, 3, 50, 11] * 8)
        assert sum(granted) == 100


# --- wait -------------------------------------------------------------------------------------------------------------


def test_who_need_not_wait_does_not(limiter: Subject) -> None:
    """Where there is room nobody sleeps, and no turn is booked."""
    began = time.monotonic()
    decision = limiter.wait("key", "1/day", timeout=60)
    assert (decision.allowed, decision.delay, decision.granted) == (True, 0.0, 1)
    assert time.monotonic() - began < PATIENCE


def test_turns_are_taken_one_after_the_other(either: Subject) -> None:
    """Whoever waits passes one emission interval after the one before, and not before."""
    began = time.monotonic()
    waited = [either.wait("key", "20/second burst 1", timeout=5).delay for _ in range(3)]
    assert waited[0] == 0
    assert all(0 <= delay <= 0.1 for delay in waited)
    assert time.monotonic() - began >= sum(waited)


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_everybody_in_a_crowd_gets_a_turn(store: str, redis_server: RedisServer) -> None:
    """Tasks that wait at once are served in the order in which they came, an emission interval apart."""
    key, passed = uuid4().hex, []

    async def one(limiter: AsyncLimiter, number: int, began: float) -> None:
        delay = (await limiter.wait(key, "20/second burst 1", timeout=5)).delay
        waited = time.monotonic() - began
        assert max(delay, number * 0.05 - 0.005) <= waited < number * 0.05 + SLACK
        passed.append(number)

    async def crowd() -> None:
        async with AsyncLimiter("memory://" if store == "memory" else redis_server.url, timeout=5) as limiter:
            began = time.monotonic()
            await asyncio.gather(*[one(limiter, number, began) for number in range(6)])

    asyncio.run(crowd())
    assert passed == list(range(6))


def test_who_would_wait_too_long_is_refused_at_once(either: Subject) -> None:
    """A turn beyond the timeout is not booked; the wait told is until it could be."""
    either.hit("key", "1/minute")
    began = time.monotonic()
    refused = either.wait("key", "1/minute", timeout=20)
    assert (refused.allowed, refused.granted, refused.delay) == (False, 0, 0.0)
    assert refused.retry_after == pytest.approx(40, abs=1)
    assert either.peek("key", "1/minute").retry_after <= 60
    assert time.monotonic() - began < PATIENCE


def test_waiting_for_what_never_fits(either: Subject) -> None:
    """A cost above the burst is refused at once, however long one would wait."""
    assert either.wait("key", "5/second", cost=6, timeout=None).retry_after == math.inf


def test_a_timeout_of_nothing_is_a_hit(limiter: Subject) -> None:
    """With a timeout of 0 nothing is booked, so any algorithm will do."""
    assert limiter.wait("key", FIXED, timeout=0).allowed
    limiter.hit("key", "1/day")
    assert limiter.wait("key", "1/day", timeout=0).retry_after == 86400


def test_only_some_algorithms_book_turns(limiter: Subject) -> None:
    """Waiting by a limit that can't book turns is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=r"fixed_window.*can't book turns"):
        limiter.wait("key", FIXED, timeout=1)


@pytest.mark.parametrize("timeout", [-1, math.nan, "5 x", True, -math.inf])
def test_a_timeout_that_makes_no_sense(limiter: Subject, timeout: Any) -> None:
    """A timeout is seconds of at least 0, or None."""
    with pytest.raises((ValueError, TypeError), match="timeout"):
        limiter.wait("key", "1/day", timeout=timeout)


def test_a_lease_and_waiting(limiter: Subject, clock: Clock) -> None:
    """Where turns are booked nothing is taken in advance besides."""
    limiter.hit("key", Limit("10/second burst 2", lease=2), cost=2)
    assert limiter.wait("key", Limit("10/second burst 2", lease=2), timeout=1).delay == 0.1
    assert limiter.peek("key", "10/second burst 2").windows[0].used == 3


@pytest.mark.parametrize("timeout", [math.inf, 10**400, 1e300], ids=["inf", "int", "float"])
def test_a_timeout_beyond_anything(limiter: Subject, timeout: float) -> None:
    """Who would wait for ever may say so by a number."""
    assert limiter.wait("key", "10/second", timeout=timeout).allowed


@pytest.mark.parametrize("passes", range(4))
def test_a_wait_that_is_cancelled_while_it_books_takes_nothing(redis_server: RedisServer, passes: int) -> None:
    """Redis may have booked the turn by then, or still do so; it is given back all the same."""

    async def story() -> None:
        store = AsyncRedisStore(redis_server.url)
        limiter = AsyncLimiter(store, timeout=5, key_prefix=uuid4().hex)
        await limiter.peek("key", "1/day")
        waiting = asyncio.create_task(limiter.wait("key", "1/day", timeout=1))
        for _ in range(passes):
            await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
        assert (await limiter.peek("key", "1/day")).remaining == 1
        await store.aclose()

    asyncio.run(story())


def test_a_wait_that_is_cancelled_gives_its_turn_back() -> None:
    """Whoever comes after gets the turn; the one who left is not counted."""

    async def story() -> None:
        limiter = AsyncLimiter(MemoryStore(Clock()))
        await limiter.hit("key", "1/minute")
        waiting = asyncio.create_task(limiter.wait("key", "1/minute", timeout=None))
        await asyncio.sleep(0.01)
        assert (await limiter.peek("key", "1/minute")).retry_after == 120
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
        assert (await limiter.peek("key", "1/minute")).retry_after == 60

    asyncio.run(story())


def test_who_waits_behind_one_that_leaves_moves_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn in the middle of a line is taken by the next, and so on; the last one becomes free."""
    world = World(monkeypatch)

    async def story() -> list[float]:
        limiter, ends = AsyncLimiter(MemoryStore(world)), []

        async def one() -> None:
            await limiter.wait("key", "20/second burst 1")
            ends.append(world.now)

        waiting = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0.01)
        waiting[1].cancel()
        await asyncio.wait(waiting)
        assert (await limiter.peek("key", "20/second burst 1")).retry_after <= 0.05
        return ends

    assert world.run(story()) == pytest.approx([0, 0.05, 0.1], abs=0.001)


def test_a_wait_that_is_interrupted_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where a thread sleeps and a signal's handler raises."""
    limiter = Limiter(MemoryStore(Clock()))
    limiter.hit("key", "1/minute")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        limiter.wait("key", "1/minute", timeout=None)
    assert limiter.peek("key", "1/minute").retry_after == 60


def test_a_turn_cannot_be_given_back_to_a_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interruption is what the caller hears of, not the store's failure on top."""
    store = Watched()
    limiter = Limiter(store)
    limiter.hit("key", "1/minute")

    def interrupted(*_: object) -> None:
        store.fails = ("correct",)
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        limiter.wait("key", "1/minute", timeout=None)


def test_a_turn_that_became_too_late_while_the_store_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that asking took counts: a turn that is then beyond the timeout is given back and refused."""
    store = MemoryStore(Clock())
    limiter, spend = Limiter(store), store.spend
    limiter.hit("key", "1/second")

    def slow(plan: Any, timeout: float = 0) -> Any:
        if plan.verb == "spend":
            time.sleep(0.06)
        return spend(plan)

    monkeypatch.setattr(store, "spend", slow)
    refused = limiter.wait("key", "1/second", timeout=1.01)
    assert (refused.allowed, refused.granted, refused.delay, refused.retry_after) == (False, 0, 0.0, 1.0)
    assert limiter.peek("key", "1/second").retry_after == 1


def test_waiting_threads_keep_to_the_rate(redis_server: RedisServer) -> None:
    """Threads that wait pass at the rate, none before its turn and none much after."""
    with contextlib.closing(RedisStore(redis_server.url)) as store, ThreadPoolExecutor(10) as pool:
        limiter, key, ends, began = Limiter(store, timeout=5), uuid4().hex, [], time.monotonic()

        def one(_: int) -> None:
            limiter.wait(key, "50/second burst 1", timeout=5)
            ends.append(time.monotonic() - began)

        list(pool.map(one, range(21)))
    assert [number for number, end in enumerate(sorted(ends)) if not number * 0.02 - 0.005 <= end < number * 0.02 + SLACK] == []


# --- reserve ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ALGORITHMS, ids=repr)
@pytest.mark.parametrize(("cost", "left"), [(2, 8), (5, 5), (8, 2), (0, 10)])
def test_a_reservation_is_settled(either: Subject, limit: Any, cost: int, left: int) -> None:
    """It counts in full until the true cost is known, then as if that had been taken."""
    reservation = either.reserve("key", limit, cost=5)
    assert (reservation.decision.granted, either.peek("key", limit).remaining) == (5, 5)
    either.run(reservation.settle(cost))
    assert either.peek("key", limit).remaining == left


def test_a_reservation_is_cancelled(either: Subject) -> None:
    """What was reserved and not used is there again."""
    reservation = either.reserve("key", "10/minute", FIXED, cost=10)
    assert not either.hit("key", "10/minute").allowed
    either.run(reservation.cancel())
    assert either.peek("key", "10/minute", FIXED).remaining == 10


@pytest.mark.parametrize("first", ["settle", "cancel"])
@pytest.mark.parametrize("second", ["settle", "cancel"])
def test_a_reservation_ends_once(limiter: Subject, first: str, second: str) -> None:
    """Settling or cancelling again is an error, and changes nothing."""

    def end(how: str) -> Any:
        return limiter.run(reservation.settle(3) if how == "settle" else reservation.cancel())

    reservation = limiter.reserve("key", "10/minute", cost=5)
    end(first)
    left = limiter.peek("key", "10/minute").remaining
    with pytest.raises(RuntimeError, match="already"):
        end(second)
    assert limiter.peek("key", "10/minute").remaining == left


def test_a_refused_reservation_has_nothing_to_settle(limiter: Subject) -> None:
    """Where nothing was taken there is nothing to give back."""
    limiter.hit("key", "5/minute", cost=5)
    reservation = limiter.reserve("key", "5/minute")
    assert not reservation.decision.allowed
    with pytest.raises(RuntimeError, match="nothing was charged"):
        limiter.run(reservation.cancel())


@pytest.mark.parametrize(("cost", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_reservation_settles_for_a_cost(limiter: Subject, cost: Any, error: type[Exception]) -> None:
    """What is no cost is refused, and the reservation can still be settled."""
    reservation = limiter.reserve("key", "5/minute")
    with pytest.raises(error, match="cost"):
        limiter.run(reservation.settle(cost))
    limiter.run(reservation.cancel())
    assert limiter.peek("key", "5/minute").remaining == 5


# --- penalize, ban, pardon --------------------------------------------------------------------------------------------


def test_who_is_banned_is_refused_by_every_limit(either: Subject) -> None:
    """A banned key is refused, whatever its limits have left, for just as long as it was said; others are not."""
    banned = either.ban("key", 30)
    assert (banned.allowed, banned.remaining, banned.retry_after) == (False, 0, 30.0)
    for limits in (["10/minute"], ["10/minute", FIXED], [FIXED]):
        refused = either.hit("key", *limits)
        assert (refused.allowed, refused.remaining) == (False, 0)
        assert refused.retry_after == pytest.approx(30, abs=0.5)
    assert either.hit("other", "10/minute").allowed
    assert either.peek("key", "10/minute").windows[0].used == 0


def test_whether_a_key_is_banned(either: Subject) -> None:
    """Asking is no ban, and takes nothing; the answer says how long it lasts."""
    for _ in range(2):
        free = either.banned("key")
        assert (free.allowed, free.retry_after, free.granted) == (True, 0, 0)
        assert (free.remaining, free.limit) == (1, 1)
    either.ban("key", 30)
    for _ in range(2):
        banned = either.banned("key")
        assert (banned.allowed, banned.remaining) == (False, 0)
        assert banned.retry_after == pytest.approx(30, abs=0.5)
    either.pardon("key")
    assert either.banned("key").allowed


def test_a_ban_ends_to_the_microsecond(limiter: Subject, clock: Clock) -> None:
    """The wait that is told is just enough."""
    limiter.ban("key", 1.5)
    clock.advance(us=1_499_999)
    assert limiter.hit("key", "1/day").retry_after == 0.000001
    clock.advance(us=1)
    assert limiter.hit("key", "1/day").allowed
    assert len(limiter.peek("key", "1/day").windows) == 1


def test_penalties_add_up_and_bans_do_not(either: Subject) -> None:
    """A penalty makes the present ban longer, a ban sees to it that it lasts at least so long."""
    assert either.penalize("key", 10).retry_after == 10
    assert either.penalize("key", 10).retry_after == pytest.approx(20, abs=0.5)
    assert either.ban("key", 5).retry_after == pytest.approx(20, abs=0.5)
    assert either.ban("key", 50).retry_after == 50


def test_a_ban_for_ever_and_a_pardon(either: Subject) -> None:
    """Without seconds a ban has no end, until it is lifted; a reset of limits does not lift it."""
    assert either.ban("key").retry_after > 99 * 365 * 86400
    either.penalize("key", 99 * 365 * 86400)
    either.reset("key", "10/minute")
    assert not either.hit("key", "10/minute").allowed
    assert either.pardon("key") is None
    assert either.hit("key", "10/minute").remaining == 9
    either.pardon("nobody")


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 10**12])
@pytest.mark.parametrize("verb", ["ban", "penalize"])
def test_a_ban_of_no_sensible_length(limiter: Subject, verb: str, seconds: float) -> None:
    """A ban lasts for more than nothing and for at most a hundred years."""
    with pytest.raises(ValueError, match="seconds"):
        getattr(limiter, verb)("key", seconds)


def test_a_ban_is_seen_where_requests_are_taken_in_advance(on_redis: Subject) -> None:
    """A process that has a lease hears of a ban within the second for which it uses one."""
    limit = Limit("1000/day", lease=100)
    assert on_redis.hit("key", limit).allowed
    on_redis.ban("key", 60)
    deadline = time.monotonic() + PATIENCE
    while on_redis.hit("key", limit).allowed:
        assert time.monotonic() < deadline
    assert on_redis.hit("key", limit).retry_after == pytest.approx(58, abs=3)


def test_a_ban_takes_no_memory_where_there_is_none(redis_server: RedisServer, on_redis: Subject) -> None:
    """Asking about keys that are not banned leaves nothing behind but their buckets."""
    with redis_server.client() as client:
        prefix = on_redis._limiter._plans.key_prefix + ":"
        on_redis.hit("key", "10/day")
        assert len(list(client.scan_iter(f"{prefix}*"))) == 1
        on_redis.ban("key", 60)
        banned = [key for key in client.scan_iter(f"{prefix}*") if b"ban" in key]
        assert len(banned) == 1
        assert 59_000 < client.pttl(banned[0]) <= 60_002
        on_redis.pardon("key")
        assert len(list(client.scan_iter(f"{prefix}*"))) == 1


def test_bans_in_memory_leave_room(clock: Clock) -> None:
    """A store that keeps few buckets keeps them for what is owed."""
    store = MemoryStore(clock, max_buckets=3)
    limiter = Limiter(store)
    for key in "abc":
        limiter.hit(key, "1/day")
    assert len(store) == 3
    assert not any(limiter.hit(key, "1/day").allowed for key in "abc")


# --- limited ----------------------------------------------------------------------------------------------------------


def test_a_plain_function_is_limited() -> None:
    """Calls beyond the limit raise RateLimited with the decision; each key counts by itself."""
    limiter = Limiter(MemoryStore(Clock()))

    @limiter.limited("2/minute", key=lambda user, **_: user)
    def greet(user: str, *, word: str = "hello") -> str:
        """Greet."""
        return f"{word} {user}"

    assert [greet("ann"), greet("ann", word="hi"), greet("bob")] == ["hello ann", "hi ann", "hello bob"]
    with pytest.raises(RateLimited) as refused:
        greet("ann")
    assert refused.value.decision.retry_after == 30
    assert str(refused.value) == "rate limited, retry in 30 s"
    assert (greet.__name__, greet.__doc__) == ("greet", "Greet.")


def test_async_functions_are_none_of_a_plain_limiter() -> None:
    """It would block the event loop."""

    async def coroutine() -> None: ...

    async def generator() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="is async, expected a plain function, or an AsyncLimiter"):
        Limiter(MemoryStore()).limited("1/minute")(coroutine)
    for limiter in (Limiter, AsyncLimiter):
        with pytest.raises(TypeError, match="is a generator, expected a function whose work is done when it returns"):
            limiter(MemoryStore()).limited("1/minute")(generator)  # type: ignore[type-var]


def test_what_a_refused_call_says() -> None:
    """The error tells how long to wait, or that waiting is of no use."""
    limited = Limiter(MemoryStore(Clock())).limited("1/minute", cost=2)(lambda: None)
    with pytest.raises(RateLimited, match="rate limited, the cost never fits"):
        limited()


def test_an_async_function_is_limited() -> None:
    """The same for coroutines; without a key all calls of a function count together, each function by itself."""

    async def story() -> None:
        limiter = AsyncLimiter(MemoryStore(Clock()))

        @limiter.limited("1/minute")
        async def one() -> int:
            return 1

        @limiter.limited("1/minute", key="shared", cost=1)
        async def two() -> int:
            return 2

        assert [await one(), await two()] == [1, 2]
        for function in (one, two):
            with pytest.raises(RateLimited):
                await function()

    asyncio.run(story())


def test_what_is_no_function_with_a_name_is_told_at_the_decorator() -> None:
    limited, alimited = Limiter(MemoryStore()).limited, AsyncLimiter(MemoryStore()).limited
    with pytest.raises(TypeError, match="is a class, expected a function, such as one of its methods"):
        limited("1/minute")(dict)
    with pytest.raises(TypeError, match="cannot be called, expected a function"):
        limited("1/minute", key="k")("send")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no name to count by, expected key="):
        limited("1/minute")(partial(print, "hello"))
    with pytest.raises(TypeError, match="has no name to count by, expected key="):
        alimited("1/minute")(partial(asyncio.sleep, 0))
    limited("1/minute", key="hello")(partial(print, end=""))()


def test_a_limited_function_may_wait_for_its_turn() -> None:
    """With a timeout calls are spaced instead of refused."""
    limiter = Limiter(MemoryStore())

    @limiter.limited("20/second burst 1", timeout=1)
    def work() -> float:
        return time.monotonic()

    began = time.monotonic()
    *_, last = work(), work(), work()
    assert 0.099 < last - began < 0.1 + SLACK


def test_a_function_of_the_other_kind() -> None:
    """A limiter for async code limits async functions only, and the other way round."""

    async def coroutine() -> None: ...

    def function() -> None: ...

    with pytest.raises(TypeError, match="async"):
        Limiter("memory://").limited("1/day")(coroutine)
    with pytest.raises(TypeError, match="is not an async function"):
        AsyncLimiter("memory://").limited("1/day")(function)


@pytest.mark.parametrize(
    ("limits", "options"),
    [([], {}), (["often"], {}), (["1/day"], {"cost": -1}), (["1/day"], {"timeout": -1}), ([FIXED], {"timeout": 5})],
)
def test_a_mistake_in_a_decorator_shows_at_once(limits: list[Any], options: dict[str, Any]) -> None:
    """Not with the first call, but where it is written."""
    limiter = Limiter("memory://")
    for check in (limiter.limited, partial(limiter.validate, "key")):
        with pytest.raises((TypeError, ValueError, ConfigError)):
            check(*limits, **options)
    limiter.validate("key", "10/minute", "1/second", timeout=None)


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
@pytest.mark.parametrize("prefix", ["", None, 5, "x" * 65])
def test_a_prefix_that_no_gate_can_have(kind: type[Limiter | AsyncLimiter], prefix: Any) -> None:
    with pytest.raises(ConfigError, match=r"key_prefix is .*, expected text of 1 to 64 characters"):
        kind("memory://", key_prefix=prefix)
    assert kind("memory://", key_prefix="x" * 64)


def test_a_key_that_is_no_text() -> None:
    """A key function that gives something else than text is an error, not a bucket for everybody."""
    limited = Limiter("memory://").limited("1/day", key=lambda user: user)(lambda user: user)
    with pytest.raises(TypeError, match="expected text"):
        limited(5)


def test_a_refusal_goes_to_another_process() -> None:
    """As errors do that a pool of processes hands on: the decision is in it, not what it was worked out from."""
    with pytest.raises(RateLimited) as caught:
        Limiter(MemoryStore(Clock())).limited("1/minute", cost=2)(lambda: None)()
    error = RateLimited(caught.value.decision, response=object())
    there = pickle.loads(pickle.dumps(error))
    assert (str(there), there.response, there.decision.windows) == (str(error), None, error.decision.windows)
    assert there.decision == error.decision


# --- all of them ------------------------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Any], Any]] = {
    "refund": lambda limiter: limiter.refund("key", "1/day"),
    "hit_up_to": lambda limiter: limiter.hit_up_to("key", "1/day", cost=2),
    "wait": lambda limiter: limiter.wait("key", "1/day", timeout=1),
    "reserve": lambda limiter: limiter.reserve("key", "1/day"),
    "ban": lambda limiter: limiter.ban("key", 1),
    "penalize": lambda limiter: limiter.penalize("key", 1),
    "banned": lambda limiter: limiter.banned("key"),
    "pardon": lambda limiter: limiter.pardon("key"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_store_that_is_gone(verb: str, tmp_path: Any) -> None:
    """Where the store fails every verb raises a StoreError."""
    with contextlib.closing(RedisStore(f"unix://{tmp_path}/nothing")) as store, pytest.raises(StoreError):
        VERBS[verb](Limiter(store))


@given(
    st.lists(
        st.tuples(st.sampled_from(["hit", "refund", "reserve", "up to"]), st.integers(0, 12), st.integers(0, 12)), max_size=30
    )
)
def test_nothing_is_lost_or_made_property(steps: list[tuple[str, int, int]]) -> None:
    """While the clock stands still, what is left is the burst less what was granted, plus what was given back."""
    limiter, limits = Limiter(MemoryStore(Clock())), ("10/minute", FIXED)
    used = 0
    for verb, cost, other in steps:
        if verb == "refund":
            limiter.refund("key", *limits, cost=cost)
            used = max(0, used - cost)
        elif verb == "reserve":
            reservation = limiter.reserve("key", *limits, cost=cost)
            if reservation.decision.allowed:
                reservation.settle(other)
                used += other
        else:
            decision: Decision = (limiter.hit if verb == "hit" else limiter.hit_up_to)("key", *limits, cost=cost)
            used += decision.granted
        assert [window.used for window in limiter.peek("key", *limits).windows] == [used, used]


def test_threads_give_back_what_they_take(redis_server: RedisServer) -> None:
    """Reservations that are cancelled in many threads leave nothing behind."""
    with contextlib.closing(RedisStore(redis_server.url)) as store, ThreadPoolExecutor(8) as pool:
        limiter, key, passed = Limiter(store, timeout=5), uuid4().hex, threading.Event()

        def one(number: int) -> None:
            reservation = limiter.reserve(key, "10/day", FIXED, cost=number % 4)
            if reservation.decision.allowed:
                passed.set()
                reservation.cancel()

        list(pool.map(one, range(200)))
        assert passed.is_set()
        assert limiter.peek(key, "10/day", FIXED).remaining == 10


@pytest.mark.parametrize("limiter", [Limiter("memory://"), Limiter("redis://h"), AsyncLimiter("redis://h")])
def test_work_slots_and_paces_cannot_be_pickled(limiter: Any) -> None:
    """They belong to one process; the error says what to call in another one."""
    for name, made in {
        "adaptive": limiter.adaptive("db"),
        "adaptive of a priority": limiter.adaptive("db").with_priority("low"),
        "slot": limiter.slot("key", 2),
        "pace": limiter.pace([1], "5/s"),
    }.items():
        call = re.escape(f"limiter.{name.split()[0]}(...)")
        with pytest.raises(TypeError, match=f"{call} cannot be pickled: .*expected the call in each process"):
            pickle.dumps(made)
        if name == "slot":
            made.args[-1].is_entered = True
