"""Group commit: threads that ask Redis at the same time share a script call.

The first thread is the leader and calls at once. Others wait; then the thread with the most time left leads the next call. Only
time in which the leader listens counts for timeouts. If the leader hangs elsewhere, others wait `HANGS` more seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from threading import Lock

from limitgate.errors import StoreError
from limitgate.limits.template import AnyAnswer, AnyPlan, PlainSpend
from limitgate.process.clock import monotonic
from limitgate.stores.base import Room
from limitgate.stores.redis.threads.connection import SHORTEST, ListenDeadline, WaitForThread

Exchange = Callable[[Sequence[AnyPlan], ListenDeadline], Sequence[AnyAnswer | StoreError]]

_LEADER = "goes"
HANGS = 0.5
"""Seconds that a follower waits after its timeout if the leader hangs."""
_LOOK_EVERY = 0.05
"""Seconds between checks for a hanging leader."""


class _Request:
    __slots__ = ("due", "outcome", "plan", "wake")

    def __init__(self, plan: AnyPlan, due: float) -> None:
        self.plan = plan
        self.due = due
        """Deadline on the clock ``CallCoalescer.listening.spent``."""
        self.outcome: AnyAnswer | StoreError | None = None
        self.wake = Lock()
        """Locked until there is an outcome, or the thread becomes the leader."""
        self.wake.acquire()


class CallCoalescer:
    """Calls ``exchange(plans, listen_deadline)`` with at most ``most`` plans."""

    def __init__(self, exchange: Exchange, most: int) -> None:
        self._exchange = exchange
        self._most = most
        self._waiting: deque[_Request] = deque()
        """Requests without a call in flight, the oldest first."""
        self._turn: dict[str, object] = {}
        """The leader under `_LEADER`. ``dict.setdefault`` is atomic and cheaper than a lock."""
        self._lock = Lock()
        self.listening: ListenDeadline = ListenDeadline(0)
        """In ``spent``, the total time in which leaders listened."""

    def spend(self, plan: AnyPlan, timeout: float) -> AnyAnswer:
        """Carry out a plan. Raises `StoreError` within ``timeout`` seconds."""
        listening, alone = self.listening, [plan]
        began = listening.spent
        try:
            if not self._waiting and self._turn.setdefault(_LEADER, alone) is alone:
                listening.left = timeout if timeout > SHORTEST else SHORTEST  # noqa: FURB136 - ten times faster than max()
                try:
                    outcome = self._exchange(alone, listening)[0]
                finally:
                    self._step_down(alone)
            else:
                outcome = self._shared(_Request(plan, began + timeout))
            waited = listening.spent - began
        # A signal handler may raise anywhere, even in the block above.
        except BaseException as error:
            self._step_down(alone)
            if isinstance(error, StoreError):
                error.waited = min(listening.spent - began, timeout)
            raise
        if isinstance(outcome, PlainSpend) and not waited:
            return outcome
        if isinstance(outcome, StoreError):
            outcome.waited = min(waited, timeout)
            raise outcome
        return outcome.having_waited(min(waited, timeout)) if waited else outcome

    def _shared(self, mine: _Request) -> AnyAnswer | StoreError:
        try:
            self._waiting.append(mine)
            # The leader may have looked for followers just before.
            if _LEADER not in self._turn:
                self._elect_leader()
            self._wait(mine)
            if self._turn.get(_LEADER) is mine:
                self._go(mine)
        # A signal handler, or gevent in waiting threads, may raise anywhere.
        except BaseException:
            self._withdraw(mine)
            self._step_down(mine)
            raise
        return StoreError("the call to Redis was interrupted", "connection") if mine.outcome is None else mine.outcome

    def _wait(self, mine: _Request) -> None:
        """Wait for an outcome or leadership, until the deadline, or until a leader hangs too long."""
        wake, left = mine.wake, mine.due - self.listening.spent
        waiting, began, leader = None, 0.0, None
        while not wake.acquire(True, left if left > SHORTEST else SHORTEST):  # noqa: FURB136 - twice as fast as max()
            if mine.outcome is not None:
                return
            if waiting is None:
                waiting = WaitForThread(ListenDeadline(HANGS))
            elif self._turn.get(_LEADER) is leader:
                waiting.waited_in_vain(left, monotonic() - began)
            leader, left, began = self._turn.get(_LEADER), min(mine.due - self.listening.spent, _LOOK_EVERY), monotonic()
            if left <= 0 or waiting.listen_deadline.is_over:
                self._give_up(mine)
                return

    def _give_up(self, mine: _Request) -> None:
        with self._lock:
            if self._turn.get(_LEADER) is not mine and mine.outcome is None:
                mine.outcome = StoreError("no answer from Redis within the timeout", "timeout")
                if mine in self._waiting:
                    self._waiting.remove(mine)

    def _go(self, mine: _Request) -> None:
        together: list[_Request] = []
        try:
            self._gather(mine.due, together)
            self.listening.left = max(mine.due - self.listening.spent, SHORTEST)
            outcomes = self._exchange(list(map(_plan, together)), self.listening)
            for request, outcome in zip(together, outcomes):
                request.outcome = outcome
        except StoreError as error:
            for request in together:
                request.outcome = error.anew()
            raise
        except BaseException:
            # Leadership must not pass to a thread that has left.
            for request in (mine, *together):
                self._withdraw(request)
            raise
        finally:
            # First, so that followers can join the next call.
            try:
                for request in together:
                    if request is not mine:
                        request.wake.release()
            finally:
                self._step_down(mine)

    def _gather(self, due: float, together: list[_Request]) -> None:
        with self._lock:
            for request in self._next(due):
                # First, so that an interruption loses no request.
                together.append(request)
                self._waiting.remove(request)

    def _next(self, due: float = math.inf) -> list[_Request]:
        room, together = Room(), []
        for request in islice(self._waiting.copy(), self._most):
            if request.due <= due:
                if not room.takes(request.plan):
                    break
                together.append(request)
        return together

    def _step_down(self, mine: object) -> None:
        if self._turn.get(_LEADER) is mine:
            del self._turn[_LEADER]
        # Later threads see that there is no leader.
        if self._waiting:
            self._elect_leader()

    def _elect_leader(self) -> None:
        """Elect the request with the most time left, so that the call doesn't end early for others."""
        with self._lock:
            if self._waiting and _LEADER not in self._turn:
                following = max(self._next(), key=_due)
                try:
                    if self._turn.setdefault(_LEADER, following) is following:
                        following.wake.release()
                # A signal handler may raise; waking twice is harmless.
                except BaseException:
                    if self._turn.get(_LEADER) is following and following.wake.locked():
                        following.wake.release()
                    raise

    def _withdraw(self, mine: _Request) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)


_due, _plan = attrgetter("due"), attrgetter("plan")
