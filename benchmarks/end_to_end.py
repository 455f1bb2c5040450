"""Requests per second through real servers: uvicorn with one worker each, and wrk in front of one at a time."""

from __future__ import annotations

import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import BARE, LIMITGATE, PATH, PEERS
from benchmarks.cpu import in_memory, on_redis
from benchmarks.drive import CROWD
from tests.support.redis_server import RedisServer

CONNECTIONS = 32
_PATIENCE = 20.0
"""Seconds for a server to come up, or to stop."""
_WARM = 1
"""Seconds that each server is asked before it counts."""

_SCRIPT = """
local number = 0
request = function()
  number = (number + 1) % {clients}
  local client = string.format("10.%d.%d.%d", number / 65536, number / 256 % 256, number % 256)
  return "GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\nX-Forwarded-For: " .. client .. "\\r\\n\\r\\n"
end
"""
"""What wrk sends: each request from the next client. uvicorn believes a peer on 127.0.0.1 about the client's address.

There are so many clients that none is back within a run, so that README's 5 per second refuse nobody.
"""


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int


class Run(NamedTuple):
    """What a server did while it was asked for a while."""

    rate: float
    """Requests per second."""
    failed: int
    cpu: float = 0.0
    """CPU per request, µs; 0 where the system does not tell."""


class Served(NamedTuple):
    """What one server managed."""

    per_second: float
    """Requests per second, median over the runs."""
    of_bare: float
    """Share of what the bare application managed in the same round, median over the rounds."""
    failed: int
    """Answers that were not 2xx or 3xx, and connections that broke."""
    added: tuple[float, ...] = ()
    """CPU of the server per request over the bare application's, µs, round by round; empty where the system does not tell."""


@dataclass(frozen=True)
class Throughput:
    """What all managed, by name, or why nothing was measured."""

    served: Mapping[str, Served]
    missing: str = ""


def throughput(server: RedisServer, *, rounds: int, seconds: int) -> Throughput:
    """Each round asks every server for ``seconds``, one after the other."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return Throughput({}, "wrk is not installed")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="limitgate-benchmark-")))
        script = folder / "clients.lua"
        script.write_text(_SCRIPT.format(clients=CROWD, path=PATH))
        servers = {name: stack.enter_context(_uvicorn(app, url)) for name, (app, url) in _apps(server).items()}
        runs: dict[str, list[Run]] = {name: [] for name in servers}
        for one in servers.values():
            _run(wrk, script, one, _WARM)
        for _ in range(rounds):
            for name, one in servers.items():
                runs[name].append(_run(wrk, script, one, seconds))
    return Throughput({name: _served(taken, runs[_bare_of(name)]) for name, taken in runs.items()})


def _apps(server: RedisServer) -> dict[str, tuple[str, str]]:
    """What is served under which name: the application and its store."""
    apps = {name: (name, "") for name in BARE}
    apps |= {in_memory(contender.name): (contender.name, "") for contender in (LIMITGATE, PEERS[0])}
    return apps | {on_redis(contender.name): (contender.name, server.url) for contender in (LIMITGATE, *PEERS)}


def _bare_of(name: str) -> str:
    return next((peer.bare for peer in PEERS if on_redis(peer.name) == name), name if name in BARE else LIMITGATE.bare)


def _served(runs: list[Run], bare: list[Run]) -> Served:
    return Served(
        statistics.median(run.rate for run in runs),
        statistics.median(run.rate / base.rate for run, base in zip(runs, bare)),
        sum(run.failed for run in runs),
        tuple(run.cpu - base.cpu for run, base in zip(runs, bare) if run.cpu and base.cpu),
    )


@contextmanager
def _uvicorn(app: str, url: str) -> Iterator[Server]:
    """A server in a process of its own, on a free port, stopped by its pid."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--factory", "benchmarks.readme:served", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "critical"]
    environment = {**os.environ, "BENCHMARK_APP": app, "BENCHMARK_STORE": url}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"uvicorn did not come up on port {port}")


def _run(wrk: str, script: Path, server: Server, seconds: int) -> Run:
    """Have wrk ask a server."""
    command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), f"http://127.0.0.1:{server.port}"]
    before = _cpu(server.pid)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + _PATIENCE)
    return Run(*parsed(done.stdout), (_cpu(server.pid) - before) / max(requests(done.stdout), 1))


def _cpu(pid: int) -> float:
    """CPU that all threads of a process have spent, µs; 0 where the system does not tell."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e3


def requests(text: str) -> int:
    """How many requests wrk's report is of."""
    match = re.search(r"(\d+) requests in", text)
    return int(match[1]) if match else 0


def parsed(text: str) -> tuple[float, int]:
    """Wrk's report as requests per second and failures."""
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    if rate is None:
        raise RuntimeError(f"{text!r} is no report of wrk's")
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    broken = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    failed = int(refused[1]) if refused else 0
    return float(rate[1]), failed + (sum(int(number) for number in broken.groups()) if broken else 0)
