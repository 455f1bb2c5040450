"""Figures for Prometheus: ``observers=["prometheus"]``, and the application serves ``/metrics`` by prometheus-client as always.

Where there are many rules, `make_asgi_app`, `make_wsgi_app` and `generate_latest` of this module take a tenth of the time of
those of prometheus-client. In its multiprocess mode, with ``PROMETHEUS_MULTIPROC_DIR``, the figures of all workers add up; see
docs/observing.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from limitgate.errors import ConfigError
from limitgate.extras import extra

with extra("prometheus", "prometheus_client"):
    import prometheus_client
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
    from prometheus_client.metrics import MetricWrapperBase
    from prometheus_client.multiprocess import mark_process_dead
    from prometheus_client.samples import Sample
    from prometheus_client.utils import floatToGoString

from limitgate.observing.handover import handover
from limitgate.observing.instruments import INSTRUMENTS, Instrument
from limitgate.own_errors import survived

__all__ = ["PrometheusObserver", "child_exit", "generate_latest", "make_asgi_app", "make_wsgi_app"]

_JOINED = {"sum": "livesum", "min": "livemin", "max": "livemax", "each": "liveall"}
"""Names of prometheus-client for how the gauges of several processes make one."""
_FIRST = INSTRUMENTS[0].prometheus_name.removesuffix("_total")
"""Name of the first metric of ours, with which a collection of a whole registry begins."""
_RECENT = 0.1
"""Seconds for which a collection goes on, or less: for its later metrics nothing new is handed over."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_number = lru_cache(4096)(floatToGoString)
"""A value in the text format. Most are small counts, many of them equal."""
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
            folder = _folder()
            bound = None if folder else self._registry
            try:
                metrics = _metrics[self._registry] = {each: _metric(each, bound) for each in INSTRUMENTS}
            except OSError as error:
                expected = "expected an empty folder that every worker may write to"
                raise ConfigError(f"PROMETHEUS_MULTIPROC_DIR: {folder}: {error.strerror}, {expected}") from error
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


def generate_latest(registry: CollectorRegistry = REGISTRY) -> bytes:
    """The text format of all metrics of a registry, byte for byte as prometheus-client's function of this name makes it.

    Lines of LimitGate's metrics are kept until their figures change, so that those of 1,000 rules take milliseconds: the other
    function puts each together anew, 15 for a rule. Of other metrics, and of all in multiprocess mode, it is the same.
    """
    text: list[str] = []
    for metric in registry.collect():
        if isinstance(metric, _Family):
            text += metric.text
        else:
            text.append(prometheus_client.generate_latest(_Collected(metric)).decode())
    return "".join(text).encode()


