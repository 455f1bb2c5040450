"""Where faults are tried: an application in a process of its own, a Redis or several, and what lies between.

A stage serves one experiment after the other, each with keys of its own, so that what one leaves behind shows in the next.
Several servers take seconds to get to know each other, so the applications behind both doors have the same ones in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple, Self
from uuid import uuid4

import httpx
import redis

from tests.faults.app import EXACTLY, SURELY
from tests.faults.link import Link
from tests.faults.places import spread
from tests.faults.traffic import Client, Traffic, is_degraded
from tests.support.doors import MOMENT, PATIENCE, server_process, uvicorn_process
from tests.support.guard import Guard
from tests.support.redis_cluster import RedisCluster, Sentinels, eventually
from tests.support.redis_server import RedisServer, free_port

Door = Literal["asgi", "wsgi"]
DOORS: tuple[Door, ...] = ("asgi", "wsgi")
Way = Literal["direct", "linked", "clocked", "absent", "sentinel", "cluster", "replicated"]
Several = Sentinels | RedisCluster
SEVERAL: Mapping[Way, Callable[[], Several]] = {
    "sentinel": Sentinels,
    "cluster": lambda: RedisCluster(cluster_require_full_coverage="no"),
    "replicated": lambda: RedisCluster(replicas=1, cluster_require_full_coverage="no"),
}
"""The ways of several servers, and how they are started."""
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
        """What is held now that was not before. Of threads a call and a probe may have left a connection each in the pool."""
        most = before._replace(connections=max(2, before.connections), rss=before.rss + GROWTH)
        return [f"{name} {now}, before {then}" for name, now, then in zip(self._fields, self, most) if now > then]


class Stage:
    """An application behind LimitGate, and what is behind that: ``store`` is the URL by which it knows it."""

    url: str
    before: State
    """What it holds when it is ready."""
    store: str
    server: RedisServer
    """The Redis, where there is one."""
    several: Several
    """The servers, where there are several."""
    link: Link
    clock: Clock
    keys: Mapping[str, str] | None = None
    """Those of the streams of an experiment, where it matters which they are."""

    def __init__(self, way: Way, folder: Path) -> None:
        self.way = way
        self._log = folder / "uvicorn.log"

    def get_ready(self) -> None:
        """Wait until several servers have got over what was before, and find new keys."""
        if self.way in SEVERAL:
            eventually(self.several.is_whole, "all servers to be well")
        if self.way in ("cluster", "replicated"):
            self.keys = spread()

    @property
    def servers(self) -> Sequence[RedisServer]:
        """All servers with which the application keeps connections."""
        if self.way not in SEVERAL:
            return [self.server]
        return self.several.servers if isinstance(self.several, Sentinels) else self.several.nodes

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
        return sum(map(_connections_to, self.servers))


def _connections_to(server: RedisServer) -> int:
    """Connections of others than us, Sentinels, and nodes that follow or have moved keys."""
    with contextlib.suppress(redis.RedisError), server.client() as client:
        clients = [found for found in client.client_list() if found["flags"] == "N" and "redis.sock" not in found["addr"]]
        return sum(not found["name"].startswith("sentinel") and "restore" not in found["cmd"] for found in clients)
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
        self._several: dict[Way, Several] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as closing:
            for several in self._several.values():
                closing.callback(several.stop)
            for _, opened in self._open.values():
                closing.push(opened)

    @contextlib.contextmanager
    def on(self, door: Door, way: Way) -> Iterator[Stage]:
        """A stage for one experiment."""
        if (door, way) not in self._open:
            self._start(door, way)
        try:
            stage = self._open[door, way][0]
            stage.get_ready()
            yield stage
        except BaseException:
            self._open.pop((door, way))[1].close()
            if way in SEVERAL:
                self._several.pop(way).stop()
            raise

    def _start(self, door: Door, way: Way) -> None:
        opened = ExitStack()
        if way in SEVERAL:
            for other in DOORS:
                self._open.pop((other, way), (None, ExitStack()))[1].close()
            if way not in self._several:
                self._several[way] = SEVERAL[way]()
        self._open[door, way] = opened.enter_context(_stage(door, way, self._several.get(way))), opened


@contextlib.contextmanager
def _stage(door: Door, way: Way, several: Several | None) -> Iterator[Stage]:
    """A stage, warm: everything that is made once has been made."""
    with ExitStack() as opened:
        folder = opened.enter_context(Guard("limitgate-faults-")).folder
        stage = Stage(way, folder)
        if several is None:
            _with_one_server(stage, folder, opened)
        else:
            stage.several, stage.store = several, several.url
        stage.get_ready()
        stage.url = opened.enter_context(served(door, folder, stage.store))
        with Traffic(stage.url, stage.keys):
            time.sleep(10 * MOMENT)
        time.sleep(10 * MOMENT)
        before = stage.state()
        if door == "wsgi":
            # Threads may keep two connections to each server, one of a call and one of a probe.
            before = before._replace(connections=max(2 * len(stage.servers), before.connections))
        stage.before = before
        yield stage


def _with_one_server(stage: Stage, folder: Path, opened: ExitStack) -> None:
    """Start the Redis of a stage, with the clock or the link that its way is named after."""
    environment, port = {}, free_port()
    if stage.way == "clocked":
        stage.clock = Clock(folder)
        environment = stage.clock.environment
    stage.server = RedisServer(start=stage.way != "absent", environment=environment, port=str(port))
    opened.callback(lambda: stage.server.stop())  # noqa: PLW0108 - by then it may be another one
    if stage.way == "linked":
        stage.link = opened.enter_context(Link(port))
        port = stage.link.port
    stage.store = f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def served(door: Door, folder: Path, store: str) -> Iterator[str]:
    """One of the applications in a process of its own; gives its URL, and looks through the log when it has ended."""
    environment = {
        "LIMITGATE_STORE": store,
        "LIMITGATE_NEW_BUCKETS": "0",  # it floods Redis with new keys, all of one client
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
