"""The event loop that async code of LimitGate needs where it waits: one of asyncio."""

from __future__ import annotations

import asyncio

from limitgate.errors import ConfigError


def asyncio_loop(what: str) -> asyncio.AbstractEventLoop:
    """Return the running event loop. Raises `ConfigError` that names ``what`` needs it if there is none, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    raise ConfigError(
        f"{what} needs asyncio, and no event loop of asyncio runs here, as under trio: expected asyncio, "
        "such as hypercorn --worker-class asyncio or anyio's backend 'asyncio'"
    )
