"""Lag of event loops and proxies: the queues in front of the limits. `LagGuard` and `ProxyQueue` are pure.

A heartbeat is due every 10 ms. While it is late, each iteration admits only requests of its first 10 ms. Without a loop, waits
reported by a trusted proxy replace heartbeats.

uvloop accepts one connection per iteration, so heartbeats may be on time with a queue in the listening socket: unaccepted
connections count, too.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
from collections.abc import Callable
from contextvars import Context
from threading import local
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

from limitgate.process.clock import asyncio_loop, monotonic
from limitgate.process.forking import reset_in_children

EVERY_S = 0.010
"""Seconds between heartbeats."""
TARGET_S = 0.005
"""Tolerated lag in seconds."""
INTERVAL_S = 0.100
"""A loop with more than `TARGET_S` of lag for this many seconds is hot."""
INTERVAL_REQUESTS = 10
"""Minimum number of requests: the longer of both applies."""
BUDGET_S = 0.010
"""Seconds for requests per iteration of a hot loop."""
BUDGET_REQUESTS = 2
"""Minimum number of requests: the longer of both applies."""
WAITING_S = 0.030
"""Seconds to add to the lag while connections wait, because they haven't caused work yet."""
LEARNED = 0.1
"""Weight of an iteration in the mean duration of a request."""
RESTS_AFTER = 100


class LagGuard:
    """Receives heartbeats or waits. ``unaccepted`` returns the number of waiting connections."""

    __slots__ = ("_late_since", "_quiet", "_stands", "_unaccepted", "begun", "due_at", "is_hot", "lag_s", "request_s")

    def __init__(self, unaccepted: Callable[[], int] = int) -> None:
        self.due_at: float = math.inf
        """Time of the next heartbeat; infinite while heartbeats pause."""
        self.is_hot: bool = False
        self.lag_s: float = 0.0
        self.request_s: float = 0.0
        """Mean seconds of the loop per request; 0 before any lag."""
        self.begun: int = 0
        self._quiet = 0
        self._late_since: float | None = None
        self._unaccepted = unaccepted
        self._stands = False
        """True if connections waited at the last heartbeat, although it was on time."""

    def start(self, now: float) -> float:
        """Return the time of the first heartbeat."""
        self.begun = self._quiet = 0
        self.is_hot, self._late_since = False, None
        self.due_at = now + EVERY_S
        return self.due_at

    def beat(self, now: float) -> float | None:
        """Return the next heartbeat, None to pause until a request."""
        lag_s = max(0.0, now - self.due_at)
        stood, waiting = self._stands, 0 if lag_s > TARGET_S else self._unaccepted()
        self._stands = waiting > 0
        if (lag_s > TARGET_S or (stood and waiting)) and self.begun:
            self.request_s += LEARNED * (min(1.0, (lag_s + EVERY_S) / self.begun) - self.request_s)
        self._quiet = 0 if self.begun else self._quiet + 1
        self.begun = 0
        self._observe(now, max(lag_s, waiting * self.request_s))
        self.due_at = now + EVERY_S if self._quiet < RESTS_AFTER or self.is_hot else math.inf
        return None if self.due_at == math.inf else self.due_at

    @property
    def is_late(self) -> bool:
        return self.is_hot or self._late_since is not None

    def waited(self, now: float, wait_s: float) -> None:
        """Note how long the current request waited, as its proxy reports."""
        wait_s = max(0.0, wait_s)
        self.due_at = now - wait_s
        self._observe(now, wait_s)

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """Call once per request. ``share`` is its priority's part of an iteration."""
        over_s = now - self.due_at
        if not self.is_hot and (over_s > 0 or self._late_since is not None):
            since = self.due_at if self._late_since is None else self._late_since
            self.is_hot = now - since >= max(INTERVAL_S, INTERVAL_REQUESTS * self.request_s)
        if self.is_hot:
            budget_s = max(BUDGET_S, BUDGET_REQUESTS * self.request_s) * share
            if over_s > budget_s or (self._stands and self._unaccepted() * self.request_s > WAITING_S * share + budget_s):
                return True
        self.begun += 1
        return False

    def _observe(self, now: float, lag_s: float) -> None:
        self.lag_s = lag_s
        if lag_s <= max(TARGET_S, self.request_s):
            self._late_since, self.is_hot = None, False
        elif self._late_since is None:
            self._late_since = now - lag_s


CLOCKS_S = 0.050
"""Tolerated difference of two synchronized clocks, and delay."""
LASTS_S = 10.0
"""If the minimum wait lasts longer than this, it isn't a queue."""


