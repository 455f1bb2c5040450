"""Time for which an event loop listened: what a server's silence is measured by.

A loop that is blocked, starved or suspended hears no reply, so that time is nobody's silence. While somebody waits, a
`ListeningClock` looks at the loop's own clock every `GRAIN` seconds, and counts no more than `LONGEST` between two looks.
Before anybody is told that a time is over, the loop polls its sockets once more: a reply that has arrived is read first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

GRAIN, SHORTEST = 0.01, 0.004
"""Seconds between two looks, at most and at least."""
LONGEST = 0.02
"""Seconds that count between two looks, at most: a loop that took longer to come round was not there to listen."""


class Listener(Protocol):
    """Somebody who waits."""

    def listened(self) -> float | None:
        """Note that the clock has gone on. Seconds that are left until a time is over; None once nobody waits."""


class ListeningClock:
    """Seconds for which the running event loop has listened. It stands still while nobody waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listened = 0.0
        self._looked = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._listeners: dict[Listener, None] = {}

    def now(self) -> float:
        """Seconds so far."""
        if self._timer is None:
            return self._listened
        return self._listened + min(self._loop.time() - self._looked, LONGEST)

    def watch(self, listener: Listener) -> None:
        """Tell somebody of each look, until nobody waits there."""
        self._listeners[listener] = None
        if self._timer is None:
            self._looked = self._loop.time()
            self._timer = self._loop.call_later(GRAIN, self._look)

    def forget(self, listener: Listener) -> None:
        """Nobody waits there any more."""
        self._listeners.pop(listener, None)

    def after_polling(self, callback: Callable[[], object]) -> None:
        """Call back once what has arrived on sockets by now is read.

        asyncio reads after the callbacks that are due already, uvloop after its timers: both before the turn after the next.
        """
        self._loop.call_soon(self._loop.call_soon, callback)

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Give what is awaited inside so many seconds of listening, else raise `TimeoutError`."""
        async with asyncio.timeout(None) as limit:
            deadline = _Deadline(self, seconds, limit)
            self.watch(deadline)
            try:
                yield
            finally:
                self.forget(deadline)
                deadline.is_over = True

    def _look(self) -> None:
        self._listened, self._looked, self._timer = self.now(), self._loop.time(), None
        soonest = GRAIN
        for listener in list(self._listeners):
            left = listener.listened()
            if left is None:
                self.forget(listener)
            else:
                soonest = min(soonest, left)
        if self._listeners:
            self._timer = self._loop.call_later(max(soonest, SHORTEST), self._look)


class _Deadline:
    """The end of `ListeningClock.within`."""

    is_over = False

    def __init__(self, clock: ListeningClock, seconds: float, limit: asyncio.Timeout) -> None:
        self._clock = clock
        self._at = clock.now() + seconds
        self._limit = limit

    def listened(self) -> float:
        left = self._at - self._clock.now()
        if left <= 0:
            self._clock.after_polling(self._ring)
        return left

    def _ring(self) -> None:
        if not self.is_over:
            self._limit.reschedule(0)
