"""A Redis that stumbles when told to, and event loops that are listened to."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
from collections.abc import Callable
from typing import Any, Self

from limitgate.stores.redis.inspection import INSPECT
from limitgate.stores.redis.wire import Reader, pack_command
from tests.support.redis_server import RedisServer

PATIENT = 60.0
"""Seconds, where a test is not about time."""
CUT = object()
"""In place of a reply: the connection ends before the call reaches Redis."""


def in_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Runs an async test in an event loop of its own, which must have nothing to complain about."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        complaints: list[str] = []

        async def listened() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
            async with asyncio.timeout(PATIENT):
                await test(*args, **options)

        try:
            asyncio.run(listened())
        finally:
            gc.collect(1)  # Objects of this test are in the young generations.
        assert complaints == []

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks, or a server, will bring about."""
    async with asyncio.timeout(PATIENT):
        while not condition():  # noqa: ASYNC110 - nobody is there to set an event
            await asyncio.sleep(0.001)


def calls_to(server: RedisServer) -> int:
    """Script calls that a server has carried out: each asks for the time once.

    Before Redis 7, the inspection of a new connection asks for it too, and for a SET that fails.
    """
    with server.client() as client:
        statistics = client.info("commandstats")
        calls: int = statistics.get("cmdstat_time", {"calls": 0})["calls"]
        if int(client.info("server")["redis_version"].partition(".")[0]) < 7:
            calls -= statistics.get("cmdstat_set", {"failed_calls": 0})["failed_calls"]
        return calls


class Proxy:
    """Passes what its clients say on to a Redis, in the test's event loop; ``async with Proxy(server) as proxy``.

    ``calls`` are the script calls in the order in which they came. ``instead`` says by their numbers what some of them get in
    place of a reply: bytes, without Redis being asked, or `CUT`.
    """

    def __init__(self, server: RedisServer, port: int = 0) -> None:
        self._port = port
        self.calls: list[list[bytes]] = []
        self.instead: dict[int, Any] = {}
        self.lines: list[Line] = []
        self.socket = server.socket
        self._replies_left = math.inf
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for line in self.lines:
            line.cut()
        await asyncio.gather(*[line.task for line in self.lines])

    @property
    def sizes(self) -> list[int]:
        """How many buckets each call is about."""
        return [int(call[2]) for call in self.calls]

    def hold(self) -> None:
        """Withhold the replies to script calls from now on."""
        self._replies_left = 0

    def release(self, count: float = math.inf) -> None:
        """Let so many withheld replies through, or all."""
        self._replies_left += count
        self._more.set()

    async def called(self, times: int) -> None:
        """Wait for so many calls, all in all."""
        await until(lambda: len(self.calls) >= times)

    async def may_reply(self) -> None:
        while self._replies_left < 1:
            self._more.clear()
            await self._more.wait()
        self._replies_left -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(self, writer)
        self.lines.append(line)
        await line.serve(reader)


class Line:
    """A client's connection to a `Proxy`."""

    def __init__(self, proxy: Proxy, writer: asyncio.StreamWriter) -> None:
        self.open = True
        self.task = asyncio.current_task()
        self._proxy = proxy
        self._writer = writer
        self._replies: asyncio.Queue[tuple[bytes | None, bool]] = asyncio.Queue()

    def say(self, words: bytes) -> None:
        """Send what the client did not ask for."""
        self._writer.write(words)

    def cut(self) -> None:
        """End the connection at once."""
        self.open = False
        self._writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        heard, redis = await asyncio.open_unix_connection(str(self._proxy.socket), limit=2**24)
        replying = asyncio.create_task(self._reply(heard))
        commands = Reader(notEnoughData=None, replyError=ValueError)
        try:
            while data := await reader.read(2**16):
                commands.feed(data)
                while self.open and (command := commands.gets()) is not None:
                    self._step_down(command, redis)
        except ConnectionError:
            pass
        finally:
            self.open = False
            replying.cancel()
            redis.close()
            self._writer.close()
            await asyncio.gather(replying, return_exceptions=True)

    def _step_down(self, command: list[bytes], redis: asyncio.StreamWriter) -> None:
        calls, reply = self._proxy.calls, None
        is_call = command[0] in (b"EVALSHA", b"EVAL") and command[1] != INSPECT.encode()
        if is_call:
            reply = self._proxy.instead.pop(len(calls), None)
            calls.append(command)
        if reply is CUT:
            self.cut()
            return
        if reply is None:
            redis.write(pack_command(tuple(command)))
        self._replies.put_nowait((reply, is_call))

    async def _reply(self, heard: asyncio.StreamReader) -> None:
        while True:
            reply, withheld = await self._replies.get()
            reply = reply or await _one_value(heard)
            if withheld:
                await self._proxy.may_reply()
            self._writer.write(reply)


async def _one_value(reader: asyncio.StreamReader) -> bytes:
    """The bytes of one RESP value."""
    line = await reader.readuntil(b"\r\n")
    kind = line[:1]
    if kind in b"$=!" and (size := int(line[1:])) >= 0:
        return line + await reader.readexactly(size + 2)
    if kind in b"*~>%":
        parts = int(line[1:]) * (2 if kind == b"%" else 1)
        return line + b"".join([await _one_value(reader) for _ in range(parts)])
    return line
