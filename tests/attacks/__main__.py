"""``python -m tests.attacks`` runs every attack of the table, floods included, and prints what came of them, and their cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.attacks import catalogue, cpu
from tests.attacks.flood import FLOODS, in_a_process
from tests.attacks.world import ATTACKS, Outcome

assert catalogue


def outcomes() -> Iterator[tuple[str, Outcome]]:
    """Each attack and what came of it."""
    for name, run in ATTACKS.items():
        yield name, run()
    for told in FLOODS:
        found = in_a_process(told)
        crowded_out = found["requests"] - found["admitted"] if told["burst"] > 1 else 0
        name = f"strangers by {told['part']}, {told['burst']} a day each, {told['door']}"
        yield name, Outcome(found["requests"], found["victims let through"], crowded_out)


def main() -> int:
    """The table; status 1 where any attack came to something."""
    print("| attack | tries | got through above the limit | victims harmed |\n|---|---|---|---|")
    total = Outcome()
    for name, outcome in outcomes():
        total += outcome
        print(f"| {name} | {outcome.tries:,} | {outcome.through} | {outcome.harmed} |", flush=True)
    print(f"| all | {total.tries:,} | {total.through} | {total.harmed} |")
    return 1 if total.through or total.harmed or cpu.table(tries=60, seed=1) > cpu.ALARM else 0


if __name__ == "__main__":
    sys.exit(main())
