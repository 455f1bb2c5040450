"""Where buckets are kept, and how a store URL becomes a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from limitgate.errors import ConfigError
from limitgate.stores.base import AsyncStore, SyncStore
from limitgate.stores.memory import MemoryStore
from limitgate.stores.redis.aio.store import AsyncRedisStore
from limitgate.stores.redis.dial.url import scheme_of
from limitgate.stores.redis.threads.store import RedisStore

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


def open_store(url: str) -> AsyncStore:
    """A store for async code, by its ``url``. Raises `ConfigError`.

    ``memory://``, ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://h1:p1,h2:p2`` or
    ``redis+sentinel://h1:p1,h2:p2/NAME``.
    """
    return MemoryStore() if scheme_of(url) == "memory" else AsyncRedisStore(url)


def open_sync_store(url: str) -> SyncStore:
    """A store for sync code, by its ``url``, the same as for `open_store`. Raises `ConfigError`."""
    return MemoryStore() if scheme_of(url) == "memory" else RedisStore(url)


def opened(store: str | S, open_url: Opener[S], key_prefix: str) -> S:
    """``store`` itself, or what ``open_url`` (`open_store` or `open_sync_store`) makes of it if it is a URL.

    The keys to come begin with ``key_prefix``. Raises `ConfigError` for a store of the other kind, and for anything that is no
    store.
    """
    found = open_url(store) if isinstance(store, str) else store
    wanted = AsyncStore if open_url is open_store else SyncStore
    if not isinstance(found, wanted):
        kind = "an async store, such as AsyncRedisStore" if wanted is AsyncStore else "a sync store, such as RedisStore"
        raise ConfigError(f"store: an object of {type(store).__qualname__} cannot serve here, expected a URL or {kind}")
    if isinstance(found, AsyncRedisStore | RedisStore):
        found.inspection.expect(key_prefix)
    return found
