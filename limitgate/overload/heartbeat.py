"""Heartbeats: timers that tell a `LagGuard` how late its event loop is, for as long as there is traffic."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

from limitgate.overload.lag_guard import LagGuard
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.process.listen_queue import ListenQueue

T = TypeVar("T")

_unaccepted = ListenQueue()
_Loop = asyncio.AbstractEventLoop
_NEVER = math.inf


class LoopGuard(LagGuard):
    """Guard of an event loop.

    Some time is no lag, as nobody waits in it: when the loop was not run, and when one task makes request after request, as
    tests do; servers have a task for each. The first request after a heartbeat is always let in.
    """

    __slots__ = ("_run", "_task")

    def __init__(self) -> None:
        super().__init__(_unaccepted)
        self._run: object = None
        self._task: Callable[[], object] = lambda: None
        """The task of the last request that came late."""

    def start(self, now: float) -> float:
        """Begin to have heartbeats. Returns when the first is due."""
        self._run = _run()
        return super().start(now)

    def beat(self, now: float) -> float | None:
        """Note a heartbeat. Returns when the next one is due, None if there need be none until a request comes."""
        return super().beat(now) if self._run is _run() else self.start(now)

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """True if a request that comes now is too much, see `LagGuard.refuses`."""
        if now <= self.due_at:
            if self._late_since is None and not self.is_hot:
                self._begun += 1
                return False  # almost all requests
        elif self._run is not _run() or self._is_of_same_task():
            self.start(now)
        elif not self._begun:
            self._begun = 1
            return False
        return super().refuses(now, share)

    def _is_of_same_task(self) -> bool:
        """True if the request that comes now and the last one that came late are of one task."""
        task, before = asyncio.current_task(), self._task()
        if task is None or task is before:
            return task is not None
        self._task = ref(task)
        return False


def _run() -> object:
    """An object that is another one whenever the event loop of this thread is run anew: it sets new hooks each time."""
    return sys.get_asyncgen_hooks().firstiter


class Lagging(Protocol):
    """Something else than an event loop that may be late."""

    @property
    def lag_s(self) -> float | None:
        """Its lag in seconds, None while nothing is heard of it."""


class Heartbeats:
    """The guards of event loops. ``clock`` gives seconds and never steps."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._others: WeakKeyDictionary[Lagging, None] = WeakKeyDictionary()
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget all event loops: none goes on in the child of a fork."""
        self._guards: WeakKeyDictionary[_Loop, LoopGuard] = WeakKeyDictionary()
        self._latest: tuple[Callable[[], _Loop | None], LoopGuard] = lambda: None, LoopGuard()
        """The event loop that was met last and its guard: mostly there is one, which is found faster here."""

    def guard(self) -> LoopGuard | None:
        """The guard of the running event loop, whose heart beats from now on; None where none runs."""
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
        """True if any event loop has had a heartbeat, or anything else was heard of."""
        return len(self._guards) > 0 or len(self._others) > 0

    def note(self, other: Lagging) -> None:
        """Tell of the lag of something else, too, for as long as it lives."""
        self._others[other] = None

    def lags_s(self) -> list[float]:
        """Lag of each event loop that has a heartbeat, and of whatever else is late, in seconds."""
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
    """The keys that are there. Their references are listed at once, as other threads may add further ones meanwhile."""
    return [key for each in weakly.keyrefs() if (key := each()) is not None]


heartbeats = Heartbeats()
"""Heartbeats of the event loops of this process, for all gates that serve there."""
