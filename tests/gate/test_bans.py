"""Bans of clients that a rule refuses too often: through both doors, on every store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from click.testing import Result

from limitgate import (
    AsyncRedisStore,
    Ban,
    Caller,
    ConfigError,
    Limit,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Rule,
    limit,
)
from limitgate.command.group import limitgate
from limitgate.errors import StoreError
from limitgate.gate import bans
from limitgate.gate.bans import BanNotes, Bans
from limitgate.gate.flow import run
from limitgate.gate.journal import MOST_BANS, Ban as Noted, Journal
from limitgate.limits.plan import Plan
from limitgate.process.forking import living
from tests.support.clock import Clock
from tests.support.command_line import CliRunner
from tests.support.doors import MOMENT, PATIENCE, ASGISite, Site, Wire, WSGISite, http_scope, websocket_scope
from tests.support.observed import Recorder

HOUR = 3600
BAN = Ban(after=3, within="10m", duration="1h", growing=2, most="3h")
ALGORITHMS = ("gcra", "fixed_window", "sliding_window", "sliding_log")


class World(NamedTuple):
    """A door and a store."""

    door: type[Site]
    url: str

    @contextlib.contextmanager
    def site(self, *rules: Rule, prefix: str | None = None, **options: Any) -> Iterator[Site]:
        options = {"store": self.url, "key_prefix": prefix or f"t{uuid4().hex}", **options}
        with self.door(*rules, **options) as site:
            yield site


@pytest.fixture(params=["memory", "redis_server", "redis_cluster"])
def url(request: pytest.FixtureRequest) -> str:
    return "memory://" if request.param == "memory" else request.getfixturevalue(request.param).url


@pytest.fixture(params=[ASGISite, WSGISite])
def world(request: pytest.FixtureRequest, url: str) -> World:
    return World(request.param, url)


def eventually(site: Site, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        site.idle()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_client_is_banned_after_refusals(world: World, algorithm: str) -> None:
    """The refusals tell of the limit; the one that leads to the ban, and all later ones, of the ban. Others notice nothing."""
    with world.site(Rule("api", Limit("2/minute", algorithm=algorithm), ban=BAN)) as site:
        assert site.statuses(2) == [200, 200]
        assert all(site.ask().wait <= 120 for _ in range(2))
        banned = [site.ask() for _ in range(6)]
        assert [reply.status for reply in banned] == [429] * 6
        assert all(HOUR - 60 < reply.wait <= HOUR for reply in banned)
        assert site.ask(peer="192.0.2.9").status == 200


def test_refusals_under_a_ban_neither_count_nor_prolong_it() -> None:
    """When it has ended the next one is longer, up to the longest; who stays away long enough begins with the first."""
    clock = Clock()
    for door in (ASGISite, WSGISite):
        with door(Rule("api", "2/minute", ban=BAN), store=MemoryStore(clock)) as site:
            for hours in (1, 2, 3, 3):
                assert site.statuses(5) == [200, 200, 429, 429, 429]
                for _ in range(50):
                    assert site.ask().wait == hours * HOUR
                clock.advance(hours * HOUR - 1)
                assert site.ask().wait == 1
                clock.advance(1)
            clock.advance(3 * HOUR)
            assert site.statuses(5) == [200, 200, 429, 429, 429]
            assert site.ask().wait == HOUR
            clock.advance(100 * HOUR)


def test_refusals_that_are_too_long_ago_do_not_count() -> None:
    """Of those within the last ten minutes there have to be three."""
    clock = Clock()
    with WSGISite(Rule("api", "1/hour", ban=BAN), store=MemoryStore(clock)) as site:
        assert site.statuses(2) == [200, 429]
        for _ in range(4):
            clock.advance(301)
            assert site.ask().wait < HOUR
        clock.advance(200)
        assert site.ask().wait == HOUR


def test_it_bans_in_the_buckets_of_the_refusing_rule_only(world: World) -> None:
    """A rule with several limits counts them together; another rule of the request has no part in it."""
    limits = [Limit("3/minute"), Limit("2/hour", algorithm="fixed_window"), Limit("9/day", algorithm="sliding_log")]
    rules = [Rule("all", "100/minute"), Rule("login", *limits, path="/login", methods=["POST"], ban=BAN)]
    with world.site(*rules) as site:
        assert site.statuses(5, "/login", method="POST") == [200, 200, 429, 429, 429]
        assert HOUR - 60 < site.ask("/login", "POST").wait <= HOUR
        assert site.statuses(2, "/login") == site.statuses(2, "/") == [200, 200]


@pytest.mark.parametrize(
    "options",
    [
        {"key": ["api_key"]},
        {"key": ["header:X-Id"]},
        {"reserve": "20%"},
        {"lease": 2},
        {"max_delay": 0.01},
        {"cost": lambda _: 1},
        {"when": lambda _: True},
        {"charge_if": {"status": [200]}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_beside_it(world: World, options: dict[str, Any]) -> None:
    """Whatever way a request is decided, its refusal counts; and others are other clients."""
    limit = "9/minute" if "reserve" in options else "2/minute"
    with world.site(Rule("api", limit, ban=BAN, **options)) as site:
        headers = {"X-API-Key": "sesame", "X-Id": "me"}
        while site.ask(headers=headers).status == 200:
            pass
        assert site.statuses(2, headers=headers) == [429, 429]
        assert HOUR - 60 < site.ask(headers=headers).wait <= HOUR
        assert site.ask(headers={"X-API-Key": "another", "X-Id": "you"}, peer="192.0.2.9").status == 200


def test_limits_by_code_and_tiers(world: World) -> None:
    """The rule of a tier has a ban of its own, and limits that code gives are refused as others are."""
    rules = [
        Rule("api", "9/minute", lambda _: "2/minute", ban=BAN),
        Rule("api", "2/minute", tier="paid", ban={**vars_of(BAN), "for": "2h"}),
    ]

    def identify(request: Any) -> Any:

        return Caller("acme", tier="paid") if request.headers.get("x-paid") else None

    with world.site(*rules, identify=identify) as site:
        assert site.statuses(5) == site.statuses(5, headers={"X-Paid": "1"}, peer="192.0.2.9") == [200, 200, 429, 429, 429]
        assert HOUR - 60 < site.ask().wait <= HOUR
        assert 2 * HOUR - 60 < site.ask(headers={"X-Paid": "1"}, peer="192.0.2.9").wait <= 2 * HOUR


def vars_of(ban: Ban) -> dict[str, Any]:
    return {"after": ban.after, "within": ban.within, "growing": ban.growing, "most": ban.most}


def test_a_shadow_bans_nobody(world: World) -> None:
    """Neither a rule that is one, nor a gate."""
    with world.site(Rule("api", "1/minute", ban=BAN, shadow=True)) as site:
        assert site.statuses(9) == [200] * 9
    with world.site(Rule("api", "1/minute", ban=BAN), shadow=True) as site:
        assert site.statuses(9) == [200] * 9


def test_no_client_can_have_another_one_banned(world: World) -> None:
    """A refusal counts in the bucket that refuses: forged addresses and keys hurt themselves."""
    rules = [Rule("api", "1/minute", key=["api_key"], ban=BAN), Rule("all", "4/minute", ban=Ban(2, 60, 7200))]
    with world.site(*rules) as site:
        forged = {"X-Forwarded-For": "192.0.2.9", "X-API-Key": "guessed"}
        assert site.statuses(20, headers=forged) == [200] + [429] * 19
        assert HOUR - 60 < site.ask(headers=forged).wait <= 2 * HOUR
        assert site.ask(peer="192.0.2.9", headers={"X-API-Key": "mine"}).status == 200


def test_processes_share_the_count_and_the_ban(world: World) -> None:
    """Two services on one store: their refusals add up to one ban, which is longer the next time."""
    if world.url == "memory://":
        pytest.skip("each process has memory of its own")
    prefix, rule = f"t{uuid4().hex}", Rule("api", "1/minute", ban=Ban(4, 60, 3600, growing=2, most=7200))
    with world.site(rule, prefix=prefix) as one, world.site(rule, prefix=prefix) as other:
        assert one.ask().status == 200
        for site in (one, other, one):
            assert site.ask().wait <= 60
        assert HOUR - 60 < other.ask().wait <= HOUR
        for site in (one, other):  # which may repeat their refusals for a second
            eventually(site, lambda site=site: HOUR - 60 < site.ask().wait <= HOUR)  # type: ignore[misc]


def test_a_ban_is_begun_once_however_many_race(url: str) -> None:
    """Many threads and processes refuse at the same moment: one ban, not one longer than the other."""
    if url == "memory://":
        store: Any = MemoryStore()
        stores = [store] * 4
    else:
        stores = [RedisStore(url, local_refusals=False) for _ in range(4)]
    prefix, observers = f"t{uuid4().hex}", [Recorder() for _ in range(4)]
    rule = Rule("api", "1/minute", ban=Ban(5, 60, 100, growing=2, most=800))
    sites = [WSGISite(rule, store=store, key_prefix=prefix, observers=[seen]) for store, seen in zip(stores, observers)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: sites[number % 4].ask().status, range(200)))
    assert [60 < site.ask().wait <= 100 for site in sites] == [True] * 4
    for site in sites:
        site.close()
    assert sum(seen.of("rule.bans")[("api", "default")] for seen in observers) == 1


class Counting(MemoryStore):
    """Counts what it is asked, and how much of that at once."""

    answers_at_once = False
    takes_plain = measures_silence = True

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[Plan] = []
        self.now_under_way = self.most_under_way = 0
        self.fails = False

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        if getattr(plan, "verb", "") == "adjust":
            self.plans.append(plan)
            self.now_under_way += 1
            self.most_under_way = max(self.most_under_way, self.now_under_way)
            try:
                await asyncio.sleep(MOMENT)
                if self.fails:
                    raise StoreError("gone")
            finally:
                self.now_under_way -= 1
        return self.spend(plan)


async def flood(app: Any, peers: list[str]) -> list[int]:
    wires = [Wire({"type": "http.request", "body": b""}) for _ in peers]
    await asyncio.gather(*[wire.call(app, http_scope(peer=peer)) for wire, peer in zip(wires, peers)])
    return [wire.reply().status for wire in wires]


def test_a_flood_is_counted_together() -> None:
    """Refusals by one bucket have one call under way, however many there are, and all of them count."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        store = Counting()
        gated = LimitGate(app, rules=[Rule("api", "1/day", ban=Ban(1000, 60, 60))], store=store)
        statuses = await flood(gated, ["192.0.2.1"] * 500)
        assert statuses.count(429) == 499
        await asyncio.sleep(5 * MOMENT)
        assert store.most_under_way == 1
        assert sum(plan.charges[1].adjustment.back[0].refusals for plan in store.plans) == 499  # type: ignore[union-attr]
        assert len(store.plans) < 6

    asyncio.run(main())


