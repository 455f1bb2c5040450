"""The routes of Starlette and FastAPI, mounted applications and included routers in their places.

A route table is read once into an index that proposes the few routes whose literal segments fit. Only those are matched, in the
table's order, while the router would match all. Nothing is kept per path, so no client can make anything grow.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from limitgate.http.paths import ANY, REST, PathIndex, below
from limitgate.http.request import Request, Scope
from limitgate.routes import FalconRoutes, LitestarRoutes, NoRoutes, Route, Routes, is_falcon
from limitgate.rules.decorators import Mark, effective, has_marks, marks_of, note_routed

_WITHIN_A_SEGMENT = re.compile(r"(?:[^{}]|\{\w+(?::(?:str|int|float|uuid))?\})*")
"""Route segment that surely stays within one segment of a path; other convertors may go on."""
_MATCH_PARTIAL, _MATCH_FULL = 1, 2  # the values of starlette.routing.Match


class StarletteRoutes:
    """The routes of a Starlette or FastAPI application, or of one of its routers."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._routes_of: Callable[[Any], list[Any]] = _IN_ROUTER if _hands_on(router) else _HERE
        self._root: list[Any] | None = None
        """The list of routes of the router itself, when they were read."""
        self._tables: dict[int, _Table] = {}
        """By the identity of the list of routes."""
        self._lists: list[list[Any]] = []
        """All lists of routes."""
        self._contents: list[list[Any]] = []
        """What was in each of them when they were read."""
        self._decorated = False
        self._by_path = False
        """True if all routes are chosen by method and path alone."""

    def decorated(self) -> bool:
        """True if any endpoint carries a decorator, in mounted applications too."""
        self._current()
        return self._decorated

    def find(self, request: Request) -> Route | None:
        """The route that the router will choose. Where it fails, by a convertor that cannot read a path, there is none."""
        try:
            return self._find(dict(request.scope or {}))
        except Exception:  # noqa: BLE001 - it is the router's to raise, after the request was charged
            return None

    def version(self, _: Request) -> object:
        """The present tables, unless any of their routes looks at more than method and path, as one by host does."""
        routes_of = self._routes_of  # no method, so called by a name of its own
        if routes_of(self._router) is not self._root or self._lists != self._contents:  # as `_current` says
            self._current()
        return self._tables if self._by_path else None

    def _find(self, scope: Scope) -> Route | None:
        """The route at the end of the mounts. One that leads back to where the request came by adds nothing to the template.

        An application mounted in itself has any depth that clients like, so depth is no part of a key.
        """
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
        """The tables, read anew when routes have changed.

        A list tells nobody of its changes, so all are compared with what was in them: by identities and in one go, a nanosecond
        for a route.
        """
        root = self._routes_of(self._router)
        if root is self._root and self._lists == self._contents:
            return self._tables
        self._tables = tables = _read(root)
        self._lists = [now for table in tables.values() for now, _ in table.lists]
        self._contents = [then for table in tables.values() for _, then in table.lists]
        self._decorated = _are_decorated(tables.values())
        self._by_path = all(_is_by_path(entry.route) for table in tables.values() for entry in table.entries)
        self._root = root
        return tables


_HERE, _IN_ROUTER = attrgetter("routes"), attrgetter("router.routes")


def _hands_on(app: Any) -> bool:
    """True if the routes of an application are those of its router, which to ask directly takes a third of the time."""
    starlette = sys.modules.get("starlette.applications")
    return starlette is not None and getattr(type(app), "routes", None) is starlette.Starlette.routes


def _is_by_path(route: Any) -> bool:
    """True if a route is one of Starlette's or FastAPI's that matches by method and path, and not one with a way of its own.

    FastAPI 0.143 and later list routes in contexts, which match as their routes do.
    """
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
"""Modules and classes whose ``matches`` looks at method and path alone."""


class _Entry(NamedTuple):
    route: Any
    path: str
    endpoint: Any
    below: list[Any] | None
    """Routes of the application mounted there; None if it is an endpoint, or shows no routes."""


