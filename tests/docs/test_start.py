"""docs/start.md is walked through as it is printed: its files are written, its servers run, its commands typed."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doors import PATIENCE, server_process
from tests.support.examples import REDIS
from tests.support.markdown import blocks
from tests.support.redis_server import RedisServer

PAGE = "docs/start.md"
SERVED = "http://127.0.0.1:8000"
"""Where the reader's server listens."""
_VOLATILE = re.compile(r"^(date|x-ratelimit-reset): .*$", re.MULTILINE)


def same(output: str) -> str:
    """What comes out of curl, less the ends of lines, the time of day, and the few seconds that typing may take."""
    text = _VOLATILE.sub(r"\1", output.replace("\r\n", "\n")).strip()
    text = re.sub(r"(urn:limitgate:refusal:)[\w-]{32}", r"\1id", text)
    return re.sub(r"(retry-after: |Try again in )(\d|1\d|20)\b", r"\1soon", text)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl, by which the page asks")
def test_everything_comes_out_as_it_is_printed(own_redis: RedisServer, tmp_path: Path) -> None:
    """Whoever types what the page says sees what the page shows."""
    printed: list[str] = []
    shown: list[str] = []
    url = ""
    with contextlib.ExitStack() as running:
        for block in blocks(PAGE):
            if block.file:
                (tmp_path / block.file).parent.mkdir(exist_ok=True)
                (tmp_path / block.file).write_text(block.text)
            elif server := re.fullmatch(r"(?:(LIMITGATE_\w+)=(\S+) )?venv/bin/uvicorn (.*)\n", block.text):
                running.close()
                name, value, arguments = server.groups()
                url = running.enter_context(
                    served(arguments, tmp_path, {name: value.replace(REDIS, own_redis.url)} if name else {})
                )
            elif "curl -" in block.text:
                done = subprocess.run(
                    ["sh", "-ec", block.text.replace(SERVED, url)], capture_output=True, text=True, timeout=PATIENCE, check=True
                )
                printed.append(same(done.stdout))
            elif block.language == "text":
                shown.append(same(block.text))
    assert len(shown) == 6
    assert printed == shown


def served(arguments: str, folder: Path, environment: dict[str, str]) -> contextlib.AbstractContextManager[str]:
    """The page's uvicorn, on a port that is free."""
    workers = 2 if "--workers 2" in arguments else 1
    command = [sys.executable, "-m", "uvicorn", *arguments.split(), "--port", "0"]
    return server_process(
        command,
        folder / "uvicorn.log",
        lambda log: "Uvicorn running" in log and log.count("Application startup complete") == workers,
        {"LIMITGATE_TIMEOUT": "5", **environment},
        folder,
    )
