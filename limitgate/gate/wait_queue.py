"""Waiting for a turn that is booked: in a thread, or on an event loop in a queue of all who wait for equal turns.

A request never passes before its turn by the store's clock, since the time counts from when the reply was heard. A waiter that
leaves gives up its place, not its turn: those behind it move up, and the last turn of the queue becomes free. No other could be
refunded, as a bucket only knows when its last turn is.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from operator import attrgetter

from limitgate.gate.admission import Receipt, Turn
from limitgate.limits.decision import is_booked
from limitgate.limits.plan import Plan
from limitgate.process import waiting

TurnWaiter = asyncio.Future[Turn]
"""A place in a queue; done when the waiter is called, with a turn."""


def book(charged: tuple[Receipt, ...], now: int, delay: float) -> tuple[tuple[Receipt, ...], Turn]:
    """Tell what was charged at once from what was booked ``delay`` seconds after ``now``, the store's clock just heard, µs."""
    ahead = [_part(each, is_ahead=True) for each in charged]
    rest = [_part(each, is_ahead=False) for each in charged]
    booked = tuple([part for part in ahead if part.plan.charges])
    turn = Turn(now + round(delay * 1_000_000), waiting.monotonic() + delay, booked)
    return tuple([part for part in rest if part.plan.charges]), turn


def _part(charged: Receipt, *, is_ahead: bool) -> Receipt:
    """The charges that were booked ahead, or those that were not."""
    part = [bucket for bucket in charged.reading.buckets if is_booked(bucket.charge, bucket.before) is is_ahead]
    plan = Plan.spend([bucket.charge for bucket in part])
    return charged._replace(plan=plan, reading=charged.reading._replace(buckets=part))


class WaitQueues:
    """The queues of a gate: one for all turns in the same buckets, at the same cost, that are waited for on one event loop."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.AbstractEventLoop, dict[object, _WaitQueue]] = {}

    def __len__(self) -> int:
        """Number of queues."""
        return sum(map(len, list(self._queues.values())))

    def join(self, turn: Turn) -> TurnWaiter:
        """Wait on the running event loop."""
        loop, kind = asyncio.get_running_loop(), _kind(turn)
        queues = self._queues.get(loop)
        if queues is None:
            for ended in [each for each in list(self._queues) if each.is_closed()]:  # nobody there will ever leave
                self._queues.pop(ended, None)
            queues = self._queues[loop] = {}
        queue = queues.get(kind)
        if queue is None:
            queue = queues[kind] = _WaitQueue()
        return queue.join(turn)

    def leave(self, turn: Turn, waiter: TurnWaiter) -> Turn:
        """Wait no more, having been called or not, and return the turn that this request had or that nobody needs any more."""
        loop, kind = waiter.get_loop(), _kind(turn)
        queues = self._queues.get(loop, {})
        queue = queues.get(kind)
        if queue is not None and waiter in queue.waiters:
            given = queue.leave(waiter)
        else:
            given = waiter.result() if waiter.done() and not waiter.cancelled() else turn  # its event loop has ended
        if queue is not None and not queue.waiters:
            del queues[kind]
            if not queues:
                self._queues.pop(loop, None)
        both = zip(turn.charged, given.charged)
        return given._replace(charged=tuple([mine._replace(plan=each.plan, reading=each.reading) for mine, each in both]))


class _WaitQueue:
    """Waiters, and the turns for them: whoever came first has the first. There is one timer, for the first turn."""

    def __init__(self) -> None:
        self.waiters: dict[TurnWaiter, None] = {}
        self._turns: list[Turn] = []
        self._timer: asyncio.Handle | None = None

    def join(self, turn: Turn) -> TurnWaiter:
        """Wait, too."""
        waiter: TurnWaiter = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = None
        insort(self._turns, turn, key=_due_us)
        if self._timer is None or self._turns[0] is turn:
            self._schedule()
        return waiter

    def leave(self, waiter: TurnWaiter) -> Turn:
        """Wait no more, before the waiter was called."""
        del self.waiters[waiter]
        turn = self._turns.pop()
        self._schedule()
        return turn

    def _schedule(self) -> None:
        """Set the timer to the first turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = next((waiter.get_loop() for waiter in self.waiters), None)
        if loop is not None and not loop.is_closed():
            self._timer = waiting.call_at(loop, self._turns[0].due_at, self._call)

    def _call(self) -> None:
        """Call all waiters whose turn has come. Those that are about to leave are passed over."""
        self._timer = None
        staying = iter([waiter for waiter in self.waiters if not waiter.done()])
        now = waiting.monotonic()
        while self._turns and self._turns[0].due_at <= now:
            waiter = next(staying, None)
            if waiter is None:
                return  # a waiter that leaves sets the timer for whoever may have come
            del self.waiters[waiter]
            waiter.set_result(self._turns.pop(0))
        self._schedule()


_due_us = attrgetter("due_us")


def _kind(turn: Turn) -> tuple[object, ...]:
    """Key of the turns that can be exchanged for each other."""
    charges = [(each.is_local, charge.key, charge.bucket, charge.cost) for each in turn.charged for charge in each.plan.charges]
    return tuple(charges)
