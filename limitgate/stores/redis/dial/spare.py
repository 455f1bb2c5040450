"""A file descriptor kept for the moment in which there is no other, so that a crowd of idle clients cannot keep Redis away."""

from __future__ import annotations

import os
from contextlib import suppress


class Spare:
    """A file descriptor that is given up where a connection cannot be made for want of one. Safe for threads."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        """One, or none; more where threads fill it at the same time. A list: no two threads ever take the same from it."""

    def fill(self) -> None:
        """Keep a descriptor, unless there is one or none is to be had."""
        if not self._descriptors:
            with suppress(OSError):
                self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> bool:
        """Give the descriptor up. False if there is none."""
        try:
            os.close(self._descriptors.pop())
        except IndexError:
            return False
        return True


SPARE = Spare()
"""The one of this process, kept from when the first Redis store is made."""
