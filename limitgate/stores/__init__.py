"""Where buckets are kept, and how a store URL becomes a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from limitgate.errors import ConfigError
from limitgate.stores.base import AsyncStore, SyncStore
from limitgate.stores.memory import MemoryStore
from limitgate.stores.redis import RedisStore
from limitgate.stores.redis_async import AsyncRedisStore

__all__ = [
    "AsyncRedisStore",
    "AsyncStore",
    "MemoryStore",
    "Opener",
    "RedisStore",
    "SyncStore",
    "open_store",
    "open_sync_store",
    "opened",
]

S = TypeVar("S")
Opener = Callable[[str], S]

_REDIS = ("redis", "rediss", "unix")


def open_store(url: str) -> AsyncStore:
    """A store for async code: ``memory://``, ``redis://``, ``rediss://`` or ``unix://``. Raises `ConfigError`."""
    return AsyncRedisStore(url) if _scheme(url) in _REDIS else MemoryStore()


def open_sync_store(url: str) -> SyncStore:
    """A store for sync code, from the same URLs as `open_store`. Raises `ConfigError`."""
    return RedisStore(url) if _scheme(url) in _REDIS else MemoryStore()


def opened(store: str | S, open_url: Opener[S]) -> S:
    """``store`` itself, or what ``open_url`` (`open_store` or `open_sync_store`) makes of it if it is a URL.

    Raises `ConfigError` for a store of the other kind, and for anything that is no store.
    """
    if isinstance(store, str):
        return open_url(store)
    wanted = AsyncStore if open_url is open_store else SyncStore
    if not isinstance(store, wanted):
        kind = "an async store" if wanted is AsyncStore else "a sync store"
        raise ConfigError(f"store: {store!r:.80} cannot serve here, expected a URL or {kind}")
    return store


def _scheme(url: str) -> str:
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in (*_REDIS, "memory"):
        raise ConfigError(f"store: scheme {scheme[:20]!r}, expected memory://, redis://, rediss:// or unix://")
    if scheme == "memory" and url != "memory://":
        raise ConfigError("store: expected memory:// with nothing behind it")
    return scheme
