"""Requests to stores on a Redis Cluster, and keys on nodes of the test's choosing."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from uuid import uuid4

from redis.crc import key_slot

from limitgate import AsyncRedisStore, MemoryStore, RedisStore, StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge, Plan, Reading, Verb
from limitgate.limits.template import PlanTemplate, whole_reading
from tests.stores.test_stores import PATIENT, AsyncDoor, Door
from tests.support.redis_cluster import SLOTS, RedisCluster
from tests.support.redis_server import RedisServer

KINDS: dict[str, Callable[..., Door]] = {
    "threads": lambda url, **options: Door(RedisStore(url, **options)),
    "asyncio": lambda url, **options: AsyncDoor(AsyncRedisStore(url, **options)),
}
US = 1_000_000


class PlainStore(RedisStore):
    """A store that is asked for plain plans where it can be, as gates and limiters do it."""

    def spend(self, plan: Plan, timeout: float) -> Reading:
        template = template_of(plan)
        if template is None:
            return super().spend(plan, timeout)
        return whole_reading(super().spend(template.asked([each.key for each in plan.charges]), timeout))


class PlainMemoryStore(MemoryStore):
    """The same in this process."""

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        template = template_of(plan)
        if template is None:
            return super().spend(plan, timeout)
        return whole_reading(super().spend(template.asked([each.key for each in plan.charges]), timeout))


class AsyncPlainStore(AsyncRedisStore):
    """The same on asyncio."""

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        template = template_of(plan)
        if template is None:
            return await super().aspend(plan, timeout)
        return whole_reading(await super().aspend(template.asked([each.key for each in plan.charges]), timeout))


PLAIN_KINDS: dict[str, Callable[..., Door]] = {
    "threads, plain": lambda url, **options: Door(PlainStore(url, **options)),
    "asyncio, plain": lambda url, **options: AsyncDoor(AsyncPlainStore(url, **options)),
}


def template_of(plan: Plan) -> PlanTemplate | None:
    """The template of a plan, the same object for all that differ in keys alone; None if it is not plain."""
    return _template_of(tuple([each._replace(key="") for each in plan.charges])) if plan.verb == "spend" else None


@lru_cache
def _template_of(charges: Sequence[Charge]) -> PlanTemplate | None:
    try:
        return PlanTemplate(charges)
    except ValueError:
        return None


MOVED = range(100, 200)
"""Slots for tests that move them. `keys_on` skips them, because a slot with another test's key can't be given away."""


def slot_of(key: str) -> int:
    return key_slot(key.encode())


def keys_on(place: int, *, masters: int = 3) -> Iterator[str]:
    """Ever new keys that the cluster's master of this place holds, each in another slot than the one before."""
    name = uuid4().hex
    for number in itertools.count():
        key = f"{name}:{number}"
        slot = slot_of(key)
        if slot * masters // SLOTS == place and slot not in MOVED:
            yield key


def key_on(place: int) -> str:
    return next(keys_on(place))


def tagged(slot: int) -> Iterator[str]:
    """Ever new keys in one slot."""
    tag = next(tag for tag in map(str, itertools.count()) if slot_of(tag) == slot)
    name = uuid4().hex
    for number in itertools.count():
        yield f"{{{tag}}}:{name}:{number}"


def charge(key: str, *limits: str, cost: int = 1, binding: bool = True, rule: str | None = None) -> Charge:
    return Charge(key, bucket_of(*limits or ("50/day",)), cost, binding, rule)


def plan(*charges: Charge, verb: Verb = "spend") -> Plan:
    return Plan(charges, verb)


def owed(door: Door, *charges: Charge) -> list[float]:
    """Requests that the first window of each bucket owes."""
    readings = [door.spend(plan(each, verb="peek")) for each in charges]
    return [reading.buckets[0].before[0] / each.bucket.weights[0] for reading, each in zip(readings, charges, strict=True)]


def used(door: Door, *charges: Charge) -> list[int]:
    """Requests that buckets owe, a begun one counted whole."""
    return [math.ceil(requests) for requests in owed(door, *charges)]


def ends(answers: Sequence[Any]) -> list[Any]:
    """How requests ended: admitted or not, or the fault."""
    return [answer.fault if isinstance(answer, StoreError) else answer.admitted for answer in answers]


def settled(door: Door, condition: Callable[[], bool], seconds: float = PATIENT) -> bool:
    """Whether it comes true while nobody asks for anything but what the condition asks."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        door.idle(0.01)
    return True


def visitors(cluster: RedisCluster) -> set[tuple[int, str]]:
    """Connections of clients to all nodes, but for those that ask, and those of nodes to each other: ports and ids.

    An earlier test's may be among them for a while, as a server notices only after a moment that somebody has left.
    """
    return {(node.port, name) for node in cluster.nodes for name in _clients(node)}


def _clients(node: RedisServer) -> set[str]:
    with node.client() as client:
        return {each["id"] for each in client.client_list(_type="normal")} - {str(client.client_id())}


def nodes_of(door: Door) -> Any:
    """What a store has made for each node, by address."""
    if isinstance(door.store, RedisStore):
        return door.store._servers._map.nodes
    (here,) = door.store._loops.values()
    return here.servers._map.nodes
