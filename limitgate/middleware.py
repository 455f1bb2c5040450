"""ASGI and WSGI middleware."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Container, Iterable
from contextlib import suppress
from contextvars import Token
from types import GeneratorType
from typing import Any, ClassVar, NoReturn, Unpack

from limitgate.errors import ConfigError, StoreError, called_as
from limitgate.exchange.application import (
    Around,
    Denials,
    Message,
    RaisingApp,
    Receive,
    Send,
    denials,
    denials_by,
    takes_arguments,
)
from limitgate.exchange.asgi import ASGIExchange, ReceiveBuffer, inner_scope, show_outside
from limitgate.exchange.base import EXCHANGE, OUTCOME, PASSED, Exchange, admission_around
from limitgate.exchange.in_flight import ASGIExchangeInFlight, turn_shed_away, turn_shed_away_here, watch_upload
from limitgate.exchange.wsgi import Body, SizedBody, StartResponse, Upload, denied_by, starting
from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.lifecycle.build import ASGIApp, ASGIOptions, WSGIApp, WSGIOptions, build_gate
from limitgate.gate.lifecycle.start import arequire, ashutdown, astartup
from limitgate.gate.nesting import overall_decision, response_fields
from limitgate.http.request import ASGIRequest, Scope, WSGIRequest
from limitgate.limits.decision import RateLimited
from limitgate.routes import Routes
from limitgate.routes.flask import wsgi_routes
from limitgate.routes.starlette import asgi_routes, is_inside_starlette
from limitgate.rules import decorators
from limitgate.rules.options import check_is_plain, check_refuses
from limitgate.stores import open_store, open_sync_store

log: logging.Logger = logging.getLogger("limitgate")

Marks = Container[decorators.Mark]
MarksToken = Token[Marks | None]


class LimitGate(Around):
    """ASGI 3 middleware: ``app.add_middleware(LimitGate, rules="config/", store="redis://localhost:6379/0")``.

    `Settings` documents the options; unset ones come from ``LIMITGATE_*`` variables. At the end of the lifespan, connections
    are closed.

    Raises `ConfigError` for invalid options or rules; ``require_store`` raises `StoreError` at start. Starlette and FastAPI
    create middleware late: an error then fails the lifespan startup, or every request without lifespan events.
    """

    NAME: ClassVar[str] = "LimitGate"
    PUT_AROUND: ClassVar[str] = "app.add_middleware(LimitGate, rules=...), or app = LimitGate(app, rules=...)"
    ENTRANCES: ClassVar[tuple[str, ...]] = ("asgi_app", "asgi_handler")
    _mistake: Exception | None = None
    """A configuration error, raised later because the framework would hide it from the server now."""

    @called_as(f"{PUT_AROUND}: options have names")
    def __init__(self, app: ASGIApp, **options: Unpack[ASGIOptions]) -> None:
        self.app = app
        self.note_entrances(app)
        self.options: ASGIOptions = options
        _check_is_application(app, self.PUT_AROUND)
        if hasattr(getattr(app, "__self__", app), "wsgi_app"):
            raise ConfigError(
                "this is a Flask application, expected limitgate.flask.LimitGate(app), or LimitGateWSGI around it"
            )
        try:
            if takes_arguments(app, 2, instead_of=3):
                raise ConfigError(f"{_name_of(app)} has the parameters of a WSGI application, expected LimitGateWSGI around it")  # noqa: TRY301
            built = build_gate(self.routes_of(app), open_store, **options)
            check_refuses(built.on_denied, "scope", "receive", "send")
        except (ConfigError, TypeError) as error:
            _tell_server(error)
            if not is_inside_starlette(app):
                raise
            self._mistake = error
            return
        self.gate, on_denied, self._owns_store, self._required_prefix = built
        self._denials = denials(app, on_denied)
        self._gate_to_be = self.gate
        if self._required_prefix is not None:
            # The gate is set once the store has answered.
            self.gate = None
        if "fastapi" in sys.modules:
            from limitgate.routes import fastapi_openapi  # noqa: PLC0415 - optional dependency

            fastapi_openapi.document()
            if self._gate_to_be is not None:
                self._gate_to_be.at_other_rules.append(fastapi_openapi.forget_documents)

    def routes_of(self, app: ASGIApp) -> Routes:
        """Return the routes of an application."""
        return asgi_routes(app)

    async def __call__(  # noqa: C901, PLR0912, PLR0915 - each extra coroutine slows down all requests
        self, scope: Any, receive: Any, send: Any
    ) -> None:
        """Handle one request. Pass on other scopes."""
        gate = self.gate
        if gate is None or scope["type"] not in ("http", "websocket"):
            await self._pass(scope, receive, send)
            return
        request = ASGIRequest(scope)
        outer = None
        if not request.is_outermost:
            if self._entrances and (app := self.app_inside(scope)) is not None:
                await app(scope, receive, send)
                return
            outer = admission_around(scope)
        # Inlined `Gate.acheck`, to save a coroutine.
        admission = gate.begin(request, outer)
        rest, plan = admission.rest, admission.plan
        if plan is not None:
            try:
                if gate.answers_at_once:
                    reading: Any = gate.store.spend(plan, gate.timeout)
                else:
                    reading = await gate.store.aspend(plan, gate.timeout)
            except BaseException as error:
                rest = gate.unanswered(admission, error)
                if rest is None:
                    raise
            else:
                rest = gate.conclude(admission, reading)
        if rest is not None:
            buffer = ReceiveBuffer(receive)
            request.source = buffer.read
            await gate.afinish(admission, rest)
            if buffer.has_read:
                receive = buffer.receive
                if admission.refusal is not None:
                    buffer.close()
        is_plain = admission.is_plain
        if not is_plain and admission.is_shed:
            await turn_shed_away(admission, scope, send)
            return
        marks, permits = admission.marks, admission.permits
        if permits is None:
            exchange = ASGIExchange()
        else:
            exchange = ASGIExchangeInFlight()
            exchange.permits = permits
        exchange.begin(gate, admission, scope, receive, send, self._denials)
        if not is_plain and admission.refusal is not None:
            await exchange.turn_away(admission.refusal)
            return
        token: MarksToken | None = decorators.decided_marks.set(marks) if marks or decorators.notes_none else None
        try:
            if is_plain or await exchange.await_turn():
                app = self.app
                if is_plain or permits is not None:
                    await app(exchange.scope, exchange.receive, exchange.send)
                else:
                    sender = exchange.send_any if admission.meter is None else exchange.send_along
                    await app(exchange.scope, exchange.receive, sender)
        except Exception as error:
            exchange.open_admission().failed()
            if not (await exchange.refuse_late(has_asked_handlers=True) and isinstance(error, RateLimited)):
                raise
        # The event loop has ended.
        except GeneratorExit:
            exchange.open_admission().abandon()
            _forget(token)
            token = None
            raise
        else:
            if not (admission.has_begun or await exchange.refuse_late()):
                exchange.open_admission().failed()
        finally:
            if token is not None:
                decorators.decided_marks.reset(token)
            if exchange.end_now():
                await gate.refunds.asettle(exchange.open_admission())

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward scopes other than requests, and everything when disabled."""
        if self._mistake is not None:
            await _fail_start(self._mistake, scope, receive, send)
        if self._gate_to_be is not None and self.gate is None and self._required_prefix is not None:
            receive = await self._require_store(self._gate_to_be, self._required_prefix, scope, receive, send)
            await self(scope, receive, send)
            return
        if self._entrances and (app := self.app_inside(scope)) is not None:
            await app(scope, receive, send)
            return
        if scope["type"] in ("http", "websocket"):
            await self._pass_request(scope, receive, send)
            return
        inside = {**scope, PASSED: self} if self._entrances else scope
        if scope["type"] == "lifespan" and self.gate:
            await self._live(self.gate, inside, receive, send)
        else:
            await self.app(inside, receive, send)

    async def _live(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await astartup(gate)
        except ConfigError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        has_ended = False

        async def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                await ashutdown(gate)
                if self._owns_store:
                    await gate.store.aclose()

        async def ending(message: Message) -> None:
            try:
                if message["type"] in _LAST_OF_LIFESPAN:
                    # Servers close the event loop after this message.
                    await end()
            finally:
                await send(message)

        try:
            await self.app(scope, receive, ending)
        finally:
            await end()

    async def _require_store(self, gate: Gate, key_prefix: str, scope: Scope, receive: Receive, send: Send) -> Receive:
        """Check the store. Without lifespan events, this happens at the first request.

        Raises `StoreError`, or `ConfigError` for a wrong event loop.
        """
        received = [await receive()] if scope["type"] == "lifespan" else []
        try:
            await arequire(gate.store, key_prefix)
        except (ConfigError, StoreError) as error:
            if received:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        self.gate = gate

        async def receive_all() -> Message:
            return received.pop() if received else await receive()

        return receive_all

    async def _pass_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        inside = scope if admission_around(scope) else inner_scope(scope, None, None)
        around = scope.get(PASSED)
        if self._entrances:
            inside = {**inside, PASSED: self}

        def show() -> None:
            show_outside(inside, scope)
            scope.pop(PASSED, None)
            if around is not None:
                scope[PASSED] = around

        async def showing(message: Message) -> None:
            show()
            await send(message)

        token: MarksToken | None = decorators.decided_marks.set(decorators.EVERYTHING)
        try:
            await self.app(inside, receive, showing)
        except GeneratorExit:
            _forget(token)
            token = None
            raise
        finally:
            show()
            if token is not None:
                decorators.decided_marks.reset(token)


_LAST_OF_LIFESPAN = ("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed")


async def _fail_start(mistake: Exception, scope: Scope, receive: Receive, send: Send) -> NoReturn:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.failed", "message": str(mistake)})
    # Otherwise, the traceback would grow with each request.
    raise mistake.with_traceback(None)


def _forget(token: MarksToken | None) -> None:
    """Reset the context variable. An abandoned request may end in another context."""
    if token is not None:
        with suppress(ValueError):
            decorators.decided_marks.reset(token)


def _check_is_application(app: Any, put_around: str) -> None:
    if isinstance(app, str):
        raise ConfigError(f"{app!r:.80} is not an application, expected {put_around}")
    if getattr(app, "__globals__", {}).get("__name__") == "django.core.handlers.exception":
        raise ConfigError("this is in MIDDLEWARE of Django, expected 'limitgate.django.LimitGateMiddleware' there")


def _name_of(app: Any) -> str:
    return getattr(app, "__qualname__", None) or type(app).__qualname__


def _tell_server(error: Exception) -> None:
    """Log the error, because most servers hide it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    log.critical("LimitGate cannot be set up, so the server ends or every request fails: %s", error)


class LimitGateWSGI(Around):
    """WSGI middleware (PEP 3333): ``app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules="config/")``.

    `Settings` documents the options; unset ones come from ``LIMITGATE_*`` variables. Under ``max_delay`` a thread sleeps.
    WSGI doesn't report disconnects, so if a client leaves, its turn is lost.

    Raises `ConfigError` for invalid options or rules, and with ``require_store`` `StoreError`.
    """

    NAME: ClassVar[str] = "LimitGateWSGI"
    PUT_AROUND: ClassVar[str] = "app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=...)"
    ENTRANCES: ClassVar[tuple[str, ...]] = ("wsgi_app", "wsgi")
    app: WSGIApp

    @called_as(f"{PUT_AROUND}: options have names")
    def __init__(self, app: WSGIApp, **options: Unpack[WSGIOptions]) -> None:
        self.app = app
        self.note_entrances(app)
        self.options: WSGIOptions = options
        _check_is_application(app, self.PUT_AROUND)
        if takes_arguments(app, 3, instead_of=2):
            error = ConfigError(
                f"{_name_of(app)} has the parameters of an ASGI application, expected app.add_middleware(LimitGate, rules=...)"
            )
            _tell_server(error)
            raise error
        built = build_gate(wsgi_routes(app), open_sync_store, **options)
        check_refuses(built.on_denied, "environ", "start_response")
        self.gate: Gate | None = built.gate
        self._denials = None if built.on_denied is None else denials_by(built.on_denied)
        if built.gate is not None:
            _check_awaits_nothing(built.gate)
        built.ask_store()

    def answer_by_handlers(self, app: Any) -> None:
        """Let a Flask application's error handlers answer, unless ``on_denied`` is set."""
        if self._denials is None:
            self._denials = Denials(RaisingApp(app, "wsgi_app").denial, are_handlers=True)

    def __call__(  # noqa: PLR0911 - each extra call slows down all requests
        self, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        """Handle one request."""
        gate = self.gate
        if gate is None:
            return self._pass(environ, start_response)
        request = WSGIRequest(environ)
        if not request.is_outermost and self._entrances and (app := self.app_inside(environ)) is not None:
            chunks: Iterable[bytes] = app(environ, start_response)
            return chunks
        admission = gate.check(request, None if request.is_outermost else admission_around(environ))
        if not admission.is_plain and admission.is_shed:
            return turn_shed_away_here(admission, environ, start_response)
        exchange = Exchange()
        exchange.stand_between(gate, admission)
        environ[EXCHANGE] = exchange
        if admission.permits is not None:
            watch_upload(environ, admission.permits)
        if admission.is_plain:
            environ["limitgate"], environ[OUTCOME] = admission.decision, "admitted"
            return self._respond(exchange, admission, environ, starting(admission, start_response))
        environ["limitgate"] = overall_decision(admission) if admission.is_nested else admission.decision
        exchange.show_outcome()
        refusal = admission.refusal
        if refusal is not None:
            answer = self._denials and self._denials.answer(environ, refusal, environ["limitgate"])
            if answer is not None:
                denied = denied_by(answer, environ, starting(admission, start_response, refusal.waiting))
                admission.end()
                return denied
            admission.end()
            fields = response_fields(admission) if admission.is_nested else admission.fields
            start_response(f"{refusal.status} {refusal.reason}", refusal.fields + fields)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [refusal.body]
        if admission.decision is not None:
            start_response = starting(admission, start_response)
        if admission.is_by_outcome and "wsgi.input" in environ:
            environ["wsgi.input"] = Upload(environ["wsgi.input"], admission)
        return self._respond(exchange, admission, environ, start_response)

    def _respond(
        self, exchange: Exchange, admission: Admission, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        marks = admission.marks
        try:
            if marks or decorators.notes_none:
                chunks = self._run(marks, environ, start_response)
            else:
                chunks = self.app(environ, start_response)
        except BaseException as error:
            if isinstance(error, Exception):
                admission.failed()
            exchange.end()
            raise
        # The slots stay taken until the response is sent, and tokens are read from all of it.
        if not admission.is_plain and (admission.has_slots or admission.meter is not None):
            exchange.settle()
            return (SizedBody if hasattr(chunks, "__len__") else Body)(chunks, exchange, admission)
        kind = type(chunks)
        is_limited = admission.decision is not None
        if kind is list or not (is_limited or (marks and kind is GeneratorType)) or _is_all_there(chunks, environ):
            exchange.close()
            return chunks
        exchange.settle()
        return Body(chunks, exchange, admission)

    def _pass(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if self._entrances and (app := self.app_inside(environ)) is not None:
            chunks: Iterable[bytes] = app(environ, start_response)
            return chunks
        if admission_around(environ) is None:
            environ["limitgate"], environ[EXCHANGE] = None, None
        if self._entrances:
            environ[PASSED] = self
        return self._run(decorators.EVERYTHING, environ, start_response)

    def _run(self, marks: Marks, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        token = decorators.decided_marks.set(marks)
        try:
            return self.app(environ, start_response)
        finally:
            decorators.decided_marks.reset(token)


def _check_awaits_nothing(gate: Gate) -> None:
    check_is_plain(gate.identify, "identify")
    for tier, rules in gate.rules.rule_set.tiers.items():
        for rule in rules:
            check_is_plain(rule.limits_by, f"the callable that returns the limits of rule {rule.name!r} of tier {tier}")


def _is_all_there(chunks: Iterable[bytes], environ: dict[str, Any]) -> bool:
    if hasattr(chunks, "__len__") or hasattr(chunks, "read"):
        return True
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(chunks, wrapper)
