"""Fair shares of a budget among the tenants of a process: who waits takes turns by tokens.

Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996), with equal weights: a request starts, in virtual time, when the one
before it in its tenant's queue ends, but not before the line's present. The least start goes first. So a tenant with many
requests delays the first request of another one by a single request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from threading import TIMEOUT_MAX, Event, Lock
from typing import Any

_LONGEST_TENANT = 256
"""Characters of a tenant's name that are told apart."""


_FEW = 64
"""Entries of requests that have left are dropped once there are more of them than others, and than this."""


class Ticket:
    """One request in a line."""

    __slots__ = ("end", "has_left", "is_called", "number", "start", "tenant", "wake")

    def __init__(self, tenant: str, start: int, end: int, number: int) -> None:
        self.tenant = tenant
        self.start = start
        self.end = end
        self.number = number
        self.is_called = self.has_left = False
        self.wake: Callable[[], Any] = bool

    def __lt__(self, other: Ticket) -> bool:
        return (self.start, self.number) < (other.start, other.number)


class FairLine:
    """The line before one key of a budget. One request at a time books its turn; the others wait here. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[Ticket] = []
        self._first: Ticket | None = None
        self._ends: dict[str, int] = {}
        """Virtual end of each tenant's last request, in tokens."""
        self._now = 0
        self._number = self._many = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return self._many

    def join(self, tenant: str, tokens: int) -> Ticket:
        """Join the line with a request of this many tokens."""
        tenant = tenant[:_LONGEST_TENANT]
        with self._lock:
            start = max(self._now, self._ends.get(tenant, 0))
            self._number += 1
            self._many += 1
            ticket = Ticket(tenant, start, start + max(1, tokens), self._number)
            self._ends[tenant] = ticket.end
            if self._first is None:
                self._call(ticket)
            else:
                heappush(self._waiting, ticket)
        return ticket

    def leave(self, ticket: Ticket, *, is_taken: bool) -> None:
        """Leave the line, so that the next one is called. A request that took nothing doesn't count for its tenant."""
        with self._lock:
            if not is_taken and self._ends.get(ticket.tenant) == ticket.end:
                self._ends[ticket.tenant] = ticket.start
            ticket.has_left = True
            self._many -= 1
            if len(self._waiting) > 2 * self._many + _FEW:
                self._waiting = [each for each in self._waiting if not each.has_left]
                heapify(self._waiting)
            if len(self._ends) > 2 * self._many + _FEW:
                self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}
            if ticket is self._first:
                self._call_next()

    def _call_next(self) -> None:
        self._first = None
        while self._first is None and self._waiting:
            ticket = heappop(self._waiting)
            # Its event loop may have ended.
            with suppress(RuntimeError):
                if not ticket.has_left:
                    self._call(ticket)
        if self._first is None:
            # While no request waits, no tenant has an advantage.
            self._ends.clear()
            self._now = 0

    def _call(self, ticket: Ticket) -> None:
        ticket.wake()
        self._first, self._now, ticket.is_called = ticket, ticket.start, True

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        """Wait in this thread until a ticket is called, at most ``timeout`` seconds."""
        called = Event()
        with self._lock:
            if ticket.is_called:
                return True
            ticket.wake = called.set
        return called.wait(None if timeout is None or timeout > TIMEOUT_MAX else timeout)

    async def await_(self, ticket: Ticket, timeout: float | None) -> bool:
        """`wait` on an event loop."""
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
