"""What an application does to its own process while it is told to: the names in ``OVERLOAD_TROUBLE``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from unittest import mock

KIND, _, AMOUNT = os.environ.get("OVERLOAD_TROUBLE", "").partition(":")
"""``stall:0.02/0.1`` keeps the event loop for 20 ms of each 0.1 s, ``busy:16`` has 16 threads that count,
``threads`` starts no thread. From the start, ``block:0.15`` keeps the process for 0.15 s at each ``/block``, and
``files:256`` opens no more files than that."""
BLOCK = float(AMOUNT) if KIND == "block" else 0.0
"""Seconds for which ``/block`` keeps whoever calls it."""


@contextlib.contextmanager
def _stalling() -> Iterator[None]:
    """Keep the event loop, again and again."""
    for_seconds, every = map(float, AMOUNT.split("/"))
    loop, over = asyncio.get_running_loop(), threading.Event()

    def stall() -> None:
        time.sleep(for_seconds)
        if not over.is_set():
            loop.call_later(every - for_seconds, stall)

    loop.call_soon(stall)
    yield
    over.set()


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Have threads that never wait."""
    over = threading.Event()

    def count() -> None:
        number = 0
        while number % 1000 or not over.is_set():
            number += 1

    for _ in range(int(AMOUNT)):
        threading.Thread(target=count, daemon=True).start()
    yield
    over.set()


@contextlib.contextmanager
def _no_threads() -> Iterator[None]:
    """Have the system refuse to start threads."""
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        yield


_KINDS = {"stall": _stalling, "busy": _busy, "threads": _no_threads}
_going_on = contextlib.ExitStack()


def told(word: str) -> None:
    """Begin, or end."""
    if word == "on":
        _going_on.enter_context(_KINDS[KIND]())
    else:
        _going_on.close()


def begin() -> None:
    """What holds from the start."""
    if KIND == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(AMOUNT), int(AMOUNT)))
