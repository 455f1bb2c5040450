"""Windows of the calendar: when the one begins and ends that a time is in, by the wall clock of a time zone. Pure.

A day is as long as it is in the zone, 23 or 25 hours when clocks change. Weeks begin on Monday, months on their first day, and
several of them are counted from 1970: ``3 months`` are the quarters of a year. Times are in Unix µs.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAY = 86_400
WEEK = 7 * DAY
MAX_MONTHS = 12
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a time of the wall clock
_MONDAY = datetime(1970, 1, 5)  # noqa: DTZ001 - see above
_OF_MACHINES = ("localtime", "posixrules")
"""Names under which each machine has a time zone of its own."""
_UTC = "utc"


class Calendar(NamedTuple):
    """Windows of so many ``months``, or if that is 0 of ``seconds``, which are whole days unless the zone is UTC."""

    zone: str
    """``utc`` or the name of a time zone."""
    seconds: int
    months: int = 0

    def begin(self, end: int) -> int:
        """Return when the window begins that ends then."""
        return self._moment(self._number(end - 1))

    def end(self, now: int) -> int:
        """Return when the window ends that a time is in."""
        return self._moment(self._number(now) + 1)

    def _number(self, now: int) -> int:
        """Number of windows that have begun by a time since 1970.

        If clocks go back over a midnight, its window has begun all the same.
        """
        local = datetime.fromtimestamp(now // 1_000_000, _zone(self.zone)).replace(tzinfo=None)
        if self.months:
            number = ((local.year - _EPOCH.year) * 12 + local.month - 1) // self.months
        else:
            number = (local - self._first) // timedelta(seconds=self.seconds)
        return number if now < self._moment(number + 1) else number + 1

    def _moment(self, number: int) -> int:
        """Return when a window begins; if clocks skip its midnight, when they do."""
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
    """Return true for the name of a time zone that is the same on every machine."""
    try:
        return isinstance(name, str) and name not in _OF_MACHINES and bool(_zone(name))
    except (ZoneInfoNotFoundError, ValueError, OSError):  # what zoneinfo raises for unknown names, and for folders
        return False


@lru_cache(maxsize=MAX_MONTHS)
def longest_days(months: int) -> int:
    """Return the days of the longest period of so many calendar months."""
    firsts = [date(1999 + month // 12, 1 + month % 12, 1) for month in range(24 + months)]
    return max([(end - begin).days for begin, end in zip(firsts, firsts[months:])])


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo:
    return UTC if name == _UTC else ZoneInfo(name)
