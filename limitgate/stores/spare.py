"""A file descriptor kept for the moment in which there is no other, so that a crowd of idle clients cannot keep Redis away."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Lock

from limitgate.forks import begin_anew_in_children


class Spare:
    """A file descriptor that is given up where a connection cannot be made for want of one. Safe for threads."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.begin_anew()
        begin_anew_in_children(self)

    def begin_anew(self) -> None:
        """In the child of a fork: nobody there will release a lock. It has a copy of the descriptor, which is as good."""
        self._lock = Lock()

    def fill(self) -> None:
        """Keep a descriptor, unless there is one or none is to be had."""
        with self._lock, suppress(OSError):
            if self._descriptor is None:
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> bool:
        """Give the descriptor up. False if there is none."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None


SPARE = Spare()
"""The one of this process, kept from when the first Redis store is made."""
