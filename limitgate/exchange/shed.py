"""Answers to requests for which there is no place in flight: as short a way as there is: it keeps a process alive."""

from __future__ import annotations

from limitgate.exchange.asgi import Send
from limitgate.exchange.base import OUTCOME
from limitgate.exchange.receive_buffer import Message
from limitgate.gate.plain_admission import Shed
from limitgate.http.request import Scope


async def turn_away(shed: Shed, scope: Scope, send: Send) -> None:
    """Answer an HTTP request over ASGI. Nothing is made for it but lists that others may write into."""
    shed.count()
    scope[OUTCOME] = "refused"
    refusal = shed.refusal
    start: Message = {"type": "http.response.start", "status": refusal.status, "headers": refusal.raw.copy()}
    await send(start)
    await send({"type": "http.response.body", "body": b"" if shed.request.sent_method == "HEAD" else refusal.body})
