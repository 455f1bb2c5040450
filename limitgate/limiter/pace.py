"""Iterators of `AsyncLimiter.pace` and `Limiter.pace`. They keep an item whose wait fails."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from functools import lru_cache
from threading import RLock
from typing import Any, Generic, Self, TypeVar, cast

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.errors import ConfigError, check_switches
from limitgate.limiter.plans import Configured
from limitgate.limits.decision import Decision, RateLimited
from limitgate.limits.limit import Limit, as_limit
from limitgate.limits.plan import check_cost
from limitgate.process.clock import asyncio_loop
from limitgate.process.forking import Unpicklable

T = TypeVar("T")

GRAIN = 100
"""Steps per second: a burst is what passes in 10 ms, because timers resolve about 1 ms."""

_NONE: Any = object()


class Spacing(Generic[T]):
    def __init__(self, limits: tuple[Limit | str | Configured, ...], cost: int | Callable[[T], int], *, even: bool) -> None:
        self._limits = tuple([each if isinstance(each, Configured) else as_limit(each) for each in limits])
        self._cost = cost if callable(cost) else check_cost(cost)
        check_switches(even=even)
        self._even = even
        for limit in self._limits:
            _check(limit, even=even)

    def of(self, item: T) -> tuple[tuple[Limit | Configured, ...], int]:
        try:
            cost = check_cost(self._cost(item)) if callable(self._cost) else self._cost
        except (StopIteration, StopAsyncIteration) as error:
            raise RuntimeError("the cost of an item raised StopIteration, expected an integer") from error
        if not self._even:
            return self._limits, cost
        return tuple([each if isinstance(each, Configured) else evenly(each, cost) for each in self._limits]), cost


def _check(limit: Limit | Configured, *, even: bool) -> None:
    if isinstance(limit, Configured):
        if even:
            raise ConfigError(f"{limit!r} may contain limits that cannot be spaced evenly, expected even=False")
    elif not limit.count:
        return  # Nothing ever passes, so there is nothing to space.
    elif not ALGORITHMS[limit.algorithm].CAN_WAIT:
        raise ConfigError(f"{limit!r} can't book turns, expected a limit of gcra, sliding_log or warm_up")
    elif even and ALGORITHMS[limit.algorithm] is not gcra:
        raise ConfigError(f"{limit!r} cannot be spaced evenly, expected even=False")


@lru_cache(maxsize=4096)
def evenly(limit: Limit, cost: int) -> Limit:
    """Return a limit whose burst lasts 10 ms, but is at least 1 and ``cost``, and at most the original burst."""
    return limit.less(max(0, limit.burst - max(1, limit.count // (limit.period * GRAIN), cost)))


def has_passed(decision: Decision) -> None:
    """Raise `RateLimited` if waiting can't help."""
    if not decision.allowed:
        raise RateLimited(decision)


class AsyncPace(Unpicklable, Generic[T]):
    """An iterator that tasks of one event loop can share."""

    made_by = "limiter.pace(...)"

    def __init__(
        self, source: Iterable[T] | AsyncIterable[T], wait: Callable[..., Awaitable[Decision]], spacing: Spacing[T]
    ) -> None:
        """Create the iterator. ``wait`` is a limiter's method for one key."""
        self._is_async = isinstance(source, AsyncIterable)
        self._source: Any = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
        self._wait = wait
        self._spacing = spacing
        self._kept: deque[T] = deque()
        self._is_over = False
        self._reading = asyncio.Lock()
        self._reader: asyncio.Task[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        asyncio_loop("pace")
        item = await self._item()
        try:
            limits, cost = self._spacing.of(item)
            has_passed(await self._wait(*limits, cost=cost))
        except BaseException:
            self._kept.append(item)
            raise
        return item

    async def _item(self) -> T:
        if not self._kept:
            if self._reading.locked() and self._reader is asyncio.current_task():
                raise RuntimeError("the source reads from the iterator that reads it, expected a source that does not")
            async with self._reading:
                if not self._kept:  # Another task may have failed and kept its item.
                    self._reader = asyncio.current_task()
                    await self._read()
        if not self._kept:
            raise StopAsyncIteration
        return self._kept.popleft()

    async def _read(self) -> None:
        if not self._is_over:
            try:
                self._kept.append(await anext(self._source) if self._is_async else next(self._source))
            except (StopAsyncIteration, StopIteration):
                self._is_over = True


class Pace(Unpicklable, Generic[T]):
    """An iterator that threads can share."""

    made_by = "limiter.pace(...)"

    def __init__(self, source: Iterable[T], wait: Callable[..., Decision], spacing: Spacing[T]) -> None:
        """Create the iterator. ``wait`` is a limiter's method for one key."""
        self._source = iter(source)
        self._wait = wait
        self._spacing = spacing
        self._kept: deque[T] = deque()
        self._is_over = False
        self._reading = RLock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item = self._item()
        try:
            limits, cost = self._spacing.of(item)
            has_passed(self._wait(*limits, cost=cost))
        except BaseException:
            self._kept.append(item)
            raise
        return item

    def _item(self) -> T:
        found = self._from_kept()
        if found is _NONE:
            with self._reading:
                found = self._from_kept()  # Another thread may have failed and kept its item.
                if found is _NONE:
                    found = self._read()
        if found is _NONE:
            raise StopIteration
        return cast("T", found)

    def _from_kept(self) -> Any:
        try:
            return self._kept.popleft()
        except IndexError:
            return _NONE

    def _read(self) -> Any:
        """Read an item. After the end of the source, return an item whose wait failed in another thread."""
        if not self._is_over:
            try:
                return next(self._source)
            except StopIteration:
                self._is_over = True
        return self._from_kept()
