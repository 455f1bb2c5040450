"""Both doors on real servers, with real clients and a real Redis between the workers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import urllib3
import websockets.exceptions
import websockets.sync.client

from limitgate import RedisStore
from tests.e2e.app import flask_twin
from tests.faults.traffic import Client
from tests.support.doors import PATIENCE, threaded_wsgi, uvicorn_process
from tests.support.redis_server import RedisServer

ONE_WORKER = pytest.mark.parametrize("served", [1], ids=["1 worker"], indirect=True)
"""For tests of a single client, which need no second worker."""
SURE = {"LIMITGATE_TIMEOUT": "10", "LIMITGATE_ON_ERROR": "closed"}
"""So that a slow machine cannot be taken for a store that failed, and a failure not for a request that fits."""


@pytest.fixture(scope="module", params=[1, 2], ids=["1 worker", "2 workers"])
def served(
    request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A uvicorn with one or two workers on the tests' Redis; its URL."""
    folder = tmp_path_factory.mktemp("uvicorn")
    environment = {**SURE, "LIMITGATE_STORE": redis_server.url}
    with uvicorn_process("tests.e2e.app:app", folder, workers=request.param, **environment) as url:
        yield url


@pytest.fixture
def who() -> dict[str, str]:
    """A header that gives each test buckets of its own."""
    return {"X-Who": uuid.uuid4().hex}


@contextlib.contextmanager
def one_client_per_worker(url: str, workers: int) -> Iterator[list[httpx.Client]]:
    """Clients that each hold a connection to another worker."""
    found: dict[str, httpx.Client] = {}
    with contextlib.ExitStack() as opened:
        deadline = time.monotonic() + PATIENCE
        while len(found) < workers:
            assert time.monotonic() < deadline
            client = opened.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
            found.setdefault(client.get("/pid").text, client)
        yield list(found.values())


async def crowd(urls: list[str], headers: dict[str, str]) -> Counter[int]:
    """The statuses of as many requests as there are URLs, all at once, each on a connection of its own."""

    async def ask(url: str) -> int:
        with contextlib.closing(Client(url)) as client:
            return (await client.get(urlsplit(url).path, headers["X-Who"]))[0]

    async with asyncio.timeout(PATIENCE):
        return Counter(await asyncio.gather(*map(ask, urls)))


def test_a_crowd_is_admitted_to_the_request(served: str, who: dict[str, str]) -> None:
    """Of 200 requests at once, exactly 50 get through a limit of 50 a day, however many workers there are."""
    assert asyncio.run(crowd([f"{served}/daily"] * 200, who)) == {200: 50, 429: 150}


@pytest.mark.parametrize("served", [2], ids=["2 workers"], indirect=True)
def test_workers_limit_together(served: str, who: dict[str, str]) -> None:
    """Requests to one worker count for the other, in turn and all at once."""
    with one_client_per_worker(served, 2) as clients:
        left = [client.get("/daily", headers=who).headers["x-ratelimit-remaining"] for client in clients * 2]
        assert left == ["49", "48", "47", "46"]
        assert asyncio.run(crowd([f"{served}/daily"] * 100, who)) == {200: 46, 429: 54}
        assert [client.get("/daily", headers=who).status_code for client in clients] == [429, 429]


@ONE_WORKER
def test_a_connection_is_kept(served: str, who: dict[str, str]) -> None:
    """Refusals, those of HEAD included, keep the connection usable: every answer ends where its headers say."""
    parts = urlsplit(served)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE)
    found = []
    with contextlib.closing(connection):
        connection.connect()
        held = connection.sock
        for method, path in [("GET", "/daily")] * 51 + [
            ("HEAD", "/daily"),
            ("GET", "/daily"),
            ("GET", "/pid"),
            ("POST", "/daily"),
        ]:
            connection.request(method, path, body=b"x" * 1000 if method == "POST" else None, headers=who)
            with connection.getresponse() as reply:
                found.append((reply.status, len(reply.read()) > 0))
            if method != "POST":
                assert connection.sock is held
    assert found == [*[(200, True)] * 50, (429, True), (429, False), (429, True), (200, True), (429, True)]


@ONE_WORKER
def test_a_stream_and_a_decorator(served: str, who: dict[str, str]) -> None:
    """A streaming response carries the rate fields and arrives whole; the decorated handler is limited."""
    with httpx.Client(base_url=served, headers=who) as client:
        replies = [client.get("/stream") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].text == "one two three"
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]
    assert replies[2].json()["violated-policies"] == ["stream"]


