"""Buckets in Redis: every plan is one script call. Connecting, TLS, AUTH and the protocol are redis-py's.

Both stores speak to connections, not to redis-py's pool: the pool refuses the 101st concurrent command, and connects
inside a request, so that a handshake slower than the request's deadline would never succeed. Here connecting goes on
in the background past the deadline of the request that began it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio.connection as aio
import redis.connection as sync
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError, ResponseError, TimeoutError as RedisTimeoutError
from redis.retry import Retry

from limitgate.errors import ConfigError, StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores import wire

log = logging.getLogger("limitgate.store")

CONNECT_TIMEOUT = 5.0
"""Seconds that connecting may take in the background."""
SILENCE = 1.0
"""Seconds without any reply after which an asyncio connection with a call overdue is given up."""
MAX_CONNECTING = 4
"""Threads of a `RedisStore` that connect at a time."""


class _Counters:
    """What the script met: counted always, logged once."""

    unreadable = 0
    """Values under our keys that were not ours; each was replaced."""
    clock_steps = 0
    """Buckets written in the server's future: its clock stepped back."""

    def _reading(self, plan: Plan, reply: object) -> Reading:
        reading, unreadable, steps = wire.reading(plan, reply)
        if unreadable:
            if not self.unreadable:
                log.warning("a value in Redis was not readable and has been replaced; further ones are only counted")
            self.unreadable += unreadable
        if steps:
            if not self.clock_steps:
                log.warning("the clock of Redis stepped back; further steps are only counted")
            self.clock_steps += steps
        return reading