class ProxyQueue:
    __slots__ = ("_before_s", "_least_s", "_turns_at")

    def __init__(self) -> None:
        self._least_s = self._before_s = math.inf
        self._turns_at = -math.inf

    def lag_s(self, now: float, waited_s: float) -> float:
        if now >= self._turns_at:
            is_first = math.isinf(self._turns_at)
            self._before_s, self._least_s = math.inf if is_first else self._least_s, waited_s
            self._turns_at = now + LASTS_S
        elif waited_s < self._least_s:
            self._least_s = waited_s
        known_s = min(self._least_s, CLOCKS_S) if math.isinf(self._before_s) else min(self._least_s, self._before_s)
        return waited_s - known_s


DESCRIPTORS = 256
"""Number of descriptors to scan. Servers open their listening sockets first."""
SCAN_EVERY_S = 60.0
"""Seconds between scans. A closed socket also triggers a scan."""
_INFO: Final[int] = getattr(socket, "TCP_INFO", 0)
_LISTENS: Final = 10
"""First byte of `tcp_info`."""
_WAITING: Final = slice(24, 28)
"""`tcpi_unacked`: a listening socket's queue."""


class ListenQueue:
    """Accept queues of listening sockets: TCP on Linux. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._sockets: list[int] = []
        """File descriptors, which may be reused."""
        self._scan_at = -math.inf

    def __call__(self) -> int:
        """Return the number of waiting connections, 0 if unknown."""
        lengths = [_length(descriptor) for descriptor in self._sockets]
        if None in lengths or self._clock() >= self._scan_at:
            self._scan_at = self._clock() + SCAN_EVERY_S
            self._sockets = [descriptor for descriptor in range(DESCRIPTORS) if _length(descriptor) is not None]
            lengths = [_length(descriptor) for descriptor in self._sockets]
        return sum([length or 0 for length in lengths])


def _length(descriptor: int) -> int | None:
    """Return None if it isn't a listening socket. Queries a duplicate, because the server may close its own."""
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
    """Ignores time when the loop didn't run, and sequential requests of a task."""

    __slots__ = ("_run", "_task", "admits_until")

    def __init__(self) -> None:
        super().__init__(_unaccepted)
        self.admits_until: float = -math.inf
        """Next heartbeat while the loop isn't late."""
        self._run: object = None
        self._task: Callable[[], object] = lambda: None

    def start(self, now: float) -> float:
        self._run = _run()
        self.admits_until = super().start(now)
        return self.admits_until

    def beat(self, now: float) -> float | None:
        due_at = super().beat(now) if self._run is _run() else self.start(now)
        self.admits_until = -math.inf if due_at is None or self.is_late else due_at
        return due_at

    def refuses(self, now: float, share: float = 1.0) -> bool:
        if now > self.due_at:
            if self._run is not _run() or self._is_of_same_task():
                self.start(now)
            elif not self.begun:
                self.begun = 1
                return False
        return super().refuses(now, share)

    def _is_of_same_task(self) -> bool:
        task, before = asyncio.current_task(), self._task()
        if task is None or task is before:
            return task is not None
        self._task = ref(task)
        return False


def _run() -> object:
    return sys.get_asyncgen_hooks().firstiter


class Lagging(Protocol):
    @property
    def lag_s(self) -> float | None: ...


class _Here(local):
    guard = LoopGuard()
    """Guard of the loop that ran last in this thread."""


class Heartbeats:
    """Guards of running event loops. ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._others: WeakKeyDictionary[Lagging, None] = WeakKeyDictionary()
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._guards: WeakKeyDictionary[_Loop, LoopGuard] = WeakKeyDictionary()
        self._here = _Here()

    def refuses(self, now: float, share: float = 1.0) -> bool:
        """Raises `ConfigError` without a running loop."""
        guard = self._here.guard
        # Asking for the running loop takes a system call in Python 3.11, so do it only if the last one may be late.
        if now <= guard.admits_until:
            guard.begun += 1
            return False
        return self._of(asyncio_loop("adaptive")).refuses(now, share)

    def guard(self) -> LoopGuard | None:
        """Start the running loop's heartbeat; None without a loop."""
        try:
            return self._of(asyncio.get_running_loop())
        except RuntimeError:
            return None

    def _of(self, loop: _Loop) -> LoopGuard:
        guard = self._guards.get(loop)
        if guard is None:
            guard = self._guards.setdefault(loop, LoopGuard())
        self._here.guard = guard
        if guard.due_at == _NEVER:
            now = self._clock()
            self._set(loop, guard, guard.start(now) - now)
        return guard

    @property
    def are_known(self) -> bool:
        return len(self._guards) > 0 or len(self._others) > 0

    def note(self, other: Lagging) -> None:
        """Include another source of lag while the object lives."""
        self._others[other] = None

    def lags_s(self) -> list[float]:
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
    return [key for each in weakly.keyrefs() if (key := each()) is not None]


heartbeats: Heartbeats = Heartbeats()
