"""The application of ``limitgate serve``: a `ForwardGate` with metrics and the gRPC service."""

from __future__ import annotations

import os
from typing import Any

from limitgate.exchange.application import ASGIApp, Message, Receive, Send
from limitgate.forward.draining import Draining
from limitgate.forward.gate import ForwardGate
from limitgate.http.request import Scope

GRPC = "_LIMITGATE_GRPC"
"""``host:port`` of the gRPC service."""
METRICS = "/metrics"


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
