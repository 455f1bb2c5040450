"""A log under rules: decisions equal those of a gate that was asked over HTTP, and every request is counted once."""

from __future__ import annotations

import gzip
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import LimitGateWSGI, MemoryStore, Rule, RuleSet, load_rules
from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.http.response import RefusalKey
from limitgate.limits.template import PlainSpend
from limitgate.replay.access_log import Entry, Log, TextParser
from limitgate.replay.engine import Engine, Share, counts_by_client, replay, replay_shared
from limitgate.replay.suggestion import Arrivals
from limitgate.rules.callers import KnownCaller
from limitgate.rules.settings import Settings

LOG = Path(__file__).parents[1] / "data" / "access.log.gz"
SECOND = 1_000_000
RULES = """
rules:
  - {name: all, key: [path, ip], qps: 5, qpm: 20}
  - {name: images, path: /images/**, key: [ip], qpm: 3, shadow: true}
  - {name: errors, key: [ip], qpm: 2, charge_if: {status: [404]}}
  - {name: robots, path: /robots.txt, exempt: true}
  - {name: closed, path: /admin/**, deny: true}
  - {name: logged, path: /blog/**, key: [ip], limits: ["3/hour"], algorithm: sliding_log}
"""


def entry(at: float, client: str, path: str = "/", method: str = "GET", **more: Any) -> Entry:
    return Entry(round(at * SECOND), client.encode(), method, path, **more)


def engine_of(*rules: Rule) -> Engine:
    return Engine(RuleSet(rules))


def through_http(rules: RuleSet, entries: list[Entry]) -> list[bool]:
    """The same requests through WSGI middleware on a clock that goes by them."""
    now = 0
    status = ["200 OK"]

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response(status[0], [])
        return []

    gate = LimitGateWSGI(app, rules=rules, store=MemoryStore(lambda: now))
    admitted = []
    for each in entries:
        now = max(now, each.at)
        status[0] = f"{each.status or 200} X"
        answers: list[str] = []
        headers = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in (each.headers or {}).items()}
        environ = {"REQUEST_METHOD": each.method, "PATH_INFO": each.path, "REMOTE_ADDR": each.client.decode(), **headers}
        chunks: Any = gate(environ, lambda line, _fields, answers=answers: answers.append(line))
        list(chunks)
        getattr(chunks, "close", bool)()
        admitted.append(answers[0] == status[0])
    return admitted


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> RuleSet:
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(RULES)
    return load_rules(file)


