"""Routes of Starlette and FastAPI with mounts and included routers.

An index finds candidates by literal segments; the router's own matching decides. Nothing is cached by path, because clients
choose paths.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import isclass, isfunction, ismethod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from limitgate.http.paths import ANY, REST, PathIndex, below
from limitgate.http.request import ASGIRequest, Request, Scope
from limitgate.routes import NoRoutes, Route, Routes, is_falcon
from limitgate.routes.overview import METHODS, Listed
from limitgate.rules.decorators import Mark, effective, has_marks, marks_of, note_routed
from limitgate.rules.rule import Rule

_WITHIN_A_SEGMENT = re.compile(r"(?:[^{}]|\{\w+(?::(?:str|int|float|uuid))?\})*")
"""Text whose convertors match within one segment."""
_MATCH_PARTIAL, _MATCH_FULL = 1, 2  # as in starlette.routing.Match


class StarletteRoutes(Routes):
    def __init__(self, router: Any) -> None:
        self._router = router
        self._routes_of: Callable[[Any], list[Any]] = _IN_ROUTER if _hands_on(router) else _HERE
        self._root: list[Any] | None = None
        self._tables: dict[int, _Table] = {}
        """Tables by the id of their list of routes."""
        self._lists: list[list[Any]] = []
        self._contents: list[list[Any]] = []
        """Contents of `_lists` at the last update."""
        self._decorated = False
        self._version: object = None
        """Version of the routes; None if more than method and path select routes."""

    def decorated(self) -> bool:
        self._current()
        return self._decorated

    def find(self, request: Request) -> Route | None:
        """Return the route; None if a convertor raises."""
        try:
            return self._find(dict(request.scope or {}))
        except Exception:  # noqa: BLE001 - the router raises this after the charge
            return None

    def version(self, _: Request) -> object:
        routes_of = self._routes_of  # a local name, because it isn't a method
        if routes_of(self._router) is not self._root or self._lists != self._contents:
            self._current()
        return self._version

    def _find(self, scope: Scope) -> Route | None:
        """Find a route. Mounts that lead back are left out of its template, because clients choose their depth."""
        tables = self._current()
        first = table = tables[id(self._routes_of(self._router))]
        entered: dict[int, str] = {}
        template, marks = "", tuple[Mark, ...]()
        for _ in range(sys.getrecursionlimit()):  # no router goes deeper
            template = entered.setdefault(id(table), template)
            found = table.find(scope)
            if found is None:
                return None if table is first else Route(f"{template}/**", marks)
            entry, child_scope = found
            if child_scope is None:
                return Route(template + entry.path, marks)
            endpoint = child_scope.get("endpoint") if entry.endpoint is None else effective(entry.endpoint)
            marks += marks_of(endpoint, scope.get("method", ""))
            if entry.below is None:
                return Route(template + entry.path, marks)
            template, table = template + entry.path, tables[id(entry.below)]
            scope = {**scope, **child_scope}
        return None

    def _current(self) -> dict[int, _Table]:
        """Return current tables. Compares the contents of lists by identity, which takes a nanosecond per route."""
        root = self._routes_of(self._router)
        if root is self._root and self._lists == self._contents:
            return self._tables
        self._tables = tables = _read(root)
        self._lists = [now for table in tables.values() for now, _ in table.lists]
        self._contents = [then for table in tables.values() for _, then in table.lists]
        self._decorated = _are_decorated(tables.values())
        is_by_path = all(_is_by_path(entry.route) for table in tables.values() for entry in table.entries)
        self._version = tables if is_by_path else None
        self._root = root
        return tables


_HERE, _IN_ROUTER = attrgetter("routes"), attrgetter("router.routes")


def _hands_on(app: Any) -> bool:
    starlette = sys.modules.get("starlette.applications")
    return starlette is not None and getattr(type(app), "routes", None) is starlette.Starlette.routes


def _is_by_path(route: Any) -> bool:
    """True for a route class of Starlette or FastAPI. FastAPI 0.143 wraps routes in contexts."""
    matches = getattr(type(getattr(route, "original_route", route)), "matches", None)
    return (getattr(matches, "__module__", None), getattr(matches, "__qualname__", "").partition(".")[0]) in _BY_PATH


_BY_PATH = frozenset(
    {
        ("starlette.routing", "Route"),
        ("starlette.routing", "WebSocketRoute"),
        ("starlette.routing", "Mount"),
        ("fastapi.routing", "APIRoute"),
        ("fastapi.routing", "APIWebSocketRoute"),
    }
)
"""Route classes whose ``matches`` only uses method and path."""


class _Entry(NamedTuple):
    route: Any
    path: str
    endpoint: Any
    below: list[Any] | None
    """Routes of a mounted application, if known."""


class _Table:
    def __init__(self, routes: list[Any]) -> None:
        self._index: PathIndex[tuple[int, _Entry]] = PathIndex()
        self.lists = [(found, list(found)) for found in _lists(routes)]
        """Lists of routes, each with its previous contents."""
        self.entries = [_entry(route) for route in flat(routes)]
        for place, entry in enumerate(self.entries):
            self._index.add(_proposal(entry), (place, entry))

    def find(self, scope: Scope) -> tuple[_Entry, Scope | None] | None:
        """Return the first full match, or else the first match of another method."""
        path = below(scope["path"], scope.get("root_path", "")).removesuffix("\n")
        partial: _Entry | None = None
        for _, entry in sorted(self._index.find(path), key=itemgetter(0)):
            match, child_scope = entry.route.matches(scope)
            if match.value == _MATCH_FULL:
                return entry, child_scope
            if match.value == _MATCH_PARTIAL and partial is None:
                partial = entry
        return None if partial is None else (partial, None)


def _read(routes: list[Any]) -> dict[int, _Table]:
    tables: dict[int, _Table] = {}
    waiting = [routes]
    while waiting:
        found = waiting.pop()
        if id(found) not in tables:
            tables[id(found)] = table = _Table(found)
            waiting += [entry.below for entry in table.entries if entry.below is not None]
    return tables


def _are_decorated(tables: Iterable[_Table]) -> bool:
    entries = [entry for table in tables for entry in table.entries]
    for entry in entries:
        note_routed(entry.endpoint)
    called = [getattr(entry.route, "app", None) if entry.endpoint is None else entry.endpoint for entry in entries]
    return any(has_marks(each) or has_marks(effective(each)) for each in called)


def asgi_routes(app: Any) -> Routes:
    router = router_of(app)
    if router is not None:
        return StarletteRoutes(router)
    while app is not None and not (hasattr(app, "asgi_handler") and hasattr(app, "route_handler_method_map")):
        if is_falcon(app):
            return NoRoutes(fills_with_nothing=True)
        app = getattr(app, "app", None)
    return NoRoutes() if app is None else NoRoutes(partial(_mounts_of_litestar, app))


def _mounts_of_litestar(app: Any) -> list[str]:
    handlers = [(route.path, getattr(route, "route_handler", None)) for route in app.routes]
    return [path for path, handler in handlers if getattr(handler, "is_mount", False) and path != "/"]


def is_inside_starlette(app: Any) -> bool:
    """True inside a Starlette application's middleware, which exists after the server's first call."""
    innermost = getattr(sys.modules.get("starlette.middleware.exceptions"), "ExceptionMiddleware", ())
    router = router_of(app)
    while app is not router and not isinstance(app, innermost):
        app = getattr(app, "app", None)
    return app is not router


def router_of(app: Any) -> Any:
    while app is not None and not _are_routes(getattr(app, "routes", None)):
        app = getattr(app, "app", None)
    return app


def _are_routes(found: object) -> bool:
    """True for routes of Starlette, because ``routes`` of other frameworks differ."""
    return isinstance(found, list) and all(hasattr(route, "matches") for route in found[:1])


def flat(routes: Iterable[Any]) -> Iterable[Any]:
    """Yield the routes of included routers of FastAPI with full paths.

    Before 0.143, foreign routes are in ``starlette_route``.
    """
    if not any(type(route).__module__ == "fastapi.routing" for route in routes):
        return routes
    import fastapi.routing  # noqa: PLC0415 - only if already imported

    flatten = getattr(fastapi.routing, "iter_route_contexts", None)
    if flatten is None:
        return routes
    return [getattr(route, "starlette_route", None) or route for route in flatten(routes)]


def mounted(route: Any) -> list[Any] | None:
    """Return the routes of a mounted application; None if unknown or an endpoint."""
    routes: list[Any] | None = getattr(router_of(getattr(route, "app", None)) or route, "routes", None)
    return routes


def _lists(routes: list[Any]) -> Iterator[list[Any]]:
    waiting, known = [routes], set()
    while waiting:
        found = waiting.pop()
        if id(found) not in known:
            known.add(id(found))
            yield found
            included = [getattr(getattr(route, "original_router", None), "routes", None) for route in found]
            waiting += [each for each in included if isinstance(each, list)]


def _entry(route: Any) -> _Entry:
    return _Entry(route, getattr(route, "path", None) or "", getattr(route, "endpoint", None), mounted(route))


def segments_of(path: str) -> tuple[str, ...]:
    """Return segments, including empty ones: `ANY` for one variable segment, `REST` for several."""
    found: list[str] = []
    for segment in path.split("/")[1:]:
        if "{" in segment and not _WITHIN_A_SEGMENT.fullmatch(segment):
            return (*found, REST)
        found.append(ANY if "{" in segment else segment)
    return tuple(found)


def _proposal(entry: _Entry) -> tuple[str, ...]:
    segments = segments_of(entry.path)
    if entry.endpoint is None:
        return segments if segments[-1:] == (REST,) else (*segments, REST)
    return () if segments == ("",) else segments


def routes_of(app: Any) -> list[Listed]:
    """Return the routes. A mount without known routes counts as one."""
    router = router_of(app)
    if router is None:
        return []
    found = list(_walk(router.routes, "", frozenset()))
    for _, route in found:
        note_routed(getattr(route, "endpoint", None))
    routes = asgi_routes(app)
    return [_listed(template, route, routes) for template, route in found]


def mounts_of(app: Any) -> Iterator[tuple[str, Any]]:
    """Yield directly mounted applications, with templates."""
    router = router_of(app)
    for route in flat(router.routes) if router is not None else ():
        within = getattr(route, "app", None)
        if within is not None and getattr(route, "endpoint", None) is None and mounted(route):
            yield getattr(route, "path", None) or "", within


def _walk(routes: list[Any], template: str, around: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield templates and routes. ``around`` has the ids of outer lists, because an application may be mounted in itself."""
    for route in flat(routes):
        path = template + (getattr(route, "path", None) or "")
        below = None if getattr(route, "endpoint", None) is not None else mounted(route)
        if not below or id(below) in around:
            yield path, route
        else:
            yield from _walk(below, path, around | {id(routes)})


