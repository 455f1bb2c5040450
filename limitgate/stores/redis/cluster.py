"""The slot map of a Redis Cluster, plans over several hash slots, and redirected calls.

A script's keys must be in one slot, so plans are split into atomic, parallel parts. If a part refuses or fails, the others are
refunded, see limitgate/limits/plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import MovedError, TryAgainError

from limitgate.errors import StoreError
from limitgate.limits.plan import BucketReading, Plan, Reading, full_refund, with_whole_shadows
from limitgate.limits.template import AnyPlan, whole
from limitgate.stores.redis.breaker import CHANCE, first_key
from limitgate.stores.redis.errors import Redirection
from limitgate.stores.redis.replies import Outcome
from limitgate.stores.redis.url import Address, parse_address
from limitgate.stores.redis.wire import Call

GIVE_BACK_TIMEOUT = 0.5
"""Seconds."""
MAP_PAUSE = 0.1
"""Seconds."""
PAUSE = 0.01
"""Seconds until a parked or split call is resent."""
MAX_HOPS = 5
"""Maximum of redirections without a pause."""


class Part(NamedTuple):
    hash_slot: int
    plan: AnyPlan
    places: Sequence[int]
    """Places of this part's charges in the whole plan."""


def hash_slot(key: str) -> int:
    return key_slot(key.encode("utf-8", "surrogatepass"))


def hash_slot_of(plan: AnyPlan) -> int:
    return hash_slot(plan.charges[0].key if isinstance(plan, Plan) else plan.keys[0])


def parts_of(plan: AnyPlan) -> list[Part]:
    """Split a plan by slots. A plain plan with several slots becomes a general one."""
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
    outcome: Outcome
    refunds: Sequence[Plan] = ()
    untouched: Sequence[tuple[Plan, Reading]] = ()
    """Parts of a refused plan in which nothing was charged."""


