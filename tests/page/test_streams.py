"""Events that the server sends: they come, they end by themselves, and they hold nobody up."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from limitgate import MemoryStore, RedisStore
from limitgate.page import Page, asgi
from tests.support import forks
from tests.support.doors import PLAIN, PROCESS_PATIENCE, Wire, http_scope, until, uvicorn_process
from tests.support.fleet import fleet, snapshot, write
from tests.support.guard import Guard
from tests.support.redis_server import RedisServer

VIEWERS = 50


def a_page(store: Any = None) -> Page:
    return Page(MemoryStore() if store is None else store, guard=lambda _: "ann")


async def quiet(running: set[asyncio.Task[Any]]) -> None:
    """Wait until no task is left besides those that were running."""
    async with asyncio.timeout(10):
        while left := asyncio.all_tasks() - running:
            await asyncio.wait(left)


def test_a_stream_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with how soon to come back, has the figures at once, and is whole when the time is up."""
    monkeypatch.setattr(asgi, "STREAM_S", 1.0)
    monkeypatch.setattr(asgi, "PERIOD_S", 0.05)
    monkeypatch.setattr(asgi, "LOOK_S", 0.02)
    store = MemoryStore()
    write(store, snapshot())
    reply = asyncio.run(Wire({"type": "http.request", "body": b""}).call(a_page(store), http_scope("/events"))).reply()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    first, *events, last = reply.body.decode().split("\n\n")
    assert (first, last) == ("retry: 1000", "")
    assert len(events) >= 2
    assert [json.loads(event.removeprefix("data: "))["processes"][0]["host"] for event in events] == ["web-1"] * len(events)


def test_nothing_runs_once_the_viewers_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer that goes away ends its stream, and the last one ends the reading."""
    monkeypatch.setattr(asgi, "LOOK_S", 0.01)

    async def come_and_go() -> None:
        running, page = asyncio.all_tasks(), a_page()
        wires = [Wire({"type": "http.request", "body": b""}) for _ in range(5)]
        streams = [asyncio.ensure_future(wire.call(page, http_scope("/events"))) for wire in wires]
        for wire in wires:
            await wire.until_sent(3)
        # 5 streams, 5 listeners for the end, 1 watcher
        assert len(asyncio.all_tasks() - running) == 11
        for stream in streams:
            stream.cancel()
        await quiet(running)
        gc.collect()

    asyncio.run(come_and_go())


def test_one_reader_serves_all_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty streams read the store as often as one, and get the same bytes."""
    monkeypatch.setattr(asgi, "LOOK_S", 0.01)
    monkeypatch.setattr(asgi, "PERIOD_S", 0.05)
    readings = 0

    class Counted(MemoryStore):
        async def afleet(self, request: Any, timeout: float = 0) -> Any:
            nonlocal readings
            readings += 1
            return await super().afleet(request, timeout)

    async def watch() -> None:
        page = a_page(Counted())
        wires = [Wire({"type": "http.request", "body": b""}) for _ in range(VIEWERS)]
        streams = [asyncio.ensure_future(wire.call(page, http_scope("/events"))) for wire in wires]
        for wire in wires:
            await wire.until_sent(5)
        assert len({wire.sent[2]["body"] for wire in wires}) <= 2
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)

    asyncio.run(watch())
    assert 1 <= readings <= 5


def test_a_store_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops while a reading waits for the store: the stream ends without it."""
    monkeypatch.setattr(asgi, "LOOK_S", 0.01)
    stopping_now = False
    monkeypatch.setattr(asgi, "is_stopping", lambda: stopping_now)

    class Hanging(MemoryStore):
        async def afleet(self, request: Any, timeout: float = 0) -> Any:
            await asyncio.Event().wait()

    async def watch() -> Wire:
        nonlocal stopping_now
        wire = Wire({"type": "http.request", "body": b""})
        stream = asyncio.ensure_future(wire.call(a_page(Hanging()), http_scope("/events")))
        await wire.until_sent(2)
        stopping_now = True
        async with asyncio.timeout(10):
            return await stream

    assert asyncio.run(watch()).reply().body == b"retry: 1000\n\n"


def test_viewers_beyond_the_bound_ask_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream too many is answered, so that the browser polls instead."""
    monkeypatch.setattr(asgi, "MOST_STREAMS", 0)
    reply = asyncio.run(Wire({"type": "http.request", "body": b""}).call(a_page(), http_scope("/events"))).reply()
    assert reply.status == 503


