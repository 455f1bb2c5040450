"""One connection to Redis on asyncio, on which calls are pipelined: sent as they come, answered in the same order.

Connecting, TLS, AUTH and the protocol's version are redis-py's. Once it has connected, the transport hands what arrives
straight to a `Session`: a reply then costs one callback, where redis-py's streams cost a task and several wake-ups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from limitgate.process.clock import monotonic
from limitgate.stores.redis.aio.batch import Batch
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.dial.redis_py import take_writer
from limitgate.stores.redis.dial.sockets import has_data, reset_on_close
from limitgate.stores.redis.protocol.session import NEED_DATA, CallEvent, MustClose, Session


class Owner(Protocol):
    """Uses a connection."""

    def heard(self, connection: AsyncConnection, event: CallEvent[Batch]) -> None:
        """Deal with an event, any but the last."""

    def lost(self, connection: AsyncConnection) -> None:
        """Let go of a connection that has ended: the calls still in ``session.flying`` will get no reply."""


class AsyncConnection(asyncio.Protocol):
    """Drives a session on a connection that redis-py has opened.

    The event loop refers to this, so this refers to its ``owner`` weakly: a store that is dropped is freed, and closes.
    """

    def __init__(self, connection: Any, owner: Owner, clock: ListeningClock) -> None:
        self.session: Session[Batch] = Session()
        self.session.asked_at = monotonic()
        self.given_up = False
        self.silent_since = 0.0
        """Time since which calls have been waiting and none was answered, by the clock; without calls of no meaning."""
        self._unsent: list[bytes] = []
        self._clock = clock
        self._owner = ref(owner)
        self._writer = take_writer(connection)
        self._transport: Any = self._writer.transport
        self._transport.set_protocol(self)
        self.is_closing: Callable[[], bool] = self._transport.is_closing
        """True unless the connection is open, as far as is known."""

    def send(self, batch: Batch) -> None:
        """Send a batch with the next `flush`. Raises one of `wire.UNSENDABLE`, and nothing has happened."""
        session = self.session
        if not session.flying:
            self.silent_since = self._clock.seconds
        self._unsent.append(session.send(batch))

    def flush(self) -> None:
        """Send what waits to be sent, together."""
        unsent = self._unsent
        if unsent:
            self._transport.write(b"".join(unsent))
            unsent.clear()

    def silence(self) -> float:
        """Seconds for which calls have been waiting and none was answered."""
        return self._clock.seconds - self.silent_since if self.session.flying else 0.0

    def give_up(self) -> None:
        """Close the connection at once. Nothing on it is sent again."""
        self.session.give_up()
        self._abort()

    def retire(self) -> None:
        """Take no further calls, and close the connection with the last reply."""
        self.session.retire()
        if not self.session.flying:
            self.give_up()

    def has_news(self) -> bool:
        """True if the event loop has yet to read what the kernel has: a server that was only slow has answered by then."""
        return has_data(self._transport.get_extra_info("socket"))

    def replace(self) -> None:
        """Close the connection at once: another one takes over its calls. What the kernel has not sent yet is not sent."""
        self.session.replaced()
        reset_on_close(self._transport.get_extra_info("socket"))
        self._abort()

    def _abort(self) -> None:
        self.given_up = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived whole."""
        session, owner = self.session, self._owner()
        if owner is None:
            self.give_up()
            return
        session.receive_data(data)
        while session.has_more and (event := session.next_event()) is not NEED_DATA:
            if isinstance(event, MustClose):
                if not self.given_up:
                    self.give_up()
                return
            self.silent_since = self._clock.seconds
            owner.heard(self, event)

    def connection_lost(self, error: Exception | None) -> None:
        """Say so."""
        owner = self._owner()
        if owner is not None:
            owner.lost(self)
