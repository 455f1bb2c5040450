"""Finds routes before the framework's router runs, and error handlers. Frameworks are imported if needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from limitgate.errors import LimitGateError
from limitgate.http.paths import ANY, REST
from limitgate.http.request import Request
from limitgate.limits.decision import RateLimited
from limitgate.rules.decorators import Mark
from limitgate.rules.rule import RuleSet

Pattern = tuple[str, ...]


class Route(NamedTuple):
    template: str
    """Template, including mount points."""
    marks: tuple[Mark, ...] = ()
    """Marks of the endpoint; empty if the router refuses the method."""


class Routes(Protocol):
    def decorated(self) -> bool:
        """True if every request needs a lookup."""

    def find(self, request: Request) -> Route | None:
        """Return the route; None if there is none, or if it is unknown."""

    def version(self, request: Request) -> object:
        """Return an object that stays the same while the routes do. None if more than method and path selects a route."""

    def mounts(self) -> list[str]:
        """Return mounts that match by prefix, as ``/files`` matches ``/filesadmin``."""
        return []

    fills_with_nothing: bool = False
    """True if placeholders match empty segments: ``/items/{id}`` matches ``/items/``."""

    def check(self, _: RuleSet, /) -> None:
        """Raise `ConfigError` for rules that these routes can't have."""
        return


class NoRoutes(Routes):
    """Knows no routes, so only rules cover the application."""

    def __init__(self, mounts: Callable[[], list[str]] = list, *, fills_with_nothing: bool = False) -> None:
        self._mounts = mounts
        self.fills_with_nothing = fills_with_nothing

    def mounts(self) -> list[str]:
        return self._mounts()

    def decorated(self) -> bool:
        return False

    def find(self, _: Request) -> Route | None:
        return None

    def version(self, _: Request) -> object:
        return self


def pattern_in(template: str) -> Pattern:
    """Return the segments of a template whose placeholders are `ANY` or `REST`."""
    pattern: list[str] = []
    for segment in filter(None, template.split("/")):
        if REST in segment:
            return (*pattern, REST)
        pattern.append(ANY if ANY in segment else segment)
    return tuple(pattern)


def is_falcon(app: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "falcon" for kind in type(app).__mro__)


STATUS = 429
ERRORS = tuple(kind for kind in RateLimited.__mro__ if issubclass(kind, LimitGateError))
"""Errors that may have handlers, most specific first."""
_KEYS = (*ERRORS, STATUS)


def application_behind(app: Any) -> Any:
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
    if handlers and isinstance(handlers, Mapping):
        for key in _KEYS:
            if key in handlers:
                handler: Callable[..., Any] = handlers[key]
                return handler
    return None
