"""What the faults are tried on: small applications behind both doors, all policies side by side, that tell how they stand.

``uvicorn tests.faults.app:app`` serves the one, ``python -m tests.faults.app`` the other, with a thread for each connection.
The store comes from ``LIMITGATE_STORE``. Every answer says what was decided; ``/state`` what the process holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

from limitgate import LimitGate, LimitGateWSGI, Rule

warnings.simplefilter("always", ResourceWarning)
"""Those end up in the log, which `tests.faults.stages.served` looks through."""

PER_SECOND, BURST = 4, 6
"""The limit of each path, below what the traffic asks for. One of them goes by two buckets."""
EXACTLY = 30
"""Requests that pass ``/exact`` with a fresh key: a limit per day, so that a few seconds more or less do not matter."""
SURELY = 5.0
"""Seconds that ``/exact`` waits for Redis, so that a slow machine is not taken for a store that failed."""

LIMIT = f"{PER_SECOND}/second burst {BURST}"
WHO = ["header:x-who"]
RULES = [
    Rule("open", LIMIT, path="/open", key=WHO, on_error="open"),
    Rule("closed", LIMIT, path="/closed", key=WHO, on_error="closed"),
    Rule("local", LIMIT, path="/local", key=WHO, on_error="local"),
    Rule("default", LIMIT, path="/default", key=WHO),
    Rule("one", LIMIT, path="/both", key=WHO, on_error="open"),
    Rule("other", LIMIT, path="/both", key=WHO, on_error="open"),
]
EXACT = {"rules": [Rule("exact", f"{EXACTLY}/day", path="/exact", key=WHO)], "on_error": "closed", "timeout": SURELY}


def _answer(path: str, decision: Any) -> tuple[int, bytes]:
    """Status and body of what an application says, whether it was let through or asked to refuse."""
    if path == "/state":
        return 200, json.dumps(_state()).encode()
    if decision is None:
        return 200, b"{}"
    said = {"allowed": decision.allowed, "degraded": decision.degraded, "remaining": decision.remaining}
    return 200 if decision.allowed else 429, json.dumps(said).encode()


def _state() -> dict[str, int]:
    """What this process holds."""
    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs here
        tasks = 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "pid": os.getpid(),
        "tasks": tasks,
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names are enough
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


# --- ASGI -------------------------------------------------------------------------------------------------------------


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    """The application; ``on_denied``, too."""
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    status, body = _answer(scope["path"], scope["limitgate"])
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Any, send: Any) -> None:
    """Start and stop when told to."""
    for word in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{word}.complete"})


_gate = LimitGate(_hello, rules=RULES, on_denied=_hello)
_exact = LimitGate(_hello, store=_gate.gate.store, on_denied=_hello, **EXACT)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Two gates on one store; they differ in what they limit, and how long they wait."""
    door = _exact if scope.get("path") == "/exact" else _gate
    await door(scope, receive, send)


# --- WSGI -------------------------------------------------------------------------------------------------------------


def _hello_wsgi(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """The application; ``on_denied``, too."""
    status, body = _answer(environ["PATH_INFO"], environ["limitgate"])
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    start_response(f"{status} As Told", headers)
    return [body]


class _Quiet(WSGIRequestHandler):
    """Says nothing, keeps connections, and sends what it has without waiting for more."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log(self, *_: object) -> None:
        """Say nothing."""


def serve_wsgi() -> None:
    """Serve the WSGI twin until the process is told to end, then close what it holds."""
    gate = LimitGateWSGI(_hello_wsgi, rules=RULES, on_denied=_hello_wsgi)
    exact = LimitGateWSGI(_hello_wsgi, store=gate.gate.store, on_denied=_hello_wsgi, **EXACT)

    def twin(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        door = exact if environ["PATH_INFO"] == "/exact" else gate
        return door(environ, start_response)

    server = make_server("127.0.0.1", 0, twin, threaded=True, request_handler=_Quiet)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    os.write(1, f"http://127.0.0.1:{server.server_port}\n".encode())
    server.serve_forever()
    server.server_close()
    gate.gate.store.close()


if __name__ == "__main__":
    serve_wsgi()
