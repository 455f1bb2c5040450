"""Limits kept in the store. Other processes apply a change within a second."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from limitgate.errors import ConfigError
from limitgate.limits.bucket import buckets_of
from limitgate.limits.limit import Limit, as_limit
from limitgate.process import switch
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

FRESH = 0.5
"""Seconds."""


@dataclass(frozen=True)
class Configured:
    """Limits that `Limiter.configure` stores under a name: ``limiter.hit("user:42", Configured("orders"))``."""

    name: str


class Configuration(NamedTuple):
    limits: tuple[Limit, ...]
    per_process: bool = False
    kinds: Sequence[str] = ()
    """Units of a budget's limits."""


class Known:
    def __init__(self) -> None:
        self._read: dict[str, tuple[Configuration, float]] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """A forked child gets a new process name."""
        self.process: str = f"{os.getpid()}:{uuid4().hex}"

    def fresh(self, key: str) -> Configuration | None:
        """Return a configuration younger than `FRESH` seconds."""
        configuration, since = self._read.get(key, (None, 0.0))
        return configuration if monotonic() - since < FRESH else None

    def stale(self, key: str) -> Configuration | None:
        return self._read[key][0] if key in self._read else None

    def note(self, key: str, configuration: Configuration | None) -> None:
        if switch.null_store is not None:
            return
        if configuration is None:
            self._read.pop(key, None)
        else:
            self._read[key] = configuration, monotonic()


def encode(limits: Sequence[Limit | str], *, per_process: bool, kinds: Sequence[str] = ()) -> str:
    """Raises `ConfigError` for an invalid limit, or one of slots."""
    if any(each.has_slots for each in buckets_of(tuple(map(as_limit, limits)))):
        raise ConfigError("limits 'at once' cannot be stored under a name, expected limits with a period")
    text = {"limits": [as_limit(limit).given for limit in limits], "per_process": per_process}
    return json.dumps({**text, "kinds": kinds} if kinds else text, separators=(",", ":"))


def decode(text: str) -> Configuration | None:
    try:
        read = json.loads(text)
        limits = tuple([as_limit(limit) for limit in read["limits"]])
        buckets_of(limits)
        return Configuration(limits, bool(read["per_process"]), read.get("kinds", ())) if limits else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
