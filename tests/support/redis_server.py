"""A redis-server of the tests' own: private socket, private folder, stopped by its pid, and gone when the tests are."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.guard import Guard

UNNAMED: Mapping[str, Any] = (
    {"driver_info": None}
    if "driver_info" in signature(redis.Redis).parameters  # since redis-py 7.2
    else {"lib_name": None, "lib_version": None}
)
"""Options of a client that does not say who it is."""


class RedisServer:
    """Starts a redis-server on a unix socket in a new folder. ``options`` are command-line options without dashes.

    With a ``port`` it listens there as well, and only on 127.0.0.1. ``environment`` is added to its own.
    """

    def __init__(self, *, start: bool = True, environment: Mapping[str, str] | None = None, **options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("no redis-server found, expected one in PATH: run 'make redis' or 'make test'")
        self._guard = Guard("limitgate-redis-")
        self.folder = self._guard.folder
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.port = int(options.get("port", 0))
        self._command = [program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        self._command += ["--save", "", "--appendonly", "no", "--loglevel", "warning"]
        self._command += _spelled({"bind": "127.0.0.1", **options})
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            try:
                self.start()
            except BaseException:
                self.stop()
                raise

    def start(self, **options: str) -> None:
        """Start the server and make sure that it is this one that answers. ``options`` are for this once."""
        if self.process is not None and self.process.poll() is None:
            raise RuntimeError(f"the server runs already, pid {self.process.pid}")
        quiet = subprocess.DEVNULL
        command = self._command + _spelled(options)
        # In its own session. If the parent of a process group ends, the kernel continues the stopped processes of the group.
        self.process = subprocess.Popen(command, env=self._environment, stdout=quiet, stderr=quiet, start_new_session=True)
        self._guard.watch(self.process.pid)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(redis.RedisError):
                if self.socket.exists():  # quicker to ask than to connect
                    with self.client() as client:
                        pid = client.info("server")["process_id"]
                    break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("redis-server did not come up")
            time.sleep(0.002)
        if pid != self.process.pid:
            raise RuntimeError(f"pid {pid} answers, expected the server just started, {self.process.pid}")

    def run_as(self, *arguments: str) -> None:
        """Start with arguments of another kind: a configuration file, a Sentinel."""
        self._command = [self._command[0], *arguments[1:], arguments[0]]
        self.start()

    def client(self) -> redis.Redis:
        """A plain redis-py client of this server, to look behind the store's back; it does not try twice, nor say who it is."""
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0), **UNNAMED)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The server's process stands still: connections hold and may be made, nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Stop the server at once, as a crash would; `start` brings it back, empty."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the server and remove its folder. As there is nothing to save it is killed: told to end, it takes a moment."""
        if self.process is not None:
            self.kill()
        self._guard.dismiss()


def free_port() -> int:
    """A port on which nobody listens, below those that systems hand out: nobody takes it while its server is away."""
    # A node of a cluster also needs the port 10,000 above for its bus.
    while not (is_free(port := random.randrange(10_000, 22_000)) and is_free(port + 10_000)):
        pass
    return port


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    with socket.socket() as trying:
        try:
            trying.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _spelled(options: Mapping[str, str]) -> list[str]:
    """Options as they stand on a command line, each word of a value by itself: Redis 6.2 does not take values apart."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", *(value.split() or [""]))]
