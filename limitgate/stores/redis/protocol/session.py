"""One connection's conversation with Redis without any I/O: calls become bytes to send, received bytes become events.

Decided here, for asyncio and threads alike:

* Replies come in the order of the calls. A call sent with ASKING has two, of which the last counts. A push message belongs to
  no call.
* NOSCRIPT is no answer: the call is sent again with the script's text, behind the calls on their way (`Resend`).
* MOVED, ASK and TRYAGAIN are no answers either (`Redirected`): `router` says where the call goes next.
* The connection ends (`MustClose`) at bytes that are no RESP, at bytes that no call waits for, at the end of the stream, and
  once it is retired and its last call is answered.
* A call on a connection that is lost is sent again on another one, once, if nothing was heard since it was sent: most likely
  the connection was dead already. If Redis had carried the call out, it is charged twice, so too little is admitted, never too
  much. For the same reason what gives back is never sent again (`wire.Call.repeated`).
* Networks drop idle connections without telling either side. So a connection that lay idle is doubted if its next call is not
  answered within a part of the timeout (`silence_allowed`): another one is made beside it, and if that comes about before
  anything is heard here, it takes over the calls (`Session.replaced`). They count as calls on a connection that is lost. What
  gives back goes behind a call that touches no bucket, once that is answered (`Session.lies_idle`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

from redis.exceptions import AskError, InvalidResponse, NoScriptError, TryAgainError

from limitgate.internal_errors import raise_interruption
from limitgate.stores.redis.errors import Redirection
from limitgate.stores.redis.protocol import wire
from limitgate.stores.redis.protocol.resp import PushNotification, Reader, error_of

IDLE = 1.0
"""Seconds without a call after which a connection may have been dropped. So it costs nothing under steady traffic."""
DOUBT, MOST_DOUBT = 0.2, 0.5
"""Share of a timeout within which a connection that lay idle has to answer, and that after doubts that were mistaken. What is
left is enough to connect and to ask once more."""
LONGEST_DOUBT = 0.25
"""Seconds within which it has to answer at most, however long the timeout is."""

Call = TypeVar("Call", bound=wire.Call)

_new = tuple.__new__  # half the time that a named tuple's own takes

_NO_REPLY = object()
"""Returned by the reader while no reply has arrived whole."""


class Answered(NamedTuple, Generic[Call]):
    """Redis has answered a call, be it by an error."""

    call: Call
    reply: object


class Redirected(NamedTuple, Generic[Call]):
    """A node of a cluster has sent a call elsewhere, or asks for patience. It has not carried the call out."""

    call: Call
    reply: Redirection


class Resend(NamedTuple, Generic[Call]):
    """Redis does not know the script: `Session.send` the call again, now with the script's text."""

    call: Call


class FellSilentError(ConnectionResetError):
    """Nothing was heard on a connection, while another one to the same server came about."""


class MustClose(NamedTuple):
    """Close the connection. Calls still in `Session.flying` get no reply."""

    error: Exception


NEED_DATA: Final = None
"""Nothing more until further bytes are received."""

CallEvent = Answered[Call] | Redirected[Call] | Resend[Call]
Event = CallEvent[Call] | MustClose