def test_a_large_fleet_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reading costs decides how often it is done, up to every 10 seconds."""
    monkeypatch.setattr(asgi, "LOOK_S", 0.01)
    monkeypatch.setattr(asgi, "SHARE", 1e-9)
    monkeypatch.setattr(asgi, "SLOWEST_S", 0.4)
    monkeypatch.setattr(asgi, "PERIOD_S", 0.01)
    monkeypatch.setattr(asgi, "STREAM_S", 0.3)
    store = MemoryStore()
    write(store, *fleet(50))
    reply = asyncio.run(Wire({"type": "http.request", "body": b""}).call(a_page(store), http_scope("/events"))).reply()
    assert reply.body.count(b"data: ") == 1


def test_it_knows_that_the_server_is_to_end() -> None:
    """By the server that the handler of the signal belongs to; other handlers say nothing."""

    class Server:
        should_exit = False

        def handle_exit(self, *_: object) -> None:
            """Be a handler."""

    server, before = Server(), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, server.handle_exit)
        assert not asgi.is_stopping()
        server.should_exit = True
        assert asgi.is_stopping()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not asgi.is_stopping()


def test_it_knows_that_a_worker_on_asyncio_is_to_end() -> None:
    """Gunicorn's own ASGI worker handles signals on its event loop."""

    class Worker:
        alive = True

        def handle_exit_signal(self) -> None:
            """Be a handler."""

    async def look() -> list[bool]:
        worker, loop = Worker(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, worker.handle_exit_signal)
        found = [asgi.is_stopping()]
        worker.alive = False
        found.append(asgi.is_stopping())
        loop.remove_signal_handler(signal.SIGTERM)
        return found

    assert asyncio.run(look()) == [False, True]


def _is_open(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), PROCESS_PATIENCE):
        return True
    return False


def _listen(port: int) -> socket.socket:
    # A reloader says that the application has started before it listens.
    until(lambda: _is_open(port), PROCESS_PATIENCE)
    viewer = socket.create_connection(("127.0.0.1", port), PROCESS_PATIENCE)
    viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    received = b""
    while b"data: " not in received:
        received += viewer.recv(65536)
    return viewer


def _port_in(log: Path) -> re.Match[str] | None:
    return re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())


@pytest.mark.parametrize(
    "extra", [(), ("--workers", "2"), ("--reload", "--reload-dir", "tests/page")], ids=["alone", "workers", "reload"]
)
def test_viewers_do_not_hold_up_a_server_that_is_to_end(extra: tuple[str, ...], own_redis: RedisServer, tmp_path: Path) -> None:
    """SIGTERM ends uvicorn, also as a supervisor, long before its fifty streams would have ended by themselves."""
    with closing(RedisStore(own_redis.url)) as store:
        write(store, snapshot())
    log = tmp_path / "log"
    command = [sys.executable, "-m", "uvicorn", "tests.page.app:app", "--host", "127.0.0.1", "--port", "0", *PLAIN, *extra]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("LIMITGATE_")}
    with ExitStack() as viewers:
        process = forks.start(command, log, {**outside, "LIMITGATE_STORE": own_redis.url})
        guard = Guard("limitgate-page-", process.pid)
        try:
            until(lambda: log.read_text().count("Application startup complete") == (2 if "2" in extra else 1), PROCESS_PATIENCE)
            # The line with the port may follow later.
            until(lambda: _port_in(log) is not None, PROCESS_PATIENCE)
            found = _port_in(log)
            assert found is not None
            for _ in range(VIEWERS):
                viewers.enter_context(_listen(int(found[1])))
            process.terminate()
            process.wait(asgi.STREAM_S / 2)
        finally:
            process.kill()
            process.wait(PROCESS_PATIENCE)
            guard.dismiss()
    assert "Traceback" not in log.read_text(), log.read_text()


def test_a_reading_that_fails_is_an_event_too(own_redis: RedisServer, tmp_path: Path) -> None:
    """Redis goes away while a viewer looks: the next event says so, and the stream goes on."""
    with closing(RedisStore(own_redis.url)) as store:
        write(store, snapshot())
    with (
        uvicorn_process("tests.page.app:app", tmp_path, LIMITGATE_STORE=own_redis.url, PERIOD_S="0.3") as url,
        _listen(int(url.rpartition(":")[2])) as viewer,
    ):
        own_redis.stop()
        received = b""
        while b'"up":false' not in received:
            more = viewer.recv(65536)
            assert more
            received += more
    assert b'"host":"web-1"' in received
