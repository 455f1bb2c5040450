"""Answers refused callers locally until they may retry.

A refusal is repeated only if the request wouldn't fit after the time since the call was *sent*. The reported wait starts
when the reply was *received*, so it is long enough. After `LONGEST` seconds the next call goes to Redis, which reveals
resets. Known bans apply until they end or a reading lacks them, even without Redis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from threading import RLock
from typing import NamedTuple

from limitgate.algorithms import ban
from limitgate.algorithms.base import State
from limitgate.limits.bucket import Bucket, banned
from limitgate.limits.plan import Charge, Reading, read
from limitgate.limits.template import AnyPlan, AnyReading, PlainSpend

LONGEST = 1.0
"""Seconds."""
MAX_BUCKETS = 10_000
"""Maximum of entries; the oldest are dropped first."""
SKEW = 1.001
"""Factor for clock rates: twice the maximum NTP slew (500 ppm)."""


class _Refusal(NamedTuple):
    bucket: Bucket
    states: Sequence[State]
    now: int
    """Redis' clock, Unix µs."""
    sent: float
    heard: float

    def later(self, elapsed_us: int) -> Sequence[State]:
        return self.bucket.algorithm.advance(self.states, elapsed_us, self.bucket)


class _GivenBack(NamedTuple):
    heard: float
    now: float
    """Redis' clock in Unix µs; infinity accepts only later readings."""

    def is_followed_by(self, sent: float, now: int) -> bool:
        return sent >= self.heard or now >= self.now


class DenyCache:
    """Buckets of refused plans. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.refusals: dict[str, _Refusal] = {}
        self._given_back: dict[str, _GivenBack] = {}
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self.refusals)

    def knows(self, keys: Iterable[str]) -> bool:
        refusals = self.refusals
        for key in keys:  # noqa: SIM110 - any() would create a generator per request
            if key in refusals:
                return True
        return False

    def answer(self, plan: AnyPlan, at: float) -> Reading | None:
        """Return a refusal; None to ask Redis, also for an unknown bucket."""
        if plan.verb != "spend":
            return None
        refusals, charges = [], []
        for charge in plan.charges:
            refusal = self.refusals.get(charge.key)
            if refusal is None or at - refusal.sent >= LONGEST:
                return None
            if refusal.bucket is not charge.bucket:
                if refusal.bucket is not banned(charge.bucket) or not charge.cost:
                    return None
                charge = charge.under_ban()  # noqa: PLW2901 - matches the reading
            refusals.append(refusal)
            charges.append(charge)
        least = [refusal.later(int((at - refusal.sent) * SKEW * 1e6) + 1) for refusal in refusals]
        if not all(map(_holds, charges, least)):
            return None
        if read(charges, 0, least).admitted:
            return None
        elapsed = [int((at - refusal.heard) * 1e6) for refusal in refusals]
        states = [refusal.later(us) for refusal, us in zip(refusals, elapsed)]
        now = max([refusal.now + us for refusal, us in zip(refusals, elapsed)])
        return read(charges, now, states)._replace(source="cache")

    def answer_plain(self, plan: PlainSpend, at: float) -> AnyReading | None:
        template, keys = plan.template, plan.keys
        if template.bans or template.may_wait or not template.is_of_debts:
            return self.answer(plan.whole_plan, at)
        now, debts, is_refused = 0, list[int](), False
        for key, (bucket, _, enforced, rows) in zip(keys, template.buckets):
            refusal = self.refusals.get(key)
            if refusal is None or at - refusal.sent >= LONGEST:
                return None
            # It was banned or had other limits.
            if refusal.bucket is not bucket:
                return self.answer(plan.whole_plan, at)
            least = refusal.later(int((at - refusal.sent) * SKEW * 1e6) + 1)
            if enforced:
                is_refused |= any(debt + increment > capacity for debt, (_, increment, capacity) in zip(least, rows))
            elapsed_us = int((at - refusal.heard) * 1e6)
            debts += refusal.later(elapsed_us)
            now = max(now, refusal.now + elapsed_us)
        if not is_refused:
            return None
        reading = template.reading(keys, now, debts, False)
        reading.source = "cache"
        return reading

    def learn(self, plan: AnyPlan, reading: AnyReading, sent: float, heard: float) -> None:
        """Remember a refusal, or forget changed buckets; ``sent`` and ``heard`` are the call's times."""
        refused = plan.verb == "spend" and not reading.admitted
        gives_back = plan.gives_back
        if not (refused or gives_back or any(charge.key in self.refusals for charge in plan.charges)):
            return
        with self._lock:
            for charge, states, _ in reading.buckets:
                key, last = charge.key, self._given_back.get(charge.key)
                is_known = last is None or last.is_followed_by(sent, reading.now)
                if gives_back and plan.verb != "adjust":
                    self._given_back[key] = _GivenBack(heard if last is None else max(heard, last.heard), math.inf)
                elif gives_back and is_known:
                    self._given_back[key] = _GivenBack(heard, reading.now)
                elif refused and not is_known:
                    continue
                self.refusals.pop(key, None)
                if is_known and (refused or (gives_back and plan.verb == "adjust")) and _holds(charge, states):
                    self.refusals[key] = _Refusal(charge.bucket, states, reading.now, sent, heard)
            self._drop_oldest()

    def forget(self, keys: Iterable[str], now: int, sent: float, heard: float) -> None:
        """Forget refusals of buckets that were refunded at ``now``, Redis' clock in Unix µs."""
        with self._lock:
            for key in keys:
                last = self._given_back.get(key)
                if last is None or last.is_followed_by(sent, now):
                    self._given_back[key] = _GivenBack(heard, now)
                self.refusals.pop(key, None)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for kept in (self.refusals, self._given_back):
            while len(kept) > MAX_BUCKETS:
                del kept[next(iter(kept))]


def _holds(charge: Charge, states: Sequence[State]) -> bool:
    return charge.bucket.algorithm.refusal_is_stable(states, charge.bucket, charge.cost)


MAX_BANS = 10_000
"""Maximum of entries; the oldest are dropped first."""


class KnownBans:
    """Bans by bucket key. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[float, int]] = {}
        """End of each ban, and Redis' clock (Unix µs) when it was read."""
        self._next_end = math.inf
        self._lock = RLock()

    def learn(self, reading: AnyReading, heard: float) -> None:
        for charge, states, _ in reading.buckets:
            if not charge.cost:
                continue
            if charge.bucket.algorithm is ban and any(states):
                self._note(charge.key, heard + max(states) / 1e6, reading.now)
            else:
                self.forget([charge.key], reading.now)

    def forget(self, keys: Iterable[str], now: int) -> None:
        """Forget bans that were lifted before ``now``, Redis' clock in Unix µs."""
        for key in keys:
            known = self.ends.get(key)
            # Otherwise the reading is older.
            if known is not None and now >= known[1]:
                with self._lock:
                    self.ends.pop(key, None)

    def drop_ended(self, at: float) -> None:
        if at < self._next_end:
            return
        with self._lock:
            self.ends = {key: known for key, known in self.ends.items() if known[0] > at}
            self._next_end = min([end for end, _ in self.ends.values()], default=math.inf)

    def left_us(self, key: str, at: float) -> int:
        known = self.ends.get(key)
        return max(0, round((known[0] - at) * 1e6)) if known else 0

    def _note(self, key: str, until: float, now: int) -> None:
        with self._lock:
            self.ends.pop(key, None)
            self.ends[key] = until, now
            self._next_end = min(self._next_end, until)
            while len(self.ends) > MAX_BANS:
                del self.ends[next(iter(self.ends))]
