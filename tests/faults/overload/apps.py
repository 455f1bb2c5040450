"""What is attacked: the same small application, limited through each door. ``OVERLOAD_DOOR`` names it.

``/login`` may be asked five times an hour, everything twenty times a second, by one address. Free are ``/block``,
which keeps the process for a while, and ``/state`` and ``/trouble/...``, which are for the tests. Options of the gate come
from ``LIMITGATE_*``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from limitgate import Rule, open_store, open_sync_store
from tests.faults.overload import trouble

LOGIN, ALL = "5/hour", "20/second"
BURST, PER_SECOND = 5, 5 / 3600
"""Those of ``LOGIN``."""
OF_ALL = Rule("all", ALL, key=["ip"])
OF_LOGIN = Rule("login", LOGIN, path="/login", key=["ip"])
FREE = [Rule(name, path=f"/{name}/**", exempt=True) for name in ("state", "trouble", "block")]
DOOR = os.environ.get("OVERLOAD_DOOR", "gate")
STORE = os.environ.get("LIMITGATE_STORE", "memory://")


def log_to_stderr() -> None:
    """Name who says what, so that our lines can be counted."""
    logging.basicConfig(format="%(levelname)s by %(name)s: %(message)s", level=logging.INFO)


def answer(path: str, decision: Any, store: Any) -> bytes:
    """The body of the application's answer."""
    if path == "/state":
        return json.dumps({"healthy": store.healthy, "outages": store.outages, "failures": store.failures}).encode()
    if path.startswith("/trouble/"):
        trouble.told(path.removeprefix("/trouble/"))
    if path == "/block":
        time.sleep(trouble.BLOCK)
    return json.dumps({"degraded": getattr(decision, "degraded", False)}).encode()


def asgi_store() -> Any:
    """The store of this process, on asyncio."""
    return open_store(STORE)


def wsgi_store() -> Any:
    """The store of this process, under threads."""
    return open_sync_store(STORE)
