"""Sliding window counter: requests of the current calendar window plus a share of the previous window.

Windows begin at multiples of the period since 1970-01-01 UTC. A state is the usage of the current and of the previous window,
and the remaining time of the current one in µs. A request passes if

    current + ceil(previous * left / period) + cost <= count

The estimate assumes evenly spread requests. In the worst case, with bursts at the end of two successive windows, a period
has one request less than twice the count. No calendar window exceeds the count.

Source: Cloudflare's approximated sliding window counter (2017).
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
"""Measured in calls of 32: charge 14 µs, adjustment 15 µs."""

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
    return "no burst: all of a window's requests may come at once" if limit.burst != limit.count else None


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, limit: LimitNumbers) -> State:
    return 0, 0, limit.period_us - now % limit.period_us


def advance(state: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State:
    current, previous, left = state
    if elapsed_us < left:
        left -= elapsed_us
    else:
        begun, into = divmod(elapsed_us - left, limit.period_us)
        current, previous, left = 0, 0 if begun else current, limit.period_us - into
    return current, previous, left if now is None else limit.period_us - now % limit.period_us


def charged(state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:
    current, previous, left = state
    return current + cost, previous, left


def apply_adjustment(state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State:
    """Refund the charge's window; if unknown, the current window first. Charge negative amounts to the current one."""
    current, previous, left = state
    if back < 0:
        return min(current - back, MAX_USED), previous, left
    if elapsed_us >= grace_us + limit.period_us:
        return state
    here = min(back, current) if elapsed_us < grace_us else 0
    return current - here, max(0, previous - (back - here)), left


def grace_us(state: State, limit: LimitNumbers) -> int:
    return state[2]


def remaining(state: State, limit: LimitNumbers) -> int:
    return max(0, limit.burst - used(state, limit))


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    current, previous, left = state
    return limit.burst - cost - current + -previous * left // limit.period_us, left + limit.period_us


def used(state: State, limit: LimitNumbers) -> int:
    current, previous, left = state
    return current - (-previous * left // limit.period_us)


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    if not cost:
        return 0
    if cost > limit.burst:
        return None
    current, previous, left = state
    room = limit.burst - cost - current
    if room >= 0:  # Upper bound for the weight of the previous window.
        return left - min(left, room * limit.period_us // previous) if previous else 0
    return left + limit.period_us - (limit.burst - cost) * limit.period_us // current


def refill_us(state: State, limit: LimitNumbers) -> int:
    current, previous, left = state
    return left + limit.period_us if current else left if previous else 0


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, cost: int, date: int) -> Sequence[int]:
    return limit.burst, min(cost, limit.burst + 1), limit.period_us


def decode_state(facts: Sequence[int]) -> State:
    return facts[0], facts[1], facts[2]
