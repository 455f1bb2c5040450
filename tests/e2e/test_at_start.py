"""What real servers log at start, and what their processes do then: told once, by those who serve, after they have forked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import forks
from tests.support.doors import MOMENT, PATIENCE, PROCESS_PATIENCE, server_process, uvicorn_process
from tests.support.redis_server import RedisServer, free_port

GUNICORN = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0", "--graceful-timeout", "1"]


@pytest.fixture
def guarded() -> Iterator[str]:
    """The URL, less its password, of a Redis that wants one."""
    port = free_port()
    server = RedisServer(port=str(port))
    with server.client() as client:
        client.config_set("requirepass", "p")
    yield f"redis://127.0.0.1:{port}"
    server.stop()


def told(log: Path, code: str, times: int = 1) -> list[tuple[int, str]]:
    """The lines with a code, once there are so many: the process that has logged it, and the line."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [line.split(" ", 2) for line in log.read_text().splitlines() if f" {code} " in line]
        if len(found) >= times:
            return [(int(pid), line) for pid, _, line in found]
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def listening(text: str) -> bool:
    return "Listening at" in text


@pytest.mark.parametrize("options", [["--preload"], [], ["--preload", "--threads", "4"]], ids=" ".join)
def test_workers_of_gunicorn_ask_and_the_master_does_not(tmp_path: Path, guarded: str, options: list[str]) -> None:
    """Without any request each worker has told what is wrong with the store, also where the master has loaded it."""
    log = tmp_path / "gunicorn.log"
    command = [*GUNICORN, "--workers", "2", *options, "tests.e2e.flask_at_start:app"]
    with server_process(command, log, listening, {"LIMITGATE_STORE": guarded}) as url:
        pids = {pid for pid, _ in told(log, "LG022", 2)}
        assert len(pids) == 2
        deadline, served = time.monotonic() + PATIENCE, set[int]()
        while served != pids and time.monotonic() < deadline:
            served.add(int(httpx.get(url, timeout=PATIENCE).text))
            time.sleep(MOMENT)
        assert served == pids
        assert len(told(log, "LG022")) == 2


def test_uvicorn_tells_before_any_request(tmp_path: Path, guarded: str) -> None:
    """What is on, and that the store refuses; the application serves under on_error."""
    with uvicorn_process("tests.e2e.at_start:app", tmp_path, LIMITGATE_STORE=guarded) as url:
        log = tmp_path / "uvicorn.log"
        ((_, error),) = told(log, "LG022")
        assert "it requires a password" in error
        assert f"store {guarded}; on_error open" in log.read_text()
        assert httpx.get(url, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "uvicorn", "--port", "0", "tests.e2e.at_start:app"],
        [*GUNICORN, "tests.e2e.flask_at_start:app"],
        [*GUNICORN, "--preload", "tests.e2e.flask_at_start:app"],
        [sys.executable, "-m", "hypercorn", "--bind", "127.0.0.1:0", "tests.e2e.at_start:app"],
    ],
    ids=["uvicorn", "gunicorn", "gunicorn --preload", "hypercorn"],
)
def test_servers_do_not_start_without_a_required_store(tmp_path: Path, command: list[str]) -> None:
    """With ``require_store`` the server ends and says why; all but hypercorn with an exit status that is not 0."""
    environment = {"LIMITGATE_STORE": f"redis://127.0.0.1:{free_port()}", "LIMITGATE_REQUIRE_STORE": "true", "PATH": "/bin"}
    status, said = forks.ended(command, tmp_path / "log", environment, PROCESS_PATIENCE)
    assert status or "hypercorn" in command
    assert "require_store: the store does not answer: cannot reach Redis" in said


FRAMEWORKS = ["starlette", "fastapi", "litestar", "quart", "around"]
UVICORN = [sys.executable, "-m", "uvicorn", "--port", "0"]


@pytest.mark.parametrize(
    ("server", "framework"),
    [
        *[("uvicorn", framework) for framework in FRAMEWORKS],
        ("gunicorn", "starlette"),
        ("gunicorn", "around"),
        ("hypercorn", "around"),
    ],
)
def test_servers_do_not_start_with_a_mistake_in_the_rules(tmp_path: Path, server: str, framework: str) -> None:
    """They end, and the mistake is told with its line, wherever the framework makes its middleware.

    Starlette does so when the server starts the application, and ``around`` is made while it imports it.
    """
    (tmp_path / "default.yaml").write_text("rules:\n  - name: api\n    qpm: ten\n")
    target = f"tests.e2e.mistaken:{framework}"
    command = {
        "uvicorn": [*UVICORN, "--factory", target],
        "gunicorn": [*GUNICORN, "--worker-class", "uvicorn_worker.UvicornWorker", f"{target}()"],
        "hypercorn": [sys.executable, "-m", "hypercorn", "--bind", "127.0.0.1:0", f"{target}()"],
    }[server]
    environment = {"LIMITGATE_RULES": str(tmp_path), "PATH": "/bin"}
    status, said = forks.ended(command, tmp_path / "log", environment, PROCESS_PATIENCE)
    assert status or server == "hypercorn"
    assert f"{tmp_path}/default.yaml:3: rules[0].qpm: expected a whole number" in said
    assert "Uvicorn running" not in said


