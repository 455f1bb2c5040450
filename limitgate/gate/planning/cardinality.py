"""Limits how many buckets a source may open with invented keys. Excess keys share an overflow bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import RLock
from typing import Generic, TypeVar

from limitgate.algorithms import gcra
from limitgate.limits.bucket import bucket_of
from limitgate.limits.limit import Limit
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.process.forking import reset_in_children

V = TypeVar("V")

BUCKETS = 65_536
"""Maximum of remembered buckets, stored by hash. At least the latest half is kept."""
SOURCES = 65_536
"""Maximum of remembered sources, stored by hash."""


class Latest(Generic[V]):
    """Keeps the latest entries, between ``most // 2`` and ``most``, in two generations.

    Needs no lock; a race may only lose an entry.
    """

    __slots__ = ("_elder", "_half", "_younger")

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._younger: dict[Hashable, V] = {}
        self._elder: dict[Hashable, V] = {}

    def __len__(self) -> int:
        return len(self._younger.keys() | self._elder.keys())

    def get(self, key: Hashable) -> V | None:
        value = self._younger.get(key)
        if value is None:
            value = self._elder.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: V) -> None:
        if len(self._younger) >= self._half and key not in self._younger:
            self._younger, self._elder = {}, self._younger
        self._younger[key] = value


class CardinalityGuard:
    """Lets each source open ``most`` buckets per minute, half of them at once.

    A source is an address; None if unknown. ``clock`` returns monotonic seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        rate = (most + 1) // 2
        self._windows = bucket_of(Limit(f"{rate}/minute", burst=most - rate + 1))
        self._most = most
        self._clock = clock
        self.forget()
        self._told = Once(Diagnosis.TOO_MANY_BUCKETS)
        self._lock = RLock()
        self.overflowed: int = 0
        reset_in_children(self)

    def __len__(self) -> int:
        return len(self._known)

    def forget(self) -> None:
        self._known: Latest[bool] = Latest(BUCKETS)
        self._sources: Latest[tuple[int, int]] = Latest(SOURCES)

    def know(self, bucket: Hashable) -> bool:
        return self._known.get(hash(bucket)) is not None

    def open(self, bucket: Hashable, source: str | None, rule: str) -> bool:
        with self._lock:
            opened = self._charge(source)
            if not opened:
                self.overflowed += 1
        if opened:
            self.note(bucket)
        else:
            self._told.log(rule, self._most)
        return opened

    def note(self, bucket: Hashable) -> None:
        self._known.put(hash(bucket), True)

    def _charge(self, source: str | None) -> bool:
        now = int(self._clock() * 1_000_000)
        # The source may be long.
        source_id = hash(source)
        written, debt = self._sources.get(source_id) or (now, 0)
        after = gcra.try_charge(gcra.advance((debt,), now - written, self._windows), self._windows, 1)
        if after is not None:
            self._sources.put(source_id, (now, after[0]))
        return after is not None

    def reset_after_fork(self) -> None:
        self._lock = RLock()
