"""Replaces asyncio connections before their logins expire."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Protocol
from weakref import ref

from limitgate.process.clock import monotonic
from limitgate.stores.redis.aio.connection import AsyncConnection
from limitgate.stores.redis.dial.credentials import Login


class Renewing(Protocol):
    """User of a connection."""

    def renew(self, connection: AsyncConnection) -> bool:
        """Start to replace a connection. Return False if it is no longer in use."""


def renew_in_time(owner: Renewing, connection: AsyncConnection, login: Login) -> None:
    """Replace a connection before its login expires, with retries."""
    due_in = max(login.renew_at - monotonic(), 0.0)
    loop = asyncio.get_running_loop()
    loop.call_later(due_in, _renew, ref(owner), ref(connection), login.retry_every, context=Context())


def _renew(owner: ref[Renewing], connection: ref[AsyncConnection], retry_every: float) -> None:
    here, expiring = owner(), connection()
    if here is not None and expiring is not None and here.renew(expiring):
        asyncio.get_running_loop().call_later(retry_every, _renew, owner, connection, retry_every, context=Context())
