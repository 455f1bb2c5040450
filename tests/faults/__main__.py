"""``python -m tests.faults [words of names ...]`` prints what became of each fault, as a Markdown table."""

from __future__ import annotations

import sys

from tests.faults.app import BURST
from tests.faults.experiment import Outcome, degraded_share, run
from tests.faults.stages import Door, Stages
from tests.faults.table import FAULTS, UNDER_THREADS

COLUMNS = (
    "door",
    "fault",
    "statuses",
    "p50 ms",
    "p99 ms",
    "by on_error",
    "of others",
    "back after s",
    "burst by Redis",
    "burst locally",
    "lines logged",
    "not as it has to be",
)


def row(door: Door, seen: Outcome) -> str:
    """The line of one fault: latencies and shares from when it began until Redis was back."""
    cells = [
        door,
        seen.fault.name,
        ", ".join(f"{status}: {count}" for status, count in sorted(seen.statuses.items())),
        f"{1000 * seen.percentile(50):.1f}",
        f"{1000 * seen.percentile(99):.0f}",
        f"{degraded_share([sample for sample in seen.during if sample.hit]):.0%}",
        f"{degraded_share(seen.spared):.0%}" if seen.fault.partly else "",
        f"{seen.recovery:.2f}",
        f"{seen.burst(degraded=False):.1f} of {seen.bound}",
        f"{seen.burst(degraded=True):.1f} of {BURST}",
        str(seen.lines),
        "; ".join(seen.complaints()),
    ]
    return f"| {' | '.join(cells)} |"


def main(*words: str) -> None:
    """Print the table, of the faults whose names contain one of the words if there are any."""
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    tried = [("asgi", fault) for fault in FAULTS] + [("wsgi", fault) for fault in FAULTS if fault.name in UNDER_THREADS]
    with Stages() as stages:
        for door, fault in tried:
            if not words or any(word in fault.name for word in words):
                with stages.on(door, fault.way) as stage:
                    sys.stdout.write(f"{row(door, run(fault, stage))}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
