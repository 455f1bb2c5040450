"""The routes of Flask, alone or behind Werkzeug's dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from limitgate.diagnostics import Diagnosis
from limitgate.http.request import Environ, Request, WSGIRequest
from limitgate.routes import NoRoutes, Route, Routes
from limitgate.rules.decorators import effective, has_marks, marks_of, note_routed

LONGEST_HOST = 260
"""Characters of a host that any name has (RFC 1035 section 2.3.4), and of its port."""


class FlaskRoutes:
    """The routes of a Flask application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._views: dict[str, Any] | None = None
        self._decorated = False

    def decorated(self) -> bool:
        """Whether any view carries a decorator; looked up anew when views have changed."""
        views = self._app.view_functions
        if self._views != views:
            self._views = dict(views)
            for view in self._views.values():
                note_routed(view)
            for rule in self._app.url_map.iter_rules():
                view = self._views.get(rule.endpoint)
                if effective(view) is not view:
                    Diagnosis.LIMIT_ABOVE_ROUTE.log(rule.rule)
            self._decorated = any(has_marks(view) or has_marks(effective(view)) for view in self._views.values())
        return self._decorated

    def find(self, request: Request) -> Route | None:
        """The route that Werkzeug's map will choose. Where it fails, by a converter that cannot read a path, there is none."""
        environ = self._with_a_short_host(request.environ or {})
        try:
            adapter = self._app.create_url_adapter(self._app.request_class(environ, populate_request=False))
            rule, _ = adapter.match(return_rule=True)
        except Exception:  # noqa: BLE001 - not found, or it is Flask's to raise, after the request was charged
            return None
        view = effective(self._app.view_functions.get(rule.endpoint))
        return Route(rule.rule, marks_of(view, environ["REQUEST_METHOD"]))

    def _with_a_short_host(self, environ: Environ) -> Environ:
        """An environ whose host takes no time to look at, where routes do not depend on it."""
        app, long = self._app, len(environ.get("HTTP_HOST") or "") > LONGEST_HOST
        if not long or app.url_map.host_matching or app.subdomain_matching or app.config.get("TRUSTED_HOSTS"):
            return environ
        return {**environ, "HTTP_HOST": "localhost"}


class DispatchedRoutes:
    """The routes of applications under the prefixes of a `werkzeug.middleware.dispatcher.DispatcherMiddleware`."""

    def __init__(self, default: Routes, mounts: Mapping[str, Routes]) -> None:
        self._default = default
        self._mounts = mounts

    def decorated(self) -> bool:
        """Whether any endpoint of any of the applications carries a decorator."""
        return self._default.decorated() or any(mount.decorated() for mount in self._mounts.values())

    def find(self, request: Request) -> Route | None:
        """The route in the application with the longest prefix of the path, as the dispatcher chooses it.

        Where there is none, the dispatcher takes whatever stands before the path's first slash for a mount point.
        """
        environ = dict(request.environ or {})
        path = environ.get("PATH_INFO", "")
        prefixes = [prefix for prefix in self._mounts if "/" in prefix and (path == prefix or path.startswith(f"{prefix}/"))]
        prefix = max(prefixes, key=len, default=path.partition("/")[0])
        environ["SCRIPT_NAME"] = environ.get("SCRIPT_NAME", "") + prefix
        environ["PATH_INFO"] = path[len(prefix) :]
        route = self._mounts.get(prefix, self._default).find(WSGIRequest(environ))
        return route._replace(template=prefix + route.template) if route and prefix in self._mounts else route


def wsgi_routes(app: Any) -> Routes:
    """The routes of a WSGI application, looked for behind the middleware around it."""
    while app is not None:
        if isinstance(mounts := getattr(app, "mounts", None), Mapping):
            known = {prefix: wsgi_routes(mounted) for prefix, mounted in mounts.items()}
            return DispatchedRoutes(wsgi_routes(getattr(app, "app", None)), known)
        owner = getattr(app, "__self__", app)
        if hasattr(owner, "url_map") and hasattr(owner, "view_functions"):
            return FlaskRoutes(owner)
        app = getattr(owner, "app", None) or getattr(owner, "wsgi_app", None)
    return NoRoutes()
