"""Other rules while the service runs: whole or not at all, between two requests, and whatever was owed before stays owed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, enumerate as enumerate_threads
from typing import Any
from weakref import WeakSet, ref

import flask
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from limitgate import (
    AsyncRedisStore,
    ConfigError,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Rule,
    ausage,
    limit,
    load_rules,
    testing,
)
from limitgate.fastapi import RateLimit
from limitgate.flask import LimitGate as FlaskLimitGate
from limitgate.gate.flow import arun
from limitgate.gate.gate import Gate
from limitgate.gate.late import usage
from limitgate.gate.lifecycle import build, reload
from limitgate.gate.lifecycle.reload import WatchedRules
from limitgate.http.request import ASGIRequest, WSGIRequest
from limitgate.process.background import Poller
from tests.support.clock import Clock
from tests.support.django_app import WAYS
from tests.support.doors import (
    SITES,
    ASGISite,
    Site,
    Wire,
    WSGISite,
    asgi_reply,
    http_scope,
    until,
    websocket_scope,
    wsgi_environ,
)
from tests.support.interpreter import needs_gil
from tests.support.observed import Recorder
from tests.support.permissions import a_public_folder, without_privileges
from tests.support.redis_server import RedisServer

NEVER = 86_400.0
"""Seconds between two looks of a gate that the test has look."""
SOON = 0.02


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder of rules: two a minute, for everything and everybody together."""
    folder = tmp_path / "config"
    folder.mkdir()
    write(folder, "limits: [2/minute]")
    return folder


@pytest.fixture(autouse=True)
def _seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "limitgate")


@pytest.fixture(autouse=True)
def _looked_no_longer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The gates of a test look for rules until it ends: what they say of its folder then is no part of another test."""
    started: WeakSet[Poller] = WeakSet()
    start = Poller.start

    def noted(poller: Poller, *, in_children: bool = False) -> None:
        started.add(poller)
        start(poller, in_children=in_children)

    monkeypatch.setattr(Poller, "start", noted)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)  # about what the suite has frozen; counting takes 10 ms
    yield
    for poller in list(started):
        poller.stop()
        if poller._thread is not None:
            poller._thread.join(20)


def write(folder: Path, *rules: str, name: str = "default", head: str = "") -> None:
    """Write a rule file: each rule is of its number's name, counts everybody together, and says this besides."""
    entries = [f"- {{name: r{number}, key: [global], {rule}}}" for number, rule in enumerate(rules)]
    (folder / f"{name}.yaml").write_text("\n".join([f"tier: {name}", head, "rules:", *entries, ""]))


def look(gate: Gate | None) -> None:
    """Look until whatever has changed is in force, or refused, and what was in force before is gone."""
    assert gate is not None
    assert gate.poller is not None
    for _ in range(3):
        gate.poller.poll()


def limits(gate: Gate | None) -> dict[str, list[str]]:
    """The limits in force, by rule, of the default tier."""
    assert gate is not None
    return {rule.name: [str(limit) for limit in rule.every_limit] for rule in gate.rules.rule_set.tiers["default"]}


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What was logged at a level, since it was asked last."""
    lines = [record.getMessage() for record in caplog.records if record.levelno == level and "rules:" not in record.msg]
    caplog.clear()
    return lines


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def site(request: pytest.FixtureRequest, config: Path) -> Iterator[Site]:
    """A small application at both doors, which looks when the test says so."""
    with request.param(rules=config, reload=NEVER, store=MemoryStore(Clock())) as made:
        yield made


# --- it looks by itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", SITES, ids=lambda site: site.door)
def test_an_edit_takes_effect_by_itself(door: type[Site], config: Path) -> None:
    """Without lifespan events, and without a request."""
    with door(rules=config, reload=SOON, store=MemoryStore(Clock())) as site:
        assert site.statuses(3) == [200, 200, 429]
        write(config, "limits: [4/minute]")
        until(lambda: limits(site.app.gate) == {"r0": ["4/minute"]})
        assert site.statuses(3) == [200, 200, 429]


def test_flask_follows_in_requests_and_in_its_overview(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option comes from the application's own configuration, and the rules are named by their path there."""
    app = flask.Flask("site")
    app.config.update(LIMITGATE_RULES=str(config), LIMITGATE_RELOAD=SOON)
    app.add_url_rule("/", view_func=lambda: "hello", endpoint="hello")
    FlaskLimitGate(app)
    gate = app.extensions["limitgate"].gate
    write(config, "limits: [1/minute]")
    until(lambda: limits(gate) == {"r0": ["1/minute"]})
    assert [app.test_client().get("/").status_code for _ in range(2)] == [200, 429]
    assert "1/minute" in app.test_cli_runner().invoke(args=["limitgate"]).output


@pytest.mark.parametrize("way", ["wsgi", "asgi"])
def test_django_follows(way: str, config: Path) -> None:
    """In threads and on an event loop."""
    from django.http import HttpResponse
    from django.urls import path

    with WAYS[way].project(path("", lambda _: HttpResponse("hello")), LIMITGATE={"RULES": str(config), "RELOAD": SOON}) as site:
        assert [site.ask("/").status_code for _ in range(3)] == [200, 200, 429]
        write(config, "limits: [3/minute]")
        deadline = time.monotonic() + 20
        while site.ask("/").status_code == 429:
            assert time.monotonic() < deadline


