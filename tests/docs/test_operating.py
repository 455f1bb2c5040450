"""The page for whoever is on call: each of its commands is run against a live Redis, under the example's rules."""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
from itertools import islice
from pathlib import Path

import pytest

from limitgate import LimitGateWSGI
from limitgate.command.group import limitgate
from limitgate.observing import logs
from tests.docs.test_docs import ROOT
from tests.support.command_line import CliRunner
from tests.support.markdown import blocks, text_of
from tests.support.redis_server import RedisServer

PAGE = "docs/operating.md"
EXPECTED = [
    ("explain --id", 1, "none of these rules refused"),
    ("explain POST", 1, "would be refused"),
    ("peek --rules", 1, "would be refused"),
    ("reset --rules", 0, "reset"),
    ("ban --rules", 0, "banned for 1 h"),
    ("bans", 0, "scraper"),
    ("pardon --rules", 0, "pardoned"),
    ("bans --log", 0, "ticket 7"),
    ("check config/", 0, ""),
    ("replay access.log", 0, "refused"),
    ("doctor", 0, "no problem found"),
]
"""The beginning of each command in the order of the page, its exit status, and what it prints."""


def test_every_command_does_what_the_page_says(own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is refused is explained, let in, shut out and pardoned; rules are checked and tried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIMITGATE_STORE", own_redis.url)
    for folder in ("config", "new"):
        shutil.copytree(ROOT / "config", folder)
    with gzip.open(ROOT / "tests/data/access.log.gz", "rt", encoding="utf-8", errors="replace") as log:
        Path("access.log").write_text("".join(islice(log, 200)), encoding="utf-8")
    gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules="config/", store=own_redis.url, timeout=10)
    for _ in range(4):
        list(gate({"REQUEST_METHOD": "POST", "PATH_INFO": "/login", "REMOTE_ADDR": "203.0.113.7"}, lambda *_: None))
    lines = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]
    commands = [line.removeprefix("limitgate ") for line in lines if line.startswith("limitgate ")]
    assert [line for line in lines if not line.startswith("limitgate ")] == [
        f"export LIMITGATE_STORE={'redis://localhost:6379/0'}"
    ]
    assert len(commands) == len(EXPECTED)
    for command, (beginning, status, printed) in zip(commands, EXPECTED):
        words = shlex.split(os.path.expandvars(command))
        result = CliRunner().invoke(limitgate, words, input="y\n", catch_exceptions=False)
        assert command.startswith(beginning)
        assert (result.exit_code, printed in result.output) == (status, True), f"{command}\n{result.output}"


def test_the_numbers_of_the_log_are_those_of_the_code() -> None:
    """Loggers, seconds and buckets."""
    text = text_of(PAGE)
    assert f"refused nothing for {logs.QUIET:.0f} seconds" in text
    assert f"at most {logs.MOST:,} buckets" in text
    assert f"`{logs.log.name}`" in text
    assert f"`{logs.audit_log.name}`" in text
