"""What a gate logs of its refusals: that a bucket begins to refuse, whose it is, and that it has ceased."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from django.urls import path

from limitgate import Caller, Limit, LimitGate, MemoryStore, Rule
from limitgate.http.response import URN
from limitgate.observing import logs
from limitgate.observing.logs import QUIET
from tests.support.clock import Clock
from tests.support.django_app import WAYS, hello
from tests.support.doors import SITES, Site, Wire, websocket_scope
from tests.support.redis_server import RedisServer

KEY = {"X-API-Key": "demo-vip-key"}


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logs.log.name)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == logs.log.name]


@pytest.mark.parametrize("door", SITES)
def test_one_line_at_the_beginning_and_one_at_the_end(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """However many are refused between, of every bucket by itself; who is admitted is not told of."""
    clock = Clock()
    with door(Rule("api", "1/minute"), store=MemoryStore(clock)) as site:
        assert site.statuses(1) == [200]
        assert not lines(caplog)
        first = site.ask()
        assert lines(caplog) == [f"rule api begins to refuse ip=19….1 (refusal {first.json()['instance'].removeprefix(URN)})"]
        clock.advance(5)
        assert site.statuses(5) == [429] * 5
        assert site.statuses(2, peer="198.51.100.23") == [200, 429]
        clock.advance(QUIET + 60)
        assert site.statuses(2) == [200, 429]
    told = [line.partition(" (")[0] for line in lines(caplog)]
    assert told == [
        "rule api begins to refuse ip=19….1",
        "rule api begins to refuse ip=198….23",
        "rule api has ceased to refuse ip=19….1: refused 6 in 5 s",
        "rule api begins to refuse ip=19….1",
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [("masked", "ip=20….7"), ("full", "ip=203.0.113.7"), ("off", "")],
)
@pytest.mark.parametrize("door", SITES)
def test_names(door: type[Site], names: Any, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    """An address by its first and last characters, in full, or not at all."""
    with door(Rule("api", "1/minute"), store=MemoryStore(Clock()), names=names) as site:
        site.statuses(2, peer="203.0.113.7")
    assert lines(caplog)[0].partition(" (")[0] == " ".join(filter(None, ["rule api begins to refuse", shown]))


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (["api_key|ip"], "api_key=dem…key"),
        (["header:X-Tenant"], "header:x-tenant=a\ufffdb"),
        (["header:X-None", "method"], "ip=192.0.2.1 method=GET"),
        (["global"], ""),
        (["tier", "ip"], "tier=default ip=192.0.2.1"),
    ],
)
@pytest.mark.parametrize("door", SITES)
def test_parts_of_keys(door: type[Site], key: list[str], shown: str, caplog: pytest.LogCaptureFixture) -> None:
    """The part that counts for the client is named; credentials are masked even in full, and no line breaks."""
    with door(Rule("api", "1/minute", key=key), store=MemoryStore(Clock()), names="full") as site:
        site.statuses(2, headers={**KEY, "X-Tenant": "a\x1bb"})
    assert lines(caplog)[0].partition(" (")[0] == " ".join(filter(None, ["rule api begins to refuse", shown]))


@pytest.mark.parametrize("door", SITES)
def test_a_caller_that_the_application_names(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """By its id."""
    rules = [Rule("api", "1/minute", key=["caller"])]
    with door(*rules, store=MemoryStore(Clock()), identify=lambda _: Caller("acme-corporation")) as site:
        site.statuses(2)
    assert lines(caplog)[0].startswith("rule api begins to refuse caller=acm…ion (")


@pytest.mark.parametrize("door", SITES)
def test_nothing_is_logged_where_it_is_switched_off(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """``refusal_logs=0``."""
    with door(Rule("api", "1/minute"), store=MemoryStore(Clock()), refusal_logs=0) as site:
        assert site.statuses(3) == [200, 429, 429]
    assert not lines(caplog)


@pytest.mark.parametrize("door", SITES)
def test_where_nobody_logs_them_nothing_is_remembered(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """The level of the logger counts, which may change at any time."""
    caplog.set_level(logging.WARNING, logs.log.name)
    with door(Rule("api", "1/minute"), store=MemoryStore(Clock())) as site:
        assert site.statuses(3) == [200, 429, 429]
        assert not site.app.gate.refusals.log.episodes._open
        caplog.set_level(logging.INFO, logs.log.name)
        assert site.statuses(2) == [429, 429]
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("door", SITES)
def test_a_denial_is_no_refusal_of_a_bucket(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """Only what a bucket has refused is told."""
    with door(Rule("no", path="/no", deny=True), Rule("api", "9/minute"), store=MemoryStore(Clock())) as site:
        assert site.statuses(2, "/no") == [403, 403]
    assert not lines(caplog)


IN_SHADOW = [
    [Rule("api", "1/minute", shadow=True)],
    [Rule("api", "1/minute", "1/hour", shadow=True), Rule("real", "99/minute")],
    [Rule("real", "99/minute"), Rule("api", Limit("1/minute", algorithm="sliding_log"), shadow=True)],
    [Rule("api", "1 at once", Limit("1/minute", algorithm="fixed_window"), shadow=True)],
    [Rule("api", "1/minute", cost=lambda _: 1, shadow=True)],
]


@pytest.mark.parametrize("rules", IN_SHADOW)
@pytest.mark.parametrize("door", SITES)
def test_a_shadow_is_logged_as_such(door: type[Site], rules: list[Rule], caplog: pytest.LogCaptureFixture) -> None:
    """Its first refusal and its last one, as of a real one, of every bucket by itself; without an id, as nobody was refused."""
    clock = Clock()
    with door(*rules, store=MemoryStore(clock)) as site:
        assert site.statuses(3) == [200] * 3
        assert lines(caplog) == ["rule api begins to refuse ip=19….1 (shadow: these requests pass)"]
        assert vars(caplog.records[-1])["shadow"] is True
        assert site.statuses(2, peer="198.51.100.23") == [200, 200]
        clock.advance(QUIET + 4000)
        assert site.statuses(2) == [200, 200]
    assert lines(caplog)[1:] == [
        "rule api begins to refuse ip=198….23 (shadow: these requests pass)",
        "rule api has ceased to refuse ip=19….1: refused 2 in 0 s (shadow: these requests pass)",
        "rule api begins to refuse ip=19….1 (shadow: these requests pass)",
    ]


@pytest.mark.parametrize("door", SITES)
def test_a_gate_in_shadow_is_logged_as_such(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """By the option, too."""
    with door(Rule("api", "1/minute"), store=MemoryStore(Clock()), shadow=True) as site:
        assert site.statuses(3) == [200] * 3
    assert lines(caplog) == ["rule api begins to refuse ip=19….1 (shadow: these requests pass)"]


@pytest.mark.parametrize("door", SITES)
def test_a_real_refusal_beside_a_shadow_is_logged_as_real(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """The shadow refuses nobody who is refused already."""
    rules = [Rule("shadow", "2/minute", shadow=True), Rule("real", "3/minute")]
    with door(*rules, store=MemoryStore(Clock())) as site:
        assert site.statuses(5) == [200, 200, 200, 429, 429]
    assert lines(caplog)[0] == "rule shadow begins to refuse ip=19….1 (shadow: these requests pass)"
    assert lines(caplog)[1].startswith("rule real begins to refuse ip=19….1 (refusal ")
    assert len(lines(caplog)) == 2


@pytest.mark.parametrize("door", SITES)
@pytest.mark.parametrize(
    "rule",
    [Rule("api", Limit("1/minute", algorithm="sliding_log")), Rule("api", "2/minute", cost=lambda _: 2)],
    ids=["sliding_log", "cost"],
)
def test_plans_of_every_kind(door: type[Site], rule: Rule, caplog: pytest.LogCaptureFixture) -> None:
    """Not only those that are prepared."""
    with door(rule, store=MemoryStore(Clock())) as site:
        assert site.statuses(4) == [200, 429, 429, 429]
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("door", SITES)
def test_while_the_store_fails(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """What this process refuses by itself is told; the 503 of ``closed`` is no bucket's."""
    rules = Rule("api", "1/minute", path="/api", on_error="local"), Rule("shut", "1/minute", path="/shut", on_error="closed")
    with door(*rules, store="redis://127.0.0.1:1") as site:
        assert site.statuses(3, "/api") == [200, 429, 429]
        assert site.statuses(2, "/shut") == [503, 503]
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("door", SITES)
def test_refusals_that_redis_is_not_asked_about_are_counted(door: type[Site], caplog: pytest.LogCaptureFixture) -> None:
    """A refusal that holds is answered by this process, and is one of the episode all the same."""
    server = RedisServer()
    try:
        with door(Rule("api", "1/day"), store=server.url, timeout=10) as site:
            assert site.statuses(6) == [200] + [429] * 5
            (episode,) = site.app.gate.refusals.log.episodes._open.values()
            assert episode.count == 5
    finally:
        server.stop()
    assert len(lines(caplog)) == 1


