"""Figures of several workers, added up from the files in which prometheus-client's multiprocess mode keeps them.

Its own collector takes all keys of all files apart at each scrape, 15 for a rule and worker: a second for 1,000 rules of four
workers. Keys stay where they were written, so here they are taken apart once, and after that values alone are read.
"""

from __future__ import annotations

import json
import operator
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial, reduce
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, in the order of the names."""
Join = Callable[[Sequence[float]], float]
"""Makes one value of those of several workers, which come in the order of their files."""

_WORD = 8
"""Bytes of a value, to which everything is aligned, and of what stands before the entries: how many bytes are in use."""
_integer = struct.Struct("i").unpack_from


def _sum(values: Sequence[float]) -> float:
    return reduce(operator.add, values, 0.0)  # `sum` rounds otherwise from Python 3.12 on


_JOINS: dict[str, Join] = {
    **dict.fromkeys(("counter", "summary", "histogram", "gauge_sum", "gauge_livesum"), _sum),
    **dict.fromkeys(("gauge_min", "gauge_livemin"), min),
    **dict.fromkeys(("gauge_max", "gauge_livemax"), max),
    **dict.fromkeys(("gauge_all", "gauge_liveall"), operator.itemgetter(-1)),
}
"""By the name of a file, less the pid: the kind of its metrics, and how those of a gauge are joined."""


def can_join(path: Path) -> bool:
    """True for a file whose values `WorkerFiles` joins."""
    return _file_kind(path) in _JOINS


def _file_kind(path: Path) -> str:
    return path.stem.rpartition("_")[0]


class Series:
    """Samples of a metric with the same labels: one, or the buckets of a histogram with their sum and count."""

    def __init__(self, labels: Labels, join: Join, found: Sequence[float]) -> None:
        self.labels = labels
        self._join = join
        self._found = found
        """Values in all files, kept up to date."""
        self._samples: dict[str, list[int]] = {}
        """By the name of a sample the places of its values among those of all files."""
        self._buckets: dict[float, list[int]] = {}
        """By the upper bound of a bucket the places of its values."""

    def add(self, name: str, bound: str | None, place: int) -> None:
        """Add the place of a worker's value, by the name of its sample, or the bound of its bucket."""
        if bound is None:
            self._samples.setdefault(name, []).append(place)
        else:
            self._buckets.setdefault(float(bound), []).append(place)

    @property
    def names(self) -> Sequence[str]:
        """Names of the samples that are no buckets."""
        return [*self._samples]

    @property
    def bounds(self) -> Sequence[float]:
        """Upper bounds of the buckets, from below."""
        return sorted(self._buckets)

    @cached_property
    def found(self) -> Callable[[], object]:
        """Function that gives the workers' values as they are in the files."""
        places = [place for places in (*self._samples.values(), *self._buckets.values()) for place in places]
        return partial(operator.itemgetter(*places), self._found)

    def values(self) -> Sequence[float]:
        """Values of `names`, then those of `bounds`, each with all that is below it."""
        found = self._found
        samples = [self._join([found[place] for place in places]) for places in self._samples.values()]
        buckets = [_sum([found[place] for place in self._buckets[bound]]) for bound in self.bounds]
        return [*samples, *accumulate(buckets)]


class Family(NamedTuple):
    """A metric of all workers."""

    name: str
    meaning: str
    kind: str
    series: dict[Labels, Series]


class WorkerFiles:
    """The files of all workers, to be read by one thread at a time."""

    def __init__(self) -> None:
        self._files: dict[Path, _WorkerFile] = {}
        self._families: Sequence[Family] = ()
        self._found: list[float] = []

    def read(self, paths: Sequence[Path]) -> Sequence[Family]:
        """Read files, each of a kind that can be joined, into the same object each time, until there are further keys or files.

        A file that has gone meanwhile has nothing.
        """
        known, self._files = self._files, {path: self._files.get(path) or _WorkerFile(path) for path in paths}
        keys = _Keys()
        latest: dict[str, _Layout] = {}
        are_new = []
        for path, file in self._files.items():
            kind = _file_kind(path)
            are_new.append(file.read(_content(path), keys, latest.get(kind, _EMPTY)))
            latest[kind] = file.layout
        found = [value for file in self._files.values() for value in file.values]
        if any(are_new) or list(known) != list(self._files):
            self._found = found
            self._families = self._arranged()
        else:
            self._found[:] = found
        return self._families

    def _arranged(self) -> Sequence[Family]:
        """Metrics and series of all files, in the order in which they are met."""
        arranged: dict[str, Family] = {}
        first = 0
        for file in self._files.values():
            for place, key in enumerate(file.layout.keys, first):
                family = arranged.get(key.family)
                if family is None:
                    family = arranged[key.family] = Family(key.family, key.meaning, file.kind, {})
                labels = key.labels + file.more_labels
                series = family.series.get(labels)
                if series is None:
                    series = family.series[labels] = Series(labels, file.join, self._found)
                series.add(key.sample, key.bound, place)
            first += len(file.layout.keys)
        return [*arranged.values()]


