"""Routes of a framework's application, looked up before its own router runs.

Used only if a key or a decorator needs it. One module for each family of frameworks; none is imported unless in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from limitgate.http.request import Request
from limitgate.rules.decorators import Mark

Pattern = tuple[str, ...]
"""Segments as `limitgate.http.paths.segments` gives them."""


class Route(NamedTuple):
    """Route of a request."""

    template: str
    """The full path template, mount points included."""
    marks: tuple[Mark, ...] = ()
    """The decorators on the endpoint that will run; none where the router will refuse the method."""


class Routes(Protocol):
    """The routes of the application behind a gate."""

    def decorated(self) -> bool:
        """True if any endpoint carries a decorator, so that every request's route has to be known."""

    def find(self, request: Request) -> Route | None:
        """The route that a request will take; None where there is none, or none that can be known."""

    def version(self, request: Request) -> object:
        """The same object while a method, path and root path lead to the same route; None if more of a request matters."""


def mounts_of(routes: Routes) -> list[str]:
    """Paths of mounts whose router compares prefixes only, so that ``/filesadmin`` is led to ``/files``."""
    mounts: Callable[[], list[str]] = getattr(routes, "mounts", list)
    return mounts()


def fills_with_nothing(routes: Routes) -> bool:
    """True if placeholders of the application's routes stand for empty segments, too: ``/items/`` is led to ``/items/{id}``."""
    fills: bool = getattr(routes, "fills_with_nothing", False)
    return fills


class NoRoutes:
    """Routes of an application that does not show them."""

    def decorated(self) -> bool:
        """Return False."""
        return False

    def find(self, _: Request) -> Route | None:
        """Return None."""
        return None

    def version(self, _: Request) -> object:
        """The same at all times."""
        return self


class LitestarRoutes(NoRoutes):
    """The mounts of a Litestar application. Its other routes are left to rules."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def mounts(self) -> list[str]:
        """Paths of mounts; Litestar leads ``/filesadmin`` to one at ``/files``, too."""
        handlers = [(route.path, getattr(route, "route_handler", None)) for route in self._app.routes]
        return [path for path, handler in handlers if getattr(handler, "is_mount", False) and path != "/"]


class FalconRoutes(NoRoutes):
    """The routes of a Falcon application, which are left to rules. It leads ``/by//login`` to ``/by/{who}/login``."""

    fills_with_nothing = True


def is_falcon(app: object) -> bool:
    """True if this is a Falcon application, under WSGI or ASGI."""
    return any(kind.__module__.partition(".")[0] == "falcon" for kind in type(app).__mro__)
