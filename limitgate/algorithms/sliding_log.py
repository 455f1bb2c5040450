"""Sliding log: keeps every admitted request for one period, so that no period ever exceeds the count.

Exact, but needs an entry per request. A waiting request has an entry in the future, at its turn. A refund removes a turn only
if no later turn follows. Up to `MAX_TURNS` requests, and at least one period, can be booked ahead.

In this process a state is a `Log`. Redis returns a `LogReport`, which is sufficient until the oldest entry expires.
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
"""An entry takes 16 bytes, in Redis 13 to 30."""
MAX_TURNS = MAX_ENTRIES
LATEST = MAX_OWED_US
"""Time of a refund of the latest requests."""
LOAD = Load(30, 3, 30)
"""Measured per request: 16 to 20 µs with 100 entries, 21 to 27 µs with 10,000, up to 70 µs with expired ones."""
LOAD_OF_ENTRY = 0.2
"""µs per entry of a refund."""
MAX_USED = 2**32
"""Maximum usage, including a shortfall."""


class Log(NamedTuple):
    """Admitted requests, oldest first. The arrays are never modified."""

    now: int
    """µs; starts with the store's clock and never goes back."""
    times: array[int]
    """Time of each entry, in the future for booked turns."""
    totals: array[int]
    """Cumulative number of requests at each entry."""
    before: int

    def at(self, place: int) -> int:
        """Return the number of requests up to an entry; -1 is before the first one."""
        return self.totals[place] if place >= 0 else self.before

    @property
    def total(self) -> int:
        return self.totals[-1] if self.totals else self.before

    @property
    def used(self) -> int:
        return self.totals[-1] - self.before if self.totals else 0

    def with_more(self, requests: int, moment: int, most: int | None = None) -> Log:
        """Append requests at ``moment``; keep at most ``most`` entries."""
        now, times, totals, before = self
        total = totals[-1] if totals else before
        if times and (times[-1] >= moment or (most is not None and len(times) >= most)):
            moment = max(moment, times[-1])
            times, totals = times[:-1], totals[:-1]
        return Log(now, times + array("q", (moment,)), totals + array("q", (total + requests,)), before)

    def with_less(self, requests: int, moment: int) -> Log:
        """Remove requests at ``moment``, or with `LATEST` the latest ones. A turn followed by later turns stays."""
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
        return self.times[bisect_left(self.totals, self.before + requests)] + period_us - self.now


class LogReport(NamedTuple):
    used: int
    cost: int
    wait: int
    """µs until the cost fits; -1 for never."""
    refill: int
    """µs until the log is empty."""
    now: int
    steady: int
    """µs until the oldest entry expires; a period if empty."""

    def later(self, elapsed_us: int) -> LogReport:
        wait = max(0, self.wait - elapsed_us) if self.wait > 0 else self.wait
        refill = max(0, self.refill - elapsed_us)
        return LogReport(self.used, self.cost, wait, refill, self.now + elapsed_us, self.steady - elapsed_us)

    def tells(self, cost: int, burst: int) -> bool:
        """True if the report is sufficient to decide on ``cost`` and its wait."""
        return self.steady > 0 and (cost == self.cost or cost > burst or self.used + cost <= burst)


State = Log | LogReport


def check(limit: LimitNumbers) -> str | None:
    if limit.burst != limit.count:
        return "no burst: all requests of a period may come at once"
    return f"a count of at most {MAX_ENTRIES:,}, because every request is stored" if limit.count > MAX_ENTRIES else None


def load(limit: LimitNumbers) -> Load:
    return LOAD._replace(correction=LOAD.correction + LOAD_OF_ENTRY * limit.count)


def initial(now: int, limit: LimitNumbers) -> Log:
    return Log(now, array("q"), array("q"), 0)


def advance(log: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State:
    if isinstance(log, LogReport):
        return log.later(elapsed_us)
    clock = log.now + elapsed_us
    gone = bisect_right(log.times, clock - limit.period_us)
    if not gone:
        # The constructor is three times faster than `_replace`.
        return Log(clock, log.times, log.totals, log.before)
    return Log(clock, log.times[gone:], log.totals[gone:], log.totals[gone - 1])


def charged(state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:
    if isinstance(state, LogReport):
        return LogReport(state.used + cost, state.cost, state.wait, limit.period_us + turn_us, state.now, state.steady)
    return state.with_more(cost, state.now + turn_us)


def apply_adjustment(log: Log, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> Log:
    """Refund requests of the entry at ``grace_us``, or charge them after all booked turns."""
    if back >= 0:
        return log.with_less(back, grace_us)
    on_top = min(-back, MAX_USED - log.used)
    return log.with_more(on_top, log.now, limit.burst) if on_top > 0 else log


def grace_us(state: State, limit: LimitNumbers) -> int:
    """Return the log's clock, by which a refund finds the entry."""
    return state.now


def refusal_is_stable(states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:
    (limit,), (state,) = bucket.limits, states
    return isinstance(state, Log) or state.tells(cost, limit.burst)


def remaining(state: State, limit: LimitNumbers) -> int:
    """Return the whole requests that fit; 0 if a turn is booked."""
    return 0 if _ahead_us(state, limit) else max(0, limit.burst - state.used)


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    return -1 if _ahead_us(state, limit) else limit.burst - state.used - cost, limit.period_us


def used(state: State, limit: LimitNumbers) -> int:
    return state.used


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    """Return the wait: exact for the cost in a `LogReport`, otherwise an upper bound."""
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
    if isinstance(state, LogReport):
        return max(0, state.refill - limit.period_us)
    return max(0, state.times[-1] - state.now) if state.times else 0


def refill_us(state: State, limit: LimitNumbers) -> int:
    if isinstance(state, LogReport):
        return state.refill
    return state.times[-1] + limit.period_us - state.now if state.times else 0


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:
    return limit.burst, min(cost, limit.burst + 1), limit.period_us


def decode_state(facts: Sequence[int]) -> LogReport:
    return LogReport(*facts)
