"""Refusals that hold: a caller that was refused is answered here until the moment at which it may return.

That moment only moves later, unless somebody gives back, resets or changes the limit. So what the script read
when it refused is kept, and a request is refused without asking only if it surely would not fit: by the time since the call
was *sent*, when less was owed than we know. What it is told goes by the time since the reply was *heard*, so that the wait
it is promised is enough. After `LONGEST` seconds Redis is asked again, so that a reset by somebody else is seen.

Bans that were seen are remembered as well, for as long as they last: they hold, too, while Redis cannot be asked. Whoever asks
Redis learns how a bucket stands, so a ban that was lifted is forgotten with the next reading of its bucket.
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
"""Seconds for which a refusal is repeated without asking."""
MAX_BUCKETS = 10_000
"""Buckets that are remembered; the oldest go first, and none is of use for longer than `LONGEST`."""
SKEW = 1.001
"""Factor by which Redis' clock may run faster than ours: twice what NTP ever slews a clock (500 ppm)."""


class _Refusal(NamedTuple):
    """A bucket as the script read it when it refused."""

    bucket: Bucket
    states: Sequence[State]
    now: int
    """Redis' clock, Unix µs."""
    sent: float
    heard: float

    def later(self, elapsed_us: int) -> Sequence[State]:
        """Return its states some time later."""
        return self.bucket.algorithm.advance(self.states, elapsed_us, self.bucket)


class _GivenBack(NamedTuple):
    """The last call that put something back into a bucket."""

    heard: float
    now: float
    """Redis' clock then; infinity where only what was sent after it was heard is to be believed: after a reset, which is worth
    more calls than to go by a clock that may step, and where it went on to take as much in advance."""

    def is_followed_by(self, sent: float, now: int) -> bool:
        """True if a reading is of a later time, or of the same call."""
        return sent >= self.heard or now >= self.now


class DenyCache:
    """Remembers the buckets of plans that were refused. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.refusals: dict[str, _Refusal] = {}
        """Buckets that are remembered, by their keys."""
        self._given_back: dict[str, _GivenBack] = {}
        self._lock = RLock()

    def __len__(self) -> int:
        """Number of buckets remembered."""
        return len(self.refusals)

    def knows(self, keys: Iterable[str]) -> bool:
        """True if the bucket of any of these keys is remembered."""
        refusals = self.refusals
        for key in keys:  # noqa: SIM110 - any() would make a generator for every request
            if key in refusals:
                return True
        return False

    def answer(self, plan: AnyPlan, at: float) -> Reading | None:
        """The reading of a plan that is surely refused at a time; None if Redis has to be asked.

        Redis has to be asked, too, where one of several buckets is not known: it might refuse for longer than the others.
        """
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
                charge = charge.under_ban()  # noqa: PLW2901 - as it was read
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
        """`answer` for a plain plan; of GCRA without an object for each charge."""
        template, keys = plan.template, plan.keys
        if template.bans or template.may_wait or not template.is_of_debts:
            return self.answer(plan.whole_plan, at)
        now, debts, is_refused = 0, list[int](), False
        for key, (bucket, _, enforced, rows) in zip(keys, template.buckets):
            refusal = self.refusals.get(key)
            if refusal is None or at - refusal.sent >= LONGEST:
                return None
            if refusal.bucket is not bucket:  # it was banned, or had other limits
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
        """Remember the reading of a call that was sent and heard at these times, or forget the buckets that it has changed.

        An adjustment after a refusal elsewhere says how its bucket stands now, so that the whole plan is known.
        """
        refused = plan.verb == "spend" and not reading.admitted
        gives_back = plan.gives_back
        if not (refused or gives_back or any(charge.key in self.refusals for charge in plan.charges)):
            return
        with self._lock:
            for charge, states, _ in reading.buckets:
                key, last = charge.key, self._given_back.get(charge.key)
                is_known = last is None or last.is_followed_by(sent, reading.now)  # else it may tell of a time before
                if gives_back and plan.verb != "adjust":
                    self._given_back[key] = _GivenBack(heard if last is None else max(heard, last.heard), math.inf)
                elif gives_back and is_known:
                    self._given_back[key] = _GivenBack(heard, reading.now)
                elif refused and not is_known:
                    continue
                self.refusals.pop(key, None)
                if (
                    is_known
                    and (refused or (gives_back and plan.verb == "adjust"))
                    and charge.bucket.algorithm.refusal_is_stable(states, charge.bucket, charge.cost)
                ):
                    self.refusals[key] = _Refusal(charge.bucket, states, reading.now, sent, heard)
            self._drop_oldest()

    def forget(self, keys: Iterable[str], now: int, sent: float, heard: float) -> None:
        """Forget buckets that something was put back into, at a time by Redis' clock and by a call of these times, see `learn`.

        Who has put it back was admitted, so nothing says that they would refuse now.
        """
        with self._lock:
            for key in keys:
                last = self._given_back.get(key)
                if last is None or last.is_followed_by(sent, now):
                    self._given_back[key] = _GivenBack(heard, now)
                self.refusals.pop(key, None)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop what is remembered of more than `MAX_BUCKETS`."""
        for kept in (self.refusals, self._given_back):
            while len(kept) > MAX_BUCKETS:
                del kept[next(iter(kept))]


def _holds(charge: Charge, states: Sequence[State]) -> bool:
    """True if these states say exactly how a charge stands, see `Algorithm.refusal_is_stable`."""
    return charge.bucket.algorithm.refusal_is_stable(states, charge.bucket, charge.cost)


MAX_BANS = 10_000
"""Bans that are remembered; those that were seen first go first."""


class KnownBans:
    """Remembers bans by the keys of their buckets. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[float, int]] = {}
        """By key when the ban ends, and the ``now`` of the reading that said so, Redis' clock in Unix µs."""
        self._next_end = math.inf
        self._lock = RLock()

    def learn(self, reading: AnyReading, heard: float) -> None:
        """Remember the bans in a reading that was heard at a time, and forget those of buckets that it shows without."""
        for charge, states, _ in reading.buckets:
            if not charge.cost:  # a reading of it shows no ban
                continue
            if charge.bucket.algorithm is ban and any(states):
                self._note(charge.key, heard + max(states) / 1e6, reading.now)
            else:
                self.forget([charge.key], reading.now)

    def forget(self, keys: Iterable[str], now: int) -> None:
        """Forget the bans of buckets that had none at a time by Redis' clock, Unix µs."""
        for key in keys:
            known = self.ends.get(key)
            if known is not None and now >= known[1]:  # else it was read before the ban
                with self._lock:
                    self.ends.pop(key, None)

    def drop_ended(self, at: float) -> None:
        """Forget the bans that have ended at a time, so that nobody looks for them any more."""
        if at < self._next_end:
            return
        with self._lock:
            self.ends = {key: known for key, known in self.ends.items() if known[0] > at}
            self._next_end = min([end for end, _ in self.ends.values()], default=math.inf)

    def left_us(self, key: str, at: float) -> int:
        """Microseconds for which a bucket is still banned at a time; 0 if that is not known."""
        known = self.ends.get(key)
        return max(0, round((known[0] - at) * 1e6)) if known else 0

    def _note(self, key: str, until: float, now: int) -> None:
        with self._lock:
            self.ends.pop(key, None)
            self.ends[key] = until, now
            self._next_end = min(self._next_end, until)
            while len(self.ends) > MAX_BANS:
                del self.ends[next(iter(self.ends))]
