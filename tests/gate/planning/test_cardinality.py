"""How many buckets one source may open by keys of its own choosing, and what becomes of those that come after."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Any

import flask
import pytest
from hypothesis import given, strategies as st

from limitgate import Caller, LimitGateWSGI, MemoryStore, Rule, RuleSet, limit
from limitgate.gate.planning.cardinality import CardinalityGuard, Latest
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.keys import overflow
from limitgate.rules.callers import KnownCaller
from tests.support.clock import Clock
from tests.support.doors import PEER, SITES, ASGISite, Site, http_scope, wsgi_environ, wsgi_reply
from tests.support.redis_server import RedisServer

Open = Callable[..., Site]

MINUTE = 60.0
FLOOD = 5_000
BY_ID = Rule("api", "3/day", key=["header:x-id"])


class Watch:
    """A monotonic clock in seconds that goes on only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def site(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens sites of one door."""
    with contextlib.ExitStack() as opened:
        yield lambda *rules, **options: opened.enter_context(request.param(*rules, **options))


# --- counting ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.001, 0.5, 2.0, 7.0, 60.0]) | st.floats(0, 90), st.sampled_from("ab"))),
)
def test_no_minute_has_more_property(most: int, steps: list[tuple[float, str]]) -> None:
    """In no minute does a source open more buckets than it may, and half of them it may open at any time after one."""
    watch = Watch()
    guard = CardinalityGuard(most, watch)
    opened: dict[str, list[float]] = {"a": [], "b": []}
    for number, (pause, source) in enumerate(steps * 5):
        watch.now += pause
        if guard.open(number, source, "r"):
            opened[source].append(watch.now)
        within = [at for at in opened[source] if at > watch.now - MINUTE + 1e-6]
        assert len(within) <= most
    watch.now += MINUTE
    assert all(guard.open(("late", number), "a", "r") for number in range(-(-most // 2)))


@given(st.integers(2, 40), st.lists(st.integers(0, 60), max_size=300))
def test_the_latest_are_kept_property(most: int, keys: list[int]) -> None:
    """What was used among the latest half is there, and never is more kept than there may be."""
    latest: Latest[int] = Latest(most)
    used: list[int] = []
    for key in keys:
        if latest.get(key) is None:
            latest.put(key, key)
        used = [key, *(other for other in used if other != key)]
        assert len(latest) <= most
        assert all(latest._younger.get(other, latest._elder.get(other)) == other for other in used[: most // 2])


def test_sources_are_bounded() -> None:
    """However many sources there are, a bounded number is remembered."""
    guard = CardinalityGuard(5, Watch())
    for number in range(150_000):
        guard.open(number, f"10.{number}", "r")
    assert len(guard) <= 65_536
    assert len(guard._sources) <= 65_536


def test_threads_together_open_no_more() -> None:
    """Threads that open buckets for one source at once open together what one alone might."""
    guard = CardinalityGuard(100, Watch())
    with ThreadPoolExecutor(16) as threads:
        opened = list(threads.map(lambda number: guard.open(number, None, "r"), range(5000)))
    assert sum(opened) == 51
    assert guard.overflowed == 5000 - 51


def test_a_fork_is_not_locked_out() -> None:
    """In the child of a fork that happened while another thread was counting, counting goes on."""
    guard = CardinalityGuard(100, Watch())
    with guard._lock:
        child = os.fork()
        if child == 0:
            free = guard._lock.acquire(timeout=1)
            os._exit(0 if free else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- at the doors -----------------------------------------------------------------------------------------------------


def requests(it: Site, headers: Iterable[dict[str, str]], peer: str | None = PEER) -> Iterator[Request]:
    """Requests with these headers, as this door makes them."""
    for fields in headers:
        if isinstance(it, ASGISite):
            yield ASGIRequest(http_scope(headers=fields, peer=peer))
        else:
            yield WSGIRequest(wsgi_environ(headers=fields, peer=peer))


def flood(it: Site, headers: Iterable[dict[str, str]], peer: str | None = PEER) -> Counter[bool]:
    """How many requests with these headers are let through, and how many not; asked at the gate, for there are many."""
    gate = it.app.gate

    async def crowds() -> Counter[bool]:
        found: Counter[bool] = Counter()
        asked = requests(it, headers, peer)
        while crowd := list(islice(asked, 1000)):
            answers = await asyncio.gather(*[gate.acheck(request) for request in crowd])
            found.update(answer.refusal is None for answer in answers)
        return found

    if isinstance(it, ASGISite):
        return it.runner.run(crowds())
    return Counter(gate.check(request).refusal is None for request in requests(it, headers, peer))


def invented(count: int, name: str = "x-id") -> list[dict[str, str]]:
    return [{name: f"invented-{number}"} for number in range(count)]


@pytest.mark.usefixtures("_unwatched")
def test_a_flood_of_keys_in_memory(site: Open) -> None:
    """Thousands of invented keys from one address open no more buckets than it may, and one for the rest."""
    store, begin = MemoryStore(Clock()), time.monotonic()
    it = site(BY_ID, store=store)
    passed = flood(it, invented(FLOOD))[True]
    most = 1000 * (1 + int((time.monotonic() - begin) // MINUTE))
    assert 500 <= len(store) <= most + 1
    assert passed == len(store) - 1 + 3
    assert it.app.gate.overflowed == FLOOD - len(store) + 1


@pytest.mark.usefixtures("_unwatched")
def test_a_flood_of_keys_in_redis(site: Open, own_redis: RedisServer) -> None:
    """Thousands of invented keys from one address leave no more buckets in Redis than it may open, and one."""
    begin = time.monotonic()
    it = site(BY_ID, store=own_redis.url, timeout=20)
    flood(it, invented(FLOOD))
    most = 1000 * (1 + int((time.monotonic() - begin) // MINUTE))
    with own_redis.client() as client:
        assert 500 <= client.dbsize() <= most + 2  # one is the key of refusals' ids


def status(it: Site, number: int | str, **more: Any) -> int:
    return it.ask(headers={"x-id": f"key-{number}", **more.pop("headers", {})}, **more).status


def test_known_keys_keep_their_buckets(site: Open) -> None:
    """A key that was in use before a flood from behind its own address is counted by itself throughout."""
    it = site(BY_ID, new_buckets=4)
    assert status(it, "mine") == 200
    flood(it, invented(50))
    assert [status(it, "mine") for _ in range(3)] == [200, 200, 429]
    assert status(it, "late") == 429


def test_another_address_is_untouched(site: Open) -> None:
    """A flood from one address takes nothing from another: neither its buckets nor its right to open some."""
    it = site(BY_ID, new_buckets=4)
    flood(it, invented(50))
    assert [status(it, number, peer="203.0.113.9") for number in range(2)] == [200, 200]
    assert [status(it, number) for number in range(2, 4)] == [429, 429]


def test_overflow_is_limited_by_itself(site: Open) -> None:
    """What comes under too many keys shares a bucket, which is limited like each of them, and which is the source's own."""
    it = site(BY_ID, new_buckets=2)
    assert [status(it, number) for number in range(7)] == [200] * 5 + [429] * 2
    assert [status(it, number, peer=None) for number in range(10, 17)] == [200] * 5 + [429] * 2
    assert [status(it, number, peer="2001:db8::1") for number in range(20, 27)] == [200] * 5 + [429] * 2
    assert [status(it, 30, peer="2001:db8::2"), status(it, 30, peer="2001:db8:0:1::2")] == [429, 200]
    assert it.app.gate.overflowed == 5 + 5 + 5 + 1


def test_each_rule_has_its_overflow(site: Open) -> None:
    """The overflow buckets of two rules are two, also where their keys are the same."""
    store = MemoryStore(Clock())
    it = site(BY_ID, Rule("other", "9/day", key=["header:x-id"]), store=store, new_buckets=2)
    for number in range(4):
        status(it, number)
    assert len(store) == 2 + 2


def test_behind_a_proxy_the_source_is_the_client(site: Open) -> None:
    """Behind a trusted proxy each client opens buckets for itself, and a flood by one hinders no other."""
    it = site(BY_ID, new_buckets=4, trusted_proxies=[PEER])
    mallory, bob = ({"X-Forwarded-For": f"203.0.113.{number}"} for number in (1, 2))
    assert [status(it, number, headers=mallory) for number in range(9)] == [200] * 6 + [429] * 3
    assert [status(it, number, headers=bob) for number in range(10, 12)] == [200, 200]


def test_the_headers_of_a_trusted_peer_are_its_own(site: Open) -> None:
    """A trusted peer that speaks for itself opens as many buckets by its headers as it needs."""
    it = site(BY_ID, new_buckets=4, trusted_proxies=[PEER])
    assert [status(it, number) for number in range(20)] == [200] * 20
    assert it.app.gate.overflowed == 0


@pytest.mark.parametrize("key", [["header:x-id"], ["host"], ["api_key", "header:x-id"]])
def test_a_trusted_gateway_speaks_for_many(site: Open, key: list[str]) -> None:
    """A gateway in ``trusted_proxies`` opens buckets for hundreds of tenants at once, by whatever tells them apart."""
    store = MemoryStore(Clock())
    it = site(Rule("api", "60/minute", key=key), store=store, trusted_proxies=[PEER], new_buckets=100)
    tenants = [{"x-id": f"t{number}", "x-api-key": f"t{number}", "host": f"t{number}.example"} for number in range(300)]
    assert flood(it, tenants) == {True: 300}
    assert (len(store), it.app.gate.overflowed) == (300, 0)
    strangers = flood(it, [{name: f"not-{value}" for name, value in tenant.items()} for tenant in tenants], peer="203.0.113.9")
    assert strangers[False] > 100


@pytest.mark.parametrize("how", ["listed", "identified"])
def test_a_known_caller_speaks_for_many(site: Open, how: str) -> None:
    """What a listed or identified caller says in its headers is real; another's from the same address is capped."""
    store, digest = MemoryStore(Clock()), hashlib.sha256(b"gateway").hexdigest()
    by_tenant = Rule("api", "60/minute", key=["header:x-id"])
    options: dict[str, Any] = {"rules": RuleSet([by_tenant], [KnownCaller(id="gateway", api_key=f"sha256:{digest}")])}
    if how == "identified":
        named = {"gateway": Caller("gateway")}
        options = {"rules": [by_tenant], "identify": lambda request: named.get(request.headers.get("x-api-key"))}
    it = site(store=store, new_buckets=100, **options)
    assert flood(it, [{"x-id": f"t{number}", "x-api-key": "gateway"} for number in range(300)]) == {True: 300}
    assert (len(store), it.app.gate.overflowed) == (300, 0)
    assert flood(it, [{"x-id": f"u{number}", "x-api-key": "wrong"} for number in range(300)])[False] > 100


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        (["header:x-id"], [{"x-id": f"v{number}"} for number in range(9)]),
        (["header:x-id|ip"], [{"x-id": f"v{number}"} for number in range(9)]),
        (["user|header:x-id"], [{"x-id": f"v{number}"} for number in range(9)]),
        (["ip", "header:x-id"], [{"x-id": f"v{number}"} for number in range(9)]),
        (["api_key"], [{"x-api-key": f"v{number}"} for number in range(9)]),
        (["host"], [{"host": f"v{number}.example"} for number in range(9)]),
    ],
)
def test_what_clients_may_invent(site: Open, key: list[str], headers: list[dict[str, str]]) -> None:
    """Header values, API keys that nobody checks and hosts are counted, alone, beside other parts and as alternatives."""
    store = MemoryStore(Clock())
    it = site(Rule("api", "9/day", key=key), store=store, new_buckets=4)
    flood(it, headers)
    assert len(store) == 3 + 1


