"""For tests of applications with limits: `off`, `frozen` and `reset`, which apply to all objects in the process.

`off` and `frozen` set `limitgate.process.switch`. `frozen` replaces clocks, and replaces Redis by memory.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from threading import Event, RLock, local
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from limitgate.algorithms import holds
from limitgate.errors import called_as
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.limit import Duration, as_seconds
from limitgate.limits.plan import BucketReading, Plan, Reading
from limitgate.messages.text import lacking
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.process import switch, waiting
from limitgate.process.forking import living
from limitgate.stores import AsyncRedisStore, MemoryStore, RedisStore
from limitgate.stores.base import ConfigRequest, FleetRequest, StoredConfig, StoredFleet
from limitgate.stores.memory import system_clock
from limitgate.stores.redis.url import StoreUrl

__all__ = ["FrozenClock", "frozen", "off", "reset"]

T = TypeVar("T")

_SECOND = 1_000_000
_LATEST = 2**33
"""Unix seconds (the year 2242)."""
_CLOCK = "_clock"
_REPLACED = ("monotonic", "require_running_clock", "sleep", "asleep", "sleep_until", "call_at")
"""Functions that a `FrozenClock` replaces."""
_ASK_REDIS = (
    *[(RedisStore, name) for name in ("spend", "config", "fleet")],
    *[(AsyncRedisStore, name) for name in ("aspend", "aconfig", "afleet")],
)
"""Methods of stores that send to Redis."""


@called_as("a with block, with off():, or the fixture limitgate_off of pytest")
def off() -> AbstractContextManager[None]:
    """Disable all limits in a ``with`` block. Stores are not used.

    Requests pass as if exempt: the decision is None, and there are no rate headers. Limiters admit everything; ``ban`` and
    ``configure`` have no effect. Outbound clients send at once. Running requests keep their decision. Blocks can be nested.
    """
    return _Block(_OFF, lambda: None)


def frozen(at: float | datetime | None = None) -> AbstractContextManager[FrozenClock]:
    """Stop the clock of all stores in a ``with`` block, which receives a `FrozenClock`.

    ``at`` is Unix time in seconds, or a datetime (UTC unless it has a zone); None for now. A wait takes no time and advances
    the clock. Redis is replaced by memory, empty at first and shared by URL. If blocks are nested, the clock of the inner block
    applies.
    """
    return _Block(_FROZEN, lambda: FrozenClock(at))


def reset() -> None:
    """Remove all buckets and bans from memory stores. Doesn't remove named configurations, or data in Redis.

    Outbound clients and adaptive limits forget what they have learned, and requests in flight.
    """
    for store in living(MemoryStore):
        store.forget()
    for guard in living(CardinalityGuard):
        guard.forget()
    for places in living(ConcurrencyLimiter):
        places.forget()
    outbound = sys.modules.get("limitgate.outbound.throttle")  # without this module there is no client
    for throttle in list(outbound.throttles) if outbound else ():
        throttle.forget()


@lacking("the clock", dict.fromkeys(("move_to", "shift", "tick"), "clock.advance(seconds)"))
class FrozenClock:
    """A clock that advances only on request. Returns Unix time in integer µs, as for `MemoryStore`."""

    def __init__(self, at: float | datetime | None = None) -> None:
        self._now = self._began = _unix_us(at)
        self._monotonic = self._reached = waiting.monotonic()
        self._lock = RLock()
        self._ahead = local()
        """``now`` of the thread that advances the clock."""

    def __call__(self) -> int:
        """Unix µs."""
        now: int = getattr(self._ahead, "now", self._now)
        return now

    def __repr__(self) -> str:
        return f"FrozenClock({self.now!r})"

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self._now / _SECOND

    def advance(self, seconds: Duration) -> None:
        """Advance by seconds, or by text such as ``"2m"``, rounded up to a microsecond. Slots in flight are renewed.

        Raises `ValueError` for less than 0.
        """
        seconds = as_seconds(seconds, "seconds")
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds is {seconds!r:.40}, expected a number of at least 0")
        with self._lock:
            self._go_on_to(self._now + _rounded_up(seconds))

    def monotonic(self) -> float:
        """`time.monotonic` by this clock."""
        return max(self._reached, self._monotonic + (self._now - self._began) / _SECOND)

    def require_running_clock(self) -> None:
        """Do nothing, because a wait advances this clock."""

    def sleep(self, seconds: float, wake: Event | None = None) -> None:
        """Advance, unless another thread has set ``wake``."""
        if wake is not None and wake.is_set():
            return
        self.sleep_until(self.monotonic() + seconds)

    async def asleep(self, seconds: float) -> None:
        """Yield to other tasks and advance."""
        due_at = self.monotonic() + seconds
        await asyncio.sleep(0)
        self.sleep_until(due_at)

    def sleep_until(self, due_at: float) -> None:
        """Advance to a `monotonic` time, unless it is past."""
        with self._lock:
            self._go_on_to(self._began + _rounded_up(due_at - self._monotonic))
            self._reached = max(self._reached, due_at)  # independent of rounding

    def call_at(self, loop: asyncio.AbstractEventLoop, due_at: float, callback: Callable[[], None]) -> asyncio.Handle:
        """Yield, advance to a `monotonic` time, and call back."""

        def call() -> None:
            self.sleep_until(due_at)
            callback()

        return loop.call_soon(call)

    def _go_on_to(self, due: int) -> None:
        if due <= self._now:
            return
        # Slots are renewed before other threads see the new time, else one of them could take an expired slot.
        self._ahead.now = due
        try:
            for keeper in living(SlotKeeper):
                charges = keeper.held
                store = _in_memory(keeper.store) if charges else None
                if store is not None:
                    store.spend(Plan.adjust([charge.renewed() for charge in charges]))
            self._now = due
        finally:
            del self._ahead.now


def _rounded_up(seconds: float) -> int:
    return math.ceil(seconds * _SECOND - 0.01)


def _unix_us(at: float | datetime | None) -> int:
    if at is None:
        return (_FROZEN.latest or system_clock)()
    if isinstance(at, datetime):
        at = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < _LATEST:
        raise ValueError(f"at is {at!r:.80}, expected Unix time in seconds, a datetime or None")
    return round(at * _SECOND)


class _Switch(Generic[T]):
    """The values of open blocks, the latest last. Each change calls ``apply``."""

    def __init__(self, apply: Callable[[Sequence[T]], None]) -> None:
        self._open: list[T] = []
        self._apply = apply

    @property
    def latest(self) -> T | None:
        return self._open[-1] if self._open else None

    def begin(self, value: T) -> None:
        with _lock:
            self._open.append(value)
            self._apply(self._open)

    def end(self, value: T) -> None:
        with _lock:
            del self._open[next(place for place, each in enumerate(self._open) if each is value)]
            self._apply(self._open)


class _Block(AbstractContextManager[T]):
    """A reusable block: each entry makes a new value."""

    def __init__(self, switch: _Switch[T], make: Callable[[], T]) -> None:
        self._switch = switch
        self._make = make
        self._entered: list[T] = []

    def __enter__(self) -> T:
        value = self._make()
        self._entered.append(value)
        self._switch.begin(value)
        return value

    def __call__(self, *_: object) -> NoReturn:
        """Raise `TypeError`, because a decorator would end before an async function runs."""
        raise TypeError("off() and frozen() are not decorators, expected a with block, or the fixtures of pytest")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._switch.end(self._entered.pop())


class _SameForAll:
    """An attribute that overrides those of instances."""

    def __init__(self, name: str, value: object) -> None:
        self._name = name
        self._value = value

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self._value

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self._name] = value


class _StandIn(MemoryStore):
    """Replaces a Redis store. Calls use the clock of the open block."""

    def __init__(self, clock: FrozenClock) -> None:
        self.clock_of_block = clock
        super().__init__()

    @property
    def _clock(self) -> FrozenClock:
        return self.clock_of_block

    @_clock.setter
    def _clock(self, _: object) -> None:
        """Ignore the clock of other memory stores."""


def _set_clock(clocks: Sequence[FrozenClock]) -> None:
    if not clocks:
        delattr(MemoryStore, _CLOCK)
        vars(waiting).update(_own_functions)
        for kind, name, method in _own_methods:
            setattr(kind, name, method)
        _own_methods.clear()
        switch.stand_in = None
        _memory.clear()
        return
    switch.stand_in = _in_memory
    for stand_in in _memory.values():
        stand_in.clock_of_block = clocks[-1]
    if _CLOCK not in vars(MemoryStore):
        _own_functions.update({name: getattr(waiting, name) for name in _REPLACED})
        for kind, name in _ASK_REDIS:
            _own_methods.append((kind, name, getattr(kind, name)))
            setattr(kind, name, _asks_memory(name))
    setattr(MemoryStore, _CLOCK, _SameForAll(_CLOCK, clocks[-1]))
    vars(waiting).update({name: getattr(clocks[-1], name) for name in _REPLACED})


def _asks_memory(name: str) -> Callable[..., Any]:
    return lambda store, *args: getattr(_in_memory(store), name)(*args)


def _in_memory(store: object) -> MemoryStore | None:
    if isinstance(store, RedisStore | AsyncRedisStore):
        with _lock:
            where = store._dialer._where  # noqa: SLF001 - only tests need it
            clock = _FROZEN.latest
            # The block may have ended meanwhile.
            return _StandIn(FrozenClock()) if clock is None else _memory.setdefault(where, _StandIn(clock))
    return store if isinstance(store, MemoryStore) else None


def _set_null_store(wanted: Sequence[None]) -> None:
    switch.null_store = _NULL_STORE if wanted else None


_lock = RLock()
_OFF: _Switch[None] = _Switch(_set_null_store)
_FROZEN: _Switch[FrozenClock] = _Switch(_set_clock)
_own_functions: dict[str, Any] = {}
_own_methods: list[tuple[type, str, Any]] = []
_memory: dict[StoreUrl, _StandIn] = {}
"""Stores in memory, by the target of the replaced URLs."""


class _NullStore:
    measures_silence = True

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        now = time.time_ns() // 1000
        states = [charge.bucket.algorithm.initial(now, charge.bucket) for charge in plan.charges]
        if plan.charges and plan.charges[0].bucket.algorithm is holds:
            states[0] = [holds.State(now, found=True)]
        buckets = [BucketReading(charge._replace(max_wait_us=0), each, each) for charge, each in zip(plan.charges, states)]
        return Reading(now, buckets, admitted=True)

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        return self.spend(plan)

    def config(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        return StoredConfig(0 if request.text is None else 1, request.text)

    async def aconfig(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        return self.config(request)

    def fleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        return StoredFleet(time.time_ns() // 1000, 0)

    async def afleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        return self.fleet(request)

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


_NULL_STORE = _NullStore()
