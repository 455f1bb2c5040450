"""Collects who uses the rules of a gate, and who is refused.

On a request's way, its reading goes into a queue. Every `PERIOD` a timer or a thread counts what is queued: the metrics of
rules, and the clients in two sketches per rule. A client is named by a request of its own, when it has a counter: its
key is a digest.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol
from weakref import WeakSet, ref

from limitgate.fleet.sketch import SIZE, RecentSketch, Top
from limitgate.internal_errors import logged_errors
from limitgate.process.forking import reset_in_children

PERIOD: Final = 0.25
"""Seconds between two counts of the queues."""
MOST: Final = 2048
"""Readings in a queue; with more, a request counts them."""
NAMES: Final = 32
"""Clients named per period while their sketch has room."""
LONGEST: Final = 128
EVERYBODY: Final = "everybody"
_DIGEST = re.compile(r"[0-9a-f]{32}")

Name = Callable[[Any], str]
"""Returns the name of the client of an admission, as the option ``names`` says."""


class Clients:
    """Clients of one rule, by the digest of their bucket."""

    __slots__ = ("__weakref__", "free", "names", "refused", "used")

    def __init__(self) -> None:
        self.used, self.refused = RecentSketch(), RecentSketch()
        self.names: dict[str, str] = {}
        self.free = NAMES
        """Clients that may be named before they have a counter."""

    def wants(self, digest: str) -> bool:
        """Return True if the name of a client is still to be found."""
        return digest not in self.names and (self.free > 0 or digest in self.used or digest in self.refused)

    def find_name(self, digest: str, name: Name, admission: Any) -> None:
        """Name the client of an admission, once."""
        self.names[digest] = ""
        self.free -= 1
        with logged_errors():  # Users and callers are objects of the application.
            self.names[digest] = name(admission)[:LONGEST]

    def tops(self, now: float) -> tuple[Top, Top]:
        """Return who uses the rule most and who is refused most, at a Unix time. Forget the names of all others."""
        self.used.look(now)
        self.refused.look(now)
        used, refused = self.used.top(), self.refused.top()
        if len(self.names) > SIZE:
            keys = {entry.key for each in (used, refused) for entry in each.entries}
            self.names = {key: name for key, name in self.names.items() if key in keys}
        return used, refused

    def renew(self) -> bool:
        """Begin another period. Return True if clients are to be named in it."""
        self.free = min(NAMES, SIZE - len(self.names)) if self.used.has_room else 0
        return self.free > 0 or not (self.used.are_in(self.names) and self.refused.are_in(self.names))


class Tally:
    """What a gate collects for the fleet."""

    def __init__(self) -> None:
        self._pending: list[tuple[ref[Queue], _Pending]] = []
        self._clients: WeakSet[Clients] = WeakSet()
        self.known: set[str] = set()
        """Keys of named clients."""
        self.wants_names = True
        self.at_overflow: Callable[[], object] = bool
        """Called when a request has to count a queue, in any thread."""
        self.at_first: Callable[[], object] | None = None
        """Called once by a request that looks for names, in any thread."""
        self.lock = threading.RLock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop what the parent counts."""
        self.lock = threading.RLock()
        self.wants_names = True
        for _, pending in self._pending:
            pending.readings.clear()
            pending.refusals.clear()
        for clients in list(self._clients):
            clients.used, clients.refused = RecentSketch(), RecentSketch()

    def take(self, queue: Queue, pending: _Pending) -> None:
        """Count what is in another queue, until it is gone."""
        with self.lock:
            self._pending.append((ref(queue), pending))

    def of_rule(self) -> Clients:
        """Return the clients of another rule."""
        clients = Clients()
        self._clients.add(clients)
        return clients

    def note(self, clients: Clients, key: str, name: Name, admission: Any, *, is_refused: bool) -> None:
        """Count the client of a request that is in no queue."""
        digest = digest_of(key)
        if clients.wants(digest):
            clients.find_name(digest, name, admission)
        with self.lock:
            (clients.refused if is_refused else clients.used).add({digest: 1}, time.time())

    def count(self, *, waits: bool = True) -> None:
        """Count what is queued. Without ``waits``, leave it to another thread that does so."""
        if not self.lock.acquire(blocking=waits):
            return
        try:
            now, is_gone = time.time(), False
            with logged_errors():
                for queue, pending in self._pending:
                    is_gone |= queue() is None
                    pending.count(now)
                if is_gone:
                    self._pending = [each for each in self._pending if each[0]() is not None or each[1].readings]
                if len(self.known) > 4 * SIZE * (1 + len(self._clients)):
                    self.known = set()
                self.wants_names = any([each.renew() for each in list(self._clients)])  # noqa: C419 - no short circuit
        finally:
            self.lock.release()


