"""CPU per request of counting for observers: ``python -m benchmarks.observing``, with and without in turn, in one run.

In memory, so that nothing else varies, under README's rule: requests that are admitted, and such that are refused. What is
handed over once a second is included. Where valgrind is installed, instructions are told, too, which no other load changes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks import instructions
from benchmarks.contenders import starlette
from benchmarks.counted import OBSERVED, REFUSING, memory
from benchmarks.drive import CLIENTS, Crowd, Crowds, trouble
from benchmarks.readme import RULE
from limitgate import LimitGate, Rule
from limitgate.prometheus import PrometheusObserver

ROUNDS, REQUESTS = 60, 2_000
_CASES = {"admitted": (RULE, CLIENTS, 200), "refused": (REFUSING, 1, 429)}
"""By outcome, the rule, how many clients there are, and the status that they get."""


def _gated(rule: Rule, observers: Sequence[Any]) -> LimitGate:
    return LimitGate(starlette(), rules=[rule], store=memory(), observers=observers)


def main() -> None:
    """Print microseconds of CPU for a request with and without observers, and the difference of each pair of rounds."""
    with Crowds() as crowd_of:
        for outcome, (rule, clients, status) in _CASES.items():
            observers: dict[str, list[PrometheusObserver]] = {"without": [], "with": [PrometheusObserver(CollectorRegistry())]}
            crowds = {name: (crowd_of.asgi(_gated(rule, each), clients=clients), count()) for name, each in observers.items()}
            took: dict[str, list[float]] = {name: [] for name in crowds}
            for crowd, numbers in crowds.values():
                crowd(islice(numbers, REQUESTS), 1)
            for turn in range(ROUNDS):
                for name in list(crowds)[:: 1 if turn % 2 else -1]:
                    took[name].append(_cpu(*crowds[name], status))
            more = [one - other for one, other in zip(took["with"], took["without"])]
            for name, each in took.items():
                print(f"{outcome}, {name:8} {1e6 * median(each):6.2f} µs, least {1e6 * min(each):6.2f} µs")
            least = min(took["with"]) - min(took["without"])
            print(f"{outcome}, more     {1e6 * median(more):6.2f} µs, least {1e6 * least:6.2f} µs")
    if reason := instructions.hindrance():
        print(reason)
        return
    counts = instructions.counted()
    for observed, without in OBSERVED.items():
        print(f"{observed}: {counts[observed] - counts[without]:,} instructions more")


def _cpu(crowd: Crowd, numbers: Iterator[int], status: int) -> float:
    """Seconds of CPU for each request of a round, all of which have to get this status."""
    gc.collect()
    began = time.process_time()
    tally = crowd(islice(numbers, REQUESTS), 1)
    took = time.process_time() - began
    if problem := trouble(tally, (status,)):
        raise RuntimeError(f"{problem} instead of {status}")
    return took / REQUESTS


if __name__ == "__main__":
    main()
