"""Inspects servers on each connection: missing rights, eviction, replaced data.

An inspection never fails a connection. It logs problems that retrying can't fix, such as a TLS mismatch.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, NamedTuple

from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)

from limitgate.internal_errors import logged_errors
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.process import background
from limitgate.process.clock import monotonic
from limitgate.stores.redis.errors import NO_CERTIFICATE, hindrance_of, unknown_commands
from limitgate.stores.redis.redis_py import CLOSED_BY_SERVER
from limitgate.stores.redis.url import Address

INSPECT = (files("limitgate") / "lua" / "inspect.lua").read_text("utf-8")

FORGETS_NOBODY = frozenset({"noeviction", "volatile-ttl"})
"""Eviction policies that keep refused callers."""


FORGOTTEN = 600.0
"""Seconds after which the same error is logged again."""


class Data(NamedTuple):
    run: str
    history: str
    """Replication ID. Changes after a restart, a promotion, or an hour without replicas."""
    parent: str
    """Previous replication ID, or zeros."""

    def continues(self, before: Data) -> bool:
        """True if these data contain ``before``."""
        forgot_its_replicas = self.run == before.run and not self.parent.strip("0")
        return self.history == before.history or forgot_its_replicas


class Report(NamedTuple):
    rights: Sequence[str]
    """Missing rights, as in ACL SETUSER."""
    evicts: str
    """Eviction policy that can drop buckets; empty if it can't."""
    data: Data | None
    """None for a replica."""
    unknown: Sequence[str] = ()


def read_report(reply: object) -> Report | None:
    if isinstance(reply, NoPermissionError):
        return Report(["+eval"], "", None)
    match reply:
        case [list(words), bytes(info)] if all(isinstance(word, bytes) for word in words):
            said, texts = _fields(info), [word.decode(errors="replace") for word in words]
            unknown = tuple(word for word in texts if word.isalpha())
            return Report([word for word in texts if not word.isalpha()], _evicts(said), _data(said), unknown)
    return None


def _fields(info: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in info.decode(errors="replace").splitlines()]
    return {name: value for name, _, value in lines}


def _evicts(said: dict[str, str]) -> str:
    policy = said.get("maxmemory_policy", "")
    return "" if policy in FORGETS_NOBODY or not said.get("maxmemory", "").strip("0") else policy


def _data(said: dict[str, str]) -> Data | None:
    history = said.get("master_replid")
    if not history or said.get("role") != "master":
        return None
    return Data(said.get("run_id", ""), history, said.get("master_replid2", ""))


class Inspection:
    replacements: int = 0
    """Number of connections to a server that may have lost data."""

    def __init__(self) -> None:
        self._prefixes: tuple[str, ...] = ()
        self._data: dict[str, Data] = {}
        self._lacks = Once(Diagnosis.RIGHTS)
        self._evicts = Once(Diagnosis.EVICTS)
        self._replaced = Once(Diagnosis.REPLACED)
        self._unknown = Once(Diagnosis.COMMANDS)
        self._told: dict[str, tuple[Diagnosis, float]] = {}
        self._refused: dict[tuple[str, Diagnosis], float] = {}
        self._masters: set[str] = set()

    def expect(self, prefix: str) -> None:
        if prefix not in self._prefixes:
            self._prefixes = (*self._prefixes, prefix)

    @property
    def question(self) -> Sequence[Any]:
        return "EVAL", INSPECT, "0", *self._prefixes

    def failed(self, server: str, error: Exception) -> None:
        """Log an error if retrying can't help, once until a connection succeeds."""
        hindrance = hindrance_of(error)
        if hindrance is not None:
            self._tell(server, *hindrance)

    def refused(self, server: str, error: BaseException) -> None:
        """Log an error if retrying can't help. A former master is no error, because the next connection finds the new one."""
        hindrance = hindrance_of(error)
        if hindrance is None or (isinstance(error, ReadOnlyError | MasterDownError) and server in self._masters):
            return
        diagnosis, reason = hindrance
        if diagnosis is Diagnosis.COMMANDS:
            self._unknown.log(server, reason)
        elif diagnosis is Diagnosis.RIGHTS:
            self._lacks.log(server, reason)
        else:
            now, last = monotonic(), self._refused.get((server, diagnosis), -math.inf)
            self._refused[server, diagnosis] = now
            if now - last > FORGOTTEN:
                diagnosis.log(server, reason)

    def tell_tls(self, server: str, reason: str) -> None:
        self._tell(server, Diagnosis.TLS, reason)

    def _tell(self, server: str, diagnosis: Diagnosis, reason: str) -> None:
        before, _ = self._told.get(server, (None, 0.0))
        self._told[server] = diagnosis, monotonic()
        if before is not diagnosis:
            diagnosis.log(server, reason)

    def heard(self, server: str, reply: object, began: float) -> None:
        """Inspect a connection. Errors after it ``began``, in `monotonic` seconds, stay."""
        _, failed = self._told.get(server, (None, math.inf))
        if failed < began:
            self._told.pop(server, None)
        with logged_errors():
            report = read_report(reply)
            if report is not None:
                self._compare(server, report)
            elif isinstance(reply, ResponseError):
                hindrance = hindrance_of(reply)
                if hindrance is not None and hindrance.diagnosis is Diagnosis.COMMANDS:
                    self._unknown.log(server, hindrance.reason)

    def _compare(self, server: str, report: Report) -> None:
        if report.rights:
            self._lacks.log(server, " ".join(report.rights))
        if report.unknown:
            self._unknown.log(server, unknown_commands(report.unknown).reason)
        if report.evicts:
            self._evicts.log(server, report.evicts)
        (self._masters.discard if report.data is None else self._masters.add)(server)
        if report.data is not None:
            before = self._data.pop(server, None) or self._followed(report.data)
            self._data[server] = report.data
            if before is not None and not report.data.continues(before):
                self.replacements += 1
                self._replaced.log(server)

    def _followed(self, data: Data) -> Data | None:
        for server, other in list(self._data.items()):
            if other.history == data.parent:
                return self._data.pop(server, None)
        return None


