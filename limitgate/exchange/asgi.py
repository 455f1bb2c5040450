"""ASGI messages between an application and its server while a gate watches."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from limitgate.exchange.base import EXCHANGE, OUTCOME, REFUSAL_ID, Exchange
from limitgate.exchange.denials import ASGIApp, Denials, Message, Receive, Send
from limitgate.gate import late, load
from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.nesting import overall_decision, overall_outcome, raw_response_fields
from limitgate.gate.permits import BUFFERED
from limitgate.gate.turns import TurnWaiter
from limitgate.http.rate_fields import Fields, raw, raw_without
from limitgate.http.request import Scope
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision, DeferredDecision, RateLimited
from limitgate.routes.handlers import STATUS

F = TypeVar("F", bound=Callable[..., Any])

_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""Messages that carry response headers."""
_STATUSES = {"http.response.start": 200, "websocket.accept": 101, "websocket.http.response.start": 403, "websocket.close": 403}
"""The status by the message that a response or handshake begins with, if it names none; servers make a 403 of a close."""
BEGINNINGS = frozenset(_STATUSES)
_LASTS = frozenset({"http.response.body", "websocket.close"})
"""Messages that may be the last of an application."""
MOST_KEPT = 4
"""Messages that are kept; from then on nobody listens but the application. Servers cut bodies into parts of some 64 KiB."""
_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})
"""Messages that say that the client has left."""

CLIENT_GONE = (OSError, RuntimeError)
"""What servers raise for a message to a client that has left: `OSError` as ASGI 2.4 has it (uvicorn's ``ClientDisconnected``),
or `RuntimeError` (Granian; uvicorn for a WebSocket that is closed). It is no error if the message is the gate's own.
"""

_OURS = ("limitgate", EXCHANGE)
"""Names in a scope that are for the application alone."""


def inner_scope(outside: Scope, decision: Decision | None, exchange: Exchange | None) -> Scope:
    """Scope for the application: a copy, with decision and exchange."""
    inside = {**outside}
    inside["limitgate"] = decision
    inside[EXCHANGE] = exchange
    return inside


def show_outside(inside: Scope, outside: Scope) -> None:
    """Write outside what the application has written into its scope: middleware there reads which route a router has found."""
    if inside is outside:
        return
    around = {name: outside[name] for name in _OURS if name in outside} if "limitgate" in outside else None
    outside.clear()
    outside.update(inside)  # into an empty dictionary, which takes a quarter of the time
    outside.pop("limitgate", None)
    outside.pop(EXCHANGE, None)
    if around is not None:
        outside.update(around)


def _handles_refusal() -> bool:
    """True inside of an ``except`` that has caught a `RateLimited`, or an error that it has led to."""
    error, seen = sys.exception(), set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, RateLimited):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def marked_as_coroutine(function: F) -> F:
    """Mark a function that returns an awaitable as a coroutine function, which adapters such as asgiref's ask for."""
    if hasattr(inspect, "markcoroutinefunction"):  # Python 3.12
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - as asgiref does
    return function


class ReceiveBuffer:
    """Stands before a server's ``receive`` while a request waits for its turn: messages are kept in order, and never lost.

    A call of ``receive`` that is under way is never cancelled but handed on.
    """

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._pending: asyncio.Future[Message] | None = None

    async def receive(self) -> Message:
        """The next message: first those that were kept."""
        while not self._kept:
            pending = self._pending
            if pending is None:
                return await self._receive()
            await asyncio.wait([pending])  # the application may be cancelled, and ask again
            if self._pending is pending:
                self._pending = None
                return pending.result()
        return self._kept.popleft()

    async def stays_until(self, moment: asyncio.Future[Any]) -> bool:
        """Listen until a moment has come. False if the client left before."""
        while not moment.done() and len(self._kept) < MOST_KEPT:
            if self._pending is None:
                self._pending = asyncio.ensure_future(self._receive())
            pending = self._pending
            await asyncio.wait([moment, pending], return_when=asyncio.FIRST_COMPLETED)
            if pending.done() and self._pending is pending:
                if pending.cancelled() or pending.exception() is not None:
                    break  # that is for the application to see, if it asks
                self._pending = None
                self._kept.append(pending.result())
                if self._kept[-1]["type"] in _DISCONNECTS:
                    return moment.done()
        await asyncio.wait([moment])
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._pending is not None and not self._pending.get_loop().is_closed():
            self._pending.cancel()


