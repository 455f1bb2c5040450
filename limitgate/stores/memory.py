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

from limitgate.algorithms.base import State
from limitgate.diagnosis import Diagnosis, Once
from limitgate.forks import begin_anew_in_children
from limitgate.plan import Charge, Plan, Reading, read
from limitgate.windows import Windows

_STEPS = 64
"""How many heap entries a newcomer may look at; bounds the work of one request."""
_STEP = 1_000_000
"""Microseconds that the clock may step back before the heap is made anew; less puts no bucket out of place for long."""


_Bucket = tuple[int, Windows, Sequence[State], int]
"""When it was written in Unix µs, its windows, how each stood then, and the heap entry that counts for it."""
_Home = tuple[dict[Any, _Bucket], Any, _Bucket | None]
"""Where a charge's bucket lives: in which dictionary, under which key, and the bucket if there is one yet."""


class MemoryStore:
    """Keeps at most ``max_buckets`` buckets in this process; each process limits by itself.

    Bans and what is configured are never dropped, and kept even where there is no room: clients can make none of them.
    ``clock`` returns Unix time in integer microseconds. ``clock_steps`` counts the buckets that were found written in the
    future, which happens when the clock steps back; the first step of a second or more is logged. The deadline of a call is
    not looked at: nothing here waits.
    """

    measures_silence = True
    """Nobody waits for it, so nobody may be told that there is no time left."""
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
            homes, states = [], []
            for charge in charges:
                windows, lease = charge.windows, charge.lease
                home = self._home(charge, now)
                homes.append(home)
                found = self._read(home, windows, now)
                if lease is not None:
                    found = windows.algorithm.put_right(found, lease.back, max(0, now - lease.as_of), lease.grace, windows)
                    self._write(home, windows, now, found, owes_less=True)
                states.append(found)
            if plan.verb == "reset":
                states = [charge.windows.algorithm.fresh(now, charge.windows) for charge in charges]
                for home, charge, found in zip(homes, charges, states):
                    self._write(home, charge.windows, now, found, owes_less=True)
            reading = read(charges, now, states)
            if plan.verb == "spend" and reading.admitted:
                for home, charge, found, then in zip(homes, charges, states, reading.after):
                    if then is not None and then is not found:
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
        if bucket is not None or self._reclaim(now) or charge.windows.algorithm.SILENT:
            return self._buckets, key, bucket  # a ban, or a configuration, that newcomers shared would hold for all of them
        shared = charge.windows.ids
        return self._overflow, shared, self._overflow.get(shared)

    def _read(self, home: _Home, windows: Windows, now: int) -> Sequence[State]:
        """How each asked window stands now."""
        bucket, algorithm = home[2], windows.algorithm
        if bucket is None:
            return algorithm.fresh(now, windows)
        written, stored, states, _ = bucket
        changed = False
        if windows is stored:
            states = algorithm.opened(states, now - written, stored, now)
        else:
            states = algorithm.drained(states, now - written, stored)
            known = {window: (state, limit) for window, state, limit in zip(stored.ids, states, stored.limits)}
            fresh = zip(windows.ids, zip(algorithm.fresh(now, windows), windows.limits))
            found = [known.get(window, new) for window, new in fresh]
            states = [algorithm.rescaled(state, limit) for (state, _), limit in zip(found, windows.limits)]
            changed = algorithm.BY_COUNT and any(
                state and limit.count != asked.count for state, (_, limit), asked in zip(states, found, windows.limits)
            )
            states = algorithm.opened(states, 0, windows, now)
        if now < written:
            self.clock_steps += 1
            if written - now >= _STEP:
                self._stepped.log("this machine")
        if changed or now < written:
            self._write(home, windows, now, states, owes_less=True)
        return states

    def _write(self, home: _Home, windows: Windows, now: int, states: Sequence[State], *, owes_less: bool = False) -> None:
        """Put how the asked windows stand; windows of the bucket that were not asked stay as they are."""
        buckets, key, bucket = home
        if bucket is not None and bucket[1] is not windows:
            windows, states = _joined(windows, states, bucket, now)
        live = buckets.get(key)  # making room for another charge of the plan may have moved or dropped it
        if buckets is self._buckets and (owes_less or live is None):
            due = _full_at(now, windows, states)
            buckets[key] = (now, windows, states, due)
            self._queue_up(due, key)
        else:
            buckets[key] = (now, windows, states, live[3] if live else 0)

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
            written, windows, states, _ = bucket
            since = min(written, now)
            due, until = _full_at(since, windows, states), _refuses_until(since, windows, states)
            if due > entry:
                heappush(self._queue, (due, key))
                self._buckets[key] = (written, windows, states, due)
            elif until > now:
                heappush(self._refusing, (until, key))
                self._buckets[key] = (written, windows, states, until)
            else:
                del self._buckets[key]
        return len(self._buckets) < self._max_buckets

    def _step_back(self, now: int) -> None:
        """After a step of the clock, let no bucket wait for the time at which it was written to come round again."""
        for key, (written, windows, states, _) in self._buckets.items():
            since = min(written, now)
            self._buckets[key] = (since, windows, states, _full_at(since, windows, states))
        self._compact()

    def _compact(self) -> None:
        """Make the heap anew, with the entries that count."""
        self._refusing = []
        self._queue = [(bucket[3], key) for key, bucket in self._buckets.items()]
        heapify(self._queue)


def _system_clock() -> int:
    return time.time_ns() // 1000


def _full_at(written: int, windows: Windows, states: Sequence[State]) -> int:
    """When they will be as if nobody had used them, in Unix µs."""
    return written + max(map(windows.algorithm.lasts_us, states, windows.limits))


def _refuses_until(written: int, windows: Windows, states: Sequence[State]) -> int:
    """When one request will fit into every window, whoever asks, in Unix µs; the time of writing if it did then.

    Bans and what is configured, which are never dropped, stay until they are over.
    """
    wait_us = windows.algorithm.wait_us
    wait = max(wait_us(state, 1, limit) or 0 for state, limit in zip(states, windows.strictest.limits))
    is_kept = windows.algorithm.SILENT or (wait and windows.has_slots)  # a hint is no promise
    return _full_at(written, windows, states) if is_kept else written + wait


def _joined(windows: Windows, states: Sequence[State], bucket: _Bucket, now: int) -> tuple[Windows, Sequence[State]]:
    """The asked windows, and those of ``bucket`` that were not asked and still owe something."""
    limits, ids, joined = list(windows.limits), list(windows.ids), list(states)
    written, stored, before, _ = bucket
    for limit, window, state in zip(stored.limits, stored.ids, windows.algorithm.opened(before, now - written, stored, now)):
        if window not in windows.ids and state:
            limits.append(limit)
            ids.append(window)
            joined.append(state)
    return (windows, states) if len(ids) == len(windows.ids) else (Windows(tuple(limits), tuple(ids)), joined)
