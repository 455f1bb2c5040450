"""A redis-server of the tests' own: private socket, private folder, stopped by its pid."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis


class RedisServer:
    """Starts a redis-server on a unix socket in a new folder. ``options`` are command-line options without dashes."""

    def __init__(self, **options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("no redis-server found, expected one in PATH: run 'make redis' or 'make test'")
        self.folder = Path(tempfile.mkdtemp(prefix="limitgate-redis-"))
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._command = [program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        self._command += ["--save", "", "--appendonly", "no", "--loglevel", "warning"]
        for name, value in options.items():
            self._command += [f"--{name.replace('_', '-')}", value]
        self.start()

    def start(self) -> None:
        """Start the server and make sure that it is this one that answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    pid = client.info("server")["process_id"]
                break
            except redis.RedisError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("redis-server did not come up") from None
                time.sleep(0.02)
        if pid != self.process.pid:
            raise RuntimeError(f"pid {pid} answers, expected the server just started, {self.process.pid}")

    def client(self) -> redis.Redis:
        """A plain redis-py client of this server, to look behind the store's back."""
        return redis.Redis(unix_socket_path=str(self.socket))

    @contextmanager
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
        """Stop the server and remove its folder."""
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