@ONE_WORKER
def test_a_websocket_is_refused_with_429(served: str, who: dict[str, str]) -> None:
    """A real WebSocket client sees the fields on an accepted handshake, and the whole 429 of a refused one."""
    url = served.replace("http", "ws", 1) + "/chat"
    with websockets.sync.client.connect(url, additional_headers=who, proxy=None) as socket:
        assert socket.recv(timeout=PATIENCE) == "hello"
        assert socket.response is not None
        assert socket.response.headers["x-ratelimit-remaining"] == "0"
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
        websockets.sync.client.connect(url, additional_headers=who, proxy=None)
    response = refused.value.response
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/problem+json"
    assert int(response.headers["retry-after"]) == 86400
    assert b'"violated-policies": ["chat"]' in response.body


@ONE_WORKER
def test_a_client_that_obeys_gets_through(served: str, who: dict[str, str]) -> None:
    """urllib3's ``Retry`` waits for as long as Retry-After says, once, and then succeeds."""
    with urllib3.PoolManager(headers=who, retries=urllib3.Retry(total=1)) as client:
        assert client.request("GET", f"{served}/seconds").status == 200
        begin = time.monotonic()
        reply = client.request("GET", f"{served}/seconds")
        waited = time.monotonic() - begin
    assert reply.status == 200
    assert [(past.status, past.method) for past in reply.retries.history] == [(429, "GET")]
    assert waited >= 2


def test_two_servers_of_two_kinds_share_their_buckets(served: str, redis_server: RedisServer, who: dict[str, str]) -> None:
    """A threaded WSGI server and an ASGI server on one Redis admit together what the rule allows."""
    with threaded_wsgi(flask_twin(store=redis_server.url, timeout=10, on_error="closed")) as other:
        assert httpx.get(f"{served}/daily", headers=who).headers["x-ratelimit-remaining"] == "49"
        assert httpx.get(f"{other}/daily", headers=who).headers["x-ratelimit-remaining"] == "48"
        urls = [f"{served}/daily", f"{other}/daily"] * 60
        assert asyncio.run(crowd(urls, who)) == {200: 48, 429: 72}


def test_a_crowd_before_threads(redis_server: RedisServer, who: dict[str, str]) -> None:
    """A threaded WSGI server by itself admits exactly the limit."""
    with (
        contextlib.closing(RedisStore(redis_server.url)) as store,
        threaded_wsgi(flask_twin(store=store, timeout=10, on_error="closed")) as url,
    ):
        assert asyncio.run(crowd([f"{url}/daily"] * 100, who)) == {200: 50, 429: 50}


@pytest.mark.parametrize(("trusted", "statuses"), [('["unix"]', [200, 429, 200]), ("[]", [200, 429, 429])])
def test_behind_a_unix_socket(redis_server: RedisServer, tmp_path: Path, trusted: str, statuses: list[int]) -> None:
    """On a unix socket there is no peer address: with ``unix`` trusted the forwarding header tells clients apart.

    This server sends no lifespan events, which nothing here needs.
    """
    path = str(tmp_path / "it.sock")
    environment = {
        "LIMITGATE_STORE": redis_server.url,
        "LIMITGATE_TRUSTED_PROXIES": trusted,
        "LIMITGATE_KEY_PREFIX": uuid.uuid4().hex,
        **SURE,
    }
    transport = httpx.HTTPTransport(uds=path)
    with (
        uvicorn_process("tests.e2e.app:app", tmp_path, "--uds", path, "--lifespan", "off", **environment) as url,
        httpx.Client(transport=transport, base_url=url, timeout=PATIENCE) as client,
    ):
        clients = ["203.0.113.1", "203.0.113.1", "203.0.113.2"]
        assert [client.get("/client", headers={"X-Forwarded-For": each}).status_code for each in clients] == statuses


def test_every_worker_outlives_redis(own_redis: RedisServer, tmp_path: Path, who: dict[str, str]) -> None:
    """While Redis is gone each worker serves under ``on_error``; once it is back, each soon limits by it."""
    environment: dict[str, Any] = {"LIMITGATE_STORE": own_redis.url, "LIMITGATE_TIMEOUT": "5"}
    with (
        uvicorn_process("tests.e2e.app:app", tmp_path, workers=2, **environment) as url,
        one_client_per_worker(url, 2) as clients,
    ):
        assert all("x-ratelimit-limit" in client.get("/daily", headers=who).headers for client in clients)
        own_redis.kill()
        replies = [client.get("/daily", headers=who) for client in clients * 10]
        assert {(reply.status_code, "x-ratelimit-limit" in reply.headers) for reply in replies} == {(200, False)}
        own_redis.start()
        deadline = time.monotonic() + PATIENCE
        for client in clients:
            while "x-ratelimit-limit" not in client.get("/daily", headers=who).headers:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        left = [int(client.get("/daily", headers=who).headers["x-ratelimit-remaining"]) for client in clients * 2]
        assert left == [left[0], left[0] - 1, left[0] - 2, left[0] - 3]
