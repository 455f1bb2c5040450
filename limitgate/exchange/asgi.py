"""Processes ASGI messages between application and server."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from limitgate.exchange.application import ASGIApp, Denials, Message, Receive, Send
from limitgate.exchange.base import EXCHANGE, OUTCOME, REFUSAL_ID, Exchange
from limitgate.gate import late, load
from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.nesting import overall_decision, overall_outcome, raw_response_fields
from limitgate.gate.permits import BUFFERED
from limitgate.gate.turns import TurnWaiter
from limitgate.http import body
from limitgate.http.rate_fields import Fields, raw, raw_without
from limitgate.http.request import Scope
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision, DeferredDecision, RateLimited
from limitgate.llm.metering import LONGEST_CHUNK, MOST_CHUNKS, ResponseMeter
from limitgate.process.clock import asyncio_loop

F = TypeVar("F", bound=Callable[..., Any])

_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
_STATUSES = {"http.response.start": 200, "websocket.accept": 101, "websocket.http.response.start": 403, "websocket.close": 403}
"""Default statuses. Servers turn an early close into a 403."""
BEGINNINGS = frozenset(_STATUSES)
_LASTS = frozenset({"http.response.body", "websocket.close"})
MOST_KEPT = 4
"""Maximum of chunks to keep. Servers split bodies into parts of about 64 KiB."""
_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})

CLIENT_GONE = (OSError, RuntimeError)
"""Errors of ``send`` after a disconnect: `OSError` by ASGI 2.4, `RuntimeError` by Granian and for WebSockets."""

_OURS = ("limitgate", EXCHANGE)


def inner_scope(outside: Scope, decision: Decision | None, exchange: Exchange | None) -> Scope:
    inside = {**outside}
    inside["limitgate"] = decision
    inside[EXCHANGE] = exchange
    return inside


def show_outside(inside: Scope, outside: Scope) -> None:
    """Copy scope changes outwards, so that outer middleware sees the matched route."""
    if inside is outside:
        return
    around = {name: outside[name] for name in _OURS if name in outside} if "limitgate" in outside else None
    outside.clear()
    # Updating an empty dictionary takes a quarter of the time.
    outside.update(inside)
    outside.pop("limitgate", None)
    outside.pop(EXCHANGE, None)
    if around is not None:
        outside.update(around)


def _handles_refusal() -> bool:
    error, seen = sys.exception(), set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, RateLimited):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def marked_as_coroutine(function: F) -> F:
    """Mark a callable for adapters such as asgiref's, which look for coroutine functions."""
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - as asgiref does
    return function


def _read_along(meter: ResponseMeter, message: Message) -> None:
    """Pass a message to the meter. The last message settles the request before the client gets it."""
    kind = message["type"]
    if kind == "http.response.body":
        meter.kept.append(message.get("body") or b"")
        if message.get("more_body"):
            meter.read()
        else:
            meter.over()
    elif kind == "http.response.start":
        fields = {bytes(name).lower(): value for name, value in message.get("headers") or ()}
        content_type, encoding = [bytes(fields.get(name, b"")).decode("latin-1") for name in _DESCRIBING]
        meter.starts(message.get("status") or 200, content_type, encoding)


_DESCRIBING = (b"content-type", b"content-encoding")


