"""From errors of redis-py and the network to `StoreError`s."""

from __future__ import annotations

import errno
import socket

from redis.exceptions import AskError, OutOfMemoryError, ResponseError, TimeoutError as RedisTimeoutError, TryAgainError

from limitgate.errors import StoreError

Redirection = AskError | TryAgainError
"""Replies of a cluster's node about a hash slot that it does not hold (MOVED is an ASK in redis-py), or not all of."""


_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of the kernel where this process, or this machine, has no file descriptor or no memory for a connection."""


def is_no_room(error: BaseException | None) -> bool:
    """Tell whether a connection was not made because there is no room for it here; redis-py wraps what the kernel said."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_room() -> StoreError:
    """The failure of this process to make a connection: no fault of the store's."""
    return StoreError("this process has no room for a connection to Redis", "overload")


def is_out_of_memory(error: BaseException) -> bool:
    """True if Redis had no room. Before version 7 it wraps what a script met in an error of its own."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and ": -OOM " in str(error))


def unsendable(error: Exception) -> StoreError:
    """Explain an error before a call was sent, one of `wire.UNSENDABLE`."""
    return StoreError(f"the call cannot be sent: {error}", "connection")


def store_error(error: Exception) -> StoreError:
    """Explain an error of redis-py or the network. A `StoreError` is copied."""
    return StoreError(str(error), error.fault) if isinstance(error, StoreError) else _meaning(error)


def _meaning(error: Exception) -> StoreError:
    if is_out_of_memory(error):
        return StoreError("Redis is out of memory", "oom")
    if is_no_room(error):
        return no_room()
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreError("no answer from Redis within the timeout", "timeout")
    if isinstance(error, Redirection):
        return StoreError("this is a node of a Redis Cluster, expected a URL like redis+cluster://host:port", "reply")
    if isinstance(error, ResponseError):
        return StoreError(f"Redis refused the call ({type(error).__name__}): {error}", "reply")
    return StoreError(f"cannot reach Redis: {error}", "connection")
