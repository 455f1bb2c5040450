"""The application inside a gate: base of the middleware, handlers of refusals, and `limitgate.usage`.

The application's handlers for `RateLimited` and status 429 answer refusals. More general handlers don't. In Flask and Quart,
the first ``before_request`` function raises the refusal, so that blueprints and ``after_request`` work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from inspect import isawaitable
from typing import Any, ClassVar, NamedTuple

from limitgate.errors import ConfigError
from limitgate.exchange.base import EXCHANGE, PASSED, Exchange
from limitgate.gate import late
from limitgate.gate.flow import run
from limitgate.gate.gate import Gate
from limitgate.http.request import Scope
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision, RateLimited, Window
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.text import lacking
from limitgate.process import switch
from limitgate.process.callables import accepts, is_async
from limitgate.routes import ERRORS, STATUS, application_behind, handler_of_refusals
from limitgate.stores import AsyncStore, SyncStore


def refused(base: type[Exception], refusal: Refusal, decision: Decision, **options: Any) -> RateLimited:
    """Return a `RateLimited` that is also an instance of the framework's error class ``base``."""
    kind = _kind(base)  # type: ignore[arg-type]  # Classes are hashable.
    error: Any = kind.__new__(kind)
    initialise: Any = base.__init__
    initialise(error, **options)
    error.decision, error.response, error.refusal_id = decision, None, refusal.id
    refused: RateLimited = error
    return refused


@cache
def _kind(base: Any) -> type[RateLimited]:
    return type("Refused", (RateLimited, base), {"__doc__": "A request was refused by a gate.", "__module__": __name__})


_REFUSED = "limitgate.refused"


class RaisingApp:
    """A Flask or Quart application, called by the method ``entrance``."""

    def __init__(self, app: Any, entrance: str) -> None:
        self._app = app
        self._entrance = entrance

    def denial(self, place: Any, refusal: Refusal, decision: Decision) -> Callable[..., Any] | None:
        """Return the application that answers a refusal; None without a handler."""
        if not any(self._has_handler(name) for name in self._app.error_handler_spec):
            return None
        # Replace the list, because other threads may be iterating over it.
        functions = self._app.before_request_funcs
        if self._raise not in functions.get(None, ()):
            functions[None] = [self._raise, *functions.get(None, ())]

        def answer(place: Any, *arguments: Any) -> Any:
            place[_REFUSED] = refusal, decision
            # Bypass middleware that might answer itself.
            entrance = getattr(type(self._app), self._entrance)
            return entrance(self._app, place, *arguments)

        return answer

    def _has_handler(self, blueprint: str | None) -> bool:
        spec = self._app.error_handler_spec.get(blueprint, {})
        return bool(spec.get(STATUS)) or any(kind in spec.get(None, {}) for kind in ERRORS)

    def _raise(self) -> Any:
        """Raise the refusal for the handlers of application or blueprint, or else answer it."""
        request = self._request
        place = getattr(request, "scope", None) or request.environ
        found = place.pop(_REFUSED, None)
        if found is None:
            return None
        refusal, decision = found
        if any(self._has_handler(name) for name in (*request.blueprints, None)):
            from werkzeug.exceptions import TooManyRequests  # noqa: PLC0415 - as in `_request`

            raise refused(TooManyRequests, refusal, decision, description=refusal.detail)
        return self._app.response_class(refusal.body, refusal.status, refusal.fields)

    @property
    def _request(self) -> Any:
        if self._entrance == "wsgi_app":
            import flask as framework  # noqa: PLC0415 - optional
        else:
            import quart as framework  # type: ignore[no-redef]  # noqa: PLC0415
        return framework.request


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def takes_arguments(app: Callable[..., Any], count: int, *, instead_of: int) -> bool:
    return accepts(app, count) and not accepts(app, instead_of)


