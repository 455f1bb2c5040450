"""The limiters, the stores and the decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import assert_type

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Configured,
    Decision,
    Limit,
    Limiter,
    LimitGateError,
    MemoryStore,
    RateLimited,
    RedisStore,
    Rule,
    StoreError,
    Window,
    ausage,
    open_store,
    open_sync_store,
    usage,
)


async def one_client(limiter: AsyncLimiter, of_threads: Limiter, rule: Rule) -> None:
    """Buckets of rules, and what is left of them."""
    bucket = limiter.bucket(rule, ip="192.0.2.1", headers={"x-tenant": "a"}, path="/items/{id}")
    assert_type(await bucket.peek(), Decision)
    assert_type(await bucket.ban(3600), Decision)
    assert_type(of_threads.bucket(rule, caller="ann", user=object(), api_key=None).pardon(), Decision)
    assert_type(usage({}, "api", path="/items/{id}"), tuple[Window, ...])
    assert_type(await ausage({}, "api"), tuple[Window, ...])
    limiter.bucket(rule, adress="192.0.2.1")  # type: ignore[call-arg]
    limiter.bucket("api", ip="192.0.2.1")  # type: ignore[arg-type]


async def on_asyncio(limiter: AsyncLimiter) -> None:
    """An `AsyncLimiter` has to be awaited."""
    async with AsyncLimiter("redis://localhost:6379/0", timeout=0.5, key_prefix="shop") as opened:
        assert_type(opened, AsyncLimiter)
    assert_type(await limiter.hit("user:42", "10/second", Limit("1000/day"), cost=2), Decision)
    assert_type(await limiter.peek("user:42", "10/second", cost=2), Decision)
    assert_type(await limiter.reset("user:42", "10/second"), Decision)
    await limiter.aclose()
    limiter.hit("user:42", "10/second").allowed  # type: ignore[attr-defined] # noqa: B018
    await limiter.hit(42, "10/second")  # type: ignore[arg-type]
    await limiter.hit("user:42", 10)  # type: ignore[arg-type]
    await limiter.hit("user:42", "10/second", cost="2")  # type: ignore[arg-type]


def under_threads(limiter: Limiter) -> None:
    """A `Limiter` has not."""
    with Limiter("memory://") as opened:
        assert_type(opened, Limiter)
    assert_type(limiter.hit("user:42", "10/second", Limit("1000/day"), cost=2), Decision)
    assert_type(limiter.peek("user:42", "10/second"), Decision)
    assert_type(limiter.reset("user:42", "10/second"), Decision)
    limiter.close()
    limiter.hit("user:42", "10/second", costs=2)  # type: ignore[call-arg]


async def functions(limiter: AsyncLimiter, blocking: Limiter) -> None:
    """A limited function is what it was: an async one makes coroutines, of which one can make tasks."""

    @limiter.limited("10/second", key=lambda user: user)
    async def fetch(user: str, pages: int = 1) -> int:
        return len(user) * pages

    @blocking.limited("10/second")
    def read(user: str) -> bytes:
        return user.encode()

    assert_type(await fetch("42", pages=2), int)
    assert_type(await asyncio.create_task(fetch("42")), int)
    assert_type(read("42"), bytes)
    await fetch(42)  # type: ignore[arg-type]
    read("42", 1)  # type: ignore[call-arg]


async def paces(limiter: AsyncLimiter, blocking: Limiter, pages: Iterable[str], lines: AsyncIterable[bytes]) -> None:
    """What is paced has the type of what the source gives, and so has what the callable for its cost takes."""
    assert_type(limiter.pace(pages, "10/second"), AsyncIterator[str])
    assert_type(limiter.pace(lines, "10/second", Limit("1000/day"), key="lines", cost=len, even=False), AsyncIterator[bytes])
    assert_type(limiter.pace([1, 2], Configured("orders"), even=False, cost=lambda number: number + 1), AsyncIterator[int])
    assert_type(blocking.pace(pages, "10/second", cost=2), Iterator[str])
    assert_type([page async for page in limiter.pace(pages, "10/second")], list[str])
    assert_type(list(blocking.pace(pages, "10/second", cost=len)), list[str])
    blocking.pace(lines, "10/second")  # type: ignore[arg-type]
    limiter.pace(pages, 10)  # type: ignore[arg-type]
    limiter.pace(pages, "10/second", cost="2")  # type: ignore[arg-type]


async def adaptive(limiter: AsyncLimiter, blocking: Limiter) -> None:
    """Work is a context manager and a decorator, which leaves a function what it was."""
    async with limiter.adaptive("db", min=4, max=50, tolerance=1.5, delay="5ms", max_delay=0.05, reserve="20%") as decision:
        assert_type(decision, Decision)
    with blocking.adaptive("db").with_priority("low") as decision:
        assert_type(decision, Decision)

    @limiter.adaptive("db").with_priority("high")
    async def fetch(user: str, pages: int = 1) -> int:
        return len(user) * pages

    @blocking.adaptive("db")
    def read(user: str) -> bytes:
        return user.encode()

    assert_type(await asyncio.create_task(fetch("42", pages=2)), int)
    assert_type(read("42"), bytes)
    assert_type((limiter.adaptive("db").limit, limiter.adaptive("db").in_flight), tuple[int, int])
    await fetch(42)  # type: ignore[arg-type]
    read("42", 1)  # type: ignore[call-arg]
    limiter.adaptive("db", minimum=4)  # type: ignore[call-arg]
    limiter.adaptive("db", min="4")  # type: ignore[arg-type]
    limiter.adaptive("db").with_priority("urgent")  # type: ignore[arg-type]
    limiter.adaptive("db")(read)  # type: ignore[arg-type]


def stores() -> None:
    """Stores for asyncio and stores for threads are not mistaken for each other; the one in memory is both."""
    memory = MemoryStore(clock=lambda: 1_000_000, max_buckets=1000)
    AsyncLimiter(memory)
    Limiter(memory)
    AsyncLimiter(open_store("redis://localhost:6379/0"))
    Limiter(open_sync_store("redis://localhost:6379/0"))
    AsyncLimiter(AsyncRedisStore("redis://localhost:6379/0"))
    Limiter(RedisStore("redis://localhost:6379/0", local_refusals=False))
    AsyncLimiter(RedisStore("redis://localhost:6379/0"))  # type: ignore[arg-type]
    Limiter(AsyncRedisStore("redis://localhost:6379/0"))  # type: ignore[arg-type]
    Limiter(open_store("memory://"))  # type: ignore[arg-type]
    MemoryStore(clock=lambda: "now")  # type: ignore[arg-type,return-value]


def decisions(decision: Decision) -> None:
    """A decision's fields, and that nobody changes them."""
    assert_type(decision.allowed, bool)
    assert_type(decision.limit, int)
    assert_type(decision.remaining, int)
    assert_type(decision.retry_after, float)
    assert_type(decision.reset_after, float)
    assert_type(decision.granted, int)
    assert_type(decision.rule, str | None)
    assert_type(decision.degraded, bool)
    assert_type(decision.shadow, bool)
    assert_type(decision.windows, tuple[Window, ...])
    window = decision.windows[0]
    assert_type((window.rule, window.limit, window.period), tuple[str | None, int, int])
    assert_type((window.remaining, window.used), tuple[int, int])
    assert_type((window.reset_after, window.retry_after), tuple[float, float])
    decision.settle(5)
    decision.settle(5, rule="tokens")
    decision.settle("5")  # type: ignore[arg-type]
    decision.allowed = True  # type: ignore[misc]
    decision.left  # type: ignore[attr-defined] # noqa: B018


def errors(limited: RateLimited, store: StoreError) -> list[LimitGateError]:
    """All errors have one base; what a mistake is, `ValueError` catches too."""
    assert_type(limited.decision, Decision)
    assert_type(store.fault == "oom", bool)
    mistake: ValueError = ConfigError("a mistake")
    assert mistake
    return [limited, store, ConfigError("a mistake")]
