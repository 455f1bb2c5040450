"""Options of TCP sockets to Redis."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_SECONDS = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""The kernel asks the other end after 30 seconds without a word, and then every 5 seconds; after 3 questions without an answer
the connection is dead. So no load balancer or NAT, which drop connections after minutes, finds one idle. ``TCP_KEEPALIVE`` is
the name of ``TCP_KEEPIDLE`` on macOS."""
KEEPALIVE: Mapping[int, int] = {getattr(socket, name): value for name, value in _SECONDS.items() if hasattr(socket, name)}
"""Options of IPPROTO_TCP, those that the platform has."""

_AT_ONCE = struct.pack("ii", 1, 0)


def reset_on_close(connected: Any) -> None:
    """Close a TCP socket by a reset when it is closed: the kernel sends nothing again that was not acknowledged."""
    with suppress(OSError, AttributeError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def has_data(connected: Any) -> bool:
    """True if a socket has something to read, its end included."""
    with selectors.DefaultSelector() as selector, suppress(OSError, ValueError):
        selector.register(connected, selectors.EVENT_READ)
        return bool(selector.select(0))
    return False
