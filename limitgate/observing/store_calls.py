"""Figures of a store: its calls, by result and duration, and whether it answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args
from weakref import ref

from limitgate.errors import StoreFault
from limitgate.observing import instruments
from limitgate.observing.handover import Figure, Row, news
from limitgate.observing.instruments import Result
from limitgate.observing.observer import Observer

_BOUNDS: Final = instruments.STORE_DURATION.bounds
_BUCKETS: Final = len(_BOUNDS) + 1
_RESULTS: Final[tuple[Result, ...]] = get_args(Result)
_WIDTH: Final = 2 * _BUCKETS
_STARTS: Final = {result: place * _WIDTH for place, result in enumerate(_RESULTS)}


class CallsRow(Row):
    """Calls to a store, whose URL has the scheme ``store``."""

    __slots__ = ("_store",)

    def __init__(self, store: str) -> None:
        super().__init__(([0] * _BUCKETS + [0.0] * _BUCKETS) * len(_RESULTS))
        self._store = store

    def note(self, result: Result | StoreFault, seconds: float) -> None:
        """Count a call that took so long. One that this process had no room for was not made."""
        if result != "overload":
            place = _STARTS[result] + bisect_left(_BOUNDS, seconds)
            self.values[place] += 1
            self.values[place + _BUCKETS] += seconds

    def tell(self, observer: Observer, before: Sequence[Any] | None, now: Sequence[Any]) -> None:
        """Tell what has come since."""
        for result, start in _STARTS.items():
            counts = news(before, now, start, start + _BUCKETS)
            if any(counts) or not before:
                sums = news(before, now, start + _BUCKETS, start + _WIDTH)
                observer.record(instruments.STORE_DURATION, (self._store, result), counts, sums)


class _OutagesRow(Row):
    """Outages that a store has counted."""

    __slots__ = ("_store",)

    def __init__(self, store: str) -> None:
        super().__init__([0])
        self._store = store

    def tell(self, observer: Observer, before: Sequence[Any] | None, now: Sequence[Any]) -> None:
        """Tell what has come since. A store begins anew in the child of a fork."""
        was = before[0] if before else 0
        new = now[0] - was if now[0] >= was else now[0]
        if new or not before:
            observer.add(instruments.STORE_OUTAGES, (self._store,), new)


class StoreCounts:
    """Figures of a store. What it counts itself is looked up, as are ``healthy`` and ``outages``, if it has them."""

    def __init__(self, store: object) -> None:
        self.scheme: str = getattr(store, "scheme", "custom")
        self._store = ref(store)
        self._outages = _OutagesRow(self.scheme)
        self._rows: list[Row] = [self._outages]
        if hasattr(store, "calls"):
            store.calls = calls = CallsRow(self.scheme)
            self._rows.append(calls)

    def rows(self) -> Iterable[Row]:
        """Its calls and outages."""
        self._outages.values[0] = getattr(self._store(), "outages", self._outages.values[0])
        return self._rows

    def gauges(self) -> Iterable[Figure]:
        """1 if it answers."""
        store = self._store()
        if store is not None:
            yield instruments.STORE_UP, (self.scheme,), int(getattr(store, "healthy", True))


def store_counts(store: object) -> StoreCounts:
    """The figures of a store, which all that use it share."""
    counts: StoreCounts | None = getattr(store, "observed", None)
    if counts is None:
        counts = StoreCounts(store)
        if hasattr(store, "observed"):
            store.observed = counts
    return counts
