"""Clocks and timers that keep running while a test has frozen time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from importlib.util import find_spec, module_from_spec
from types import BuiltinFunctionType, ModuleType


def _second_module_of_time() -> ModuleType:
    """Return a second copy of module `time`, whose functions freezegun doesn't replace."""
    spec = find_spec("time")
    if spec is None or spec.loader is None:
        raise ImportError("the module time has no loader", name="time")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_own_time = _second_module_of_time()
monotonic: Callable[[], float] = _own_time.monotonic


def asyncio_is_stopped() -> bool:
    """Return True if a test replaced `time.monotonic`: then asyncio timers may never fire."""
    return type(time.monotonic) is not BuiltinFunctionType


def loop_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return seconds on the clock of an event loop, or of `monotonic` if it is frozen."""
    return monotonic() if asyncio_is_stopped() else loop.time()


def call_later(
    loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]
) -> asyncio.Future[None] | asyncio.TimerHandle:
    """Call back on an event loop in an empty context, even if its clock is frozen."""
    if not asyncio_is_stopped():
        return loop.call_later(seconds, callback, context=Context())
    timer = loop.run_in_executor(None, time.sleep, seconds)
    timer.add_done_callback(lambda done: done.cancelled() or callback(), context=Context())
    return timer
