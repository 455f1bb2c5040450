"""What tests start and make does not outlive them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.doors import until
from tests.support.redis_server import RedisServer

PROGRAM = """
import signal, sys
from tests.support.redis_server import RedisServer
server = RedisServer()
if sys.argv[1] == "frozen":
    server.process.send_signal(signal.SIGSTOP)
if sys.argv[1] == "again":
    server.kill()
    server.start()
print(server.process.pid, server.folder, flush=True)
signal.pause()
"""


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is nobody to ask for the state of a process")
@pytest.mark.parametrize("how", ["runs", "frozen", "again"])
def test_a_test_run_that_is_killed_leaves_no_server(how: str) -> None:
    """Nor its folder, whatever state the server is in."""
    program = [sys.executable, "-c", PROGRAM, how]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as run:
        server, folder = run.stdout.readline().split()
        run.kill()
    until(lambda: not is_running(int(server)) and not Path(folder).exists())


def test_a_server_that_does_not_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with options that Redis does not know, or where no process may be started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="did not come up"):
        RedisServer(no_such_option="1")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.skip("starts a process"))
    with pytest.raises(pytest.skip.Exception):
        RedisServer()
    assert list(tmp_path.iterdir()) == []
