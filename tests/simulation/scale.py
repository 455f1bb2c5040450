"""Many processes and callers on one simulated Redis: ``python -m tests.simulation.scale``, for docs/internals/scale.md.

``--real`` runs a small case on real processes and a real Redis instead, and simulates the same case beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from bisect import bisect
from collections import Counter
from itertools import accumulate
from multiprocessing import get_context

from limitgate import AsyncLimiter, Limit, StoreError
from tests.simulation.installed import entered, worlds
from tests.simulation.ledger import CALL, Call, Ledger
from tests.simulation.network import Network, SimDialer
from tests.simulation.scenario import RecordingStore
from tests.simulation.server import MAX_BUCKETS, Server
from tests.simulation.world import SECOND, Process, World
from tests.support.redis_server import RedisServer

PER_CALLER = "10/second burst 20"


class Zipf:
    """Callers by rank, the most frequent first."""

    def __init__(self, callers: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._sums = list(accumulate(1 / rank for rank in range(1, callers + 1)))

    def __call__(self) -> int:
        return bisect(self._sums, self._chance.random() * self._sums[-1])


class Case:
    """Parameters of a simulation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.processes, self.callers, self.rate = options.processes, options.callers, options.rate
        self.seconds, self.lease, self.failover = options.seconds, options.lease, options.failover
        self.text = options.limit
        self.limit = Limit(options.limit, lease=self.lease)


def simulated(case: Case, seed: int = 0) -> Counter[str]:
    """Count requests, answers and calls, and hold admissions against the ledger."""
    world = World(seed)
    with worlds(), entered(world, seed):
        network, server = Network(world), Server(world)
        server.store._max_buckets = server._replica._max_buckets = max(MAX_BUCKETS, 2 * case.callers)
        network.servers = [server]
        ledger = Ledger(world, [server], case.processes)
        # At the end, some calls are under way.
        ledger.is_calm = False
        figures: Counter[str] = Counter()
        zipf = Zipf(case.callers, seed)
        if case.failover:
            server.lag_us = 50_000
            world.after(int(case.seconds * SECOND / 2), lambda: server.fail_over(1.0))
        for _ in range(case.processes):
            process = Process(world)
            process.start(_Callers(case, ledger, network, process, zipf, figures).run())
        world.run(within=case.seconds)
        ledger._check_admissions()
        figures["calls"] = server.calls
        figures["over"] = len(world.findings)
        _count_lost(server, figures)
        world.is_over = True
        for process in world.processes:
            process.kill()
    return figures


def _count_lost(server: Server, figures: Counter[str]) -> None:
    for _, _, why, _, key, gone in server.vanished:
        if why == "failover" and key:
            figures["lost"] += max(ticks // weight for ticks, weight in zip(gone, server._known[key].weights))


class _Callers:
    """The requests of one process."""

    def __init__(  # noqa: PLR0917 - all of a world
        self, case: Case, ledger: Ledger, network: Network, process: Process, zipf: Zipf, figures: Counter[str]
    ) -> None:
        self._case, self._ledger, self._process, self._zipf, self._figures = case, ledger, process, zipf, figures
        store = RecordingStore(SimDialer(network, process, ledger.servers[0]), process.world.monotonic)
        store.ledger = ledger
        self._limiter = AsyncLimiter(store, timeout=0.1)

    async def run(self) -> None:
        rng, case = self._process.world.rng, self._case
        while True:
            await asyncio.sleep(rng.expovariate(case.rate / case.processes))
            self._process.loop.create_task(self._one(f"caller {self._zipf()}"))

    async def _one(self, key: str) -> None:
        call = Call(self._process, "hit", key, 1)
        self._ledger.calls.append(call)
        CALL.set(call)
        self._figures["requests"] += 1
        try:
            decision = await self._limiter.hit(key, self._case.limit)
        except StoreError:
            self._figures["failed"] += 1
            return
        self._figures["admitted" if decision.allowed else "refused"] += 1
        self._figures[call.readings[-1][3]] += 1


def report(case: Case, figures: Counter[str]) -> str:
    requests = max(1, figures["requests"])
    local = figures["cache"] + figures["lease"]
    failover = "yes" if case.failover else "no"
    return (
        f"| {case.processes:,} | {case.callers:,} | {case.text} | {case.rate:,} | {case.lease} | {failover} "
        f"| {figures['requests']:,} | {figures['calls'] / requests:.2f} | {local / requests:.0%} "
        f"| {figures['refused'] / requests:.0%} | {figures['failed']:,} | {figures['lost']:,} | {figures['over']} |"
    )


COLUMNS = (
    *("processes", "callers", "limit", "requests/s", "lease", "failover", "requests", "Redis calls per request"),
    *("answered locally", "refused", "failed", "charges lost", "above the bound"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}"


# --- real processes ---------------------------------------------------------------------------------------------------


def _work(url: str, number: int, options: argparse.Namespace, begin, queue) -> None:
    queue.put(asyncio.run(_work_async(url, number, options, begin)))


async def _work_async(url: str, number: int, options: argparse.Namespace, begin) -> Counter[str]:
    figures: Counter[str] = Counter()
    limit, zipf, rng = Limit(options.limit, lease=options.lease), Zipf(options.callers, number), random.Random(number)
    loop = asyncio.get_running_loop()
    async with AsyncLimiter(url, timeout=5) as limiter:
        await limiter.hit("first", "1/second")
        begin.wait()
        end, due = loop.time() + options.seconds, loop.time()

        async def one() -> None:
            decision = await limiter.hit(f"caller {zipf()}", limit)
            figures["admitted" if decision.allowed else "refused"] += 1

        tasks = []
        while (due := due + rng.expovariate(options.rate / options.processes)) < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            figures["requests"] += 1
            tasks.append(asyncio.ensure_future(one()))
        await asyncio.gather(*tasks)
    return figures


def real(options: argparse.Namespace) -> Counter[str]:
    """The same on processes of this machine, with a Redis of their own."""
    server = RedisServer()
    try:
        context = get_context("spawn")
        queue, begin = context.Queue(), context.Barrier(options.processes)
        before = _calls(server)
        workers = [context.Process(target=_work, args=(server.url, n, options, begin, queue)) for n in range(options.processes)]
        for worker in workers:
            worker.start()
        figures = sum((queue.get() for _ in workers), Counter())
        for worker in workers:
            worker.join()
        figures["calls"] = _calls(server) - before
    finally:
        server.stop()
    return figures


def _calls(server) -> int:
    stats = server.client().info("commandstats")
    return sum(int(stats.get(name, {}).get("calls", 0)) for name in ("cmdstat_evalsha",))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale", description=__doc__)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--callers", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=20_000, help="requests a second, of all processes")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--limit", default=PER_CALLER, help="of each caller")
    parser.add_argument("--lease", type=int, default=0)
    parser.add_argument("--failover", action="store_true", help="a failover in the middle, of a replica that is 50 ms behind")
    parser.add_argument("--real", action="store_true", help="on real processes, and the same simulated")
    options = parser.parse_args()
    case = Case(options)
    print(HEAD)
    if options.real:
        figures = real(options)
        share = figures["calls"] / figures["requests"]
        refused = figures["refused"] / figures["requests"]
        print(f"real: {figures['requests']:,} requests, {share:.2f} Redis calls per request, {refused:.0%} refused")
    print(report(case, simulated(case)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
