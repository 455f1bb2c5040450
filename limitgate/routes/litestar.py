"""What is known of the routes of Litestar: where applications are mounted."""

from __future__ import annotations

from typing import Any

from limitgate.routes import NoRoutes


class LitestarRoutes(NoRoutes):
    """The mounts of a Litestar application. Its other routes are left to rules."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def mounts(self) -> list[str]:
        """The paths of mounts; Litestar takes ``/filesadmin`` to one at ``/files``, too."""
        handlers = [(route.path, getattr(route, "route_handler", None)) for route in self._app.routes]
        return [path for path, handler in handlers if getattr(handler, "is_mount", False) and path != "/"]
