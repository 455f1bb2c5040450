"""redis-py's connection internals, 5.0 to 8, and socket options."""

from __future__ import annotations

import asyncio
import math
import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError, InvalidResponse, TimeoutError as RedisTimeoutError

from limitgate.stores.redis.credentials import Login

CLOSED_BY_SERVER = "Connection closed by server."
_NO = ("0", "f", "false", "n", "no", "")


def shared_options(options: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """Return ``options`` for later connections. Host names are checked, as redis-py does only since 6.0."""
    shared = dict(options)
    # Since redis-py 7.2; otherwise each connection reads a version from disk.
    if hasattr(made, "driver_info"):
        shared["driver_info"] = made.driver_info
    if hasattr(made, "check_hostname"):
        check = shared.get("ssl_check_hostname", True)
        is_checked = check.lower() not in _NO if isinstance(check, str) else bool(check)
        shared["ssl_check_hostname"] = is_checked and shared.get("ssl_cert_reqs") != "none"
    return shared


def is_answer(error: BaseException) -> bool:
    """True if an error is a server's reply, so that the connection stays usable."""
    if isinstance(error, RedisConnectionError):
        return type(error) is not RedisConnectionError
    return isinstance(error, Exception) and not isinstance(error, InvalidResponse | RedisTimeoutError | OSError)


def lead_to(connection: Any, host: str, address: str) -> None:
    """Connect to an address instead of resolving the host."""
    connection._connection_arguments = partial(_at, connection._connection_arguments(), host, address)  # noqa: SLF001


def _at(arguments: Mapping[str, Any], host: str, address: str) -> dict[str, Any]:
    return {**arguments, "host": address, **({"server_hostname": host} if "ssl" in arguments else {})}


def socket_of(connection: Any) -> socket.socket:
    """Return the socket, which the connection still owns."""
    sock: socket.socket = connection._sock  # noqa: SLF001
    return sock


def take_writer(connection: Any) -> asyncio.StreamWriter:
    """Take over the writer, which closes when it is freed."""
    writer: asyncio.StreamWriter = connection._writer  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    return writer


def close(connection: Any) -> None:
    if connection._writer is not None:  # noqa: SLF001
        take_writer(connection).close()


def set_login(connection: Any, login: Login) -> None:
    connection.username, connection.password = login.user, login.password
    connection.limitgate_login = login


def renewable_login(connection: Any) -> Login | None:
    """Return None if the login does not expire."""
    login: Login | None = getattr(connection, "limitgate_login", None)
    return login if login is not None and login.renew_at < math.inf else None


_SECONDS = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Load balancers drop idle connections. ``TCP_KEEPALIVE`` is for macOS."""
KEEPALIVE: Mapping[int, int] = {getattr(socket, name): value for name, value in _SECONDS.items() if hasattr(socket, name)}

_AT_ONCE = struct.pack("ii", 1, 0)


def reset_on_close(connected: Any) -> None:
    """Close with a reset, without retransmission."""
    with suppress(OSError, AttributeError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def has_data(connected: Any) -> bool:
    with selectors.DefaultSelector() as selector, suppress(OSError, ValueError):
        selector.register(connected, selectors.EVENT_READ)
        return bool(selector.select(0))
    return False
