"""What a limiter should answer, in exact fractions of requests; it shares no arithmetic with the package.

A bucket owes requests. Time pays them back at count per period, never below nothing. What it owes is kept as requests when
a limit's count changes: paid back under the old count up to the moment when the new one is first seen, refused or not, and
from then on under the new one. A limit that lets borrow looks for room for one request only, and lets the bucket owe for all.

A request that does not fit yet may be booked ahead, where it may wait for its turn. A turn is given back only while nobody has
one behind it: those keep theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from limitgate.limits.limit import Limit
from limitgate.limits.plan import Adjustment, Charge, Plan

FIELDS = ("allowed", "limit", "remaining", "retry_after", "reset_after", "granted", "rule", "degraded", "shadow", "delay")
WINDOW_FIELDS = ("rule", "limit", "period", "remaining", "used", "reset_after", "retry_after")
LONGEST_US = 2**52
"""A debt that a lowered limit has stretched is cut off at this many microseconds (142 years)."""

Identity = tuple[int, str, int]
"""What tells a window from the others of its bucket: period, algorithm, place among those equal in both."""


@lru_cache(maxsize=100_000)
def rate(count: int, period: int) -> Fraction:
    """Requests that are paid back in a microsecond."""
    return Fraction(count, period * 1_000_000)


def identities(limits: tuple[Limit, ...]) -> list[Identity]:
    places: Counter[tuple[int, str]] = Counter()
    found = []
    for limit in limits:
        kind = limit.period, limit.algorithm
        found.append((*kind, places[kind]))
        places[kind] += 1
    return found


@dataclass
class Debt:
    requests: Fraction
    count: int
    period: int

    def after(self, elapsed_us: int) -> Debt:
        """The debt that much later."""
        paid = elapsed_us * rate(self.count, self.period)
        return Debt(max(Fraction(0), self.requests - paid), self.count, self.period)

    def under(self, limit: Limit) -> Debt:
        """The same number of requests under another count."""
        if limit.count == self.count:
            return self
        return Debt(min(self.requests, LONGEST_US * rate(limit.count, limit.period)), limit.count, limit.period)

    def gone_in_us(self) -> int:
        return math.ceil(self.requests / rate(self.count, self.period))


@dataclass
class Bucket:
    written: int
    debts: dict[Identity, Debt] = field(default_factory=dict)

    def at(self, now: int) -> Bucket:
        """The bucket now; time that went backwards neither pays nor takes."""
        elapsed = max(0, now - self.written)
        return Bucket(now, {identity: debt.after(elapsed) for identity, debt in self.debts.items()})

    def asked(self, limits: tuple[Limit, ...]) -> list[Debt]:
        """What these limits owe; a window never seen owes nothing."""
        return [
            self.debts.get(identity, Debt(Fraction(0), limit.count, limit.period)).under(limit)
            for identity, limit in zip(identities(limits), limits, strict=True)
        ]

    def left_by_another_count(self, limits: tuple[Limit, ...], debts: list[Debt]) -> bool:
        """Whether anything is still owed under a count that has since changed."""
        owed = zip(identities(limits), debts, strict=True)
        return any(self.debts[identity].count != debt.count for identity, debt in owed if debt.requests)

    def put(self, limits: tuple[Limit, ...], debts: list[Debt]) -> None:
        self.debts.update(zip(identities(limits), debts, strict=True))

    def full_at(self) -> int:
        """When nothing is owed any more, in Unix µs."""
        return self.written + max((debt.gone_in_us() for debt in self.debts.values()), default=0)


@dataclass
class Answer:
    now: int
    debts: list[list[Fraction]]
    """Requests that each window of each charge owed before."""
    decision: dict[str, object]
    windows: list[tuple[object, ...]]


class Oracle:
    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.clock_steps = 0
        self.left = self.kept = 0
        """How often a turn that was still ahead was given back, and how often it was not, as others were behind it."""

    def ask(self, plan: Plan, now: int) -> Answer:
        """Carry out a plan and say what must be reported about it."""
        owed = [self._read(charge, now, looks=plan.verb == "look") for charge in plan.charges]
        if plan.verb == "reset":
            owed = [[Debt(Fraction(0), debt.count, debt.period) for debt in debts] for debts in owed]
        for place, charge in enumerate(plan.charges):
            if charge.adjustment is not None:
                owed[place] = self._apply_adjustment(charge, charge.adjustment, owed[place], now)
                self._write(charge, owed[place], now)
        fits = [_fits(charge, debts) for charge, debts in zip(plan.charges, owed, strict=True)]
        allowed = all(fit or not charge.enforced for charge, fit in zip(plan.charges, fits, strict=True))
        before = [[debt.requests for debt in debts] for debts in owed]
        for place, (charge, fit) in enumerate(zip(plan.charges, fits, strict=True)):
            takes = plan.verb == "spend" and allowed and fit
            if takes:
                owed[place] = _taken(charge, owed[place])
            if plan.verb == "reset" or (takes and charge.cost):
                self._write(charge, owed[place], now)
        decision, windows = _decision(plan, owed, fits, allowed=allowed)
        decision["delay"] = _delay(plan, before) if allowed and plan.verb == "spend" else 0.0
        return Answer(now, before, decision, windows)

    def _read(self, charge: Charge, now: int, *, looks: bool) -> list[Debt]:
        bucket = self.buckets.get(charge.key, Bucket(now))
        debts = bucket.at(now).asked(charge.bucket.limits)
        self.clock_steps += bucket.written > now
        if bucket.written > now or (not looks and bucket.left_by_another_count(charge.bucket.limits, debts)):
            self._write(charge, debts, now)
        return debts

    def _write(self, charge: Charge, debts: list[Debt], now: int) -> None:
        bucket = self.buckets.get(charge.key, Bucket(now)).at(now)
        bucket.put(charge.bucket.limits, debts)
        self.buckets[charge.key] = bucket

    def _apply_adjustment(self, charge: Charge, lease: Adjustment, debts: list[Debt], now: int) -> list[Debt]:
        """The debts after requests are put back or taken on top, less those that time has paid back since the grace ended."""
        right = []
        for debt, ticks, grace, limit in zip(debts, lease.back, lease.grace, charge.bucket.limits, strict=True):
            speed, elapsed = rate(debt.count, debt.period), max(0, now - lease.as_of)
            since = max(0, elapsed - grace) * speed
            requests = Fraction(ticks, debt.period * 1_000_000)
            if_last = requests + (grace + 1 - elapsed) * speed
            if requests > 0 and if_last > limit.burst and not limit.borrow:
                if debt.requests >= if_last:
                    requests = Fraction(0)
                    self.kept += 1
                else:
                    self.left += 1
            left = max(requests - since, Fraction(0)) if requests > 0 else min(requests + since, Fraction(0))
            owed = max(debt.requests - left, Fraction(0))
            right.append(Debt(min(owed, LONGEST_US * rate(debt.count, debt.period)), debt.count, debt.period))
        return right


def _fits(charge: Charge, debts: list[Debt]) -> bool:
    windows = zip(charge.bucket.limits, debts, strict=True)
    return not charge.cost or all(
        not _is_too_much(charge, limit)
        and debt.requests + _room_for(charge, limit) <= limit.burst + charge.max_wait_us * rate(limit.count, limit.period)
        and (not limit.borrow or debt.requests + charge.cost <= LONGEST_US * rate(limit.count, limit.period))
        for limit, debt in windows
    )


def _room_for(charge: Charge, limit: Limit) -> int:
    """The requests that there has to be room for."""
    return min(charge.cost, 1) if limit.borrow else charge.cost


def _is_too_much(charge: Charge, limit: Limit) -> bool:
    """Whether a charge never fits: more than the burst, or a debt that would be cut off if all but one request is borrowed."""
    if limit.borrow:
        return limit.burst + charge.cost - 1 > LONGEST_US * rate(limit.count, limit.period)
    return charge.cost > limit.burst


def _delay(plan: Plan, owed: list[list[Fraction]]) -> float:
    """Seconds until everything that may be waited for fits."""
    turns = [
        math.ceil((requests + _room_for(charge, limit) - limit.burst) / rate(limit.count, limit.period))
        for charge, before in zip(plan.charges, owed, strict=True)
        for limit, requests in zip(charge.bucket.limits, before, strict=True)
        if charge.enforced and charge.max_wait_us and charge.cost
    ]
    return max(0, 0, *turns) / 1_000_000


def _taken(charge: Charge, debts: list[Debt]) -> list[Debt]:
    return [Debt(debt.requests + charge.cost, debt.count, debt.period) for debt in debts]


def _decision(
    plan: Plan, after: list[list[Debt]], fits: list[bool], *, allowed: bool
) -> tuple[dict[str, object], list[tuple[object, ...]]]:
    windows, tightness, waits = [], [], [(0.0, 0, None)]
    for charge, debts, fit in zip(plan.charges, after, fits, strict=True):
        for limit, debt in zip(charge.bucket.limits, debts, strict=True):
            window = _window(charge, limit, debt, fits=fit)
            _, _, _, remaining, _, reset_after, retry_after = window
            windows.append(window)
            tightness.append((not charge.enforced, remaining, -reset_after, len(windows) - 1, charge.cost))
            if charge.enforced and not fit:
                waits.append((retry_after, -len(windows), charge.rule))
    _, remaining, reset_after, place, cost = min(tightness)
    retry_after, _, refuser = max(waits)
    decision = {
        "allowed": allowed,
        "limit": windows[place][1],
        "remaining": remaining,
        "retry_after": 0.0 if allowed else retry_after,
        "reset_after": -reset_after,
        "granted": cost if allowed and plan.verb == "spend" else 0,
        "rule": windows[place][0] if allowed else refuser,
        "degraded": False,
        "shadow": allowed and not all(fits),
    }
    return decision, windows


def _window(charge: Charge, limit: Limit, debt: Debt, *, fits: bool) -> tuple[object, ...]:
    over = debt.requests + _room_for(charge, limit) - limit.burst
    turn = math.ceil(max(over, 0) / rate(limit.count, limit.period))
    wait = math.inf if _is_too_much(charge, limit) else max(0, turn - charge.max_wait_us) / 1_000_000
    return (
        charge.rule,
        limit.burst,
        limit.period,
        max(0, math.floor(limit.burst - debt.requests)),
        math.ceil(debt.requests),
        debt.gone_in_us() / 1_000_000,
        0.0 if fits else wait,
    )
