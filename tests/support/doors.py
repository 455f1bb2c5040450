"""Ways into an application: called in process with every word of the protocol at hand, or served on a port of its own.

ASGI and WSGI alike answer with a `Reply`. A path is written as on the request line, percent-encoded, with its query.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import unquote, unquote_to_bytes
from wsgiref.validate import validator

import httpx
import uvicorn
from werkzeug.serving import WSGIRequestHandler, make_server

from limitgate import LimitGate, LimitGateWSGI
from tests.support import forks, ticks  # noqa: F401 - the latter acts when imported
from tests.support.guard import Guard

PEER = "192.0.2.1"
PATIENCE = 60.0
"""Seconds after which a test that still waits has failed."""
PROCESS_PATIENCE = 120.0
"""The same where a process is to start or to end: on a busy machine imports alone take 20 seconds."""
MOMENT = 0.02
"""Seconds between two looks at whether something has happened."""

PLAIN = ["--loop", "asyncio", "--http", "h11"]
"""What every uvicorn has."""
if "timeout_worker_healthcheck" in signature(uvicorn.Config).parameters:  # since 0.37
    # A worker that is slow to answer on a busy machine is not replaced by another.
    PLAIN += ["--timeout-worker-healthcheck", str(int(PROCESS_PATIENCE))]

Lines = Mapping[str, str] | Sequence[tuple[str, str]]


class Reply(NamedTuple):
    """A response, whichever door it came out of."""

    status: int
    headers: httpx.Headers
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def wait(self) -> int:
        """``Retry-After``, which has to be whole seconds in digits."""
        assert re.fullmatch("[0-9]+", self.headers["retry-after"])
        return int(self.headers["retry-after"])

    @property
    def rate(self) -> dict[str, str]:
        """The rate fields, each of which may stand there once."""
        found = [(name, value) for name, value in self.headers.multi_items() if "ratelimit" in name]
        assert len(found) == len(dict(found))
        return dict(found)


# --- ASGI, in process -------------------------------------------------------------------------------------------------


def http_scope(
    path: str = "/", method: str = "GET", headers: Lines = (), peer: str | None = PEER, **more: Any
) -> dict[str, Any]:
    """An ASGI ``http`` scope as uvicorn makes it."""
    target, _, query = path.partition("?")
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in _pairs(headers)]
    if all(name != b"host" for name, _ in lines):
        lines.insert(0, (b"host", b"testserver"))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(target),
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": lines,
        "client": None if peer is None else (peer, 50000),
        "server": ("testserver", 80),
        **more,
    }


def websocket_scope(path: str = "/", headers: Lines = (), peer: str | None = PEER, **more: Any) -> dict[str, Any]:
    """An ASGI ``websocket`` scope; as ``extensions`` give ``{"websocket.http.response": {}}`` for the denial extension."""
    scope = http_scope(path, headers=headers, peer=peer, subprotocols=[], **more)
    del scope["method"]
    return {**scope, "type": "websocket", "scheme": "ws"}


class Wire:
    """The server's side of one ASGI call: hands out messages, then stays silent; keeps what is sent."""

    def __init__(self, *incoming: dict[str, Any]) -> None:
        self.incoming = deque(incoming)
        self.received = 0
        self.sent: list[dict[str, Any]] = []
        self._grown = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        self.received += 1
        if not self.incoming:
            await asyncio.get_running_loop().create_future()
        return self.incoming.popleft()

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self._grown.set()

    async def until_sent(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.sent) < count:
                self._grown.clear()
                await self._grown.wait()

    async def call(self, app: Any, scope: dict[str, Any]) -> Self:
        async with asyncio.timeout(PATIENCE):
            await app(scope, self.receive, self.send)
        return self

    @property
    def types(self) -> list[str]:
        return [message["type"] for message in self.sent]

    def reply(self) -> Reply:
        """What was sent, checked to be one whole response. A handshake that was accepted counts as 101."""
        start, *rest = self.sent
        if start["type"] == "websocket.accept":
            return Reply(101, httpx.Headers(list(start.get("headers", ()))), b"")
        kind = start["type"].removesuffix(".start")
        assert kind in ("http.response", "websocket.http.response")
        assert {message["type"] for message in rest} == {f"{kind}.body"}
        assert [message.get("more_body", False) for message in rest] == [True] * (len(rest) - 1) + [False]
        assert all(name == name.lower() for name, _ in start["headers"])
        body = b"".join(message.get("body", b"") for message in rest)
        return Reply(start["status"], httpx.Headers(list(start["headers"])), body)


