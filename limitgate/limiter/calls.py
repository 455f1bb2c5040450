"""Runs a limiter's operations on its store, and waits for turns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from limitgate.errors import LimitGateError, StoreError
from limitgate.gate.admission import Receipt, Turn
from limitgate.gate.flow import Budget, ConfigFlow, answers_at_once, arun, measures_silence, run, takes_plain
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.gate.turns import WaitQueues
from limitgate.limiter.bookings import Bookings, Sleepers
from limitgate.limiter.holding import Holds
from limitgate.limiter.operations import ROUNDING, Operations
from limitgate.limiter.plans import Limits
from limitgate.limiter.reservation import ChargedOperation
from limitgate.limits.bucket import MAX_AHEAD
from limitgate.limits.decision import SECOND, Decision
from limitgate.limits.plan import wait_us
from limitgate.process import switch, waiting
from limitgate.process.clock import asyncio_loop
from limitgate.stores import AsyncStore, SyncStore

T = TypeVar("T")
LOOK_AGAIN = 1.0
"""Seconds between checks of a ban."""


def seconds_left(timeout: float | None, began: float) -> float | None:
    """Return the rest of a timeout; None if unlimited. ``began`` is monotonic."""
    if timeout is None or timeout >= MAX_AHEAD / 1e6:
        return None
    return max(0.0, timeout - (waiting.monotonic() - began))


def ask_again_in(decision: Decision, left: float | None) -> float:
    """Return the seconds until the next attempt; 0 for no further one."""
    refused = [(charge, states) for charge, states, after in decision.evidence if after is None and charge.enforced]
    waits = [wait_us(charge, states) for charge, states in refused]
    if decision.allowed or not waits:
        return 0.0
    longest = max([math.inf if wait is None else wait / SECOND for wait in waits])
    is_in_time = longest < math.inf if left is None else longest <= left + ROUNDING
    return min(decision.retry_after, LOOK_AGAIN) if is_in_time else 0.0


class AsyncCalls(Operations):
    def _use(self, store: AsyncStore) -> None:
        self._store: AsyncStore = store
        self._takes_plain = takes_plain(store)
        self._holds = Holds(store)
        self._wait_queues = WaitQueues()
        self._bookings = Bookings(self._wait_queues)
        self._slot_keeper = SlotKeeper(store, self._timeout)
        self._observe(store, self._slot_keeper)

    def _arun(self, flow: ConfigFlow[T]) -> Coroutine[Any, Any, T]:
        return arun(switch.null_store or self._store, flow, Budget(self._timeout, measured=measures_silence(self._store)))

    async def _await_chance(
        self, key: str, limits: Limits, cost: int, timeout: float | None, held_us: int = 0, *, settles: bool = False
    ) -> ChargedOperation:
        began, left = waiting.monotonic(), timeout
        while True:
            operation = await self._await_turn(key, limits, cost, left, held_us, settles=settles)
            pause = ask_again_in(operation.decision, seconds_left(timeout, began))
            if not pause:
                self._count(operation.decision, operation.source)
                return operation
            await waiting.asleep(pause)
            left = seconds_left(timeout, began)

    async def _await_turn(
        self, key: str, limits: Limits, cost: int, timeout: float | None, held_us: int, *, settles: bool
    ) -> ChargedOperation:
        """Book a turn and wait for it. If ``settles``, note refunds of earlier charges."""
        asyncio_loop("wait")
        task = asyncio.ensure_future(self._arun(self._booking(key, limits, cost, timeout, held_us)))
        try:
            operation, charged, turn = await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.shield(self._leave(task))
            raise
        if turn is not None:
            charged, turn = self._bookings.caught_up(charged), self._bookings.caught_up_turn(turn)
            waiter = self._wait_queues.join(turn)
            if settles:
                operation.waits(waiter)
                operation.watch()
            try:
                waiting.require_running_clock()
                await waiter
            # The event loop has ended, so the caller is gone.
            except GeneratorExit:
                self._wait_queues.leave(turn, waiter)
                raise
            except BaseException:
                given_up = self._wait_queues.leave(turn, waiter)
                last = self._wait_queues.as_last(given_up)
                await asyncio.shield(self._arun(operation.giving_back(charged, last, given_up)))
                raise
            operation.turn_came(charged, self._wait_queues.leave(turn, waiter))
        elif settles and operation.decision.allowed:
            operation.watch()
        return operation

    async def _leave(self, task: asyncio.Future[tuple[ChargedOperation, tuple[Receipt, ...], Turn | None]]) -> None:
        with suppress(LimitGateError):
            operation, charged, turn = await task
            if operation.decision.allowed:
                last = None if turn is None else self._wait_queues.as_last(turn)
                await self._arun(operation.giving_back(charged, last, turn))

    async def _reserve_now(self, key: str, limits: Limits, cost: int) -> ChargedOperation:
        """Charge without waiting. After a cancellation nobody could settle the charge, so it is refunded."""
        if answers_at_once(self._store):
            return await self._arun(self._reserving(key, limits, cost))
        asyncio_loop("reserve")
        task = asyncio.ensure_future(self._arun(self._reserving(key, limits, cost)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.shield(self._undo_charge(task))
            raise

    async def _undo_charge(self, task: asyncio.Future[ChargedOperation]) -> None:
        # The caller gets the cancellation, whatever else has happened.
        with suppress(Exception):
            operation = await task
            if operation.decision.allowed:
                await self._arun(operation.undoing())

    async def _begin_hold(self, operation: ChargedOperation) -> None:
        task = asyncio.ensure_future(self._arun(operation.registering()))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.shield(self._undo_hold(task, operation))
            raise
        except StoreError:
            await asyncio.shield(self._arun(operation.undoing()))
            raise

    async def _undo_hold(self, task: asyncio.Future[None], operation: ChargedOperation) -> None:
        with suppress(LimitGateError):
            await task
        await self._arun(operation.undoing())


class Calls(Operations):
    def _use(self, store: SyncStore) -> None:
        self._store: SyncStore = store
        self._takes_plain = takes_plain(store)
        self._holds = Holds(store)
        self._sleepers = Sleepers()
        self._bookings = Bookings(self._sleepers)
        self._slot_keeper = SlotKeeper(store, self._timeout)
        self._observe(store, self._slot_keeper)

    def _run(self, flow: ConfigFlow[T]) -> T:
        return run(switch.null_store or self._store, flow, Budget(self._timeout, measured=measures_silence(self._store)))

    def _wait_for_chance(
        self, key: str, limits: Limits, cost: int, timeout: float | None, held_us: int = 0, *, settles: bool = False
    ) -> ChargedOperation:
        began, left = waiting.monotonic(), timeout
        while True:
            operation = self._wait_for_turn(key, limits, cost, left, held_us, settles=settles)
            pause = ask_again_in(operation.decision, seconds_left(timeout, began))
            if not pause:
                self._count(operation.decision, operation.source)
                return operation
            waiting.sleep(pause)
            left = seconds_left(timeout, began)

    def _wait_for_turn(
        self, key: str, limits: Limits, cost: int, timeout: float | None, held_us: int, *, settles: bool
    ) -> ChargedOperation:
        operation, charged, turn = self._run(self._booking(key, limits, cost, timeout, held_us))
        if turn is not None:
            with self._bookings.lock:
                charged, turn = self._bookings.caught_up(charged), self._bookings.caught_up_turn(turn)
                sleeper = self._sleepers.join(turn)
                operation.waits(sleeper)
                if settles:
                    operation.watch()
            try:
                sleeper.sleep()
            except BaseException:
                with self._bookings.lock:
                    given_up = self._sleepers.leave(sleeper)
                self._run(operation.giving_back(charged, given_up, given_up))
                raise
            with self._bookings.lock:
                operation.turn_came(charged, self._sleepers.leave(sleeper))
        elif settles:
            operation.watch()
        return operation


def carry_out(limiter: AsyncCalls | Calls, flow: ConfigFlow[Any]) -> Any:
    """Run a flow on a limiter's store; return the result or an awaitable."""
    return limiter._arun(flow) if isinstance(limiter, AsyncCalls) else limiter._run(flow)  # noqa: SLF001 - same module
