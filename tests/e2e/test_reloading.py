"""Rules that change under real servers: every worker looks for itself, whoever has loaded the application, and all follow."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.support.doors import PATIENCE, server_process, until, uvicorn_process

GUNICORN = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0", "--graceful-timeout", "1", "--workers", "2"]


def served(server: str, folder: Path, **environment: str) -> AbstractContextManager[str]:
    """Two workers of a server, whose log is ``folder``'s; gives the URL."""
    if server == "uvicorn":
        return uvicorn_process("tests.e2e.reloading:app", folder, workers=2, **environment)
    command = [*GUNICORN, *server.split()[1:], "tests.e2e.reloading:flask_app"]
    loads = 1 if "--preload" in command else 2

    def ready(text: str) -> bool:
        return text.count("Booting worker") == 2 and text.count("polled every") == loads

    return server_process(command, folder / "gunicorn.log", ready, environment)


def tellers(folder: Path, words: str) -> list[int]:
    """The processes that have logged a line with these words."""
    (log,) = folder.glob("*.log")
    return [int(pid) for pid in re.findall(rf"^(\d+) [A-Z]+ .*{re.escape(words)}", log.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("server", ["uvicorn", "gunicorn", "gunicorn --preload", "gunicorn --preload --threads 4"])
def test_every_worker_follows(tmp_path: Path, server: str) -> None:
    """A mistake is refused by each, a change is made by each, and by nobody else."""
    rules = tmp_path / "config" / "default.yaml"
    rules.parent.mkdir()
    rules.write_text("rules: [{name: all, limits: [1000/minute]}]")
    environment = {"LIMITGATE_RULES": str(rules.parent), "LIMITGATE_RELOAD": "0.05"}
    with served(server, tmp_path, **environment) as url:
        assert httpx.get(url, timeout=PATIENCE).headers["x-ratelimit-limit"] == "1000"
        rules.write_text("rules: [{name: all, limits: [often]}]")
        until(lambda: len(tellers(tmp_path, "LG034")) == 2)
        assert httpx.get(url, timeout=PATIENCE).headers["x-ratelimit-limit"] == "1000"
        rules.write_text("rules: [{name: all, limits: [2000/minute]}]")
        until(lambda: len(tellers(tmp_path, "rules read again")) == 2)
        workers = set(tellers(tmp_path, "rules read again"))
        assert len(workers) == 2
        assert set(tellers(tmp_path, "LG034")) == workers
        assert {httpx.get(url, timeout=PATIENCE).headers["x-ratelimit-limit"] for _ in range(9)} == {"2000"}
