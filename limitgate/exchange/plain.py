"""The short way of a request that a plain plan has let in: all that is due are rate fields. Almost every request goes it.

Whatever asks for more, such as a gate inside, a further limit, or a message of another kind, asks for the `admission`: from
then on the exchange is one like any other. Property tests hold both ways equal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from typing import Any, ClassVar

from limitgate.exchange.asgi import ASGIExchange, Receive, Send, for_client
from limitgate.exchange.base import EXCHANGE, OUTCOME, Exchange
from limitgate.exchange.handlers import Denials
from limitgate.exchange.receive_buffer import Message
from limitgate.exchange.wsgi import StartResponse, starting, status_code, written_in_flight
from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.load import InFlight
from limitgate.gate.plain_admission import PlainAdmission
from limitgate.http.rate_fields import Fields
from limitgate.http.request import Environ, Request, Scope
from limitgate.limits.decision import DeferredDecision
from limitgate.rules.decorators import Mark

_WHOLE = (Exchange, ASGIExchange)
"""Classes that exchanges become."""


class PlainExchange(Exchange):
    """One request that has a `PlainAdmission`.

    Methods that no other exchange has are called by their class, as another thread may make this one whole meanwhile.
    """

    gate: Gate
    _plain: PlainAdmission
    _has_begun: bool
    _status: int | str | None
    """Response status, or the line that begins with it; None before the response starts, and if that is no number."""
    WHOLE: ClassVar[type[Exchange]] = Exchange
    """Class that it becomes, one of `_WHOLE`."""

    @property
    def admission(self) -> Admission:  # type: ignore[override]
        """The whole admission, made when somebody asks for it.

        Threads that ask at the same time are given the same one. There is no lock, which the child of a fork might find held.
        """
        made = self._plain.whole()
        PlainExchange._tell(self, made)
        admission: Admission = self.__dict__.setdefault("admission", made)  # where classes for any kind of request have it
        kind = type(self)
        if kind not in _WHOLE:
            self.__class__ = kind.WHOLE  # type: ignore[assignment]
        self._plain.request = None  # a WSGI environ leads to it
        if self._has_begun and not admission.has_begun:  # just now, in another thread
            PlainExchange._tell(self, admission)
        return admission

    def _tell(self, admission: Admission) -> None:
        """Have an admission know what has become of the request."""
        if self._has_begun:
            status = self._status
            admission.is_counted = True
            admission.begun(status_code(status) if isinstance(status, str) else status)
        if admission.settlement.is_over:
            admission.is_sent = admission.is_counted = True

    @property
    def marks(self) -> Container[Mark]:
        """Decorators that the gate has decided about."""
        return self._plain.prepared.marks

    @property
    def in_flight(self) -> InFlight | None:
        """Places of the request under adaptive limits; None where none is for it, or it is over."""
        if self._plain.prepared.adaptive is None:
            return None
        request: Request | None = self._plain.request
        in_flight: InFlight | None = self.admission.in_flight if request is None else request.in_flight
        return in_flight

    def note_begun(self) -> None:
        """Count the request, whose response has just begun, and have an admission know of it that was asked for meanwhile."""
        rules = self._plain.rules
        if rules.counts is not None:
            rules.counts.count("admitted", self._plain.reading.source)
        if type(self) in _WHOLE:  # another thread has asked for the admission just now
            PlainExchange._tell(self, self.admission)

    def sent(self) -> None:
        """Note that the application has given all of its response: but for places in flight nothing is held."""
        plain = self._plain
        if plain.prepared.adaptive is not None and (in_flight := self.in_flight) is not None:
            in_flight.end()
        self.settle()

    def settle(self) -> None:
        """Refund whatever is known by now to be charged wrongly."""
        plain = self._plain
        if type(plain.decision) is not DeferredDecision and plain.has_news():  # asked here, without a call for most
            Exchange.settle(self)

    def end(self) -> None:
        """End the request, and refund what has to be refunded."""
        if not (self._has_begun and self._plain.end()):
            Exchange.end(self)

    def end_sized(self) -> None:
        """`end` a request whose response is all there, for the server to send."""
        plain = self._plain
        if plain.prepared.adaptive is not None or not (self._has_begun and plain.end()):
            Exchange.end_sized(self)


class PlainASGIExchange(PlainExchange, ASGIExchange):
    """One ASGI request that has a `PlainAdmission`."""

    WHOLE = ASGIExchange
    __init__ = object.__init__  # one with arguments takes twice as long as `begin`

    def begin(  # noqa: PLR0917 - keywords would take longer
        self, gate: Gate, plain: PlainAdmission, scope: Scope, receive: Receive, send: Send, denials: Denials
    ) -> None:
        """Stand between application and server for a request that was let in."""
        self.gate = gate
        self._plain = plain
        plain.request.scope = {**scope}  # rules see the request as it came, whatever the application writes
        self._outer_scope = scope
        self.scope = inside = {**scope}
        inside["limitgate"] = plain.decision
        inside[EXCHANGE] = self
        inside[OUTCOME] = "admitted"
        self._receive = receive
        self._send = send
        self._denials = denials
        self._has_begun = False

    def send(self, message: Message) -> Awaitable[None]:  # type: ignore[override]
        """Pass a message of the application on, with the rate fields where a response starts."""
        plain = self._plain
        if type(self) is PlainASGIExchange and (type(plain.decision) is DeferredDecision or not plain.has_news()):
            kind, send = message["type"], self._send  # to call it as `self._send` takes longer, as it is no method
            if kind == "http.response.body":
                return send(message)
            if kind == "http.response.start" and not self._has_begun:
                self._status = message.get("status") or 200  # first, as other threads read it once a response has begun
                self._has_begun = True
                if plain.rules.counts is not None or type(self) is not PlainASGIExchange:  # any more
                    PlainExchange.note_begun(self)
                inside, outside = self.scope, self._outer_scope  # `show_outside`, of a request that came by no other gate
                outside.clear()
                outside.update(inside)
                outside.pop("limitgate", None)
                outside.pop(EXCHANGE, None)
                self._shown = len(inside)
                fields = plain.raw_fields()
                if fields:
                    message = {**message}
                    message["headers"] = [*(message.get("headers") or ()), *fields]
                return send(message)
        return ASGIExchange.send(self, message)

    def send_in_flight(self, message: Message) -> Awaitable[None]:
        """`send`, of a request in flight."""
        kind = message["type"]
        if kind == "http.response.start":
            in_flight = self.followed
            in_flight.starts(message.get("status"), message.get("headers") or ())
            return for_client(self.send(message), in_flight) if in_flight.held else self.send(message)
        if kind == "http.response.body" and not message.get("more_body"):
            self.followed.end()
            if type(self) is PlainASGIExchange and type(self._plain.decision) is DeferredDecision:
                return self._send(message)
            return self.send(message)
        return ASGIExchange.send_in_flight(self, message)

    def has_begun(self) -> bool:
        """True if a response has begun."""
        return self._has_begun or ASGIExchange.has_begun(self)

    def end_now(self) -> bool:
        """End the request. True if something may have to be refunded, by `Refunds.asettle`."""
        if not (self._has_begun and self._plain.end()):
            return ASGIExchange.end_now(self)
        if len(self.scope) == self._shown:  # `_detach`, of a request that the application has heard no more of
            self.scope = self._outer_scope
        else:
            self._detach()
        return False


class PlainWSGIExchange(PlainExchange):
    """One WSGI request that has a `PlainAdmission`."""

    def __init__(self, gate: Gate, plain: PlainAdmission, environ: Environ) -> None:
        self.gate = gate
        self._plain = plain
        self._has_begun = False
        environ["limitgate"] = plain.decision
        environ[EXCHANGE] = self
        environ[OUTCOME] = "admitted"

    def starting(self, start_response: StartResponse) -> StartResponse:
        """``start_response`` that adds rate fields and notes the status."""

        def start(status: str, headers: Fields, *exc_info: Any) -> Callable[[bytes], object]:
            if type(self) in _WHOLE:  # somebody has asked for more
                return starting(self.admission, start_response)(status, headers, *exc_info)
            plain = self._plain
            fields = [*headers, *plain.fields()]
            write = start_response(status, fields, *exc_info) if exc_info else start_response(status, fields)
            has_begun = self._has_begun
            self._status = status  # first, as other threads read it once a response has begun
            self._has_begun = True
            if not has_begun and (plain.rules.counts is not None or type(self) in _WHOLE):
                PlainExchange.note_begun(self)
            if plain.prepared.adaptive is not None and (in_flight := self.in_flight) is not None:
                return written_in_flight(write, in_flight, status_code(status), headers)
            return write

        return start


class PlainBody:
    """The chunks of a WSGI response, for whose making no decorator has to be noted and no place in flight is held.

    Like `Body`, but the request is like any other by the end of it only if somebody has asked for more.
    """

    __slots__ = ("_chunks", "_exchange", "_iterator")

    def __init__(self, chunks: Iterable[bytes], exchange: Exchange) -> None:
        self._chunks: Any = chunks
        self._exchange = exchange
        self._iterator = _noted(chunks, exchange)

    def __iter__(self) -> Iterator[bytes]:
        return self._iterator

    def __next__(self) -> bytes:
        return next(self._iterator)

    def close(self) -> None:
        """The server is done with it."""
        try:
            getattr(self._chunks, "close", bool)()
        finally:
            self._exchange.end()


def _noted(chunks: Iterable[bytes], exchange: Exchange) -> Iterator[bytes]:
    """The chunks of a response, whose end is noted. What breaks off leaves them for `PlainBody.close`."""
    try:
        for chunk in chunks:  # noqa: UP028 - `yield from` would close them as soon as nobody reads on
            yield chunk
    except Exception:
        exchange.admission.failed()
        raise
    exchange.sent()
