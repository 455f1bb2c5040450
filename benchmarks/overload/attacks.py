"""Clients that try to have the adaptive limit refuse honest ones: ``python -m benchmarks.overload.attacks``.

Each attack runs against real uvicorn and hypercorn, whose work has room for everybody: whoever is refused is refused for
nothing. Shares are of honest requests from the second second of an attack on. What an event loop refuses because it is late
says more of a busy machine than of the attack, so it is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from benchmarks.overload.client import HOST
from limitgate import LimitGate, Rule
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.process.forking import living

SERVERS = {
    "uvicorn": ["-m", "uvicorn", "--log-level", "error", "--port", "{port}", "benchmarks.overload.attacks:app"],
    "hypercorn": ["-m", "hypercorn", "--log-level", "error", "--bind", "127.0.0.1:{port}", "benchmarks.overload.attacks:app"],
}
ATTACKER = "127.0.0.9"
"""Address of the client that attacks; each honest request comes from one of the first eight."""
HONEST = 60
"""Honest requests per second."""
SLOW_S = 0.1
"""Seconds that these take."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
_PATIENCE_S = 60.0


async def _work(request: Request) -> Response:
    """Take as long as the query says, once all of the body is there."""
    with suppress(ClientDisconnect):
        await request.body()
    await asyncio.sleep(float(request.query_params.get("s", SLOW_S)))
    return PlainTextResponse("done")


async def _large(_: Request) -> Response:
    return PlainTextResponse("x" * 200_000)


async def _refusals(_: Request) -> Response:
    """Requests refused so far, for want of room and because the loop was late."""
    levels = [level for places in living(ConcurrencyLimiter) for level in places.limit.levels.values()]
    return JSONResponse([sum([level.limit for level in levels]), sum([level.lag for level in levels])])


app = LimitGate(
    Starlette(
        routes=[
            Route("/refusals", _refusals),
            Route("/work", _work, methods=["GET", "POST"]),
            Route("/large", _large),
            *[Route(f"/route/{number}", _work) for number in range(100)],
        ]
    ),
    rules=[Rule("watched", path="/refusals", exempt=True), Rule("all", adaptive=True)],
    store="memory://",
)
"""What the servers serve."""


