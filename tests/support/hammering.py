"""A process that asks as fast as it can: a module of its own, so that it imports little."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from limitgate import AsyncRedisStore, RedisStore
from limitgate.limits.plan import Plan

PATIENT = 10.0


def hammer(url: str, plan: Plan, seconds: float, together: threading.Barrier, found: Any, *, in_loop: bool) -> None:
    """Ask for a while, at the same time as others; between which times each request was admitted."""
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