@pytest.mark.parametrize(
    ("key", "options", "headers"),
    [
        (["ip"], {}, invented(9)),
        (["path", "tier"], {}, invented(9)),
        (["ip|header:x-id"], {}, invented(9)),
        (["header:x-other"], {}, invented(9)),
        (["api_key"], {"identify": lambda request: Caller(request.headers["x-api-key"])}, invented(9, "x-api-key")),
        (["caller"], {"identify": lambda request: Caller(request.headers["x-id"])}, invented(9)),
    ],
)
def test_what_clients_cannot_invent(site: Open, key: list[str], options: Any, headers: list[dict[str, str]]) -> None:
    """Addresses, routes and whoever is vouched for are not counted, nor is a header that is not there."""
    it = site(Rule("api", "99/day", key=key), new_buckets=1, **options)
    for _ in range(2):
        flood(it, headers)
    assert it.app.gate.overflowed == 0


def test_listed_keys_are_not_counted(site: Open) -> None:
    """Where API keys are listed, those that are not count as none, so nobody opens buckets with them."""
    store = MemoryStore(Clock())
    rules = RuleSet([Rule("api", "9/day", key=["api_key"])], [KnownCaller(id="a", api_key=f"sha256:{'0' * 64}")])
    it = site(rules=rules, store=store, new_buckets=1)
    flood(it, invented(9, "x-api-key"))
    assert (len(store), it.app.gate.overflowed) == (1, 0)


