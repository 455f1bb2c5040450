"""Rate fields of a service's responses: ``Retry-After``, ``RateLimit`` and ``X-RateLimit``. Pure.

A field that is malformed is ignored, as draft-ietf-httpapi-ratelimit-headers-11 section 7 demands, and the next one is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
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
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?", re.ASCII)
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
    if _number(field("age")):
        return Answer(status, wait)  # a cache tells of limits as they were once (the draft's section 7.3)
    return Answer(status, wait, _exhausted(field, now))


def _short(field: Field) -> Field:
    """The fields without those that are too long."""

    def short(name: str) -> str | None:
        value = field(name)
        return None if value is None or len(value) > MOST_READ else value

    return short


def _retry_after(value: str, date: str | None, now: float) -> float | None:
    """RFC 9110 section 10.2.3: seconds, or a date. Fractions of seconds and Unix time are sent nonetheless."""
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
        remaining, reset = _number(field(remaining_name)), _number(field(reset_name))
        if remaining is None or reset is None:
            continue
        return None if remaining > 0 else _wait(reset, field("date"), now)
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


def _number(value: str | None) -> float | None:
    match = _NUMBER.fullmatch(value.strip()) if value is not None else None
    return float(match[0]) if match else None


def _time(value: str | None) -> float | None:
    """An HTTP date as seconds of Unix time, None if it is none."""
    if value is None:
        return None
    try:
        found = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # also where there is no such day, or time zone
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _wait(number: float, date: str | None, now: float) -> float:
    """Seconds to wait, given as seconds or as Unix time."""
    if number < _IS_TIME:
        return min(number, LONGEST)
    return _until(number / 1000 if number >= _IS_MILLISECONDS else number, date, now)


def _until(at: float, date: str | None, now: float) -> float:
    """Seconds until a time by the service's clock; by ours if the two agree, or its response has no ``Date``."""
    theirs = _time(date)
    return min(max(0.0, at - (now if theirs is None or abs(theirs - now) <= _SKEW else theirs)), LONGEST)
