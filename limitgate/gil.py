"""Work beside requests: a thread that has much to do gives up the GIL every millisecond, so that no event loop waits for it.

CPython takes the GIL from a thread after 5 ms only, each time that another one wants it; and what is a tree is freed at once.
"""

from __future__ import annotations

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


def sleep(seconds: float) -> None:
    """Sleep in this thread, by whatever has taken the place of `time.sleep`: that of gevent lets others have their turn."""
    time.sleep(seconds)


class _Work(local):
    piece_ends: float | None = None
    kept: list[object]


_work = _Work()


@contextmanager
def in_pieces() -> Iterator[None]:
    """Have this thread work in pieces inside of the ``with`` block: `yield_gil` pauses."""
    _work.piece_ends = time.perf_counter() + PIECE
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
