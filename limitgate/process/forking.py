"""State that a forked child must not share: locks that nobody there will release, connections, threads."""

from __future__ import annotations

import os
from typing import Protocol, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class Forked(Protocol):
    """Object that begins anew in a forked child."""

    def reset_after_fork(self) -> None:
        """Called in the child of a fork: drop locks, connections and threads, which belong to the parent."""


class Forking(Protocol):
    """Object that gets ready for a fork."""

    def before_fork(self) -> None:
        """Called in the parent: wait for a moment until no thread of its own holds a lock that the child would keep."""


_all: WeakSet[Forked] = WeakSet()
_ready: WeakSet[Forking] = WeakSet()


def reset_in_children(forked: Forked) -> None:
    """Have ``reset_after_fork`` called in every process that is forked from this one, for as long as the object lives."""
    _all.add(forked)


def get_ready_for_forks(forking: Forking) -> None:
    """Have ``before_fork`` called before this process is forked, for as long as the object lives."""
    _ready.add(forking)


def _before_fork() -> None:
    for forking in list(_ready):
        forking.before_fork()


def living(kind: type[T]) -> list[T]:
    """The objects of a class that `reset_in_children` was told of."""
    while True:
        try:
            return [each for each in _all if isinstance(each, kind)]
        except RuntimeError:  # another thread has made one meanwhile
            continue


def _begin_anew() -> None:
    for forked in _all:
        forked.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_begin_anew)
