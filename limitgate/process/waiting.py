"""Time as those go by it who wait for a turn. `limitgate.testing.frozen` replaces all of it, by these names."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextvars import Context

from limitgate.errors import ConfigError
from limitgate.process import clock

SHORTEST = 0.001
"""Seconds of the shortest timer: no event loop has finer ones, and one that rings a bit early is set again."""

monotonic = clock.monotonic
"""Seconds by a clock that never steps."""


def require_running_clock() -> None:
    """Raise `ConfigError` if a test has stopped the clock by which buckets in memory refill: waiting would be in vain."""
    time_machine = sys.modules.get("time_machine")
    if not clock.asyncio_is_stopped() and (time_machine is None or not time_machine.escape_hatch.is_travelling()):
        return
    before = time.time_ns()
    time.sleep(SHORTEST)
    if time.time_ns() == before:
        raise ConfigError(
            "a test has stopped the clock with freezegun or time-machine, so that a wait for a turn might never end, expected "
            "limitgate.testing.frozen() or the fixture limitgate_clock, which move the clock on instead, or tick=True"
        )


def sleep(seconds: float) -> None:
    """Sleep in this thread. Raises `ConfigError` if the clock stands still."""
    require_running_clock()
    time.sleep(seconds)


async def asleep(seconds: float) -> None:
    """Sleep on the event loop. Raises `ConfigError` if the clock stands still."""
    require_running_clock()
    await asyncio.sleep(seconds)


def sleep_until(due_at: float) -> None:
    """Sleep in this thread until a time of `monotonic`. Raises `ConfigError` if the clock stands still."""
    while (left := due_at - monotonic()) > 0:
        sleep(left)


def call_at(loop: asyncio.AbstractEventLoop, due_at: float, callback: Callable[[], None]) -> asyncio.Handle:
    """Have an event loop call back at a time of `monotonic`, or a bit before, in an empty context.

    Call `require_running_clock` before waiting for that: otherwise a stopped event loop never calls.
    """
    return loop.call_later(max(due_at - monotonic(), SHORTEST), callback, context=Context())
