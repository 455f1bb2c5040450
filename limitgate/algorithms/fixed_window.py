"""Fixed window: so many requests per window of the calendar; what was used is forgotten when the next one begins.

A state is what was used in the present window, and how long the window still lasts, in µs. Around the moment between two
windows twice the count may pass at once. Windows begin at multiples of the period since 1970-01-01 UTC. In the time zone that
``align`` names they are those of its calendar, see `limitgate.algorithms.calendar_windows`, and so are months, and weeks with
``align="utc"``. With ``align="first-request"`` a window begins with the first request after the end of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from struct import pack
from zoneinfo import available_timezones

from limitgate.algorithms.base import MAX_USED, LimitNumbers, Load, Straight, always
from limitgate.algorithms.calendar_windows import DAY, WEEK, Calendar, is_zone
from limitgate.messages.suggestions import meant

REPLY_FIELDS = 2
CAN_WAIT = False
MAX_TURNS = 0
refusal_is_stable = always
LOAD = Load(3, 2, 2)
"""Measured: 14 µs for a charge, 16 µs to put something right, among 32 in a call."""

FIRST_REQUEST = "first-request"
UTC_DAYS = "utc"
ALIGNED = (UTC_DAYS, FIRST_REQUEST)
"""Alignments of windows besides a time zone."""
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
    """Return what was expected of a limit that this algorithm cannot count, None if it can."""
    if limit.burst != limit.count:
        return "no burst: all of a window's requests may come at once"
    if limit.months and limit.align == FIRST_REQUEST:
        return "align to be utc or a time zone: a month begins on its first day"
    if limit.align in (None, *ALIGNED):
        return None
    if not is_zone(limit.align):
        return (
            f"align to be utc, first-request or a time zone such as Europe/Berlin, not {limit.align!r:.80}{_cure(limit.align)}"
        )
    if limit.period % DAY:
        return "a period of whole days where windows are those of a time zone; shorter ones begin by UTC"
    return None


def load(limit: LimitNumbers) -> Load:  # noqa: ARG001 - as every algorithm's
    """Load of a window."""
    return LOAD


def initial(now: int, limit: LimitNumbers) -> State:
    """A window that nobody has used, at a time in Unix µs."""
    return 0, _left(0, 0, now, limit)


def advance(state: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State:
    """The state some time later; how long the next window lasts is known only if ``now`` is, in Unix µs."""
    used, left = state
    used, left = (used, left - elapsed_us) if elapsed_us < left else (0, limit.period_us)
    return used, left if now is None else _left(used, left, now, limit)


def charged(state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:  # noqa: ARG001 - of no matter
    """The state after ``cost`` requests, whether they fit or not."""
    return state[0] + cost, state[1]


def apply_adjustment(state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State:  # noqa: ARG001 - of no matter
    """The state after requests are put back that this window was charged, or taken on top."""
    used, left = state
    return (min(max(0, used - back), MAX_USED), left) if back < 0 or elapsed_us < grace_us else state


def grace_us(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """For how long what was charged can be put back: as long as the window lasts."""
    return state[1]


def remaining(state: State, limit: LimitNumbers) -> int:
    """Requests that still fit; never negative."""
    return max(0, limit.burst - state[0])


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    """Requests that fit besides ``cost``, negative if that does not fit now, and then the µs until nothing counts any more."""
    return limit.burst - state[0] - cost, state[1]


def used(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """Requests of this window."""
    return state[0]


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    """Microseconds until ``cost`` requests fit: none, or until the next window begins; None if they never do."""
    if state[0] + cost <= limit.burst or not cost:
        return 0
    return None if cost > limit.burst else state[1]


def refill_us(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """Microseconds until nothing counts any more."""
    return state[1] if state[0] else 0


def date(limit: LimitNumbers) -> int:
    """The end of the present window by this machine's clock, where Redis cannot know it: it knows no calendar."""
    calendar = _calendar(limit)
    return 0 if calendar is None else calendar.end(time.time_ns() // 1000)


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:
    """Burst, cost, period, how windows are aligned, and three ends of windows around the present date."""
    how = _BY_DATE if date else _BY_FIRST_REQUEST if limit.align == FIRST_REQUEST else _BY_CLOCK
    calendar = _calendar(limit) if date else None
    ends = [0, 0, 0] if calendar is None else [calendar.begin(date), date, calendar.end(date)]
    return limit.burst, min(cost, limit.burst + 1), limit.period_us, how, *ends


def decode_state(facts: Sequence[int]) -> State:
    """The state that the script has reported."""
    return facts[0], facts[1]


def _left(used: int, left: int, now: int, limit: LimitNumbers) -> int:
    """Length of the window that a time is in."""
    if limit.align == FIRST_REQUEST:
        return left if used else limit.period_us
    calendar = _calendar(limit)
    return limit.period_us - now % limit.period_us if calendar is None else calendar.end(now) - now


def _calendar(limit: LimitNumbers) -> Calendar | None:
    """Calendar that its windows are those of; None if they are not."""
    if limit.align == FIRST_REQUEST:
        return None
    if not limit.months and (limit.align is None or (limit.align == UTC_DAYS and limit.period % WEEK)):
        return None
    return Calendar(limit.align or UTC_DAYS, limit.period, limit.months)


def _cure(align: object) -> str:
    """What may be done about an alignment that is unknown, for the end of a message."""
    zones = sorted(available_timezones())
    if not zones:
        return "; this system knows no time zones: pip install tzdata"
    towns = {zone.rpartition("/")[2]: zone for zone in zones}
    near = meant(align, [*ALIGNED, *zones]) or towns.get(meant(str(align).rpartition("/")[2].replace(" ", "_"), towns) or "")
    return "" if near is None else f"; did you mean {near!r}?"
