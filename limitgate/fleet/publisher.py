"""Writes the snapshot of this process to the store every 2 seconds, in a task under ASGI, otherwise in a thread.

Requests never wait for it. If the store fails, the next snapshots come later.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from secrets import token_hex
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from limitgate.errors import StoreError
from limitgate.fleet.snapshot import STEP, STEPS, LoadState, RuleState, Snapshot, StoreState, Value, encode
from limitgate.fleet.tally import MUCH, PERIOD, Clients, Tally
from limitgate.internal_errors import logged_errors
from limitgate.observing import instruments
from limitgate.observing.counts import ADMITTED, BOUNDS, COUNTS, REFUSED, SUMS, Counts, RuleSeries
from limitgate.observing.exporter import Gauge, Series
from limitgate.observing.instruments import Instrument
from limitgate.process import switch
from limitgate.process.background import Poller
from limitgate.process.clock import begin, monotonic
from limitgate.process.forking import get_ready_for_forks, reset_in_children, resume_after_forks
from limitgate.rules.revision import revision
from limitgate.rules.rule import RuleSet
from limitgate.stores.base import AsyncFleetStore, FleetRequest, StoredFleet, SyncFleetStore, fleet_key

EVERY: Final = 2.0
"""Seconds."""
TTL: Final = 10.0
ENDED_TTL: Final = 60.0
"""Seconds, so that an exporter sees the last counts."""
TIMEOUT: Final = 1.0
_LAST: Final = 0.5
_LONGEST_PAUSE: Final = 16.0
_RENEWAL: Final = 900
"""Snapshots: half an hour."""
_FLEET_BYTES, _LEAST, _MOST_BYTES = 1024 * 1024, 1536, 48 * 1024
"""Bytes of all snapshots, and bounds of one: large fleets list fewer clients per process."""
_LOOKBACK = 5
"""Snapshots that utilization spans."""


class Loads(Protocol):
    was_ok: bool
    at: float
    error: str | None


class _Rules(Protocol):
    rule_set: RuleSet


class _Outages(Protocol):
    last_error: tuple[str, float] | None
    """Text and Unix time."""


class Watched(Protocol):
    loads: Any
    rules: Any
    outages: Any


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
        self._gate = ref(gate)
        self._store = store
        self._key = fleet_key(key_prefix)
        self._counts, self._tally = counts, tally
        self._scheme: str = getattr(store, "scheme", "memory")
        self._names = names
        self._version = version
        self._host = socket.gethostname()
        self._poller = Poller(PERIOD, [self], name="fleet")
        self._base: dict[Series, Sequence[Any]] = {}
        self._outages_before = 0
        self.failures: int = 0
        self._begin_anew()
        tally.at_overflow = self.start
        self._is_paused = False
        reset_in_children(self)
        get_ready_for_forks(self)
        resume_after_forks(self)
        _all.add(self)

    def _begin_anew(self) -> None:
        self.id: str = token_hex(8)
        self._pid = os.getpid()
        self._start = time.time()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0
        self._pause = EVERY
        self._written = self._processes = 0
        self._closings: int = getattr(self._store, "closings", 0)
        self._seen_at_close = -1
        self._before = 0, 0, monotonic()
        self._steps: dict[int, list[int]] = {}
        self._rows: dict[RuleSeries, deque[list[Any]]] = {}
        self._latency: float | None = None
        self._rates = 0.0, 0.0

    def before_fork(self) -> None:
        """Stop the thread: forking a process with threads may deadlock the child."""
        self._is_paused = self._poller.pause(2 * TIMEOUT)

    def after_fork(self) -> None:
        if self._is_paused:
            self._poller.start()

    def reset_after_fork(self) -> None:
        """A child has counted nothing; it writes from its first request on."""
        self._tally.at_first = self.start
        self._begin_anew()
        self._base = {series: series.values.copy() for series in self._series()}
        self._forget_store()
        requests, refused = self._totals()
        self._before = requests, refused, monotonic()

    def start(self) -> None:
        """Start writing, on the running event loop if the store needs one."""
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
            self._poller.start()

    def _next_look(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._timer = loop.call_later(seconds, _look, ref(self), loop, context=Context())

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count what is queued, and write when due. Called by a timer."""
        if self._loop is not loop or self._timer is None:
            return
        self._next_look(loop, self._count())
        if self._is_due() and (self._task is None or self._task.done()):
            self._task = begin(self._awrite())

    def poll(self) -> None:
        """`look`, called by a thread."""
        self._poller.seconds = self._count()
        if self._is_due():
            self._write()

    def _count(self) -> float:
        """An idle process wakes up for snapshots only."""
        return PERIOD if self._tally.count() > MUCH else EVERY

    def forget(self) -> None:
        """Do nothing: an interrupted write is repeated."""

    def _is_due(self) -> bool:
        now = monotonic()
        # A timer may be early.
        if now + PERIOD / 2 < self._due:
            return False
        self._due = now + self._pause
        return self._gate() is not None and switch.null_store is None and not self._is_closed()

    def _is_closed(self) -> bool:
        """True if no request has used a closed store since: writing would reopen it."""
        closings = getattr(self._store, "closings", 0)
        seen = self._totals()[0]
        if closings != self._closings:
            self._closings, self._seen_at_close = closings, seen
        return seen == self._seen_at_close

    def _write(self) -> None:
        with logged_errors():
            request, began = self._request(), monotonic()
            try:
                stored = self._store.fleet(request, TIMEOUT)
            except StoreError:
                self._failed()
            else:
                self._noted(stored, monotonic() - began)

    async def _awrite(self) -> None:
        with logged_errors():
            request, began = self._request(), monotonic()
            try:
                stored = await self._store.afleet(request, TIMEOUT)
            except StoreError:
                self._failed()
            else:
                self._noted(stored, monotonic() - began)

    def _request(self) -> FleetRequest:
        budget = budget_of(self._processes)
        renews = self._written % _RENEWAL == _RENEWAL - 1
        return FleetRequest(self._key, self.id, encode(self.snapshot(), budget), TTL, renews=renews)

    def _failed(self) -> None:
        self.failures += 1
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._due = monotonic() + self._pause

    def _noted(self, stored: StoredFleet, seconds: float) -> None:
        self._written += 1
        self._latency = seconds
        self._processes = stored.processes
        self._pause = EVERY

    async def aend(self) -> None:
        timer, self._timer, self._loop = self._timer, None, None
        if timer is not None:
            timer.cancel()
        self._poller.stop()
        if self._task is not None and not self._task.done() and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])
        request = self._last()
        if request is not None and isinstance(self._store, AsyncFleetStore):
            with logged_errors():
                try:
                    await self._store.afleet(request, _LAST)
                except StoreError:
                    self.failures += 1

    def end(self) -> None:
        """Write the last snapshot from a thread."""
        if not self._poller.is_running:
            return
        self._poller.stop()
        request = self._last()
        if request is not None and not self._is_closed():
            with logged_errors():
                try:
                    self._store.fleet(request, _LAST)
                except StoreError:
                    self.failures += 1

    def _last(self) -> FleetRequest | None:
        if not self._written or self._pid != os.getpid() or self._gate() is None:
            return None
        self._tally.count()
        return FleetRequest(self._key, self.id, encode(self.snapshot(ended=True), _LEAST), ENDED_TTL)

    def _series(self) -> Iterable[Series]:
        yield from self._counts.series()
        # Calls to the store are counted only if there are observers.
        calls = getattr(self._store, "calls", None)
        if calls is not None and self._tells_of_store():
            yield calls

    def _tells_of_store(self) -> bool:
        """Only the first of the gates that share a store reports its calls and outages, because readers add them up."""
        first = _tellers.get(self._store)
        teller = None if first is None else first()
        if teller is not None:
            return teller is self
        _tellers[self._store] = ref(self)
        if first is not None:  # Another gate has reported everything so far.
            self._forget_store()
        return True

    def _forget_store(self) -> None:
        """Report only later calls and outages."""
        self._outages_before = getattr(self._store, "outages", 0)
        calls = getattr(self._store, "calls", None)
        if calls is not None:
            self._base[calls] = calls.values.copy()

    def _outages(self) -> Iterable[Value]:
        if not self._tells_of_store():
            return
        outages = getattr(self._store, "outages", 0) - self._outages_before
        if outages:
            yield instruments.STORE_OUTAGES.name, (self._scheme,), [outages]

    def _gauges(self) -> Iterable[Gauge]:
        yield from self._counts.gauges()
        yield instruments.STORE_UP, (self._scheme,), int(getattr(self._store, "healthy", True))

    def _values(self, series: Series) -> Sequence[Any]:
        base = self._base.get(series)
        return series.values if base is None else [value - was for value, was in zip(series.values, base)]

    def _totals(self) -> tuple[int, int]:
        requests = refused = 0
        for (outcome, _), count in self._counts.requests.items():
            requests += count
            if outcome == "refused":
                refused += count
        base = self._base.get(self._counts.request_series)
        if base is not None:
            was = dict(zip(self._counts.requests, base))
            requests -= sum(was.values())
            refused -= sum([count for (outcome, _), count in was.items() if outcome == "refused"])
        return requests, refused

    def snapshot(self, *, ended: bool = False) -> Snapshot:
        gate = self._gate()
        if gate is None:
            raise ReferenceError("the gate is gone")
        now = time.time()
        loads: Loads = gate.loads
        requests, refused = self._totals()
        self._note_history(requests, refused, now)
        outages: _Outages = gate.outages
        error = outages.last_error
        gauges = list(self._gauges())
        rules: _Rules = gate.rules
        rule_set = rules.rule_set
        return Snapshot(
            id=self.id,
            host=self._host[:128],
            pid=self._pid,
            start=self._start,
            at=now,
            version=self._version,
            revision=revision(rule_set),
            source=str(rule_set.source or "Python")[:500],
            requests=requests,
            refused=refused,
            store=self._store_state(),
            load=LoadState(loads.was_ok, loads.at, loads.error),
            last_error=None if error is None else error[0][:500],
            last_error_at=None if error is None else error[1],
            rules=[self._rule(row, now) for row in self._counts.rules()],
            adaptive=_adaptive(gauges),
            counters=[*self._outages(), *[value for series in self._series() for value in self._counters(series)]],
            gauges=[(instrument.name, labels, [value]) for instrument, labels, value in gauges],
            ended=ended,
            names=self._names,
            rates=self._rates,
            history=[(step, *counts) for step, counts in sorted(self._steps.items())],  # type: ignore[misc]
        )

    def _note_history(self, requests: int, refused: int, now: float) -> None:
        before, refused_before, at = self._before
        seconds = monotonic() - at
        step = int(now // STEP)
        counts = self._steps.setdefault(step, [0, 0])
        counts[0] += requests - before
        counts[1] += refused - refused_before
        for old in [each for each in self._steps if each < step - STEPS]:
            del self._steps[old]
        if seconds >= PERIOD:
            self._rates = (requests - before) / seconds, (refused - refused_before) / seconds
        self._before = requests, refused, monotonic()

    def _store_state(self) -> StoreState:
        is_up = bool(getattr(self._store, "healthy", True))
        return StoreState(is_up, self._latency, "closed" if is_up else "open", self._scheme)

    def _rule(self, row: RuleSeries, now: float) -> RuleState:
        values = self._values(row)
        kept = self._rows.setdefault(row, deque([[0] * len(values)], _LOOKBACK))
        utilization = _utilization(values, kept[0])
        kept.append(list(values))
        clients: Clients | None = row.clients
        if clients is None:
            return RuleState(*row.labels, values[ADMITTED], values[REFUSED], utilization, limits=row.limits)
        with self._tally.lock:
            used, refusals, names = clients.tops(now)
        return RuleState(*row.labels, values[ADMITTED], values[REFUSED], utilization, used, refusals, names, row.limits)

    def _counters(self, series: Series) -> Iterable[Value]:
        """Leaves out zeros: readers know all series."""
        values = self._values(series)
        place = len(series.counters)
        for (instrument, labels), value in zip(series.counters, values):
            if value:
                yield instrument.name, labels, [value]
        for instrument, labels in series.histograms:
            width = len(instrument.bounds) + 1
            counts, sums = values[place : place + width], values[place + width : place + 2 * width]
            place += 2 * width
            if any(counts):
                yield instrument.name, labels, [*counts, round(sum(sums), 9)]


def budget_of(processes: int) -> int:
    return max(_LEAST, min(_MOST_BYTES, _FLEET_BYTES // max(1, processes)))


def _utilization(values: Sequence[Any], before: Sequence[Any]) -> float:
    """Mean share of the highest histogram bucket with new counts."""
    for bucket in range(len(BOUNDS), -1, -1):
        count = values[COUNTS + bucket] - before[COUNTS + bucket]
        if count > 0:
            return max(0.0, float(values[SUMS + bucket] - before[SUMS + bucket]) / float(count))
    return 0.0


def _adaptive(gauges: Iterable[Gauge]) -> list[tuple[str, str, int, int]]:
    found: dict[Instrument, Mapping[tuple[str, ...], float]] = {}
    wanted = instruments.RULE_ADAPTIVE_LIMIT, instruments.RULE_IN_FLIGHT
    for each in wanted:
        found[each] = {labels: value for instrument, labels, value in gauges if instrument is each}
    limits, in_flight = (found[each] for each in wanted)
    return [(*labels, int(limit), int(in_flight.get(labels, 0))) for labels, limit in limits.items()]  # type: ignore[misc]


def _look(publisher: ref[Publisher], loop: asyncio.AbstractEventLoop) -> None:
    here = publisher()
    if here is not None:
        with logged_errors():
            here.look(loop)


_all: WeakSet[Publisher] = WeakSet()
_tellers: WeakKeyDictionary[Any, ref[Publisher]] = WeakKeyDictionary()
"""By store."""


@atexit.register
def _end() -> None:
    for publisher in list(_all):
        publisher.end()
