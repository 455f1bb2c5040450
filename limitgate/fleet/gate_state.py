"""The content of a gate's snapshot. Counts start with the process, and are read when a snapshot is due."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, ref

from limitgate.fleet.sketch import Top
from limitgate.fleet.snapshot import STEP, STEPS, LoadState, RuleState, Snapshot, StoreState, Value
from limitgate.fleet.tally import PERIOD, Clients, Tally
from limitgate.observing import instruments
from limitgate.observing.counts import (
    ADMITTED,
    BOUNDS,
    COUNTS,
    REFUSED,
    SHADOW_REFUSED,
    SUMS,
    Counts,
    ReloadStats,
    RuleSeries,
    process_metrics,
)
from limitgate.observing.exporter import Gauge, Series
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.rules.revision import revision
from limitgate.rules.rule import RuleSet
from limitgate.stores import url_of

_LOOKBACK: Final = 5
"""Number of snapshots that utilization covers."""


class _Process:
    def __init__(self) -> None:
        self._begin()
        self.inherited: dict[Series, Sequence[Any]] = {}
        reset_in_children(self)

    def _begin(self) -> None:
        self.id: str = token_hex(8)
        self.start: float = time.time()
        self.lock = threading.Lock()
        self.speakers: WeakKeyDictionary[Any, dict[tuple[str, str | None], ref[GateState]]] = WeakKeyDictionary()

    def reset_after_fork(self) -> None:
        self._begin()
        self.inherited = {series: series.values.copy() for series in process_metrics.series()}


_process = _Process()


class Watched(Protocol):
    loads: ReloadStats
    rules: Any
    outages: Any


class GateState:
    """Makes the snapshots of a gate while the gate lives."""

    def __init__(
        self, gate: Watched, store: Any, key_prefix: str, counts: Counts, *, tally: Tally, names: str, version: str
    ) -> None:
        self._gate = ref(gate)
        self._store = store
        self._key_prefix = key_prefix
        self._counts, self._tally = counts, tally
        self._scheme: str = getattr(store, "scheme", "memory")
        self._names = names
        self._version = version
        self._host = socket.gethostname()[:128]
        self._base: dict[Series, Sequence[Any]] = dict(_process.inherited)
        self._outages_before = 0
        self._before = 0, 0
        self._begin()

    def _begin(self) -> None:
        self.id: str = token_hex(8)
        self.pid: int = os.getpid()
        self.latency: float | None = None
        """Seconds to write the previous snapshot."""
        self._looked = monotonic()
        self._steps: dict[int, list[int]] = {}
        self._rows: dict[RuleSeries, _Row] = {}
        self._rates = 0.0, 0.0
        self._speaks_for_store = self._speaks_for_process = False

    def reset_after_fork(self) -> None:
        self._begin()
        self._base = {series: series.values.copy() for series in self._counts.series()}
        self._forget_store()
        self._forget_process()
        self._before = self.totals()

    @property
    def is_gone(self) -> bool:
        return self._gate() is None

    def totals(self) -> tuple[int, int]:
        labels, counts = self._counts.request_series.counters, self._values(self._counts.request_series)
        refused = sum([count for (_, (outcome, _)), count in zip(labels, counts) if outcome == "refused"])
        return sum(counts), refused

    def snapshot(self, *, ended: bool = False) -> Snapshot:
        gate = self._gate()
        if gate is None:
            raise ReferenceError("the gate is gone")
        now = time.time()
        loads = gate.loads
        seconds = monotonic() - self._looked
        self._looked += seconds
        requests, refused = self._note_totals(seconds, now)
        self._claim()
        error: tuple[str, float] | None = gate.outages.last_error
        gauges = list(self._gauges())
        rule_set: RuleSet = gate.rules.rule_set
        is_up = bool(getattr(self._store, "healthy", True))
        return Snapshot(
            id=self.id,
            host=self._host,
            pid=self.pid,
            start=_process.start,
            at=now,
            version=self._version,
            revision=revision(rule_set),
            source=str(rule_set.source or "Python")[:500],
            requests=requests,
            refused=refused,
            store=StoreState(is_up, self.latency, "closed" if is_up else "open", self._scheme),
            load=LoadState(loads.was_ok, loads.at, loads.error),
            last_error=None if error is None else error[0][:500],
            last_error_at=None if error is None else error[1],
            rules=[self._rule(row, now, seconds) for row in self._counts.rules()],
            adaptive=_adaptive(gauges),
            counters=[*self._outages(), *[value for series in self._series() for value in self._counters(series)]],
            gauges=[(instrument.name, labels, [value]) for instrument, labels, value in gauges],
            ended=ended,
            names=self._names,
            rates=self._rates,
            history=[(step, *counts) for step, counts in sorted(self._steps.items())],  # type: ignore[misc]
            process=_process.id,
        )

    def _series(self) -> Iterable[Series]:
        yield from self._counts.series()
        if self._speaks_for_process:
            yield from process_metrics.series()
        # Calls to the store are counted only if there are observers.
        calls = getattr(self._store, "calls", None)
        if calls is not None and self._speaks_for_store:
            yield calls

    def _claim(self) -> None:
        """Let one gate report the process and a shared store, because readers add up snapshots."""
        url = url_of(self._store)
        with _process.lock:
            self._speaks_for_store = self._claims(self._store, None, self._forget_store)
            # Stores of one URL have the same readers.
            shared = self._store if url is None else process_metrics
            self._speaks_for_process = self._claims(shared, url or "", self._forget_process)

    def _claims(self, shared: Any, url: str | None, forget: Callable[[], object]) -> bool:
        speakers = _process.speakers.setdefault(shared, {})
        first = speakers.get((self._key_prefix, url))
        speaker = None if first is None else first()
        if speaker is not None:
            return speaker is self
        speakers[self._key_prefix, url] = ref(self)
        if first is not None:  # Another gate has reported everything so far.
            forget()
        return True

    def _forget_store(self) -> None:
        """Ignore earlier calls and outages, because another gate has reported them."""
        self._outages_before = getattr(self._store, "outages", 0)
        calls = getattr(self._store, "calls", None)
        if calls is not None:
            self._base[calls] = calls.values.copy()

    def _forget_process(self) -> None:
        self._base.update({series: series.values.copy() for series in process_metrics.series()})

    def _outages(self) -> Iterable[Value]:
        if not self._speaks_for_store:
            return
        outages = getattr(self._store, "outages", 0) - self._outages_before
        if outages:
            yield instruments.STORE_OUTAGES.name, (self._scheme,), [outages]

    def _gauges(self) -> Iterable[Gauge]:
        yield from self._counts.gauges()
        if self._speaks_for_process:
            yield from process_metrics.gauges()
        yield instruments.STORE_UP, (self._scheme,), int(getattr(self._store, "healthy", True))

    def _values(self, series: Series) -> Sequence[Any]:
        base = self._base.get(series)
        return series.values if base is None else [value - was for value, was in zip(series.values, base)]

    def _note_totals(self, seconds: float, now: float) -> tuple[int, int]:
        requests, refused = self.totals()
        more, more_refused = requests - self._before[0], refused - self._before[1]
        self._before = requests, refused
        step = int(now // STEP)
        counts = self._steps.setdefault(step, [0, 0])
        counts[0] += more
        counts[1] += more_refused
        for old in [each for each in self._steps if each < step - STEPS]:
            del self._steps[old]
        if seconds >= PERIOD:
            self._rates = more / seconds, more_refused / seconds
        return requests, refused

    def _rule(self, series: RuleSeries, now: float, seconds: float) -> RuleState:
        values = self._values(series)
        row = self._rows.setdefault(series, _Row(values))
        utilization = row.utilization(values)
        clients: Clients | None = series.clients
        tops = Top(), Top()
        names: Mapping[str, str] = {}
        if clients is not None:
            with self._tally.lock:
                *tops, names = clients.tops(now)  # type: ignore[assignment]
        return RuleState(
            *series.labels,
            values[ADMITTED],
            values[REFUSED],
            utilization,
            *tops,
            names=names,
            limits=series.limits,
            rates=row.rates(tops, seconds),
            would_refuse=values[SHADOW_REFUSED] if series.is_shadow else None,
        )

    def _counters(self, series: Series) -> Iterable[Value]:
        values = self._values(series)
        for (instrument, labels), value in zip(series.counters, values):
            if value:
                yield instrument.name, labels, [value]
        for instrument, labels, counts, sums in series.buckets(values):
            if any(counts):
                yield instrument.name, labels, [*counts, round(sum(sums), 9)]


_Rates = tuple[Mapping[str, float], Mapping[str, float]]


class _Row:
    def __init__(self, values: Sequence[Any]) -> None:
        self._values: deque[list[Any]] = deque([[0] * len(values)], _LOOKBACK)
        self._hits: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._rates: _Rates = {}, {}

    def utilization(self, values: Sequence[Any]) -> float:
        """Return the mean utilization of the highest histogram bucket with new counts."""
        before = self._values[0]
        self._values.append(list(values))
        for bucket in range(len(BOUNDS), -1, -1):
            count = values[COUNTS + bucket] - before[COUNTS + bucket]
            if count > 0:
                return max(0.0, float(values[SUMS + bucket] - before[SUMS + bucket]) / float(count))
        return 0.0

    def rates(self, tops: Sequence[Top], seconds: float) -> _Rates:
        """Return used and refused requests per second by key."""
        if seconds >= PERIOD:
            used, refused = (_rates(*each, seconds) for each in zip(tops, self._hits, self._rates))
            self._rates = used, refused
            for hits, top in zip(self._hits, tops):
                hits.clear()
                hits.update({entry.key: entry.hits for entry in top.entries})
        return self._rates


def _rates(top: Top, before: Mapping[str, int], rates: Mapping[str, float], seconds: float) -> dict[str, float]:
    found = {}
    for key, hits, error, _, _ in top.entries:
        was = before.get(key, error)
        if hits > was:
            found[key] = (hits - was) / seconds
        elif hits < was and key in rates:  # A period has ended.
            found[key] = rates[key]
    return found


def _adaptive(gauges: Sequence[Gauge]) -> list[tuple[str, str, int, int]]:
    limits, in_flight = (
        {labels: value for instrument, labels, value in gauges if instrument is wanted}
        for wanted in (instruments.RULE_ADAPTIVE_LIMIT, instruments.RULE_IN_FLIGHT)
    )
    return [(*labels, int(limit), int(in_flight.get(labels, 0))) for labels, limit in limits.items()]  # type: ignore[misc]
