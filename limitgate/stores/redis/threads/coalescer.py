"""Threads that ask Redis at the same time share a call of the script: one of them goes for all who wait.

A thread that comes while none is on its way goes at once, for itself alone. Those that come meanwhile wait; when it is back,
the one that may wait longest goes for all. So there is one call on its way at a time, the longer it takes the more share the
next one, and plans are carried out in the order of arrival. With 32 threads that is 30 % less CPU here than a call for each
and half as much in Redis.

A thread waits as long as its timeout says. Only time in which the leader listened to Redis counts, see `ListenDeadline`.
If that one hangs elsewhere, as in a handler of the log, the others wait for `HANGS` more seconds by the clock.
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
from limitgate.stores.redis.calls import Room
from limitgate.stores.redis.threads.listen_deadline import SHORTEST, ListenDeadline, WaitForThread

Exchange = Callable[[Sequence[AnyPlan], ListenDeadline], Sequence[AnyAnswer | StoreError]]

_LEADER = "goes"
HANGS = 0.5
"""Seconds that a thread goes on waiting for the same leader after its timeout. Seconds in which it did not run do not count."""
_LOOK_EVERY = 0.05
"""Seconds between two checks of a leader that may hang."""


class _Request:
    """Plan of a thread that waits, and its reading."""

    __slots__ = ("due", "outcome", "plan", "wake")

    def __init__(self, plan: AnyPlan, due: float) -> None:
        self.plan = plan
        self.due = due
        """Time at which it has waited for long enough, by the seconds that threads have listened in vain so far."""
        self.outcome: AnyAnswer | StoreError | None = None
        self.wake = Lock()
        """Held until there is an answer, or it is this thread's turn."""
        self.wake.acquire()


class CallCoalescer:
    """Lets threads share calls of ``exchange(plans, listen_deadline)``, at most ``most`` plans in one."""

    def __init__(self, exchange: Exchange, most: int) -> None:
        self._exchange = exchange
        self._most = most
        self._waiting: deque[_Request] = deque()
        """Requests that no call is on its way for, the oldest first; none for longer while nobody goes."""
        self._turn: dict[str, object] = {}
        """Under `_LEADER` the request of the thread whose turn it is to ask, or its plan where it did not wait; else empty. To
        take it by `dict.setdefault` is one step, for a quarter of what a lock takes."""
        self._lock = Lock()
        """Held to choose among those who wait, or to leave them."""
        self.listening = ListenDeadline(0)
        """Patience of whoever asks: what it has spent are the seconds that threads have listened in vain so far."""

    def spend(self, plan: AnyPlan, timeout: float) -> AnyAnswer:
        """Return the reading of a plan. Raises `StoreError` within ``timeout`` seconds."""
        listening, alone = self.listening, [plan]
        began = listening.spent
        try:
            if not self._waiting and self._turn.setdefault(_LEADER, alone) is alone:
                listening.left = timeout if timeout > SHORTEST else SHORTEST  # noqa: FURB136 - in a tenth of the time
                try:
                    outcome = self._exchange(alone, listening)[0]
                finally:  # and once more below, if just this is interrupted
                    self._step_down(alone)
            else:
                outcome = self._shared(_Request(plan, began + timeout))
            waited = listening.spent - began
        except BaseException as error:  # a signal's handler may raise anywhere
            self._step_down(alone)
            if isinstance(error, StoreError):
                error.waited = min(listening.spent - began, timeout)
            raise
        if isinstance(outcome, PlainSpend) and not waited:
            return outcome  # almost always
        if isinstance(outcome, StoreError):
            outcome.waited = min(waited, timeout)
            raise outcome
        return outcome.having_waited(min(waited, timeout)) if waited else outcome

    def _shared(self, mine: _Request) -> AnyAnswer | StoreError:
        """Wait for the outcome of a request, or for its turn to ask."""
        try:
            self._waiting.append(mine)
            if _LEADER not in self._turn:  # whoever went has looked for others just before
                self._elect_leader()
            self._wait(mine)
            if self._turn.get(_LEADER) is mine:
                self._go(mine)
        except BaseException:  # a signal's handler may raise anywhere; so does gevent in threads that wait
            self._withdraw(mine)
            self._step_down(mine)
            raise
        return StoreError("the call to Redis was interrupted", "connection") if mine.outcome is None else mine.outcome

    def _wait(self, mine: _Request) -> None:
        """Wait for an answer or this thread's turn, or until Redis was silent, or the thread that went hung, for too long."""
        wake, left = mine.wake, mine.due - self.listening.spent
        waiting, began, leader = None, 0.0, None
        while not wake.acquire(True, left if left > SHORTEST else SHORTEST):  # noqa: FURB136 - in half the time
            if mine.outcome is not None:  # whoever went was interrupted while it woke others
                return
            if waiting is None:
                waiting = WaitForThread(ListenDeadline(HANGS))
            elif self._turn.get(_LEADER) is leader:  # else there was progress
                waiting.waited_in_vain(left, monotonic() - began)
            leader, left, began = self._turn.get(_LEADER), min(mine.due - self.listening.spent, _LOOK_EVERY), monotonic()
            if left <= 0 or waiting.listen_deadline.is_over:
                self._give_up(mine)
                return

    def _give_up(self, mine: _Request) -> None:
        """Fail a request whose time is over. If this thread's turn has just come, it goes all the same, to pass it on."""
        with self._lock:
            if self._turn.get(_LEADER) is not mine and mine.outcome is None:
                mine.outcome = StoreError("no answer from Redis within the timeout", "timeout")
                if mine in self._waiting:
                    self._waiting.remove(mine)

    def _go(self, mine: _Request) -> None:
        """Ask for this thread and for those who wait, then pass the turn on."""
        together: list[_Request] = []
        try:
            self._gather(mine.due, together)
            self.listening.left = max(mine.due - self.listening.spent, SHORTEST)
            outcomes = self._exchange(list(map(_plan, together)), self.listening)
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
                self._step_down(mine)

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
        for request in islice(self._waiting.copy(), self._most):  # others may join meanwhile
            if request.due <= due:
                if not room.takes(request.plan):
                    break
                together.append(request)
        return together

    def _step_down(self, mine: object) -> None:
        """It is not this thread's turn any more, if it was: let others go who wait."""
        if self._turn.get(_LEADER) is mine:
            del self._turn[_LEADER]
        if self._waiting:  # whoever begins to wait after this look sees that it is nobody's turn
            self._elect_leader()

    def _elect_leader(self) -> None:
        """Let the one go that has the most time left of those whose turn it is: none of them fails for another's haste."""
        with self._lock:
            if self._waiting and _LEADER not in self._turn:
                following = max(self._next(), key=_due)
                try:
                    if self._turn.setdefault(_LEADER, following) is following:
                        following.wake.release()
                except BaseException:  # a signal's handler may raise in between; to wake it twice does no harm
                    if self._turn.get(_LEADER) is following and following.wake.locked():
                        following.wake.release()
                    raise

    def _withdraw(self, mine: _Request) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)


_due, _plan = attrgetter("due"), attrgetter("plan")
