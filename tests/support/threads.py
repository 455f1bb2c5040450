"""Threads that a test has started: earlier ones in the same process may have left some behind."""

from __future__ import annotations

import threading


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
