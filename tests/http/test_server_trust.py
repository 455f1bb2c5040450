"""Servers that believe anybody's forwarding header, judged by a request that came through them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from limitgate import LimitGate, Rule
from tests.support.doors import ASGISite, Wire, http_scope


class Apart:
    """Middleware that runs the application in a task of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.create_task(self.app(scope, receive, send))


def gated() -> Any:
    return LimitGate(ASGISite.answering(200, [], b"hello", []), rules=[Rule("all", "9999/second")])


def told(caplog: pytest.LogCaptureFixture, app: Any, *forwarded: str, peer: tuple[str, int] = ("10.0.0.1", 5)) -> int:
    """Number of times that it is told for requests with these headers."""

    async def requests() -> None:
        for value in forwarded:
            scope = http_scope("/", headers={"X-Forwarded-For": value})
            await Wire({"type": "http.request"}).call(app, {**scope, "client": peer})

    with caplog.at_level(logging.WARNING, "limitgate"):
        asyncio.run(requests())
    return sum(message.startswith("LG002") for message in caplog.messages)


@pytest.mark.parametrize("trusted", ["*", ["*"], ["0.0.0.0/0", "::/0"]])
def test_the_middleware_around_a_request_says_whom_it_trusts(caplog: pytest.LogCaptureFixture, trusted: Any) -> None:
    """One address that a client made up is enough, with a port or without, and it is told once."""
    app = ProxyHeadersMiddleware(gated(), trusted)
    assert told(caplog, app, "1.2.3.4:99", "1.2.3.5", "2001:db8::1", "1.2.3.4, 1.2.3.5") == 1


@pytest.mark.parametrize("trusted", ["10.0.0.1", ["10.0.0.0/8", "1.2.3.5"], ["0.0.0.0/1", "10.0.0.1"]])
def test_proxies_that_are_named_are_no_reason(caplog: pytest.LogCaptureFixture, trusted: Any) -> None:
    """Where it trusts some, the leftmost of several may well be the client, public proxies or not."""
    app = ProxyHeadersMiddleware(gated(), trusted)
    assert told(caplog, app, "1.2.3.4", "1.2.3.4, 1.2.3.5", "9.9.9.9, 10.0.0.3", "1.2.3.4, 198.51.100.1") == 0


def test_out_of_sight_a_public_address_that_was_passed_over_tells(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a task of its own the middleware is not to be found; then the leftmost of several is the sign."""
    app = ProxyHeadersMiddleware(Apart(gated()), "*")
    assert told(caplog, app, "1.2.3.4", "1.2.3.4, 10.0.0.3", "1.2.3.4, 1.2.3.4") == 0
    assert told(caplog, app, "1.2.3.4, 8.8.8.8", "1.2.3.4, 8.8.4.4") == 1


def test_a_server_that_has_rewritten_nothing_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """A peer with a port of its own is one that has connected, whatever it says of itself."""
    assert told(caplog, gated(), "1.2.3.4, 8.8.8.8", peer=("1.2.3.4", 50_000)) == 0


def test_a_header_that_holds_no_address(caplog: pytest.LogCaptureFixture) -> None:
    """Nonsense is nobody's address."""
    app = ProxyHeadersMiddleware(gated(), "10.0.0.1")
    assert told(caplog, app, "unknown", "", ", ,", "x" * 5000) == 0
