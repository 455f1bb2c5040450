"""Figures of several workers, added up from the files in which prometheus-client's multiprocess mode keeps them.

Its own collector takes all keys of all files apart at each scrape, 15 for a rule and worker: a second for 1,000 rules of four
workers. Keys stay where they were written, so here they are taken apart once, and those that workers have in common once for
all of them. After that a file is one row of bytes and numbers, which are unpacked and added up without a loop in Python.
"""

from __future__ import annotations

import json
import operator
import os
import re
import stat
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import inf
from pathlib import Path
from typing import NamedTuple

Labels = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of labels in their order, and the value of each."""
Join = Callable[[float, float], float]
"""Makes one value of that of the workers before, in the order of their files, and that of one more."""

_WORD = 8
"""Bytes of a value, to which everything is aligned, and of what stands before the entries: how many bytes are in use."""
_AFTER = 2 * _WORD
"""Bytes of a value and of the time behind it."""
_integer = struct.Struct("i").unpack_from
_LENGTH = 4
"""Bytes of the length of a key, before it."""
_DAMAGED = "a file of prometheus-client is damaged, expected a folder that is empty when the server starts"

_JOINS: dict[str, Join] = {
    **dict.fromkeys(("counter", "summary", "histogram", "gauge_sum", "gauge_livesum"), operator.add),
    **dict.fromkeys(("gauge_min", "gauge_livemin"), min),
    **dict.fromkeys(("gauge_max", "gauge_livemax"), max),
    **dict.fromkeys(("gauge_all", "gauge_liveall"), lambda _, value: value),
}
"""By the name of a file, less the pid: the kind of its metrics, and how those of a gauge are joined."""


def can_join(path: Path) -> bool:
    """True for a file whose values `WorkerFiles` joins."""
    return _file_kind(path) in _JOINS


def _file_kind(path: Path) -> str:
    return path.stem.rpartition("_")[0]


class Run(NamedTuple):
    """Series one after another that have the same samples, and labels of the same names."""

    samples: Sequence[str]
    """Names of the samples of each that are no buckets."""
    bounds: Sequence[float]
    """Upper bounds of the buckets of each, from below."""
    names: tuple[str, ...]
    """Names of the labels."""
    values: Sequence[tuple[str, ...]]
    """Values of the labels of each."""


class Family:
    """A metric of all workers."""

    def __init__(self, name: str, meaning: str, kind: str) -> None:
        self.name = name
        self.meaning = meaning
        self.kind = kind
        self.values: Sequence[float] = ()
        """Of each series the values of its samples, then of its buckets, each with all that is below it, and their count."""
        self.series: dict[Labels, dict[str | float, int]] = {}
        """By labels the places of totals, by the names of samples and the upper bounds of buckets."""

    @cached_property
    def runs(self) -> Sequence[Run]:
        """All series, in the order of prometheus-client."""
        runs = []
        for (met, names), series in groupby(self._in_order, lambda each: (tuple(each[1]), each[0][0])):
            samples = [mark for mark in met if isinstance(mark, str)]
            bounds = sorted([mark for mark in met if not isinstance(mark, str)])
            runs.append(Run(samples, bounds, names, [labels[1] for labels, _ in series]))
        return runs

    @cached_property
    def _in_order(self) -> Iterable[tuple[Labels, dict[str | float, int]]]:
        """Series in the order in which the first sample of each was met that is no bucket; those without one come last."""
        if {type(next(iter(places))) for places in self.series.values()} == {str}:
            return self.series.items()
        first = {
            labels: min([place for mark, place in places.items() if isinstance(mark, str)], default=inf)
            for labels, places in self.series.items()
        }
        return [(labels, self.series[labels]) for labels in sorted(first, key=first.__getitem__)]

    @cached_property
    def _places(self) -> Sequence[Sequence[int]]:
        """Of each run the places of its totals, series by series."""
        series = iter(self._in_order)
        found: list[list[int]] = []
        for run in self.runs:
            marks: Sequence[str | float] = [*run.samples, *run.bounds]
            found.append([places[mark] for _, (_, places) in zip(run.values, series) for mark in marks])
        return found

    def take(self, totals: Sequence[float]) -> None:
        """Take the values out of the totals of all."""
        values: list[float] = []
        for run, places in zip(self.runs, self._places):
            found = [totals[place] for place in places]
            values += _accumulated(found, len(run.samples), len(run.bounds)) if run.bounds else found
        self.values = values


def _accumulated(found: Sequence[float], samples: int, bounds: int) -> Sequence[float]:
    """Values of histograms: of each its samples as they are, its buckets with all that is below each, and their count."""
    wide = samples + bounds
    values = [0.0] * (len(found) // wide * (wide + 1))
    for place in range(samples):
        values[place :: wide + 1] = found[place::wide]
    below = [0.0] * (len(found) // wide)
    for place in range(samples, wide):
        below = [*map(operator.add, below, found[place::wide])]
        values[place :: wide + 1] = below
    values[wide :: wide + 1] = below
    return values


class WorkerFiles:
    """The files of all workers, to be read by one thread at a time."""

    def __init__(self) -> None:
        self._files: dict[Path, _WorkerFile] = {}
        self._forms = {apart: _Forms(apart) for apart in (None, "le", "pid")}
        self._totals = _Totals([])

    def read(self, paths: Sequence[Path]) -> Sequence[Family]:
        """Read files, each of a kind that can be joined, into the same object each time, until there are further keys or files.

        A file that has gone meanwhile has nothing.
        """
        known = self._files
        self._files = {path: known.get(path) or _WorkerFile(path, self._forms) for path in paths}
        latest: dict[object, _Layout] = {}
        for path, file in self._files.items():
            _read(path, file, latest)
        made_of = [(file, file.layout) for file in self._files.values()]
        if made_of != self._totals.made_of:
            self._totals = _Totals(made_of)
        self._totals.join()
        return self._totals.families


def _read(path: Path, file: _WorkerFile, latest: dict[object, _Layout]) -> None:
    """Read a file, given the latest layouts of others, by their kind, and by that and their size."""
    kind, content = _file_kind(path), _content(path)
    file.read(content, latest.get((kind, len(content))) or latest.get(kind, _EMPTY))
    latest[kind] = latest[kind, len(content)] = file.layout


class _Totals:
    """Totals of all files, and the metrics whose they are."""

    def __init__(self, made_of: Sequence[tuple[_WorkerFile, _Layout]]) -> None:
        self.made_of = made_of
        """Each file, and the layout that it had: others may be known by now, though a later file could not be read."""
        self._families: dict[str, Family] = {}
        self._initial: list[float | None] = []
        """What every total begins with, None if that is the first value."""
        self._files: list[tuple[_WorkerFile, Sequence[int]]] = []
        """Each file, and the places of its values among the totals: a range where one total of sums comes after the other."""
        alike: dict[tuple[object, ...], Sequence[int]] = {}
        for file, _ in made_of:
            same = file.layout, file.kind, file.join, file.more_labels
            if same not in alike:
                alike[same] = self._places(file)
            self._files.append((file, alike[same]))
        self.families = [*self._families.values()]

    def _places(self, file: _WorkerFile) -> Sequence[int]:
        names, values = file.more_labels
        begins = 0.0 if file.join is operator.add else None
        initial, found = self._initial, list[int]()
        for labels, (name, marks, meaning) in zip(*file.layout.series):
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = Family(name, meaning, file.kind)
            own = (labels[0] + names, labels[1] + values) if names else labels
            places = family.series.get(own)
            new = marks if places is None else [mark for mark in marks if mark not in places]
            added = zip(new, range(len(initial), len(initial) + len(new)))
            initial += [begins] * len(new)
            if places is None:
                places = family.series[own] = dict(added)
            else:
                places.update(added)
            found += places.values() if len(new) == len(places) == len(marks) else [places[mark] for mark in marks]
        straight = range(found[0], found[0] + len(found)) if found else range(0)
        adds = begins is not None and None not in initial[straight.start : straight.stop]
        return straight if adds and found == [*straight] else found

    def join(self) -> None:
        """Join the values of the files, and give each metric its own."""
        totals = self._initial.copy()
        for file, places in self._files:
            if isinstance(places, range):
                among = slice(places.start, places.stop)
                totals[among] = map(operator.add, totals[among], file.values)
                continue
            for place, value in zip(places, file.values):
                before = totals[place]
                totals[place] = value if before is None else file.join(before, value)
        for family in self.families:
            family.take(totals)  # type: ignore[arg-type]


class _Marks(NamedTuple):
    """What keys one after another say of their samples, whatever values the labels have that they share."""

    family: str
    marks: tuple[str | float, ...]
    """Name of each sample, or upper bound of a bucket."""
    meaning: str


class _Form:
    """A form of keys: what stands before the labels and behind them is the same, and so are their names.

    Labels are taken out only where their values are such as stand in JSON as they are.
    """

    after: _Form
    """The form of the key that came after one of this form the last time."""

    def __init__(self, marks: _Marks, names: tuple[str, ...], head: bytes, tail: bytes) -> None:
        self.marks = marks
        """Of a single key."""
        self.names = names
        self.head, self.head_size = head, len(head)
        self.tail, self.tail_size = tail, len(tail)
        self.after = self
        self.blocks: dict[int, _Block] = {}
        """By the size of the labels' text the last entries of a series that began with this form."""
        plain = r'"([^"\\\x00-\x1f]*)"'
        self._match = re.compile(", ".join([f"{re.escape(json.dumps(name))}: {plain}" for name in names])).fullmatch

    def own(self, key: bytes) -> bytes | None:
        """The text of the labels in a key; None if it has not this form."""
        fits = key.startswith(self.head) and key.endswith(self.tail, self.head_size)
        return key[self.head_size : -self.tail_size] if fits else None

    def labels(self, own: bytes) -> Labels | None:
        """The labels of this text; None if it is none that is taken apart here."""
        found = self._match(own.decode())
        return (self.names, found.groups()) if found else None


