"""A file descriptor kept for the moment in which there is no other, so that a crowd of idle clients cannot keep Redis away."""

from __future__ import annotations

import os
from typing import TypeVar

from limitgate.forks import begin_anew_in_children

T = TypeVar("T")


class Spare:
    """A file descriptor that is given up where a connection cannot be made for want of one."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.fill()
        begin_anew_in_children(self)

    def begin_anew(self) -> None:
        """In the child of a fork: the child has a copy, which is as good."""

    def fill(self) -> None:
        """Keep a descriptor, unless there is one or none is to be had."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return

    def release(self) -> bool:
        """Give the descriptor up. False if there is none."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None
