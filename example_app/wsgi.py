"""The example on WSGI: ``flask --app example_app.wsgi run``. Its twin on ASGI is main.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Lock
from typing import Any

from flask import Flask, Response, request
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from example_app import content, demo
from limitgate import ConfigError, Limiter, LimitGateWSGI, RateLimited, StoreError, limit, usage
from limitgate.page import PageWSGI, this_machine


def start() -> tuple[str, dict[str, str]]:
    """Show a rate limiter at work."""
    return content.start_page(request.url_root)


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
def login() -> tuple[dict[str, str], int]:
    """Log in."""
    return demo.login(request.get_data())


def healthz() -> Response:
    """Say that the service is up."""
    return Response("ok", mimetype="text/plain")


def one_at_a_time() -> Callable[[], dict[str, str]]:
    """Work that is done one at a time: further requests wait in line."""
    desk = Lock()

    def work() -> dict[str, str]:
        with desk:
            time.sleep(demo.WORK)
        return content.worked()

    return work


def guarded(work: Callable[[], dict[str, str]]) -> Callable[[], Any]:
    """Work behind the overload guard, which admits what can be done soon. It learns from their latency how many that are."""
    guard = Limiter("memory://").adaptive("guard", min=2, max=8)

    def guarded_work() -> Any:
        try:
            with guard:
                return work()
        except RateLimited:
            return content.busy()

    return guarded_work


def state() -> tuple[dict[str, Any], dict[str, str]]:
    """Show the caller's buckets. Charges nothing."""
    try:
        windows = usage(request, *demo.SHOWN, path=demo.HELLO)
    except (ConfigError, StoreError):  # other rules, or no answer: nothing to show
        windows = ()
    return demo.State(windows).fields(content.rules()), {"Cache-Control": "no-store"}


def crowds(app: Flask) -> Callable[[], Response]:
    """Crowds of requests that this service sends itself, one crowd of each kind at a time."""
    under_way = {"/work": Lock(), "/work/unguarded": Lock()}

    def crowd() -> Response:
        path = demo.work_path(request.query_string.decode("latin-1"))
        if not under_way[path].acquire(blocking=False):
            return Response("Another crowd is under way.", 409, mimetype="text/plain")
        client, address = Client(app), {"REMOTE_ADDR": request.remote_addr or ""}

        def ask(number: int) -> str:
            began = time.perf_counter()
            response = client.open(path, environ_overrides=address)
            return demo.answered(number, response.status_code, time.perf_counter() - began)

        def answers() -> Iterator[str]:
            with ThreadPoolExecutor(demo.CROWD) as threads:
                asking = [threads.submit(in_turn, number) for number in range(demo.CROWD)]
                for each in as_completed(asking):
                    yield each.result()

        def in_turn(number: int) -> str:
            time.sleep(number * demo.BETWEEN)
            return ask(number)

        response = Response(answers(), mimetype="application/x-ndjson", headers={"Cache-Control": "no-store"})
        response.call_on_close(under_way[path].release)
        return response

    return crowd


def document(name: str) -> Response:
    """Show a page of the documentation as it is written."""
    text = demo.document(name)
    missing = Response("There is no such page.", 404, mimetype="text/plain")
    return missing if text is None else Response(text, mimetype="text/plain")


def create_app(**options: Any) -> Flask:
    """The application; ``options`` are those of `LimitGateWSGI`, unset ones come from ``LIMITGATE_*``."""
    store = content.store(options)
    app = Flask(__name__, static_folder=None)
    app.add_url_rule("/", view_func=start)
    app.add_url_rule("/api/hello", view_func=hello)
    app.add_url_rule("/api/items/<id>", view_func=item)
    app.add_url_rule("/api/stream", view_func=stream)
    app.add_url_rule("/login", view_func=login, methods=["POST"])
    app.add_url_rule("/work", "work", guarded(one_at_a_time()))
    app.add_url_rule("/work/unguarded", "unguarded", one_at_a_time())
    app.add_url_rule("/healthz", view_func=healthz)
    app.add_url_rule("/demo/state", view_func=state)
    app.add_url_rule("/demo/crowd", "crowd", crowds(app))
    app.add_url_rule("/docs/<name>", view_func=document)
    # Within the gate, whose rules the live page explains.
    live: dict[str, Any] = {demo.LIVE: PageWSGI(store, guard=this_machine, actions=True)}
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, live)  # type: ignore[method-assign]
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, **{"rules": content.rules(), **options, "store": store})  # type: ignore[method-assign]
    return app


app = create_app()
