"""Threads of a test: those that it has started, as earlier ones may have left some behind, and some that repeat an action."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Began:
    """Threads that began after this was made."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def running(self) -> list[threading.Thread]:
        """Those that run."""
        return [thread for thread in threading.enumerate() if thread not in self._before]

    def names(self) -> list[str]:
        """Names of those that run."""
        return [thread.name for thread in self.running()]


@contextmanager
def repeated(action: Callable[[], object]) -> Iterator[None]:
    """Do something over and over in three threads meanwhile. Fails where it has failed in any."""
    failed: list[BaseException] = []
    done = threading.Event()

    def repeat() -> None:
        try:
            while not done.is_set():
                action()
        except BaseException as error:  # noqa: BLE001 - for the test to tell
            failed.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not failed
