"""Instructions per request, counted by callgrind: ``make bench-count`` keeps them, and a test compares with what is kept.

Times on a shared machine vary by half with the hour, counts by some thousandths, since all that they could depend on is fixed:

* Hash seeds are 0, addresses are not randomised (``setarch -R``), and the environment is this and nothing else.
* Start-up is left out: callgrind counts from a mark on, in a process whose caches and connections are warm. What comes once in
  a run of requests cancels out too, as the count of few requests is taken off that of many.
* Each count is the least of several in one process. The garbage collector is off meanwhile, and clocks go by looks (marks.c).

Redis runs beside it and is not counted. Another build of Python, or another version of what a request passes on its way, makes
other counts; so these are kept beside them, and where they differ nothing can be said.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.counted import BARE, FEW, MANY
from benchmarks.redis_side import own_server

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "instructions.json"
TOLERANCE = 0.03
"""Share by which a count may rise before somebody has to say so, by keeping the new one."""
TIMES = 3
"""How often each case is counted for what is kept."""
_PROGRAMS = ("valgrind", "setarch", "env", "cc")
_PASSED = ("starlette", "flask", "werkzeug", "uvloop", "redis", "hiredis")
"""Packages that requests pass."""
_PART = re.compile(r"^desc: Trigger: Client Request: (.+)\|(\d+)$|^totals: (\d+)", re.MULTILINE)

Counts = Mapping[str, int]
"""Instructions per request over the bare application, by case; of a refusal, which reaches no application, all of them."""


class Kept(NamedTuple):
    """What is kept for one minor version of Python."""

    setting: Mapping[str, str]
    counts: Counts


def hindrance() -> str:
    """Why nothing can be counted here, "" if it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (`scripts/ensure-valgrind` tries to)"
    is_fixed = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode == 0
    return "" if is_fixed else "addresses cannot be fixed, as `setarch -R` is not allowed"


def setting() -> dict[str, str]:
    """What counts depend on besides the code."""
    build = f"{platform.python_version()}, {platform.python_compiler()}, {' '.join(platform.python_build())}"
    tool = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {"python": build, "machine": platform.machine(), "valgrind": tool, **{name: version(name) for name in _PASSED}}


def kept(file: Path = FILE) -> dict[str, Kept]:
    """What is kept, by minor version of Python."""
    entries = json.loads(file.read_text()) if file.exists() else {}
    return {python: Kept(entry["setting"], entry["counts"]) for python, entry in entries.items()}


def keep(counts: Counts, file: Path = FILE) -> None:
    """Keep counts for this Python, those for others as they are."""
    entries = {**kept(file), python(): Kept(setting(), counts)}
    texts = {name: entry._asdict() for name, entry in sorted(entries.items())}
    file.write_text(json.dumps(texts, indent=2) + "\n")


def python() -> str:
    """The minor version of this Python."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def risen(before: Counts, now: Counts) -> list[str]:
    """Cases whose count has risen by more than `TOLERANCE`, or that are new or gone, each with its figures."""
    return [
        f"{name}: {before.get(name, 0):,} -> {now.get(name, 0):,}"
        for name in {**before, **now}
        if name not in before or name not in now or now[name] > before[name] * (1 + TOLERANCE)
    ]


def counted(times: int = TIMES, names: Iterable[str] = ()) -> dict[str, int]:
    """Run every case, or those of these names, so many times under callgrind and work out its count."""
    with tempfile.TemporaryDirectory(prefix="limitgate-count-") as name, own_server() as server:
        folder = Path(name)
        marks, out = folder / "marks.so", folder / "out"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", marks, ROOT / "benchmarks" / "marks.c"], check=True)
        program = [sys.executable, "-m", "benchmarks.counted", server.url, str(marks), str(times), *names]
        done = subprocess.run([*_fixed(marks, out), *program], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"callgrind ended with {done.returncode}: {done.stderr}")
        return worked_out(out.read_text())


def _fixed(marks: Path, out: Path) -> list[str]:
    """How to run a program so that it does the same every time."""
    environment = [f"PATH={os.defpath}", "LANG=C.UTF-8", "PYTHONHASHSEED=0", f"LD_PRELOAD={marks}"]
    callgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--combine-dumps=yes", "--dump-line=no"]
    return ["setarch", "-R", "env", "-i", *environment, *callgrind, f"--callgrind-out-file={out}"]


def worked_out(report: str) -> dict[str, int]:
    """Counts from what callgrind wrote."""
    least = _least(report)
    each = {name: (least[name, MANY] - least[name, FEW]) / (MANY - FEW) for name, requests in least if requests == FEW}
    return {name: round(count - each.get(BARE.get(name, ""), 0.0)) for name, count in each.items() if name in BARE}


def _least(report: str) -> dict[tuple[str, int], int]:
    """The least of each case's totals, by its name and its number of requests."""
    least: dict[tuple[str, int], int] = {}
    part: tuple[str, int] | None = None
    for match in _PART.finditer(report):
        if match[1]:
            part = match[1], int(match[2])
        elif part:
            least[part] = min(least.get(part, sys.maxsize), int(match[3]))
            part = None
    return least


def table(before: Counts, now: Counts) -> Iterable[str]:
    """Lines of a table: each case's count before and now."""
    yield f"{'instructions per request over the bare application':60}{'kept':>10}{'now':>10}"
    for name, count in now.items():
        yield f"{name:60}{before.get(name, 0) or '-':>10}{count:>10}"


def main() -> None:
    """Count, show and keep."""
    if reason := hindrance():
        sys.exit(reason)
    before = kept().get(python(), Kept({}, {})).counts
    now = counted()
    print("\n".join(table(before, now)))
    keep(now)


if __name__ == "__main__":
    main()
