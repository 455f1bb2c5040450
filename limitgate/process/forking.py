"""State that a forked child must not share: held locks, connections, threads."""

from __future__ import annotations

import os
from typing import Protocol, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class Forked(Protocol):
    """An object that resets itself in a forked child."""

    def reset_after_fork(self) -> None:
        """Drop locks, connections and threads of the parent, in the child of a fork."""


class Forking(Protocol):
    """An object that prepares for a fork."""

    def before_fork(self) -> None:
        """Wait in the parent until this object's threads hold no locks that the child would inherit."""


_all: WeakSet[Forked] = WeakSet()
_ready: WeakSet[Forking] = WeakSet()


def reset_in_children(forked: Forked) -> None:
    """Call ``reset_after_fork`` in every forked child while the object lives."""
    _all.add(forked)


def get_ready_for_forks(forking: Forking) -> None:
    """Call ``before_fork`` before each fork while the object lives."""
    _ready.add(forking)


def _before_fork() -> None:
    for forking in list(_ready):
        forking.before_fork()


def living(kind: type[T]) -> list[T]:
    """Return the living objects of a class registered with `reset_in_children`."""
    while True:
        try:
            return [each for each in _all if isinstance(each, kind)]
        except RuntimeError:  # Another thread added an object during the iteration.
            continue


def _begin_anew() -> None:
    for forked in _all:
        forked.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_begin_anew)
