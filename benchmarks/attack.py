"""What happens when it gets rough: one client far over its limit, and a thousand requests at the same moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.contenders import EASY, LIMITGATE, PEERS, Contender, Quotas, limitgate_with_defaults
from benchmarks.drive import Crowd, Crowds, Tally, trouble
from benchmarks.redis_side import overheard
from tests.support.redis_server import RedisServer

ATTACKED: Quotas = {"second": 5, "minute": 100}
AT_ONCE = 1_000
CONCURRENCY = 32


class Attack(NamedTuple):
    """What a refused request cost."""

    refused: int = 0
    admitted: int = 0
    """As many as the limits allow, if it limits at all."""
    cpu: float = 0.0
    """µs of CPU of the process that handles requests; median over the rounds."""
    commands: float = 0.0
    """Redis commands for each refused request; those for the few admitted ones count too."""
    error: str = ""
    """The commonest error's name, if there was one."""


class Rush(NamedTuple):
    """How a thousand requests at once were answered."""

    decided: int = 0
    """Fewest in any of the rounds."""
    milliseconds: float = 0.0
    """Until the last one was answered; median over the rounds."""
    error: str = ""
    """The commonest error's name, if there was one."""


def attacks(server: RedisServer, *, rounds: int, requests: int, seconds: float) -> Mapping[str, Attack]:
    """One client sends ``requests`` a round, for ``seconds`` a round at most, under 5 per second and 100 per minute."""
    with Crowds() as crowd_of:
        crowds = {
            contender.name: crowd_of.asgi(contender.build(server.url, ATTACKED), clients=1) for contender in (LIMITGATE, *PEERS)
        }
        for crowd in crowds.values():
            crowd(iter(range(2 * CONCURRENCY)), CONCURRENCY)
        tallies: dict[str, Tally] = {name: Tally() for name in crowds}
        costs: dict[str, list[float]] = {name: [] for name in crowds}
        for _ in range(rounds):
            for name, crowd in crowds.items():
                began = time.process_time()
                tally = crowd(_until(requests, seconds), CONCURRENCY)
                costs[name].append((time.process_time() - began) * 1e6 / max(tally[429], 1))
                tallies[name] += tally
        return {
            name: Attack(
                tallies[name][429],
                tallies[name][200],
                statistics.median(costs[name]),
                _commands(server, crowd, requests, seconds),
                trouble(tallies[name], (200, 429)),
            )
            for name, crowd in crowds.items()
        }


def _commands(server: RedisServer, crowd: Crowd, requests: int, seconds: float) -> float:
    tallies: list[Tally] = []
    heard = overheard(server, lambda: tallies.append(crowd(_until(requests, seconds), CONCURRENCY)))
    return len(heard) / max(tallies[0][429], 1)


def _until(requests: int, seconds: float) -> Iterator[int]:
    deadline = time.monotonic() + seconds
    for number in range(requests):
        if time.monotonic() > deadline:
            return
        yield number


def rushes(server: RedisServer, rounds: int) -> Mapping[str, Rush]:
    """A thousand requests at the same moment; LimitGate with the deadline that it has by default."""
    defaults = Contender(LIMITGATE.name, limitgate_with_defaults)
    with Crowds() as crowd_of:
        return {
            contender.name: _rush(crowd_of.asgi(contender.build(server.url, EASY)), rounds) for contender in (defaults, *PEERS)
        }


def _rush(crowd: Crowd, rounds: int) -> Rush:
    crowd(iter(range(1)), 1)
    total: Tally = Tally()
    decided, took = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        tally = crowd(iter(range(AT_ONCE)), AT_ONCE)
        took.append((time.perf_counter() - began) * 1e3)
        decided.append(tally[200] + tally[429])
        total += tally
    return Rush(min(decided), statistics.median(took), trouble(total, (200, 429)))
