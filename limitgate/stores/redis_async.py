"""Buckets in Redis for asyncio: one connection per event loop, on which requests share calls."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from redis.asyncio.connection import ConnectionPool

from limitgate.plan import Plan, Reading
from limitgate.stores.batch import Batcher
from limitgate.stores.breaker import probe_beside
from limitgate.stores.redis import connections
from limitgate.stores.scripted import Scripted


class AsyncRedisStore(Scripted):
    """Buckets in Redis for asyncio: one connection per event loop, on which requests of the same turn share a call.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options. Connects on first use. Callers that
    are refused are answered without asking until the moment they were promised; ``local_refusals=False`` asks every time.
    """

    def __init__(self, url: str, *, local_refusals: bool = True) -> None:
        super().__init__(local_refusals=local_refusals)
        self._pool = connections(ConnectionPool, url, socket_timeout=None)
        self._batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return "AsyncRedisStore()"

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` in one round trip at most. Raises `StoreError` within ``timeout`` seconds."""
        reading = self.locally(plan)
        if reading is not None:
            return reading
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            for ended in [loop for loop in self._batchers if loop.is_closed()]:  # without closing asynchronous generators
                self._batchers.pop(ended).abandon()
            batcher = self._batchers[loop] = Batcher(self._pool.make_connection, self, probe_beside(plan))
            await batcher.begin()
        return await batcher.spend(plan, timeout)

    async def aclose(self) -> None:
        """Close this event loop's connection."""
        batcher = self._batchers.pop(asyncio.get_running_loop(), None)
        if batcher is not None:
            await batcher.end()
