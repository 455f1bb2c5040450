"""Threads that ask Redis at the same time share a call of the script: one of them goes for all who wait.

A thread that comes while none is on its way goes at once, for itself alone. Those that come meanwhile wait; when it is back,
the one that may wait longest goes for all. So there is one call on its way at a time, the longer it takes the more share the
next one, and plans are carried out in the order of arrival. With 32 threads that is 30 % less CPU here than a call for each
and half as much in Redis.

A thread waits as long as its timeout says, but only time counts in which the one that went listened to Redis, see `Patience`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from threading import Lock

from limitgate.errors import StoreError
from limitgate.limits.template import AnyPlan, AnyReading
from limitgate.stores.redis.calls import Room
from limitgate.stores.redis.threads.patience import SHORTEST, Patience

Exchange = Callable[[Sequence[AnyPlan], Patience], Sequence[AnyReading | StoreError]]


class _Request:
    """A thread's plan, and its reading."""

    __slots__ = ("due", "goes", "outcome", "plan", "wake")
    wake: Lock
    """Held until there is an answer, or it is this thread's turn. Only requests that wait have one."""

    def __init__(self, plan: AnyPlan, due: float) -> None:
        self.plan = plan
        self.due = due
        """Time at which it has waited for long enough, by the seconds that threads have listened in vain so far."""
        self.outcome: AnyReading | StoreError | None = None
        self.goes = False
        """True if it is this thread's turn to ask."""


class CallCoalescer:
    """Lets threads share calls of ``exchange(plans, patience)``, at most ``most`` plans in one."""

    def __init__(self, exchange: Exchange, most: int) -> None:
        self._exchange = exchange
        self._most = most
        self._waiting: deque[_Request] = deque()
        """Requests that no call is on its way for, the oldest first; none while `_somebody_goes` is false."""
        self._somebody_goes = False
        self._lock = Lock()
        self.listening = Patience(0)
        """Patience of the latest call: what it has spent are the seconds that threads have listened in vain so far."""

    def spend(self, plan: AnyPlan, timeout: float) -> AnyReading:
        """Return the reading of a plan. Raises `StoreError` within ``timeout`` seconds."""
        began = self.listening.spent
        mine = _Request(plan, began + timeout)
        try:
            with self._lock:
                waits = self._somebody_goes
                if waits:
                    mine.wake = Lock()
                    mine.wake.acquire()
                    self._waiting.append(mine)
                else:
                    self._somebody_goes = mine.goes = True
            if waits:
                self._wait(mine)
            if mine.goes:
                self._go(mine, [] if waits else [mine])
        except BaseException as error:  # a signal's handler may raise anywhere; so does gevent in threads that wait
            self._leave(mine)
            if isinstance(error, StoreError):
                error.waited = min(self.listening.spent - began, timeout)
            raise
        outcome, waited = mine.outcome, self.listening.spent - began
        if not (outcome is None or isinstance(outcome, StoreError)):
            return outcome.having_waited(min(waited, timeout)) if waited else outcome
        failure = outcome or StoreError("the call to Redis was interrupted", "connection")
        failure.waited = min(waited, timeout)
        raise failure

    def _wait(self, mine: _Request) -> None:
        """Wait for an answer, or for this thread's turn, or until Redis has been silent for too long."""
        while not mine.wake.acquire(timeout=max(mine.due - self.listening.spent, SHORTEST)):
            if mine.outcome is not None:  # whoever went was interrupted while it woke others
                return
            if self.listening.spent >= mine.due:
                self._give_up(mine)
                return

    def _give_up(self, mine: _Request) -> None:
        """Fail a request whose time is over. If this thread's turn has just come, it goes all the same, to pass it on."""
        with self._lock:
            if not mine.goes and mine.outcome is None:
                mine.outcome = StoreError("no answer from Redis within the timeout", "timeout")
                if mine in self._waiting:
                    self._waiting.remove(mine)

    def _go(self, mine: _Request, together: list[_Request]) -> None:
        """Ask ``together``, by default for this thread and for those who wait, then pass the turn on."""
        try:
            if not together:
                self._gather(mine.due, together)
            now = self.listening.spent
            self.listening = patience = Patience(max(mine.due - now, SHORTEST), now)
            outcomes = self._exchange(list(map(_plan, together)), patience)
            for request, outcome in zip(together, outcomes):
                request.outcome = outcome
        except StoreError as error:
            for request in together:
                request.outcome = StoreError(str(error), error.fault)
            raise
        except BaseException:
            for request in (mine, *together):  # else the turn might be passed on to a thread that goes on without it
                self._withdraw(request)
            raise
        finally:
            try:  # those that have an answer first: they may come again in time for the next call
                for request in together:
                    if request is not mine:
                        request.wake.release()
            finally:
                self._pass_on(mine)

    def _gather(self, due: float, together: list[_Request]) -> None:
        """Take the requests of the next call out of those that wait."""
        with self._lock:
            for request in self._next(due):
                together.append(request)  # first, as an interruption must lose none
                self._waiting.remove(request)

    def _next(self, due: float = math.inf) -> list[_Request]:
        """Requests that share the next call, if it is given up at a time: one that may wait longer shares another call.

        Whoever is among them stays so until it is made, as others only leave before it.
        """
        room, together = Room(), []
        for request in islice(self._waiting, self._most):
            if request.due <= due:
                if not room.takes(request.plan):
                    break
                together.append(request)
        return together

    def _pass_on(self, mine: _Request) -> None:
        """Let the one go next that has the most time left of those whose turn it is: none of them fails for another's haste."""
        with self._lock:
            if mine.goes:
                following = max(self._next(), key=_due) if self._waiting else None
                self._somebody_goes = following is not None
                if following is not None:
                    following.goes = True
                    following.wake.release()
                mine.goes = False

    def _leave(self, mine: _Request) -> None:
        """This thread was interrupted: nobody may wait for it to go."""
        self._withdraw(mine)
        self._pass_on(mine)

    def _withdraw(self, mine: _Request) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)


_due, _plan = attrgetter("due"), attrgetter("plan")
