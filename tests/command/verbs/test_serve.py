"""`limitgate serve`, as a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from limitgate.command.group import limitgate
from tests.support import forks
from tests.support.command_line import CliRunner
from tests.support.doors import PATIENCE, PROCESS_PATIENCE, server_process, until
from tests.support.proxies import missing, on_thread, running
from tests.support.redis_server import RedisServer

SERVE = [sys.executable, "-m", "limitgate", "serve"]
RULES = "rules: [{name: all, path: /limited, qpd: 2}]\n"
ASKED = {"X-Original-URI": "/limited", "X-Original-Method": "GET", "X-Forwarded-For": "192.0.2.7"}


class Served(NamedTuple):
    """A running command."""

    url: str
    log: Path

    @property
    def pid(self) -> int:
        """Of the process that others are told to end."""
        text = self.log.read_text()
        return int(text.partition("parent process [" if "parent process" in text else "server process [")[2].partition("]")[0])


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A folder of rules."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "default.yaml").write_text(RULES)
    return folder


@contextlib.contextmanager
def serving(rules: Path, *options: str, workers: int = 1, **environment: str) -> Iterator[Served]:
    """The command, once it serves."""
    command = [*SERVE, "--rules", str(rules), "--workers", str(workers), *options]
    command += [] if "--uds" in options else ["--port", "0"]
    log = rules.parent / "serve.log"

    def ready(text: str) -> bool:
        return "Uvicorn running" in text and text.count("Application startup complete") == workers

    with server_process(command, log, ready, environment) as url:
        yield Served(url, log)


def test_rules_are_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads them again, so it can't take them from an application; the help says so."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    helped = CliRunner().invoke(limitgate, ["serve", "--help"]).output
    assert "--rules PATH" in helped
    assert "MODULE" not in helped
    refused = CliRunner().invoke(limitgate, ["serve", "--rules", "shop:app"])
    assert (refused.exit_code, "expected a rule file or a folder of rule files" in refused.output) == (1, True)


class OnSocket(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self.host)


def connected(served: Served, uds: str | None = None) -> http.client.HTTPConnection:
    """A connection of a proxy."""
    host = served.url.removeprefix("http://")
    return OnSocket(uds, timeout=PATIENCE) if uds else http.client.HTTPConnection(host, timeout=PATIENCE)


def got(connection: http.client.HTTPConnection, path: str, headers: Any = ASKED) -> tuple[int, str]:
    """One subrequest."""
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_it_serves_rules_health_and_metrics(rules: Path) -> None:
    """On one connection. A proxy on this machine is trusted, and clients are told apart."""
    with serving(rules) as served, contextlib.closing(connected(served)) as connection:
        assert got(connection, "/healthz") == (200, "ok\n")
        assert [got(connection, "/haproxy")[0] for _ in range(3)] == [200, 200, 429]
        assert got(connection, "/haproxy", ASKED | {"X-Forwarded-For": "192.0.2.8"})[0] == 200
        connection.request("GET", "/nginx", headers=ASKED)
        response = connection.getresponse()
        assert (response.status, response.read()) == (403, b"")
        assert json.loads(response.headers["X-LimitGate-Body"])["violated-policies"] == ["all"]
        metrics = got(connection, "/metrics")[1]
        assert 'limitgate_rule_decisions_total{outcome="refused",rule="all",tier="default"} 2.0' in metrics
        log = served.log.read_text()
        assert "trusted proxies 127.0.0.1, ::1" in log
        assert "rule all begins to refuse" in log


def test_changed_rules_apply(rules: Path) -> None:
    with serving(rules, "--reload", "0.1") as served, contextlib.closing(connected(served)) as connection:
        assert [got(connection, "/haproxy")[0] for _ in range(3)] == [200, 200, 429]
        (rules / "default.yaml").write_text(RULES.replace("2", "3"))
        until(lambda: got(connection, "/haproxy")[0] == 200)


def test_workers_share_a_socket_and_their_metrics(rules: Path, redis_server: RedisServer) -> None:
    """Metrics add up, whichever worker is asked."""
    uds = str(rules.parent / "gate.sock")
    options = ("--uds", uds, "--store", redis_server.url)
    with serving(rules, *options, workers=2, LIMITGATE_KEY_PREFIX="served", LIMITGATE_TIMEOUT=str(PATIENCE)) as served:
        connections = [connected(served, uds) for _ in range(8)]
        statuses = [got(each, "/haproxy")[0] for each in connections]
        assert sorted(statuses) == [200, 200] + [429] * 6
        counted = 'limitgate_rule_decisions_total{outcome="admitted",rule="all",tier="default"} 2.0'
        until(lambda: counted in got(connections[0], "/metrics")[1])
        for connection in connections:
            connection.close()


def test_a_termination_finishes_what_is_under_way(rules: Path) -> None:
    """A store that never answers keeps the request for its timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with serving(rules, "--store", store, LIMITGATE_TIMEOUT="2") as served:
            answers: list[int] = []

            def ask() -> None:
                with contextlib.closing(connected(served)) as connection:
                    answers.append(got(connection, "/haproxy")[0])

            asking = threading.Thread(target=ask)
            asking.start()
            with silent.accept()[0]:
                os.kill(served.pid, signal.SIGTERM)
                asking.join(PATIENCE)
            assert answers == [200]
            until(lambda: "Finished server process" in served.log.read_text())


