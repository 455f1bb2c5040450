"""Refunds charges and releases slots. If the store fails, charges and slots stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from limitgate.errors import StoreError
from limitgate.gate import nesting
from limitgate.gate.admission import Admission, Refund
from limitgate.gate.flow import Budget, Flow, T, answers_at_once, arun, run
from limitgate.gate.outage import Outages
from limitgate.gate.slot_keeper import SlotKeeper, Taken
from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Charge, Plan, refund
from limitgate.limits.template import AnyPlan
from limitgate.process import switch

Corrections = tuple[AnyPlan | None, Taken]
"""A plan, if any, and charges whose slots it releases."""


class Refunds:
    """Corrects charges in the store, or here after an outage."""

    def __init__(self, store: Any, outages: Outages, timeout: float) -> None:
        self.uncorrected: int = 0
        self.slot_keeper: SlotKeeper = outages.store_slots
        self._store = store
        self._answers_at_once = answers_at_once(store)
        self._timeout = timeout
        self._outages = outages
        self._under_way: set[asyncio.Future[Any]] = set()

    def settle(self, admission: Admission) -> None:
        """Refund by outcome and reported costs."""
        plan, slots = self._due(admission)
        if plan is None:
            return
        store = self._store if self._answers_at_once else switch.stand_in and switch.stand_in(self._store)
        if store is None:
            run(self._store, self._adjust(plan, slots), admission.budget)
            return
        try:
            store.spend(plan, self._timeout)
        except BaseException as error:  # noqa: BLE001 - interruptions are raised again
            self._failed(slots, error)

    async def asettle(self, admission: Admission) -> None:
        """`settle` on an event loop. Completes even after a cancellation or timeout."""
        if self._answers_at_once or (switch.stand_in is not None and switch.stand_in(self._store) is not None):
            self.settle(admission)
            return
        plan, slots = self._due(admission)
        if plan is None:
            return
        left = admission.budget.left
        if left < self._timeout:
            sent = self._send(plan, slots)
            if sent is not None:
                await asyncio.wait([sent], timeout=max(0.0, left))
        # The store answers within `left`, and `asyncio.wait` would take twice as long.
        else:
            over = asyncio.get_running_loop().create_future()
            if self._send(plan, slots, over) is not None:
                await over

    def settle_soon(self, admission: Admission) -> asyncio.Future[Any] | None:
        plan, slots = self._due(admission)
        return None if plan is None else self._send(plan, slots)

    def settle_refused(self, admission: Admission) -> None:
        if admission.has_to_refund:
            self.settle(admission)

    async def asettle_refused(self, admission: Admission) -> None:
        if admission.has_to_refund:
            await self.asettle(admission)

    async def asettled(self) -> None:
        """Wait for this event loop's refunds and charges in the background."""
        begun = list(self._under_way)
        # Under trio, nothing is under way.
        if not begun:
            return
        here = asyncio.get_running_loop()
        if under_way := [each for each in begun if each.get_loop() is here]:
            await asyncio.wait(under_way)

    def soon(self, flow: Flow[T], budget: Budget | None = None) -> asyncio.Future[T]:
        """Run a flow to its end, even if cancelled."""
        task = asyncio.ensure_future(arun(self._store, flow, budget))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def apply(self, refunds: Sequence[Refund]) -> Flow[None]:
        plan, slots = self._corrections(refunds)
        if plan is not None:
            yield from self._adjust(plan, slots)

    def _due(self, admission: Admission) -> Corrections:
        refund = admission.plain_refund()
        if refund is None:
            any_has_own_cost = bool(admission.settlement.costs) and nesting.any_has_own_cost(admission)
            return self._corrections(admission.refunds(any_has_own_cost=any_has_own_cost))
        slots: Taken = ()
        if admission.gives_slots_back:
            admission.has_slots = False
            slots = refund.spent
            self.slot_keeper.release(slots)
        return refund if refund.keys else None, slots

    def _corrections(self, refunds: Sequence[Refund]) -> Corrections:
        charges: list[Charge] = []
        slots: list[Charge] = []
        for charged, costs in refunds:
            plan = refund(charged.plan, charged.reading, costs)
            if charged.request_plan.has_slots:
                over = [charge for charge, cost in zip(charged.plan.charges, costs) if not cost]
                (self._outages.local_slots if charged.is_local else self.slot_keeper).release(over)
                slots += [] if charged.is_local else over
            if charged.is_local:
                self._outages.apply_refund(plan)
            else:
                charges += plan.charges
        return Plan.adjust(charges) if charges else None, slots

    def _send(self, plan: AnyPlan, slots: Taken, over: asyncio.Future[None] | None = None) -> asyncio.Future[Any] | None:
        try:
            sent: asyncio.Future[Any] = asyncio.ensure_future(self._store.aspend(plan, self._timeout))
        except BaseException as error:  # noqa: BLE001 - as in `settle`
            self._failed(slots, error)
            return None
        self._under_way.add(sent)
        sent.add_done_callback(partial(self._answered, slots, over))
        return sent

    def _adjust(self, plan: AnyPlan, slots: Taken) -> Flow[None]:
        try:
            yield plan, self._timeout
        except BaseException as error:  # noqa: BLE001 - as in `settle`
            self._failed(slots, error)

    def _answered(self, slots: Taken, over: asyncio.Future[None] | None, sent: asyncio.Future[Any]) -> None:
        self._under_way.discard(sent)
        if over is not None and not over.done():
            over.set_result(None)
        if sent.cancelled():
            self.slot_keeper.release_later(slots)
        elif (error := sent.exception()) is not None:
            with logged_errors():
                self._failed(slots, error)

    def _failed(self, slots: Taken, error: BaseException) -> None:
        self.slot_keeper.release_later(slots)
        if not isinstance(error, StoreError):
            raise error
        self.uncorrected += 1
        self._outages.failed(error)

    def hold(self, admission: Admission, taken: Taken, *, is_local: bool = False) -> None:
        admission.has_slots = True
        (self._outages.local_slots if is_local else self.slot_keeper).hold(taken, admission)
