"""Writes bans by rules into the journal in the background, for `limitgate bans`: the first at once, others in batches."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context
from typing import Any
from weakref import WeakSet

from limitgate.algorithms import ban as ban_algorithm
from limitgate.errors import StoreError
from limitgate.gate.flow import ConfigFlow, arun, run
from limitgate.gate.journal import MOST_BANS, Ban, JournalFlows
from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Charge, Plan
from limitgate.process.forking import reset_in_children
from limitgate.stores.base import AsyncConfigStore, SyncConfigStore
from limitgate.stores.redis.aio.loop_end import begin
from limitgate.stores.redis.calls import calls_of

PAUSE = 1.0
"""Seconds between writes."""
LAST = 2.0
"""Seconds to write the remaining bans in at shutdown."""

_Noted = tuple[Ban, Charge]


class BanNotes:
    """Queues bans, and writes them in a task or a thread, with ``timeout`` seconds per call.

    If the store keeps no configuration, nothing is written. If it fails, the next write tries again.
    """

    def __init__(self, store: Any, key_prefix: str, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._journal = JournalFlows(key_prefix, timeout)
        self._is_kept = isinstance(store, SyncConfigStore | AsyncConfigStore)
        self.reset_after_fork()
        reset_in_children(self)
        _all.add(self)

    def reset_after_fork(self) -> None:
        """Reset in the child of a fork."""
        # Reentrant, because a garbage-collected flow may end while another one holds the lock.
        self._lock = threading.RLock()
        self._waiting: dict[str, _Noted] = {}
        self._job: asyncio.Task[None] | threading.Thread | None = None
        self._is_ending = threading.Event()

    def add(self, ban: Ban, charge: Charge) -> None:
        """Queue a ban of the bucket of ``charge``. The oldest are dropped if the journal cannot keep all of them."""
        if not self._is_kept:
            return
        self._put({charge.key: (ban, charge)})
        with self._lock:
            if not self._runs():
                self._start()

    async def asettled(self) -> None:
        """Write the queued bans of this event loop before the application ends."""
        job = self._job
        if isinstance(job, asyncio.Task) and not job.done() and job.get_loop() is asyncio.get_running_loop():
            # A cancelled task writes them first.
            job.cancel()
            await asyncio.wait([job])

    def end(self) -> None:
        """Write the queued bans before the process exits."""
        self._is_ending.set()
        if isinstance(self._job, threading.Thread):
            self._job.join(LAST)

    def _put(self, noted: Mapping[str, _Noted]) -> None:
        with self._lock:
            self._waiting |= noted
            while len(self._waiting) > MOST_BANS:
                del self._waiting[next(iter(self._waiting))]

    def _runs(self) -> bool:
        if isinstance(self._job, threading.Thread):
            return self._job.is_alive()
        return self._job is not None and not self._job.done() and self._job.get_loop().is_running()

    def _start(self) -> None:
        if isinstance(self._store, AsyncConfigStore):
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                self._job = begin(self._awriting())
                return
        if isinstance(self._store, SyncConfigStore):
            thread = threading.Thread(target=Context().run, args=[self._writing], name="limitgate-bans", daemon=True)
            # If no thread can be started, the next ban tries again.
            with suppress(RuntimeError):
                thread.start()
                self._job = thread

    def _writing(self) -> None:
        while self._has_more():
            with logged_errors():
                run(self._store, self._batch())
            if self._is_ending.wait(PAUSE):
                with logged_errors():
                    run(self._store, self._batch())
                return

    async def _awriting(self) -> None:
        try:
            while self._has_more():
                with logged_errors():
                    await arun(self._store, self._batch())
                await asyncio.sleep(PAUSE)
        except asyncio.CancelledError:
            with logged_errors(), suppress(TimeoutError):
                await asyncio.wait_for(arun(self._store, self._batch()), LAST)
            raise

    def _has_more(self) -> bool:
        """Return False if the job has to end. The next ban then starts another one."""
        with self._lock:
            if not self._waiting:
                self._job = None
            return bool(self._waiting)

    def _batch(self) -> ConfigFlow[None]:
        with self._lock:
            noted, self._waiting = self._waiting, {}
        if not noted:
            return
        try:
            lifted = yield from self._lifted(noted)
            bans = {key: each for key, each in noted.items() if key not in lifted}
            if not bans:
                return
            yield from self._journal.noting_bans([ban for ban, _ in bans.values()])
            # A pardon lifts a ban before it changes the journal, so this finds any that came in between.
            if lifted := (yield from self._lifted(bans)):
                yield from self._journal.removing(list(lifted))
        except BaseException as error:
            self._put({key: each for key, each in noted.items() if key not in self._waiting})
            if not isinstance(error, StoreError):
                raise

    def _lifted(self, noted: Mapping[str, _Noted]) -> ConfigFlow[set[str]]:
        """Return the keys of buckets that are not banned any more."""
        lifted: set[str] = set()
        for together in calls_of([Plan.look([charge]) for _, charge in noted.values()]):
            reading = yield Plan.look([plan.charges[0] for plan in together]), self._timeout
            lifted |= {charge.key for charge, *_ in reading.buckets if charge.bucket.algorithm is not ban_algorithm}
        return lifted


_all: WeakSet[BanNotes] = WeakSet()


@atexit.register
def _end() -> None:
    for notes in list(_all):
        notes.end()
