"""What the worker of the example is given to do in tests: notes of what was done, by whom and when."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    job: int
    pid: int
    at: float


async def note(fields: dict[str, str]) -> None:
    """Write to the file `begun`, take as long as ``JOBS_TAKE`` says, then write to the file ``JOBS_FILE``."""
    file = Path(os.environ["JOBS_FILE"])
    _write(fields["job"], begun(file))
    await asyncio.sleep(float(os.environ.get("JOBS_TAKE", "0")))
    _write(fields["job"], file)


def begun(file: Path) -> Path:
    """The file for jobs that were begun, beside the one for those that were done."""
    return file.with_name("begun")


async def fail_first(fields: dict[str, str]) -> None:
    """Fail at every third job, the first time."""
    file = Path(os.environ["JOBS_FILE"])
    if int(fields["job"]) % 3 == 0 and _is_new(file.with_name(fields["job"])):
        raise ValueError("a job that fails")
    await note(fields)


def _write(job: str, file: Path) -> None:
    """A line that is whole or not there."""
    with file.open("ab", buffering=0) as opened:
        opened.write(f"{job} {os.getpid()} {time.monotonic()}\n".encode())


def _is_new(file: Path) -> bool:
    """Whether a file was not there until now."""
    is_new = not file.exists()
    file.touch()
    return is_new


def notes(file: Path) -> list[Note]:
    """What was noted so far, in order."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Note(int(job), int(pid), float(at)) for job, pid, at in map(str.split, lines)]
