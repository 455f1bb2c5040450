"""Requests of one event loop that share a call."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from limitgate.limits.plan import Plan
from limitgate.limits.template import OF_ANY, AnyPlan, ScriptVariant
from limitgate.stores.base import Room
from limitgate.stores.redis import wire

Request = tuple[AnyPlan, float, "asyncio.Future[Any]", float]
"""Plan, deadline (in seconds of silence, see `Batcher`), future, and timeout in seconds."""


class Batch(wire.Call):
    __slots__ = ("_due", "requests", "silence", "since")
    plans: list[AnyPlan]
    requests: list[Request]
    since: float
    """Latest send, by the `ListeningClock`."""
    silence: float
    _due: float | None

    def __init__(
        self, requests: list[Request], shape: ScriptVariant | None = None, config: wire.KeptRequest | None = None
    ) -> None:
        plans = [requests[0][0]] if len(requests) == 1 else [plan for plan, _, _, _ in requests]
        wire.Call.__init__(self, plans, shape, config)  # ``super()`` is slower
        self.requests = requests
        self.since = self.silence = 0.0
        self._due = None

    @property
    def is_wanted(self) -> bool:
        for _, _, waiting, _ in self.requests:  # noqa: SIM110 - any() would create a generator per call
            if not waiting.done():
                return True
        return False

    @property
    def due(self) -> float:
        """Return a time of the `ListeningClock`, not after the first deadline."""
        if self._due is None:
            first = min([due for _, due, waiting, _ in self.requests if not waiting.done()], default=math.inf)
            self._due = self.since + first - self.silence
        return self._due

    def silence_at(self, now: float) -> float:
        passed = now - self.since
        return self.silence + passed if passed > 0 else self.silence  # max() is slower

    def heard(self, seconds: float, now: float) -> None:
        """Record an answer that asks for a resend."""
        self.silence, self.since, self._due = self.silence_at(seconds), now, None

    def overdue(self, now: float) -> list[Request]:
        self._due = None
        silence = self.silence_at(now)
        return [request for request in self.requests if request[1] <= silence and not request[2].done()]

    def follow(self, other: wire.Call) -> None:
        super().follow(other)
        if isinstance(other, Batch):
            self.since, self.silence = other.since, other.silence

    def repeated(self) -> Batch:
        """Return the requests whose caller still waits, without refunds."""
        left = [request for request in self.requests if not (request[0].has_adjustments or request[2].done())]
        again = Batch(left, self.shape)
        again.follow(self)
        again.asking, again.is_repeated = self.asking, True
        return again

    def each(self) -> list[Batch]:
        alone = []
        for plan, request in zip(self.plans, self.requests):
            batch = Batch([request], self.shape)
            batch.plans = [plan]
            batch.follow(self)
            alone.append(batch)
        return alone


class RequestQueue:
    """Requests in order of arrival. Successive plain plans of the same shape form a batch."""

    __slots__ = ("_entries", "_most", "_open", "_room", "size")

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: deque[Request | Batch] = deque()
        self._open: dict[ScriptVariant, Batch] = {}
        self._room = Room()
        self.size: int = 0

    def __iter__(self) -> Iterator[Request]:
        for entry in self._entries:
            if isinstance(entry, Batch):
                yield from entry.requests
            else:
                yield entry

    def append(self, request: Request) -> None:
        self.size += 1
        plan = request[0]
        entry: Request | Batch = request
        if not isinstance(plan, Plan):
            shape = plan.template.shape
            batch = self._open.get(shape)
            if batch is not None and len(batch.plans) < self._most and (shape is not OF_ANY or self._room.takes(plan)):
                batch.requests.append(request)
                batch.plans.append(plan)
                return
            self._open[shape] = entry = Batch([request], shape)
            if shape is OF_ANY:
                self._room = Room()
                self._room.takes(plan)
        self._entries.append(entry)

    def appendleft(self, request: Request) -> None:
        self._entries.appendleft(request)
        self.size += 1

    def first(self) -> Request | None:
        entry = self._entries[0] if self._entries else None
        return None if isinstance(entry, Batch) else entry

    def popleft(self) -> Request:
        entry = self._entries.popleft()
        if isinstance(entry, Batch):
            raise TypeError("plain plans are next, expected first() to be asked before")
        self.size -= 1
        return entry

    def pop_plain(self) -> Batch | None:
        entries, still_open = self._entries, self._open
        if not entries or type(batch := entries[0]) is not Batch:
            return None
        entries.popleft()
        self.size -= len(batch.plans)
        shape: Any = batch.shape
        if still_open.get(shape) is batch:
            del still_open[shape]
        return batch

    def keep(self, requests: Iterable[Request]) -> None:
        self.clear()
        for request in requests:
            self.append(request)

    def clear(self) -> None:
        self._entries.clear()
        self._open.clear()
        self.size = 0