def _listed(template: str, route: Any, routes: Routes) -> Listed:
    endpoint = getattr(route, "endpoint", None)
    pattern = tuple(filter(None, segments_of(template)))
    if endpoint is None:
        pattern = pattern if pattern[-1:] == (REST,) else (*pattern, REST)
        return Listed(f"{template}/**", pattern, METHODS, lambda _: (), lambda _: True)
    meant = effective(endpoint)
    dependencies = tuple(rules_within(route.dependant)) if hasattr(route, "dependant") else ()

    def marks(method: str) -> tuple[Mark, ...]:
        return (*marks_of(meant, method), *dependencies)

    methods = _methods(route, meant)
    return Listed(
        template or "/", pattern, methods, marks, partial(_takes, routes, template, methods[0]), lambda _: dependencies
    )


def _methods(route: Any, endpoint: Any) -> tuple[str, ...]:
    """Return the methods. A class defines its methods; a WebSocket has GET."""
    given = getattr(route, "methods", None)
    if given is None and isclass(endpoint):
        given = [method for method in (*METHODS, "HEAD", "OPTIONS") if hasattr(endpoint, method.lower())]
    if given is None and not hasattr(route, "methods"):
        given = ["GET"]
    if not given:
        return METHODS if not (isfunction(endpoint) or ismethod(endpoint)) else ("GET",)
    return tuple(sorted(set(given) - ({"HEAD"} if "GET" in given else set())))


def _takes(routes: Routes, template: str, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}, "headers": []}
    found = routes.find(ASGIRequest(scope))
    return found is not None and found.template == template


def rules_within(dependant: Any) -> Iterator[Rule]:
    for dependency in dependant.dependencies:
        rule = getattr(dependency.call, "rule", None)
        if isinstance(rule, Rule):
            yield rule
        yield from rules_within(dependency)
