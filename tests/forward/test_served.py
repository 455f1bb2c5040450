"""The time between SIGTERM and the end of ``limitgate serve``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limitgate.forward import served
from limitgate.forward.served import Draining, application
from tests.support.doors import PATIENCE, Wire, http_scope

Ended = list[int]


@pytest.fixture
def ended() -> Iterator[Ended]:
    """Signals that the server's own handler got."""
    seen: Ended = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, before)


async def _application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]})
        await send({"type": "http.response.body", "body": b""})


async def headers_of(app: Draining) -> list[tuple[bytes, bytes]]:
    """Of an answer."""
    wire = Wire()
    await app(http_scope("/"), wire.receive, wire.send)
    return list(wire.sent[0]["headers"])


@pytest.mark.usefixtures("ended")
def test_answers_close_their_connections_before_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "DRAIN_S", 0.001)

    async def serve() -> None:
        app, wire, is_over = Draining(_application), Wire(), asyncio.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        await app({"type": "lifespan"}, wire.receive, wire.send)
        assert await headers_of(app) == [(b"x-a", b"1")]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await headers_of(app) == [(b"x-a", b"1"), (b"connection", b"close")]
        assert not is_over.is_set()
        await asyncio.wait_for(is_over.wait(), PATIENCE)

    asyncio.run(serve())


def test_a_second_signal_ends_at_once(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "DRAIN_S", PATIENCE)

    async def serve() -> None:
        app, wire = Draining(_application), Wire()
        await app({"type": "lifespan"}, wire.receive, wire.send)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve())
    assert ended == [signal.SIGTERM]


def test_serve_ends_that_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{name: all, qpd: 2}]\n")
    monkeypatch.setenv("LIMITGATE_RULES", str(tmp_path))
    monkeypatch.setenv("LIMITGATE_STORE", "memory://")
    assert isinstance(application(), Draining)


def test_a_server_without_a_handler_ends_as_it_would() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        wire = Wire()
        asyncio.run(Draining(_application)({"type": "lifespan"}, wire.receive, wire.send))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