@pytest.mark.parametrize("options", [["--preload"], []], ids=" ".join)
def test_a_required_store_that_answers(tmp_path: Path, redis_server: RedisServer, options: list[str]) -> None:
    """The server starts, and its workers limit together, by connections of their own."""
    command = [*GUNICORN, "--workers", "2", *options, "tests.e2e.flask_at_start:app"]
    environment = {
        "LIMITGATE_STORE": redis_server.url,
        "LIMITGATE_REQUIRE_STORE": "1",
        "LIMITGATE_TIMEOUT": "9",
        "LIMITGATE_KEY_PREFIX": f"start{options}",
    }
    with server_process(command, tmp_path / "gunicorn.log", listening, environment) as url:
        assert [httpx.get(url, timeout=PATIENCE).status_code for _ in range(5)] == [200, 200, 200, 429, 429]


# --- who is believed --------------------------------------------------------------------------------------------------


def spoofed(url: str, *headers: str) -> None:
    for value in headers:
        assert httpx.get(url, headers={"X-Forwarded-For": value}, timeout=PATIENCE).status_code == 200


@contextmanager
def believing(folder: Path, way: str, trusted: str) -> Iterator[tuple[str, Path]]:
    """A server that believes proxies, as it is told in one of several ways; its URL and its log."""
    log = folder / "server.log"
    (folder / "gunicorn.conf.py").write_text(f"forwarded_allow_ips = {trusted!r}\n" if "file" in way else "")
    environment = {"FORWARDED_ALLOW_IPS": trusted} if "variable" in way else {}
    if way.startswith("uvicorn"):
        command = [sys.executable, "-m", "uvicorn", "--port", "0", "tests.e2e.at_start:app"]
    else:
        worker = ["--worker-class", "uvicorn_worker.UvicornWorker", "--config", str(folder / "gunicorn.conf.py")]
        command = [*GUNICORN, *worker, "tests.e2e.at_start:app"]
    command += ["--forwarded-allow-ips", trusted] if "flag" in way else []
    with server_process(command, log, lambda text: "startup complete" in text and "http://" in text, environment) as url:
        yield url, log


WAYS = ["uvicorn, a flag", "gunicorn, a flag", "gunicorn, a file", "uvicorn, a variable"]


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_believes_everybody_is_told_of(tmp_path: Path, way: str) -> None:
    """At start, or as soon as a client has chosen its address, once."""
    with believing(tmp_path, way, "*") as (url, log):
        spoofed(url, *[f"198.18.0.{number}, 5.6.7.8" for number in range(9)])
        assert len(told(log, "LG002")) == 1


@pytest.mark.parametrize("way", [way for way in WAYS if "file" not in way])
def test_a_server_that_believes_its_proxies_is_not(tmp_path: Path, way: str) -> None:
    """Proxies that are named are believed without a word, a chain of public ones as well."""
    with believing(tmp_path, way, "127.0.0.1,5.6.7.8") as (url, log):
        spoofed(url, "198.18.0.1", "1.2.3.4, 5.6.7.8", "9.9.9.9, 1.2.3.5, 5.6.7.8", "1.2.3.4:99")
        assert "LG0" not in log.read_text()


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["flask_at_start", "at_start"])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_of_gunicorn_are_counted(tmp_path: Path, target: str, workers: int) -> None:
    """Several workers on memory:// are reported by each; one is not."""
    kind = ["--worker-class", "uvicorn_worker.UvicornWorker"] if target == "at_start" else []
    command = [*GUNICORN, "--workers", str(workers), *kind, f"tests.e2e.{target}:app"]
    log = tmp_path / "gunicorn.log"
    with server_process(command, log, lambda text: text.count("Booting worker") == workers, {}) as url:
        served = {httpx.get(url, timeout=PATIENCE).text.split()[0] for _ in range(3)}
        if workers > 1:
            assert "LG001 3 workers with memory://" in told(log, "LG001", len(served))[0][1]
        else:
            assert "LG001" not in log.read_text()


@pytest.mark.parametrize(("processes", "says"), [("1", True), ("2", False)])
def test_local_limits_of_workers_that_are_not_divided(
    tmp_path: Path, redis_server: RedisServer, processes: str, says: object
) -> None:
    """Under ``on_error: local`` several workers have to be told how many they are."""
    command = [*GUNICORN, "--workers", "2", "tests.e2e.flask_at_start:app"]
    environment = {
        "LIMITGATE_STORE": redis_server.url,
        "LIMITGATE_ON_ERROR": "local",
        "LIMITGATE_PROCESSES": processes,
        "LIMITGATE_KEY_PREFIX": f"workers{processes}",
        "LIMITGATE_TIMEOUT": "9",
    }
    log = tmp_path / "gunicorn.log"
    with server_process(command, log, lambda text: text.count("Booting worker") == 2, environment) as url:
        assert httpx.get(url, timeout=PATIENCE).status_code == 200
        if says:
            assert "LG028 2 workers" in told(log, "LG028")[0][1]
        time.sleep(0.5)
        assert ("LG028" in log.read_text()) is says


def test_a_reloader_is_no_worker(tmp_path: Path) -> None:
    """Uvicorn's reloader, a parent with one child, is not told of."""
    with uvicorn_process("tests.e2e.at_start:app", tmp_path, "--reload", "--reload-dir", str(tmp_path)) as url:
        assert httpx.get(url, timeout=PATIENCE).status_code == 200
        assert "LG001" not in (tmp_path / "uvicorn.log").read_text()


def test_uvicorn_s_workers_are_counted(tmp_path: Path) -> None:
    """Processes that a supervisor has spawned and not forked see its command line as well."""
    with uvicorn_process("tests.e2e.at_start:app", tmp_path, workers=2) as url:
        assert httpx.get(url, timeout=PATIENCE).status_code == 200
        assert "LG001 2 workers" in told(tmp_path / "uvicorn.log", "LG001")[0][1]
