"""Limits the buckets that one source may open: where clients choose the names of buckets, they could choose any number.

A source that opens too many goes on in one bucket of its own, so that it fills neither Redis nor memory; buckets that were in
use before stay what they are. What is known is bounded too, in buckets and in sources, and forgotten by age.
"""

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
"""Buckets that are remembered as known, by their hashes; at least the latest half of so many."""
SOURCES = 65_536
"""Sources whose new buckets are counted, by their hashes; whoever has more addresses than that opens more buckets anyway."""


class Latest(Generic[V]):
    """A dictionary that keeps the entries used last: at least ``most // 2`` of them, never more than ``most``.

    Two generations, of which the elder goes when the younger is half of what there may be. So an entry is looked up as
    cheaply as in a dictionary, and threads need no lock: at worst they forget one.
    """

    __slots__ = ("_elder", "_half", "_younger")

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._younger: dict[Hashable, V] = {}
        self._elder: dict[Hashable, V] = {}

    def __len__(self) -> int:
        return len(self._younger.keys() | self._elder.keys())

    def get(self, key: Hashable) -> V | None:
        """The value of ``key``, None if it is forgotten."""
        value = self._younger.get(key)
        if value is None:
            value = self._elder.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: V) -> None:
        """Remember a value, which must not be None."""
        if len(self._younger) >= self._half and key not in self._younger:
            self._younger, self._elder = {}, self._younger
        self._younger[key] = value


class CardinalityGuard:
    """Lets each source open at most ``most`` buckets in any minute. ``clock`` is monotonic, in seconds.

    Counted by GCRA: half of them may come at once, the others are earned over the minute, so that in no minute there are more
    than ``most``. A source is an address, or None for all who have none.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        rate = (most + 1) // 2
        self._windows = bucket_of(Limit(f"{rate}/minute", burst=most - rate + 1))
        self._most = most
        self._clock = clock
        self.forget()
        self._told = Once(Diagnosis.TOO_MANY_BUCKETS)
        self._lock = RLock()
        self.overflowed = 0
        """Number of requests that had to share the overflow bucket of their source."""
        reset_in_children(self)

    def __len__(self) -> int:
        """Number of buckets that are known."""
        return len(self._known)

    def forget(self) -> None:
        """Forget what was opened, and by whom."""
        self._known: Latest[bool] = Latest(BUCKETS)
        self._sources: Latest[tuple[int, int]] = Latest(SOURCES)

    def know(self, bucket: Hashable) -> bool:
        """True if a bucket is one that was opened lately."""
        return self._known.get(hash(bucket)) is not None

    def open(self, bucket: Hashable, source: str | None, rule: str) -> bool:
        """Open a bucket of a rule, which then is known; False if its source has opened too many."""
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
        """Know a bucket from now on, whoever opened it."""
        self._known.put(hash(bucket), True)

    def _charge(self, source: str | None) -> bool:
        now = int(self._clock() * 1_000_000)
        source_id = hash(source)  # a name may have any length
        written, debt = self._sources.get(source_id) or (now, 0)
        after = gcra.try_charge(gcra.advance((debt,), now - written, self._windows), self._windows, 1)
        if after is not None:
            self._sources.put(source_id, (now, after[0]))
        return after is not None

    def reset_after_fork(self) -> None:
        """Renew the lock in the child of a fork, where no thread would release one that was held."""
        self._lock = RLock()
