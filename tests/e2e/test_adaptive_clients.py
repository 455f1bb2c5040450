"""On real servers: clients that are slow to send or to read keep no place in flight that another request needs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import hypercorn.asyncio
import hypercorn.config
import pytest
import uvicorn

from limitgate import Adaptive, LimitGate, Rule
from tests.support.doors import PATIENCE

LARGE = b"x" * 200_000
SERVERS = ["uvicorn", "hypercorn"]


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Read all of a body, and answer at length."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LARGE))]})
    await send({"type": "http.response.body", "body": LARGE})


@asynccontextmanager
async def serving(server: str) -> AsyncIterator[tuple[str, int]]:
    """A server on the running event loop, with a place for one request; its address."""
    gated = LimitGate(answering, rules=[Rule("all", adaptive=Adaptive(min=1, max=1))], store="memory://")
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    if server == "uvicorn":
        served = uvicorn.Server(uvicorn.Config(gated, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        task = asyncio.create_task(served.serve([listening]))
    else:
        over, config = asyncio.Event(), hypercorn.config.Config()
        config.bind, config.loglevel, config.graceful_timeout = [f"fd://{listening.detach()}"], "CRITICAL", 0.1
        task = asyncio.create_task(hypercorn.asyncio.serve(gated, config, shutdown_trigger=over.wait))  # type: ignore[arg-type]
    try:
        yield address
    finally:
        if server == "uvicorn":
            served.should_exit = True
        else:
            over.set()
        async with asyncio.timeout(PATIENCE):
            await task


async def status(address: tuple[str, int]) -> int:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    answer = await reader.readuntil(b"\r\n")
    writer.transport.abort()
    return int(answer.split()[1])


async def served(address: tuple[str, int]) -> None:
    """Ask until there is a place."""
    async with asyncio.timeout(PATIENCE):
        while await status(address) != 200:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.005)


pytestmark = pytest.mark.usefixtures("punctual_loops")


@pytest.mark.parametrize("server", SERVERS)
def test_a_body_that_comes_byte_by_byte(server: str) -> None:
    async def main() -> None:
        async with serving(server) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")

            async def trickle() -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.002)

            trickling = asyncio.create_task(trickle())
            await served(address)
            trickling.cancel()
            writer.transport.abort()

    asyncio.run(main())


@pytest.mark.parametrize("server", SERVERS)
def test_answers_that_nobody_reads(server: str) -> None:
    """The next request on the connection is held up as soon as it begins its answer."""

    async def main() -> None:
        async with serving(server) as address:
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(own, address)
            for _ in range(60):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await loop.sock_sendall(own, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            for _ in range(3):
                await served(address)
            own.close()

    asyncio.run(main())
