"""A made-up fleet for the pictures: eight processes at a fixed time, one of them with other rules."""

from __future__ import annotations

from hashlib import blake2b

from limitgate import MemoryStore
from limitgate.fleet.sketch import Entry, Top
from limitgate.fleet.snapshot import STEP, STEPS, LoadState, RuleState, Snapshot, StoreState, encode
from limitgate.stores.base import FleetRequest, fleet_key

NOW = 1_791_898_265.0
"""A Wednesday afternoon, in Unix seconds."""
PROCESSES, OTHER = 8, 5
_REFUSED_PER_SECOND = 6.1
_REVISION = 0x5F1C2AD09B77
_CLIENTS = ("ip=20….7", "ip=19….44", "ip=20….9", "api_key=ac…9f", "ip=2a…c1")


def store() -> MemoryStore:
    """A store, at that time, with the snapshots of the fleet."""
    made = MemoryStore(lambda: round(NOW * 1e6))
    for number in range(PROCESSES):
        packed = encode(_process(number))
        made.fleet(FleetRequest(fleet_key("limitgate"), f"{number:016x}", packed, 60.0))
    return made


def _process(number: int) -> Snapshot:
    other = number == OTHER
    mistake = "config/default.yaml:14: rules[0].qps: expected a whole number of at least 0, not 'many'"
    return Snapshot(
        id=f"{number:016x}",
        host=f"web-{number // 4 + 1}",
        pid=4210 + number,
        start=NOW - 7300,
        at=NOW,
        version="0.1.0",
        revision=_REVISION - (1 << 44) if other else _REVISION,
        source="config/",
        requests=310_000,
        refused=9_100,
        store=StoreState(True, 0.0004, "closed", "redis"),
        load=LoadState(not other, NOW - 760, mistake if other else None),
        rules=[
            _rule("api", 38_000, 1.0, 300, 0),
            _rule("login", 210, 0.6, 9, 1),
            _rule("search", 9_000, 0.65, 4, 2),
            _rule("export", 120, 0.2, 0, 0),
        ],
        rates=(44.2, _REFUSED_PER_SECOND),
        history=_history(),
    )


def _rule(name: str, admitted: int, utilization: float, scale: int, first: int) -> RuleState:
    clients = _CLIENTS[first:] if scale else ()
    names = {_digest(f"{name} {who}"): who for who in clients}
    counts = [(key, scale * 6 // (place * place + 1)) for place, key in enumerate(names)]
    entries = [Entry(key, count, 0, NOW - 190 + 31 * place, NOW - 1) for place, (key, count) in enumerate(counts) if count]
    refused = sum(entry.hits for entry in entries)
    rates = {entry.key: entry.hits * _REFUSED_PER_SECOND / 3_481 for entry in entries}
    return RuleState(name, "default", admitted, refused, utilization, Top(entries), Top(entries), names, rates=(rates, rates))


def _history() -> list[tuple[int, int, int]]:
    """A calm quarter of an hour, and a client that begins to hammer three minutes ago."""
    last = int(NOW // STEP)
    steps = []
    for step in range(last - STEPS, last):
        wave = (step * 7919) % 13 * 12
        refused = 184 if step >= last - 6 else (step * 31) % 5
        steps.append((step, 1100 + wave + refused, refused))
    return steps


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
