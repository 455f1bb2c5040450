"""Handlers of the application's own for refusals: of `RateLimited` and of status 429, as its framework registers them.

A handler is looked up when a request is refused, so it may be registered at any time. Handlers of other errors, `Exception`
say, are not asked: what they answer is no refusal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, NamedTuple

from limitgate.exchange.raising import RaisingApp
from limitgate.exchange.receive_buffer import Message
from limitgate.exchange.refused import refused
from limitgate.http.request import Scope
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision, RateLimited
from limitgate.routes.handlers import application_behind, handler_of_refusals
from limitgate.rules.options import is_async

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Denials(NamedTuple):
    """Who answers in the place of a gate that refuses."""

    find: Callable[[Scope, Refusal, Decision], ASGIApp | None]
    """Finds the ASGI application that answers a refusal; None if there is none."""
    are_handlers: bool
    """True if these are handlers of errors, so that what they have answered already is no other answer."""


def denials(app: ASGIApp, on_denied: ASGIApp | None) -> Denials:
    """Who answers refusals: the option ``on_denied``, else the handlers of the application behind a gate."""
    if on_denied is not None:
        return Denials(lambda _scope, _refusal, _decision: on_denied, are_handlers=False)
    behind = application_behind(app)
    if behind is not None and hasattr(behind, "error_handler_spec"):
        return Denials(RaisingApp(behind, "asgi_app").denial, are_handlers=True)

    def find(scope: Scope, refusal: Refusal, decision: Decision) -> ASGIApp | None:
        around: Any = scope.get("litestar_app") or scope.get("app") if behind is None else behind
        handler = handler_of_refusals(getattr(around, "exception_handlers", None))
        if handler is None:
            return None
        of_litestar = hasattr(around, "request_class")
        error = _error(refusal, decision, of_litestar=of_litestar)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if of_litestar:
                request = around.request_class(scope=scope, receive=receive, send=send)
                response = await _response_of_litestar(around, handler, error, request)
            else:
                from starlette.requests import Request  # noqa: PLC0415 - only where it is in use already

                response = await _response_of_starlette(handler, error, Request(scope, receive, send))
            await response(scope, receive, send)

        return answer

    return Denials(find, are_handlers=True)


def _error(refusal: Refusal, decision: Decision, *, of_litestar: bool) -> RateLimited:
    """The error that a handler is given: a `RateLimited` that is an HTTP error of the framework's, too."""
    base: type[Exception]
    if of_litestar:
        from litestar.exceptions import TooManyRequestsException  # noqa: PLC0415 - only where it is in use already

        base = TooManyRequestsException
    else:
        from starlette.exceptions import HTTPException  # noqa: PLC0415

        base = HTTPException
    fields = dict(refusal.waiting)
    return refused(base, refusal, decision, status_code=refusal.status, detail=refusal.detail, headers=fields)


async def _response_of_starlette(handler: Callable[..., Any], error: RateLimited, request: Any) -> ASGIApp:
    """Call a handler of Starlette's or FastAPI's, in a thread if it does not await."""
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415

    response: ASGIApp = await (handler(request, error) if is_async(handler) else run_in_threadpool(handler, request, error))
    return response


async def _response_of_litestar(app: Any, handler: Callable[..., Any], error: RateLimited, request: Any) -> ASGIApp:
    """Call a handler of Litestar's."""
    response = handler(request, error)
    if isawaitable(response):
        response = await response
    answer: ASGIApp = response.to_asgi_response(app=None, request=request, type_encoders=app.type_encoders)
    return answer
