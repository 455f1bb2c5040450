"""Where buckets are kept, and how a store URL becomes a store."""

from __future__ import annotations

from limitgate.errors import ConfigError
from limitgate.stores.base import AsyncStore, SyncStore
from limitgate.stores.memory import MemoryStore
from limitgate.stores.redis import AsyncRedisStore, RedisStore

__all__ = ["AsyncRedisStore", "AsyncStore", "MemoryStore", "RedisStore", "SyncStore", "open_store", "open_sync_store"]

_REDIS = ("redis", "rediss", "unix")


def open_store(url: str) -> AsyncStore:
    """A store for async code: ``memory://``, ``redis://``, ``rediss://`` or ``unix://``. Raises `ConfigError`."""
    return AsyncRedisStore(url) if _scheme(url) in _REDIS else MemoryStore()


def open_sync_store(url: str) -> SyncStore:
    """A store for sync code, from the same URLs as `open_store`. Raises `ConfigError`."""
    return RedisStore(url) if _scheme(url) in _REDIS else MemoryStore()


def _scheme(url: str) -> str:
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in (*_REDIS, "memory"):
        raise ConfigError(f"store: scheme {scheme[:20]!r}, expected memory://, redis://, rediss:// or unix://")
    if scheme == "memory" and url != "memory://":
        raise ConfigError("store: expected memory:// with nothing behind it")
    return scheme
