"""LimitGate as a Flask extension."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Unpack

from limitgate.messages.text import extra

with extra("flask", "flask", "werkzeug", "click"):
    import click
    from flask import Flask
    from werkzeug.exceptions import HTTPException
    from werkzeug.routing import Map, RequestRedirect, Rule as URLRule

from limitgate.errors import ConfigError, called_as
from limitgate.exchange.application import OF_LIMITERS
from limitgate.exchange.wsgi import StartResponse
from limitgate.gate.lifecycle.build import WSGIOptions
from limitgate.gate.planning.identity import AnyIdentify
from limitgate.http.request import Request
from limitgate.messages.text import expected_of, lacking, not_of
from limitgate.middleware import LimitGateWSGI
from limitgate.routes import NoRoutes
from limitgate.routes.flask import pattern_of, wsgi_routes
from limitgate.routes.overview import METHODS, Listed, overview
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import effective, marks_of, note_routed
from limitgate.rules.options import check_is_plain
from limitgate.rules.settings import PREFIX, GateSettings, Settings

NAME = "limitgate"


@lacking("LimitGate", {**OF_LIMITERS, "gate": f"app.extensions[{NAME!r}].gate"})
class LimitGate:
    """Flask extension: ``LimitGate(app, rules="config/")``, or ``gate = LimitGate()`` and later ``gate.init_app(app)``.

    Takes the options of `Settings`; defaults come from ``app.config`` (``LIMITGATE_RULES`` for ``rules``), then from
    ``LIMITGATE_*`` variables. ``identify`` runs in a request context.
    """

    @called_as("LimitGate(app, rules=...): the key belongs to a rule, Rule('all', '100/minute', key=['ip'])")
    def __init__(self, app: Flask | None = None, **options: Unpack[WSGIOptions]) -> None:
        if isinstance(rules := options.get("rules"), Iterator):
            options["rules"] = list(rules)
        self._options = options
        if app is not None:
            self.init_app(app)

    @called_as("LimitGate(rules=...), which takes the options, and then init_app(app)")
    def init_app(self, app: Flask) -> None:
        """Put a `LimitGateWSGI` around ``app.wsgi_app`` and into ``app.extensions``, and add ``flask limitgate``.

        Raises `ConfigError` for errors in options or rules, or a second LimitGate, and `TypeError` for an unknown option.
        """
        _check_is_flask(app)
        if NAME in app.extensions:
            raise ConfigError(f"{app.name} has LimitGate already, expected one init_app for each application")
        options: dict[str, Any] = {**_configured(app), **self._options}
        settings = GateSettings(**options)
        if settings.identify is not None:
            check_is_plain(settings.identify, "identify")
            options["identify"] = _in_context(app, settings.identify)
        inside = _Routed(app) if isinstance(wsgi_routes(app.wsgi_app), NoRoutes) else app.wsgi_app
        middleware = LimitGateWSGI(inside, **options)
        app.extensions[NAME] = middleware
        app.wsgi_app = middleware  # type: ignore[method-assign]
        middleware.answer_by_handlers(app)

        @app.cli.command(NAME)
        def show_limits() -> None:
            """Show the limits of each route."""
            if middleware.gate is None:
                click.echo("LimitGate is disabled.")
                return
            click.echo(overview([middleware.gate.rules.rule_set], list(routes_of(app))))
            if settings.shadow:
                click.echo("\nThe option shadow is on: nothing is refused.")


def _check_is_flask(app: object) -> None:
    if not isinstance(app, Flask):
        message = f"{type(app).__qualname__} is not a Flask application, expected one; limitgate.LimitGate is for ASGI"
        raise ConfigError(message)


def _configured(app: Flask) -> dict[str, Any]:
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
    """Make an ``identify`` that runs in a request context without the body, because the view needs the body.

    Without a context, the request has no caller, and Flask raises the error after the charge.
    """

    @wraps(identify)
    def identify_in_context(request: Request) -> Caller | Awaitable[Caller | None] | None:
        with ExitStack() as stack:
            try:
                context = app.request_context(dict(request.environ or {}))
                context.request.shallow = True
                stack.callback(_leave, context)  # to clean up after a failed push, too
                context.push()
            except Exception:  # noqa: BLE001
                return None
            return identify(request)

    return identify_in_context


def _leave(context: Any) -> None:
    """Leave the context. Ignore errors of teardown functions that rely on ``before_request``."""
    with suppress(Exception):
        context.pop()


class _Routed:
    def __init__(self, app: Flask) -> None:
        self.app = app
        self._wsgi_app = app.wsgi_app

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        return self._wsgi_app(environ, start_response)


def routes_of(app: Flask) -> Iterator[Listed]:
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
    if rule.host:
        return f"//{rule.host}{rule.rule}"
    return f"//{rule.subdomain}.*{rule.rule}" if rule.subdomain else rule.rule


def _takes(routes: Map, rule: URLRule, method: str, path: str) -> bool:
    """True if Werkzeug matches a path, or redirects it to the path with a final slash."""
    if rule.host or rule.subdomain:
        return True
    try:
        matched, _ = routes.bind("localhost").match(path, method, return_rule=True)
    except RequestRedirect:
        return not path.endswith("/") and _takes(routes, rule, method, f"{path}/")
    except HTTPException:
        return False
    return matched is rule


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_of(
        __name__,
        {
            "Limiter": "from limitgate.flask import LimitGate, or, outside of requests, from limitgate import Limiter",
            "exempt": "from limitgate import exempt",
            "limit": "from limitgate import limit",
        },
    )
