"""All that was measured, and whether the marks set beforehand were reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks import instructions
from benchmarks.attack import Attack, Rush
from benchmarks.contenders import LIMITGATE, PEERS, WSGI
from benchmarks.cpu import Naming, in_memory, on_redis
from benchmarks.end_to_end import Throughput
from benchmarks.example import BARE_EXAMPLE, EXAMPLE
from benchmarks.figures import Bar, Outcomes, over, ratio, server
from benchmarks.growth import Growth
from benchmarks.memory_use import MemoryUse
from benchmarks.options import PLAIN
from benchmarks.setting import Setting

ASGI = (LIMITGATE, *PEERS)
CROWDED, THREADS = 32, 8
"""The concurrency that most marks are about, and that of threads."""
PEER = PEERS[0].name
"""The peer that most marks compare with, the cheapest of them."""


@dataclass(frozen=True)
class Results:
    """What one run measured; what it left out is empty."""

    setting: Setting
    gate: Mapping[int, Outcomes] = field(default_factory=dict)
    """By concurrency."""
    crowded: Mapping[int, Outcomes] = field(default_factory=dict)
    example: Mapping[int, Outcomes] = field(default_factory=dict)
    options: Outcomes = field(default_factory=dict)
    easy: Outcomes = field(default_factory=dict)
    wsgi: Mapping[int, Outcomes] = field(default_factory=dict)
    frameworks: Mapping[str, Mapping[int, Outcomes]] = field(default_factory=dict)
    """By framework, then by concurrency."""
    attacks: Mapping[str, Attack] = field(default_factory=dict)
    rushes: Mapping[str, Rush] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=lambda: Throughput({}, "left out"))
    growth: Sequence[Growth] = ()
    memory: MemoryUse | None = None


def bars(results: Results) -> list[Bar]:
    """The marks that were set before requests were made cheap, and what was measured."""
    attack = results.attacks.get(LIMITGATE.name)
    served = {name: results.throughput.served.get(on_redis(name)) for name in (LIMITGATE.name, PEER)}
    ours, theirs = served[LIMITGATE.name], served[PEER]
    counts = instructions.kept().get(instructions.python())
    crowded = results.gate.get(CROWDED, {})
    return [
        _against_peer("CPU in memory, 32 at once, relative to asgi-ratelimit", crowded, in_memory, 1.6, 1.0),
        _against_peer("CPU on Redis, 32 at once, relative to asgi-ratelimit", crowded, on_redis, 0.1, 0.07),
        _against_peer("the same, 8 at once", results.gate.get(8, {}), on_redis, 0.14, 0.09),
        _against_peer("the same, 1 at once", results.gate.get(1, {}), on_redis, 0.25, 0.17),
        Bar(
            "CPU of Redis, 32 at once, relative to asgi-ratelimit",
            0.27,
            0.2,
            ratio(server(crowded, on_redis(LIMITGATE.name)), server(crowded, on_redis(PEER))),
        ),
        _in_flask("CPU in Flask, in memory, 8 threads, relative to Flask-Limiter", results, in_memory, 0.2, 0.12),
        _in_flask("CPU in Flask, on Redis, 8 threads, relative to Flask-Limiter", results, on_redis, 0.1, 0.05),
        Bar(
            "requests/s through uvicorn on Redis, 32 connections, relative to the bare application",
            0.6,
            0.67,
            ours.of_bare if ours else None,
            results.throughput.missing,
            higher_is_better=True,
        ),
        Bar(
            "the server's CPU in that run, relative to asgi-ratelimit",
            0.14,
            0.09,
            ratio(ours and ours.added, theirs and theirs.added),
        ),
        _example(results),
        _many_clients(results),
        *[
            Bar(f"{one.what}: {one.much} compared with {one.little}", 1.2, 1.05, ratio(*reversed(one.costs)))
            for one in results.growth[:2]
        ],
        Bar(
            "instructions on Redis, 32 at once (`make bench-count`)",
            75_000,
            50_000,
            counts.counts.get("ASGI, Redis, 32 at once") if counts else None,
        ),
        Bar("Redis commands per refused request under attack", 0.01, 0.01, attack.commands if attack else None),
        Bar(
            "bytes of memory per client, 100,000 clients",
            400,
            220,
            results.memory.process.get(LIMITGATE.name) if results.memory else None,
        ),
    ]


def _against_peer(what: str, outcomes: Outcomes, store: Naming, must: float, aim: float) -> Bar:
    ours, theirs = (over(outcomes, store(name), LIMITGATE.bare) for name in (LIMITGATE.name, PEER))
    return Bar(what, must, aim, ratio(ours, theirs))


def _in_flask(what: str, results: Results, store: Naming, must: float, aim: float) -> Bar:
    outcomes = results.wsgi.get(THREADS, {})
    ours, theirs = (over(outcomes, store(contender.name), contender.bare) for contender in WSGI)
    return Bar(what, must, aim, ratio(ours, theirs))


def _example(results: Results) -> Bar:
    outcomes = results.example.get(CROWDED, {})
    whole, plain = over(outcomes, on_redis(EXAMPLE), BARE_EXAMPLE), over(outcomes, on_redis(PLAIN), LIMITGATE.bare)
    return Bar("README's whole example on Redis, 32 at once, relative to README's rule", 1.5, 1.25, ratio(whole, plain))


def _many_clients(results: Results) -> Bar:
    """Of two parts of a run, so the medians are compared, each as a multiple of its bare application."""
    name = on_redis(LIMITGATE.name)
    times = [
        ratio(over(outcomes, name, LIMITGATE.bare), over(outcomes, LIMITGATE.bare, None))
        for outcomes in (results.crowded.get(CROWDED, {}), results.gate.get(CROWDED, {}))
    ]
    many, few = times
    return Bar("100,000 clients compared with 1,000, on Redis, 32 at once", 1.2, 1.05, many / few if many and few else None)
