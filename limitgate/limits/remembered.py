"""A cache whose hit rate degrades gradually if there are too many keys."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from random import random
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST = 1024
"""The process pauses while a full garbage collection visits all objects."""
_ADMITTED = 8
"""A full cache adds one of this many new values."""


class Remembered(Generic[K, V]):
    """A cache of at most `MOST` values.

    A full cache adds few new values and evicts at random. With LRU or FIFO, keys that come in turn would all miss as soon as
    one key is too many, and each miss would leave garbage for full collections.
    """

    __slots__ = ("_keys", "values")

    def __init__(self) -> None:
        self.values: Final[dict[K, V]] = {}
        """For lookups only."""
        self._keys: list[K] = []

    def add(self, key: K, value: V) -> None:
        """Add a value. A full cache ignores most new values."""
        if len(self._keys) < MOST:
            self._keys.append(key)
        else:
            place = int(random() * MOST * _ADMITTED)  # noqa: S311 - no cryptographic use
            if place >= MOST:
                return
            self.values.pop(self._keys[place], None)
            self._keys[place] = key
        self.values[key] = value
        if len(self.values) > MOST:
            with suppress(RuntimeError):
                self.values.pop(next(iter(self.values)), None)
