"""What an ASGI server has to say while a request waits for its turn: kept in order for the application, and never lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]

MOST = 4
"""Messages that are kept; from then on nobody listens but the application. Servers cut bodies into parts of some 64 KiB."""
_ENDS = frozenset({"http.disconnect", "websocket.disconnect"})


class ReceiveBuffer:
    """Stands before a server's ``receive``. A call of that which is under way is never cancelled but handed on."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._coming: asyncio.Future[Message] | None = None

    async def receive(self) -> Message:
        """The next message: first those that were kept."""
        while not self._kept:
            coming = self._coming
            if coming is None:
                return await self._receive()
            await asyncio.wait([coming])  # the application may be cancelled, and ask again
            if self._coming is coming:
                self._coming = None
                return coming.result()
        return self._kept.popleft()

    async def stays_until(self, moment: asyncio.Future[Any]) -> bool:
        """Listen until something has come. False if the client left before."""
        while not moment.done() and len(self._kept) < MOST:
            if self._coming is None:
                self._coming = asyncio.ensure_future(self._receive())
            coming = self._coming
            await asyncio.wait([moment, coming], return_when=asyncio.FIRST_COMPLETED)
            if coming.done() and self._coming is coming:
                if coming.cancelled() or coming.exception() is not None:
                    break  # that is for the application to see, if it asks
                self._coming = None
                self._kept.append(coming.result())
                if self._kept[-1]["type"] in _ENDS:
                    return moment.done()
        await asyncio.wait([moment])
        return True

    def close(self) -> None:
        """Nobody wants to hear any more."""
        if self._coming is not None and not self._coming.get_loop().is_closed():
            self._coming.cancel()
