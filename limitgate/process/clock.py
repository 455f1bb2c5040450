"""Clocks of this process, and timers, that go on while a test has stopped time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from importlib.util import find_spec, module_from_spec
from types import BuiltinFunctionType, ModuleType


def _second_module_of_time() -> ModuleType:
    """The module `time` once more, with functions of its own.

    freezegun replaces the functions of `time` in every module that has them, and then a wait, or a timeout, would never end.
    """
    spec = find_spec("time")
    if spec is None or spec.loader is None:
        raise ImportError("the module time has no loader", name="time")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_own_time = _second_module_of_time()
monotonic: Callable[[], float] = _own_time.monotonic
"""Seconds by a clock that never steps."""


def asyncio_is_stopped() -> bool:
    """True if `time.monotonic` is not Python's own: then asyncio goes by the clock of a test, and its timers may never ring."""
    return type(time.monotonic) is not BuiltinFunctionType


def loop_time(loop: asyncio.AbstractEventLoop) -> float:
    """Seconds by the clock of an event loop, or by `monotonic` if a test has stopped it."""
    return monotonic() if asyncio_is_stopped() else loop.time()


def call_later(
    loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]
) -> asyncio.Future[None] | asyncio.TimerHandle:
    """Have an event loop call back in an empty context, even if a test has stopped its clock: then a thread keeps the time."""
    if not asyncio_is_stopped():
        return loop.call_later(seconds, callback, context=Context())
    timer = loop.run_in_executor(None, time.sleep, seconds)
    timer.add_done_callback(lambda done: done.cancelled() or callback(), context=Context())
    return timer
