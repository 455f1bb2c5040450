"""Listening time of an event loop, which measures a server's silence.

A blocked or suspended loop receives no replies, so that time must not count. A `ListeningClock` ticks every `GRAIN` seconds,
and advances after the loop has polled its sockets. A late tick counts only in small part.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from limitgate.internal_errors import logged_errors
from limitgate.process.clock import asyncio_is_stopped, call_later, monotonic

GRAIN, SHORTEST = 0.01, 0.004
"""Seconds between ticks, and the minimum."""
LONGEST = 0.05
"""Maximum of seconds that a tick counts. The loop polls its sockets between ticks."""
LATE = 0.002
"""If a tick is late by this many seconds, the loop did other work. Waits for the GIL take 5 ms."""
ASLEEP = 1.0
"""After this many seconds without a tick, the process was suspended."""
AWAY = 0.1
"""Share of a timeout, at most `GRAIN`, that a late tick counts during a connection attempt."""


class Listener(Protocol):
    def listened(self) -> float | None:
        """Return the seconds until the next deadline; None to stop."""


class ListeningClock:
    """Counts listening time while there are listeners."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_stopped, self._time = False, self._loop.time
        self.seconds: float = 0.0
        self._passed = 0.0
        self.was_away: bool = False
        """True if the loop did other work before one of the latest two ticks."""
        self.sleeps: int = 0
        """Number of times that the loop or process stood still."""
        self._run: object = None
        self._was_late = False
        self._looked = self._pause = 0.0
        self._ticks = False
        self._listeners: dict[Listener, None] = {}

    def now(self) -> float:
        if not self._ticks:
            return self.seconds
        since = self._time() - self._looked
        return self.seconds + self._passed + (since if since < LONGEST else LONGEST)  # noqa: FURB136 - min() is slower

    def watch(self, listener: Listener) -> None:
        self._listeners[listener] = None
        if not self._ticks:
            self._ticks = True
            self._looked, self._run = self._time(), _run()
            self._look_later(GRAIN)

    def forget(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as limit:
            deadline = _Deadline(self, seconds, limit)
            self.watch(deadline)
            try:
                yield
            finally:
                self.forget(deadline)

    def _look_later(self, pause: float) -> None:
        self._pause = pause
        if asyncio_is_stopped() is not self._is_stopped:
            self._is_stopped = not self._is_stopped
            self._time = monotonic if self._is_stopped else self._loop.time
            self._looked = self._time()
        # The timer outlives the request's context.
        call_later(self._loop, pause, self._look)

    def _look(self) -> None:
        """Count time after sockets were read, which asyncio and uvloop do before the iteration after next."""
        now = self._time()
        is_late = now - self._looked > self._pause + LATE
        self.was_away, self._was_late = is_late or self._was_late, is_late
        run = _run()
        if run is not self._run or now - self._looked > ASLEEP:
            self._run = run
            self.sleeps += 1
        self._passed, self._looked = min(now - self._looked, LONGEST), now
        self._loop.call_soon(self._loop.call_soon, self._count)

    def _count(self) -> None:
        self.seconds, self._passed = self.seconds + self._passed, 0.0
        soonest = GRAIN
        for listener in list(self._listeners):
            left: float | None = GRAIN
            with logged_errors():
                left = listener.listened()
            if left is None:
                self.forget(listener)
            else:
                soonest = min(soonest, left)
        self._ticks = bool(self._listeners)
        if self._ticks:
            self._look_later(max(soonest, SHORTEST))


def _run() -> object:
    """Identify a run of the loop: each run installs new asyncgen hooks."""
    return sys.get_asyncgen_hooks().firstiter


class Silence:
    """Listening time in which a due answer hasn't arrived. Pauses while no caller waits."""

    __slots__ = ("_clock", "_looked", "_was_broken", "seconds")

    def __init__(self, clock: ListeningClock) -> None:
        self.seconds: float = 0.0
        self._clock = clock
        self._looked: float | None = None
        self._was_broken = False

    def watch(self, listener: Listener) -> None:
        if self._looked is None:
            self._looked = self._clock.now()
            self._clock.watch(listener)

    def break_(self) -> None:
        self._was_broken = True

    def go_on(self, *, connecting: float = math.inf) -> bool:
        """Return False if there was no silence.

        ``connecting`` is the timeout of a connection attempt, during which late ticks count little.
        """
        now, looked = self._clock.seconds, self._looked
        passed = 0.0 if looked is None or self._was_broken else max(0.0, now - looked)
        if connecting < math.inf:
            passed = min(passed, GRAIN, AWAY * connecting if self._clock.was_away else GRAIN)
        self._looked, self._was_broken = now, False
        self.seconds += passed
        return passed > 0

    def stop(self) -> None:
        self._looked = None


class _Deadline:
    def __init__(self, clock: ListeningClock, seconds: float, limit: asyncio.Timeout) -> None:
        self._clock = clock
        self._at = clock.now() + seconds
        self._limit = limit

    def listened(self) -> float | None:
        left = self._at - self._clock.seconds
        if left > 0:
            return left
        self._limit.reschedule(0)
        return None
