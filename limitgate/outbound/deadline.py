"""A deadline for threads that read from a socket, for all of their reading together: timeouts of sockets are for each piece."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer


@contextmanager
def shut_after(seconds: float, fileno: int) -> Iterator[None]:
    """Shut a socket down unless the block has ended in time, so that reading from it ends too."""
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
    with suppress(OSError):  # it may be gone by now
        line.shutdown(socket.SHUT_RDWR)
