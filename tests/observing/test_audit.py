"""The audit log: bans, pardons, resets and changed rules, with who and why, as text and as fields."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from limitgate import AsyncLimiter, Limiter, MemoryStore, Rule, StoreError
from limitgate.command.group import limitgate
from limitgate.observing import logs
from tests.support.command_line import CliRunner
from tests.support.redis_server import RedisServer

BY = logs.somebody()
RULE = Rule("api", "5/minute")


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "limitgate")


def facts(caplog: pytest.LogCaptureFixture) -> list[tuple[Any, ...]]:
    records: list[Any] = [record for record in caplog.records if record.name == "limitgate.audit"]
    return [(each.action, each.target, each.by, each.reason) for each in records]


def test_a_limiter(caplog: pytest.LogCaptureFixture) -> None:
    """The key is masked, as it may name somebody."""
    limiter = Limiter(MemoryStore())
    limiter.ban("user:1234", 60, reason="scraper")
    limiter.pardon("user:1234", reason="ticket 7")
    limiter.reset("user:1234", "5/minute")
    limiter.hit("user:1234", "5/minute")
    limiter.peek("user:1234", "5/minute")
    assert facts(caplog) == [
        ("ban", "us…34", BY, "scraper"),
        ("pardon", "us…34", BY, "ticket 7"),
        ("reset", "us…34", BY, None),
    ]
    assert caplog.messages[0] == f"ban us…34 by {BY}: scraper"
    assert caplog.messages[2] == f"reset us…34 by {BY}"
    assert caplog.records[0].seconds == 60  # type: ignore[attr-defined]


def test_an_event_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the reason says: a log has no lines that nobody has logged. The fields of the record have it as it is."""
    reason = "\x1b[31mred\nban everybody by root: made up"
    Limiter(MemoryStore()).ban("\nban everybody", reason=reason)
    assert caplog.messages == [f"ban \ufffdba…ody by {BY}: \\x1b[31mred\\nban everybody by root: made up"]
    assert [each[-1] for each in facts(caplog)] == [reason]


def test_an_async_limiter(caplog: pytest.LogCaptureFixture) -> None:
    """The same, awaited."""

    async def change() -> None:
        limiter = AsyncLimiter(MemoryStore())
        bucket = limiter.bucket(RULE, ip="203.0.113.7")
        await limiter.ban("user:1234", reason="a")
        await limiter.pardon("user:1234", reason="b")
        await limiter.reset("user:1234", "5/minute", reason="c")
        await bucket.ban(60, reason="d")
        await bucket.pardon(reason="e")
        await bucket.reset(reason="f")

    asyncio.run(change())
    assert [(action, reason) for action, _, _, reason in facts(caplog)] == [
        ("ban", "a"),
        ("pardon", "b"),
        ("reset", "c"),
        ("ban", "d"),
        ("pardon", "e"),
        ("reset", "f"),
    ]


def test_a_bucket_of_a_rule(caplog: pytest.LogCaptureFixture) -> None:
    """By its key in the store, which tells nothing of anybody."""
    bucket = Limiter(MemoryStore()).bucket(RULE, ip="203.0.113.7")
    bucket.ban(60, reason="scraper")
    bucket.pardon()
    bucket.reset()
    assert [fact[0] for fact in facts(caplog)] == ["ban", "pardon", "reset"]
    assert all(re.fullmatch(r"limitgate:api:[0-9a-f]{32}", fact[1]) for fact in facts(caplog))


def test_what_has_failed_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was changed."""
    with Limiter("redis://127.0.0.1:1") as limiter, pytest.raises(StoreError):
        limiter.ban("user:1234")
    with pytest.raises(TypeError, match="expected text"):
        Limiter(MemoryStore()).ban(5)  # type: ignore[arg-type]
    assert not facts(caplog)


def test_the_command(redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once each, with the reason that was given."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: audited, qpd: 3}\n")
    whose = ["--store", redis_server.url, "--timeout", "10", "--rules", str(rules), "--rule", "audited", "--ip", "203.0.113.7"]
    for verb in ("ban", "pardon", "reset"):
        result = CliRunner().invoke(limitgate, [verb, *whose, "-y", "--reason", f"why {verb}"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert [(action, reason) for action, _, _, reason in facts(caplog)] == [
        ("ban", "why ban"),
        ("pardon", "why pardon"),
        ("reset", "why reset"),
    ]


def test_changed_rules(caplog: pytest.LogCaptureFixture) -> None:
    """Where they come from, and what has changed."""
    logs.rules_changed("config/", "changed api")
    assert caplog.messages == ["rules read again from config/: changed api"]
    assert facts(caplog) == [("rules", "config/", None, None)]
    assert caplog.records[0].changes == "changed api"  # type: ignore[attr-defined]
