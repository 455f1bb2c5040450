"""Daemon threads. One of them polls for changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, Protocol
from weakref import ref

from limitgate.internal_errors import logged_errors, raise_interruption
from limitgate.process.forking import reset_in_children

_made: dict[str, Any] = {}
"""Made by the first background thread: gevent and eventlet may replace threads after this import."""


def is_background() -> bool:
    """True in background threads. Finalizers and log handlers may interrupt them while they hold locks."""
    return bool(_made) and _made["marks"].is_background


def daemon(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread with an empty context, because green threads would copy the request's. Raises `RuntimeError`."""
    thread = threading.Thread(target=Context().run, args=[target, *args], name=f"limitgate-{name}", daemon=True)
    thread.start()
    return thread


def start(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a `daemon` that logs exceptions. Store calls raise `StoreError`."""
    try:
        return daemon(name, _run, target, *args)
    except RuntimeError as error:
        raise_interruption(error)
        raise


def _run(target: Callable[..., object], *args: Any) -> None:
    # A default of the class, because the search for a missing attribute is slow.
    _made.setdefault("marks", type("Marks", (threading.local,), {"is_background": False})()).is_background = True
    with logged_errors():
        target(*args)


class Pollable(Protocol):
    def poll(self) -> None: ...

    def forget(self) -> None:
        """Poll again as if everything had changed, because the last poll was interrupted."""


class Poller:
    def __init__(self, seconds: float, pollables: Sequence[Pollable], name: str = "reload") -> None:
        self.seconds = seconds
        self._pollables = pollables
        self._name = name
        self._is_looking = self._is_wanted = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        reset_in_children(self)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._ended.is_set()

    def start(self, *, in_children: bool = False, first: float | None = None) -> None:
        """Start the thread; with ``in_children``, only in forks. The thread keeps no reference to this object.

        The first poll comes after ``first`` seconds. Default: the time between polls.
        """
        self._is_wanted = True
        if in_children or self.is_running:
            return
        self._ended = threading.Event()
        with suppress(RuntimeError):  # The thread may fail to start.
            seconds = self.seconds if first is None else first
            self._thread = daemon(self._name, _keep_looking, ref(self), seconds, self._ended)

    def stop(self) -> None:
        self._is_wanted = False
        self._ended.set()

    def pause(self, seconds: float) -> bool:
        """Stop the thread, and wait up to ``seconds``. Return False without a thread."""
        thread = self._thread
        if thread is None or not self.is_running or thread is threading.current_thread():
            return False
        self.stop()
        thread.join(seconds)
        return True

    def poll(self) -> None:
        self._is_looking = True
        for each in self._pollables:
            with logged_errors():
                each.poll()
        self._is_looking = False

    def reset_after_fork(self) -> None:
        self._thread = None
        if self._is_looking:
            self._is_looking = False
            for each in self._pollables:
                each.forget()
        if self._is_wanted:
            self.start()


def _keep_looking(poller: ref[Poller], seconds: float, ended: threading.Event) -> None:
    while not ended.wait(seconds):
        here = poller()
        if here is None:
            return
        here.poll()
        seconds = here.seconds
        del here
