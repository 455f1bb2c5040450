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
from typing import Any

from limitgate import gcra
from limitgate.limits import Windows
from limitgate.plan import Charge, Plan, Reading, read

_STEPS = 64
"""How many heap entries a newcomer may look at; bounds the work of one request."""


_Bucket = tuple[int, Windows, Sequence[int]]
"""When it was written in Unix µs, its windows, and what each owed then, in ticks."""
_Home = tuple[dict[Any, _Bucket], Any, _Bucket | None]
"""Where a charge's bucket lives: in which dictionary, under which key, and the bucket if there is one yet."""


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
            homes, debts = [], []
            for charge in charges:
                home = self._home(charge, now)
                homes.append(home)
                debts.append(self._read(home, charge.windows, now))
            if plan.verb == "reset":
                debts = [[0] * len(owed) for owed in debts]
                for home, charge, owed in zip(homes, charges, debts):
                    self._write(home, charge.windows, now, owed)
            reading = read(charges, now, debts)
            if plan.verb == "spend" and reading.admitted:
                for home, charge, then in zip(homes, charges, reading.after):
                    if then is not None and charge.cost:
                        self._write(home, charge.windows, now, then)
            return reading

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        """`spend`, for async callers."""
        return self.spend(plan)

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def _home(self, charge: Charge, now: int) -> _Home:
        """Where this charge's bucket lives: under its key, or in the overflow bucket of its windows."""
        key = charge.key
        bucket = self._buckets.get(key)
        if bucket is not None or self._reclaim(now):
            return self._buckets, key, bucket
        shared = charge.windows.ids
        return self._overflow, shared, self._overflow.get(shared)

    def _read(self, home: _Home, windows: Windows, now: int) -> Sequence[int]:
        """What each asked window owes now, in ticks."""
        bucket = home[2]
        if bucket is None:
            return [0] * len(windows.ids)
        written, stored, debts = bucket
        debts = gcra.drained(debts, now - written, stored)
        if windows is not stored:
            by_id = dict(zip(stored.ids, debts))
            debts = [gcra.rescaled(by_id.get(window, 0), limit) for limit, window in zip(windows.limits, windows.ids)]
        if now < written:
            self.clock_steps += 1
            self._write(home, windows, now, debts)
        return debts

    def _write(self, home: _Home, windows: Windows, now: int, debts: Sequence[int]) -> None:
        """Put the asked windows' debts; windows of the bucket that were not asked stay as they are."""
        buckets, key, bucket = home
        if bucket is not None and bucket[1] is not windows:
            windows, debts = _joined(windows, debts, bucket, now)
        buckets[key] = written = (now, windows, debts)
        if bucket is None and buckets is self._buckets:
            heappush(self._queue, (_full_at(written), key))

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
            full_at = _full_at(bucket)
            if full_at > due:
                heappush(self._queue, (full_at, key))
            elif (until := _refuses_until(bucket)) > now:
                heappush(self._refusing, (until, key))
            else:
                del self._buckets[key]
        return len(self._buckets) < self._max_buckets


def _system_clock() -> int:
    return time.time_ns() // 1000


def _full_at(bucket: _Bucket) -> int:
    """When nothing will be owed any more, in Unix µs."""
    written, windows, debts = bucket
    return written + max(map(gcra.refill_us, debts, windows.limits))


def _refuses_until(bucket: _Bucket) -> int:
    """When one request will fit into every window, in Unix µs; the time of writing if it did then."""
    written, windows, debts = bucket
    return written + max(gcra.wait_us(debt, 1, limit) or 0 for debt, limit in zip(debts, windows.limits))


def _joined(windows: Windows, debts: Sequence[int], bucket: _Bucket, now: int) -> tuple[Windows, Sequence[int]]:
    """The asked windows, and those of ``bucket`` that were not asked and still owe something."""
    limits, ids, owed = list(windows.limits), list(windows.ids), list(debts)
    written, stored, before = bucket
    for limit, window, debt in zip(stored.limits, stored.ids, gcra.drained(before, now - written, stored)):
        if window not in windows.ids and debt:
            limits.append(limit)
            ids.append(window)
            owed.append(debt)
    return (windows, debts) if len(ids) == len(windows.ids) else (Windows(tuple(limits), tuple(ids)), owed)
