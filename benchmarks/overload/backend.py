"""What handlers wait for: a backend of a few connections, of which each request needs one for 50 ms, on a unix socket.

It stands in the client's process, and its times are those of a schedule: a connection is free at the moment at which it should
be, however late the timer comes. So its capacity does not depend on how busy its process is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import cast

NUMBER = 4
"""Bytes of a request's number, all that is sent to the backend and back."""
LEAST_S, MOST_S = 0.040, 0.060
"""Seconds for which a request keeps a connection, 50 ms on average."""
MEAN_S = (LEAST_S + MOST_S) / 2

Reply = Callable[[], None]


class Backend:
    """The backend; one for all who connect to it."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self._size, self._random = size, Random(seed)
        self._busy = 0
        self._waiting: deque[tuple[float, Reply]] = deque()

    @property
    def capacity(self) -> float:
        """Requests per second."""
        return self._size / MEAN_S

    def resize(self, size: int) -> None:
        """Have so many connections from now on."""
        self._size = size
        self._feed(time.monotonic())

    def close(self) -> None:
        """Forget everybody who waits."""
        self._waiting.clear()

    def use(self, reply: Reply) -> None:
        """Have a request wait for a connection, use it, and reply."""
        now = time.monotonic()
        self._waiting.append((now, reply))
        self._feed(now)

    def _feed(self, now: float) -> None:
        while self._waiting and self._busy < self._size:
            came, reply = self._waiting.popleft()
            self._busy += 1
            until = max(now, came) + self._random.uniform(LEAST_S, MOST_S)
            asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), self._release, until, reply)

    def _release(self, until: float, reply: Reply) -> None:
        self._busy -= 1
        reply()
        self._feed(until)


class _Serving(asyncio.Protocol):
    """A connection of an application, for all of its requests."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._received = backend, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        whole = len(received) - len(received) % NUMBER
        for begin in range(0, whole, NUMBER):
            self._backend.use(self._replying(received[begin : begin + NUMBER]))
        self._received = received[whole:]

    def _replying(self, number: bytes) -> Reply:
        return lambda: None if self._transport.is_closing() else self._transport.write(number)


async def serve(backend: Backend, path: str) -> asyncio.Server:
    """Have a backend listen on a unix socket."""
    return await asyncio.get_running_loop().create_unix_server(lambda: _Serving(backend), path)


class Connected(asyncio.Protocol):
    """An application's end of its connection to the backend."""

    def __init__(self) -> None:
        self._received = b""
        self._number = 0
        self._asked: dict[bytes, asyncio.Future[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to the backend."""
        self._transport = cast("asyncio.Transport", transport)

    async def use(self) -> None:
        """Have the backend do its work."""
        self._number = (self._number + 1) % 256**NUMBER
        number = self._number.to_bytes(NUMBER)
        done = self._asked[number] = asyncio.get_running_loop().create_future()
        self._transport.write(number)
        try:
            await done
        finally:
            del self._asked[number]

    def data_received(self, data: bytes) -> None:
        """Wake those whose work is done."""
        received = self._received + data
        whole = len(received) - len(received) % NUMBER
        for begin in range(0, whole, NUMBER):
            done = self._asked.get(received[begin : begin + NUMBER])
            if done is not None and not done.done():
                done.set_result(None)
        self._received = received[whole:]


async def connect(path: str) -> Connected:
    """Connect to the backend."""
    _, connected = await asyncio.get_running_loop().create_unix_connection(Connected, path)
    return connected
