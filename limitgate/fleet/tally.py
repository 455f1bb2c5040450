"""Collects which clients use the rules of a gate, and which are refused.

A request only queues its reading. A timer or a thread counts the queue: the metrics of rules, and two sketches of clients per
rule. A client's key is a digest, so one of its requests provides the name.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet, ref

from limitgate.fleet.sketch import SIZE, RecentSketch, Top
from limitgate.internal_errors import logged_errors
from limitgate.process.forking import reset_in_children

PERIOD: Final = 0.25
"""Seconds between counts."""
MUCH: Final = 200
MOST: Final = 2048
"""Maximum of readings in a queue. A request beyond it counts all queues."""
NAMES: Final = 32
"""Maximum of clients that are named early in a period."""
LONGEST: Final = 128
EVERYBODY: Final = "everybody"
_DIGEST = re.compile(r"[0-9a-f]{32}")

CountMany = Callable[[Any, Mapping[Any, int]], None]
Name = Callable[[Any], str]
"""Returns a client's name, as the option ``names`` allows."""


class Clients:
    __slots__ = ("__weakref__", "_named", "free", "has_newcomers", "names", "refused", "used")

    def __init__(self) -> None:
        self.used: RecentSketch = RecentSketch()
        self.refused: RecentSketch = RecentSketch()
        self.names: dict[str, str] = {}
        self.free: int = NAMES
        """Number of clients that may still be named early in this period."""
        self.has_newcomers: bool = True
        """True if admitted requests may have new clients to name."""
        self._named = 0

    def wants(self, key: str) -> bool:
        return key not in self.names and (self.free > 0 or key in self.used or key in self.refused)

    def find_name(self, key: str, name: Name, admission: Any) -> None:
        self.names[key] = ""
        self.free = max(0, self.free - 1)
        with logged_errors():  # Users and callers are objects of the application.
            self.names[key] = name(admission)[:LONGEST]

    def tops(self, now: float) -> tuple[Top, Top, dict[str, str]]:
        """Return the top users and refused clients at a Unix time, and their names by digest."""
        self.used.look(now)
        self.refused.look(now)
        used, refused = self.used.top(), self.refused.top()
        keys = {entry.key for each in (used, refused) for entry in each.entries}
        if len(self.names) > SIZE:
            self.names = {key: name for key, name in self.names.items() if key in keys}
        names = {digest_of(key): self.names.get(key, "") for key in keys}
        return _by_digest(used), _by_digest(refused), names

    def renew(self, *, is_busy: bool) -> Iterable[str]:
        """Begin a period.

        After a busy period without new clients, admitted requests don't look for new ones; refused requests do.
        """
        before, self._named = self._named, len(self.names)
        self.free = min(NAMES, max(0, SIZE - self._named)) if self.used.has_room else 0
        self.has_newcomers = not (is_busy and self._named == before)
        return [key for each in (self.used, self.refused) for key in each.names if key not in self.names]


def _by_digest(found: Top) -> Top:
    return found._replace(entries=[entry._replace(key=digest_of(entry.key)) for entry in found.entries])


class Tally:
    def __init__(self) -> None:
        self._pending: list[tuple[ref[Queue], _Pending]] = []
        self._others: list[tuple[RecentSketch, str, int | None]] = []
        self._counted_at = time.time()
        self._later: list[Callable[[], object]] = []
        self._clients: WeakSet[Clients] = WeakSet()
        self.known: set[str] = set()
        self.wanted: set[str] = set()
        """Keys with a counter but no name."""
        self.at_overflow: Callable[[], object] = bool
        """Called if a request finds a full queue, in any thread."""
        self.at_first: Callable[[], object] | None = None
        """Called once by the first request, in any thread."""
        self.lock: threading.RLock = threading.RLock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self.lock = threading.RLock()
        self.known = set()
        for queue, pending in self._pending:
            pending.clear()
            living = queue()
            if living is not None:
                living.is_known = self.known.issuperset
        self._others.clear()
        self._counted_at = time.time()
        self._later.clear()
        for clients in list(self._clients):
            clients.used, clients.refused = RecentSketch(), RecentSketch()

    def take(self, queue: Queue, pending: _Pending) -> None:
        """Count a queue until it is freed."""
        with self.lock:
            self._pending.append((ref(queue), pending))

    def of_rule(self) -> Clients:
        clients = Clients()
        self._clients.add(clients)
        return clients

    def note(self, clients: Clients, key: str, name: Name, admission: Any, now: int | None, *, is_refused: bool) -> None:
        """``now`` is the store's clock in Unix µs."""
        if clients.wants(key):
            clients.find_name(key, name, admission)
        self._others.append((clients.refused if is_refused else clients.used, key, now))
        if len(self._others) > MOST:
            self.count(waits=False)

    def count_later(self, count: Callable[[], object]) -> None:
        self._later.append(count)
        if len(self._later) > MOST:
            self.count(waits=False)

    def count(self, *, waits: bool = True) -> int:
        """Count the queues, and return the number of requests. If ``waits`` is False and another thread counts, do nothing."""
        counted = 0
        if not self.lock.acquire(blocking=waits):
            return 0
        try:
            before, now = self._counted_at, time.time()
            self._counted_at = now
            with logged_errors():
                for _, pending in self._pending:
                    counted += len(pending)
                    pending.count(before, now)
                for count in _taken(self._later):
                    count()
                counted += len(self._others)
                self._count_others(before, now)
                every = list(self._clients)
                if len(self.known) > 4 * SIZE * (1 + len(every)):
                    self.known = set()
                self.wanted = {key for each in every for key in each.renew(is_busy=counted > MUCH)}
                self.known -= self.wanted
                self._renew_queues()
        finally:
            self.lock.release()
        return counted

    def _renew_queues(self) -> None:
        is_gone = False
        for queue, _ in self._pending:
            living = queue()
            if living is None:
                is_gone = True
            else:
                living.renew()
        if is_gone:
            self._pending = [each for each in self._pending if each[0]() is not None or len(each[1])]

    def _count_others(self, before: float, now: float) -> None:
        if others := _taken(self._others):
            together: dict[RecentSketch, list[tuple[str, int | None]]] = {}
            for sketch, key, at in others:
                together.setdefault(sketch, []).append((key, at))
            for sketch, hits in together.items():
                _add(sketch, hits, before, now)


