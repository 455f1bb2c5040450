"""A Redis Cluster, as far as plans are concerned: which node holds which bucket, and plans whose buckets are on several.

A script's keys must be in one slot, so such a plan is taken apart, its parts are carried out side by side, each atomically,
and their readings are put together. If one part refuses, or fails, what the others took is given back, so that their buckets
are as if they had never been asked, see limitgate/limits/refund.py. Pure: knows no connection and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from limitgate.errors import StoreError
from limitgate.limits.plan import BucketReading, Plan, Reading
from limitgate.limits.refund import full_refund
from limitgate.limits.template import AnyPlan, whole
from limitgate.stores.redis.breaker import CHANCE, Breaker
from limitgate.stores.redis.dial.url import Address, parse_address
from limitgate.stores.redis.replies import Outcome

GIVE_BACK_TIMEOUT = 0.5
"""Seconds that giving back may take."""
MAP_PAUSE = 0.1
"""Seconds between two looks at who holds which slot."""


class Part(NamedTuple):
    """The charges of a plan in one hash slot."""

    hash_slot: int
    plan: AnyPlan
    places: Sequence[int]
    """Indices of its charges in the whole plan."""


def hash_slot(key: str) -> int:
    """The hash slot of a key. The same on every cluster."""
    return key_slot(key.encode("utf-8", "surrogatepass"))


def hash_slot_of(plan: AnyPlan) -> int:
    """The hash slot of a plan all of whose buckets are in one."""
    return hash_slot(plan.charges[0].key if isinstance(plan, Plan) else plan.keys[0])


def parts_of(plan: AnyPlan) -> list[Part]:
    """A plan taken apart by slots. A plain one stays plain only if all of its buckets are in one."""
    if not isinstance(plan, Plan):
        slot, *others = map(hash_slot, plan.keys)
        if others.count(slot) == len(others):
            return [Part(slot, plan, range(len(plan.keys)))]
    charges = plan.charges
    if len(charges) == 1:
        return [Part(hash_slot_of(plan), plan, (0,))]
    places: dict[int, list[int]] = {}
    for place, charge in enumerate(charges):
        places.setdefault(hash_slot(charge.key), []).append(place)
    if len(places) == 1:
        return [Part(next(iter(places)), plan, range(len(charges)))]
    return [
        Part(slot, Plan(tuple([charges[place] for place in own]), plan.verb, plan.ban_us), own) for slot, own in places.items()
    ]


class Conclusion(NamedTuple):
    """Outcome of a plan that was carried out in parts, and what follows from it."""

    outcome: Outcome
    refunds: Sequence[Plan] = ()
    """Plans that give back what parts took although the plan failed or was refused."""
    untouched: Sequence[tuple[Plan, Reading]] = ()
    """Buckets that a refused plan took nothing from all the same, full shadows and costs of nothing, with their readings."""


def concluded(plan: AnyPlan, parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Conclusion:
    """Conclude from the outcomes of its parts what becomes of a plan."""
    if len(parts) == 1:
        return Conclusion(outcomes[0])
    readings = [outcome for outcome in outcomes if isinstance(outcome, Reading)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
    outcome: Outcome
    if failures:
        outcome = StoreError(str(failures[0]), _worst(failures), _missed(parts, outcomes))
        outcome.__cause__ = failures[0]
        outcome.waited = max([each.waited for each in outcomes])
    else:
        outcome = _joined(plan, parts, readings)
        if outcome.admitted:
            return Conclusion(outcome)
    if plan.verb != "spend":
        return Conclusion(outcome)
    admitted = [
        (whole(part.plan), reading)
        for part, reading in zip(parts, outcomes)
        if isinstance(reading, Reading) and reading.admitted
    ]
    back = [full_refund(part, reading) for part, reading in admitted]
    untouched = [] if failures else [_untouched(reading) for _, reading in admitted]
    return Conclusion(outcome, [plan for plan in back if plan.charges], untouched)


def _missed(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> frozenset[str]:
    """The buckets of parts that failed, if the others can still be asked: not where the time is over."""
    failed = [(part, failure) for part, failure in zip(parts, outcomes) if isinstance(failure, StoreError)]
    if len(failed) == len(parts) or any(failure.fault == "timeout" for _, failure in failed):
        return frozenset()
    return frozenset(charge.key for part, _ in failed for charge in part.plan.charges)


def _worst(failures: Sequence[StoreError]) -> Any:
    """The kind of a failure; out of memory if anything failed by that, since ``on_error`` takes it less lightly."""
    return "oom" if any(failure.fault == "oom" for failure in failures) else failures[0].fault


def _joined(plan: AnyPlan, parts: Sequence[Part], readings: Sequence[Reading]) -> Reading:
    places = {place: bucket for part, reading in zip(parts, readings) for place, bucket in zip(part.places, reading.buckets)}
    buckets = [places.get(place) or BucketReading(charge, (), None) for place, charge in enumerate(plan.charges)]
    now = max([reading.now for reading in readings])
    waited = max([reading.waited for reading in readings])
    return Reading(now, buckets, all(reading.admitted for reading in readings), waited)


def _untouched(reading: Reading) -> tuple[Plan, Reading]:
    """Charges of an admitted plan that took nothing, and their reading as that of a refused plan."""
    untouched = [bucket for bucket in reading.buckets if not bucket.charge.cost or bucket.after is None]
    return Plan.spend([bucket.charge for bucket in untouched]), reading._replace(buckets=untouched, admitted=False)


class HasBreaker(Protocol):
    """A driver's object for a node."""

    @property
    def breaker(self) -> Breaker:
        """The breaker of the node."""


