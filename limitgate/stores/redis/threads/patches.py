"""Libraries that replace the standard library's threads: LimitGate has to be imported after them."""

from __future__ import annotations

import threading

from limitgate.errors import ConfigError

_LOCK = threading.Lock
"""Type of the locks here."""
_PATCHES = {
    "gevent": "gevent.monkey.patch_all()",
    "eventlet": "eventlet.monkey_patch()",
}


def check_patches() -> None:
    """Raise `ConfigError` if threads were replaced after LimitGate was imported: a wait would stop the whole process."""
    lock = threading.Lock
    if lock is _LOCK:
        return
    library = str(getattr(lock, "__module__", "")).partition(".")[0]
    if library in _PATCHES:
        raise ConfigError(
            f"store: {library} has replaced threads after limitgate was imported, so a request that waits would stop the whole "
            f"process, expected {_PATCHES[library]} before anything else is imported (with gunicorn: no --preload)"
        )