def test_invented_methods_are_one(site: Open) -> None:
    """Methods open a handful of buckets, whatever a client invents, so they need no counting."""
    store = MemoryStore(Clock())
    it = site(Rule("api", "9/day", key=["method"]), store=store, new_buckets=1)
    others = ("AAA", "BBB", "CCC") if isinstance(it, ASGISite) else ("PUT",)  # the validator takes no other method
    for method in ("GET", "HEAD", "POST", *others):
        it.ask(method=method)
    assert (len(store), it.app.gate.overflowed) == (3, 0)


def test_who_leaves_the_header_out_is_not_hindered(site: Open) -> None:
    """After a flood, a request from the same address without the header has the address's own bucket."""
    it = site(BY_ID, new_buckets=4)
    flood(it, invented(50))
    assert it.statuses(4) == [200, 200, 200, 429]


def test_any_number(site: Open) -> None:
    """With ``new_buckets=0`` nobody counts."""
    store = MemoryStore(Clock())
    it = site(BY_ID, store=store, new_buckets=0)
    flood(it, invented(3000))
    assert (len(store), it.app.gate.overflowed) == (3000, 0)


def test_buckets_are_earned_again(monkeypatch: pytest.MonkeyPatch, site: Open) -> None:
    """As time goes by, a source may open buckets again."""
    watch = Watch()
    monkeypatch.setattr("limitgate.gate.planning.active_rules.monotonic", watch)
    store = MemoryStore(Clock())
    it = site(BY_ID, store=store, new_buckets=60)
    for _ in range(3):
        flood(it, [{"x-id": f"{watch.now}-{number}"} for number in range(99)])
        watch.now += 20
    assert len(store) == 31 + 1 + 10 + 10


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_least_caps(site: Open, count: int) -> None:
    """The smallest numbers are kept to as well."""
    store = MemoryStore(Clock())
    flood(site(BY_ID, store=store, new_buckets=count), invented(9))
    assert 2 <= len(store) <= count + 1