APART = 60.0
"""Seconds."""
_TIMEOUT = 0.5
"""Seconds per step."""


class TLSCheck:
    def __init__(self, inspection: Inspection, *, uses_tls: bool, has_certificate: bool) -> None:
        self._inspection = inspection
        self._uses_tls = uses_tls
        self._has_certificate = has_certificate
        self._looked: dict[str, float] = {}

    def look(self, server: str, connection: Any, error: Exception) -> None:
        host = getattr(connection, "host", None)
        if host is None or not self._may_be_for_tls(error):
            return
        address, now = (host, connection.port), monotonic()
        if now - self._looked.get(server, -APART) >= APART:
            self._looked[server] = now
            with suppress(RuntimeError):  # no thread can be started now
                background.start("tls", self._look, server, address)

    def look_again(self, server: str, connection: Any, error: Exception) -> None:
        """Call `look` again, because some servers request a certificate only after the first command."""
        if self._uses_tls:
            self.look(server, connection, error)

    def _may_be_for_tls(self, error: Exception) -> bool:
        ended = isinstance(error.__cause__ or error.__context__, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
        if self._uses_tls and isinstance(error, RedisTimeoutError | TimeoutError):
            # A server without TLS reads the handshake as a command and waits for its end.
            return True
        return isinstance(error, RedisConnectionError) and (ended or str(error) == CLOSED_BY_SERVER)

    def _look(self, server: str, address: Address) -> None:
        if not self._uses_tls:
            if _holds(_shakes_hands, address):
                self._inspection.tell_tls(server, "it speaks TLS at this port; use rediss://")
        elif _holds(_answers_plainly, address):
            self._inspection.tell_tls(server, "it does not speak TLS at this port; use redis:// or its port for TLS")
        elif not self._has_certificate and _holds(_wants_certificate, address):
            self._inspection.tell_tls(server, NO_CERTIFICATE)


def _holds(look: Callable[[Address], bool], address: Address) -> bool:
    try:
        return look(address)
    except OSError:
        return False


def _answers_plainly(address: Address) -> bool:
    with socket.create_connection(address, _TIMEOUT) as plain:
        plain.sendall(b"PING\r\n")
        return plain.recv(1) in (b"+", b"-")


def _shakes_hands(address: Address) -> bool:
    with _spoken_to(address):
        return True


def _wants_certificate(address: Address) -> bool:
    """True if the server wants a client certificate. Without one, TLS 1.3 closes the connection after the handshake."""
    with _spoken_to(address) as encrypted:
        try:
            return not encrypted.recv(1)
        except TimeoutError:
            return False
        # The server's alert may be lost.
        except OSError:
            return True


def _spoken_to(address: Address) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(address, _TIMEOUT))
