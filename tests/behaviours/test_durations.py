"""Durations as text: wherever seconds are taken, text with a unit says the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from limitgate import AsyncLimiter, Ban, ConfigError, Limit, Limiter, MemoryStore, Rule, Settings, load_rules
from limitgate.command.group import limitgate
from limitgate.httpx import RateLimitTransport
from limitgate.outbound.options import CheckedOptions
from limitgate.testing import FrozenClock, frozen
from tests.support.cases import case
from tests.support.clock import Clock
from tests.support.command_line import CliRunner


def banned(how: Callable[[Limiter], object]) -> float:
    """For how long a key is banned then."""
    with Limiter(MemoryStore(Clock())) as limiter:
        how(limiter)
        return limiter.peek("k", "5/minute").retry_after


def bucket_banned(how: Callable[[Any], object]) -> float:
    with Limiter(MemoryStore(Clock())) as limiter:
        how(limiter.bucket(Rule("api", "5/minute"), ip="203.0.113.7"))
        return limiter.bucket(Rule("api", "5/minute"), ip="203.0.113.7").peek().retry_after


def waited(timeout: float | str) -> float:
    """How long a limiter waits that may wait for so long."""
    with frozen() as clock, Limiter("memory://") as limiter:
        began = clock.now
        limiter.hit("k", "1 per 90 seconds")
        decision = limiter.wait("k", "1 per 90 seconds", timeout=timeout)
        return clock.now - began if decision.allowed else -1


def advanced(seconds: float | str) -> float:
    clock = FrozenClock(0)
    clock.advance(seconds)
    return clock.now


def own(name: str) -> Callable[[Any], float]:
    return lambda value: getattr(CheckedOptions.of({name: value}), name)


PLACES: dict[str, Callable[[Any], Any]] = {
    "option timeout": lambda value: Settings(timeout=value, rules=[]).timeout,
    "option reload": lambda value: Settings(reload=value, rules=[]).reload,
    "limiter": lambda value: Limiter("memory://", timeout=value)._timeout,
    "async limiter": lambda value: AsyncLimiter("memory://", timeout=value)._timeout,
    "ban": lambda value: banned(lambda limiter: limiter.ban("k", value)),
    "penalize": lambda value: banned(lambda limiter: limiter.penalize("k", value)),
    "ban of a bucket": lambda value: bucket_banned(lambda bucket: bucket.ban(value)),
    "max_delay": lambda value: Rule("a", "5/s", max_delay=value).max_delay,
    "warm_up": lambda value: Limit("5/s", warm_up=value).warm_up,
    "outbound timeout": own("timeout"),
    "outbound longest_pause": own("longest_pause"),
    "a clock": advanced,
}


SECONDS: dict[str | timedelta, float] = {"500ms": 0.5, "2s": 2, "0.5m": 30, " 10 s ": 10, "0.5": 0.5, "10 seconds": 10}
SECONDS[timedelta(seconds=10)] = 10


@pytest.mark.parametrize("place", PLACES)
def test_text_is_the_same_as_seconds(place: str) -> None:
    for text, seconds in SECONDS.items():
        assert PLACES[place](text) == PLACES[place](seconds) == seconds, text


@pytest.mark.parametrize("place", PLACES)
def test_other_text_is_a_mistake(place: str) -> None:
    for wrong in ("soon", "2 parsecs", "-2s", "1m30s", ""):
        with case(wrong), pytest.raises(ConfigError, match="expected seconds, or text such as '2s', '500ms'"):
            PLACES[place](wrong)


BY_DAYS = ("1w", "1 week", "7 days", timedelta(weeks=1))


@pytest.mark.parametrize("week", BY_DAYS)
def test_weeks_and_days(week: Any) -> None:
    """In every place that takes such long times."""
    for place in ("ban", "penalize", "ban of a bucket", "outbound timeout", "outbound longest_pause", "a clock"):
        assert PLACES[place](week) == 7 * 86_400
    ban = Ban(after=2, within=week, duration=week, most="2 weeks")
    assert (ban.within, ban.duration, ban.most) == (7 * 86_400, 7 * 86_400, 14 * 86_400)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_true_and_false_are_no_durations(place: str, value: object) -> None:
    """Although Python counts them as 1 and 0."""
    with pytest.raises(ValueError, match="expected"):
        PLACES[place](value)


@pytest.mark.parametrize("wrong", [True, False])
def test_true_and_false_are_no_timeouts(wrong: Any) -> None:
    """Of waits, sync and async, and of limited functions."""
    limiter, other = Limiter("memory://"), AsyncLimiter("memory://")
    calls: list[Callable[[], object]] = [
        lambda: limiter.wait("k", "1/minute", timeout=wrong),
        lambda: asyncio.run(other.wait("k", "1/minute", timeout=wrong)),
        lambda: limiter.limited("1/minute", timeout=wrong),
        lambda: other.limited("1/minute", timeout=wrong),
        lambda: asyncio.run(other.ban("k", wrong)),
        lambda: asyncio.run(other.penalize("k", wrong)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="expected"):
            call()


@pytest.mark.parametrize("option", ["processes", "ipv6_prefix", "new_buckets", "refusal_logs", "timeout", "reload"])
def test_true_is_no_number_of_an_option(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: .*expected"):
        Settings(rules=[], **{option: True})


def test_a_penalty_has_an_end() -> None:
    """A ban without seconds is permanent; a penalty adds seconds."""
    limiter, other = Limiter("memory://"), AsyncLimiter("memory://")
    with pytest.raises(ValueError, match=r"seconds is None, expected the seconds to add"):
        limiter.penalize("k", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seconds is None, expected the seconds to add"):
        asyncio.run(other.penalize("k", None))  # type: ignore[arg-type]
    assert limiter.banned("k").allowed


@pytest.mark.parametrize(("written", "text"), [("10:00", "10m"), ("1:30", "90s"), ("10:00:00", "10h"), ("24:00:00", "1d")])
def test_a_time_with_colons_in_a_rule_file(tmp_path: Path, written: str, text: str) -> None:
    """YAML 1.1 reads a number of seconds; the error shows the duration."""
    file = tmp_path / "rules.yaml"
    for fields in (f"ban: {{after: 2, within: {written}, for: 1d}}", f"max_delay: {written}"):
        file.write_text(f"rules: [{{name: a, qps: 5, {fields}}}]\n")
        with pytest.raises(ConfigError, match=rf":1: .*{written} is \d+ in YAML, expected {text} for the duration"):
            load_rules(file)


def test_waiting() -> None:
    """Each way to wait takes text; a wait of no time is a hit."""
    assert waited("2m") == waited(120) == 90
    assert waited("1m") == waited("0s") == -1

    async def later() -> bool:
        async with AsyncLimiter("memory://") as limiter:
            await limiter.hit("k", "1/minute")
            await limiter.ban("other", "1h")
            return (await limiter.wait("k", "1/minute", timeout="1s")).allowed

    assert not asyncio.run(later())
    with frozen() as clock, Limiter("memory://") as limiter:
        limited = limiter.limited("1 per 90 seconds", timeout="2m")(lambda: clock.now)
        assert limited() + 90 == limited()


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As text, and as the numbers that they were."""
    for value, seconds in (("250ms", 0.25), ("0.25", 0.25), ("2", 2)):
        monkeypatch.setenv("LIMITGATE_TIMEOUT", value)
        monkeypatch.setenv("LIMITGATE_RELOAD", value)
        assert (Settings(rules=[]).timeout, Settings(rules=[]).reload) == (seconds, seconds)
    monkeypatch.setenv("LIMITGATE_TIMEOUT", "2m")
    with pytest.raises(ConfigError, match="timeout: expected at most 60"):
        Settings(rules=[])


