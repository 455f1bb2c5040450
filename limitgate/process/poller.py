"""A thread that looks every so often whether something has changed, and keeps no process alive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from threading import Event, Thread
from typing import Protocol
from weakref import ref

from limitgate.internal_errors import logged_errors
from limitgate.process.forking import reset_in_children


class Pollable(Protocol):
    """Something that may change."""

    def poll(self) -> None:
        """Look whether it has changed, and do what there is to be done then."""

    def forget(self) -> None:
        """Take whatever is there for changed: the last look has not come to its end."""


class Poller:
    """A thread that looks every so many seconds, as long as this object lives; in each process that is forked, another one.

    It keeps no process alive.
    """

    def __init__(self, seconds: float, pollables: Sequence[Pollable]) -> None:
        self._seconds = seconds
        self._pollables = pollables
        self._is_looking = self._is_wanted = False
        self._ended = Event()
        self._thread: Thread | None = None
        reset_in_children(self)

    @property
    def is_running(self) -> bool:
        """True if the thread looks, and goes on."""
        return self._thread is not None and self._thread.is_alive() and not self._ended.is_set()

    def start(self, *, in_children: bool = False) -> None:
        """Begin to look, unless it does already; or ``in_children``: in each process that is forked from this one, not here."""
        self._is_wanted = True
        if in_children or self.is_running:
            return
        self._ended = Event()
        with suppress(RuntimeError):  # no thread can be started now
            thread = Thread(
                target=Context().run,
                args=(_keep_looking, ref(self), self._seconds, self._ended),
                name="limitgate-reload",
                daemon=True,
            )
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Look no more until it is started again."""
        self._is_wanted = False
        self._ended.set()

    def poll(self) -> None:
        """Look once."""
        self._is_looking = True
        for each in self._pollables:
            with logged_errors():
                each.poll()
        self._is_looking = False

    def reset_after_fork(self) -> None:
        """Look in the child of a fork, too; what the parent was reading when it forked has to be read here."""
        self._thread = None
        if self._is_looking:
            self._is_looking = False
            for each in self._pollables:
                each.forget()
        if self._is_wanted:
            self.start()


def _keep_looking(poller: ref[Poller], seconds: float, ended: Event) -> None:
    while not ended.wait(seconds):
        here = poller()
        if here is None:
            return
        here.poll()
        del here
