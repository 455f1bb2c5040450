"""Refunds: what requests were charged wrongly is given back, and the slots that they hold. Where the store fails, both stay."""

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
from limitgate.gate.slot_keeper import Taken
from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.refund import refund
from limitgate.limits.template import AnyPlan

Corrections = tuple[AnyPlan | None, Taken]
"""The plan that corrects charges in a store, None if nothing is due, and the charges among these whose slots it gives back."""


class Refunds:
    """Corrects charges in a store, or in this process where they were made in an outage."""

    def __init__(self, store: Any, outages: Outages, timeout: float) -> None:
        self.uncorrected = 0
        """Number of times a refund was lost, as the store did not answer."""
        self.slot_keeper = outages.store_slots
        """Keeps the slots that were taken in the store."""
        self._store = store
        self._answers_at_once = answers_at_once(store)
        self._timeout = timeout
        self._outages = outages
        self._under_way: set[asyncio.Future[Any]] = set()

    def settle(self, admission: Admission) -> None:
        """Refund a request by its outcome and by the costs that `Decision.settle` noted, as far as these are known."""
        plan, slots = self._due(admission)
        if plan is not None and self._answers_at_once:
            try:
                self._store.spend(plan, self._timeout)
            except BaseException as error:  # noqa: BLE001 - an interruption is raised again
                self._failed(slots, error)
        elif plan is not None:
            run(self._store, self._adjust(plan, slots), admission.budget)

    async def asettle(self, admission: Admission) -> None:
        """`settle`, by an `AsyncStore`; to the end, even if the request is cancelled meanwhile or cannot wait any longer."""
        if self._answers_at_once:
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
        else:  # the store answers or fails in that time, and `asyncio.wait` takes twice as long
            over = asyncio.get_running_loop().create_future()
            if self._send(plan, slots, over) is not None:
                await over

    def settle_soon(self, admission: Admission) -> asyncio.Future[Any] | None:
        """`settle`, by an `AsyncStore`, in the background. Returns the reading to come; None if nothing is due."""
        plan, slots = self._due(admission)
        return None if plan is None else self._send(plan, slots)

    def settle_refused(self, admission: Admission) -> None:
        """`settle` a request if it is refused after it was charged."""
        if admission.has_to_refund:
            self.settle(admission)

    async def asettle_refused(self, admission: Admission) -> None:
        """`settle_refused`, by an `AsyncStore`."""
        if admission.has_to_refund:
            await self.asettle(admission)

    async def asettled(self) -> None:
        """Wait for all refunds and charges under way in this event loop that nobody else waits for."""
        begun = list(self._under_way)
        if not begun:  # as under trio, where memory:// serves and nothing is under way
            return
        here = asyncio.get_running_loop()
        if under_way := [each for each in begun if each.get_loop() is here]:
            await asyncio.wait(under_way)

    def soon(self, flow: Flow[T], budget: Budget | None = None) -> asyncio.Future[T]:
        """Run a flow on the running event loop, to its end, even if its caller is cancelled."""
        task = asyncio.ensure_future(arun(self._store, flow, budget))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def apply(self, refunds: Sequence[Refund]) -> Flow[None]:
        """Give back to buckets, or charge more."""
        plan, slots = self._corrections(refunds)
        if plan is not None:
            yield from self._adjust(plan, slots)

    def _due(self, admission: Admission) -> Corrections:
        """The corrections that a request needs by now."""
        refund = admission.plain_refund()
        if refund is None:
            return self._corrections(_refunds_of(admission))
        slots: Taken = ()
        if admission.gives_slots_back:
            admission.has_slots = False
            slots = refund.spent
            self.slot_keeper.release(slots)
        return refund if refund.keys else None, slots

    def _corrections(self, refunds: Sequence[Refund]) -> Corrections:
        """The corrections to make in the store. Those of this process' own buckets are made at once."""
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
        """Make adjustments by an `AsyncStore`, in the background; ``over`` ends with them. None if they fail at once."""
        try:
            sent: asyncio.Future[Any] = asyncio.ensure_future(self._store.aspend(plan, self._timeout))
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed(slots, error)
            return None
        self._under_way.add(sent)
        sent.add_done_callback(partial(self._answered, slots, over))
        return sent

    def _adjust(self, plan: AnyPlan, slots: Taken) -> Flow[None]:
        """Make adjustments in the store. If that fails, these slots are released later."""
        try:
            yield plan, self._timeout
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed(slots, error)

    def _answered(self, slots: Taken, over: asyncio.Future[None] | None, sent: asyncio.Future[Any]) -> None:
        """The store has answered adjustments that were sent, or the event loop ends."""
        self._under_way.discard(sent)
        if over is not None and not over.done():  # else it was cancelled
            over.set_result(None)
        if sent.cancelled():
            self.slot_keeper.release_later(slots)
        elif (error := sent.exception()) is not None:
            with logged_errors():
                self._failed(slots, error)

    def _failed(self, slots: Taken, error: BaseException) -> None:
        """Note that adjustments failed, and release their slots later. Raises any error but a `StoreError`."""
        self.slot_keeper.release_later(slots)
        if not isinstance(error, StoreError):
            raise error
        self.uncorrected += 1
        self._outages.failed(error)

    def hold(self, admission: Admission, taken: Taken, *, is_local: bool = False) -> None:
        """Keep the slots of a request, among charges that were made, until they are given back."""
        admission.has_slots = True
        (self._outages.local_slots if is_local else self.slot_keeper).hold(taken, admission)


def _refunds_of(admission: Admission) -> list[Refund]:
    any_has_own_cost = bool(admission.settlement.costs) and nesting.any_has_own_cost(admission)
    return admission.refunds(any_has_own_cost=any_has_own_cost)
