"""Messages of an ASGI server while a request waits for its turn: kept in order for the application, and never lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]

MOST = 4
"""Messages that are kept; from then on nobody listens but the application. Servers cut bodies into parts of some 64 KiB."""
ENDS = frozenset({"http.disconnect", "websocket.disconnect"})
"""Messages that say that the client has left."""


class ReceiveBuffer:
    """Stands before a server's ``receive``. A call of that which is under way is never cancelled but handed on."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._pending: asyncio.Future[Message] | None = None

    async def receive(self) -> Message:
        """The next message: first those that were kept."""
        while not self._kept:
            pending = self._pending
            if pending is None:
                return await self._receive()
            await asyncio.wait([pending])  # the application may be cancelled, and ask again
            if self._pending is pending:
                self._pending = None
                return pending.result()
        return self._kept.popleft()

    async def stays_until(self, moment: asyncio.Future[Any]) -> bool:
        """Listen until a moment has come. False if the client left before."""
        while not moment.done() and len(self._kept) < MOST:
            if self._pending is None:
                self._pending = asyncio.ensure_future(self._receive())
            pending = self._pending
            await asyncio.wait([moment, pending], return_when=asyncio.FIRST_COMPLETED)
            if pending.done() and self._pending is pending:
                if pending.cancelled() or pending.exception() is not None:
                    break  # that is for the application to see, if it asks
                self._pending = None
                self._kept.append(pending.result())
                if self._kept[-1]["type"] in ENDS:
                    return moment.done()
        await asyncio.wait([moment])
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._pending is not None and not self._pending.get_loop().is_closed():
            self._pending.cancel()
