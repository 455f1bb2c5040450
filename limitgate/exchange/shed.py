"""Answers to requests for which there is no place in flight: as short a way as there is: it keeps a process alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from limitgate.exchange.asgi import Send
from limitgate.exchange.base import EXCHANGE, OUTCOME
from limitgate.exchange.receive_buffer import Message
from limitgate.exchange.wsgi import StartResponse
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


def turn_away_here(shed: Shed, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Answer a request over WSGI."""
    shed.count()
    refusal, in_flight = shed.refusal, shed.request.in_flight
    environ["limitgate"] = in_flight.refused(refusal)
    environ[EXCHANGE], environ[OUTCOME] = None, "refused"
    start_response(_STATUS, refusal.fields.copy())
    return [] if shed.request.sent_method == "HEAD" else [refusal.body]


_STATUS = "503 Service Unavailable"
