"""What polite clients cost and keep: ``python -m benchmarks.outbound`` prints the figures of docs/internals/outbound.md.

The other side is a process of its own that answers at once and remembers when each request came. What a call costs is the CPU
of the client's process over the same calls by bare httpx, in turns. The rate is what the other side saw, from the first request
to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection

import httpx

from benchmarks.redis_side import own_server
from benchmarks.report import table
from limitgate import AsyncLimiter, Limiter
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport

ENOUGH = "1000000/second"
"""A limit that no round comes near to, so that nobody ever waits."""
CALLS = 300
"""In a round."""
WORKERS = 16
"""Tasks that ask at once, in each process."""


@contextmanager
def other_side() -> Iterator[str]:
    """A server in a process of its own; gives its URL."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(ready: Connection) -> None:
    arrivals: list[float] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                body = b"ok"
                if request.startswith(b"GET /arrivals"):
                    body = json.dumps(arrivals).encode()
                    arrivals.clear()
                else:
                    arrivals.append(time.monotonic())
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        ready.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    asyncio.run(serve())


# --- what a call costs ------------------------------------------------------------------------------------------------


def cost(url: str, store: str, rounds: int) -> dict[str, float]:
    """Microseconds of the client's CPU for a call: the median over rounds."""
    return {name: statistics.median(times) for name, times in _sync(url, store, rounds).items()} | {
        name: statistics.median(times) for name, times in asyncio.run(_async(url, store, rounds)).items()
    }


def _sync(url: str, store: str, rounds: int) -> Mapping[str, Sequence[float]]:
    with Limiter(store, timeout=1) as limiter:
        transports: dict[str, httpx.BaseTransport] = {
            "httpx.Client": httpx.HTTPTransport(),
            "httpx.Client, memory": RateLimitTransport(ENOUGH),
            "httpx.Client, Redis": RateLimitTransport(ENOUGH, limiter=limiter),
        }
        clients = {name: httpx.Client(transport=transport, base_url=url) for name, transport in transports.items()}
        times: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(rounds):
            for name, client in clients.items():
                client.get("/")
                began = time.process_time()
                for _ in range(CALLS):
                    client.get("/")
                times[name].append((time.process_time() - began) / CALLS * 1e6)
        for client in clients.values():
            client.close()
    return times


async def _async(url: str, store: str, rounds: int) -> Mapping[str, Sequence[float]]:
    async with AsyncLimiter(store, timeout=1) as limiter:
        transports: dict[str, httpx.AsyncBaseTransport] = {
            "httpx.AsyncClient": httpx.AsyncHTTPTransport(),
            "httpx.AsyncClient, memory": AsyncRateLimitTransport(ENOUGH),
            "httpx.AsyncClient, Redis": AsyncRateLimitTransport(ENOUGH, limiter=limiter),
        }
        clients = {name: httpx.AsyncClient(transport=transport, base_url=url) for name, transport in transports.items()}
        times: dict[str, list[float]] = {}
        for crowd in (1, WORKERS):
            for client in clients.values():
                await _crowd(crowd, client)
            for _ in range(rounds):
                for name, client in clients.items():
                    began = time.process_time()
                    await _crowd(crowd, client)
                    times.setdefault(f"{name}, {crowd} at once", []).append((time.process_time() - began) / CALLS * 1e6)
        for client in clients.values():
            await client.aclose()
    return times


async def _crowd(crowd: int, client: httpx.AsyncClient) -> None:
    """Call as often as a round has it, so many at a time."""
    numbers = iter(range(CALLS))

    async def work() -> None:
        for _ in numbers:
            await client.get("/")

    await asyncio.gather(*[work() for _ in range(crowd)])


# --- what rate is kept ------------------------------------------------------------------------------------------------


def rate(url: str, store: str, limit: str, processes: int, seconds: float) -> tuple[int, float]:
    """How many requests the other side saw, and how many in a second."""
    spawn = multiprocessing.get_context("spawn")
    httpx.get(f"{url}/arrivals")  # forgets those before
    start = time.monotonic() + 2.0
    running = [spawn.Process(target=_ask, args=(url, store, limit, start, seconds)) for _ in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    arrivals = sorted(httpx.get(f"{url}/arrivals").json())
    return len(arrivals), (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def _ask(url: str, store: str, limit: str, start: float, seconds: float) -> None:
    async def ask() -> None:
        async with AsyncLimiter(store, timeout=1) as limiter:
            transport = AsyncRateLimitTransport(limit, limiter=limiter)
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:

                async def work() -> None:
                    while time.monotonic() < start + seconds:
                        await client.get("/")

                await asyncio.sleep(max(0.0, start - time.monotonic()))
                await asyncio.gather(*[work() for _ in range(WORKERS)])

    asyncio.run(ask())


def main(arguments: Sequence[str]) -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of calls (default 15)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which a rate is kept (default 30)")
    parser.add_argument("--rates", type=int, nargs="*", default=[20, 100, 500], help="requests in a second")
    options = parser.parse_args(arguments)
    with own_server() as server, other_side() as url:
        bare, costs = 0.0, []
        for name, figure in cost(url, server.url, options.rounds).items():
            is_bare = "memory" not in name and "Redis" not in name
            bare = figure if is_bare else bare
            costs.append([name, f"{figure:.0f}", "" if is_bare else f"+{figure - bare:.0f}"])
        print(table(["calls", "CPU of a call, µs", "over bare httpx"], costs), end="\n\n", flush=True)
        kept = []
        for number, processes in product(options.rates, (1, 4)):
            seen, found = rate(url, server.url, f"{number}/second burst 1", processes, options.seconds)
            kept.append([f"{number}/second", str(processes), str(seen), f"{found:.2f}", f"{found / number:.2%}"])
        print(table(["limit", "processes", "requests", "in a second", "of the limit"], kept))


if __name__ == "__main__":
    main(sys.argv[1:])