class RedisStore(_Counters):
    """Buckets in Redis for threads: one round trip per call, one connection per thread that is in a call.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options. Connects on first use.
    """

    def __init__(self, url: str) -> None:
        self._pool = _connections(sync.ConnectionPool, url, socket_timeout=CONNECT_TIMEOUT)
        self._idle: deque[Any] = deque()
        self._changed = threading.Condition()
        self._wanted = self._connecting = self._failures = 0
        self._failure: Exception | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return "RedisStore()"

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` in one script call. Raises `StoreError` within about ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        keys_and_args = wire.arguments(plan)
        try:
            connection = self._take(deadline)
            try:
                try:
                    reply = self._call(connection, deadline, "EVALSHA", wire.SHA, *keys_and_args)
                except NoScriptError:
                    reply = self._call(connection, deadline, "EVAL", wire.SPEND, *keys_and_args)
                reading = self._reading(plan, reply)
            except BaseException:
                connection.disconnect()
                raise
        except (RedisError, OSError) as error:
            raise _store_error(error) from error
        self._idle.append(connection)
        return reading

    def close(self) -> None:
        """Close the connections that no thread is using."""
        while self._idle:
            self._idle.pop().disconnect()

    @staticmethod
    def _call(connection: Any, deadline: float, *command: str | bytes | int) -> object:
        connection.send_command(*command)
        return connection.read_response(timeout=max(0.001, deadline - time.monotonic()))

    def _take(self, deadline: float) -> Any:
        """A connection that is open and has nothing left to read. The newest goes first, so that the rest can age."""
        self._forget_parents()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            try:
                if not connection.can_read(0):
                    return connection
            except (RedisError, OSError):
                pass
            connection.disconnect()
        return self._connected(deadline)

    def _forget_parents(self) -> None:
        """After a fork, leave the parent's connections to the parent."""
        if self._pid != os.getpid():
            self._pid, self._idle, self._changed = os.getpid(), deque(), threading.Condition()
            self._wanted = self._connecting = 0

    def _connected(self, deadline: float) -> Any:
        """A new connection, made by another thread that goes on past the deadline and then leaves it for the next."""
        with self._changed:
            failures = self._failures
            self._wanted += 1
            try:
                while not self._idle:
                    if self._connecting < min(self._wanted, MAX_CONNECTING):
                        self._connecting += 1
                        threading.Thread(target=self._connect, name="limitgate-connect", daemon=True).start()
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        raise StoreError("no connection to Redis within the timeout", "timeout")
                    if self._failures != failures and self._failure is not None:
                        raise _store_error(self._failure) from self._failure
                return self._idle.pop()
            finally:
                self._wanted -= 1

    def _connect(self) -> None:
        connection: Any = None
        try:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            connection.connect()
        except Exception as error:  # noqa: BLE001 - whatever kept us from connecting is told to those who wait
            connection, failure = None, error
        with self._changed:
            self._connecting -= 1
            if connection is None:
                self._failure, self._failures = failure, self._failures + 1
            else:
                self._idle.append(connection)
            self._changed.notify_all()


class AsyncRedisStore(_Counters):
    """Buckets in Redis for asyncio: one connection per event loop, on which all its calls are pipelined.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options. Connects on first use.
    """

    def __init__(self, url: str) -> None:
        self._pool = _connections(aio.ConnectionPool, url, socket_timeout=None)
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
            return self._reading(plan, reply)
        except TimeoutError as error:
            link.overdue()
            raise StoreError("no answer from Redis within the timeout", "timeout") from error
        except OutOfMemoryError as error:
            raise _store_error(error) from error
        except (RedisError, OSError) as error:
            await link.close()
            raise _store_error(error) from error
        except StoreError:
            await link.close()
            raise

    async def aclose(self) -> None:
        """Close this event loop's connection."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.close()

    def _link(self) -> _Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = _Link(self._pool.make_connection)
        return link


class _Link:
    """One event loop's connection. Calls go out in order and replies are handed out in order.

    Tasks live only while there is something to connect or to read, so an idle loop can stop without leftovers.
    """

    def __init__(self, make_connection: Callable[[], Any]) -> None:
        self._make = make_connection
        self._connection: Any = None
        self._connecting: asyncio.Task[Exception | None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[object]] = deque()
        self._heard = 0.0

    async def call(self, *command: str | bytes | int) -> object:
        """Send one command and wait for its reply. Raises what redis-py raises."""
        while not await self._usable():
            await self._connected()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[object] = loop.create_future()
        connection = self._connection
        if not self._waiting:
            self._heard = loop.time()
        self._waiting.append(reply)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(connection))
        await connection.send_command(*command)
        return await reply

    def overdue(self) -> None:
        """A call was not answered in time. Give the connection up if nothing at all has been heard for a while."""
        if self._reading is not None and asyncio.get_running_loop().time() - self._heard > SILENCE:
            self._reading.cancel()

    async def close(self) -> None:
        """Close the connection; calls still waiting on it fail."""
        for task in (self._connecting, self._reading):
            if task is not None:
                task.cancel()
        await self._drop(ConnectionResetError("the connection to Redis was closed"))

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
            self._connection = connection
        except (RedisError, OSError) as error:
            await connection.disconnect(nowait=True)
            return error
        finally:
            self._connecting = None
        return None

    async def _read(self, connection: Any) -> None:
        failure: BaseException = ConnectionResetError("the connection to Redis was given up")
        try:
            while self._waiting:
                try:
                    reply = await connection.read_response()
                except ResponseError as error:
                    reply = error
                self._heard = asyncio.get_running_loop().time()
                waiting = self._waiting.popleft()
                if waiting.done():
                    continue
                if isinstance(reply, ResponseError):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except (RedisError, OSError) as error:
            failure = error
        finally:
            self._reading = None
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


def _connections(pool: Any, url: str, *, socket_timeout: float | None) -> Any:
    """redis-py's reading of a URL: the class and options of its connections. We keep them ourselves, see above."""
    try:
        return pool.from_url(
            url,
            socket_timeout=socket_timeout,
            socket_connect_timeout=CONNECT_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
        )
    except (ValueError, RedisError) as error:
        raise ConfigError(f"store: {error}") from error


def _store_error(error: Exception) -> StoreError:
    if isinstance(error, OutOfMemoryError):
        return StoreError("Redis is out of memory", "oom")
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreError("no answer from Redis within the timeout", "timeout")
    if isinstance(error, ResponseError):
        return StoreError(f"Redis refused the call ({type(error).__name__}): {error}", "reply")
    return StoreError(f"cannot reach Redis: {error}", "connection")