def test_a_process_counts_for_so_many_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals by further buckets are left out, and nothing stays behind."""
    monkeypatch.setattr(bans, "MOST", 10)

    async def main() -> None:
        store = Counting()
        gated = LimitGate(_unused, rules=[Rule("api", "1/day", ban=Ban(1, 60, 60), cost=1)], store=store)
        peers = [f"192.0.2.{number}" for number in range(100)]
        for peer in peers:
            store.spend(Plan.spend(_charges(gated, peer)))
        assert await flood(gated, peers) == [429] * 100
        await asyncio.sleep(3 * MOMENT)
        assert store.most_under_way == len(store.plans) == 10
        store.fails = True  # the store's failure loses a count, and no more
        assert await flood(gated, ["192.0.2.99"] * 3) == [429] * 3
        await asyncio.sleep(3 * MOMENT)
        store.fails = False
        assert await flood(gated, ["192.0.2.99"]) == [429]
        await asyncio.sleep(3 * MOMENT)
        assert store._bans
        assert not any(each._under_way for each in living(Bans))

    asyncio.run(main())


async def _unused(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError


def _charges(gated: Any, peer: str) -> Any:
    """The charges to a client's bucket, as the gate makes them."""
    return Limiter(gated.gate.store).bucket(Rule("api", "1/day"), ip=peer)._operations._charges


