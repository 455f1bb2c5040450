"""Time for waiting requests, replaced by `limitgate.testing.frozen`. Other frozen clocks raise `ConfigError`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextvars import Context
from threading import TIMEOUT_MAX, Event

from limitgate.errors import ConfigError
from limitgate.process import clock

SHORTEST = 0.001
"""Seconds of the shortest timer of event loops."""

monotonic: Callable[[], float] = clock.monotonic


def require_running_clock() -> None:
    """Raise `ConfigError` for frozen time: a wait would never end."""
    time_machine = sys.modules.get("time_machine")
    if not clock.asyncio_is_stopped() and (time_machine is None or not time_machine.escape_hatch.is_travelling()):
        return
    before = time.time_ns()
    time.sleep(SHORTEST)
    if time.time_ns() == before:
        raise ConfigError(
            "a test stopped the clock with freezegun or time-machine, so a wait for a turn might never end; expected "
            "limitgate.testing.frozen() or the fixture limitgate_clock, which advance the clock, or tick=True"
        )


def sleep(seconds: float, wake: Event | None = None) -> None:
    """Sleep, at most until ``wake`` is set."""
    require_running_clock()
    if wake is None:
        time.sleep(seconds)
    else:
        wake.wait(min(seconds, TIMEOUT_MAX))


async def asleep(seconds: float) -> None:
    require_running_clock()
    await asyncio.sleep(seconds)


def sleep_until(due_at: float) -> None:
    while (left := due_at - monotonic()) > 0:
        sleep(left)


def call_at(loop: asyncio.AbstractEventLoop, due_at: float, callback: Callable[[], None]) -> asyncio.Handle:
    """Call back, perhaps slightly too early. Call `require_running_clock` first."""
    return loop.call_later(max(due_at - monotonic(), SHORTEST), callback, context=Context())
