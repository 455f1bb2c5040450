"""Buckets in Redis for threads, and what the asyncio store shares with it.

Connecting, TLS, AUTH and the protocol are redis-py's. Both stores speak to connections, not to
redis-py's pool: the pool refuses the 101st concurrent command, and connects inside a request, so that a handshake slower
than the request's deadline would never succeed. Here connecting goes on in the background past the deadline of the request
that began it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import ref

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import (
    InvalidResponse,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)
from redis.retry import Retry

from limitgate.errors import ConfigError, StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores import wire
from limitgate.stores.breaker import PROBE_TIMEOUT, Breaker, probe_beside
from limitgate.stores.leases import LONGEST
from limitgate.stores.scripted import MAX_BATCH, Outcome, Scripted
from limitgate.stores.threads import SharedCalls

CONNECT_TIMEOUT = 1.5
"""Seconds that connecting may take in the background; recovery from a connect that hangs takes as long."""
MAX_CONNECTING = 4
"""Threads of a `RedisStore` that connect at a time."""


class RedisStore(Scripted):
    """Buckets in Redis for threads: one round trip per request, shared by those that ask at the same time.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options. Connects on first use. Callers that
    are refused are answered without asking until the moment they were promised; ``local_refusals=False`` asks every time.
    """

    def __init__(self, url: str, *, local_refusals: bool = True) -> None:
        super().__init__(local_refusals=local_refusals)
        self._pool = connections(ConnectionPool, url, socket_timeout=CONNECT_TIMEOUT)
        self._begin()

    def _begin(self) -> None:
        self._idle: deque[Any] = deque()
        self._changed = threading.Condition()
        self._wanted = self._connecting = 0
        self._failure: tuple[float, Exception | None] = 0.0, None
        self._gives_back = False
        self._probe: Plan | None = None
        self._breaker = self.breaker()
        self._calls = SharedCalls(self._exchange, MAX_BATCH)

    def begin_anew(self) -> None:
        """Leave the parent's connections to the parent, and its threads' calls."""
        super().begin_anew()
        self._begin()

    def __repr__(self) -> str:
        return "RedisStore()"

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` in one script call at most. Raises `StoreError` within about ``timeout`` seconds."""
        reading = self.locally(plan)
        if reading is None:
            self._breaker.check()
            self._probe = self._probe or probe_beside(plan)
            reading = self._calls.spend(plan, timeout)
            if self.leases and not self._gives_back:
                self._give_back_in_time()
        return reading

    def _exchange(self, plans: Sequence[Plan], timeout: float) -> list[Outcome]:
        self._breaker.check()
        return self._attempt(plans, timeout)

    def _attempt(self, plans: Sequence[Plan], timeout: float) -> list[Outcome]:
        """Make a call, and tell the breaker what became of it."""
        try:
            outcomes = self._call_with(plans, timeout)
        except StoreError as error:
            if error.fault != "oom" and self._breaker.failed(error):
                self._look_for_redis()
            raise
        self._breaker.succeeded()
        return outcomes

    def _look_for_redis(self) -> None:
        """Start the thread that probes until Redis is back; it keeps no store alive."""
        try:
            threading.Thread(target=_probe, args=(ref(self), self._breaker), name="limitgate-probe", daemon=True).start()
        except RuntimeError:  # no thread can be started now: requests go on waiting
            self._breaker = self.breaker(instead_of=self._breaker)

    def _call_with(self, plans: Sequence[Plan], timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        try:
            connection = self._take(deadline)
            plans, sent = self.outgoing(plans)
            try:
                keys_and_args = wire.arguments(plans)
                try:
                    reply = self._call(connection, deadline, "EVALSHA", wire.SHA, *keys_and_args)
                except NoScriptError:
                    reply = self._call(connection, deadline, "EVAL", wire.SPEND, *keys_and_args)
                outcomes = self.understood(plans, reply, sent)
            except BaseException as error:
                self.unanswered(plans)
                if is_out_of_memory(error):
                    self._give(connection)
                else:
                    connection.disconnect()
                raise
        except ResponseError as error:
            raise store_error(error) from error
        except wire.UNSENDABLE as error:
            raise unsendable(error) from error
        except (RedisError, OSError) as error:
            self._close_idle()  # what broke one connection may have broken those that lie idle
            raise store_error(error) from error
        self._give(connection)
        return outcomes

    def close(self) -> None:
        """Give back what was taken in advance, and close the connections that no thread is using.

        One that is being made is kept for the next call.
        """
        self._give_back(age=0)
        self._close_idle()
        self._breaker = self.breaker(instead_of=self._breaker)  # whoever probes for that one stops

    def probe(self, breaker: Breaker) -> bool:
        """Ask whether Redis is back. False where nobody needs to ask any more."""
        if breaker is not self._breaker or self._probe is None:
            return False
        with contextlib.suppress(StoreError):
            self._attempt([self._probe], PROBE_TIMEOUT)
        return not breaker.healthy

    def _give_back(self, age: float = LONGEST) -> None:
        """Give back leases of an age, in seconds, or above. Those that Redis does not hear of drain there."""
        plans = self.leases.ended(time.monotonic(), age)
        with contextlib.suppress(StoreError):
            for start in range(0, len(plans), MAX_BATCH):
                self._exchange(plans[start : start + MAX_BATCH], CONNECT_TIMEOUT)

    def _give_back_in_time(self) -> None:
        """Start the thread that gives back what is left of leases when they end, unless it runs already."""
        with self._changed:
            if not self._gives_back:
                with contextlib.suppress(RuntimeError):  # no thread can be started now: the next call tries again
                    threading.Thread(target=self._keep_giving_back, name="limitgate-leases", daemon=True).start()
                    self._gives_back = True

    def _keep_giving_back(self) -> None:
        while True:
            with self._changed:
                self._gives_back = False  # first, so that a lease that comes now starts another thread
                ends = self.leases.ends()
                if ends is None:
                    return
                self._gives_back = True
            time.sleep(max(0.0, ends - time.monotonic()))
            self._give_back()

    def _close_idle(self) -> None:
        while (connection := self._pop()) is not None:
            connection.disconnect()

    @staticmethod
    def _call(connection: Any, deadline: float, *command: str | bytes | int) -> object:
        """Send one command and read its reply. A reply that comes in pieces has until the deadline for each piece."""
        connection._sock.settimeout(_left(deadline))  # noqa: SLF001 - redis-py sends under the timeout of connecting
        connection.send_packed_command(connection.pack_command(*command), check_health=False)
        try:
            return connection.read_response(timeout=_left(deadline))
        except (TypeError, ValueError) as error:  # redis-py's about an error it cannot read, hiredis' about a map by lists
            raise InvalidResponse(str(error)) from error

    def _pop(self) -> Any:
        """An idle connection, the newest first so that the others can age; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give(self, connection: Any) -> None:
        """Leave a connection for the next call."""
        with self._changed:
            self._idle.append(connection)
            self._changed.notify()

    def _take(self, deadline: float) -> Any:
        """A connection that is open and has nothing left to read."""
        while (connection := self._pop()) is not None:
            try:
                if not connection.can_read(0):
                    return connection
            except (RedisError, OSError):
                pass
            connection.disconnect()
        return self._connected(deadline)

    def _connected(self, deadline: float) -> Any:
        """A new connection, made by another thread that goes on past the deadline and then leaves it for the next."""
        arrived = time.monotonic()
        with self._changed:
            self._wanted += 1
            try:
                while (connection := self._pop()) is None:
                    if self._connecting < min(self._wanted, MAX_CONNECTING):
                        threading.Thread(target=self._connect, name="limitgate-connect", daemon=True).start()
                        self._connecting += 1
                    if not self._changed.wait(_left(deadline)) and not self._idle:
                        raise StoreError("no connection to Redis within the timeout", "timeout")
                    began, failure = self._failure
                    if began >= arrived and failure is not None:  # an attempt that began before may be out of date
                        raise store_error(failure) from failure
            except RuntimeError as error:
                raise StoreError(f"no thread to connect to Redis in: {error}", "connection") from error
            finally:
                self._wanted -= 1
        return connection

    def _connect(self) -> None:
        began = time.monotonic()
        connection: Any = None
        try:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            connection.connect()
        except Exception as error:  # noqa: BLE001 - whatever kept us from connecting is told to those who wait
            connection, failure = None, error
        with self._changed:
            self._connecting -= 1
            if connection is None:
                self._failure = began, failure
            else:
                self._idle.append(connection)
            self._changed.notify_all()


def _probe(store: ref[RedisStore], breaker: Breaker) -> None:
    goes_on = True
    while goes_on:
        time.sleep(breaker.pause())
        asking = store()
        goes_on = asking is not None and asking.probe(breaker)
        del asking


def _left(deadline: float) -> float:
    """Seconds to a deadline; never quite none, which sockets would take for not blocking."""
    return max(0.001, deadline - time.monotonic())


def connections(pool_class: Any, url: str, *, socket_timeout: float | None) -> Any:
    """redis-py's reading of a URL: the class and options of its connections. We keep them ourselves, see above."""
    try:
        pool = pool_class.from_url(
            url,
            socket_timeout=socket_timeout,
            socket_connect_timeout=CONNECT_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
        )
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigError(f"store: {error}, expected a URL that redis-py understands") from error
    return pool


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Redis had no room. Before version 7 it wraps what a script met in an error of its own."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and ": -OOM " in str(error))


def unsendable(error: Exception) -> StoreError:
    """What went wrong before a call was sent, one of `wire.UNSENDABLE`."""
    return StoreError(f"the call cannot be sent: {error}", "connection")


def store_error(error: Exception) -> StoreError:
    """What went wrong in redis-py, as what it means to those who asked."""
    if is_out_of_memory(error):
        return StoreError("Redis is out of memory", "oom")
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreError("no answer from Redis within the timeout", "timeout")
    if isinstance(error, ResponseError):
        return StoreError(f"Redis refused the call ({type(error).__name__}): {error}", "reply")
    return StoreError(f"cannot reach Redis: {error}", "connection")
