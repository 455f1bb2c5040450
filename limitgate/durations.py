"""Durations as people write them: seconds as a number, or text with a unit."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from limitgate.errors import ConfigError

_UNITS = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_DURATION = re.compile(r"\s*(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<unit>ms|s|m|h|d)\s*", re.ASCII)
_EXPECTED = "expected seconds as a number, or text such as '10s', '2m' or '500ms'"


def microseconds(value: object, name: str) -> int:
    """A duration in whole microseconds, rounded: seconds as a number, or text with one of the units ms, s, m, h and d.

    Raises `ConfigError`, in which the duration is called ``name``, for anything else and for what is no time at all.
    """
    us = None
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        us = round(Fraction(match["number"]) * _UNITS[match["unit"]])
    elif (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value)):
        us = round(Fraction(value) * 1_000_000)
    if us is None or us < 1:
        raise ConfigError(f"{name} {value!r:.80} is no duration, {_EXPECTED}")
    return us


def seconds(us: int) -> float:
    """Microseconds as seconds, whole ones as an integer."""
    return us // 1_000_000 if us % 1_000_000 == 0 else us / 1_000_000
