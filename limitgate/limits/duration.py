"""Durations as people write them: ``2``, ``0.5``, ``"2s"``, ``"500ms"``, ``"1m"``. Pure."""

from __future__ import annotations

import re
import sys
from typing import TypeVar

from limitgate.errors import ConfigError

T = TypeVar("T")

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
"""In milliseconds, so that ``500ms`` is half a second and no hair less."""
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|s|m|h|d)\s*", re.ASCII)
EXPECTED = "expected seconds, or text such as '2s', '500ms', '1m', '1h' or '1d'"


def seconds_of(value: object) -> float:
    """A duration in seconds: a number of them, or text with a unit, which is ``ms``, ``s``, ``m``, ``h`` or ``d``.

    Raises `ConfigError` for anything else, for what is negative, and for what is no finite number.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return float(match[1]) * _UNITS[match[2]] / 1000
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ConfigError(f"{value!r:.80} is no duration, {EXPECTED}")


def as_seconds(value: str | T, what: str) -> float | T:
    """The seconds of a duration that is given as text; anything else as it is, for checks of numbers.

    Raises `ConfigError` that says ``what`` was given as text that is no duration.
    """
    if not isinstance(value, str):
        return value
    try:
        return seconds_of(value)
    except ConfigError:
        raise ConfigError(f"{what} is {value!r:.40}, {EXPECTED}") from None
