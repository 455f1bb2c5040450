"""Buckets in this process: exact, thread-safe, bounded. Twin of limitgate/lua/spend.lua.

Room for a newcomer is made from a heap with one entry per bucket, ordered by when the bucket will be full again: expired
buckets come up first, then those that owe least. A bucket that owes more than its entry says is put back when it comes up,
a bucket that is refusing is set aside until it no longer does, and where no room can be made in a few steps the newcomer
shares an overflow bucket with other newcomers of its kind. So a flood of new keys can never push an exhausted one out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import Any

from limitgate import gcra
from limitgate.diagnosis import Diagnosis, Once
from limitgate.forks import begin_anew_in_children
from limitgate.limits import Windows
from limitgate.plan import Charge, Plan, Reading, read

_STEPS = 64
"""How many heap entries a newcomer may look at; bounds the work of one request."""
_STEP = 1_000_000
"""Microseconds that the clock may step back before the heap is made anew; less puts no bucket out of place for long."""


_Bucket = tuple[int, Windows, Sequence[int], int]
"""When it was written in Unix µs, its windows, what each owed then in ticks, and the heap entry that counts for it."""
_Home = tuple[dict[Any, _Bucket], Any, _Bucket | None]
"""Where a charge's bucket lives: in which dictionary, under which key, and the bucket if there is one yet."""


