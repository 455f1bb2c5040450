"""Permits of an `AdaptiveLimit` for threads and tasks: clock, lock and waiting."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import Context
from functools import partial
from threading import Event, Lock
from typing import Any
from weakref import WeakSet

from limitgate.limits.bucket import Priority
from limitgate.overload.adaptive_limit import AdaptiveLimit, Guard, Outcome, Permit
from limitgate.overload.options import Terms
from limitgate.process.clock import call_later, monotonic
from limitgate.process.forking import reset_in_children
from limitgate.process.waiting import SHORTEST


class WaitingThread:
    def __init__(self) -> None:
        self._woken = Event()

    def wake(self) -> bool:
        self._woken.set()
        return True

    def look_in(self, seconds: float, look: Callable[[], None]) -> None:
        self._woken.set()

    def wait(self, seconds: float) -> None:
        if self._woken.wait(seconds):
            self._woken.clear()


class WaitingTask:
    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self.loop.create_future()

    def wake(self) -> bool:
        """Wake the task. Return False if its event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            return False
        return True

    def look_in(self, seconds: float, look: Callable[[], None]) -> None:
        """Call ``look`` on the task's event loop."""
        with suppress(RuntimeError):  # The loop is closed.
            self.loop.call_soon_threadsafe(call_later, self.loop, seconds, look, context=Context())

    def _set(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


PermitWaiter = WaitingThread | WaitingTask


class ConcurrencyLimiter:
    """Permits of one adaptive limit, shared by threads and event loops.

    ``clock`` returns monotonic seconds, even while a test freezes time.
    """

    def __init__(self, terms: Terms, clock: Callable[[], float] = monotonic) -> None:
        self.terms: Terms = terms
        self._clock = clock
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = Lock()
        adaptive, max_delay, reserve = self.terms
        self.limit: AdaptiveLimit = AdaptiveLimit(adaptive, wall_offset=self._wall_offset, reserve=reserve, max_delay=max_delay)
        self._waiters: dict[Permit, PermitWaiter] = {}
        self._timed: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        self._abandoned: deque[Callable[[], None]] = deque()
        """Actions that the next holder of the lock runs."""

    def forget(self) -> None:
        with self._lock:
            waiters = list(self._waiters.values())
            self.reset_after_fork()
        for waiter in waiters:
            waiter.wake()

    def reconfigure(self, terms: Terms) -> None:
        with self._lock:
            if terms != self.terms:
                self.terms = terms
                self.limit.reconfigure(terms.adaptive, reserve=terms.reserve, max_delay=terms.max_delay)
                self._serve(self._clock())

    def begin(
        self, request_class: Hashable, priority: Priority, guard: Guard | None, waiter: Callable[[], PermitWaiter]
    ) -> Permit | None:
        """Return a permit, which may have to wait, see `waiter`. None without room."""
        clock = self._clock
        with self._lock:
            if self._abandoned:
                self._end_abandoned()
            permit = self.limit.begin(clock(), request_class, priority, guard)
            if type(permit) is not Permit:
                return None
            if permit.began is None:
                self._waiters[permit] = waiter()
            return permit

    def waiter(self, permit: Permit) -> Any:
        """The waiter from `begin`; None if it no longer waits."""
        return self._waiters.get(permit)

    def look(self, permit: Permit) -> float:
        """Return the seconds until the next check; 0 if the permit doesn't wait."""
        with self._lock:
            self._end_abandoned()
            now = self._clock()
            self._serve(now)
            if permit not in self._waiters:
                return 0
            return max(self.limit.due_at(now) - now, SHORTEST)

    def wait(self, permit: Permit, thread: WaitingThread) -> bool:
        while pause_s := self.look(permit):
            thread.wait(pause_s)
        return permit.began is not None

    def has_to_wait(self, permit: Permit, task: WaitingTask) -> bool:
        """True until ``woken``, also by a refusal."""
        if not self.look(permit):
            return False
        if task.loop not in self._timed:
            self._keep_time(task.loop)
        return True

    def idle(self, permit: Permit, spent_s: float) -> float:
        """Note that the request has waited for its client for ``spent_s`` seconds. Return the start of the wait.

        The request keeps its permit for ``delay`` seconds, and then until another request needs it.
        """
        now = self._clock()
        until = now + self.terms.adaptive.delay - spent_s
        self.limit.idle(permit, until)
        if self._waiters:
            with self._lock:
                waiter = next(iter(self._waiters.values()), None)
            if waiter is not None:
                waiter.look_in(until - now, self._serve_again)
        return now

    def busy(self, permit: Permit, since: float) -> float:
        """Return the seconds that the request waited for its client."""
        idle_s = max(0.0, self._clock() - since)
        self.limit.busy(permit, idle_s)
        return idle_s

    def resume(self, permit: Permit) -> None:
        with self._lock:
            self.limit.resume(permit, self._clock())

    def end(self, permit: Permit, outcome: Outcome = "untaught") -> None:
        clock = self._clock
        with self._lock:
            if self._waiters:
                self._end(permit, outcome)
            else:
                self.limit.done(permit, clock(), outcome)

    def abandon(self, permit: Permit) -> None:
        """`end` without blocking, because the garbage collector may call this."""
        self._abandon(lambda: self._end(permit, "untaught"))

    def _abandon(self, action: Callable[[], None]) -> None:
        """Run an action now, or when the lock is free."""
        self._abandoned.append(action)
        if self._lock.acquire(blocking=False):
            try:
                self._end_abandoned()
            finally:
                self._lock.release()

    def _end(self, permit: Permit, outcome: Outcome) -> None:
        self._waiters.pop(permit, None)
        now = self._clock()
        self.limit.done(permit, now, outcome)
        self._serve(now)

    def _serve(self, now: float) -> None:
        """Give permits to waiting requests. If a waiter is gone, its permit passes on."""
        is_over = not self._waiters
        while not is_over:
            is_over = True
            for permit in [each for served in self.limit.serve(now) for each in served]:
                waiter = self._waiters.pop(permit, None)
                if waiter is None or not waiter.wake():
                    self.limit.done(permit, now, "untaught")
                    is_over = False

    def _serve_again(self) -> None:
        with self._lock:
            self._serve(self._clock())

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()()

    def _keep_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer refuses all tasks of an event loop."""
        with self._lock:
            now = self._clock()
            self._serve(now)
            is_timed = any(isinstance(each, WaitingTask) and each.loop is loop for each in self._waiters.values())
            pause_s = max(self.limit.due_at(now) - now, SHORTEST)
        if is_timed:
            self._timed.add(loop)
            call_later(loop, pause_s, partial(self._keep_time, loop))
        else:
            self._timed.discard(loop)

    def _wall_offset(self) -> float:
        return time.time() - self._clock()
