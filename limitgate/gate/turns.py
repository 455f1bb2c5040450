"""Waits for booked turns and permits, in a thread or on an event loop.

Requests with equal turns share a FIFO queue per loop. If a request leaves, the others move up and the last turn is refunded,
because a bucket can refund only the last turn. Turns in GCRA buckets also move up after refunds ahead of them.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from operator import attrgetter, is_
from typing import Any

from limitgate.algorithms import gcra
from limitgate.errors import ConfigError
from limitgate.gate.admission import Admission, PermitWait, Receipt, Turn
from limitgate.gate.flow import arun
from limitgate.gate.load import Load, end_undecided
from limitgate.gate.permits import Stay
from limitgate.gate.refunds import Refunds
from limitgate.http.response import unavailable
from limitgate.limits.decision import is_booked
from limitgate.limits.plan import BucketReading, Plan, Returned, wait_us
from limitgate.observing.counts import RuleSeries, counted_waiting
from limitgate.process import waiting
from limitgate.process.clock import asyncio_loop

TurnWaiter = asyncio.Future[Turn]


def book(charged: tuple[Receipt, ...], now: int, delay: float) -> tuple[tuple[Receipt, ...], Turn]:
    """Split charges: those made now, and those booked ``delay`` seconds after ``now`` (Unix µs)."""
    ahead = [_part(each, is_ahead=True) for each in charged]
    rest = [_part(each, is_ahead=False) for each in charged]
    booked = tuple([part for part in ahead if part.plan.charges])
    turn = Turn(now + round(delay * 1_000_000), waiting.monotonic() + delay, booked)
    return tuple([part for part in rest if part.plan.charges]), turn


def _part(charged: Receipt, *, is_ahead: bool) -> Receipt:
    part = [bucket for bucket in charged.reading.buckets if is_booked(bucket.charge, bucket.before) is is_ahead]
    plan = Plan.spend([bucket.charge for bucket in part])
    return charged._replace(plan=plan, reading=charged.reading._replace(buckets=part))


class WaitQueues:
    """Turns in the same buckets with the same cost share a queue per event loop."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.AbstractEventLoop, dict[object, _WaitQueue]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def join(self, turn: Turn) -> TurnWaiter:
        loop, kind = asyncio_loop("max_delay"), _kind(turn)
        queues = self._queues.get(loop)
        if queues is None:
            # Requests never leave the queues of a closed event loop.
            for ended in [each for each in list(self._queues) if each.is_closed()]:
                self._queues.pop(ended, None)
            queues = self._queues[loop] = {}
        queue = queues.get(kind)
        if queue is None:
            queue = queues[kind] = _WaitQueue()
        return queue.join(turn)

    def leave(self, turn: Turn, waiter: TurnWaiter) -> Turn:
        """Leave the queue. Return the turn that becomes free."""
        loop, kind = waiter.get_loop(), _kind(turn)
        queues = self._queues.get(loop, {})
        queue = queues.get(kind)
        if queue is not None and waiter in queue.waiters:
            given = queue.leave(waiter)
        else:
            # The event loop has ended.
            given = waiter.result() if waiter.done() and not waiter.cancelled() else turn
        if queue is not None and not queue.waiters:
            del queues[kind]
            if not queues:
                self._queues.pop(loop, None)
        both = zip(turn.charged, given.charged)
        return given._replace(charged=tuple([mine._replace(plan=each.plan, reading=each.reading) for mine, each in both]))

    def move_up(self, returned: Sequence[Returned]) -> None:
        """Move up the turns behind refunded charges. Turns of other event loops move slightly later."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        for loop, queues in list(self._queues.items()):
            if loop is running:
                _move_up(queues, returned)
            else:
                # The event loop may have ended.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(_move_up, queues, returned, context=Context())

    def as_last(self, given_up: Turn) -> Turn:
        """Return the turn as if it were the last one, so that the bucket can refund it."""
        queues = self._queues.get(asyncio.get_running_loop(), {})
        behind = [bucket for queue in queues.values() for bucket in queue.booked()]
        return given_up._replace(charged=tuple([_behind(each, behind) for each in given_up.charged]))


class _WaitQueue:
    def __init__(self) -> None:
        self.waiters: dict[TurnWaiter, None] = {}
        self._turns: list[Turn] = []
        self._timer: asyncio.Handle | None = None

    def join(self, turn: Turn) -> TurnWaiter:
        waiter: TurnWaiter = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = None
        insort(self._turns, turn, key=_due_us)
        if self._timer is None or self._turns[0] is turn:
            self._schedule()
        return waiter

    def leave(self, waiter: TurnWaiter) -> Turn:
        del self.waiters[waiter]
        turn = self._turns.pop()
        self._schedule()
        return turn

    def booked(self) -> list[tuple[int, BucketReading]]:
        receipts = [receipt for turn in self._turns for receipt in turn.charged]
        return [(receipt.reading.now, bucket) for receipt in receipts for bucket in receipt.reading.buckets]

    def move_up(self, returned: Sequence[Returned]) -> None:
        turns = [moved_up(turn, tuple([lowered(each, returned) for each in turn.charged])) for turn in self._turns]
        if turns != self._turns:
            self._turns = sorted(turns, key=_due_us)
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = next((waiter.get_loop() for waiter in self.waiters), None)
        if loop is not None and not loop.is_closed():
            self._timer = waiting.call_at(loop, self._turns[0].due_at, self._call)

    def _call(self) -> None:
        """Wake the waiter whose turn has come. Skip waiters that are about to leave."""
        self._timer = None
        staying = iter([waiter for waiter in self.waiters if not waiter.done()])
        now = waiting.monotonic()
        while self._turns and self._turns[0].due_at <= now:
            waiter = next(staying, None)
            if waiter is None:
                # A leaving waiter sets the timer.
                return
            del self.waiters[waiter]
            waiter.set_result(self._turns.pop(0))
        self._schedule()


_due_us = attrgetter("due_us")


def _move_up(queues: dict[object, _WaitQueue], returned: Sequence[Returned]) -> None:
    for queue in list(queues.values()):
        queue.move_up(returned)


def moved_up(turn: Turn, charged: tuple[Receipt, ...]) -> Turn:
    if all(map(is_, charged, turn.charged)):
        return turn
    due_us = max(
        [
            receipt.reading.now + (wait_us(bucket.charge, bucket.before) or 0)
            for receipt in charged
            for bucket in receipt.reading.buckets
        ]
    )
    earlier_us = max(0, turn.due_us - due_us)
    return Turn(turn.due_us - earlier_us, turn.due_at - earlier_us / 1_000_000, charged)


def lowered(receipt: Receipt, returned: Iterable[Returned]) -> Receipt:
    """Return a receipt as if earlier, refunded charges had not been made."""
    reading = receipt.reading
    buckets = list(reading.buckets)
    for each in returned:
        buckets = [bucket._replace(before=each.lowered(bucket.charge, reading.now, bucket.before)) for bucket in buckets]
    if all(new.before is old.before for new, old in zip(buckets, reading.buckets)):
        return receipt
    return receipt._replace(reading=reading._replace(buckets=buckets))


def _behind(receipt: Receipt, booked: Sequence[tuple[int, BucketReading]]) -> Receipt:
    reading = receipt.reading
    buckets = [_raised(bucket, reading.now, booked) for bucket in reading.buckets]
    return receipt._replace(reading=reading._replace(buckets=buckets))


def _raised(bucket: BucketReading, now: int, booked: Sequence[tuple[int, BucketReading]]) -> BucketReading:
    """Add the costs of later turns to the debts of a charge."""
    charge, before, _ = bucket
    if charge.bucket.algorithm is not gcra:
        return bucket
    debts = dict(zip(charge.bucket.ids, before))
    raised = dict(debts)
    for booked_at, (other, others, _) in booked:
        if other.key == charge.key and other.bucket.algorithm is gcra:
            for window, debt, weight in zip(other.bucket.ids, others, other.bucket.weights):
                if window in debts and (booked_at, debt) > (now, debts[window]):
                    raised[window] += other.cost * weight
    return bucket._replace(before=list(raised.values()))


def _kind(turn: Turn) -> tuple[object, ...]:
    charges = [(each.is_local, charge.key, charge.bucket, charge.cost) for each in turn.charged for charge in each.plan.charges]
    return tuple(charges)


class Turns:
    def __init__(self, store: Any, refunds: Refunds, load: Load) -> None:
        self.queues: WaitQueues = WaitQueues()
        self._store = store
        self._refunds = refunds
        self._load = load

    def wait_for(self, admission: Admission, turn: Turn) -> None:
        """Wait in this thread, lending the permits."""
        permits = admission.permits
        if permits is not None:
            permits.end("untaught")
        self.wait_for_further(admission, turn)
        if permits is not None:
            try:
                permits.begin_again_here()
            except BaseException:
                end_undecided(admission)
                admission.refusal = unavailable()
                self._refunds.settle(admission)
                raise
            if permits.refusal is not None:
                self._load.shed_late(admission)
                self._refunds.settle_refused(admission)

    def wait_for_further(self, admission: Admission, turn: Turn) -> None:
        """Wait for a further limit, keeping the permits. An interruption refunds."""
        admission.turn = None
        try:
            with counted_waiting(_rows(turn)):
                waiting.sleep_until(turn.due_at)
        except BaseException:
            admission.turn_ended(turn, stays=False)
            self._refunds.settle(admission)
            raise
        admission.turn_ended(turn, stays=True)

    async def await_turn(self, admission: Admission, stay: Stay) -> bool:
        """Wait for a turn. If the client leaves first, refund and return False."""
        if isinstance(admission.turn, PermitWait) and not await self._await_places(admission, admission.turn, stay):
            return False
        turn, permits = admission.turn, admission.permits
        if not isinstance(turn, Turn):
            return True
        if permits is not None:
            permits.end("untaught")
        if not await self.await_further(admission, turn, stay):
            return False
        if permits is not None:
            try:
                stays = await permits.begin_again(stay)
            except BaseException as error:
                await self._undo(admission, error)
                raise
            if not stays:
                admission.refusal = unavailable()
            elif permits.refusal is not None:
                self._load.shed_late(admission)
            await self._refunds.asettle_refused(admission)
        return admission.refusal is None

    async def await_further(self, admission: Admission, turn: Turn, stay: Stay) -> bool:
        """`wait_for_further` on an event loop. Return False if the client leaves."""
        admission.turn = None
        try:
            waiter = self.queues.join(turn)
        except ConfigError as error:
            admission.turn_ended(turn, stays=False)
            await self._undo(admission, error)
            raise
        try:
            waiting.require_running_clock()
            with counted_waiting(_rows(turn)):
                stays = await stay(waiter)
        except BaseException as error:
            admission.turn_ended(self.queues.leave(turn, waiter), stays=False)
            await self._undo(admission, error)
            raise
        admission.turn_ended(self.queues.leave(turn, waiter), stays=stays)
        return stays

    async def _await_places(self, admission: Admission, wait: PermitWait, stay: Stay) -> bool:
        admission.turn, permits = None, admission.permits
        if permits is None:
            return True
        if not await permits.await_places(stay):
            admission.refusal = unavailable()
        elif permits.refusal is not None:
            self._load.shed_late(admission)
        else:
            await arun(self._store, wait.rest, admission.budget)
            await self._refunds.asettle_refused(admission)
        return admission.refusal is None

    async def _undo(self, admission: Admission, error: BaseException) -> None:
        admission.refusal = unavailable()
        # The event loop has ended.
        if isinstance(error, GeneratorExit):
            admission.abandon()
        else:
            await self._refunds.asettle(admission)


def _rows(turn: Turn) -> list[RuleSeries]:
    rows = [charged.request_plan.row(charge) for charged in turn.charged for charge in charged.plan.charges]
    return [row for row in dict.fromkeys(rows) if row is not None]
