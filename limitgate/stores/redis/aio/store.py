"""The Redis store for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, overload

from redis.asyncio.connection import ConnectionPool

from limitgate.errors import called_as
from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainSpend
from limitgate.process import switch
from limitgate.process.clock import Timer, asyncio_loop, call_later, monotonic
from limitgate.process.forking import Remade
from limitgate.stores.base import ConfigRequest, FleetRequest, StoredConfig, StoredFleet
from limitgate.stores.redis.aio.batcher import Batcher
from limitgate.stores.redis.aio.cluster import AsyncCluster
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.credentials import AsyncGivesLogin, Credentials
from limitgate.stores.redis.dialer import CONNECT_TIMEOUT, Dialer
from limitgate.stores.redis.leases import LONGEST, Leases
from limitgate.stores.redis.replies import RedisStoreBase
from limitgate.stores.redis.url import scheme_of
from limitgate.stores.redis.wire import Kept, KeptRequest

_NAME = "a store on Redis for async code"


class LoopEnd:
    """Calls ``close`` before the event loop ends, by an async generator (PEP 525)."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close: Callable[[], Awaitable[None]] | None = close
        self._ending: AsyncGenerator[None, None] | None = self._until_the_loop_ends()

    async def watch(self) -> None:
        if self._ending is not None:
            await anext(self._ending)

    async def closed(self) -> None:
        """Stop the watch after a normal close."""
        self._close = None
        if self._ending is not None:
            await self._ending.aclose()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            # The generator keeps the loop alive.
            self._ending = None
            if self._close is not None:
                await self._close()


class _LoopState:
    def __init__(self, servers: Batcher | AsyncCluster, leases: Leases) -> None:
        self.servers = servers
        self.loop_end = LoopEnd(self.close)
        self._leases = leases
        self._timer: Timer | None = None

    def end_leases_in_time(self) -> None:
        pause = self._leases.pause(monotonic()) if self._timer is None else None
        if pause is not None:
            self._timer = call_later(asyncio.get_running_loop(), pause, self._end_leases)

    def _end_leases(self) -> None:
        self._timer = None
        self.give_back()
        self.end_leases_in_time()

    def give_back(self, age: float = LONGEST) -> list[asyncio.Future[Reading]]:
        sent: list[asyncio.Future[Reading]] = []
        plans = self._leases.ended(monotonic(), age)
        for plan in plans if switch.stand_in is None else ():
            # An unreturned lease drains.
            with logged_errors():
                sent.append(self.servers.spend(plan, CONNECT_TIMEOUT))
        return sent

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self.servers.close()

    async def end(self) -> None:
        if given_back := self.give_back(age=0):
            await asyncio.wait(given_back)
        await self.close()
        await self.loop_end.closed()