class ReceiveBuffer:
    """Buffers messages during a wait, or for a rule that reads the body.

    A pending ``receive`` is never cancelled; the application takes it over.
    """

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._pending: asyncio.Future[Message] | None = None
        self._most = MOST_KEPT
        self.has_read: bool = False

    async def receive(self) -> Message:
        while not self._kept:
            pending = self._pending
            if pending is None:
                return await self._receive()
            # The application may be cancelled and call again.
            await asyncio.wait([pending])
            if self._pending is pending:
                self._pending = None
                return pending.result()
        return self._kept.popleft()

    async def stays_until(self, moment: asyncio.Future[Any]) -> bool:
        """Wait for a future. Return False if the client leaves first."""
        while not moment.done() and len(self._kept) < self._most:
            if self._pending is None:
                self._pending = asyncio.ensure_future(self._receive())
            pending = self._pending
            await asyncio.wait([moment, pending], return_when=asyncio.FIRST_COMPLETED)
            if pending.done() and self._pending is pending:
                if pending.cancelled() or pending.exception() is not None:
                    # The application gets this error from `receive`.
                    break
                self._pending = None
                self._kept.append(pending.result())
                if self._kept[-1]["type"] in _DISCONNECTS:
                    return moment.done()
        await asyncio.wait([moment])
        return True

    async def read(self, most: int) -> bytes:
        """Return the body, which the application receives afterwards. Raises `BodyError`."""
        loop = asyncio_loop("a rule that reads the body")
        self.has_read = True
        deadline, data = loop.time() + body.LONGEST_READ_S, bytearray()
        while True:
            message = await self._next(deadline - loop.time())
            self._kept.append(message)
            # Otherwise, `stays_until` would not notice a disconnect after a long body.
            self._most = len(self._kept) + MOST_KEPT
            if message["type"] != "http.request":
                raise body.incomplete()
            data += message.get("body") or b""
            if len(data) > most:
                raise body.too_large(most)
            if not message.get("more_body"):
                return bytes(data)
            if len(self._kept) >= body.MOST_PARTS:
                raise body.too_many_parts()

    async def _next(self, seconds: float) -> Message:
        pending = self._pending = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait([pending], timeout=max(0, seconds))
        except BaseException:
            self.close()
            raise
        if not pending.done():
            raise body.too_slow()
        # The application gets this error from `receive`.
        if pending.cancelled() or pending.exception() is not None:
            raise body.incomplete()
        self._pending = None
        return pending.result()

    def close(self) -> None:
        if self._pending is not None and not self._pending.get_loop().is_closed():
            self._pending.cancel()


