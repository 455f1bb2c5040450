"""One connection of threads to Redis, used by one at a time: calls out, replies in, both by a deadline.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Replies are read straight from the socket into hiredis:
redis-py would give each piece of a reply as long as the whole, so that a trickle could go on for ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.exceptions import InvalidResponse, RedisError

from limitgate.stores.wire import Call

_MORE = object()
"""What hiredis gives when a reply has not arrived whole."""
_CHUNK = 65_536
"""Bytes to read at a time."""


class Line:
    """A connection that redis-py has opened."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket = connection._sock  # noqa: SLF001 - redis-py sends under the timeout of connecting
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,  # noqa: SLF001 - by which redis-py tells errors apart
            notEnoughData=_MORE,
        )

    def is_quiet(self) -> bool:
        """Whether it is open and has nothing left to read."""
        try:
            return not (self._replies.has_data() or self._connection.can_read(0))
        except (RedisError, OSError):
            return False

    def send(self, calls: Sequence[Call], deadline: float) -> None:
        """Send calls together. Raises one of `wire.UNSENDABLE`, or `OSError`."""
        packed = [hiredis.pack_command(command) for call in calls for command in call.commands()]  # type: ignore[arg-type]
        self._socket.settimeout(left_until(deadline))
        self._socket.sendall(b"".join(packed))

    def reply(self, call: Call, deadline: float) -> object:
        """What Redis says to a call, be it an error. Raises `OSError` or `InvalidResponse`."""
        if call.asking:
            self._reply(deadline)
        return self._reply(deadline)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _reply(self, deadline: float) -> object:
        overdue = False
        while (reply := self._gets()) is _MORE or isinstance(reply, hiredis.PushNotification):
            if reply is _MORE:
                if overdue:
                    raise TimeoutError
                self._socket.settimeout(left_until(deadline))
                data = self._socket.recv(_CHUNK)
                if not data:
                    raise ConnectionResetError("Redis closed the connection")
                self._replies.feed(data)
                overdue = time.monotonic() >= deadline
        return reply

    def _gets(self) -> object:
        try:
            return self._replies.gets()
        except (TypeError, ValueError) as error:  # redis-py's about an error it cannot read, hiredis' about a map by lists
            raise InvalidResponse(str(error)) from error


def left_until(deadline: float) -> float:
    """Seconds to a deadline; never quite none, which sockets would take for not blocking."""
    return max(0.001, deadline - time.monotonic())
