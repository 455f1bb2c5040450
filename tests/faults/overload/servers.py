"""The servers that applications run on, each in a process of its own, at a port of this machine, stopped by its pid."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from tests.support import forks
from tests.support.doors import MOMENT, PATIENCE
from tests.support.guard import Guard
from tests.support.redis_server import free_port

ROOT = Path(__file__).parent.parent.parent.parent
LONG = 60_000
"""Bytes of a long path."""
PYTHON = [sys.executable, "-m"]
UVICORN = [*PYTHON, "uvicorn", "--no-access-log", "--no-proxy-headers", "--timeout-keep-alive", "60", "--port", "{port}"]
GUNICORN = [*PYTHON, "gunicorn", "--limit-request-line", "0", "--keep-alive", "60", "-b", "127.0.0.1:{port}"]
HYPERCORN = [*PYTHON, "hypercorn", "--keep-alive", "60", "-b", "127.0.0.1:{port}"]
WAITRESS = [*PYTHON, "waitress", "--no-clear-untrusted-proxy-headers"]
SERVERS: Mapping[str, list[str]] = {
    "uvicorn uvloop httptools": [*UVICORN, "--loop", "uvloop", "--http", "httptools"],
    "uvicorn uvloop h11": [*UVICORN, "--loop", "uvloop", "--http", "h11"],
    "uvicorn asyncio httptools": [*UVICORN, "--loop", "asyncio", "--http", "httptools"],
    "uvicorn asyncio h11": [*UVICORN, "--loop", "asyncio", "--http", "h11"],
    "hypercorn asyncio": [*HYPERCORN, "-k", "asyncio"],
    "gunicorn uvicorn": [*GUNICORN, "-k", "uvicorn_worker.UvicornWorker"],
    "gunicorn gthread": [*GUNICORN, "-k", "gthread", "--threads", "32"],
    "waitress": [*WAITRESS, "--listen", "127.0.0.1:{port}", "--threads", "32"],
}
"""Their command lines, but for the application."""
UNDER_THREADS = ("gunicorn gthread", "waitress")


class Served(NamedTuple):
    """An application on a server."""

    port: int
    log: Path

    def state(self) -> dict[str, Any]:
        """What the application says of its store."""
        with urlopen(f"http://127.0.0.1:{self.port}/state", timeout=PATIENCE) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def lines(self) -> int:
        """Lines that LimitGate has logged so far."""
        return self.log.read_text().count(" by limitgate")

    def is_up(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError):
            return bool(self.state())
        return False


@contextlib.contextmanager
def served(server: str, door: str, store: str, **environment: str) -> Iterator[Served]:
    """An application behind one of its doors, on one of the servers."""
    module = "wsgi" if server in UNDER_THREADS else "asgi"
    port = free_port()
    command = [word.format(port=port) for word in SERVERS[server]]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("LIMITGATE_")}
    ours = {"OVERLOAD_DOOR": door, "LIMITGATE_STORE": store, "LIMITGATE_TRUSTED_PROXIES": "127.0.0.1", **environment}
    with Guard("limitgate-overload-") as guard:
        log = guard.folder / "log"
        process = forks.start([*command, f"tests.faults.overload.{module}:app"], log, outside | ours)
        guard.watch(process.pid)
        try:
            found = Served(port, log)
            _wait_for(found, process)
            yield found
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE)


def _wait_for(found: Served, process: forks.Forked) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + PATIENCE
    while not found.is_up():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not come up: {found.log.read_text()}")
        time.sleep(MOMENT)
