"""``python -m tests.faults.overload [words of names ...]`` prints what became of each situation, as Markdown tables.

Words have to be in a situation's name, its server, door, policy and store, all of them. ``--seconds 3`` makes attacks shorter
than the eight seconds of the issue; ``--list`` prints names alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from typing import NamedTuple

from tests.faults.overload import attack, outcome, rushes, waits
from tests.faults.overload.attack import THREADS, UVICORN, Setting
from tests.faults.overload.outcome import Outcome
from tests.faults.overload.servers import SERVERS, UNDER_THREADS
from tests.faults.overload.waits import Wait
from tests.support.redis_cluster import RedisCluster, Sentinels
from tests.support.redis_server import RedisServer, free_port

GTHREAD, ASYNCIO_H11, ASYNCIO = "gunicorn gthread", "uvicorn asyncio h11", "uvicorn asyncio httptools"
POLICIES = ("open", "closed", "local")
DOORS = [
    *[(server, "gate") for server in SERVERS],
    (UVICORN, "dependency"),
    (ASYNCIO_H11, "dependency"),
    (UVICORN, "throttle"),
    (GTHREAD, "throttle"),
    (GTHREAD, "decorator"),
    (THREADS, "decorator"),
]


ATTACKS: list[tuple[Callable[..., Outcome], Setting, *tuple[int, ...]]] = [
    *[(attack.long_paths, Setting(server, door)) for server, door in DOORS],
    *[(attack.long_paths, Setting(server, policy=policy)) for server in (UVICORN, GTHREAD) for policy in ("closed", "local")],
    *[(attack.long_paths, Setting(server, store=store)) for server in (UVICORN, GTHREAD) for store in ("sentinel", "cluster")],
    *[(attack.long_paths_later, Setting(server)) for server in list(SERVERS)[:4]],
    *[(attack.guesses_alone, Setting(server)) for server in SERVERS],
    *[(attack.blocked, Setting(server, policy=policy)) for server in (UVICORN, ASYNCIO) for policy in POLICIES],
    *[(attack.slow_clients, Setting(server)) for server in (UVICORN, ASYNCIO)],
    *[(attack.starved, Setting(server), busy) for server in UNDER_THREADS for busy in (16, 32)],
    *[(attack.starved, Setting(server, policy="closed"), 32) for server in UNDER_THREADS],
    *[(attack.no_threads, Setting(server)) for server in UNDER_THREADS],
    (attack.no_threads, Setting(THREADS, "decorator")),
    *[(attack.no_threads_for_names, Setting(server)) for server in (UVICORN, ASYNCIO)],
    *[(attack.no_files, Setting(policy=policy)) for policy in POLICIES],
]
"""What is done to applications that are served."""


class Behind:
    """The servers of Redis, each started when it is needed first."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened

    @cached_property
    def single(self) -> RedisServer:
        server = RedisServer(port=str(free_port()))
        self._opened.callback(server.stop)
        return server

    @cached_property
    def sentinels(self) -> Sentinels:
        found = Sentinels()
        self._opened.callback(found.stop)
        return found

    @cached_property
    def cluster(self) -> RedisCluster:
        found = RedisCluster()
        self._opened.callback(found.stop)
        return found

    def url(self, store: str) -> str:
        """Where the store is; what it has counted so far is forgotten."""
        if store == "sentinel":
            _forget(self.sentinels.master)
            return self.sentinels.url
        if store == "cluster":
            for node in self.cluster.masters:
                _forget(node)
            return self.cluster.url
        _forget(self.single)
        return f"redis://127.0.0.1:{self.single.port}/0"


