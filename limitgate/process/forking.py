"""State that forks and pickles must not copy."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, Protocol, Self, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class Forked(Protocol):
    def reset_after_fork(self) -> None:
        """Drop locks, connections and threads of the parent."""


class Resuming(Protocol):
    def after_fork(self) -> None: ...


class Forking(Protocol):
    def before_fork(self) -> None:
        """Wait until no thread holds a lock that the child would inherit."""


_all: WeakSet[Forked] = WeakSet()
_ready: WeakSet[Forking] = WeakSet()
_resuming: WeakSet[Resuming] = WeakSet()


def reset_in_children(forked: Forked) -> None:
    """Call ``reset_after_fork`` in forked children while the object lives."""
    _all.add(forked)


def get_ready_for_forks(forking: Forking) -> None:
    """Call ``before_fork`` while the object lives."""
    _ready.add(forking)


def resume_after_forks(resuming: Resuming) -> None:
    """Call ``after_fork`` in the parent while the object lives."""
    _resuming.add(resuming)


def _after_fork() -> None:
    for resuming in list(_resuming):
        resuming.after_fork()


def _before_fork() -> None:
    for forking in list(_ready):
        forking.before_fork()


def living(kind: type[T]) -> list[T]:
    while True:
        try:
            return [each for each in _all if isinstance(each, kind)]
        except RuntimeError:  # Another thread added an object during the iteration.
            continue


_here = [os.getpid()]


def _begin_anew() -> None:
    _here[0] = os.getpid()
    for forked in _all:
        forked.reset_after_fork()


def _register_with_uwsgi() -> None:
    """Call the hook of children under uWSGI, which forks without Python's hooks."""
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is None:
        return
    hooks = [getattr(uwsgi, "post_fork_hook", None)]
    # Imported later, it would replace the hook. Without a master process, it raises `Exception`.
    with suppress(Exception):
        import_module("uwsgidecorators")
    hooks.append(getattr(uwsgi, "post_fork_hook", None))

    def begin_anew() -> None:
        # With uWSGI's option py-call-osafterfork, this has been done.
        if os.getpid() != _here[0]:
            _begin_anew()
        for hook in dict.fromkeys(filter(None, hooks)):
            hook()

    uwsgi.post_fork_hook = begin_anew


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_anew)
_register_with_uwsgi()


IN_MEMORY = "its counts are in the memory of this process, expected the URL of a store on Redis"


class Remade:
    """Objects that are pickled and copied by constructor arguments.

    Raises `TypeError` if these can't be pickled, or if the
    copy would lack state.
    """

    _made_of: tuple[Sequence[Any], Mapping[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._made_of = args, kwargs
        return made

    @property
    def made_of(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return self._made_of

    @property
    def state_here(self) -> str:
        """State that a copy would lack, and what to do instead."""
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_state("pickled")
        args, kwargs = self._made_of
        for place, value in enumerate(args, 1):
            self._check_argument(f"argument {place}", value)
        for name, value in kwargs.items():
            self._check_argument(name, value)
        return _made, (type(self), args, kwargs)

    def __copy__(self) -> Self:
        self._check_state("copied")
        args, kwargs = self._made_of
        return type(self)(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def _check_state(self, done: str) -> None:
        if self.state_here:
            raise TypeError(f"a {type(self).__qualname__} cannot be {done}: {self.state_here}")

    def _check_argument(self, name: str, value: object) -> None:
        if isinstance(value, Remade):
            value.__reduce__()
            return
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - classes raise various errors
            refused = getattr(value, "__qualname__", None) or f"an object of {type(value).__qualname__}"
        else:
            return
        cure = "a module-level function" if callable(value) else "a picklable one"
        raise TypeError(f"a {type(self).__qualname__} cannot be pickled, because its {name} cannot: {refused}, expected {cure}")


class Unpicklable:
    made_by: str

    def __reduce__(self) -> NoReturn:
        raise unpicklable(self.made_by)


def unpicklable(made_by: str) -> TypeError:
    """The error for a pickle or copy."""
    return TypeError(
        f"{made_by} cannot be pickled: its state is in the memory of this process, expected the call in each process"
    )


def _made(kind: type[Remade], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Remade:
    return kind(*args, **kwargs)