N = TypeVar("N", bound=HasBreaker)


class SlotMap(Generic[N]):
    """Which node holds which hash slot, as far as is known, and the driver's object for each node, made by ``open_node``.

    ``seeds`` are asked about slots that nothing is known of: the cluster says itself where they are.
    """

    def __init__(self, seeds: Sequence[Address], open_node: Callable[[Address], N]) -> None:
        self._seeds = tuple(seeds)
        self._open_node = open_node
        self._holders: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self.nodes: dict[Address, N] = {}
        self.is_outdated = False
        """True if some node is to be asked who holds which slot."""

    def holder(self, slot: int) -> Address:
        """The node to ask about a slot."""
        return self._holders[slot] or next((seed for seed in self._seeds if self._is_healthy(seed)), self._seeds[0])

    def node(self, address: Address) -> N:
        """The driver's object for a node, made now if there is none."""
        node = self.nodes.get(address)
        return self.nodes.setdefault(address, self._open_node(address)) if node is None else node

    def moved(self, slot: int, address: Address) -> None:
        """Note that another node holds a slot than was known."""
        self._holders[slot] = address
        self.is_outdated = True

    def learn(self, reply: object, origin: Address) -> bool:
        """Take what a node says to CLUSTER SLOTS. False if it knows of no slot."""
        holders: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, address in _ranges(reply, origin):
            holders[first : last + 1] = [address] * (last + 1 - first)
        if not any(holders):
            return False
        self._holders = holders
        return True

    def known(self) -> list[Address]:
        """All nodes that may know the others, first those that answer."""
        held = list(self._held())
        CHANCE.shuffle(held)  # one that is cut off and knows no better is not asked every time
        return sorted(dict.fromkeys([*held, *self._seeds]), key=lambda address: not self._is_healthy(address))

    def unused(self) -> list[Address]:
        """Nodes that something was made for, but that hold no slot any more. None while some slots are not known."""
        return [] if None in self._holders else list(self.nodes.keys() - self._held())

    def _held(self) -> set[Address]:
        return {address for address in self._holders if address is not None}

    def _is_healthy(self, address: Address) -> bool:
        return address not in self.nodes or self.nodes[address].breaker.is_closed


def unreachable(nodes: SlotMap[Any], parts: Sequence[Part], clock: Callable[[], float]) -> StoreError | None:
    """Failure of a plan that needs a node which does not answer, by the clock; None if all of its nodes may be asked."""
    failures = []
    for part in parts:
        try:
            nodes.node(nodes.holder(part.hash_slot)).breaker.check(clock)
        except StoreError as error:
            failures.append((part, error))
    if not failures:
        return None
    keys = frozenset(charge.key for part, _ in failures for charge in part.plan.charges)
    return StoreError(str(failures[0][1]), failures[0][1].fault, keys)


def address_at(host: str, port: int, origin: Address) -> Address:
    """The address of a host and a port as a node names them. Without a host it is the node's own, which was asked."""
    return (origin[0] if host in ("", "?") else host), port


def _ranges(reply: object, origin: Address) -> Iterable[tuple[int, int, Address]]:
    """The first and the last slot, and the node, of what CLUSTER SLOTS says; of what has another shape, nothing."""
    for entry in reply if isinstance(reply, list) else []:
        try:
            first, last, (host, port, *_), *_ = entry
            host, port = parse_address(host or "", port)
            if 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                yield first, last, address_at(host, port, origin)
        except (TypeError, ValueError):
            continue
