"""An open-loop client: each request is sent when it is due, whether or not those before it were answered.

A client that waits for its answers sends less to a server that is late, and so hides its collapse. Latency counts from when a
request was due, not from when it could be sent.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple, cast

CONNECTIONS = 1000
"""Connections to all servers together that are there before the first request, as a proxy keeps them; more are made where none
is idle. uvloop accepts one in each iteration, so that under load new ones wait in the listen backlog, seen by nobody."""
HOST = "127.0.0.1"
SWEEP_S = 0.005
"""Seconds between two looks at who has waited for too long."""
_RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: a connection that is closed leaves nothing, so that ports do not run out."""


class Arrival(NamedTuple):
    """A request to send."""

    due_s: float
    """Seconds after the beginning."""
    kind: str = "normal"
    """Its path; `benchmarks.overload.app` takes it for the priority."""
    server: int = 0


class Answer(NamedTuple):
    """What became of a request."""

    arrival: Arrival
    took_s: float
    """Seconds from when it was due until the answer was complete; infinite if the client gave up."""
    status: int
    """0 without an answer."""
    limit: int
    """The limit in force, as the handler saw it; 0 if it did not say."""


class Answers(NamedTuple):
    """What became of all requests, in order of their arrival."""

    answers: list[Answer]
    lag_s: float
    """99th percentile of how much later than due requests were sent."""
    watched: list[Any]
    """What was watched at the times that were asked for."""


def poisson(random: Random, rate: float, begin_s: float, end_s: float, servers: int = 1) -> list[Arrival]:
    """Poisson arrivals, of which exactly as many come as are expected, so that runs at a rate are of the same load."""
    times = sorted(random.uniform(begin_s, end_s) for _ in range(round(rate * (end_s - begin_s))))
    return [Arrival(due_s, server=random.randrange(servers)) for due_s in times]


async def offer(
    ports: Sequence[int],
    arrivals: Sequence[Arrival],
    patience_s: float,
    *,
    keep_alive: bool = True,
    watch: Callable[[], Any],
    watch_at: Sequence[float],
) -> Answers:
    """Send every request to its server's port at its time, and give up after ``patience_s``.

    ``watch`` is called at the seconds ``watch_at``.
    """
    crowd = _Crowd(ports, patience_s, keep_alive=keep_alive)
    await crowd.connect(CONNECTIONS if keep_alive else 0)
    watched = []
    marks = deque(watch_at)
    lags = []
    for arrival in arrivals:
        await _until(crowd.began + arrival.due_s)
        while marks and marks[0] <= arrival.due_s:
            marks.popleft()
            watched.append(watch())
        lags.append(time.monotonic() - crowd.began - arrival.due_s)
        crowd.send(arrival)
    for mark in marks:
        await _until(crowd.began + mark)
        watched.append(watch())
    await crowd.finish()
    return Answers(crowd.answers(), sorted(lags)[int(0.99 * len(lags))], watched)


async def _until(when: float) -> None:
    """Sleep until a time of the monotonic clock. Timers of uvloop are whole milliseconds."""
    while (pause_s := when - time.monotonic()) > 0:  # noqa: ASYNC110 - it is a time that is waited for
        await asyncio.sleep(pause_s)


class _Request:
    """A request that was sent, or is to be sent as soon as there is a connection."""

    __slots__ = ("arrival", "connection", "limit", "status", "took_s")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.connection: _Connection | None = None
        self.took_s = math.inf
        self.status = self.limit = 0


class _Connection(asyncio.Protocol):
    """A connection kept alive, with one request at a time."""

    def __init__(self, crowd: _Crowd, server: int) -> None:
        self._crowd, self._server = crowd, server
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.request: _Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport = cast("asyncio.Transport", transport)
        if self.request is None:
            self._crowd.idle[self._server].append(self)
        else:
            self.send(self.request)

    def send(self, request: _Request) -> None:
        """Send a request, or keep it until there is a connection."""
        self.request, request.connection = request, self
        if self._transport is not None:
            self._transport.write(b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % request.arrival.kind.encode())

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or self.request is None:
            return
        _, _, rest = head.lower().partition(b"content-length: ")
        if len(body) < int(rest.partition(b"\r\n")[0]):
            return
        self._received = b""
        request, self.request = self.request, None
        request.took_s = time.monotonic() - self._crowd.began - request.arrival.due_s
        request.status = int(head[9:12])
        request.limit = int(body) if request.status == 200 else 0
        request.connection = None
        if self._crowd.keep_alive:
            self._crowd.idle[self._server].append(self)
        else:
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        with suppress(ValueError):
            self._crowd.idle[self._server].remove(self)

    def close(self) -> None:
        """Close the connection, so that an answer that comes yet reaches nobody."""
        if self._transport is not None:
            self._transport.abort()


class _Crowd:
    """All clients of some servers."""

    def __init__(self, ports: Sequence[int], patience_s: float, *, keep_alive: bool) -> None:
        self.began, self.keep_alive = time.monotonic(), keep_alive
        self.idle: list[list[_Connection]] = [[] for _ in ports]
        self._ports, self._patience_s = ports, patience_s
        self._requests: list[_Request] = []
        self._impatient: deque[_Request] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweeper = asyncio.create_task(self._sweep())

    def send(self, arrival: Arrival) -> None:
        """Send a request on a connection that is idle, or on a new one."""
        request = _Request(arrival)
        self._requests.append(request)
        self._impatient.append(request)
        idle = self.idle[arrival.server]
        if idle:
            idle.pop().send(request)
            return
        connecting = asyncio.create_task(self._connect(arrival.server, request))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def connect(self, connections: int) -> None:
        """Have so many connections before the first request; all times count from then on."""
        for number in range(connections):
            await self._connect(number % len(self._ports))
        self.began = time.monotonic()

    async def finish(self) -> None:
        """Wait for the last answers and give up on the rest."""
        while self._impatient:  # noqa: ASYNC110 - the sweeper is as slow
            await asyncio.sleep(SWEEP_S)
        self._sweeper.cancel()
        for task in self._connecting:
            task.cancel()
        for connections in self.idle:
            for connection in list(connections):
                connection.close()
        await asyncio.gather(self._sweeper, *self._connecting, return_exceptions=True)

    def answers(self) -> list[Answer]:
        """What became of all requests."""
        return [Answer(each.arrival, each.took_s, each.status, each.limit) for each in self._requests]

    async def _connect(self, server: int, request: _Request | None = None) -> None:
        """Connect, for a request if there is one; where the listen backlog is full nobody answers it."""
        connection = _Connection(self, server)
        if request is not None:
            connection.send(request)
        with suppress(OSError):
            await asyncio.get_running_loop().create_connection(lambda: connection, HOST, self._ports[server])

    async def _sweep(self) -> None:
        """Give up on whoever has waited for too long; all have the same patience, so the first that was sent is the first."""
        while True:
            late = time.monotonic() - self.began - self._patience_s
            while self._impatient and (self._impatient[0].status or self._impatient[0].arrival.due_s <= late):
                request = self._impatient.popleft()
                if request.connection is not None:
                    request.connection.close()
                    request.connection = None
            await asyncio.sleep(SWEEP_S)