def concluded(plan: AnyPlan, parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Conclusion:
    if len(parts) == 1:
        return Conclusion(outcomes[0])
    readings = [outcome for outcome in outcomes if isinstance(outcome, Reading)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
    outcome: Outcome
    if failures:
        # Prefer "oom", which `on_error` treats more strictly.
        fault = "oom" if any(failure.fault == "oom" for failure in failures) else failures[0].fault
        outcome = StoreError(str(failures[0]), fault, _missed(parts, outcomes))
        outcome.__cause__ = failures[0]
        outcome.waited = max([each.waited for each in outcomes])
    else:
        outcome = _joined(plan, parts, readings)
        if outcome.admitted:
            return Conclusion(outcome, _refunds_of_torn_shadows(plan, outcome, parts, readings))
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


def _refunds_of_torn_shadows(plan: AnyPlan, reading: Reading, parts: Sequence[Part], readings: Sequence[Reading]) -> list[Plan]:
    back = []
    for part, of_part in zip(parts, readings) if plan.verb == "spend" else ():
        torn = [
            bucket
            for place, bucket in zip(part.places, of_part.buckets)
            if bucket.after is not None and reading.buckets[place].after is None
        ]
        if torn:
            back.append(full_refund(Plan.spend([bucket.charge for bucket in torn]), of_part._replace(buckets=torn)))
    return [plan for plan in back if plan.charges]


def _missed(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> frozenset[str]:
    failed = [(part, failure) for part, failure in zip(parts, outcomes) if isinstance(failure, StoreError)]
    if len(failed) == len(parts) or any(failure.fault == "timeout" for _, failure in failed):
        return frozenset()
    return frozenset(charge.key for part, _ in failed for charge in part.plan.charges)


def _joined(plan: AnyPlan, parts: Sequence[Part], readings: Sequence[Reading]) -> Reading:
    places = {place: bucket for part, reading in zip(parts, readings) for place, bucket in zip(part.places, reading.buckets)}
    buckets = [places.get(place) or BucketReading(charge, (), None) for place, charge in enumerate(plan.charges)]
    now = max([reading.now for reading in readings])
    waited = max([reading.waited for reading in readings])
    return Reading(now, with_whole_shadows(buckets), all(reading.admitted for reading in readings), waited)


def _untouched(reading: Reading) -> tuple[Plan, Reading]:
    untouched = [bucket for bucket in reading.buckets if not bucket.charge.cost or bucket.after is None]
    return Plan.spend([bucket.charge for bucket in untouched]), reading._replace(buckets=untouched, admitted=False)


class Route(NamedTuple):
    """Where to resend: at once, after `PAUSE` (park), or plan by plan after `PAUSE` (split)."""

    address: Address
    how: Literal["send", "park", "split"]


N = TypeVar("N", bound=Any)


class SlotMap(Generic[N]):
    """Maps slots to nodes. ``open_node`` creates nodes, and ``seeds`` are asked about unknown slots."""

    def __init__(self, seeds: Sequence[Address], open_node: Callable[[Address], N]) -> None:
        self._seeds = tuple(seeds)
        self._open_node = open_node
        self._holders: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self.nodes: dict[Address, N] = {}
        self.is_outdated: bool = False

    def holder(self, slot: int) -> Address:
        return self._holders[slot] or next((seed for seed in self._seeds if self._is_healthy(seed)), self._seeds[0])

    def node(self, address: Address) -> N:
        node = self.nodes.get(address)
        return self.nodes.setdefault(address, self._open_node(address)) if node is None else node

    def moved(self, slot: int, address: Address) -> None:
        self._holders[slot] = address
        self.is_outdated = True

    def route(self, call: Call, redirection: Redirection, origin: Address) -> Route:
        """Route a call that ``origin`` has redirected.

        MOVED      another node has the slot: resend, and look up the map
        ASK        the bucket has moved ahead of its slot: resend once, after ASKING
        TRYAGAIN   the moving slot splits the call's buckets: resend each plan after a pause

        After `MAX_HOPS` redirections a call pauses, because the nodes disagree. CLUSTERDOWN is a failure.
        """
        slot = hash_slot(first_key(call.first))
        if isinstance(redirection, TryAgainError):
            return Route(self.holder(slot), "split")
        address = address_at(redirection.host, redirection.port, origin)
        call.hops += 1
        call.asking = not isinstance(redirection, MovedError)
        if not call.asking:
            self.moved(slot, address)
        return Route(address, "send" if call.hops <= MAX_HOPS else "park")

    def learn(self, reply: object, origin: Address) -> bool:
        """Adopt a reply to CLUSTER SLOTS. Return False if it names no slot."""
        holders: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, address in _ranges(reply, origin):
            holders[first : last + 1] = [address] * (last + 1 - first)
        if not any(holders):
            return False
        self._holders = holders
        return True

    def known(self) -> list[Address]:
        held = list(self._held())
        # Avoids always asking a partitioned node first.
        CHANCE.shuffle(held)
        return sorted(dict.fromkeys([*held, *self._seeds]), key=lambda address: not self._is_healthy(address))

    def unused(self) -> list[Address]:
        """Return nodes without slots, but none while a slot is unknown."""
        return [] if None in self._holders else list(self.nodes.keys() - self._held())

    def _held(self) -> set[Address]:
        return {address for address in self._holders if address is not None}

    def _is_healthy(self, address: Address) -> bool:
        return address not in self.nodes or self.nodes[address].breaker.is_closed


def unreachable(nodes: SlotMap[Any], parts: Sequence[Part], clock: Callable[[], float]) -> StoreError | None:
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
    """An empty host means ``origin``."""
    return (origin[0] if host in ("", "?") else host), port


def _ranges(reply: object, origin: Address) -> Iterable[tuple[int, int, Address]]:
    for entry in reply if isinstance(reply, list) else []:
        try:
            first, last, (host, port, *_), *_ = entry
            host, port = parse_address(host or "", port)
            if 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                yield first, last, address_at(host, port, origin)
        except (TypeError, ValueError):
            continue