class _NoForm(_Form):
    """Stands for the form of a single key."""

    def __init__(self, marks: _Marks) -> None:
        super().__init__(marks, (), b"\0", b"\0")  # which begin and end none


class _Block:
    """The entries of a series, by which those of the next one are known: they differ in the text of their labels alone."""

    def __init__(self, before: Sequence[bytes], own: bytes, marks: _Marks, last: _Form) -> None:
        self.sizes = [*map(len, before)]
        self.marks = marks
        self.last = last
        """Form of the last entry."""
        self._entries = _entries(self.sizes)
        self.size = self._entries.size
        self._parts = b"".join(before).split(own)
        self._is_one = len(self._parts) == len(before) + 1

    def fits(self, content: bytes, start: int, own: bytes) -> bool:
        """True if a content goes on from there with entries such as these, with this text of labels."""
        if not self._is_one or start + self.size > len(content):
            return False
        return b"".join(self._entries.unpack_from(content, start)[::2]) == own.join(self._parts)


_NONE: Labels = (), ()


class _Forms:
    """The forms of keys: 15 keys of a rule have one of a dozen forms, and only the first of each is read as JSON."""

    def __init__(self, apart: str | None) -> None:
        self._apart = apart
        """Name of the label that tells samples of one series apart."""
        self._by_head: dict[bytes, _Form] = {}
        self._last: _Form = _NoForm(_Marks("", (), ""))

    def take_apart(self, content: bytes, start: int, sizes: list[int], series: _Series) -> None:
        """Add the size of what stands before each value of a content from a start on, and the labels and samples of the keys.

        Raises `ValueError` for what is no such file.
        """
        if len(content) % _WORD:
            raise ValueError(_DAMAGED)
        form = self._last
        while start < len(content):
            end, value = _ends(content, start)
            key, last, form = content[start + _LENGTH : end], form, form.after
            own = form.own(key)
            labels = None if own is None else form.labels(own)
            if labels is None:
                form, labels = self._look_up(key)
                own = form.own(key)
                last.after = form
            block = form.blocks.get(len(own)) if own and form.blocks else None
            if block and own and block.fits(content, start, own):
                sizes += block.sizes
                start += block.size
                form, marks = block.last, block.marks
            else:
                sizes.append(value - start)
                start, marks = value + _AFTER, form.marks
                if own and content.startswith(own, start + _LENGTH + form.after.head_size):
                    start, form, marks = self._go_on(content, start, form, own, sizes)
            series.labels.append(labels)
            series.marks.append(marks)
        self._last = form

    def _go_on(self, content: bytes, start: int, first: _Form, own: bytes, sizes: list[int]) -> tuple[int, _Form, _Marks]:
        """Add entries that go on with a series after the first. Gives where they end, the form of the last, and all samples."""
        form, marks, entries, begin = first, first.marks.marks, len(sizes) - 1, start - _AFTER - sizes[-1]
        while start < len(content):
            end, value = _ends(content, start)
            follower = form.after
            inner = start + _LENGTH + follower.head_size
            if (
                content[inner : end - follower.tail_size] != own
                or follower.marks.family != first.marks.family
                or not content.startswith(follower.head, start + _LENGTH)
                or not content.endswith(follower.tail, inner, end)
            ):
                break
            sizes.append(value - start)
            form = follower
            marks += form.marks.marks
            start = value + _AFTER
        of_all = first.marks._replace(marks=marks)
        if form is not first:
            before = _entries(sizes[entries:]).unpack_from(content, begin)[::2]
            first.blocks[len(own)] = _Block(before, own, of_all, form)
        return start, form, of_all

    def _look_up(self, key: bytes) -> tuple[_Form, Labels]:
        """Form and labels of a key."""
        form = self._by_head.get(self._head(key))
        own = form.own(key) if form else None
        labels = form.labels(own) if form and own is not None else None
        return (form, labels) if form and labels else self._read(key)

    def _read(self, key: bytes) -> tuple[_Form, Labels]:
        """Form and labels of a key that is read as JSON; its form is kept if there may be others like it."""
        try:
            family, sample, labels, meaning = json.loads(key.decode())
            are_texts = {*map(type, (family, sample, meaning, *labels.values()))} == {str}
            apart = labels.pop(self._apart, None)
            bound = apart if self._apart == "le" else None
            marks = _Marks(family, (sample if bound is None else float(bound),), meaning)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(_DAMAGED) from error
        if not are_texts:
            raise ValueError(_DAMAGED)
        found = tuple(sorted(labels)), tuple([value for _, value in sorted(labels.items())])
        head = f"[{json.dumps(family)}, {json.dumps(sample)}, {{" + ("" if bound is None else f'"le": {json.dumps(bound)}, ')
        form = _Form(marks, found[0], head.encode(), f"}}, {json.dumps(meaning)}]".encode())
        own = form.own(key)
        if own is None or form.labels(own) != found:
            return _NoForm(marks), found
        self._by_head[form.head] = form
        return form, found

    def _head(self, key: bytes) -> bytes:
        """The part of a key that stands before its labels, if it is of a usual kind."""
        end = key.find(b"{") + 1
        if self._apart == "le" and key.startswith(b'"le": "', end):
            end = key.find(b'", ', end) + 3
        return key[:end]


