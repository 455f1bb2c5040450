"""Converts errors of redis-py and the network to `StoreError`."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ConnectionError as RedisConnectionError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
    TryAgainError,
)

from limitgate.errors import StoreError, StoreFault
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.text import shortened

Redirection = AskError | TryAgainError
"""In redis-py, MOVED is a kind of ASK."""


_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


_LONGEST = 500
"""Characters."""


class CredentialsError(RedisConnectionError):
    """The ``credentials`` callable returned no login."""


class Hindrance(NamedTuple):
    """A reason why retrying can't help."""

    diagnosis: Diagnosis
    reason: str
    """Reason and remedy, without a password."""


_LOGIN, _COMMANDS, _WRITES = Diagnosis.LOGIN, Diagnosis.COMMANDS, Diagnosis.WRITES
_NO_LOGIN = "it requires a password but got none: use redis://user:password@host, or :password@, or credentials="
_REPLICA = "it is a replica: name its master in the URL, or use redis+sentinel://"
_CLUSTER = "it is a cluster node: use redis+cluster:// instead of redis://"
_HINDRANCES = (
    ("HELLO must be called", _LOGIN, _NO_LOGIN),
    ("Authentication required", _LOGIN, _NO_LOGIN),
    ("invalid username-password", _LOGIN, "the user or the password is wrong, or the user is disabled"),
    ("invalid password", _LOGIN, "the password is wrong"),
    ("without any password configured", _LOGIN, "it has no password but the URL has one: remove it"),
    ("running in protected mode", _LOGIN, "it is in protected mode and serves only its own machine: set a password there"),
    ("DB index", Diagnosis.DATABASE, "the number is too high, see CONFIG GET databases there"),
    ("SELECT is not allowed", Diagnosis.DATABASE, "a cluster has only database 0: remove the number"),
    ("cluster support disabled", Diagnosis.SERVER_KIND, "it is not a cluster node: use redis:// instead of redis+cluster://"),
    ("CROSSSLOT", Diagnosis.SERVER_KIND, _CLUSTER),
    ("unknown command 'SENTINEL'", Diagnosis.SERVER_KIND, "it is not a Sentinel: use redis:// instead of redis+sentinel://"),
    ("NOPROTO", _COMMANDS, "it does not speak RESP3: add ?protocol=2 to the URL"),
    ("unsupported protocol version", _COMMANDS, "it does not speak RESP3: add ?protocol=2 to the URL"),
    ("READONLY You can't write", _WRITES, _REPLICA),
    ("MISCONF", _WRITES, "it cannot save its data to disk: fix that, or CONFIG SET stop-writes-on-bgsave-error no"),
    ("NOREPLICAS", _WRITES, "it has fewer replicas than min-replicas-to-write: connect them, or lower that setting"),
)
"""Diagnoses by parts of error texts, because redis-py removes the error codes."""
_UNKNOWN_COMMAND = re.compile(r"""unknown command(?! called from)[ '"`]*([a-z|]+)""", re.IGNORECASE)
"""Skips Valkey's "Unknown command called from script", which names no command."""
_REFUSED = "not supported|unsupported|not allowed|disabled"
_HELLO_REFUSED = re.compile(rf"\bHELLO\b.*(?:{_REFUSED})|(?:{_REFUSED}).*\bHELLO\b", re.IGNORECASE)
_NO_SCRIPTS = re.compile(rf"\b(?:EVAL(?:SHA)?|scripting|Lua)\b.*(?:{_REFUSED})", re.IGNORECASE)
_FULL = "its memory is full and it cannot evict anything: raise maxmemory, or set maxmemory-policy volatile-ttl"
_PASSING = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
NO_CERTIFICATE = "it requires a client certificate: add ?ssl_certfile= and &ssl_keyfile= to the URL"
_EXPIRED, _OTHER_NAME = 10, (62, 64)
"""OpenSSL codes."""


_REPEATED = ", with args beginning with"
"""Start of the arguments that Redis repeats in an error."""
_MASK = "***"


