"""All that we use of redis-py's connections below its public interface, and what differs between its versions, 5.0 to 8."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError, InvalidResponse, TimeoutError as RedisTimeoutError

from limitgate.stores.redis.dial.credentials import Login

CLOSED_BY_SERVER = "Connection closed by server."
"""Text of redis-py's error for a server that hangs up."""
_NO = ("0", "f", "false", "n", "no", "")


def shared_options(options: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """The options of a URL for all connections, of which ``made`` is the first.

    A certificate is for the host unless the URL says otherwise: redis-py checks that since 6.0.
    """
    shared = dict(options)
    if hasattr(made, "driver_info"):  # since 7.2; without it, each reads a version from disk
        shared["driver_info"] = made.driver_info
    if hasattr(made, "check_hostname"):
        check = shared.get("ssl_check_hostname", True)
        is_checked = check.lower() not in _NO if isinstance(check, str) else bool(check)
        shared["ssl_check_hostname"] = is_checked and shared.get("ssl_cert_reqs") != "none"
    return shared


def is_answer(error: BaseException) -> bool:
    """True if an error is what a server has answered, and more can be asked. Some of these are lost connections to redis-py."""
    if isinstance(error, RedisConnectionError):
        return type(error) is not RedisConnectionError
    return isinstance(error, Exception) and not isinstance(error, InvalidResponse | RedisTimeoutError | OSError)


def lead_to(connection: Any, host: str, address: str) -> None:
    """Have an asyncio connection to a host connect to one of its addresses."""
    connection._connection_arguments = partial(_at, connection._connection_arguments(), host, address)  # noqa: SLF001


def _at(arguments: Mapping[str, Any], host: str, address: str) -> dict[str, Any]:
    """Arguments to connect with, to an address of the host; certificates are for the host."""
    return {**arguments, "host": address, **({"server_hostname": host} if "ssl" in arguments else {})}


def socket_of(connection: Any) -> socket.socket:
    """The socket of an open connection of threads, which stays the connection's to close."""
    sock: socket.socket = connection._sock  # noqa: SLF001
    return sock


def take_writer(connection: Any) -> asyncio.StreamWriter:
    """Take over the writer of an open asyncio connection, which then has nothing left to close. Once it is freed, it closes."""
    writer: asyncio.StreamWriter = connection._writer  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    return writer


def close(connection: Any) -> None:
    """Close an asyncio connection without waiting. It need not be open any more."""
    if connection._writer is not None:  # noqa: SLF001
        take_writer(connection).close()


def set_login(connection: Any, login: Login) -> None:
    """Have a connection log in, and remember for how long that is valid."""
    connection.username, connection.password = login.user, login.password
    connection.limitgate_login = login


def renewable_login(connection: Any) -> Login | None:
    """The login of a connection if it expires."""
    login: Login | None = getattr(connection, "limitgate_login", None)
    return login if login is not None and login.renew_at < math.inf else None
