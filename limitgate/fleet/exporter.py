"""Adds up the counters of all processes for Prometheus, including ended ones.

Each start of a process has a new id, so the sum never falls. The store keeps the totals across restarts of the exporter.
"""

from __future__ import annotations

import base64
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from limitgate.errors import StoreError
from limitgate.fleet.reader import FleetReader
from limitgate.fleet.snapshot import Snapshot, read_values
from limitgate.internal_errors import logged_errors
from limitgate.messages.text import extra
from limitgate.observing import instruments
from limitgate.observing.counts import USUAL
from limitgate.observing.exporter import Name, joined
from limitgate.observing.instruments import INSTRUMENTS, Instrument
from limitgate.process.clock import monotonic
from limitgate.stores.base import ConfigRequest, SyncConfigStore, fleet_key

with extra("prometheus", "prometheus_client"):
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

EVERY = 5.0
"""Seconds. Snapshots last for 10 s, so none is missed."""
KEPT = 3_600.0
"""Seconds for which ended processes are remembered."""
MOST_SERIES = 20_000
_BY_NAME = {each.name: each for each in INSTRUMENTS}
_MOST_STATE = 64 * 1024 * 1024

Series = tuple[str, tuple[str, ...]]


class Totals:
    """Counters by process, and the sum of processes that ended long ago. Times are Unix seconds."""

    def __init__(self) -> None:
        self._gone: dict[Series, list[float]] = {}
        self._processes: dict[str, tuple[float, dict[Series, list[float]]]] = {}
        """Time of the last snapshot, and the counters, by process."""

    def update(self, snapshots: Iterable[Snapshot], now: float) -> None:
        for snapshot in snapshots:
            _, known = self._processes.get(snapshot.id, (now, {}))
            for name, labels, counts in read_values(snapshot.counters):
                series, instrument = (name, labels), _BY_NAME.get(name)
                if instrument is None or not _fits(instrument, labels, counts):
                    continue
                if series in known:
                    known[series] = [max(pair) for pair in zip(known[series], counts)]
                elif len(known) < MOST_SERIES:
                    known[series] = list(counts)
            self._processes[snapshot.id] = now, known
        for id_ in [each for each, (seen, _) in self._processes.items() if now - seen > KEPT]:
            _add(self._gone, self._processes.pop(id_)[1])

    def sums(self) -> dict[Series, list[float]]:
        found = {series: list(values) for series, values in self._gone.items()}
        for _, counters in self._processes.values():
            _add(found, counters)
        return found

    def state(self) -> str:
        kept = {
            "gone": _listed(self._gone),
            "processes": [[id_, seen, _listed(counters)] for id_, (seen, counters) in self._processes.items()],
        }
        return base64.b64encode(zlib.compress(json.dumps(kept, separators=(",", ":")).encode(), 1)).decode()

    def restore(self, text: str) -> None:
        """Adopt another exporter's state. Ignores invalid text."""
        try:
            unpacking = zlib.decompressobj()
            kept = json.loads(unpacking.decompress(base64.b64decode(text), _MOST_STATE))
            gone = _read(kept["gone"])
            processes = {str(id_): (float(seen), _read(counters)) for id_, seen, counters in kept["processes"]}
        except (ValueError, TypeError, LookupError, AttributeError, zlib.error, RecursionError, OverflowError):
            return
        self._gone, self._processes = gone, processes


def _fits(instrument: Instrument, labels: Sequence[str], values: Sequence[float]) -> bool:
    is_complete = len(labels) == len(instrument.labels) and len(values) == _width(instrument)
    return instrument.kind in ("counter", "histogram") and is_complete


def _width(instrument: Instrument) -> int:
    return len(instrument.bounds) + 2 if instrument.kind == "histogram" else 1


def _add(sums: dict[Series, list[float]], counters: Mapping[Series, Sequence[float]]) -> None:
    for series, values in counters.items():
        known = sums.get(series)
        if known is None:
            if len(sums) < MOST_SERIES:
                sums[series] = list(values)
        else:
            for place, value in enumerate(values):
                known[place] += value


def _listed(counters: Mapping[Series, Sequence[float]]) -> list[Any]:
    return [[name, labels, values] for (name, labels), values in counters.items()]


def _read(listed: Iterable[Any]) -> dict[Series, list[float]]:
    found: dict[Series, list[float]] = {}
    for name, labels, values in listed:
        instrument, numbers = _BY_NAME.get(name), [max(0, value) for value in values if math.isfinite(value)]
        if instrument is not None and _fits(instrument, labels, numbers):
            found[str(name), tuple(map(str, labels))] = numbers
    return found


