"""State that a forked child must not share: locks that nobody there will release, connections, threads."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Object that begins anew in a forked child."""

    def begin_anew(self) -> None:
        """Called in the child of a fork: drop locks, connections and threads, which belong to the parent."""


_all: WeakSet[Forked] = WeakSet()


def begin_anew_in_children(forked: Forked) -> None:
    """Have ``begin_anew`` called in every process that is forked from this one, for as long as the object lives."""
    _all.add(forked)


def _begin_anew() -> None:
    for forked in _all:
        forked.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
