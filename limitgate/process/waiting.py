"""Time as those go by it who wait for a turn. `limitgate.testing.frozen` replaces all of it, by these names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context

SHORTEST = 0.001
"""Seconds of the shortest timer: no event loop has finer ones, and one that rings a bit early is set again."""

monotonic = time.monotonic
"""Seconds by a clock that never steps."""
sleep = time.sleep
"""Sleep so many seconds in this thread."""
asleep = asyncio.sleep
"""Sleep so many seconds on the event loop."""


def sleep_until(due_at: float) -> None:
    """Sleep in this thread until a time of `monotonic`."""
    while (left := due_at - monotonic()) > 0:
        sleep(left)


def call_at(loop: asyncio.AbstractEventLoop, due_at: float, callback: Callable[[], None]) -> asyncio.Handle:
    """Have an event loop call back at a time of `monotonic`, or a bit before, in an empty context."""
    return loop.call_later(max(due_at - monotonic(), SHORTEST), callback, context=Context())
