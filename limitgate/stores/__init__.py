"""Where buckets are kept, and how a store URL becomes a store.

Those in Redis are imported when they are asked for: their client takes longer to import than all of LimitGate, and neither
memory nor most verbs of the command need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from limitgate.errors import ConfigError
from limitgate.stores.base import AsyncStore, SyncStore
from limitgate.stores.memory import MemoryStore
from limitgate.stores.redis.dial.url import scheme_of

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
]

S = TypeVar("S")
Opener = Callable[[str], S]


_REDIS = {"RedisStore": "limitgate.stores.redis.threads.store", "AsyncRedisStore": "limitgate.stores.redis.aio.store"}


def __getattr__(name: str) -> Any:
    """A store in Redis, which is imported now."""
    if name not in _REDIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_REDIS[name]), name)


def is_redis(store: object) -> TypeGuard[RedisStore]:
    """True for a `RedisStore`, which has been imported then."""
    return _is(store, "RedisStore")


def is_async_redis(store: object) -> TypeGuard[AsyncRedisStore]:
    """True for an `AsyncRedisStore`, which has been imported then."""
    return _is(store, "AsyncRedisStore")


def _is(store: object, name: str) -> bool:
    module = sys.modules.get(_REDIS[name])
    return module is not None and isinstance(store, getattr(module, name))


def open_store(url: str) -> AsyncStore:
    """A store for async code, by its ``url``. Raises `ConfigError`.

    ``memory://``, ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://h1:p1,h2:p2`` or
    ``redis+sentinel://h1:p1,h2:p2/NAME``.
    """
    if scheme_of(url) == "memory":
        return MemoryStore()
    from limitgate.stores.redis.aio.store import AsyncRedisStore  # noqa: PLC0415 - see above

    return AsyncRedisStore(url)


def open_sync_store(url: str) -> SyncStore:
    """A store for sync code, by its ``url``, the same as for `open_store`. Raises `ConfigError`."""
    if scheme_of(url) == "memory":
        return MemoryStore()
    from limitgate.stores.redis.threads.store import RedisStore  # noqa: PLC0415 - see above

    return RedisStore(url)


def opened(store: str | S, open_url: Opener[S], key_prefix: str) -> S:
    """``store`` itself, or what ``open_url`` (`open_store` or `open_sync_store`) makes of it if it is a URL.

    The keys to come begin with ``key_prefix``. Raises `ConfigError` for a store of the other kind, and for anything that is no
    store.
    """
    found = open_url(store) if isinstance(store, str) else store
    if isinstance(found, type):
        raise ConfigError(f"store: the class {found.__qualname__}, expected an object of it, or a URL")
    wanted = AsyncStore if open_url is open_store else SyncStore
    if not isinstance(found, wanted):
        kind = "an async store, such as AsyncRedisStore" if wanted is AsyncStore else "a sync store, such as RedisStore"
        raise ConfigError(f"store: an object of {type(store).__qualname__} cannot serve here, expected a URL or {kind}")
    if is_redis(found) or is_async_redis(found):
        found.inspection.expect(key_prefix)
    return found
