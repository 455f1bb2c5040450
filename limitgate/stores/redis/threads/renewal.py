"""Replaces sync connections before their logins expire."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol
from weakref import ref

from redis.exceptions import RedisError

from limitgate.process.clock import monotonic
from limitgate.stores.redis.dial.credentials import Login

LOOK_EVERY = 1.0
"""Seconds between two checks for closed connections."""


class Renewing(Protocol):
    """A connection pool."""

    def closed_since(self, closings: int) -> bool:
        """True if the pool was closed after ``closings`` closings."""

    def renew(self, closings: int) -> Login | None:
        """Replace the connections and return the new login, if it expires. Raises the error of connecting."""


def keep_renewing(pool: ref[Renewing], login: Login | None, closings: int) -> None:
    """Replace connections in time while the pool is open."""
    retry_at = 0.0
    while login is not None:
        left = max(login.renew_at, retry_at) - monotonic()
        time.sleep(min(max(left, 0.0), LOOK_EVERY))
        renewing = pool()
        if renewing is None or renewing.closed_since(closings):
            return
        if left <= LOOK_EVERY:
            retry_at = monotonic() + login.retry_every
            with suppress(OSError, RedisError):
                login = renewing.renew(closings)
                retry_at = 0.0
        del renewing
