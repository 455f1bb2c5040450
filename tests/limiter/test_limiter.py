"""Limiter and AsyncLimiter: the same engine without HTTP, driven alike."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Decision,
    Limit,
    Limiter,
    MemoryStore,
    RedisStore,
    StoreError,
)
from tests.support.clock import Clock
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer

SLACK = 3.0
"""Seconds that a busy machine may add to a deadline."""
Open = Callable[..., "Subject"]


class Subject:
    """A Limiter of either kind, called alike; its store is closed with it."""

    kind, store = Limiter, RedisStore

    def __init__(self, store: Any, **options: Any) -> None:
        self.limiter = self.kind(store, **options)

    def done(self, answer: Any) -> Any:
        return answer

    def hit(self, *arguments: Any, **options: Any) -> Decision:
        return self.done(self.limiter.hit(*arguments, **options))

    def peek(self, *arguments: Any, **options: Any) -> Decision:
        return self.done(self.limiter.peek(*arguments, **options))

    def reset(self, *arguments: Any, **options: Any) -> Decision:
        return self.done(self.limiter.reset(*arguments, **options))

    def close(self) -> None:
        self.limiter.close()

    def block(self, body: Callable[[], Any]) -> Any:
        """What the body returns, called inside the limiter as a context manager."""
        with self.limiter as entered:
            assert entered is self.limiter
            return body()


class AsyncSubject(Subject):
    kind, store = AsyncLimiter, AsyncRedisStore

    def __init__(self, store: Any, **options: Any) -> None:
        super().__init__(store, **options)
        self.runner = asyncio.Runner()

    def done(self, answer: Any) -> Any:
        return self.runner.run(answer)

    def close(self) -> None:
        self.done(self.limiter.aclose())
        self.runner.close()

    def block(self, body: Callable[[], Any]) -> Any:
        async def enter() -> Any:
            entered = await self.limiter.__aenter__()
            assert entered is self.limiter

        self.done(enter())
        try:
            return body()
        finally:
            self.done(self.limiter.__aexit__(None, None, None))


@pytest.fixture(params=[Subject, AsyncSubject], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Subject]:
    return request.param


@pytest.fixture
def open_limiter(kind: type[Subject]) -> Iterator[Open]:
    """Opens limiters of one kind, closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda store, **options: opened.enter_context(contextlib.closing(kind(store, **options)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(open_limiter: Open, clock: Clock) -> Subject:
    """A limiter of either kind on a memory store with the test's clock."""
    return open_limiter(MemoryStore(clock))


def visitors(server: RedisServer) -> int:
    """Connections to the server, but for the one that asks."""
    with server.client() as client:
        return len(client.client_list()) - 1


def left(server: RedisServer) -> bool:
    """Whether everybody leaves the server; it notices only after a moment."""
    deadline = time.monotonic() + PATIENCE
    while visitors(server):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- hit, peek, reset -------------------------------------------------------------------------------------------------


def test_hit_takes_until_nothing_is_left(limiter: Subject, clock: Clock) -> None:
    """Hits pass until the limit is spent, and again after the promised wait."""
    assert [limiter.hit("user:42", "2/second").allowed for _ in range(3)] == [True, True, False]
    clock.advance(limiter.peek("user:42", "2/second").retry_after)
    assert limiter.hit("user:42", "2/second").allowed


def test_every_field_of_an_admission(limiter: Subject) -> None:
    """An admitted hit shows the windows as they stand after it."""
    decision = limiter.hit("key", "10/second", "15/minute burst 12", cost=4)
    assert (decision.allowed, decision.granted, decision.retry_after) == (True, 4, 0)
    assert (decision.limit, decision.remaining, decision.reset_after) == (10, 6, 0.4)
    assert (decision.rule, decision.degraded, decision.shadow) == (None, False, False)
    fields = ("rule", "limit", "period", "remaining", "used", "reset_after", "retry_after")
    assert [tuple(getattr(window, name) for name in fields) for window in decision.windows] == [
        (None, 10, 1, 6, 4, 0.4, 0),
        (None, 12, 60, 8, 4, 16, 0),
    ]


def test_every_field_of_a_refusal(limiter: Subject) -> None:
    """A refused hit shows the windows as they stood, and the longest of the waits."""
    limiter.hit("key", "10/second", "15/minute burst 12", "100/day", cost=9)
    decision = limiter.hit("key", "10/second", "15/minute burst 12", "100/day", cost=8)
    assert (decision.allowed, decision.granted, decision.retry_after) == (False, 0, 20)
    assert (decision.limit, decision.remaining, decision.reset_after) == (10, 1, 0.9)
    assert [window.remaining for window in decision.windows] == [1, 3, 91]
    assert [window.used for window in decision.windows] == [9, 9, 9]
    assert [window.retry_after for window in decision.windows] == [0.7, 20, 0]


def test_a_cost_that_can_never_pass(limiter: Subject) -> None:
    """A cost above one window's burst waits for ever, whatever the others say."""
    decision = limiter.hit("key", "10/second", "15/minute burst 12", cost=11)
    assert (decision.allowed, decision.granted, decision.retry_after) == (False, 0, math.inf)
    assert [window.retry_after for window in decision.windows] == [math.inf, 0]


TIGHTEST = [
    # limits, cost: limit, remaining, reset_after
    (("10/second", "20/minute"), 3, (10, 7, 0.3)),
    (("20/minute", "10/second"), 3, (10, 7, 0.3)),
    (("10/second", "10/minute"), 3, (10, 7, 18)),
    (("10/minute", "10/second"), 3, (10, 7, 18)),
    (("10/minute", "10/second", "9/day burst 10"), 3, (10, 7, 28800)),
    (("10/second", "100/second burst 10"), 3, (10, 7, 0.3)),
    (("5/minute", "10/day burst 5", "4/second"), 4, (4, 0, 1)),
]


@pytest.mark.parametrize(("limits", "cost", "shown"), TIGHTEST)
def test_the_tightest_window_is_shown(limiter: Subject, limits: tuple[str, ...], cost: int, shown: tuple[float, ...]) -> None:
    """The window with the least remaining is shown, of equals the one that takes longest to be full."""
    decision = limiter.hit("key", *limits, cost=cost)
    assert (decision.limit, decision.remaining, decision.reset_after) == shown


def test_periods_are_told_in_seconds(limiter: Subject) -> None:
    """Each window says how long its period is, in whole seconds and in the order given."""
    decision = limiter.hit("key", "9/day", "1/second", "5 per 15 minutes", Limit("3/hour"))
    assert [window.period for window in decision.windows] == [86400, 1, 900, 3600]


def test_times_are_rounded_up_to_the_microsecond(limiter: Subject, clock: Clock) -> None:
    """A promised time is never too short, by not even a microsecond."""
    limiter.hit("key", "3/second", cost=3)
    decision = limiter.hit("key", "3/second")
    assert (decision.retry_after, decision.reset_after) == (0.333_334, 1)
    clock.advance(us=333_333)
    assert limiter.peek("key", "3/second").retry_after == 0.000_001


def test_peek_answers_what_hit_would(limiter: Subject) -> None:
    """A peek gives the answer of the hit that follows it, shows the bucket before it, and charges nothing."""
    for cost in (3, 4, 11, 3, 0, 1):
        peeked, again = [limiter.peek("key", "6/second", "10/minute", cost=cost) for _ in range(2)]
        assert peeked == again
        hit = limiter.hit("key", "6/second", "10/minute", cost=cost)
        assert (peeked.allowed, peeked.retry_after) == (hit.allowed, hit.retry_after)
        assert peeked.granted == 0
        assert peeked.remaining == hit.remaining + hit.granted


def test_reset_fills_the_buckets_named(limiter: Subject) -> None:
    """A reset fills the limits that it names, answers with the state after it, and leaves the rest."""
    limiter.hit("key", "5/second", "7/minute", cost=5)
    limiter.hit("other", "5/second", cost=5)
    decision = limiter.reset("key", "5/second")
    assert (decision.allowed, decision.remaining, decision.reset_after, decision.granted) == (True, 5, 0, 0)
    assert [window.used for window in limiter.peek("key", "5/second", "7/minute").windows] == [0, 5]
    assert limiter.peek("other", "5/second").remaining == 0


def test_a_reset_of_nothing_is_no_error(limiter: Subject) -> None:
    """A key never seen can be reset."""
    assert limiter.reset("nobody", "5/second").remaining == 5


def test_a_cost_of_nothing(limiter: Subject) -> None:
    """Cost 0 always passes and charges nothing."""
    limiter.hit("key", "1/day")
    decision = limiter.hit("key", "1/day", cost=0)
    assert (decision.allowed, decision.granted, decision.remaining, decision.retry_after) == (True, 0, 0, 0)


def test_a_decision_cannot_be_changed(limiter: Subject) -> None:
    """A decision and its windows are immutable."""
    decision = limiter.hit("key", "5/second")
    for part, name in ((decision, "allowed"), (decision, "windows"), (decision.windows[0], "remaining")):
        with pytest.raises((AttributeError, TypeError)):  # the latter is what slotted dataclasses raise for no field
            setattr(part, name, None)


@pytest.mark.parametrize("key", ["", " ", "a" * 100_000, "schlüssel\x00\n", "\ud800", "user:42 user:43"])
def test_any_text_is_a_key(limiter: Subject, key: str) -> None:
    """Every text is a key of its own, however odd."""
    limiter.hit(key, "2/day")
    assert limiter.peek(key, "2/day").remaining == 1
    assert limiter.peek(key + " ", "2/day").remaining == limiter.peek(key.upper() + "!", "2/day").remaining == 2


# --- mistakes ---------------------------------------------------------------------------------------------------------

COSTS = [(1.0, TypeError), ("1", TypeError), (None, TypeError), (True, TypeError), (-1, ValueError), (-(10**30), ValueError)]


@pytest.mark.parametrize("verb", ["hit", "peek"])
@pytest.mark.parametrize(("cost", "error"), COSTS, ids=str)
def test_a_bad_cost_is_refused(limiter: Subject, verb: str, cost: Any, error: type[Exception]) -> None:
    """A cost that is no integer is a TypeError, a negative one a ValueError; nothing is charged."""
    with pytest.raises(error, match="cost"):
        getattr(limiter, verb)("key", "5/day", cost=cost)
    assert limiter.peek("key", "5/day").remaining == 5


@pytest.mark.parametrize("verb", ["hit", "peek", "reset"])
def test_no_limits_is_a_type_error(limiter: Subject, verb: str) -> None:
    """A call that names no limit is a mistake, not a free pass."""
    with pytest.raises(TypeError, match="limit"):
        getattr(limiter, verb)("key")


@pytest.mark.parametrize("verb", ["hit", "peek", "reset"])
@pytest.mark.parametrize("limit", ["5/fortnight", "-1/second", "", "1000001/second", 5, None, ["5/day"]], ids=str)
def test_a_bad_limit_is_a_config_error(limiter: Subject, verb: str, limit: Any) -> None:
    """A limit that cannot be read is a ConfigError, and the good ones beside it are not charged."""
    with pytest.raises(ConfigError, match="expected"):
        getattr(limiter, verb)("key", "5/day", limit)
    assert limiter.peek("key", "5/day").remaining == 5


@pytest.mark.parametrize("key", [b"bytes", 42, None, ("a", "b")], ids=str)
def test_a_key_is_text(limiter: Subject, key: Any) -> None:
    """A key that is no text is a TypeError."""
    with pytest.raises(TypeError, match="key"):
        limiter.hit(key, "5/day")


@pytest.mark.parametrize("store", ["", "http://localhost", "memory://here", None, 5, object()], ids=lambda it: str(it)[:16])
def test_a_bad_store_is_a_config_error(kind: type[Subject], store: Any) -> None:
    """What is neither a store nor the URL of one is refused at once."""
    with pytest.raises(ConfigError, match="store"):
        kind.kind(store)


def test_a_store_of_the_other_kind_is_a_config_error() -> None:
    """A sync limiter refuses an async store, and the other way round, before any call."""
    with pytest.raises(ConfigError, match="store"):
        Limiter(AsyncRedisStore("redis://localhost"))
    with pytest.raises(ConfigError, match="store"):
        AsyncLimiter(RedisStore("redis://localhost"))


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_is_positive(kind: type[Subject], timeout: float) -> None:
    """A limiter that may not wait at all could never ask its store."""
    with pytest.raises(ValueError, match="timeout"):
        kind.kind("memory://", timeout=timeout)


# --- the store --------------------------------------------------------------------------------------------------------


def test_the_memory_store_needs_no_server(open_limiter: Open) -> None:
    """A limiter on memory:// limits in this process; another one has buckets of its own."""
    first, second = open_limiter("memory://"), open_limiter("memory://")
    assert [first.hit("key", "1/day").allowed for _ in range(2)] == [True, False]
    assert second.hit("key", "1/day").allowed


def test_limiters_on_one_redis_share_their_buckets(redis_server: RedisServer) -> None:
    """Sync and async limiters of one prefix share buckets, those of another prefix do not."""
    key, url = uuid4().hex, redis_server.url
    with contextlib.closing(Subject(url)) as one, contextlib.closing(AsyncSubject(url, timeout=5)) as two:
        assert [each.hit(key, "3/day").remaining for each in (one, two, one)] == [2, 1, 0]
        assert not two.hit(key, "3/day").allowed
    with contextlib.closing(Subject(url, key_prefix="elsewhere", timeout=5)) as three:
        assert three.hit(key, "3/day").remaining == 2


def test_no_key_can_be_read_in_redis(own_redis: RedisServer, open_limiter: Open) -> None:
    """Neither the names nor the values in Redis hold any part of a key in readable form."""
    limiter = open_limiter(own_redis.url, timeout=5, key_prefix="ours")
    secret = "api-key-0123456789-of-alice@example.com"
    for key in (secret, secret.upper(), f"user:{secret}", "192.0.2.77"):
        limiter.hit(key, "10/day", "100/day")
    with own_redis.client() as client:
        names = list(client.scan_iter())
        stored = b"\0".join([*names, *[client.get(name) for name in names]]).lower()
    assert len(names) == 4
    assert all(name.startswith(b"ours:") for name in names)
    pieces = {text.encode()[start : start + 6] for text in (secret, "192.0.2.77") for start in range(len(text) - 5)}
    assert not [piece for piece in pieces if piece in stored]


def test_a_limiter_closes_the_store_that_it_opened(kind: type[Subject], own_redis: RedisServer) -> None:
    """A limiter made from a URL lets go of its connections at the end of its block, and can be used again."""
    subject = kind(own_redis.url, timeout=5)
    for remaining in (4, 3):
        assert subject.block(lambda: subject.hit("key", "5/day").remaining) == remaining
        assert left(own_redis)
    subject.close()
    gc.collect()


def test_a_block_that_fails_still_closes(kind: type[Subject], own_redis: RedisServer) -> None:
    """An error inside the block passes through, and the store is closed all the same."""
    subject = kind(own_redis.url, timeout=5)

    def body() -> None:
        subject.hit("key", "5/day")
        raise LookupError

    with pytest.raises(LookupError):
        subject.block(body)
    assert left(own_redis)
    subject.close()


def test_a_limiter_leaves_a_given_store_open(kind: type[Subject], own_redis: RedisServer) -> None:
    """A store that was handed in belongs to whoever made it."""
    store = kind.store(own_redis.url)
    subject = kind(store, timeout=5)
    subject.block(lambda: subject.hit("key", "5/day"))
    assert visitors(own_redis) == 1
    closed = store.aclose() if isinstance(store, AsyncRedisStore) else store.close()
    if closed is not None:
        subject.done(closed)
    assert left(own_redis)
    subject.close()


def test_the_context_managers_read_as_such(redis_server: RedisServer) -> None:
    """Both kinds work in their own form of the with statement."""
    key = uuid4().hex

    async def hit() -> Decision:
        async with AsyncLimiter(redis_server.url, timeout=5) as limiter:
            return await limiter.hit(key, "5/day")

    with Limiter(redis_server.url, timeout=5) as limiter:
        assert limiter.hit(key, "5/day").remaining == 4
    assert asyncio.run(hit()).remaining == 3


@pytest.mark.parametrize("verb", ["hit", "peek", "reset"])
def test_a_store_that_is_gone_is_a_store_error(open_limiter: Open, verb: str) -> None:
    """Where nobody listens, every call is a StoreError, at once."""
    limiter = open_limiter("unix:///nonexistent/redis.sock", timeout=PATIENCE)
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        getattr(limiter, verb)("key", "5/day")
    assert caught.value.fault == "connection"
    assert not isinstance(caught.value, redis.RedisError)
    assert time.monotonic() - start < PATIENCE / 2


@pytest.mark.parametrize("timeout", [None, 0.3])
def test_a_store_that_is_silent_costs_the_timeout(
    open_limiter: Open, own_redis: RedisServer, default_timeout: None, timeout: float | None
) -> None:
    """Where the store does not answer, a call is a StoreError within its timeout, 0.1 s unless told."""
    limiter = open_limiter(own_redis.url, **{"timeout": timeout} if timeout else {})
    with own_redis.client() as client:
        client.execute_command("CLIENT", "PAUSE", "20000", "ALL")
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        limiter.hit("key", "5/day")
    assert caught.value.fault == "timeout"
    assert (timeout or 0.1) - 0.01 <= time.monotonic() - start < (timeout or 0.1) + SLACK


def test_mistakes_are_found_before_the_store_is_asked(open_limiter: Open) -> None:
    """A mistake in the call is told even where the store is gone."""
    limiter = open_limiter("unix:///nonexistent/redis.sock")
    with pytest.raises(ConfigError):
        limiter.hit("key", "5/fortnight")
    with pytest.raises(TypeError):
        limiter.hit("key")
    with pytest.raises(ValueError, match="cost"):
        limiter.hit("key", "5/day", cost=-1)
