"""Which endpoint a request will reach, told before the framework's own router has run.

Asked only where a key or a decorator needs it. One module per family of frameworks; none is imported unless it is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from limitgate.http.request import Request
from limitgate.rules.decorators import Mark


class Route(NamedTuple):
    """What is known about the route of a request."""

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


def mounts_of(routes: Routes) -> list[str]:
    """The paths of mounts to which a router takes whatever begins with them, such as ``/filesadmin`` to ``/files``."""
    mounts: Callable[[], list[str]] = getattr(routes, "mounts", list)
    return mounts()


class NoRoutes:
    """Behind the gate is something whose routes cannot be known."""

    def decorated(self) -> bool:
        """No."""
        return False

    def find(self, _: Request) -> Route | None:
        """None."""
        return None


class LitestarRoutes(NoRoutes):
    """The mounts of a Litestar application. Its other routes are left to rules."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def mounts(self) -> list[str]:
        """The paths of mounts; Litestar takes ``/filesadmin`` to one at ``/files``, too."""
        handlers = [(route.path, getattr(route, "route_handler", None)) for route in self._app.routes]
        return [path for path, handler in handlers if getattr(handler, "is_mount", False) and path != "/"]