class CountsRules(Protocol):
    """Counts readings of one template for the metrics of its rules."""

    charged: Callable[[Sequence[Any]], None]
    refused: Callable[[Sequence[Any]], None]


Place = tuple[int, str, Clients, Name]
"""For a rule: the place of its first key, its name, its clients, and how to name one."""


class _Pending:
    """What a queue holds. It outlives the queue until it is counted."""

    __slots__ = ("admitted", "charged", "defers", "places", "readings", "refusals")

    def __init__(
        self,
        charged: Callable[[Sequence[Any]], None],
        places: Sequence[Place],
        admitted: Callable[[Mapping[Any, int]], None],
        *,
        defers: bool,
    ) -> None:
        self.charged = charged
        # Without what names a client, which would keep replaced rules.
        self.places = [(place, rule, clients) for place, rule, clients, _ in places]
        self.admitted = admitted
        self.defers = defers
        self.readings: deque[Any] = deque()
        self.refusals: deque[tuple[Sequence[str], Iterable[str | None]]] = deque()

    def count(self, now: float) -> None:
        """Count at a Unix time. The caller holds the lock."""
        if self.readings:
            queue = self.readings
            readings = [queue.popleft() for _ in range(len(queue))]
            if self.defers:
                for reading in readings:
                    self.charged(reading.states)
                self.admitted(Counter([reading.source for reading in readings]))
            for place, _, clients in self.places:
                counted = Counter([reading.keys[place] for reading in readings])
                clients.used.add({digest_of(key): count for key, count in counted.items()}, now)
        while self.refusals:
            keys, rules = self.refusals.popleft()
            for place, name, clients in self.places:
                if name in rules:
                    clients.refused.add({digest_of(keys[place]): 1}, now)


class Queue:
    """Readings of one prepared plan that are still to be counted. Takes the place of its counter.

    If it ``defers``, they are counted for the metrics of rules and requests, too. ``admitted`` counts requests by the source
    of their decision.
    """

    __slots__ = ("__weakref__", "_pending", "_places", "charged", "defers", "queue", "refused", "tally")

    def __init__(
        self,
        tally: Tally,
        counter: CountsRules,
        places: Sequence[Place],
        *,
        defers: bool,
        admitted: Callable[[Mapping[Any, int]], None],
    ) -> None:
        self.tally = tally
        self.charged, self.refused = counter.charged, counter.refused
        self.defers = defers
        self._places = places
        self._pending = _Pending(counter.charged, places, admitted, defers=defers)
        self.queue = self._pending.readings
        tally.take(self, self._pending)

    def look(self, keys: Sequence[str], admission: Any) -> None:
        """Name the client of an admission if it is still to be named. Count the queue if it is too long."""
        if self.tally.at_first is not None:
            begin, self.tally.at_first = self.tally.at_first, None
            begin()
        if self.tally.wants_names and not self.tally.known.issuperset(keys):
            self._name(keys, admission)
        if len(self.queue) > MOST or len(self._pending.refusals) > MOST:
            self.tally.at_overflow()
            self.tally.count(waits=False)

    def _name(self, keys: Sequence[str], admission: Any) -> None:
        is_known = True
        for place, _, clients, name in self._places:
            digest = digest_of(keys[place])
            if clients.wants(digest):
                clients.find_name(digest, name, admission)
            is_known &= digest in clients.names
        if is_known:
            self.tally.known.update(keys)

    def note(self, keys: Sequence[str], admission: Any) -> None:
        """Note the clients of a request that is counted elsewhere."""
        for place, _, clients, name in self._places:
            self.tally.note(clients, keys[place], name, admission, is_refused=False)

    def note_refusal(self, keys: Sequence[str], rules: Iterable[str | None], admission: Any) -> None:
        """Note who was refused by these rules."""
        self._pending.refusals.append((keys, rules))
        self.look(keys, admission)


def digest_of(key: str) -> str:
    """Return the digest in the key of a bucket."""
    found = _DIGEST.search(key)
    return key if found is None else found[0]
