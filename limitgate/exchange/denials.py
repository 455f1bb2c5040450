"""Lets the application answer refusals by its framework's handlers for `RateLimited` and status 429.

Handlers are looked up for each refusal, so you may register them at any time. Those of more general errors are not used. In
Flask and Quart, the first ``before_request`` function raises the refusal, so that blueprints and ``after_request`` functions
work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from inspect import isawaitable
from typing import Any, NamedTuple

from limitgate.http.request import Scope
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision, RateLimited
from limitgate.routes.handlers import ERRORS, STATUS, application_behind, handler_of_refusals
from limitgate.rules.options import is_async


def refused(base: type[Exception], refusal: Refusal, decision: Decision, **options: Any) -> RateLimited:
    """Return a `RateLimited` that is also a framework's error of class ``base``."""
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
    """A Flask or Quart application with a method ``entrance``."""

    def __init__(self, app: Any, entrance: str) -> None:
        self._app = app
        self._entrance = entrance

    def denial(self, place: Any, refusal: Refusal, decision: Decision) -> Callable[..., Any] | None:
        """Return the application that answers a refusal; None without a handler."""
        if not any(self._has_handler(name) for name in self._app.error_handler_spec):
            return None
        self._hook()

        def answer(place: Any, *arguments: Any) -> Any:
            place[_REFUSED] = refusal, decision
            # Bypass middleware that might answer itself.
            entrance = getattr(type(self._app), self._entrance)
            return entrance(self._app, place, *arguments)

        return answer

    def _hook(self) -> None:
        """Install the function that raises refusals.

        Replace the list, because other threads may be iterating over it.
        """
        functions = self._app.before_request_funcs
        if self._raise not in functions.get(None, ()):
            functions[None] = [self._raise, *functions.get(None, ())]

    def _has_handler(self, blueprint: str | None) -> bool:
        spec = self._app.error_handler_spec.get(blueprint, {})
        return bool(spec.get(STATUS)) or any(kind in spec.get(None, {}) for kind in ERRORS)

    def _raise(self) -> Any:
        """Raise the refusal, or answer it if neither the application nor the blueprint has a handler."""
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


class Denials(NamedTuple):
    """Finds the application that answers a refusal."""

    find: Callable[[Any, Refusal, Decision], Callable[..., Any] | None]
    """Returns the application that answers; None for none."""
    are_handlers: bool
    """True if the framework may have run the handler already."""

    def answer(self, place: Any, refusal: Refusal, decision: Decision | None) -> Callable[..., Any] | None:
        """Return the application that answers a refusal; None if there is none, or if no limit refused."""
        return None if refusal.status != STATUS or decision is None else self.find(place, refusal, decision)


def denials_by(on_denied: Callable[..., Any]) -> Denials:
    """Let the option ``on_denied`` answer refusals."""
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
