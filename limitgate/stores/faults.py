"""What went wrong between us and Redis, as what it means to those who asked."""

from __future__ import annotations

from redis.exceptions import AskError, OutOfMemoryError, ResponseError, TimeoutError as RedisTimeoutError, TryAgainError

from limitgate.errors import StoreError

Redirection = AskError | TryAgainError
"""What a node of a cluster says about a slot that it does not hold (MOVED is an ASK in redis-py), or not all of."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Redis had no room. Before version 7 it wraps what a script met in an error of its own."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and ": -OOM " in str(error))


def unsendable(error: Exception) -> StoreError:
    """What went wrong before a call was sent, one of `wire.UNSENDABLE`."""
    return StoreError(f"the call cannot be sent: {error}", "connection")


def store_error(error: Exception) -> StoreError:
    """What an error of redis-py, or of the network, means."""
    if is_out_of_memory(error):
        return StoreError("Redis is out of memory", "oom")
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreError("no answer from Redis within the timeout", "timeout")
    if isinstance(error, Redirection):
        return StoreError("this is a node of a Redis Cluster, expected a URL like redis+cluster://host:port", "reply")
    if isinstance(error, ResponseError):
        return StoreError(f"Redis refused the call ({type(error).__name__}): {error}", "reply")
    return StoreError(f"cannot reach Redis: {error}", "connection")
