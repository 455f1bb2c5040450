"""Rate fields of a service's responses: ``Retry-After``, ``RateLimit`` and ``X-RateLimit``. Pure.

A field that is malformed is ignored, as draft-ietf-httpapi-ratelimit-headers-11 section 7 demands, and the next one is read.
A proxy and the service behind it may both send one, on two lines, which arrive as one list: then the longest wait counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_tz
from typing import NamedTuple

import http_sf

Field = Callable[[str], str | None]
"""A field's value by its name in lower case; its lines joined by commas, None if there is none."""

LONGEST = 366 * 86_400.0
"""Longest pause that is believed, in seconds."""
MOST_READ = 4096
"""Most characters of a field, all its lines joined; a longer one is ignored."""
_SKEW = 2.0
"""Seconds by which two clocks may differ before the service's counts: its ``Date`` is in whole seconds, and has travelled."""
_IS_TIME = 1_000_000_000
"""A number from here on is Unix time (September 2001), not seconds to wait (31 years)."""
_IS_MILLISECONDS = 1_000_000_000_000
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)
_VALUE = re.compile(r"\s*(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\s*,)?[^,]+", re.IGNORECASE)
"""A value in a list of them: two of the three forms of HTTP dates have a comma behind the day of the week."""
_COUNTS = (
    ("ratelimit-remaining", "ratelimit-reset"),  # the draft before 07, in seconds
    ("x-ratelimit-remaining", "x-ratelimit-reset-after"),
    ("x-ratelimit-remaining", "x-ratelimit-reset"),
    ("x-rate-limit-remaining", "x-rate-limit-reset"),
)


class Answer(NamedTuple):
    """Limits in a response."""

    status: int
    retry_after: float | None = None
    """Seconds after which the service wants to be asked again, None if it does not say."""
    exhausted: float | None = None
    """Seconds until its exhausted limit has room again, None if it has now, or does not say."""

    @property
    def refused(self) -> bool:
        """True if the request was refused by a limit (RFC 6585 section 4)."""
        return self.status == 429

    @property
    def pause(self) -> float | None:
        """The seconds to wait: ``Retry-After`` takes precedence (the draft's section 7)."""
        return self.exhausted if self.retry_after is None else self.retry_after


def answer_of(status: int, field: Field, now: float) -> Answer:
    """Read the limits in a response received at ``now``, in seconds of Unix time."""
    field = _short(field)
    retry_after = field("retry-after") if status >= 400 else None
    wait = None if retry_after is None else _retry_after(retry_after, field("date"), now)
    if any(_numbers(field("age")) or ()):
        return Answer(status, wait)  # a cache tells of limits as they were once (the draft's section 7.3)
    return Answer(status, wait, _exhausted(field, now))


def _short(field: Field) -> Field:
    """The fields without those that are too long."""

    def short(name: str) -> str | None:
        value = field(name)
        return None if value is None or len(value) > MOST_READ else value

    return short


def _retry_after(value: str, date: str | None, now: float) -> float | None:
    """RFC 9110 section 10.2.3: seconds, or a date. Fractions of seconds and Unix time are sent nonetheless.

    Of several values the longest; those that are malformed are ignored.
    """
    waits = [_delay(each, date, now) for each in _VALUE.findall(value)]
    return max([wait for wait in waits if wait is not None], default=None)


def _delay(value: str, date: str | None, now: float) -> float | None:
    number = _number(value)
    if number is not None:
        return _wait(number, date, now)
    at = _time(value)
    return None if at is None else _until(at, date, now)


def _exhausted(field: Field, now: float) -> float | None:
    """Seconds until the limit has room again, by the first field that says how much remains."""
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
    """Remaining requests of each policy, and seconds until there are more; empty if the field is malformed.

    The draft since 08 has a list of items, ``"name";r=0;t=5``, that of 07 a dictionary, ``limit=10, remaining=0, reset=5``.
    """
    raw = value.encode("latin-1", "replace")
    for kind, read in (("list", _items), ("dictionary", _members)):
        try:
            return read(http_sf.parse(raw, tltype=kind))
        except (ValueError, KeyError, TypeError):
            continue
    return []


def _items(parsed: object) -> list[tuple[int, int | None]]:
    """Policies of a list of items; raises if it is another list."""
    found = []
    for name, parameters in parsed:  # type: ignore[attr-defined] # whatever else it may be raises
        if type(name) is not str:
            raise TypeError(f"{name!r:.80} is no name of a policy, expected a string")
        found.append((_count(parameters["r"]), _count(parameters["t"]) if "t" in parameters else None))
    return found


def _members(parsed: object) -> list[tuple[int, int | None]]:
    """Policy of a dictionary; raises if it is another dictionary."""
    members = {name: value for name, (value, _) in parsed.items()}  # type: ignore[attr-defined]
    return [(_count(members["remaining"]), _count(members["reset"]))]


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no count, expected a non-negative integer")
    return value


def _numbers(value: str | None) -> list[float] | None:
    """Numbers of a list; None if one of them is malformed, or there is no list."""
    found = [] if value is None else [_number(each) for each in value.split(",")]
    return None if not found or None in found else [number for number in found if number is not None]


def _number(value: str) -> float | None:
    match = _NUMBER.fullmatch(value.strip())
    return float(match[0]) if match else None


def _time(value: str) -> float | None:
    """An HTTP date as seconds of Unix time, None if it is none."""
    try:
        year, month, day, hour, minute, second, _, _, _, offset = parsedate_tz(value)  # type: ignore[misc]
        # Unix time has no leap seconds: one is the second after it.
        leap = second == 60
        zone = timezone(timedelta(seconds=offset or 0))
        return datetime(year, month, day, hour, minute, second - leap, tzinfo=zone).timestamp() + leap
    except (TypeError, ValueError, OverflowError):  # no date, no such day, or no such time zone
        return None


def _wait(number: float, date: str | None, now: float) -> float:
    """Seconds to wait, given as seconds or as Unix time."""
    if number < _IS_TIME:
        return min(number, LONGEST)
    return _until(number / 1000 if number >= _IS_MILLISECONDS else number, date, now)


def _until(at: float, date: str | None, now: float) -> float:
    """Seconds until a time by the service's clock; by ours if the two agree, or its response has no ``Date``."""
    theirs = None if date is None else next(map(_time, _VALUE.findall(date)), None)
    return min(max(0.0, at - (now if theirs is None or abs(theirs - now) <= _SKEW else theirs)), LONGEST)
