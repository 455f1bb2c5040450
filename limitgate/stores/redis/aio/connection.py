"""One connection to Redis on asyncio, on which calls are pipelined: sent as they come, answered in the same order.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Once it has connected, we take over the transport and hand
what arrives straight to hiredis: a reply then costs one callback, where redis-py's streams cost a task and several wake-ups.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import hiredis

from limitgate.stores.redis import wire

Call = TypeVar("Call", bound=wire.Call)

_MORE = object()
"""What hiredis gives when a reply has not arrived whole."""


class Connection(asyncio.Protocol, Generic[Call]):
    """Sends calls on a connection that redis-py has opened, until it is lost.

    ``answered(pipeline, call, reply)`` is told of every reply, an error from Redis being one too; ``lost(pipeline)`` of the
    end of the connection, when the calls still in ``flying`` will never be answered. ``clock`` tells seconds of listening.
    """

    def __init__(
        self,
        connection: Any,
        answered: Callable[[Connection[Call], Call, object], None],
        lost: Callable[[Connection[Call]], None],
        clock: Callable[[], float],
    ) -> None:
        self.flying: deque[Call] = deque()
        """The calls that are not answered yet."""
        self.unheard = True
        """True if nothing has arrived since a call was sent while no other was on its way."""
        self.given_up = False
        self._since = 0.0
        self._unsent: list[bytes] = []
        self._clock = clock
        self._answered = answered
        self._lost = lost
        self._connection = connection
        self._replies = hiredis.Reader(notEnoughData=_MORE, replyError=connection._parser.parse_error)  # noqa: SLF001
        self._transport = connection._writer.transport  # noqa: SLF001
        self._transport.set_protocol(self)

    def __bool__(self) -> bool:
        """True if the connection is open, as far as we have heard."""
        return not self._transport.is_closing()

    def send(self, call: Call) -> None:
        """Send a call with the next `flush`. Nothing has happened if it cannot be put into bytes."""
        commands = call.commands()
        packed = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        if not self.flying:
            self.unheard, self._since = True, self._clock()
        call.replies_due = len(commands)
        self.flying.append(call)
        self._unsent += packed

    def flush(self) -> None:
        """Send what waits to be sent, together."""
        if self._unsent:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()

    def silence(self) -> float:
        """Seconds for which calls have been waiting and none was answered."""
        return self._clock() - self._since if self.flying else 0.0

    def give_up(self) -> None:
        """Close the connection at once."""
        self.given_up = True
        self._transport.abort()
        self._connection._close()  # noqa: SLF001 - else redis-py would complain that nobody closed it

    def data_received(self, data: bytes) -> None:
        """Hand out the replies that have arrived whole; bytes that nobody waits for cannot be a reply of ours."""
        self.unheard = False
        self._replies.feed(data)
        while (reply := self._reply()) is not _MORE:
            if isinstance(reply, hiredis.PushNotification):
                continue
            if not self.flying:
                self.give_up()
                return
            self._since = self._clock()
            call = self.flying[0]
            call.replies_due -= 1
            if not call.replies_due:
                self._answered(self, self.flying.popleft(), reply)

    def _reply(self) -> object:
        """The next reply that has arrived whole. What is not RESP, or more than Python can make of it, ends the connection."""
        try:
            return self._replies.gets()
        except Exception:  # noqa: BLE001 - besides hiredis' own, redis-py's about an error it cannot read, a map by lists
            self.give_up()
            return _MORE

    def connection_lost(self, error: Exception | None) -> None:
        """Let go of the connection and say so."""
        try:
            self._connection._close()  # noqa: SLF001
        finally:
            self._lost(self)
