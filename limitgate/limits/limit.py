"""Limits: a count per period with a burst, in integers; durations in text. Pure.

A request costs ``period_us`` ticks, and ``count`` ticks drain per microsecond, so that all amounts in GCRA are whole ticks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from math import gcd
from typing import Any, TypeVar, cast

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.fixed_window import MAX_MONTHS, longest_days
from limitgate.algorithms.gcra import MAX_OWED_US
from limitgate.errors import ConfigError, Field, called_as
from limitgate.messages.text import expected_of

SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604_800}
"""A ``fixed_window`` also accepts `MONTH`."""
MONTH = "month"

MAX_PERIOD = 366 * SECONDS["day"]
MAX_RATE = 1_000_000
"""Maximum of requests per second; keeps Lua's doubles exact."""
MAX_REFILL_US = 10 * MAX_PERIOD * 1_000_000
"""Maximum time in µs for an empty bucket to fill."""
ABBREVIATIONS = {
    "s": "second",
    "sec": "second",
    "m": "minute",
    "min": "minute",
    "h": "hour",
    "hr": "hour",
    "d": "day",
    "w": "week",
    "wk": "week",
}
_AT_ONCE = re.compile(r"\s*(?P<count>[0-9]{1,40})\s+at\s+once\s*", re.ASCII | re.IGNORECASE)
_LIMIT = re.compile(
    r"\s*(?P<count>[0-9]{1,40})\s*(?:/|\bper\b)\s*(?:(?P<many>[0-9]{1,40})\s*)?(?P<unit>[a-z]{1,10})"
    r"(?:\s+burst\s+(?P<burst>[0-9]{1,40}))?\s*",
    re.ASCII | re.IGNORECASE,
)
_EXPECTED = "expected for example '100/minute', '5 per 15 minutes', '10/s burst 20' or '20 at once'"
_OPTIONS = ("burst", "algorithm", "lease", "align", "borrow", "warm_up")
NAMES = tuple([name for name, algorithm in ALGORITHMS.items() if algorithm.IS_LIMIT and name != "concurrency"])


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Limit:
    """``count`` requests per ``period`` seconds. A full bucket admits ``burst`` requests at once.

    Examples: ``Limit("100/minute")``, ``Limit("10/s burst 20")``, ``Limit("5 per 15 minutes")``. ``burst`` defaults to the
    count; a count of 0 refuses every request. ``Limit("1000/month", algorithm="fixed_window")`` counts by calendar months.
    ``Limit("20 at once")`` limits requests in flight and has no period.

    Decisions are exact up to 1,000,000 requests per second and periods up to 366 days. Raises `ConfigError` beyond that, and
    for invalid text.

    With ``lease``, a process takes that many requests from Redis in advance, for at most a second. The limit is never exceeded,
    but up to ``lease`` requests per process may remain unused. ``borrow`` admits any cost if one request fits; later requests
    pay for it. With ``warm_up`` (``10`` or ``"10s"``), an idle limit starts at a third of its rate and reaches the full rate
    after that time.
    """

    count: int
    """Requests per period; 0 refuses all."""
    period: int
    """Seconds; for months, the longest possible; 0 for requests in flight."""
    months: int
    """Calendar months; 0 for seconds."""
    burst: int
    """Requests that a full bucket admits at once. Defaults to the count."""
    algorithm: str
    """Counting algorithm, by default that of the rule or ``gcra``. See docs/algorithms.md."""
    lease: int
    """Requests that a process takes from Redis in advance; 0: none."""
    align: str | None
    """Start of a ``fixed_window``: ``utc``, a time zone, or ``first-request``. Default: multiples of the period."""
    borrow: bool
    """True to admit any cost if one request fits. Later requests pay for it."""
    warm_up: float | None
    """Seconds, or ``10s``, in which an idle limit rises from a third of its rate to the full rate."""
    says_algorithm: bool = field(compare=False)
    """True if the limit names its algorithm, so that the rule's is ignored."""
    period_us: int = field(compare=False)
    """Also a request's weight in ticks."""
    capacity: int = field(compare=False)
    """Ticks."""
    ceiling: int = field(compare=False)
    """Maximum debt in ticks."""
    full: int = field(compare=False)
    """Stored ticks of idle time, see ``warm_up``."""
    most: int = field(compare=False)
    """Maximum cost."""
    series: int
    """Separates windows of equal periods. Limits that a provider reports use 0 to 3."""

    @called_as("Limit('5/minute', burst=10), or in text '5 per 15 minutes burst 10'")
    def __init__(
        self,
        text: str,
        *,
        burst: int | None = None,
        algorithm: str | None = None,
        lease: int = 0,
        align: str | None = None,
        borrow: bool = False,
        warm_up: Duration | None = None,
    ) -> None:
        self._read(text, burst=burst, algorithm=algorithm, lease=lease, align=align, borrow=borrow, warm_up=warm_up)
        check_months(self)

    def _read(
        self,
        text: str,
        *,
        burst: int | None = None,
        algorithm: str | None = None,
        lease: int = 0,
        align: str | None = None,
        borrow: bool = False,
        warm_up: Duration | None = None,
    ) -> None:
        """Read a limit. Doesn't call `check_months`, because a rule may set the algorithm."""
        count, period, months, written_burst = _parse(text)
        if algorithm is not None and (not period) is not (algorithm == "concurrency"):
            expected = "expected '20 at once' for the algorithm concurrency, a rate for others"
            raise ConfigError(f"limit {text!r} does not fit {algorithm!r:.40}, {expected}")
        if burst is not None and written_burst is not None:
            raise ConfigError(f"limit {text!r} gives its burst twice, expected it once")
        given = written_burst if burst is None else burst
        says, default = algorithm is not None or not period, "gcra" if period else "concurrency"
        if warm_up is not None:
            if given is not None or not period:
                raise ConfigError(f"limit {text!r} has warm_up, expected a rate without burst: one request passes at a time")
            if algorithm not in (None, "warm_up"):
                raise ConfigError(f"limit {text!r} has warm_up, expected no other algorithm; remove {algorithm!r:.40}")
            says, default, given, warm_up = True, "warm_up", 1, seconds_of(warm_up)
        if not count:
            if algorithm not in (None, "concurrency", *NAMES):
                raise ConfigError(f"limit {text!r}: {_no_algorithm(algorithm)}")
            # Requests never pass, so the algorithm is irrelevant.
            algorithm, given, lease, borrow, warm_up = "fixed_window" if period else "concurrency", 0, 0, False, None
        self._become(
            count=count,
            period=period,
            months=months,
            burst=count if given is None else given,
            algorithm=default if algorithm is None else algorithm,
            says_algorithm=says,
            lease=lease,
            align=align,
            borrow=borrow,
            warm_up=warm_up,
            series=0,
        )
        _check(self, text)

    def _become(self, **changes: Any) -> None:
        become = object.__setattr__
        for name, value in changes.items():
            become(self, name, value)
        count, period, burst = self.count, self.period, self.burst
        if type(count) is int and type(period) is int and type(burst) is int:
            weight, ceiling = period * 1_000_000, MAX_OWED_US * count
            full = 0 if self.warm_up is None else round(Fraction(self.warm_up) * 1_000_000) * count
            most = burst
            if self.borrow and weight:
                most = (ceiling - burst * weight) // weight + 1
            elif full and weight:
                most = (ceiling - full) // weight
            become(self, "period_us", weight)
            become(self, "capacity", burst * weight)
            become(self, "ceiling", ceiling)
            become(self, "full", full)
            become(self, "most", most)

    def leased(self, lease: int) -> Limit:
        """Return this limit with a lease. Raises `ConfigError`."""
        return self.having(lease=lease)

    def having(self, **options: Any) -> Limit:
        now = {name: getattr(self, name) for name in _OPTIONS[1:] if name != "algorithm" or self.says_algorithm}
        return Limit(str(self), **{**now, **options})

    def in_series(self, series: int) -> Limit:
        """Return this limit in another `series`."""
        other = copy(self)
        other._become(series=series)  # noqa: SLF001 - same class
        return other

    def share(self, processes: int, cost: int = 1) -> Limit:
        """Return one process' share of ``processes``. All shares together never exceed this limit.

        The rate is divided exactly, if necessary by a longer period: ``5/second`` for two is ``5 per 2 seconds``. The burst is
        rounded down, but not below one request, or below ``cost`` if the whole limit admits it. Window algorithms divide only
        the burst. A share has no lease, may exceed the usual range, and is for the memory store only.
        """
        common = gcd(self.count, processes)
        burst = max(self.burst // processes, min(max(1 if self.borrow else cost, 1), self.burst))
        shared, changes = copy(self), {"burst": burst, "lease": 0}
        if ALGORITHMS[self.algorithm] is gcra or self.warm_up:
            changes |= {"count": self.count // common, "period": self.period * (processes // common)}
        shared._become(**changes)  # noqa: SLF001 - same class
        return shared

    def less(self, kept: int) -> Limit:
        """Return this limit with ``kept`` requests less room. Raises `ConfigError` if none remains."""
        if not self.count:
            return self
        if kept >= self.burst:
            raise ConfigError(
                f"{self} admits {self.burst} at once, of which {kept} would be reserved for others, expected a smaller reserve"
            )
        lesser = copy(self)
        lesser._become(burst=self.burst - kept)  # noqa: SLF001 - same class
        return lesser

    def __str__(self) -> str:
        if not self.period:
            return f"{self.burst} at once"
        unit = self.unit
        periods = f"{self.months} months" if self.months else f"{self.period} seconds"
        rate = f"{self.count}/{unit}" if unit else f"{self.count} per {periods}"
        return rate if self.burst == self.count or self.warm_up else f"{rate} burst {self.burst}"

    def __repr__(self) -> str:
        text, *options = self.given.items()
        return f"Limit({text[1]!r}{''.join(f', {name}={value!r}' for name, value in options)})"

    @property
    def unit(self) -> str | None:
        """``minute`` or ``month``; None for other periods."""
        if self.months:
            return MONTH if self.months == 1 else None
        return next((unit for unit, seconds in SECONDS.items() if seconds == self.period), None)

    @property
    def given(self) -> dict[str, Any]:
        usual = "warm_up" if self.warm_up else "concurrency" if not self.period else "gcra" if self.count else "fixed_window"
        default = {"algorithm": usual, "lease": 0, "align": None, "borrow": False, "warm_up": None}
        options = {name: getattr(self, name) for name, value in default.items() if getattr(self, name) != value}
        return {"limit": str(self), **options}


def as_limit(value: object) -> Limit:
    """Convert a `Limit`, text, or a mapping with ``limit`` and its options. Raises `ConfigError`."""
    limit = limit_of_rule(value)
    check_months(limit)
    return limit


def limit_of_rule(value: object) -> Limit:
    """Return a limit without `check_months`, because a rule may set the algorithm."""
    if isinstance(value, Limit):
        return value
    if isinstance(value, str):
        return _written(value)
    if isinstance(value, dict):
        if "limit" not in value:
            raise ConfigError("a mapping without limit, expected for example {limit: 100/minute, algorithm: fixed_window}")
        for name in value:
            if name not in ("limit", *_OPTIONS):
                raise ConfigError(f"unknown field {name!r:.80} of a limit, {expected_of(name, ('limit', *_OPTIONS, 'cost'))}")
        return _written(value["limit"], **{name: option for name, option in value.items() if name != "limit"})
    if isinstance(value, list | tuple):
        raise ConfigError(f"{value!r:.80} is a {type(value).__name__}, {_expected_of_list(value)}")
    cure = "; a decorator takes its limits in parentheses" if callable(value) else ""
    if hasattr(value, "every_limit"):
        cure = "; one client's bucket of a rule is limiter.bucket(rule, ip='203.0.113.7')"
    raise ConfigError(f"{_shown(value)} is not a limit, {_EXPECTED}{cure}")


def _written(text: Any, **options: Any) -> Limit:
    limit = object.__new__(Limit)
    limit._read(text, **options)
    return limit


def check_months(limit: Limit, place: Field = ()) -> None:
    """Raise `ConfigError` for months, unless the algorithm is ``fixed_window``."""
    if limit.months and limit.algorithm != "fixed_window":
        said = f"not {limit.algorithm}" if limit.says_algorithm else f"and {limit.algorithm} is the default"
        raise ConfigError(
            f"limit '{limit}': only a fixed_window counts by calendar months, {said}; expected algorithm: fixed_window, or "
            "days, such as '30 days' for a month",
            place,
        )


def _expected_of_list(value: Sequence[object]) -> str:
    match value:
        case [int(count), int(seconds)]:
            return f"expected text such as '{count} per {seconds} seconds'"
        case [int(count), str(unit)]:
            return f"expected text such as '{count}/{unit:.20}'"
    return "expected each limit separately, such as '5/second', '100/minute'"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"an object of {type(value).__qualname__}"


def kept_as(algorithm: str) -> Limit:
    """Make an internal limit, such as that of a ban."""
    limit = copy(Limit("1/second"))
    limit._become(algorithm=algorithm)  # noqa: SLF001 - same class
    return limit


def _parse(text: object) -> tuple[int, int, int, int | None]:
    match = _LIMIT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        if isinstance(text, str) and (at_once := _AT_ONCE.fullmatch(text)):
            return int(at_once["count"]), 0, 0, None
        raise ConfigError(f"{text!r:.80} is not a limit, {_expected(text)}")
    if match["unit"] == "M":
        raise ConfigError(f"{text!r:.80} is not a limit: 'M' may be minute or month, expected 'minute' or 'm', or '{MONTH}'")
    unit = match["unit"].lower()
    unit = ABBREVIATIONS.get(unit, unit.removesuffix("s"))
    many, burst = int(match["many"] or 1), match["burst"]
    if unit not in SECONDS and unit != MONTH:
        *most, last = SECONDS
        raise ConfigError(
            f"{text!r:.80} is not a limit: {match['unit'].lower()!r} is not a unit, expected {', '.join(most)} or {last}, or "
            f"several of them, such as '30 days' for a month; a fixed_window also knows {MONTH}"
        )
    if not many:
        raise ConfigError(f"limit {text!r}: expected a period of at least 1 {'month' if unit == MONTH else 'second'}")
    if unit != MONTH:
        months, period = 0, many * SECONDS[unit]
    elif many <= MAX_MONTHS and MAX_MONTHS % many:
        raise ConfigError(f"limit {text!r}: {many} months don't divide a year, expected 1, 2, 3, 4, 6 or 12")
    elif many <= MAX_MONTHS:
        months, period = many, longest_days(many) * SECONDS["day"]
    else:
        raise ConfigError(f"limit {text!r}: expected a period of at most {MAX_MONTHS} months")
    return int(match["count"]), period, months, None if burst is None else int(burst)


def _expected(text: object) -> str:
    if isinstance(text, str) and re.match(r"\s*[0-9]{1,3}(?:[,_'][0-9]{3})+\s*(?:/|per\b)", text):
        return "expected the count in digits alone, such as '1000/minute'"
    if isinstance(text, str) and re.search(r"[,;&|]|\band\b", text):
        return "expected each limit separately, such as '5/second', '100/minute'"
    if isinstance(text, str) and re.match(r"\s*[0-9]*\.[0-9]", text):
        return "expected a whole count, such as '3 per 2 seconds'"
    if isinstance(text, str) and (bare := re.fullmatch(r"\s*([0-9]{1,18})\s*(?:/|per\b)\s*([0-9]{1,9})\s*", text)):
        return f"expected a unit after the period, such as '{bare[1]} per {bare[2]} seconds'"
    return _EXPECTED


def _check(limit: Limit, written: str) -> None:
    if (reason := _mistake(limit)) is not None:
        text = f"{limit.count} per {limit.period} s, burst {limit.burst!s:.40}"
        if limit.months:
            text = repr(written)
        elif limit.algorithm == "concurrency":
            text = f"{limit.count} at once"
        raise ConfigError(f"limit {text}{reason}")


def _mistake(limit: Limit) -> str | None:  # noqa: PLR0911 - one return per error
    count, period, burst, lease, algorithm = limit.count, limit.period, limit.burst, limit.lease, limit.algorithm
    for name, number in (("count", count), ("period", period), ("burst", burst)):
        is_zero = number == 0 and not count
        if (type(number) is not int or number < 1) and not is_zero and (name != "period" or algorithm != "concurrency"):
            return f": expected a {name} of at least 1, a whole number, not {number!r:.40}"
    if period > MAX_PERIOD:
        return ": expected a period of at most 366 days"
    if period and count > MAX_RATE * period:
        return f": expected at most {MAX_RATE:,} requests per second"
    if burst * period * 1_000_000 > MAX_REFILL_US * count:
        return ": expected a burst that refills within ten years at this rate"
    if type(lease) is not int or not 0 <= lease <= burst:
        return f": expected a lease of 0 to {burst} requests, not {lease!r:.40}"
    if algorithm != "concurrency" and algorithm not in NAMES:
        return f": {_no_algorithm(algorithm)}"
    return _mistake_by_algorithm(limit)


def _no_algorithm(algorithm: object) -> str:
    return f"{algorithm!r:.80} is not an algorithm, {expected_of(algorithm, NAMES)}"


def _mistake_by_algorithm(limit: Limit) -> str | None:
    algorithm, borrow = limit.algorithm, cast("object", limit.borrow)
    if limit.align is not None and algorithm != "fixed_window":
        return f": align {limit.align!r:.80} is for a fixed_window only, expected algorithm: fixed_window beside it"
    if type(borrow) is not bool:
        return f": expected true or false for borrow, not {borrow!r:.40}"
    if borrow and (limit.lease or ALGORITHMS[algorithm] is not gcra):
        what = "without a lease" if limit.lease else f"for gcra only, not for {algorithm}"
        return f": expected borrow {what}"
    if limit.lease and ALGORITHMS[algorithm] is not gcra:
        return f": expected no lease for a {algorithm}"
    expected = ALGORITHMS[algorithm].check(limit)
    return None if expected is None else f", {algorithm}: expected {expected}"


T = TypeVar("T")

Duration = float | str | timedelta
"""Seconds, or text with a unit."""

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
"""Milliseconds of each unit, which keep ``500ms`` exact."""
_WORDS = "|".join([unit if unit in ("ms", *"smhdw") else f"{unit}s?" for unit in UNITS])
PATTERN = rf"\s*(?!0[0-9]+(?:\.[0-9]+)?\s*$)([0-9]{{1,12}}(?:\.[0-9]{{1,12}})?)\s*({_WORDS})?\s*"
_DURATION = re.compile(PATTERN, re.ASCII)
EXPECTED = "expected seconds, or text such as '2s', '500ms', '1m', '1h', '1d' or '1w'"


def seconds_of(value: object) -> float:
    """Return a duration in seconds. Raises `ConfigError` for anything else, including negative and infinite values."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        unit = match[2] or "s"
        return float(match[1]) * (UNITS.get(unit) or UNITS[unit.removesuffix("s")]) / 1000
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ConfigError(f"{value!r:.80} is not a duration, {EXPECTED}")


def as_seconds(value: Duration | T, what: str) -> float | T:
    """Convert duration text or a `timedelta`; keep other values. Raises `ConfigError` for invalid text, true and false."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, str | bool):
        return value
    try:
        return seconds_of(value)
    except ConfigError:
        raise ConfigError(f"{what} is {value!r:.40}, {EXPECTED}") from None


LONGEST_TIMEOUT = 60
"""Seconds."""


def store_timeout(value: object) -> float:
    """Return the longest wait for a store in seconds. Raises `ConfigError` unless it is above 0 and at most a minute."""
    seconds = as_seconds(value, "timeout")
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_TIMEOUT:
        raise ConfigError(f"timeout is {value!r:.40}, expected seconds above 0, at most {LONGEST_TIMEOUT}")
    return seconds
