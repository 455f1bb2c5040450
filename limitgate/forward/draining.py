"""The time between SIGTERM and the end of ``limitgate serve``."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType

from limitgate.exchange.application import ASGIApp, Message, Receive, Send
from limitgate.http.request import Scope

DRAIN_S = 0.5


class Draining:
    """Delays the server's handler of SIGTERM by `DRAIN_S`, in which every answer closes its connection.

    Otherwise the server closes idle connections at once, and loses the subrequests that are about to arrive on them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._put_off()
        await self._app(scope, receive, _closing(send) if self._is_ending else send)

    def _put_off(self) -> None:
        loop, ends = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
        if not callable(ends):
            return

        def drain(number: int, frame: FrameType | None) -> None:
            if self._is_ending:
                ends(number, frame)
            else:
                self._is_ending = True
                loop.call_soon_threadsafe(loop.call_later, DRAIN_S, ends, number, None)

        signal.signal(signal.SIGTERM, drain)


def _closing(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sending