def make_asgi_app(registry: CollectorRegistry = REGISTRY) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """An ASGI application that serves a registry, as prometheus-client's does, by `generate_latest`, and not compressed."""
    other = prometheus_client.make_asgi_app(registry)

    async def metrics(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["query_string"]:
            await other(scope, receive, send)
            return
        body = generate_latest(registry)
        headers = [(b"content-type", _TEXT.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return metrics


def make_wsgi_app(registry: CollectorRegistry = REGISTRY) -> Callable[[Any, Any], Iterable[bytes]]:
    """`make_asgi_app` for WSGI."""
    other = prometheus_client.make_wsgi_app(registry)

    def metrics(environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET" or environ.get("QUERY_STRING"):
            answer: Iterable[bytes] = other(environ, start_response)
            return answer
        body = generate_latest(registry)
        start_response("200 OK", [("Content-Type", _TEXT), ("Content-Length", str(len(body)))])
        return [body]

    return metrics


class _Collected:
    """A metric that was collected, for a function that collects."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _label_text(labels: Mapping[str, str]) -> str:
    """Labels in the text format."""
    pairs = [f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class _UpToDate(MetricWrapperBase):
    """A metric that is brought up to date before it is collected.

    What one of its series gives is kept until that changes: to put thousands together anew takes most of the time of a
    collection, and sets Python's collector off. None says when its series was created, as that would be a fourth of all, for
    what nobody asks.
    """

    changes = 0
    """Number of times that it was changed, counted after the change; one thread at a time does so."""
    _kept_samples: tuple[int, Sequence[Sample]] = (-1, ())
    """Its samples, and the changes that are in them."""
    _kept_text: tuple[int, str] = (-1, "")
    """Its lines in the text format, and the changes that are in them."""

    def collect(self) -> Iterable[Metric]:
        """Collect. Where one of the others was collected just before, nothing new is looked for."""
        if self._name == _FIRST or handover.seconds_since() > _RECENT:
            handover.hand_over()
        return [_Family(self)]

    def family(self) -> Metric:
        """Its name, meaning and type, without samples."""
        metric: Metric = self._get_metric()  # type: ignore[no-untyped-call]
        return metric

    def present_samples(self) -> Sequence[Sample]:
        """The samples of one series, or of the buckets of one histogram."""
        changes = self.changes
        if self._kept_samples[0] != changes:
            samples = [Sample(name, labels, value) for (name, labels), value in zip(self._places, self.values())]
            self._kept_samples = changes, samples
        return self._kept_samples[1]

    def present_text(self) -> str:
        """`present_samples` in the text format."""
        changes = self.changes
        if self._kept_text[0] != changes:
            lines = [f"{beginning} {_number(value)}\n" for beginning, value in zip(self._beginnings, self.values())]
            self._kept_text = changes, "".join(lines)
        return self._kept_text[1]

    def places(self) -> Iterable[tuple[str, dict[str, str]]]:
        """Name and labels of each sample."""
        raise NotImplementedError

    def values(self) -> Iterable[float]:
        """Value of each sample."""
        raise NotImplementedError

    @property
    def named(self) -> dict[str, str]:
        """Its labels by their names."""
        return dict(zip(self._labelnames, self._labelvalues))

    @cached_property
    def _places(self) -> Sequence[tuple[str, dict[str, str]]]:
        return tuple(self.places())

    @cached_property
    def _beginnings(self) -> Sequence[str]:
        """What comes before the value of each sample in the text format."""
        return [f"{name}{_label_text(labels)}" for name, labels in self.places()]

    def children(self) -> Iterable[Any]:
        """Its series, each of which is a metric for prometheus-client."""
        if not self._is_parent():  # type: ignore[no-untyped-call]
            return (self,)
        with self._lock:
            return tuple(self._metrics.values())


class _Family(Metric):
    """A metric as it is collected, whose samples are put together when somebody asks for them."""

    def __init__(self, metric: _UpToDate) -> None:
        empty = metric.family()
        super().__init__(empty.name, empty.documentation, empty.type)
        del self.samples
        self._metric = metric

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The samples of all its series."""
        return [sample for child in self._metric.children() for sample in child.present_samples()]

    @property
    def text(self) -> Iterable[str]:
        """The metric in the text format, in parts."""
        name = self.name + ("_total" if self.type == "counter" else "")
        yield f"# HELP {name} {self.documentation}\n# TYPE {name} {self.type}\n"
        for child in self._metric.children():
            yield child.present_text()


class _Counter(_UpToDate, Counter):
    def places(self) -> Iterable[tuple[str, dict[str, str]]]:
        return ((self._name + "_total", self.named),)

    def values(self) -> Iterable[float]:
        return (self._value.get(),)


class _Gauge(_UpToDate, Gauge):
    def places(self) -> Iterable[tuple[str, dict[str, str]]]:
        return ((self._name, self.named),)

    def values(self) -> Iterable[float]:
        return (self._value.get(),)


class _Histogram(_UpToDate, Histogram):
    """Histogram that takes many observations at once: its own ``observe`` takes as long for each as counting may."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add to its buckets, and to the sum of all observations."""
        for bucket, count in zip(self._buckets, counts):
            if count:
                bucket.inc(count)
        self._sum.inc(total)

    def places(self) -> Iterable[tuple[str, dict[str, str]]]:
        """Its buckets, and their count and sum."""
        for bound in self._upper_bounds:
            yield self._name + "_bucket", {**self.named, "le": floatToGoString(bound)}  # type: ignore[no-untyped-call]
        yield self._name + "_count", self.named
        yield self._name + "_sum", self.named

    def values(self) -> Iterable[float]:
        """What is in its buckets, each with all that is in those before, and their count and sum."""
        counts = list(accumulate([bucket.get() for bucket in self._buckets]))
        return (*counts, counts[-1], self._sum.get())


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
