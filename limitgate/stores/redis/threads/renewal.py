"""Replaces sync connections before their logins expire."""

from __future__ import annotations

import math
from contextlib import suppress
from threading import Event
from typing import NamedTuple, Protocol
from weakref import ref

from redis.exceptions import RedisError

from limitgate.internal_errors import logged_errors
from limitgate.process.clock import monotonic

LOOK_EVERY = 1.0
"""Seconds between two checks for closed connections."""


class Renewal(NamedTuple):
    """When to replace all connections: before the first of their logins expires."""

    due_at: float
    """A time of `time.monotonic`."""
    retry_every: float
    """Seconds between two attempts."""


class Renewing(Protocol):
    """A connection pool."""

    def next_renewal(self, closings: int) -> Renewal | None:
        """Return None if no login expires, or if the pool was closed after ``closings`` closings."""

    def renew(self, closings: int) -> None:
        """Replace the connections. Raises the error of connecting."""


def keep_renewing(pool: ref[Renewing], logins_changed: Event, closings: int) -> None:
    """Replace connections in time while the pool is open and has logins that expire."""
    failed_at = -math.inf
    while (renewing := pool()) is not None and (renewal := renewing.next_renewal(closings)) is not None:
        left = max(renewal.due_at, failed_at + renewal.retry_every) - monotonic()
        if left <= 0:
            failed_at = monotonic()
            with logged_errors(), suppress(OSError, RedisError):
                renewing.renew(closings)
                failed_at = -math.inf
        del renewing
        if left > 0:
            logins_changed.wait(min(left, LOOK_EVERY))
            logins_changed.clear()
