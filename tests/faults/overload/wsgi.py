"""The doors under threads, as ``tests.faults.overload.wsgi:app``."""

from __future__ import annotations

from typing import Any

import flask

from limitgate import LimitGateWSGI, limit
from tests.faults.overload import apps, trouble


def gate() -> Any:
    """Rules alone, in front of a bare application."""
    store = apps.wsgi_store()

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        body = apps.answer(environ["PATH_INFO"], environ["limitgate"], store)
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return LimitGateWSGI(app, rules=[apps.OF_LOGIN, apps.OF_ALL, *apps.FREE], store=store)


def decorated() -> Any:
    """A decorator limits a view of Flask's, a rule everything."""
    store, app = apps.wsgi_store(), flask.Flask(__name__)

    def hello() -> flask.Response:
        decision = flask.request.environ["limitgate"]
        return flask.Response(apps.answer(flask.request.path, decision, store), mimetype="application/json")

    app.add_url_rule("/login", "login", limit(apps.LOGIN, name="login", key=["ip"])(hello))
    for path in ("/hello", "/block", "/state", "/trouble/on", "/trouble/off"):
        app.add_url_rule(path, path.replace("/", "_"), hello)
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[apps.OF_ALL, *apps.FREE], store=store)
    return app


def rest() -> Any:
    """A throttle of REST framework limits logins, a rule everything."""
    from tests.faults.overload.rest import wsgi

    return wsgi()


apps.log_to_stderr()
trouble.begin()
app = {"gate": gate, "decorator": decorated, "throttle": rest}[apps.DOOR]()
