"""Plans, which go to a store, and readings, which come back: plain data, the language between rules, stores and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import urandom
from typing import Literal, NamedTuple

from limitgate.algorithms.base import Amount, State
from limitgate.limits.bucket import Bucket, banned

Source = Literal["nobody", "store", "cache", "lease", "local"]
"""Where a decision comes from: a store, a refusal of its that holds, a lease, this process in its place, or nowhere."""
Verb = Literal["spend", "peek", "look", "adjust", "reset", "ban"]
"""`Plan` has a constructor for each."""


def check_cost(cost: object) -> int:
    """``cost`` as it may be charged. Raises `TypeError` if it is no integer, `ValueError` if it is negative."""
    if type(cost) is not int:
        raise TypeError(f"cost is a {type(cost).__name__}, expected an integer, or in a rule a callable that gives one")
    if cost < 0:
        raise ValueError(f"cost is {cost}, expected at least 0")
    return cost


def new_slot() -> int:
    """Name of slots that nobody has had before, of 51 bits: by no generator that an application or a fork may repeat."""
    return (int.from_bytes(urandom(7), "little") >> 5) + 1


class Adjustment(NamedTuple):
    """Charges made to a bucket in advance, and charges put back that were made before.

    What was taken drains in the bucket like everything else. So the later it is put back the less is left of it, but for
    the time in which the bucket had other debts to drain. What is taken on top drains by the same rule.
    """

    most: int
    """Number of requests to take besides the charge, as many as fit."""
    as_of: int
    """The store's clock from which on what is put back counts as drained, Unix µs."""
    back: Sequence[Amount]
    """Amount that is put back per window, as its algorithm counts it; if negative, taken on top, even if it does not fit."""
    grace: Sequence[int]
    """For how long after ``as_of`` it can be put back in whole, µs per window: a bucket may have other debts to drain first."""

    @property
    def gives_back(self) -> bool:
        """True if anything is put back, or taken on top."""
        return any(self.back)


class Charge(NamedTuple):
    """Charge of a request to one bucket."""

    key: str
    """The bucket's key in the store: digests only, nothing that a client sent."""
    bucket: Bucket
    cost: int
    enforced: bool
    """True if this bucket may refuse the request; a shadow rule's may not."""
    rule: str | None
    """The rule's name, None in a Limiter."""
    adjustment: Adjustment | None = None
    """Adjustment that is made besides, None for nothing."""
    max_wait_us: int = 0
    """For how long the request may wait for its turn, µs: so far ahead it can be booked. At most `Bucket.longest_wait_us`."""
    slot: int = 0
    """Name of the slot that is taken, where requests in flight are counted; 0 elsewhere."""
    turn_us: int = 0
    """In a reading, the turn that the request has by all limits together, µs from then, if any of them remembers turns."""

    def adjusted(self, back: Sequence[Amount], grace: Sequence[int], as_of: int = 0) -> Charge:
        """A charge of nothing that makes an adjustment of this one's bucket, see `Adjustment`."""
        return self._replace(cost=0, enforced=False, max_wait_us=0, adjustment=Adjustment(0, as_of, back, grace))

    def released(self) -> Charge:
        """A charge of nothing that gives this one's slot back."""
        return self.adjusted([self.cost], [self.slot])

    def under_ban(self) -> Charge:
        """This charge as it is read from a banned bucket, where nobody waits for a turn."""
        return self._replace(bucket=banned(self.bucket), max_wait_us=0)

    def renewed(self) -> Charge:
        """A charge of nothing that renews this one's slot, or takes it again if it is gone and there is room."""
        return self.adjusted([-self.cost], [self.slot])

    def share(self, processes: int) -> Charge:
        """This charge by one of so many processes that each limit alone, see `Limit.share`."""
        return self if processes == 1 else self._replace(bucket=self.bucket.share(processes, self.cost))


class Plan(NamedTuple):
    """All buckets that one request touches. They are charged together or not at all."""

    charges: tuple[Charge, ...]
    verb: Verb = "spend"
    ban_us: int = 0
    """For how long the buckets are banned by a plan of verb ``ban``, µs."""

    @classmethod
    def spend(cls, charges: Iterable[Charge]) -> Plan:
        """A request: take every charge that fits if all enforced ones do."""
        return cls(tuple(charges), "spend")

    @classmethod
    def peek(cls, charges: Iterable[Charge]) -> Plan:
        """A question: charge nothing. What is owed drains as it was told, under the count that was asked for."""
        return cls(tuple(charges), "peek")

    @classmethod
    def look(cls, charges: Iterable[Charge]) -> Plan:
        """A question by somebody whom the limits do not concern: change nothing, also where they have another count."""
        return cls(tuple(charges), "look")

    @classmethod
    def adjust(cls, charges: Iterable[Charge]) -> Plan:
        """Refunds, bans, and slots that are renewed or released: make the adjustments, whether they fit or not."""
        return cls(tuple(charges), "adjust")

    @classmethod
    def reset(cls, charges: Iterable[Charge]) -> Plan:
        """Empty the windows of the charges."""
        return cls(tuple(charges), "reset")

    @classmethod
    def ban(cls, charges: Iterable[Charge], us: int) -> Plan:
        """Refuse all charges to these buckets for at least so many microseconds; 0 lifts their bans. What they owe stays."""
        return cls(tuple(charges), "ban", us)

    @property
    def gives_back(self) -> bool:
        """True if buckets owe less afterwards, or something that nobody asked them about."""
        return self.verb in ("reset", "ban") or any(
            charge.adjustment and charge.adjustment.gives_back for charge in self.charges
        )

    @property
    def has_adjustments(self) -> bool:
        """True if it puts something back, or takes something in advance."""
        return any(charge.adjustment for charge in self.charges)

    def named(self) -> Plan:
        """This plan with a name for the slots that it takes, which nobody has had before."""
        slot = new_slot()
        return self._replace(
            charges=tuple([charge._replace(slot=slot) if charge.bucket.has_slots else charge for charge in self.charges])
        )


