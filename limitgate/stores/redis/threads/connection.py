"""One connection of threads to Redis, used by one at a time: calls out, events in, both with patience.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Bytes are read straight from the socket into a `Session`:
redis-py would give each piece of a reply as long as the whole, so that a trickle could go on for ever.
"""

from __future__ import annotations

from contextlib import suppress
from ssl import SSLWantReadError
from time import monotonic
from typing import Any

from limitgate.stores.redis.dial.redis_py import socket_of
from limitgate.stores.redis.protocol.session import NEED_DATA, Event, Session
from limitgate.stores.redis.protocol.wire import Call
from limitgate.stores.redis.threads.patience import SLICE, Patience

_CHUNK = 16_384
"""Bytes to read at a time."""


class SyncConnection:
    """Drives a session on a connection that redis-py has opened."""

    def __init__(self, connection: Any) -> None:
        self.session: Session[Call] = Session()
        self._connection = connection
        self._socket = socket_of(connection)  # redis-py sends under the timeout of connecting
        self._timeout = -1.0  # unknown
        self.looked_at = monotonic()
        """Time at which the socket was last looked at while no call was on its way, monotonic, in seconds."""

    def is_quiet(self) -> bool:
        """True if it is open and nothing was sent that no call waits for."""
        self.looked_at = monotonic()
        try:
            self._set_timeout(0.0)
            with suppress(BlockingIOError, SSLWantReadError):
                self.session.receive_data(self._socket.recv(_CHUNK))
        except OSError:
            return False
        return self.session.is_quiet()

    def send(self, data: bytes, patience: Patience) -> None:
        """Send what the session has packed. Raises `TimeoutError`; any other `OSError` is the session's next event."""
        left: bytes | memoryview = data
        began = 0.0  # the first wait is not counted unless it is in vain: almost always all is sent at once
        while True:
            if self._timeout != SLICE or patience.left < SLICE:
                self._set_timeout(patience.slice())
            try:
                sent = self._socket.send(left)
            except TimeoutError:
                self._waited_in_vain(patience)
            except OSError as error:
                self.session.receive_end(error)
                return
            else:
                if sent == len(left):
                    return
                patience.waited_since(began, self._timeout)
                left = memoryview(left)[sent:]
            began = monotonic()

    def next_event(self, patience: Patience) -> Event[Call]:
        """Wait for what Redis says next. Raises `TimeoutError`."""
        session = self.session
        while not session.has_more or (event := session.next_event()) is NEED_DATA:
            if self._timeout != SLICE or patience.left < SLICE:  # else it stays as it is, from call to call
                if patience.is_exhausted:
                    raise TimeoutError
                self._set_timeout(patience.slice())
            began = monotonic()
            try:
                data = self._socket.recv(_CHUNK)
            except TimeoutError:
                self._waited_in_vain(patience)
            except OSError as error:
                session.receive_end(error)
            else:
                patience.waited_since(began, self._timeout)
                session.receive_data(data)
        return event

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _waited_in_vain(self, patience: Patience) -> None:
        """The socket was not ready in time. Raises `TimeoutError` once patience is over."""
        patience.waited_in_vain(self._timeout)
        if patience.is_over:
            raise TimeoutError

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self._timeout:
            self._socket.settimeout(seconds)
            self._timeout = seconds
