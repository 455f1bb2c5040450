"""Reads and adds up the snapshots of all processes. All viewers of a process share one reader per store.

`FleetReader.read` and `FleetReader.aread` return one dictionary, as in ``status --json``. They never raise: if the store fails,
the figures say so and repeat the last reading.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from limitgate.errors import StoreError
from limitgate.fleet.sketch import Entry, Top, merge
from limitgate.fleet.snapshot import STEP, STEPS, RuleState, Snapshot, UnreadableError, decode
from limitgate.gate.flow import arun, run
from limitgate.gate.journal import Ban, JournalFlows
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.base import AsyncFleetStore, FleetRequest, StoredFleet, SyncFleetStore, fleet_key
from limitgate.stores.memory import MemoryStore

FRESH = 1.0
"""Minimum seconds that a reading is shared."""
SHARE = 0.02
"""Share of a core for reading; large fleets are read less often."""
STALEST = 10.0
BANS_FRESH = 4.0
LATE = 6.0
"""Seconds without a snapshot; after 10 the process is gone."""
MOST_WHO = 20
"""Clients per rule."""
AWAY = 30.0
"""Clock difference in seconds that is reported."""
LIVE = 15 * 60 // 2
"""Readings: 15 minutes, one per 2 seconds."""
NOW = 15.0
"""Seconds after a refusal that a client counts as refused."""
Figures = dict[str, Any]


class FleetReader:
    """Reads the fleet of one store and key prefix. Use `reader_of`, which shares readers.

    ``timeout`` is in seconds per call, ``clock`` returns Unix seconds.
    """

    def __init__(
        self, store: Any, key_prefix: str = "limitgate", *, timeout: float = 2.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._key_prefix = key_prefix
        self._key = fleet_key(key_prefix)
        self._timeout = timeout
        self._clock = clock
        self._journal = JournalFlows(key_prefix, timeout, clock)
        self.snapshots: Sequence[Snapshot] = ()
        self._live: deque[dict[str, float]] = deque(maxlen=LIVE)
        self._steps: dict[int, dict[str, tuple[int, int]]] = {}
        self._counts: dict[tuple[str, str, str], tuple[float, int, float | None]] = {}
        self._figures: Figures | None = None
        self._bans: Sequence[Ban] = ()
        self._next_bans = -math.inf
        self._fresh = FRESH
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._reading: asyncio.Future[Figures] | None = None
        self._read_at = -math.inf

    def expire(self) -> None:
        self._read_at = self._next_bans = -math.inf

    def read(self) -> Figures:
        """Return the figures, 1 to 10 seconds old depending on the fleet. Needs a sync store."""
        with self._lock:
            if self._figures is None or monotonic() - self._read_at > self._fresh:
                began = monotonic()
                try:
                    stored = self._store.fleet(FleetRequest(self._key), self._timeout)
                    bans = self._read_bans() if self._wants_bans() else None
                except StoreError as error:
                    self._note_failure(error)
                else:
                    self._note(stored, bans, monotonic() - began)
                self._read_at = monotonic()
            return self._figures or {}

    async def aread(self) -> Figures:
        """`read` for an async store. Concurrent callers share a reading."""
        if self._figures is not None and monotonic() - self._read_at <= self._fresh:
            return self._figures
        reading, loop = self._reading, asyncio.get_running_loop()
        if reading is None or reading.done() or reading.get_loop() is not loop:
            reading = self._reading = loop.create_task(self._aread())
        return await asyncio.shield(reading)

    async def _aread(self) -> Figures:
        began = monotonic()
        try:
            stored = await self._store.afleet(FleetRequest(self._key), self._timeout)
            bans = await self._aread_bans() if self._wants_bans() else None
        except StoreError as error:
            self._note_failure(error)
        else:
            self._note(stored, bans, monotonic() - began)
        self._read_at = monotonic()
        return self._figures or {}

    def _wants_bans(self) -> bool:
        return monotonic() >= self._next_bans

    def _read_bans(self) -> Sequence[Ban]:
        return list(run(self._store, self._journal.listing()))

    async def _aread_bans(self) -> Sequence[Ban]:
        return list(await arun(self._store, self._journal.listing()))

    def _note_failure(self, error: StoreError) -> None:
        figures = dict(self._figures or self._summary([], [], self._clock(), None))
        figures["store"] = {"up": False, "latency": None, "breaker": self._breaker(), "error": str(error)}
        figures["at"] = self._clock()
        if not figures["processes"]:
            figures["empty"] = f"the store does not answer: {error}"
        self._figures = figures

    def _note(self, stored: StoredFleet, bans: Sequence[Ban] | None, seconds: float) -> None:
        if bans is not None:
            self._bans, self._next_bans = bans, monotonic() + BANS_FRESH
        began = time.thread_time()
        snapshots: dict[str, Snapshot] = {}
        unreadable: list[str] = []
        for packed in stored.snapshots:
            try:
                snapshot = decode(packed) if packed else _too_long()
            except UnreadableError as error:
                unreadable.append(str(error))
            else:
                snapshots[snapshot.id] = snapshot
        self.snapshots = list(snapshots.values())
        self._figures = self._summary(self.snapshots, unreadable, stored.now / 1e6, seconds)
        self._fresh = max(FRESH, min(STALEST, (time.thread_time() - began) / SHARE))

    def _breaker(self) -> str:
        return "closed" if getattr(self._store, "healthy", True) else "open"

    def _summary(self, every: Sequence[Snapshot], unreadable: Sequence[str], now: float, seconds: float | None) -> Figures:
        living = [each for each in every if not each.ended]
        revision = _revision_of_most(living)
        processes = sorted(
            [self._process(each, revision, now) for each in living],
            key=lambda each: (each["follows"], each["host"], each["pid"], each["id"]),
        )
        self._note_steps(every, now)
        requests, refused = (sum(each.rates[place] for each in living) for place in (0, 1))
        if seconds is not None:
            self._live.append({"at": now, "admitted": max(0.0, requests - refused), "refused": refused})
        rules = self._rules(living, now)
        failed = [each for each in processes if each["last_load"]["error"]]
        load_error = max(failed, key=lambda each: each["last_load"]["at"], default=None)
        return {
            "at": now,
            "prefix": self._key_prefix,
            "store": {"up": seconds is not None, "latency": seconds, "breaker": self._breaker(), "error": None},
            "requests_per_second": requests,
            "refused_per_second": refused,
            "history": self._history(now),
            "live": list(self._live),
            "headline": _headline(rules, now),
            "rules": rules,
            "processes": processes,
            "revision": revision,
            "revisions": {str(each): count for each, count in Counter([each.revision for each in living]).items()},
            "last_load_error": None
            if load_error is None
            else {**load_error["last_load"], "host": load_error["host"], "pid": load_error["pid"]},
            "bans": [_ban(each, now) for each in self._bans if each.until > now],
            "adaptive": _adaptive(living),
            "unreadable": list(unreadable),
            "empty": None if living else self._why_empty(unreadable),
        }

    def _process(self, snapshot: Snapshot, revision: int | None, now: float) -> dict[str, Any]:
        requests, refused = snapshot.rates
        return {
            "host": snapshot.host,
            "pid": snapshot.pid,
            "id": snapshot.id,
            "version": snapshot.version,
            "revision": snapshot.revision,
            "follows": snapshot.revision == revision,
            "rules_from": snapshot.source,
            "start": snapshot.start,
            "uptime": max(0.0, snapshot.at - snapshot.start),
            "requests": snapshot.requests,
            "refused": snapshot.refused,
            "requests_per_second": requests,
            "refused_per_second": refused,
            "store": {
                "up": snapshot.store.up,
                "latency": snapshot.store.latency,
                "breaker": snapshot.store.breaker,
                "scheme": snapshot.store.scheme,
            },
            "last_error": snapshot.last_error,
            "last_error_at": snapshot.last_error_at,
            "last_load": {"ok": snapshot.load.ok, "at": snapshot.load.at, "error": snapshot.load.error},
            "clock_ahead": round(_ahead(snapshot, now), 3),
        }

    def _note_steps(self, every: Iterable[Snapshot], now: float) -> None:
        """Keep the steps of ended processes. They count from the process' own clock, which may be wrong by hours."""
        for snapshot in every:
            ahead = round(_ahead(snapshot, now) / STEP)
            for step, requests, refused in snapshot.history:
                self._steps.setdefault(step - ahead, {})[snapshot.id] = requests, refused
        oldest = int(now // STEP) - STEPS
        for step in [each for each in self._steps if each < oldest]:
            del self._steps[step]

    def _history(self, now: float) -> list[dict[str, int]]:
        current = int(now // STEP)
        found = []
        for step in range(current - STEPS, current):
            of_step = self._steps.get(step, {}).values()
            requests, refused = sum(each[0] for each in of_step), sum(each[1] for each in of_step)
            found.append({"at": step * STEP, "seconds": STEP, "admitted": max(0, requests - refused), "refused": refused})
        return found

    def _rules(self, living: Iterable[Snapshot], now: float) -> list[dict[str, Any]]:
        together: dict[tuple[str, str], list[RuleState]] = {}
        for snapshot in living:
            ahead = _ahead(snapshot, now)
            for rule in snapshot.rules:
                state = _shifted(rule, ahead) if ahead else rule
                together.setdefault((rule.name, rule.tier), []).append(state)
        counts: dict[tuple[str, str, str], tuple[float, int, float | None]] = {}
        found = []
        for (name, tier), states in together.items():
            names: dict[str, str] = {}
            for each in states:
                names.update({key: who for key, who in each.names.items() if who})
            refusals, used = merge([each.refusals for each in states]), merge([each.used for each in states])
            found.append(
                {
                    "name": name,
                    "tier": tier,
                    "admitted": sum([each.admitted for each in states]),
                    "refused": sum([each.refused for each in states]),
                    "utilization": max([each.utilization for each in states]),
                    "limits": next((list(each.limits) for each in states if each.limits), []),
                    "most_refused": self._listed(refusals, names, (name, tier, "refused"), counts, now),
                    "most_used": self._listed(used, names, (name, tier, "used"), counts, now),
                }
            )
        self._counts = counts
        return sorted(found, key=lambda each: (-each["utilization"], -each["refused"], each["name"], each["tier"]))

    def _listed(
        self,
        top: Top,
        names: Mapping[str, str],
        of: tuple[str, str, str],
        counts: dict[tuple[str, str, str], tuple[float, int, float | None]],
        now: float,
    ) -> list[dict[str, Any]]:
        name, tier, kind = of
        listed = []
        for entry in top.entries[:MOST_WHO]:
            place = f"{name} {tier}", kind, entry.key
            rate = _rate(self._counts.get(place), entry, now)
            counts[place] = rate
            listed.append(
                {
                    "who": names.get(entry.key) or f"#{entry.key[:8]}",
                    "count": entry.hits,
                    "error": entry.error,
                    "since": entry.since,
                    "last": entry.last,
                    "per_second": rate[2],
                    "key": entry.key,
                }
            )
        return listed

    def _why_empty(self, unreadable: Sequence[str]) -> str:
        if unreadable:
            return f"no snapshot can be read: {unreadable[0]}"
        if isinstance(self._store, MemoryStore):
            return "memory:// shows only this process, and no gate in it uses this store, or the option fleet is off"
        return (
            f"no process has written a snapshot with key_prefix {self._key_prefix!r} for 10 seconds: no service is "
            "running, it uses another store, database or key_prefix, its option fleet is off, or the store is full or read-only"
        )


def _ahead(snapshot: Snapshot, now: float) -> float:
    ahead = snapshot.at - now
    return ahead if abs(ahead) > AWAY else 0.0


def _shifted(rule: RuleState, ahead: float) -> RuleState:
    used, refusals = (
        top._replace(entries=[each._replace(since=each.since - ahead, last=each.last - ahead) for each in top.entries])
        for top in (rule.used, rule.refusals)
    )
    return replace(rule, used=used, refusals=refusals)


def _rate(before: tuple[float, int, float | None] | None, entry: Entry, now: float) -> tuple[float, int, float | None]:
    if before is None:
        return now, entry.hits, None
    at, count, rate = before
    if now - at < FRESH:
        return before
    # Counts fall when a period ends.
    return now, entry.hits, (entry.hits - count) / (now - at) if entry.hits >= count else rate


def _too_long() -> Snapshot:
    raise UnreadableError("it is too long")


def _revision_of_most(living: Iterable[Snapshot]) -> int | None:
    ranks: dict[int | None, tuple[int, float]] = {}
    for each in living:
        count, at = ranks.get(each.revision, (0, 0.0))
        ranks[each.revision] = count + 1, max(at, each.load.at)
    return max(ranks, key=lambda each: ranks[each], default=None)


def _ban(ban: Ban, now: float) -> dict[str, Any]:
    left = ban.retry_after(now)
    return {
        "key": ban.key,
        "retry_after": None if math.isinf(left) else left,
        "reason": ban.reason,
        "by": ban.by,
        "digest": ban.digest,
    }


def _adaptive(living: Iterable[Snapshot]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[int]] = {}
    for snapshot in living:
        for name, tier, limit, in_flight in snapshot.adaptive:
            each = found.setdefault((name, tier), [0, 0])
            each[0] += limit
            each[1] += in_flight
    return [
        {"rule": name, "tier": tier, "limit": limit, "in_flight": in_flight}
        for (name, tier), (limit, in_flight) in sorted(found.items())
    ]


def _headline(rules: Iterable[Mapping[str, Any]], now: float) -> dict[str, Any] | None:
    found = [
        ((each["per_second"] or 0.0, each["count"] - each["error"]), rule, each)
        for rule in rules
        for each in rule["most_refused"]
        if now - each["last"] <= NOW
    ]
    if not found:
        return None
    _, rule, most = max(found, key=lambda each: each[0])
    return {"who": most["who"], "rule": rule["name"], "tier": rule["tier"]} | {
        name: most[name] for name in ("count", "error", "since", "last", "per_second", "key")
    }


_readers: WeakKeyDictionary[Any, dict[str, FleetReader]] = WeakKeyDictionary()


def reader_of(store: Any, key_prefix: str = "limitgate", *, timeout: float = 2.0) -> FleetReader:
    """Return the shared reader of a store. Raises `TypeError` for a store without snapshots."""
    if not isinstance(store, SyncFleetStore | AsyncFleetStore):
        raise TypeError(f"a {type(store).__name__} cannot keep snapshots, expected a MemoryStore or a store on Redis")
    readers = _readers.setdefault(store, {})
    if key_prefix not in readers:
        readers[key_prefix] = FleetReader(store, key_prefix, timeout=timeout)
    return readers[key_prefix]
