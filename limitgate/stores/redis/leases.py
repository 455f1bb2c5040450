"""Leases: a process charges a bucket in advance and admits requests locally.

Redis counts a lease as used at once, and a lease is useless after it has drained there. So a lease has two debts per
window, as Redis would have them without other clients:

ahead   with the whole lease, drained since
held    with the local requests, charged when they came

The difference is usable. After ``held`` has drained, it shrinks, so leases never admit more than the limit (proof in
docs/architecture.md). A lease ends after `LONGEST` seconds or when used up. The rest is returned, except the part that drains
in `LONGEST` seconds, because later leases need it.
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
"""Seconds."""
MAX_BUCKETS = 1_000
"""Maximum of buckets, because all leases may have to be returned in one call."""


class _Held:
    __slots__ = ("ahead", "as_of", "began", "bucket", "debts", "sent")

    def __init__(self, bucket: Bucket, ahead: Sequence[int], debts: Sequence[int], now: int, sent: float) -> None:
        self.bucket = bucket
        self.ahead = ahead
        self.debts = debts
        self.began = self.as_of = now
        """Redis' clock, Unix µs."""
        self.sent = sent

    def forward(self, at: float) -> None:
        """Drain the debts up to time ``at``, rounded up."""
        now = self.began + int((at - self.sent) * SKEW * 1e6) + 1
        if now > self.as_of:
            self.ahead = gcra.advance(self.ahead, now - self.as_of, self.bucket)
            self.debts = gcra.advance(self.debts, now - self.as_of, self.bucket)
            self.as_of = now

    def view(self) -> list[int]:
        """Return the state as if other clients had used everything else."""
        return [full - (ahead - debt) for full, ahead, debt in zip(self.bucket.capacities, self.ahead, self.debts)]

    def lease(self, most: int) -> Adjustment:
        """Return an adjustment that returns the lease, except a spare part, and takes a new one of up to ``most``."""
        bucket = zip(self.ahead, self.debts, self.bucket.counts)
        back = [max(0, ahead - LEASE_SPARE_US * count - debt) for ahead, debt, count in bucket]
        return Adjustment(most, self.as_of, back, [0] * len(back))


class Leases:
    """Leases on buckets with a ``lease``. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self.pending: set[str] = set()
        """Keys with a request in flight."""
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._held)

    def answer(self, plan: AnyPlan, at: float) -> Reading | None:
        counted = [charge for charge in plan.charges if charge.bucket.algorithm.IS_LIMIT]
        if plan.verb != "spend" or not counted or not all(charge.bucket.lease for charge in counted):
            # On a cluster a part may consist of a ban only.
            return None
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
                    # A client must not read "0 remaining" only because the lease ends.
                    return None
            by_key = dict(zip([charge.key for charge in counted], views))
            states = [by_key.get(charge.key) or charge.bucket.algorithm.initial(0, charge.bucket) for charge in plan.charges]
            reading = read(plan.charges, max([held.as_of for held in leases]), states)
            for held, charge in zip(leases, counted):
                weights = held.bucket.weights
                held.debts = [debt + charge.cost * weight for debt, weight in zip(held.debts, weights)]
            return reading._replace(source="lease")

    def extend(self, plan: Plan, at: float) -> Plan:
        """Add new leases to a plan, in place of the current ones."""
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
            held.forward(min(at, held.sent + LONGEST))
            lease = held.lease(bucket.lease)
        else:
            return charge
        self.pending.add(key)
        return charge._replace(adjustment=lease)

    def learn(self, reading: AnyReading, sent: float) -> None:
        """Record the leases of a plan sent at ``sent``."""
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
        """Forget the leases of an unanswered plan, which drain."""
        for charge in plan.charges:
            if charge.adjustment and charge.adjustment.most:
                self.pending.discard(charge.key)

    def pause(self, at: float) -> float | None:
        with self._lock:
            oldest = next(iter(self._held.values()), None)
        return None if oldest is None else max(0.0, oldest.sent + LONGEST - at)

    def ended(self, at: float, age: float = LONGEST) -> list[Plan]:
        """End leases that are ``age`` seconds old. Return a plan for each."""
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
