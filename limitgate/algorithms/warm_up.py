"""Warming up: from a third of the rate to the whole rate, for what is slow after it was idle. SmoothWarmingUp in Google Guava.

Guava's limiter *stores* idle time, as much as warming up takes. A request passes if nothing is owed, whatever it costs, and
then what it costs is owed, so that the next one pays. Each uses up as much stored time as it takes at the whole rate. While
more than half is stored that is dear: three times as dear when all is there (Guava's cold factor), less and less down to the
whole rate at one half. Once nothing is stored, requests cost what they do at the whole rate.

Amounts are in ticks of 1/count µs as in `limitgate.algorithms.gcra`, so that a request is ``period_us`` ticks. A state is the
*debt*, and the *warmth*: how much of the stored time is used up. Neither is there in a window that nobody has used, which is
cold. With ``full`` ticks stored in all, time that is stored at warmth w costs 3 - 4w/full times itself, down to 1 at one half.
Summed from the cold up to w, what it costs besides itself is 2w(full - w)/full ticks, the `toll`. It is rounded up to whole
ticks there, and a request pays the difference between two tolls: roundings do not add up, and nothing passes before its time
under the formula.
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
"""Measured: 17 µs for a charge, among 32 in a call."""
MAX_FULL = 2**50
"""Ticks that may be stored, and some more: keeps every sum in Lua's doubles exact."""
_LEAST = 1000

State = tuple[int, int]
Amount = tuple[int, int, int, int]
"""Amount given back: ticks of requests and of warmth, µs that the request had to wait for its turn, and the warmth that
it left behind, which says what toll it paid."""


def check(limit: LimitNumbers) -> str | None:
    """Return what was expected of a limit that this algorithm cannot count, None if it can."""
    if limit.warm_up is None:
        return "a duration for warm_up, such as 10s"
    if limit.full < _LEAST * limit.count:
        return "a warm_up of at least 1 ms"
    if limit.full >= MAX_FULL:
        most = (MAX_FULL - 1) // limit.count / 1_000_000
        return f"a warm_up of at most {most:g} s, so that it is exact; more where the same rate is written with a smaller count"
    return None


def toll(warmth: int, full: int) -> int:
    """Ticks that requests cost besides themselves while a cold window gets this warm, rounded up."""
    part = min(warmth, full // 2)
    return -(-2 * part * (full - part) // full)


def load(limit: LimitNumbers) -> Load:  # noqa: ARG001 - as every algorithm's
    """Load of a window."""
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:  # noqa: ARG001 - as every algorithm's
    """Nothing is owed, and it is cold."""
    return [(0, 0)] * len(bucket.ids)


def advance(
    states: Sequence[State],
    elapsed_us: int,
    bucket: BucketNumbers,
    now: int | None = None,  # noqa: ARG001 - of no matter
) -> Sequence[State]:
    """The states some time later: time pays the debt, and what is left of it cools. What time it is does not matter."""
    if elapsed_us <= 0:
        return states
    left = []
    for (debt, warmth), count in zip(states, bucket.counts):
        idle = elapsed_us * count - debt
        left.append((-idle, warmth) if idle < 0 else (0, max(0, warmth - idle)))
    return left


def rescaled(state: State, limit: LimitNumbers) -> State:
    """A state left by another count, under this limit: as many requests are owed, and as many have warmed it."""
    debt, warmth = state
    return min(debt, limit.ceiling), min(warmth, limit.full)


def try_charge(
    states: Sequence[State],
    bucket: BucketNumbers,
    cost: int,
    max_wait_us: int = 0,
    slot: int = 0,  # noqa: ARG001 - as every algorithm's
    *,
    turn_us: int = 0,
) -> Sequence[State] | None:
    """The states after ``cost`` requests; None if something is owed for longer than they may wait."""
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
    """The states where nothing passes before a turn: the time until then is owed, and cools where it is idle."""
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
    """The states after something is given back, as if it had been the last that was charged, or, if negative, charged now.

    What of it has drained by now, which it does ``grace_us`` after it was charged, has cooled the window instead. The toll is
    that of a window as warm as this one, or as the charge left it if it has cooled since. So it is exact in a window that has
    not been idle since, and less than a microsecond off in one that nobody else uses.

    A turn that is still ahead and has others behind it is not given back, as in `limitgate.algorithms.gcra`: they keep theirs.
    """
    right = []
    elapsed_us = max(0, elapsed_us)
    for state, (ticks, taken, turn, warmest), grace, limit in zip(states, back, grace_us, bucket.limits):
        debt, warmth = state
        full = limit.full
        other = min(full, max(0, warmth - taken))
        paid_at = min(full, max(warmth, warmest)) if ticks > 0 else warmth  # as warm as the window was before it cooled
        amount = ticks + toll(paid_at, full) - toll(min(full, max(0, paid_at - taken)), full)
        last = amount + (grace + 1 - elapsed_us) * limit.count  # less would be owed if nobody had come since
        if ticks > 0 and turn > elapsed_us and debt >= last:
            right.append(state)
        elif ticks > 0:
            idle = max(0, elapsed_us - grace) * limit.count
            right.append((max(0, debt - max(0, amount - idle)), max(0, other - min(amount, idle))))
        else:
            right.append((min(debt - amount, limit.ceiling), other))
    return right


def refund_amount(
    states: Sequence[State],
    bucket: BucketNumbers,
    cost: int,
    due: int,
    slot: int = 0,  # noqa: ARG001 - as every algorithm's
    *,
    turn_us: int = 0,
) -> tuple[Sequence[Amount], Sequence[int]]:
    """Amount to give back per window, and for how long older debts drained, so that a charge of ``cost`` becomes ``due``.

    Of a charge that was too low the difference is owed from now on.
    """
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


def remaining(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - of no matter
    """One request, whatever it costs, if nothing is owed."""
    return 0 if state[0] else 1


def used(state: State, limit: LimitNumbers) -> int:
    """Requests at the whole rate that are owed, a begun one counted whole."""
    return -(-state[0] // limit.period_us)


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    """Microseconds until nothing is owed, rounded up; None if the cost is more than can be remembered."""
    if not cost:
        return 0
    return None if cost > limit.most else refill_us(state, limit)


def refill_us(state: State, limit: LimitNumbers) -> int:
    """Microseconds until nothing is owed, rounded up. It may be warm then."""
    return -(-state[0] // limit.count)


def ttl_us(state: State, limit: LimitNumbers) -> int:
    """Microseconds until it is as cold as one that nobody has used, rounded up."""
    return -(-sum(state) // limit.count)


def date(limit: LimitNumbers) -> int:  # noqa: ARG001 - as every algorithm's
    """No date matters."""
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:  # noqa: ARG001 - alone in its bucket
    """The count, what can be stored, how far ahead may be booked (below 0: never), warmth and ticks of the requests."""
    if cost > limit.most:
        return limit.count, limit.full, -1, 0, 0, 0
    ticks = cost * limit.period_us
    return limit.count, limit.full, max_wait_us, min(ticks, limit.full), *divmod(ticks, limit.count)


def encode_adjustment(limit: LimitNumbers, back: Amount, grace_us: int) -> Sequence[int]:
    """The ticks as whole microseconds and a rest, the warmth, how long the turn was ahead, the grace, and the warmth before."""
    ticks, warmth, turn, warmest = back
    return *divmod(ticks, limit.count), warmth, turn, grace_us, warmest


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    """The states that the script has reported."""
    return [(facts[3 * at] * count + facts[3 * at + 1], facts[3 * at + 2]) for at, count in enumerate(bucket.counts)]