class FleetCollector:
    """A collector for prometheus-client: ``registry.register(FleetCollector(reader, store, key_prefix))``.

    ``timeout`` is in seconds per call.
    """

    def __init__(
        self,
        reader: FleetReader,
        store: SyncConfigStore,
        key_prefix: str,
        *,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reader = reader
        self._store = store
        self._key = f"{fleet_key(key_prefix)}:exporter"
        self._timeout = timeout
        self._clock = clock
        self._totals = Totals()
        self._is_restored = False
        self._known: dict[Series, list[float]] = {}
        self._saved_at = -math.inf
        self._lock = threading.Lock()

    def look(self) -> None:
        """Read the snapshots, and keep the totals in the store."""
        with self._lock:
            self._restore()
            figures = self._reader.read()
            if figures["store"]["up"]:
                self._totals.update(self._reader.snapshots, self._clock())
            if self._is_restored and monotonic() - self._saved_at >= EVERY:
                self.save()

    def save(self) -> None:
        self._saved_at = monotonic()
        with logged_errors():
            try:
                self._store.config(ConfigRequest(self._key, self._totals.state()), self._timeout)
            except StoreError:
                return

    def _restore(self) -> None:
        if self._is_restored:
            return
        try:
            stored = self._store.config(ConfigRequest(self._key), self._timeout)
        except StoreError:
            return
        self._is_restored = True
        if stored.text:
            self._totals.restore(stored.text)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the series depend on the processes."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the sums of all processes, and gauges of live ones."""
        self.look()
        with self._lock:
            figures = self._reader.read()
            is_up = bool(figures["store"]["up"])
            living = [each for each in self._reader.snapshots if not each.ended] if is_up else []
            processes = len(figures["processes"]) if is_up else 0
            sums = _expected(living)
            _add(sums, self._totals.sums())
            for series, values in self._known.items():
                sums[series] = [max(pair) for pair in zip(values, sums[series])] if series in sums else values
            self._known = sums
            counters = {series: list(values) for series, values in sums.items()}
        yield from _counter_metrics(counters)
        yield from _gauge_metrics(living)
        yield GaugeMetricFamily("limitgate_fleet_processes", "Processes that write snapshots.", processes)
        yield GaugeMetricFamily("limitgate_fleet_store_up", "1 if the exporter can read the store, else 0.", int(is_up))
        yield GaugeMetricFamily(
            "limitgate_fleet_unreadable_snapshots", "Snapshots that cannot be read.", len(figures["unreadable"])
        )


def _expected(living: Sequence[Snapshot]) -> dict[Series, list[float]]:
    codes = instruments.DIAGNOSTICS.values["code"] if living else ()
    expected: list[Name] = [(instruments.DIAGNOSTICS, (code,)) for code in codes]
    for snapshot in living:
        expected += [(instruments.REQUESTS, labels) for labels in USUAL]
        for rule in snapshot.rules:
            labels = rule.name, rule.tier
            outcomes = instruments.RULE_DECISIONS.values["outcome"]
            expected += [(instruments.RULE_DECISIONS, (*labels, outcome)) for outcome in outcomes]
            expected.append((instruments.RULE_UTILIZATION, labels))
        scheme, results = snapshot.store.scheme, instruments.STORE_DURATION.values["result"]
        expected += [(instruments.STORE_DURATION, (scheme, result)) for result in results]
        expected.append((instruments.STORE_OUTAGES, (scheme,)))
        expected += [(instruments.CONFIG_LOADS, (result,)) for result in instruments.CONFIG_LOADS.values["result"]]
    return {(instrument.name, labels): [0] * _width(instrument) for instrument, labels in expected}


def _counter_metrics(counters: Mapping[Series, Sequence[float]]) -> Iterable[Metric]:
    for instrument in INSTRUMENTS:
        series = [(labels, values) for (name, labels), values in counters.items() if name == instrument.name]
        if instrument.kind == "counter":
            counter = CounterMetricFamily(instrument.prometheus_name, instrument.meaning, labels=instrument.labels)
            for labels, values in sorted(series):
                counter.add_metric(labels, values[0])
            yield counter
        elif instrument.kind == "histogram":
            histogram = HistogramMetricFamily(instrument.prometheus_name, instrument.meaning, labels=instrument.labels)
            bounds = [*map(floatToGoString, (*instrument.bounds, float("inf")))]
            for labels, values in sorted(series):
                *counts, total = values
                histogram.add_metric(labels, [*zip(bounds, accumulate(counts))], total)
            yield histogram


def _gauge_metrics(living: Sequence[Snapshot]) -> Iterable[Metric]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for snapshot in living:
        for name, labels, numbers in read_values(snapshot.gauges):
            instrument = _BY_NAME.get(name)
            if instrument is None or instrument.kind not in ("gauge", "up_down") or len(labels) != len(instrument.labels):
                continue
            if len(numbers) != 1:
                continue
            if instrument.joined == "each":
                labels = (*labels, snapshot.host, str(snapshot.pid), snapshot.id)  # noqa: PLW2901
            series = found.setdefault(name, {})
            series[labels] = joined(instrument, series[labels], numbers[0]) if labels in series else numbers[0]
    for instrument in INSTRUMENTS:
        if instrument.name in found:
            names = (*instrument.labels, "host", "pid", "process") if instrument.joined == "each" else instrument.labels
            gauge = GaugeMetricFamily(instrument.prometheus_name, instrument.meaning, labels=names)
            for labels, value in sorted(found[instrument.name].items()):
                gauge.add_metric(labels, value)
            yield gauge
