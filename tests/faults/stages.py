"""Where faults are tried: an application in a process of its own, a Redis, and what lies between the two.

A stage serves one experiment after the other, each with keys of its own, so that what one leaves behind shows in the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple, Self
from uuid import uuid4

import httpx
import redis

from tests.doors import MOMENT, PATIENCE, server_process, uvicorn_process
from tests.faults.app import EXACTLY, SURELY
from tests.faults.link import Link
from tests.faults.traffic import Client, Traffic, is_degraded
from tests.redis_server import RedisServer, free_port

Door = Literal["asgi", "wsgi"]
DOORS: tuple[Door, ...] = ("asgi", "wsgi")
Way = Literal["direct", "linked", "clocked", "absent"]
GROWTH = 16 * 2**20
"""Bytes that a process may grow by: what a flood of new keys takes while it limits by itself, and what Python keeps."""
SETTLES_WITHIN = 2.0
"""Seconds until everything is let go that was needed for a while."""
TOO_MANY, CLIENTS = 10, 4
"""Requests beyond what ``/exact`` lets pass, and how many ask at a time."""


class State(NamedTuple):
    """What an application's process holds while nobody asks it anything."""

    tasks: int
    threads: int
    fds: int
    """Open files, without connections to Redis."""
    connections: int
    """To Redis, as Redis counts them."""
    rss: int
    """Memory, in bytes."""

    def beyond(self, before: State) -> list[str]:
        """What is held now that was not before."""
        most = before._replace(connections=max(1, before.connections), rss=before.rss + GROWTH)
        return [f"{name} {now}, before {then}" for name, now, then in zip(self._fields, self, most) if now > then]


class Stage:
    """An application behind LimitGate, its Redis, and the clock or the link where there is one."""

    url: str
    before: State
    """What it holds when it is ready."""

    def __init__(self, server: RedisServer, folder: Path, link: Link | None, clock: Clock | None) -> None:
        self.server = server
        self.link = link
        self.clock = clock
        self._log = folder / "uvicorn.log"

    def state(self) -> State:
        """What the application's process holds now."""
        found = httpx.get(f"{self.url}/state", timeout=PATIENCE).json()
        connections = self._connections()
        return State(found["tasks"], found["threads"], found["fds"] - connections, connections, found["rss"])

    def settled(self) -> State:
        """The state as soon as it holds no more than at first, or as it is when it still does after some seconds."""
        deadline = time.monotonic() + SETTLES_WITHIN
        while True:
            state = self.state()
            if not state.beyond(self.before) or time.monotonic() > deadline:
                return state
            time.sleep(MOMENT)

    def exact(self) -> Counter[tuple[int, bool]]:
        """How some requests with a fresh key end at ``/exact``: status, and whether the store had failed."""
        return asyncio.run(_crowd(self.url))

    def complaints(self) -> int:
        """Lines in the log so far that say that the store failed."""
        return len(re.findall("store failed|does not answer", self._log.read_text()))

    def _connections(self) -> int:
        """Connections of the application, with which we speak from the same machine but over another socket."""
        with contextlib.suppress(redis.RedisError), self.server.client() as client:
            return sum("redis.sock" not in found["addr"] and found["flags"] == "N" for found in client.client_list())
        return 0


class Clock:
    """The wall clock of a server that runs by whole seconds fast or slow."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self.step(0)
        shim = folder / "clock_shim.so"
        source = Path(__file__).parent / "clock_shim.c"
        subprocess.run([compiler(), "-shared", "-fPIC", "-O1", "-o", shim, source], check=True)
        self.environment = {"LD_PRELOAD": str(shim), "LIMITGATE_TEST_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Run so many seconds fast from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


def compiler() -> str | None:
    """The C compiler that makes clocks, None where there is none."""
    return shutil.which("cc") or shutil.which("gcc")


class Stages:
    """``with Stages() as stages``: opens stages when first needed and keeps them, but one on which something failed."""

    def __init__(self) -> None:
        self._open: dict[tuple[Door, Way], tuple[Stage, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as closing:
            for _, opened in self._open.values():
                closing.push(opened)

    @contextlib.contextmanager
    def on(self, door: Door, way: Way) -> Iterator[Stage]:
        """A stage for one experiment."""
        if (door, way) not in self._open:
            opened = ExitStack()
            self._open[door, way] = opened.enter_context(_stage(door, way)), opened
        try:
            yield self._open[door, way][0]
        except BaseException:
            self._open.pop((door, way))[1].close()
            raise


@contextlib.contextmanager
def _stage(door: Door, way: Way) -> Iterator[Stage]:
    """A stage, warm: everything that is made once has been made."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="limitgate-faults-")))
        clock = Clock(folder) if way == "clocked" else None
        port = free_port()
        server = RedisServer(start=way != "absent", environment=clock and clock.environment, port=str(port))
        link = opened.enter_context(Link(port)) if way == "linked" else None
        stage = Stage(server, folder, link, clock)
        opened.callback(lambda: stage.server.stop())  # noqa: PLW0108 - by then it may be another one
        stage.url = opened.enter_context(served(door, folder, f"redis://127.0.0.1:{link.port if link else port}/0"))
        with Traffic(stage.url):
            time.sleep(10 * MOMENT)
        time.sleep(10 * MOMENT)
        stage.before = stage.state()
        yield stage


@contextlib.contextmanager
def served(door: Door, folder: Path, store: str) -> Iterator[str]:
    """One of the applications in a process of its own; gives its URL, and looks through the log when it has ended."""
    environment = {
        "LIMITGATE_STORE": store,
        "LIMITGATE_NEW_BUCKETS": "0",  # it floods Redis with new keys, all of one client
        "PYTHONWARNINGS": "always::ResourceWarning",
    }
    log = folder / "uvicorn.log"
    if door == "asgi":
        options = "--no-access-log", "--timeout-keep-alive", "60"
        serving = uvicorn_process("tests.faults.app:app", folder, *options, **environment)
    else:
        serving = server_process([sys.executable, "-m", "tests.faults.app"], log, bool, environment)
    with serving as url:
        yield url
    assert "ResourceWarning" not in log.read_text(), log.read_text()


async def _crowd(url: str) -> Counter[tuple[int, bool]]:
    """What becomes of more requests than pass, from a few clients at a time."""
    who, answers = uuid4().hex, Counter[tuple[int, bool]]()

    async def ask(times: int) -> None:
        with contextlib.closing(Client(url)) as client:
            for _ in range(times):
                status, body = await client.get("/exact", who)
                answers[status, is_degraded(status, body)] += 1

    async with asyncio.timeout(2 * SURELY), asyncio.TaskGroup() as asking:
        for _ in range(CLIENTS):
            asking.create_task(ask((EXACTLY + TOO_MANY) // CLIENTS))
    return answers
