"""What limiters that count should answer, in plain integers, from a list of all that was ever admitted.

As naive as can be, and with nothing of the package: every admission is looked at for every question, waits are found
by trying, and the days of a time zone by looking at its calendar, minute by minute where it changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

US = 1_000_000
DAY = 86_400


class Answer(NamedTuple):
    """What is to be said to a question; all times in µs."""

    allowed: bool
    remaining: int
    used: int
    retry_after: int | None
    """None for never."""
    reset_after: int


@dataclass
class Admitted:
    """So many requests that were admitted together, or are owed."""

    cost: int
    made: int
    """When, by the clock that the bucket goes by."""
    ends: int = 0
    """When the window ends that it was admitted in; for a log, the moment that it is known by."""


@dataclass
class Counter:
    """One bucket of some limiter. ``clock`` says how time has passed for it: a clock that steps back stands still for it."""

    count: int
    period: int
    """µs."""
    admitted: list[Admitted] = field(default_factory=list)
    written: int | None = None
    """When somebody last changed it, None if nobody has."""

    def ask(self, now: int, cost: int, verb: str = "spend", owed: int = 0, given_back: Admitted | None = None) -> Answer:
        """What to say to a request; requests may be owed on top before, or some of an admission given back."""
        if self.written is not None and now < self.written:
            self.stepped(now)
            self.written = now
        if verb == "reset":
            self.admitted.clear()
        if given_back is not None:
            self.give_back(given_back, owed, now)
        elif owed:
            self.admit(owed, now)
        if owed or verb == "reset":
            self.written = now
        wait = self.wait(now, cost)
        if verb == "spend" and cost and wait == 0:
            self.admit(cost, now)
            self.written = now
        used = self.used(now)
        return Answer(wait == 0, max(0, self.count - used), used, wait, self.reset(now))

    def give_back(self, admission: Admitted, cost: int, now: int) -> None:
        """Take so much from an admission that still counts."""
        if any(each is admission for each in self.admitted) and self.counts(admission, now):
            admission.cost = max(0, admission.cost - cost)

    def wait(self, now: int, cost: int) -> int | None:
        """The shortest wait after which a cost fits, by trying all at which anything changes."""
        if cost > self.count:
            return None
        return next(after for after in self.changes(now, cost) if not cost or self.used(now + after) + cost <= self.count)

    # --- what limiters differ in ---

    def stepped(self, now: int) -> None:
        """The clock has gone back to a time before the bucket was written."""
        raise NotImplementedError

    def admit(self, cost: int, now: int) -> None:
        raise NotImplementedError

    def counts(self, admission: Admitted, now: int) -> bool:
        raise NotImplementedError

    def used(self, now: int) -> int:
        raise NotImplementedError

    def changes(self, now: int, cost: int) -> list[int]:
        """How long from now less may be used, in order, beginning with 0."""
        raise NotImplementedError

    def reset(self, now: int) -> int:
        """How long from now nothing is used any more."""
        last = [after for after in self.changes(now, 1) if self.used(now + after) == 0]
        return min(last)


@dataclass
class FixedWindow(Counter):
    """So many requests in each window. ``end`` says when the window of a time ends; without, the first request begins it."""

    end: Callable[[int], int] | None = None

    def stepped(self, now: int) -> None:
        for each in self.admitted:
            left = each.ends - self.written
            each.ends = now if left <= 0 else self.end(now) if self.end else now + left

    def admit(self, cost: int, now: int) -> None:
        ends = self.end(now) if self.end else max([each.ends for each in self._present(now)], default=now + self.period)
        self.admitted.append(Admitted(cost, now, ends))

    def counts(self, admission: Admitted, now: int) -> bool:
        return admission.ends > now

    def used(self, now: int) -> int:
        return sum(each.cost for each in self._present(now))

    def changes(self, now: int, cost: int) -> list[int]:
        return sorted({0, *[each.ends - now for each in self._present(now)]})

    def _present(self, now: int) -> list[Admitted]:
        return [each for each in self.admitted if each.cost and each.ends > now]


@dataclass
class SlidingWindow(Counter):
    """Windows of the calendar; of the one before, the share counts that a window which ends now overlaps."""

    def stepped(self, now: int) -> None:
        later, end = self.written, self.end(now)
        for each in self.admitted:
            if each.ends > later:
                each.ends = end
            elif each.ends > later - self.period:
                each.ends = end - self.period
            else:
                each.ends = end - 2 * self.period

    def admit(self, cost: int, now: int) -> None:
        self.admitted.append(Admitted(cost, now, self.end(now)))

    def counts(self, admission: Admitted, now: int) -> bool:
        return admission.ends + self.period > now

    def used(self, now: int) -> int:
        end = self.end(now)
        current = sum(each.cost for each in self.admitted if each.ends >= end)
        previous = sum(each.cost for each in self.admitted if each.ends == end - self.period)
        whole, rest = divmod(previous * (end - now), self.period)
        return current + whole + (rest > 0)

    def changes(self, now: int, cost: int) -> list[int]:
        """The ends of both windows, and the moments in them at which a cost would just fit, give or take two microseconds."""
        end = self.end(now)
        found = {0, end - now, end + self.period - now}
        for ends in (end, end + self.period):
            present = sum(each.cost for each in self.admitted if each.ends >= ends)
            before = sum(each.cost for each in self.admitted if each.ends == ends - self.period)
            if before:
                about = ends - (self.count - cost - present) * self.period // before - now
                found |= {about + off for off in range(-2, 3) if max(now, ends - self.period) <= now + about + off <= ends}
        return sorted(found)

    def end(self, now: int) -> int:
        """When the window of a time ends."""
        return multiples_of(self.period)(now)


@dataclass
class SlidingLog(Counter):
    """Whatever was admitted less than a period ago counts. Its clock stands still where the store's steps back."""

    ahead: int = 0
    """By how much its clock is ahead of the store's."""

    def ask(self, now: int, cost: int, verb: str = "spend", owed: int = 0, given_back: Admitted | None = None) -> Answer:
        if self.written is not None and now < self.written:
            self.ahead += self.written - now
            self.written = now
        self.written = None if self.written is None else self.written + self.ahead
        answer = super().ask(now + self.ahead, cost, verb, owed, given_back)
        self.written = None if self.written is None else self.written - self.ahead
        return answer

    def admit(self, cost: int, now: int) -> None:
        live = [each for each in self.admitted if each.cost and self.counts(each, now)]
        moments = sorted({each.made for each in live})
        if len(moments) >= self.count and moments[-1] != now:
            for each in live:
                if each.made == moments[-1]:
                    each.made = now
        self.admitted.append(Admitted(cost, now, now))

    def give_back(self, admission: Admitted, cost: int, now: int) -> None:
        """As others do, unless it has joined a later entry: then nobody knows it any more."""
        if admission.ends == admission.made:
            super().give_back(admission, cost, now)

    def counts(self, admission: Admitted, now: int) -> bool:
        return admission.made + self.period > now

    def used(self, now: int) -> int:
        return sum(each.cost for each in self.admitted if self.counts(each, now))

    def changes(self, now: int, cost: int) -> list[int]:
        return sorted({0, *[each.made + self.period - now for each in self.admitted if each.cost and self.counts(each, now)]})


