"""Warm-up: from a third of the rate to the full rate after idle time, like SmoothWarmingUp in Google Guava.

Idle time is *stored*, up to the warm-up duration. Without debt, a request of any cost passes, and the cost becomes debt. Each
request uses up stored time. While more than half is stored, requests cost up to three times as much.

Amounts are in ticks as in `limitgate.algorithms.gcra`. A state has the *debt* and the *warmth*, which is the used part of the
stored time. With ``full`` ticks of storage, a tick at warmth w costs 3 - 4w/full ticks, at least one. The additional cost from
cold to w is 2w(full - w)/full ticks, the `toll`. A request pays the difference of two tolls, so rounding errors don't
accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight, always

REPLY_FIELDS = 3
CAN_WAIT = True
MAX_TURNS = 0
refusal_is_stable = always
left_after = None
STRAIGHT: Straight | None = None
IS_LIMIT = True
RESCALES = True
LOAD = Load(5, 3, 4)
"""Measured in calls of 32: charge 17 µs."""
MAX_FULL = 2**50
"""Maximum of stored ticks; keeps Lua's doubles exact."""
_LEAST = 1000

State = tuple[int, int]
Amount = tuple[int, int, int, int]
"""Refunded ticks, refunded warmth, µs until the turn, and the warmth after the charge."""


def check(limit: LimitNumbers) -> str | None:
    if limit.warm_up is None:
        return "a duration for warm_up, such as 10s"
    if limit.full < _LEAST * limit.count:
        return "a warm_up of at least 1 ms"
    if limit.full >= MAX_FULL:
        most = (MAX_FULL - 1) // limit.count / 1_000_000
        return f"a warm_up of at most {most:g} s, to be exact; for a longer one, write the same rate with a smaller count"
    return None


def toll(warmth: int, full: int) -> int:
    """Additional ticks from cold to ``warmth``, rounded up."""
    part = min(warmth, full // 2)
    return -(-2 * part * (full - part) // full)


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:
    return [(0, 0)] * len(bucket.ids)


def advance(states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[State]:
    if elapsed_us <= 0:
        return states
    left = []
    for (debt, warmth), count in zip(states, bucket.counts):
        idle = elapsed_us * count - debt
        left.append((-idle, warmth) if idle < 0 else (0, max(0, warmth - idle)))
    return left


def rescaled(state: State, limit: LimitNumbers) -> State:
    debt, warmth = state
    return min(debt, limit.ceiling), min(warmth, limit.full)


def try_charge(
    states: Sequence[State], bucket: BucketNumbers, cost: int, max_wait_us: int = 0, slot: int = 0, *, turn_us: int = 0
) -> Sequence[State] | None:
    if not cost:
        return states
    after = []
    for state, limit in zip(_held(states, turn_us, bucket), bucket.limits):
        wait = wait_us(state, cost, limit)
        if wait is None or wait > max_wait_us:
            return None
        after.append(_charged(state, cost, limit))
    return after


def _held(states: Sequence[State], turn_us: int, bucket: BucketNumbers) -> Sequence[State]:
    """Admit no request before ``turn_us``. Idle time until then cools the window."""
    if not turn_us:
        return states
    ends = [max(debt, turn_us * count) for (debt, _), count in zip(states, bucket.counts)]
    return [(end, max(0, warmth - (end - debt))) for end, (debt, warmth) in zip(ends, states)]


def _charged(state: State, cost: int, limit: LimitNumbers) -> State:
    debt, warmth = state
    ticks = cost * limit.period_us
    warmer = min(limit.full, warmth + ticks)
    return min(debt + ticks + toll(warmer, limit.full) - toll(warmth, limit.full), limit.ceiling), warmer


def apply_adjustment(
    states: Sequence[State], back: Sequence[Amount], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
) -> Sequence[State]:
    """Refund an amount as if it were the last charge. A negative amount is charged now.

    After ``grace_us``, the charge has drained, so the refund cools the window instead. The toll is computed from the current
    warmth, or from the warmth after the charge if the window has cooled since. Refunds are exact if there was no idle time, and
    less than 1 µs off if there were no other requests. A turn followed by later turns isn't refunded.
    """
    right = []
    elapsed_us = max(0, elapsed_us)
    for state, (ticks, taken, turn, warmest), grace, limit in zip(states, back, grace_us, bucket.limits):
        debt, warmth = state
        full = limit.full
        other = min(full, max(0, warmth - taken))
        # The warmth before the window cooled.
        paid_at = min(full, max(warmth, warmest)) if ticks > 0 else warmth
        amount = ticks + toll(paid_at, full) - toll(min(full, max(0, paid_at - taken)), full)
        # Without later requests, the debt is lower than this.
        last = amount + (grace + 1 - elapsed_us) * limit.count
        if ticks > 0 and turn > elapsed_us and debt >= last:
            right.append(state)
        elif ticks > 0:
            idle = max(0, elapsed_us - grace) * limit.count
            right.append((max(0, debt - max(0, amount - idle)), max(0, other - min(amount, idle))))
        else:
            right.append((min(debt - amount, limit.ceiling), other))
    return right


def refund_amount(
    states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
) -> tuple[Sequence[Amount], Sequence[int]]:
    back, graces = [], []
    for state, limit in zip(_held(states, turn_us, bucket), bucket.limits):
        ticks = max(-limit.ceiling, min((cost - due) * limit.period_us, limit.ceiling))
        if ticks < 0:
            back.append((ticks, max(ticks, -limit.full), 0, 0))
            graces.append(0)
        else:
            debt, warmth = _charged(state, due, limit)
            _, warmest = _charged(state, cost, limit)
            back.append((ticks, warmest - warmth, refill_us(state, limit), warmest))
            graces.append(debt // limit.count)
    return back, graces


def remaining(state: State, limit: LimitNumbers) -> int:
    return 0 if state[0] else 1


def used(state: State, limit: LimitNumbers) -> int:
    return -(-state[0] // limit.period_us)


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    if not cost:
        return 0
    return None if cost > limit.most else refill_us(state, limit)


def refill_us(state: State, limit: LimitNumbers) -> int:
    return -(-state[0] // limit.count)


def ttl_us(state: State, limit: LimitNumbers) -> int:
    return -(-sum(state) // limit.count)


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:
    if cost > limit.most:
        return limit.count, limit.full, -1, 0, 0, 0
    ticks = cost * limit.period_us
    return limit.count, limit.full, max_wait_us, min(ticks, limit.full), *divmod(ticks, limit.count)


def encode_adjustment(limit: LimitNumbers, back: Amount, grace_us: int) -> Sequence[int]:
    ticks, warmth, turn, warmest = back
    return *divmod(ticks, limit.count), warmth, turn, grace_us, warmest


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    return [(facts[3 * at] * count + facts[3 * at + 1], facts[3 * at + 2]) for at, count in enumerate(bucket.counts)]
