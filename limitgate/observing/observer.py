"""The observer protocol, and the observers that the option ``observers`` accepts by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from limitgate.errors import ConfigError
from limitgate.observing.instruments import Instrument

NAMES = {
    "prometheus": ("limitgate.prometheus", "PrometheusObserver"),
    "opentelemetry": ("limitgate.opentelemetry", "OpenTelemetryObserver"),
}
"""Module and class of each named observer; imported on use."""


@runtime_checkable
class Observer(Protocol):
    """Receives all metrics, once a second while values change: ``LimitGate(app, observers=[MyObserver()])``.

    Called from any thread, but never concurrently. ``labels`` are the values of `Instrument.labels`, in their order; clients
    can't create label values. Every series starts at 0. Equal observers count as one.
    """

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        """Add ``amount`` to a counter."""

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge, or the current value of an up-down counter."""

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        """Record observations in a histogram: new counts and sums per bucket; the last bucket is unbounded."""


def check_observers(chosen: Iterable[object]) -> None:
    """Raise `ConfigError` for an invalid observer or name."""
    for each in chosen:
        if isinstance(each, str):
            if each not in NAMES:
                raise ConfigError(f"observer {each!r:.80} is unknown, expected some of {', '.join(NAMES)}, or an Observer")
        elif isinstance(each, type) or not isinstance(each, Observer):
            raise ConfigError(f"{each!r:.80} is no observer, expected one with the methods add, set and record, or a name")


def observers_of(chosen: Iterable[str | Observer]) -> tuple[Observer, ...]:
    """Return observers, given as objects, names, or one text of names. Raises `ConfigError`, also for a missing package."""
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
