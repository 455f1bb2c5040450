"""Requests of one event loop that share a call."""

from __future__ import annotations

import asyncio
import math

from limitgate.limits.plan import Plan, Reading
from limitgate.stores.redis import wire

Request = tuple[Plan, float, "asyncio.Future[Reading]", float]
"""A plan, the silence of Redis at which it is overdue (see `Batcher`), its future reading, and its timeout in seconds."""


class Batch(wire.Call):
    """Requests that share a call."""

    __slots__ = ("_due", "requests", "silence", "since")

    def __init__(self, requests: list[Request]) -> None:
        super().__init__([plan for plan, _, _, _ in requests])
        self.requests = requests
        self.since = 0.0
        """Time of the first sending, by the `ListeningClock`."""
        self.silence = 0.0
        """Seconds for which Redis had been silent then."""
        self._due: float | None = None

    @property
    def is_wanted(self) -> bool:
        """True if anybody still waits for it."""
        for _, _, waiting, _ in self.requests:  # noqa: SIM110 - any() would make a generator for every call
            if not waiting.done():
                return True
        return False

    @property
    def due(self) -> float:
        """Time by which its first request is overdue, or before, by the `ListeningClock`; infinity if nobody waits."""
        if self._due is None:
            first = min([due for _, due, waiting, _ in self.requests if not waiting.done()], default=math.inf)
            self._due = self.since + first - self.silence
        return self._due

    def silence_at(self, now: float) -> float:
        """Seconds of silence that its requests have met by now, by the `ListeningClock`."""
        return self.silence + max(0.0, now - self.since)

    def overdue(self, now: float) -> list[Request]:
        """Its requests that have waited too long."""
        self._due = None
        silence = self.silence_at(now)
        return [request for request in self.requests if request[1] <= silence and not request[2].done()]

    def follow(self, other: wire.Call) -> None:
        """Be sent as another batch that it is a part of."""
        super().follow(other)
        if isinstance(other, Batch):
            self.since, self.silence = other.since, other.silence

    def repeated(self) -> Batch:
        """The requests to send once more: those that somebody waits for, and that give nothing back."""
        again = Batch([request for request in self.requests if not (request[0].has_adjustments or request[2].done())])
        again.follow(self)
        again.asking, again.is_repeated = self.asking, True
        return again

    def each(self) -> list[Batch]:
        """Its requests as batches of their own, their plans just as they are."""
        alone = []
        for plan, request in zip(self.plans, self.requests):
            batch = Batch([request])
            batch.plans = [plan]
            batch.follow(self)
            alone.append(batch)
        return alone