class MemoryStore:
    """Keeps at most ``max_buckets`` buckets in this process; each process limits by itself.

    ``clock`` returns Unix time in integer microseconds. ``clock_steps`` counts the buckets that were found written in the
    future, which happens when the clock steps back; the first step of a second or more is logged. The deadline of a call is
    not looked at: nothing here waits.
    """

    healthy = True
    """Whether the store answers, as in every store; this one always does."""

    def __init__(self, clock: Callable[[], int] | None = None, *, max_buckets: int = 1_000_000) -> None:
        if max_buckets < 1:
            raise ValueError(f"max_buckets is {max_buckets}, expected at least 1")
        self._clock = clock or _system_clock
        self._max_buckets = max_buckets
        self._buckets: dict[str, _Bucket] = {}
        self._overflow: dict[tuple[int, ...], _Bucket] = {}
        self._queue: list[tuple[int, str]] = []
        self._refusing: list[tuple[int, str]] = []
        self._latest = 0
        self._lock = Lock()
        begin_anew_in_children(self)
        self.clock_steps = 0
        self._stepped = Once(Diagnosis.CLOCK_STEPPED)

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
                owed = self._read(home, charge.windows, now)
                lease = charge.lease
                if lease is not None:
                    owed = gcra.put_right(owed, lease.back, max(0, now - lease.as_of), lease.grace, charge.windows)
                    self._write(home, charge.windows, now, owed, owes_less=True)
                debts.append(owed)
            if plan.verb == "reset":
                debts = [[0] * len(owed) for owed in debts]
                for home, charge, owed in zip(homes, charges, debts):
                    self._write(home, charge.windows, now, owed, owes_less=True)
            reading = read(charges, now, debts)
            if plan.verb == "spend" and reading.admitted:
                for home, charge, then in zip(homes, charges, reading.after):
                    if then is not None and charge.cost:
                        self._write(home, charge.windows, now, then)
            return reading

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        """`spend`, for async callers."""
        return self.spend(plan)

    def begin_anew(self) -> None:
        """In the child of a fork: no thread is left there that could release what another one held."""
        self._lock = Lock()

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
        written, stored, debts, _ = bucket
        debts = gcra.drained(debts, now - written, stored)
        changed = False
        if windows is not stored:
            owed = {window: (debt, count) for window, debt, count in zip(stored.ids, debts, stored.counts) if debt}
            found = [owed.get(window, (0, count)) for window, count in zip(windows.ids, windows.counts)]
            debts = [gcra.rescaled(debt, limit) for (debt, _), limit in zip(found, windows.limits)]
            changed = any(count != limit.count for (_, count), limit in zip(found, windows.limits))
        if now < written:
            self.clock_steps += 1
            if written - now >= _STEP:
                self._stepped.log("this machine")
        if changed or now < written:
            self._write(home, windows, now, debts, owes_less=True)
        return debts

    def _write(self, home: _Home, windows: Windows, now: int, debts: Sequence[int], *, owes_less: bool = False) -> None:
        """Put the asked windows' debts; windows of the bucket that were not asked stay as they are."""
        buckets, key, bucket = home
        if bucket is not None and bucket[1] is not windows:
            windows, debts = _joined(windows, debts, bucket, now)
        live = buckets.get(key)  # making room for another charge of the plan may have moved or dropped it
        if buckets is self._buckets and (owes_less or live is None):
            due = _full_at(now, windows, debts)
            buckets[key] = (now, windows, debts, due)
            self._queue_up(due, key)
        else:
            buckets[key] = (now, windows, debts, live[3] if live else 0)

    def _queue_up(self, due: int, key: str) -> None:
        """Put a bucket into the heap; once half of the entries do not count any more, they go."""
        heappush(self._queue, (due, key))
        if len(self._queue) + len(self._refusing) > 2 * len(self._buckets) + _STEPS:
            self._compact()

    def _reclaim(self, now: int) -> bool:
        """Make room: expired buckets go, and when there is no room still the one that owes least. False if all refuse."""
        if now < self._latest - _STEP:
            self._step_back(now)
        self._latest = now
        for _ in range(_STEPS):
            if not self._refusing or self._refusing[0][0] > now:
                break
            heappush(self._queue, heappop(self._refusing))
        for _ in range(_STEPS):
            if not self._queue or (self._queue[0][0] > now and len(self._buckets) < self._max_buckets):
                break
            entry, key = heappop(self._queue)
            bucket = self._buckets.get(key)
            if bucket is None or bucket[3] != entry:
                continue
            written, windows, debts, _ = bucket
            since = min(written, now)
            due, until = _full_at(since, windows, debts), _refuses_until(since, windows, debts)
            if due > entry:
                heappush(self._queue, (due, key))
                self._buckets[key] = (written, windows, debts, due)
            elif until > now:
                heappush(self._refusing, (until, key))
                self._buckets[key] = (written, windows, debts, until)
            else:
                del self._buckets[key]
        return len(self._buckets) < self._max_buckets

    def _step_back(self, now: int) -> None:
        """After a step of the clock, let no bucket wait for the time at which it was written to come round again."""
        for key, (written, windows, debts, _) in self._buckets.items():
            since = min(written, now)
            self._buckets[key] = (since, windows, debts, _full_at(since, windows, debts))
        self._compact()

    def _compact(self) -> None:
        """Make the heap anew, with the entries that count."""
        self._refusing = []
        self._queue = [(bucket[3], key) for key, bucket in self._buckets.items()]
        heapify(self._queue)


def _system_clock() -> int:
    return time.time_ns() // 1000


def _full_at(written: int, windows: Windows, debts: Sequence[int]) -> int:
    """When nothing will be owed any more, in Unix µs."""
    return written + max(map(gcra.refill_us, debts, windows.limits))


def _refuses_until(written: int, windows: Windows, debts: Sequence[int]) -> int:
    """When one request will fit into every window, in Unix µs; the time of writing if it did then."""
    return written + max(gcra.wait_us(debt, 1, limit) or 0 for debt, limit in zip(debts, windows.limits))


def _joined(windows: Windows, debts: Sequence[int], bucket: _Bucket, now: int) -> tuple[Windows, Sequence[int]]:
    """The asked windows, and those of ``bucket`` that were not asked and still owe something."""
    limits, ids, owed = list(windows.limits), list(windows.ids), list(debts)
    written, stored, before, _ = bucket
    for limit, window, debt in zip(stored.limits, stored.ids, gcra.drained(before, now - written, stored)):
        if window not in windows.ids and debt:
            limits.append(limit)
            ids.append(window)
            owed.append(debt)
    return (windows, debts) if len(ids) == len(windows.ids) else (Windows(tuple(limits), tuple(ids)), owed)
