"""Threads of the stores' own, which keep connections, slots and leases in order. None keeps a process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

from limitgate.internal_errors import logged_errors, raise_interruption


class _ThreadState(threading.local):
    is_background = False


this_thread = _ThreadState()
"""Of the running thread: a finalizer or a log handler that runs in one of ours may have interrupted it anywhere, locks held."""


def start(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a thread that no exception ends without a report. Raises `RuntimeError` where none can be started now.

    Its context is empty, because green threads would copy that of the request.
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
