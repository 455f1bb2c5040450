"""Plans for a store and the readings it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import urandom
from typing import Any, Literal, NamedTuple

from limitgate.algorithms import ban, gcra
from limitgate.algorithms.base import Amount, State
from limitgate.errors import ConfigError
from limitgate.limits.bucket import LEASE_SPARE_US, Bucket, banned
from limitgate.limits.limit import Limit

Source = Literal["nobody", "store", "cache", "lease", "local"]
"""``cache``: a stored refusal; ``local``: this process in an outage; ``nobody``: no buckets."""
Verb = Literal["spend", "peek", "look", "adjust", "reset", "ban"]


def check_cost(cost: object) -> int:
    if type(cost) is not int:
        raise TypeError(f"cost is a {type(cost).__name__}, expected an integer, or in a rule a callable that returns one")
    if cost < 0:
        raise ValueError(f"cost is {cost}, expected at least 0")
    return cost


def new_slot() -> int:
    """Return a unique name of 51 bits. `urandom` doesn't repeat after a fork."""
    return (int.from_bytes(urandom(7), "little") >> 5) + 1


REQUESTS = "requests"
TOKENS: dict[int, tuple[str, ...]] = {
    1: ("tokens",),
    2: ("input_tokens", "output_tokens"),
    3: ("tokens", "input_tokens", "output_tokens"),
}
"""Units of limits that have their own costs, by the number of such limits."""


class Adjustment(NamedTuple):
    """Change of a charge: requests to take in advance, and corrections."""

    most: int
    """Number of further requests to take."""
    as_of: int
    """When the charge began to drain, in Unix µs of the store."""
    back: Sequence[Amount]
    """Refund per window. A negative amount is charged even if it doesn't fit."""
    grace: Sequence[int]
    """µs after which a refund becomes partial, per window."""

    @property
    def gives_back(self) -> bool:
        return any(self.back)


class Charge(NamedTuple):
    key: str
    """Key in the store, with digests only."""
    bucket: Bucket
    cost: int
    enforced: bool
    rule: str | None
    adjustment: Adjustment | None = None
    max_wait_us: int = 0
    """Maximum wait for a turn, in µs."""
    slot: int = 0
    turn_us: int = 0
    """In a reading, the time until the turn, which all limits share."""
    unit: str = REQUESTS

    def adjusted(self, back: Sequence[Amount], grace: Sequence[int], as_of: int = 0) -> Charge:
        """Return a zero-cost charge with an adjustment."""
        return self._replace(cost=0, enforced=False, max_wait_us=0, adjustment=Adjustment(0, as_of, back, grace))

    def released(self) -> Charge:
        return self.adjusted([self.cost], [self.slot])

    def under_ban(self) -> Charge:
        """Return this charge in a banned bucket."""
        return self._replace(bucket=banned(self.bucket), max_wait_us=0)

    def renewed(self) -> Charge:
        """A zero-cost charge that renews this slot, or takes an expired one again."""
        return self.adjusted([-self.cost], [self.slot])

    def share(self, processes: int) -> Charge:
        return self if processes == 1 else self._replace(bucket=self.bucket.share(processes, self.cost))


class Plan(NamedTuple):
    """Charges of a request: all that fit are made, or none."""

    charges: tuple[Charge, ...]
    verb: Verb = "spend"
    ban_us: int = 0

    @classmethod
    def spend(cls, charges: Iterable[Charge]) -> Plan:
        """Charge nothing unless all enforced charges fit; then make these, and the shadow charges that fit."""
        return cls(tuple(charges), "spend")

    @classmethod
    def peek(cls, charges: Iterable[Charge]) -> Plan:
        """Only read. The script lets debts drain under the stored count, then applies a changed one."""
        return cls(tuple(charges), "peek")

    @classmethod
    def look(cls, charges: Iterable[Charge]) -> Plan:
        """Only read, even if a stored count differs."""
        return cls(tuple(charges), "look")

    @classmethod
    def adjust(cls, charges: Iterable[Charge]) -> Plan:
        """Refund, ban, renew or release, without conditions."""
        return cls(tuple(charges), "adjust")

    @classmethod
    def reset(cls, charges: Iterable[Charge]) -> Plan:
        return cls(tuple(charges), "reset")

    @classmethod
    def ban(cls, charges: Iterable[Charge], us: int) -> Plan:
        """Refuse for at least ``us`` µs; 0 lifts bans. Usage stays."""
        return cls(tuple(charges), "ban", us)

    @property
    def gives_back(self) -> bool:
        """True if the plan makes cached refusals wrong."""
        return self.verb in ("reset", "ban") or any(
            charge.adjustment and charge.adjustment.gives_back for charge in self.charges
        )

    @property
    def has_adjustments(self) -> bool:
        return any(charge.adjustment for charge in self.charges)

    def named(self) -> Plan:
        slot = new_slot()
        return self._replace(
            charges=tuple([charge._replace(slot=slot) if charge.bucket.has_slots else charge for charge in self.charges])
        )