class Doubts:
    """Silence that a connection to a server is allowed after it lay idle. Where answers take long, it learns to wait longer."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = DOUBT

    def silence_allowed(self, timeout: float) -> float:
        """Seconds for which a call may be unanswered."""
        return min(self._share * timeout, LONGEST_DOUBT)

    def begun(self) -> None:
        """Note that a connection is doubted; mistakenly, unless it is replaced."""
        self._share = min(2 * self._share, MOST_DOUBT)

    def confirmed(self) -> None:
        """Note that it was replaced."""
        self._share = DOUBT


class Session(Generic[Call]):
    """State of one connection: calls on their way, bytes not yet understood."""

    __slots__ = ("_end", "_is_retired", "_is_unheard", "_reader", "asked_at", "flying", "has_more", "is_settling")

    def __init__(self) -> None:
        self.flying: deque[Call] = deque()
        """Calls on their way, the oldest first."""
        self.is_settling = False
        """True while a call with the script's text is on its way: new calls wait, so as not to overtake it."""
        self.has_more = False
        """True if `next_event` may have something to say: bytes have arrived that are no whole reply yet, or the end."""
        self.asked_at = 0.0
        """Time at which the last call that is answered was sent, or the connection was made, by `time.monotonic`."""
        self._is_retired = False
        self._is_unheard = True
        """True if nothing has arrived since a call was sent while no other was on its way."""
        self._end: MustClose | None = None
        self._reader = Reader(notEnoughData=_NO_REPLY, replyError=error_of)

    def send(self, call: Call) -> bytes:
        """Put a call into bytes and on its way. Raises one of `wire.UNSENDABLE`, and nothing has happened."""
        packed = call.packed()
        if not self.flying:
            self._is_unheard = True
        if call.in_full:
            self.is_settling = True
        call.is_granted = not call.asking
        self.flying.append(call)
        return packed

    def receive_data(self, data: bytes) -> None:
        """Take bytes in. None at all (``b""``) are the end of the stream."""
        if data:
            self._is_unheard = False
            self.has_more = True
            self._reader.feed(data)
        else:
            self.receive_end(ConnectionResetError("Redis closed the connection"))

    def receive_end(self, error: Exception) -> None:
        """Note that no further bytes will come."""
        self._end = MustClose(error)
        self.has_more = True

    def next_event(self) -> Event[Call] | None:
        """Return what the received bytes say next, `NEED_DATA` if nothing. `MustClose` is the last event."""
        while self.has_more and self._end is None:
            try:
                reply = self._reader.gets()
            except Exception as error:  # noqa: BLE001 - besides the reader's own: a redirection that cannot be read, a map by lists
                raise_interruption(error)
                self.receive_end(InvalidResponse(f"no reply of Redis: {type(error).__name__}"))
                break
            if reply is _NO_REPLY:
                break
            self.has_more = self._is_retired or self._reader.has_data()
            if type(reply) is not bytes and isinstance(reply, PushNotification):
                continue
            flying = self.flying
            if not flying:
                self.receive_end(InvalidResponse("Redis sent what nobody has asked for"))
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
            self.receive_end(ConnectionResetError("an error of Redis ended the connection"))
        return self._end or NEED_DATA

    def retire(self) -> None:
        """Take no further calls: the connection ends with the last reply."""
        self._is_retired = self.has_more = True

    def give_up(self) -> None:
        """Wait for no further bytes, nor send any call again: Redis may only have been slow."""
        self._is_unheard = False
        self.receive_end(ConnectionResetError("the connection was given up"))

    def lies_idle(self, now: float) -> bool:
        """True if there was no call for a while until now, by `time.monotonic`."""
        return not self.flying and now - self.asked_at >= IDLE

    @property
    def is_doubtful(self) -> bool:
        """True if the connection lay idle before the calls on their way, and nothing was heard since."""
        return self._is_unheard and len(self.flying) > 0 and self.flying[0].sent - self.asked_at >= IDLE

    def replaced(self) -> None:
        """End: another connection came about while nothing was heard here."""
        self.receive_end(FellSilentError("nothing was heard on the connection"))

    @property
    def is_open(self) -> bool:
        """True if further calls may be sent here."""
        return self._end is None and not self._is_retired

    def is_quiet(self) -> bool:
        """True if the connection is fit for the next call: all calls are answered, and all bytes understood."""
        if self.has_more and self.next_event() is not NEED_DATA:
            return False
        return self._end is None and not (self._is_retired or self.flying or self.has_more)

    def may_repeat(self, call: Call) -> bool:
        """True if a call that got no reply here may be sent again on another connection."""
        return self._is_unheard and not call.is_repeated


def _error_event(call: Call, error: Exception) -> CallEvent[Call]:
    if isinstance(error, AskError | TryAgainError):
        return Redirected(call, error)
    if isinstance(error, NoScriptError) and not call.in_full:
        call.in_full = True
        return Resend(call)
    return Answered(call, error)
