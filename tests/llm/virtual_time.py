"""Processes that share a budget against a provider, in virtual time: the same in every run, and over in seconds."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
import pytest

import limitgate.llm.told_limits
from limitgate import AsyncLimiter, MemoryStore
from limitgate.httpx2 import AsyncRateLimitTransport
from limitgate.limits.plan import Plan, Reading
from limitgate.llm import Budget
from limitgate.process import waiting
from tests.support.provider import Provider

T = TypeVar("T")

BEGIN = 1_200_000.0
"""A multiple of a minute, small enough for the resolution of event loops."""
ROUND_TRIP = 0.0004
_MODULES: tuple[Any, ...] = (waiting, limitgate.llm.told_limits)


class _Silence(selectors.SelectSelector):
    """Nothing comes from outside."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is left to do."""

    now = BEGIN

    def __init__(self) -> None:
        super().__init__(_Silence())

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Store(MemoryStore):
    """A store of all processes, at the distance of a round trip."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(clock=lambda: int(loop.now * 1_000_000))

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:  # type: ignore[override]
        await asyncio.sleep(ROUND_TRIP / 2)
        reading = self.spend(plan, timeout)
        await asyncio.sleep(ROUND_TRIP / 2)
        return reading


class Network(httpx2.AsyncBaseTransport):
    """Delays requests by 1 to 20 ms, so that some overtake others."""

    def __init__(self, provider: Provider, dice: random.Random) -> None:
        self._inner = httpx2.ASGITransport(app=provider)
        self._dice = dice

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(self._dice.uniform(0.001, 0.02))
        return await self._inner.handle_async_request(request)


@contextmanager
def virtual_time() -> Iterator[Loop]:
    """Run an event loop in virtual time."""
    loop = Loop()
    with pytest.MonkeyPatch.context() as patched:
        for module in _MODULES:
            patched.setattr(module, "monotonic", loop.time)
        try:
            yield loop
        finally:
            loop.close()


def run(loop: Loop, *works: Coroutine[Any, Any, T]) -> list[T]:
    """Run works to their ends; return their results."""

    async def main() -> list[T]:
        return await asyncio.gather(*works)

    return loop.run_until_complete(main())


async def process(loop: Loop, store: Store, budget: Budget, provider: Provider, many: tuple[int, float], **body: Any) -> None:
    """A process whose tasks ask as often as the budget allows, so many tasks for so many seconds."""
    tasks, seconds = many
    limiter, until = AsyncLimiter(store), loop.now + seconds
    network = Network(provider, random.Random(2))
    transport = AsyncRateLimitTransport(budget=budget, limiter=limiter, timeout=seconds, transport=network)
    question = {"model": "m", "messages": [{"role": "user", "content": "abcd" * 10}], **body}
    async with httpx2.AsyncClient(transport=transport, timeout=None) as client:

        async def ask() -> None:
            while loop.now < until:
                if (await client.post("http://p/v1/chat/completions", json=question)).status_code == 429:
                    return

        await asyncio.gather(*[ask() for _ in range(tasks)])
