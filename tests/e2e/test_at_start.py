"""What real servers log at start, and what their processes do then: told once, by those who serve, after they have forked."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.doors import PATIENCE, server_process, uvicorn_process
from tests.support.redis_server import RedisServer, free_port

ROOT = Path(__file__).parents[2]
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
    command = [*GUNICORN, "--workers", "2", *options, "tests.e2e.at_start:flask_app"]
    with server_process(command, log, listening, {"LIMITGATE_STORE": guarded}) as url:
        pids = {pid for pid, _ in told(log, "LG022", 2)}
        assert len(pids) == 2
        deadline, served = time.monotonic() + PATIENCE, set[int]()
        while served != pids and time.monotonic() < deadline:
            served.add(int(httpx.get(url, timeout=PATIENCE).text))
        assert served == pids
        assert len(told(log, "LG022")) == 2


def test_uvicorn_tells_before_any_request(tmp_path: Path, guarded: str) -> None:
    """What is on, and that the store refuses; the application serves under on_error."""
    with uvicorn_process("tests.e2e.at_start:app", tmp_path, LIMITGATE_STORE=guarded) as url:
        log = tmp_path / "uvicorn.log"
        ((_, error),) = told(log, "LG022")
        assert "it wants a password" in error
        assert f"store {guarded}; on_error open" in log.read_text()
        assert httpx.get(url, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "uvicorn", "--port", "0", "tests.e2e.at_start:app"],
        [*GUNICORN, "tests.e2e.at_start:flask_app"],
        [*GUNICORN, "--preload", "tests.e2e.at_start:flask_app"],
        [sys.executable, "-m", "hypercorn", "--bind", "127.0.0.1:0", "tests.e2e.at_start:app"],
    ],
    ids=["uvicorn", "gunicorn", "gunicorn --preload", "hypercorn"],
)
def test_servers_do_not_start_without_a_required_store(command: list[str]) -> None:
    """With ``require_store`` the server ends and says why; all but hypercorn with an exit status that is not 0."""
    environment = {"LIMITGATE_STORE": f"redis://127.0.0.1:{free_port()}", "LIMITGATE_REQUIRE_STORE": "true", "PATH": "/bin"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode or "hypercorn" in command
    assert "require_store: the store does not answer: cannot reach Redis" in ended.stderr


@pytest.mark.parametrize("options", [["--preload"], []], ids=" ".join)
def test_a_required_store_that_answers(tmp_path: Path, redis_server: RedisServer, options: list[str]) -> None:
    """The server starts, and its workers limit together, by connections of their own."""
    command = [*GUNICORN, "--workers", "2", *options, "tests.e2e.at_start:flask_app"]
    environment = {
        "LIMITGATE_STORE": redis_server.url,
        "LIMITGATE_REQUIRE_STORE": "1",
        "LIMITGATE_TIMEOUT": "9",
        "LIMITGATE_KEY_PREFIX": f"start{options}",
    }
    with server_process(command, tmp_path / "gunicorn.log", listening, environment) as url:
        assert [httpx.get(url, timeout=PATIENCE).status_code for _ in range(5)] == [200, 200, 200, 429, 429]
