"""What is collected from requests, off their way."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.fastapi import RateLimit
from limitgate.fleet.tally import MOST, MUCH, NAMES, Clients, Tally
from limitgate.gate.gate import Gate
from tests.support.clock import Clock


def app_of(*rules: Rule, **options: Any) -> LimitGateWSGI:
    def hello(_: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"hello"]

    return LimitGateWSGI(hello, rules=[*rules], **{"store": MemoryStore(Clock()), "fleet": True, **options})


def visit(app: LimitGateWSGI, peer: str = "192.0.2.1", path: str = "/", **headers: str) -> None:
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": peer, "wsgi.url_scheme": "http", **headers}
    run: Any = app
    list(run(environ, lambda *_: None))


def gate_of(app: LimitGate | LimitGateWSGI) -> Gate:
    assert app.gate is not None
    return app.gate


def tally_of(app: LimitGate | LimitGateWSGI) -> Tally:
    counts = gate_of(app).rules.counts
    assert counts is not None
    assert counts.tally is not None
    return counts.tally


def told(app: LimitGate | LimitGateWSGI) -> Any:
    tally_of(app).count()
    counts = gate_of(app).rules.counts
    assert counts is not None
    return counts.publisher.snapshot()


def listed(app: LimitGate | LimitGateWSGI, kind: str, place: int = 0) -> dict[str, int]:
    rule = told(app).rules[place]
    return {rule.names.get(entry.key, "?"): entry.hits for entry in getattr(rule, kind).entries}


def test_who_uses_a_rule_and_who_is_refused() -> None:
    app = app_of(Rule("api", "3/day", key=["ip"]), Rule("all", "1000/day", key=["global"]))
    for _ in range(5):
        visit(app, "203.0.113.7")
    visit(app, "198.51.100.9")
    assert listed(app, "used") == {"ip=20….7": 3, "ip=198…0.9": 1}
    assert listed(app, "refusals") == {"ip=20….7": 2}
    assert listed(app, "used", 1) == {"everybody": 4}
    snapshot = told(app)
    assert (snapshot.requests, snapshot.refused) == (6, 2)
    assert [(rule.admitted, rule.refused) for rule in snapshot.rules] == [(4, 2), (4, 0)]
    assert snapshot.rules[0].utilization == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("names", "expected"), [("full", "ip=203.0.113.7"), ("masked", "ip=20….7"), ("off", "")])
def test_names_are_shown_as_the_option_says(names: str, expected: str) -> None:
    app = app_of(Rule("api", "3/day", key=["ip"]), names=names)
    visit(app, "203.0.113.7")
    assert listed(app, "used") == {expected: 1}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (["host"], {"host=sho…ple": 1}),
        (["tier", "method"], {"tier=default method=GET": 1}),
        (["path"], {"everybody": 1}),
        (["api_key|global"], {"everybody": 1}),
    ],
)
def test_only_a_bucket_that_all_share_is_everybody_s(key: list[str], expected: dict[str, int]) -> None:
    app = app_of(Rule("api", "3/day", key=key))
    visit(app, HTTP_HOST="shop.example")
    assert listed(app, "used") == expected


def test_values_of_dependencies_name_clients(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, too. A client without a value counts by its address."""
    caplog.set_level("INFO", logger="limitgate")

    def current_user(request: Request) -> str | None:
        return request.headers.get("x-user")

    app, mine = FastAPI(), RateLimit("1/day", key=[current_user], name="mine")
    app.get("/", dependencies=[Depends(mine)])(lambda: "hello")
    app.add_middleware(LimitGate, rules=[], store=MemoryStore(Clock()), fleet=True)
    with TestClient(app, client=("203.0.113.7", 1)) as client:
        for user in ("hannah", "robert", "hannah", "robert", None, None):
            client.get("/", headers={} if user is None else {"x-user": user})
        gate: Any = app.middleware_stack
        while not isinstance(gate, LimitGate):
            gate = gate.app
        names = {"current_user=h…h": 1, "current_user=r…t": 1, "ip=20….7": 1}
        assert listed(gate, "used") == listed(gate, "refusals") == names
    begun = [each for each in caplog.messages if "begins to refuse" in each]
    assert [[name for name in names if name in each] for each in begun] == [[name] for name in names]


def test_a_key_is_never_shown_in_full() -> None:
    app = app_of(Rule("api", "3/day", key=["api_key"]), names="full")
    visit(app, HTTP_X_API_KEY="secret-key-of-somebody")
    assert listed(app, "used") == {"api_key=sec…ody": 1}


def test_requests_that_are_counted_otherwise() -> None:
    """Those with slots, by outcome, with turns and in shadow are not plain, and are collected all the same."""
    rules = [
        Rule("slots", concurrency=2, key=["ip"], path="/a"),
        Rule("outcome", "5/day", key=["ip"], charge_if={"status": [500]}, path="/b"),
        Rule("turns", "5/day", key=["ip"], max_delay=1, path="/c"),
        Rule("shadow", "1/day", key=["ip"], shadow=True, path="/d"),
        Rule("window", "5/day", key=["ip"], algorithm="sliding_log", path="/e"),
    ]
    app = app_of(*rules)
    for path in ("/a", "/b", "/c", "/d", "/d", "/e"):
        visit(app, "203.0.113.7", path)
    for place in (0, 1, 2, 4):
        assert listed(app, "used", place) == {"ip=20….7": 1}, rules[place].name
    assert listed(app, "used", 3)["ip=20….7"] >= 1
    assert told(app).requests == 6


