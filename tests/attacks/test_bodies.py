"""Rules that read bodies on real servers: pipelined, chunked, slow, huge and broken-off requests."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from typing import Self

import pytest

from tests.support.doors import PATIENCE, server_process, uvicorn_process


@pytest.fixture(scope="module", params=["h11", "httptools", "gunicorn"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("served")
    if request.param == "gunicorn":
        command = [sys.executable, "-m", "gunicorn", "--worker-class", "gthread", "--threads", "4", "--bind", "127.0.0.1:0"]
        command += ["tests.attacks.served_bodies:wsgi_app"]
        with server_process(command, folder / "log", lambda text: "Booting worker" in text, {}) as base:
            yield int(base.rpartition(":")[2])
        return
    with uvicorn_process("tests.attacks.served_bodies:app", folder, "--http", request.param) as base:
        yield int(base.rpartition(":")[2])


class Client:
    """A connection that says exactly what a test wants."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.input = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.input.close()
        self.socket.close()

    def post(self, body: bytes, path: str = "/users", *lines: str) -> bytes:
        """The bytes of a request."""
        head = [f"POST {path} HTTP/1.1", "Host: a", *(lines or [f"Content-Length: {len(body)}"])]
        return "\r\n".join([*head, "", ""]).encode() + body

    def reply(self) -> tuple[int, bytes]:
        """The next response."""
        status, length = int(self.input.readline().split()[1]), 0
        while line := self.input.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, self.input.read(length)

    def ask(self, body: bytes, path: str = "/users", *lines: str) -> tuple[int, bytes]:
        self.socket.sendall(self.post(body, path, *lines))
        return self.reply()


def chunked(*parts: bytes) -> bytes:
    return b"".join([b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b"")])


def test_pipelined_requests(port: int) -> None:
    """Each body belongs to its request, whether it comes before or after the decision about the one before."""
    users = [b'{"user": "p%d"}' % (number % 3) for number in range(12)]
    with Client(port) as client:
        client.socket.sendall(b"".join(map(client.post, users)))
        replies = [client.reply() for _ in users]
    assert [status for status, _ in replies] == [200] * 9 + [429] * 3
    assert [body for _, body in replies[:9]] == users[:9]


def test_chunked_bodies(port: int) -> None:
    with Client(port) as client:
        sent = chunked(b'{"user"', b': "c', b'hunked"}')
        replies = [client.ask(sent, "/users", "Transfer-Encoding: chunked") for _ in range(4)]
    assert replies[:3] == [(200, b'{"user": "chunked"}')] * 3
    assert replies[3][0] == 429


def test_a_body_in_single_bytes(port: int) -> None:
    with Client(port) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in client.post(b'{"user": "bytes"}'):
            client.socket.sendall(bytes([byte]))
        assert client.reply() == (200, b'{"user": "bytes"}')


@pytest.mark.parametrize("way", ["length", "chunked"])
def test_a_huge_body(port: int, way: str) -> None:
    """It is refused early, and the server goes on."""
    data = b" " * 10_000_000
    with Client(port) as client:
        begun = client.post(data) if way == "length" else client.post(chunked(data), "/users", "Transfer-Encoding: chunked")
        client.socket.sendall(begun[:200_000])
        assert client.reply()[0] == 413
    with Client(port) as client:
        assert client.ask(b"x" * 100_000, "/rest") == (200, b"x" * 100_000)


def test_a_deep_body(port: int) -> None:
    with Client(port) as client:
        assert client.ask(b"[" * 50_000)[0] == 413


def test_clients_that_leave_in_the_middle(port: int) -> None:
    """They are not charged."""
    for _ in range(5):
        with Client(port) as client:
            client.socket.sendall(client.post(b'{"user": "leaves"}')[:-3])
    with Client(port) as client:
        assert [client.ask(b'{"user": "leaves"}')[0] for _ in range(4)] == [200, 200, 200, 429]


def test_a_body_that_never_ends(port: int, request: pytest.FixtureRequest) -> None:
    """Others are answered meanwhile."""
    if "gunicorn" in request.node.name:
        pytest.skip("threads of WSGI wait as long as the server's own timeout lets them")
    with Client(port) as slow, Client(port) as client:
        slow.socket.sendall(slow.post(b'{"user": "slow"}')[:-3])
        began = time.monotonic()
        assert client.ask(b'{"user": "quick"}')[0] == 200
        status, body = slow.reply()
        assert (status, b"did not arrive within 1 s" in body) == (408, True)
        assert time.monotonic() - began < PATIENCE
