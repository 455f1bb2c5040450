"""A deadline for a thread's socket reads as a whole; socket timeouts apply to each read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer


@contextmanager
def shut_after(seconds: float, fileno: int) -> Iterator[None]:
    """Shut down a socket after ``seconds`` unless the block has ended, which also ends pending reads."""
    with socket.fromfd(fileno, socket.AF_INET, socket.SOCK_STREAM) as line:
        timer = Timer(seconds, _shut, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut(line: socket.socket) -> None:
    with suppress(OSError):  # The socket may be gone.
        line.shutdown(socket.SHUT_RDWR)