class Target(NamedTuple):
    """A server under attack, and what became of honest requests."""

    port: int
    statuses: list[tuple[float, int]]
    """When each came, and how it was answered."""
    cheap: float
    """Cheap requests per second of one client."""

    async def ask(self, path: str, *, client: str, method: str = "GET", give_up_s: float = 10.0) -> int:
        """Make a request on a connection of its own. Returns the status, 0 without an answer."""
        with suppress(OSError, TimeoutError, IndexError, ValueError):
            async with asyncio.timeout(give_up_s):
                reader, writer = await asyncio.open_connection(HOST, self.port, local_addr=(client, 0))
                try:
                    writer.write(f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
                    status = int((await reader.readline()).split()[1])
                    await reader.read()
                    return status
                finally:
                    writer.transport.abort()
        return 0

    async def honest(self, seconds: float, path: str = "/work", rate: float = HONEST, clients: int = 8) -> None:
        """Poisson arrivals at a rate, whether or not those before are answered."""

        async def one(number: int) -> None:
            came = time.monotonic()
            self.statuses.append((came, await self.ask(path, client=f"127.0.0.{1 + number % clients}")))

        await _steadily(one, rate, seconds, Random(1))

    async def refusals(self) -> list[int]:
        """Requests that the server has refused, for want of room and because it was late."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(b"GET /refusals HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(_PATIENCE_S):
            answer = await reader.readuntil(b"]")
        writer.transport.abort()
        return [int(number) for number in answer[answer.index(b"[") + 1 : -1].split(b",")]


async def _steadily(call: Callable[[int], Awaitable[Any]], rate: float, seconds: float, random: Random | None = None) -> None:
    """Call at a rate for some seconds, evenly or by chance, and wait for all to end."""
    now = began = time.monotonic()
    calls, number = set(), 0
    while now - began < seconds:
        calls.add(asyncio.ensure_future(call(number)))
        number += 1
        now += 1 / rate if random is None else random.expovariate(rate)
        await asyncio.sleep(max(0.0, now - time.monotonic()))
    await asyncio.wait(calls)


async def _slow_bodies(target: Target, seconds: float, pause_s: float = 0.005) -> None:
    """30 connections that send a byte every few milliseconds, made anew every 4 s."""

    async def trickle(until: float) -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, target.port, local_addr=(ATTACKER, 0))
            writer.write(b"POST /work HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
            while time.monotonic() < until:
                writer.write(b"x")
                await asyncio.sleep(pause_s)
            writer.transport.abort()

    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        until = time.monotonic() + min(left, 4)
        await asyncio.gather(*[trickle(until) for _ in range(30)])


async def nothing(target: Target) -> None:
    """No attack: what is refused then says how busy this machine is."""
    await target.honest(11)


async def slow_bodies(target: Target) -> None:
    """A byte of a body now and then."""
    await target.honest(2)
    target.statuses.clear()
    await asyncio.gather(target.honest(9), _slow_bodies(target, 9))


async def silent_bodies(target: Target) -> None:
    """A byte of a body, and then none."""
    await target.honest(2)
    target.statuses.clear()
    await asyncio.gather(target.honest(9), _slow_bodies(target, 9, 5.0))


async def slow_readers(target: Target) -> None:
    """Connections on which request follows request, and no answer is ever read."""
    await target.honest(2)
    target.statuses.clear()

    async def read_nothing() -> None:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        own.bind((ATTACKER, 0))
        with suppress(OSError):
            await asyncio.get_running_loop().sock_connect(own, (HOST, target.port))
            for _ in range(40):
                await asyncio.wait_for(
                    asyncio.get_running_loop().sock_sendall(own, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"), 1
                )
                await asyncio.sleep(0.2)
        await asyncio.sleep(1)
        own.close()

    await asyncio.gather(target.honest(9), *[read_nothing() for _ in range(30)])


async def classes(target: Target) -> None:
    """Nine methods to twelve routes, most of which are not allowed; then an honest route that is slow beside fast ones."""
    for number in range(12):
        await asyncio.gather(*[target.ask(f"/route/{number}?s=0", client=ATTACKER, method=each) for each in METHODS])
    await asyncio.gather(
        target.honest(9, "/work?s=0.2", 30), target.honest(9, "/route/98?s=0", 30), target.honest(9, "/route/99?s=0", 30)
    )


async def routes(target: Target) -> None:
    """As many routes as an application has, before one that is slow."""
    for number in range(98):
        await target.ask(f"/route/{number}?s=0", client=f"127.0.0.{1 + number % 8}")
    await asyncio.gather(
        target.honest(9, "/work?s=0.2", 30), target.honest(9, "/route/98?s=0", 30), target.honest(9, "/route/99?s=0", 30)
    )


async def _cheap(target: Target, seconds: float, client: str = ATTACKER) -> None:
    """Requests that take no time, on the route of honest ones, over connections that are kept alive."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(_: int) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = idle.pop() if idle else await asyncio.open_connection(HOST, target.port, local_addr=(client, 0))
            writer.write(b"GET /work?s=0 HTTP/1.1\r\nHost: a\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            idle.append((reader, writer))

    await _steadily(one, target.cheap, seconds)
    for _, writer in idle:
        writer.close()


async def cheap(target: Target) -> None:
    """Cheap requests of one client among honest ones for 3 s."""
    await target.honest(3)
    target.statuses.clear()
    await asyncio.gather(target.honest(15), _cheap(target, 3))


async def cheap_alone(target: Target) -> None:
    """The same, while there are no honest ones."""
    await target.honest(3)
    target.statuses.clear()
    await _cheap(target, 3)
    await target.honest(12)


async def cheap_first(target: Target) -> None:
    """The same, before there are any."""
    await _cheap(target, 3)
    await target.honest(12)


async def cheap_of_all(target: Target) -> None:
    """Cheap requests of the only client there is."""
    await target.honest(3, clients=1)
    target.statuses.clear()
    await _cheap(target, 3, client="127.0.0.1")
    await target.honest(12, clients=1)


async def cheap_in_bursts(target: Target) -> None:
    """Cheap requests of one client that fill the limit, so that it is measured under them."""
    await target.honest(3)

    async def burst(_: int) -> None:
        await asyncio.gather(*[target.ask("/work?s=0.001", client=ATTACKER) for _ in range(60)])

    await _steadily(burst, 10, 7)
    target.statuses.clear()
    await target.honest(12)


async def aborted(target: Target) -> None:
    """Requests of one client that leaves before they are answered."""
    await target.honest(3)
    target.statuses.clear()
    await asyncio.gather(target.honest(9), _steadily(lambda _: target.ask("/work", client=ATTACKER, give_up_s=0.02), 100, 9))


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        nothing,
        slow_bodies,
        silent_bodies,
        slow_readers,
        classes,
        routes,
        cheap,
        cheap_alone,
        cheap_first,
        cheap_of_all,
        cheap_in_bursts,
        aborted,
    )
}


@contextmanager
def serving(server: str) -> Iterator[int]:
    """A server in a process group of its own, all of which is stopped: hypercorn has workers. Gives its port."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *[each.format(port=port) for each in SERVERS[server]]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection((HOST, port)).close()
                break
            time.sleep(0.05)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_PATIENCE_S)


async def _attacked(attack: str, port: int, rate: float) -> str:
    target = Target(port, [], rate)
    await ATTACKS[attack](target)
    began = target.statuses[0][0]
    counted = [status for came, status in target.statuses if came >= began + 1]
    refused, other = counted.count(503), sum(1 for status in counted if status not in (200, 503))
    limit, lag = await target.refusals()
    return f"{len(counted)} | {refused} | {refused / len(counted):.1%} | {other} | {limit} | {lag}"


def main() -> None:
    """Run the attacks and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload.attacks", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--cheap", type=float, default=600, help="cheap requests per second; fewer than the server can do")
    options = parser.parse_args()
    print("| attack | server | honest | refused | share | not answered | all refused for want of room | because late |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for attack in options.only:
        for server in options.server:
            with serving(server) as port:
                print(f"| {attack} | {server} | {asyncio.run(_attacked(attack, port, options.cheap))} |", flush=True)


if __name__ == "__main__":
    main()
