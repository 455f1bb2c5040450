"""Lookup of routes before the framework's router runs, and of its error handlers.

Each framework has a module, imported only if needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from limitgate.errors import LimitGateError
from limitgate.http.request import Request
from limitgate.limits.decision import RateLimited
from limitgate.rules.decorators import Mark
from limitgate.rules.rule import RuleSet

Pattern = tuple[str, ...]
"""Segments from `limitgate.http.paths.segments`."""


class Route(NamedTuple):
    """The route of a request."""

    template: str
    """The path template with mount points."""
    marks: tuple[Mark, ...] = ()
    """Decorators of the endpoint, empty if the router refuses the method."""


class Routes(Protocol):
    """The routes of an application."""

    def decorated(self) -> bool:
        """True if any endpoint has a decorator; every request then needs a route lookup."""

    def find(self, request: Request) -> Route | None:
        """Return None without a route, or for an unknown one."""

    def version(self, request: Request) -> object:
        """Return the same object while method, path and root path determine the route; None if they don't."""


def mounts_of(routes: Routes) -> list[str]:
    """Return mount paths that the router matches by text prefix, as ``/files`` for ``/filesadmin``."""
    mounts: Callable[[], list[str]] = getattr(routes, "mounts", list)
    return mounts()


def fills_with_nothing(routes: Routes) -> bool:
    """True if placeholders match empty segments, as ``/items/{id}`` for ``/items/``."""
    fills: bool = getattr(routes, "fills_with_nothing", False)
    return fills


def check_of(routes: Routes) -> Callable[[RuleSet], None]:
    """Return the check of rules that these routes need; it raises `ConfigError`."""
    check: Callable[[RuleSet], None] = getattr(routes, "check", lambda _: None)
    return check


class NoRoutes:
    """Routes of an application that only rules cover. See `mounts_of` and `fills_with_nothing`."""

    def __init__(self, mounts: Callable[[], list[str]] = list, *, fills_with_nothing: bool = False) -> None:
        self.mounts = mounts
        self.fills_with_nothing = fills_with_nothing

    def decorated(self) -> bool:
        return False

    def find(self, _: Request) -> Route | None:
        return None

    def version(self, _: Request) -> object:
        return self


def is_falcon(app: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "falcon" for kind in type(app).__mro__)


STATUS = 429
ERRORS = tuple(kind for kind in RateLimited.__mro__ if issubclass(kind, LimitGateError))
"""Errors with possible handlers, the most specific first."""
_KEYS = (*ERRORS, STATUS)


def application_behind(app: Any) -> Any:
    """Return the framework application behind a gate and other middleware."""
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
    """Return the handler of refusals from handlers by error or status."""
    if handlers and isinstance(handlers, Mapping):
        for key in _KEYS:
            if key in handlers:
                handler: Callable[..., Any] = handlers[key]
                return handler
    return None