def test_a_long_queue_is_counted_by_a_request() -> None:
    """If nobody else counts, as where no thread can be started: nothing is lost, and memory is bounded."""
    app = app_of(Rule("api", "100000/day", key=["ip"]))
    tally_of(app).at_overflow = bool
    gate = gate_of(app)
    gate.outages.at_first_answer.clear()
    for _ in range(2 * MOST + 10):
        visit(app)
    assert told(app).rules[0].admitted == 2 * MOST + 10


def test_few_are_named_at_once() -> None:
    """A flood of new clients costs no names: 32 per period, and whoever has a counter without a name."""
    clients = Clients()
    for number in range(100):
        if clients.wants(f"{number:032x}"):
            clients.find_name(f"{number:032x}", lambda _: "somebody", None)
    assert len(clients.names) == NAMES
    clients.used.add({f"{99:032x}": 1}, 0.0)
    assert clients.wants(f"{99:032x}")


def test_a_busy_period_without_new_clients_ends_early_names() -> None:
    """A new client is then named when it comes again, and those after it at once."""
    app = app_of(Rule("api", "1000000/day", key=["ip"]))
    for _ in range(3):
        for _ in range(MUCH + 1):
            visit(app, "192.0.2.1")
        tally_of(app).count()
    visit(app, "192.0.2.2")
    assert listed(app, "used") == {"ip=19….1": 3 * (MUCH + 1), "": 1}
    visit(app, "192.0.2.2")
    assert listed(app, "used") == {"ip=19….1": 3 * (MUCH + 1), "ip=19….2": 2}
    visit(app, "192.0.2.3")
    assert listed(app, "used")["ip=19….3"] == 1


def test_a_refused_client_is_named_even_if_it_comes_once() -> None:
    """The headline of ``top`` is of such clients, also after busy periods without new ones."""
    app = app_of(Rule("api", "1000000/day", key=["ip"], path="/api"), Rule("login", "20/day", key=["ip"], path="/login"))

    def is_busy(periods: int) -> None:
        for _ in range(periods):
            for _ in range(MUCH + 1):
                visit(app, "192.0.2.1", "/api")
            tally_of(app).count()

    is_busy(4)
    for _ in range(300):
        visit(app, "203.0.113.9", "/login")
    is_busy(8)
    assert listed(app, "refusals", 1) == {"ip=20….9": 280}


def test_the_others_are_named_when_they_come_again() -> None:
    """Also beside a rule whose clients all have names."""
    app = app_of(Rule("api", "9/day", key=["ip"]), Rule("all", "1000/day", key=["global"]))
    for _ in range(2):
        for number in range(2 * NAMES):
            visit(app, f"203.0.113.{number}")
        tally_of(app).count()
    assert "" not in listed(app, "used")
    assert len(told(app).rules[0].used.entries) == 2 * NAMES


def test_naming_that_fails_harms_no_request() -> None:
    """Users are objects of the application."""
    clients = Clients()

    def fails(_: Any) -> str:
        raise RuntimeError("no name")

    clients.find_name("a", fails, None)
    assert clients.names == {"a": ""}
    assert not clients.wants("a")


def test_nothing_is_collected_without_a_fleet() -> None:
    """``fleet=False`` and no observers: no counts at all."""
    app = app_of(Rule("api", "3/day", key=["ip"]), fleet=False)
    visit(app)
    gate = gate_of(app)
    assert gate.rules.counts is None


@pytest.mark.parametrize("names", ["full", "masked"])
def test_hostile_names_are_harmless(names: str) -> None:
    """Control characters and marks of direction are replaced, markup is text, and nothing is longer than 128 characters."""
    app = app_of(Rule("api", "3/day", key=["header:X-User"]), names=names)
    for value in ("\x9b31mred\xe2\x80\xae", "<script>alert(1)</script>", "a" * 3_000):
        visit(app, HTTP_X_USER=value)
    found = listed(app, "used")
    assert len(found) == 3
    assert all(name.isprintable() and len(name) <= 128 for name in found)


def refused_since(app: LimitGateWSGI, place: int) -> float:
    (entry,) = told(app).rules[place].refusals.entries
    return entry.since


@pytest.mark.parametrize("store_ahead", [0, 1e6, -1e6])
def test_a_refusal_has_its_own_time(monkeypatch: pytest.MonkeyPatch, store_ahead: float) -> None:
    """Not that of the count, for plain rules and others. If the store's clock is off, it lies between two counts."""
    began = float(round(time.time()))
    at = [began]
    monkeypatch.setattr("limitgate.fleet.tally.time", SimpleNamespace(time=lambda: at[0]))
    clock = Clock(round((at[0] + store_ahead) * 1e6))
    rules = [Rule("api", "1/day", path="/a"), Rule("trial", "1/day", path="/b", shadow=True)]
    app = app_of(*rules, store=MemoryStore(clock))
    gate_of(app).outages.at_first_answer.clear()
    tally_of(app).count()
    for _ in range(3):
        at[0] += 0.5
        clock.advance(0.5)
        for path in ("/a", "/b"):
            visit(app, path=path)
    at[0] += 0.5
    expected = began + (1 if store_ahead == 0 else 2 if store_ahead > 0 else 0)
    assert [refused_since(app, place) for place in (0, 1)] == [expected, expected]
