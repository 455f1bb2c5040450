"""Threads that ask Redis at the same time share a call of the script: one of them goes for all who wait.

A thread that comes while none is on its way goes at once, for itself alone. Those that come meanwhile wait; when it is back,
the one that may wait longest goes for all. So there is one call on its way at a time, the longer it takes the more share the
next one, and plans are carried out in the order of arrival. With 32 threads that is 30 % less CPU here than a call for each
and half as much in Redis.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from operator import attrgetter
from threading import Lock

from limitgate.errors import StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores.scripted import Room

Exchange = Callable[[Sequence[Plan], float], Sequence[Reading | StoreError]]


class _Request:
    """What a thread wants to know."""

    __slots__ = ("deadline", "goes", "outcome", "plan", "told")

    def __init__(self, plan: Plan, deadline: float) -> None:
        self.plan = plan
        self.deadline = deadline
        self.outcome: Reading | StoreError | None = None
        self.goes = False
        """Whether it is this thread's turn to ask."""
        self.told = Lock()
        """Held until there is an answer, or it is this thread's turn."""


class SharedCalls:
    """Lets threads share calls of ``exchange(plans, timeout)``, at most ``most`` plans in one."""

    def __init__(self, exchange: Exchange, most: int) -> None:
        self._exchange = exchange
        self._most = most
        self._waiting: deque[_Request] = deque()
        self._somebody_goes = False
        self._lock = Lock()

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """The reading of a plan, or a `StoreError` within about ``timeout`` seconds."""
        mine = _Request(plan, time.monotonic() + timeout)
        try:
            self._arrive(mine)
            if not mine.goes and not mine.told.acquire(timeout=timeout):
                self._give_up(mine)
            if mine.goes:
                self._go(mine)
        except BaseException:  # a signal's handler may raise anywhere, and gevent and others raise in threads that wait
            self._leave(mine)
            raise
        if not isinstance(mine.outcome, Reading):
            raise mine.outcome or StoreError("the call to Redis was interrupted", "connection")
        return mine.outcome

    def _arrive(self, mine: _Request) -> None:
        with self._lock:
            self._waiting.append(mine)
            if self._somebody_goes:
                mine.told.acquire()
            else:
                self._somebody_goes = mine.goes = True

    def _give_up(self, mine: _Request) -> None:
        """The deadline is over. If it has just become this thread's turn, it goes all the same, to pass the turn on."""
        with self._lock:
            if not mine.goes and mine.outcome is None:
                mine.outcome = StoreError("no answer from Redis within the timeout", "timeout")
                if mine in self._waiting:
                    self._waiting.remove(mine)

    def _go(self, mine: _Request) -> None:
        """Ask for this thread and for those who wait, then pass the turn on."""
        together: list[_Request] = []
        try:
            with self._lock:
                for _ in self._next():
                    together.append(self._waiting.popleft())  # noqa: PERF401 - an interruption loses none
            left = max(0.001, mine.deadline - time.monotonic())
            outcomes = self._exchange([request.plan for request in together], left)
            for request, outcome in zip(together, outcomes):
                request.outcome = outcome
        except StoreError as error:
            for request in together:
                request.outcome = StoreError(str(error), error.fault)
            raise
        finally:
            self._pass_on(mine)
            for request in together:
                if request is not mine:
                    request.told.release()

    def _next(self) -> list[_Request]:
        """Those who share the next call. Whoever is among them stays so until it is made, as others only leave before it."""
        room = Room()
        return list(takewhile(lambda request: room.takes(request.plan), islice(self._waiting, self._most)))

    def _pass_on(self, mine: _Request) -> None:
        """Let the one go next that has the most time left of those whose turn it is: none of them fails for another's haste."""
        with self._lock:
            if mine.goes:
                following = max(self._next(), key=_deadline, default=None)
                self._somebody_goes = following is not None
                if following is not None:
                    following.goes = True
                    following.told.release()
                mine.goes = False

    def _leave(self, mine: _Request) -> None:
        """This thread was interrupted: nobody may wait for it to go."""
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
        self._pass_on(mine)


_deadline = attrgetter("deadline")
