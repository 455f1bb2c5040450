"""Uvicorn with one worker, pinned to a core; and the CPU that it has spent and waited for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.overload.client import HOST

_PATIENCE_S = 20.0
"""Seconds for a server to come up, or to stop."""


class Cpu(NamedTuple):
    """Seconds that a server has spent on its core, and for which others kept it from that."""

    spent_s: float
    waited_s: float


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int

    def cpu(self) -> Cpu:
        """CPU of all of its threads."""
        threads = [file.read_text().split() for file in Path(f"/proc/{self.pid}/task").glob("*/schedstat")]
        return Cpu(*[sum([int(thread[place]) for thread in threads]) / 1e9 for place in (0, 1)])


def cores() -> tuple[int, int]:
    """A core for the server and another for the client. Raises `RuntimeError` where there are no two."""
    if not hasattr(os, "sched_getaffinity"):
        raise RuntimeError("this system cannot pin a process to a core, expected Linux")
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise RuntimeError("only one core to run on, expected one for the server and another for the client")
    return found[0], found[1]


@contextmanager
def serving(core: int, environment: Mapping[str, str]) -> Iterator[Server]:
    """A server in a process of its own, stopped by its pid. ``environment`` tells `benchmarks.overload.app` what to serve."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        "benchmarks.overload.app:served",
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    command += ["--timeout-keep-alive", "75"]
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        os.sched_setaffinity(process.pid, {core})
        _wait_for(port, process)
        yield Server(port, process.pid)
    finally:
        process.kill()  # it may be seconds late, and none of its answers counts any more
        process.wait(_PATIENCE_S)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, port)).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"uvicorn did not come up on port {port}")
