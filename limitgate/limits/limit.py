"""Limits: a count per period with a burst, in integers. Knows no clock, no store and no HTTP.

One request weighs ``period_us`` ticks and time drains ``count`` ticks per microsecond, so every amount that
GCRA needs for this limit is a whole number of ticks (a tick is 1/count µs).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd
from typing import Any, cast

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.algorithms.calendar_windows import MAX_MONTHS, longest_days
from limitgate.algorithms.gcra import MAX_OWED_US
from limitgate.errors import ConfigError, Field, called_as
from limitgate.limits.duration import seconds_of
from limitgate.messages.suggestions import expected_of

SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604_800}
"""The units of any limit; others are written as ``5 per 15 minutes``. A ``fixed_window`` also knows the `MONTH`."""
MONTH = "month"
"""The unit of calendar months."""

MAX_PERIOD = 366 * SECONDS["day"]
MAX_RATE = 1_000_000
"""Requests per second up to which the arithmetic is exact in Lua's doubles, see docs/architecture.md."""
MAX_REFILL_US = 10 * MAX_PERIOD * 1_000_000
"""The longest time that an empty bucket may take to fill: ten times the longest period."""
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
"""Other spellings of units; the full ones may have an s, too."""
_AT_ONCE = re.compile(r"\s*(?P<count>[0-9]{1,18})\s+at\s+once\s*", re.ASCII | re.IGNORECASE)
_LIMIT = re.compile(
    r"\s*(?P<count>[0-9]{1,18})\s*(?:/|\bper\b)\s*(?:(?P<many>[0-9]{1,9})\s*)?(?P<unit>[a-z]{1,10})"
    r"(?:\s+burst\s+(?P<burst>[0-9]{1,18}))?\s*",
    re.ASCII | re.IGNORECASE,
)
_EXPECTED = "expected for example '100/minute', '5 per 15 minutes', '10/s burst 20' or '20 at once'"
_OPTIONS = ("burst", "algorithm", "lease", "align", "borrow", "warm_up")
NAMES = tuple([name for name, algorithm in ALGORITHMS.items() if algorithm.IS_LIMIT and name != "concurrency"])
"""The algorithms that a limit may have which has a period."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Limit:
    """``count`` requests per ``period`` seconds, of which ``burst`` may come at once from a full bucket.

    Written ``Limit("100/minute")``, ``Limit("10/s burst 20")``, ``Limit("5 per 15 minutes")``. ``burst`` defaults to the
    count. Raises `ConfigError` for text that is no limit, and for a limit outside the range in which every decision is
    exact: up to 1,000,000 requests per second and periods up to 366 days.

    A count of 0 refuses every request, whatever the other options. It is kept as a ``fixed_window`` of 0.

    ``Limit("1000/month", algorithm="fixed_window")`` counts by calendar months, and no other algorithm does.

    ``lease`` lets a process take up to so many requests from Redis in advance and admit them by itself for at most a second;
    what is left then goes back. No more is admitted for it, but up to ``lease`` requests per process may go unused.

    ``borrow`` lets a request pass that costs more than there is, as long as one request fits: the next ones pay for it.
    ``warm_up`` starts an idle limit at a third of its rate and lets it get faster for so long, ``10`` or ``"10s"``. Both are
    what Guava's limiters do.

    ``Limit("20 at once")`` is about requests in flight: a ``concurrency`` of 20, which has no period. A request takes one of
    the places when it comes and gives it back when it is over.
    """

    count: int
    """Requests in a period; 0 to refuse every request."""
    period: int
    """Seconds, of months those of the longest; 0 for requests in flight."""
    months: int
    """Calendar months in a period; 0 for a period of seconds."""
    burst: int
    """Requests that may come at once from a full bucket; the count if not given."""
    algorithm: str
    """Algorithm that counts requests, ``gcra`` if neither the limit nor its rule says; see docs/algorithms.md."""
    lease: int
    """Requests that a process may take from Redis in advance; 0 to ask for every one."""
    align: str | None
    """Where a ``fixed_window`` begins: ``utc``, a time zone, or ``first-request``; multiples of the period if not given."""
    borrow: bool
    """True if a request of any cost passes where one request fits, and the next ones pay for it."""
    warm_up: float | None
    """Seconds, or text such as ``10s``, in which an idle limit gets from a third of its rate to all of it."""
    says_algorithm: bool = field(compare=False)
    """True if the limit itself says how requests are counted, so that nobody else does."""
    period_us: int = field(compare=False)
    """The period in microseconds; also what one request weighs, in ticks."""
    capacity: int = field(compare=False)
    """Capacity of a full bucket in ticks: ``burst`` requests."""
    ceiling: int = field(compare=False)
    """The most that is remembered of a debt, in ticks: `MAX_OWED_US`."""
    full: int = field(compare=False)
    """The idle time that ``warm_up`` stores, in ticks; 0 without."""
    most: int = field(compare=False)
    """The most that a request may cost: ``burst``, or where the next ones pay for it, what can be remembered."""

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
        warm_up: float | str | None = None,
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
        warm_up: float | str | None = None,
    ) -> None:
        """Take on what was written. `check_months` is left to do, since a rule may have an algorithm for all its limits."""
        count, period, months, written_burst = _parse(text)
        if algorithm is not None and (not period) is not (algorithm == "concurrency"):
            message = f"limit {text!r}, {algorithm!r:.40}: expected '20 at once' for a concurrency, and for nothing else"
            raise ConfigError(message)
        if burst is not None and written_burst is not None:
            raise ConfigError(f"limit {text!r} gives its burst twice, expected it once")
        given = written_burst if burst is None else burst
        says, default = algorithm is not None or not period, "gcra" if period else "concurrency"
        if warm_up is not None:
            if given is not None or not period:
                raise ConfigError(f"limit {text!r} has warm_up, expected a rate without burst: one request passes at a time")
            if algorithm not in (None, "warm_up"):
                raise ConfigError(f"limit {text!r} has warm_up, expected no other algorithm than that, not {algorithm!r:.40}")
            says, default, given, warm_up = True, "warm_up", 1, seconds_of(warm_up)
        if not count:
            if algorithm not in (None, "concurrency", *NAMES):
                raise ConfigError(f"limit {text!r}: {_no_algorithm(algorithm)}")
            # As nothing ever passes, it does not matter how requests are counted.
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
        )
        _check(self)

    def _become(self, **changes: Any) -> None:
        """Take on values, and what follows from them."""
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
        """This limit with a lease. Raises `ConfigError` for one that it cannot have."""
        return self.having(lease=lease)

    def having(self, **options: Any) -> Limit:
        """This limit with other options. Raises `ConfigError` as `Limit` does."""
        now = {name: getattr(self, name) for name in _OPTIONS[1:] if name != "algorithm" or self.says_algorithm}
        return Limit(str(self), **{**now, **options})

    def share(self, processes: int, cost: int = 1) -> Limit:
        """Share that one of so many ``processes`` may grant by itself, so that all together grant no more than this limit.

        The rate is divided exactly: the period stays where the count can be divided, and gets longer where it cannot, so
        ``100/minute`` among four is ``25/minute`` and ``5/second`` among two is ``5 per 2 seconds``. The share is a limit like
        any other, and what is reported of it is what this process will do; the whole limit's numbers would be promises that
        it cannot keep. The burst is divided and rounded down, but a request of this ``cost`` stays possible if it was, and
        one request always does: only there may all processes together exceed the burst.

        A share may have a longer period, and take longer to fill, than other limits: it is for stores that count in whole
        numbers of any size, not for Redis. It has no lease. Of algorithms that count in windows, and so have no rate,
        only the burst is divided: it is all that they let through.
        """
        common = gcd(self.count, processes)
        burst = max(self.burst // processes, min(max(1 if self.borrow else cost, 1), self.burst))
        shared, changes = copy(self), {"burst": burst, "lease": 0}
        if ALGORITHMS[self.algorithm] is gcra or self.warm_up:
            changes |= {"count": self.count // common, "period": self.period * (processes // common)}
        shared._become(**changes)  # noqa: SLF001 - it is one of ours
        return shared

    def less(self, kept: int) -> Limit:
        """This limit with so much room less, which is kept for others. Raises `ConfigError` where nothing would be left."""
        if not self.count:
            return self
        if kept >= self.burst:
            raise ConfigError(
                f"{self} has room for {self.burst} of which {kept} would be kept for others, expected less than that"
            )
        lesser = copy(self)
        lesser._become(burst=self.burst - kept)  # noqa: SLF001 - it is one of ours
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
        """The unit that its period is one of, such as ``minute`` or ``month``; None for another period."""
        if self.months:
            return MONTH if self.months == 1 else None
        return next((unit for unit, seconds in SECONDS.items() if seconds == self.period), None)

    @property
    def given(self) -> dict[str, Any]:
        """A mapping that `as_limit` makes this limit of."""
        usual = "warm_up" if self.warm_up else "concurrency" if not self.period else "gcra" if self.count else "fixed_window"
        default = {"algorithm": usual, "lease": 0, "align": None, "borrow": False, "warm_up": None}
        options = {name: getattr(self, name) for name, value in default.items() if getattr(self, name) != value}
        return {"limit": str(self), **options}


def as_limit(value: object) -> Limit:
    """``value`` as a `Limit`: one already, text, or a mapping of ``limit`` and the options of `Limit`.

    Raises `ConfigError` for anything else.
    """
    limit = limit_of_rule(value)
    check_months(limit)
    return limit


def limit_of_rule(value: object) -> Limit:
    """`as_limit` for a rule, which may have an algorithm for its limits: `check_months` is left to do."""
    if isinstance(value, Limit):
        return value
    if isinstance(value, str):
        return _written(value)
    if isinstance(value, dict):
        for name in value:
            if name not in ("limit", *_OPTIONS):
                raise ConfigError(f"unknown field {name!r:.80} of a limit, {expected_of(name, ('limit', *_OPTIONS))}")
        if "limit" not in value:
            raise ConfigError("a mapping without limit, expected for example {limit: 100/minute, algorithm: fixed_window}")
        return _written(value["limit"], **{name: option for name, option in value.items() if name != "limit"})
    if isinstance(value, list | tuple):
        raise ConfigError(f"{value!r:.80} is a {type(value).__name__}, {_expected_of_list(value)}")
    cure = "; a decorator takes its limits in parentheses" if callable(value) else ""
    if hasattr(value, "every_limit"):
        cure = "; one client's bucket of a rule is limiter.bucket(rule, ip='203.0.113.7')"
    raise ConfigError(f"{_shown(value)} is not a limit, {_EXPECTED}{cure}")


def _written(text: Any, **options: Any) -> Limit:
    """Make a `Limit` without `check_months`."""
    limit = object.__new__(Limit)
    limit._read(text, **options)
    return limit


def check_months(limit: Limit, place: Field = ()) -> None:
    """Raise `ConfigError`, of a limit at this place, for calendar months of another algorithm than a ``fixed_window``."""
    if limit.months and limit.algorithm != "fixed_window":
        said = f"not of {limit.algorithm}" if limit.says_algorithm else f"and {limit.algorithm} is the default"
        raise ConfigError(
            f"limit '{limit}': calendar months are periods of a fixed_window, {said}; expected algorithm: fixed_window, or "
            "days, such as '30 days' for a month",
            place,
        )


def _expected_of_list(value: Sequence[object]) -> str:
    """What was expected in the place of a list that is no limit."""
    match value:
        case [int(count), int(seconds)]:
            return f"expected text such as '{count} per {seconds} seconds'"
        case [int(count), str(unit)]:
            return f"expected text such as '{count}/{unit:.20}'"
    return "expected each limit by itself, such as '5/second', '100/minute'"


def _shown(value: object) -> str:
    """What stands where a limit should, if it is short, else its kind."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"an object of {type(value).__qualname__}"