async def asgi_reply(
    app: Any, path: str = "/", method: str = "GET", headers: Lines = (), body: bytes = b"", **more: Any
) -> Reply:
    """One request to an ASGI application, word by word."""
    wire = Wire({"type": "http.request", "body": body})
    return (await wire.call(app, http_scope(path, method, headers, **more))).reply()


async def handshake(app: Any, path: str = "/", headers: Lines = (), *, denial: bool = True, **more: Any) -> Reply:
    """One WebSocket handshake; the client goes away once it is accepted. A plain close is a reply of its close code."""
    wire = Wire({"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000})
    extensions = {"websocket.http.response": {}} if denial else {}
    await wire.call(app, websocket_scope(path, headers, extensions=extensions, **more))
    if wire.sent[0]["type"] == "websocket.close":
        return Reply(wire.sent[0]["code"], httpx.Headers(), b"")
    return wire.reply()


async def asgi_through_httpx(app: Any, url: str = "/", method: str = "GET", headers: Lines = (), body: bytes = b"") -> Reply:
    """One request to an ASGI application as httpx makes it out of a URL."""
    transport = httpx.ASGITransport(app, client=(PEER, 50000))
    request = httpx.Request(method, f"http://testserver{url}", headers=dict(_pairs(headers)), content=body)
    async with asyncio.timeout(PATIENCE):
        response = await transport.handle_async_request(request)
    return Reply(response.status_code, response.headers, await response.aread())


# --- WSGI, in process -------------------------------------------------------------------------------------------------


def wsgi_environ(
    path: str = "/", method: str = "GET", headers: Lines = (), peer: str | None = PEER, body: bytes = b"", **more: Any
) -> dict[str, Any]:
    """A WSGI environ as PEP 3333 wants it: only native strings, text as latin-1. ``peer`` None leaves the address out."""
    target, _, query = path.partition("?")
    environ = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(target).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "testserver",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if peer is not None:
        environ["REMOTE_ADDR"] = peer
    if body:
        environ["CONTENT_LENGTH"] = str(len(body))
    for name, value in _pairs(headers):
        key = name.upper().replace("-", "_")
        key = key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"
        environ[key] = f"{environ[key]}, {value}" if key in environ and key != "HTTP_HOST" else value
    return {**environ, **more}


def run_wsgi(app: Any, environ: dict[str, Any]) -> Reply:
    """Run a WSGI application to its end, as the standard library's validator allows."""
    started: list[Any] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        assert exc_info is not None or not started
        started[:] = status, headers
        return written.append

    chunks = validator(app)(environ, start_response)
    try:
        body = b"".join(chunks)
    finally:
        chunks.close()
    status, headers = started
    return Reply(int(status[:3]), httpx.Headers(headers), b"".join(written) + body)


def wsgi_reply(app: Any, path: str = "/", method: str = "GET", headers: Lines = (), body: bytes = b"", **more: Any) -> Reply:
    """One request to a WSGI application."""
    return run_wsgi(app, wsgi_environ(path, method, headers, body=body, **more))


def validated(app: Any) -> Any:
    """A WSGI application that complains if what calls it is no good server.

    The validator wants a dot in the names of a server's own variables, the contract fixes ``environ["limitgate"]``.
    """

    def inner(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ["limitgate"] = environ.pop("limitgate.limits.decision")
        return app(environ, start_response)

    checked = validator(inner)

    def outer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ["limitgate.limits.decision"] = environ.pop("limitgate")
        return checked(environ, start_response)

    return outer


# --- both doors, one face ---------------------------------------------------------------------------------------------


class Site:
    """A small application behind a gate. Answers 200 ``hello`` and keeps the decisions it was handed in ``seen``."""

    door: ClassVar[str]

    def __init__(self, *rules: Any, **options: Any) -> None:
        self.seen: list[Any] = []
        if rules:
            options["rules"] = list(rules)
        self.app = self._gated(
            self.answering(200, [("Content-Type", "text/plain"), ("X-Own", "1")], b"hello", self.seen), options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def answering(status: int, headers: list[tuple[str, str]], body: bytes, seen: list[Any]) -> Any:
        """An application of this door's kind that always answers the same and keeps the decisions it finds."""
        raise NotImplementedError

    def ask(self, path: str = "/", method: str = "GET", headers: Lines = (), peer: str | None = PEER, **more: Any) -> Reply:
        """The reply to one request; ``mount`` is the prefix that the server has taken off."""
        raise NotImplementedError

    def statuses(self, count: int, path: str = "/", **more: Any) -> list[int]:
        """The statuses of several requests in a row."""
        return [self.ask(path, **more).status for _ in range(count)]

    def idle(self, seconds: float = MOMENT) -> None:
        """Let time pass without a request, as a server does: an event loop goes on running."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _gated(self, app: Any, options: dict[str, Any]) -> Any:
        raise NotImplementedError


class ASGISite(Site):
    door = "asgi"

    def __init__(self, *rules: Any, **options: Any) -> None:
        super().__init__(*rules, **options)
        self.runner = asyncio.Runner()

    @staticmethod
    def answering(status: int, headers: list[tuple[str, str]], body: bytes, seen: list[Any]) -> Any:
        raw = [(name.lower().encode(), value.encode()) for name, value in headers]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["limitgate"])
            await send({"type": "http.response.start", "status": status, "headers": raw})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

        return app

    def ask(self, path: str = "/", method: str = "GET", headers: Lines = (), peer: str | None = PEER, **more: Any) -> Reply:
        mount = more.pop("mount", "")
        return self.runner.run(asgi_reply(self.app, mount + path, method, headers, peer=peer, root_path=mount, **more))

    def idle(self, seconds: float = MOMENT) -> None:
        self.runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        with contextlib.closing(self.runner):
            if self.app.gate is not None:
                self.runner.run(self.app.gate.store.aclose())
        self.runner = asyncio.Runner()

    def _gated(self, app: Any, options: dict[str, Any]) -> Any:
        return LimitGate(app, **options)


class WSGISite(Site):
    door = "wsgi"

    @staticmethod
    def answering(status: int, headers: list[tuple[str, str]], body: bytes, seen: list[Any]) -> Any:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            seen.append(environ["limitgate"])
            start_response(f"{status} As Told", list(headers))
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        return app

    def ask(self, path: str = "/", method: str = "GET", headers: Lines = (), peer: str | None = PEER, **more: Any) -> Reply:
        mount = more.pop("mount", "")
        return wsgi_reply(self.app, path, method, headers, peer=peer, SCRIPT_NAME=mount, **more)

    def idle(self, seconds: float = MOMENT) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        if self.app.gate is not None:
            # Written later, the journal would open a connection again.
            self.app.gate.charging.bans.notes.end()
            self.app.gate.store.close()

    def _gated(self, app: Any, options: dict[str, Any]) -> Any:
        return LimitGateWSGI(validated(app), **options)


SITES = (ASGISite, WSGISite)


# --- served -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def uvicorn_process(target: str, folder: Path, *options: str, workers: int = 1, **environment: str) -> Iterator[str]:
    """A uvicorn in a process of its own, on a free port unless told otherwise; gives the URL, stops it by its pid.

    It has asyncio's own loop and h11 unless told otherwise, whatever else is installed.
    """
    command = [sys.executable, "-m", "uvicorn", target, "--workers", str(workers), *PLAIN, *options]
    if "--uds" not in options:
        command += ["--host", "127.0.0.1", "--port", "0"]

    def ready(text: str) -> bool:
        return "Uvicorn running" in text and (text.count("Application startup complete") == workers or "off" in options)

    with server_process(command, folder / "uvicorn.log", ready, environment) as url:
        yield url


@contextlib.contextmanager
def server_process(
    command: Sequence[str],
    log: Path,
    ready: Callable[[str], bool],
    environment: Mapping[str, str],
    cwd: Path = Path(__file__).parents[2],
) -> Iterator[str]:
    """A server in a process of its own, once it is ready by its log; gives the URL that it logs, stops it by its pid.

    Some log the URL, and that workers have started, a moment before they listen there, so a connection is tried, too.
    """
    outside = {name: value for name, value in os.environ.items() if not name.startswith("LIMITGATE_")}
    if forks.can_run(command, environment):
        process: Any = forks.start(command, log, outside | environment, cwd)
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=cwd, env=outside | environment, stdout=output, stderr=output)

    def up() -> bool:
        assert process.poll() is None, log.read_text()
        return ready(log.read_text())

    guard = Guard("limitgate-server-", process.pid)
    try:
        until(up, PROCESS_PATIENCE)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
        if found:
            until(lambda: _listens(int(found[1])), PROCESS_PATIENCE)
        yield found[0] if found else "http://testserver"
    finally:
        process.terminate()
        try:
            process.wait(PROCESS_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            guard.dismiss()
    assert "Traceback" not in log.read_text(), log.read_text()


def _listens(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), PATIENCE):
        return True
    return False


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def threaded_wsgi(app: Any) -> Iterator[str]:
    """Werkzeug's server with a thread for each request; gives the URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
    assert not thread.is_alive()


def until(ready: Callable[[], bool], listen_deadline: float = PATIENCE) -> None:
    """Wait for what others bring about, for so many seconds at most."""
    deadline = time.monotonic() + listen_deadline
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(MOMENT)


def _pairs(headers: Lines) -> list[tuple[str, str]]:
    return list(headers.items() if isinstance(headers, Mapping) else headers)
