"""Fixed window: so many requests per window of the calendar; what was used is forgotten when the next one begins.

A state is what was used in the present window, and how long the window still lasts, in µs. Around the moment between two
windows twice the count may pass at once. Windows begin at multiples of the period since 1970-01-01, in UTC or in the time zone
that ``align`` names, where a day is as long as it is there: 23 or 25 hours when clocks change. With ``align="first-request"`` a
window begins with the first request after the end of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from struct import pack
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from limitgate.algorithms.base import MAX_USED, LimitNumbers, Load, Straight, always

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
_DAY = 86_400
_OF_MACHINES = ("localtime", "posixrules")
"""Names under which each machine has a time zone of its own."""
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - of a wall clock, wherever it hangs
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
    asked=lambda limit, _, cost: pack("<4d", *encode_charge(limit, cost, 0)[:4]),
    reported="used{n}, left{n},",
    reported_state="(used{n}, left{n}),",
)


def check(limit: LimitNumbers) -> str | None:
    """Return what was expected of a limit that this algorithm cannot count, None if it can."""
    if limit.burst != limit.count:
        return "no burst: all of a window's requests may come at once"
    if limit.align in (None, *ALIGNED):
        return None
    if not _is_zone(limit.align):
        hint = "" if available_timezones() else "; this system knows no time zones: pip install tzdata"
        return f"align to be utc, first-request or a time zone such as Europe/Berlin, not {limit.align!r:.80}{hint}"
    if limit.period % _DAY:
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
    """The end of the present window by this machine's clock, where Redis cannot know it: it knows no time zones."""
    return 0 if limit.align in (None, *ALIGNED) else _end(time.time_ns() // 1000, limit)


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:
    """Burst, cost, period, how windows are aligned, and three ends of windows around the present date."""
    how = _BY_DATE if date else _BY_FIRST_REQUEST if limit.align == FIRST_REQUEST else _BY_CLOCK
    ends = [_begin(date, limit), date, _end(date, limit)] if date else [0, 0, 0]
    return limit.burst, min(cost, limit.burst + 1), limit.period_us, how, *ends


def decode_state(facts: Sequence[int]) -> State:
    """The state that the script has reported."""
    return facts[0], facts[1]


def _left(used: int, left: int, now: int, limit: LimitNumbers) -> int:
    """Length of the window that a time is in."""
    if limit.align == FIRST_REQUEST:
        return left if used else limit.period_us
    if limit.align in (None, UTC_DAYS):
        return limit.period_us - now % limit.period_us
    return _end(now, limit) - now


def _begin(end: int, limit: LimitNumbers) -> int:
    """Where the window before an end begins, in Unix µs."""
    return _moment(_number(end - 1, limit), limit)


def _end(now: int, limit: LimitNumbers) -> int:
    """Where the window ends that a time is in, in Unix µs."""
    return _moment(_number(now, limit) + 1, limit)


def _number(now: int, limit: LimitNumbers) -> int:
    """Number of windows that have begun by a time since 1970 in this time zone.

    Where clocks go back over a midnight, its window has begun all the same.
    """
    local = datetime.fromtimestamp(now // 1_000_000, _zone(limit.align)).replace(tzinfo=None)
    number = (local - _EPOCH) // timedelta(seconds=limit.period)
    return number if now < _moment(number + 1, limit) else number + 1


def _moment(number: int, limit: LimitNumbers) -> int:
    """When a window begins, in Unix µs; where clocks skip its midnight, when they do."""
    local = (_EPOCH + number * timedelta(seconds=limit.period)).replace(tzinfo=_zone(limit.align))
    return int(local.astimezone(UTC).timestamp()) * 1_000_000


@lru_cache(maxsize=64)
def _zone(name: str | None) -> ZoneInfo:
    return ZoneInfo(str(name))


def _is_zone(name: object) -> bool:
    try:
        return isinstance(name, str) and name not in _OF_MACHINES and bool(_zone(name))
    except (ZoneInfoNotFoundError, ValueError, OSError):  # what zoneinfo says to names that are none, or folders
        return False