def test_a_rule_file(tmp_path: Path) -> None:
    """Tests in a rule file take text, too."""
    file = tmp_path / "rules.yaml"
    file.write_text(
        "rules: [{name: a, limits: [1 per 5 minutes]}]\n"
        "tests:\n  - {given: {path: /}, expect: {remaining: 0}}\n"
        "  - {given: {path: /, at: 1m}, expect: {allowed: false, rule: a, retry_after: 4m}}\n"
        "  - {given: {path: /, at: 300}, expect: {remaining: 0}}\n"
    )
    load_rules(file)
    assert CliRunner().invoke(limitgate, ["check", str(file)], catch_exceptions=False).exit_code == 0


def test_the_command(tmp_path: Path) -> None:
    """``--timeout`` takes what ``--for`` takes."""
    file = tmp_path / "rules.yaml"
    file.write_text("rules: [{name: a, qps: 5}]\n")
    words = ["explain", "GET", "/", "--rules", str(file), "--timeout"]
    assert [CliRunner().invoke(limitgate, [*words, each]).exit_code for each in ("500ms", "2", "soon", "2m")] == [0, 0, 2, 2]


def test_what_is_logged_of_a_ban_is_in_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "limitgate.audit"), Limiter("memory://") as limiter:
        limiter.ban("k", "1h", reason="abuse")
    assert caplog.records[0].seconds == 3600  # type: ignore[attr-defined]


def test_a_transport() -> None:
    RateLimitTransport("10/second", timeout="2m", longest_pause="1h").close()
