"""What was taken for an estimated cost, until it is known: what `AsyncLimiter.reserve` and `Limiter.reserve` give."""

from __future__ import annotations

from limitgate.gate.flow import arun, run
from limitgate.limiter.operations import ChargedOperation
from limitgate.limits.decision import Decision
from limitgate.stores import AsyncStore, SyncStore


class AsyncReservation:
    """What `AsyncLimiter.reserve` took; it counts until it is settled or cancelled, and for good if neither happens."""

    def __init__(self, booked: ChargedOperation, store: AsyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """What `AsyncLimiter.hit` would have answered. Where it is a refusal, nothing was taken."""
        return self._booked.decision

    async def settle(self, cost: int) -> None:
        """Say what it really cost; once. What was taken too much is given back, what was taken too little is owed from now on.

        Raises `RuntimeError` where nothing was taken, or it was settled or cancelled already; `StoreError` if the store fails,
        and then it counts as it was taken.
        """
        await arun(self._store, self._booked.settling(cost))

    async def cancel(self) -> None:
        """Give everything back, as if it had never been taken. Raises as `settle` does."""
        await arun(self._store, self._booked.settling(0))


class Reservation:
    """What `Limiter.reserve` took; it counts until it is settled or cancelled, and for good if neither happens."""

    def __init__(self, booked: ChargedOperation, store: SyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """What `Limiter.hit` would have answered. Where it is a refusal, nothing was taken."""
        return self._booked.decision

    def settle(self, cost: int) -> None:
        """Say what it really cost; once. What was taken too much is given back, what was taken too little is owed from now on.

        Raises `RuntimeError` where nothing was taken, or it was settled or cancelled already; `StoreError` if the store fails,
        and then it counts as it was taken.
        """
        run(self._store, self._booked.settling(cost))

    def cancel(self) -> None:
        """Give everything back, as if it had never been taken. Raises as `settle` does."""
        run(self._store, self._booked.settling(0))
