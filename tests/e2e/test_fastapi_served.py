"""FastAPI's dependencies on a real uvicorn with a real Redis."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest
import websockets.exceptions
import websockets.sync.client

from tests.e2e.fastapi_app import twice
from tests.support.doors import PATIENCE, uvicorn_process
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def url(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A uvicorn on the tests' Redis."""
    environment = {"LIMITGATE_STORE": redis_server.url, "LIMITGATE_TIMEOUT": "10", "LIMITGATE_ON_ERROR": "closed"}
    with uvicorn_process("tests.e2e.fastapi_app:app", tmp_path_factory.mktemp("uvicorn"), **environment) as url:
        yield url


@pytest.fixture
def ann(url: str) -> Iterator[httpx.Client]:
    """A client with a user of its own."""
    with httpx.Client(base_url=url, headers={"X-User": uuid.uuid4().hex}, timeout=PATIENCE) as client:
        yield client


def test_requests_of_a_user(ann: httpx.Client) -> None:
    """A user has two requests; the third is refused by the gate, under a name that is the same in every process."""
    replies = [ann.get("/api/v1/hello") for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 429, 429]
    assert replies[-1].json()["violated-policies"] == [twice.rule.name]
    assert replies[-1].headers["retry-after"] == "43200"
    assert ann.get("/nowhere").headers["x-ratelimit-remaining"] == "47"
    assert ann.get("/api/v1/hello", headers={"X-User": uuid.uuid4().hex}).status_code == 200


def test_websockets_of_a_user(url: str, ann: httpx.Client) -> None:
    """A handshake is admitted with rate fields, and refused with the whole answer, by the limit that requests share."""
    user = {"X-User": ann.headers["X-User"]}
    address = f"ws{url.removeprefix('http')}/api/v1/chat"
    for left in ("1", "0"):
        with websockets.sync.client.connect(address, additional_headers=user) as socket:
            assert socket.recv(PATIENCE) == "hello"
            assert socket.response is not None
            assert socket.response.headers["x-ratelimit-remaining"] == left
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
        websockets.sync.client.connect(address, additional_headers=user)
    assert refused.value.response.status_code == 429
    assert refused.value.response.headers["retry-after"] == "43200"
    assert twice.rule.name.encode() in (refused.value.response.body or b"")
    assert ann.get("/api/v1/hello").status_code == 429


def test_events_arrive_one_by_one(ann: httpx.Client, url: str) -> None:
    """An event is on its way before the next one is made, with rate fields ahead of all."""
    with ann.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-ratelimit-remaining"] == "0"
        lines = response.iter_lines()
        assert next(lines) == 'data: "one"'
        httpx.get(f"{url}/go-on", timeout=PATIENCE)
        assert 'data: "two"' in list(lines)
    assert ann.get("/events").status_code == 429


def test_the_document_is_served(ann: httpx.Client) -> None:
    """``/openapi.json`` tells of the 429 of every route, as a rule is for all."""
    paths = ann.get("/openapi.json").json()["paths"]
    assert {path: list(operation["get"]["responses"]) for path, operation in paths.items()} == {
        "/api/v1/hello": ["200", "422", "429"],
        "/events": ["200", "422", "429"],
        "/go-on": ["200", "429"],
    }
