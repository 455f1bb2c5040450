"""Sliding window of two counters: the requests of this window of the calendar, and those of the one before by their share.

Windows begin at multiples of the period since 1970-01-01 UTC. A state is what was used in the present window, what was used in
the one before, and how long the present one still lasts, in µs. As much of the window before counts as a window that ends now
would still overlap, rounded up to whole requests:

    current + ceil(previous * left / period) + cost <= count

It is an estimate: it takes the requests of the window before for spread evenly. If they all came at its end they are forgotten
too early. A period that begins with a share s of a window still to come may see the count in that share, and then as much of
the next window as leaves room for s of it: count * (2 - s) in all. So in the worst case, a burst at the very end of a window,
and another just before the end of the next, one request less than twice the count passes within a period. If they all came at
the beginning they count for longer than a period, and less than the count may pass. Yet no window of the calendar ever has more
than the count. A promised wait is exact by this estimate: just long enough.

Source: the approximated sliding window counter as Cloudflare has described it (2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

from limitgate.algorithms.base import MAX_USED, LimitNumbers, Load, Straight, always

REPLY_FIELDS = 3
CAN_WAIT = False
MAX_TURNS = 0
refusal_is_stable = always
LOAD = Load(4, 3, 2)
"""Measured: 14 µs for a charge, 15 µs to put something right, among 32 in a call."""

State = tuple[int, int, int]

STRAIGHT: Straight | None = Straight(
    kept="current{n}, previous{n}, left{n},",
    state="(current{n}, previous{n}, left{n}),",
    row="burst{n}, period{n},",
    row_of=lambda limit, _: (limit.burst, limit.period_us),
    advance="""
    if elapsed >= left{n}:
        previous{n} = current{n} if elapsed < left{n} + period{n} else 0
        current{n} = 0
    left{n} = period{n} - now % period{n}
    """,
    fits="previous{n} * left{n} <= (burst{n} - cost - current{n}) * period{n}",
    charged="current{n} + cost, previous{n}, left{n},",
    refund=None,
    asked=lambda limit, _, cost: pack("<3d", *encode_charge(limit, cost, 0)),
    reported="current{n}, previous{n}, left{n},",
    reported_state="(current{n}, previous{n}, left{n}),",
)


def check(limit: LimitNumbers) -> str | None:
    """Return what was expected of a limit that this algorithm cannot count, None if it can."""
    return "no burst: all of a window's requests may come at once" if limit.burst != limit.count else None


def load(limit: LimitNumbers) -> Load:  # noqa: ARG001 - as every algorithm's
    """Load of a window."""
    return LOAD


def initial(now: int, limit: LimitNumbers) -> State:
    """Windows that nobody has used, at a time in Unix µs."""
    return 0, 0, limit.period_us - now % limit.period_us


def advance(state: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State:
    """The windows some time later: the present one may have become the one before, or be forgotten, too."""
    current, previous, left = state
    if elapsed_us < left:
        left -= elapsed_us
    else:
        begun, into = divmod(elapsed_us - left, limit.period_us)
        current, previous, left = 0, 0 if begun else current, limit.period_us - into
    return current, previous, left if now is None else limit.period_us - now % limit.period_us


def charged(state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:  # noqa: ARG001 - of no matter
    """The state after ``cost`` requests, whether they fit or not."""
    current, previous, left = state
    return current + cost, previous, left


def apply_adjustment(state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State:
    """The state after requests are put back into the window that was charged for them, or taken on top of the present one.

    What is more than the present window was charged, when nobody knows which one it was, is put back into the one before.
    """
    current, previous, left = state
    if back < 0:
        return min(current - back, MAX_USED), previous, left
    if elapsed_us >= grace_us + limit.period_us:
        return state
    here = min(back, current) if elapsed_us < grace_us else 0
    return current - here, max(0, previous - (back - here)), left


def grace_us(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """For how long the window lasts that is charged; it counts as the one before for a period more."""
    return state[2]


def remaining(state: State, limit: LimitNumbers) -> int:
    """Requests that still fit; never negative."""
    return max(0, limit.burst - used(state, limit))


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    """Requests that fit besides ``cost``, negative if that does not fit now, and then the µs until nothing counts any more."""
    current, previous, left = state
    return limit.burst - cost - current + -previous * left // limit.period_us, left + limit.period_us


def used(state: State, limit: LimitNumbers) -> int:
    """Requests of this window and the share of those before, rounded up."""
    current, previous, left = state
    return current - (-previous * left // limit.period_us)


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    """Microseconds until ``cost`` requests fit: later in this window, or in the next one; None if they never do."""
    if not cost:
        return 0
    if cost > limit.burst:
        return None
    current, previous, left = state
    room = limit.burst - cost - current
    if room >= 0:  # the window before must weigh no more than that
        return left - min(left, room * limit.period_us // previous) if previous else 0
    return left + limit.period_us - (limit.burst - cost) * limit.period_us // current


def refill_us(state: State, limit: LimitNumbers) -> int:
    """Microseconds until nothing counts any more."""
    current, previous, left = state
    return left + limit.period_us if current else left if previous else 0


def date(limit: LimitNumbers) -> int:  # noqa: ARG001 - as every algorithm's
    """No date matters: windows are those of UTC."""
    return 0


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """Burst, cost and period."""
    return limit.burst, min(cost, limit.burst + 1), limit.period_us


def decode_state(facts: Sequence[int]) -> State:
    """The state that the script has reported."""
    return facts[0], facts[1], facts[2]
