"""Figures for Prometheus: ``observers=["prometheus"]``, and the application serves ``/metrics`` by prometheus-client as always.

Where there are many rules, `make_asgi_app`, `make_wsgi_app` and `generate_latest` of this module take a tenth of the time of
those of prometheus-client. In its multiprocess mode, with ``PROMETHEUS_MULTIPROC_DIR``, the figures of all workers add up, in a
fraction of the time by the `MultiProcessCollector` of this module; see docs/observing.md.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from limitgate.errors import ConfigError
from limitgate.messages.extras import extra

with extra("prometheus", "prometheus_client"):
    import prometheus_client
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, multiprocess
    from prometheus_client.metrics import MetricWrapperBase
    from prometheus_client.samples import Sample
    from prometheus_client.utils import floatToGoString

from limitgate.observing.handover import handover
from limitgate.observing.instruments import INSTRUMENTS, Instrument
from limitgate.observing.worker_files import Family, Run, WorkerFiles, can_join
from limitgate.own_errors import survived

__all__ = ["MultiProcessCollector", "PrometheusObserver", "child_exit", "generate_latest", "make_asgi_app", "make_wsgi_app"]

_JOINED = {"sum": "livesum", "min": "livemin", "max": "livemax", "each": "liveall"}
"""Names of prometheus-client for how the gauges of several processes make one."""
_FIRST = INSTRUMENTS[0].prometheus_name.removesuffix("_total")
"""Name of the first metric of ours, with which a collection of a whole registry begins."""
_OURS = "limitgate_"
"""With which the names of all metrics of ours begin."""
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
"""A name that stands in the text format as it is."""
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
    function puts each together anew, 15 for a rule. Of other metrics it is the same. In multiprocess mode they are kept where
    the registry has a `MultiProcessCollector` of this module.
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


class MultiProcessCollector(multiprocess.MultiProcessCollector):
    """prometheus-client's collector of this name, which reads the keys of each worker's files once, and then values alone.

    It collects the same metrics. To be made once, as what it remembers is lost with it.
    """

    def __init__(self, registry: CollectorRegistry | None, path: str | None = None) -> None:
        self._files = WorkerFiles()
        self._families: Sequence[Family] = ()
        self._metrics: Sequence[_JoinedMetric] = ()
        self._lock = threading.Lock()
        super().__init__(registry, path)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics of all workers."""
        paths = [*Path(self._path).glob("*.db")]
        others = [str(path) for path in paths if not can_join(path) and path.is_file() and os.access(path, os.R_OK)]
        with self._lock:
            families = self._files.read([path for path in paths if can_join(path)])
            if families is not self._families:
                self._families, self._metrics = families, [*map(_JoinedMetric, families)]
            metrics = self._metrics
        return [*[metric.collected() for metric in metrics], *self.merge(others)]  # type: ignore[no-untyped-call]


class _Collected:
    """A metric that was collected, for a function that collects."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


_Shape = tuple[tuple[str, str | None], ...]
"""Samples of a series: the name of each, and the upper bound of a bucket."""


def _places(shape: _Shape, labels: dict[str, str]) -> Iterable[tuple[str, dict[str, str]]]:
    """Name and labels of each sample of a series with these labels."""
    return [(name, labels if bound is None else {**labels, "le": bound}) for name, bound in shape]


def _lines(shape: _Shape, names: tuple[str, ...], values: Sequence[tuple[str, ...]]) -> str:
    """The lines of series in the text format, by the names and values of their labels, with ``%s`` for each value."""
    places = {name: place for place, name in enumerate(names)}
    in_order = tuple(sorted(places))
    labels = values if in_order == names else [tuple([each[places[name]] for name in in_order]) for each in values]
    if _ODD.search("".join([*chain.from_iterable(labels)])):
        labels = [tuple(map(_escaped, each)) for each in labels]
    if len(shape) > 1:
        labels = [each * len(shape) for each in labels]
    return _any_lines(shape, in_order) * len(values) % tuple(chain.from_iterable(labels))


@lru_cache(256)
def _any_lines(shape: _Shape, names: tuple[str, ...]) -> str:
    """`_lines` of any series with labels of these names, which are sorted, with ``%s`` in the place of their values, too."""
    lines = []
    for name, bound in shape:
        own = dict.fromkeys(names, "%s") | ({} if bound is None else {"le": _escaped(bound)})
        pairs = ",".join([f'{each}="{own[each]}"' for each in sorted(own)])
        lines.append(f"{name}{{{pairs}}} %%s\n" if pairs else f"{name} %%s\n")
    return "".join(lines)


_ODD = re.compile(r'[\\\n"%]')
"""A character that does not stand in the text format as it is, or not before values are put in."""


def _escaped(value: str) -> str:
    """The value of a label in the text format, for ``%``."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").replace("%", "%%")


@lru_cache(256)
def _of_histogram(name: str, bounds: Sequence[float], more: tuple[str, ...]) -> _Shape:
    """The samples of a histogram: its buckets, and ``more``."""
    buckets = [(f"{name}_bucket", str(floatToGoString(bound))) for bound in bounds]  # type: ignore[no-untyped-call]
    return (*buckets, *((f"{name}_{each}", None) for each in more))


class _Present(Protocol):
    """A metric as it is now."""

    def family(self) -> Metric:
        """Its name, meaning and type, without samples."""

    def all_samples(self) -> list[Sample]:
        """The samples of all its series."""

    def all_lines(self) -> str:
        """`all_samples` in the text format."""