class ASGIExchange(Exchange):
    """One ASGI request: stands between the application and the server.

    Adds rate fields to the response and notes its status, puts a refusal in the place of the application's answer, and has
    every message over a WebSocket charged where a rule says so.
    """

    awaits = True
    scope: Scope
    """Scope for the application."""
    _is_answered = False
    """True if something else has begun to answer in the place of a refusal."""
    _has_hung_up = False
    """True if the application has closed the WebSocket itself."""
    _is_receiving = False
    """True if the application waits for a message, or has been cancelled while it did."""
    _charging: tuple[Message, asyncio.Future[Refusal | None]] | None = None
    """A message that the application does not have yet, and the refusal that its charge may bring."""

    _shown = -1
    """Names in the scope when it was last shown outside."""
    _buffer: ReceiveBuffer | None = None
    """Messages of the server while the request waited for its turn; None if it did not wait."""
    _is_closed = False
    """True if whatever the application sends is dropped."""

    def begin(  # noqa: PLR0917 - keywords would take longer
        self, gate: Gate, admission: Admission, scope: Scope, receive: Receive, send: Send, denials: Denials
    ) -> None:
        """Stand between application and server for a request that was decided about."""
        self.gate = gate
        self._admission = admission
        admission.request.scope = {**scope}  # rules see the request as it came, whatever the application writes
        self._outer_scope = scope
        self.scope = inside = {**scope}
        inside[EXCHANGE] = self
        self._receive = receive
        self._send = send
        self._denials = denials
        if admission.is_plain:
            inside["limitgate"] = admission.decision
            inside[OUTCOME] = "admitted"
        else:
            if admission.permits is not None:
                load.show(admission)
            if admission.refusal is None:  # else `refuse` shows it
                inside["limitgate"] = overall_decision(admission) if admission.is_nested else admission.decision
                inside[OUTCOME] = overall_outcome(admission) if admission.is_nested else admission.outcome

    def show_outcome(self) -> None:
        """Write what has become of the request so far where it is shown outside, too, when the response begins."""
        admission, inside = self._admission, self.scope
        inside["limitgate"] = overall_decision(admission) if admission.is_nested else admission.decision
        inside[OUTCOME] = overall_outcome(admission) if admission.is_nested else admission.outcome
        refusal = admission.refusal
        if refusal is not None:
            if admission.is_nested or admission.permits is not None:
                load.end_refused(admission)
            if refusal.id is not None:
                inside[REFUSAL_ID] = self._outer_scope[REFUSAL_ID] = refusal.id

    async def receive(self) -> Message:
        """The next message from the server."""
        if self._charging is not None:  # nobody waited for it to the end
            return await self._deliver(*self._charging)
        self._is_receiving = True
        message = await self._receive()
        self._is_receiving = False
        if message["type"] == "http.request":
            return message
        while self._is_closed and message["type"] == "websocket.receive":
            message = await self._receive()  # it was on its way already when the WebSocket was closed
        kind, admission = message["type"], self.open_admission()
        messages = admission.messages
        if kind in _DISCONNECTS:
            admission.client_left = True
        elif messages is not None and kind == "websocket.receive" and not self._has_hung_up:
            self._charging = message, late.message(self.gate, admission, messages)
            return await self._deliver(*self._charging)
        return message

    async def stays_until(self, waiter: TurnWaiter) -> bool:
        """Wait for a turn, and listen for the client meanwhile. False if it left before."""
        if self._is_receiving:  # some other task of the application hears of it
            await asyncio.wait([waiter])
            return True
        if self._buffer is None:
            self._buffer = ReceiveBuffer(self._receive)
            self._receive = self._buffer.receive
        if await self._buffer.stays_until(waiter):
            return True
        admission = self.open_admission()
        admission.client_left = True
        if self.scope["type"] == "websocket" and not admission.has_begun:
            self._is_closed = True
            with suppress(*CLIENT_GONE):  # servers want a handshake to be answered, even if nobody is there
                await self._send({"type": "websocket.close"})
        return False

    async def _deliver(self, message: Message, charging: asyncio.Future[Refusal | None]) -> Message:
        """A message once its charge is made, or a disconnect if it must not pass. A cancelled caller may ask for it again."""
        try:
            refusal = await asyncio.shield(charging)
        except Exception:
            self._charging = None
            raise
        self._charging = None
        if refusal is None or self._has_hung_up:
            return message
        self._is_closed = True
        await self._close(refusal)
        return {"type": "websocket.disconnect", "code": refusal.close_code, "reason": refusal.reason}

    @marked_as_coroutine
    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message of the application on, and add the rate fields where a response starts."""
        admission = self._admission
        if admission.is_plain and (type(admission.decision) is DeferredDecision or not admission.has_news):
            kind, send = message["type"], self._send  # to call it as `self._send` takes longer, as it is no method
            if kind == "http.response.body":
                return send(message)
            if kind == "http.response.start" and not admission.has_begun:
                admission.sent_status = (
                    message.get("status") or 200
                )  # first, as other threads read it once a response has begun
                admission.has_begun = True
                if admission.rules.counts is not None:
                    admission.count_once(admission.rules.counts)
                inside, outside = self.scope, self._outer_scope  # `show_outside`, of a request that came by no other gate
                outside.clear()
                outside.update(inside)
                outside.pop("limitgate", None)
                outside.pop(EXCHANGE, None)
                self._shown = len(inside)
                fields = admission.raw_fields()
                if fields:
                    headers, initials = [*(message.get("headers") or ())], admission.rules.raw_initials
                    for name, _ in headers:
                        if name[:1] in initials:
                            headers = raw_without(headers, fields)
                            break
                    message = {**message}
                    message["headers"] = [*headers, *fields]
                return send(message)
        return self.send_any(message)

    async def send_any(self, message: Message) -> None:  # noqa: C901 - each call more costs all
        """`send` a message where more than rate fields may be due."""
        admission, kind = self.open_admission(), message["type"]
        if not admission.has_begun and kind in BEGINNINGS:
            if admission.refusal is not None:
                await self._begin_refused(message, admission.refusal)
                return
            admission.begun(message.get("status") or _STATUSES[kind])
            show_outside(self.scope, self._outer_scope)
            self._shown = len(self.scope)
            if kind in _STARTS and (fields := raw_response_fields(admission)):
                headers, initials = [*(message.get("headers") or ())], admission.rules.raw_initials
                for name, _ in headers:
                    if name[:1] in initials or admission.is_nested:
                        headers = raw_without(headers, fields)
                        break
                message = {**message}
                message["headers"] = [*headers, *fields]
            await self._send(message)
            if admission.is_by_outcome and admission.may_need_refund():  # a response may take long
                await self.gate.refunds.asettle(admission)
        elif self._is_closed:
            if admission.refusal is None and kind != "websocket.close":
                raise OSError("the WebSocket was closed, as its messages came too fast")
            # else it has been answered already
        elif (admission.has_slots or admission.has_news) and kind in _LASTS and not message.get("more_body"):
            await self._send_last(message)
        else:
            if kind == "websocket.close":
                self._has_hung_up = True
            await self._send(message)

    async def _begin_refused(self, message: Message, refusal: Refusal) -> None:
        """Have a refusal answered, by what begins a response if that is the answer to it, else in its place."""
        if not self._is_answered_by(message, refusal):
            await self.refuse_late(has_asked_handlers=True)
            return
        self._admission.begun(refusal.status)
        await self._send(self._completed(message, refusal.waiting))

    async def _send_last(self, message: Message) -> None:
        """Pass on the last message: a client that has the whole response is to find everything refunded."""
        admission = self._admission
        if message["type"] == "websocket.close":
            self._has_hung_up = True
        if admission.has_news:
            await self.gate.refunds.asettle(admission)
        if admission.has_slots:  # to send it may take long
            await self._send_wholly(message)
            admission.is_sent = True
            await self.gate.refunds.asettle(admission)
        else:
            await self._send(message)

    async def _send_wholly(self, message: Message) -> None:
        """Pass the last message on, and wait until the server has room again for another one.

        Some servers, uvicorn for one, wait for a slow client only before they take the next message.
        """
        if len(message.get("body") or b"") > BUFFERED:
            await self._send({**message, "more_body": True})
            message = {"type": message["type"], "body": b"", "more_body": False}
        await self._send(message)

    async def refuse_late(self, *, has_asked_handlers: bool = False) -> bool:
        """Answer in the application's place if a limit that it asked for refuses, and nothing else was answered.

        ``has_asked_handlers`` says that the framework has run the handler of the refusal, if there is one: it is not run twice.
        """
        refusal = self._admission.refusal
        if refusal is None or self._admission.has_begun:
            return False
        if not (self._is_closed or self._admission.client_left):
            await self.refuse(refusal, asks_handlers=not has_asked_handlers)
        return True

    async def turn_away(self, refusal: Refusal) -> None:
        """Answer a request that the application never hears of."""
        if self.scope["type"] == "websocket":
            await self._receive()
        await self.refuse(refusal)
        self._admission.end()
        if self._is_answered or self._buffer is not None:
            self._detach()
        else:  # nobody has written anything into the scope
            self.scope = self._outer_scope

    async def refuse(self, refusal: Refusal, *, asks_handlers: bool = True) -> None:
        """Answer in the application's place."""
        self._is_closed = True
        self.show_outcome()
        self._outer_scope[OUTCOME] = self.scope[OUTCOME]
        kind = "http.response"
        if self.scope["type"] == "websocket":
            kind = "websocket.http.response"
            if kind not in (self.scope.get("extensions") or {}):
                await self._close(refusal)
                return
        elif (asks_handlers or not self._denials.are_handlers) and (answer := self._answer(refusal)) is not None:
            await self._have_answered(answer, refusal)
            return
        await self._send_refusal(refusal, kind)

    async def _have_answered(self, answer: ASGIApp, refusal: Refusal) -> None:
        """Have another application answer, or the client is told the refusal itself; the error is raised all the same."""
        try:
            await answer(self.scope, self._receive, self._sending(refusal.waiting))
        except Exception:
            if not self._is_answered:
                await self._send_refusal(refusal, "http.response")
            raise

    async def _send_refusal(self, refusal: Refusal, kind: str) -> None:
        """Send a refusal as it is, in messages of a kind."""
        admission = self._admission
        headers = refusal.raw + (raw_response_fields(admission) if admission.is_nested else admission.raw_fields())
        try:
            await self._send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
            await self._send({"type": f"{kind}.body", "body": b"" if self.scope.get("method") == "HEAD" else refusal.body})
        except CLIENT_GONE:  # without `suppress`, whose calls would cost each refusal
            pass

    def _is_answered_by(self, start: Message, refusal: Refusal) -> bool:
        """True if a handler of the application has answered what a dependency has raised, by this message.

        It may choose any status but 500, which is that of a handler that failed. An answer of another status than the refusal's
        comes from a handler only while the refusal is being handled: else the application has caught it and goes on.
        """
        status = start.get("status")
        is_denial = start["type"] == "http.response.start" and status != 500
        is_denial = is_denial and (status == refusal.status or _handles_refusal())
        return is_denial and self._denials.are_handlers and self._answer(refusal) is not None

    def _answer(self, refusal: Refusal) -> ASGIApp | None:
        """The application that answers in the place of a refusal, if there is one."""
        if refusal.status != STATUS:
            return None
        admission = self._admission
        decision = overall_decision(admission) if admission.is_nested else admission.decision
        return None if decision is None else self._denials.find(self.scope, refusal, decision)

    def end_now(self) -> bool:
        """End the request. True if something may have to be refunded, by `Refunds.asettle`."""
        admission = self._admission
        needs_refund = admission.end()
        if admission.is_plain and len(self.scope) == self._shown:  # `_detach`, where the application has heard no more
            self.scope = self._outer_scope
        else:
            self._detach()
        admission.is_plain = False  # a task that goes on may still answer
        return needs_refund

    async def ashutdown(self) -> None:
        """End the request, and refund what has to be refunded."""
        if self.end_now():
            await self.gate.refunds.asettle(self._admission)

    def _detach(self) -> None:
        """Undo what leads in a circle from the application's scope to here and back, and stop listening."""
        if len(self.scope) != self._shown:  # else nothing is new since the response has begun
            show_outside(self.scope, self._outer_scope)
        self.scope = self._outer_scope
        if self._buffer is not None:
            self._buffer.close()

    def _sending(self, waiting: Fields) -> Send:
        """``send`` that adds rate fields and those of waiting to what starts a response, where they are not set yet."""

        async def send(message: Message) -> None:
            if message["type"] in _STARTS:
                self._is_answered = True
                message = self._completed(message, waiting)
            await self._send(message)

        return send

    def _completed(self, start: Message, waiting: Fields) -> Message:
        """What starts an answer to a refusal, with the fields that are not set yet."""
        headers = list(start.get("headers") or ())
        fields = [*raw(waiting), *raw_response_fields(self._admission)]
        return {**start, "headers": [*headers, *raw_without(fields, headers)]}

    async def _close(self, refusal: Refusal) -> None:
        with suppress(*CLIENT_GONE):  # it has left, or did not answer a ping
            await self._send({"type": "websocket.close", "code": refusal.close_code, "reason": refusal.reason})
