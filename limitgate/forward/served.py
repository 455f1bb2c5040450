"""The application of ``limitgate serve``: a `ForwardGate` with metrics, the gRPC service, and a delay after SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from types import FrameType
from typing import Any

from limitgate.exchange.application import ASGIApp, Message, Receive, Send
from limitgate.forward.gate import ForwardGate
from limitgate.http.request import Scope

GRPC = "_LIMITGATE_GRPC"
"""``host:port`` of the gRPC service."""
METRICS = "/metrics"
DRAIN_S = 0.5


def application() -> ASGIApp:
    """Return a worker's application, with options from ``LIMITGATE_*``."""
    return Draining(Served(ForwardGate(), os.environ.get(GRPC)))


class Served:
    """``grpc`` is the address of the gRPC service, if any."""

    def __init__(self, gate: ForwardGate, grpc: str | None) -> None:
        self._gate = gate
        self._grpc = grpc
        self._metrics = _metrics() if gate.reports_to_prometheus else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == METRICS and self._metrics is not None:
            await self._metrics(scope, receive, send)
        elif scope["type"] == "lifespan" and self._grpc is not None:
            await self._live(self._grpc, scope, receive, send)
        else:
            await self._gate(scope, receive, send)

    async def _live(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        from limitgate.forward.rate_limit_service import GRACE_S, started  # noqa: PLC0415 - an extra

        server: Any = None

        async def sending(message: Message) -> None:
            nonlocal server
            if message["type"] == "lifespan.startup.complete":
                try:
                    server = await started(self._gate, address)
                except RuntimeError as error:
                    await send({"type": "lifespan.startup.failed", "message": f"gRPC cannot listen on {address}: {error}"})
                    return
            await send(message)

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and server is not None:
                await server.stop(GRACE_S)
            return message

        await self._gate(scope, receiving, sending)


def _metrics() -> ASGIApp:
    from prometheus_client import REGISTRY, CollectorRegistry  # noqa: PLC0415 - an extra

    from limitgate.prometheus import MultiProcessCollector, make_asgi_app  # noqa: PLC0415 - an extra

    registry = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return make_asgi_app(registry)


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
