"""Plain plans: charges of GCRA buckets that fit now or do not, prepared once for all plans that differ in keys alone.

Almost every request makes one. What follows from the debts that were read is worked out here without an object for each charge.
It is the same as what `limitgate.limits.plan.read` and `limitgate.limits.decision.decide` say, which know every kind of plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from limitgate.algorithms import gcra
from limitgate.limits.decision import SECOND, Decision, Settlement, decision_of
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading, read

PlainReading = tuple[int, Sequence[int], float]
"""Clock of the store in Unix µs, what each window owed before in ticks of 1/count µs, and seconds of the store's silence."""

MAX_WINDOWS = 12
"""Windows of a plain plan at most: the script has a dozen variables for each, of 200 that Lua allows."""
_MAX_DEBT = 2**63 - 1
"""Ticks that a window of a plain plan may owe at most, so that 64 bits hold them."""


Row = tuple[int, int, int]
"""Of a window the ticks that a microsecond pays back, that the charge takes, and that fit."""


def is_plain(charge: Charge) -> bool:
    """True if a charge is one of GCRA that fits now or does not: nothing is leased, booked, borrowed or adjusted."""
    bucket = charge.bucket
    return (
        bucket.algorithm is gcra
        and not (bucket.lease or bucket.borrow or charge.adjustment or charge.max_wait_us)
        and 0 < charge.cost <= min(limit.most for limit in bucket.limits)
        and max(bucket.capacities) <= _MAX_DEBT
    )


class PlanTemplate:
    """Plain charges less their keys, and the numbers of their windows. Raises `ValueError` for charges that are not plain."""

    __slots__ = ("buckets", "charges", "nothing", "windows")

    def __init__(self, charges: Sequence[Charge]) -> None:
        count = sum(len(charge.bucket.limits) for charge in charges)
        if not (all(map(is_plain, charges)) and 0 < count <= MAX_WINDOWS):
            raise ValueError(f"{charges!r} are not plain, expected GCRA without lease, delay, borrowing and adjustment")
        self.charges = tuple(charges)
        self.buckets = tuple((charge.bucket, charge.cost, charge.enforced, _rows(charge)) for charge in charges)
        """Per charge its bucket, its cost, true if it may refuse, and its rows."""
        self.windows = tuple(
            (count, increment, capacity, limit.period_us, limit.burst, charge)
            for charge in charges
            for limit, (count, increment, capacity) in zip(charge.bucket.limits, _rows(charge))
        )
        """Per window of all charges what is in its row, the ticks of one request, the burst, and the charge."""
        self.nothing = (0,) * count
        """Debts of windows that nobody has used; a bucket has as many at most."""

    def plan(self, keys: Sequence[str]) -> Plan:
        """Plan with these keys, one for each charge."""
        return Plan(tuple([charge._replace(key=key) for charge, key in zip(self.charges, keys)]))

    def reading(self, plan: Plan, reading: PlainReading) -> Reading:
        """Reading of a plan of this template, with an object for each charge."""
        now, debts, waited = reading
        each = iter(debts)
        states = [list(islice(each, len(charge.bucket.limits))) for charge in self.charges]
        return read(plan.charges, now, states)._replace(waited=waited)

    def decide(self, keys: Sequence[str], reading: PlainReading, settlement: Settlement) -> Decision | None:
        """Decision to admit the plan with these keys; None unless every charge fits, those of shadow rules included."""
        least, latest, burst, deciding = -1, -1, 0, self.charges[0]
        for debt, (count, increment, capacity, period_us, limit, charge) in zip(reading[1], self.windows):
            owed = debt + increment
            if owed > capacity:
                return None
            left = (capacity - owed) // period_us
            if left <= least or least < 0:
                refill = -(-owed // count)
                if left != least or refill > latest:
                    least, latest, burst, deciding = left, refill, limit, charge
        evidence = _Evidence(self, keys, reading)
        wait, reset = 0.0, latest / SECOND
        return decision_of(
            True, burst, least, wait, reset, deciding.cost, deciding.rule, False, 0.0, evidence, True, settlement
        )


class _Evidence(Sequence[BucketReading]):
    """Readings of the buckets of a plain plan, each made an object when it is asked for."""

    __slots__ = ("_keys", "_reading", "_template")

    def __init__(self, template: PlanTemplate, keys: Sequence[str], reading: PlainReading) -> None:
        self._template = template
        self._keys = keys
        self._reading = reading

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: Any) -> Any:
        return self._template.reading(self._template.plan(self._keys), self._reading).buckets[place]

    def __iter__(self) -> Iterator[BucketReading]:
        return iter(self[:])


def charged(owed: Sequence[int], elapsed_us: int, rows: Sequence[Row], debts: list[int]) -> list[int] | None:
    """Debts of a bucket after its charge, None if that does not fit. Those before it, drained, are appended to ``debts``."""
    after: list[int] | None = []
    for written, (count, increment, capacity) in zip(owed, rows):
        debt = written - elapsed_us * count
        if debt < 0:  # noqa: PLR1730 - max() takes longer
            debt = 0
        debts.append(debt)
        debt += increment
        if debt > capacity:
            after = None
        elif after is not None:
            after.append(debt)
    return after


def _rows(charge: Charge) -> tuple[Row, ...]:
    return tuple((limit.count, charge.cost * limit.period_us, limit.capacity) for limit in charge.bucket.limits)
