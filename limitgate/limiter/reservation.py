"""Reservations: charges of an estimated cost until the real one is known, returned by the limiters' ``reserve``."""

from __future__ import annotations

from limitgate.gate.flow import arun, run
from limitgate.limiter.operations import ChargedOperation
from limitgate.limits.decision import Decision
from limitgate.stores import AsyncStore, SyncStore


class AsyncReservation:
    """Charge of `AsyncLimiter.reserve`; it counts until it is settled or cancelled, and for good if neither happens."""

    def __init__(self, booked: ChargedOperation, store: AsyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """Decision of `AsyncLimiter.hit`. If it is a refusal, nothing was taken."""
        return self._booked.decision

    async def settle(self, cost: int) -> None:
        """Replace the estimate by the real cost; once. An excess is refunded, a shortfall is owed from now on.

        Raises `RuntimeError` if nothing was taken, or it was settled or cancelled already; `StoreError` if the store fails:
        the estimate then counts.
        """
        await arun(self._store, self._booked.settling(cost))

    async def cancel(self) -> None:
        """Refund everything, as if it had never been taken. Raises as `settle` does."""
        await arun(self._store, self._booked.settling(0))


class Reservation:
    """Charge of `Limiter.reserve`; it counts until it is settled or cancelled, and for good if neither happens."""

    def __init__(self, booked: ChargedOperation, store: SyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """Decision of `Limiter.hit`. If it is a refusal, nothing was taken."""
        return self._booked.decision

    def settle(self, cost: int) -> None:
        """Replace the estimate by the real cost; once. An excess is refunded, a shortfall is owed from now on.

        Raises `RuntimeError` if nothing was taken, or it was settled or cancelled already; `StoreError` if the store fails:
        the estimate then counts.
        """
        run(self._store, self._booked.settling(cost))

    def cancel(self) -> None:
        """Refund everything, as if it had never been taken. Raises as `settle` does."""
        run(self._store, self._booked.settling(0))
