"""LimitGate as a Flask extension: options from ``app.config``, callers found by Flask's own means, ``flask limitgate``."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from limitgate.messages.extras import extra

with extra("flask", "flask", "werkzeug", "click"):
    import click
    from flask import Flask
    from werkzeug.exceptions import HTTPException
    from werkzeug.routing import Map, RequestRedirect, Rule as URLRule

from limitgate.errors import ConfigError, called_as
from limitgate.exchange.around import OF_LIMITERS
from limitgate.exchange.wsgi import StartResponse
from limitgate.gate.lifecycle.build import WSGIOptions
from limitgate.gate.planning.identity import AnyIdentify
from limitgate.http.request import Request
from limitgate.messages.suggestions import expected_of, lacking, not_of
from limitgate.middleware import LimitGateWSGI
from limitgate.routes import NoRoutes
from limitgate.routes.flask import pattern_of, wsgi_routes
from limitgate.routes.overview import METHODS, Listed, overview
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import effective, marks_of, note_routed
from limitgate.rules.options import check_is_plain
from limitgate.rules.settings import PREFIX, GateSettings, Settings

NAME = "limitgate"
"""The extension's key in ``app.extensions``, and the name of its command."""


@lacking("LimitGate", {**OF_LIMITERS, "gate": f"app.extensions[{NAME!r}].gate"})
class LimitGate:
    """Flask extension: ``LimitGate(app, rules="config/")``, or ``gate = LimitGate()`` and then ``gate.init_app(app)``.

    Options are those of `Settings`. What is not passed here comes from ``app.config``, as ``LIMITGATE_RULES`` for ``rules``
    and so on, then from ``LIMITGATE_*`` variables. ``identify`` runs in a request context of the application.
    """

    @called_as("LimitGate(app, rules=...): keys are of rules, Rule('all', '100/minute', key=['ip'])")
    def __init__(self, app: Flask | None = None, **options: Unpack[WSGIOptions]) -> None:
        if isinstance(rules := options.get("rules"), Iterator):
            options["rules"] = list(rules)
        self._options = options
        if app is not None:
            self.init_app(app)

    @called_as("LimitGate(rules=...), which takes the options, and then init_app(app)")
    def init_app(self, app: Flask) -> None:
        """Put a `LimitGateWSGI` around ``app.wsgi_app`` and into ``app.extensions``, and add ``flask limitgate``.

        Raises `ConfigError` for a mistake in options or rules, and for an application that has this extension already;
        `TypeError` for an unknown option. Then the application is as it was.
        """
        _check_is_flask(app)
        if NAME in app.extensions:
            raise ConfigError(f"{app.name} has LimitGate already, expected one init_app for each application")
        options: dict[str, Any] = {**_configured(app), **self._options}
        settings = GateSettings(**options)
        if settings.identify is not None:
            check_is_plain(settings.identify, "identify")
            options["identify"] = _in_context(app, settings.identify)
        middleware = LimitGateWSGI(_with_routes(app), **options)
        app.extensions[NAME] = middleware
        app.wsgi_app = middleware  # type: ignore[method-assign]
        middleware.answer_by_handlers(app)

        @app.cli.command(NAME)
        def show_limits() -> None:
            """Show the limits of each route."""
            if middleware.gate is None:
                click.echo("LimitGate is switched off.")
                return
            click.echo(overview([middleware.gate.rules.rule_set], list(routes_of(app))))
            if settings.shadow:
                click.echo("\nThe option shadow is on: nothing is refused.")


def _check_is_flask(app: object) -> None:
    if not isinstance(app, Flask):
        message = f"{type(app).__qualname__} is no Flask application, expected one; limitgate.LimitGate is for all of ASGI"
        raise ConfigError(message)


def _configured(app: Flask) -> dict[str, Any]:
    """The options in ``app.config``."""
    known = {option.upper(): option for option in Settings.model_fields}
    configured = {}
    for key, value in app.config.items():
        name = key.removeprefix(PREFIX)
        if name == key:
            continue
        if name not in known:
            raise ConfigError(f"app.config: {key} is unknown, {expected_of(name, sorted(known), PREFIX)}")
        configured[known[name]] = value
    return configured


def _in_context(app: Flask, identify: AnyIdentify) -> AnyIdentify:
    """``identify`` with Flask's own means: ``flask.request``, ``flask.session`` and whatever else lives in a request's context.

    The body is out of reach, as whoever reads it here would take it from the view. Where there can be no context, because
    a session or a converter fails, nobody is named, and Flask meets with the same after the request was charged.
    """

    def identify_in_context(request: Request) -> Caller | Awaitable[Caller | None] | None:
        with ExitStack() as stack:
            try:
                context = app.request_context(dict(request.environ or {}))
                context.request.shallow = True
                stack.callback(_leave, context)  # before it is entered, as half of a context has to be left, too
                context.push()
            except Exception:  # noqa: BLE001
                return None
            return identify(request)

    return identify_in_context


def _leave(context: Any) -> None:
    """Leave a context that no request was handled in, even if teardown functions miss their ``before_request``."""
    with suppress(Exception):
        context.pop()


class _Routed:
    """WSGI middleware that does not say whose routes are behind it, with the application that says it."""

    def __init__(self, app: Flask) -> None:
        self.app = app
        self._wsgi_app = app.wsgi_app

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        return self._wsgi_app(environ, start_response)


def _with_routes(app: Flask) -> Any:
    """The WSGI application to put a gate around: with its routes, and the middleware that it has already."""
    return _Routed(app) if isinstance(wsgi_routes(app.wsgi_app), NoRoutes) else app.wsgi_app


def routes_of(app: Flask) -> Iterator[Listed]:
    """The routes of an application, as `overview` takes them."""
    for view in app.view_functions.values():
        note_routed(view)
    for rule in app.url_map.iter_rules():
        if not rule.build_only:
            methods = sorted(rule.methods or METHODS)
            if "GET" in methods and "HEAD" in methods:
                methods.remove("HEAD")
            view = effective(app.view_functions.get(rule.endpoint))
            takes = partial(_takes, app.url_map, rule, methods[0])
            yield Listed(_full_template(rule), pattern_of(app.url_map, rule), tuple(methods), partial(marks_of, view), takes)


def _full_template(rule: URLRule) -> str:
    """The template, behind its host or subdomain if it has one."""
    if rule.host:
        return f"//{rule.host}{rule.rule}"
    return f"//{rule.subdomain}.*{rule.rule}" if rule.subdomain else rule.rule


def _takes(routes: Map, rule: URLRule, method: str, path: str) -> bool:
    """True if Werkzeug takes a path to this rule, if need be after it has asked for a slash at the end."""
    if rule.host or rule.subdomain:
        return True
    try:
        matched, _ = routes.bind("localhost").match(path, method, return_rule=True)
    except RequestRedirect:
        return not path.endswith("/") and _takes(routes, rule, method, f"{path}/")
    except HTTPException:
        return False
    return matched is rule


if not TYPE_CHECKING:  # else any name would be one to type checkers
    __getattr__ = not_of(
        __name__,
        {
            "Limiter": "from limitgate.flask import LimitGate, or from limitgate import Limiter for what is no request",
            "exempt": "from limitgate import exempt",
            "limit": "from limitgate import limit",
        },
    )
