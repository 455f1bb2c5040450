"""Metrics for OpenTelemetry: ``observers=["opentelemetry"]``. The application provides the SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from limitgate.messages.text import extra

with extra("opentelemetry", "opentelemetry"):
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter

from limitgate.observing.exporter import exporter
from limitgate.observing.instruments import INSTRUMENTS, Instrument
from limitgate.process.forking import reset_in_children

__all__ = ["OpenTelemetryObserver"]

Callback = Callable[[CallbackOptions], Iterable[Observation]]


class OpenTelemetryObserver:
    """Exports all metrics to a meter provider, by default the global one, which may be set later.

    A provider set later gets all counts since the start. Histograms have exact counts and sums, but approximate minima and
    maxima. Observers of the same provider are equal.
    """

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        self._meter_provider = meter_provider
        self._values: dict[Instrument, dict[tuple[str, ...], float]] = {each: {} for each in INSTRUMENTS}
        meter = get_meter("limitgate", meter_provider=meter_provider)
        self._histograms: dict[Instrument, Histogram] = {}
        for each in INSTRUMENTS:
            if each.kind == "histogram":
                self._histograms[each] = meter.create_histogram(
                    each.name, each.unit, each.meaning, explicit_bucket_boundaries_advisory=each.bounds
                )
            else:
                _observable(meter, each)(each.name, [self._observing(each)], each.unit, each.meaning)
        reset_in_children(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenTelemetryObserver) and other._meter_provider is self._meter_provider

    def __hash__(self) -> int:
        return hash((OpenTelemetryObserver, id(self._meter_provider)))

    def reset_after_fork(self) -> None:
        """A child is another service instance."""
        for values in self._values.values():
            values.clear()

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        """Add ``amount`` to a counter."""
        values = self._values[instrument]
        values[labels] = values.get(labels, 0) + amount

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge or an up-down counter."""
        self._values[instrument][labels] = value

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        """Record observations in a histogram."""
        record, attributes = self._histograms[instrument].record, dict(zip(instrument.labels, labels))
        for count, total in zip(counts, sums):
            for _ in range(count):
                record(total / count, attributes)

    def _observing(self, instrument: Instrument) -> Callback:
        values = self._values[instrument]

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            # Don't wait, because the SDK may hold a lock that another export waits for.
            exporter.export(waits=False)
            return [Observation(value, dict(zip(instrument.labels, labels))) for labels, value in list(values.items())]

        return observe


def _observable(meter: Meter, instrument: Instrument) -> Callable[..., Any]:
    if instrument.kind == "counter":
        return meter.create_observable_counter
    return meter.create_observable_gauge if instrument.kind == "gauge" else meter.create_observable_up_down_counter
