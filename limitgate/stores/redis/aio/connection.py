"""One connection to Redis on asyncio, on which calls are pipelined: sent as they come, answered in the same order.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Once it has connected, the transport hands what arrives
straight to a `Session`: a reply then costs one callback, where redis-py's streams cost a task and several wake-ups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from limitgate.stores.redis.aio.batch import Batch
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.dial.redis_py import take_writer
from limitgate.stores.redis.protocol.session import NEED_DATA, CallEvent, MustClose, Session


class AsyncConnection(asyncio.Protocol):
    """Drives a session on a connection that redis-py has opened.

    ``heard(connection, event)`` gets every event but the last; ``lost(connection)`` is called at the end of the connection,
    when the calls still in ``session.flying`` will get no reply.
    """

    def __init__(
        self,
        connection: Any,
        heard: Callable[[AsyncConnection, CallEvent[Batch]], None],
        lost: Callable[[AsyncConnection], None],
        clock: ListeningClock,
    ) -> None:
        self.session: Session[Batch] = Session()
        self.given_up = False
        self._since = 0.0
        self._unsent: list[bytes] = []
        self._clock = clock
        self._heard = heard
        self._lost = lost
        self._writer = take_writer(connection)
        self._transport: Any = self._writer.transport
        self._transport.set_protocol(self)
        self.is_closing: Callable[[], bool] = self._transport.is_closing
        """True unless the connection is open, as far as is known."""

    def send(self, batch: Batch) -> None:
        """Send a batch with the next `flush`. Raises one of `wire.UNSENDABLE`, and nothing has happened."""
        session = self.session
        if not session.flying:
            self._since = self._clock.seconds
        self._unsent.append(session.send(batch))

    def flush(self) -> None:
        """Send what waits to be sent, together."""
        unsent = self._unsent
        if unsent:
            self._transport.write(b"".join(unsent))
            unsent.clear()

    def silence(self) -> float:
        """Seconds for which calls have been waiting and none was answered."""
        return self._clock.seconds - self._since if self.session.flying else 0.0

    def give_up(self) -> None:
        """Close the connection at once. Nothing on it is sent again."""
        self.given_up = True
        self.session.give_up()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived whole."""
        session, heard = self.session, self._heard
        session.receive_data(data)
        while session.has_more and (event := session.next_event()) is not NEED_DATA:
            if isinstance(event, MustClose):
                if not self.given_up:
                    self.give_up()
                return
            self._since = self._clock.seconds
            heard(self, event)

    def connection_lost(self, error: Exception | None) -> None:
        """Say so."""
        self._lost(self)