def test_messages_over_a_websocket(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that is closed for its messages is told of, too."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    gate = LimitGate(app, rules=[Rule("chat", "1/minute", per="message")], store=MemoryStore(Clock()))
    message = {"type": "websocket.receive", "text": "x"}
    wire = Wire({"type": "websocket.connect"}, message, message)
    asyncio.run(gate(websocket_scope(), wire.receive, wire.send))
    assert lines(caplog)[0].startswith("rule chat begins to refuse ip=")


@pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
def test_django(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By the options of its settings."""
    options = {"rules": [Rule("api", "1/minute")], "store": MemoryStore(Clock())}
    with way.project(path("hello", hello), names="full", **options) as project:
        project.statuses("/hello", "/hello", "/hello")
    assert [line.partition(" (")[0] for line in lines(caplog)] == ["rule api begins to refuse ip=127.0.0.1"]


def test_a_crowd_of_clients_at_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack from everywhere costs a bounded number of lines and of objects."""
    assert logs.MOST <= 5_000
    monkeypatch.setattr(logs, "MOST", 400)
    with SITES[1](Rule("api", "1/minute"), store=MemoryStore(Clock()), refusal_logs=5) as site:
        site.app.gate.refusals.log.episodes._clock = lambda: 0.0  # on a busy machine it takes more than a minute
        for number in range(500):
            peer = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            assert site.statuses(2, peer=peer) == [200, 429]
        known = site.app.gate.refusals.log.episodes._open
        assert len(known) == logs.MOST
    assert len(lines(caplog)) == 5
