"""The number of connections waiting to be accepted, for TCP on Linux."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import Final

from limitgate.process.clock import monotonic

DESCRIPTORS = 256
"""File descriptors to scan for listening sockets, which servers open first."""
SCAN_EVERY_S = 60.0
"""Interval between scans in seconds; a closed socket triggers an earlier scan."""
_INFO: Final[int] = getattr(socket, "TCP_INFO", 0)
_LISTENS: Final = 10
"""State of a listening socket, the first byte of `tcp_info`."""
_WAITING: Final = slice(24, 28)
"""`tcpi_unacked`, the queue length of a listening socket."""


class ListenQueue:
    """Accept queues of all listening sockets of this process. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._sockets: list[int] = []
        """File descriptors, which may have been closed and reused."""
        self._scan_at = -math.inf

    def __call__(self) -> int:
        """Return the number of waiting connections, 0 if the system doesn't report it."""
        lengths = [_length(descriptor) for descriptor in self._sockets]
        if None in lengths or self._clock() >= self._scan_at:
            self._scan_at = self._clock() + SCAN_EVERY_S
            self._sockets = [descriptor for descriptor in range(DESCRIPTORS) if _length(descriptor) is not None]
            lengths = [_length(descriptor) for descriptor in self._sockets]
        return sum([length or 0 for length in lengths])


def _length(descriptor: int) -> int | None:
    """Return the queue length of a listening socket, None for other descriptors.

    Queries a duplicate, because the server may close its socket at any time.
    """
    if not _INFO:
        return None
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        # Family and type don't matter here.
        asked = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with asked:
        try:
            told = asked.getsockopt(socket.IPPROTO_TCP, _INFO, _WAITING.stop)
        except OSError:
            return None
    return int.from_bytes(told[_WAITING], "little") if told and told[0] == _LISTENS else None
