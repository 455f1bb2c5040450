"""Differences between event loops: tasks that begin at once, and the end of a loop, at which its connections are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Create a task that begins in the next turn of the running event loop, even under `asyncio.eager_task_factory`.

    An eager one may have ended before anybody knows of it. The task's context is empty: it outlives the request that needs it,
    whose context variables would live as long as a connection, and mark its log lines.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), context=Context())


class LoopEnd:
    """Calls ``close`` before the running event loop ends: it closes all its asynchronous generators (PEP 525), ours too."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close: Callable[[], Awaitable[None]] | None = close
        self._ending: AsyncGenerator[None, None] | None = self._until_the_loop_ends()

    async def watch(self) -> None:
        """Begin."""
        if self._ending is not None:
            await anext(self._ending)

    async def closed(self) -> None:
        """Stop watching: all is closed already."""
        self._close = None
        if self._ending is not None:
            await self._ending.aclose()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._ending = None  # it knows the loop, so the loop would be kept for as long as the store
            if self._close is not None:
                await self._close()