def _ends(content: bytes, start: int) -> tuple[int, int]:
    """The ends of the key of an entry, and of all that stands before its value. Raises `ValueError` if it has none."""
    begin = start + _LENGTH
    end = begin + _integer(content, start)[0]
    value = (end | _WORD - 1) + 1  # at least one byte of padding
    if end < begin or value + _AFTER > len(content):
        raise ValueError(_DAMAGED)
    return end, value


class _Series(NamedTuple):
    """Labels and samples of the values in a file, of values one after another that have the same labels once."""

    labels: list[Labels]
    marks: list[_Marks]


class _Layout:
    """The places of the values in a file, and what they are of."""

    def __init__(self, before: Sequence[bytes], series: _Series, entries: struct.Struct) -> None:
        self._before = before
        """What stands before each value."""
        self.series = series
        self._entries = entries

    def values(self, content: bytes) -> Sequence[float] | None:
        """The values in a content that has this layout; None for another one."""
        if len(content) != self._entries.size:
            return None
        found = self._entries.unpack(content)
        return found[1::2] if found[::2] == self._before else None

    def of(self, content: bytes, forms: _Forms) -> tuple[_Layout, Sequence[float]]:
        """Layout and values of a content, of which no more is taken apart than begins otherwise than with this layout."""
        ends = [*accumulate([len(each.marks) for each in self.series.marks], initial=0)]
        kept = bisect_right(ends, self._common(content)) - 1
        series = _Series(self.series.labels[:kept], self.series.marks[:kept])
        before = self._before[: ends[kept]]
        sizes = [*map(len, before)]
        forms.take_apart(content, sum(sizes) + _AFTER * len(sizes), sizes, series)
        entries = _entries(sizes)
        found = entries.unpack(content)
        return _Layout((*before, *found[2 * len(before) :: 2]), series, entries), found[1::2]

    def _common(self, content: bytes) -> int:
        """Number of entries with which a content begins as this layout does."""
        ends = [*accumulate([len(each) + _AFTER for each in self._before])]
        fit = self._before[: bisect_right(ends, len(content))]
        differ = [*map(operator.ne, _entries(map(len, fit)).unpack_from(content)[::2], fit)]
        return differ.index(True) if True in differ else len(fit)


