"""Parses durations: ``2``, ``"2"``, ``"2s"``, ``"500ms"``, ``"1 week"``, ``timedelta(minutes=1)``. Pure."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from typing import TypeVar

from limitgate.errors import ConfigError

T = TypeVar("T")

Duration = float | str | timedelta
"""Seconds, text with a unit, or a `timedelta`."""

UNITS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "sec": 1000,
    "second": 1000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hr": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "wk": 604_800_000,
    "week": 604_800_000,
}
"""In milliseconds, which makes ``500ms`` exact. All but ``ms`` and single letters have a plural."""
_WORDS = "|".join([unit if unit in ("ms", *"smhdw") else f"{unit}s?" for unit in UNITS])
PATTERN = rf"\s*(?!0[0-9]+(?:\.[0-9]+)?\s*$)([0-9]{{1,12}}(?:\.[0-9]{{1,12}})?)\s*({_WORDS})?\s*"
_DURATION = re.compile(PATTERN, re.ASCII)
EXPECTED = "expected seconds, or text such as '2s', '500ms', '1m', '1h', '1d' or '1w'"


def seconds_of(value: object) -> float:
    """Return a duration in seconds.

    ``value`` is a `timedelta`, a number of seconds, also as text, or text with a unit from ``ms`` to ``weeks``. Raises
    `ConfigError` for other values, and for negative or infinite ones.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return float(match[1]) * _milliseconds(match[2]) / 1000
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ConfigError(f"{value!r:.80} is not a duration, {EXPECTED}")


def _milliseconds(unit: str | None) -> int:
    if unit is None:
        return UNITS["s"]
    return UNITS[unit] if unit in UNITS else UNITS[unit.removesuffix("s")]


def as_seconds(value: Duration | T, what: str) -> float | T:
    """Return the seconds of a duration in text or of a `timedelta`, or other values unchanged.

    Raises `ConfigError` that names ``what`` for invalid text, and for true and false, which Python counts as numbers.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, str | bool):
        return value
    try:
        return seconds_of(value)
    except ConfigError:
        raise ConfigError(f"{what} is {value!r:.40}, {EXPECTED}") from None
