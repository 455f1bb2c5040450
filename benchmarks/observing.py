"""CPU per request of counting for observers: ``python -m benchmarks.observing``, with and without in turn, in one run.

In memory, so that nothing else varies, under README's rule. What is handed over once a second is included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.contenders import starlette
from benchmarks.drive import CLIENTS, Crowds
from benchmarks.readme import RULE
from limitgate import LimitGate
from limitgate.prometheus import PrometheusObserver

ROUNDS, REQUESTS = 60, 2_000


def _gated(observers: Sequence[Any]) -> LimitGate:
    return LimitGate(starlette(), rules=[RULE], observers=observers)


def main() -> None:
    """Print microseconds of CPU for a request with and without observers, and the difference of each pair of rounds."""
    with Crowds() as crowd_of:
        crowds = {
            "without": (crowd_of.asgi(_gated([]), clients=CLIENTS), count()),
            "with": (crowd_of.asgi(_gated([PrometheusObserver(CollectorRegistry())]), clients=CLIENTS), count()),
        }
        took: dict[str, list[float]] = {name: [] for name in crowds}
        for turn in range(ROUNDS):
            for name in list(crowds)[:: 1 if turn % 2 else -1]:
                crowd, numbers = crowds[name]
                took[name].append(_cpu(partial(crowd, islice(numbers, REQUESTS), 1)) / REQUESTS)
    more = [one - other for one, other in zip(took["with"], took["without"])]
    for name, each in took.items():
        print(f"{name:8} {1e6 * median(each):6.2f} µs, least {1e6 * min(each):6.2f} µs")
    print(f"more     {1e6 * median(more):6.2f} µs, least {1e6 * (min(took['with']) - min(took['without'])):6.2f} µs")


def _cpu(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