def _entries(sizes: Iterable[int]) -> struct.Struct:
    """Unpacks entries with so many bytes before each value into these and the value."""
    return struct.Struct(f"={f'sd{_WORD}x'.join([*map(str, sizes), ''])}")


_EMPTY = _Layout((), _Series([], []), _entries(()))


class _WorkerFile:
    """A file of one worker. Its name says the kind of its metrics, how they are joined, and the worker's pid."""

    def __init__(self, path: Path, forms: Mapping[str | None, _Forms]) -> None:
        self.kind, _, joined = _file_kind(path).partition("_")
        self.join = _JOINS[_file_kind(path)]
        self.more_labels: Labels = (("pid",), (path.stem.rpartition("_")[2],)) if joined.endswith("all") else _NONE
        """Label of gauges that are not joined."""
        self.layout = _EMPTY
        self.values: Sequence[float] = ()
        self._forms = forms["le" if self.kind == "histogram" else "pid" if joined and not self.more_labels[0] else None]

    def read(self, content: bytes, other: _Layout) -> None:
        """Take the values out of the content.

        Its keys are taken apart unless they have been, in this file or in that of another worker, which mostly has the same.
        """
        before = self.layout
        for layout in (before, other):
            values = layout.values(content)
            if values is not None:
                break
        else:
            layout, values = (other if before is _EMPTY else before).of(content, self._forms)
        self.layout, self.values = layout, values


def _content(path: Path) -> bytes:
    """The entries in a file; nothing if it cannot be read, or just being made.

    The gauges of workers that have ended are gone, and a folder, a FIFO or a file of another user is no worker's.
    """
    try:
        with open(path, "rb", opener=_open_file) as file:
            header = file.read(_WORD)
            return file.read(max(0, _integer(header)[0] - _WORD)) if len(header) == _WORD else b""
    except OSError:
        return b""


def _open_file(path: str, flags: int) -> int:
    """Open a regular file, without waiting for the other end of a FIFO. Raises `OSError` for anything else."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return descriptor
