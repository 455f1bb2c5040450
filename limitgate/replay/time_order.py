"""Requests of a log in the order in which they came: servers write a line when a response ends, or each worker in its turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from limitgate.replay.access_log import Entry

LATE = 120
"""Seconds that a line may be late. One that is later is decided as it comes, and the clock stays."""
MOST = 500_000
"""Requests that wait for earlier ones at most."""
_SECOND = 1_000_000
_at = itemgetter(0)


class TimeOrder:
    """Sorts requests that are nearly in order. Those of the same time keep their order."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Entry]] = {}
        """By second."""
        self._count = 0
        self._latest = 0
        self._next = 0
        """The first second of which nothing was given out."""

    def push(self, entry: Entry) -> Sequence[Entry]:
        """Take a request, and give out those that no line can come before any more."""
        second = max(entry.at // _SECOND, self._next)
        waiting = self._waiting.get(second)
        if waiting is None:
            self._waiting[second] = [entry]
        else:
            waiting.append(entry)
        self._count += 1
        if second > self._latest:
            self._latest = second
            return [*self._until(second - LATE)]
        return [*self._until(min(self._waiting) + 1)] if self._count > MOST else ()

    def rest(self) -> Sequence[Entry]:
        """Give out all that is left."""
        return [*self._until(self._latest + 1)]

    def _until(self, end: int) -> Iterator[Entry]:
        """The requests of all seconds before ``end``."""
        for second in sorted(each for each in self._waiting if each < end):
            entries = self._waiting.pop(second)
            self._count -= len(entries)
            self._next = second + 1
            entries.sort(key=_at)
            yield from entries
