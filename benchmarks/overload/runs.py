"""One run: uvicorn under an open load, and what became of the requests."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Self

import uvloop

from benchmarks.overload.app import NONE
from benchmarks.overload.backend import Backend, serve
from benchmarks.overload.client import Answer, Answers, Arrival, offer
from benchmarks.overload.servers import Server, cores, serving

PATIENCE_S = 1.0
"""Seconds after which a client gives up; an answer within them is good."""
CONNECTIONS = 10
"""Of the backend."""
ADMITTED, REFUSED = 200, (429, 503)


@dataclass(frozen=True)
class Load:
    """What a server is offered."""

    work: str
    """``loop`` or ``pool``, see `benchmarks.overload.app`."""
    limit: str
    arrivals: Sequence[Arrival]
    warm_s: float
    """Seconds that do not count."""
    end_s: float
    servers: int = 1
    patience_s: float = PATIENCE_S
    keep_alive: bool = True
    """False if each request comes on a connection of its own."""
    sizes: Sequence[tuple[float, int]] = ()
    """When the backend has how many connections from then on."""


@dataclass(frozen=True)
class Run:
    """What became of the requests of a run that came after its time of warming up."""

    seconds: float
    answers: Sequence[Answer]
    cpu_s: float
    """Seconds of CPU that the servers spent on them."""
    waited_s: float
    """Seconds for which others kept one of the servers from its core. On a quiet machine there are none."""
    lag_s: float
    """99th percentile of how much later than due the client sent them."""
    everything: Sequence[Answer] = field(repr=False)
    """Those of the time of warming up, too."""

    @property
    def admitted(self) -> list[Answer]:
        """All that were not refused, those without an answer included."""
        return [each for each in self.answers if each.status not in REFUSED]

    @property
    def goodput(self) -> float:
        """Requests answered in time, per second."""
        return self.count(self.answers) / self.seconds

    @property
    def offered(self) -> float:
        """Requests per second."""
        return len(self.answers) / self.seconds

    @property
    def shed(self) -> float:
        """Share of the requests that were refused."""
        return sum([each.status in REFUSED for each in self.answers]) / len(self.answers)

    def share(self, capacity: float) -> float:
        """Goodput as a share of what could be served: the capacity, or what was offered where that is less; 1 of nothing."""
        reachable = min(self.offered, capacity)
        return self.goodput / reachable if reachable else 1.0

    def answered(self, kind: str) -> float:
        """Share of the requests of a kind that were answered in time."""
        asked = [each for each in self.answers if each.arrival.kind == kind]
        return self.count(asked) / len(asked)

    def quantile_s(self, share: float) -> float:
        """Latency in seconds that so many of the admitted did not exceed; infinite where clients gave up."""
        ordered = sorted([each.took_s for each in self.admitted])
        return ordered[int(share * (len(ordered) - 1))] if ordered else math.inf

    @property
    def limits(self) -> tuple[float, float]:
        """Mean and standard deviation of the limits of all servers together."""
        now: dict[int, int] = {}
        sums = []
        for each in self.admitted:
            if each.limit:
                now[each.arrival.server] = each.limit
                sums.append(sum(now.values()))
        begun = len(sums) // 50  # by when all servers have been heard of
        return fmean(sums[begun:]), pstdev(sums[begun:])

    @property
    def fairness(self) -> float:
        """Jain's index of the servers' goodput: 1 where all serve the same."""
        shares = [self.count([each for each in self.answers if each.arrival.server == server]) for server in self._servers]
        return sum(shares) ** 2 / (len(shares) * sum([each**2 for each in shares]))

    def rate(self, begin_s: float, end_s: float) -> float:
        """Requests per second that were answered in time between two times."""
        ends = [each.arrival.due_s + each.took_s for each in self.everything if is_good(each)]
        return sum([begin_s <= end < end_s for end in ends]) / (end_s - begin_s)

    @staticmethod
    def count(answers: Sequence[Answer]) -> int:
        """Requests that were answered in time."""
        return sum([is_good(each) for each in answers])

    @property
    def _servers(self) -> set[int]:
        return {each.arrival.server for each in self.answers}


def is_good(answer: Answer) -> bool:
    """True for a request that was admitted, and answered before its client would have given up."""
    return answer.status == ADMITTED and answer.took_s <= PATIENCE_S


class Bench(ExitStack):
    """Two cores, one for the servers and one for this process, which is the client."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._core, own = cores()
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {own})
        self.callback(os.sched_setaffinity, 0, before)
        self._runner = self.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="limitgate-overload-")))
        return self

    def run(self, load: Load) -> Run:
        """Start servers, offer them a load, and stop them."""
        backend, path = Backend(CONNECTIONS), str(self._folder / "backend")
        listening = self._runner.run(serve(backend, path))
        environment = {"BENCHMARK_WORK": load.work, "BENCHMARK_LIMIT": load.limit or NONE, "BENCHMARK_BACKEND": path}
        with ExitStack() as stack:
            stack.callback(listening.close)
            stack.callback(backend.close)
            servers = [stack.enter_context(serving(self._core, environment)) for _ in range(load.servers)]
            gc.collect()
            gc.disable()  # a pause of the client's would look like latency
            stack.callback(gc.enable)
            answers = self._runner.run(_offer(load, backend, servers))
        begin, end = answers.watched
        counted = [each for each in answers.answers if each.arrival.due_s >= load.warm_s]
        return Run(
            load.end_s - load.warm_s,
            counted,
            sum([cpu.spent_s for cpu in end]) - sum([cpu.spent_s for cpu in begin]),
            max([after.waited_s - before.waited_s for before, after in zip(begin, end)]),
            answers.lag_s,
            answers.answers,
        )


async def _offer(load: Load, backend: Backend, servers: Sequence[Server]) -> Answers:
    for at_s, size in load.sizes:
        asyncio.get_running_loop().call_later(at_s, backend.resize, size)
    return await offer(
        [server.port for server in servers],
        load.arrivals,
        load.patience_s,
        keep_alive=load.keep_alive,
        watch=lambda: [server.cpu() for server in servers],
        watch_at=(load.warm_s, load.end_s),
    )
