"""The connections of threads to one Redis server: kept while they are idle, made by other threads.

Connecting goes on past the time of the call that began it, and what comes of it serves the next. Where no thread can be
started, the one that asks connects by itself.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any
from weakref import WeakSet, ref

from limitgate.errors import StoreError
from limitgate.internal_errors import internal_error, raise_interruption
from limitgate.process.clock import monotonic
from limitgate.stores.redis import background
from limitgate.stores.redis.dial.credentials import Login
from limitgate.stores.redis.dial.dialer import Dial
from limitgate.stores.redis.dial.redis_py import renewable_login
from limitgate.stores.redis.errors import store_error
from limitgate.stores.redis.protocol.session import Doubts
from limitgate.stores.redis.threads.connection import SyncConnection
from limitgate.stores.redis.threads.listen_deadline import SHORTEST, ListenDeadline, WaitForThread
from limitgate.stores.redis.threads.renewal import keep_renewing

MAX_CONNECTING = 4
"""Threads that connect to a server at a time."""
LOOK_EVERY = 1.0
"""Seconds for which a connection is believed to be as it was when somebody looked. Whether a server that sends what nobody has
asked for is noticed depends on it, so it is short; calls that come one after the other need no look each."""


class ConnectionPool:
    """Keeps connections, made of the redis-py ones that ``dial`` opens."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._idle: deque[SyncConnection] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted = 0
        self._connecting: set[object] = set()
        """Attempts of other threads under way."""
        self._failure: tuple[float, Exception | None] = 0.0, None
        self._retired = False
        self._closings = 0
        """Calls of `close` so far."""
        self._made_at = -math.inf
        self.doubts = Doubts()
        self._expiring: WeakSet[SyncConnection] = WeakSet()
        """Connections whose logins expire."""
        self._renewed_by = -1
        """How often the pool had been closed when the thread began that replaces them."""

    def take(self, listen_deadline: ListenDeadline, *, by_looking: bool = False) -> SyncConnection:
        """Take a connection that is open and has nothing left to read. Raises `StoreError` once ``listen_deadline`` is over.

        That is looked at if nobody has within `LOOK_EVERY` seconds, or ``by_looking``: a call that was sent on a connection
        that has ended since is sent again, as a rule (`Session.may_repeat`).
        """
        while (connection := self._pop()) is not None:
            if (not by_looking and monotonic() - connection.looked_at < LOOK_EVERY) or connection.is_quiet():
                return connection
            connection.close()
        return self._made(listen_deadline)

    def give(self, connection: SyncConnection) -> None:
        """Leave a connection for the next call. Close it if it is not fit for one, or the pool was closed since it was made."""
        if not connection.session.is_quiet():
            connection.close()
            return
        self._idle.append(connection)
        if self._wanted:  # whoever begins to wait after this look finds it among the idle ones
            with self._lock:
                self._changed.notify()
        if connection.closings != self._closings or self._retired:
            self.close_idle()

    def make_another(self) -> None:
        """Close what lies idle, as it may have been dropped as well, and begin to connect if a thread can be started."""
        self.close_idle()
        with self._lock:
            self._begin_to_connect()

    def have_another(self, since: float) -> bool:
        """True if a connection has been made since a time by `time.monotonic`."""
        return self._made_at >= since

    def close_idle(self) -> None:
        """Close the connections that no thread is using. One that is being made is kept for the next call."""
        while (connection := self._pop()) is not None:
            connection.close()

    def close(self) -> None:
        """`close_idle`, and keep none that is in use or being made: a thread that waits for it may use it once."""
        self._closings += 1  # without the lock, as a signal's handler may close while its thread holds that
        self.close_idle()

    def retire(self) -> None:
        """Close all connections as they become idle."""
        self._retired = True
        self.close()

    def _pop(self) -> SyncConnection | None:
        """An idle connection, the newest first so that the others can age; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _made(self, listen_deadline: ListenDeadline) -> SyncConnection:
        """A new connection, made by another thread if one can be started, so that it serves the next if it comes late."""
        arrived = monotonic()
        waiting = WaitForThread(listen_deadline)
        with self._lock:
            self._wanted += 1
            try:
                while (connection := self._pop()) is None:
                    if len(self._connecting) < min(self._wanted, MAX_CONNECTING) and not self._begin_to_connect():
                        break
                    self._wait(waiting)
                    began, failure = self._failure
                    if began >= arrived and failure is not None:  # an attempt that began before may be out of date
                        raise store_error(failure) from failure
            finally:
                self._wanted -= 1
        return self._made_here(listen_deadline) if connection is None else connection

    def _begin_to_connect(self) -> bool:
        """Have another thread connect. False if none can be started now."""
        attempt = object()
        try:
            self._connecting.add(attempt)
            background.start("connect", self._connect, self._closings, attempt)
        except RuntimeError:
            self._connecting.discard(attempt)
            return False
        except BaseException:  # a signal's handler may raise anywhere; the thread runs, or it does not
            self._connecting.discard(attempt)
            raise
        return True

    def _wait(self, waiting: WaitForThread) -> None:
        """Wait until something has changed. Raises `StoreError` once patience is over."""
        listen_deadline = waiting.listen_deadline
        slice_, began = listen_deadline.slice(), monotonic()
        if self._changed.wait(slice_) or self._idle:
            listen_deadline.waited_since(began, slice_)
        elif listen_deadline.is_over:
            raise StoreError("no connection to Redis within the timeout", "timeout")
        else:
            waiting.waited_in_vain(slice_, monotonic() - began)

    def _made_here(self, listen_deadline: ListenDeadline) -> SyncConnection:
        began, closings = monotonic(), self._closings
        try:
            return self._driven(self._dial(within=max(listen_deadline.left, SHORTEST)), closings)
        except Exception as error:
            raise_interruption(error)
            raise store_error(error) from error
        finally:
            listen_deadline.waited_in_vain(monotonic() - began)

    def _connect(self, closings: int, attempt: object) -> None:
        """Connect; ``closings`` tells whether the pool was closed meanwhile."""
        began = monotonic()
        connection: SyncConnection | None = None
        failure: Exception | None = None
        try:
            connection = self._driven(self._dial(), closings)
        except Exception as error:  # noqa: BLE001 - whatever kept us from connecting is told to those who wait
            failure = error
        finally:  # also where this thread is killed, as gevent can
            with self._lock:
                self._connecting.discard(attempt)
                is_awaited = self._wanted > 0
                if connection is None:
                    self._failure = began, failure
                else:
                    self._idle.append(connection)
                    self._made_at = connection.looked_at
                self._changed.notify_all()
        if not is_awaited and (self._retired or closings != self._closings):
            self.close_idle()

    def _driven(self, connection: Any, closings: int) -> SyncConnection:
        """Take a connection over that redis-py has opened. Where that fails, the connection is closed."""
        try:
            driven = SyncConnection(connection)
        except Exception as error:
            connection.disconnect()
            raise internal_error(error) from error
        driven.others = self
        driven.closings = closings
        if (login := renewable_login(connection)) and closings == self._closings:
            self._renew_in_time(driven, login)
        return driven

    def _renew_in_time(self, connection: SyncConnection, login: Login) -> None:
        """Have connections replaced before their logins expire; by one thread, unless the pool is closed meanwhile."""
        with self._lock:
            self._expiring.add(connection)
            is_renewed, self._renewed_by = self._renewed_by == self._closings, self._closings
        if not is_renewed:
            try:
                background.start("renewal", keep_renewing, ref(self), login, self._closings)
            except RuntimeError:  # no thread can be started now: the next connection tries again
                self._renewed_by = -1

    def closed_since(self, closings: int) -> bool:
        """True if the pool was closed since it had been closed so often."""
        return closings != self._closings

    def renew(self, closings: int) -> Login | None:
        """Replace the connections, see `Renewing`: those in use are closed with their calls."""
        with self._lock:
            old = list(self._expiring)
        opened = self._dial()
        connection, login = self._driven(opened, closings), renewable_login(opened)
        if login is None:
            self._renewed_by = -1
        for each in old:
            each.session.retire()
        self.close_idle()
        self.give(connection)
        return login
