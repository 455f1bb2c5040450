"""Sliding log: every admitted request is remembered for one period, so that never more than the count passes in any period.

Exact, at the price of memory: one entry for each request, or for those of the same microsecond. Whatever is admitted counts
until one period later, when it no longer does. Where the log has as many entries as the limit has requests, what is owed on top
joins the newest entry and counts from then on with it, so that no more entries count.

A request that may wait is entered with the time of its turn, which is to come: the first moment at which so many others are a
period old that it fits. Whatever is in the log counts until then, so turns come in the order in which they were booked, and
nobody passes while one of them is still ahead. A turn that is given back leaves the log, unless others are behind it: they
keep theirs. As many periods can be booked ahead as have `MAX_TURNS` requests, and at least one.

In Redis a log of more than 128 entries is read by the page, where a bisection looks at it, and a new entry is appended, so a
request costs 2.1 times what GCRA does, with 10,000 entries as with 1,000. Entries that have expired stay in front until they
are an eighth of all; then the others are copied, which takes 0.4 ms for 10,000, of one or two logs in a call. So there are
stored at most 8/7 of the entries that count, and Redis may hold room for as many again to be appended. Only what gives back
looks at many entries: for an old charge at half of those that have come at most, or at all of them where more turns are booked,
in 2 ms for 5,000; for the last turn at none, but all others are copied.

In this process a state is a `Log`, from Redis a `LogReport`: enough for a decision, and for the same one until the first
entry goes. Of a log that is full, that is when a request fits again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight
from limitgate.algorithms.gcra import MAX_OWED_US

REPLY_FIELDS = 6
CAN_WAIT = True

STRAIGHT: Straight | None = None

MAX_ENTRIES = 10_000
"""The highest count of a limit: each entry takes 16 bytes here and 13 to 30 in Redis."""
MAX_TURNS = MAX_ENTRIES
"""Entries of turns that are still ahead, at most."""
LATEST = MAX_OWED_US
"""Stands for the moment of those that came last, where something is given back."""
LOAD = Load(30, 3, 30)
"""Measured, for a request that is refused or admitted: 16 to 20 µs with 100 entries, 21 to 27 µs with 10,000, and up to 70 µs
where entries that have expired are to be found among these."""
LOAD_OF_ENTRY = 0.2
"""Microseconds more for each entry, where something is given back. Measured with 10,000: 2 ms, if half of them came later."""
MAX_USED = 2**32
"""Requests at which what is owed on top is cut off."""


class Log(NamedTuple):
    """Admitted requests, oldest first. Immutable: nobody changes the arrays."""

    now: int
    """The log's own clock in µs: it begins with the store's, and only goes forward."""
    times: array[int]
    """When the requests of each entry pass, by that clock; in the future where a turn is still ahead."""
    totals: array[int]
    """Number of requests up to each entry."""
    before: int
    """Number of requests before the first entry."""

    def at(self, place: int) -> int:
        """Number of requests up to an entry, from 0; before the first, at place -1."""
        return self.totals[place] if place >= 0 else self.before

    @property
    def total(self) -> int:
        """Number of requests."""
        return self.totals[-1] if self.totals else self.before

    @property
    def used(self) -> int:
        """Requests that count."""
        return self.totals[-1] - self.before if self.totals else 0

    def with_more(self, requests: int, moment: int, most: int | None = None) -> Log:
        """With requests of a moment by the log's clock, behind all others, and at most so many entries, None for any number."""
        now, times, totals, before = self
        total = totals[-1] if totals else before
        if times and (times[-1] >= moment or (most is not None and len(times) >= most)):
            moment = max(moment, times[-1])
            times, totals = times[:-1], totals[:-1]
        return Log(now, times + array("q", (moment,)), totals + array("q", (total + requests,)), before)

    def with_less(self, requests: int, moment: int) -> Log:
        """Without requests of a moment by the log's clock, as far as they count; at `LATEST` without the last that have come.

        Those whose turn is still ahead stay if others are behind them.
        """
        last = bisect_right(self.times, self.now if moment == LATEST else moment) - 1
        if last < 0 or not requests or self.times[last] < moment < LATEST:
            return self
        if self.times[last] > self.now and last + 1 < len(self.times):
            return self
        least = self.before if moment == LATEST else self.at(last - 1)
        left = max(least, self.totals[last] - requests)
        gone = self.totals[last] - left
        begin = bisect_right(self.totals, left)
        times, totals = self.times[:begin], self.totals[:begin]
        if self.at(begin - 1) < left:
            times, totals = self.times[: begin + 1], totals + array("q", (left,))
        later = array("q", [total - gone for total in self.totals[last + 1 :]])
        return self._replace(times=times + self.times[last + 1 :], totals=totals + later)

    def wait_us(self, requests: int, period_us: int) -> int:
        """Microseconds until so many of those that count no longer do."""
        return self.times[bisect_left(self.totals, self.before + requests)] + period_us - self.now


