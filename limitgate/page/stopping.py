"""Detects that the server is stopping. Streams must then end, because the server waits for them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def is_stopping() -> bool:
    """True once uvicorn or gunicorn got a signal to stop.

    Servers inform applications only after all responses have ended. But their signal handler is a method of the object with
    the state. Other servers, and gunicorn's worker on uvloop, wait for the streams or time out.
    """
    return any(getattr(owner, "should_exit", False) is True or getattr(owner, "alive", True) is False for owner in _owners())


def _owners() -> Iterator[Any]:
    handlers: Any = None
    with suppress(RuntimeError):
        # Handlers set by ``add_signal_handler``.
        handlers = getattr(asyncio.get_running_loop(), "_signal_handlers", None)
    for number in (signal.SIGTERM, signal.SIGINT):
        yield getattr(signal.getsignal(number), "__self__", None)
        if handlers and number in handlers:
            yield getattr(getattr(handlers[number], "_callback", None), "__self__", None)
