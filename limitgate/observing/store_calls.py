"""Metrics of a store: calls by result and duration, and availability."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, get_args
from weakref import ref

from limitgate.errors import StoreFault
from limitgate.observing import instruments
from limitgate.observing.exporter import Gauge, Series
from limitgate.observing.instruments import Result

_BOUNDS: Final = instruments.STORE_DURATION.bounds
_BUCKETS: Final = len(_BOUNDS) + 1
_RESULTS: Final[tuple[Result, ...]] = get_args(Result)
_WIDTH: Final = 2 * _BUCKETS
_STARTS: Final = {result: place * _WIDTH for place, result in enumerate(_RESULTS)}


class CallSeries(Series):
    """Calls to a store with the URL scheme ``store``."""

    __slots__ = ()

    def __init__(self, store: str) -> None:
        values = ([0] * _BUCKETS + [0.0] * _BUCKETS) * len(_RESULTS)
        super().__init__(values, histograms=[(instruments.STORE_DURATION, (store, result)) for result in _RESULTS])

    def note(self, result: Result | StoreFault, seconds: float) -> None:
        """Count a call of ``seconds``. An overload of this process made no call."""
        if result != "overload":
            place = _STARTS[result] + bisect_left(_BOUNDS, seconds)
            self.values[place] += 1
            self.values[place + _BUCKETS] += seconds


class StoreCounts:
    """Metrics of a store. Reads ``healthy`` and ``outages`` from it, if present."""

    def __init__(self, store: object) -> None:
        self.scheme: str = getattr(store, "scheme", "custom")
        self._store = ref(store)
        self._outages = Series([0], [(instruments.STORE_OUTAGES, (self.scheme,))])
        self._seen = 0
        self._series = [self._outages]
        if hasattr(store, "calls"):
            store.calls = calls = CallSeries(self.scheme)
            self._series.append(calls)

    def series(self) -> Iterable[Series]:
        """Calls and outages."""
        outages = getattr(self._store(), "outages", self._seen)
        # The store of a forked child counts from 0.
        self._outages.values[0] += outages - self._seen if outages >= self._seen else outages
        self._seen = outages
        return self._series

    def gauges(self) -> Iterable[Gauge]:
        """1 if the store is available."""
        store = self._store()
        if store is not None:
            yield instruments.STORE_UP, (self.scheme,), int(getattr(store, "healthy", True))


def store_counts(store: object) -> StoreCounts:
    """Return the metrics of a store, shared by its users."""
    counts: StoreCounts | None = getattr(store, "observed", None)
    if counts is None:
        counts = StoreCounts(store)
        if hasattr(store, "observed"):
            store.observed = counts
    return counts
