"""Work for the processes of tests. They import this module instead of a test module, because it needs few others."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from limitgate import AsyncLimiter, AsyncRedisStore, RedisStore
from limitgate.limits.plan import Plan

PATIENT = 20.0


def hammer(url: str, plan: Plan, seconds: float, together: threading.Barrier, found: Any, *, in_loop: bool) -> None:
    """Send requests for some seconds, beside other processes. ``found`` gets the start and end of each admitted request."""
    spans: list[tuple[float, float]] = []
    if in_loop:
        asyncio.run(_hammer_in_loop(url, plan, seconds, together, spans))
    else:
        store = RedisStore(url)
        store.spend(plan._replace(verb="peek"), PATIENT)
        together.wait()
        end = time.monotonic() + seconds
        while (before := time.monotonic()) < end:
            if store.spend(plan, PATIENT).admitted:
                spans.append((before, time.monotonic()))
        store.close()
    found.put(spans)


async def _hammer_in_loop(
    url: str, plan: Plan, seconds: float, together: threading.Barrier, spans: list[tuple[float, float]]
) -> None:
    store = AsyncRedisStore(url)
    await store.aspend(plan._replace(verb="peek"), PATIENT)
    together.wait()
    end = time.monotonic() + seconds
    while (before := time.monotonic()) < end:
        if (await store.aspend(plan, PATIENT)).admitted:
            spans.append((before, time.monotonic()))
    await store.aclose()


def drain(server: tuple[str, str], limit: str, count: int, start: threading.Barrier, came: Any) -> None:
    """Share a pace with other processes, by eight tasks. ``came`` gets the time of the start and of each item."""

    async def main() -> list[float]:
        url, prefix = server
        async with AsyncLimiter(url, timeout=PATIENT, key_prefix=prefix) as limiter:
            await limiter.peek("pace", limit)
            start.wait(4 * PATIENT)
            times, paced = [time.monotonic()], limiter.pace(range(count), limit)

            async def work() -> None:
                times.extend([time.monotonic() async for _ in paced])

            await asyncio.gather(*[work() for _ in range(8)])
            return times

    came.put(asyncio.run(main()))
