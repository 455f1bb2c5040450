"""What is measured, row by row. Each can be measured alone; all measure capacity first, on the server without a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from benchmarks.overload.app import ADAPTIVE, NONE, PRIORITIES
from benchmarks.overload.client import Arrival, poisson
from benchmarks.overload.runs import CONNECTIONS, Bench, Load, Run, is_good

LOADS = (0.5, 1, 2, 5, 10)
"""How many times its capacity a server is offered."""
AWAITING = "awaiting"
NEW_CONNECTIONS = "connections"
STEADY = ("loop", "pool")
"""Works that are measured under all loads."""
AWAITING_LOADS = (1, 2)
NEW_CONNECTIONS_LOADS = (2,)
IDLE = 0.1
"""Load of an idle server."""
FIXED: Mapping[str, Mapping[float, Sequence[int]]] = {
    "pool": {1: (24, 35), 2: (14, 17, 24)},
    AWAITING: {1: (14, 24, 35), 2: (8, 14, 24)},
}
"""Fixed limits that are tried by hand, by work and load."""
STEP_RATE = 1200
"""Requests per second under which the capacity of the backend changes."""
STEP_UP_S, STEP_DOWN_S, STEPS_END_S = 4.0, 14.0, 24.0
STEP = 3
"""How many times the capacity it has in between."""
PROCESSES = 4
PROCESSES_WARM_S = 30
"""Seconds until their limits have settled: a process that starts into a full pool takes a queue for the time of the work."""
SHARES = {"high": 0.2, "normal": 0.3, "low": 0.5}
HIGH_LOADS = {2: (5, 7), 4.5: (13, 8)}
"""Loads with priorities, with the seconds until who is thinned has settled, and those that count. At the second one, high alone
is 0.9 of the capacity."""
_SEED = 1


class Work(NamedTuple):
    """What servers do for requests."""

    name: str
    handler: str
    """Of `benchmarks.overload.app`."""
    expected: float
    """Capacity that is about right, requests per second; half as much more is offered to measure it."""
    keep_alive: bool = True


WORKS = {
    "loop": Work("event loop", "loop", 430.0),
    AWAITING: Work("event loop, 5 ms awaited", "awaiting", 400.0),
    "pool": Work("pool", "pool", 200.0),
    NEW_CONNECTIONS: Work("event loop, a connection for each request", "loop", 400.0, keep_alive=False),
}


class Capacity(NamedTuple):
    """What a server can do."""

    rate: float
    """Requests per second."""
    request_s: float
    """Seconds of its CPU for a request."""


@dataclass
class Results:
    """What was measured; what was left out is empty."""

    capacity: dict[str, Capacity] = field(default_factory=dict)
    """By work, as everything else."""
    idle: dict[str, Run] = field(default_factory=dict)
    limited: dict[tuple[str, float], Run] = field(default_factory=dict)
    """By work and load."""
    unlimited: dict[tuple[str, float], Run] = field(default_factory=dict)
    fixed: dict[tuple[str, float, int], Run] = field(default_factory=dict)
    """By work, load and limit."""
    steps: dict[str, Run] = field(default_factory=dict)
    """Of the pool, by limit."""
    processes: Run | None = None
    priorities: dict[tuple[str, float], Run] = field(default_factory=dict)
    drift: tuple[Run, Run] | None = None
    """The first minute under twice the load and the last of ten."""


def _steady(results: Results, bench: Bench, work: str, loads: Sequence[float] = LOADS) -> None:
    """Loads with the adaptive limit and without any."""
    _capacity(results, bench, work)
    for load in loads:
        results.limited[work, load] = bench.run(_load(results, work, ADAPTIVE, load, (4, 16 if load == 1 else 7)))
        results.unlimited[work, load] = bench.run(_load(results, work, NONE, load, (1, 3)))


def _fixed(results: Results, bench: Bench) -> None:
    """Fixed limits, of which the best is what the adaptive one has to come near to."""
    for work, by_load in FIXED.items():
        _capacity(results, bench, work)
        for load, limits in by_load.items():
            for limit in limits:
                seconds = (2, 10 if load == 1 else 6)
                results.fixed[work, load, limit] = bench.run(_load(results, work, f"{limit}", load, seconds))


def _steps(results: Results, bench: Bench) -> None:
    """Thrice the connections for ten seconds."""
    _capacity(results, bench, "pool")
    arrivals = poisson(Random(_SEED), STEP_RATE, 0, STEPS_END_S)
    sizes = ((STEP_UP_S, STEP * CONNECTIONS), (STEP_DOWN_S, CONNECTIONS))
    for limit in (ADAPTIVE, NONE):
        results.steps[limit] = bench.run(Load("pool", limit, arrivals, 0, STEPS_END_S, sizes=sizes))


def _processes(results: Results, bench: Bench) -> None:
    """Four processes on one backend, under twice what it can do."""
    capacity = _capacity(results, bench, "pool")
    warm_s, counted_s = PROCESSES_WARM_S, 16
    arrivals = _arrivals(2 * capacity.rate, warm_s, counted_s, servers=PROCESSES)
    results.processes = bench.run(Load("pool", ADAPTIVE, arrivals, warm_s, warm_s + counted_s, servers=PROCESSES))


def _priorities(results: Results, bench: Bench) -> None:
    """Requests of three priorities, of which high alone is far below the capacity or near to it."""
    for work in STEADY:
        capacity = _capacity(results, bench, work)
        for load, (warm_s, counted_s) in HIGH_LOADS.items():
            random = Random(_SEED)
            arrivals = [
                each._replace(kind=random.choices(list(SHARES), list(SHARES.values()))[0])
                for each in _arrivals(load * capacity.rate, warm_s, counted_s)
            ]
            results.priorities[work, load] = bench.run(Load(work, PRIORITIES, arrivals, warm_s, warm_s + counted_s))


def _drift(results: Results, bench: Bench) -> None:
    """Ten minutes under twice the load."""
    capacity = _capacity(results, bench, "pool")
    arrivals = poisson(Random(_SEED), 2 * capacity.rate, 0, 600)
    run = bench.run(Load("pool", ADAPTIVE, arrivals, 10, 600))
    results.drift = (_part(run, 10, 70), _part(run, 540, 600))


Row = Callable[[Results, Bench], None]
ROWS: Mapping[str, Row] = {
    "loop": lambda results, bench: _steady(results, bench, "loop"),
    "pool": lambda results, bench: _steady(results, bench, "pool"),
    AWAITING: lambda results, bench: _steady(results, bench, AWAITING, AWAITING_LOADS),
    NEW_CONNECTIONS: lambda results, bench: _steady(results, bench, NEW_CONNECTIONS, NEW_CONNECTIONS_LOADS),
    "fixed": _fixed,
    "steps": _steps,
    "processes": _processes,
    "priorities": _priorities,
    "drift": _drift,
}
LONG = ("drift",)
"""Rows that are measured only if they are asked for."""


def _capacity(results: Results, bench: Bench, work: str) -> Capacity:
    """The rate of answers of a server with a backlog, whose clients wait for long. Measures the idle server, too."""
    if work not in results.capacity:
        warm_s, end_s = 1.0, 4.5
        handler, keep_alive = WORKS[work].handler, WORKS[work].keep_alive
        arrivals = poisson(Random(_SEED), 1.5 * WORKS[work].expected, 0, end_s)
        run = bench.run(Load(handler, NONE, arrivals, warm_s, end_s, patience_s=8, keep_alive=keep_alive))
        ends = [each.arrival.due_s + each.took_s for each in run.everything]
        done = sum([warm_s <= end < end_s for end in ends])
        results.capacity[work] = Capacity(done / (end_s - warm_s), run.cpu_s / done)
        results.idle[work] = bench.run(_load(results, work, NONE, IDLE, (1, 5)))
    return results.capacity[work]


def _load(results: Results, work: str, limit: str, load: float, seconds: tuple[float, float]) -> Load:
    """So many times the capacity, for seconds of warming up and seconds that count."""
    warm_s, counted_s = seconds
    arrivals = _arrivals(load * results.capacity[work].rate, warm_s, counted_s)
    handler, keep_alive = WORKS[work].handler, WORKS[work].keep_alive
    return Load(handler, limit, arrivals, warm_s, warm_s + counted_s, keep_alive=keep_alive)


def _arrivals(rate: float, warm_s: float, seconds: float, servers: int = 1) -> list[Arrival]:
    """Requests of a time of warming up, and of the time that counts, in which exactly as many come as are expected."""
    random = Random(_SEED)
    return [
        *poisson(random, rate, 0, warm_s, servers),
        *poisson(random, rate, warm_s, warm_s + seconds, servers),
    ]


def _part(run: Run, begin_s: float, end_s: float) -> Run:
    """The requests of a run that came between two times."""
    answers = [each for each in run.everything if begin_s <= each.arrival.due_s < end_s]
    return Run(end_s - begin_s, answers, run.cpu_s, run.waited_s, run.lag_s, answers)


def refusal_s(results: Results, work: str, load: float) -> float | None:
    """Seconds of the server's CPU for a refusal: what it spent beyond its answers, divided by its refusals."""
    run, capacity = results.limited.get((work, load)), results.capacity.get(work)
    if run is None or capacity is None or not run.shed:
        return None
    answered = sum([is_good(each) for each in run.answers])
    return (run.cpu_s - answered * capacity.request_s) / (run.shed * len(run.answers))