def command(world: World, prefix: str, *words: str) -> Result:
    verb, *rest = words
    given = [verb, "--store", world.url, "--key-prefix", prefix, "--timeout", "10", *rest]
    return CliRunner().invoke(limitgate, given, catch_exceptions=False)


def test_bans_lists_it_and_pardon_lifts_it(world: World, tmp_path: Path) -> None:
    """A pardon forgets the refusals and the growth, too; what was used stays used."""
    if world.url == "memory://":
        pytest.skip("the command is for stores that processes share")
    prefix, rules = f"t{uuid4().hex}", tmp_path / "rules.yaml"
    rules.write_text("rules: [{name: api, limits: [1/minute], ban: {after: 2, within: 10m, for: 1h, growing: 2, most: 24h}}]")
    client = ["--rules", str(rules), "--rule", "api", "--ip", "192.0.2.1"]

    def listed() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(command(world, prefix, "bans", "--json").stdout)
        return found

    with world.site(rules=str(rules), prefix=prefix) as site:
        assert site.statuses(3) == [200, 429, 429]
        assert HOUR - 60 < site.ask().wait <= HOUR
        eventually(site, listed)
        (ban,) = listed()
        assert (ban["key"], ban["reason"]) == ("api ip=19….1", "refused 2 times within 600 s")
        assert HOUR - 60 < ban["retry_after"] <= HOUR
        assert "rule api" in command(world, prefix, "bans").stdout
        assert "banned" in command(world, prefix, "peek", *client).stdout
        assert command(world, prefix, "reset", *client, "-y").exit_code == 0
        assert command(world, prefix, "pardon", *client, "-y").exit_code == 0
        assert listed() == []
        eventually(site, lambda: site.ask().status == 200)
        assert site.statuses(2) == [429, 429]
        assert HOUR - 60 < site.ask().wait <= HOUR  # the first ban


