"""Another service, on a port of its own: answers what it is told to, and remembers who asked, when, and over how many lines."""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any, NamedTuple

from tests.support.doors import PATIENCE


class Told(NamedTuple):
    """An answer. A body of several pieces is sent as it comes, and what frames it has to be among the fields.

    It ends with the connection where it is to `close`, or `reset` it.
    """

    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes | Iterable[bytes] = b"hello"
    end: str = "keep"


class Asked(NamedTuple):
    """A request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    at: float
    """When it had arrived, in seconds of the monotonic clock."""
    line: int
    """The number of its connection, from 0."""


Script = Callable[[Asked], Told]


class Service:
    """`answers` are given in turn, then 200 ``hello``; or a script says what to answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[Told] = []
        self.script: Script = lambda _: self.answers.pop(0) if self.answers else Told()
        self.asked: list[Asked] = []
        self.lines = 0
        """How many connections were made."""

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def gaps(self) -> list[float]:
        """The seconds between one request and the next."""
        times = sorted(each.at for each in self.asked)
        return [then - before for before, then in pairwise(times)]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else gets for as long as this lasts. Connections are refused while nobody serves on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[Service]:
    """A `Service` for as long as this lasts, on a free port or on one that is held for it."""
    server = _Server(("127.0.0.1", port), _Handler)
    server.service = Service(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.service
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    allow_reuse_port = True
    service: Service

    def handle_error(self, *_: Any) -> None:
        """Say nothing: those that go away are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.line = self.server.service.lines
        self.server.service.lines += 1

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self) -> None:
        service = self.server.service
        asked = Asked(self.command, self.path, self.headers, self._body(), time.monotonic(), self.line)
        service.asked.append(asked)
        told = service.script(asked)
        self.send_response_only(told.status)
        for name, value in told.headers.items():
            self.send_header(name, value)
        pieces = told.body
        if isinstance(pieces, bytes):
            if "Content-Length" not in told.headers:
                self.send_header("Content-Length", str(len(pieces)))
            pieces = [b"" if self.command == "HEAD" else pieces]
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)
        if told.end != "keep":
            self.close_connection = True
        if told.end == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


def trickling(piece: bytes = b"x", pause: float = 0.05, seconds: float = 10.0) -> Iterator[bytes]:
    """A body that comes in small pieces for a long time, or until nobody wants it any more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield piece
        time.sleep(pause)


SOON = Told(429, {"Retry-After": "0.2"}, b'{"error": "slow down"}')
LATER = Told(429, {"Retry-After": "3600"}, b'{"error": "slow down"}')


def refusal(body: bytes | Iterable[bytes], end: str = "keep", **fields: str) -> Told:
    """A 429 that wants an hour, with fields whose names are written with underscores."""
    return Told(429, {"Retry-After": "3600"} | {name.replace("_", "-"): value for name, value in fields.items()}, body, end)


ZIPPED = gzip.compress(b"x" * 1000)
LARGER = gzip.compress(random.Random(0).randbytes(65_530))
"""What has a byte too many on the wire, and not once it is decoded."""
IN_CHUNKS = {"Transfer_Encoding": "chunked", "Content_Encoding": "gzip"}
HOSTILE = {
    "huge": lambda: refusal(b"x" * 10_000_000),
    "endless": lambda: refusal(trickling(b"x" * 10_000, 0), "close"),
    "one byte more": lambda: refusal(b"x" * 65_537),
    "two bytes more": lambda: refusal(b"x" * 65_538),
    "trickling": lambda: refusal(trickling(), Content_Length="1000"),
    "trickling chunks": lambda: refusal(trickling(b"1\r\nx\r\n"), Transfer_Encoding="chunked"),
    "trickling length of a chunk": lambda: refusal(trickling(b"0"), Transfer_Encoding="chunked"),
    "trickling to the end": lambda: refusal(trickling(), "close", Connection="close"),
    "silent": lambda: refusal(trickling(b""), Content_Length="1000"),
    "reset": lambda: refusal([b"abc"], "reset", Content_Length="1000"),
    "closed": lambda: refusal([b"abc"], "close", Content_Length="1000"),
    "reset in a chunk": lambda: refusal([b"5\r\nab"], "reset", Transfer_Encoding="chunked"),
    "no chunks": lambda: refusal([b"nonsense"], "close", Transfer_Encoding="chunked"),
    "broken gzip": lambda: refusal(b"nonsense", Content_Encoding="gzip"),
    "gzip broken within": lambda: refusal(ZIPPED[:12] + b"\xff\xff\xff" + ZIPPED[15:], Content_Encoding="gzip"),
    "a bomb": lambda: refusal(gzip.compress(b"x" * 10_000_000), Content_Encoding="gzip"),
    "larger when zipped": lambda: refusal([b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGER), LARGER)], **IN_CHUNKS),
    "zipped many times": lambda: refusal(zlib.compress(b"x"), Content_Encoding=", ".join(["gzip"] * 50)),
}