def test_the_option_is_a_variable_too(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIMITGATE_RELOAD`` says the seconds; without it nobody looks."""
    assert LimitGateWSGI(None, rules=config).gate.poller is None
    monkeypatch.setenv("LIMITGATE_RELOAD", "0.02")
    gate = LimitGateWSGI(None, rules=config).gate
    write(config, "limits: [7/minute]")
    until(lambda: limits(gate) == {"r0": ["7/minute"]})


def test_rules_that_were_loaded_are_known_by_their_path(config: Path) -> None:
    """A rule set that was loaded before, to fail at start, is looked for where it was loaded from."""
    rules = load_rules(config)
    write(config, "limits: [9/minute]")
    gate = LimitGateWSGI(None, rules=rules, reload=NEVER).gate
    assert limits(gate) == {"r0": ["2/minute"]}
    look(gate)
    assert limits(gate) == {"r0": ["9/minute"]}


def test_reloaded_rules_keep_the_name_that_was_given(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path stays relative: ``limitgate status`` shows it."""
    monkeypatch.chdir(config.parent)
    gate = LimitGateWSGI(None, rules="config", reload=NEVER).gate
    write(config, "limits: [9/minute]")
    look(gate)
    assert limits(gate) == {"r0": ["9/minute"]}
    assert gate.rules.rule_set.source == "config"


@pytest.mark.parametrize("rules", [[], [Rule("a", "1/s")]], ids=["none", "rules"])
def test_rules_in_python_cannot_be_looked_at(rules: list[Rule]) -> None:
    """Nobody would look, so it is a mistake to ask for it."""
    with pytest.raises(ConfigError, match=r"reload: .* expected the path of a file or folder"):
        LimitGateWSGI(None, rules=rules, reload=1)


@pytest.mark.parametrize("seconds", [-1, 0.001, 1e9, float("nan"), float("inf"), "often"])
def test_seconds_that_make_no_sense_are_a_mistake(seconds: Any, config: Path) -> None:
    """Neither backwards nor without a pause."""
    with pytest.raises(ConfigError, match=r"reload: .*expected"):
        LimitGateWSGI(None, rules=config, reload=seconds)


def test_the_first_line_says_so(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who reads the log finds out whether an edit will be seen."""
    LimitGateWSGI(None, rules=config, reload=1.5)
    assert f"from {config}, polled every 1.5 s; store" in caplog.text


# --- what cannot be used ----------------------------------------------------------------------------------------------

MISTAKES = {
    "a field of another name": ("rules:\n- {name: a, limits: [1/s], pth: /}", "default.yaml:2: rules[0].pth: "),
    "a limit that is none": ("rules:\n- {name: a,\n   limits: [often]}", "default.yaml:3: rules[0].limits[0]: "),
    "no YAML": ("rules: [", "default.yaml:1: expected YAML"),
    "empty": ("", "default.yaml:1: empty, expected tier, callers and rules"),
    "no rules": ("tier: default", "no rules, expected some"),
    "no rule": ("rules: []", "no rules, expected some"),
    "another tier's rules": ("rules:\n- {name: a, limits: [1/s], tier: gold}", "default.yaml:2: rules[0].tier: "),
    "half a file": ("rules:\n- {name: a, limits: [1/s]}\n- {na", "default.yaml:3: expected YAML"),
    "bytes": ("\0\1\2", "default.yaml"),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_what_cannot_be_used_is_refused(
    site: Site, config: Path, caplog: pytest.LogCaptureFixture, text: str, message: str
) -> None:
    """The rules in force stay; one line says where the mistake is, however often it is looked at, and what was expected."""
    gate, before = site.app.gate, site.app.gate.rules
    (config / "default.yaml").write_text(text)
    for _ in range(3):
        look(gate)
    (line,) = told(caplog, logging.ERROR)
    assert message in line
    assert "expected" in line
    assert "LG034" in line
    assert gate.rules is before
    assert (gate.loads.ok, gate.loads.rejected, gate.loads.was_ok) == (1, 1, False)
    assert site.statuses(3) == [200, 200, 429]


def test_a_rule_that_a_limit_in_code_replaces_stays(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise each request of that view would fail."""
    endpoint = limit("3/minute", name="mine", replaces=["r0"])(lambda _: PlainTextResponse("hello"))
    app = LimitGate(Starlette(routes=[Route("/", endpoint)]), rules=config, reload=NEVER, store=MemoryStore(Clock()))
    assert asyncio.run(asgi_reply(app)).status == 200
    (config / "default.yaml").write_text("rules: [{name: other, qpm: 1}]")
    look(app.gate)
    (line,) = told(caplog, logging.ERROR)
    assert "LG034" in line
    assert "limit 'mine': replaces: there is no rule 'r0', expected one of " in line
    assert asyncio.run(asgi_reply(app)).status == 200


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_what_is_missing_is_refused(site: Site, config: Path, caplog: pytest.LogCaptureFixture, gone: str) -> None:
    """A folder without rule files, and no folder at all."""
    (config / "default.yaml").unlink()
    if gone == "folder":
        config.rmdir()
    look(site.app.gate)
    assert len(told(caplog, logging.ERROR)) == 1
    assert site.statuses(3) == [200, 200, 429]


def a_file_that_may_not_be_read(folder: Path) -> None:
    (folder / "default.yaml").chmod(0o000)


def a_folder_that_may_not_be_read(folder: Path) -> None:
    folder.chmod(0o000)


def a_file_for_the_folder(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    folder.write_text("rules: [")


def a_folder_for_the_file(folder: Path) -> None:
    (folder / "default.yaml").unlink()
    (folder / "default.yaml").mkdir()


def a_pipe_for_the_file(folder: Path) -> None:
    (folder / "default.yaml").unlink()
    os.mkfifo(folder / "default.yaml")


def a_link_to_itself(folder: Path) -> None:
    (folder / "default.yaml").unlink()
    (folder / "default.yaml").symlink_to("default.yaml")


def another_folder_without_rules(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    folder.mkdir()


@pytest.mark.parametrize(
    "change",
    [
        a_file_that_may_not_be_read,
        a_folder_that_may_not_be_read,
        a_file_for_the_folder,
        a_folder_for_the_file,
        a_pipe_for_the_file,
        a_link_to_itself,
        another_folder_without_rules,
    ],
)
def test_what_cannot_be_read_is_refused_until_it_can(change: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    """One line at level ERROR, and the rules in force stay; whoever puts a folder of rules there has it taken over."""
    with a_public_folder() as parent:
        folder = parent / "config"
        folder.mkdir()
        write(folder, "limits: [2/minute]")
        gate = LimitGateWSGI(None, rules=folder, reload=NEVER).gate
        change(folder)
        with without_privileges():
            for _ in range(2):
                look(gate)
        (line,) = told(caplog, logging.ERROR)
        assert "LG034" in line
        assert "expected" in line
        assert limits(gate) == {"r0": ["2/minute"]}
        folder.rename(folder.with_name("gone"))
        folder.mkdir()
        write(folder, "limits: [3/minute]")
        look(gate)
        assert limits(gate) == {"r0": ["3/minute"]}
        folder.with_name("gone").chmod(0o755)


def test_each_content_is_told_once_and_a_good_one_takes_over(
    site: Site, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bad, the same again, otherwise bad, good: the counts say how many were loaded, and how the last load ended."""
    gate, file, began = site.app.gate, config / "default.yaml", time.time()
    for text, errors in (("rules: [", 1), ("rules: [", 0), ("rules: {", 1)):
        file.write_text(text)
        file.touch()
        look(gate)
        assert len(told(caplog, logging.ERROR)) == errors
    write(config, "limits: [5/minute]")
    look(gate)
    assert (gate.loads.ok, gate.loads.rejected, gate.loads.was_ok) == (2, 2, True)
    assert began <= gate.loads.at <= time.time()
    assert told(caplog, logging.INFO) == [f"rules read again from {config}: changed r0"]


def test_a_mistake_that_is_taken_back_is_a_load_that_is_well(
    site: Site, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The alarm ends with it."""
    before = (config / "default.yaml").read_text()
    for text in ("rules: [", before):
        (config / "default.yaml").write_text(text)
        look(site.app.gate)
    assert site.app.gate.loads.was_ok
    assert told(caplog, logging.INFO) == [f"rules read again from {config}: no rule has changed"]


def test_further_mistakes_are_counted(site: Site, config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line, not one for each."""
    write(config, "limits: [a]", "limits: [b]", "limits: [c]")
    look(site.app.gate)
    (line,) = told(caplog, logging.ERROR)
    assert "(and 2 more)" in line


def test_a_mistake_of_our_own_leaves_the_rules_in_force(
    site: Site, config: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails, it is told, and the next content is looked at as ever."""
    monkeypatch.setattr(reload, "changes", lambda *_: 1 / 0)
    write(config, "limits: [5/minute]")
    look(site.app.gate)
    assert any("LG034" in line and "ZeroDivisionError" in line for line in told(caplog, logging.ERROR))
    assert limits(site.app.gate) == {"r0": ["2/minute"]}
    assert site.app.gate.loads.rejected == 1
    monkeypatch.undo()
    write(config, "limits: [6/minute]")
    look(site.app.gate)
    assert limits(site.app.gate) == {"r0": ["6/minute"]}


def test_a_look_that_fails_is_not_the_last_one(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on."""
    has_changed, failed = WatchedRules.has_changed, []

    def failing(self: WatchedRules) -> bool:
        if len(failed) < 3:
            failed.append(self)
            raise OSError("no more files can be opened")
        return has_changed(self)

    monkeypatch.setattr(WatchedRules, "has_changed", failing)
    gate = LimitGateWSGI(None, rules=config, reload=SOON).gate
    write(config, "limits: [6/minute]")
    until(lambda: limits(gate) == {"r0": ["6/minute"]})
    assert len(failed) == 3


# --- what is told of a change -----------------------------------------------------------------------------------------


def test_one_line_says_what_has_changed(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rules and callers by their names; and which rules begin anew, for which debt is forgotten."""
    key = "sha256:" + "0" * 64
    write(config, "limits: [2/minute]", "limits: [3/minute]", "limits: [1/day]", "limits: [9/s]")
    write(
        config, "limits: [20/minute]", name="vip", head=f"callers: [{{id: a, api_key: '{key}'}}, {{id: b, header: {{X: b}}}}]"
    )
    gate = LimitGateWSGI(None, rules=config, reload=NEVER).gate
    told(caplog, logging.INFO)
    write(config, "limits: [{limit: 2/minute, algorithm: sliding_window}]", "limits: [4/minute]", "limits: [1/day]")
    write(config, "limits: [30/minute]", "limits: [8/s]", name="vip", head=f"callers: [{{id: a, api_key: '{key[:-1]}1'}}]")
    look(gate)
    (line,) = told(caplog, logging.INFO)
    _, _, difference = line.partition(f"{config}: ")
    changed = "added vip/r1; removed r3; changed r0, r1, vip/r0"
    assert difference == f"{changed}; buckets reset r0 (sliding_window instead of gcra); callers changed a, b"


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_debt_is_kept(site: Site, config: Path) -> None:
    """Buckets have the same keys: what a client has used, it has used under the new count."""
    assert site.statuses(2) == [200, 200]
    write(config, "limits: [5/minute]")
    look(site.app.gate)
    assert site.statuses(4) == [200, 200, 200, 429]
    write(config, "limits: [3/minute]")
    look(site.app.gate)
    assert site.statuses(1) == [429]
    write(config, "limits: [6/minute]")
    look(site.app.gate)
    assert site.statuses(2) == [200, 429]


def test_figures_tell_the_limits_in_force(config: Path) -> None:
    """A limit that is gone is 0, with its rule or without, until it is there again."""
    recorder = Recorder()
    write(config, "limits: [5/second, 7/minute]", "qpd: 3")
    gate = LimitGateWSGI(None, rules=config, reload=NEVER, observers=[recorder]).gate
    both = {("r0", "default", "second"): 5, ("r0", "default", "minute"): 7, ("r1", "default", "day"): 3}
    assert recorder.of("rule.limit") == both
    write(config, "limits: [4/second]")
    look(gate)
    assert recorder.of("rule.limit") == {**dict.fromkeys(both, 0), ("r0", "default", "second"): 4}
    write(config, "limits: [5/second, 7/minute]", "qpd: 3")
    look(gate)
    assert recorder.of("rule.limit") == both


def test_paths_keys_and_exemptions_follow(site: Site, config: Path) -> None:
    """Nothing that was worked out for a path before is used after a change: the same path is asked throughout."""
    assert site.statuses(3, "/a") == [200, 200, 429]
    for rule, statuses in (
        ("limits: [1/minute], path: /b", [200, 200]),
        ("limits: [1/hour], path: /a", [200, 429]),
        ("exempt: true", [200, 200]),
        ("deny: true", [403, 403]),
        ("limits: [1/hour], shadow: true", [200, 200]),
        ("limits: [1/day], cost: 1, methods: [POST]", [200, 200]),
        ("limits: [1/day]", [200, 429]),
    ):
        write(config, rule)
        look(site.app.gate)
        assert site.statuses(2, "/a") == statuses, rule


def test_callers_and_tiers_follow(site: Site, config: Path) -> None:
    """A new key is known, an old one is not any more, and a tier comes and goes."""
    headers = {"X-API-Key": "secret"}
    digest = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    assert site.statuses(3, headers=headers) == [200, 200, 429]
    write(config, "limits: [5/hour]", name="vip", head=f"callers: [{{id: a, api_key: '{digest}'}}]")
    look(site.app.gate)
    assert site.statuses(6, headers=headers) == [200] * 5 + [429]
    assert site.statuses(1) == [429]
    (config / "vip.yaml").unlink()
    look(site.app.gate)
    assert site.statuses(1, headers=headers) == [429]


def test_the_count_of_invented_buckets_goes_on(config: Path) -> None:
    """A change of rules gives nobody another thousand buckets."""
    file = config / "default.yaml"
    file.write_text("rules: [{name: a, key: ['header:X-A'], limits: [1/minute]}]")
    site = WSGISite(rules=config, reload=NEVER, new_buckets=2, store=MemoryStore(Clock()))
    for n in range(3):
        site.ask(headers={"X-A": f"{n}"})
    file.write_text("rules: [{name: a, key: ['header:X-A'], limits: [2/minute]}]")
    look(site.app.gate)
    overflowed = site.app.gate.overflowed
    assert site.ask(headers={"X-A": "new"}).status == 200
    assert site.app.gate.overflowed == overflowed + 1


# --- a request ends under the rules that it began with ----------------------------------------------------------------


class Paused:
    """An ASGI application in which each request waits until the test lets it go on, and then does what it is told."""

    def __init__(self) -> None:
        self.inside = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.found: Any = None

    async def act(self, scope: Any) -> Any:
        """What a request does once it goes on."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.inside.set()
        await self.goes_on.wait()
        self.found = await self.act(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def changed_in_the_middle(app: Paused, gate: LimitGate, change: Any) -> Any:
    """The reply to a request while which the rules change."""
    asking = asyncio.ensure_future(asgi_reply(gate))
    await app.inside.wait()
    change()
    look(gate.gate)
    app.goes_on.set()
    return await asking


def test_usage_tells_of_the_rules_it_began_with(config: Path) -> None:
    """By name, and all that apply."""

    class Asking(Paused):
        async def act(self, scope: Any) -> Any:
            asked = () if self.found else ((), ("r0",), ("r1",))
            return [[(window.rule, window.limit) for window in await ausage(scope, *names)] for names in asked] or self.found

    async def main() -> None:
        app = Asking()
        write(config, "limits: [2/minute]", "limits: [9/hour], path: /elsewhere")
        gate = LimitGate(app, rules=config, reload=NEVER)
        reply = await changed_in_the_middle(app, gate, lambda: write(config, "limits: [7/minute]"))
        assert app.found == [[("r0", 2)], [("r0", 2)], [("r1", 9)]]
        assert reply.rate["x-ratelimit-limit"] == "2"
        assert (await asgi_reply(gate)).rate["x-ratelimit-limit"] == "7"

    asyncio.run(main())


def test_refunds_are_those_of_the_rules_it_began_with(config: Path) -> None:
    """An outcome that does not count by the old rules is refunded, whatever the new ones say."""

    async def main() -> None:
        app = Paused()
        write(config, "limits: [2/minute], charge_if: {status: [401]}")
        gate = LimitGate(app, rules=config, reload=NEVER, store=MemoryStore(Clock()))
        await changed_in_the_middle(app, gate, lambda: write(config, "limits: [3/minute]"))
        assert (await asgi_reply(gate)).rate["x-ratelimit-remaining"] == "2"

    asyncio.run(main())


def test_the_real_cost_goes_to_the_rules_it_began_with(config: Path) -> None:
    """What is settled at the end, too."""

    class Settling(Paused):
        async def act(self, scope: Any) -> bool:
            if not self.found:
                scope["limitgate"].settle(cost=4)
            return True

    async def main() -> None:
        app = Settling()
        write(config, "limits: [10/minute]")
        gate = LimitGate(app, rules=config, reload=NEVER, store=MemoryStore(Clock()))
        await changed_in_the_middle(app, gate, lambda: write(config, "limits: [20/minute]", "limits: [5/hour]"))
        assert (await asgi_reply(gate)).rate["x-ratelimit-remaining"] == "4"
        assert gate.gate is not None
        decision = (await gate.gate.acheck(ASGIRequest(http_scope()))).decision
        assert decision is not None
        assert {window.rule: window.used for window in decision.windows} == {"r0": 6, "r1": 2}

    asyncio.run(main())


def test_further_limits_know_the_tiers_it_began_with(config: Path) -> None:
    """A dependency that is asked late finds the caller that the request came as."""
    digest = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    head = f"callers: [{{id: a, api_key: '{digest}'}}]"
    write(config, "limits: [99/minute]")
    write(config, "limits: [9/minute]", name="vip", head=head)
    late = RateLimit("1/minute", name="late", key=["caller"])

    class Late(Paused):
        async def act(self, scope: Any) -> Any:
            return await scope["limitgate.exchange"].afurther([(late.rule, ())])

    async def main() -> None:
        app = Late()
        gate = LimitGate(app, rules=config, reload=NEVER, store=MemoryStore(Clock()))
        known = {"X-API-Key": "secret"}
        asking = asyncio.ensure_future(asgi_reply(gate, headers=known))
        await app.inside.wait()
        (config / "vip.yaml").unlink()
        look(gate.gate)
        app.goes_on.set()
        assert (await asking).status == 200
        assert (await asgi_reply(gate, headers=known)).status == 200  # now it is just an address, with a bucket of its own
        assert (await asgi_reply(gate)).status == 429

    asyncio.run(main())


def test_messages_go_by_the_rules_of_the_handshake(config: Path) -> None:
    """A WebSocket ends under its rules, however long it is open; the next one has the new ones."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": "x"})

    async def main() -> None:
        write(config, "limits: [3/minute], per: message")
        gate = LimitGate(app, rules=config, reload=NEVER, store=MemoryStore(Clock()))
        message = {"type": "websocket.receive", "text": "x"}

        class Slow(Wire):
            async def receive(self) -> dict[str, Any]:
                if self.received == 2:
                    write(config, "limits: [1/minute], per: message")
                    look(gate.gate)
                return await super().receive()

        wire = await Slow({"type": "websocket.connect"}, *[message] * 5).call(gate, websocket_scope())
        assert wire.types == ["websocket.accept", *["websocket.send"] * 3, "websocket.close"]
        wire = await Wire({"type": "websocket.connect"}, *[message] * 5).call(gate, websocket_scope())
        assert wire.types == ["websocket.accept", "websocket.close"]

    asyncio.run(main())


def test_places_in_flight_are_given_back(config: Path) -> None:
    """Of a limit that was changed meanwhile, and of one that is gone: nobody stays in flight for ever."""

    async def main() -> None:
        app, store = Paused(), MemoryStore(Clock())
        write(config, "limits: [1 at once]", "limits: [1 at once], path: /")
        gate = LimitGate(app, rules=config, reload=NEVER, store=store)
        asking = asyncio.ensure_future(asgi_reply(gate))
        await app.inside.wait()
        assert (await asgi_reply(gate)).status == 429
        write(config, "limits: [2 at once]")
        look(gate.gate)
        second = asyncio.ensure_future(asgi_reply(gate))
        app.inside.clear()
        await app.inside.wait()
        assert (await asgi_reply(gate)).status == 429
        app.goes_on.set()
        assert [(await each).status for each in (asking, second)] == [200, 200]
        assert [(await asgi_reply(gate)).status for _ in range(3)] == [200] * 3
        write(config, "limits: [1 at once]", "limits: [1 at once], path: /")
        look(gate.gate)
        assert [(await asgi_reply(gate)).status for _ in range(3)] == [200] * 3

    asyncio.run(main())


def test_those_who_wait_keep_their_turns(config: Path) -> None:
    """A turn that was booked comes when it was promised; whoever comes later waits behind it by the new rules."""

    async def main() -> None:
        write(config, "limits: [1/minute], max_delay: 60")
        gate = LimitGate(PlainTextResponse("x"), rules=config, reload=NEVER)
        with testing.frozen() as clock:
            assert (await asgi_reply(gate)).status == 200
            began = clock.now
            assert (await asgi_reply(gate)).status == 200
            assert clock.now == pytest.approx(began + 60, abs=0.01)
            write(config, "limits: [2/minute], max_delay: 60")
            look(gate.gate)
            assert (await asgi_reply(gate)).status == 200
            assert clock.now == pytest.approx(began + 60, abs=0.01)
            assert (await asgi_reply(gate)).status == 200
            assert clock.now == pytest.approx(began + 90, abs=0.01)

    asyncio.run(main())


def test_gates_in_gates_follow_each_for_itself(config: Path) -> None:
    """The outer one changes while a request is inside of the inner one."""

    async def main() -> None:
        app = Paused()
        inner = LimitGate(app, rules=[Rule("inner", "5/minute", key=["global"])])
        outer = LimitGate(Starlette(routes=[Mount("/", inner)]), rules=config, reload=NEVER)
        reply = await changed_in_the_middle(app, outer, lambda: write(config, "limits: [50/minute]"))
        assert reply.rate["x-ratelimit-limit"] == "2"
        assert (await asgi_reply(outer)).rate["x-ratelimit-limit"] == "5"

    asyncio.run(main())


def test_a_slow_identify_does_not_mix_rules(config: Path) -> None:
    """The rules are taken when the request comes, not when its caller is known."""

    async def main() -> None:
        asked, known = asyncio.Event(), asyncio.Event()

        async def identify(_: Any) -> None:
            asked.set()
            await known.wait()

        gate = LimitGate(PlainTextResponse("x"), rules=config, reload=NEVER, identify=identify)
        asking = asyncio.ensure_future(asgi_reply(gate))
        await asked.wait()
        write(config, "limits: [7/minute]")
        look(gate.gate)
        known.set()
        assert (await asking).rate["x-ratelimit-limit"] == "2"
        assert (await asgi_reply(gate)).rate["x-ratelimit-limit"] == "7"

    asyncio.run(main())


# --- traffic under change ---------------------------------------------------------------------------------------------

OLD = ("limits: [1000000/second]", "limits: [2000000/minute]")
NEW = ("limits: [3000000/minute]", "limits: [4000000/hour]")
SETS = {(("r0", 1_000_000), ("r1", 2_000_000)): "old", (("r0", 3_000_000), ("r1", 4_000_000)): "new"}
REQUESTS = int(os.environ.get("LIMITGATE_TEST_REQUESTS", "3000"))


def explained(windows: Any) -> str:
    """The rule set that explains the windows of a decision."""
    return SETS.get(tuple((window.rule, window.limit) for window in windows), "neither")


@contextmanager
def changing(gate: Gate | None, config: Path) -> Iterator[None]:
    """Have the rules change every 50 ms, in a thread of its own."""
    assert gate is not None
    ended = Event()

    def change() -> None:
        while not ended.wait(0.05):
            write(config, *(NEW if limits(gate) == {"r0": ["1000000/second"], "r1": ["2000000/minute"]} else OLD))
            look(gate)

    thread = Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert gate.loads.rejected == 0


async def slow(_: Any) -> None:
    """Identify nobody, after others had their turn."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("identify", [None, slow], ids=["prepared", "planned"])
def test_no_decision_is_of_a_mixture_property(identify: Any, config: Path) -> None:
    """Requests on an event loop, 50 at a time: each is decided by the old rules or by the new ones, as a whole."""
    write(config, *OLD)
    gate = LimitGate(None, rules=config, reload=NEVER, identify=identify).gate
    assert gate is not None
    found: Counter[str] = Counter()

    async def one() -> str:
        admission = await gate.acheck(ASGIRequest(http_scope()))
        assert admission.decision is not None
        by = explained(admission.decision.windows)
        await asyncio.sleep(0)
        assert explained(await arun(gate.store, usage(gate, admission, (), None))) == by
        return by

    async def main() -> None:
        while found.total() < REQUESTS or len(found) < 2:
            found.update(await asyncio.gather(*[one() for _ in range(50)]))

    with changing(gate, config):
        asyncio.run(main())
    assert set(found) == {"old", "new"}


def test_no_decision_in_threads_is_of_a_mixture_property(config: Path) -> None:
    """The same in four threads."""
    write(config, *OLD)
    gate = LimitGateWSGI(None, rules=config, reload=NEVER).gate
    assert gate is not None
    found: list[Counter[str]] = [Counter() for _ in range(4)]

    def ask(mine: Counter[str]) -> None:
        while mine.total() < REQUESTS // 4 or len(mine) < 2:
            decided = gate.check(WSGIRequest(wsgi_environ())).decision
            assert decided is not None
            mine[explained(decided.windows)] += 1

    with changing(gate, config):
        threads = [Thread(target=ask, args=[mine]) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(set(mine) == {"old", "new"} for mine in found)


# --- what a process keeps of the store --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_refusals_are_felt_no_longer(kind: type, config: Path, own_redis: RedisServer) -> None:
    """A client that was refused, so that nobody asked Redis any more, is asked about under the new count at once."""
    door = WSGISite if kind is RedisStore else ASGISite
    with door(rules=config, reload=NEVER, store=own_redis.url, timeout=5) as site:
        assert site.statuses(4) == [200, 200, 429, 429]
        assert site.app.gate.store.deny_cache
        write(config, "limits: [4/minute]")
        look(site.app.gate)
        assert site.statuses(3) == [200, 200, 429]


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_refusals_of_rules_that_stay_hold(kind: type, config: Path, own_redis: RedisServer) -> None:
    """The buckets of a rule that is read again are the same ones."""
    write(config, "limits: [2/minute]", "limits: [9/hour], path: /b")
    door = WSGISite if kind is RedisStore else ASGISite
    with door(rules=config, reload=NEVER, store=own_redis.url, timeout=5) as site:
        buckets = site.app.gate.rules.rule_set.tiers["default"][0].buckets
        write(config, "limits: [2/minute]", "limits: [8/hour], path: /b")
        look(site.app.gate)
        assert site.app.gate.rules.rule_set.tiers["default"][0].buckets == buckets


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_leases_are_given_back_at_once(kind: type, config: Path, own_redis: RedisServer) -> None:
    """What was taken in advance under the old rules is there for the new ones, and for other processes."""
    write(config, "limits: [100/day], lease: 50")
    door = WSGISite if kind is RedisStore else ASGISite
    with door(rules=config, reload=NEVER, store=own_redis.url, timeout=5) as site:
        assert site.statuses(3) == [200] * 3
        assert site.app.gate.store.leases
        write(config, "limits: [100/day]")
        look(site.app.gate)
        site.idle()
        assert not site.app.gate.store.leases
        until(lambda: int(site.ask().rate["x-ratelimit-remaining"]) > 85)


# --- documents --------------------------------------------------------------------------------------------------------


def test_the_openapi_document_follows(config: Path) -> None:
    """What was made by the old rules is made anew, and a mistake in the files does not take its limits away."""
    app = FastAPI()

    @app.get("/items")
    async def items() -> str:
        return "x"

    write(config, "limits: [2/minute], path: /items")
    app.add_middleware(LimitGate, rules=config, reload=NEVER, headers=["x-ratelimit-windows"])

    async def document() -> set[str]:
        reply = await asgi_reply(app, "/openapi.json")
        refused = reply.json()["paths"]["/items"]["get"]["responses"].get("429")
        return set() if refused is None else {name for name in refused["headers"] if name.startswith("X")}

    async def main() -> None:
        assert await document() == {"X-RateLimit-Limit-Minute", "X-RateLimit-Remaining-Minute"}
        gate: Any = app.middleware_stack
        while not isinstance(gate, LimitGate):
            gate = gate.app
        write(config, "limits: [2/hour], path: /items")
        look(gate.gate)
        assert await document() == {"X-RateLimit-Limit-Hour", "X-RateLimit-Remaining-Hour"}
        (config / "default.yaml").write_text("rules: [")
        look(gate.gate)
        assert await document() == {"X-RateLimit-Limit-Hour", "X-RateLimit-Remaining-Hour"}
        write(config, "limits: [2/hour], path: /elsewhere")
        look(gate.gate)
        assert await document() == set()

    asyncio.run(main())


# --- options wait for a restart ---------------------------------------------------------------------------------------


@pytest.fixture
def variables(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of variables that is read on purpose."""
    file = tmp_path / "limitgate.env"
    file.write_text("LIMITGATE_TIMEOUT=0.2\nLIMITGATE_KEY_PREFIX=one\n")
    monkeypatch.setenv("LIMITGATE_ENV_FILE", str(file))
    return file


def test_other_options_are_told_to_need_a_restart(variables: Path, config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By their names: a secret or the password of a URL is never told. What the code says instead is no change."""
    app = LimitGateWSGI(None, rules=config, reload=NEVER, timeout=0.3)
    gate = app.gate
    look(gate)
    assert told(caplog, logging.WARNING) == []
    secret = "0123456789abcdef"
    variables.write_text(f"LIMITGATE_TIMEOUT=0.4\nLIMITGATE_STORE=redis://:{secret}@h/0\nLIMITGATE_SECRET={secret}\n")
    look(gate)
    (line,) = told(caplog, logging.WARNING)
    assert line.startswith("LG035")
    assert ": key_prefix, secret, store (" in line or ": store, key_prefix, secret (" in line
    assert secret not in line
    look(gate)
    assert told(caplog, logging.WARNING) == []


def test_variables_that_do_not_matter_are_not_told(variables: Path, config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Comments, variables of others, and those that the environment says otherwise."""
    app = LimitGateWSGI(None, rules=config, reload=NEVER)
    gate = app.gate
    variables.write_text("# x\nLIMITGATE_KEY_PREFIX=one\nLIMITGATE_TIMEOUT=0.20\nOTHER=1\n")
    look(gate)
    assert told(caplog, logging.WARNING) == []


@pytest.mark.parametrize("text", ["LIMITGATE_IPV6_PREFIX=often\n", None], ids=["mistaken", "missing"])
def test_variables_with_which_no_restart_works_are_told(
    variables: Path, config: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    """Before somebody finds out by restarting."""
    app = LimitGateWSGI(None, rules=config, reload=NEVER)
    gate = app.gate
    look(gate)
    if text is None:
        variables.unlink()
    else:
        variables.write_text(text)
    look(gate)
    (line,) = told(caplog, logging.WARNING)
    assert "prevents a restart" in line
    assert "expected" in line


def test_flask_options_are_compared_with_their_own_configuration(
    variables: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What ``app.config`` says is not taken from the file."""
    app = flask.Flask("site")
    app.config["LIMITGATE_KEY_PREFIX"] = "two"
    FlaskLimitGate(app, rules=str(config), reload=NEVER)
    gate = app.extensions["limitgate"].gate
    look(gate)
    variables.write_text("LIMITGATE_KEY_PREFIX=three\nLIMITGATE_SHADOW=true\n")
    look(gate)
    (line,) = told(caplog, logging.WARNING)
    assert ": shadow (" in line


# --- the thread -------------------------------------------------------------------------------------------------------


def pollers() -> list[Thread]:
    return [thread for thread in enumerate_threads() if thread.name == "limitgate-reload"]


def test_it_ends_with_the_gate(config: Path) -> None:
    """Nothing but the application keeps a gate; the thread ends, too."""
    before = set(pollers())
    app = LimitGateWSGI(None, rules=config, reload=SOON)
    (thread,) = set(pollers()) - before
    gone = ref(app.gate)
    del app
    gc.collect()
    assert gone() is None
    until(lambda: not thread.is_alive())


def test_it_keeps_no_process_alive(config: Path) -> None:
    """A script that makes a gate ends with its last line."""
    script = f"from limitgate import LimitGateWSGI; app = LimitGateWSGI(None, rules={str(config)!r}, reload=3600)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_it_begins_and_ends_with_the_application(config: Path) -> None:
    """By lifespan events, where these are sent: as often as the application is started."""

    async def lifespan(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})

    gate = LimitGate(lifespan, rules=config, reload=SOON)
    assert gate.gate is not None
    assert gate.gate.poller is not None

    async def main() -> None:
        for _ in range(2):
            wire = Wire({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
            await wire.call(gate, {"type": "lifespan"})

    poller = gate.gate.poller
    began = poller._thread
    asyncio.run(main())
    assert began is not None
    until(lambda: not began.is_alive())
    assert not poller.is_running

    async def serving() -> None:
        shut_down = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if receive.calls:  # type: ignore[attr-defined]
                await shut_down.wait()
                return {"type": "lifespan.shutdown"}
            receive.calls = 1  # type: ignore[attr-defined]
            return {"type": "lifespan.startup"}

        receive.calls = 0  # type: ignore[attr-defined]

        async def send(_: Any) -> None: ...

        serving = asyncio.ensure_future(gate({"type": "lifespan"}, receive, send))
        write(config, "limits: [8/minute]")
        await asyncio.to_thread(until, lambda: limits(gate.gate) == {"r0": ["8/minute"]})
        shut_down.set()
        await serving

    asyncio.run(serving())
    assert not poller.is_running


@pytest.mark.parametrize("door", SITES, ids=lambda site: site.door)
def test_who_serves_looks(door: type[Site], config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be known before whether a server is going to fork, the first request tells."""
    monkeypatch.setattr(build, "is_going_to_fork", lambda: True)
    with door(rules=config, reload=SOON) as site:
        assert not site.app.gate.poller.is_running
        site.ask()
        assert site.app.gate.poller.is_running


def test_a_clock_that_stands_still_does_not_stop_it(config: Path) -> None:
    """Nor does it run away: `limitgate.testing` is about turns and buckets."""
    with testing.frozen(), testing.off():
        gate = LimitGateWSGI(None, rules=config, reload=SOON).gate
        write(config, "limits: [8/minute]")
        until(lambda: limits(gate) == {"r0": ["8/minute"]})


# --- what it takes from others ----------------------------------------------------------------------------------------


def many_rules() -> list[str]:
    return [f"limits: [5/s, {n + 1}/hour], path: ['/api/v{n}/{{id}}', '/b/{n}/**'], methods: [GET, POST]" for n in range(300)]


def test_a_large_set_is_not_freed_in_one_go(config: Path) -> None:
    """While the interpreter frees a tree no other thread runs. Of 150 rules, 150,000 blocks take about 15 ms."""
    rules = many_rules()[:150]
    write(config, *rules)
    gate = LimitGateWSGI(None, rules=config, reload=NEVER).gate
    assert gate is not None
    write(config, *reversed(rules))
    assert gate.poller is not None
    gate.poller.poll()
    events, most, blocks = 0, 0, sys.getallocatedblocks()

    def count(*_: object) -> None:
        nonlocal events, most, blocks
        events += 1
        if events % 1000 == 0:
            now = sys.getallocatedblocks()
            most, blocks = max(most, blocks - now), now

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(count)
    try:
        look(gate)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert gate.loads.ok == 2
    assert most < 15_000, most


COLLECTIONS = """
import gc, json, logging, sys
from pathlib import Path
from limitgate import LimitGateWSGI
from limitgate.gate.lifecycle import reload

def load():
    config.write_text(config.read_text() + " ")
    gate.poller.poll()
    gate.poller.poll()

def generations():
    found = []
    note = lambda phase, told: phase == "start" and found.append(told["generation"])
    gc.callbacks.append(note)
    load()
    gc.callbacks.remove(note)
    return max(found)

logging.getLogger("limitgate").addHandler(logging.NullHandler())
reload.SPARED = 2
config = Path(sys.argv[1])
gate = LimitGateWSGI(None, rules=config, reload=86_400.0).gate
gc.collect()
gc.set_threshold(700, 10, 0)  # later versions begin with others
found = [generations() for _ in range(3)]
gc.collect()
found.append(generations())
gc.freeze()
frozen = gc.get_freeze_count()
print(json.dumps([found, generations(), gate.loads.ok, gc.get_freeze_count() > frozen / 2]))
"""


@needs_gil
def test_a_load_causes_no_full_collection(config: Path) -> None:
    """Only what is new is looked at, until load upon load has had it so; then all is, and so on.

    What an application has frozen itself, before a fork say, stays so. In a process of its own, as ours has frozen all.
    """
    write(config, *many_rules())
    command = [sys.executable, "-c", COLLECTIONS, str(config / "default.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[0, 0, 2, 0], 2, 6, True]


def test_a_child_that_is_forked_amid_a_load_collects_garbage(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load ends in the parent alone, so the child ends by itself what the load prevents."""
    gate = LimitGateWSGI(None, rules=config, reload=NEVER).gate
    assert gate is not None
    found: list[int] = []

    def load(_: WatchedRules) -> None:
        callbacks = len(gc.callbacks)
        child = os.fork()
        if not child:
            os._exit(callbacks - len(gc.callbacks))
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    monkeypatch.setattr(WatchedRules, "load", load)
    monkeypatch.setattr(reload, "FROZEN_BY_PYTHON", sys.maxsize)  # our tests freeze more
    monkeypatch.setattr(reload, "_age", lambda *_: None)
    write(config, "limits: [3/minute]")
    look(gate)
    assert found == [1]


def test_rules_that_are_gone_are_no_garbage(config: Path) -> None:
    """They are freed with the last request that has them, and not by Python's collector in the midst of another one."""
    gate = LimitGateWSGI(None, rules=config, reload=NEVER).gate
    assert gate is not None
    for count in (3, 4):
        write(config, f"limits: [{count}/minute]")
        look(gate)
    gc.collect()
    gc.disable()
    try:
        before = gate.rules
        gone = [ref(before), ref(before.planner), ref(before.rule_set.tiers["default"][0])]
        admission = gate.check(WSGIRequest(wsgi_environ()))
        del before
        write(config, "limits: [5/minute]")
        look(gate)
        assert all(each() is not None for each in gone)
        del admission
        look(gate)
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()
