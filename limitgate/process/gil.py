"""Work beside requests: a thread that has much to do gives up the GIL every millisecond, so that no event loop waits for it.

CPython takes the GIL from a thread after 5 ms only, each time that another one wants it; what is a tree is freed at once; and
once much is new its collector looks at all objects of the process in one go, which may take 100 ms.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import TypeVar

T = TypeVar("T")

PIECE = 0.001
"""Seconds that a thread works at a time."""
PAUSE = 0.001
"""Seconds that it leaves to others then; less than their timers can tell would not let them come first."""
SPARED = 10
"""Times that work may have the collector spare what is new until its next full collection: no garbage stays for ever."""

FROZEN_BY_PYTHON = 1_000
"""Objects that Python itself may have frozen at its start: 3.12 some hundreds. An application freezes many more."""


def sleep(seconds: float) -> None:
    """Sleep in this thread, by whatever has taken the place of `time.sleep`: that of gevent lets others have their turn."""
    time.sleep(seconds)


class _Work(local):
    piece_ends: float | None = None
    kept: list[object]
    may_spare: bool
    has_spared: bool


_work = _Work()


class _Collector:
    """How often work had the collector spare what was new, since its last full collection."""

    def __init__(self) -> None:
        self._times = self._collections = 0

    def may_spare(self) -> bool:
        """True if one more work may have it do so."""
        collections = gc.get_stats()[2]["collections"]
        if collections != self._collections:
            self._times, self._collections = 0, collections
        return self._times < SPARED

    def spare(self) -> None:
        """Hand what is new to the oldest generation unlooked at, before more than the newest of it would be looked at.

        To freeze all objects and to take that back takes no time, and is no reason for a full collection. What an application
        has frozen itself stays so, and then nothing is spared.
        """
        if gc.get_count()[1] <= gc.get_threshold()[1] // 2:
            return
        if gc.get_freeze_count() > FROZEN_BY_PYTHON:  # to count them takes long, so that is done once
            _work.may_spare = False
            return
        gc.freeze()
        gc.unfreeze()
        if not _work.has_spared:
            _work.has_spared = True
            self._times += 1


_collector = _Collector()


@contextmanager
def in_pieces() -> Iterator[None]:
    """Have this thread work in pieces inside of the ``with`` block: `yield_gil` pauses."""
    _work.piece_ends = time.perf_counter() + PIECE
    _work.has_spared, _work.may_spare = False, _collector.may_spare()
    kept: list[object] = []
    _work.kept = kept
    try:
        yield
    finally:
        kept.reverse()
        free_in_pieces(kept)
        _work.piece_ends = None


def yield_gil() -> None:
    """Let others have their turn if this thread works `in_pieces` and the present one is over. For loops over rules."""
    ends = _work.piece_ends
    if ends is not None and time.perf_counter() >= ends:
        if _work.may_spare:
            _collector.spare()
        sleep(PAUSE)
        _work.piece_ends = time.perf_counter() + PIECE


def free_in_pieces(parts: list[object]) -> None:
    """Free one after the other what nobody else has, the whole before its parts: else all of them would be freed at once."""
    for place in range(len(parts)):
        parts[place] = None
        yield_gil()
    parts.clear()


def freed_in_pieces(part: T) -> T:
    """A part of something large, made after its own parts: where this thread works `in_pieces` each is freed by itself."""
    if _work.piece_ends is not None:
        _work.kept.append(part)
    return part
