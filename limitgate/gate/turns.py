"""Turns: requests wait for what they have booked, and for places in flight, in a thread or on an event loop.

Whoever leaves, or is interrupted, is refunded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from limitgate.gate.admission import Admission, PermitWait, Turn
from limitgate.gate.flow import arun
from limitgate.gate.load import Permits
from limitgate.gate.refunds import Refunds
from limitgate.gate.refusal_log import RefusalLog
from limitgate.gate.wait_queue import TurnWaiter, WaitQueues
from limitgate.http.response import unavailable
from limitgate.observing.counts import RuleSeries, counted_waiting
from limitgate.process import waiting

Stay = Callable[[TurnWaiter], Awaitable[bool]]
"""Waits until a waiter is called; False if the client left before."""


class Turns:
    """The turns of one gate's requests."""

    def __init__(self, store: Any, refunds: Refunds, refusal_log: RefusalLog | None) -> None:
        self.queues = WaitQueues()
        """Who waits on an event loop."""
        self._store = store
        self._refunds = refunds
        self._refusal_log = refusal_log

    def wait_for(self, admission: Admission, turn: Turn) -> None:
        """Wait for the turn of a request in this thread; others may have its places in flight until it comes."""
        in_flight = admission.in_flight
        if in_flight is not None:
            in_flight.end("untaught")
        self.wait_for_further(admission, turn)
        if in_flight is not None:
            try:
                in_flight.begin_again_here()
            except BaseException:
                admission.refusal = unavailable()
                self._refunds.settle(admission)
                raise
            if in_flight.refusal is not None:
                self._shed(admission, in_flight)
                self._refunds.settle_refused(admission)

    def wait_for_further(self, admission: Admission, turn: Turn) -> None:
        """`wait_for` the turn of a limit that was asked for while the request was under way: it keeps its places in flight.

        An interruption, by a signal's handler or by gevent, refunds it.
        """
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
        """Wait until the turn of a request comes. False if the client left before: then it is refused and refunded."""
        if isinstance(admission.turn, PermitWait) and not await self._await_places(admission, admission.turn, stay):
            return False
        turn, in_flight = admission.turn, admission.in_flight
        if not isinstance(turn, Turn):
            return True
        if in_flight is not None:  # others may have its places until its turn comes
            in_flight.end("untaught")
        if not await self.await_further(admission, turn, stay):
            return False
        if in_flight is not None:
            try:
                stays = await in_flight.begin_again(stay)
            except BaseException as error:
                await self._undo(admission, error)
                raise
            if not stays:
                admission.refusal = unavailable()
            elif in_flight.refusal is not None:
                self._shed(admission, in_flight)
            await self._refunds.asettle_refused(admission)
        return admission.refusal is None

    async def await_further(self, admission: Admission, turn: Turn, stay: Stay) -> bool:
        """`wait_for_further`, on the event loop. False if the client left; then, or if it is cancelled, it is refunded."""
        admission.turn = None
        waiter = self.queues.join(turn)
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
        """Wait for places in flight, and decide about all else then. False if the client left before, or it is refused."""
        admission.turn, in_flight = None, admission.in_flight
        if in_flight is None:
            return True
        if not await in_flight.await_places(stay):
            admission.refusal = unavailable()
        elif in_flight.refusal is not None:
            self._shed(admission, in_flight)
        else:
            await arun(self._store, wait.rest, admission.budget)
            await self._refunds.asettle_refused(admission)
        return admission.refusal is None

    async def _undo(self, admission: Admission, error: BaseException) -> None:
        """Refund a request whose waiting was ended by an error."""
        admission.refusal = unavailable()
        if isinstance(error, GeneratorExit):  # the event loop is gone, and nothing can be awaited any more
            admission.abandon()
        else:
            await self._refunds.asettle(admission)

    def _shed(self, admission: Admission, in_flight: Permits) -> None:
        """Refuse a request that has waited, as there is no place in flight for it."""
        admission.shed()
        if self._refusal_log is not None:
            self._refusal_log.note_shed(in_flight)


def _rows(turn: Turn) -> list[RuleSeries]:
    """The figures of the rules that make a request wait for its turn."""
    rows = [charged.request_plan.row(charge) for charged in turn.charged for charge in charged.plan.charges]
    return [row for row in dict.fromkeys(rows) if row is not None]
