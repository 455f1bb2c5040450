"""Calendar windows: start and end of the window at a time, by the wall clock of a time zone. Pure.

Days have 23 or 25 hours when clocks change. Weeks begin on Monday. Multiples count from 1970. Times are in Unix µs.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAY = 86_400
WEEK = 7 * DAY
MAX_MONTHS = 12
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - wall-clock time
_MONDAY = datetime(1970, 1, 5)  # noqa: DTZ001 - see above
_OF_MACHINES = ("localtime", "posixrules")
"""Time zone names with a machine-specific meaning."""
_UTC = "utc"


class Calendar(NamedTuple):
    """Windows of ``months``, or if 0 of ``seconds``: whole days unless the zone is UTC."""

    zone: str
    """``utc`` or the name of a time zone."""
    seconds: int
    months: int = 0

    def begin(self, end: int) -> int:
        """Return the start of the window with this end."""
        return self._moment(self._number(end - 1))

    def end(self, now: int) -> int:
        """Return the end of the window at a time."""
        return self._moment(self._number(now) + 1)

    def _number(self, now: int) -> int:
        """Return the number of windows that began since 1970. A clock change doesn't reopen a window."""
        local = datetime.fromtimestamp(now // 1_000_000, _zone(self.zone)).replace(tzinfo=None)
        if self.months:
            number = ((local.year - _EPOCH.year) * 12 + local.month - 1) // self.months
        else:
            number = (local - self._first) // timedelta(seconds=self.seconds)
        return number if now < self._moment(number + 1) else number + 1

    def _moment(self, number: int) -> int:
        """Return the start of a window, at the clock change if its midnight is skipped."""
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
    """Return True for the name of a time zone that is the same on every machine."""
    try:
        return isinstance(name, str) and name not in _OF_MACHINES and bool(_zone(name))
    except (ZoneInfoNotFoundError, ValueError, OSError):  # zoneinfo raises these for unknown names and for folders.
        return False


@lru_cache(maxsize=MAX_MONTHS)
def longest_days(months: int) -> int:
    """Return the maximum length in days of a period of calendar months."""
    firsts = [date(1999 + month // 12, 1 + month % 12, 1) for month in range(24 + months)]
    return max([(end - begin).days for begin, end in zip(firsts, firsts[months:])])


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo:
    return UTC if name == _UTC else ZoneInfo(name)
