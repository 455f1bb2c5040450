"""The routes of Starlette and FastAPI for the overview."""

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
from limitgate.rules.rule import Rule


def routes_of(app: Any) -> list[Listed]:
    """Return the routes of an application; a mount without known routes is one route."""
    router = router_of(app)
    if router is None:
        return []
    found = list(_walk(router.routes, "", frozenset()))
    for _, route in found:
        note_routed(getattr(route, "endpoint", None))
    routes = asgi_routes(app)
    return [_listed(template, route, routes) for template, route in found]


def mounts_of(app: Any) -> Iterator[tuple[str, Any]]:
    """Yield the directly mounted applications with their mount templates."""
    router = router_of(app)
    for route in flat(router.routes) if router is not None else ():
        within = getattr(route, "app", None)
        if within is not None and getattr(route, "endpoint", None) is None and mounted(route):
            yield getattr(route, "path", None) or "", within


def _walk(routes: list[Any], template: str, around: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield routes with templates. ``around`` has the ids of outer lists, to stop at an application mounted in itself."""
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
    dependencies = _limits_of_dependencies(route)

    def marks(method: str) -> tuple[Mark, ...]:
        return (*marks_of(meant, method), *dependencies)

    methods = _methods(route, meant)
    return Listed(
        template or "/", pattern, methods, marks, partial(_takes, routes, template, methods[0]), lambda _: dependencies
    )


def _methods(route: Any, endpoint: Any) -> tuple[str, ...]:
    """Return the methods of a route or its class; GET for a WebSocket."""
    given = getattr(route, "methods", None)
    if given is None and isclass(endpoint):
        given = [method for method in (*METHODS, "HEAD", "OPTIONS") if hasattr(endpoint, method.lower())]
    if given is None and not hasattr(route, "methods"):
        given = ["GET"]
    if not given:
        return METHODS if not (isfunction(endpoint) or ismethod(endpoint)) else ("GET",)
    return tuple(sorted(set(given) - ({"HEAD"} if "GET" in given else set())))


def _limits_of_dependencies(route: Any) -> tuple[Rule, ...]:
    if not hasattr(route, "dependant"):
        return ()
    from limitgate.routes.fastapi_openapi import rules_within  # noqa: PLC0415 - only with FastAPI

    return tuple(rules_within(route.dependant))


def _takes(routes: Routes, template: str, method: str, path: str) -> bool:
    """True if the router chooses this template for a path."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "path_params": {}, "headers": []}
    found = routes.find(ASGIRequest(scope))
    return found is not None and found.template == template
