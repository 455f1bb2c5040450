"""Clocks, timers and tasks of event loops, which run while a test freezes time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from importlib.util import find_spec, module_from_spec
from types import BuiltinFunctionType, ModuleType
from typing import Any, Protocol, TypeVar

from limitgate.errors import ConfigError

T = TypeVar("T")


def _second_module_of_time() -> ModuleType:
    """Return a module `time` whose functions freezegun doesn't replace."""
    spec = find_spec("time")
    if spec is None or spec.loader is None:
        raise ImportError("the module time has no loader", name="time")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_own_time = _second_module_of_time()
monotonic: Callable[[], float] = _own_time.monotonic


def asyncio_is_stopped() -> bool:
    """True if asyncio timers may never fire."""
    return type(time.monotonic) is not BuiltinFunctionType


def loop_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return an event loop's time, or `monotonic` if its clock is frozen."""
    return monotonic() if asyncio_is_stopped() else loop.time()


class Timer(Protocol):
    def cancel(self) -> object: ...


class _ThreadTimer:
    """A timer for an event loop with a frozen clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._callback = callback
        self._cancelled = threading.Event()
        threading.Thread(target=Context().run, args=[self._run], name="limitgate-timer", daemon=True).start()

    def _run(self) -> None:
        if not self._cancelled.wait(self._seconds):
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._call, context=Context())

    def _call(self) -> None:
        if not self._cancelled.is_set():
            self._callback()

    def cancel(self) -> None:
        self._cancelled.set()


def call_later(loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> Timer:
    """Call back in an empty context, even with a frozen clock."""
    if asyncio_is_stopped():
        return _ThreadTimer(loop, seconds, callback)
    return loop.call_later(seconds, callback, context=Context())


async def wait_within(work: asyncio.Future[Any], seconds: float) -> None:
    """Wait, even with a frozen clock. Doesn't cancel the work."""
    if not asyncio_is_stopped():
        await asyncio.wait([work], timeout=seconds)
        return
    loop = asyncio.get_running_loop()
    late = loop.create_future()
    timer = call_later(loop, seconds, late.cancel)
    try:
        await asyncio.wait([work, late], return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        late.cancel()


def asyncio_loop(what: str) -> asyncio.AbstractEventLoop:
    """Raises a `ConfigError` about ``what`` without asyncio, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    raise ConfigError(
        f"{what} needs asyncio, but no asyncio event loop is running, for example under trio; expected asyncio, "
        "such as hypercorn --worker-class asyncio or anyio's backend 'asyncio'"
    )


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Create a task that starts in the next iteration, with an empty context.

    An eager task could end before its owner knows the task. With the current context, the task would keep a request's context
    alive.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), context=Context())
