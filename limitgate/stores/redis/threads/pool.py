"""One server's sync connections. They are opened in the background, so that an attempt may last longer than its call."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary, ref

from redis.exceptions import RedisError

from limitgate.errors import StoreError
from limitgate.internal_errors import internal_error, logged_errors, raise_interruption
from limitgate.process import background
from limitgate.process.clock import monotonic
from limitgate.stores.redis.credentials import Login
from limitgate.stores.redis.errors import store_error
from limitgate.stores.redis.redis_py import renewable_login
from limitgate.stores.redis.session import Doubts
from limitgate.stores.redis.threads.connection import SHORTEST, ListenDeadline, SyncConnection, WaitForThread

CHECK_LOGINS_EVERY = 1.0
"""Seconds between checks of logins, and of connections that were closed."""
MAX_CONNECTING = 4
"""Threads that connect, per server."""
LOOK_EVERY = 1.0
"""Seconds between checks for unexpected data."""


class ConnectionPool:
    def __init__(self, dial: Callable[..., Any]) -> None:
        self._dial = dial
        self._idle: deque[SyncConnection] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted = 0
        self._connecting: set[object] = set()
        self._failure: tuple[float, Exception | None] = 0.0, None
        self._retired = False
        self._closings = 0
        self._made_at = -math.inf
        self.doubts: Doubts = Doubts()
        self._logins: WeakKeyDictionary[SyncConnection, Login] = WeakKeyDictionary()
        self._logins_changed = threading.Event()
        self._renewed_by = -1
        """Number of closings when the renewal thread started; -1 without a thread."""

    def take(self, listen_deadline: ListenDeadline, *, by_looking: bool = False) -> SyncConnection:
        """Return a connection without unread data. Raises `StoreError` after ``listen_deadline``.

        Checks the connection after `LOOK_EVERY` seconds, or with ``by_looking``.
        """
        while (connection := self._pop()) is not None:
            if (not by_looking and monotonic() - connection.looked_at < LOOK_EVERY) or connection.is_quiet():
                return connection
            connection.close()
        return self._made(listen_deadline)

    def give(self, connection: SyncConnection) -> None:
        if not connection.session.is_quiet():
            connection.close()
            return
        self._idle.append(connection)
        # A later thread finds the idle connection.
        if self._wanted:
            with self._lock:
                self._changed.notify()
        if connection.closings != self._closings or self._retired:
            self.close_idle()

    def make_another(self) -> None:
        """Open another connection. Close idle connections, which may have been dropped as well."""
        self.close_idle()
        with self._lock:
            self._begin_to_connect(self._closings)

    def have_another(self, since: float) -> bool:
        return self._made_at >= since

    def close_idle(self) -> None:
        while (connection := self._pop()) is not None:
            connection.close()

    def close(self) -> None:
        """Close idle connections. Connections in use close after one more use."""
        # A signal handler may close while its thread holds the lock.
        self._closings += 1
        self.close_idle()

    def retire(self) -> None:
        self._retired = True
        self.close()

    def _pop(self) -> SyncConnection | None:
        """Take the newest connection, so that others age."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _made(self, listen_deadline: ListenDeadline) -> SyncConnection:
        arrived, closings = monotonic(), self._closings
        waiting = WaitForThread(listen_deadline)
        with self._lock:
            self._wanted += 1
            try:
                while (connection := self._pop()) is None:
                    if len(self._connecting) < min(self._wanted, MAX_CONNECTING) and not self._begin_to_connect(closings):
                        break
                    self._wait(waiting)
                    began, failure = self._failure
                    if began >= arrived and failure is not None:
                        raise store_error(failure) from failure
            finally:
                self._wanted -= 1
        return self._made_here(listen_deadline, closings) if connection is None else connection

    def _begin_to_connect(self, closings: int) -> bool:
        attempt = object()
        try:
            self._connecting.add(attempt)
            background.start("connect", self._connect, closings, attempt)
        except RuntimeError:
            self._connecting.discard(attempt)
            return False
        # A signal handler may raise anywhere.
        except BaseException:
            self._connecting.discard(attempt)
            raise
        return True

    def _wait(self, waiting: WaitForThread) -> None:
        listen_deadline = waiting.listen_deadline
        slice_, began = listen_deadline.slice(), monotonic()
        if self._changed.wait(slice_) or self._idle:
            listen_deadline.waited_since(began, slice_)
        elif listen_deadline.is_over:
            raise StoreError("no connection to Redis within the timeout", "timeout")
        else:
            waiting.waited_in_vain(slice_, monotonic() - began)

    def _made_here(self, listen_deadline: ListenDeadline, closings: int) -> SyncConnection:
        began = monotonic()
        try:
            return self._driven(self._dial(within=max(listen_deadline.left, SHORTEST)), closings)
        except Exception as error:
            raise_interruption(error)
            raise store_error(error) from error
        finally:
            listen_deadline.waited_in_vain(monotonic() - began)

    def _connect(self, closings: int, attempt: object) -> None:
        began = monotonic()
        connection: SyncConnection | None = None
        failure: Exception | None = None
        try:
            connection = self._driven(self._dial(), closings)
        except Exception as error:  # noqa: BLE001 - reported to the waiting threads
            failure = error
        finally:
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
        with self._lock:
            self._logins[connection] = login
            is_renewed, self._renewed_by = self._renewed_by == self._closings, self._closings
        self._logins_changed.set()
        if not is_renewed:
            try:
                background.start("renewal", _keep_renewing, ref(self), self._logins_changed, self._closings)
            # The next connection tries again.
            except RuntimeError:
                self._renewed_by = -1

    def next_renewal(self, closings: int) -> tuple[float, float] | None:
        """Return the monotonic time of the next renewal, and the seconds between attempts. None if no login expires."""
        with self._lock:
            logins = list(self._logins.values())
            if logins and closings == self._closings:
                return min([each.renew_at for each in logins]), min([each.retry_every for each in logins])
            if self._renewed_by == closings:
                self._renewed_by = -1
        return None

    def renew(self, closings: int) -> None:
        """Replace connections. Those in use close after their calls."""
        with self._lock:
            old = list(self._logins)
        connection = self._driven(self._dial(), closings)
        with self._lock:
            for each in old:
                self._logins.pop(each, None)
        for each in old:
            each.session.retire()
        self.close_idle()
        self.give(connection)


def _keep_renewing(pool: ref[ConnectionPool], logins_changed: Event, closings: int) -> None:
    failed_at = -math.inf
    while (renewing := pool()) is not None and (renewal := renewing.next_renewal(closings)) is not None:
        due_at, retry_every = renewal
        left = max(due_at, failed_at + retry_every) - monotonic()
        if left <= 0:
            failed_at = monotonic()
            with logged_errors(), suppress(OSError, RedisError):
                renewing.renew(closings)
                failed_at = -math.inf
        del renewing
        if left > 0:
            logins_changed.wait(min(left, CHECK_LOGINS_EVERY))
            logins_changed.clear()
