"""A cache whose hit rate falls gradually where there are more keys than fit, in whatever order they come."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from random import random
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST = 1024
"""Values that are remembered. During a full garbage collection, which looks at all their objects, the process stands still."""
_ADMITTED = 8
"""Of so many new values one is remembered once there is no room."""


class Remembered(Generic[K, V]):
    """Values by key, of which `MOST` are remembered.

    If it is full, few new values replace others, chosen at random. With the oldest or least recently used one replaced by each
    new value, keys that come in turn would all miss as soon as there is one too many, and each miss would leave garbage of an
    age that only a full collection finds, during which the process stands still.
    """

    __slots__ = ("_keys", "values")

    def __init__(self) -> None:
        self.values: Final[dict[K, V]] = {}
        """For look-ups. Values are added by `add` only."""
        self._keys: list[K] = []

    def add(self, key: K, value: V) -> None:
        """Remember a value, unless there is no room and it is not its turn."""
        if len(self._keys) < MOST:
            self._keys.append(key)
        else:
            place = int(random() * MOST * _ADMITTED)  # noqa: S311 - it guards nothing
            if place >= MOST:
                return
            self.values.pop(self._keys[place], None)
            self._keys[place] = key
        self.values[key] = value
        if len(self.values) > MOST:  # threads have taken the same place
            with suppress(RuntimeError):
                self.values.pop(next(iter(self.values)), None)
