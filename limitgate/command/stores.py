"""The store of a service for blocking calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

from limitgate.errors import ConfigError
from limitgate.limits.plan import Plan, Reading
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore, open_sync_store
from limitgate.stores.base import AsyncConfigStore, ConfigRequest, StoredConfig, SyncConfigStore

T = TypeVar("T")


class BlockingStore:
    """A blocking interface to an async store, on an event loop in a thread."""

    measures_silence = True

    def __init__(self, store: AsyncConfigStore) -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="limitgate-store", daemon=True)
        self._thread.start()

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """Run a plan on the store."""

        async def spend() -> Reading:
            return await self._store.aspend(plan, timeout)

        return self._run(spend())

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Read or replace a text."""
        return self._run(self._store.aconfig(request, timeout))

    def close(self) -> None:
        """Close connections, and end the thread."""
        self._run(self._store.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def store_of(settings: Settings) -> SyncConfigStore | None:
    """Return the store of a service; None for a memory store, which other processes cannot reach.

    Raises `click.UsageError` for an unusable store.
    """
    try:
        store: Any = open_sync_store(settings.store) if isinstance(settings.store, str) else settings.store
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if isinstance(store, MemoryStore):
        return None
    if isinstance(store, SyncConfigStore):
        return store
    if isinstance(store, AsyncConfigStore):
        return BlockingStore(store)
    raise click.UsageError(
        f"the store of the service is a {type(store).__name__}, which this command cannot use; expected --store"
    )
