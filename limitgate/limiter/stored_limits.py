"""Limits kept in the store: changed once, they hold within a second in every process that shares it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from limitgate.algorithms.register import MAX_BYTES
from limitgate.errors import ConfigError
from limitgate.forking import begin_anew_in_children
from limitgate.limits.limit import Limit, as_limit

FRESH = 0.5
"""Seconds for which limits are used without being read again."""


@dataclass(frozen=True)
class Configured:
    """The limits that `Limiter.configure` keeps under a name: ``limiter.hit("user:42", Configured("orders"))``."""

    name: str


class Configuration(NamedTuple):
    """Limits kept under a name."""

    limits: tuple[Limit, ...]
    per_process: bool = False
    """True if each process counts by itself."""


class Known:
    """Cache of the configurations that this process has read, by their keys in the store."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Configuration, float]] = {}
        self.begin_anew()
        begin_anew_in_children(self)

    def begin_anew(self) -> None:
        """Called in the child of a fork, which is a process of its own."""
        self.process = f"{os.getpid()}:{uuid4().hex}"
        """Name of this process, unlike any other's."""

    def fresh(self, key: str) -> Configuration | None:
        """Configuration of less than `FRESH` seconds, None if it has to be read again."""
        found, since = self._read.get(key, (None, 0.0))
        return found if time.monotonic() - since < FRESH else None

    def stale(self, key: str) -> Configuration | None:
        """Configuration that was read last, None if there is none."""
        return self._read[key][0] if key in self._read else None

    def note(self, key: str, found: Configuration | None) -> None:
        """Remember a configuration, or that there is none."""
        if found is None:
            self._read.pop(key, None)
        else:
            self._read[key] = found, time.monotonic()


def number_of(limits: Sequence[Limit | str], *, per_process: bool) -> int:
    """A configuration as a number. Raises `ConfigError` if it is too long to be kept."""
    given = [as_limit(limit).given for limit in limits]
    text = json.dumps({"limits": given, "per_process": per_process}, separators=(",", ":")).encode()
    if len(text) >= MAX_BYTES:
        raise ConfigError(f"{len(limits)} limits take {len(text)} bytes to keep, expected fewer than {MAX_BYTES}: fewer limits")
    return int.from_bytes(b"\1" + text, "big")


def configuration_of(number: int) -> Configuration | None:
    """The configuration that a number stands for, None if it is none: nothing is kept, or nothing of ours."""
    text = number.to_bytes((number.bit_length() + 7) // 8, "big")[1:]
    try:
        read = json.loads(text)
        return Configuration(tuple([as_limit(limit) for limit in read["limits"]]), bool(read["per_process"]))
    except (ValueError, KeyError, TypeError, ConfigError):
        return None
