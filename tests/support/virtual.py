"""Time that goes on by itself: whoever sleeps or waits is woken at once, and every clock has gone on by just so long."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from threading import Event
from typing import Any, TypeVar

import pytest

from limitgate import MemoryStore
from limitgate.outbound import throttle
from limitgate.process import waiting

T = TypeVar("T")
_BEGAN = 1_790_000_000_000_000


class World:
    """One time for everything: stores, monotonic clocks, threads that sleep and event loops that wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.us = 0
        """Microseconds since it all began."""
        self.waits = 0
        """How often an event loop has waited for something."""
        self.errors: list[Any] = []
        """What an event loop complained of."""
        self.slept: list[float] = []
        """Seconds for which threads have slept."""
        monkeypatch.setattr(waiting, "monotonic", self.monotonic)
        monkeypatch.setattr(waiting, "sleep", self.sleep)
        monkeypatch.setattr(throttle, "MemoryStore", lambda: MemoryStore(self))

    def __call__(self) -> int:
        """The clock of a store."""
        return _BEGAN + self.us

    @property
    def now(self) -> float:
        """Seconds since it all began, as a test would write them: a timer may ring two microseconds late."""
        return round(self.us / 1_000_000, 5)

    def monotonic(self) -> float:
        return 1000 + self.us / 1_000_000

    def advance(self, seconds: float) -> None:
        self.us += round(seconds * 1_000_000)

    def sleep(self, seconds: float, wake: Event | None = None) -> None:
        self.slept.append(seconds)
        self.us += round(seconds * 1_000_000) + 1

    def loop(self) -> asyncio.AbstractEventLoop:
        """An event loop of this world."""
        loop = asyncio.SelectorEventLoop(_Selector(self))
        loop.time = self.monotonic  # type: ignore[method-assign]
        loop.set_exception_handler(lambda _, error: self.errors.append(error))
        return loop

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run on an event loop of this world."""
        with asyncio.Runner(loop_factory=self.loop) as runner:
            result = runner.run(main)
        assert not self.errors
        return result


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never waits: it lets time go by until the next timer rings, and a microsecond, so that none rings too early."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if found or timeout == 0:
            return found
        self._world.waits += 1
        if timeout is None:
            return super().select(5)  # a thread has to say something
        self._world.us += round(timeout * 1_000_000) + 1
        return found
