"""The two doors, side by side: how a request comes in and how its answer goes out. What the answer is, the gate says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, MutableMapping
from types import GeneratorType
from typing import Any, Unpack

from limitgate.decorators import Mark, seen_by_gate
from limitgate.front import Options, open_front
from limitgate.gate import OFF, Answer
from limitgate.headers import Fields, Refusal, raw
from limitgate.request import ASGIRequest, Scope, WSGIRequest
from limitgate.routes.flask import wsgi_routes
from limitgate.routes.starlette import asgi_routes
from limitgate.stores import open_store, open_sync_store

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
StartResponse = Callable[..., Callable[[bytes], object]]
WSGIApp = Callable[[dict[str, Any], Any], Iterable[bytes]]

_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""The messages that carry response headers."""
_TRY_AGAIN_LATER = 1013
"""The WebSocket close code of a server that is overloaded (IANA WebSocket Close Code Number Registry)."""


class LimitGate:
    """ASGI 3 middleware: ``app.add_middleware(LimitGate, rules="config/", store="redis://localhost:6379/0")``.

    Options are those of `Settings`; unset ones come from ``LIMITGATE_*``. Raises `ConfigError` for a mistake in them or in the
    rules. Needs no lifespan events; where they are sent, its connections are closed with the application.
    """

    def __init__(self, app: ASGIApp, **options: Unpack[Options]) -> None:
        self.app = app
        self.gate, self._on_denied, self._owns_store = open_front(asgi_routes(app), open_store, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, pass everything else through."""
        if scope["type"] not in ("http", "websocket"):
            await self._pass(scope, receive, send)
            return
        answer = await self.gate.acheck(ASGIRequest(scope)) if self.gate else OFF
        scope = {**scope, "limitgate": answer.decision}
        if answer.refusal is not None:
            await self._refuse(answer, answer.refusal, scope, receive, send)
            return
        token = seen_by_gate.set(answer.seen) if answer.seen else None
        try:
            await self.app(scope, receive, _adding(answer.fields, send) if answer.fields else send)
        finally:
            if token is not None:
                seen_by_gate.reset(token)

    async def _refuse(self, answer: Answer, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        kind = "http.response"
        if scope["type"] == "websocket":
            await receive()
            kind = "websocket.http.response"
            if kind not in (scope.get("extensions") or {}):
                await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": refusal.reason})
                return
        elif self._on_denied is not None and refusal.status == 429:
            await self._on_denied(scope, receive, _completing(refusal.waiting, _adding(answer.fields, send)))
            return
        headers = refusal.raw + raw(answer.fields)
        await send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
        await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else refusal.body})

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            if scope["type"] == "lifespan" and self.gate and self._owns_store:
                await self.gate.store.aclose()


class LimitGateWSGI:
    """WSGI middleware (PEP 3333): ``app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules="config/")``.

    Options are those of `Settings`; unset ones come from ``LIMITGATE_*``. Raises `ConfigError` for a mistake in them or in the
    rules.
    """

    def __init__(self, app: WSGIApp, **options: Unpack[Options]) -> None:
        self.app = app
        self.gate, self._on_denied, _ = open_front(wsgi_routes(app), open_sync_store, **options)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        answer = self.gate.check(WSGIRequest(environ)) if self.gate else OFF
        environ["limitgate"] = answer.decision
        refusal = answer.refusal
        if refusal is not None:
            if self._on_denied is not None and refusal.status == 429:
                denied: Iterable[bytes] = self._on_denied(environ, _starting(answer.fields, start_response, refusal.waiting))
                return denied
            start_response(f"{refusal.status} {refusal.reason}", refusal.fields + answer.fields)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [refusal.body]
        token = seen_by_gate.set(answer.seen)
        try:
            chunks = self.app(environ, _starting(answer.fields, start_response) if answer.fields else start_response)
        finally:
            seen_by_gate.reset(token)
        return _Running(chunks, answer.seen) if answer.seen and isinstance(chunks, GeneratorType) else chunks


class _Running:
    """A generator that has yet to run the application: lets it see, at each step, what the gate has weighed."""

    def __init__(self, chunks: GeneratorType[Any, Any, Any], seen: Container[Mark]) -> None:
        self._chunks = chunks
        self._seen = seen
        self.close = chunks.close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        token = seen_by_gate.set(self._seen)
        try:
            chunk: bytes = next(self._chunks)
        finally:
            seen_by_gate.reset(token)
        return chunk


def _adding(fields: Fields, send: Send) -> Send:
    """``send`` that adds fields to whatever starts a response."""
    added = raw(fields)

    async def send_with_fields(message: Message) -> None:
        if message["type"] in _STARTS:
            message = {**message, "headers": [*(message.get("headers") or ()), *added]}
        await send(message)

    return send_with_fields


def _completing(fields: Fields, send: Send) -> Send:
    """``send`` that adds those fields which whatever starts a response does not have yet."""

    async def send_completed(message: Message) -> None:
        if message["type"] in _STARTS:
            headers = list(message.get("headers") or ())
            present = {bytes(name).lower() for name, _ in headers}
            headers += [field for field in raw(fields) if field[0] not in present]
            message = {**message, "headers": headers}
        await send(message)

    return send_completed


def _starting(fields: Fields, start_response: StartResponse, unless_set: Fields = []) -> StartResponse:  # noqa: B006
    """``start_response`` that adds fields, those in ``unless_set`` where there are none yet."""

    def start(status: str, headers: Fields, *exc_info: Any) -> Callable[[bytes], object]:
        present = {name.lower() for name, _ in headers}
        missing = [field for field in unless_set if field[0].lower() not in present]
        return start_response(status, [*headers, *missing, *fields], *exc_info)

    return start
