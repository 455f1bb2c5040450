"""Reads and adds up the snapshots of all processes. All viewers of a process share one reader per store.

`FleetReader.read` and `FleetReader.aread` return one dictionary, as in ``status --json``. They never raise: if the store fails,
the figures say so and repeat the last reading with its time.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from limitgate.errors import StoreError
from limitgate.fleet.figures import Figures, Fleet
from limitgate.fleet.snapshot import Snapshot, UnreadableError, decode
from limitgate.gate.flow import ConfigFlow, arun, run
from limitgate.gate.journal import Ban, JournalFlows
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.base import AsyncFleetStore, ConfigRequest, FleetRequest, StoredFleet, SyncFleetStore, fleet_key
from limitgate.stores.memory import MemoryStore

FRESH = 1.0
"""Minimum of seconds for which a reading is shared."""
SHARE = 0.02
"""Share of a core that reading may take; large fleets are read less often."""
STALEST = 10.0
BESIDES_FRESH = 4.0
"""Seconds for which bans and the test of writes are shared."""


class FleetReader:
    """Reads the fleet of one store and key prefix. Use `reader_of`, which shares readers.

    ``timeout`` is in seconds per call, ``clock`` returns Unix seconds. ``brief`` leaves out rules and history.
    """

    def __init__(
        self,
        store: Any,
        key_prefix: str = "limitgate",
        *,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.time,
        brief: bool = False,
    ) -> None:
        self._brief = brief
        self._store = store
        self._key_prefix = key_prefix
        self._key = fleet_key(key_prefix)
        self._fleet = Fleet(key_prefix)
        self._timeout = timeout
        self._clock = clock
        self._journal = JournalFlows(key_prefix, timeout, clock)
        self.snapshots: Sequence[Snapshot] = ()
        self._figures: Figures | None = None
        self._bans: Sequence[Ban] = ()
        self._writes: bool | None = None
        self._cannot_write: str | None = None
        self._next_besides = -math.inf
        self._fresh = FRESH
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._under_way: asyncio.Future[None] | None = None
        self._read_at = -math.inf

    def expire(self) -> None:
        self._read_at = self._next_besides = -math.inf

    def read(self) -> Figures:
        """Return the figures, 1 to 10 seconds old depending on the fleet. Needs a sync store."""
        with self._lock:
            if not self._is_fresh:
                run(self._store, self._reading())
            return self._figures or {}

    async def aread(self) -> Figures:
        """`read` for an async store. Concurrent callers share a reading."""
        if not self._is_fresh:
            reading, loop = self._under_way, asyncio.get_running_loop()
            if reading is None or reading.done() or reading.get_loop() is not loop:
                reading = self._under_way = loop.create_task(arun(self._store, self._reading()))
            await asyncio.shield(reading)
        return self._figures or {}

    @property
    def _is_fresh(self) -> bool:
        return self._figures is not None and monotonic() - self._read_at <= self._fresh

    def _reading(self) -> ConfigFlow[None]:
        began = monotonic()
        try:
            stored = yield FleetRequest(self._key), self._timeout
            seconds = monotonic() - began
            if monotonic() >= self._next_besides:
                yield from self._read_besides()
        except StoreError as error:
            self._note_failure(error)
        else:
            self._note(stored, seconds)
        self._read_at = monotonic()

    def _read_besides(self) -> ConfigFlow[None]:
        """Read bans, and test if the store accepts writes, because limits don't apply otherwise."""
        self._bans = list((yield from self._journal.listing()))
        yield from self._try_to_write()
        self._next_besides = monotonic() + BESIDES_FRESH

    def _try_to_write(self) -> ConfigFlow[None]:
        self._writes, self._cannot_write = True, None
        if isinstance(self._store, MemoryStore):
            return
        try:
            yield ConfigRequest(f"{self._key}:probe", "", lasts=1), self._timeout
        except StoreError as error:
            # The viewer may have fewer rights than the service.
            self._writes, self._cannot_write = (False, str(error)) if error.is_unwritable else (None, None)

    def _note_failure(self, error: StoreError) -> None:
        store = {"up": False, "latency": None, "writes": None, "breaker": self._breaker(), "error": str(error)}
        now = self._clock()
        figures = self._figures or self._fleet.figures([], [], [], now, store)
        self._figures = {**figures, "store": store}
        if not figures["processes"]:
            self._figures |= {"at": now, "empty": f"the store does not answer: {error}"}

    def _note(self, stored: StoredFleet, seconds: float) -> None:
        began = time.thread_time()
        snapshots: dict[str, Snapshot] = {}
        unreadable: list[str] = []
        for packed in stored.snapshots:
            try:
                snapshot = decode(packed, brief=self._brief) if packed else _too_long()
            except UnreadableError as error:
                unreadable.append(str(error))
            else:
                snapshots[snapshot.id] = snapshot
        self.snapshots = list(snapshots.values())
        writes, why = self._writes, self._cannot_write
        store = {"up": True, "latency": seconds, "writes": writes, "breaker": self._breaker(), "error": why}
        figures = self._fleet.figures(self.snapshots, unreadable, self._bans, stored.now / 1e6, store)
        figures["empty"] = None if figures["processes"] else self._why_empty(unreadable)
        self._figures = figures
        self._fresh = max(FRESH, min(STALEST, (time.thread_time() - began) / SHARE))

    def _breaker(self) -> str:
        return "closed" if getattr(self._store, "healthy", True) else "open"

    def _why_empty(self, unreadable: Sequence[str]) -> str:
        if unreadable:
            return f"no snapshot can be read: {unreadable[0]}"
        if self._cannot_write is not None:
            return f"the store cannot be written to, so no process can report: {self._cannot_write}"
        if isinstance(self._store, MemoryStore):
            return "memory:// shows only this process, where no gate uses this store or the option fleet is off"
        return (
            f"no process has written a snapshot with key_prefix {self._key_prefix!r} for 10 seconds: no service is running, "
            "it uses another store, database or key_prefix, or its option fleet is off"
        )


def _too_long() -> Snapshot:
    raise UnreadableError("it is too long")


_readers: WeakKeyDictionary[Any, dict[str, FleetReader]] = WeakKeyDictionary()


def reader_of(store: Any, key_prefix: str = "limitgate", *, timeout: float = 2.0) -> FleetReader:
    """Raises `TypeError` for a store without snapshots."""
    if not isinstance(store, SyncFleetStore | AsyncFleetStore):
        raise TypeError(f"a {type(store).__name__} cannot keep snapshots, expected a MemoryStore or a store on Redis")
    readers = _readers.setdefault(store, {})
    if key_prefix not in readers:
        readers[key_prefix] = FleetReader(store, key_prefix, timeout=timeout)
    return readers[key_prefix]