class _Table:
    """One list of routes, in whatever places it is mounted."""

    def __init__(self, routes: list[Any]) -> None:
        self._index: PathIndex[tuple[int, _Entry]] = PathIndex()
        self.lists = [(found, list(found)) for found in _lists(routes)]
        """The lists of its routes, each with what was in it before it was read."""
        self.entries = [_entry(route) for route in flat(routes)]
        for place, entry in enumerate(self.entries):
            self._index.add(_proposal(entry), (place, entry))

    def find(self, scope: Scope) -> tuple[_Entry, Scope | None] | None:
        """The first route that matches fully and what it adds to the scope, else the first that matches but for its method."""
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
    """Tables of a router and of all applications mounted in it, each read once: one may be mounted in itself."""
    tables: dict[int, _Table] = {}
    waiting = [routes]
    while waiting:
        found = waiting.pop()
        if id(found) not in tables:
            tables[id(found)] = table = _Table(found)
            waiting += [entry.below for entry in table.entries if entry.below is not None]
    return tables


def _are_decorated(tables: Iterable[_Table]) -> bool:
    """True if any endpoint of these tables carries a decorator."""
    entries = [entry for table in tables for entry in table.entries]
    for entry in entries:
        note_routed(entry.endpoint)
    called = [getattr(entry.route, "app", None) if entry.endpoint is None else entry.endpoint for entry in entries]
    return any(has_marks(each) or has_marks(effective(each)) for each in called)


def asgi_routes(app: Any) -> Routes:
    """The routes of an ASGI application, looked for behind the middleware around it."""
    router = router_of(app)
    if router is not None:
        return StarletteRoutes(router)
    while app is not None and not _is_litestar(app):
        if is_falcon(app):
            return FalconRoutes()
        app = getattr(app, "app", None)
    return NoRoutes() if app is None else LitestarRoutes(app)


def _is_litestar(app: Any) -> bool:
    return hasattr(app, "asgi_handler") and hasattr(app, "route_handler_method_map")


def router_of(app: Any) -> Any:
    """The application or router with Starlette's routes, looked for behind the middleware around it; None if there is none."""
    while app is not None and not _are_routes(getattr(app, "routes", None)):
        app = getattr(app, "app", None)
    return app


def _are_routes(found: object) -> bool:
    """True if this is a list of Starlette's routes; other frameworks have lists of that name, too."""
    return isinstance(found, list) and all(hasattr(route, "matches") for route in found[:1])


def flat(routes: Iterable[Any]) -> Iterable[Any]:
    """The routes with those of FastAPI's included routers in their places, each under its full path.

    Before FastAPI 0.143 an included route that is not FastAPI's own has its path and endpoint in ``starlette_route``.
    """
    if not any(type(route).__module__ == "fastapi.routing" for route in routes):
        return routes
    import fastapi.routing  # noqa: PLC0415 - only where it is in use already

    flatten = getattr(fastapi.routing, "iter_route_contexts", None)
    if flatten is None:
        return routes
    return [getattr(route, "starlette_route", None) or route for route in flatten(routes)]


def mounted(route: Any) -> list[Any] | None:
    """Routes of the application mounted at a route; None if it is an endpoint, or shows no routes."""
    routes: list[Any] | None = getattr(router_of(getattr(route, "app", None)) or route, "routes", None)
    return routes


def _lists(routes: list[Any]) -> Iterator[list[Any]]:
    """Lists of the routes of one level: their own, and those of FastAPI's included routers, each once."""
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
    """A route's path as segments as in a rule's pattern, empty ones kept: `ANY` for one that varies, `REST` for several."""
    found: list[str] = []
    for segment in path.split("/")[1:]:
        if "{" in segment and not _WITHIN_A_SEGMENT.fullmatch(segment):
            return (*found, REST)
        found.append(ANY if "{" in segment else segment)
    return tuple(found)


def _proposal(entry: _Entry) -> tuple[str, ...]:
    """Segments that match at least every path that the route matches."""
    segments = segments_of(entry.path)
    if entry.endpoint is None:
        return segments if segments[-1:] == (REST,) else (*segments, REST)
    return () if segments == ("",) else segments
