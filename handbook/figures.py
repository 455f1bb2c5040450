"""The table of docs/observing.md: every figure that observers are handed."""

from __future__ import annotations

from handbook.reference import inserted
from limitgate.observing.instruments import INSTRUMENTS, Instrument

_KINDS = {"counter": "counter", "gauge": "gauge", "up_down": "up-down counter, in Prometheus a gauge", "histogram": "histogram"}
_SHORT = 8
"""Values of a label up to which they are listed."""


def figures(text: str) -> str:
    """The page with its table as the code has it now."""
    rows = ["| Prometheus | OpenTelemetry (unit) | kind | labels | meaning |", "| --- | --- | --- | --- | --- |"]
    return inserted(text, "figures", "\n".join([*rows, *map(_row, INSTRUMENTS)]))


def _row(instrument: Instrument) -> str:
    kind = _KINDS[instrument.kind]
    if instrument.bounds:
        kind += f"; buckets up to {', '.join(f'{bound:g}' for bound in instrument.bounds)}"
    labels = "; ".join([_described(instrument, label) for label in instrument.labels]) or "none"
    names = f"`{instrument.prometheus_name}` | `{instrument.name}` ({instrument.unit})"
    return f"| {names} | {kind} | {labels} | {instrument.meaning} |"


def _described(instrument: Instrument, label: str) -> str:
    """A label, with its values if these are known and few."""
    values = instrument.values.get(label, ())
    return f"`{label}`: {', '.join(values)}" if 0 < len(values) <= _SHORT else f"`{label}`"
