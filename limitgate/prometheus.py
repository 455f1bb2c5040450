"""Metrics for Prometheus: ``observers=["prometheus"]``; the application serves ``/metrics`` with prometheus-client.

In multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``), the metrics of all workers add up; see docs/observing.md.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from stat import S_ISREG
from typing import Any
from weakref import WeakKeyDictionary

from limitgate.errors import ConfigError
from limitgate.messages.text import extra

with extra("prometheus", "prometheus_client"):
    from prometheus_client import (
        REGISTRY,
        CollectorRegistry,
        Metric,
        generate_latest,
        make_asgi_app,
        make_wsgi_app,
        multiprocess,
        values as client_values,
    )
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

from limitgate.internal_errors import logged_errors
from limitgate.observing.exporter import exporter
from limitgate.observing.instruments import INSTRUMENTS, Instrument

__all__ = ["MultiProcessCollector", "PrometheusObserver", "child_exit", "generate_latest", "make_asgi_app", "make_wsgi_app"]

_log = logging.getLogger("limitgate.prometheus")

_JOINED = {"sum": "livesum", "min": "livemin", "max": "livemax", "each": "liveall"}
_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "up_down": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_LIVE_GAUGES = re.compile(r"gauge_live[a-z]+_(\d+)\.db")
_WORKER_FILE = re.compile(r"(counter|summary|histogram|gauge_[a-z]+)_[\w-]+\.db")


class PrometheusObserver:
    """Exports all metrics to a registry of prometheus-client, by default ``REGISTRY``.

    Metrics are current when the registry is collected. In multiprocess mode, ``MultiProcessCollector`` reads metrics that are
    at most a second old; a registry would report them twice. Observers of the same registry are equal.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = REGISTRY if registry is None or _is_multiprocess() else registry
        metrics = _metrics.get(self._registry)
        if metrics is None:
            try:
                metrics = _Metrics()
            except OSError as error:
                expected = "expected an empty folder that every worker may write to"
                raise ConfigError(f"PROMETHEUS_MULTIPROC_DIR: {_folder()}: {error.strerror}, {expected}") from error
            if _is_multiprocess():
                _remove_dead()
            else:
                self._registry.register(metrics)
            _metrics[self._registry] = metrics
        self._metrics = metrics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrometheusObserver) and other._registry is self._registry

    def __hash__(self) -> int:
        return hash(self._registry)

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        self._metrics.values(instrument, labels)[0].inc(amount)

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        self._metrics.values(instrument, labels)[0].set(value)

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        total, *buckets = self._metrics.values(instrument, labels)
        for bucket, count in zip(buckets, counts):
            if count:
                bucket.inc(count)
        total.inc(sum(sums))


def child_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn gives both
    """Remove an ended worker's gauges. Import this function in gunicorn.conf.py."""
    if _folder():
        _remove_gauges(worker.pid)


