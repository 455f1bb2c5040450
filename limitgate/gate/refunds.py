"""Refunds: what requests were charged wrongly is given back, and the slots that they hold. Where the store fails, both stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from limitgate.errors import StoreError
from limitgate.gate import nesting
from limitgate.gate.admission import Admission, Charged, Refund
from limitgate.gate.fallback import Fallback
from limitgate.gate.flow import Budget, Flow, T, answers_at_once, arun, run
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.gate.store_health import StoreHealth
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.refund import refund


class Refunds:
    """Corrects charges in a store, or in the ``fallback`` where they were made there."""

    def __init__(self, store: Any, fallback: Fallback, store_health: StoreHealth, timeout: float) -> None:
        self.uncorrected = 0
        """Number of times a refund was lost, as the store did not answer."""
        self.slot_keeper = SlotKeeper(store, timeout)
        """Keeps the slots that were taken in the store."""
        self._store = store
        self._answers_at_once = answers_at_once(store)
        self._timeout = timeout
        self._fallback = fallback
        self._store_health = store_health
        self._under_way: set[asyncio.Future[Any]] = set()

    def settle(self, admission: Admission) -> None:
        """Refund a request by its outcome and by the costs that `Decision.settle` noted, as far as these are known."""
        run(self._store, self._due(admission), admission.budget)

    async def asettle(self, admission: Admission) -> None:
        """`settle`, by an `AsyncStore`; to the end, even if the request is cancelled meanwhile or cannot wait any longer."""
        if self._answers_at_once:
            self.settle(admission)
            return
        task = self.soon(self._due(admission))
        if not task.done():
            await asyncio.wait([task], timeout=max(0.0, admission.budget.left))

    def settle_soon(self, admission: Admission) -> asyncio.Future[None]:
        """`settle`, by an `AsyncStore`, in a task of the running event loop."""
        return self.soon(self._due(admission))

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
        here = asyncio.get_running_loop()
        if under_way := [each for each in list(self._under_way) if each.get_loop() is here]:
            await asyncio.wait(under_way)

    def soon(self, flow: Flow[T], budget: Budget | None = None) -> asyncio.Future[T]:
        """Run a flow on the running event loop, to its end, whoever waits for it."""
        task = asyncio.ensure_future(arun(self._store, flow, budget))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def apply(self, refunds: Sequence[Refund]) -> Flow[None]:
        """Give back to buckets, or charge more."""
        charges: list[Charge] = []
        slots: list[Charge] = []
        for charged, costs in refunds:
            plan = refund(charged.plan, charged.reading, costs)
            if charged.request_plan.has_slots:
                over = [charge for charge, cost in zip(charged.plan.charges, costs) if not cost]
                self._slot_keeper_of(charged).release(over)
                slots += [] if charged.is_local else over
            if charged.is_local:
                self._fallback.apply_refund(plan)
            else:
                charges += plan.charges
        yield from self._adjust(charges, slots)

    def _due(self, admission: Admission) -> Flow[None]:
        """Correct what a request was charged wrongly, by what is known now."""
        plain = admission.plain_refund()
        return self.apply(_refunds_of(admission)) if plain is None else self._adjust(plain)

    def _adjust(self, charges: Sequence[Charge], slots: Sequence[Charge] = ()) -> Flow[None]:
        """Make adjustments in the store. If that fails, these slots are released later."""
        if charges:
            try:
                yield Plan.adjust(charges), self._timeout
            except StoreError as error:
                self.uncorrected += 1
                self._store_health.failed(error)
                self.slot_keeper.release_later(slots)
            except BaseException:  # an interruption
                self.slot_keeper.release_later(slots)
                raise

    def hold(self, admission: Admission, charged: Sequence[Charged]) -> None:
        """Keep the slots of a request until they are given back."""
        admission.has_slots = True
        for each in charged:
            slots = [charge for charge, _, after in each.reading.buckets if after is not None]
            self._slot_keeper_of(each).hold(slots, admission)

    def release_later(self, plan: Plan | None, keys: frozenset[str] = frozenset()) -> None:
        """Schedule the release of slots in these buckets, or in all: the reply was lost, so they may be taken."""
        charges = plan.charges if plan else ()
        self.slot_keeper.release_later([charge for charge in charges if not keys or charge.key in keys])

    def _slot_keeper_of(self, charged: Charged) -> SlotKeeper:
        return self._fallback.slot_keeper if charged.is_local else self.slot_keeper


def _refunds_of(admission: Admission) -> list[Refund]:
    any_has_own_cost = bool(admission.settlement.costs) and nesting.any_has_own_cost(admission)
    return admission.refunds(any_has_own_cost=any_has_own_cost)
