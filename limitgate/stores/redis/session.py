"""The protocol state of one connection, without I/O: calls become bytes, received bytes become events.

* Replies arrive in the order of calls. A call with ASKING has two replies, of which the second counts. Push messages are
  ignored.
* After NOSCRIPT, a call is resent with the script's text, after the calls in flight.
* Invalid RESP and unexpected bytes end the connection.
* If a connection is lost and nothing has arrived since a call was sent, the call is resent once on another connection. At
  worst it is charged twice, so too few requests pass, never too many. Refunds are never resent.
* Networks drop idle connections silently. If a connection is silent beyond `silence_allowed`, a second connection is opened.
  It takes over the calls if it opens before an answer arrives. A refund on an idle connection first waits for an answer;
  if no call is in flight, an empty call asks for one.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

from redis.exceptions import AskError, InvalidResponse, NoScriptError, TryAgainError

from limitgate.internal_errors import raise_interruption
from limitgate.stores.redis import wire
from limitgate.stores.redis.errors import Redirection
from limitgate.stores.redis.wire import PushNotification, Reader, error_of

IDLE = 1.0
"""A connection may have been dropped after this many idle seconds."""
DOUBT, MOST_DOUBT = 0.2, 0.5
"""Share of the timeout until an idle connection is doubted, and its maximum after wrong doubts. The rest is enough to retry."""
LONGEST_DOUBT = 0.25
"""Seconds."""

Call = TypeVar("Call", bound=wire.Call)

# Twice as fast as the constructor.
_new = tuple.__new__

_NO_REPLY = object()


class Answered(NamedTuple, Generic[Call]):
    """A call was answered, perhaps with an error."""

    call: Call
    reply: object


class Redirected(NamedTuple, Generic[Call]):
    call: Call
    reply: Redirection


class Resend(NamedTuple, Generic[Call]):
    """Redis doesn't have the script. Call `Session.send` again, which sends the text."""

    call: Call


class FellSilentError(ConnectionResetError):
    """A new connection succeeded while this one was silent."""


class MustClose(NamedTuple):
    """The connection must be closed. Calls in `Session.flying` get no reply."""

    error: Exception


NEED_DATA: Final = None

CallEvent = Answered[Call] | Redirected[Call] | Resend[Call]
Event = CallEvent[Call] | MustClose


class Doubts:
    """Allowed silence of an idle connection. It adapts to slow servers."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = DOUBT

    def silence_allowed(self, timeout: float) -> float:
        return min(self._share * timeout, LONGEST_DOUBT)

    def begun(self) -> None:
        self._share = min(2 * self._share, MOST_DOUBT)

    def confirmed(self) -> None:
        self._share = DOUBT


class Session(Generic[Call]):
    __slots__ = ("_end", "_is_retired", "_is_unheard", "_reader", "asked_at", "flying", "has_more", "is_settling")

    def __init__(self) -> None:
        self.flying: deque[Call] = deque()
        """Calls, the oldest first."""
        self.is_settling: bool = False
        """True while later calls must wait: the script's text is in flight, or a refund waits for an answer."""
        self.has_more: bool = False
        self.asked_at: float = 0.0
        """Time when the last answered call was sent."""
        self._is_retired = False
        self._is_unheard = True
        """True if nothing has arrived since the first call in flight."""
        self._end: MustClose | None = None
        self._reader = Reader(notEnoughData=_NO_REPLY, replyError=error_of)

    def send(self, call: Call) -> bytes:
        """Pack a call, which is in flight from now on. Raises one of `wire.UNSENDABLE` without effect."""
        packed = call.packed()
        if not self.flying:
            self._is_unheard = True
        if call.in_full:
            self.is_settling = True
        call.is_granted = not call.asking
        self.flying.append(call)
        return packed

    def receive_data(self, data: bytes) -> None:
        """Parse data; empty data is the end."""
        if data:
            self._is_unheard = False
            self.has_more = True
            self._reader.feed(data)
        else:
            self.receive_end(ConnectionResetError("Redis closed the connection"))

    def receive_end(self, error: Exception) -> None:
        self._end = MustClose(error)
        self.has_more = True

    def next_event(self) -> Event[Call] | None:
        while self.has_more and self._end is None:
            try:
                reply = self._reader.gets()
            except Exception as error:  # noqa: BLE001 - also an unreadable redirection, or a map with list keys
                raise_interruption(error)
                self.receive_end(InvalidResponse(f"invalid reply from Redis: {type(error).__name__}"))
                break
            if reply is _NO_REPLY:
                break
            self.has_more = self._is_retired or self._reader.has_data()
            if type(reply) is not bytes and isinstance(reply, PushNotification):
                continue
            flying = self.flying
            if not flying:
                self.receive_end(InvalidResponse("Redis sent an unexpected reply"))
                break
            call = flying[0]
            if not call.is_granted:
                call.is_granted = True
                continue
            flying.popleft()
            self.asked_at = call.sent
            if self.is_settling and not flying:
                self.is_settling = False
            if type(reply) is not bytes and isinstance(reply, Exception):
                return _error_event(call, reply)
            answered: Answered[Call] = _new(Answered, (call, reply))
            return answered
        if self._is_retired and not self.flying:
            self.receive_end(ConnectionResetError("the connection ended after an error from Redis"))
        return self._end or NEED_DATA

    def retire(self) -> None:
        self._is_retired = self.has_more = True

    def give_up(self) -> None:
        self._is_unheard = False
        self.receive_end(ConnectionResetError("LimitGate closed the connection"))

    def lies_idle(self, now: float) -> bool:
        """True after `IDLE` seconds without a call."""
        return not self.flying and now - self.asked_at >= IDLE

    @property
    def is_doubtful(self) -> bool:
        """True if the connection was idle before the calls in flight, and has been silent since."""
        return self._is_unheard and len(self.flying) > 0 and self.flying[0].sent - self.asked_at >= IDLE

    def replaced(self) -> None:
        self.receive_end(FellSilentError("the connection was silent and was replaced"))

    @property
    def is_open(self) -> bool:
        return self._end is None and not self._is_retired

    def is_quiet(self) -> bool:
        if self.has_more and self.next_event() is not NEED_DATA:
            return False
        return self._end is None and not (self._is_retired or self.flying or self.has_more)

    def may_repeat(self, call: Call) -> bool:
        return self._is_unheard and not call.is_repeated


def _error_event(call: Call, error: Exception) -> CallEvent[Call]:
    if isinstance(error, AskError | TryAgainError):
        return Redirected(call, error)
    if isinstance(error, NoScriptError) and not call.in_full:
        call.in_full = True
        return Resend(call)
    return Answered(call, error)