class MultiProcessCollector(multiprocess.MultiProcessCollector):
    """prometheus-client's `MultiProcessCollector`, which also skips unreadable and unrelated files."""

    def __init__(self, registry: CollectorRegistry | None, path: str | None = None) -> None:
        super().__init__(registry, path)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics of all workers."""
        if self._path == _folder() and _metrics:
            # Elsewhere, for example in another container, the pids of the workers could be unknown.
            _remove_dead()
        files = [str(path) for path in Path(self._path).glob("*.db") if _is_worker_file(path)]
        try:
            return self._merged(files)
        except _UNREADABLE:
            return self._merged([file for file in files if self._is_readable(file)])

    def _merged(self, files: Sequence[str]) -> Iterable[Metric]:
        merged: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]
        return merged

    def _is_readable(self, file: str) -> bool:
        try:
            self._merged([file])
        except FileNotFoundError:  # The worker has ended.
            return False
        except _UNREADABLE as error:
            _report_unreadable(file, type(error).__name__)
            return False
        return True


_UNREADABLE = (OSError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, struct.error)
"""Errors of a missing, damaged or unrelated file."""


def _is_worker_file(path: Path) -> bool:
    """Return False for unrelated files, FIFOs (which block) and empty files."""
    try:
        status = path.stat()
    except OSError:
        return False
    return bool(_WORKER_FILE.fullmatch(path.name) and S_ISREG(status.st_mode) and status.st_size)


@lru_cache(256)
def _report_unreadable(file: str, error: str) -> None:
    _log.warning("%s is left out of the metrics: %s; expected a folder that is empty when the server starts", file, error)


class _Metrics:
    """Keeps values in files in multiprocess mode, otherwise in memory."""

    def __init__(self) -> None:
        self._series: dict[Instrument, dict[tuple[str, ...], Sequence[Any]]] = {each: {} for each in INSTRUMENTS}
        for each in INSTRUMENTS:
            if not each.labels:
                self.values(each, ())

    def values(self, instrument: Instrument, labels: tuple[str, ...]) -> Sequence[Any]:
        """Values of a series: for a histogram its sum, then its buckets."""
        series = self._series[instrument]
        found = series.get(labels)
        if found is None:
            found = series[labels] = [_value(instrument, labels, *sample) for sample in _SAMPLES[instrument]]
        return found

    def describe(self) -> Iterable[Metric]:
        return map(_family, INSTRUMENTS)

    def collect(self) -> Iterable[Metric]:
        exporter.export()
        for instrument, series in self._series.items():
            family = _family(instrument)
            for labels, values in list(series.items()):
                first, *buckets = [value.get() for value in values]
                if buckets:
                    bounds = [bound for _, bound in _SAMPLES[instrument][1:]]
                    family.add_metric(labels, [*zip(bounds, accumulate(buckets))], first)
                else:
                    family.add_metric(labels, first)
            yield family


def _family(instrument: Instrument) -> Any:
    return _FAMILIES[instrument.kind](instrument.prometheus_name, instrument.meaning, labels=instrument.labels)


def _samples(instrument: Instrument) -> Sequence[tuple[str, str | None]]:
    if instrument.kind == "histogram":
        bounds = map(floatToGoString, (*instrument.bounds, float("inf")))
        return ("_sum", None), *[("_bucket", bound) for bound in bounds]
    return (("_total" if instrument.kind == "counter" else "", None),)


_SAMPLES = {each: _samples(each) for each in INSTRUMENTS}


def _value(instrument: Instrument, labels: tuple[str, ...], suffix: str, bound: str | None) -> Any:
    """Create a value by prometheus-client's private API, because the public API can't add many observations or use files."""
    name = instrument.prometheus_name.removesuffix("_total")
    names = instrument.labels if bound is None else (*instrument.labels, "le")
    of_labels = labels if bound is None else (*labels, bound)
    kind = "gauge" if instrument.kind == "up_down" else instrument.kind
    joined = _JOINED[instrument.joined]
    return client_values.ValueClass(kind, name, name + suffix, names, of_labels, instrument.meaning, multiprocess_mode=joined)


_metrics: WeakKeyDictionary[CollectorRegistry, _Metrics] = WeakKeyDictionary()
"""Metrics by registry, because a registry allows each name once."""


def _is_multiprocess() -> bool:
    """True in multiprocess mode, which prometheus-client selects on import."""
    return client_values.ValueClass is not client_values.MutexValue


def _folder() -> str | None:
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR")


def _remove_gauges(pid: int) -> None:
    with logged_errors():
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _remove_dead() -> None:
    """Remove gauges of ended workers, because some servers never call `child_exit`."""
    folder = _folder()
    names = [path.name for path in Path(folder).glob("*.db")] if folder else []
    for pid in {int(found[1]) for name in names if (found := _LIVE_GAUGES.fullmatch(name))}:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            _remove_gauges(pid)
        except (PermissionError, OverflowError):
            # The process belongs to another user, or the number is invalid.
            continue
