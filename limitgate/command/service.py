"""The service that a verb works on: rules, options, routes and store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import isawaitable
from typing import Any

import click

from limitgate.command.applications import (
    Door,
    application,
    gates,
    inwards,
    is_in_python,
    is_of_django,
    is_rules,
    no_gate,
    routes_of,
    rules_named,
)
from limitgate.command.output import say
from limitgate.command.stored import settings_of
from limitgate.gate.refused_rules import Refusers
from limitgate.http.paths import meet, segments
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.http.written import Lines, asgi_scope, wsgi_environ
from limitgate.process.callables import accepts, is_async
from limitgate.routes import STATUS, NoRoutes, Pattern, Routes, application_behind, handler_of_refusals
from limitgate.routes.flask import wsgi_routes
from limitgate.routes.overview import Listed
from limitgate.routes.starlette import asgi_routes
from limitgate.rules.callers import Caller
from limitgate.rules.files import rules_of
from limitgate.rules.rule import Rule, RuleSet, placed_rules
from limitgate.rules.settings import Settings


@dataclass(eq=False)
class Service:
    rules: RuleSet
    settings: Settings
    _app: Any = None
    _door: Door = "asgi"

    @property
    def awaits(self) -> bool:
        return self._door == "asgi" or (self._door == "django" and is_async(self.settings.identify))

    @cached_property
    def routes(self) -> Routes:
        if self._app is None:
            return NoRoutes()
        if self._door == "django":
            from limitgate.routes.django import DjangoRoutes

            return DjangoRoutes()
        return asgi_routes(self._app) if self._door == "asgi" else wsgi_routes(self._app)

    @property
    def knows_routes(self) -> bool:
        return not isinstance(self.routes, NoRoutes)

    @cached_property
    def templates(self) -> dict[str, Pattern]:
        return {route.template: route.pattern for route in self._listed}

    @cached_property
    def _listed(self) -> list[Listed]:
        return [] if self._app is None else routes_of(self._app)

    def templates_for(self, rule: Rule) -> list[str]:
        patterns = [*map(segments, rule.paths)]
        return [text for text, route in self.templates.items() if any(meet(each, route) is not None for each in patterns)]

    @cached_property
    def in_code(self) -> list[Rule]:
        if any(map(is_of_django, inwards(self._app))):
            for route in self._listed:  # imports the views
                for method in route.methods:
                    route.marks(method)  # makes the limits of throttles by rate
        return [] if self._app is None else placed_rules()

    @property
    def refusers(self) -> Refusers:
        return Refusers(self.rules, self.in_code, self.settings, self.templates_for if self.knows_routes else None)

    def late_limits(self, request: Request) -> Sequence[Rule]:
        """Return limits of dependencies or throttles, which apply behind the gate."""
        route = self.routes.find(request)
        found = [each for each in self._listed if route is not None and each.template == route.template]
        # A route for HEAD alone comes before one for GET, which also answers HEAD.
        methods = request.sent_method, "GET" if request.method == "HEAD" else request.method
        return next((each.late(method) for method in methods for each in found if method in each.methods), ())

    @property
    def every_late_limit(self) -> list[str]:
        return list(dict.fromkeys(rule.name for each in self._listed for method in each.methods for rule in each.late(method)))

    @property
    def late_kind(self) -> str:
        return "throttle" if self._door == "django" else "dependency"

    @property
    def answers_refusals(self) -> bool:
        behind = application_behind(self._app)
        handlers = [getattr(behind, "exception_handlers", None)]
        of_blueprints = getattr(behind, "error_handler_spec", None) or {}
        handlers += [{STATUS: of_status[STATUS]} for of_status in of_blueprints.values() if of_status.get(STATUS)]
        handlers += [of_class for of_status in of_blueprints.values() for of_class in of_status.values()]
        return self.settings.on_denied is not None or any(handler_of_refusals(each) is not None for each in handlers)

    def request(self, method: str, target: str, peer: str | None, headers: Lines = (), user: str | None = None) -> Request:
        """``target`` is the raw path, with an optional query."""
        request = self._request(method, target, peer, headers, user)
        request.document = None
        return request

    def _request(self, method: str, target: str, peer: str | None, headers: Lines, user: str | None) -> Request:
        if self._door == "asgi":
            return ASGIRequest(asgi_scope(method, target, peer, headers, user))
        environ = wsgi_environ(method, target, peer, headers, user)
        if self._door == "wsgi":
            return WSGIRequest(environ)
        from django.core.handlers.wsgi import WSGIRequest as DjangoWSGIRequest

        from limitgate.django.middleware import DjangoRequest

        return DjangoRequest(DjangoWSGIRequest(environ))

    def caller_of(self, request: Request) -> Caller | None:
        """None if ``identify`` raises."""
        identify = self.settings.identify
        found = None if identify is None else lenient(identify)(request)
        return asyncio.run(found) if isinstance(found, Coroutine) else found


def lenient(identify: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Make an ``identify`` that returns None instead of raising."""

    def find(request: Request) -> Any:
        with _telling():
            found = identify(request)
            return wait(found) if isawaitable(found) else found

    async def wait(found: Awaitable[Any]) -> Any:
        with _telling():
            return await found

    return find


def tell_unidentified(expected: str) -> None:
    told = "identify found no caller for these headers (the application's startup was not run)"
    say(f"limitgate: {told}; if the service knows the caller, expected {expected}", err=True)


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - user code
        told = f"{type(error).__name__}: {error} outside the service"
        say(f"limitgate: identify raised {told}, so the request has no caller", err=True)


def service(rules: str | None, app: str | None, **given: Any) -> Service:
    """Raises `click.UsageError` and `ConfigError`."""
    name = app or (rules if rules is not None and is_in_python(rules) else None)
    found = None if name is None else application(name)
    if is_rules(found):
        if app is not None:
            raise click.UsageError(f"{app} is a list of rules, expected an application, or {app} as --rules")
        return Service(rules_of(found), settings_of(given, rules_of(found)))
    gate = None if found is None else next(gates(found), None)
    if rules is not None and rules != name:
        in_force = rules_named(rules)
    elif name is None:
        raise click.UsageError("expected --rules, or --app with its own rules")
    elif gate is None:
        raise no_gate(name)
    else:
        in_force = gate.rules
    if found is not None and gate is None:
        say(f"limitgate: no LimitGate found around {name}, so options come from LIMITGATE_*", err=True)
    settings = settings_of(given, in_force, gate)
    return Service(in_force, settings, found, _door_of(found) if gate is None else gate.door)


def _door_of(app: Any) -> Door:
    if any(map(is_of_django, inwards(app))):
        return "django"
    is_wsgi = hasattr(app, "wsgi_app") or (callable(app) and accepts(app, 2) and not accepts(app, 3))
    return "wsgi" if is_wsgi else "asgi"
