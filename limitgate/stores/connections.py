"""The connections of threads to one Redis server: kept while they are idle, made by other threads.

Connecting goes on past the deadline of the call that began it, and what comes of it serves the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from limitgate.errors import StoreError
from limitgate.stores.faults import store_error
from limitgate.stores.line import Line, left_until

MAX_CONNECTING = 4
"""Threads that connect to a server at a time."""


class Connections:
    """Keeps connections, made of the redis-py ones that ``dial`` opens."""

    def __init__(self, dial: Callable[[], Any]) -> None:
        self._dial = dial
        self._idle: deque[Line] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted = self._connecting = 0
        self._failure: tuple[float, Exception | None] = 0.0, None
        self._closed = False

    def take(self, deadline: float) -> Line:
        """A connection that is open and has nothing left to read. Raises `StoreError` by the deadline."""
        while (connection := self._pop()) is not None:
            if connection.is_quiet():
                return connection
            connection.close()
        return self._made(deadline)

    def give(self, connection: Line) -> None:
        """Leave a connection for the next call."""
        with self._lock:
            self._idle.append(connection)
            self._changed.notify()
        if self._closed:
            self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that no thread is using. One that is being made is kept for the next call."""
        while (connection := self._pop()) is not None:
            connection.close()

    def close(self) -> None:
        """Close all connections as they become idle."""
        self._closed = True
        self.close_idle()

    def _pop(self) -> Line | None:
        """An idle connection, the newest first so that the others can age; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _made(self, deadline: float) -> Line:
        """A new connection, made by another thread that goes on past the deadline and then leaves it for the next."""
        arrived = time.monotonic()
        with self._lock:
            self._wanted += 1
            try:
                while (connection := self._pop()) is None:
                    if self._connecting < min(self._wanted, MAX_CONNECTING):
                        threading.Thread(target=self._connect, name="limitgate-connect", daemon=True).start()
                        self._connecting += 1
                    if not self._changed.wait(left_until(deadline)) and not self._idle:
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
        connection: Line | None = None
        failure: Exception | None = None
        try:
            connection = Line(self._dial())
        except Exception as error:  # noqa: BLE001 - whatever kept us from connecting is told to those who wait
            failure = error
        with self._lock:
            self._connecting -= 1
            if connection is None:
                self._failure = began, failure
            else:
                self._idle.append(connection)
            self._changed.notify_all()
        if self._closed:
            self.close_idle()