class _Key(NamedTuple):
    """What the key of a value says."""

    family: str
    sample: str
    labels: Labels
    bound: str | None
    """Upper bound of a bucket."""
    meaning: str


class _Keys(dict[tuple[bytes, str | None], _Key]):
    """Keys by their text, and by the name of the label that tells samples of one series apart; workers mostly have the same."""

    def __missing__(self, key: tuple[bytes, str | None]) -> _Key:
        text, apart = key
        family, sample, labels, meaning = json.loads(text.decode())
        bound = labels.pop(apart, None)
        found = self[key] = _Key(family, sample, tuple(sorted(labels.items())), bound if apart == "le" else None, meaning)
        return found


class _Layout(NamedTuple):
    """Places of the values in a file, and what they are of."""

    keys: Sequence[_Key]
    places: Sequence[int]
    """Places of the values, in words. The word behind each is a time."""
    rest: int
    """Hash of all that is no value."""

    @classmethod
    def of(cls, content: bytes, keys: _Keys, apart: str | None) -> _Layout:
        """The layout of a content, for files whose series have samples that this label tells apart."""
        entries = [*_entries(content)]
        places = [place for _, place in entries]
        return cls([keys[text, apart] for text, _ in entries], places, _taken(content, places)[1])

    def values(self, content: bytes) -> Sequence[float] | None:
        """The values in a content that has this layout; None for another one."""
        if not self.places or len(content) != (self.places[-1] + 2) * _WORD:
            return None
        values, rest = _taken(content, self.places)
        return values if rest == self.rest else None


_EMPTY = _Layout([], [], 0)


class _WorkerFile:
    """A file of one worker. Its name says the kind of its metrics, how they are joined, and the worker's pid."""

    def __init__(self, path: Path) -> None:
        self.kind, _, joined = _file_kind(path).partition("_")
        self.join = _JOINS[_file_kind(path)]
        self.more_labels = (("pid", path.stem.rpartition("_")[2]),) if joined.endswith("all") else ()
        """Label of gauges that are not joined."""
        self.layout = _EMPTY
        self.values: Sequence[float] = ()
        self._apart = "le" if self.kind == "histogram" else "pid" if joined and not self.more_labels else None

    def read(self, content: bytes, keys: _Keys, other: _Layout) -> bool:
        """Take the values out of the content. True if its keys are others than before.

        They are taken apart unless they have been, in this file or in that of another worker, which mostly has the same.
        """
        before = self.layout
        for layout in (before, other):
            values = layout.values(content)
            if values is not None:
                self.layout, self.values = layout, values
                break
        else:
            self.layout = _Layout.of(content, keys, self._apart)
            self.values = _taken(content, self.layout.places)[0]
        return before.keys != self.layout.keys


def _taken(content: bytes, places: Sequence[int]) -> tuple[Sequence[float], int]:
    """Values that a content has at these places, and a hash of all else."""
    words = array("d", content)
    values = [words[place] for place in places]
    for place in places:
        words[place] = words[place + 1] = 0.0
    return values, hash(words.tobytes())


def _content(path: Path) -> bytes:
    """The entries in a file; nothing if it is gone, as the gauges of workers that have ended are, or just being made."""
    try:
        with path.open("rb") as file:
            header = file.read(_WORD)
            return file.read(max(0, _integer(header)[0] - _WORD)) if len(header) == _WORD else b""
    except FileNotFoundError:
        return b""


def _entries(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Keys, and the places of their values in words. Raises `ValueError` for what is no such file."""
    start = 0
    while start < len(content):
        length = _integer(content, start)[0]
        begin = start + 4
        value = begin + length + _WORD - (length + 4) % _WORD  # at least one byte of padding
        if length < 0 or value + 2 * _WORD > len(content):
            raise ValueError("a file of prometheus-client is damaged, expected a folder that is empty when the server starts")
        yield content[begin : begin + length], value // _WORD
        start = value + 2 * _WORD
