"""Rate fields of OpenAI, Azure, Anthropic and Groq. Pure.

Fields that are malformed, contradictory, or longer than `MOST_READ` count as missing. So does a window with contradictory
fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, TypeVar

from limitgate.limits.limit import MAX_RATE, SECONDS, Limit
from limitgate.outbound.response_fields import LONGEST, Field, answer_of, clock_of

Kind = Literal["requests", "tokens", "input_tokens", "output_tokens"]
T = TypeVar("T")

MOST_READ = 256
"""Characters."""
IMPLAUSIBLE = 10
"""A limit that changes by this factor needs two equal answers."""
_PAST = 5.0
"""Seconds; a reset further in the past is wrong."""
ROUNDING = 1000
"""Anthropic rounds remaining tokens to this number."""
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?", re.ASCII)
_DURATION = re.compile(
    r"(?=[0-9])(?:([0-9]{1,7})h)?(?:([0-9]{1,9})m(?!s))?(?:([0-9]{1,9})(?:\.([0-9]{1,9}))?s)?|"
    r"([0-9]{1,9})(?:\.([0-9]{1,9}))?(ms|us|\u00b5s|\u03bcs|\u00c2\u00b5s|\u00ce\u00bcs|ns)",
    re.ASCII,
)
"""Go's time.Duration. The micro sign may arrive as Latin-1."""
_PER_SECOND = {"ms": 1000, "ns": 1_000_000_000}
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})", re.ASCII
)
_OPENAI: tuple[tuple[Kind, str], ...] = (("requests", "requests"), ("tokens", "tokens"), ("tokens", "project-tokens"))
_ANTHROPIC: tuple[tuple[Kind, str], ...] = (
    ("requests", "requests"),
    ("tokens", "tokens"),
    ("input_tokens", "input-tokens"),
    ("output_tokens", "output-tokens"),
)
_RESOLUTION = 0.001
"""Resolution of OpenAI's resets, in seconds."""
_TOLERANCE = 1.25
"""Tolerated ratio of a computed period to a real one."""
_MINUTE, _DAY = SECONDS["minute"], SECONDS["day"]


class Window(NamedTuple):
    kind: Kind
    limit: int | None
    remaining: int | None
    reset_after: float | None
    """Seconds until the limit is full, or until Azure's window ends."""
    period: int | None
    """Seconds, if known."""


class Told(NamedTuple):
    status: int
    windows: tuple[Window, ...]
    retry_after: float | None
    """Seconds to wait; None for a success."""
    may_retry: bool | None

    @property
    def exhausted(self) -> float | None:
        """Seconds until all exhausted windows are full; None if no window is exhausted, or a reset is unknown."""
        return max(
            [each.reset_after for each in self.windows if each.remaining == 0 and each.reset_after is not None], default=None
        )


def told(status: int, field: Field, now: float, host: str = "") -> Told:
    """Read the limits of ``host`` at ``now`` (Unix seconds)."""
    windows = _anthropic_windows(field, now) or _openai_windows(field, host)
    return Told(status, windows, _retry_after(status, field, now), _may_retry(field))


def limit_of(window: Window) -> Limit | None:
    """Such as ``200000/minute``; None for an unknown period or a rate above `MAX_RATE`."""
    if window.limit is None or window.period is None or window.limit > MAX_RATE * window.period:
        return None
    return Limit(f"{window.limit}/{_UNITS[window.period]}")


_UNITS = {seconds: unit for unit, seconds in SECONDS.items() if unit != "week"}


class ToldLimit:
    """Limit of a provider, protected from wrong answers.

    A rate that changes tenfold needs two equal answers.
    """

    __slots__ = ("_suspect", "current")

    def __init__(self, current: Limit | None = None) -> None:
        self.current = current
        """None before the first answer."""
        self._suspect: Limit | None = None

    def hear(self, limit: Limit | None, *, twice: bool = False) -> bool:
        """Note the limit in an answer; None if it has none.

        Return True if the limit in force changes. With ``twice``, each limit needs two answers.
        """
        is_credible = limit is not None and not twice and (self.current is None or _is_plausible(limit, self.current))
        if limit is None or not (is_credible or limit == self._suspect):
            self._suspect = limit
            return False
        self._suspect = None
        is_new = self.current is None or (limit.count, limit.period) != (self.current.count, self.current.period)
        if is_new:
            self.current = limit
        return is_new


def _is_plausible(limit: Limit, current: Limit) -> bool:
    ours, theirs = current.count * limit.period, limit.count * current.period
    return ours == theirs or (ours < IMPLAUSIBLE * theirs and theirs < IMPLAUSIBLE * ours)


