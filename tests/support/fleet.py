"""Snapshots of a made-up fleet, as its processes would write them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from limitgate.fleet.sketch import Entry, Top
from limitgate.fleet.snapshot import LoadState, RuleState, Snapshot, StoreState, encode
from limitgate.stores.base import FleetRequest, fleet_key

REVISION = 0x5F1C2AD09B77


def digest(name: str) -> str:
    """32 hex digits, as a bucket's key ends in."""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def rule(
    name: str = "api", tier: str = "default", refused: Sequence[tuple[str, int]] = (), last: float = -1, **fields: Any
) -> RuleState:
    """A rule that has refused clients so many times, until ``last`` seconds from now."""
    now = time.time()
    entries = [Entry(digest(who), count, 0, now - 120, now + last) for who, count in refused]
    given: dict[str, Any] = {"admitted": 1000, "refused": sum(count for _, count in refused), "utilization": 0.5}
    given |= {"refusals": Top(entries), "names": {digest(who): who for who, _ in refused}, **fields}
    return RuleState(name, tier, **given)


def snapshot(number: int = 1, **fields: Any) -> Snapshot:
    """The snapshot of one process."""
    now = time.time()
    given: dict[str, Any] = {
        "id": f"{number:016x}",
        "host": f"web-{number}",
        "pid": 4000 + number,
        "start": now - 3600,
        "at": now,
        "version": "0.1.0",
        "revision": REVISION,
        "source": "config/",
        "requests": 10_000,
        "refused": 500,
        "store": StoreState(True, 0.0006, "closed", "redis"),
        "load": LoadState(True, now - 3600),
        "rules": [rule(refused=[("ip=20….7", 400), ("ip=19….1", 100)])],
    }
    return Snapshot(**{**given, **fields})


def write(store: Any, *snapshots: Snapshot | bytes, key_prefix: str = "limitgate", seconds: float = 60) -> None:
    """Write snapshots, or bytes in their place, into a sync store."""
    for number, each in enumerate(snapshots):
        packed = each if isinstance(each, bytes) else encode(each)
        member = f"{number:016x}" if isinstance(each, bytes) else each.id
        store.fleet(FleetRequest(fleet_key(key_prefix), member, packed, seconds), 5)


def fleet(processes: int, **fields: Mapping[str, Any]) -> list[Snapshot]:
    """Snapshots of so many processes."""
    one = snapshot(**fields)
    return [replace(one, id=f"{number:016x}", host=f"web-{number}", pid=number) for number in range(processes)]
