"""Where on a cluster the buckets of requests lie, in thirds of the slots: each of three masters holds one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from redis.crc import key_slot

from limitgate import LimitGateWSGI, MemoryStore
from limitgate.limits.plan import Plan, Reading
from tests.faults.app import RULES
from tests.faults.traffic import BOTH, LIMITED
from tests.support.doors import wsgi_environ
from tests.support.redis_cluster import SLOTS

HIT = 0
"""The third that faults of a part of a cluster concern."""
THIRDS = {**dict.fromkeys(LIMITED, (HIT,)), "default": (1,), BOTH: (HIT, 2)}
"""Where the buckets of each stream are to be: of one where no fault comes, and of one with a bucket on either side."""


class _Noting(MemoryStore):
    """Remembers which buckets it was asked about at last."""

    keys: tuple[str, ...] = ()

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        self.keys = tuple(charge.key for charge in plan.charges)
        return super().spend(plan, timeout)


_store = _Noting()
_twin = LimitGateWSGI(lambda environ, _: [environ["PATH_INFO"].encode()], rules=RULES, store=_store, new_buckets=0)


def slots(path: str, who: str) -> list[int]:
    """The slots of the buckets that a request asks about, in the order of its rules."""
    _twin(wsgi_environ(path, headers={"X-Who": who}), _ignore)
    return [key_slot(key.encode()) for key in _store.keys]


def third(slot: int) -> int:
    """In which third of all slots one is."""
    return slot * 3 // SLOTS


def is_hit(path: str, who: str) -> bool:
    """Whether a request needs the part of the cluster that faults concern."""
    return any(third(slot) == HIT for slot in slots(path, who))


def spread() -> dict[str, str]:
    """A new key for each stream, so that its buckets are where they are to be."""
    return {stream: next(_keys_at(f"/{stream}", thirds)) for stream, thirds in THIRDS.items()}


def hit_slots(keys: Mapping[str, str]) -> set[int]:
    """The slots of streams' buckets in the part of the cluster that faults concern."""
    found = {slot for stream, who in keys.items() for slot in slots(f"/{stream}", who)}
    return {slot for slot in found if third(slot) == HIT}


def _keys_at(path: str, thirds: tuple[int, ...]) -> Iterator[str]:
    while True:
        who = uuid4().hex
        if tuple(map(third, slots(path, who))) == thirds:
            yield who


def _ignore(*_: Any) -> None:
    """No server has begun a response."""