def duration(value: str) -> float | None:
    """Parse Go's duration, such as ``1h2m3.5s`` or ``12ms``, up to `LONGEST`; None for another value."""
    match = _DURATION.fullmatch(value) if len(value) <= 64 else None
    if match is None:
        return None
    hours, minutes, seconds, fraction, small, small_fraction, unit = match.groups()
    if unit:
        nanoseconds = _nanoseconds(small, small_fraction, _PER_SECOND.get(unit, 1_000_000))
    else:
        nanoseconds = (int(hours or 0) * 3600 + int(minutes or 0) * 60) * 10**9 + _nanoseconds(seconds or "0", fraction, 1)
    return _bounded(nanoseconds / 10**9)


def _nanoseconds(whole: str, fraction: str | None, per_second: int) -> int:
    digits = (fraction or "").ljust(9, "0")
    return int(whole + digits) // per_second


def _bounded(seconds: float) -> float | None:
    return seconds if seconds <= LONGEST else None


def _retry_after(status: int, field: Field, now: float) -> float | None:
    if status < 400:
        return None
    milliseconds = _agreed(field("retry-after-ms"), _decimal)
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    return answer_of(status, lambda name: field(name) if name in ("retry-after", "date") else None, now).retry_after


def _may_retry(field: Field) -> bool | None:
    return _agreed(field("x-should-retry"), {"true": True, "false": False}.get)


def _openai_windows(field: Field, host: str) -> tuple[Window, ...]:
    is_groq = host.partition(":")[0].endswith("groq.com") or field("x-groq-region") is not None
    is_azure = False
    windows = []
    for kind, name in _OPENAI:
        given, reset = field(f"x-ratelimit-limit-{name}"), field(f"x-ratelimit-reset-{name}")
        limit, remaining = _agreed(given, _count), _agreed(field(f"x-ratelimit-remaining-{name}"), _count)
        if given is not None and not limit:
            # Azure says 0 and -1 for unknown.
            limit, remaining = None, remaining or None
        is_azure = is_azure or _agreed(reset, _decimal) is not None
        after = _agreed(reset, _reset)
        windows.append(Window(kind, limit, remaining, after, None))
    known = [each for each in windows if _is_sound(each)]
    if is_groq:
        known = [each._replace(period=_DAY if each.kind == "requests" else _MINUTE) for each in known]
    elif not is_azure:
        known = [each._replace(period=_period(each)) for each in known]
    return tuple(known)


def _anthropic_windows(field: Field, now: float) -> tuple[Window, ...]:
    windows, date = [], field("date")
    clock = clock_of(date if date is None or len(date) <= MOST_READ else None, now)
    for kind, name in _ANTHROPIC:
        prefix = f"anthropic-ratelimit-{name}-"
        limit, remaining = _agreed(field(prefix + "limit"), _count), _agreed(field(prefix + "remaining"), _count)
        reset = _agreed(field(prefix + "reset"), _time)
        if limit and remaining and limit < remaining <= limit + ROUNDING:
            remaining = limit
        after = None if reset is None or reset - clock < -_PAST else _bounded(max(0.0, reset - clock))
        windows.append(Window(kind, limit or None, remaining, after, _MINUTE))
    return tuple([each for each in windows if _is_sound(each)])


def _is_sound(window: Window) -> bool:
    limit, remaining = window.limit, window.remaining
    return (limit, remaining) != (None, None) and (limit is None or remaining is None or remaining <= limit)


def _period(window: Window) -> int | None:
    if window.limit is None or window.remaining is None or not window.reset_after or window.remaining == window.limit:
        return None
    share = window.limit / (window.limit - window.remaining)
    least = (window.reset_after - _RESOLUTION) * share / _TOLERANCE
    most = (window.reset_after + _RESOLUTION) * share * _TOLERANCE
    found = [period for period in _UNITS if least <= period <= most]
    return found[0] if len(found) == 1 else None


def _agreed(value: str | None, read: Callable[[str], T | None]) -> T | None:
    if value is None or len(value) > MOST_READ:
        return None
    found = {read(line.strip()) for line in value.split(",")}
    return found.pop() if len(found) == 1 else None


def _count(value: str) -> int | None:
    return int(value) if _NUMBER.fullmatch(value) else None


def _decimal(value: str) -> float | None:
    return float(value) if _DECIMAL.fullmatch(value) else None


def _reset(value: str) -> float | None:
    seconds = _decimal(value)
    return duration(value) if seconds is None else _bounded(seconds) or None


def _time(value: str) -> float | None:
    if not _TIME.fullmatch(value):
        return None
    # Unix time has no leap seconds, so a leap second is the second after it.
    is_leap = value[17:19] == "60"
    try:
        at = datetime.fromisoformat((value[:17] + "59" + value[19:] if is_leap else value).upper())
        return (at + timedelta(seconds=is_leap)).timestamp()
    except (ValueError, OverflowError):
        return None
