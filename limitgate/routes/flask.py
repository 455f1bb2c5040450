"""Routes of Flask, also behind Werkzeug's dispatcher."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any

from limitgate.http.paths import ANY, REST
from limitgate.http.request import Environ, Request, WSGIRequest
from limitgate.internal_errors import raise_interruption
from limitgate.process.clock import monotonic
from limitgate.routes import NoRoutes, Pattern, Route, Routes, is_falcon, pattern_in
from limitgate.rules.decorators import effective, has_marks, marks_of, note_routed

LOOK_EVERY = 1.0
"""Seconds between comparisons of views."""
LONGEST_HOST = 260
"""Characters with port (RFC 1035 section 2.3.4)."""
_VARIABLE = re.compile(r"<(?:(?P<converter>\w+)(?:\(.*?\))?:)?\w+>")


class FlaskRoutes(Routes):
    def __init__(self, app: Any) -> None:
        self._app = app
        self._views: dict[str, Any] = {}
        self._rules = 0
        self._looks_at = -math.inf
        self._version: object = object()
        self._decorated = False

    def decorated(self) -> bool:
        if self._views != self._app.view_functions:
            self._read_views()
        return self._decorated

    def _read_views(self) -> None:
        views = dict(self._app.view_functions)
        for view in views.values():
            note_routed(view)
        self._decorated = any(has_marks(view) or has_marks(effective(view)) for view in views.values())
        self._version = object()
        self._views = views  # set last, because then other threads skip reading

    def find(self, request: Request) -> Route | None:
        """Return the route; None if a converter raises."""
        environ = self._with_a_short_host(request.environ or {})
        try:
            adapter = self._app.create_url_adapter(self._app.request_class(environ, populate_request=False))
            rule, _ = adapter.match(return_rule=True)
        except Exception as error:  # noqa: BLE001 - not found, or Flask raises this after the charge
            raise_interruption(error)
            return None
        view = effective(self._app.view_functions.get(rule.endpoint))
        return Route(rule.rule, marks_of(view, environ["REQUEST_METHOD"]))

    def version(self, _: Request) -> object:
        """None if the host selects routes. Finds replaced views within `LOOK_EVERY` seconds, other changes at once."""
        app = self._app
        url_map = app.url_map
        if url_map.host_matching or app.subdomain_matching or app.config.get("TRUSTED_HOSTS"):
            return None
        now = monotonic()
        is_added_to = url_map._remap  # noqa: SLF001 - true from the addition of a rule until the next lookup
        if is_added_to or now >= self._looks_at or len(app.view_functions) != len(self._views):
            self._look(now)
        return self._version

    def _look(self, now: float) -> None:
        if self._views != self._app.view_functions:
            self._read_views()
        rules = sum(map(len, self._app.url_map._rules_by_endpoint.values()))  # noqa: SLF001 - there is no public attribute
        if rules != self._rules:
            self._version = object()
            self._rules = rules  # last, as above
        if getattr(self._app, "_got_first_request", False):
            self._looks_at = now + LOOK_EVERY

    def _with_a_short_host(self, environ: Environ) -> Environ:
        app, long = self._app, len(environ.get("HTTP_HOST") or "") > LONGEST_HOST
        if not long or app.url_map.host_matching or app.subdomain_matching or app.config.get("TRUSTED_HOSTS"):
            return environ
        return {**environ, "HTTP_HOST": "localhost"}


class DispatchedRoutes(Routes):
    """Routes behind a `werkzeug.middleware.dispatcher.DispatcherMiddleware`."""

    def __init__(self) -> None:
        self.default: Routes = NoRoutes()
        self.mounted: dict[str, Routes] = {}
        self._version: Sequence[object] = ()

    def decorated(self) -> bool:
        return any(routes.decorated() for routes in self._ends)

    @cached_property
    def _ends(self) -> list[Routes]:
        """Return each mounted application's routes once, although a dispatcher may contain itself."""
        found: list[Routes] = [self]
        for routes in found:
            if isinstance(routes, DispatchedRoutes):
                found += [each for each in (routes.default, *routes.mounted.values()) if each not in found]
        return [routes for routes in found if not isinstance(routes, DispatchedRoutes)]

    def find(self, request: Request) -> Route | None:
        """Return the route; its template omits mounts that lead back."""
        environ = dict(request.environ or {})
        routes: Routes = self
        entered: dict[int, str] = {}
        template = ""
        for _ in range(sys.getrecursionlimit()):  # no dispatcher goes deeper
            template = entered.setdefault(id(routes), template)
            if not isinstance(routes, DispatchedRoutes):
                route = routes.find(WSGIRequest(environ))
                return route and route._replace(template=template + route.template)
            prefix = routes.prefix_of(environ.get("PATH_INFO", ""))
            environ["SCRIPT_NAME"] = environ.get("SCRIPT_NAME", "") + prefix
            environ["PATH_INFO"] = environ.get("PATH_INFO", "")[len(prefix) :]
            template += prefix if prefix in routes.mounted else ""
            routes = routes.mounted.get(prefix, routes.default)
        return None

    def version(self, request: Request) -> object:
        now = [routes.version(request) for routes in self._ends]
        if None in now:
            return None
        if len(now) != len(self._version) or not all(map(is_, now, self._version)):
            self._version = now
        return self._version

    def prefix_of(self, path: str) -> str:
        """Return the longest mounted prefix, or the text before the first slash."""
        prefixes = [prefix for prefix in self.mounted if "/" in prefix and (path == prefix or path.startswith(f"{prefix}/"))]
        return max(prefixes, key=len, default=path.partition("/")[0])


def wsgi_routes(app: Any) -> Routes:
    return _routes(app, {})


def _routes(app: Any, known: dict[int, Routes]) -> Routes:
    flask: Any = None
    passed = []
    while app is not None:
        owner = getattr(app, "__self__", app)
        if (step := (id(owner), owner is app)) in passed:
            break
        passed.append(step)
        if id(app) in known:
            return known[id(app)]
        if is_falcon(owner):
            return NoRoutes(fills_with_nothing=True)
        if isinstance(mounts := getattr(app, "mounts", None), Mapping):
            return _dispatched(app, mounts, known)
        if hasattr(owner, "url_map") and hasattr(owner, "view_functions"):
            flask, app = owner, vars(owner).get("wsgi_app") if owner is app else None
        else:
            app = getattr(owner, "app", None) or getattr(owner, "wsgi_app", None)
    return NoRoutes() if flask is None else FlaskRoutes(flask)


def pattern_of(routes: Any, rule: Any) -> Pattern:
    """`ANY` for one variable segment, `REST` for several."""

    def placeholder(variable: re.Match[str]) -> str:
        converter = routes.converters.get(variable["converter"] or "default")
        return ANY if getattr(converter, "part_isolating", True) else REST

    return pattern_in(_VARIABLE.sub(placeholder, rule.rule))


def _dispatched(dispatcher: Any, mounts: Mapping[str, Any], known: dict[int, Routes]) -> Routes:
    known[id(dispatcher)] = found = DispatchedRoutes()
    found.default = _routes(getattr(dispatcher, "app", None), known)
    found.mounted = {prefix: _routes(each, known) for prefix, each in mounts.items()}
    return found