def test_a_pardon_by_the_limiter(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets as that of the command does, and the list of bans shows the ban no more."""
    monkeypatch.setattr(bans, "PAUSE", MOMENT)
    prefix, rule = f"t{uuid4().hex}", Rule("api", "1/minute", ban=Ban(2, 600, HOUR, growing=3))
    store: Any = MemoryStore() if url == "memory://" else RedisStore(url)
    with WSGISite(rule, store=store, key_prefix=prefix) as site:
        limiter = Limiter(store, key_prefix=prefix)
        for _ in range(2):
            assert site.statuses(3)[1:] == [429, 429]
            assert HOUR - 60 < site.ask().wait <= HOUR
            eventually(site, Journal(store, prefix, PATIENCE).bans)
            bucket = limiter.bucket(rule, ip="192.0.2.1")
            bucket.pardon()
            assert not Journal(store, prefix, PATIENCE).bans()
            assert bucket.peek().retry_after <= 60


def test_bans_of_a_flood_are_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them soon, though no further refusal comes, except those that were pardoned meanwhile."""
    monkeypatch.setattr(bans, "PAUSE", 0.4)
    prefix, rule = f"t{uuid4().hex}", Rule("api", "1/minute", ban=Ban(1, 600, HOUR))
    store: Any = MemoryStore() if world.url == "memory://" else RedisStore(world.url)
    journal = Journal(store, prefix, PATIENCE)
    with world.site(rule, prefix=prefix, **({"store": store} if world.url == "memory://" else {})) as site:
        limiter = Limiter(store, key_prefix=prefix)
        for number in range(60):
            assert site.statuses(2, peer=f"192.0.2.{number}") == [200, 429]
        for number in range(50, 60):
            limiter.bucket(rule, ip=f"192.0.2.{number}").pardon()
        eventually(site, lambda: len(journal.bans()) == 50)
        for _ in range(30):
            site.idle()
        assert len(journal.bans()) == 50


class Late(MemoryStore):
    """Carries out what comes up before the journal is written for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.at_writing: Callable[[], object] | None = None

    def config(self, request: Any, timeout: float = 0) -> Any:
        if request.text is not None and self.at_writing is not None:
            at_writing, self.at_writing = self.at_writing, None
            at_writing()
        return super().config(request, timeout)


def test_a_pardon_while_the_journal_is_written() -> None:
    """The ban was looked up before, and written after it."""
    store, rule = Late(), Rule("api", "1/day", ban=Ban(1, 600, HOUR))
    notes = BanNotes(store, "p", PATIENCE)
    bucket = Limiter(store, key_prefix="p").bucket(rule, ip="192.0.2.1")
    bucket.ban(HOUR)
    store.at_writing = bucket.pardon
    (charge,) = bucket._operations._charges[:1]
    notes.add(Noted.by_rule("api", "", charge.key, time.time() + HOUR, ""), charge)
    notes.end()
    assert store.at_writing is None
    assert Journal(store, "p", PATIENCE).bans() == []


def test_bans_are_written_at_the_end(url: str) -> None:
    """When an application shuts down, or its event loop ends, none of its bans is missing in the journal."""
    sync_store: Any = MemoryStore() if url == "memory://" else RedisStore(url)
    peers = [f"192.0.2.{number}" for number in range(8)]

    async def main(prefix: str, *, has_lifespan: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b""})

        store = sync_store if url == "memory://" else AsyncRedisStore(url)
        gated = LimitGate(app, rules=[Rule("api", "1/day", ban=Ban(1, 60, HOUR))], store=store, key_prefix=prefix)
        for peer in peers:
            assert await flood(gated, [peer]) == [200]
            assert await flood(gated, [peer]) == [429]
        if has_lifespan:
            wire = Wire({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
            await wire.call(gated, {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}})
            assert len(Journal(sync_store, prefix, PATIENCE).bans()) == len(peers)

    for has_lifespan in (True, False):
        prefix = f"t{uuid4().hex}"
        asyncio.run(main(prefix, has_lifespan=has_lifespan))
        assert len(Journal(sync_store, prefix, PATIENCE).bans()) == len(peers)


def test_bans_are_written_at_exit(redis_server: Any) -> None:
    """A process that exits right after its refusals writes the bans first."""
    prefix = f"t{uuid4().hex}"
    code = f"""
from limitgate import Ban, LimitGateWSGI, Rule
def app(environ, start_response):
    start_response("200 OK", [])
    return [b""]
rule = Rule("api", "1/day", ban=Ban(1, 60, 3600))
gate = LimitGateWSGI(app, rules=[rule], store={redis_server.url!r}, key_prefix={prefix!r})
for number in range(8):
    for _ in range(2):
        environ = {{"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": f"192.0.2.{{number}}", "SERVER_NAME": "a"}}
        b"".join(gate(environ, lambda status, fields, error=None: None))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(Journal(RedisStore(redis_server.url), prefix, PATIENCE).bans()) == 8


def test_the_journal_is_written_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bans wait while the store fails: the last ones, as many as the journal keeps."""
    monkeypatch.setattr(bans, "PAUSE", MOMENT)
    monkeypatch.setattr(bans, "MOST_BANS", 3)
    store, peers = Broken(), [f"192.0.2.{number}" for number in range(5)]
    rule = Rule("api", "1/day", ban=Ban(1, 60, HOUR))
    with WSGISite(rule, store=store, key_prefix="p") as site:
        assert [site.ask(peer=peer).status for peer in peers for _ in range(2)] == [200, 429] * 5
        seen = store.failures
        eventually(site, lambda: store.failures > seen + 2)
        store.fails = False
        journal = Journal(store, "p", PATIENCE)
        eventually(site, journal.bans)
        last = [Limiter(store, key_prefix="p").bucket(rule, ip=peer).keys for peer in peers[-3:]]
        assert sorted(ban.keys for ban in journal.bans()) == sorted(last)


class Broken(MemoryStore):
    """Keeps no configuration until it is mended."""

    fails, failures = True, 0

    def config(self, request: Any, timeout: float = 0) -> Any:
        if self.fails:
            self.failures += 1
            raise StoreError("gone")
        return super().config(request, timeout)


def test_the_journal_keeps_the_bans_of_people(url: str) -> None:
    """Of more bans than it keeps those by rules go first, however long they are."""
    store: Any = MemoryStore() if url == "memory://" else RedisStore(url)
    journal = Journal(store, f"t{uuid4().hex}", PATIENCE)
    journal.note("ban", "api ip=1", ["key"], "scraper", 60, bans=True)
    until = time.time() + 1000

    run(store, journal.noting_bans([Noted.by_rule("r", "", f"k{number}", until, "") for number in range(MOST_BANS + 5)]))
    found = journal.bans()
    assert len(found) == MOST_BANS
    assert found[0].keys == ["key"]
    assert [event.action for event in journal.events()] == ["ban"]


def test_log_and_metrics(caplog: pytest.LogCaptureFixture, world: World) -> None:
    """A line for each ban, with the client's name masked, and a counter of its own."""
    seen = Recorder()
    caplog.set_level(logging.INFO, "limitgate.refusals")
    with world.site(Rule("api", "1/day", ban=BAN), observers=[seen]) as site:
        site.statuses(9)
        eventually(site, lambda: seen.new("rule.bans"))
        assert seen.of("rule.bans") == {("api", "default"): 1}
        assert seen.of("rule.decisions")["api", "default", "refused"] == 8
        lines = [record.getMessage() for record in caplog.records]
        assert lines.count("rule api bans ip=19….1 for 3600 s: refused 3 times within 600 s") == 1
        assert len(lines) == 2
    with world.site(Rule("plain", "1/day"), observers=[Recorder()]) as site:
        site.statuses(3)
        assert ("plain", "default") not in seen.of("rule.bans")


def test_failed_logins(world: World) -> None:
    """Refused attempts count under ``charge_if``, and no others do."""
    rule = Rule("login", "2/hour", ban=Ban(2, "10m", "2h"), charge_if={"status": [401]})
    answer = [401]

    def login(environ: Any, start_response: Any) -> list[bytes]:
        start_response(f"{answer[0]} Something", [("Content-Type", "text/plain")])
        return [b""]

    async def alogin(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": answer[0], "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with world.site(rule) as site:
        options: dict[str, Any] = {"rules": [rule], "store": world.url, "key_prefix": f"t{uuid4().hex}"}
        site.app = LimitGateWSGI(login, **options) if world.door is WSGISite else LimitGate(alogin, **options)
        answer[0] = 200
        assert site.statuses(9) == [200] * 9
        answer[0] = 401
        assert site.statuses(4) == [401, 401, 429, 429]
        assert HOUR < site.ask().wait <= 2 * HOUR


def test_requests_in_flight(url: str) -> None:
    """A rule with ``concurrency`` bans a client that asks for too many at once; what is in flight goes on to its end."""

    async def main() -> None:
        goes_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await goes_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        rule = Rule("api", concurrency=1, ban=BAN)
        gated = LimitGate(app, rules=[rule], store=url, key_prefix=f"t{uuid4().hex}")
        first = asyncio.create_task(flood(gated, ["192.0.2.1"]))
        await asyncio.sleep(5 * MOMENT)
        for _ in range(3):
            assert await flood(gated, ["192.0.2.1"]) == [429]
        goes_on.set()
        assert await first == [200]
        await asyncio.sleep(MOMENT)
        wire = Wire({"type": "http.request", "body": b""})
        await wire.call(gated, http_scope(peer="192.0.2.1"))
        assert HOUR - 60 < wire.reply().wait <= HOUR
        assert await flood(gated, ["192.0.2.9"]) == [200]
        await gated.gate.store.aclose()

    asyncio.run(main())


class Half(MemoryStore):
    """Decides about no request, so that this process limits by itself; it would count."""

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        if plan.verb == "spend":
            raise StoreError("no room to ask", "overload")
        return super().spend(plan, timeout)


@pytest.mark.parametrize("store", [MemoryStore, Half])
def test_messages_of_a_websocket(store: type[MemoryStore]) -> None:
    """A message that is refused counts, too, unless it is refused in place of the store."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    async def main() -> MemoryStore:
        gated = LimitGate(app, rules=[Rule("chat", "2/day", ban=BAN, per="message")], store=(kept := store()))
        for _ in range(4):
            messages = [{"type": "websocket.receive", "text": "hi"}] * 3
            wire = Wire({"type": "websocket.connect"}, *messages, {"type": "websocket.disconnect", "code": 1000})
            await wire.call(gated, websocket_scope(peer="192.0.2.1"))
        return kept

    assert bool(asyncio.run(main())._bans) is (store is MemoryStore)


def test_limits_of_endpoints(url: str) -> None:
    """`@limit` and a dependency of FastAPI take it as a rule does."""
    fastapi = pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from limitgate.fastapi import RateLimit

    app = fastapi.FastAPI()

    @app.get("/limited")
    @limit("1/minute", ban={"after": 2, "within": 60, "for": "1h"})
    def limited() -> str:
        return "hi"

    @app.get("/depends", dependencies=[fastapi.Depends(RateLimit("1/minute", ban=Ban(2, 60, HOUR)))])
    def depends() -> str:
        return "hi"

    app.add_middleware(LimitGate, rules=[Rule("all", "100/second")], store=url, key_prefix=f"t{uuid4().hex}")
    with TestClient(app) as client:
        for path in ("/limited", "/depends"):
            assert [client.get(path).status_code for _ in range(3)] == [200, 429, 429]
            assert HOUR - 60 < int(client.get(path).headers["retry-after"]) <= HOUR


def test_without_the_store(own_redis: Any) -> None:
    """Nothing counts, nothing fails; a ban that was seen holds on."""
    rule = Rule("api", "1/minute", ban=BAN, on_error="local")
    with WSGISite(rule, store=own_redis.url, timeout=0.2) as site:
        assert site.ask(peer="192.0.2.9").status == 200
        site.statuses(5)
        assert HOUR - 60 < site.ask().wait <= HOUR
        own_redis.stop()
        time.sleep(1.1)  # longer than a refusal is repeated
        assert HOUR - 60 < site.ask().wait <= HOUR
        assert site.statuses(9, peer="192.0.2.9") == [200] + [429] * 8
        assert site.ask(peer="192.0.2.9").wait <= 60


def test_refusals_in_place_of_the_store_do_not_count() -> None:
    """Where this process limits by itself, its refusals are not known to others, so they ban nobody."""
    store = Half()
    with WSGISite(Rule("api", "1/day", ban=Ban(1, 60, HOUR)), store=store) as site:
        assert site.statuses(5) == [200] + [429] * 4
    assert not store._bans


@pytest.mark.parametrize("prefix", ["a{b", "{}a"])
def test_a_prefix_that_no_count_can_have(prefix: str) -> None:
    """On a cluster the count has to be in the slot of its bucket."""
    with pytest.raises(ConfigError, match="expected a key_prefix such as"):
        WSGISite(Rule("api", "1/day", ban=BAN), key_prefix=prefix)
    WSGISite(Rule("api", "1/day"), key_prefix=prefix)


def test_nothing_is_asked_for_requests_that_pass(url: str) -> None:
    """A request that passes asks as much as without a ``ban``, and so does one that a ban refuses."""
    if url == "memory://":
        pytest.skip("memory is not called")

    async def main() -> None:
        spends = []
        for ban in (None, BAN):
            store = AsyncRedisStore(url, local_refusals=False)
            sent: list[Any] = []
            spend = store.aspend

            def aspend(plan: Any, timeout: float, *, spend: Callable[..., Any] = spend, sent: list[Any] = sent) -> Any:
                sent.append(plan.verb)
                return spend(plan, timeout)

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b""})

            store.aspend = aspend  # type: ignore[method-assign,assignment]
            gated = LimitGate(app, rules=[Rule("api", "5/day", ban=ban)], store=store, key_prefix=f"t{uuid4().hex}")
            for _ in range(20):
                await flood(gated, ["192.0.2.1"])
            spends.append(sent.count("spend"))
            assert sent.count("adjust") == (3 if ban else 0)
            await store.aclose()
        assert spends[0] == spends[1]

    asyncio.run(main())


def test_the_refusal_that_leads_to_a_ban_says_so(caplog: pytest.LogCaptureFixture, world: World) -> None:
    """Header, body, decision and usage agree, and its id stays that of the log."""
    with caplog.at_level(logging.INFO, "limitgate.refusals"), world.site(Rule("api", "1/minute", ban=Ban(1, 60, "2h"))) as site:
        assert site.ask().status == 200
        reply = site.ask()
        assert 2 * HOUR - 60 < reply.wait <= 2 * HOUR
        assert reply.json()["detail"] == f"Too many requests. Try again in {reply.wait} s."
        assert reply.json()["violated-policies"] == ["api"]
        assert caplog.records[0].refusal_id in reply.json()["instance"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_client_that_waits_is_admitted(world: World, algorithm: str) -> None:
    """During a ban that ends before the limit has room, the wait is that of the limit."""
    with world.site(Rule("api", Limit("1/hour", algorithm=algorithm), ban=Ban(2, "10m", "5s"))) as site:
        assert site.ask().status == 200
        first = site.ask().wait
        assert first > 5
        assert all(first - 60 < site.ask().wait <= first for _ in range(8))
    if world.url != "memory://":
        return
    clock = Clock()
    store = MemoryStore(clock)
    with world.site(Rule("api", Limit("1/minute", algorithm=algorithm), ban=Ban(2, "10m", "2s")), store=store) as site:
        assert site.statuses(3) == [200, 429, 429]
        clock.advance(1)
        clock.advance(site.ask().wait)
        assert site.ask().status == 200


def test_a_client_that_waits_is_admitted_behind_other_limits(world: World) -> None:
    """The wait is the longest of all limits of the rule, whichever bucket the ban is in."""
    limits = [Limit("1/minute"), Limit("1/hour", algorithm="sliding_log"), Limit("2/day")]
    with world.site(Rule("api", *limits, ban=Ban(1, "10m", "2s"))) as site:
        assert site.ask().status == 200
        assert all(HOUR - 60 < site.ask().wait <= HOUR for _ in range(4))


def test_a_cost_above_the_burst_has_no_wait_during_a_ban(world: World) -> None:
    """Waiting never helps, so there is no ``Retry-After``; nor does the ban count as permanent."""

    def cost(request: Any) -> int:
        return int(request.headers.get("x-cost", 1))

    with world.site(Rule("api", "2/minute", cost=cost, ban=Ban(1, "10m", "1h"))) as site:
        assert site.statuses(3) == [200, 200, 429]
        for _ in range(2):
            reply = site.ask(headers={"X-Cost": "3"})
            assert (reply.status, "retry-after" in reply.headers) == (429, False)
            assert "ever allows" in reply.json()["detail"]
            assert HOUR - 60 < site.ask().wait <= HOUR


@pytest.mark.parametrize("number", [1, 2])
def test_a_refusal_under_a_ban_is_of_one_piece(world: World, number: int) -> None:
    """The one that begins the ban, and those after it, agree in all header fields and in the decision."""
    styles = ["x-ratelimit", "draft-11"]
    with world.site(Rule("api", "1/minute", ban=Ban(1, 60, "1h")), headers=styles) as site:
        assert site.ask().status == 200
        reply = [site.ask() for _ in range(number)][-1]
        assert HOUR - 60 < reply.wait <= HOUR
        assert abs(int(re.findall(r";t=([0-9]+)", reply.headers["ratelimit"])[0]) - reply.wait) <= 1
        assert abs(int(reply.headers["x-ratelimit-reset"]) - time.time() - reply.wait) <= 5
        assert reply.headers["x-ratelimit-remaining"] == "0"


def _greeting(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b""]


def test_the_windows_of_the_refusal_that_begins_a_ban() -> None:
    """They wait as long as the decision."""
    store, rules = MemoryStore(Clock()), [Rule("api", "1/minute", "9/hour", ban=Ban(1, 60, "1h"))]
    with WSGISite(*rules, store=store) as site:
        seen: list[Any] = []

        def on_denied(environ: Any, start_response: Any) -> list[bytes]:
            seen.append(environ["limitgate"])
            start_response("429 Too Many Requests", [("Content-Type", "text/plain")])
            return [b""]

        site.app = LimitGateWSGI(_greeting, rules=rules, store=store, on_denied=on_denied)
        assert site.statuses(3) == [200, 429, 429]
        for decision in seen:
            assert decision.retry_after == decision.reset_after == HOUR
            assert [window.retry_after for window in decision.windows] == [HOUR, HOUR]
            assert not decision.is_permanent_ban


def test_gates_in_gates_and_rules_beside() -> None:
    """Each rule that refused has its own count and its own ban."""
    rules = [Rule("a", "1/day", ban=Ban(2, 60, HOUR)), Rule("b", "1/day", ban=Ban(3, 60, HOUR)), Rule("c", "2/day")]
    store = MemoryStore()
    with ASGISite(*rules, store=store) as site:
        assert site.statuses(9) == [200] + [429] * 8
        (key,) = store._bans
        assert ":a:" in key  # once it bans, nothing counts for b
    outer, inner = MemoryStore(), MemoryStore()
    with ASGISite(Rule("in", "1/day", ban=Ban(2, 60, HOUR)), store=inner) as site:
        site.app = LimitGate(site.app, rules=[Rule("out", "100/day")], store=outer)
        assert site.statuses(5) == [200] + [429] * 4
        assert len(inner._bans) == 1
        assert not outer._bans


@pytest.mark.parametrize("limits", ["0/day", ["0/day", "100/minute"]])
def test_a_caller_whose_count_is_0_is_not_banned(world: World, limits: Any) -> None:
    """No wait helps, so no refusal promises one."""
    rule = Rule("api", "100/minute", key=["caller"], ban=Ban(after=2, within="10m", duration="1h"))
    with world.site(rule, identify=lambda _: Caller("acme", limits={"api": limits})) as site:
        refused = [site.ask() for _ in range(4)]
    assert [reply.status for reply in refused] == [429] * 4
    assert not any("retry-after" in reply.headers for reply in refused)


def test_a_cost_above_the_burst_is_not_banned(world: World) -> None:
    """Neither alone nor if another rule refuses as well; requests that fit are admitted afterwards."""
    costs = iter([20] * 4 + [1])
    rules = [
        Rule("tokens", "10/minute", cost=lambda _: next(costs), ban=Ban(after=2, within="10m", duration="1h")),
        Rule("api", "5/day", ban=Ban(after=2, within="10m", duration="1h")),
    ]
    with world.site(*rules) as site:
        refused = [site.ask() for _ in range(4)]
        assert not any("retry-after" in reply.headers for reply in refused)
        assert site.ask().status == 200
