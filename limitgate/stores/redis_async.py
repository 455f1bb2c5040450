"""Redis for asyncio: each event loop has connections of its own, on which requests share calls."""

from __future__ import annotations

import asyncio
from typing import Protocol
from weakref import WeakKeyDictionary

from redis.asyncio.connection import ConnectionPool

from limitgate.plan import Plan, Reading
from limitgate.stores.batch import Batcher
from limitgate.stores.breaker import probe_beside
from limitgate.stores.cluster import Cluster
from limitgate.stores.dialer import Dialer
from limitgate.stores.loops import LoopEnd
from limitgate.stores.scripted import Scripted


class Servers(Protocol):
    """What carries plans out in one event loop: one server, or a cluster."""

    def spend(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        """The reading of a plan, or a `StoreError`, within ``timeout`` seconds."""

    async def close(self) -> None:
        """Close the connections; requests still waiting fail."""

    async def end(self) -> None:
        """Give back what was taken in advance, and close."""

    def abandon(self) -> None:
        """The event loop was closed before anything here was: no call on its way will be answered."""


class AsyncRedisStore(Scripted):
    """Buckets in Redis for asyncio: requests of the same turn of an event loop share a call.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options, or one with several servers, see
    limitgate/stores/dialer.py. Connects on first use. Callers that are refused are answered without asking until the moment
    they were promised; ``local_refusals=False`` asks every time.
    """

    def __init__(self, url: str, *, local_refusals: bool = True) -> None:
        super().__init__(local_refusals=local_refusals)
        self._dialer = Dialer(url, ConnectionPool, socket_timeout=None)
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Servers, LoopEnd]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return "AsyncRedisStore()"

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` in one round trip at most. Raises `StoreError` within ``timeout`` seconds."""
        reading = self.locally(plan)
        if reading is not None:
            return reading
        self.patience = timeout
        loop = asyncio.get_running_loop()
        open_here = self._loops.get(loop)
        if open_here is None:
            for ended in [loop for loop in self._loops if loop.is_closed()]:  # without closing asynchronous generators
                self._loops.pop(ended)[0].abandon()
            servers = self._open(plan)
            open_here = self._loops[loop] = servers, LoopEnd(servers.close)
            await open_here[1].watch()
        return await open_here[0].spend(plan, timeout)

    async def aclose(self) -> None:
        """Close this event loop's connections."""
        open_here = self._loops.pop(asyncio.get_running_loop(), None)
        if open_here is not None:
            servers, loop_end = open_here
            await servers.end()
            await loop_end.closed()

    def _open(self, plan: Plan) -> Servers:
        probe = probe_beside(plan)
        if self._dialer.nodes:
            return Cluster(self._dialer, self, probe)
        return Batcher(self._dialer.adial, self, probe)
