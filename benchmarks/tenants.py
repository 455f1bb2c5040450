"""Two tenants of one budget, with 10,000 and 20 requests: ``python -m benchmarks.tenants``.

Prints the median wait of the small tenant's requests, alone and beside the other tenant, in one process and across several.
The budget admits 600 requests per minute. They are used up when the small tenant comes, so that 10 pass per second. The
requests of a tenant come at once, those of the large tenant 3 seconds earlier.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any

from limitgate import AsyncLimiter
from limitgate.llm import Budget, Usage
from tests.support.redis_server import RedisServer

PER_SECOND = 10
COST = 100
"""Tokens of a request."""
AFTER = 3
"""Seconds from the large tenant's requests to the small one's. A process needs a second for 10,000 requests."""
TOKENS = 60 * PER_SECOND * COST
MANY, FEW = 10_000, 20


def work(store: str, tenants: Sequence[tuple[str, int, float]], ready: Any, used: float, seconds: float, waits: Any) -> None:  # noqa: PLR0917 - for a process
    """Send the requests of some tenants, each given by its name, its requests, and the seconds until they come.

    The budget is used up for the first ``used`` seconds.
    """

    async def main() -> None:
        limiter = AsyncLimiter(store, timeout=5)
        budget = Budget(tokens=f"{TOKENS}/minute", key=lambda _: "k", share=lambda body: body["tenant"])
        if ready.wait() == 0:
            used_up = await limiter.reserve("k", (f"{TOKENS}/minute", 0))
            await used_up.settle(TOKENS + round(used * PER_SECOND * COST))
        begin_at = time.time()

        async def ask(tenant: str, after: float) -> None:
            came_at = begin_at + after
            body = {"tenant": tenant, "messages": [{"role": "user", "content": "abcd" * 10}], "max_tokens": COST - 10}
            await asyncio.sleep(came_at - time.time())
            reservation = await budget.areserve(limiter, body, timeout=begin_at + seconds - time.time())
            if reservation.decision.allowed:
                waits.put((tenant, time.time() - came_at))
                await reservation.settle(Usage(10, COST - 10))

        asked = [asyncio.create_task(ask(name, after)) for name, many, after in tenants for _ in range(many)]
        await asyncio.sleep(begin_at + seconds - time.time())
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await limiter.aclose()

    asyncio.run(main())


def median(plans: Sequence[Sequence[tuple[str, int, float]]], used: float, seconds: float) -> float:
    """Run each plan in a process of its own; return the median wait of the small tenant's requests."""
    server = RedisServer()
    waits: Any = multiprocessing.get_context("spawn").SimpleQueue()
    ready = multiprocessing.get_context("spawn").Barrier(len(plans))
    processes = [
        multiprocessing.get_context("spawn").Process(target=work, args=(server.url, plan, ready, used, seconds, waits))
        for plan in plans
    ]
    for process in processes:
        process.start()
    found = []
    while any(process.is_alive() for process in processes) or not waits.empty():
        if waits.empty():
            time.sleep(0.01)
        else:
            found.append(waits.get())
    for process in processes:
        process.join()
    server.stop()
    small = [wait for tenant, wait in found if tenant == "small"]
    assert len(small) == FEW, f"{len(small)} of the small tenant's requests were admitted"
    return float(statistics.median(small))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=14)
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    many = arguments.processes
    print("| processes | the small tenant is in | alone | beside 10,000 requests | ratio |\n|---|---|---|---|---|")
    for processes, small_in in ((1, 1), (many, 1), (many, many)):
        small = [[("small", FEW // small_in, AFTER)] if number < small_in else [] for number in range(processes)]
        alone = median(small, AFTER, arguments.seconds)
        large = [("large", MANY // processes, 0.0)]
        # The large tenant uses it up in the last second.
        beside = median([[*large, *each] for each in small], AFTER - 1, arguments.seconds)
        where = f"{small_in} of them" if small_in < processes else "each of them" if processes > 1 else "the only one"
        print(f"| {processes} | {where} | {alone:.2f} s | {beside:.2f} s | {beside / alone:.2f} |", flush=True)


if __name__ == "__main__":
    main()
