"""Limits kept in the store: changed once, they hold within a second in every process that shares it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from limitgate.limits.bucket import buckets_of
from limitgate.limits.limit import Limit, as_limit
from limitgate.process import switch
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

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
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Called in the child of a fork, which is a process of its own."""
        self.process = f"{os.getpid()}:{uuid4().hex}"
        """Name of this process, unlike any other's."""

    def fresh(self, key: str) -> Configuration | None:
        """Configuration read less than `FRESH` seconds ago, None if it has to be read again."""
        configuration, since = self._read.get(key, (None, 0.0))
        return configuration if monotonic() - since < FRESH else None

    def stale(self, key: str) -> Configuration | None:
        """Configuration that was read last, None if there is none."""
        return self._read[key][0] if key in self._read else None

    def note(self, key: str, configuration: Configuration | None) -> None:
        """Remember a configuration, or that there is none."""
        if switch.null_store is not None:
            return
        if configuration is None:
            self._read.pop(key, None)
        else:
            self._read[key] = configuration, monotonic()


def encode(limits: Sequence[Limit | str], *, per_process: bool) -> str:
    """A configuration as the text that the store keeps. Raises `ConfigError` for text that is no limit."""
    given = [as_limit(limit).given for limit in limits]
    return json.dumps({"limits": given, "per_process": per_process}, separators=(",", ":"))


def decode(text: str) -> Configuration | None:
    """The configuration in a text of the store; None if it is none."""
    try:
        read = json.loads(text)
        limits = tuple([as_limit(limit) for limit in read["limits"]])
        buckets_of(limits)
        return Configuration(limits, bool(read["per_process"])) if limits else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
