"""Parses durations: ``2``, ``0.5``, ``"2s"``, ``"500ms"``, ``"1m"``. Pure."""

from __future__ import annotations

import re
import sys
from typing import TypeVar

from limitgate.errors import ConfigError

T = TypeVar("T")

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
"""In milliseconds, which makes ``500ms`` exact."""
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|s|m|h|d)\s*", re.ASCII)
EXPECTED = "expected seconds, or text such as '2s', '500ms', '1m', '1h' or '1d'"


def seconds_of(value: object) -> float:
    """Return a duration in seconds.

    ``value`` is a number of seconds, or text with the unit ``ms``, ``s``, ``m``, ``h`` or ``d``. Raises `ConfigError` for
    other values, and for negative or infinite ones.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return float(match[1]) * _UNITS[match[2]] / 1000
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ConfigError(f"{value!r:.80} is no duration, {EXPECTED}")


def as_seconds(value: str | T, what: str) -> float | T:
    """Return the seconds of a duration in text, or other values unchanged.

    Raises `ConfigError` that names ``what`` for invalid text.
    """
    if not isinstance(value, str):
        return value
    try:
        return seconds_of(value)
    except ConfigError:
        raise ConfigError(f"{what} is {value!r:.40}, {EXPECTED}") from None