class LogReport(NamedTuple):
    """A log as the script has reported it."""

    used: int
    """Requests that count."""
    cost: int
    """Charge that was read for."""
    wait: int
    """Microseconds until that fits, and its turn is; 0 if it is now, -1 if it never will."""
    refill: int
    """Microseconds until nothing counts any more."""
    now: int
    """The log's own clock."""
    steady: int
    """Microseconds for which all of these count; a period where there are none."""

    def later(self, elapsed_us: int) -> LogReport:
        """The log some time later, as far as it is still known."""
        wait = max(0, self.wait - elapsed_us) if self.wait > 0 else self.wait
        refill = max(0, self.refill - elapsed_us)
        return LogReport(self.used, self.cost, wait, refill, self.now + elapsed_us, self.steady - elapsed_us)

    def tells(self, cost: int, burst: int) -> bool:
        """True if it is known whether so many requests fit and for how long they do not."""
        return self.steady > 0 and (cost == self.cost or cost > burst or self.used + cost <= burst)


State = Log | LogReport


def check(limit: LimitNumbers) -> str | None:
    """Return what was expected of a limit that this algorithm cannot count, None if it can."""
    if limit.burst != limit.count:
        return "no burst: all requests of a period may come at once"
    return f"a count of at most {MAX_ENTRIES:,}, since every request is remembered" if limit.count > MAX_ENTRIES else None


def load(limit: LimitNumbers) -> Load:
    """Load of a window at most: half of the entries are written anew where an old charge is given back."""
    return LOAD._replace(correction=LOAD.correction + LOAD_OF_ENTRY * limit.count)


def initial(now: int, limit: LimitNumbers) -> Log:  # noqa: ARG001 - as every algorithm's
    """An empty log, at a time in Unix µs."""
    return Log(now, array("q"), array("q"), 0)


def advance(log: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State:  # noqa: ARG001 - its own clock is enough
    """The log some time later, without what was admitted a period ago."""
    if isinstance(log, LogReport):
        return log.later(elapsed_us)
    clock = log.now + elapsed_us
    gone = bisect_right(log.times, clock - limit.period_us)
    if not gone:
        return Log(clock, log.times, log.totals, log.before)  # `_replace` takes three times as long, here and below
    return Log(clock, log.times[gone:], log.totals[gone:], log.totals[gone - 1])


def charged(state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:
    """The state after ``cost`` requests, whether they fit or not, whose turn is so many µs from now."""
    if isinstance(state, LogReport):
        return LogReport(state.used + cost, state.cost, state.wait, limit.period_us + turn_us, state.now, state.steady)
    return state.with_more(cost, state.now + turn_us)


def apply_adjustment(log: Log, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> Log:  # noqa: ARG001 - see `grace_us`
    """The log after requests are put back that were charged at a moment by its clock, or taken on top as of now.

    Those on top go behind all turns that are booked, since these were promised.
    """
    if back >= 0:
        return log.with_less(back, grace_us)
    on_top = min(-back, MAX_USED - log.used)
    return log.with_more(on_top, log.now, limit.burst) if on_top > 0 else log


def grace_us(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """The moment of a charge by the log's clock, under which it finds the entry again."""
    return state.now


def refusal_is_stable(states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:
    """True until the first entry goes: from then on nobody knows here how many requests count. And for a known cost only."""
    (limit,), (state,) = bucket.limits, states
    return isinstance(state, Log) or state.tells(cost, limit.burst)


def remaining(state: State, limit: LimitNumbers) -> int:
    """Requests that still fit; never negative, and none while a turn is still ahead."""
    return 0 if _ahead_us(state, limit) else max(0, limit.burst - state.used)


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    """Requests that fit besides ``cost``, negative if that does not fit now, and then the µs until nothing counts any more."""
    return -1 if _ahead_us(state, limit) else limit.burst - state.used - cost, limit.period_us


def used(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """Requests of the last period, and those that are booked."""
    return state.used


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    """Microseconds until ``cost`` requests fit: until enough others are a period old, and all turns have come that are booked.

    None if they never do. Of a log that was `LogReport` this is exact for the cost that was asked about, and enough for others.
    """
    if not cost:
        return 0
    if cost > limit.burst:
        return None
    over = state.used + cost - limit.burst
    if over <= 0:
        return _ahead_us(state, limit)
    if isinstance(state, Log):
        return max(state.wait_us(over, limit.period_us), _ahead_us(state, limit))
    return state.wait if cost <= state.cost and state.wait > 0 else state.refill


def _ahead_us(state: State, limit: LimitNumbers) -> int:
    """Microseconds until the last turn that is booked; 0 if all have come."""
    if isinstance(state, LogReport):
        return max(0, state.refill - limit.period_us)
    return max(0, state.times[-1] - state.now) if state.times else 0


def refill_us(state: State, limit: LimitNumbers) -> int:
    """Microseconds until nothing counts any more."""
    if isinstance(state, LogReport):
        return state.refill
    return state.times[-1] + limit.period_us - state.now if state.times else 0


def date(limit: LimitNumbers) -> int:  # noqa: ARG001 - as every algorithm's
    """No date matters."""
    return 0


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """Burst, cost and period."""
    return limit.burst, min(cost, limit.burst + 1), limit.period_us


def decode_state(facts: Sequence[int]) -> LogReport:
    """The state that the script has reported."""
    return LogReport(*facts)
