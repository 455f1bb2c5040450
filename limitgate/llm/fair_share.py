"""Requests of this process that wait for a budget, by tenant.

The first request of up to `HEADS` tenants waits in the line of all processes, see `limitgate.algorithms.line`; others wait
here. Beyond these, tenants also take turns by start-time fair queueing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from threading import TIMEOUT_MAX, Event, Lock
from typing import Any

HEADS = 16
"""Maximum of a process' tenants in the shared line."""
_LONGEST_TENANT = 256
"""Characters."""

_FEW = 64
"""Minimum of ended entries before they are removed."""


class Ticket:
    __slots__ = ("end", "has_left", "is_called", "number", "start", "tenant", "wake")

    def __init__(self, tenant: str, start: int, end: int, number: int) -> None:
        self.tenant: str = tenant
        self.start: int = start
        self.end: int = end
        self.number: int = number
        self.is_called: bool = False
        self.has_left: bool = False
        self.wake: Callable[[], Any] = bool

    def __lt__(self, other: Ticket) -> bool:
        return (self.start, self.number) < (other.start, other.number)


class FairLine:
    """The line of one key. Calls the requests of up to ``heads`` tenants, one of each. Thread-safe."""

    def __init__(self, heads: int = 1) -> None:
        self._heads = heads
        self._called: dict[str, Ticket] = {}
        """Called tickets by tenant."""
        self._queues: dict[str, dict[Ticket, None]] = {}
        """Other tickets of each tenant, in order."""
        self._next: list[Ticket] = []
        """Heap of the first ticket of each tenant without a called one. It may have tickets that have left."""
        self._ends: dict[str, int] = {}
        """Virtual time in tokens at which each tenant's last ticket ends."""
        self._now = 0
        self._number = self._many = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return self._many

    def join(self, tenant: str, tokens: int) -> Ticket:
        tenant = tenant[:_LONGEST_TENANT]
        with self._lock:
            start = max(self._now, self._ends.get(tenant, 0))
            self._number += 1
            self._many += 1
            ticket = Ticket(tenant, start, start + max(1, tokens), self._number)
            self._ends[tenant] = ticket.end
            queue = self._queues.setdefault(tenant, {})
            queue[ticket] = None
            if len(queue) == 1 and tenant not in self._called:
                heappush(self._next, ticket)
                self._call_next()
        return ticket

    def leave(self, ticket: Ticket, *, is_taken: bool) -> None:
        """Leave, and call the next ticket. A request that reserved nothing costs no virtual time."""
        tenant = ticket.tenant
        with self._lock:
            if not is_taken and self._ends.get(tenant) == ticket.end:
                self._ends[tenant] = ticket.start
            ticket.has_left = True
            self._many -= 1
            queue = self._queues.get(tenant, {})
            was_next = ticket is next(iter(queue), None)
            queue.pop(ticket, None)
            if self._called.get(tenant) is ticket:
                del self._called[tenant]
                was_next = True
            if was_next and queue and tenant not in self._called:
                heappush(self._next, next(iter(queue)))
            if not queue:
                self._queues.pop(tenant, None)
            self._tidy()
            self._call_next()

    def _tidy(self) -> None:
        if len(self._next) > 2 * len(self._queues) + _FEW:
            self._next = [each for each in self._next if not each.has_left]
            heapify(self._next)
        if len(self._ends) > 2 * self._many + _FEW:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

    def _call_next(self) -> None:
        while len(self._called) < self._heads and self._next:
            ticket = heappop(self._next)
            if ticket.has_left:
                continue
            queue = self._queues[ticket.tenant]
            del queue[ticket]
            # Its event loop may have ended.
            with suppress(RuntimeError):
                ticket.wake()
                self._called[ticket.tenant] = ticket
                self._now, ticket.is_called = ticket.start, True
            if not queue:
                del self._queues[ticket.tenant]
            elif not ticket.is_called:
                heappush(self._next, next(iter(queue)))
        if not self._called:
            # While no request waits, no tenant has an advantage.
            self._ends.clear()
            self._now = 0

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Wait in this thread until called, for ``timeout`` seconds."""
        called = Event()
        with self._lock:
            if ticket.is_called:
                return True
            ticket.wake = called.set
        return called.wait(None if timeout is None or timeout > TIMEOUT_MAX else timeout)

    async def await_(self, ticket: Ticket, timeout: float | None) -> bool:
        loop = asyncio.get_running_loop()
        called = loop.create_future()

        def call() -> None:
            if not called.done():
                called.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(call)

        with self._lock:
            if ticket.is_called:
                return True
            ticket.wake = wake
        try:
            async with asyncio.timeout(timeout):
                await called
        except TimeoutError:
            return ticket.is_called
        return True
