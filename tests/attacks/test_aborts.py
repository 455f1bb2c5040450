"""Clients that go away, send half of what they announced, or send much at once: each request is charged once, nothing stays."""

from __future__ import annotations

import asyncio
import http.client
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from limitgate import LimitGate, LimitGateWSGI, Rule
from tests.attacks.served import RULES, hello, hello_wsgi
from tests.support.doors import MOMENT, PATIENCE, Wire, http_scope, threaded_wsgi, uvicorn_process
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a uvicorn that answers ``hello``."""
    folder = tmp_path_factory.mktemp("uvicorn")
    with uvicorn_process("tests.attacks.served:app", folder, "--no-proxy-headers", "--lifespan", "off") as url:
        yield url


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE)


def tasks(url: str) -> int:
    """How many tasks the server's event loop has, the one that counts them included."""
    return int(httpx.get(f"{url}/tasks", timeout=PATIENCE).text)


def all_gone(url: str, before: int) -> None:
    """Wait until there are no more tasks than before."""
    deadline = time.monotonic() + PATIENCE
    while tasks(url) > before:
        assert time.monotonic() < deadline
        time.sleep(MOMENT)


def statuses(url: str, path: str, count: int) -> list[int]:
    return [httpx.get(f"{url}{path}", timeout=PATIENCE).status_code for _ in range(count)]


def test_half_a_body_is_a_whole_request(served: str) -> None:
    """Whoever goes away in the middle of a body has been charged once, and leaves no task behind."""
    before = tasks(served)
    for _ in range(2):
        with connected(served) as connection:
            connection.sendall(b"POST /bodies HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1000\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100")  # so it is read, and has been charged
            connection.sendall(b"x" * 10)
    assert statuses(served, "/bodies", 3) == [200, 429, 429]
    all_gone(served, before)


def test_half_a_request_is_none(served: str) -> None:
    """Header lines that never end, and bytes that drip, cost their sender nothing and leave nothing."""
    before = tasks(served)
    parts = [
        b"",
        b"G",
        b"GET /rest",
        b"GET /rest HTTP/1.1\r\nHost: a\r\n",
        b"GET /rest HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 9000,
    ]
    for part in parts * 4:
        with connected(served) as connection:
            connection.sendall(part)
    with connected(served) as connection:
        for byte in b"GET /rest HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n":
            connection.sendall(bytes([byte]))
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, response.headers["x-ratelimit-remaining"]) == (200, "99")
    all_gone(served, before)


def test_pipelined_requests_are_as_many_as_they_are(served: str) -> None:
    """Ten requests in one packet on one connection are ten requests; three of them are admitted."""
    before = tasks(served)
    with connected(served) as connection:
        connection.sendall(
            b"GET /pings HTTP/1.1\r\nHost: a\r\n\r\n" * 9 + b"GET /pings HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        )
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200") == 3
    assert received.count(b"HTTP/1.1 429") == 7
    all_gone(served, before)


def test_half_a_body_on_a_threaded_server() -> None:
    """The same on a WSGI server: the request is charged before its body is read."""
    running: list[str] = []

    def noting(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        running.append(environ["PATH_INFO"])
        return hello_wsgi(environ, start_response)

    with threaded_wsgi(LimitGateWSGI(noting, rules=RULES)) as url:
        for count in (1, 2):
            with connected(url) as connection:
                connection.sendall(b"POST /bodies HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nxxxxx")
                deadline = time.monotonic() + PATIENCE
                while len(running) < count:
                    assert time.monotonic() < deadline
                    time.sleep(MOMENT)
        assert statuses(url, "/bodies", 3) == [200, 429, 429]


def test_clients_that_leave_while_redis_decides(own_redis: RedisServer) -> None:
    """Requests that are cancelled before their decision take one each at most, the others are admitted, no task is left."""
    gated = LimitGate(hello, rules=[Rule("all", "100/day")], store=own_redis.url, timeout=PATIENCE, on_error="closed")

    def asked() -> tuple[Wire, asyncio.Task[Wire]]:
        wire = Wire({"type": "http.request", "body": b""})
        return wire, asyncio.create_task(wire.call(gated, http_scope("/")))

    async def crowd() -> int:
        await asked()[1]
        with own_redis.frozen():
            waiting = [asked() for _ in range(40)]
            await asyncio.sleep(MOMENT)  # until they have been sent
            leaving = [task for _, task in waiting[::2]]
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        staying = await asyncio.gather(*[task for _, task in waiting[1::2]])
        assert {wire.reply().status for wire in staying} == {200}
        assert not any(wire.sent for wire, _ in waiting[::2])
        last, task = asked()
        await task
        await gated.gate.store.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return int(last.reply().headers["x-ratelimit-remaining"])

    assert 100 - 1 - 40 - 1 <= asyncio.run(crowd()) <= 100 - 1 - 20 - 1


def test_clients_that_leave_while_somebody_is_identified() -> None:
    """A request that is cancelled before it is known who asks has taken nothing."""

    async def identify(_: Any) -> None:
        await asyncio.sleep(0 if done.is_set() else PATIENCE)

    async def crowd() -> list[int]:
        for _ in range(10):
            wire = Wire({"type": "http.request", "body": b""})
            task = asyncio.create_task(wire.call(gated, http_scope("/")))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        done.set()
        wires = [await Wire({"type": "http.request", "body": b""}).call(gated, http_scope("/")) for _ in range(3)]
        return [wire.reply().status for wire in wires]

    done = asyncio.Event()
    gated = LimitGate(hello, rules=[Rule("all", "2/day")], identify=identify)
    assert asyncio.run(crowd()) == [200, 200, 429]
