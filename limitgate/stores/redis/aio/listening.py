"""Time for which an event loop listened: what a server's silence is measured by.

A loop that is blocked, starved or suspended hears no reply, so that time is nobody's silence. While somebody waits, a
`ListeningClock` looks at the loop's own clock every `GRAIN` seconds, counts little of a time in which it could not look, and
goes on only after the loop has polled its sockets once more: whoever is answered by then has not waited.
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
"""Seconds between two looks, at most and at least."""
LONGEST = 0.05
"""Seconds that count between two looks, at most: of more the loop was away. So much of it counts all the same, as it polls its
sockets in between, and a server that is silent each time is silent."""
LATE = 0.002
"""Seconds by which a look comes late if the loop was away: threads that want the GIL keep it for 5 ms each."""
ASLEEP = 1.0
"""Seconds without a look after which the process was stopped, rather than busy."""
AWAY = 0.1
"""Share of a timeout that counts of a time in which the loop was away while a connection is made, which takes such a loop
several turns; `GRAIN` at most."""


class Listener(Protocol):
    """Somebody who waits."""

    def listened(self) -> float | None:
        """Note that the clock has gone on. Seconds that are left until a time is over; None once nobody waits."""


class ListeningClock:
    """Seconds for which the running event loop has listened in vain. It stands still while nobody waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_stopped, self._time = False, self._loop.time
        self.seconds = 0.0
        """Seconds at the latest look."""
        self._passed = 0.0
        """Seconds that count as soon as sockets have been polled."""
        self.was_away = False
        """True if the loop was away before one of the latest two looks: a starved one is in time by chance."""
        self.sleeps = 0
        """How often the loop stood still while somebody waited: it was not run, or the process was stopped."""
        self._run: object = None
        self._was_late = False
        self._looked = self._pause = 0.0
        self._ticks = False
        self._listeners: dict[Listener, None] = {}

    def now(self) -> float:
        """Seconds by now: what waits from now on has waited for nothing of them."""
        if not self._ticks:
            return self.seconds
        since = self._time() - self._looked
        return self.seconds + self._passed + (since if since < LONGEST else LONGEST)  # noqa: FURB136 - min() takes longer

    def watch(self, listener: Listener) -> None:
        """Tell somebody of each look, until nobody waits there."""
        self._listeners[listener] = None
        if not self._ticks:
            self._ticks = True
            self._looked, self._run = self._time(), _run()
            self._look_later(GRAIN)

    def forget(self, listener: Listener) -> None:
        """Nobody waits there any more."""
        self._listeners.pop(listener, None)

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

    def _look_later(self, pause: float) -> None:
        self._pause = pause
        if asyncio_is_stopped() is not self._is_stopped:
            self._is_stopped = not self._is_stopped
            self._time = monotonic if self._is_stopped else self._loop.time
            self._looked = self._time()
        call_later(self._loop, pause, self._look)  # it goes on after the request that waits now

    def _look(self) -> None:
        """Look at the clock, and count once what has arrived by now is read.

        asyncio reads after the callbacks that are due already, uvloop after its timers: both before the turn after the next.
        """
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
            with logged_errors():  # else no time would ever be over again
                left = listener.listened()
            if left is None:
                self.forget(listener)
            else:
                soonest = min(soonest, left)
        self._ticks = bool(self._listeners)
        if self._ticks:
            self._look_later(max(soonest, SHORTEST))


def _run() -> object:
    """An object that is another one whenever the event loop of this thread is run anew: it sets new hooks each time."""
    return sys.get_asyncgen_hooks().firstiter


class Silence:
    """Time for which a server owed answers and gave none while the loop listened. It stands still while nobody waits."""

    __slots__ = ("_clock", "_looked", "_was_broken", "seconds")

    def __init__(self, clock: ListeningClock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._looked: float | None = None
        self._was_broken = False

    def watch(self, listener: Listener) -> None:
        """Have a listener that waits from now on told of each look."""
        if self._looked is None:
            self._looked = self._clock.now()
            self._clock.watch(listener)

    def break_(self) -> None:
        """Note that something was answered: the time since the last look was no silence."""
        self._was_broken = True

    def go_on(self, *, connecting: float = math.inf) -> bool:
        """Count the time since the last look. False if none of it was silence.

        While a connection is made for those who wait for ``connecting`` seconds, little counts if the loop was away.
        """
        now, looked = self._clock.seconds, self._looked
        passed = 0.0 if looked is None or self._was_broken else max(0.0, now - looked)
        if connecting < math.inf:
            passed = min(passed, GRAIN, AWAY * connecting if self._clock.was_away else GRAIN)
        self._looked, self._was_broken = now, False
        self.seconds += passed
        return passed > 0

    def stop(self) -> None:
        """Nobody waits any more."""
        self._looked = None


class _Deadline:
    """The end of `ListeningClock.within`."""

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
