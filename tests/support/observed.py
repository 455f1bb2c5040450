"""An observer that keeps what it is told, to be compared with what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limitgate.observing.exporter import exporter
from limitgate.observing.instruments import Instrument


class Recorder:
    """Figures by name and labels, as Prometheus would have them."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, tuple[str, ...]], Any] = {}

    def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
        place = instrument.name, labels
        assert amount >= 0
        assert len(labels) == len(instrument.labels)
        self.told[place] = self.told.get(place, 0) + amount

    def set(self, instrument: Instrument, labels: tuple[str, ...], value: float) -> None:
        self.told[instrument.name, labels] = value

    def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Sequence[int], sums: Sequence[float]) -> None:
        assert len(counts) == len(sums) == len(instrument.bounds) + 1
        known = self.told.get((instrument.name, labels), [0] * len(counts))
        self.told[instrument.name, labels] = [was + count for was, count in zip(known, counts)]

    def of(self, name: str) -> dict[tuple[str, ...], Any]:
        """All series of a figure."""
        exporter.export()
        return {labels: value for (each, labels), value in self.told.items() if each == f"limitgate.{name}"}

    def new(self, name: str) -> dict[tuple[str, ...], Any]:
        """Those that are not 0."""
        return {labels: value for labels, value in self.of(name).items() if value}

    def without(self, *names: str) -> dict[tuple[str, tuple[str, ...]], Any]:
        """Everything but some figures."""
        exporter.export()
        return {place: value for place, value in self.told.items() if place[0].removeprefix("limitgate.") not in names}
