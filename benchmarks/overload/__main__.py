"""The adaptive limit on real servers: ``python -m benchmarks.overload`` prints, ``--write`` keeps it in docs/."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path

from benchmarks.overload.pictures import loads, steps
from benchmarks.overload.report import disturbed, report
from benchmarks.overload.rows import LONG, ROWS, Results
from benchmarks.overload.runs import Bench
from benchmarks.setting import machine
from handbook.reference import inserted

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "internals" / "overload.md"
PICTURES = {"overload-loads.svg": loads, "overload-steps.svg": steps}
SHOWN = """\
![Goodput over load, with the adaptive limit and without](../overload-loads.svg)

![Goodput over time while the capacity changes](../overload-steps.svg)

Each cell has the goodput, the median and 99th percentile of the latency of admitted requests, and the share of refused requests
("shed"). With the adaptive limit, goodput is a share of the most that can be served at the measured cost of a refusal.
Without it, and in the table of bars, goodput is a share of the capacity."""
"""What stands above the tables on the page."""
WHOLE = [name for name in ROWS if name not in LONG]


def main() -> None:
    """Measure what was asked for, print it, and write it down if wanted."""
    options = _options()
    began, results, failed = time.monotonic(), Results(), []
    with Bench() as bench:
        for name in options.only or WHOLE:
            try:
                ROWS[name](results, bench)
            except Exception:  # noqa: BLE001 - what was measured before is shown all the same
                traceback.print_exc()
                failed.append(name)
            print(f"{name}: after {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(report(results))
    print(disturbed(results))
    if failed:
        sys.exit(f"Failed, so nothing is kept: {', '.join(failed)}")
    if options.write:
        _write(results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description="Measure the adaptive limit under load.")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--write", action="store_true", help="keep the results in docs/")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write keeps a full run only")
    return options


def _write(results: Results) -> None:
    setting = f"{machine()}, uvicorn {version('uvicorn')}, uvloop {version('uvloop')}, httptools {version('httptools')}."
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(results, (setting,)))
    text = "\n\n".join(filter(None, (setting, SHOWN, disturbed(results), report(results))))
    PAGE.write_text(inserted(PAGE.read_text(), "overload", text))


if __name__ == "__main__":
    main()
