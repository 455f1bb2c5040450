"""The protocol of observers, and what the option ``observers`` names."""

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
"""Observers that have a name: their modules, which are imported only for one that is used, and their classes."""


@runtime_checkable
class Observer(Protocol):
    """Gets all metrics, once a second while something is new: ``LimitGate(app, observers=[MyObserver()])``.

    Called by any thread, but never by two at once. ``labels`` are the values of `Instrument.labels`, in their order: none is
    ever made up by a client. Every series begins with 0. Two observers that are equal are one.
    """

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        """Add to a counter."""

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge, or the present value of an up-down counter."""

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        """Record observations in a histogram: how many are new in each bucket, the last one unbounded, and their sum."""


def check_observers(chosen: Iterable[object]) -> None:
    """Raise `ConfigError` for what is neither the name of an observer nor an observer."""
    for each in chosen:
        if isinstance(each, str):
            if each not in NAMES:
                raise ConfigError(f"observer {each!r:.80} is unknown, expected some of {', '.join(NAMES)}, or an Observer")
        elif isinstance(each, type) or not isinstance(each, Observer):
            raise ConfigError(f"{each!r:.80} is no observer, expected one with the methods add, set and record, or a name")


def observers_of(chosen: Iterable[str | Observer]) -> tuple[Observer, ...]:
    """The observers that names or objects stand for, or a text of names. Raises `ConfigError`, also for a missing package."""
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