def _forget(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


class Case(NamedTuple):
    """Something that can be tried."""

    name: str
    run: Callable[[], Outcome | Wait]


def _attacks(behind: Behind, seconds: float) -> Iterator[Case]:
    """What is done to applications that are served."""
    for function, setting, *more in ATTACKS:
        name = " ".join([function.__name__, *map(str, more), *setting[:4]])
        yield Case(name, partial(_attack, behind, function, setting._replace(seconds=seconds), *more))
    for policy in POLICIES:
        setting = Setting(policy=policy, seconds=max(4.0, seconds))
        yield Case(f"frozen_while_stalling {policy}", partial(_frozen_while_stalling, behind, setting))
    for server in (UVICORN, ASYNCIO):
        setting = Setting(server, seconds=30.0 if seconds >= attack.SECONDS else seconds)
        yield Case(f"stalls {server}", partial(_attack, behind, attack.stalls, setting))


def _attack(behind: Behind, function: Callable[..., Outcome], setting: Setting, *more: int) -> Outcome:
    return function(setting, behind.url(setting.store), *more)


def _frozen_while_stalling(behind: Behind, setting: Setting) -> Outcome:
    return attack.frozen_while_stalling(setting, behind.url("single"), behind.single)


def _rushes(behind: Behind) -> Iterator[Case]:
    """Crowds in one turn of the loop."""
    for size in (1_000, 5_000, 15_000):
        for warm in (True, False):
            for store in ("single", "cluster"):
                yield Case(
                    f"one_turn {size} {'warm' if warm else 'cold'} {store} open",
                    lambda size=size, warm=warm, store=store: asyncio.run(
                        rushes.one_turn(behind.url(store), size, warm=warm, store=store)
                    ),
                )
    for policy in ("closed", "local"):
        yield Case(
            f"one_turn 15000 warm single {policy}",
            lambda policy=policy: asyncio.run(rushes.one_turn(behind.url("single"), 15_000, warm=True, policy=policy)),
        )
    for size in (2_000, 3_000, 4_000):
        yield Case(f"on_two_nodes {size} cluster", lambda size=size: asyncio.run(_on_two_nodes(behind, size)))


async def _on_two_nodes(behind: Behind, size: int) -> Outcome:
    behind.url("cluster")
    return await rushes.on_two_nodes(behind.cluster, size)


def _waits(behind: Behind) -> Iterator[Case]:
    """How long somebody waits who is not to wait."""
    ways = [(warm, at_once) for warm in (True, False) for at_once in (1, 8)]
    for name in waits.UNDER_THREADS:
        yield Case(f"late {name}", lambda name=name: waits.late(behind.single, name))
        for warm, at_once in ways:
            run = partial(_frozen, behind, name, warm=warm, at_once=at_once)
            yield Case(f"frozen {name} {'warm' if warm else 'cold'} {at_once}", run)
    for name in waits.ON_ASYNCIO:
        yield Case(f"late {name}", lambda name=name: asyncio.run(waits.alate(behind.single, name)))
        for warm, at_once in ways:
            run = partial(_afrozen, behind, name, warm=warm, at_once=at_once)
            yield Case(f"frozen {name} {'warm' if warm else 'cold'} {at_once}", run)
    yield Case("slow_names 1", lambda: asyncio.run(waits.slow_names(5.0, 0.0, 1)))
    yield Case("slow_names all", lambda: asyncio.run(waits.slow_names(12.0, 8.0)))


def _frozen(behind: Behind, name: str, *, warm: bool, at_once: int) -> Wait:
    return waits.frozen(behind.url("single"), behind.single, name, warm=warm, at_once=at_once)


def _afrozen(behind: Behind, name: str, *, warm: bool, at_once: int) -> Wait:
    return asyncio.run(waits.afrozen(behind.url("single"), behind.single, name, warm=warm, at_once=at_once))


def main() -> None:
    """Print a table of attacks and crowds, and one of waits."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.overload", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seconds", type=float, default=attack.SECONDS)
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    with ExitStack() as opened:
        behind = Behind(opened)
        for head, cases in (
            (outcome.HEAD, [*_attacks(behind, chosen.seconds), *_rushes(behind)]),
            (waits.HEAD, list(_waits(behind))),
        ):
            found = [case for case in cases if all(word in case.name for word in chosen.words)]
            if found:
                sys.stdout.write("\n".join(case.name for case in found) + "\n" if chosen.list else head)
            for case in found if not chosen.list else ():
                sys.stdout.write(f"{case.run().row()}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
