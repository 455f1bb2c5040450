"""Portable task start and cleanup for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Create a task that starts in the next loop iteration, with an empty context.

    An eager task could end before its owner knows it. The task outlives the request, whose context would stay alive.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), context=Context())


class LoopEnd:
    """Calls ``close`` before the event loop ends, by an asynchronous generator (PEP 525)."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close: Callable[[], Awaitable[None]] | None = close
        self._ending: AsyncGenerator[None, None] | None = self._until_the_loop_ends()

    async def watch(self) -> None:
        """Start the watch."""
        if self._ending is not None:
            await anext(self._ending)

    async def closed(self) -> None:
        """Stop the watch after a normal close."""
        self._close = None
        if self._ending is not None:
            await self._ending.aclose()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            # The generator keeps the loop alive.
            self._ending = None
            if self._close is not None:
                await self._close()
