"""Reserves a share of a limit for callers with a higher priority. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final, Literal, TypeGuard

from limitgate.errors import ConfigError
from limitgate.limits.bucket import Bucket

Priority = Literal["high", "normal", "low"]

NORMAL: Final[Priority] = "normal"
RESERVES: Final[Mapping[Priority, int]] = {"high": 0, "normal": 1, "low": 2}
"""Number of reserves that each priority cannot use."""
MOST = Fraction(49, 100)
"""Maximum reserve. Twice as much still leaves room."""

_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*", re.ASCII)


def is_priority(value: object) -> TypeGuard[Priority]:
    """Return True for the name of a priority."""
    return isinstance(value, str) and value in RESERVES


def share_of(value: object) -> Fraction:
    """Parse a reserve such as ``20%`` or 0.2, exactly.

    Raises `ConfigError` for other values. The share must be above 0 and at most 49 %.
    """
    share = None
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        share = Fraction(match[1]) / 100
    elif isinstance(value, float) and math.isfinite(value):
        share = Fraction(repr(value))
    elif isinstance(value, Fraction):
        share = value
    if share is None or not 0 < share <= MOST:
        raise ConfigError(f"{value!r:.80} is no reserve, expected a share above 0 and up to 49 %, such as '20%' or 0.2")
    return share


def graded(buckets: tuple[Bucket, ...], reserve: Fraction) -> dict[Priority, tuple[Bucket, ...]]:
    """Return the buckets for each priority.

    Reserves are rounded up to whole requests. Raises `ConfigError` if a limit has no room left.
    """
    kept = [[math.ceil(reserve * limit.burst) for limit in bucket.limits] for bucket in buckets]
    low = [bucket.less([2 * each for each in much]) for bucket, much in zip(buckets, kept)]
    found: dict[Priority, tuple[Bucket, ...]] = {}
    for priority, times in RESERVES.items():
        rooms = zip(buckets, kept, low)
        found[priority] = tuple([bucket.less([times * each for each in much], least) for bucket, much, least in rooms])
    return found


def percent(share: Fraction) -> str:
    """Format a share as a percentage."""
    return f"{float(share * 100):g}%"