def without_secrets(error: Exception, user: str | None, password: str | None) -> Exception:
    """Remove a login from a connection error, its causes and tracebacks.

    Servers and proxies may repeat HELLO and AUTH in errors. Unknown errors are replaced, because they may contain bytes
    from the server.
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        seen.append(each)
        if isinstance(each, RedisError):
            each.args = (_masked(str(each), user, password),)
        each.__traceback__ = None
        leading = each.__cause__ or each.__context__
        each.__context__ = leading if isinstance(leading, RedisError | OSError) else None
        each.__cause__ = each.__context__ if each.__cause__ else None
        each = each.__context__
    return (
        error
        if isinstance(error, RedisError | OSError)
        else InvalidResponse(f"invalid reply from Redis: {type(error).__name__}")
    )


def _masked(text: str, user: str | None, password: str | None) -> str:
    """Mask secrets, except in known texts, in which the password may be an ordinary word."""
    kept = [re.escape(part) for part, _, _ in _HINDRANCES]
    secrets = [re.escape(password)] if password else []
    secrets += [rf"(?<!\w){re.escape(user)}(?!\w)"] if user and user != "default" else []
    pattern = f"({'|'.join(kept)}){''.join([f'|{secret}' for secret in secrets])}"
    return re.sub(pattern, lambda match: match[1] or _MASK, text.partition(_REPEATED)[0])


def hindrance_of(error: BaseException) -> Hindrance | None:
    """Return None if retrying may help."""
    if isinstance(error, CredentialsError):
        return Hindrance(Diagnosis.CREDENTIALS, str(error))
    of_server = isinstance(error, RedisError) and (_hindrance_by_class(error) or _hindrance_by_text(error, str(error)))
    return of_server or _hindrance_of_tls(error)


def _hindrance_by_class(error: RedisError) -> Hindrance | None:
    if isinstance(error, Redirection):
        return Hindrance(Diagnosis.SERVER_KIND, _CLUSTER)
    if isinstance(error, ReadOnlyError | MasterDownError):
        return Hindrance(_WRITES, _REPLICA)
    if isinstance(error, OutOfMemoryError):
        return Hindrance(_WRITES, _FULL)
    return None


def _hindrance_by_text(error: RedisError, text: str) -> Hindrance | None:
    for part, diagnosis, reason in _HINDRANCES:
        if part in text:
            return Hindrance(diagnosis, reason)
    if isinstance(error, AuthenticationError):
        return Hindrance(_LOGIN, "it refuses the user and password")
    if isinstance(error, NoPermissionError):
        command = re.search(r"'([a-z|]+)' command", text)
        instead = ", or add ?protocol=2 to the URL" if command and command[1] == "hello" else ""
        return Hindrance(Diagnosis.RIGHTS, f"+{command[1]}{instead}") if command else None
    return _hindrance_by_command(text)


def _hindrance_by_command(text: str) -> Hindrance | None:
    if command := _UNKNOWN_COMMAND.search(text):
        return unknown_commands([command[1]])
    if _HELLO_REFUSED.search(text):
        return unknown_commands(["HELLO"])
    if _NO_SCRIPTS.search(text):
        return Hindrance(_COMMANDS, "it runs no scripts: allow EVAL and EVALSHA there")
    return None


def unknown_commands(names: Sequence[str]) -> Hindrance:
    if [name.upper() for name in names] == ["HELLO"]:
        return Hindrance(_COMMANDS, "it does not know HELLO: add ?protocol=2 to the URL")
    listed = ", ".join(name.upper() for name in names)
    return Hindrance(_COMMANDS, f"it does not know {listed}: remove its rename-command, or use a server that has them all")


def _hindrance_of_tls(error: BaseException | None) -> Hindrance | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return Hindrance(Diagnosis.TLS, f"its certificate is not trusted ({error.verify_message}): {_cure_of(error)}")
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return Hindrance(Diagnosis.TLS, "it does not speak TLS at this port; use redis:// or its port for TLS")
        if isinstance(error, ssl.SSLError) and error.reason and "CERTIFICATE_REQUIRED" in error.reason:
            return Hindrance(Diagnosis.TLS, NO_CERTIFICATE)
        if isinstance(error, ssl.SSLError) and error.reason and not isinstance(error, _PASSING):
            return Hindrance(Diagnosis.TLS, f"the TLS handshake failed ({error.reason}): check the ssl_ options of the URL")
        error = error.__cause__ or error.__context__
    return None


def _cure_of(error: ssl.SSLCertVerificationError) -> str:
    unchecked = "or add ?ssl_cert_reqs=none to trust any certificate on a private network"
    if error.verify_code in _OTHER_NAME:
        return f"use a name in the certificate, or add ?ssl_check_hostname=false, {unchecked}"
    if error.verify_code == _EXPIRED:
        return f"renew it, {unchecked}"
    return f"set its authority with ?ssl_ca_certs=, {unchecked}"


def is_no_room(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_room() -> StoreError:
    return StoreError("this process has no file descriptor, thread or memory left for a connection to Redis", "overload")


OUT_OF_MEMORY = OutOfMemoryError("Redis is out of memory")
"""Reported by a script's reply."""


def unsendable(error: Exception) -> StoreError:
    return StoreError(f"the call cannot be sent: {error}", "connection")


def store_error(error: Exception) -> StoreError:
    return error.anew() if isinstance(error, StoreError) else _meaning(error)


def _meaning(error: Exception) -> StoreError:
    if isinstance(error, OutOfMemoryError):
        return StoreError("Redis is out of memory", "oom")
    if is_no_room(error):
        return no_room()
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreError("no answer from Redis within the timeout", "timeout")
    if isinstance(error, Redirection):
        return StoreError("this is a node of a Redis Cluster, expected a URL like redis+cluster://host:port", "reply")
    fault: StoreFault = "reply" if isinstance(error, ResponseError) else "connection"
    hindrance = hindrance_of(error)
    if hindrance is not None and hindrance.diagnosis is not Diagnosis.RIGHTS:
        refuses = hindrance.diagnosis in (_COMMANDS, _WRITES)
        what = "Redis refuses the call" if refuses else "no connection to Redis"
        return StoreError(f"{what}: {hindrance.reason}", fault, is_unwritable=hindrance.diagnosis is _WRITES)
    what = f"Redis refused the call ({type(error).__name__})" if fault == "reply" else "cannot reach Redis"
    return StoreError(f"{what}: {shortened(str(error), _LONGEST)}", fault)