class Denials(NamedTuple):
    find: Callable[[Any, Refusal, Decision], Callable[..., Any] | None]
    are_handlers: bool
    """True if the framework may have called a handler."""

    def answer(self, place: Any, refusal: Refusal, decision: Decision | None) -> Callable[..., Any] | None:
        return None if refusal.status != STATUS or decision is None else self.find(place, refusal, decision)


def denials_by(on_denied: Callable[..., Any]) -> Denials:
    return Denials(lambda _place, _refusal, _decision: on_denied, are_handlers=False)


def denials(app: ASGIApp, on_denied: ASGIApp | None) -> Denials:
    """Return ``on_denied``, or the error handlers of the application."""
    if on_denied is not None:
        return denials_by(on_denied)
    behind = application_behind(app)
    if behind is not None and hasattr(behind, "error_handler_spec"):
        return Denials(RaisingApp(behind, "asgi_app").denial, are_handlers=True)

    def find(scope: Scope, refusal: Refusal, decision: Decision) -> ASGIApp | None:
        around: Any = scope.get("litestar_app") or scope.get("app") if behind is None else behind
        handlers = getattr(around, "exception_handlers", None)
        handler = handler_of_refusals(handlers) if handlers else None
        if handler is None:
            return None
        of_litestar = hasattr(around, "request_class")
        error = _error(refusal, decision, of_litestar=of_litestar)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if of_litestar:
                request = around.request_class(scope=scope, receive=receive, send=send)
                response = await _response_of_litestar(around, handler, error, request)
            else:
                from starlette.requests import Request  # noqa: PLC0415 - optional

                response = await _response_of_starlette(handler, error, Request(scope, receive, send))
            await response(scope, receive, send)

        return answer

    return Denials(find, are_handlers=True)


def _error(refusal: Refusal, decision: Decision, *, of_litestar: bool) -> RateLimited:
    base: type[Exception]
    if of_litestar:
        from litestar.exceptions import TooManyRequestsException  # noqa: PLC0415 - optional

        base = TooManyRequestsException
    else:
        from starlette.exceptions import HTTPException  # noqa: PLC0415

        base = HTTPException
    fields = dict(refusal.waiting)
    return refused(base, refusal, decision, status_code=refusal.status, detail=refusal.detail, headers=fields)


async def _response_of_starlette(handler: Callable[..., Any], error: RateLimited, request: Any) -> ASGIApp:
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415

    response: ASGIApp = await (handler(request, error) if is_async(handler) else run_in_threadpool(handler, request, error))
    return response


async def _response_of_litestar(app: Any, handler: Callable[..., Any], error: RateLimited, request: Any) -> ASGIApp:
    response = handler(request, error)
    if isawaitable(response):
        response = await response
    answer: ASGIApp = response.to_asgi_response(app=None, request=request, type_encoders=app.type_encoders)
    return answer


OF_LIMITERS = {
    "check": "nothing, because LimitGate checks requests before the application runs; inside a view limitgate.Limiter.hit",
    "current_limit": "usage(request) of limitgate, under ASGI await ausage(request)",
    "enabled": "the option enabled; in tests off() of limitgate.testing",
    "exempt": "@exempt of limitgate",
    "limit": "@limit('5/minute') of limitgate, below the route decorator",
    "request_filter": "Rule('monitoring', exempt=True, when=...) among the rules",
    "reset": "reset() of limitgate.testing in tests, limitgate.Limiter.bucket(...).reset() for one client",
    "shared_limit": "@limit('10/minute', name='database') of limitgate, below the route decorator",
}
AT_ONCE = 1.0
"""Gates dropped within this many seconds are reported."""


