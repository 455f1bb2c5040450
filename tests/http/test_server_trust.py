"""Servers that believe anybody's forwarding header, judged by a request that came through them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from limitgate import LimitGate, Rule
from tests.support.doors import ASGISite, Wire, http_scope


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
def test_server_that_skips_a_public_address_is_reported(caplog: pytest.LogCaptureFixture, trusted: Any) -> None:
    """It is reported once. A single address, or the same one twice, says nothing of the server."""
    app = ProxyHeadersMiddleware(gated(), trusted)
    assert told(caplog, app, "1.2.3.4", "1.2.3.4, 1.2.3.4", "1.2.3.4", "1.2.3.4, 10.0.0.3") == 0
    assert told(caplog, app, *["1.2.3.4, 8.8.8.8"] * 9) == 1


def test_a_server_whose_proxies_are_known_is_not_judged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public proxies that it was told of may be passed over."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.1,8.8.8.8")
    app = ProxyHeadersMiddleware(gated(), ["10.0.0.1", "8.8.8.8"])
    assert told(caplog, app, *["1.2.3.4, 8.8.8.8"] * 9) == 0


@pytest.mark.parametrize("trusted", ["10.0.0.1", ["10.0.0.0/8"]])
def test_server_with_private_proxies_is_not_reported(caplog: pytest.LogCaptureFixture, trusted: Any) -> None:
    """The address behind them is the client's."""
    app = ProxyHeadersMiddleware(gated(), trusted)
    assert told(caplog, app, "1.2.3.4", "1.2.3.4, 1.2.3.5", "9.9.9.9, 10.0.0.3", "1.2.3.4, 198.51.100.1") == 0


def test_a_server_that_has_rewritten_nothing_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """A peer with a port of its own is one that has connected, whatever it says of itself."""
    assert told(caplog, gated(), "1.2.3.4, 8.8.8.8", peer=("1.2.3.4", 50_000)) == 0


def test_server_with_a_header_without_addresses_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Nonsense is nobody's address."""
    app = ProxyHeadersMiddleware(gated(), "10.0.0.1")
    assert told(caplog, app, "unknown", "", ", ,", "x" * 5000) == 0
