"""Buckets in Redis for asyncio: one connection per event loop, on which all its calls are pipelined."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from limitgate.errors import StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores import wire
from limitgate.stores.redis import CONNECT_TIMEOUT, Counters, connections, is_out_of_memory, store_error

SILENCE = 1.0
"""Seconds without any reply after which a connection with a call overdue is given up."""
MAX_WAITING = 10_000
"""Calls that may wait for replies on a connection."""


class AsyncRedisStore(Counters):
    """Buckets in Redis for asyncio: one connection per event loop, on which all its calls are pipelined.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options. Connects on first use.
    """

    def __init__(self, url: str) -> None:
        self._pool = connections(ConnectionPool, url, socket_timeout=None)
        self._links: WeakKeyDictionary[asyncio.AbstractEventLoop, _Link] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return "AsyncRedisStore()"

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` in one script call. Raises `StoreError` within ``timeout`` seconds."""
        link = self._link()
        keys_and_args = wire.arguments(plan)
        try:
            async with asyncio.timeout(timeout):
                try:
                    reply = await link.call("EVALSHA", wire.SHA, *keys_and_args)
                except NoScriptError:
                    reply = await link.call("EVAL", wire.SPEND, *keys_and_args)
        except TimeoutError as error:
            link.overdue()
            raise StoreError("no answer from Redis within the timeout", "timeout") from error
        except ResponseError as error:
            if not is_out_of_memory(error):
                await link.close()
            raise store_error(error) from error
        except (RedisError, OSError) as error:
            raise store_error(error) from error
        try:
            return self.understood(plan, reply)
        except StoreError:
            await link.close()
            raise

    async def aclose(self) -> None:
        """Close this event loop's connection."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.end()

    def _link(self) -> _Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = _Link(self._pool.make_connection)
        return link


class _UnansweredError(ConnectionResetError):
    """The connection broke before anything was answered: it may have been closed before anything was sent."""


class _Link:
    """One event loop's connection. Calls go out in order and replies are handed out in order.

    Tasks live only while there is something to connect or to read, so an idle loop can stop without leftovers.
    """

    def __init__(self, make_connection: Callable[[], Any]) -> None:
        self._make = make_connection
        self._connection: Any = None
        self._connecting: asyncio.Task[Exception | None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[object]] = deque()
        self._answered = False
        self._heard = 0.0
        self._ending: AsyncGenerator[None, None] | None = None

    async def call(self, *command: str | bytes | int) -> object:
        """Send one command and wait for its reply. Raises what redis-py raises.

        A command on a connection that turns out to have been closed meanwhile is sent once more on another.
        """
        if self._ending is None:
            self._ending = self._until_the_loop_ends()
            await anext(self._ending)
        try:
            return await self._ask(command)
        except _UnansweredError:
            return await self._ask(command)

    def overdue(self) -> None:
        """A call was not answered in time. Give the connection up if nothing at all has been heard for a while."""
        if self._reader is not None and asyncio.get_running_loop().time() - self._heard > SILENCE:
            self._reader.cancel()

    async def close(self) -> None:
        """Close the connection; calls still waiting on it fail."""
        connecting, self._connecting = self._connecting, None
        for task in (connecting, self._reader):
            if task is not None:
                task.cancel()
        await self._drop(ConnectionResetError("the connection to Redis was closed"))

    async def end(self) -> None:
        """Close for good."""
        await self.close()
        if self._ending is not None:
            await self._ending.aclose()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Waits for the end of the event loop, which closes every asynchronous generator (PEP 525), and closes."""
        try:
            yield
        finally:
            await self.close()

    async def _ask(self, command: tuple[str | bytes | int, ...]) -> object:
        while not await self._usable():
            await self._connected()
        if len(self._waiting) >= MAX_WAITING:
            raise StoreError(f"{MAX_WAITING} calls to Redis are waiting already", "timeout")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[object] = loop.create_future()
        connection = self._connection
        if not self._waiting:
            self._answered, self._heard = False, loop.time()
        self._waiting.append(reply)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(connection))
        # Written without redis-py's send_command: whoever is cancelled in there takes the connection down for all.
        connection._writer.write(b"".join(connection.pack_command(*command)))  # noqa: SLF001
        return await reply

    async def _usable(self) -> bool:
        """Whether a command can be sent. An idle connection that the server has closed, or left bytes on, is not."""
        if self._connection is None:
            return False
        if self._waiting or not await self._connection.can_read():
            return True
        await self._drop(ConnectionResetError("Redis closed the connection"))
        return False

    async def _connected(self) -> None:
        """Wait for a connection that is made in a task of its own, which a caller's deadline does not end."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        connecting = self._connecting
        await asyncio.wait([connecting])
        failure = ConnectionResetError("the store was closed") if connecting.cancelled() else connecting.result()
        if failure is not None:
            raise failure

    async def _connect(self) -> Exception | None:
        connection = self._make()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.connect()
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, RedisError | OSError):
                return error
            raise
        finally:
            if self._connecting is asyncio.current_task():
                self._connecting = None
        self._connection = connection
        return None

    async def _read(self, connection: Any) -> None:
        failure: BaseException = ConnectionResetError("the connection to Redis was given up")
        try:
            while self._waiting:
                try:
                    reply = await connection.read_response()
                except ResponseError as error:
                    reply = error
                self._answered, self._heard = True, asyncio.get_running_loop().time()
                waiting = self._waiting.popleft()
                if waiting.done():
                    continue
                if isinstance(reply, ResponseError):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except (RedisConnectionError, OSError) as error:
            failure = error if self._answered else _UnansweredError(str(error))
        except RedisError as error:
            failure = error
        finally:
            self._reader = None
            if self._waiting:
                await self._drop(failure)

    async def _drop(self, failure: BaseException) -> None:
        connection, self._connection = self._connection, None
        waiting, self._waiting = self._waiting, deque()
        for reply in waiting:
            if not reply.done():
                reply.set_exception(failure)
                reply.exception()  # it may have nobody left to look at it
        if connection is not None:
            await connection.disconnect(nowait=True)
