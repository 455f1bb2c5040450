"""A sync connection to Redis, for one thread at a time.

A `Session` parses the bytes, because redis-py restarts the timeout for each piece of a reply. A thread that waits for the GIL
receives nothing. So it waits in slices. A slice counts only if all of it was spent in the kernel.
"""

from __future__ import annotations

from contextlib import suppress
from ssl import SSLWantReadError
from typing import Any, Protocol
from weakref import finalize

from limitgate.internal_errors import raise_interruption
from limitgate.process.clock import monotonic
from limitgate.stores.redis.redis_py import has_data, reset_on_close, socket_of
from limitgate.stores.redis.session import NEED_DATA, Doubts, Event, Session
from limitgate.stores.redis.wire import Call

SLICE = 0.0125
"""Maximum of seconds in a slice."""
GRACE = 0.02
"""Seconds to read after the deadline, for each server if there are several."""
SHORTEST = 0.001
"""Minimum of seconds in a slice."""

STARVED_TURNS = 40
"""Waits for the GIL that don't count; connecting needs 5 to 25."""
LATE_S = 0.004
"""Longer waits are for the GIL, which other threads hold for 5 ms."""


class ListenDeadline:
    __slots__ = ("left", "spent")

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        self.left: float = seconds
        self.spent: float = spent

    @property
    def is_over(self) -> bool:
        """True after the deadline and a last short slice."""
        return self.left <= -SHORTEST

    @property
    def is_exhausted(self) -> bool:
        """True if all data that arrived before the deadline was read."""
        return self.left <= -GRACE

    def slice(self) -> float:
        return max(min(self.left, SLICE), SHORTEST)

    def waited_in_vain(self, seconds: float) -> None:
        self.left -= seconds
        self.spent += seconds

    def waited_since(self, began: float, slice_: float) -> None:
        """Count a slice in which data arrived, unless this thread was away."""
        seconds = monotonic() - began
        if seconds <= slice_:
            self.left -= seconds


class WaitForThread:
    """A deadline for a wait for another thread, which may wait for the GIL itself."""

    def __init__(self, listen_deadline: ListenDeadline) -> None:
        self.listen_deadline = listen_deadline
        self._turns = 0.0

    def waited_in_vain(self, slice_: float, elapsed: float) -> None:
        """Note a slice without progress.

        The first `STARVED_TURNS` don't count, and later ones only in part, because the
        other thread waits for the GIL, too.
        """
        late_s = elapsed - slice_
        if late_s > LATE_S and self._turns < STARVED_TURNS:
            self._turns += elapsed / late_s
        else:
            self.listen_deadline.waited_in_vain(slice_ * slice_ / elapsed if late_s > slice_ else slice_)


_CHUNK = 16_384


class OtherConnections(Protocol):
    doubts: Doubts

    def make_another(self) -> None: ...

    def have_another(self, since: float) -> bool:
        """True if another connection was opened since."""


class SyncConnection:
    """A session on a redis-py connection."""

    others: OtherConnections | None = None
    closings = 0
    """How often the pool had been closed before dialing."""

    def __init__(self, connection: Any) -> None:
        self.session: Session[Call] = Session()
        # In a garbage cycle, Python may free the socket before the connection that closes it. This finalizer runs before both.
        finalize(self, connection.disconnect).atexit = False
        self._connection = connection
        # Without the socket, redis-py would send with the connect timeout.
        self._socket = socket_of(connection)
        self._timeout = -1.0
        self._left = 0.0
        self._doubted_at: float | None = None
        self.looked_at: float = monotonic()
        """Last check without calls in flight."""
        self.session.asked_at = self.looked_at

    def is_quiet(self) -> bool:
        self.looked_at = monotonic()
        try:
            self._set_timeout(0.0)
            with suppress(BlockingIOError, SSLWantReadError):
                self.session.receive_data(self._socket.recv(_CHUNK))
        except OSError as error:
            raise_interruption(error)
            return False
        return self.session.is_quiet()

    def send(self, data: bytes, listen_deadline: ListenDeadline) -> None:
        """Send the calls. Raises `TimeoutError`; another `OSError` becomes an event."""
        self._left, self._doubted_at = listen_deadline.left, None
        left: bytes | memoryview = data
        # Usually all bytes are sent at once, so the first wait is not measured.
        began = 0.0
        while True:
            if self._timeout != SLICE or listen_deadline.left < SLICE:
                self._set_timeout(listen_deadline.slice())
            try:
                sent = self._socket.send(left)
            except TimeoutError as error:
                raise_interruption(error)
                self._waited_in_vain(listen_deadline)
            except OSError as error:
                raise_interruption(error)
                self.session.receive_end(error)
                return
            else:
                if sent == len(left):
                    return
                listen_deadline.waited_since(began, self._timeout)
                left = memoryview(left)[sent:]
            began = monotonic()

    def next_event(self, listen_deadline: ListenDeadline) -> Event[Call]:
        """Raises `TimeoutError`."""
        session = self.session
        while not session.has_more or (event := session.next_event()) is NEED_DATA:
            # Usually the timeout stays the same.
            if self._timeout != SLICE or listen_deadline.left < SLICE:
                if listen_deadline.is_exhausted:
                    raise TimeoutError
                self._set_timeout(listen_deadline.slice() if self._doubted_at is None else SHORTEST)
            began = monotonic()
            try:
                data = self._socket.recv(_CHUNK)
            except TimeoutError as error:
                raise_interruption(error)
                self._waited_in_vain(listen_deadline)
                if self.others is not None and session.is_doubtful:
                    self._doubt(self.others, self._left - listen_deadline.left)
            except OSError as error:
                raise_interruption(error)
                session.receive_end(error)
            else:
                listen_deadline.waited_since(began, self._timeout)
                session.receive_data(data)
        return event

    def _doubt(self, others: OtherConnections, silence: float) -> None:
        if self._doubted_at is not None:
            # A server that was only slow has answered here before it accepts another connection.
            if others.have_another(self._doubted_at) and not has_data(self._socket):
                others.doubts.confirmed()
                reset_on_close(self._socket)
                self.session.replaced()
        elif silence >= others.doubts.silence_allowed(self._left):
            self._doubted_at = monotonic()
            # To notice the other connection soon.
            self._set_timeout(SHORTEST)
            others.doubts.begun()
            others.make_another()

    def close(self) -> None:
        self._connection.disconnect()

    def _waited_in_vain(self, listen_deadline: ListenDeadline) -> None:
        listen_deadline.waited_in_vain(self._timeout)
        if listen_deadline.is_over:
            raise TimeoutError

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self._timeout:
            self._socket.settimeout(seconds)
            self._timeout = seconds
