"""The two doors, side by side: how a request comes in and how its answer goes out. What the answer is, the gate says."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Container, Iterable
from contextlib import suppress
from contextvars import Token
from types import GeneratorType
from typing import Any, Self, Unpack

from limitgate.errors import ConfigError
from limitgate.exchange.asgi import Exchange, Receive, Send
from limitgate.exchange.wsgi import Body, SizedBody, StartResponse, Upload, end, settle, starting
from limitgate.gate.admission import ADMISSION, Admission, admission_around
from limitgate.gate.build import GateOptions, build_gate
from limitgate.gate.gate import Identify
from limitgate.http.request import ASGIRequest, Request, Scope, WSGIRequest
from limitgate.limits.decision import Decision, RateLimited
from limitgate.routes.flask import wsgi_routes
from limitgate.routes.starlette import asgi_routes
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import EVERYTHING, Mark, seen_by_gate
from limitgate.stores import AsyncStore, SyncStore, open_store, open_sync_store

log = logging.getLogger("limitgate")

ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
WSGIApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
ASGIOptions = GateOptions[AsyncStore, Identify, ASGIApp]
_OURS = frozenset({"limitgate", ADMISSION})
"""Names in a scope that are for the application alone."""
WSGIOptions = GateOptions[SyncStore, Callable[[Request], Caller | None], WSGIApp]


class LimitGate:
    """ASGI 3 middleware: ``app.add_middleware(LimitGate, rules="config/", store="redis://localhost:6379/0")``.

    Options are those of `Settings`; unset ones come from ``LIMITGATE_*``. Raises `ConfigError` for a mistake in them or in the
    rules. Needs no lifespan events; where they are sent, its connections are closed with the application.
    """

    def __init__(self, app: ASGIApp, **options: Unpack[ASGIOptions]) -> None:
        self.app = app
        if hasattr(getattr(app, "__self__", app), "wsgi_app"):
            raise ConfigError(
                "this is a Flask application, expected limitgate.flask.LimitGate(app), or LimitGateWSGI around it"
            )
        try:
            self.gate, self._on_denied, self._owns_store = build_gate(asgi_routes(app), open_store, **options)
        except (ConfigError, TypeError) as error:
            _tell_server(error)
            raise
        if "fastapi" in sys.modules:
            from limitgate.routes import fastapi_openapi  # noqa: PLC0415 - only where FastAPI is in use already

            fastapi_openapi.document()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, pass everything else through."""
        if scope["type"] not in ("http", "websocket"):
            await self._pass(scope, receive, send)
        elif self.gate is None:
            scope = scope if admission_around(scope) else _Within(scope, None, None)
            await self._run(EVERYTHING, scope, receive, send)
        else:
            request = ASGIRequest(scope)
            admission = await self.gate.acheck(request)
            request.scope = {**scope}  # rules see the request as it came, whatever the application writes
            scope = _Within(scope, admission.told, admission)
            if admission.seen is EVERYTHING:
                await self._run(EVERYTHING, scope, receive, send)
            else:
                await self._attend(admission, scope, receive, send)

    async def _run(self, seen: Container[Mark], scope: Scope, receive: Receive, send: Send) -> None:
        token: Token[Container[Mark] | None] | None = seen_by_gate.set(seen)
        try:
            await self.app(scope, receive, send)
        except GeneratorExit:  # the event loop is gone
            _forget(token)
            token = None
            raise
        finally:
            if token is not None:
                seen_by_gate.reset(token)

    async def _attend(self, admission: Admission, scope: Scope, receive: Receive, send: Send) -> None:
        """Stay with a request to its end."""
        exchange = Exchange(admission, scope, receive, send, on_denied=self._on_denied)
        if admission.refusal is not None:
            await exchange.turn_away(admission.refusal)
            return
        admission.listener = exchange
        token: Token[Container[Mark] | None] | None = seen_by_gate.set(admission.seen)
        try:
            if admission.booking is None or await admission.gate.await_booking(admission):
                await self.app(scope, exchange.receive, exchange.send)
        except Exception as error:
            admission.failed()
            if not (await exchange.refuse_late() and isinstance(error, RateLimited)):
                raise
        except GeneratorExit:  # the event loop is gone, and nothing can be awaited any more
            admission.abandon()
            _forget(token)
            token = None
            raise
        else:
            if not (admission.has_begun or await exchange.refuse_late()):
                admission.failed()
        finally:
            if token is not None:
                seen_by_gate.reset(token)
            if admission.end():
                await admission.gate.asettle(admission)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and self.gate:
            await self.gate.aconnect()
        try:
            await self.app(scope, receive, send)
        finally:
            if scope["type"] == "lifespan" and self.gate:
                await self.gate.asettled()
                if self._owns_store:
                    await self.gate.store.aclose()


