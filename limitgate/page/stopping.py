"""Detects that the server is stopping. Streams end then, because servers wait for them."""

from __future__ import annotations

import signal


def is_stopping() -> bool:
    """True once uvicorn, also as a worker of gunicorn, has received a signal to stop.

    Servers don't tell applications before all responses are over. Uvicorn handles signals by a method of its server, which
    sets ``should_exit``.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        server = getattr(signal.getsignal(number), "__self__", None)
        if getattr(server, "should_exit", False):
            return True
    return False
