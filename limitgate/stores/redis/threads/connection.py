"""One connection of threads to Redis, used by one at a time: calls out, replies in, both with patience.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Replies are read straight from the socket into hiredis:
redis-py would give each piece of a reply as long as the whole, so that a trickle could go on for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

import hiredis
from redis.exceptions import InvalidResponse, RedisError

from limitgate.stores.redis.threads.patience import Patience
from limitgate.stores.redis.wire import Call

T = TypeVar("T")

_MORE = object()
"""What hiredis gives when a reply has not arrived whole."""
_CHUNK = 65_536
"""Bytes to read at a time."""


class Connection:
    """A connection that redis-py has opened."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket = connection._sock  # noqa: SLF001 - redis-py sends under the timeout of connecting
        self._timeout: float | None = None
        self._loss: OSError | None = None
        """What ended the connection while something was sent."""
        self._is_unheard = False
        """True if nothing has arrived since something was sent."""
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,  # noqa: SLF001 - by which redis-py tells errors apart
            notEnoughData=_MORE,
        )

    def is_quiet(self) -> bool:
        """True if it is open and has nothing left to read."""
        try:
            return not (self._replies.has_data() or self._connection.can_read(0))
        except (RedisError, OSError):
            return False

    def send(self, calls: Sequence[Call], patience: Patience) -> None:
        """Send calls together. Raises one of `wire.UNSENDABLE`, or `TimeoutError`; any other `OSError` is told by `reply`."""
        packed = [hiredis.pack_command(command) for call in calls for command in call.commands()]  # type: ignore[arg-type]
        self._is_unheard = True
        left = memoryview(b"".join(packed))
        try:
            while left:
                left = left[self._waiting(patience, self._socket.send, left) :]
        except TimeoutError:
            raise
        except OSError as error:
            self._loss = error

    def may_have_been_dead(self, error: BaseException) -> bool:
        """True if an error is the loss of a connection that may have been dead before the last calls were sent."""
        return isinstance(error, OSError) and not isinstance(error, TimeoutError) and self._is_unheard

    def reply(self, call: Call, patience: Patience) -> object:
        """What Redis says to a call, be it an error. Raises `OSError` or `InvalidResponse`."""
        if call.asking:
            self._reply(patience)
        return self._reply(patience)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _reply(self, patience: Patience) -> object:
        if self._loss is not None:
            raise self._loss
        while (reply := self._gets()) is _MORE or isinstance(reply, hiredis.PushNotification):
            if reply is _MORE:
                if patience.is_exhausted:
                    raise TimeoutError
                data = self._waiting(patience, self._socket.recv, _CHUNK)
                if not data:
                    raise ConnectionResetError("Redis closed the connection")
                self._is_unheard = False
                self._replies.feed(data)
        return reply

    def _waiting(self, patience: Patience, operation: Callable[[Any], T], given: object) -> T:
        """Do something with the socket as soon as it is ready. Raises `TimeoutError` if it is not, and patience is over."""
        while True:
            slice_, began = patience.slice(), monotonic()
            if slice_ != self._timeout:
                self._socket.settimeout(slice_)
                self._timeout = slice_
            try:
                result = operation(given)
            except TimeoutError:
                patience.waited_in_vain(slice_)
                if patience.is_over:
                    raise
            else:
                patience.waited_since(began, slice_)
                return result

    def _gets(self) -> object:
        try:
            return self._replies.gets()
        except (TypeError, ValueError) as error:  # redis-py's about an error it cannot read, hiredis' about a map by lists
            raise InvalidResponse(str(error)) from error