class BucketReading(NamedTuple):
    charge: Charge
    before: Sequence[State]
    after: Sequence[State] | None
    """None if the charge does not fit."""


class Reading(NamedTuple):
    """A store's answer to a plan."""

    now: int
    """Store clock, Unix µs."""
    buckets: Sequence[BucketReading]
    admitted: bool
    """True if all enforced charges fit. Then all charges that fit are made, otherwise none."""
    waited: float = 0.0
    """Seconds without a reply."""

    source: Source = "store"

    def having_waited(self, waited: float) -> Reading:
        return self._replace(waited=waited)


def with_bans(
    charges: Sequence[Charge], states: Sequence[Sequence[State]], bans: Mapping[int, int]
) -> tuple[list[Charge], list[Sequence[State]]]:
    """Return charges and states under bans. ``bans`` has µs by index of the charge."""
    read_charges, read_states = list(charges), list(states)
    for place, left_us in bans.items():
        charge = charges[place]
        read_charges[place], read_states[place] = charge.under_ban(), _under_ban(charge, states[place], left_us)
    return read_charges, read_states


def _under_ban(charge: Charge, states: Sequence[State], left_us: int) -> list[State]:
    algorithm, cost = charge.bucket.algorithm, charge.cost
    found = []
    for limit, state in zip(charge.bucket.limits, states):
        wait = algorithm.wait_us(state, cost, limit)
        wait = None if wait is None else wait - charge.max_wait_us
        found.append(ban.Rest.of(left_us, wait, algorithm.refill_us(state, limit), algorithm.used(state, limit), cost))
    return found


# Takes half the time of the constructor.
_new = tuple.__new__


def read(charges: Sequence[Charge], now: int, states: Sequence[Sequence[State]]) -> Reading:
    """Compute a reading at ``now``. This is what the Lua script does atomically."""
    admitted, remembers_turns, is_shadow_full = True, False, False
    buckets: list[BucketReading] = []
    for charge, before in zip(charges, states):
        bucket, max_wait_us = charge.bucket, charge.max_wait_us
        after = bucket.algorithm.try_charge(before, bucket, charge.cost, max_wait_us, charge.slot)
        if after is None:
            if charge.enforced:
                admitted = False
            else:
                is_shadow_full = True
        if max_wait_us and bucket.algorithm.MAX_TURNS:
            remembers_turns = True
        buckets.append(_new(BucketReading, (charge, before, after)))
    if remembers_turns and admitted:
        buckets = _in_turn(buckets)
    if is_shadow_full:
        buckets = with_whole_shadows(buckets)
    reading: Reading = _new(Reading, (now, buckets, admitted, 0.0, "store"))
    return reading


def is_joined(charge: Charge, other: Charge) -> bool:
    """True for charges of the same shadow rule."""
    return not charge.enforced and not other.enforced and _counted_by(charge) == _counted_by(other)


def _counted_by(charge: Charge) -> tuple[str | None, str]:
    return charge.rule, charge.key.removesuffix(charge.bucket.suffix)


def with_whole_shadows(buckets: Sequence[BucketReading]) -> list[BucketReading]:
    """Make all charges of a shadow rule or none."""
    full = {_counted_by(charge) for charge, _, after in buckets if after is None and not charge.enforced}
    return [
        bucket if bucket.charge.enforced or _counted_by(bucket.charge) not in full else bucket._replace(after=None)
        for bucket in buckets
    ]


def _in_turn(buckets: list[BucketReading]) -> list[BucketReading]:
    """Make charges of other limits at the turn, so that they don't count the request earlier."""
    turn_us = 0
    for charge, before, _ in buckets:
        if charge.max_wait_us and charge.enforced:
            turn_us = max(turn_us, wait_us(charge, before) or 0)
    if not turn_us:
        return buckets
    return [_at(turn_us, *bucket) if bucket.charge.max_wait_us else bucket for bucket in buckets]


def _at(turn_us: int, charge: Charge, before: Sequence[State], after: Sequence[State] | None) -> BucketReading:
    if after is not None:
        longest = max(charge.max_wait_us, turn_us)
        after = charge.bucket.algorithm.try_charge(before, charge.bucket, charge.cost, longest, charge.slot, turn_us=turn_us)
    return BucketReading(charge._replace(turn_us=turn_us), before, after)


def wait_us(charge: Charge, states: Sequence[State]) -> int | None:
    """Return the µs until a charge fits; None if never."""
    longest = 0
    for limit, state in zip(charge.bucket.limits, states):
        wait = charge.bucket.algorithm.wait_us(state, charge.cost, limit)
        if wait is None:
            return None
        longest = max(longest, wait)
    return longest


