"""Settings and store of a verb."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from limitgate.errors import ConfigError
from limitgate.limits.plan import Plan, Reading
from limitgate.stores import MemoryStore, open_sync_store
from limitgate.stores.base import (
    AsyncConfigStore,
    AsyncFleetStore,
    ConfigRequest,
    FleetRequest,
    StoredConfig,
    StoredFleet,
    SyncConfigStore,
)

if TYPE_CHECKING:
    from limitgate.command.applications import GateAround
    from limitgate.rules.rule import RuleSet
    from limitgate.rules.settings import GateSettings

MISSING_STORE = "Missing option '--store' (env var: 'LIMITGATE_STORE')."
MEMORY_STORE = "a memory store belongs to a single process, expected the URL of a shared store"


def settings_of(given: dict[str, Any], rules: RuleSet | None = None, gate: GateAround | None = None) -> GateSettings:
    """Return the options: from the command line, then the gate, then ``LIMITGATE_*``. Raises `click.UsageError`."""
    from limitgate.rules.rule import RuleSet
    from limitgate.rules.settings import GateSettings

    options = {} if gate is None else dict(gate.options)
    options |= {name: value for name, value in given.items() if value is not None}
    options["rules"] = RuleSet([]) if rules is None else rules
    try:
        return GateSettings(**options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


T = TypeVar("T")


class _BlockingStore:
    measures_silence = True

    def __init__(self, store: AsyncConfigStore) -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="limitgate-store", daemon=True)
        self._thread.start()

    def spend(self, plan: Plan, timeout: float) -> Reading:
        async def spend() -> Reading:
            return await self._store.aspend(plan, timeout)

        return self._run(spend())

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        return self._run(self._store.aconfig(request, timeout))

    def fleet(self, request: FleetRequest, timeout: float) -> StoredFleet:
        if not isinstance(self._store, AsyncFleetStore):
            raise click.UsageError(f"a {type(self._store).__name__} keeps no snapshots of processes, expected --store")
        return self._run(self._store.afleet(request, timeout))

    def close(self) -> None:
        self._run(self._store.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


_SDK = "opentelemetry.sdk.metrics"


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Keep redis-py from importing OpenTelemetry, which takes a tenth of the time of ``status``."""
    modules: dict[str, Any] = sys.modules
    if _SDK in modules:
        yield
        return
    modules[_SDK] = None
    try:
        yield
    finally:
        del modules[_SDK]


def store_of(given: object) -> SyncConfigStore | None:
    """None if the store is in the memory of other processes. Raises `click.UsageError`."""
    try:
        with _without_telemetry():
            store: Any = open_sync_store(given) if isinstance(given, str) else given
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if isinstance(store, MemoryStore):
        return None
    if isinstance(store, SyncConfigStore):
        return store
    if isinstance(store, AsyncConfigStore):
        return _BlockingStore(store)
    raise click.UsageError(
        f"the store of the service is a {type(store).__name__}, which this command cannot use; expected --store"
    )
