"""How much memory a client's buckets take."""

from __future__ import annotations

import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import LIMITGATE, PEERS, README, Quotas
from benchmarks.drive import CLIENTS, CROWD, FEW_CLIENTS, Crowds, trouble
from benchmarks.redis_side import bytes_in_use
from limitgate import Limit, Limiter, MemoryStore
from tests.support.redis_server import RedisServer

BUCKETS = 20_000
REQUESTS = 4
"""Requests that each client has made when its bytes are counted."""

_AT_ONCE = 32
_STATM = Path("/proc/self/statm")
_QUOTAS: Quotas = {"minute": 5_000, "hour": 8_000, "day": 10_000}
"""No window of a second: its keys would begin to go before all clients have been."""
_LASTING = (Limit("100/hour"), Limit("1000/day"), Limit("5000 per 7 days"))
"""Three windows of which something is owed still when they are looked at."""


class MemoryUse(NamedTuple):
    """Bytes for each client of three windows."""

    one_key: float
    """LimitGate on Redis, where one key holds all three."""
    three_keys: float
    """The same windows as three rules, a key each."""
    memory_store: float
    clients: Mapping[str, float]
    """Each contender on Redis, after `REQUESTS` requests of each client."""
    process: Mapping[str, float]
    """By how much a process grows that counts by README's rule in memory; empty where the system does not tell."""


def memory_use(server: RedisServer) -> MemoryUse:
    """Measure all of it; empties ``server``."""
    return MemoryUse(
        _in_redis(server, [_LASTING]),
        _in_redis(server, [(limit,) for limit in _LASTING]),
        _in_memory_store(),
        {contender.name: _client(server, contender.build(server.url, _QUOTAS)) for contender in (LIMITGATE, *PEERS)},
        {contender.name: _process(contender.name) for contender in (LIMITGATE, PEERS[0]) if _STATM.exists()},
    )


def _in_redis(server: RedisServer, rules: Sequence[Sequence[Limit]]) -> float:
    _empty(server)
    with Limiter(server.url) as limiter:
        for number in range(FEW_CLIENTS):
            for place, limits in enumerate(rules):
                limiter.hit(f"{number}:{place}", *limits)
    return bytes_in_use(server) / FEW_CLIENTS


def _client(server: RedisServer, app: object) -> float:
    _empty(server)
    with Crowds() as crowd_of:
        error = trouble(crowd_of.asgi(app, clients=FEW_CLIENTS)(iter(range(REQUESTS * FEW_CLIENTS)), 1))
    if error:
        raise RuntimeError(error)
    return bytes_in_use(server) / FEW_CLIENTS


def _empty(server: RedisServer) -> None:
    with server.client() as client:
        client.flushdb()


def _in_memory_store() -> float:
    store = MemoryStore()
    with Limiter(store) as limiter, _traced() as taken:
        before = taken()
        for number in range(BUCKETS):
            limiter.hit(f"client:{number}", *_LASTING)
        after = taken()
    if len(store) != BUCKETS:
        raise RuntimeError(f"{len(store)} buckets, expected {BUCKETS}")
    return (after - before) / BUCKETS


def _process(name: str) -> float:
    """By how much a process of its own grows for each of 100,000 clients."""
    command = [sys.executable, "-m", "benchmarks.memory_use", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print by how many bytes this process grows for each client of the contender that is named."""
    contender = next(one for one in (LIMITGATE, *PEERS) if one.name == sys.argv[1])
    with Crowds() as crowd_of:
        crowd = crowd_of.asgi(contender.build("", README), clients=CROWD)
        crowd(iter(range(CLIENTS)), _AT_ONCE)
        before = _resident()
        error = trouble(crowd(iter(range(CLIENTS, CROWD)), _AT_ONCE))
        print((_resident() - before) / (CROWD - CLIENTS))
    if error:
        raise RuntimeError(error)


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


if __name__ == "__main__":
    main()
