"""One pipelined connection to Redis on asyncio.

The transport feeds a `Session` directly, because streams need a task and several wake-ups per reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ref

from limitgate.process.clock import call_later, monotonic
from limitgate.stores.redis.aio.batch import Batch
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.credentials import Login
from limitgate.stores.redis.redis_py import has_data, reset_on_close, take_writer
from limitgate.stores.redis.session import NEED_DATA, CallEvent, MustClose, Session


class Owner(Protocol):
    def heard(self, connection: AsyncConnection, event: CallEvent[Batch]) -> None: ...

    def lost(self, connection: AsyncConnection) -> None:
        """Handle a lost connection. The calls in ``session.flying`` get no reply."""

    def renew(self, connection: AsyncConnection) -> bool:
        """Open another connection. False if this one is no longer in use."""


class AsyncConnection(asyncio.Protocol):
    """A session on a redis-py connection. Refers to its ``owner`` weakly, so that a dropped store is freed."""

    def __init__(self, connection: Any, owner: Owner, clock: ListeningClock) -> None:
        self.session: Session[Batch] = Session()
        self.session.asked_at = monotonic()
        self.given_up: bool = False
        self.silent_since: float = 0.0
        """Start of the silence, if calls are in flight."""
        self._unsent: list[bytes] = []
        self._clock = clock
        self._owner = ref(owner)
        self._writer = take_writer(connection)
        self._transport: Any = self._writer.transport
        self._transport.set_protocol(self)
        self.is_closing: Callable[[], bool] = self._transport.is_closing

    def send(self, batch: Batch) -> None:
        """Queue a batch for `flush`, or raise one of `wire.UNSENDABLE` and queue nothing."""
        session = self.session
        if not session.flying:
            self.silent_since = self._clock.seconds
        self._unsent.append(session.send(batch))

    def flush(self) -> None:
        unsent = self._unsent
        if unsent:
            self._transport.write(b"".join(unsent))
            unsent.clear()

    def silence(self) -> float:
        return self._clock.seconds - self.silent_since if self.session.flying else 0.0

    def give_up(self) -> None:
        """Close without resending."""
        self.session.give_up()
        self._abort()

    def retire(self) -> None:
        self.session.retire()
        if not self.session.flying:
            self.give_up()

    def has_news(self) -> bool:
        """True if the kernel has unread data."""
        return has_data(self._transport.get_extra_info("socket"))

    def replace(self) -> None:
        """Discard unsent data, because another connection takes over."""
        self.session.replaced()
        reset_on_close(self._transport.get_extra_info("socket"))
        self._abort()

    def _abort(self) -> None:
        self.given_up = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
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
        owner = self._owner()
        if owner is not None:
            owner.lost(self)


def renew_in_time(owner: Owner, connection: AsyncConnection, login: Login) -> None:
    """Replace a connection before its login expires, with retries."""
    due_in = max(login.renew_at - monotonic(), 0.0)
    loop = asyncio.get_running_loop()
    call_later(loop, due_in, partial(_renew, ref(owner), ref(connection), login.retry_every))


def _renew(owner: ref[Owner], connection: ref[AsyncConnection], retry_every: float) -> None:
    here, expiring = owner(), connection()
    if here is not None and expiring is not None and here.renew(expiring):
        call_later(asyncio.get_running_loop(), retry_every, partial(_renew, owner, connection, retry_every))
