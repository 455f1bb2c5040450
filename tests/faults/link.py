"""A line between an application and its Redis that can be made bad: late, cut, garbled, deaf.

It runs in a thread of its own and listens on one port for as long as it lives, whatever happens to the server behind it. It
knows nothing of what it carries, but that a script's reply begins with an asterisk.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

PIECE = 2**16
TICK = 0.002
"""Seconds between two looks at whether held bytes may go on."""


class Faithful:
    """How bytes are carried: as they come."""

    async def there(self, cable: Cable, data: bytes) -> None:
        """Carry what the application says."""
        cable.far.write(data)

    async def back(self, cable: Cable, data: bytes, arrived: float) -> None:
        """Carry what Redis says, which arrived at a moment on the loop's clock."""
        cable.near.write(data)


class Late(Faithful):
    """Replies take some seconds longer, without keeping others behind them any longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def back(self, cable: Cable, data: bytes, arrived: float) -> None:
        now = asyncio.get_running_loop().time
        while now() < arrived + self.seconds and cable.link.manner is self:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(TICK)
        cable.near.write(data)


class Trickling(Faithful):
    """Replies come byte by byte, some seconds apart."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def back(self, cable: Cable, data: bytes, arrived: float) -> None:
        for place in range(len(data)):
            cable.near.write(data[place : place + 1])
            if cable.link.manner is self:
                await asyncio.sleep(self.seconds)


class Cutting(Faithful):
    """The connection ends in the middle of a script's reply."""

    async def back(self, cable: Cable, data: bytes, arrived: float) -> None:
        if not data.startswith((b"*", b"$")):
            cable.near.write(data)
        else:
            cable.near.write(data[: len(data) // 2])
            cable.near.close()


class Garbling(Faithful):
    """Scripts' replies are something else."""

    def __init__(self, words: bytes) -> None:
        self.words = words

    async def back(self, cable: Cable, data: bytes, arrived: float) -> None:
        cable.near.write(self.words if data.startswith((b"*", b"$")) else data)


class Swallowing(Faithful):
    """What the application says never arrives, and its connection is never any good again."""

    async def there(self, cable: Cable, data: bytes) -> None:
        cable.deaf = True


class Cable:
    """One connection, and its twin to the server."""

    def __init__(self, link: Link, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.link = link
        self.target = link.target
        self.near = near
        self.far = far
        self.deaf = False
        """Whether bytes are taken and never carried, in either direction."""

    async def carry(self, spoken: asyncio.StreamReader, heard: asyncio.StreamReader) -> None:
        """Carry bytes until either side is at its end."""
        replies: asyncio.Queue[tuple[bytes, float]] = asyncio.Queue()
        ways = [asyncio.ensure_future(way) for way in (self._there(spoken), self._hear(heard, replies), self._back(replies))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self.cut()
            await asyncio.gather(*ways, return_exceptions=True)

    def cut(self) -> None:
        """End both connections; what was written still arrives."""
        self.near.close()
        self.far.close()

    async def _there(self, spoken: asyncio.StreamReader) -> None:
        while data := await spoken.read(PIECE):
            if not self.deaf:
                await self.link.manner.there(self, data)

    async def _hear(self, heard: asyncio.StreamReader, replies: asyncio.Queue[tuple[bytes, float]]) -> None:
        """Note when replies arrive. A deaf connection does not even learn that the server has closed."""
        while data := await heard.read(PIECE):
            replies.put_nowait((data, asyncio.get_running_loop().time()))
        if self.deaf:
            await asyncio.get_running_loop().create_future()

    async def _back(self, replies: asyncio.Queue[tuple[bytes, float]]) -> None:
        while not self.near.is_closing():
            data, arrived = await replies.get()
            if not self.deaf:
                await self.link.manner.back(self, data, arrived)


class Link:
    """``with Link(port) as link`` carries what comes to ``link.port`` to a port, in the ``manner`` of the moment."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.manner = Faithful()
        self.cables: list[Cable] = []
        self.made = 0
        """Connections so far."""
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="link")

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def cut(self) -> None:
        """End all connections."""
        for cable in list(self.cables):
            self._loop.call_soon_threadsafe(cable.cut)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._begun.set()
        await self._ended.wait()
        server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _connect(self, spoken: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        """Carry a new connection until its end."""
        task = asyncio.current_task()
        self._carrying.add(task)
        self.made += 1
        try:
            heard, far = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            near.close()
        else:
            cable = Cable(self, near, far)
            self.cables.append(cable)
            await cable.carry(spoken, heard)
            self.cables.remove(cable)
        finally:
            self._carrying.discard(task)