class CountsRules(Protocol):
    """Counts readings for the metrics of rules."""

    charged_many: Callable[[Sequence[Sequence[Any]]], None]
    refused: Callable[[Sequence[Any]], None]


Place = tuple[int, str, Clients, Name]
"""Index of a rule's first key, the rule's name, its clients, and a function that names a client."""


class _Pending:
    __slots__ = ("_count_many", "_counter", "others", "places", "readings", "refusals")

    def __init__(self, counter: Callable[[], CountsRules] | None, places: Sequence[Place], count_many: CountMany) -> None:
        self._counter = None if counter is None else cache(counter)
        # Without the functions that name clients, which would keep replaced rules alive.
        self.places: list[tuple[int, str, Clients]] = [(place, rule, clients) for place, rule, clients, _ in places]
        self._count_many = count_many
        # Lists, from whose start many are taken at once.
        self.readings: list[Any] = []
        self.others: list[Any] = []
        self.refusals: list[tuple[Any, Iterable[str | None]]] = []

    def __len__(self) -> int:
        return len(self.readings) + len(self.others) + len(self.refusals)

    def clear(self) -> None:
        self.readings.clear()
        self.others.clear()
        self.refusals.clear()

    def count(self, before: float, now: float) -> None:
        readings, others = _taken(self.readings), _taken(self.others)
        if readings and self._counter is not None:
            self._count_many("admitted", Counter([reading.source for reading in readings]))
        readings += others
        if readings:
            if self._counter is not None:
                self._counter().charged_many([reading.states for reading in readings])
            for place, _, clients in self.places:
                clients.used.add(Counter([reading.keys[place] for reading in readings]), now)
        refusals = _taken(self.refusals)
        if refusals:
            if self._counter is not None:
                for reading, _ in refusals:
                    self._counter().refused(reading.states)
                self._count_many("refused", Counter([reading.source for reading, _ in refusals]))
            for place, name, clients in self.places:
                refused = [(reading.keys[place], reading.now) for reading, rules in refusals if name in rules]
                if refused:
                    _add(clients.refused, refused, before, now)


def _add(sketch: RecentSketch, hits: Sequence[tuple[str, int | None]], before: float, now: float) -> None:
    """The store's clock may differ from that of this process."""
    first = {key: min(max(at / 1e6, before), now) for key, at in reversed(hits) if at is not None}
    sketch.add(Counter([key for key, _ in hits]), now, first)


T = TypeVar("T")


def _taken(queue: list[T]) -> list[T]:
    count = len(queue)
    taken = queue[:count]
    del queue[:count]
    return taken


class Queue:
    """Readings of one prepared plan that aren't counted yet.

    With a ``counter``, they are counted for metrics.
    """

    __slots__ = (
        "__weakref__",
        "_pending",
        "_places",
        "defers",
        "is_known",
        "others",
        "queue",
        "refusals",
        "tally",
    )

    def __init__(
        self,
        tally: Tally,
        counter: Callable[[], CountsRules] | None,
        places: Sequence[Place],
        count_many: CountMany,
    ) -> None:
        self.tally: Tally = tally
        self.defers: bool = counter is not None
        self._places = places
        self._pending = _Pending(counter, places, count_many)
        self.queue: list[Any] = self._pending.readings
        self.others: list[Any] = self._pending.others
        self.refusals: list[tuple[Any, Iterable[str | None]]] = self._pending.refusals
        self.is_known: Callable[[Sequence[str]], bool] | None = tally.known.issuperset
        """Returns False if a client of these keys needs a name. None while no client needs a name."""
        tally.take(self, self._pending)

    def renew(self) -> None:
        tally = self.tally
        if any(clients.has_newcomers and clients.free > 0 for _, _, clients, _ in self._places):
            self.is_known = tally.known.issuperset
        else:
            self.is_known = tally.wanted.isdisjoint if tally.wanted else None

    def look(self, keys: Sequence[str], admission: Any) -> None:
        tally = self.tally
        if tally.at_first is not None:
            begin, tally.at_first = tally.at_first, None
            begin()
        if not tally.known.issuperset(keys):
            for place, _, clients, name in self._places:
                key = keys[place]
                if clients.wants(key):
                    clients.find_name(key, name, admission)
                    tally.wanted.discard(key)
            tally.known.update(keys)
            self.renew()
        if len(self._pending) > MOST:
            tally.at_overflow()
            tally.count(waits=False)


def digest_of(key: str) -> str:
    found = _DIGEST.search(key)
    return key if found is None else found[0]
