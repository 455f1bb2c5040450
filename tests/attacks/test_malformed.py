from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import flask
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.routing import BaseConverter

from limitgate import LimitGate, LimitGateWSGI, Rule
from limitgate.errors import HeadersTooLargeError
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.paths import interpretations
from limitgate.http.request import ASGIRequest, WSGIRequest
from limitgate.routes.flask import wsgi_routes
from tests.attacks.world import LIMIT, PROXY, TRUSTED
from tests.support.doors import Wire, http_scope, wsgi_environ

ROUTED = Rule("all", LIMIT, key=["path", "ip"])
TOO_LONG = "/numbers/" + "9" * 5000
"""Python converts no text of more than 4300 digits to a number."""


def test_a_path_that_starlettes_router_chokes_on_is_charged() -> None:
    """A path whose number is too long fails in the router once, as it would by itself, and is refused then."""

    async def number(request: Any) -> PlainTextResponse:
        return PlainTextResponse("number")

    gated = LimitGate(Starlette(routes=[Route("/numbers/{number:int}", number)]), rules=[ROUTED])
    first, second = Wire({"type": "http.request"}), Wire({"type": "http.request"})
    with pytest.raises(ValueError, match="digits"):
        asyncio.run(first.call(gated, http_scope(TOO_LONG)))
    assert first.reply().status == 500
    assert asyncio.run(second.call(gated, http_scope(TOO_LONG))).reply().status == 429


def test_a_path_that_flasks_router_chokes_on_is_charged() -> None:
    """A path that a converter fails on is answered by Flask once, and refused then."""

    class Failing(BaseConverter):
        def to_python(self, value: str) -> str:
            raise KeyError(value)

    app = flask.Flask("choking")
    app.url_map.converters["failing"] = Failing
    app.add_url_rule("/numbers/<failing:number>", "number", lambda number: number)
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[ROUTED])
    client = app.test_client()
    assert [client.get(TOO_LONG).status_code for _ in range(2)] == [500, 429]


def _seconds(work: Callable[[], object]) -> float:
    """The processor time of the quickest of several runs."""
    times = []
    for _ in range(5):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def _lines(size: int) -> Callable[[], object]:
    scope = http_scope(headers=[("X-Same", "v")] * size)
    return lambda: ASGIRequest(scope).headers


def _different_lines(size: int) -> Callable[[], object]:
    scope = http_scope(headers=[(f"X-{number}", "v") for number in range(size)])
    return lambda: ASGIRequest(scope).headers


def _dispatched(size: int) -> Callable[[], object]:
    app = flask.Flask("mounted")
    routes = wsgi_routes(DispatcherMiddleware(app, {"/a": app}))
    request = WSGIRequest(wsgi_environ("/" * size))
    return lambda: routes.find(request)


def _forwarding(unit: str, header: str) -> Callable[[int], Callable[[], object]]:
    def made(size: int) -> Callable[[], object]:
        request = ASGIRequest(http_scope(headers=[(header, unit * size)], peer=PROXY))
        proxies = TrustedProxies(TRUSTED, header)

        def find() -> None:
            with suppress(HeadersTooLargeError):
                proxies.client(request)

        return find

    return made


WORK: dict[str, Callable[[int], Callable[[], object]]] = {
    "lines of one name": _lines,
    "lines of different names": _different_lines,
    "slashes before a dispatcher": _dispatched,
    **{
        f"a path of {unit!r}": lambda size, unit=unit: lambda: interpretations(unit * size)
        for unit in ("/", "/..", ";", "\x00", "x/")
    },
    **{f"a Forwarded of {unit!r}": _forwarding(unit, "forwarded") for unit in ('"', '",', "\\", '\\"', "for=", 'a="\\', ";")},
    **{f"an X-Forwarded-For of {unit!r}": _forwarding(unit, "x-forwarded-for") for unit in (",", "10.0.0.1,", " ", "[")},
}


@pytest.mark.parametrize("name", WORK)
def test_a_longer_request_is_no_more_work_than_it_is_longer(name: str) -> None:
    """Sixteen times the bytes take about sixteen times as long, not two hundred and fifty-six times."""
    short, long = _seconds(WORK[name](4_000)), _seconds(WORK[name](64_000))
    assert long < 0.005 or long < 80 * short
