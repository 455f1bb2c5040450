"""Serves requests for half an hour, with everything that goes wrong, and looks for growth: `make soak`.

Clients leave in the middle of streams, WebSockets come and go, the process forks, rules change each 20 seconds, and Redis stops
and restarts empty. Each 5 seconds the served process reports its memory, descriptors, tasks, threads and objects, and Redis its
keys. The same application without LimitGate runs beside it, under the same traffic: memory grows slowly there, too. In the
second half of the time, nothing may grow: the 99 % interval of the slope contains 0, or that of its difference from the slope
without LimitGate, or the difference of a day is below a hundredth of the level. A slope is that of means of blocks, since
neighbouring samples depend on each other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import httpx
import redis
import websockets

BLOCKS = 12
STUDENT = 3.169
"""Quantile of Student's t distribution for 99 %, two-sided, with 10 degrees of freedom."""
RULES = """
rules:
  - {{name: all, key: [path, ip], limits: ["{count}/second", "5000/minute"]}}
  - {{name: login, path: /login, methods: [POST], key: [ip], limits: ["30/minute"], charge_if: {{status: [401]}}}}
  - {{name: slots, path: /slow, key: [ip], concurrency: 20}}
"""


def slope(times: list[float], values: list[float]) -> tuple[float, float]:
    """Return growth per second, and half of its 99 % interval, from means of blocks."""
    size = max(1, len(times) // BLOCKS)
    blocks = [(fmean(times[i : i + size]), fmean(values[i : i + size])) for i in range(0, size * BLOCKS, size)]
    mean_x, mean_y = fmean(x for x, _ in blocks), fmean(y for _, y in blocks)
    spread = sum((x - mean_x) ** 2 for x, _ in blocks)
    growth = sum((x - mean_x) * (y - mean_y) for x, y in blocks) / spread
    errors = [y - mean_y - growth * (x - mean_x) for x, y in blocks]
    deviation = math.sqrt(sum(error**2 for error in errors) / (len(blocks) - 2) / spread)
    return growth, STUDENT * deviation


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Redis:
    """A server of our own on a unix socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start without data."""
        program = shutil.which("redis-server") or sys.exit("soak: no redis-server found: run make redis")
        command = [str(program), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        """Stop, and lose all data."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    @property
    def keys(self) -> int | None:
        """Number of keys, None while the server is away."""
        try:
            with redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1) as client:
                found: int = client.dbsize()
                return found
        except redis.RedisError:
            return None


async def requests(client: httpx.AsyncClient, until: float, generator: random.Random) -> int:
    """Send requests as fast as answers come. Return how many got an answer."""
    answered = 0
    while time.monotonic() < until:
        path = generator.choice(["/hello", "/hello", "/hello", "/login?fail=1", "/login"])
        method = "POST" if path.startswith("/login") else "GET"
        with contextlib.suppress(httpx.HTTPError):
            await client.request(method, path, headers={"X-Forwarded-For": f"203.0.113.{generator.randrange(50)}"})
            answered += 1
        await asyncio.sleep(0.005)
    return answered


async def leaves(client: httpx.AsyncClient, until: float, generator: random.Random) -> None:
    """Read a part of a stream, and leave."""
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("GET", "/slow") as response:
                async for _ in response.aiter_raw():
                    if generator.random() < 0.3:
                        break
        await asyncio.sleep(0.05)


async def chats(url: str, until: float, generator: random.Random) -> None:
    """Open WebSockets, send some messages, and close them well or not at all."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError, websockets.WebSocketException):
            connection = await websockets.connect(url)
            for _ in range(generator.randrange(5)):
                await connection.send("hello")
                await connection.recv()
            if generator.random() < 0.5:
                await connection.close()
            else:
                connection.transport.abort()
        await asyncio.sleep(0.1)


async def forks(client: httpx.AsyncClient, until: float) -> tuple[int, int]:
    """Let the process fork each second. Return how many children ended well, and how many did not."""
    ended: list[bool] = []
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            ended.append((await client.get("/fork", timeout=30)).status_code != 500)
        await asyncio.sleep(1)
    return sum(ended), len(ended) - sum(ended)


async def faults(server: Redis, rules: Path, until: float, generator: random.Random) -> None:
    """Change the rules, and take Redis away now and then."""
    while time.monotonic() < until:
        rules.write_text(RULES.format(count=generator.choice((30, 50))))  # noqa: ASYNC240 - a short local file
        await asyncio.sleep(20)
        if generator.random() < 0.3:
            server.stop()
            await asyncio.sleep(generator.uniform(0.1, 3))
            server.start()


async def samples(client: httpx.AsyncClient, server: Redis | None, until: float) -> list[dict[str, float]]:
    """Ask the served process and Redis each 5 seconds."""
    found = []
    while time.monotonic() < until:
        await asyncio.sleep(5)
        with contextlib.suppress(httpx.HTTPError):
            told = (await client.get("/process", headers={"X-Forwarded-For": "198.51.100.1"})).json()
            keys = 0 if server is None else server.keys
            if keys is not None and "memory" in told:
                found.append({**told, "keys": keys, "at": time.monotonic()})
    return found


@contextlib.contextmanager
def served(folder: Path, **settings: str) -> Iterator[int]:
    """Serve the application. Yields the port."""
    port = free_port()
    environment = {**os.environ, **settings}
    command = [sys.executable, "-m", "uvicorn", "benchmarks.soak_app:app", "--port", str(port), "--log-level", "error"]
    with (folder / f"log-{port}").open("wb") as log:
        process = subprocess.Popen([*command, "--forwarded-allow-ips", "127.0.0.1"], env=environment, stdout=log, stderr=log)
        try:
            yield port
        finally:
            process.terminate()
            process.wait(30)


class Found(NamedTuple):
    """What happened to an application; samples of the second half."""

    samples: list[dict[str, float]]
    answered: int
    children: int
    hung: int


async def traffic(port: int, server: Redis | None, until: float, generator: random.Random) -> Found:
    """Use an application in all ways at once."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        found, answered, (children, hung), _ = await asyncio.gather(
            samples(client, server, until),
            requests(client, until, generator),
            forks(client, until),
            asyncio.gather(
                leaves(client, until, generator),
                leaves(client, until, generator),
                chats(f"ws://127.0.0.1:{port}/chat", until, generator),
            ),
        )
    return Found(found[len(found) // 2 :], answered, children, hung)


async def soak(seconds: float, seed: int) -> int:
    """Run everything and report. Return 1 for growth."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="limitgate-soak-") as name:
        folder = Path(name)
        rules = folder / "rules.yaml"
        rules.write_text(RULES.format(count=40))
        server = Redis(folder)
        try:
            with (
                served(folder, SOAK_RULES=str(rules), SOAK_STORE=f"unix://{server.socket}") as port,
                served(folder, SOAK_CONTROL="1") as control_port,
            ):
                await asyncio.sleep(3)
                until = time.monotonic() + seconds
                found, control, _ = await asyncio.gather(
                    traffic(port, server, until, generator),
                    traffic(control_port, None, until, generator),
                    faults(server, rules, until, generator),
                )
        finally:
            server.stop()
    count = min(len(found.samples), len(control.samples))
    print(f"{found.answered:,} requests, {found.children:,} forks, {count} samples in {seconds:.0f} s, seed {seed}")
    if hung := found.hung + control.hung:
        sys.exit(f"soak: {hung} forked children failed or hung, expected none")
    if count < 2 * BLOCKS:
        sys.exit(f"soak: only {count} samples, expected at least {2 * BLOCKS}: run it for longer")
    kinds = ("memory", "descriptors", "tasks", "threads", "objects", "keys")
    return int(sum(grows(found.samples, control.samples, kind) for kind in kinds) > 0)


def grows(found: list[dict[str, float]], control: list[dict[str, float]], kind: str) -> bool:
    """Print the slopes of one kind. True if the slope with LimitGate is above 0, and above the slope without LimitGate."""
    (growth, half), (other, other_half) = (
        slope([each["at"] for each in samples], [each[kind] for each in samples]) for samples in (found, control)
    )
    level = fmean(each[kind] for each in found)
    more, half_of_more = growth - other, math.hypot(half, other_half)
    is_growing = growth > half and more > half_of_more and more * 86400 > 0.01 * level
    spelled = [f"{3600 * each:+,.1f} ± {3600 * width:,.1f}" for each, width in ((growth, half), (other, other_half))]
    print(f"{kind}: {level:,.0f}, {spelled[0]} per hour, without LimitGate {spelled[1]}: {'GROWS' if is_growing else 'flat'}")
    return is_growing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    sys.exit(asyncio.run(soak(given.seconds, given.seed)))
