"""Hands figures to observers: at once after a quiet second, then once a second, before a scrape, and when the process ends.

A thread of its own does it, so that neither a stalled event loop nor one that ends holds anything back. It sleeps while nothing
is counted. Observers are told differences since the last time, so that figures of several gates and processes add up.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import ref

from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.observing.instruments import STORE_UP, Instrument
from limitgate.observing.observer import Observer
from limitgate.process.forking import begin_anew_in_children, get_ready_for_forks

PERIOD = 1.0
"""Seconds between two times that observers are handed what is new."""

Figure = tuple[Instrument, tuple[str, ...], float]
"""A gauge, the labels of its series, and its value."""


class Row:
    """Figures that only grow."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tell(self, observer: Observer, before: Sequence[Any] | None, now: Sequence[Any]) -> None:
        """Tell what has come since they were as ``before``, None if they were never told: then every series, with 0."""
        raise NotImplementedError


def news(before: Sequence[Any] | None, now: Sequence[Any], start: int, end: int) -> list[Any]:
    """What has been added to some of a row's figures."""
    if before is None:
        return list(now[start:end])
    return [value - was for value, was in zip(now[start:end], before[start:end])]


class Counted(Protocol):
    """Something whose figures are handed over."""

    def rows(self) -> Iterable[Row]:
        """Figures that only grow. The same objects each time, and further ones."""

    def gauges(self) -> Iterable[Figure]:
        """Figures as they stand."""


class _Source(NamedTuple):
    counted: Counted
    owner: ref[object]
    """Whose figures they are; once it is gone they are told for the last time."""


class _Feed:
    """What one observer has been told."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._sources: list[_Source] = []
        self._told: dict[Row, Sequence[Any]] = {}
        self._gauges: dict[tuple[Instrument, tuple[str, ...]], float] = {}
        self._beginning: list[Row] = []
        """Rows of which all series have yet to be told with 0, although some of their figures are nobody's to tell."""
        self._failed = Once(Diagnosis.OBSERVER_FAILED)

    def attach(self, counted: Counted, owner: object) -> None:
        """Tell of something from now on."""
        if not any(source.counted is counted for source in self._sources):
            self._sources.append(_Source(counted, ref(owner)))

    def begin_anew(self) -> None:
        """In the child of a fork: what was counted before is for the parent to tell, and all series begin anew."""
        self._gauges.clear()
        rows = [row for source in self._sources for row in source.counted.rows()]
        self._told = {row: row.values.copy() for row in rows}
        self._beginning = rows

    def tell(self) -> bool:
        """Tell what is new. True if anything was, or will be without a request: a store may answer again."""
        while self._beginning:
            row = self._beginning.pop()
            self._guarded(row.tell, self._observer, None, [0] * len(row.values))
        gone = [source for source in self._sources if source.owner() is None]
        left = [source for source in self._sources if source not in gone]
        has_news = any([self._tell_row(row) for source in self._sources for row in source.counted.rows()])  # noqa: C419 - all of them
        has_news |= self._tell_gauges([figure for source in left for figure in source.counted.gauges()])
        for source in gone:
            self._sources.remove(source)
            for row in source.counted.rows():
                self._told.pop(row, None)
        return has_news

    def _tell_gauges(self, figures: Iterable[Figure]) -> bool:
        """Tell gauges that have changed. True if any has, or a store is down."""
        has_news = False
        present = {place: 0.0 for place in self._gauges if place[0].kind == "up_down"}  # of an owner that is gone: nothing
        known = set[tuple[Instrument, tuple[str, ...]]]()
        for instrument, labels, value in figures:
            place = instrument, labels
            present[place] = _joined(instrument, present[place], value) if place in known else value
            known.add(place)
        for place, value in present.items():
            if self._gauges.get(place) != value:
                has_news = True
                self._gauges[place] = value
                self._guarded(self._observer.set, *place, value)
            has_news |= place[0] is STORE_UP and not value
        return has_news

    def _tell_row(self, row: Row) -> bool:
        before, now = self._told.get(row), row.values.copy()
        if before == now:
            return False
        self._told[row] = now  # first: what an observer fails at is lost, and never told twice
        self._guarded(row.tell, self._observer, before, now)
        return True

    def _guarded(self, tell: Callable[..., None], *args: Any) -> None:
        """Tell something to the observer, whose failure harms nobody else."""
        try:
            tell(*args)
        except Exception as error:  # noqa: BLE001 - it is somebody else's, and the other figures have to be told
            self._failed.log(type(self._observer).__name__, type(error).__name__)


def _joined(instrument: Instrument, one: float, other: float) -> float:
    """One value of a gauge that has two in this process."""
    if instrument.joined == "sum":
        return one + other
    if instrument.joined == "each":
        return other
    return min(one, other) if instrument.joined == "min" else max(one, other)


class Handover:
    """Hands all figures of this process to its observers."""

    def __init__(self) -> None:
        self._feeds: dict[Observer, _Feed] = {}
        self.is_idle = True
        """True if whoever counts something has to `wake` it."""
        self._reset()
        begin_anew_in_children(self)
        get_ready_for_forks(self)
        atexit.register(self.hand_over)

    def _reset(self) -> None:
        self._thread: threading.Thread | None = None
        self._wakeup = threading.Event()
        self._lock = threading.RLock()
        self._is_telling = False

    def before_fork(self) -> None:
        """Wait until no observer is being told: its locks would stay locked in the child."""
        with self._lock:
            pass

    def begin_anew(self) -> None:
        """In the child of a fork: count from 0, and start a thread when there is something to tell."""
        self._reset()
        self.is_idle = True
        for feed in self._feeds.values():
            feed.begin_anew()

    def attach(self, observers: Iterable[Observer], *counted: tuple[Counted, object]) -> None:
        """Hand over what is counted, each for as long as its owner lives. All its series are there from now on."""
        with self._lock:
            for observer in observers:
                feed = self._feeds.setdefault(observer, _Feed(observer))
                for each, owner in counted:
                    feed.attach(each, owner)
        self.hand_over()

    def wake(self) -> None:
        """Hand over soon, and every second from then on until nothing is new. Nothing where nobody observes."""
        if not self._feeds:
            return
        self.is_idle = False
        self._wakeup.set()
        if self._thread is None:
            self._start()

    def hand_over(self, *, waits: bool = True) -> bool:
        """Tell every observer what is new. True if anything was. Unless it ``waits``, false where another thread is at it."""
        if not self._lock.acquire(blocking=waits):
            return False
        try:
            if self._is_telling:  # an observer asks for what it is being told
                return False
            self._is_telling = True
            try:
                have_news = [feed.tell() for feed in list(self._feeds.values())]
                return any(have_news)
            finally:
                self._is_telling = False
        finally:
            self._lock.release()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=[self._wakeup], name="limitgate-observers", daemon=True)
                with suppress(RuntimeError):  # no thread can be started now: the next one who counts tries again
                    thread.start()
                    self._thread = thread
                    return
                self.is_idle = True

    def _run(self, wakeup: threading.Event) -> None:
        while True:
            wakeup.wait()
            wakeup.clear()
            while self.hand_over():
                time.sleep(PERIOD)
            self.is_idle = True  # from here on whoever counts wakes it
            if self.hand_over():  # somebody did before
                self.wake()


handover = Handover()
