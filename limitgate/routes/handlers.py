"""Error handlers that an application has registered with its framework for refusals: of `RateLimited` and of status 429."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from limitgate.errors import LimitGateError
from limitgate.limits.decision import RateLimited

STATUS = 429
"""The status that handlers may be registered for."""
ERRORS = tuple(kind for kind in RateLimited.__mro__ if issubclass(kind, LimitGateError))
"""The errors that handlers may be registered for, the nearest first."""
_KEYS = (*ERRORS, STATUS)


def application_behind(app: Any) -> Any:
    """The application of a framework behind a gate, looked for behind the middleware around it; None if there is none."""
    seen: set[int] = set()
    while app is not None:
        owner = getattr(app, "__self__", app)  # of a method such as Quart.asgi_app
        if id(owner) in seen:
            return None
        seen.add(id(owner))
        if hasattr(owner, "error_handler_spec") or isinstance(getattr(owner, "exception_handlers", None), Mapping):
            return owner
        app = getattr(owner, "app", None)
    return None


def handler_of_refusals(handlers: Any) -> Callable[..., Any] | None:
    """The handler of a refusal among those by error or status."""
    if handlers and isinstance(handlers, Mapping):
        for key in _KEYS:
            if key in handlers:
                handler: Callable[..., Any] = handlers[key]
                return handler
    return None
