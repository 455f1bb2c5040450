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
from benchmarks.drive import CLIENTS, address
from tests.support.redis_server import RedisServer

CONNECTIONS = 32
_PATIENCE = 20.0
"""Seconds for a server to come up, or to stop."""
_WARM = 1
"""Seconds that each server is asked before it counts."""

_SCRIPT = """
local requests = {{}}
init = function()
  for number = 0, {clients} - 1 do
    requests[number] = wrk.format("GET", "{path}", {{["X-Forwarded-For"] = "{network}" .. number}})
  end
end
local number = 0
request = function()
  number = (number + 1) % {clients}
  return requests[number]
end
"""
"""What wrk sends: each request from the next client. uvicorn believes a peer on 127.0.0.1 about the client's address."""


class Served(NamedTuple):
    """What one server managed."""

    per_second: float
    """Requests per second, median over the runs."""
    of_bare: float
    """Share of what the bare application managed in the same round, median over the rounds."""
    failed: int
    """Answers that were not 2xx or 3xx, and connections that broke."""


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
        script.write_text(_SCRIPT.format(clients=CLIENTS, path=PATH, network=address(0)[:-1]))
        ports = {name: stack.enter_context(_uvicorn(app, url)) for name, (app, url) in _apps(server).items()}
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in ports}
        for port in ports.values():
            _wrk(wrk, script, port, _WARM)
        for _ in range(rounds):
            for name, port in ports.items():
                runs[name].append(_wrk(wrk, script, port, seconds))
    return Throughput({name: _served(taken, runs[_bare_of(name)]) for name, taken in runs.items()})


def _apps(server: RedisServer) -> dict[str, tuple[str, str]]:
    """What is served under which name: the application and its store."""
    apps = {name: (name, "") for name in BARE}
    apps |= {in_memory(LIMITGATE.name): (LIMITGATE.name, "")}
    return apps | {on_redis(contender.name): (contender.name, server.url) for contender in (LIMITGATE, *PEERS)}


def _bare_of(name: str) -> str:
    return next((peer.bare for peer in PEERS if on_redis(peer.name) == name), name if name in BARE else LIMITGATE.bare)


def _served(taken: list[tuple[float, int]], bare: list[tuple[float, int]]) -> Served:
    return Served(
        statistics.median(rate for rate, _ in taken),
        statistics.median(rate / base for (rate, _), (base, _) in zip(taken, bare)),
        sum(failed for _, failed in taken),
    )


@contextmanager
def _uvicorn(app: str, url: str) -> Iterator[int]:
    """A server in a process of its own, on a free port, stopped by its pid."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--factory", "benchmarks.contenders:served", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--loop", "asyncio", "--no-access-log", "--log-level", "critical"]
    environment = {**os.environ, "BENCHMARK_APP": app, "BENCHMARK_STORE": url}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield port
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


def _wrk(wrk: str, script: Path, port: int, seconds: int) -> tuple[float, int]:
    """Requests per second, and how many were not answered well."""
    command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), f"http://127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + _PATIENCE)
    return parsed(done.stdout)


def parsed(text: str) -> tuple[float, int]:
    """Wrk's report as requests per second and failures."""
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    if rate is None:
        raise RuntimeError(f"{text!r} is no report of wrk's")
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    broken = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    failed = int(refused[1]) if refused else 0
    return float(rate[1]), failed + (sum(int(number) for number in broken.groups()) if broken else 0)
