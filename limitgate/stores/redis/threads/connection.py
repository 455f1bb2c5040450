"""One connection of threads to Redis, used by one at a time: calls out, events in, both with patience.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Bytes are read straight from the socket into a `Session`:
redis-py would give each piece of a reply as long as the whole, so that a trickle could go on for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from ssl import SSLWantReadError
from time import monotonic
from typing import Any, TypeVar

from redis.exceptions import RedisError

from limitgate.stores.redis.protocol.session import NEED_DATA, Event, Session
from limitgate.stores.redis.protocol.wire import Call
from limitgate.stores.redis.threads.patience import SLICE, Patience

T = TypeVar("T")

_CHUNK = 65_536
"""Bytes to read at a time."""


class SyncConnection:
    """Drives a session on a connection that redis-py has opened."""

    def __init__(self, connection: Any) -> None:
        self.session: Session[Call] = Session(connection._parser.parse_error)  # noqa: SLF001 - tells kinds of errors apart
        self._connection = connection
        self._socket = connection._sock  # noqa: SLF001 - redis-py sends under the timeout of connecting
        self._timeout = -1.0  # unknown
        self.looked_at = monotonic()
        """Time at which the socket was last looked at while no call was on its way, monotonic, in seconds."""

    def is_quiet(self) -> bool:
        """True if it is open and nothing was sent that no call waits for."""
        self.looked_at = monotonic()
        try:
            if self._connection.can_read(0):
                self._set_timeout(0.0)
                with suppress(BlockingIOError, SSLWantReadError):
                    self.session.receive_data(self._socket.recv(_CHUNK))
        except (RedisError, OSError):
            return False
        return self.session.is_quiet()

    def send(self, data: bytes, patience: Patience) -> None:
        """Send what the session has packed. Raises `TimeoutError`; any other `OSError` is the session's next event."""
        try:
            sent = self._send_at_once(data, patience)
            left = memoryview(data)[sent:] if sent < len(data) else b""
            while left:
                sent = self._waiting(patience, self._socket.send, left)
                left = memoryview(left)[sent:] if sent < len(left) else b""
        except TimeoutError:
            raise
        except OSError as error:
            self.session.receive_end(error)

    def _send_at_once(self, data: bytes, patience: Patience) -> int:
        """Send what there is room for and return its length: almost always that is all, so that no time has to be counted."""
        if self._timeout != SLICE or patience.left < SLICE:
            return 0
        try:
            sent: int = self._socket.send(data)
        except TimeoutError:
            patience.waited_in_vain(SLICE)
            return 0
        return sent

    def next_event(self, patience: Patience) -> Event[Call]:
        """Wait for what Redis says next. Raises `TimeoutError`."""
        while (event := self.session.next_event()) is NEED_DATA:
            if patience.is_exhausted:
                raise TimeoutError
            try:
                data = self._waiting(patience, self._socket.recv, _CHUNK)
            except TimeoutError:
                raise
            except OSError as error:
                self.session.receive_end(error)
            else:
                self.session.receive_data(data)
        return event

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _waiting(self, patience: Patience, operation: Callable[[Any], T], given: object) -> T:
        """Do something with the socket as soon as it is ready. Raises `TimeoutError` if it is not, and patience is over."""
        while True:
            if self._timeout != SLICE or patience.left < SLICE:  # else it stays as it is, from call to call
                self._set_timeout(patience.slice())
            began = monotonic()
            try:
                result = operation(given)
            except TimeoutError:
                patience.waited_in_vain(self._timeout)
                if patience.is_over:
                    raise
            else:
                patience.waited_since(began, self._timeout)
                return result

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self._timeout:
            self._socket.settimeout(seconds)
            self._timeout = seconds
