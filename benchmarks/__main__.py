"""LimitGate beside its peers, in one run: ``python -m benchmarks`` measures and prints, ``--write`` keeps it in docs/."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import attack, cpu, end_to_end, example, frameworks, growth, memory_use, options
from benchmarks.chart import Row, chart
from benchmarks.drive import CROWD
from benchmarks.figures import Failed, over
from benchmarks.redis_side import own_server
from benchmarks.report import inserted, page, summary
from benchmarks.results import ASGI, CROWDED, THREADS, Results
from benchmarks.rounds import Plan
from benchmarks.setting import setting
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).parent.parent


class Pace(NamedTuple):
    """How much time to take."""

    asgi: Plan
    crowded: Plan
    wsgi: Plan
    frameworks: Plan
    growth: Plan
    attack_rounds: int
    attack_seconds: float
    rushes: int
    runs: int
    """Of wrk, a second each."""
    buckets: int
    clients: int


_DRAINED = 0.33
"""Seconds for half the clients; after the other half a request has drained from 5 per second and from 100 per minute."""
FULL = Pace(
    Plan(12, 500, _DRAINED), Plan(7, 500, _DRAINED), Plan(9, 500), Plan(9, 200), Plan(9, 1_000), 3, 1.0, 5, 5, 1_000_000, CROWD
)
QUICK = Pace(
    Plan(2, 500, _DRAINED), Plan(2, 500, _DRAINED), Plan(2, 250), Plan(2, 50), Plan(2, 250), 1, 0.3, 1, 1, 20_000, 10_000
)
CONCURRENCIES = (1, 8, CROWDED, 128)

Section = Callable[[RedisServer, Pace], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    "gate": lambda server, pace: {"gate": cpu.gate(server, CONCURRENCIES, pace.asgi)},
    "crowded": lambda server, pace: {"crowded": cpu.crowded(server, CONCURRENCIES, pace.crowded, pace.clients)},
    "example": lambda server, pace: {"example": example.measured(server, (1, CROWDED), pace.asgi)},
    "options": lambda server, pace: {"options": options.measured(server, CROWDED, pace.asgi)},
    "wsgi": lambda server, pace: {"wsgi": cpu.wsgi(server, (1, THREADS), pace.wsgi)},
    "frameworks": lambda server, pace: {"frameworks": frameworks.added(server, (1, CROWDED), pace.frameworks)},
    "throughput": lambda server, pace: {"throughput": end_to_end.throughput(server, rounds=pace.runs, seconds=1)},
    "attacks": lambda server, pace: {
        "attacks": attack.attacks(server, rounds=pace.attack_rounds, requests=7_000, seconds=pace.attack_seconds)
    },
    "rushes": lambda server, pace: {"rushes": attack.rushes(server, pace.rushes)},
    "memory": lambda server, _: {"memory": memory_use.memory_use(server)},
    "growth": lambda server, pace: {"growth": growth.growth(server, pace.growth, pace.buckets)},
    "easy": lambda server, pace: {"easy": cpu.easy(server, CROWDED, pace.growth)},
}
"""What can be measured, each on an empty Redis of its own; each returns fields of `Results`."""


def main() -> None:
    """Measure what was asked for, print it, and write it down if wanted."""
    arguments = _arguments()
    began = time.monotonic()
    results, failed = _measured(arguments.only or list(SECTIONS), QUICK if arguments.quick else FULL)
    print(page(results))
    print(f"Measured in {time.monotonic() - began:.0f} s.")
    if failed:
        sys.exit(f"Failed, so nothing is kept: {', '.join(failed)}")
    if arguments.write:
        _write(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure LimitGate beside its peers.")
    parser.add_argument("--quick", action="store_true", help="two minutes instead of nine; the figures are not worth keeping")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--write", action="store_true", help="keep the results in docs/ and README.md")
    arguments = parser.parse_args()
    if arguments.write and (arguments.quick or arguments.only):
        parser.error("--write keeps a full run only")
    return arguments


def _measured(sections: list[str], pace: Pace) -> tuple[Results, list[str]]:
    """The results, and the sections that failed and are left out of them."""
    failed = []
    with own_server() as server:
        results = Results(setting(server))
    for name in sections:
        began = time.monotonic()
        with own_server() as server:
            try:
                results = replace(results, **SECTIONS[name](server, pace))
            except Exception:  # noqa: BLE001 - what was measured before is shown all the same
                traceback.print_exc()
                failed.append(name)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return results, failed


def _write(results: Results) -> None:
    (ROOT / "docs" / "benchmark.md").write_text(page(results))
    (ROOT / "docs" / "benchmark.svg").write_text(_chart(results))
    readme = ROOT / "README.md"
    readme.write_text(inserted(readme.read_text(), summary(results)))


def _chart(results: Results) -> str:
    outcomes = results.gate[CROWDED]
    rows = []
    for contender in ASGI:
        name = cpu.on_redis(contender.name)
        costs, outcome = over(outcomes, name, contender.bare), outcomes[name]
        instead = f"fails ({outcome.error})" if isinstance(outcome, Failed) else ""
        rows.append(Row(contender.name, statistics.median(costs) if costs else None, instead, ours=contender is ASGI[0]))
    captions = (
        f"README's rule on Redis, 1,000 clients, {CROWDED} requests at once; median of {FULL.asgi.rounds} rounds.",
        f"{results.setting}.",
    )
    return chart("CPU that a limiter adds to a request", "µs", rows, captions)


if __name__ == "__main__":
    main()