def refund(plan: Plan, reading: Reading, costs: Sequence[int]) -> Plan:
    """Return the correction to the final costs, which may be empty.

    A refund is the difference, minus the part that has drained since. Older charges drain first. The refund is exact to the
    microsecond if there are no other requests, or while the debt exceeds what has drained. A shortfall is charged now, because
    concurrent requests could otherwise claim the same idle time.
    """
    read = zip(plan.charges, reading.buckets, costs)
    took = [(charge, bucket, cost) for charge, bucket, cost in read if bucket.after is not None]
    wrong = [_corrected(charge, bucket, reading.now, cost) for charge, bucket, cost in took if cost != charge.cost]
    return Plan.adjust([charge for charge in wrong if charge.adjustment and charge.adjustment.gives_back])


def full_refund(plan: Plan, reading: Reading) -> Plan:
    return refund(plan, reading, [0] * len(plan.charges))


def owed(reading: Reading, costs: Sequence[int]) -> Plan:
    """Return a plan that charges costs without conditions, if any remain after a refund."""
    charged = zip(reading.buckets, costs)
    owing = [
        _corrected(bucket.charge._replace(cost=0), bucket, reading.now, cost)
        for bucket, cost in charged
        if bucket.after is not None and bucket.charge.bucket.algorithm.IS_LIMIT
    ]
    return Plan.adjust([charge for charge in owing if charge.adjustment and charge.adjustment.gives_back])


def _corrected(charge: Charge, reading: BucketReading, now: int, cost: int) -> Charge:
    bucket, turn_us = charge.bucket, reading.charge.turn_us
    back, grace = bucket.algorithm.refund_amount(reading.before, bucket, charge.cost, cost, charge.slot, turn_us=turn_us)
    # The charge may come from an older lease.
    if bucket.lease and cost < charge.cost:
        back = [max(0, ticks - LEASE_SPARE_US * count) for ticks, count in zip(back, bucket.counts)]
        grace = [0] * len(back)
    return charge._replace(slot=0).adjusted(back, grace, now)


_NONE: Mapping[int, int] = {}
_WITH_COSTS = {tuple, list, dict}
_NAMED = TOKENS[3]
NO_COST = object()
"""Marks limits without their own cost."""


def with_own_costs(limits: Sequence[Any]) -> tuple[tuple[Any, ...], Mapping[int, int]]:
    """Split arguments such as ``("200000/minute", 900)`` into limits, and a mapping from places to own costs.

    Raises `TypeError` or `ValueError`.
    """
    if _WITH_COSTS.isdisjoint(map(type, limits)):
        return tuple(limits), _NONE
    bare, costs = [], {}
    for place, value in enumerate(limits):
        limit, cost = own_cost(value)
        bare.append(limit)
        if cost is not NO_COST:
            costs[place] = check_cost(cost)
            if isinstance(limit, Limit) and limit.lease:
                raise ConfigError(f"{limit!r} has a lease and its own cost, expected one of the two")
    return tuple(bare), costs


def own_cost(value: Any) -> tuple[Any, Any]:
    match value:
        case (str() | Limit() | {"limit": _}) as limit, cost if not isinstance(cost, str | Limit | dict) or cost in _NAMED:
            return limit, cost
        case {"limit": _, "cost": cost}:
            return {name: option for name, option in value.items() if name != "cost"}, cost
    return value, NO_COST


class Returned(NamedTuple):
    """The effect of a refund on later charges."""

    key: str
    charged_at: int
    """Unix µs of the store at the charge."""
    windows: Mapping[int, tuple[int, int]]
    """Debt before the charge, and refunded ticks, for each window."""

    def lowered(self, charge: Charge, now: int, debts: Sequence[int]) -> Sequence[int]:
        """Return the debts before another charge at ``now``, as if the refunded charge had not been made."""
        if charge.key != self.key or charge.bucket.algorithm is not gcra:
            return debts
        lowered = list(debts)
        for place, window in enumerate(charge.bucket.ids):
            before, ticks = self.windows.get(window, (0, 0))
            if (now, debts[place]) > (self.charged_at, before):
                lowered[place] = max(0, debts[place] - ticks)
        return debts if lowered == debts else lowered


def returned(correction: Plan, after: Reading, charges: Iterable[tuple[int, BucketReading]]) -> list[Returned]:
    """Return the refunded part of a correction. Only for GCRA, where refunds move up all later turns."""
    given = []
    made = {(bucket.charge.key, bucket.charge.bucket.ids): (now, bucket.before) for now, bucket in charges}
    for charge, (_, debts, _) in zip(correction.charges, after.buckets):
        known = made.get((charge.key, charge.bucket.ids))
        if known is None or charge.adjustment is None or charge.bucket.algorithm is not gcra:
            continue
        ticks = gcra.refunded(
            debts, charge.adjustment.back, after.now - charge.adjustment.as_of, charge.adjustment.grace, charge.bucket
        )
        if any(ticks):
            given.append(Returned(charge.key, known[0], dict(zip(charge.bucket.ids, zip(known[1], ticks)))))
    return given