@lacking("LimitGate", OF_LIMITERS)
class Around:
    """Middleware around an application. It may replace the application's entrance."""

    gate: Gate | None = None
    app: Any
    options: Mapping[str, Any]
    """Options, from which the command derives the same keys and clients."""
    NAME: ClassVar[str]
    PUT_AROUND: ClassVar[str]
    ENTRANCES: ClassVar[tuple[str, ...]]

    def note_entrances(self, app: Any) -> None:
        standing = {name: getattr(app, name, None) for name in self.ENTRANCES}
        self._entrances: dict[str, Callable[..., Any]] = {name: found for name, found in standing.items() if found is not None}

    def app_inside(self, place: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return the inner application if the request came back here, as after ``app.wsgi_app = LimitGateWSGI(app)``."""
        exchange: Exchange | None = place.get(EXCHANGE)
        has_passed = place.get(PASSED) is self
        if not has_passed and (exchange is None or exchange.gate is not self.gate or exchange.has_come_back):
            return None
        for name, before in self._entrances.items():
            if self._is_behind(getattr(self.app, name, None)):
                if exchange is not None and not has_passed:
                    # If the request comes again, the application has sent it.
                    exchange.has_come_back = True
                return before
        return None

    def _is_behind(self, app: Any) -> bool:
        seen = set[int]()
        while app is not None and app is not self and id(app) not in seen:
            seen.add(id(app))
            app = getattr(app, "app", None)
        return app is self

    def __del__(self) -> None:
        """Log a gate dropped right after its creation (LG039)."""
        gate = self.gate
        if gate is None or gate.has_begun or gate.outages.has_answered or sys.is_finalizing():
            return
        if time.time() - gate.loads.at < AT_ONCE:
            Diagnosis.DROPPED.log(self.NAME, self.PUT_AROUND)


_PLACES = ("scope", "environ", "META", "env")


def usage(request: object, *rule_names: str, path: str | None = None) -> tuple[Window, ...]:
    """Return the state of the limits for the caller of a request, in WSGI applications. Charges nothing.

    ``request`` is an environ, or a framework's request with an environ. ``rule_names`` selects rules of the caller's tier;
    without names, you get all rules that apply. If a named rule counts by ``path`` and doesn't apply, pass the route template
    as ``path``, such as ``/items/{id}``. Calls the store once. The result is empty if LimitGate is off, without names if the
    request is exempt, or if the headers are too large.

    Raises `StoreError` whatever ``on_error`` is, and `ConfigError` for an unknown rule, a missing ``path``, or outside a
    request.
    """
    exchange = _exchange_of(request, "usage")
    if exchange is None:
        return ()
    if exchange.awaits or not isinstance(exchange.gate.store, SyncStore):
        raise ConfigError("usage was called under ASGI, expected await ausage(request)")
    gate, admission = exchange.gate, exchange.open_admission()
    if rule_names and admission.rules.planner.asks_user:
        admission.request.find_user_here()
    return run(gate.store, late.usage(gate, admission, rule_names, path), admission.budget)


async def ausage(request: object, *rule_names: str, path: str | None = None) -> tuple[Window, ...]:
    """`usage` for ASGI applications. ``request`` is a scope, or a request with a scope."""
    exchange = _exchange_of(request, "ausage")
    if exchange is None:
        return ()
    if not (exchange.awaits and isinstance(exchange.gate.store, AsyncStore)):
        raise ConfigError("ausage was called under WSGI, expected usage(request)")
    admission = exchange.open_admission()
    if rule_names and admission.rules.planner.asks_user:
        await admission.request.find_user()
    return await exchange.abudgeted(late.usage(exchange.gate, admission, rule_names, path))


def _exchange_of(request: object, function: str) -> Exchange | None:
    places = [getattr(request, name, None) for name in _PLACES]
    place: Any = next((each for each in places if isinstance(each, Mapping)), request)
    if not isinstance(place, Mapping):
        raise TypeError(f"request is a {type(request).__name__}, expected a framework's request, a scope or an environ")
    if EXCHANGE not in place:
        raise ConfigError(
            f"{function} was called for a request that no LimitGate has admitted, expected LimitGate around the application"
        )
    exchange: Exchange | None = place[EXCHANGE]
    if exchange is not None and exchange.open_admission().settlement.is_over:
        raise ConfigError(f"{function} was called after the request, expected the call during it")
    return exchange if switch.null_store is None else None
