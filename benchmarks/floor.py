"""The floor of a limiter on Redis: LimitGate's own script in calls that were packed before, shared by the requests of a turn.

In front of an application this makes no key, no decision and no field, and knows no deadline. So what a limiter costs beyond it
is its own work, and the rest is what it takes to ask Redis on this machine at all, to sleep and to wake up for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import cache
from itertools import cycle
from typing import Any

import hiredis

from benchmarks.contenders import README, quota_texts
from benchmarks.drive import CLIENTS
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge
from limitgate.limits.template import PlanTemplate
from limitgate.stores.redis import plain
from limitgate.stores.redis.aio.store import LoopEnd
from tests.support.redis_server import RedisServer


class Floor:
    """Asks Redis before each request of an application."""

    def __init__(self, app: Any, server: RedisServer) -> None:
        self._app = app
        self._socket = str(server.socket)
        self._calls: _Calls | None = None
        self._connecting: asyncio.Task[_Calls] | None = None
        template = PlanTemplate([Charge("", bucket_of(*quota_texts(README)), 1, enforced=True, rule=None)])
        script = plain.script_of(template.shape)
        with server.client() as untyped:
            client: Any = untyped
            client.script_load(script.text)

        @cache
        def packed(size: int) -> cycle[bytes]:
            keys = [f"floor:{number:032x}" for number in range(CLIENTS)]
            crowds = [keys[start : start + size] for start in range(0, CLIENTS - size + 1, size)]
            return cycle(
                [plain.packed(script.words(in_full=False), [template.asked([key]) for key in crowd]) for crowd in crowds]
            )

        self._packed = packed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request once Redis has answered."""
        if self._calls is None:
            self._connecting = self._connecting or asyncio.get_running_loop().create_task(self._connect())
            self._calls = await self._connecting
        await self._calls.ask()
        await self._app(scope, receive, send)

    async def _connect(self) -> _Calls:
        loop = asyncio.get_running_loop()
        _, calls = await loop.create_unix_connection(lambda: _Calls(self._packed, loop), self._socket)
        self._loop_end = LoopEnd(calls.close)
        await self._loop_end.watch()
        return calls


class _Calls(asyncio.Protocol):
    """A connection, and the requests that wait for it."""

    def __init__(self, packed: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._packed = packed
        self._loop = loop
        self._reader = hiredis.Reader(notEnoughData=self)
        self._transport: Any = None
        self._gathering: list[asyncio.Future[None]] = []
        self._flying: deque[list[asyncio.Future[None]]] = deque()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def ask(self) -> asyncio.Future[None]:
        """Join the call that is sent when this turn of the event loop ends."""
        if not self._gathering:
            self._loop.call_soon(self._send)
        waiting = self._loop.create_future()
        self._gathering.append(waiting)
        return waiting

    def _send(self) -> None:
        together, self._gathering = self._gathering, []
        self._flying.append(together)
        self._transport.write(next(self._packed(len(together))))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not self:
            for waiting in self._flying.popleft():
                if isinstance(reply, Exception):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(None)
