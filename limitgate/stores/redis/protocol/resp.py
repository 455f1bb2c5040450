"""RESP, the protocol of Redis: by hiredis where it is installed, else in Python. Pure: bytes and replies, no connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

try:
    from hiredis import ProtocolError, PushNotification, Reader, pack_command
except ImportError:  # not installed, or before 3.2, which cannot tell push messages from replies
    from limitgate.stores.redis.protocol.python_resp import (  # type: ignore[assignment]
        ProtocolError,
        PushNotification,
        Reader,
        pack_command,
    )

__all__ = ["ProtocolError", "PushNotification", "Reader", "error_of", "pack_command"]

_KINDS: Mapping[str, Callable[[Any], RedisError]] = {
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "ERR": ResponseError,
    "LOADING": BusyLoadingError,
    "MASTERDOWN": MasterDownError,
    "MOVED": MovedError,
    "NOAUTH": AuthenticationError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
    "WRONGPASS": AuthenticationError,
}
"""Kinds of errors by their code. redis-py itself knows ASK, MOVED and TRYAGAIN since 7.2, before that on its cluster client."""


def error_of(text: str) -> RedisError:
    """Return the error that an error reply stands for, without its code if the kind says as much.

    Raises `ValueError` if the reply redirects to an address that cannot be read.
    """
    code, _, message = text.partition(" ")
    kind = _KINDS.get(code)
    return ResponseError(text) if kind is None else kind(message)