@pytest.mark.skipif(missing("nginx") is not None, reason=missing("nginx") or "")
def test_nginx_asks_on_a_unix_socket(rules: Path) -> None:
    uds = str(rules.parent / "gate.sock")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def on_socket(text: str) -> str:
        return text.replace("server 127.0.0.1:1;", f"server unix:{uds};").replace("150ms", "20s")

    with serving(rules, "--uds", uds), on_thread(application) as behind, running("nginx", behind, 1, on_socket) as proxy:
        assert [proxy.ask("/limited").status for _ in range(3)] == [200, 200, 429]


def failed(folder: Path, *options: str) -> tuple[int, str]:
    """A command that doesn't begin to serve."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("LIMITGATE_")}
    return forks.ended([*SERVE, "--port", "0", *options], folder.parent / "failed.log", outside, PROCESS_PATIENCE)


def test_mistakes_are_told_before_it_serves(rules: Path) -> None:
    """Also with several workers, which would otherwise be restarted for ever."""
    (rules / "default.yaml").write_text("rules: [{name: all, concurrency: 2}]\n")
    status, said = failed(rules, "--rules", str(rules), "--workers", "2")
    assert status == 1
    assert "rule 'all': concurrency: needs the response" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected --rules PATH"),
        (("--store", "foo://"), "store: scheme 'foo' is unknown, expected memory://, redis://"),
        (("--reload", "x"), "reload: expected seconds"),
        (("--trusted-proxy", "x"), "trusted_proxies[0]: 'x' is not an address"),
        (("--port", "TAKEN"), "cannot listen on 127.0.0.1:"),
        (("--port", "0", "--grpc", "TAKEN"), "cannot listen on 127.0.0.1:"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
        (("--uds", "/no/such/folder/gate.sock"), "cannot listen on /no/such/folder/gate.sock: No such file"),
        (("--uds", __file__), "cannot listen on"),
        (("--uds", "/tmp/" + "x" * 200), "AF_UNIX path too long"),
        (("--uds", "gate.sock", "--port", "80"), "expected either --uds or --port, not both"),
        (("--uds", "gate.sock", "--host", "::1"), "expected either --uds or --host, not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage(words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2 before the server starts, whose status would be that of a store that does not answer."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        result = CliRunner().invoke(limitgate, ["serve", *given])
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert "LIMITGATE_STORE" not in result.stderr


@pytest.mark.parametrize(
    ("words", "variable", "warns"),
    [
        (("--host", "0.0.0.0", "--port", "0"), None, True),
        (("--host", "0.0.0.0", "--port", "0"), "10.0.0.0/8", False),
        (("--host", "0.0.0.0", "--port", "0", "--trusted-proxy", "10.0.0.0/8"), None, False),
        (("--host", "localhost", "--port", "0"), None, False),
        (("--port", "0"), None, False),
        (("--uds", "SOCKET"), None, False),
    ],
)
def test_a_port_for_other_machines_without_a_trusted_proxy_is_told(
    rules: Path, words: tuple[str, ...], variable: str | None, monkeypatch: pytest.MonkeyPatch, *, warns: bool
) -> None:
    """As no proxy could describe a request."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    if variable is not None:
        os.environ["LIMITGATE_TRUSTED_PROXIES"] = variable
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
    given = [word.replace("SOCKET", str(rules.parent / "gate.sock")) for word in words]
    result = CliRunner().invoke(limitgate, ["serve", "--rules", str(rules), *given], catch_exceptions=False)
    assert result.exit_code == 0
    assert ("no trusted proxy, so no proxy can describe requests" in result.stderr) is warns
    assert ("expected --trusted-proxy PEER" in result.stderr) is warns


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_socket_in_use_is_not_taken_over(rules: Path, workers: str) -> None:
    uds = str(rules.parent / "gate.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(uds)
        other.listen()
        result = CliRunner().invoke(limitgate, ["serve", "--rules", str(rules), "--uds", uds, "--workers", workers])
        assert (result.exit_code, f"cannot listen on {uds}: a process listens there" in result.stderr) == (2, True)
        assert Path(uds).is_socket()


def test_the_socket_of_an_ended_process_is_replaced(rules: Path) -> None:
    """SIGKILL, and SIGTERM under some servers, leave it."""
    uds = str(rules.parent / "gate.sock")
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(uds)
    with serving(rules, "--uds", uds, workers=2) as served, contextlib.closing(connected(served, uds)) as connection:
        assert got(connection, "/healthz") == (200, "ok\n")