class _Within(dict[str, Any]):
    """The scope of the application, with what is ours. What else is written there is written outside too, as without a gate.

    Middleware outside reads there which route a router has found.
    """

    __slots__ = ("_outside",)

    def __init__(self, outside: Scope, decision: Decision | None, admission: Admission | None) -> None:
        super().__init__(outside)
        super().__setitem__("limitgate", decision)
        super().__setitem__(ADMISSION, admission)
        self._outside = outside

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name not in _OURS:
            self._outside[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if name not in _OURS:
            self._outside.pop(name, None)

    def update(self, *others: Any, **more: Any) -> None:
        """Write several."""
        for name, value in dict(*others, **more).items():
            self[name] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Write what is not there yet."""
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """Take out what may be there."""
        if name in self:
            value = self[name]
            del self[name]
            return value
        return super().pop(name, *default)


def _forget(token: Token[Container[Mark] | None] | None) -> None:
    """Undo what was set for a request, wherever it is thrown away; its own context may be gone, and then so is what was set."""
    if token is not None:
        with suppress(ValueError):
            seen_by_gate.reset(token)


def _tell_server(error: Exception) -> None:
    """Log a mistake where a server builds the middleware: most of them go on after an error in that moment, in silence."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    log.critical("LimitGate cannot be set up, so every request fails: %s", error)


class LimitGateWSGI:
    """WSGI middleware (PEP 3333): ``app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules="config/")``.

    Options are those of `Settings`; unset ones come from ``LIMITGATE_*``. Raises `ConfigError` for a mistake in them or in the
    rules. A request that a rule's ``max_delay`` makes wait for its turn sleeps in its thread. WSGI does not tell when a client
    leaves meanwhile, so its turn is not given back.
    """

    def __init__(self, app: WSGIApp, **options: Unpack[WSGIOptions]) -> None:
        self.app = app
        self.gate, self._on_denied, _ = build_gate(wsgi_routes(app), open_sync_store, **options)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if self.gate is None:
            return self._pass(environ, start_response)
        admission = self.gate.check(WSGIRequest(environ))
        environ["limitgate"], environ[ADMISSION] = admission.told, admission
        refusal = admission.refusal
        if refusal is not None:
            if self._on_denied is not None and refusal.status == 429:
                denied: Iterable[bytes] = self._on_denied(environ, starting(admission, start_response, refusal.waiting))
                admission.end()
                return denied
            admission.end()
            start_response(f"{refusal.status} {refusal.reason}", refusal.fields + admission.rate_fields)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [refusal.body]
        if admission.decision is not None:
            start_response = starting(admission, start_response)
        if admission.is_by_outcome and "wsgi.input" in environ:
            environ["wsgi.input"] = Upload(environ["wsgi.input"], admission)
        try:
            chunks = self._run(admission.seen, environ, start_response)
        except BaseException as error:
            if isinstance(error, Exception):
                admission.failed()
            end(admission)
            raise
        if admission.has_slots:  # until the server is done with it, as to send it may take long
            settle(admission)
            return SizedBody(chunks, admission) if hasattr(chunks, "__len__") else Body(chunks, admission)
        has_yet_to_run = isinstance(chunks, GeneratorType)
        if (admission.seen and has_yet_to_run) or (admission.decision is not None and not _is_all_there(chunks, environ)):
            settle(admission)
            return Body(chunks, admission)
        end(admission)
        return chunks

    def _pass(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if admission_around(environ) is None:
            environ["limitgate"], environ[ADMISSION] = None, None
        return self._run(EVERYTHING, environ, start_response)

    def _run(self, seen: Container[Mark], environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        token = seen_by_gate.set(seen)
        try:
            return self.app(environ, start_response)
        finally:
            seen_by_gate.reset(token)


def _is_all_there(chunks: Iterable[bytes], environ: dict[str, Any]) -> bool:
    """True if nothing of the application is left to run: chunks of a known number, or a file for the server to send."""
    if hasattr(chunks, "__len__") or hasattr(chunks, "read"):
        return True
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(chunks, wrapper)
