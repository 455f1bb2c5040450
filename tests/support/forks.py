"""Forks Python programs from one interpreter that has already imported most of their modules.

That interpreter runs ``python -m tests.support.forks MODULE...``. It reads the programs from its standard input.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVERS = (
    "fastapi",
    "flask",
    "gunicorn.app.wsgiapp",
    "gunicorn.glogging",
    "gunicorn.workers.sync",
    "h11",
    "limitgate.command.verbs.serve",
    "limitgate.fastapi",
    "limitgate.flask",
    "limitgate.page",
    "limitgate.stores.redis.aio.store",
    "limitgate.stores.redis.threads.store",
    "redis.asyncio",
    "starlette.testclient",
    "tests.support.ticks",
    "uvicorn.__main__",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.protocols.websockets.auto",
    "uvicorn_worker",
)
DJANGO = (
    "django.core.asgi",
    "django.core.wsgi",
    "django.test",
    "django.urls",
    "limitgate.command.verbs.explain",
    "limitgate.command.verbs.peek",
    "limitgate.django",
    "limitgate.testing",
    "pytest",
    "tests.support.command_line",
    "tests.support.doors",
    "tests.support.markdown",
)
"""For projects of Django, each of which needs its own process."""
MOMENT = 0.02
"""Seconds between two looks at whether a program has ended."""


class Forked:
    """A running program, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, parent: _Parent, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent, self._command = parent, command

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._command, timeout)
            time.sleep(MOMENT)
        return status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def can_run(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """True for a module, unless a ``PYTHON`` variable may change how an interpreter starts."""
    return list(command[:2]) == [sys.executable, "-m"] and not any(name.startswith("PYTHON") for name in environment)


def start(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    cwd: Path = ROOT,
    *,
    imported: tuple[str, ...] = SERVERS,
) -> Forked:
    """Run ``[sys.executable, "-m", module, ...]``. The file ``output`` gets what it prints."""
    output.write_bytes(b"")
    told = {"module": command[2], "words": command[3:], "output": str(output), "cwd": str(cwd)}
    parent = _parent(imported)
    pid = parent.ask(**told, environment=dict(environment))
    assert pid is not None
    return Forked(parent, pid, command)


def ended(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    timeout: float,
    *,
    cwd: Path = ROOT,
    imported: tuple[str, ...] = SERVERS,
) -> tuple[int, str]:
    """Exit status and output of a program that ends by itself."""
    process = start(command, output, environment, cwd, imported=imported)
    try:
        return process.wait(timeout), output.read_text()
    finally:
        process.kill()


class _Parent:
    """The interpreter that programs are forked from. It ends with this process."""

    def __init__(self, imported: Sequence[str]) -> None:
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "tests.support.forks", *imported]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.communicate)

    def ask(self, **told: Any) -> int | None:
        with self._lock:
            self._process.stdin.write(f"{json.dumps(told)}\n")
            self._process.stdin.flush()
            answer: int | None = json.loads(self._process.stdout.readline())
            return answer


_parent = cache(_Parent)


def _serve() -> None:
    """Start programs, and answer whether they have ended."""
    for name in sys.argv[1:]:
        with suppress(ImportError):
            import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # A collection in a child would copy the shared memory.
    for line in sys.stdin:
        told = json.loads(line)
        if "pid" in told:
            pid, status = os.waitpid(told["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                _become(told)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


def _become(told: dict[str, Any]) -> None:
    """Run a program in this process, as ``python -m`` does, and exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing, open(told["output"], "a") as output:  # noqa: PTH123 - quick
        for new, old in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(new.fileno(), old)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["cwd"])
    sys.path[0] = told["cwd"]
    sys.argv = [told["module"], *told["words"]]
    runpy.run_module(told["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
