"""What a fleet of 1,000 processes costs Redis, with simulated snapshots, and how long ``status`` takes to read it.

``python -m benchmarks.fleet [PROCESSES]``
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median

from benchmarks.redis_side import own_server
from limitgate.fleet.publisher import EVERY, budget_of
from limitgate.fleet.reader import FleetReader
from limitgate.fleet.sketch import Entry, Top
from limitgate.fleet.snapshot import LoadState, RuleState, Snapshot, StoreState, encode
from limitgate.stores.base import FleetRequest, fleet_key
from limitgate.stores.redis.threads.store import RedisStore

RULES, CLIENTS = 10, 256
ROUNDS = 5
_CHANCE = random.Random(1)
_KEYS = [f"{_CHANCE.getrandbits(128):032x}" for _ in range(4 * CLIENTS)]


def snapshot(number: int, now: float) -> Snapshot:
    """A busy process: ten rules, each with two full sketches."""
    return Snapshot(
        id=f"{number:016x}",
        host=f"web-{number // 8}",
        pid=number,
        start=now - 1000,
        at=now,
        version="1.0",
        revision=5,
        source="config/",
        requests=number * 1000,
        refused=number,
        store=StoreState(up=True, latency=0.001, breaker="closed", scheme="redis"),
        load=LoadState(ok=True, at=now - 1000),
        rules=[rule(f"rule-{place}", now) for place in range(RULES)],
        counters=[("limitgate.rule.decisions", (f"rule-{place}", "default", "admitted"), [number]) for place in range(RULES)],
        rates=(100.0, 1.0),
        history=[(int(now // 30) - step, 3_000, 30) for step in range(30)],
    )


def rule(name: str, now: float) -> RuleState:
    """Clients as their counts would be by Zipf's law."""
    keys = _CHANCE.sample(_KEYS, CLIENTS)
    top = Top([Entry(key, 10_000 // (place + 1), place % 7, now - 60, now) for place, key in enumerate(keys)], 30)
    return RuleState(name, "default", 1000, 10, 0.5, top, top, {key: f"ip={key[:2]}….{key[2]}" for key in keys})


def wall(words: list[str]) -> float:
    """Median of the seconds that the command takes, with compiled modules as an installed one has."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(ROUNDS + 1):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "limitgate", *words], check=True, stdout=subprocess.DEVNULL, env=environment)
        found.append(time.monotonic() - began)
    return median(found[1:])


def main() -> None:
    """Write, read, and print what that took."""
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    now = time.time()
    made = [snapshot(number, now) for number in range(processes)]
    # Readers correct the times of an old snapshot, as if its clock were wrong.
    snapshots = [encode(replace(each, at=time.time()), budget_of(processes)) for each in made]
    with own_server() as server, server.client() as client:
        store, key = RedisStore(server.url), fleet_key("limitgate")
        for number, packed in enumerate(snapshots):
            store.fleet(FleetRequest(key, f"{number:016x}", packed, 60), 5)
        used = client.info("memory")["used_memory"]
        before = client.info("cpu")
        reader = FleetReader(store, timeout=5)
        began = time.monotonic()
        figures = reader.read()
        read = time.monotonic() - began
        after = client.info("cpu")
        read_cpu = sum(after[each] - before[each] for each in ("used_cpu_user", "used_cpu_sys"))
        took = {form: wall(["status", "--store", server.url, f"--{form}"]) for form in ("once", "json")}
        bare = wall(["--version"])
        before = client.info("cpu")
        for number in range(ROUNDS * processes):
            store.fleet(FleetRequest(key, f"{number % processes:016x}", snapshots[number % processes], 60), 5)
        after = client.info("cpu")
        wrote = sum(after[each] - before[each] for each in ("used_cpu_user", "used_cpu_sys"))
        store.close()
    size = sum(map(len, snapshots))
    print(f"{len(figures['processes']):,} processes, {size / 1e6:.1f} MB of snapshots, {size / processes:,.0f} bytes each")
    print(f"memory of Redis {used / 1e6:.1f} MB; {processes / EVERY:,.0f} commands/s, {size / EVERY / 1e6:.2f} MB/s written")
    print(f"CPU of Redis for the writes: {wrote / ROUNDS / EVERY:.1%} of a core; for a reading {read_cpu * 1000:.0f} ms")
    print(f"a reading takes {read:.2f} s, 'limitgate --version' {bare:.2f} s")
    print("'limitgate status' takes " + ", ".join(f"{seconds:.2f} s with --{form}" for form, seconds in took.items()))


if __name__ == "__main__":
    main()
