"""Options of TCP sockets to Redis."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_SECONDS = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: probe after 30 idle seconds, then every 5 seconds, 3 times. Load balancers and NATs drop idle connections.
``TCP_KEEPALIVE`` is for macOS."""
KEEPALIVE: Mapping[int, int] = {getattr(socket, name): value for name, value in _SECONDS.items() if hasattr(socket, name)}

_AT_ONCE = struct.pack("ii", 1, 0)


def reset_on_close(connected: Any) -> None:
    """Close a TCP socket with a reset, without retransmission."""
    with suppress(OSError, AttributeError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def has_data(connected: Any) -> bool:
    """True if a socket has data or has reached its end."""
    with selectors.DefaultSelector() as selector, suppress(OSError, ValueError):
        selector.register(connected, selectors.EVENT_READ)
        return bool(selector.select(0))
    return False