def test_a_real_log_is_decided_as_over_http(rules: RuleSet) -> None:
    """The first half of the requests in a real web server's log, under rules of many kinds."""
    parse = TextParser()
    entries = sorted([parse(line) for lines, _ in Log(str(LOG)).blocks() for line in lines if line], key=lambda each: each.at)
    entries = entries[: len(entries) // 2]
    engine = Engine(rules)
    assert [engine.decide(each) for each in entries] == through_http(rules, entries)
    figures = engine.finish()
    assert figures.refused > 100
    assert figures.rules["images"][1] > 0
    assert figures.rules["logged"][1] > 0


ENTRIES = st.lists(
    st.tuples(
        st.integers(0, 3 * SECOND),
        st.sampled_from(["203.0.113.7", "2001:db8::1", "2001:db8::2", "nobody"]),
        st.sampled_from(["/images/a", "/blog//x", "/admin/", "/robots.txt", "/"]),
        st.sampled_from(["GET", "HEAD", "POST"]),
        st.sampled_from([200, 404]),
    ),
    max_size=40,
)


@given(ENTRIES)
def test_requests_are_decided_as_over_http(rules: RuleSet, steps: list[Any]) -> None:
    """Clients, networks, methods, outcomes, and clocks that step by any number of microseconds."""
    now, entries = 1_431_857_103 * SECOND, []
    for step, client, path, method, status in steps:
        now += step
        entries.append(Entry(now, client.encode(), method, path, status))
    engine = Engine(rules)
    assert [engine.decide(each) for each in entries] == through_http(rules, entries)


def test_every_request_is_counted_once() -> None:
    """Admitted or refused, for the rules that it met and for its client."""
    engine = engine_of(Rule("a", "2/minute", path="/a"), Rule("b", "3/minute"), Rule("never", "1/minute", path="/never"))
    for number in range(4):
        engine.decide(entry(number, "h", "/a"))
    engine.decide(entry(5, "g", "/b"))
    engine.skip()
    figures = engine.finish()
    assert figures.as_json(9) == {
        "lines": 6,
        "skipped": 1,
        "requests": 5,
        "admitted": 3,
        "refused": 2,
        "rules": {
            "a": {"admitted": 2, "refused": 2},
            "b": {"admitted": 3, "refused": 0},
            "never": {"admitted": 0, "refused": 0},
        },
        "clients": [{"client": "h", "requests": 4, "refused": 2}, {"client": "g", "requests": 1, "refused": 0}],
        "highest": {"second": {"client": "h", "requests": 1}, "minute": {"client": "h", "requests": 4}},
    }
    assert (figures.first, figures.last) == (0, 5 * SECOND)
    assert figures.clients(1) == [b"h"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_costs_of_limits_beside_requests_in_flight(place: int) -> None:
    """A limit keeps its own cost, wherever the limit on requests in flight stands."""
    limits: list[Any] = ["9/minute", {"limit": "2000/minute", "cost": 900}]
    limits.insert(place, "20 at once")
    engine = engine_of(Rule("all", limits=limits))
    assert [engine.decide(entry(0, "h")) for _ in range(4)] == [True, True, False, False]


def test_the_algorithm_of_a_rule_with_requests_in_flight() -> None:
    """A listed caller's own limits are counted by it."""
    key = f"sha256:{sha256(b'k').hexdigest()}"
    caller = KnownCaller.model_validate({"id": "c", "api_key": key, "limits": {"all": "1/minute"}})
    for more in ({}, {"concurrency": 5}):
        engine = Engine(RuleSet([Rule("all", "9/minute", algorithm="fixed_window", **more)], [caller]))
        assert [engine.decide(entry(at, "h", headers={"x-api-key": "k"})) for at in (59, 61)] == [True, True]


@pytest.mark.parametrize(
    ("spellings", "client"),
    [
        (["203.0.113.7", "203.0.113.7:5000", "::ffff:203.0.113.7", "[::ffff:203.0.113.7]:80"], "203.0.113.7"),
        (["2001:db8::1", "2001:DB8:0::2", "[2001:db8::3]:443", "2001:db8:0:0:ffff::4"], "2001:db8::/64"),
        (["host.example"] * 4, "host.example"),
        (["-"] * 4, "-"),
    ],
)
def test_spellings_of_a_client_are_one_client(spellings: list[str], client: str) -> None:
    """In the figures and in what is suggested, as for the gate: ports, brackets, IPv4 in IPv6, addresses of a network."""
    engine = engine_of(Rule("all", "2/minute"))
    engine.arrivals = Arrivals()
    assert [engine.decide(entry(0, each)) for each in spellings] == [True, True, False, False]
    figures = engine.finish()
    assert figures.as_json(9)["clients"] == [{"client": client, "requests": 4, "refused": 2}]
    assert figures.highest()["minute"] == {"client": client, "requests": 4}
    assert engine.arrivals.suggestions().counts["all"]["minute"] == (4, 4)


def test_settings_say_who_clients_are() -> None:
    """The network that IPv6 clients are grouped by, and proxies in front of the service."""
    settings = Settings(ipv6_prefix=48, trusted_proxies=["10.0.0.1"])
    engine = Engine(RuleSet([Rule("all", "1/minute")]), settings)
    behind = [{"x-forwarded-for": each} for each in ("2001:db8:0:1::1", "2001:db8:0:2::1", "203.0.113.7")]
    assert [engine.decide(entry(0, "10.0.0.1:80", headers=each)) for each in behind] == [True, False, True]
    assert set(engine.finish().clients(9)) == {b"2001:db8::/48", b"203.0.113.7"}
    assert engine.figures.of_proxies == 0
    engine.decide(entry(0, "10.0.0.1:80"))
    assert engine.figures.of_proxies == 1


def test_a_wider_network_is_of_one_share() -> None:
    """Where the service groups by more than a /64."""
    shares = [Share(place, 3, 48) for place in range(3)]
    assert [share.has(b"2001:db8:0:1::1") for share in shares] == [share.has(b"2001:db8:0:2::1") for share in shares]


def test_plain_rules_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As requests that servers send do: no plan is made of objects, be a request admitted, refused or limited by nothing."""
    for owner, name in ((Gate, "_charge"), (PlainSpend, "made"), (Admission, "charged")):
        monkeypatch.setattr(owner, name, None)
    engine = engine_of(Rule("all", key=["path", "ip"], qps=1, qpm=2, path="/a/**"))
    decided = [engine.decide(entry(second, "203.0.113.7", path)) for second in (0, 1, 2) for path in ("/a/1", "/b")]
    assert decided == [True, True, True, True, False, True]
    assert engine.finish().rules == {"all": [2, 1]}


def test_a_caller_is_known_by_the_key_in_a_log(tmp_path: Path) -> None:
    """Logs of JSON have headers, and these lead to tiers."""
    (tmp_path / "default.yaml").write_text("rules: [{name: all, qpm: 1}]")
    digest = f"sha256:{sha256(b'secret').hexdigest()}"
    (tmp_path / "vip.yaml").write_text(
        f"tier: vip\ncallers: [{{id: acme, api_key: '{digest}'}}]\nrules: [{{name: all, qpm: 2, key: [caller]}}]"
    )
    engine = Engine(load_rules(tmp_path))
    keyed = entry(0, "h", headers={"x-api-key": "secret"})
    assert [engine.decide(keyed) for _ in range(3)] == [True, True, False]
    assert [engine.decide(entry(0, "h")) for _ in range(2)] == [True, False]


def test_a_log_whose_times_step_back() -> None:
    """Where lines are later than can be put in order, the clock stays until it is passed."""
    engine = engine_of(Rule("a", "1/second"))
    assert [engine.decide(entry(at, "h")) for at in (10, 9, 10.5, 11)] == [True, False, False, True]


def test_what_a_log_does_not_tell_is_left_out() -> None:
    """How long a request took is not known, so none is in flight; nobody waits for a turn."""
    engine = engine_of(
        Rule("busy", concurrency=1), Rule("both", "2/minute", concurrency=1), Rule("later", "1 per 30 seconds", max_delay=30)
    )
    assert [engine.decide(entry(0, "h")) for _ in range(3)] == [True, True, False]
    assert engine.finish().rules == {"busy": [0, 0], "both": [2, 1], "later": [2, 1]}


def test_rules_beside_others(tmp_path: Path) -> None:
    """Of each request it is known whether other rules would have decided otherwise."""
    file = tmp_path / "log"
    file.write_bytes(b"\n".join(b'h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1' for _ in range(5)))
    found = replay(Log(str(file)), engine_of(Rule("a", "2/minute")), engine_of(Rule("a", "4/minute")))
    assert (found.newly_refused, found.newly_admitted) == (0, 2)
    found = replay(Log(str(file)), engine_of(Rule("a", "4/minute")), engine_of(Rule("a", "1/minute")))
    assert (found.newly_refused, found.newly_admitted) == (3, 0)
    assert found.tried is not None
    assert (found.figures.refused, found.tried.refused) == (1, 4)


def test_processes_find_the_same(tmp_path: Path) -> None:
    """Each decides about its share of the clients, and all of them together about every line."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{name: all, key: [path, ip], qps: 5, qpm: 20}, {name: trial, key: [ip], qps: 2, shadow: true}]")
    log = tmp_path / "access.log"
    with gzip.open(LOG, "rt") as lines:
        log.write_text("".join(islice(lines, 4_000)))
    alone = replay(Log(str(log)), Engine(load_rules(rules)))
    shared = replay_shared(Log(str(log)), str(rules), str(rules), 2, Settings())
    assert shared.figures.as_json(2000) == alone.figures.as_json(2000)
    assert (shared.figures.in_shadow, shared.figures.in_shadow_by) == (alone.figures.in_shadow, alone.figures.in_shadow_by)
    assert alone.figures.in_shadow > 0
    assert shared.tried is not None
    assert shared.tried.as_json(2000) == alone.figures.as_json(2000)
    assert (shared.newly_refused, shared.newly_admitted) == (0, 0)
    assert (shared.figures.first, shared.figures.last) == (alone.figures.first, alone.figures.last)


@pytest.mark.parametrize(
    ("key", "is_exact"),
    [
        (["ip"], True),
        (["path", "ip"], True),
        (["global"], False),
        (["api_key|ip"], False),
        (["header:X"], False),
        (["path"], False),
    ],
)
def test_processes_share_only_what_no_clients_share(key: list[str], *, is_exact: bool) -> None:
    """A bucket of several clients has to be in one process."""
    assert counts_by_client(RuleSet([Rule("a", "1/minute", key=key), Rule("no", path="/x", deny=True)])) is is_exact


def test_a_network_is_of_one_share() -> None:
    """Addresses that share a bucket are decided about by one process."""
    shares = [Share(place, 3) for place in range(3)]
    for number in range(50):
        near = [share.has(f"2001:db8:0:{number:x}::{host}".encode()) for share in shares for host in (1, 2)]
        assert near[::2] == near[1::2]
        assert near.count(True) == 2


def test_refusals_that_nobody_is_sent_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ids and bodies would take a tenth of the time."""

    def written(*_: object) -> bytes:
        raise AssertionError("an id of a refusal was made")

    monkeypatch.setattr(RefusalKey, "write", written)
    engine = engine_of(Rule("all", "2/minute"))
    assert [engine.decide(entry(0, "203.0.113.7")) for _ in range(3)] == [True, True, False]
    assert engine.finish().rules == {"all": [2, 1]}
