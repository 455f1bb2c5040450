"""Explanations say what then happens when the request is really sent, and charge nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import LimitGateWSGI, MemoryStore, Rule, RuleSet, load_rules
from limitgate.gate.explain import Explanation, LookingStore, explain
from limitgate.gate.lifecycle.build import build_gate
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import WSGIRequest
from limitgate.routes import NoRoutes
from limitgate.stores import open_sync_store

CONFIG = Path(__file__).parents[2] / "config"
RULES = {
    "default.yaml": """
rules:
  - {name: all, key: [ip], qpm: 4}
  - {name: api, path: /api/**, key: [path, ip], qps: 2, qpm: 3}
  - {name: images, path: /images/**, exclude: [/images/logo], key: [ip], qpm: 1, shadow: true}
  - {name: login, path: /login, methods: [POST], key: [ip], limits: ["2/minute"], replaces: [all], on_error: closed}
  - {name: office, path: /office, clients: [203.0.113.0/24], exempt: true}
  - {name: closed, path: /admin/**, deny: true}
  - {name: slots, path: /slots, concurrency: 2}
  - {name: later, path: /later, limits: ["1/minute"], max_delay: 60}
  - {name: logged, path: /logged, limits: ["2/hour"], algorithm: sliding_log}
""",
    "vip.yaml": """
tier: vip
callers: [{id: acme, header: {X-Caller: acme}, set_by_proxy: true}]
rules:
  - {name: api, path: /api/**, key: [caller], qpm: 9}
""",
}
PROXY = "10.0.0.1"
PATHS = ["/", "/api/x", "/api//x/", "/images/a", "/images/logo", "/login", "/office", "/admin/x", "/slots", "/later", "/logged"]


class World:
    """A gate on a store, and one beside it that looks only."""

    def __init__(self, rules: Any, **options: Any) -> None:
        self.now = 1_431_857_103_000_000
        self.store = MemoryStore(lambda: self.now)
        options = {"rules": rules, "trusted_proxies": [PROXY], "headers": ["x-ratelimit", "draft-11"], **options}
        self.gate = LimitGateWSGI(_app, store=self.store, **options)
        looking = build_gate(NoRoutes(), open_sync_store, store=LookingStore(self.store), **options).gate
        assert looking is not None
        self.looking = looking

    def explain(self, *described: Any) -> Explanation:
        return explain(self.looking, WSGIRequest(environ(*described)))

    def send(self, *described: Any) -> tuple[int, list[tuple[str, str]], dict[str, Any]]:
        answers: list[Any] = []
        asked = environ(*described)
        chunks: Any = self.gate(asked, lambda status, fields: answers.append((int(status[:3]), fields)))
        list(chunks)
        getattr(chunks, "close", bool)()
        return (*answers[0], asked)


def _app(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b""]


def environ(method: str, path: str, ip: str = "203.0.113.7", **headers: str) -> dict[str, Any]:
    named = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    return {"REQUEST_METHOD": method, "PATH_INFO": path, "REMOTE_ADDR": PROXY, "HTTP_X_FORWARDED_FOR": ip, **named}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    for name, text in RULES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def rules(folder: Path) -> RuleSet:
    return load_rules(folder)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["GET", "HEAD", "POST"]),
        st.sampled_from([path for path in PATHS if path != "/later"]),
        st.sampled_from(["203.0.113.7", "198.51.100.1", "2001:db8::1"]),
        st.sampled_from([{}, {"x_caller": "acme"}]),
        st.integers(0, 20_000_000),
    ),
    max_size=12,
)


@given(REQUESTS)
def test_it_says_what_then_happens(rules: RuleSet, requests: list[Any]) -> None:
    """Decision, status and every field, for any history; asked twice, it says the same."""
    world = World(rules)
    for method, path, ip, headers, step in requests:
        world.now += step
        sent = environ(method, path, ip, **headers)
        said = explain(world.looking, WSGIRequest(dict(sent)))
        again = explain(world.looking, WSGIRequest(dict(sent)))
        assert (said.decision, said.fields, said.rules) == (again.decision, again.fields, again.rules)
        status, fields, asked = world.send(method, path, ip) if not headers else _sent(world, sent)
        assert said.decision == asked["limitgate"]
        assert (said.status or 200, said.fields) == (status, fields)
        limiting = {reason.name for reason in said.rules if reason.applies and "limits" in reason.why}
        if asked["limitgate"] is not None and status != 403:
            assert limiting == {window.rule for window in asked["limitgate"].windows}
        assert said.client == ip


def _sent(world: World, asked: dict[str, Any]) -> tuple[int, list[tuple[str, str]], dict[str, Any]]:
    answers: list[Any] = []
    chunks: Any = world.gate(asked, lambda status, fields: answers.append((int(status[:3]), fields)))
    list(chunks)
    getattr(chunks, "close", bool)()
    return (*answers[0], asked)


@pytest.mark.parametrize(
    ("described", "rule", "why"),
    [
        (("GET", "/api/x"), "api default yes", "limits GET /api/x: path /api/**"),
        (("GET", "/api/x"), "login default no", "is for POST, not GET"),
        (("GET", "/x"), "api default no", "path /x does not match /api/**"),
        (("GET", "/images/logo"), "images default no", "path /images/logo is excluded by /images/logo"),
        (("POST", "/login"), "all default no", "rule login replaces it"),
        (("GET", "/office"), "office default yes", "exempts GET /office of client 203.0.113.7: path /office"),
        (("GET", "/office"), "all default no", "rule office exempts this request"),
        (("GET", "/office", "198.51.100.1"), "office default no", "client 198.51.100.1 is none of 203.0.113.0/24"),
        (("GET", "/office;x"), "office default no", "the path could also be read as /office;x, which the rule does not exempt"),
        (("GET", "/admin/x"), "closed default yes", "denies GET /admin/x: path /admin/**"),
        (("GET", "/admin/x"), "all default no", "rule closed denies this request"),
        (("GET", "/api/x"), "api vip no", "is for tier vip, the caller is of default"),
    ],
)
def test_reasons(folder: Path, described: Any, rule: str, why: str) -> None:
    """Each rule says why it applies, or the first thing that keeps it from that."""
    name, tier, applies = rule.split()
    (reason,) = [each for each in World(load_rules(folder)).explain(*described).rules if (each.name, each.tier) == (name, tier)]
    assert (reason.applies, reason.why) == (applies == "yes", why)


def test_a_caller_of_a_tier(folder: Path) -> None:
    """Its rules take the place of others of their names."""
    world = World(load_rules(folder))
    said = explain(world.looking, WSGIRequest(environ("GET", "/api/x", x_caller="acme")))
    assert said.caller is not None
    assert (said.caller.id, said.tier) == ("acme", "vip")
    whys = {(each.name, each.tier): each.why for each in said.rules}
    assert whys["api", "default"] == "tier vip replaces it with its own rule of this name"
    assert whys["api", "vip"].startswith("limits GET /api/x")


def test_a_preflight_and_a_condition() -> None:
    """What is never counted says so; a condition in Python is named."""
    world = World([Rule("all", "1/minute"), Rule("never", "1/minute", when=lambda _: False)])
    headers = {"origin": "https://example.com", "access_control_request_method": "GET"}
    said = explain(world.looking, WSGIRequest(environ("OPTIONS", "/", **headers)))
    assert (said.decision, said.status) == (None, None)
    assert [each.why for each in said.rules] == ["CORS preflights are never counted", "its condition (when) is not met"]


def test_a_turn_that_would_be_waited_for(folder: Path) -> None:
    """It is told at once, and nobody waits; places in flight are not kept."""
    world = World(load_rules(folder))
    world.send("GET", "/later")
    said = world.explain("GET", "/later")
    assert said.decision is not None
    assert said.decision.delay == 60
    for _ in range(5):
        assert world.explain("GET", "/slots").status is None
    assert not world.looking.refunds.slot_keeper.held


def test_a_ban_is_seen() -> None:
    """As by the gate."""
    from limitgate import Limiter

    rule = Rule("all", "5/minute")
    world = World(RuleSet([rule]))
    Limiter(world.store).bucket(rule, ip="203.0.113.7").ban(60)
    said = world.explain("GET", "/")
    assert said.status == 429
    assert ("Retry-After", "60") in said.fields


@pytest.mark.parametrize(
    ("forwarded", "hops"),
    [
        ("203.0.113.7", [PROXY, "203.0.113.7"]),
        ("198.51.100.1, 203.0.113.7", [PROXY, "203.0.113.7"]),
        ("203.0.113.7, 10.0.0.1", [PROXY, PROXY, "203.0.113.7"]),
        ("203.0.113.7, nonsense, 10.0.0.1", [PROXY, PROXY, "nonsense"]),
        ("10.0.0.1", [PROXY, PROXY]),
        ("", [PROXY, ""]),
    ],
)
def test_hops(forwarded: str, hops: list[str]) -> None:
    """The walk of `TrustedProxies.client`, address by address, with its end."""
    proxies = TrustedProxies([PROXY], "x-forwarded-for")
    request = WSGIRequest(environ("GET", "/", forwarded))
    found = proxies.hops(request)
    assert [hop.address for hop in found] == hops
    client = proxies.client(request)
    assert client == (found[-2] if found[-1].why.startswith("no address") else found[-1]).address
    untrusted = WSGIRequest({**environ("GET", "/", forwarded), "REMOTE_ADDR": "192.0.2.1"})
    assert [hop.address for hop in proxies.hops(untrusted)] == ["192.0.2.1"]
