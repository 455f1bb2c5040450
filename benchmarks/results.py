"""All that was measured, and whether the marks set beforehand were reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.attack import AT_ONCE, Attack, Rush
from benchmarks.contenders import LIMITGATE, PEERS
from benchmarks.cpu import CALLER, NO_OP, in_memory, on_redis
from benchmarks.end_to_end import Throughput
from benchmarks.figures import Bar, Outcomes, best, over, ratio, server
from benchmarks.growth import Growth
from benchmarks.memory_use import MemoryUse
from benchmarks.setting import Setting

ASGI = (LIMITGATE, *PEERS)
Naming = Callable[[str], str]
"""`on_redis` or `in_memory`."""
CROWDED = 32
"""The concurrency that most marks are about."""


@dataclass(frozen=True)
class Results:
    """What one run measured; what it left out is empty."""

    setting: Setting
    asgi: Mapping[int, Outcomes] = field(default_factory=dict)
    """By concurrency."""
    wsgi: Mapping[int, Outcomes] = field(default_factory=dict)
    frameworks: Mapping[str, Mapping[int, Outcomes]] = field(default_factory=dict)
    """By framework, then by concurrency."""
    attacks: Mapping[str, Attack] = field(default_factory=dict)
    rushes: Mapping[str, Rush] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=lambda: Throughput({}, "left out"))
    growth: Sequence[Growth] = ()
    memory: MemoryUse | None = None


def bars(results: Results) -> list[Bar]:
    """The marks that were set before the engine was built for speed, and what was measured."""
    crowded, alone = results.asgi.get(CROWDED, {}), results.asgi.get(1, {})
    attack, rush = results.attacks.get(LIMITGATE.name), results.rushes.get(LIMITGATE.name)
    served = results.throughput.served.get(on_redis(LIMITGATE.name))
    ours = over(alone, on_redis(LIMITGATE.name), LIMITGATE.bare)
    throttled = server(crowded, on_redis("throttled-py"))
    return [
        _against_best("CPU over the bare app on Redis, 32 at once, of the best peer's", crowded, on_redis, 1 / 5, 1 / 10),
        Bar("the same, 1 at once, of one bare redis-py `evalsha`", 1.2, 0.7, ratio(ours, over(alone, NO_OP, CALLER))),
        _against_best("CPU over the bare app in memory, 32 at once, of the best peer's", crowded, in_memory, 1 / 3, 1 / 5),
        Bar(
            "Redis' CPU, 32 at once, of that for throttled-py's three calls",
            1 / 4,
            1 / 6,
            ratio(server(crowded, on_redis(LIMITGATE.name)), throttled),
        ),
        Bar("Redis commands per refused request under attack", 0.05, 0.01, attack.commands if attack else None),
        Bar(
            f"of {AT_ONCE:,} requests at once answered by a decision",
            AT_ONCE,
            AT_ONCE,
            rush.decided if rush else None,
            higher_is_better=True,
        ),
        Bar(
            "requests/s through uvicorn on Redis, 32 connections, of the bare app's",
            0.6,
            0.75,
            served.of_bare if served else None,
            results.throughput.missing,
            higher_is_better=True,
        ),
    ]


def peers_over(outcomes: Outcomes, store: Naming) -> dict[str, Sequence[float] | None]:
    """What each peer cost over its bare application, round by round; None for one that failed."""
    return {peer.name: over(outcomes, store(peer.name), peer.bare) for peer in PEERS}


def _against_best(what: str, outcomes: Outcomes, store: Naming, must: float, aim: float) -> Bar:
    peers = peers_over(outcomes, store)
    winner = best(peers)
    ours = over(outcomes, store(LIMITGATE.name), LIMITGATE.bare)
    return Bar(what, must, aim, ratio(ours, peers[winner]) if winner else None, winner or "")
