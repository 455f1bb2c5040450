"""Places in flight under an adaptive limit: what threads and tasks do to the same `AdaptiveLimit`.

Whom to let in is decided in `limitgate.overload`; here are the clock, the lock and those who wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import Context
from functools import partial
from threading import Event, Lock
from typing import Any, Protocol
from weakref import WeakSet

from limitgate.limits.priority import Priority
from limitgate.overload.adaptive_limit import AdaptiveLimit, Guard, Outcome, Permit
from limitgate.overload.options import Terms
from limitgate.process.clock import call_later, monotonic
from limitgate.process.forking import reset_in_children
from limitgate.process.waiting import SHORTEST


class PermitWaiter(Protocol):
    """Whoever waits for a place."""

    def wake(self) -> bool:
        """Have it look what has become of its ticket. False if it cannot. Called from any thread."""

    def look_in(self, seconds: float, look: Callable[[], None]) -> None:
        """Have it ``look`` after some seconds at who else has given way. Called from any thread."""


class WaitingThread:
    """A thread that waits."""

    def __init__(self) -> None:
        self._woken = Event()

    def wake(self) -> bool:
        """Have the thread go on."""
        self._woken.set()
        return True

    def look_in(self, seconds: float, look: Callable[[], None]) -> None:
        """Have the thread find out by itself when to look."""
        self._woken.set()

    def wait(self, seconds: float) -> None:
        """Wait until somebody wakes it, but no longer than so many seconds."""
        if self._woken.wait(seconds):
            self._woken.clear()


class WaitingTask:
    """A task of the running event loop that waits."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self.loop.create_future()

    def wake(self) -> bool:
        """Have the task go on. False if its event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            return False
        return True

    def look_in(self, seconds: float, look: Callable[[], None]) -> None:
        """Look on the event loop of the task."""
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(call_later, self.loop, seconds, look, context=Context())

    def _set(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class ConcurrencyLimiter:
    """The places under one adaptive limit in this process, for any number of threads and event loops.

    ``clock`` gives seconds and never steps. It is not that of `limitgate.process.waiting`, as a test that stops that one
    does not make the work any faster.
    """

    def __init__(self, terms: Terms, clock: Callable[[], float] = monotonic) -> None:
        self.terms = terms
        self._clock = clock
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget everything, in the child of a fork: a ticket of the parent is none of the new ``limit``."""
        self._lock = Lock()
        adaptive, max_delay, reserve = self.terms
        self.limit = AdaptiveLimit(adaptive, wall_offset=self._wall_offset, reserve=reserve, max_delay=max_delay)
        self._waiters: dict[Permit, PermitWaiter] = {}
        self._timed: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        """Event loops with a timer for those who wait there."""
        self._abandoned: deque[Callable[[], None]] = deque()
        """What is to be done with the lock as soon as somebody has it."""

    def forget(self) -> None:
        """Forget everything. Whoever waits gives way."""
        with self._lock:
            waiters = list(self._waiters.values())
            self.reset_after_fork()
        for waiter in waiters:
            waiter.wake()

    def reconfigure(self, terms: Terms) -> None:
        """Go on under other terms, with everything that was learned."""
        with self._lock:
            if terms != self.terms:
                self.terms = terms
                self.limit.reconfigure(terms.adaptive, reserve=terms.reserve, max_delay=terms.max_delay)
                self._serve(self._clock())

    def begin(
        self, request_class: Hashable, priority: Priority, guard: Guard | None, waiter: Callable[[], PermitWaiter]
    ) -> Permit | None:
        """Take a place, or a ticket that waits for one, see `waiter`; None if there is no room."""
        with self._lock:
            if self._abandoned:
                self._end_abandoned()
            permit = self.limit.begin(self._clock(), request_class, priority, guard)
            if type(permit) is not Permit:
                return None
            if permit.began is None:
                self._waiters[permit] = waiter()
            return permit

    def waiter(self, permit: Permit) -> Any:
        """Whoever waits by a ticket, as ``waiter`` of `begin` has made it; None if the waiting is over."""
        return self._waiters.get(permit)

    def look(self, permit: Permit) -> float:
        """Seconds after which to look again for whoever waits; 0 if the waiting is over."""
        with self._lock:
            self._end_abandoned()
            now = self._clock()
            self._serve(now)
            if permit not in self._waiters:
                return 0
            return max(self.limit.due_at(now) - now, SHORTEST)

    def wait(self, permit: Permit, thread: WaitingThread) -> bool:
        """Wait in this thread. True if it has its place, False if it had to give way."""
        while pause_s := self.look(permit):
            thread.wait(pause_s)
        return permit.began is not None

    def has_to_wait(self, permit: Permit, task: WaitingTask) -> bool:
        """True if a task has to wait until it is ``woken``, in time if it is to give way."""
        if not self.look(permit):
            return False
        if task.loop not in self._timed:
            self._keep_time(task.loop)
        return True

    def idle(self, permit: Permit, spent_s: float) -> float:
        """Note that a request waits for its client, as it has done for some seconds already. Returns when that began.

        It keeps its place for ``delay`` seconds in all, and then until somebody else needs it.
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
        """Note that a request has what it has waited for. Returns for how many seconds it did."""
        idle_s = max(0.0, self._clock() - since)
        self.limit.busy(permit, idle_s)
        return idle_s

    def resume(self, permit: Permit) -> None:
        """Have a request that has lost its place to others take one again."""
        with self._lock:
            self.limit.resume(permit, self._clock())

    def end(self, permit: Permit, outcome: Outcome = "untaught") -> None:
        """Give back a place, or wait for it no more. To do so twice changes nothing."""
        with self._lock:
            if self._waiters:
                self._end(permit, outcome)
            else:
                self.limit.done(permit, self._clock(), outcome)

    def abandon(self, permit: Permit, outcome: Outcome = "untaught") -> None:
        """`end`, by the garbage collector or a `GeneratorExit` of its: in the midst of anything, so nobody may wait."""
        self._abandon(lambda: self._end(permit, outcome))

    def _abandon(self, action: Callable[[], None]) -> None:
        """Do something now if nobody has the lock, else as soon as somebody has it."""
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
        """Wake those whose waiting is over. A place for which nobody is left goes to the next one."""
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
        """Have those on an event loop give way in time. One timer does for all of them."""
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
