"""Heartbeats: timers that measure the lag of an event loop for a `LagGuard` while there is traffic."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

from limitgate.overload.lag_guard import LagGuard
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

DESCRIPTORS = 256
"""File descriptors to scan for listening sockets, which servers open first."""
SCAN_EVERY_S = 60.0
"""Interval between scans in seconds; a closed socket triggers an earlier scan."""
_INFO: Final[int] = getattr(socket, "TCP_INFO", 0)
_LISTENS: Final = 10
"""State of a listening socket, the first byte of `tcp_info`."""
_WAITING: Final = slice(24, 28)
"""`tcpi_unacked`, the queue length of a listening socket."""


class ListenQueue:
    """Accept queues of all listening sockets of this process. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._sockets: list[int] = []
        """File descriptors, which may have been closed and reused."""
        self._scan_at = -math.inf

    def __call__(self) -> int:
        """Return the number of waiting connections, 0 if the system doesn't report it."""
        lengths = [_length(descriptor) for descriptor in self._sockets]
        if None in lengths or self._clock() >= self._scan_at:
            self._scan_at = self._clock() + SCAN_EVERY_S
            self._sockets = [descriptor for descriptor in range(DESCRIPTORS) if _length(descriptor) is not None]
            lengths = [_length(descriptor) for descriptor in self._sockets]
        return sum([length or 0 for length in lengths])


def _length(descriptor: int) -> int | None:
    """Return the queue length of a listening socket, None for other descriptors.

    Queries a duplicate, because the server may close its socket at any time.
    """
    if not _INFO:
        return None
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        # Family and type don't matter here.
        asked = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with asked:
        try:
            told = asked.getsockopt(socket.IPPROTO_TCP, _INFO, _WAITING.stop)
        except OSError:
            return None
    return int.from_bytes(told[_WAITING], "little") if told and told[0] == _LISTENS else None


T = TypeVar("T")

_unaccepted = ListenQueue()
_Loop = asyncio.AbstractEventLoop
_NEVER = math.inf


class LoopGuard(LagGuard):
    """Guard of an event loop. Ignores time when the loop didn't run, and sequential requests of one task."""

    __slots__ = ("_run", "_task")

    def __init__(self) -> None:
        super().__init__(_unaccepted)
        self._run: object = None
        self._task: Callable[[], object] = lambda: None

    def start(self, now: float) -> float:
        """Start heartbeats. Returns the time of the first one."""
        self._run = _run()
        return super().start(now)

    def beat(self, now: float) -> float | None:
        """Record a heartbeat; return the time of the next one, None to pause until a request."""
        return super().beat(now) if self._run is _run() else self.start(now)

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """Return True to refuse a request now, see `LagGuard.refuses`."""
        if now <= self.due_at:
            if self._late_since is None and not self.is_hot:
                self._begun += 1
                return False  # The fast path.
        elif self._run is not _run() or self._is_of_same_task():
            self.start(now)
        elif not self._begun:
            self._begun = 1
            return False
        return super().refuses(now, share)

    def _is_of_same_task(self) -> bool:
        task, before = asyncio.current_task(), self._task()
        if task is None or task is before:
            return task is not None
        self._task = ref(task)
        return False


def _run() -> object:
    """Return an object that identifies a run of this thread's event loop."""
    return sys.get_asyncgen_hooks().firstiter


class Lagging(Protocol):
    """A source of lag other than an event loop."""

    @property
    def lag_s(self) -> float | None:
        """Its lag in seconds, None if unknown."""


class Heartbeats:
    """Guards of event loops. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._others: WeakKeyDictionary[Lagging, None] = WeakKeyDictionary()
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget all event loops, which don't run in the child of a fork."""
        self._guards: WeakKeyDictionary[_Loop, LoopGuard] = WeakKeyDictionary()
        self._latest: tuple[Callable[[], _Loop | None], LoopGuard] = lambda: None, LoopGuard()
        """The last event loop and its guard, a fast path for the usual single loop."""

    def guard(self) -> LoopGuard | None:
        """Return the guard of the running event loop and start its heartbeat; None without a loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        known, guard = self._latest
        if known() is not loop:
            guard = self._guards.setdefault(loop, LoopGuard())
            self._latest = ref(loop), guard
        if guard.due_at == _NEVER:
            now = self._clock()
            self._set(loop, guard, guard.start(now) - now)
        return guard

    @property
    def are_known(self) -> bool:
        """True if any lag was measured."""
        return len(self._guards) > 0 or len(self._others) > 0

    def note(self, other: Lagging) -> None:
        """Include another source of lag while it lives."""
        self._others[other] = None

    def lags_s(self) -> list[float]:
        """Return all current lags in seconds."""
        others = [other.lag_s for other in _alive(self._others)]
        guards = [self._guards[loop] for loop in _alive(self._guards)]
        return [guard.lag_s for guard in guards if guard.due_at != math.inf] + [lag_s for lag_s in others if lag_s is not None]

    def _set(self, loop: _Loop, guard: LoopGuard, pause_s: float) -> None:
        loop.call_later(max(pause_s, 0), self._beat, loop, guard, context=Context())

    def _beat(self, loop: _Loop, guard: LoopGuard) -> None:
        now = self._clock()
        due_at = guard.beat(now)
        if due_at is not None:
            self._set(loop, guard, due_at - now)


def _alive(weakly: WeakKeyDictionary[T, Any]) -> list[T]:
    """Return the living keys. Lists the references first, because other threads may add keys."""
    return [key for each in weakly.keyrefs() if (key := each()) is not None]


heartbeats = Heartbeats()
