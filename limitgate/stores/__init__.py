"""Stores of buckets, and how to open one by URL. Redis stores are imported on first use, because their import is slow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from limitgate.errors import ConfigError
from limitgate.process.forking import Remade
from limitgate.stores.base import AsyncStore, SyncStore
from limitgate.stores.memory import MemoryStore
from limitgate.stores.redis.url import scheme_of

if TYPE_CHECKING:
    from limitgate.stores.redis.aio.store import AsyncRedisStore
    from limitgate.stores.redis.threads.store import RedisStore

__all__ = [
    "AsyncRedisStore",
    "AsyncStore",
    "MemoryStore",
    "Opener",
    "RedisStore",
    "SyncStore",
    "is_async_redis",
    "is_redis",
    "open_store",
    "open_sync_store",
    "opened",
    "url_of",
]

S = TypeVar("S")
Opener = Callable[[str], S]


_REDIS = {"RedisStore": "limitgate.stores.redis.threads.store", "AsyncRedisStore": "limitgate.stores.redis.aio.store"}


def __getattr__(name: str) -> Any:
    """Import a Redis store on access."""
    if name not in _REDIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_REDIS[name]), name)


def is_redis(store: object) -> TypeGuard[RedisStore]:
    """True if ``store`` is a `RedisStore`."""
    return _is(store, "RedisStore")


def is_async_redis(store: object) -> TypeGuard[AsyncRedisStore]:
    """True if ``store`` is an `AsyncRedisStore`."""
    return _is(store, "AsyncRedisStore")


def url_of(store: object) -> str | None:
    """Return the URL of a store, with its login; None for a store without one."""
    if isinstance(store, Remade):
        arguments, named = store.made_of
        store = arguments[0] if arguments else named.get("url")
    return store if isinstance(store, str) else None


def _is(store: object, name: str) -> bool:
    module = sys.modules.get(_REDIS[name])
    return module is not None and isinstance(store, getattr(module, name))


def open_store(url: str) -> AsyncStore:
    """Open a store for async code by its ``url``.

    Accepts ``memory://``, ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://h1:p1,h2:p2`` and
    ``redis+sentinel://h1:p1,h2:p2/NAME``. Raises `ConfigError`.
    """
    if scheme_of(url) == "memory":
        return MemoryStore()
    from limitgate.stores.redis.aio.store import AsyncRedisStore  # noqa: PLC0415 - see above

    return AsyncRedisStore(url)


def open_sync_store(url: str) -> SyncStore:
    """Open a store for sync code by its ``url``; see `open_store`. Raises `ConfigError`."""
    if scheme_of(url) == "memory":
        return MemoryStore()
    from limitgate.stores.redis.threads.store import RedisStore  # noqa: PLC0415 - see above

    return RedisStore(url)


def opened(store: str | S, open_url: Opener[S], key_prefix: str) -> S:
    """Open ``store`` by ``open_url`` if it is a URL. Raises `ConfigError` if it isn't a store of this kind."""
    found = open_url(store) if isinstance(store, str) else store
    if isinstance(found, type):
        raise ConfigError(f"store: the class {found.__qualname__}, expected an instance or a URL")
    wanted = AsyncStore if open_url is open_store else SyncStore
    if not isinstance(found, wanted):
        kind = "an async store, such as AsyncRedisStore" if wanted is AsyncStore else "a sync store, such as RedisStore"
        raise ConfigError(f"store: an object of {type(store).__qualname__}, expected a URL or {kind}")
    if is_redis(found) or is_async_redis(found):
        found.inspection.expect(key_prefix)
    return found
