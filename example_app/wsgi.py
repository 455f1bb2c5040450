"""The example on WSGI: ``flask --app example_app.wsgi run``. Its twin on ASGI is main.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, request

from example_app import content
from limitgate import LimitGateWSGI, limit


def start() -> str:
    """Say what to try."""
    return content.start_page(request.host_url)


def hello() -> dict[str, Any]:
    """Say hello, and what the caller has left."""
    return content.hello(request.environ["limitgate"])


def item(id: str) -> dict[str, str]:  # noqa: A002 - the route's own name for it
    """Show one item."""
    return content.item(id)


def stream() -> Response:
    """Answer in several chunks."""

    def chunks() -> Iterator[str]:
        for number in range(1, content.CHUNKS + 1):
            yield content.chunk(number)
            time.sleep(content.PAUSE)

    return Response(chunks(), mimetype="text/plain")


# Besides the rule `login` in config/default.yaml: five per minute, three at once. Both have to have room.
@limit("20/hour", name="login-hourly", key=["ip"], on_error="closed")
def login() -> dict[str, str]:
    """Log in."""
    return content.logged_in()


def healthz() -> Response:
    """Say that the service is up."""
    return Response("ok", mimetype="text/plain")


def create_app(**options: Any) -> Flask:
    """The application; ``options`` are those of `LimitGateWSGI`, unset ones come from ``LIMITGATE_*``."""
    app = Flask(__name__, static_folder=None)
    app.add_url_rule("/", view_func=start)
    app.add_url_rule("/api/hello", view_func=hello)
    app.add_url_rule("/api/items/<id>", view_func=item)
    app.add_url_rule("/api/stream", view_func=stream)
    app.add_url_rule("/login", view_func=login, methods=["POST"])
    app.add_url_rule("/healthz", view_func=healthz)
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, **{"rules": content.rules(), **options})  # type: ignore[method-assign]
    return app


app = create_app()