class AsyncRedisStore(RedisStoreBase, Remade):
    """Buckets in Redis for asyncio. Requests of the same loop iteration share a call.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's options, or the URL of several servers, see
    limitgate/stores/redis/url.py. The store connects on first use. It answers refused callers locally until they may retry;
    ``local_refusals=False`` asks Redis every time.

    ``credentials`` replaces the login in the URL, except for Sentinels: a sync or async callable that returns ``(user,
    password)`` or ``(user, password, seconds it is valid)``; the user may be None. Connections are replaced before their logins
    expire. Raises `ConfigError`.
    """

    measures_silence = takes_plain = True
    """Readings and errors report silence."""

    @called_as("AsyncRedisStore('redis://localhost:6379/0'), whose URL has other options")
    def __init__(self, url: str, *, local_refusals: bool = True, credentials: AsyncGivesLogin | None = None) -> None:
        super().__init__(local_refusals=local_refusals)
        self.scheme: str = scheme_of(url)
        logins = None if credentials is None else Credentials(credentials, may_await=True)
        self._dialer = Dialer(url, ConnectionPool, self.inspection, socket_timeout=None, credentials=logins)
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        self._opening = Lock()

    def __repr__(self) -> str:
        return "AsyncRedisStore()"

    @overload
    def aspend(self, plan: Plan, timeout: float) -> Awaitable[Reading]: ...
    @overload
    def aspend(self, plan: PlainSpend, timeout: float) -> Awaitable[AnyReading]: ...
    @overload
    def aspend(self, plan: AnyPlan, timeout: float) -> Awaitable[AnyAnswer]: ...

    def aspend(self, plan: AnyPlan, timeout: float) -> Awaitable[AnyAnswer]:
        """Carry out ``plan`` in at most one round trip. Raises `StoreError` within ``timeout`` seconds."""
        is_straight = type(plan) is PlainSpend or plan.verb == "adjust"
        try:
            state = self._loops.get(asyncio.get_running_loop()) if is_straight else None
        except RuntimeError:  # no running event loop
            state = None
        if state is None:
            return self._aspend(plan, timeout)
        cache = self.deny_cache
        if cache is not None and cache.refusals and isinstance(plan, PlainSpend) and cache.knows(plan.keys):
            reading = cache.answer_plain(plan, self._clock())
            if reading is not None:
                return _told(reading)
        self.listen_deadline: float = timeout
        return state.servers.spend(plan, timeout)

    async def _aspend(self, plan: AnyPlan, timeout: float) -> AnyAnswer:
        if not isinstance(plan, PlainSpend) and (reading := self.locally(plan)) is not None:
            return reading
        state = self._loops.get(asyncio_loop(_NAME)) or await self._open()
        if isinstance(plan, PlainSpend):
            return await self.aspend(plan, timeout)
        self.listen_deadline = timeout
        return await state.servers.spend(plan, timeout)

    async def aconfig(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` in one round trip. Raises `StoreError` within ``timeout`` seconds."""
        stored: Any = await self._akeep(request, timeout)
        return stored  # type: ignore[no-any-return]

    async def afleet(self, request: FleetRequest, timeout: float) -> StoredFleet:
        """Carry out ``request`` in one round trip. Raises `StoreError` within ``timeout`` seconds."""
        stored: Any = await self._akeep(request, timeout)
        return stored  # type: ignore[no-any-return]

    async def _akeep(self, request: KeptRequest, timeout: float) -> Kept:
        self.listen_deadline = timeout
        state = self._loops.get(asyncio_loop(_NAME)) or await self._open()
        return await state.servers.config(request, timeout)

    async def connect(self) -> None:
        if switch.stand_in is not None:
            return
        state = self._loops.get(asyncio_loop(_NAME)) or await self._open()
        state.servers.connect()

    async def aclose(self) -> None:
        """Return leases and close this event loop's connections."""
        self.closings += 1
        try:
            loop = asyncio.get_running_loop()
        # Under trio nothing is open.
        except RuntimeError:
            return
        with self._opening:
            state = self._loops.pop(loop, None)
        if state is not None:
            await state.end()

    def give_back_leases(self) -> None:
        """Return leases. May be called in any thread."""
        for loop, state in list(self._loops.items()) if self.leases else ():
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(state.give_back, 0)

    def end_leases_in_time(self) -> None:
        state = self._loops.get(asyncio.get_running_loop())
        if state is not None:
            state.end_leases_in_time()

    async def _open(self) -> _LoopState:
        state = _LoopState(self._reach(ListeningClock()), self.leases)
        # Event loops can run in several threads.
        with self._opening:
            # A loop can end without closing its asynchronous generators.
            ended = [loop for loop in list(self._loops) if loop.is_closed()]
            left = [self._loops.pop(loop) for loop in ended]
            self._loops[asyncio.get_running_loop()] = state
        for each in left:
            each.servers.abandon()
        await state.loop_end.watch()
        return state

    def _reach(self, clock: ListeningClock) -> Batcher | AsyncCluster:
        if self._dialer.nodes:
            return AsyncCluster(self._dialer, self, clock)
        return Batcher(partial(self._dialer.adial, clock), self, clock)


async def _told(reading: AnyReading) -> AnyReading:
    return reading
