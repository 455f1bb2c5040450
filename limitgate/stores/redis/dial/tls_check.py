"""A look at whether a server speaks TLS where its URL says otherwise: neither side tells, each waits or hangs up."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError, TimeoutError as RedisTimeoutError

from limitgate.stores.redis import background
from limitgate.stores.redis.dial.inspection import Inspection
from limitgate.stores.redis.dial.redis_py import CLOSED_BY_SERVER
from limitgate.stores.redis.dial.url import Address

APART = 60.0
"""Seconds between two looks at a server that does not answer."""
_TIMEOUT = 0.5
"""Seconds that each step of a look may take."""


class TLSCheck:
    """Looks at servers to which no connection comes about, in threads that nobody waits for."""

    def __init__(self, inspection: Inspection, *, uses_tls: bool) -> None:
        self._inspection = inspection
        self._uses_tls = uses_tls
        self._looked: dict[str, float] = {}

    def look(self, server: str, connection: Any, error: Exception) -> None:
        """Look at a server to which redis-py's connection has failed, if that may be for want of TLS, or for too much of it."""
        host = getattr(connection, "host", None)
        if host is None or not self._may_be_for_tls(error):
            return
        address, now = (host, connection.port), time.monotonic()
        if now - self._looked.get(server, -APART) >= APART:
            self._looked[server] = now
            with suppress(RuntimeError):  # no thread can be started now
                background.start("tls", self._look, server, address)

    def _may_be_for_tls(self, error: Exception) -> bool:
        if self._uses_tls:  # a server without TLS waits for the end of what it takes for a command
            return isinstance(error, RedisTimeoutError | TimeoutError)
        ended = isinstance(error.__cause__ or error.__context__, ConnectionResetError | BrokenPipeError)
        return isinstance(error, RedisConnectionError) and (ended or str(error) == CLOSED_BY_SERVER)

    def _look(self, server: str, address: Address) -> None:
        with suppress(OSError):
            if self._uses_tls and _answers_plainly(address):
                self._inspection.tell_tls(server, "it does not speak TLS at this port; use redis:// or its port for TLS")
            elif not self._uses_tls and _shakes_hands(address):
                self._inspection.tell_tls(server, "it speaks TLS at this port; use rediss://")


def _answers_plainly(address: Address) -> bool:
    """True if a server answers a command without TLS, by an error or otherwise."""
    with socket.create_connection(address, _TIMEOUT) as plain:
        plain.sendall(b"PING\r\n")
        return plain.recv(1) in (b"+", b"-")


def _shakes_hands(address: Address) -> bool:
    """True if a server begins to speak TLS, whatever certificate it has or wants. Nothing is sent through it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, _TIMEOUT) as plain, context.wrap_socket(plain):
        return True
