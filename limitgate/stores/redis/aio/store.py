"""Redis for asyncio: each event loop has connections of its own, on which requests share calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Protocol, overload

from redis.asyncio.connection import ConnectionPool

from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainSpend
from limitgate.process.clock import call_later, monotonic
from limitgate.process.event_loop import asyncio_loop
from limitgate.process.remaking import Remade
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.redis.aio.batcher import Batcher
from limitgate.stores.redis.aio.cluster import AsyncCluster
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.aio.loop_end import LoopEnd
from limitgate.stores.redis.dial.credentials import AsyncGivesLogin, Credentials
from limitgate.stores.redis.dial.dialer import CONNECT_TIMEOUT, Dialer
from limitgate.stores.redis.dial.url import scheme_of
from limitgate.stores.redis.leases import LONGEST, Leases
from limitgate.stores.redis.replies import RedisStoreBase

_NAME = "a store on Redis for async code"


class AsyncServers(Protocol):
    """One server or a cluster, as one event loop reaches it."""

    def spend(self, plan: AnyPlan, timeout: float) -> asyncio.Future[Reading]:
        """Return the reading of a plan, or a `StoreError`, within ``timeout`` seconds."""

    def config(self, request: ConfigRequest, timeout: float) -> asyncio.Future[StoredConfig]:
        """Return the configuration, or a `StoreError`, within ``timeout`` seconds."""

    def connect(self) -> None:
        """Begin to connect, if there is no connection. Nobody waits for it."""

    async def close(self) -> None:
        """Close the connections; requests still waiting fail."""

    def abandon(self) -> None:
        """Forget calls on their way: the event loop was closed before the connections were."""


class _LoopState:
    """Connections and lease timer of a store in one event loop."""

    def __init__(self, servers: AsyncServers, leases: Leases) -> None:
        self.servers = servers
        self.loop_end = LoopEnd(self.close)
        self._leases = leases
        self._timer: asyncio.TimerHandle | asyncio.Future[None] | None = None

    def end_leases_in_time(self) -> None:
        """Give leases back when the oldest ends, and so on."""
        pause = self._leases.pause(monotonic()) if self._timer is None else None
        if pause is not None:
            self._timer = call_later(asyncio.get_running_loop(), pause, self._end_leases)

    def _end_leases(self) -> None:
        self._timer = None
        self.give_back()
        self.end_leases_in_time()

    def give_back(self, age: float = LONGEST) -> list[asyncio.Future[Reading]]:
        """Give back leases of an age, in seconds, or above. Those that Redis does not hear of drain there."""
        sent = []
        for plan in self._leases.ended(monotonic(), age):
            with logged_errors():  # a `StoreError`, too: it drains
                sent.append(self.servers.spend(plan, CONNECT_TIMEOUT))
        return sent

    async def close(self) -> None:
        """Close the connections; requests still waiting fail."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self.servers.close()

    async def end(self) -> None:
        """Give back what was taken in advance, and close."""
        if given_back := self.give_back(age=0):
            await asyncio.wait(given_back)
        await self.close()
        await self.loop_end.closed()


class AsyncRedisStore(RedisStoreBase, Remade):
    """Buckets in Redis for asyncio: requests of the same turn of an event loop share a call.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options, or one with several servers, see
    limitgate/stores/redis/dial/url.py. Connects on first use. Callers that are refused are answered without asking until the
    moment they were promised; ``local_refusals=False`` asks every time.

    ``credentials`` is a callable that gives ``(user, password)``, or ``(user, password, seconds it is valid)``; the user may be
    None. It may be async. It is asked for each new connection, and a connection is replaced before its login expires. The URL
    has no user and password then; Sentinels have theirs in the URL.
    """

    measures_silence = takes_plain = True
    """Readings and errors say for how long Redis was silent while this process was there to listen."""

    def __init__(self, url: str, *, local_refusals: bool = True, credentials: AsyncGivesLogin | None = None) -> None:
        super().__init__(local_refusals=local_refusals)
        self.scheme = scheme_of(url)
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
        """Carry out ``plan`` in one round trip at most. Raises `StoreError` within ``timeout`` seconds.

        No coroutine for a plain plan or an adjustment, which have nothing to wait for but one future.
        """
        is_straight = type(plan) is PlainSpend or plan.verb == "adjust"
        try:
            state = self._loops.get(asyncio.get_running_loop()) if is_straight else None
        except RuntimeError:  # no event loop runs yet
            state = None
        if state is None:
            return self._aspend(plan, timeout)
        cache = self.deny_cache
        if cache is not None and cache.refusals and isinstance(plan, PlainSpend) and cache.knows(plan.keys):
            reading = cache.answer_plain(plan, self._clock())
            if reading is not None:
                return _told(reading)
        self.listen_deadline = timeout
        return state.servers.spend(plan, timeout)

    async def _aspend(self, plan: AnyPlan, timeout: float) -> AnyAnswer:
        """`aspend` a plan of any kind, or in an event loop that has no connections yet."""
        if not isinstance(plan, PlainSpend) and (reading := self.locally(plan)) is not None:
            return reading
        state = self._loops.get(asyncio_loop(_NAME)) or await self._open()
        if isinstance(plan, PlainSpend):
            return await self.aspend(plan, timeout)
        self.listen_deadline = timeout
        return await state.servers.spend(plan, timeout)

    async def aconfig(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` in one round trip. Raises `StoreError` within ``timeout`` seconds."""
        self.listen_deadline = timeout
        state = self._loops.get(asyncio_loop(_NAME)) or await self._open()
        return await state.servers.config(request, timeout)

    async def connect(self) -> None:
        """Begin to connect in the background."""
        state = self._loops.get(asyncio_loop(_NAME)) or await self._open()
        state.servers.connect()

    async def aclose(self) -> None:
        """Give back what was taken in advance, and close this event loop's connections."""
        self.closings += 1
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # under trio, nothing was opened
            return
        with self._opening:
            state = self._loops.pop(loop, None)
        if state is not None:
            await state.end()

    def give_back_leases(self) -> None:
        """Give back what was taken in advance, on an event loop that runs, out of any thread."""
        for loop, state in list(self._loops.items()) if self.leases else ():
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(state.give_back, 0)

    def end_leases_in_time(self) -> None:
        """Give leases back in this event loop when they end."""
        state = self._loops.get(asyncio.get_running_loop())
        if state is not None:
            state.end_leases_in_time()

    async def _open(self) -> _LoopState:
        """Make the running event loop's state, and drop that of loops that have ended without a word."""
        state = _LoopState(self._reach(ListeningClock()), self.leases)
        with self._opening:  # event loops may run in several threads
            ended = [loop for loop in list(self._loops) if loop.is_closed()]  # without closing asynchronous generators
            left = [self._loops.pop(loop) for loop in ended]
            self._loops[asyncio.get_running_loop()] = state
        for each in left:
            each.servers.abandon()
        await state.loop_end.watch()
        return state

    def _reach(self, clock: ListeningClock) -> AsyncServers:
        if self._dialer.nodes:
            return AsyncCluster(self._dialer, self, clock)
        return Batcher(partial(self._dialer.adial, clock), self, clock)


async def _told(reading: AnyReading) -> AnyReading:
    """A reading that nobody has to be asked for."""
    return reading
