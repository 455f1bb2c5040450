"""Detects libraries that replace threads after LimitGate was imported."""

from __future__ import annotations

import threading

from limitgate.errors import ConfigError

_LOCK = threading.Lock
_PATCHES = {
    "gevent": "gevent.monkey.patch_all()",
    "eventlet": "eventlet.monkey_patch()",
}


def check_patches() -> None:
    """Raise `ConfigError` if threads were replaced, because a wait would block the process."""
    lock = threading.Lock
    if lock is _LOCK:
        return
    library = str(getattr(lock, "__module__", "")).partition(".")[0]
    if library in _PATCHES:
        raise ConfigError(
            f"store: {library} has replaced threads after limitgate was imported, so a waiting request would block the whole "
            f"process, expected {_PATCHES[library]} before anything else is imported (with gunicorn: no --preload)"
        )
