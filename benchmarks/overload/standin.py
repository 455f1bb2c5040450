"""The limit and the guard around an application, without anything else."""

from __future__ import annotations

import asyncio
import math
import random
import time
from fractions import Fraction
from typing import Any

from limitgate.overload.adaptive_limit import AdaptiveLimit, Ticket
from limitgate.overload.lag_guard import LagGuard
from limitgate.overload.options import Adaptive


class Limited:
    """An ASGI application under a limit: ``adaptive``, ``priorities`` or a number of requests at once."""

    def __init__(self, app: Any, limit: str, reserve: Fraction | None = None) -> None:
        self.app = app
        options = Adaptive(min=int(limit), max=int(limit)) if limit.isdigit() else Adaptive()
        self.limit = AdaptiveLimit(options, wall_offset=lambda: time.time() - time.monotonic(), reserve=reserve)
        self.guard = LagGuard()
        self.is_guarded = not limit.isdigit()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        now = time.monotonic()
        if self.is_guarded and self.guard.due_at == math.inf:
            asyncio.get_running_loop().call_later(self.guard.start(now) - now, self._beat)
        ticket = self.limit.begin(now, "", scope["path"][1:], self.guard if self.is_guarded else None)
        if not isinstance(ticket, Ticket):
            after = b"%d" % self.limit.retry_after_s(random.random)
            fields = [(b"retry-after", after), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 503, "headers": fields})
            await send({"type": "http.response.body", "body": b""})
            return
        scope["limit"] = self.limit.limit
        try:
            await self.app(scope, receive, send)
        finally:
            self.limit.done(ticket, time.monotonic())

    def _beat(self) -> None:
        now = time.monotonic()
        due_at = self.guard.beat(now)
        if due_at is not None:
            asyncio.get_running_loop().call_later(max(0.0, due_at - now), self._beat)
