"""Requests taken in advance: a process debits a bucket for several requests at once and admits these without asking.

What is taken counts as used in Redis from the moment it is taken, so nothing is ever let through twice. But a debt drains,
and what has drained by the time it is used would be let through on top of it. So a lease keeps two debts per window, both as
Redis would see them if nobody else asked:

    ahead   with all that was taken in advance, drained since
    held    with what was really used, at the time at which it was used

Their difference is what may still be used. It melts as soon as ``held`` is paid back, just as an idle bucket earns nothing
beyond its burst. So in any interval no more is admitted than without leases, over all processes together (docs/architecture.md
has the proof). A lease ends after `LONGEST` seconds, or when it does not suffice; then what is left is given back, but for what
drains in `LONGEST` seconds: leases that were taken since count on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from limitgate.algorithms import gcra
from limitgate.limits.bucket import LEASE_SPARE_US, Bucket
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, read
from limitgate.limits.template import AnyPlan, AnyReading
from limitgate.stores.redis.deny_cache import SKEW

LONGEST = 1.0
"""Seconds for which a lease is used."""
MAX_BUCKETS = 1_000
"""Buckets that are leased from at a time; the next ones ask Redis for every request. All may have to be given back at once."""


class _Held:
    """Lease of this process on a bucket."""

    __slots__ = ("ahead", "as_of", "began", "bucket", "debts", "sent")

    def __init__(self, bucket: Bucket, ahead: Sequence[int], debts: Sequence[int], now: int, sent: float) -> None:
        self.bucket = bucket
        self.ahead = ahead
        self.debts = debts
        """Debts with what was really used, in ticks per window."""
        self.began = self.as_of = now
        """Redis' clock when it was taken, and at which the debts stand; Unix µs."""
        self.sent = sent

    def forward(self, at: float) -> None:
        """Let the debts drain up to a time, rather too much than too little."""
        now = self.began + int((at - self.sent) * SKEW * 1e6) + 1
        if now > self.as_of:
            self.ahead = gcra.advance(self.ahead, now - self.as_of, self.bucket)
            self.debts = gcra.advance(self.debts, now - self.as_of, self.bucket)
            self.as_of = now

    def view(self) -> list[int]:
        """The bucket's debts if everything is gone but what we hold; nothing else is sure."""
        return [full - (ahead - debt) for full, ahead, debt in zip(self.bucket.capacities, self.ahead, self.debts)]

    def lease(self, most: int) -> Adjustment:
        """Adjustment that gives back what is held but for what is spared, and takes up to so many requests anew."""
        bucket = zip(self.ahead, self.debts, self.bucket.counts)
        back = [max(0, ahead - LEASE_SPARE_US * count - debt) for ahead, debt, count in bucket]
        return Adjustment(most, self.as_of, back, [0] * len(back))


class Leases:
    """Leases of this process on buckets whose limits have a ``lease``. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self.pending: set[str] = set()
        """Buckets that a call on its way takes a lease from."""
        self._lock = RLock()

    def __len__(self) -> int:
        """Number of buckets leased from."""
        return len(self._held)

    def answer(self, plan: AnyPlan, at: float) -> Reading | None:
        """Admit a plan out of what is held of all its buckets; None if that does not suffice."""
        counted = [charge for charge in plan.charges if charge.bucket.algorithm.IS_LIMIT]
        if plan.verb != "spend" or not counted or not all(charge.bucket.lease for charge in counted):
            return None  # on a cluster a part may be a ban alone
        with self._lock:
            leases = []
            for charge in counted:
                held = self._held.get(charge.key)
                if held is None or held.bucket is not charge.bucket or at - held.sent >= LONGEST:
                    return None
                held.forward(at)
                leases.append(held)
            views = [held.view() for held in leases]
            for charge, debts in zip(counted, views):
                if gcra.try_charge(debts, charge.bucket, charge.cost + 1) is None:
                    return None  # the last one is kept: nobody shall read "0 remaining" only because it is all that we hold
            by_key = dict(zip([charge.key for charge in counted], views))
            states = [by_key.get(charge.key) or charge.bucket.algorithm.initial(0, charge.bucket) for charge in plan.charges]
            reading = read(plan.charges, max([held.as_of for held in leases]), states)
            for held, charge in zip(leases, counted):
                weights = held.bucket.weights
                held.debts = [debt + charge.cost * weight for debt, weight in zip(held.debts, weights)]
            return reading._replace(source="lease")

    def extend(self, plan: Plan, at: float) -> Plan:
        """The plan as it is sent: its buckets are leased from anew, and what is held of them is given back."""
        if plan.verb == "spend":
            for charge in plan.charges:
                if charge.bucket.lease:
                    with self._lock:
                        return plan._replace(charges=tuple([self._extended(charge, at) for charge in plan.charges]))
        return plan

    def _extended(self, charge: Charge, at: float) -> Charge:
        key, bucket = charge.key, charge.bucket
        if not bucket.lease or not charge.cost or key in self.pending or len(self._held) + len(self.pending) >= MAX_BUCKETS:
            return charge
        held = self._held.get(key)
        if held is None:
            nothing = [0] * len(bucket.ids)
            lease = Adjustment(bucket.lease, 0, nothing, nothing)
        elif held.bucket is bucket:
            del self._held[key]
            held.forward(min(at, held.sent + LONGEST))  # since its end it drains on its way, with nothing of it used
            lease = held.lease(bucket.lease)
        else:  # the rule was changed: what was taken under the old one is given back when it ends
            return charge
        self.pending.add(key)
        return charge._replace(adjustment=lease)

    def learn(self, reading: AnyReading, sent: float) -> None:
        """Note what a plan from `extend`, which was sent at a time, has taken in advance."""
        for charge, _, after in reading.buckets:
            if charge.adjustment is None or not charge.adjustment.most:
                continue
            with self._lock:
                self.pending.discard(charge.key)
                if reading.admitted and after is not None:
                    bucket = charge.bucket
                    rooms = zip(bucket.capacities, after, bucket.weights)
                    extra = min([charge.adjustment.most, *[(full - debt) // weight for full, debt, weight in rooms]])
                    if extra:
                        ahead = [debt + extra * weight for debt, weight in zip(after, bucket.weights)]
                        self._held[charge.key] = _Held(bucket, ahead, after, reading.now, sent)

    def forget(self, plan: AnyPlan) -> None:
        """A plan from `extend` was not answered: whatever it took is left to drain."""
        for charge in plan.charges:
            if charge.adjustment and charge.adjustment.most:
                self.pending.discard(charge.key)

    def pause(self, at: float) -> float | None:
        """Seconds from a time until the oldest lease ends, when it is due to be given back; None if there is none."""
        with self._lock:
            oldest = next(iter(self._held.values()), None)
        return None if oldest is None else max(0.0, oldest.sent + LONGEST - at)

    def ended(self, at: float, age: float = LONGEST) -> list[Plan]:
        """End all leases of an age in seconds or above at a time. Returns a plan for each, which gives it back."""
        plans = []
        with self._lock:
            for key, held in list(self._held.items()):
                if at - held.sent < age:
                    break
                del self._held[key]
                held.forward(min(at, held.sent + LONGEST))
                lease = held.lease(0)
                if lease.gives_back:
                    plans.append(Plan.adjust([Charge(key, held.bucket, 0, enforced=False, rule=None, adjustment=lease)]))
        return plans