def test_decorators_are_counted() -> None:
    """A decorated endpoint's key is counted like a rule's."""
    store, app = MemoryStore(Clock()), flask.Flask("site")
    app.add_url_rule("/", "view", limit("9/day", key=["header:x-id"])(lambda: "hello"))
    gate = LimitGateWSGI(app, rules=[], store=store, new_buckets=4)
    for fields in invented(9):
        wsgi_reply(gate, headers=fields)
    assert len(store) == 3 + 1


def test_a_flood_is_told_once(site: Open, caplog: pytest.LogCaptureFixture) -> None:
    """That a source opens too many buckets is said at the first time, without a value that it sent; and not before."""
    with caplog.at_level(logging.WARNING, "limitgate"):
        it = site(BY_ID, new_buckets=4)
        flood(it, invented(3))
        assert caplog.messages == []
        flood(it, invented(50))
        flood(it, invented(50), peer="203.0.113.9")
    (message,) = caplog.messages
    assert message.startswith("LG013 api: ")
    assert not any(sent in message for sent in ("invented", PEER, "203"))


@cache
def planner_by(part: str) -> Any:
    from tests.gate.planning.test_planner import planner

    return planner(Rule("api", "9/s", key=[part]))


@given(st.text(max_size=30), st.sampled_from([None, "192.0.2.1", "2001:db8::/64"]))
def test_no_key_spells_an_overflow_bucket_property(value: str, source: str | None) -> None:
    """Whatever a client sends, its bucket is not an overflow bucket, not even that of its own address."""
    from limitgate.keys import Key
    from tests.gate.planning.test_planner import asked

    for part in ("header:overflow", "header:x-id", "host"):
        gate = planner_by(part)
        request = asked(**{part.removeprefix("header:").replace("-", "_"): value.encode("utf-8", "surrogatepass")})
        (charge,) = gate.plan(request, None).plan.charges
        assert not charge.key.endswith(Key([part], "rule api", "/**").digest(overflow(source)))
