"""Daemon threads that maintain connections, slot maps and leases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

from limitgate.internal_errors import logged_errors, raise_interruption


class _ThreadState(threading.local):
    is_background = False


this_thread = _ThreadState()
"""True in a background thread, which a finalizer or log handler may interrupt with locks held."""


def start(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread that logs its exceptions. Raises `RuntimeError` if no thread can be started.

    Its context is empty, because green threads copy the context of the request.
    """
    thread = threading.Thread(target=Context().run, args=[_run, target, *args], name=f"limitgate-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise_interruption(error)
        raise
    return thread


def _run(target: Callable[..., object], *args: Any) -> None:
    this_thread.is_background = True
    with logged_errors():
        target(*args)
