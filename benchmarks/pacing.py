"""What rate `AsyncLimiter.pace` achieves, over one process and several: ``python -m benchmarks.pacing --seconds 30``."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from benchmarks.redis_side import own_server
from benchmarks.report import table
from limitgate import AsyncLimiter, Limit

LIMITS = ("100/second", "1000/second")
PROCESSES = (1, 4)
UNLIMITED = "1000000/second"
"""More than anybody can do."""
CROWD = 32
"""Tasks that ask one iterator at the same time, in one process."""
_SETTLING = 1.0
"""Seconds that are left out: a burst that is there at first is no rate."""


class Case(NamedTuple):
    """What is measured."""

    url: str
    limit: str
    even: bool
    processes: int
    tasks: int
    """In each process, on one iterator."""
    seconds: float

    @property
    def key(self) -> str:
        """What they count under, all together and apart from the other cases."""
        return f"{self.limit} {self.even} {self.processes} {self.tasks}"


class Achieved(NamedTuple):
    """What came of it."""

    rate: float
    """Items per second of all processes together."""
    most: int
    """Items in the fullest 100 ms."""
    cpu: float
    """µs that an item cost the processes."""


def measured(case: Case) -> Achieved:
    """Let the processes pace for so long, all at once."""
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(case.processes), context.Queue()
    running = [context.Process(target=_drain, args=(case, start, found), daemon=True) for _ in range(case.processes)]
    for process in running:
        process.start()
    results = [found.get() for _ in running]
    for process in running:
        process.join()
    times = sorted(at for seen, _ in results for at in seen)
    settled = times[bisect_left(times, times[0] + _SETTLING) :]
    most = max(bisect_left(settled, at + 0.1) - place for place, at in enumerate(settled))
    cpu = sum(spent for _, spent in results) / len(times) * 1e6
    return Achieved((len(settled) - 1) / (settled[-1] - settled[0]), most, cpu)


def _drain(case: Case, start: Any, found: Any) -> None:
    """What one process does: it notes when its items came, and what CPU it spent meanwhile."""

    async def main() -> tuple[list[float], float]:
        seen: list[float] = []
        async with AsyncLimiter(case.url, timeout=5) as limiter:
            await limiter.peek(case.key, case.limit)
            paced = limiter.pace(count(), case.limit, key=case.key, even=case.even)
            start.wait()
            end, before = time.monotonic() + case.seconds + _SETTLING, time.process_time()

            async def drain() -> None:
                async for _ in paced:
                    seen.append(time.monotonic())
                    if seen[-1] > end:
                        return

            await asyncio.gather(*[drain() for _ in range(case.tasks)])
            return seen, time.process_time() - before

    found.put(asyncio.run(main()))


def _row(case: Case, achieved: Achieved) -> Sequence[str]:
    if case.limit == UNLIMITED:
        what, of_limit = f"as fast as it goes, {case.tasks} at once", "-"
    else:
        limit = Limit(case.limit)
        what = f"{limit}, {'evenly' if case.even else 'in bursts'}"
        of_limit = f"{achieved.rate * limit.period / limit.count:.2%}"
    return what, f"{case.processes}", f"{achieved.rate:,.1f}", of_limit, f"{achieved.most:,}", f"{achieved.cpu:.0f}"


def main() -> None:
    """Measure every case, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pacing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="for each case")
    seconds = parser.parse_args().seconds
    with own_server() as server:
        cases = [
            Case(server.url, limit, even, processes, 1, seconds)
            for limit in LIMITS
            for even in (True, False)
            for processes in PROCESSES
        ]
        cases += [Case(server.url, UNLIMITED, even=True, processes=1, tasks=tasks, seconds=seconds) for tasks in (1, CROWD)]
        rows = [_row(case, measured(case)) for case in cases]
    print(table(["", "processes", "items/s", "of the limit", "most in 100 ms", "CPU of an item, µs"], rows))


if __name__ == "__main__":
    main()
