"""A steady stream of requests that does not wait for answers: an open loop, on connections that are kept.

It runs in a thread with an event loop of its own, so that the test can break things meanwhile. Each of the streams has a key
of its own and asks for more than its limit; in `FLOOD`, half of these, every request has a new one. In `BOTH`, which is
for clusters alone, a request goes by two buckets. In `FREE` none is limited: it tells how fast the machine is at the moment.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit
from uuid import uuid4

PER_SECOND = 100
"""Requests each second, all streams together."""
HANG = 3.0
"""Seconds after which a request counts as hanging."""
FLOOD = "flood"
LIMITED = ("open", "closed", "local", "default")
"""Streams that keep to a key, named after what their rule says about a store that fails."""
BOTH = "both"
FREE = "free"


class Sample(NamedTuple):
    """One request and what became of it. Times are monotonic, in seconds."""

    stream: str
    sent: float
    heard: float
    status: int
    """0 where no HTTP response came."""
    degraded: bool
    """Whether the store had failed, and ``on_error`` decided."""
    trouble: str
    """What kept the response from coming, or what it said if it is none of those that we know."""
    hit: bool = True
    """Whether it needs what the fault concerns."""

    @property
    def seconds(self) -> float:
        return self.heard - self.sent


class Traffic:
    """``with Traffic(url) as traffic``; what became of the requests so far is in ``samples``, in the order of answers.

    Those that are not limited are in ``free``.
    ``keys`` are those of the streams; ``is_hit`` says of a path and a key whether a request needs what the fault concerns.
    """

    def __init__(
        self, url: str, keys: Mapping[str, str] | None = None, is_hit: Callable[[str, str], bool] = lambda *_: True
    ) -> None:
        self.samples: list[Sample] = []
        self.free: list[Sample] = []
        self._url = url
        self._keys = keys or dict.fromkeys(LIMITED, uuid4().hex)
        self._is_hit = is_hit
        self._idle: list[Client] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._drive()), name="traffic")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(2 * HANG)

    async def _drive(self) -> None:
        """Send requests at their times, and hear the last ones out."""
        begun, streams = time.monotonic(), [*(stream for limited in self._keys for stream in (limited, FLOOD)), FREE]
        async with asyncio.TaskGroup() as requests:
            for number in count():
                if self._stopping.is_set():
                    break
                await asyncio.sleep(max(0.0, begun + number / PER_SECOND - time.monotonic()))
                requests.create_task(self._ask(streams[number % len(streams)]))
        for client in self._idle:
            client.close()

    async def _ask(self, stream: str) -> None:
        """One request, on an idle connection or a new one."""
        client = self._idle.pop() if self._idle else Client(self._url)
        path, who = ("/default", uuid4().hex) if stream == FLOOD else (f"/{stream}", self._keys.get(stream, ""))
        hit = self._is_hit(path, who)
        sent, status, body, trouble = time.monotonic(), 0, b"", ""
        try:
            async with asyncio.timeout(HANG):
                await client.connect()
                sent = time.monotonic()
                status, body = await client.get(path, who)
            degraded = is_degraded(status, body)
            self._idle.append(client)
        except (OSError, EOFError, ValueError, LookupError) as error:
            client.close()
            degraded, trouble = False, f"{error!r} {body[:200]!r}"
        told = self.free if stream == FREE else self.samples
        told.append(Sample(stream, sent, time.monotonic(), status, degraded, trouble, hit))


def is_degraded(status: int, body: bytes) -> bool:
    """Whether an answer says that the store had failed."""
    return status == 503 or bool(json.loads(body).get("degraded"))


class Client:
    """Asks one after the other, on a connection that is kept as long as the server likes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Connect, if that has not been done yet."""
        if self._connection is None:
            self._connection = await asyncio.open_connection(*self._address)

    async def get(self, path: str, who: str) -> tuple[int, bytes]:
        """Status and body of the response to a GET."""
        await self.connect()
        reader, writer = self._connection
        writer.write(f"GET {path} HTTP/1.1\r\nHost: testserver\r\nX-Who: {who}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        start, *lines = head.split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(fields["content-length"]))
        if fields.get("connection") == "close":
            self.close()
        return int(start.split(" ")[1]), body

    def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection[1].close()
