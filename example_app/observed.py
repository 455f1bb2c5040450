"""The example on ASGI with metrics at /metrics/: ``uvicorn example_app.observed:app``; deploy/ starts it beside Prometheus."""

from __future__ import annotations

import os

from prometheus_client import REGISTRY, CollectorRegistry
from starlette.applications import Starlette

from example_app.main import create_app as create_example
from limitgate.prometheus import MultiProcessCollector, make_asgi_app


def registry() -> CollectorRegistry:
    """What /metrics/ serves: with several workers, which share a folder, the figures of all of them."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    shared = CollectorRegistry()
    MultiProcessCollector(shared)
    return shared


def create_app() -> Starlette:
    """The example, observed. No rule of config/ is for /metrics/, so scrapes are not limited."""
    app = create_example(observers=["prometheus"])
    app.mount("/metrics", make_asgi_app(registry()))
    return app


app = create_app()
