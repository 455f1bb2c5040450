"""A server that says exactly what a test wants, byte for byte, and counts its connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.doors import PATIENCE


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float


Script = bytes | Callable[["Connection"], object]
"""What is sent in answer, or what does so; None or False of it closes the connection, as does ``Connection: close``."""


def reply(status: int = 200, body: bytes = b"fine", *, length: int | None = None, **headers: str | bytes) -> bytes:
    """A response with its body, or with part of it."""
    lines = [b"HTTP/1.1 %d As Told" % status, b"Content-Length: %d" % (len(body) if length is None else length)]
    for name, value in headers.items():
        lines.append(name.replace("_", "-").encode() + b": " + (value.encode() if isinstance(value, str) else value))
    return b"\r\n".join([*lines, b"", body])


def refusal(wait: str | None = "0.05", body: bytes = b'{"why": "slow down"}', **more: Any) -> bytes:
    """A 429."""
    return reply(429, body, **({} if wait is None else {"Retry_After": wait}), **more)


class Connection:
    """One connection of somebody."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.input = sock.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def head(self) -> tuple[str, str, dict[str, str]] | None:
        """The head of the next request, None if there is none."""
        start = self.input.readline().split()
        if len(start) != 3:
            return None
        headers = {}
        while (line := self.input.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return start[0].decode(), start[1].decode(), headers

    def chunk(self) -> bytes:
        """The next part of a body that comes in parts."""
        data = self.input.read(int(self.input.readline(), 16))
        self.input.readline()
        return data

    def body(self, headers: dict[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", ""):
            return self.input.read(int(headers.get("content-length", 0)))
        return b"".join(iter(self.chunk, b""))

    def reset(self) -> None:
        """Break off, so that the other side hears of it."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def is_left(self) -> bool:
        """Whether the other side leaves before it says anything else."""
        with contextlib.suppress(OSError):
            return self.input.read(1) == b""
        return True


class RawServer:
    """Answers by its script, and with 200 after that. ``early`` are paths whose body is left to the script."""

    def __init__(self, *script: Script) -> None:
        self.script = list(script)
        self.asked: list[Asked] = []
        self.connections = 0
        self.early: set[str] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def paths(self) -> list[str]:
        return [each.path for each in self.asked]

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.asked]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(PATIENCE)  # first, since it may be about to keep a socket
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                self.connections += 1
                self._open.add(sock)
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        with contextlib.suppress(OSError, ValueError), sock, connection.input:
            while (head := connection.head()) is not None:
                method, path, headers = head
                body = b"" if path in self.early else connection.body(headers)
                self.asked.append(Asked(method, path, headers, body, time.monotonic()))
                say = self.script.pop(0) if self.script else reply(body=b"" if method == "HEAD" else b"fine")
                if callable(say):
                    if not say(connection):
                        break
                else:
                    connection.send(say)
        self._open.discard(sock)


@contextlib.contextmanager
def raw_server(*script: Script) -> Iterator[RawServer]:
    """A server for as long as a block runs."""
    server = RawServer(*script)
    try:
        yield server
    finally:
        server.close()