class BucketReading(NamedTuple):
    """One bucket of a plan, as a store has read it."""

    charge: Charge
    """The plan's own; `Charge.under_ban` if it costs something and the bucket is banned."""
    before: Sequence[State]
    """State of each window before the plan was carried out."""
    after: Sequence[State] | None
    """States if the charge is made; None if it does not fit."""


class Reading(NamedTuple):
    """Reply of a store to a plan, and what follows from it for the plan as a whole."""

    now: int
    """The store's clock, Unix µs."""
    buckets: Sequence[BucketReading]
    """One for each charge, in the order of the plan."""
    admitted: bool
    """True if the request passes: every enforced charge fits. Then each charge that fits is made, else none is."""
    waited: float = 0.0
    """Seconds for which the store was silent before, while this process was there to listen, as far as it measures that."""

    source: Source = "store"
    """Where it comes from."""

    def having_waited(self, waited: float) -> Reading:
        """The same after so many seconds of silence."""
        return self._replace(waited=waited)


def with_bans(
    charges: Sequence[Charge], states: Sequence[Sequence[State]], bans: Mapping[int, int]
) -> tuple[list[Charge], list[Sequence[State]]]:
    """Charges and states as they are read where some buckets are banned: ``bans`` has the rest in µs by the charge's place."""
    read_charges, read_states = list(charges), list(states)
    for place, left_us in bans.items():
        charge = charges[place].under_ban()
        read_charges[place], read_states[place] = charge, [left_us] * len(charge.bucket.ids)
    return read_charges, read_states


_new = tuple.__new__  # half the time that a named tuple's own takes


def read(charges: Sequence[Charge], now: int, states: Sequence[Sequence[State]]) -> Reading:
    """The reading of ``states`` at ``now``. Every store's verdict is made here; Lua repeats it where it must be atomic."""
    admitted, remembers_turns = True, False
    buckets: list[BucketReading] = []
    for charge, before in zip(charges, states):
        bucket, max_wait_us = charge.bucket, charge.max_wait_us
        after = bucket.algorithm.try_charge(before, bucket, charge.cost, max_wait_us, charge.slot)
        if after is None and charge.enforced:
            admitted = False
        if max_wait_us and bucket.algorithm.MAX_TURNS:
            remembers_turns = True
        buckets.append(_new(BucketReading, (charge, before, after)))
    if remembers_turns and admitted:
        buckets = _in_turn(buckets)
    reading: Reading = _new(Reading, (now, buckets, admitted, 0.0, "store"))
    return reading


def _in_turn(buckets: list[BucketReading]) -> list[BucketReading]:
    """The buckets of a request that waits for its turn by all of them, charged as of this turn by each.

    A limit that remembers turns has many at the same moment, so none beside it may count them one by one before that.
    """
    turn_us = 0
    for charge, before, _ in buckets:
        if charge.max_wait_us and charge.enforced:
            turn_us = max(turn_us, wait_us(charge, before) or 0)
    if not turn_us:
        return buckets
    return [_at(turn_us, *bucket) if bucket.charge.max_wait_us else bucket for bucket in buckets]


def _at(turn_us: int, charge: Charge, before: Sequence[State], after: Sequence[State] | None) -> BucketReading:
    """A bucket charged as of a turn, if the charge fits."""
    if after is not None:
        longest = max(charge.max_wait_us, turn_us)
        after = charge.bucket.algorithm.try_charge(before, charge.bucket, charge.cost, longest, charge.slot, turn_us=turn_us)
    return BucketReading(charge._replace(turn_us=turn_us), before, after)


def wait_us(charge: Charge, states: Sequence[State]) -> int | None:
    """Microseconds until a charge fits into every window of its bucket, None if it never does."""
    longest = 0
    for limit, state in zip(charge.bucket.limits, states):
        wait = charge.bucket.algorithm.wait_us(state, charge.cost, limit)
        if wait is None:
            return None
        longest = max(longest, wait)
    return longest
