"""How many connections to this process wait to be accepted, where the system tells: on TCP under Linux."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import Final

from limitgate.process.clock import monotonic

DESCRIPTORS = 256
"""File descriptors among which listening sockets are looked for: servers open theirs before they accept anything."""
SCAN_EVERY_S = 60.0
"""Seconds after which they are looked for again, or earlier if one of them was closed."""
_INFO: Final[int] = getattr(socket, "TCP_INFO", 0)
_LISTENS: Final = 10
"""State of a listening socket, the first byte of its `tcp_info`."""
_WAITING: Final = slice(24, 28)
"""`tcpi_unacked`, which is the length of the queue of a listening socket."""


class ListenQueue:
    """The queues of all listening sockets of this process. ``clock`` gives seconds and never steps."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._sockets: list[int] = []
        """Their file descriptors, which may have been closed meanwhile, and be of something else."""
        self._scan_at = -math.inf

    def __call__(self) -> int:
        """Connections that wait to be accepted, 0 where the system does not tell."""
        lengths = [_length(descriptor) for descriptor in self._sockets]
        if None in lengths or self._clock() >= self._scan_at:
            self._scan_at = self._clock() + SCAN_EVERY_S
            self._sockets = [descriptor for descriptor in range(DESCRIPTORS) if _length(descriptor) is not None]
            lengths = [_length(descriptor) for descriptor in self._sockets]
        return sum([length or 0 for length in lengths])


def _length(descriptor: int) -> int | None:
    """The length of the queue of a listening socket, None if it is none.

    It is asked by a copy, which is closed at once: whoever listens closes his socket when he likes, and nobody listens then.
    """
    if not _INFO:
        return None
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        asked = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)  # whatever kind of socket it really is
    except OSError:
        os.close(copy)
        return None
    with asked:
        try:
            told = asked.getsockopt(socket.IPPROTO_TCP, _INFO, _WAITING.stop)
        except OSError:
            return None
    return int.from_bytes(told[_WAITING], "little") if told and told[0] == _LISTENS else None
