"""Falcon's placeholders stand for empty segments, too: what its router takes to a handler is charged to the handler's rule."""

from __future__ import annotations

import asyncio
from typing import Any

import bottle
import falcon
import falcon.asgi
import pytest
from werkzeug.middleware.proxy_fix import ProxyFix

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule
from tests.support.clock import Clock
from tests.support.doors import asgi_reply, wsgi_reply

RULES = [Rule("item", "2/minute", path="/items/{id}"), Rule("login", "1/minute", path="/by/{who}/login")]
TEMPLATES = ("/items/{id}", "/by/{who}/login")


class View:
    def on_get(self, req: Any, resp: Any, **_: str) -> None:
        """Answer 200."""


class AsyncView:
    async def on_get(self, req: Any, resp: Any, **_: str) -> None:
        """Answer 200."""


class App(falcon.App):
    """As projects derive their own."""


def wsgi(app: Any) -> Any:
    for template in TEMPLATES:
        app.add_route(template, View())
    return app


def wsgi_statuses(app: Any, *paths: str) -> list[int]:
    gate = LimitGateWSGI(app, rules=RULES, store=MemoryStore(Clock()))
    return [wsgi_reply(gate, path).status for path in paths]


@pytest.mark.parametrize("app", [wsgi(falcon.App()), ProxyFix(wsgi(App()))], ids=["alone", "behind middleware"])
def test_wsgi(app: Any) -> None:
    paths = ("/items/", "//items/", "/items/7", "/by//login", "/by/me/login", "/items//")
    assert wsgi_statuses(app, *paths) == [200, 200, 429, 200, 429, 404]


def test_asgi() -> None:
    app = falcon.asgi.App()
    for template in TEMPLATES:
        app.add_route(template, AsyncView())
    gate = LimitGate(app, rules=RULES, store=MemoryStore(Clock()))

    async def statuses(*paths: str) -> list[int]:
        return [(await asgi_reply(gate, path)).status for path in paths]

    assert asyncio.run(statuses("/items/", "/items/", "/items/7", "/by//login", "/by//login")) == [200, 200, 429, 200, 429]


def test_a_list_beside_its_items_is_not_charged_as_one_of_them_elsewhere() -> None:
    """Other routers lead ``/items/`` to the list, so the rule of an item is not for it."""
    app = bottle.Bottle()
    app.route("/items/", callback=lambda: "list")
    app.route("/items/<item>", callback=lambda item: item)
    assert wsgi_statuses(app, "/items/", "/items/", "/items/", "/items/7") == [200, 200, 200, 200]
