"""RESP, by hiredis if installed, else in Python."""

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
# hiredis before 3.2 cannot distinguish push messages from replies.
except ImportError:
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
"""redis-py's parser knows ASK, MOVED and TRYAGAIN only since 7.2."""


def error_of(text: str) -> RedisError:
    """Return the error for an error reply.

    Raises `ValueError` if a redirection's address is unreadable.
    """
    code, _, message = text.partition(" ")
    kind = _KINDS.get(code)
    return ResponseError(text) if kind is None else kind(message)
