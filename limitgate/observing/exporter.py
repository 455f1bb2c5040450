"""Exports metrics to observers: once a second while values change, before a scrape, and at the end.

A thread exports. Observers receive differences, so that gates and processes add up.
"""

from __future__ import annotations

import atexit
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final, Protocol, get_args, runtime_checkable
from weakref import ref

from limitgate.errors import ConfigError, StoreFault
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.observing import instruments
from limitgate.observing.instruments import STORE_UP, Instrument, Result
from limitgate.process.background import daemon
from limitgate.process.forking import get_ready_for_forks, reset_in_children

NAMES = {
    "prometheus": ("limitgate.prometheus", "PrometheusObserver"),
    "opentelemetry": ("limitgate.opentelemetry", "OpenTelemetryObserver"),
}


@runtime_checkable
class Observer(Protocol):
    """Receives all metrics, once a second while values change: ``LimitGate(app, observers=[MyObserver()])``.

    Called from any thread, but never concurrently. ``labels`` are the values of `Instrument.labels`, in their order; clients
    can't create new ones. Every series starts at 0. Equal observers count as one.
    """

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        """Add ``amount`` to a counter."""

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge, or the current value of an up-down counter."""

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        """Record new counts and sums per histogram bucket; the last bucket is unbounded."""


def check_observers(chosen: Iterable[object]) -> None:
    """Raise `ConfigError` for an invalid observer or name."""
    for each in chosen:
        if isinstance(each, str):
            if each not in NAMES:
                raise ConfigError(f"observers: {each!r:.80} is unknown, expected one of {', '.join(NAMES)}, or an Observer")
        elif isinstance(each, type) or not isinstance(each, Observer):
            raise ConfigError(
                f"observers: {each!r:.80} is not an observer, expected one with the methods add, set and record, or a name"
            )


def observers_of(chosen: Iterable[str | Observer]) -> tuple[Observer, ...]:
    """Return observers from objects or names. Raises `ConfigError`, also for a missing package."""
    listed = tuple(filter(None, map(str.strip, chosen.split(",")))) if isinstance(chosen, str) else tuple(chosen)
    check_observers(listed)
    return tuple(dict.fromkeys([_named(each) if isinstance(each, str) else each for each in listed]))


def _named(name: str) -> Observer:
    module, kind = NAMES[name]
    try:
        observer: Any = getattr(import_module(module), kind)()
    except ModuleNotFoundError as error:
        raise ConfigError(f"observer {name!r}: {error}") from error
    made: Observer = observer
    return made


PERIOD = 1.0
"""Seconds."""

Name = tuple[Instrument, tuple[str, ...]]
Gauge = tuple[Instrument, tuple[str, ...], float]


class Series:
    """Counters and histograms of one subject, which only increase.

    ``values`` has a number for each counter, then the counts and the sums of each histogram. Series with ``rare`` labels start
    when they change.
    """

    __slots__ = ("counters", "histograms", "rare", "values")

    def __init__(
        self,
        values: list[Any],
        counters: Sequence[Name] = (),
        histograms: Sequence[Name] = (),
        rare: Collection[tuple[str, ...]] = (),
    ) -> None:
        self.values: list[Any] = values
        self.counters: Sequence[Name] = counters
        self.histograms: Sequence[Name] = histograms
        self.rare: Collection[tuple[str, ...]] = rare

    def export(self, observer: Observer, before: Sequence[Any] | None, now: Sequence[Any]) -> None:
        """Export changes since ``before``; all if None."""
        is_first = before is None
        new = now if before is None else [value - was for value, was in zip(now, before)]
        for (instrument, labels), amount in zip(self.counters, new):
            if amount or (is_first and labels not in self.rare):
                observer.add(instrument, labels, amount)
        for instrument, labels, counts, sums in self.buckets(new):
            if is_first or any(counts):
                observer.record(instrument, labels, counts, sums)

    def buckets(self, values: Sequence[Any]) -> Iterator[tuple[Instrument, tuple[str, ...], Sequence[int], Sequence[float]]]:
        """Yield the counts and sums of each histogram in ``values``."""
        place = len(self.counters)
        for instrument, labels in self.histograms:
            width = len(instrument.bounds) + 1
            yield instrument, labels, values[place : place + width], values[place + width : place + 2 * width]
            place += 2 * width


class Metrics(Protocol):
    def series(self) -> Iterable[Series]:
        """Yield all series. Later calls yield the same objects, and new ones."""

    def gauges(self) -> Iterable[Gauge]: ...


class _Exported:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._owners: dict[Metrics, ref[object]] = {}
        self._values: dict[Series, Sequence[Any]] = {}
        self._gauges: dict[Name, float] = {}
        self._inherited: list[Series] = []
        """Series of the parent. A forked child exports them once with 0, because the parent exports their values."""
        self._failed = Once(Diagnosis.OBSERVER_FAILED)

    def attach(self, metrics: Metrics, owner: object) -> None:
        self._owners.setdefault(metrics, ref(owner))

    def reset_after_fork(self) -> None:
        self._gauges.clear()
        self._inherited = [series for metrics in self._owners for series in metrics.series()]
        self._values = {series: series.values.copy() for series in self._inherited}

    def export(self) -> bool:
        while self._inherited:
            series = self._inherited.pop()
            self._guarded(series.export, self._observer, None, [0] * len(series.values))
        gone = [metrics for metrics, owner in self._owners.items() if owner() is None]
        has_news = any([self._export(series) for metrics in self._owners for series in metrics.series()])  # noqa: C419 - no short circuit
        has_news |= self._export_gauges([gauge for each in self._owners if each not in gone for gauge in each.gauges()])
        for metrics in gone:
            del self._owners[metrics]
            for series in metrics.series():
                self._values.pop(series, None)
        return has_news

    def _export(self, series: Series) -> bool:
        before, now = self._values.get(series), series.values.copy()
        if before == now:
            return False
        self._values[series] = now  # Set first, so that values are never exported twice if an observer fails.
        self._guarded(series.export, self._observer, before, now)
        return True

    def _export_gauges(self, gauges: Iterable[Gauge]) -> bool:
        has_news = False
        present = {name: 0.0 for name in self._gauges if name[0].kind == "up_down"}  # Gauges without an owner fall to 0.
        known = set[Name]()
        for instrument, labels, value in gauges:
            name = instrument, labels
            present[name] = joined(instrument, present[name], value) if name in known else value
            known.add(name)
        for name, value in present.items():
            if self._gauges.get(name) != value:
                has_news = True
                self._gauges[name] = value
                self._guarded(self._observer.set, *name, value)
            has_news |= name[0] is STORE_UP and not value
        return has_news

    def _guarded(self, export: Callable[..., None], *args: Any) -> None:
        try:
            export(*args)
        except Exception as error:  # noqa: BLE001 - observers are foreign code
            self._failed.log(type(self._observer).__name__, type(error).__name__)


def joined(instrument: Instrument, one: float, other: float) -> float:
    if instrument.joined == "sum":
        return one + other
    if instrument.joined == "each":
        return other
    return min(one, other) if instrument.joined == "min" else max(one, other)


class MetricsExporter:
    def __init__(self) -> None:
        self._exported: dict[Observer, _Exported] = {}
        self.is_idle: bool = True
        """If True, counting has to `wake` the exporter."""
        self._reset()
        reset_in_children(self)
        get_ready_for_forks(self)
        atexit.register(self.export)

    def _reset(self) -> None:
        self._thread: threading.Thread | None = None
        self._wakeup = threading.Event()
        self._lock = threading.RLock()
        self._is_exporting = False

    def before_fork(self) -> None:
        """Wait for the export, because the child must not inherit locks of observers."""
        with self._lock:
            pass

    def reset_after_fork(self) -> None:
        self._reset()
        self.is_idle = True
        for exported in self._exported.values():
            exported.reset_after_fork()

    def attach(self, observers: Iterable[Observer], *metrics: tuple[Metrics, object]) -> None:
        """Export metrics while their owner lives. All series exist from now on."""
        with self._lock:
            for observer in observers:
                exported = self._exported.setdefault(observer, _Exported(observer))
                for each, owner in metrics:
                    exported.attach(each, owner)
        self.export()

    def wake(self) -> None:
        """Export until nothing changes."""
        if not self._exported:
            return
        self.is_idle = False
        self._wakeup.set()
        if self._thread is None:
            self._start()

    def export(self, *, waits: bool = True) -> bool:
        """Export changes. Return True if there were any. Without ``waits``, return False during another export."""
        if not self._lock.acquire(blocking=waits):
            return False
        try:
            if self._is_exporting:  # An observer collects during its own export.
                return False
            self._is_exporting = True
            try:
                have_news = [exported.export() for exported in list(self._exported.values())]
                return any(have_news)
            finally:
                self._is_exporting = False
        finally:
            self._lock.release()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                try:
                    self._thread = daemon("observers", self._run, self._wakeup)
                except RuntimeError:  # The next count tries again.
                    self.is_idle = True

    def _run(self, wakeup: threading.Event) -> None:
        while True:
            wakeup.wait()
            wakeup.clear()
            while self.export():
                time.sleep(PERIOD)
            self.is_idle = True  # From now on, counting wakes the exporter.
            if self.export():  # Something was counted just before that.
                self.wake()


exporter: MetricsExporter = MetricsExporter()


_CALL_BOUNDS: Final = instruments.STORE_DURATION.bounds
_CALL_BUCKETS: Final = len(_CALL_BOUNDS) + 1
_RESULTS: Final[tuple[Result, ...]] = get_args(Result)
_CALL_WIDTH: Final = 2 * _CALL_BUCKETS
_CALL_STARTS: Final = {result: place * _CALL_WIDTH for place, result in enumerate(_RESULTS)}


class CallSeries(Series):
    __slots__ = ()

    def __init__(self, store: str) -> None:
        values = ([0] * _CALL_BUCKETS + [0.0] * _CALL_BUCKETS) * len(_RESULTS)
        super().__init__(values, histograms=[(instruments.STORE_DURATION, (store, result)) for result in _RESULTS])

    def note(self, result: Result | StoreFault, seconds: float) -> None:
        """Note a call. An overload of this process isn't a call."""
        if result != "overload":
            place = _CALL_STARTS[result] + bisect_left(_CALL_BOUNDS, seconds)
            self.values[place] += 1
            self.values[place + _CALL_BUCKETS] += seconds


class StoreCounts:
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
        outages = getattr(self._store(), "outages", self._seen)
        self._outages.values[0] += outages - self._seen
        self._seen = outages
        return self._series

    def gauges(self) -> Iterable[Gauge]:
        store = self._store()
        if store is not None:
            yield instruments.STORE_UP, (self.scheme,), int(getattr(store, "healthy", True))


def store_counts(store: object) -> StoreCounts:
    """Return the metrics that all users of a store share."""
    counts: StoreCounts | None = getattr(store, "observed", None)
    if counts is None:
        counts = StoreCounts(store)
        if hasattr(store, "observed"):
            store.observed = counts
    return counts
