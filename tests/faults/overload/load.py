"""The clients, in a process of their own: ``python -m tests.faults.overload.load`` reads a `Spec` as JSON and answers in JSON.

The first line of output says when the attack began. Every time is monotonic, in seconds, and so that of the whole machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any, TypedDict

HANG = 15.0
"""Seconds after which a request counts as never answered."""
AGAIN = 0.02
"""Seconds until somebody comes back whose connection has failed."""
ENOUGH = 12
"""Honest requests in a row that show that all is well again."""
TRICKLE = 0.05
"""Seconds between two bytes of a slow client."""
CONTROL = "192.0.2.9"
"""The address of whoever tells the application to make trouble."""
HONEST_LINES = 8
"""Connections that honest clients have from the start; where all are busy they make further ones."""


class Crowd(TypedDict, total=False):
    """Connections that each send one request after the other."""

    name: str
    connections: int
    path: str
    address: str
    pause: float
    """Seconds between an answer and the next request."""
    delay: float
    """Seconds after the attack began until the first request."""


class Spec(TypedDict, total=False):
    """What is sent to a port of this machine."""

    port: int
    lead: float
    """Seconds of honest requests alone, before the attack."""
    seconds: float
    """How long the attack lasts."""
    tail: float
    """Seconds of honest requests alone, after it, at most."""
    crowds: list[Crowd]
    honest: float
    """Requests each second, whatever becomes of those before; 0 for none."""
    addresses: list[str]
    """Those of the honest, in turn."""
    path: str
    """What the honest ask for."""
    idle: int
    """Connections that say nothing."""
    slow: int
    """Connections that send a request byte by byte, and never come to its end."""
    trouble: bool
    """Whether the application makes trouble of its own during the attack."""


class Line(asyncio.Protocol):
    """A connection that is kept; asks one thing at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._heard = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def open(self) -> None:
        """Connect, if there is no connection."""
        if self._transport is None:
            self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; raises an OSError where none comes."""
        async with asyncio.timeout(HANG):
            await self.open()
            assert self._transport is not None
            self._answer = asyncio.get_running_loop().create_future()
            try:
                self._transport.write(request)
                return await self._answer
            except BaseException:
                self.close()
                raise

    def say(self, words: bytes) -> None:
        """Send something without waiting for an answer."""
        if self._transport is not None:
            self._transport.write(words)

    def close(self) -> None:
        """End the connection."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard += data
        answer = _whole(self._heard)
        if answer is not None:
            status, body, keeps = answer
            self._heard.clear()
            if not keeps:
                self.close()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result((status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._heard.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server has closed the connection"))


def _whole(heard: bytearray) -> tuple[int, bytes, bool] | None:
    """Status, body, and whether the connection is kept, once an answer is there."""
    end = heard.find(b"\r\n\r\n") + 4
    if end == 3:
        return None
    head = bytes(heard[:end]).lower()
    if b"transfer-encoding: chunked" in head:
        if not heard.endswith(b"0\r\n\r\n"):
            return None
    else:
        _, _, rest = head.partition(b"content-length:")
        if len(heard) < end + int(rest.split(b"\r\n", 1)[0] or 0):
            return None
    return int(heard[9:12]), bytes(heard[end:]), b"connection: close" not in head


def request(path: str, address: str) -> bytes:
    """A GET by a client of an address, as the proxy in front of the server tells."""
    return f"GET {path} HTTP/1.1\r\nHost: testserver\r\nX-Forwarded-For: {address}\r\n\r\n".encode()


class Load:
    """All clients, and what they have got."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.statuses: dict[str, Counter[int]] = {crowd["name"]: Counter() for crowd in spec["crowds"]}
        self.degraded: Counter[str] = Counter()
        self.honest: list[tuple[float, float, int, bool]] = []
        self._idle = [self._line() for _ in range(HONEST_LINES)]
        self._stopping = asyncio.Event()

    def _line(self) -> Line:
        return Line(self.spec["port"])

    async def run(self) -> dict[str, Any]:
        """Open all connections, then attack, beside those who are honest."""
        spec = self.spec
        crowds = [(crowd, [self._line() for _ in range(crowd["connections"])]) for crowd in spec["crowds"]]
        control, slow = self._line(), [self._line() for _ in range(spec.get("slow", 0))]
        idle = [self._line() for _ in range(spec.get("idle", 0))]
        await _open([control, *self._idle, *[line for _, lines in crowds for line in lines], *slow, *idle])
        lead, trouble = spec["lead"], spec.get("trouble")
        if trouble and not lead:
            await control.ask(request("/trouble/on", CONTROL))
        honest = asyncio.create_task(self._be_honest())
        await asyncio.sleep(lead)
        if trouble and lead:
            await control.ask(request("/trouble/on", CONTROL))
        began = time.monotonic()
        sys.stdout.write(f"{json.dumps(began)}\n")
        sys.stdout.flush()
        attack = [self._keep_asking(crowd, line, began + spec["seconds"]) for crowd, lines in crowds for line in lines]
        await asyncio.gather(asyncio.sleep(spec["seconds"]), *attack, *[self._trickle(line, began) for line in slow])
        for line in idle:
            line.close()
        if trouble:
            await control.ask(request("/trouble/off", CONTROL))
        over = time.monotonic()
        while time.monotonic() < over + spec["tail"] and not self._is_well_since(over):  # noqa: ASYNC110 - it is a time, too
            await asyncio.sleep(AGAIN)
        self._stopping.set()
        await honest
        statuses = {name: dict(found) for name, found in self.statuses.items()}
        return {"began": began, "over": over, "statuses": statuses, "degraded": dict(self.degraded), "honest": self.honest}

    def _is_well_since(self, over: float) -> bool:
        """Whether enough honest requests in a row have got what they asked for, by the store."""
        after = sorted(each for each in self.honest if each[0] >= over)[-ENOUGH:]
        return len(after) == ENOUGH and all(status == 200 and not degraded for _, _, status, degraded in after)

    async def _keep_asking(self, crowd: Crowd, line: Line, end: float) -> None:
        """One of a crowd: no longer than until a moment, but for the answer to its last request."""
        words, found, name = request(crowd["path"], crowd["address"]), self.statuses[crowd["name"]], crowd["name"]
        await asyncio.sleep(crowd.get("delay", 0.0))
        while time.monotonic() < end:
            try:
                status, body = await line.ask(words)
            except OSError:
                found[0] += 1
                await asyncio.sleep(AGAIN)
                continue
            found[status] += 1
            self.degraded[name] += is_degraded(status, body)
            await asyncio.sleep(crowd.get("pause", 0.0))
        line.close()

    async def _trickle(self, line: Line, began: float) -> None:
        """Send a request slowly."""
        line.say(request("/slow", "198.51.100.9")[:-4] + b"\r\nX-Slow: ")
        while time.monotonic() < began + self.spec["seconds"]:
            line.say(b"x")
            await asyncio.sleep(TRICKLE)
        line.close()

    async def _be_honest(self) -> None:
        """Requests at a steady rate, however long the others take."""
        begun, rate, addresses = time.monotonic(), self.spec["honest"], self.spec["addresses"]
        async with asyncio.TaskGroup() as asking:
            for number in count() if rate else ():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), max(0.0, begun + number / rate - time.monotonic()))
                if self._stopping.is_set():
                    break
                asking.create_task(self._ask(addresses[number % len(addresses)]))
        await self._stopping.wait()
        for line in self._idle:
            line.close()

    async def _ask(self, address: str) -> None:
        """One honest request, on an idle connection or a new one."""
        line = self._idle.pop() if self._idle else self._line()
        sent, status, body = time.monotonic(), 0, b""
        with contextlib.suppress(OSError):
            status, body = await line.ask(request(self.spec["path"], address))
        self._idle.append(line)
        self.honest.append((sent, time.monotonic(), status, is_degraded(status, body)))


async def _open(lines: Sequence[Line]) -> None:
    """Connect one after the other, so that the first ones are there where not all can be."""
    for line in lines:
        with contextlib.suppress(OSError):
            await line.open()


def is_degraded(status: int, body: bytes) -> bool:
    """Whether an answer says that the store had failed."""
    return status == 503 or b'"degraded": true' in body


async def _bounded(spec: Spec) -> dict[str, Any]:
    async with asyncio.timeout(spec["lead"] + spec["seconds"] + spec["tail"] + 3 * HANG):
        return await Load(spec).run()


if __name__ == "__main__":
    json.dump(asyncio.run(_bounded(json.load(sys.stdin))), sys.stdout)
