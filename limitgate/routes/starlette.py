"""The routes of Starlette and FastAPI, mounted applications and included routers in their places.

A route table is read once into an index that proposes the few routes whose literal segments fit; those are
asked whether they match, in the table's order, as the router would ask all of them. Nothing is kept per path, so no client
can make anything grow.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from limitgate.decorators import has_marks, marks_of, outermost
from limitgate.paths import ANY, REST, PathIndex, below
from limitgate.request import Request, Scope
from limitgate.routes import NoRoutes, Route, Routes

log = logging.getLogger("limitgate.routes")

_SEGMENT_CONVERTOR = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*(?::(?:str|int|float|uuid))?\}", re.ASCII)
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
        """The route that the router will choose."""
        return self._current().find(dict(request.scope or {}), request.method)

    def _current(self) -> _Table:
        """The table, read anew when routes have been added since."""
        routes = self._router.routes
        if self._table is None or self._table.size != len(routes):
            self._table = _Table(routes)
        return self._table


class _Entry(NamedTuple):
    route: Any
    path: str
    endpoint: Any
    below: _Table | None


class _Table:
    """One level of routes, and the tables of what is mounted there."""

    def __init__(self, routes: Sequence[Any]) -> None:
        self.size = len(routes)
        self._index: PathIndex[tuple[int, _Entry]] = PathIndex()
        flat = list(_flat(routes))
        endpoints = {id(getattr(route, "endpoint", None)) for route in flat}
        entries = [_entry(route, endpoints) for route in flat]
        for place, entry in enumerate(entries):
            self._index.add(_proposal(entry), (place, entry))
        self.decorated: bool = any(
            has_marks(entry.endpoint) or (entry.below is not None and entry.below.decorated) for entry in entries
        )

    def find(self, scope: Scope, method: str) -> Route | None:
        """The first route that matches fully, else the first that matches but for its method."""
        path = below(scope["path"], scope.get("root_path", "")).removesuffix("\n")
        partial: Route | None = None
        for _, entry in sorted(self._index.find(path), key=lambda proposed: proposed[0]):
            match, child_scope = entry.route.matches(scope)
            if match.value == _MATCH_FULL:
                return _reached(entry, scope, child_scope, method)
            if match.value == _MATCH_PARTIAL and partial is None:
                partial = Route(entry.path)
        return partial


def asgi_routes(app: Any) -> Routes:
    """The routes of an ASGI application, looked for behind the middleware around it."""
    router = _router(app)
    return NoRoutes() if router is None else StarletteRoutes(router)


def _router(app: Any) -> Any:
    while app is not None and not isinstance(getattr(app, "routes", None), list):
        app = getattr(app, "app", None)
    return app


def _flat(routes: Sequence[Any]) -> Iterable[Any]:
    """The routes with those of FastAPI's included routers in their places, each under its full path."""
    if not any(type(route).__module__ == "fastapi.routing" for route in routes):
        return routes
    import fastapi.routing  # noqa: PLC0415 - only where it is in use already

    flatten = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if flatten is None else flatten(routes)


def _entry(route: Any, endpoints: set[int]) -> _Entry:
    endpoint = getattr(route, "endpoint", None)
    limited = outermost(endpoint)
    if limited is not endpoint and id(limited) not in endpoints:
        log.warning("@limit stands above the route decorator of %s; it applies, but belongs below", route.path)
        endpoint = limited
    mounted = getattr(route, "routes", None) or getattr(_router(getattr(route, "app", None)), "routes", None)
    return _Entry(route, getattr(route, "path", None) or "", endpoint, _Table(mounted) if mounted else None)


def _proposal(entry: _Entry) -> tuple[str, ...]:
    """Segments that match at least every path that the route matches."""
    segments: list[str] = []
    for segment in entry.path.split("/")[1:]:
        if "{" not in segment:
            segments.append(segment)
        elif _SEGMENT_CONVERTOR.fullmatch(segment):
            segments.append(ANY)
        else:
            return (*segments, REST)
    if entry.endpoint is None:
        return (*segments, REST)
    return () if segments == [""] else tuple(segments)


def _reached(entry: _Entry, scope: Scope, child_scope: Scope, method: str) -> Route:
    if entry.below is not None:
        route = entry.below.find({**scope, **child_scope}, method)
        return Route(f"{entry.path}/**") if route is None else Route(entry.path + route.template, route.marks)
    endpoint = entry.endpoint
    if endpoint is None:
        endpoint = child_scope.get("endpoint")
    return Route(entry.path, marks_of(endpoint, method))
