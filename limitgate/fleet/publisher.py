"""Writes the snapshot of this process to the store every 2 seconds, in a task under ASGI, otherwise in a thread.

Requests never wait for it. If the store fails, the next snapshots come later.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from contextvars import Context
from typing import Any, Final
from weakref import WeakSet, ref

from limitgate.errors import StoreError
from limitgate.fleet.gate_state import GateState, Watched
from limitgate.fleet.snapshot import Snapshot, encode
from limitgate.fleet.tally import MUCH, PERIOD, Tally
from limitgate.gate.flow import ConfigFlow, arun, run
from limitgate.internal_errors import logged_errors
from limitgate.observing.counts import Counts
from limitgate.process import switch
from limitgate.process.background import Poller
from limitgate.process.clock import begin, monotonic
from limitgate.process.forking import get_ready_for_forks, reset_in_children, resume_after_forks
from limitgate.stores.base import AsyncFleetStore, FleetRequest, SyncFleetStore, fleet_key

EVERY: Final = 2.0
"""Seconds."""
TTL: Final = 10.0
ENDED_TTL: Final = 60.0
"""Seconds until a last snapshot expires."""
TIMEOUT: Final = 1.0
_LAST: Final = 0.5
_LONGEST_PAUSE: Final = 16.0
_RENEWAL: Final = 900
"""Snapshots (half an hour) between renewals of the index."""
_FLEET_BYTES, _LEAST, _MOST_BYTES = 1024 * 1024, 1536, 48 * 1024
"""Bytes: maximum of all snapshots, minimum and maximum of one."""


class Publisher:
    """Writes a gate's snapshots while the gate lives."""

    def __init__(
        self,
        gate: Watched,
        store: Any,
        key_prefix: str,
        counts: Counts,
        *,
        tally: Tally,
        names: str,
        version: str,
    ) -> None:
        self._state = GateState(gate, store, key_prefix, counts, tally=tally, names=names, version=version)
        self._store = store
        self._key = fleet_key(key_prefix)
        self._tally = tally
        self._poller = Poller(PERIOD, [self], name="fleet")
        self.failures: int = 0
        self._begin_anew()
        tally.at_overflow = self.start
        self._is_paused = False
        reset_in_children(self)
        get_ready_for_forks(self)
        resume_after_forks(self)
        _all.add(self)

    def _begin_anew(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0
        self._pause = EVERY
        self._written = self._processes = 0
        self._closings: int = getattr(self._store, "closings", 0)
        self._seen_at_close = -1

    @property
    def id(self) -> str:
        return self._state.id

    def snapshot(self, *, ended: bool = False) -> Snapshot:
        return self._state.snapshot(ended=ended)

    def before_fork(self) -> None:
        """Stop the thread, because a child of a process with threads may deadlock."""
        self._is_paused = self._poller.pause(2 * TIMEOUT)

    def after_fork(self) -> None:
        if self._is_paused:
            # A process may fork more often than it writes.
            self._poller.start(first=min(EVERY, max(0.0, self._due - monotonic())))

    def reset_after_fork(self) -> None:
        self._tally.at_first = self.start
        self._begin_anew()
        self._state.reset_after_fork()

    def start(self, *, in_children: bool = False) -> None:
        """Start writing, on the running event loop if the store needs one; with ``in_children``, only in forks."""
        if switch.null_store is not None:
            return
        if isinstance(self._store, AsyncFleetStore):
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                loop = None
            if loop is not None:
                if self._loop is not loop or self._timer is None:
                    self._loop = loop
                    self._next_look(loop, PERIOD)
                return
        if isinstance(self._store, SyncFleetStore):
            self._poller.start(in_children=in_children)

    def resume(self) -> None:
        """Write soon, because the store answers again."""
        self._pause, self._due = EVERY, 0.0

    def _next_look(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._timer = loop.call_later(seconds, _look, ref(self), loop, context=Context())

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by a timer."""
        if self._loop is not loop or self._timer is None:
            return
        self._next_look(loop, self._count())
        if self._is_due() and (self._task is None or self._task.done()):
            self._task = begin(arun(self._store, self._writing()))

    def poll(self) -> None:
        self._poller.seconds = self._count()
        if self._is_due():
            run(self._store, self._writing())

    def _count(self) -> float:
        return PERIOD if self._tally.count() > MUCH else EVERY

    def forget(self) -> None:
        """Do nothing, because an interrupted write is repeated."""

    def _is_due(self) -> bool:
        now = monotonic()
        # A timer may be early.
        if now + PERIOD / 2 < self._due:
            return False
        self._due = now + self._pause
        return not self._state.is_gone and switch.null_store is None and not self._is_closed()

    def _is_closed(self) -> bool:
        """True if the store is closed and no request has used it since: a write would reopen it."""
        closings = getattr(self._store, "closings", 0)
        seen = self._state.totals()[0]
        if closings != self._closings:
            self._closings, self._seen_at_close = closings, seen
        return seen == self._seen_at_close

    def _writing(self) -> ConfigFlow[None]:
        with logged_errors():
            request, began = self._request(), monotonic()
            try:
                stored = yield request, TIMEOUT
            except StoreError:
                self._failed()
            else:
                self._written += 1
                self._state.latency = monotonic() - began
                self._processes = stored.processes
                self._pause = EVERY

    def _request(self) -> FleetRequest:
        budget = budget_of(self._processes)
        renews = self._written % _RENEWAL == _RENEWAL - 1
        return FleetRequest(self._key, self.id, encode(self.snapshot(), budget), TTL, renews=renews)

    def _failed(self) -> None:
        self.failures += 1
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._due = monotonic() + self._pause

    async def aend(self) -> None:
        timer, self._timer, self._loop = self._timer, None, None
        if timer is not None:
            timer.cancel()
        self._poller.stop()
        if self._task is not None and not self._task.done() and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])
        request = self._last()
        if request is not None and isinstance(self._store, AsyncFleetStore):
            await arun(self._store, self._ending(request))

    def end(self) -> None:
        if not self._poller.is_running:
            return
        self._poller.stop()
        request = self._last()
        if request is not None and not self._is_closed():
            run(self._store, self._ending(request))

    def _ending(self, request: FleetRequest) -> ConfigFlow[None]:
        with logged_errors():
            try:
                yield request, _LAST
            except StoreError:
                self.failures += 1

    def _last(self) -> FleetRequest | None:
        if not self._written or self._state.pid != os.getpid() or self._state.is_gone:
            return None
        self._tally.count()
        return FleetRequest(self._key, self.id, encode(self.snapshot(ended=True), _LEAST), ENDED_TTL)


def budget_of(processes: int) -> int:
    return max(_LEAST, min(_MOST_BYTES, _FLEET_BYTES // max(1, processes)))


def _look(publisher: ref[Publisher], loop: asyncio.AbstractEventLoop) -> None:
    here = publisher()
    if here is not None:
        with logged_errors():
            here.look(loop)


_all: WeakSet[Publisher] = WeakSet()


@atexit.register
def _end() -> None:
    for publisher in list(_all):
        publisher.end()
