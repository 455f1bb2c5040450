"""Finds the most frequent names of a stream with little memory. Pure.

Space-Saving (Metwally et al., 2005) with the filter of Homem and Carvalho (2010). ``size`` names have a counter; others
share the filter's cells by hash, and replace the name with the least count once their cell reaches that count. So a flood
of n names raises the largest counts by n / cells instead of n / size.

The true count of a name with a counter is in ``[hits - error, hits]``. Any other count is at most `floor`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

SIZE = 256
CELLS = 4096


class Entry(NamedTuple):
    """One name of a sketch. Times are Unix seconds."""

    key: str
    hits: int
    error: int
    """Maximum number of ``hits`` that may belong to other names."""
    since: float
    """Time of the first hit after the last pause of `PAUSE`."""
    last: float


PAUSE = 60.0
"""Seconds."""
Runs = tuple[Mapping[str, float], Mapping[str, float]]
"""``since`` and ``last`` by name."""
_UNKNOWN: Mapping[str, float] = {}


class Sketch:
    __slots__ = (
        "_cells",
        "_counts",
        "_errors",
        "_filter",
        "_floor",
        "_last",
        "_lowest",
        "_runs_before",
        "_since",
        "size",
        "total",
    )

    def __init__(self, size: int = SIZE, cells: int = CELLS, runs: Runs = ({}, {})) -> None:
        """``runs`` is `Sketch.runs` of the previous period."""
        self.size: int = size
        self._runs_before = runs
        self.total: int = 0
        self._cells = cells
        self._filter: array[int] | None = None
        """Created when no counter is free."""
        self._counts: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._floor = 0
        """Lower bound of the counts."""
        self._lowest: list[str] = []
        """Names that had the lowest count when they were last searched."""

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    @property
    def names(self) -> Iterable[str]:
        return self._counts

    @property
    def runs(self) -> Runs:
        return self._since, self._last

    @property
    def floor(self) -> int:
        if self._filter is None:
            return 0
        return max(self._filter) if self._cells else min(self._counts.values(), default=0)

    def add(self, counts: Mapping[str, int], now: float, first: Mapping[str, float] = _UNKNOWN) -> None:
        """``first`` has the times of first hits, if known."""
        known, last, cells = self._counts, self._last, self._cells
        self.total += sum(counts.values())
        fill, floor = self._filter, self._floor
        for key, count in counts.items():
            if key in known:
                known[key] += count
                if now - last[key] > PAUSE:
                    self._since[key] = first.get(key, now)
                last[key] = now
            elif fill is not None and cells:
                cell = hash(key) % cells
                filled = fill[cell] + count
                if filled <= floor:
                    fill[cell] = filled
                else:
                    self._compete(key, count, now, first)
                    floor = self._floor
            elif len(known) < self.size and fill is None:
                self._put(key, count, 0, now, first)
            else:
                self._compete(key, count, now, first)
                fill, floor = self._filter, self._floor

    def _put(self, key: str, count: int, error: int, now: float, first: Mapping[str, float]) -> None:
        self._counts[key], self._errors[key] = count + error, error
        self._since[key], self._last[key] = first.get(key, now), now
        since, last = self._runs_before
        if key in last and now - last[key] <= PAUSE:
            self._since[key] = since[key]

    def _compete(self, key: str, count: int, now: float, first: Mapping[str, float]) -> None:
        if self._filter is None:
            self._filter = array("Q", bytes(8 * max(1, self._cells)))
        least = self._least()
        cell = hash(key) % self._cells if self._cells else 0
        before = self._filter[cell] if self._cells else self._floor
        if before + count <= self._floor:
            self._filter[cell] = before + count
            return
        self._lowest.pop()
        if self._cells:
            of_least = hash(least) % self._cells
            self._filter[of_least] = max(self._filter[of_least], self._floor)
        for each in (self._counts, self._errors, self._since, self._last):
            del each[least]
        self._put(key, count, before, now, first)

    def _least(self) -> str:
        """One search finds all names with the lowest count, because a flood replaces many."""
        while True:
            lowest, counts = self._lowest, self._counts
            while lowest:
                if counts[lowest[-1]] == self._floor:
                    return lowest[-1]
                lowest.pop()
            self._floor = min(counts.values())
            self._lowest = [key for key, count in counts.items() if count == self._floor]

    def entries(self) -> list[Entry]:
        entries = [
            Entry(key, count, self._errors[key], self._since[key], self._last[key]) for key, count in self._counts.items()
        ]
        return sorted(entries, key=_least_first)


def _least_first(entry: Entry) -> tuple[int, int]:
    return entry.error - entry.hits, -entry.hits


class Top(NamedTuple):
    entries: Sequence[Entry] = ()
    floor: int = 0

    def cut(self, most: int) -> Top:
        left_out = self.entries[most:]
        return Top(self.entries[:most], max([self.floor, *[each.hits for each in left_out]])) if left_out else self


NOBODY = Top()


def top(sketch: Sketch) -> Top:
    return Top(sketch.entries(), sketch.floor)


def merge(tops: Iterable[Top], most: int | None = None) -> Top:
    """Add the counts of streams. Errors add up, because a name may also be in streams that don't list it.

    ``since`` is the start of the last run without a pause. ``most`` is the number of names to return.
    """
    listed = list(tops)
    if len(listed) == 1:
        return listed[0] if most is None else listed[0].cut(most)
    floor = sum([each.floor for each in listed])
    found: dict[str, list[Any]] = {}
    for each in listed:
        unlisted = floor - each.floor
        for entry in each.entries:
            known = found.get(entry[0])
            if known is None:
                found[entry[0]] = [entry[1] + unlisted, entry[2] + unlisted, entry]
            else:
                known[0] += entry[1] - each.floor
                known[1] += entry[2] - each.floor
                known.append(entry)
    ranked = sorted(found, key=lambda key: (found[key][1] - found[key][0], -found[key][0]))
    entries = []
    for key in ranked[:most]:
        hits, error, *of_streams = found[key]
        entries.append(Entry(key, hits, error, *_last_run(of_streams)))
    left_out = [found[key][0] for key in ranked[len(entries) :]]
    return Top(entries, max([floor, *left_out]))


def _last_run(entries: list[Entry]) -> tuple[float, float]:
    """Return the beginning and the end of the latest run."""
    latest, *earlier = sorted(entries, key=attrgetter("last"), reverse=True)
    since = latest.since
    for each in earlier:
        if since - each.last > PAUSE:
            break
        since = min(since, each.since)
    return since, latest.last


class RecentSketch:
    """A sketch of the current period of `PERIOD` seconds and the previous one.

    Periods begin at multiples of `PERIOD` in Unix time, so that they are the same in all processes.
    """

    __slots__ = ("_before", "_current", "_period")

    def __init__(self) -> None:
        self._current, self._before = Sketch(), Sketch()
        self._period = 0

    def add(self, counts: Mapping[str, int], now: float, first: Mapping[str, float] = _UNKNOWN) -> None:
        self.look(now)
        self._current.add(counts, now, first)

    def look(self, now: float) -> None:
        period = int(now // PERIOD)
        if period == self._period:
            return
        self._before = self._current if period == self._period + 1 else Sketch()
        self._current, self._period = Sketch(runs=self._before.runs), period

    def __contains__(self, key: object) -> bool:
        return key in self._current or key in self._before

    @property
    def has_room(self) -> bool:
        return len(self._current) < self._current.size

    @property
    def names(self) -> Iterable[str]:
        return chain(self._current.names, self._before.names)

    def top(self) -> Top:
        return merge([top(each) for each in (self._current, self._before) if each.total])


PERIOD = 300.0


def counts_from(now: float) -> float:
    """Return the beginning of the counts of a `RecentSketch`."""
    return (now // PERIOD - 1) * PERIOD
