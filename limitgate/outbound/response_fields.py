"""Rate fields of responses: ``Retry-After``, ``RateLimit`` and ``X-RateLimit``. Pure.

Ignores malformed fields (draft-ietf-httpapi-ratelimit-headers-11, section 7). The longest wait counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_tz
from typing import NamedTuple

import http_sf

Field = Callable[[str], str | None]
"""Returns the value of a field by lower-case name, with lines joined by commas."""

LONGEST = 366 * 86_400.0
"""Seconds."""
MOST_READ = 4096
"""Longer fields are ignored."""
_SKEW = 2.0
"""Tolerated difference in seconds, because ``Date`` has whole seconds and a delay."""
_IS_TIME = 1_000_000_000
"""A number from this on is Unix time, not a wait."""
_IS_MILLISECONDS = 1_000_000_000_000
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)
_VALUE = re.compile(r"\s*(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\s*,)?[^,]+", re.IGNORECASE)
"""An item of a list. Two of HTTP's three date formats contain a comma."""
_COUNTS = (
    ("ratelimit-remaining", "ratelimit-reset"),  # Drafts before 07, in seconds.
    ("x-ratelimit-remaining", "x-ratelimit-reset-after"),
    ("x-ratelimit-remaining", "x-ratelimit-reset"),
    ("x-rate-limit-remaining", "x-rate-limit-reset"),
)


class Answer(NamedTuple):
    status: int
    retry_after: float | None = None
    """From ``Retry-After``, in seconds."""
    exhausted: float | None = None
    """Seconds until the exhausted limit has room."""

    @property
    def refused(self) -> bool:
        """True for a 429 (RFC 6585, section 4)."""
        return self.status == 429

    @property
    def pause(self) -> float | None:
        """Seconds to wait; ``Retry-After`` takes precedence (draft, section 7)."""
        return self.exhausted if self.retry_after is None else self.retry_after


def answer_of(status: int, field: Field, now: float) -> Answer:
    """Read a response received at ``now`` (Unix seconds)."""
    field = _short(field)
    retry_after = field("retry-after") if status >= 400 else None
    wait = None if retry_after is None else _retry_after(retry_after, field("date"), now)
    if any(_numbers(field("age")) or ()):
        # A cached response reports old limits (draft, section 7.3).
        return Answer(status, wait)
    return Answer(status, wait, _exhausted(field, now))


def without_encoding(field: Field) -> Field:
    """Hide ``content-encoding``, because the body is decoded while it is read."""
    return lambda name: None if name == "content-encoding" else field(name)


def _short(field: Field) -> Field:
    def short(name: str) -> str | None:
        value = field(name)
        return None if value is None or len(value) > MOST_READ else value

    return short


def _retry_after(value: str, date: str | None, now: float) -> float | None:
    """Parse ``Retry-After`` (RFC 9110, section 10.2.3), also with fractions or Unix time. The longest value counts."""
    waits = [_delay(each, date, now) for each in _VALUE.findall(value)]
    return max([wait for wait in waits if wait is not None], default=None)


def _delay(value: str, date: str | None, now: float) -> float | None:
    number = _number(value)
    if number is not None:
        return _wait(number, date, now)
    at = _time(value)
    return None if at is None else _until(at, date, now)


def _exhausted(field: Field, now: float) -> float | None:
    value = field("ratelimit")
    if value and (found := _policies(value)):
        waits = [wait for remaining, wait in found if remaining == 0 and wait is not None]
        return min(max(waits), LONGEST) if waits else None
    for remaining_name, reset_name in _COUNTS:
        remaining, reset = _numbers(field(remaining_name)), _numbers(field(reset_name))
        if remaining is None or reset is None or len(remaining) != len(reset):
            continue
        resets = [_wait(until, field("date"), now) for left, until in zip(remaining, reset) if left <= 0]
        return max(resets, default=None)
    return None


def _policies(value: str) -> list[tuple[int, int | None]]:
    """Return remaining requests and seconds until reset per policy; empty if malformed.

    Drafts since 08 use a list: ``"name";r=0;t=5``. Draft 07 uses a dictionary: ``limit=10, remaining=0, reset=5``.
    """
    raw = value.encode("latin-1", "replace")
    for kind, read in (("list", _items), ("dictionary", _members)):
        try:
            return read(http_sf.parse(raw, tltype=kind))
        except (ValueError, KeyError, TypeError):
            continue
    return []


def _items(parsed: object) -> list[tuple[int, int | None]]:
    found = []
    for name, parameters in parsed:  # type: ignore[attr-defined] # other types raise
        if type(name) is not str:
            raise TypeError(f"{name!r:.80} is not the name of a policy, expected a string")
        waits = [parameters[each] for each in ("t", "w") if each in parameters]
        found.append((_count(parameters["r" if "r" in parameters else "a"]), _count(waits[0]) if waits else None))
    return found


def _members(parsed: object) -> list[tuple[int, int | None]]:
    members = {name: value for name, (value, _) in parsed.items()}  # type: ignore[attr-defined]
    return [(_count(members["remaining"]), _count(members["reset"]))]


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is not a count, expected a non-negative integer")
    return value


def _numbers(value: str | None) -> list[float] | None:
    found = [] if value is None else [_number(each) for each in value.split(",")]
    return None if not found or None in found else [number for number in found if number is not None]


def _number(value: str) -> float | None:
    match = _NUMBER.fullmatch(value.strip())
    return float(match[0]) if match else None


def _time(value: str) -> float | None:
    try:
        year, month, day, hour, minute, second, _, _, _, offset = parsedate_tz(value)  # type: ignore[misc]
        # Unix time has no leap seconds, so a leap second is the second after it.
        leap = second == 60
        zone = timezone(timedelta(seconds=offset or 0))
        return datetime(year, month, day, hour, minute, second - leap, tzinfo=zone).timestamp() + leap
    except (TypeError, ValueError, OverflowError):  # Not a date, or an invalid day or offset.
        return None


def _wait(number: float, date: str | None, now: float) -> float:
    if number < _IS_TIME:
        return min(number, LONGEST)
    return _until(number / 1000 if number >= _IS_MILLISECONDS else number, date, now)


def _until(at: float, date: str | None, now: float) -> float:
    return min(max(0.0, at - clock_of(date, now)), LONGEST)


def clock_of(date: str | None, now: float) -> float:
    """Return the service's clock by its ``Date``, or ours if both agree or ``Date`` is missing."""
    theirs = None if date is None else next(map(_time, _VALUE.findall(date)), None)
    return now if theirs is None or abs(theirs - now) <= _SKEW else theirs
