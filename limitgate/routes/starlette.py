"""The routes of Starlette and FastAPI, mounted applications and included routers in their places.

A route table is read once into an index that proposes the few routes whose literal segments fit; those are
asked whether they match, in the table's order, as the router would ask all of them. Nothing is kept per path, so no client
can make anything grow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from limitgate.diagnostics import Diagnosis
from limitgate.http.paths import ANY, REST, PathIndex, below
from limitgate.http.request import Request, Scope
from limitgate.routes import LitestarRoutes, NoRoutes, Route, Routes
from limitgate.rules.decorators import effective, has_marks, marks_of, note_routed

_WITHIN_A_SEGMENT = re.compile(r"(?:[^{}]|\{\w+(?::(?:str|int|float|uuid))?\})*")
"""What stays in one segment of a path for sure; other convertors may go on."""
_MATCH_PARTIAL, _MATCH_FULL = 1, 2  # the values of starlette.routing.Match


class StarletteRoutes:
    """The routes of a Starlette or FastAPI application, or of one of its routers."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._table: _Table | None = None

    def decorated(self) -> bool:
        """Whether any endpoint carries a decorator, in mounted applications too."""
        return self._current().decorated

    def find(self, request: Request) -> Route | None:
        """The route that the router will choose. Where it fails, by a convertor that cannot read a path, there is none."""
        try:
            return self._current().find(dict(request.scope or {}))
        except Exception:  # noqa: BLE001 - it is the router's to raise, after the request was charged
            return None

    def _current(self) -> _Table:
        """The table, read anew when routes have changed since."""
        routes = self._router.routes
        if self._table is None or self._table.routes is not routes or self._table.is_stale():
            for route in _everywhere(routes):
                note_routed(getattr(route, "endpoint", None))
            self._table = _Table(routes)
        return self._table


class _Entry(NamedTuple):
    route: Any
    path: str
    endpoint: Any
    below: _Table | None


class _Table:
    """One level of routes, and the tables of what is mounted there."""

    def __init__(self, routes: list[Any]) -> None:
        self.routes = routes
        self._index: PathIndex[tuple[int, _Entry]] = PathIndex()
        self._lists = [(found, list(found)) for found in _lists(routes)]
        entries = [_entry(route) for route in flat(routes)]
        for place, entry in enumerate(entries):
            self._index.add(_proposal(entry), (place, entry))
        self._below = [entry.below for entry in entries if entry.below is not None]
        marked = any(has_marks(entry.endpoint) or has_marks(effective(entry.endpoint)) for entry in entries)
        self.decorated: bool = marked or any(table.decorated for table in self._below)

    def is_stale(self) -> bool:
        """Whether any list of routes, here or below, has changed. Compares identities, so it costs little."""
        for now, then in self._lists:
            if now != then:
                return True
        return bool(self._below) and any(table.is_stale() for table in self._below)

    def find(self, scope: Scope) -> Route | None:
        """The first route that matches fully, else the first that matches but for its method."""
        path = below(scope["path"], scope.get("root_path", "")).removesuffix("\n")
        partial: Route | None = None
        for _, entry in sorted(self._index.find(path), key=lambda proposed: proposed[0]):
            match, child_scope = entry.route.matches(scope)
            if match.value == _MATCH_FULL:
                return _reached(entry, scope, child_scope)
            if match.value == _MATCH_PARTIAL and partial is None:
                partial = Route(entry.path)
        return partial


def asgi_routes(app: Any) -> Routes:
    """The routes of an ASGI application, looked for behind the middleware around it."""
    router = _router(app)
    if router is not None:
        return StarletteRoutes(router)
    while app is not None and not _is_litestar(app):
        app = getattr(app, "app", None)
    return NoRoutes() if app is None else LitestarRoutes(app)


def _is_litestar(app: Any) -> bool:
    return hasattr(app, "asgi_handler") and hasattr(app, "route_handler_method_map")


def _router(app: Any) -> Any:
    while app is not None and not _are_routes(getattr(app, "routes", None)):
        app = getattr(app, "app", None)
    return app


def _are_routes(found: object) -> bool:
    """Whether this is a list of Starlette's routes; other frameworks have lists of that name, too."""
    return isinstance(found, list) and all(hasattr(route, "matches") for route in found[:1])


def flat(routes: Iterable[Any]) -> Iterable[Any]:
    """The routes with those of FastAPI's included routers in their places, each under its full path.

    Before FastAPI 0.143 what is included and is no route of FastAPI's own has its path and endpoint in ``starlette_route``.
    """
    if not any(type(route).__module__ == "fastapi.routing" for route in routes):
        return routes
    import fastapi.routing  # noqa: PLC0415 - only where it is in use already

    flatten = getattr(fastapi.routing, "iter_route_contexts", None)
    if flatten is None:
        return routes
    return [getattr(route, "starlette_route", None) or route for route in flatten(routes)]


def _everywhere(routes: Iterable[Any]) -> Iterator[Any]:
    """All routes, those of mounted applications too."""
    for route in flat(routes):
        yield route
        yield from _everywhere(_mounted(route) or ())


def _mounted(route: Any) -> list[Any] | None:
    """The routes of what is mounted at a route; None where it leads to an endpoint, or to nothing that has routes."""
    routes: list[Any] | None = getattr(_router(getattr(route, "app", None)) or route, "routes", None)
    return routes


def _lists(routes: list[Any]) -> Iterator[list[Any]]:
    """The lists that the routes of one level stand in: their own, and those of FastAPI's included routers."""
    yield routes
    for route in routes:
        included = getattr(getattr(route, "original_router", None), "routes", None)
        if isinstance(included, list):
            yield from _lists(included)


def _entry(route: Any) -> _Entry:
    endpoint = getattr(route, "endpoint", None)
    if effective(endpoint) is not endpoint:
        Diagnosis.LIMIT_ABOVE_ROUTE.log(route.path)
    routes = _mounted(route)
    return _Entry(route, getattr(route, "path", None) or "", endpoint, None if routes is None else _Table(routes))


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


def _reached(entry: _Entry, scope: Scope, child_scope: Scope) -> Route:
    if entry.below is not None:
        route = entry.below.find({**scope, **child_scope})
        return Route(f"{entry.path}/**") if route is None else Route(entry.path + route.template, route.marks)
    endpoint = child_scope.get("endpoint") if entry.endpoint is None else effective(entry.endpoint)
    return Route(entry.path, marks_of(endpoint, scope.get("method", "")))