def kept_as(algorithm: str) -> Limit:
    """Make the stand-in for a limit that nobody could write, that of a ban."""
    limit = copy(Limit("1/second"))
    limit._become(algorithm=algorithm)  # noqa: SLF001 - it is one of ours
    return limit


def _parse(text: object) -> tuple[int, int, int, int | None]:
    """Count, period in seconds, period in months, and burst."""
    match = _LIMIT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        if isinstance(text, str) and (at_once := _AT_ONCE.fullmatch(text)):
            return int(at_once["count"]), 0, 0, None
        raise ConfigError(f"{text!r:.80} is not a limit, {_expected(text)}")
    unit = match["unit"].lower()
    unit = ABBREVIATIONS.get(unit, unit.removesuffix("s"))
    many, burst = int(match["many"] or 1), match["burst"]
    if unit not in SECONDS and unit != MONTH:
        *most, last = SECONDS
        raise ConfigError(
            f"{text!r:.80} is not a limit: {match['unit'].lower()!r} is no unit, expected {', '.join(most)} or {last}, or "
            f"several of them, such as '30 days' for a month; a fixed_window also knows {MONTH}"
        )
    if not many:
        raise ConfigError(f"limit {text!r}: expected a period of at least 1 {'month' if unit == MONTH else 'second'}")
    if unit != MONTH:
        months, period = 0, many * SECONDS[unit]
    elif many <= MAX_MONTHS:
        months, period = many, longest_days(many) * SECONDS["day"]
    else:
        raise ConfigError(f"limit {text!r}: expected a period of at most {MAX_MONTHS} months")
    return int(match["count"]), period, months, None if burst is None else int(burst)


