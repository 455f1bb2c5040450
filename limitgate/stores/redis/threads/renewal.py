"""Connections of threads whose logins expire: a thread replaces them while they still serve."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol
from weakref import ref

from redis.exceptions import RedisError

from limitgate.process.clock import monotonic
from limitgate.stores.redis.dial.credentials import Login

LOOK_EVERY = 1.0
"""Seconds between two looks whether the connections are still used: the thread ends soon after they are closed."""


class Renewing(Protocol):
    """Keeps connections."""

    def closed_since(self, closings: int) -> bool:
        """True if the connections were closed since they had been closed so often."""

    def renew(self, closings: int) -> Login | None:
        """Replace the connections, and return the login of the new one, None if it does not expire.

        Raises whatever keeps it from connecting.
        """


def keep_renewing(pool: ref[Renewing], login: Login | None, closings: int) -> None:
    """Replace connections in time, for as long as they are used. The failure of an attempt was told."""
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
