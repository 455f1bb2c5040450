"""The asyncio event loop, for async code that waits."""

from __future__ import annotations

import asyncio

from limitgate.errors import ConfigError


def asyncio_loop(what: str) -> asyncio.AbstractEventLoop:
    """Return the running asyncio event loop. Raises a `ConfigError` naming ``what`` if there is none, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    raise ConfigError(
        f"{what} needs asyncio, and no event loop of asyncio runs here, as under trio: expected asyncio, "
        "such as hypercorn --worker-class asyncio or anyio's backend 'asyncio'"
    )
