"""Fixed window: a count per calendar window, reset at the start of the next one.

A state is the usage of the window and its remaining µs. Around a boundary, twice the count can pass. Windows begin at multiples
of the period since 1970-01-01 UTC; months and windows with ``align`` follow a `Calendar`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from struct import pack
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from limitgate.algorithms.base import MAX_USED, LimitNumbers, Load, Straight, always
from limitgate.messages.text import meant

REPLY_FIELDS = 2
CAN_WAIT = False
MAX_TURNS = 0
refusal_is_stable = always
LOAD = Load(3, 2, 2)
"""Measured in calls of 32: charge 14 µs, adjustment 16 µs."""

FIRST_REQUEST = "first-request"
UTC_DAYS = "utc"
ALIGNED = (UTC_DAYS, FIRST_REQUEST)
_BY_CLOCK, _BY_FIRST_REQUEST, _BY_DATE = 0, 1, 2

State = tuple[int, int]

STRAIGHT: Straight | None = Straight(
    kept="used{n}, left{n},",
    state="(used{n}, left{n}),",
    row="burst{n}, period{n}, by_first{n},",
    row_of=lambda limit, _: (limit.burst, limit.period_us, limit.align == FIRST_REQUEST),
    advance="""
    if elapsed >= left{n}:
        used{n} = 0
    if by_first{n}:
        left{n} = left{n} - elapsed if used{n} else period{n}
    else:
        left{n} = period{n} - now % period{n}
    """,
    fits="used{n} + cost <= burst{n}",
    charged="used{n} + cost, left{n},",
    refund=None,
    asked=lambda limit, _, cost: pack("<4d", *encode_charge(limit, cost, 0)[:4]),
    reported="used{n}, left{n},",
    reported_state="(used{n}, left{n}),",
)


def check(limit: LimitNumbers) -> str | None:
    if limit.burst != limit.count:
        return "no burst: all of a window's requests may come at once"
    if limit.months and limit.align == FIRST_REQUEST:
        return "align utc or a time zone, because a calendar month can't begin at the first request"
    if limit.align in (None, *ALIGNED):
        return None
    if not is_zone(limit.align):
        return f"align utc, first-request or a time zone such as Europe/Berlin, not {limit.align!r:.80}{_cure(limit.align)}"
    if limit.period % DAY:
        return "a period of whole days for windows in a time zone; shorter windows begin by UTC"
    return None


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, limit: LimitNumbers) -> State:
    return 0, _left(0, 0, now, limit)


def advance(state: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State:
    """Advance the window. Without ``now``, the next window has an approximate length."""
    used, left = state
    used, left = (used, left - elapsed_us) if elapsed_us < left else (0, limit.period_us)
    return used, left if now is None else _left(used, left, now, limit)


def charged(state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:
    return state[0] + cost, state[1]


def apply_adjustment(state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State:
    used, left = state
    return (min(max(0, used - back), MAX_USED), left) if back < 0 or elapsed_us < grace_us else state


def grace_us(state: State, limit: LimitNumbers) -> int:
    return state[1]


def remaining(state: State, limit: LimitNumbers) -> int:
    return max(0, limit.burst - state[0])


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    return limit.burst - state[0] - cost, state[1]


def used(state: State, limit: LimitNumbers) -> int:
    return state[0]


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    if state[0] + cost <= limit.burst or not cost:
        return 0
    return None if cost > limit.burst else state[1]


def refill_us(state: State, limit: LimitNumbers) -> int:
    return state[1] if state[0] else 0


def date(limit: LimitNumbers) -> int:
    """Return the end of the calendar window, because Redis has no calendar."""
    calendar = _calendar(limit)
    return 0 if calendar is None else calendar.end(time.time_ns() // 1000)


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:
    how = _BY_DATE if date else _BY_FIRST_REQUEST if limit.align == FIRST_REQUEST else _BY_CLOCK
    calendar = _calendar(limit) if date else None
    ends = [0, 0, 0] if calendar is None else [calendar.begin(date), date, calendar.end(date)]
    return limit.burst, min(cost, limit.burst + 1), limit.period_us, how, *ends


def decode_state(facts: Sequence[int]) -> State:
    return facts[0], facts[1]


def _left(used: int, left: int, now: int, limit: LimitNumbers) -> int:
    if limit.align == FIRST_REQUEST:
        return left if used else limit.period_us
    calendar = _calendar(limit)
    return limit.period_us - now % limit.period_us if calendar is None else calendar.end(now) - now


def _calendar(limit: LimitNumbers) -> Calendar | None:
    if limit.align == FIRST_REQUEST:
        return None
    if not limit.months and (limit.align is None or (limit.align == UTC_DAYS and limit.period % WEEK)):
        return None
    return Calendar(limit.align or UTC_DAYS, limit.period, limit.months)


def _cure(align: object) -> str:
    zones = sorted(filter(is_zone, available_timezones()))
    if not zones:
        return "; this system knows no time zones: pip install tzdata"
    towns = {zone.rpartition("/")[2]: zone for zone in zones}
    near = meant(align, [*ALIGNED, *zones]) or towns.get(meant(str(align).rpartition("/")[2].replace(" ", "_"), towns) or "")
    return "" if near is None else f"; did you mean {near!r}?"


DAY = 86_400
WEEK = 7 * DAY
MAX_MONTHS = 12
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - wall-clock time
_MONDAY = datetime(1970, 1, 5)  # noqa: DTZ001 - see above
_OF_MACHINES = ("localtime", "posixrules")
"""Zone names that depend on the machine."""
_UTC = "utc"


class Calendar(NamedTuple):
    """Windows of ``months``, or of ``seconds`` if ``months`` is 0. Times are Unix µs.

    Zones other than UTC need windows of whole days, which have 23 or 25 hours when clocks change. Weeks begin on Monday.
    """

    zone: str
    """``utc`` or the name of a time zone."""
    seconds: int
    months: int = 0

    def begin(self, end: int) -> int:
        return self._moment(self._number(end - 1))

    def end(self, now: int) -> int:
        return self._moment(self._number(now) + 1)

    def _number(self, now: int) -> int:
        local = datetime.fromtimestamp(now // 1_000_000, _zone(self.zone)).replace(tzinfo=None)
        if self.months:
            number = ((local.year - _EPOCH.year) * 12 + local.month - 1) // self.months
        else:
            number = (local - self._first) // timedelta(seconds=self.seconds)
        return number if now < self._moment(number + 1) else number + 1

    def _moment(self, number: int) -> int:
        """Return the start of a window. If the clock change skips midnight, the window starts at the change."""
        if self.months:
            years, months = divmod(number * self.months, 12)
            local = _EPOCH.replace(year=_EPOCH.year + years, month=1 + months)
        else:
            local = self._first + number * timedelta(seconds=self.seconds)
        return int(local.replace(tzinfo=_zone(self.zone)).astimezone(UTC).timestamp()) * 1_000_000

    @property
    def _first(self) -> datetime:
        return _EPOCH if self.seconds % WEEK else _MONDAY


def is_zone(name: object) -> bool:
    """True if the zone is the same on every machine."""
    try:
        return isinstance(name, str) and name not in _OF_MACHINES and bool(_zone(name))
    except (ZoneInfoNotFoundError, ValueError, OSError):  # for unknown names and for folders
        return False


@lru_cache(maxsize=MAX_MONTHS)
def longest_days(months: int) -> int:
    firsts = [_EPOCH.replace(year=1999 + month // 12, month=1 + month % 12) for month in range(24 + months)]
    return max([(end - begin).days for begin, end in zip(firsts, firsts[months:])])


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo:
    return UTC if name == _UTC else ZoneInfo(name)