class ASGIExchange(Exchange):
    awaits = True
    scope: Scope
    _is_answered = False
    _has_hung_up = False
    _is_receiving = False
    """True during a receive, also after its cancellation."""
    _charging: tuple[Message, asyncio.Future[Refusal | None]] | None = None
    """A message from the client, and the charge after which it is delivered."""

    _meter: ResponseMeter
    _kept: list[bytes] | None = None
    """Chunks of the response for the meter."""
    _shown = -1
    _buffer: ReceiveBuffer | None = None
    _is_closed = False

    def begin(  # noqa: PLR0917 - keywords would be slower
        self, gate: Gate, admission: Admission, scope: Scope, receive: Receive, send: Send, denials: Denials
    ) -> None:
        self.gate = gate
        self._admission = admission
        # Rules see the original request.
        admission.request.scope = {**scope}
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
            # `refuse` shows refusals.
            if admission.refusal is None:
                inside["limitgate"] = overall_decision(admission) if admission.is_nested else admission.decision
                inside[OUTCOME] = overall_outcome(admission) if admission.is_nested else admission.outcome

    def show_outcome(self) -> None:
        """Also show a refusal's id in the outer scope."""
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
        # The previous caller was cancelled.
        if self._charging is not None:
            return await self._deliver(*self._charging)
        self._is_receiving = True
        message = await self._receive()
        self._is_receiving = False
        if message["type"] == "http.request":
            return message
        while self._is_closed and message["type"] == "websocket.receive":
            # Drop messages that were sent before the close.
            message = await self._receive()
        kind, admission = message["type"], self.open_admission()
        messages = admission.messages
        if kind in _DISCONNECTS:
            admission.client_left = True
        elif messages is not None and kind == "websocket.receive" and not self._has_hung_up:
            self._charging = message, late.message(self.gate, admission, messages)
            return await self._deliver(*self._charging)
        return message

    async def stays_until(self, waiter: TurnWaiter) -> bool:
        # Another task is listening already.
        if self._is_receiving:
            await asyncio.wait([waiter])
            return True
        if self._buffer is None:
            reader = getattr(self._receive, "__self__", None)
            self._buffer = reader if isinstance(reader, ReceiveBuffer) else ReceiveBuffer(self._receive)
            self._receive = self._buffer.receive
        if await self._buffer.stays_until(waiter):
            return True
        admission = self.open_admission()
        admission.client_left = True
        if self.scope["type"] == "websocket" and not admission.has_begun:
            self._is_closed = True
            # Servers expect an answer to the handshake.
            with suppress(*CLIENT_GONE):
                await self._send({"type": "websocket.close"})
        return False

    async def _deliver(self, message: Message, charging: asyncio.Future[Refusal | None]) -> Message:
        """Charge the message; a refusal becomes a disconnect. A cancelled caller may call again."""
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
        """Add rate fields at the start of the response."""
        admission = self._admission
        if admission.is_plain and (type(admission.decision) is DeferredDecision or not admission.has_news):
            # `_send` is an attribute, so a local name is faster.
            kind, send = message["type"], self._send
            if kind == "http.response.body":
                return send(message)
            if kind == "http.response.start" and not admission.has_begun:
                # Set this before `has_begun`, because other threads read it afterwards.
                admission.sent_status = message.get("status") or 200
                admission.has_begun = True
                if admission.rules.counts is not None:
                    admission.count_once()
                inside, outside = self.scope, self._outer_scope
                outside.clear()
                outside.update(inside)
                try:
                    del outside["limitgate"], outside[EXCHANGE]
                except KeyError:
                    outside.pop(EXCHANGE, None)
                self._shown = len(inside)
                fields = admission.raw_fields()
                if fields:
                    headers, initials = [*(message.get("headers") or ())], admission.rules.raw_initials
                    try:
                        for name, _ in headers:
                            if name[0] in initials:
                                headers = raw_without(headers, fields)
                                break
                    # A field without a name.
                    except IndexError:
                        headers = raw_without(headers, fields)
                    message = {**message}
                    message["headers"] = headers + fields
                return send(message)
        return self.send_any(message)

    @marked_as_coroutine
    def send_along(self, message: Message) -> Awaitable[None]:
        """A faster `send_any`, for chunks that the meter reads."""
        try:
            chunk, is_more = message["body"], message["more_body"]
        except KeyError:
            return self.send_any(message)
        kept = self._kept
        if kept is None or not (is_more and chunk):
            return self.send_any(message)
        kept.append(chunk)
        if len(kept) >= MOST_CHUNKS or len(chunk) > LONGEST_CHUNK:
            self._meter.read()
        return self._send(message)

    async def send_any(self, message: Message) -> None:  # noqa: C901, PLR0912 - calls slow down every message
        """`send` for requests that need more than rate fields."""
        admission, kind = self.open_admission(), message["type"]
        if admission.meter is not None:
            _read_along(admission.meter, message)
        if not admission.has_begun and kind in BEGINNINGS:
            if admission.refusal is not None:
                await self._begin_refused(message, admission.refusal)
                return
            admission.begun(message.get("status") or _STATUSES[kind])
            if admission.meter is not None:
                self._meter, self._kept = admission.meter, admission.meter.kept
            show_outside(self.scope, self._outer_scope)
            self._shown = len(self.scope)
            if kind in _STARTS and (fields := raw_response_fields(admission)):
                headers, initials = [*(message.get("headers") or ())], admission.rules.raw_initials
                for name, _ in headers:
                    if not name or name[0] in initials or admission.is_nested:
                        headers = raw_without(headers, fields)
                        break
                message = {**message}
                message["headers"] = [*headers, *fields]
            await self._send(message)
            if admission.is_by_outcome and admission.may_need_refund():
                await self.gate.refunds.asettle(admission)
        elif self._is_closed:
            if admission.refusal is None and kind != "websocket.close":
                raise OSError("the WebSocket was closed because its messages came too fast")
        elif (admission.has_slots or admission.has_news) and kind in _LASTS and not message.get("more_body"):
            await self._send_last(message)
        else:
            if kind == "websocket.close":
                self._has_hung_up = True
            await self._send(message)

    async def _begin_refused(self, message: Message, refusal: Refusal) -> None:
        """Send the start of a response if it answers the refusal, otherwise the refusal."""
        if not self._is_answered_by(message, refusal):
            await self.refuse_late(has_asked_handlers=True)
            return
        self._admission.begun(refusal.status)
        await self._send(self._completed(message, refusal.waiting))

    async def _send_last(self, message: Message) -> None:
        """Refund before the client has the whole response."""
        admission = self._admission
        if message["type"] == "websocket.close":
            self._has_hung_up = True
        if admission.has_news:
            await self.gate.refunds.asettle(admission)
        if admission.has_slots:
            await self._send_wholly(message)
            admission.is_sent = True
            await self.gate.refunds.asettle(admission)
        else:
            await self._send(message)

    async def _send_wholly(self, message: Message) -> None:
        """Send a message, and wait. Servers such as uvicorn wait only before the next message."""
        if len(message.get("body") or b"") > BUFFERED:
            await self._send({**message, "more_body": True})
            message = {"type": message["type"], "body": b"", "more_body": False}
        await self._send(message)

    async def refuse_late(self, *, has_asked_handlers: bool = False) -> bool:
        """Send the refusal of a further limit, unless a response has begun.

        ``has_asked_handlers`` is True if the framework has called its handler.
        """
        refusal = self._admission.refusal
        if refusal is None or self._admission.has_begun:
            return False
        if not (self._is_closed or self._admission.client_left):
            await self.refuse(refusal, asks_handlers=not has_asked_handlers)
        return True

    async def turn_away(self, refusal: Refusal) -> None:
        if self.scope["type"] == "websocket":
            await self._receive()
        await self.refuse(refusal)
        self._admission.end()
        if self._is_answered or self._buffer is not None:
            self._detach()
        else:
            self.scope = self._outer_scope

    async def refuse(self, refusal: Refusal, *, asks_handlers: bool = True) -> None:
        self._is_closed = True
        self.show_outcome()
        self._outer_scope[OUTCOME] = self.scope[OUTCOME]
        kind = "http.response"
        if self.scope["type"] == "websocket":
            kind = "websocket.http.response"
            if kind not in (self.scope.get("extensions") or {}):
                await self._close(refusal)
                return
        elif asks_handlers or not self._denials.are_handlers:
            answer = self._denials.answer(self.scope, refusal, self.scope["limitgate"])
            if answer is not None:
                await self._have_answered(answer, refusal)
                return
        await self._send_refusal(refusal, kind)

    async def _have_answered(self, answer: ASGIApp, refusal: Refusal) -> None:
        """If the handler fails, send the plain refusal and raise its error."""
        try:
            await answer(self.scope, self._receive, self._sending(refusal.waiting))
        except Exception:
            if not self._is_answered:
                await self._send_refusal(refusal, "http.response")
            raise

    async def _send_refusal(self, refusal: Refusal, kind: str) -> None:
        admission = self._admission
        headers = refusal.raw + (raw_response_fields(admission) if admission.is_nested else admission.raw_fields())
        try:
            await self._send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
            await self._send({"type": f"{kind}.body", "body": b"" if self.scope.get("method") == "HEAD" else refusal.body})
        # `suppress` would slow down every refusal.
        except CLIENT_GONE:
            pass

    def _is_answered_by(self, start: Message, refusal: Refusal) -> bool:
        """True if a handler's response answers the refusal.

        A 500 indicates a failed handler. Other statuses count only while the refusal is handled.
        """
        status = start.get("status")
        is_denial = start["type"] == "http.response.start" and status != 500
        is_denial = is_denial and (status == refusal.status or _handles_refusal())
        if not is_denial or not self._denials.are_handlers:
            return False
        return self._denials.answer(self.scope, refusal, overall_decision(self._admission)) is not None

    def end_now(self) -> bool:
        """End the request. Return True if `Refunds.asettle` is needed."""
        admission = self._admission
        needs_refund = admission.end()
        if admission.is_plain and len(self.scope) == self._shown:
            self.scope = self._outer_scope
        else:
            self._detach()
        # A remaining task may still respond.
        admission.is_plain = False
        return needs_refund

    async def ashutdown(self) -> None:
        if self.end_now():
            await self.gate.refunds.asettle(self._admission)

    def _detach(self) -> None:
        # An equal size means that nothing has changed.
        if len(self.scope) != self._shown:
            show_outside(self.scope, self._outer_scope)
        self.scope = self._outer_scope
        # If a rule needed the body, another buffer has read it.
        buffer = self._buffer or getattr(self._receive, "__self__", None)
        if isinstance(buffer, ReceiveBuffer):
            buffer.close()

    def _sending(self, waiting: Fields) -> Send:
        is_head = self.scope.get("method") == "HEAD"

        async def send(message: Message) -> None:
            if message["type"] in _STARTS:
                self._is_answered = True
                message = self._completed(message, waiting)
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await self._send(message)

        return send

    def _completed(self, start: Message, waiting: Fields) -> Message:
        headers = list(start.get("headers") or ())
        fields = [*raw(waiting), *raw_response_fields(self._admission)]
        return {**start, "headers": [*headers, *raw_without(fields, headers)]}

    async def _close(self, refusal: Refusal) -> None:
        # The client may have left.
        with suppress(*CLIENT_GONE):
            await self._send({"type": "websocket.close", "code": refusal.close_code, "reason": refusal.reason})
