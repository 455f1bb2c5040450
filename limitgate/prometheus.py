"""Figures for Prometheus: ``observers=["prometheus"]``, and the application serves ``/metrics`` by prometheus-client as always.

In prometheus-client's multiprocess mode, with ``PROMETHEUS_MULTIPROC_DIR``, the figures of all workers add up; see
docs/observing.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from limitgate.extras import extra

with extra("prometheus", "prometheus_client"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
    from prometheus_client.metrics import MetricWrapperBase
    from prometheus_client.multiprocess import mark_process_dead
    from prometheus_client.samples import Sample
    from prometheus_client.utils import floatToGoString

from limitgate.observing.handover import handover
from limitgate.observing.instruments import INSTRUMENTS, Instrument
from limitgate.own_errors import survived

__all__ = ["PrometheusObserver", "child_exit"]

_JOINED = {"sum": "livesum", "min": "livemin", "max": "livemax", "each": "liveall"}
"""Names of prometheus-client for how the gauges of several processes make one."""
_FIRST = INSTRUMENTS[0].prometheus_name.removesuffix("_total")
"""Name of the first metric of ours, with which a collection of a whole registry begins."""
_RECENT = 0.1
"""Seconds for which a collection goes on, or less: for its later metrics nothing new is handed over."""
_OF_LIVE = re.compile(r"gauge_live[a-z]+_(\d+)\.db")


class PrometheusObserver:
    """Keeps all figures in a registry of prometheus-client, by default its ``REGISTRY``.

    They are up to date whenever the registry is collected. In multiprocess mode they are in no registry, as they would be
    there twice: ``MultiProcessCollector`` finds them, at most a second old. Observers of the same registry are equal.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = REGISTRY if registry is None else registry
        metrics = _metrics.get(self._registry)
        if metrics is None:
            bound = None if _folder() else self._registry
            metrics = _metrics[self._registry] = {each: _metric(each, bound) for each in INSTRUMENTS}
            _bury_dead()
        self._metrics = metrics
        self._children: dict[tuple[Instrument, tuple[str, ...]], Any] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrometheusObserver) and other._registry is self._registry

    def __hash__(self) -> int:
        return hash(self._registry)

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        """Add to a counter."""
        child = self._child(instrument, labels)
        child.inc(amount)
        child.changes += 1

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        child = self._child(instrument, labels)
        child.set(value)
        child.changes += 1

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        """Add to the buckets of a histogram."""
        child = self._child(instrument, labels)
        child.add(counts, sum(sums))
        child.changes += 1

    def _child(self, instrument: Instrument, labels: tuple[str, ...]) -> Any:
        place = instrument, labels
        child = self._children.get(place)
        if child is None:
            metric = self._metrics[instrument]
            child = self._children[place] = metric.labels(*labels) if labels else metric
        return child


def child_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn gives both
    """Take the gauges of a worker that has ended out of the sums; to be imported in gunicorn.conf.py."""
    if _folder():
        _bury(worker.pid)


class _UpToDate(MetricWrapperBase):
    """A metric that is brought up to date before it is collected.

    Its samples are kept until it changes: to put thousands together anew takes most of the time of a collection, and sets
    Python's collector off. None says when its series was created, as that would be a fourth of all, for what nobody asks.
    """

    changes = 0
    """Number of times that it was changed, counted after the change; one thread at a time does so."""
    _kept: tuple[int, Sequence[Sample]] = (-1, ())
    """Its samples, and the changes that are in them."""

    def collect(self) -> Iterable[Metric]:
        """Collect. Where one of the others was collected just before, nothing new is looked for."""
        if self._name == _FIRST or handover.seconds_since() > _RECENT:
            handover.hand_over()
        metric: Metric = self._get_metric()  # type: ignore[no-untyped-call]
        metric.samples = [sample for child in self._children() for sample in child.present_samples()]
        return [metric]

    def present_samples(self) -> Sequence[Sample]:
        """`samples`, put together where it has changed since."""
        changes = self.changes
        if self._kept[0] != changes:
            self._kept = changes, self.samples()
        return self._kept[1]

    def samples(self) -> Sequence[Sample]:
        """The samples of one series, or of the buckets of one histogram."""
        raise NotImplementedError

    @cached_property
    def named(self) -> dict[str, str]:
        """Its labels by their names."""
        return dict(zip(self._labelnames, self._labelvalues))

    def _children(self) -> Iterable[Any]:
        if not self._is_parent():  # type: ignore[no-untyped-call]
            return (self,)
        with self._lock:
            return tuple(self._metrics.values())


class _Counter(_UpToDate, Counter):
    def samples(self) -> Sequence[Sample]:
        return (Sample(self._name + "_total", self.named, self._value.get()),)


class _Gauge(_UpToDate, Gauge):
    def samples(self) -> Sequence[Sample]:
        return (Sample(self._name, self.named, self._value.get()),)


class _Histogram(_UpToDate, Histogram):
    """Histogram that takes many observations at once: its own ``observe`` takes as long for each as counting may."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add to its buckets, and to the sum of all observations."""
        for bucket, count in zip(self._buckets, counts):
            if count:
                bucket.inc(count)
        self._sum.inc(total)

    def samples(self) -> Sequence[Sample]:
        """The samples of its buckets, each with all that is in those before, and of their count and sum."""
        name, found, total = self._name + "_bucket", [], 0.0
        for named, bucket in zip(self._named_buckets, self._buckets):
            total += bucket.get()
            found.append(Sample(name, named, total))
        found.append(Sample(self._name + "_count", self.named, total))
        found.append(Sample(self._name + "_sum", self.named, self._sum.get()))
        return found

    @cached_property
    def _named_buckets(self) -> list[dict[str, str]]:
        return [{**self.named, "le": floatToGoString(bound)} for bound in self._upper_bounds]  # type: ignore[no-untyped-call]


_metrics: WeakKeyDictionary[CollectorRegistry, dict[Instrument, MetricWrapperBase]] = WeakKeyDictionary()
"""The metrics of each registry, which may have each name once only."""


def _metric(instrument: Instrument, registry: CollectorRegistry | None) -> MetricWrapperBase:
    name, meaning, labels = instrument.prometheus_name, instrument.meaning, instrument.labels
    if instrument.kind == "counter":
        return _Counter(name, meaning, labels, registry=registry)
    if instrument.kind == "histogram":
        return _Histogram(name, meaning, labels, registry=registry, buckets=instrument.bounds)
    return _Gauge(name, meaning, labels, registry=registry, multiprocess_mode=_JOINED[instrument.joined])  # type: ignore[arg-type]


def _folder() -> str | None:
    """The folder that the workers of multiprocess mode share; None without that."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR")


def _bury(pid: int) -> None:
    """Remove the gauges of a process that has ended."""
    with survived():
        mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _bury_dead() -> None:
    """Take the gauges of processes that are gone out of the sums, as not every server tells when a worker has ended."""
    folder = _folder()
    names = [path.name for path in Path(folder).iterdir()] if folder and Path(folder).is_dir() else []
    for pid in {int(found[1]) for name in names if (found := _OF_LIVE.fullmatch(name))}:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            _bury(pid)
        except PermissionError:
            continue  # it lives, and is somebody else's
