"""Requests of one event loop that share a call."""

from __future__ import annotations

import asyncio

from limitgate.plan import Plan, Reading
from limitgate.stores import wire

Request = tuple[Plan, float, "asyncio.Future[Reading]"]
"""What is asked, by when on the loop's clock, and whom to tell."""


class Batch(wire.Call):
    """Requests that share a call."""

    __slots__ = ("again", "requests")

    def __init__(self, requests: list[Request]) -> None:
        super().__init__([plan for plan, _, _ in requests])
        self.requests = requests
        self.again = False
        """Whether it was sent before, on a connection that turned out to be dead."""

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        for _, _, waiting in self.requests:  # noqa: SIM110 - any() would make a generator for every call
            if not waiting.done():
                return True
        return False

    @property
    def deadline(self) -> float:
        """When the first of its requests is overdue."""
        return min(deadline for _, deadline, _ in self.requests)

    def each(self) -> list[Batch]:
        """Its requests as batches of their own, their plans just as they are."""
        alone = []
        for plan, request in zip(self.plans, self.requests):
            batch = Batch([request])
            batch.plans = [plan]
            batch.follow(self)
            alone.append(batch)
        return alone
