"""``python -m tests.faults [door] [words of a name ...]`` prints what became of each fault, as a Markdown table."""

from __future__ import annotations

import sys

from tests.faults.app import BURST
from tests.faults.experiment import Outcome, run
from tests.faults.stages import Stages
from tests.faults.table import FAULTS

COLUMNS = (
    "fault",
    "statuses",
    "p50 ms",
    "p99 ms",
    "on_error decided",
    "back after s",
    "burst by Redis",
    "burst locally",
    "not as it has to be",
)


def row(seen: Outcome) -> str:
    """The line of one fault."""
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(seen.statuses.items()))
    degraded = sum(sample.degraded for sample in seen.during) / max(1, len(seen.during))
    cells = [
        seen.fault.name,
        statuses,
        f"{1000 * seen.percentile(50):.1f}",
        f"{1000 * seen.percentile(99):.0f}",
        f"{degraded:.0%}",
        f"{seen.recovery:.2f}",
        f"{seen.burst(degraded=False):.1f} of {seen.bound}",
        f"{seen.burst(degraded=True):.1f} of {BURST}",
        "; ".join(seen.complaints()),
    ]
    return f"| {' | '.join(cells)} |"


def main(door: str = "asgi", *words: str) -> None:
    """Print the table."""
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    with Stages() as stages:
        for fault in FAULTS:
            if not words or any(word in fault.name for word in words):
                with stages.on(door, fault.way) as stage:
                    sys.stdout.write(f"{row(run(fault, stage))}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
