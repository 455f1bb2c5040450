"""Buckets in this process: exact, thread-safe, bounded. Twin of limitgate/lua/spend.lua.

Room for a newcomer is made from a heap with one entry per bucket, ordered by when the bucket will be full again: expired
buckets come up first, then those that owe least. A bucket that owes more than its entry says is put back when it comes up,
a bucket that is refusing is set aside until it no longer does, and where no room can be made in a few steps the newcomer
shares an overflow bucket with other newcomers of its kind. So a flood of new keys can never push an exhausted one out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from threading import Lock
from typing import NamedTuple

from limitgate import gcra
from limitgate.limits import Windows
from limitgate.plan import Charge, Plan, Reading, admitted, fitting

_STEPS = 64
"""How many heap entries a newcomer may look at; bounds the work of one request."""


class _Bucket(NamedTuple):
    written: int
    windows: Windows
    debts: Sequence[int]

    def full_at(self) -> int:
        """When nothing will be owed any more, in Unix µs."""
        owed = zip(self.windows.limits, self.debts, strict=True)
        return self.written + max(gcra.refill_us(debt, limit) for limit, debt in owed)

    def refuses_until(self) -> int:
        """When one request will fit into every window, in Unix µs; the time of writing if it did then."""
        owed = zip(self.windows.limits, self.debts, strict=True)
        return self.written + max(gcra.wait_us(debt, 1, limit) or 0 for limit, debt in owed)


class MemoryStore:
    """Keeps at most ``max_buckets`` buckets in this process; each process limits by itself.

    ``clock`` returns Unix time in integer microseconds. ``clock_steps`` counts the buckets that were found written in the
    future, which happens when the clock steps back. The deadline of a call is not looked at: nothing here waits.
    """

    def __init__(self, clock: Callable[[], int] | None = None, *, max_buckets: int = 1_000_000) -> None:
        if max_buckets < 1:
            raise ValueError(f"max_buckets is {max_buckets}, expected at least 1")
        self._clock = clock or _system_clock
        self._max_buckets = max_buckets
        self._buckets: dict[str, _Bucket] = {}
        self._overflow: dict[tuple[int, ...], _Bucket] = {}
        self._queue: list[tuple[int, str]] = []
        self._refusing: list[tuple[int, str]] = []
        self._lock = Lock()
        self.clock_steps = 0

    def __len__(self) -> int:
        """How many buckets are kept."""
        return len(self._buckets)

    def __repr__(self) -> str:
        return f"MemoryStore(max_buckets={self._max_buckets})"

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        """Carry out ``plan`` under one lock and report the state before it."""
        charges = plan.charges
        with self._lock:
            now = self._clock()
            homes = [self._home(charge, now) for charge in charges]
            debts = [self._read(home, charge.windows, now) for home, charge in zip(homes, charges, strict=True)]
            if plan.verb == "spend":
                fit = fitting(charges, debts)
                if admitted(charges, fit):
                    for home, charge, owed, fits in zip(homes, charges, debts, fit, strict=True):
                        if fits and charge.cost:
                            self._write(home, now, charge.windows, _charged(charge, owed))
            elif plan.verb == "reset":
                debts = [[0] * len(owed) for owed in debts]
                for home, charge, owed in zip(homes, charges, debts, strict=True):
                    self._write(home, now, charge.windows, owed)
            return Reading(now, debts)

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        """`spend`, for async callers."""
        return self.spend(plan)

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def _home(self, charge: Charge, now: int) -> str | tuple[int, ...]:
        """Where this charge's bucket lives: under its key, or in the overflow bucket of its windows."""
        if charge.key in self._buckets or self._reclaim(now):
            return charge.key
        return charge.windows.ids

    def _read(self, home: str | tuple[int, ...], windows: Windows, now: int) -> list[int]:
        """What each asked window owes now, in ticks."""
        bucket = self._find(home)
        if bucket is None:
            return [0] * len(windows.ids)
        elapsed = now - bucket.written
        owed = zip(bucket.windows.limits, bucket.debts, strict=True)
        debts = [gcra.drained(debt, elapsed, limit) for limit, debt in owed]
        if windows is not bucket.windows:
            stored = dict(zip(bucket.windows.ids, debts, strict=True))
            asked = zip(windows.limits, windows.ids, strict=True)
            debts = [gcra.rescaled(stored.get(window, 0), limit) for limit, window in asked]
        if elapsed < 0:
            self.clock_steps += 1
            self._write(home, now, windows, debts)
        return debts

    def _write(self, home: str | tuple[int, ...], now: int, windows: Windows, debts: Sequence[int]) -> None:
        """Put the asked windows' debts; windows of the bucket that were not asked stay as they are."""
        bucket = self._find(home)
        if bucket is not None and bucket.windows is not windows:
            windows, debts = _joined(windows, debts, bucket, now)
        self._put(home, _Bucket(now, windows, debts))

    def _find(self, home: str | tuple[int, ...]) -> _Bucket | None:
        return self._buckets.get(home) if isinstance(home, str) else self._overflow.get(home)

    def _put(self, home: str | tuple[int, ...], bucket: _Bucket) -> None:
        if not isinstance(home, str):
            self._overflow[home] = bucket
            return
        if home not in self._buckets:
            heappush(self._queue, (bucket.full_at(), home))
        self._buckets[home] = bucket

    def _reclaim(self, now: int) -> bool:
        """Make room: expired buckets go, and when there is no room still the one that owes least. False if all refuse."""
        for _ in range(_STEPS):
            if not self._refusing or self._refusing[0][0] > now:
                break
            heappush(self._queue, heappop(self._refusing))
        for _ in range(_STEPS):
            if not self._queue or (self._queue[0][0] > now and len(self._buckets) < self._max_buckets):
                break
            due, key = heappop(self._queue)
            bucket = self._buckets[key]
            full_at = bucket.full_at()
            if full_at > due:
                heappush(self._queue, (full_at, key))
            elif (until := bucket.refuses_until()) > now:
                heappush(self._refusing, (until, key))
            else:
                del self._buckets[key]
        return len(self._buckets) < self._max_buckets


def _system_clock() -> int:
    return time.time_ns() // 1000


def _charged(charge: Charge, owed: Sequence[int]) -> list[int]:
    cost = charge.cost
    return [debt + cost * limit.period_us for limit, debt in zip(charge.windows.limits, owed, strict=True)]


def _joined(windows: Windows, debts: Sequence[int], bucket: _Bucket, now: int) -> tuple[Windows, Sequence[int]]:
    """The asked windows, and those of ``bucket`` that were not asked and still owe something."""
    limits, ids, owed = list(windows.limits), list(windows.ids), list(debts)
    for limit, window, written in zip(bucket.windows.limits, bucket.windows.ids, bucket.debts, strict=True):
        debt = gcra.drained(written, now - bucket.written, limit)
        if window not in windows.ids and debt:
            limits.append(limit)
            ids.append(window)
            owed.append(debt)
    return (windows, debts) if len(ids) == len(windows.ids) else (Windows(tuple(limits), tuple(ids)), owed)
