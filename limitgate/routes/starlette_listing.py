"""The routes of Starlette and FastAPI for the overview: mounted applications and included routers in their places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import isclass, isfunction, ismethod
from typing import Any

from limitgate.http.paths import REST
from limitgate.http.request import ASGIRequest
from limitgate.routes import Routes
from limitgate.routes.overview import METHODS, Listed
from limitgate.routes.starlette import asgi_routes, flat, mounted, router_of, segments_of
from limitgate.rules.decorators import Mark, effective, marks_of, note_routed


def routes_of(app: Any) -> list[Listed]:
    """The routes of an application, none if it shows none. Of one that shows none and is mounted, its mount alone."""
    router = router_of(app)
    if router is None:
        return []
    found = list(_walk(router.routes, "", frozenset()))
    for _, route in found:
        note_routed(getattr(route, "endpoint", None))
    routes = asgi_routes(app)
    return [_listed(template, route, routes) for template, route in found]


def mounts_of(app: Any) -> Iterator[tuple[str, Any]]:
    """The applications that are mounted right in one, each with the template of its mount."""
    router = router_of(app)
    for route in flat(router.routes) if router is not None else ():
        within = getattr(route, "app", None)
        if within is not None and getattr(route, "endpoint", None) is None and mounted(route):
            yield getattr(route, "path", None) or "", within


def _walk(routes: list[Any], template: str, around: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Routes and their templates. ``around`` are the lists that these are mounted in: one may be mounted in itself."""
    for route in flat(routes):
        path = template + (getattr(route, "path", None) or "")
        below = None if getattr(route, "endpoint", None) is not None else mounted(route)
        if not below or id(below) in around:  # an application that shows no routes has an empty list of them, or none
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
    dependencies = _limits_of_dependencies(route)

    def marks(method: str) -> tuple[Mark, ...]:
        return (*marks_of(meant, method), *dependencies)

    methods = _methods(route, meant)
    return Listed(template or "/", pattern, methods, marks, partial(_takes, routes, template, methods[0]))


def _methods(route: Any, endpoint: Any) -> tuple[str, ...]:
    """The methods of a route: those that it names, or that its class has; GET for a WebSocket, whose handshake is one."""
    given = getattr(route, "methods", None)
    if given is None and isclass(endpoint):
        given = [method for method in (*METHODS, "HEAD", "OPTIONS") if hasattr(endpoint, method.lower())]
    if given is None and not hasattr(route, "methods"):
        given = ["GET"]
    if not given:
        return METHODS if not (isfunction(endpoint) or ismethod(endpoint)) else ("GET",)
    return tuple(sorted(set(given) - ({"HEAD"} if "GET" in given else set())))


def _limits_of_dependencies(route: Any) -> tuple[Mark, ...]:
    """The limits among the dependencies of a route of FastAPI."""
    if not hasattr(route, "dependant"):
        return ()
    from limitgate.routes.fastapi_openapi import rules_within  # noqa: PLC0415 - FastAPI is in use where a route has these

    return tuple(rules_within(route.dependant))


def _takes(routes: Routes, template: str, method: str, path: str) -> bool:
    """True if the router leads a path to the route of this template."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}, "headers": []}
    found = routes.find(ASGIRequest(scope))
    return found is not None and found.template == template
