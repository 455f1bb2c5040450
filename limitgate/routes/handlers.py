"""Error handlers of applications for `RateLimited` and status 429."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from limitgate.errors import LimitGateError
from limitgate.limits.decision import RateLimited

STATUS = 429
ERRORS = tuple(kind for kind in RateLimited.__mro__ if issubclass(kind, LimitGateError))
"""Errors with possible handlers, the most specific first."""
_KEYS = (*ERRORS, STATUS)


def application_behind(app: Any) -> Any:
    """Return the framework application behind a gate and other middleware, or None."""
    seen: set[int] = set()
    while app is not None:
        owner = getattr(app, "__self__", app)  # for methods such as Quart.asgi_app
        if id(owner) in seen:
            return None
        seen.add(id(owner))
        if hasattr(owner, "error_handler_spec") or isinstance(getattr(owner, "exception_handlers", None), Mapping):
            return owner
        app = getattr(owner, "app", None)
    return None


def handler_of_refusals(handlers: Any) -> Callable[..., Any] | None:
    """Return the handler of refusals from handlers by error or status, or None."""
    if handlers and isinstance(handlers, Mapping):
        for key in _KEYS:
            if key in handlers:
                handler: Callable[..., Any] = handlers[key]
                return handler
    return None