# --- calendars --------------------------------------------------------------------------------------------------------


def multiples_of(period: int) -> Callable[[int], int]:
    """When windows end that begin at multiples of a period since 1970."""
    return lambda now: now - now % period + period


def days_of(zone: str, days: int, around: int) -> Callable[[int], int]:
    """When windows of so many days end, by the calendar of a time zone; some time around a time in Unix seconds.

    Whole weeks begin on Monday.
    """
    begins = _begins(zone, days, 0, around)
    return lambda now: begins[bisect_right(begins, now)]


def months_of(zone: str, months: int, around: int) -> Callable[[int], int]:
    """`days_of`, for windows of so many months."""
    begins = _begins(zone, 31 * months, months, around)
    return lambda now: begins[bisect_right(begins, now)]


@lru_cache(maxsize=256)
def _begins(zone: str, days: int, months: int, around: int) -> list[int]:
    """When windows begin, in Unix µs: at the first minute of which the calendar shows a date of the next one."""
    clock, span = ZoneInfo(zone), 25 * (days + 1) * DAY

    def looked_up(moment: int) -> tuple[int, timedelta | None]:
        local = datetime.fromtimestamp(moment, clock)
        if months:
            return (local.year * 12 + local.month - 1) // months, local.utcoffset()
        first = date(1970, 1, 1) if days % 7 else date(1970, 1, 5)
        return (local.date() - first).days // days, local.utcoffset()

    def changes(first: int, last: int, step: int, *finer: int) -> Iterator[int]:
        """Ends of the finest steps during which anything changes."""
        before = looked_up(first)
        for moment in range(first + step, last + 1, step):
            if (after := looked_up(moment)) != before:
                yield from changes(moment - step, moment, *finer) if finer else (moment,)
                before = after

    begins, first = [], around - around % 3600 - span
    latest, _ = looked_up(first)
    for minute in changes(first, around + span, 12 * 3600, 3600, 60):
        if (number := looked_up(minute)[0]) > latest:
            begins.append(minute * US)
            latest = number
    return begins