class _UpToDate(MetricWrapperBase):
    """A metric that is brought up to date before it is collected.

    The samples of one of its series are kept until that changes, and its text until one of them does: to put thousands together
    anew takes most of the time of a collection, and sets Python's collector off. None says when its series was created, as that
    would be a fourth of all, for what nobody asks.
    """

    changes = 0
    """Number of times that it was changed, counted after the change; one thread at a time does so."""
    _kept_samples: tuple[int, Sequence[Sample]] = (-1, ())
    """Its samples, and the changes that are in them."""
    _kept_text: tuple[Sequence[Any], str, Sequence[int], str] = ((), "", (), "")
    """Its series, and their lines in the text format with ``%s`` for each value; the changes of each, and lines with values."""

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
            places = _places(self.shape(), self.named)
            samples = [Sample(name, labels, value) for (name, labels), value in zip(places, self.values())]
            self._kept_samples = changes, samples
        return self._kept_samples[1]

    def all_samples(self) -> list[Sample]:
        """The samples of all its series."""
        return [sample for child in self.children() for sample in child.present_samples()]

    def all_lines(self) -> str:
        """`all_samples` in the text format."""
        children = self.children()
        changes = [child.changes for child in children]
        known, lines, kept, text = self._kept_text
        if known != children:
            labels = [child.label_values for child in children]
            lines = _lines(children[0].shape(), tuple(self._labelnames), labels) if children else ""
        elif kept == changes:
            return text
        values: list[float] = []
        for child in children:
            values += child.values()
        text = lines % tuple(map(_number, values))
        self._kept_text = children, lines, changes, text
        return text

    @property
    def label_values(self) -> tuple[str, ...]:
        """The values of its labels."""
        return tuple(self._labelvalues)

    def shape(self) -> _Shape:
        """Its samples."""
        raise NotImplementedError

    def values(self) -> Iterable[float]:
        """Value of each sample."""
        raise NotImplementedError

    @property
    def named(self) -> dict[str, str]:
        """Its labels by their names."""
        return dict(zip(self._labelnames, self.label_values))

    def children(self) -> Sequence[Any]:
        """Its series, each of which is a metric for prometheus-client."""
        if not self._is_parent():  # type: ignore[no-untyped-call]
            return (self,)
        with self._lock:
            return tuple(self._metrics.values())


class _Family(Metric):
    """A metric as it is collected, whose samples are put together when somebody asks for them."""

    def __init__(self, metric: _Present) -> None:
        empty = metric.family()
        super().__init__(empty.name, empty.documentation, empty.type)
        del self.samples
        self._metric = metric

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The samples of all its series."""
        return self._metric.all_samples()

    @property
    def text(self) -> Iterable[str]:
        """The metric in the text format, in parts."""
        name = self.name + ("_total" if self.type == "counter" else "")
        meaning = self.documentation.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {name} {meaning}\n# TYPE {name} {self.type}\n"
        yield self._metric.all_lines()


class _JoinedMetric:
    """A metric of several workers, whose text is kept until a value changes."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._shapes = [_shape_of(family.name, run) for run in family.runs]
        names = [family.name, *[name for run in family.runs for name in (*run.samples, *run.names)]]
        self._is_ours = family.name.startswith(_OURS) and all(map(_NAME.fullmatch, names))
        self._kept_text: tuple[Sequence[float] | None, str] = (None, "")
        """Its lines in the text format, and the values that are in them."""

    def collected(self) -> Metric:
        """The metric as it is collected; its text is made here if it is one of LimitGate's."""
        present = _Family(_JoinedValues(self, self._family.values))
        if self._is_ours:
            return present
        metric = self.family()
        metric.samples = present.samples
        return metric

    def family(self) -> Metric:
        """Its name, meaning and type, without samples."""
        return Metric(self._family.name, self._family.meaning, self._family.kind)

    def samples(self, values: Sequence[float]) -> list[Sample]:
        """All its samples with these values."""
        places = [
            place
            for shape, run in zip(self._shapes, self._family.runs)
            for labels in run.values
            for place in _places(shape, dict(zip(run.names, labels)))
        ]
        return [Sample(name, labels, value) for (name, labels), value in zip(places, values)]

    def text(self, values: Sequence[float]) -> str:
        """All its lines with these values."""
        kept, text = self._kept_text
        if kept != values:
            text = self._lines % tuple(map(_number, values))
            self._kept_text = values, text
        return text

    @cached_property
    def _lines(self) -> str:
        return "".join([_lines(shape, run.names, run.values) for shape, run in zip(self._shapes, self._family.runs)])


class _JoinedValues:
    """A metric of several workers, and its values when it was collected."""

    def __init__(self, metric: _JoinedMetric, values: Sequence[float]) -> None:
        self._metric = metric
        self._values = values

    def family(self) -> Metric:
        """Its name, meaning and type, without samples."""
        return self._metric.family()

    def all_samples(self) -> list[Sample]:
        """The samples of all its series."""
        return self._metric.samples(self._values)

    def all_lines(self) -> str:
        """`all_samples` in the text format."""
        return self._metric.text(self._values)


def _shape_of(metric: str, run: Run) -> _Shape:
    """The samples of each series of a run."""
    return tuple((name, None) for name in run.samples) + (
        _of_histogram(metric, tuple(run.bounds), ("count",)) if run.bounds else ()
    )


class _Counter(_UpToDate, Counter):
    def shape(self) -> _Shape:
        return ((f"{self._name}_total", None),)

    def values(self) -> Iterable[float]:
        return (self._value.get(),)


class _Gauge(_UpToDate, Gauge):
    def shape(self) -> _Shape:
        return ((self._name, None),)

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

    def shape(self) -> _Shape:
        """Its buckets, and their count and sum."""
        return _of_histogram(self._name, tuple(self._upper_bounds), ("count", "sum"))

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
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


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