def _expected(text: object) -> str:
    """What was expected in the place of text that is no limit."""
    if isinstance(text, str) and re.match(r"\s*[0-9]{1,3}(?:[,_'][0-9]{3})+\s*(?:/|per\b)", text):
        return "expected the count in digits alone, such as '1000/minute'"
    if isinstance(text, str) and re.search(r"[,;&|]|\band\b", text):
        return "expected each limit by itself, such as '5/second', '100/minute'"
    if isinstance(text, str) and re.match(r"\s*[0-9]*\.[0-9]", text):
        return "expected a whole count, such as '3 per 2 seconds'"
    if isinstance(text, str) and (bare := re.fullmatch(r"\s*([0-9]{1,18})\s*(?:/|per\b)\s*([0-9]{1,9})\s*", text)):
        return f"expected a unit behind the period, such as '{bare[1]} per {bare[2]} seconds'"
    return _EXPECTED


def _check(limit: Limit) -> None:
    """Raise `ConfigError` for a limit that is out of range, or has options that do not go together."""
    if (reason := _mistake(limit)) is not None:
        in_flight = limit.algorithm == "concurrency"
        text = f"{limit.count} at once" if in_flight else f"{limit.count} per {limit.period} s, burst {limit.burst}"
        raise ConfigError(f"limit {text}{reason}")


def _mistake(limit: Limit) -> str | None:  # noqa: PLR0911 - as many mistakes
    """The end of the message about what is wrong with a limit, None if nothing is."""
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
        return ": expected a burst that this rate earns back within ten years"
    if type(lease) is not int or not 0 <= lease <= burst:
        return f": expected a lease of 0 to {burst} requests, not {lease!r:.40}"
    if algorithm != "concurrency" and algorithm not in NAMES:
        return f": {_no_algorithm(algorithm)}"
    return _mistake_by_algorithm(limit)


def _no_algorithm(algorithm: object) -> str:
    return f"{algorithm!r:.80} is no algorithm, {expected_of(algorithm, NAMES)}"


def _mistake_by_algorithm(limit: Limit) -> str | None:
    """`_mistake` about options that not every algorithm has."""
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
