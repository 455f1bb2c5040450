"""Reservations: charges of an estimated cost, corrected when the real cost is known."""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.gate.flow import arun, run
from limitgate.limiter.operations import ChargedOperation
from limitgate.limits.decision import Decision
from limitgate.stores import AsyncStore, SyncStore


class AsyncReservation:
    """Charge of `AsyncLimiter.reserve`, permanent unless it is settled or cancelled."""

    def __init__(self, booked: ChargedOperation, store: AsyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """Decision as of `AsyncLimiter.hit`. A refusal charges nothing."""
        return self._booked.decision

    async def settle(self, cost: int | Sequence[int]) -> None:
        """Replace the estimate by the real cost, once: refund an excess, or charge a shortfall now.

        If limits have their own cost, ``cost`` replaces these; of several, it is a list in their order.

        Raises `RuntimeError` if nothing was charged or the reservation is already settled or cancelled, and `StoreError` if the
        store fails; then the estimate remains charged.
        """
        await arun(self._store, self._booked.settling(cost))

    async def cancel(self) -> None:
        """Refund everything. Raises the errors of `settle`."""
        await arun(self._store, self._booked.cancelling())


class Reservation:
    """Charge of `Limiter.reserve`, permanent unless it is settled or cancelled."""

    def __init__(self, booked: ChargedOperation, store: SyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """Decision as of `Limiter.hit`. A refusal charges nothing."""
        return self._booked.decision

    def settle(self, cost: int | Sequence[int]) -> None:
        """Replace the estimate by the real cost, once: refund an excess, or charge a shortfall now.

        If limits have their own cost, ``cost`` replaces these; of several, it is a list in their order.

        Raises `RuntimeError` if nothing was charged or the reservation is already settled or cancelled, and `StoreError` if the
        store fails; then the estimate remains charged.
        """
        run(self._store, self._booked.settling(cost))

    def cancel(self) -> None:
        """Refund everything. Raises the errors of `settle`."""
        run(self._store, self._booked.cancelling())
