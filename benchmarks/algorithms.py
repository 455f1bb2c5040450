"""What each algorithm costs Redis: ``python -m benchmarks.algorithms`` prints it, ``--write`` puts it into docs/algorithms.md.

Memory is that of a key that owes as much as it can, of a rule of the name ``api`` and of a limiter, whose keys name their hash
slot besides. Time is that of the script's call for a request that passes, in keys that are half full, by the server's own count
(`INFO commandstats`): the best of several rounds, as others may use the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handbook.reference import inserted
from limitgate import Limit
from limitgate.limiter.plans import bucket_key
from limitgate.limits.bucket import buckets_of
from limitgate.limits.plan import Charge, Plan
from limitgate.stores.redis import wire
from tests.support.redis_server import RedisServer

LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "gcra": (Limit("1000/hour"),),
    "gcra, three limits": (Limit("1000/minute"), Limit("1000/hour"), Limit("1000/day")),
    "gcra, borrow": (Limit("1000/hour", borrow=True),),
    "fixed_window": (Limit("1000/day", algorithm="fixed_window"),),
    "fixed_window, time zone": (Limit("1000/day", algorithm="fixed_window", align="Europe/Berlin"),),
    "sliding_window": (Limit("1000/hour", algorithm="sliding_window"),),
    "sliding_log, 10": (Limit("10/hour", algorithm="sliding_log"),),
    "sliding_log, 100": (Limit("100/hour", algorithm="sliding_log"),),
    "sliding_log, 1,000": (Limit("1000/hour", algorithm="sliding_log"),),
    "sliding_log, 10,000": (Limit("10000/hour", algorithm="sliding_log"),),
    "warm_up": (Limit("1000/hour", warm_up="10s"),),
    "10 at once": (Limit("10 at once"),),
    "100 at once": (Limit("100 at once"),),
    "1,000 at once": (Limit("1000 at once"),),
}
"""What is measured, by name."""
PAGE = Path(__file__).parent.parent / "docs/algorithms.md"
ROUNDS = 60
CALLS = 50
"""In a round, and so buckets."""


class Cost(NamedTuple):
    """What limits cost Redis."""

    memory: int
    """Bytes of a rule's key, as MEMORY USAGE has it."""
    of_limiter: int
    """Bytes of a limiter's key."""
    time: float
    """Microseconds of a call."""


def measured(server: RedisServer, several: Mapping[str, tuple[Limit, ...]], rounds: int = ROUNDS) -> dict[str, Cost]:
    """What some limits cost on a server, which is emptied before. They take turns, as a machine may be slow for a while."""
    with server.client() as client:
        client.flushall()
        client.script_load(wire.SPEND.text)
        subjects = {name: _Subject(client, limits) for name, limits in several.items()}
        memory = {name: (subject.memory(), subject.memory(of_limiter=True)) for name, subject in subjects.items()}
        times = [{name: subject.time(number) for name, subject in subjects.items()} for number in range(rounds)]
    return {name: Cost(*memory[name], min(each[name] for each in times)) for name in several}


class _Subject:
    """Limits whose calls are timed."""

    def __init__(self, client: Any, limits: tuple[Limit, ...]) -> None:
        self._client = client
        (self._windows,) = buckets_of(limits)
        self._half = limits[0].count // 2

    def memory(self, *, of_limiter: bool = False) -> int:
        """Bytes of a key that owes as much as it can."""
        call = self._call(0, 1, of_limiter=of_limiter)
        self._send([self._call(0, slot, of_limiter=of_limiter) for slot in range(1, 2 * self._half + 1)])
        return int(self._client.memory_usage(call[3], samples=0))

    def time(self, number: int) -> float:
        """Microseconds of a call in the round of this number, in buckets that are at least half full."""
        keys = [1 + number // self._half * CALLS + key for key in range(CALLS)]
        if number % self._half == 0:
            for key in keys:
                self._send([self._call(key, slot) for slot in range(1, self._half + 1)])
        self._client.config_resetstat()
        self._send([self._call(key, self._half + 1 + number % self._half) for key in keys])
        stat = self._client.info("commandstats")["cmdstat_evalsha"]
        return float(stat["usec"]) / int(stat["calls"])

    def _call(self, key: int, slot: int, *, of_limiter: bool = False) -> Sequence[Any]:
        """The command that takes one request from a bucket, or books it where nothing fits while anything is owed."""
        windows = self._windows
        ahead = 10**12 if windows.limits[0].warm_up else 0
        digest = f"{id(self):016x}{key:016x}"
        bucket = bucket_key(f"limitgate:{digest}", windows) if of_limiter else f"limitgate:api:{digest}{windows.suffix}"
        charge = Charge(bucket, windows, 1, enforced=True, rule=None, max_wait_us=ahead, slot=slot)
        return "EVALSHA", wire.SPEND.sha, *wire.arguments([Plan((charge,))])

    def _send(self, commands: Sequence[Sequence[Any]]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            pipeline.execute()


def page(text: str, costs: Mapping[str, Cost]) -> str:
    """The page with its table as it was measured."""
    base = costs["gcra"].time
    rows = ["| limits | key of a rule, bytes | key of a limiter, bytes | Redis' CPU |", "|---|--:|--:|--:|"]
    rows += [f"| {name} | {cost.memory:,} | {cost.of_limiter:,} | {cost.time / base:.2f} |" for name, cost in costs.items()]
    return inserted(text, "costs", "\n".join(rows))


def main() -> None:
    """Measure everything, and print or write a table."""
    server = RedisServer()
    try:
        costs = measured(server, LIMITS)
    finally:
        server.stop()
    print(f"a call for gcra: {costs['gcra'].time:.1f} µs")
    text = page(PAGE.read_text(), costs)
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text.partition("<!-- costs -->")[2].partition("<!-- /costs -->")[0])


if __name__ == "__main__":
    main()
