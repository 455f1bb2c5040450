"""What requests get while the store fails, at both doors: by a store that fails on demand, and by a real Redis in trouble."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import redis

from limitgate import MemoryStore, Rule, StoreError, limit, open_store, open_sync_store
from limitgate.gate.outage import CALM
from tests.support.clock import Clock
from tests.support.doors import MOMENT, PATIENCE, SITES, ASGISite, Reply, Site, asgi_reply, wsgi_environ, wsgi_reply
from tests.support.redis_server import RedisServer

Open = Callable[..., Site]

TIMEOUT = 0.1
SLACK = 3.0
"""Seconds that a request may take beyond its timeout on a busy machine; tests/faults measures without such patience."""
BACK_WITHIN = 10.0
"""Seconds after which every process limits again by a store that answers again, on a machine however busy."""


class Flaky:
    """A store that works until it is given a fault."""

    def __init__(self) -> None:
        self.fault: Any = None
        self.missing: tuple[str, ...] = ()
        """Rules whose buckets cannot be reached."""
        self.calls = 0
        self._memory = MemoryStore(Clock())

    def spend(self, plan: Any, timeout: float) -> Any:
        self.calls += 1
        if self.fault:
            raise StoreError("out of order", self.fault)
        missing = frozenset(charge.key for charge in plan.charges if charge.rule in self.missing)
        if missing:
            raise StoreError("a part is out of order", keys=missing)
        return self._memory.spend(plan)

    async def aspend(self, plan: Any, timeout: float) -> Any:
        return self.spend(plan, timeout)

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def site(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens sites of one door."""
    with contextlib.ExitStack() as opened:
        yield lambda *rules, **options: opened.enter_context(request.param(*rules, **options))


@pytest.fixture
def flaky() -> Flaky:
    return Flaky()


def broken(fault: str = "connection") -> Flaky:
    store = Flaky()
    store.fault = fault
    return store


def ticking(it: Site, **more: Any) -> tuple[Reply, float]:
    """A reply and how many seconds it took."""
    begin = time.monotonic()
    reply = it.ask(**more)
    return reply, time.monotonic() - begin


# --- who decides ------------------------------------------------------------------------------------------------------

OUTCOMES = {"open": [200, 200, 200], "local": [200, 429, 429], "closed": [503, 503, 503]}


def ruled(*policies: str | None, **options: Any) -> list[Rule]:
    return [Rule(f"r{place}", "1/minute", on_error=policy, **options) for place, policy in enumerate(policies)]


@pytest.mark.parametrize(
    ("overall", "own", "outcome"),
    [
        (None, [None], "open"),
        ("open", [None], "open"),
        ("local", [None], "local"),
        ("closed", [None], "closed"),
        *[(overall, [own], own) for overall in OUTCOMES for own in OUTCOMES],
        *[("open", list(own), "closed") for own in permutations(["closed", "local", "open"])],
        *[("open", list(own), "local") for own in permutations(["local", "open"])],
        *[("open", list(own), "closed") for own in permutations(["closed", None])],
        ("closed", ["open", "open"], "open"),
        ("closed", ["open", None], "closed"),
        ("local", ["open", None], "local"),
        ("local", ["closed", None], "closed"),
    ],
)
def test_on_error(site: Open, overall: Any, own: list[Any], outcome: str) -> None:
    """A rule's own ``on_error`` wins over the gate's; of several rules closed beats local beats open."""
    options = {"on_error": overall} if overall else {}
    assert site(*ruled(*own), store=broken(), **options).statuses(3) == OUTCOMES[outcome]


@pytest.mark.parametrize(
    ("overall", "own", "outcome"),
    [
        (None, [None], "local"),
        ("open", [None], "local"),
        ("open", ["open"], "open"),
        ("open", ["open", "open"], "open"),
        ("open", ["open", None], "local"),
        ("open", ["closed", None], "closed"),
        ("local", ["open"], "open"),
        ("local", [None], "local"),
        ("closed", [None], "closed"),
        ("closed", ["open"], "open"),
        ("closed", ["local"], "local"),
    ],
)
def test_out_of_memory(site: Open, overall: Any, own: list[Any], outcome: str) -> None:
    """Out of memory in the store makes ``open`` count as ``local``, unless the rule itself says open."""
    options = {"on_error": overall} if overall else {}
    assert site(*ruled(*own), store=broken("oom"), **options).statuses(3) == OUTCOMES[outcome]


@pytest.mark.parametrize("fault", ["timeout", "connection", "reply"])
def test_any_other_fault_is_the_same(site: Open, fault: str) -> None:
    """Whether the store is late, unreachable or talks nonsense makes no difference to what a request gets."""
    assert site(*ruled(None), store=broken(fault)).statuses(3) == OUTCOMES["open"]


@pytest.mark.parametrize("shady", ["closed", "local", None])
def test_a_shadow_rule_has_no_say(site: Open, shady: Any) -> None:
    """A rule that never refuses does not refuse while the store fails either."""
    rules = [Rule("shady", "1/minute", on_error=shady, shadow=True), Rule("real", "1/minute", on_error="open")]
    assert site(*rules, store=broken(), on_error="closed").statuses(3) == OUTCOMES["open"]
    assert site(rules[0], store=broken(), on_error="closed").statuses(3) == OUTCOMES["open"]


def test_a_gate_in_shadow_lets_everything_through(site: Open) -> None:
    """With the shadow option no request is refused, whatever ``on_error`` says."""
    it = site(*ruled("closed", "local"), store=broken(), shadow=True, on_error="closed")
    assert it.statuses(3) == OUTCOMES["open"]


def test_only_rules_that_match_have_a_say(site: Open) -> None:
    """A closed rule for one path closes no other; what no rule is for, or an exempt one, needs no store at all."""
    store = broken()
    it = site(
        Rule("login", "1/minute", path="/login", on_error="closed"),
        Rule("api", "1/minute", path="/api", on_error="local"),
        Rule("health", path="/login/health", exempt=True),
        store=store,
    )
    assert [it.ask(path).status for path in ("/login", "/api", "/api", "/", "/login/health")] == [503, 200, 429, 200, 200]
    assert store.calls == 3


def test_a_decorators_on_error() -> None:
    """A decorator's ``on_error`` is weighed like a rule's."""
    import flask

    from limitgate import LimitGateWSGI

    app = flask.Flask("site")
    app.add_url_rule("/strict", "strict", limit("1/minute", on_error="closed")(lambda: "hello"))
    app.add_url_rule("/easy", "easy", limit("1/minute")(lambda: "hello"))
    gate = LimitGateWSGI(app, rules=[], store=broken())
    assert [wsgi_reply(gate, path).status for path in ("/strict", "/easy", "/easy")] == [503, 200, 200]


# --- a part of the store fails ----------------------------------------------------------------------------------------


def test_rules_whose_buckets_can_be_reached_go_on_limiting(site: Open, flaky: Flaky) -> None:
    """Where only some buckets are out of reach, ``on_error`` decides for their rules alone."""
    it = site(Rule("here", "2/day"), Rule("there", "1/day"), store=flaky)
    flaky.missing = ("there",)
    assert it.statuses(4) == [200, 200, 429, 429]
    assert [decision.degraded for decision in it.seen] == [True, True]
    assert [window.rule for window in it.seen[0].windows] == ["here"]
    flaky.missing = ()
    assert it.ask().status == 429


@pytest.mark.parametrize(("policy", "statuses"), [("open", [200] * 4), ("local", [200, 200, 429, 429]), ("closed", [503] * 4)])
def test_the_others_are_charged_only_if_it_passes(site: Open, flaky: Flaky, policy: Any, statuses: list[int]) -> None:
    """What a policy refuses is charged to no bucket, neither here nor there."""
    it = site(Rule("here", "9/day"), Rule("there", "2/day", on_error=policy), store=flaky)
    flaky.missing = ("there",)
    assert it.statuses(4) == statuses
    flaky.missing = ()
    assert it.ask().status == 200
    assert {window.rule: window.used for window in it.seen[-1].windows} == {"here": statuses.count(200) + 1, "there": 1}


def test_a_local_refusal_is_told_before_the_rest_is_asked(site: Open, flaky: Flaky) -> None:
    """A request that this process refuses costs the store no more than finding out that a part of it is missing."""
    it = site(Rule("here", "9/day"), Rule("there", "1/day", on_error="local"), store=flaky)
    flaky.missing = ("there",)
    assert it.statuses(3) == [200, 429, 429]
    assert flaky.calls == 4


def test_the_rest_may_fail_too(site: Open, flaky: Flaky) -> None:
    """If the rest of the store fails while it is asked, ``on_error`` decides for all rules."""
    it = site(Rule("here", "1/day", on_error="closed"), Rule("there", "1/day"), store=flaky)
    flaky.missing = ("there", "here")
    assert it.ask().status == 503
    flaky.missing = ("there",)
    spend = flaky.spend

    def failing_at_last(plan: Any, timeout: float) -> Any:
        flaky.fault = "timeout" if len(plan.charges) == 1 else None
        return spend(plan, timeout)

    flaky.spend = failing_at_last  # type: ignore[method-assign]
    assert it.ask().status == 503


@pytest.mark.parametrize("takes", [0.05, 0.3], ids=["in time", "late"])
def test_the_rest_gets_the_time_that_is_left(site: Open, flaky: Flaky, monkeypatch: pytest.MonkeyPatch, takes: float) -> None:
    """A request asks twice within one timeout. If finding out what is missing took all of it, nobody else is asked."""
    timeout = 20.0 if takes < 0.2 else 0.2
    it = site(Rule("here", "1/day"), Rule("there", "1/day"), store=flaky, timeout=timeout)
    flaky.missing = ("there",)
    given, spend = [], flaky.spend

    def slow(plan: Any, timeout: float) -> Any:
        given.append(timeout)
        time.sleep(takes)
        return spend(plan, timeout)

    monkeypatch.setattr(flaky, "spend", slow)
    if takes < timeout:
        assert it.statuses(2) == [200, 429]
        assert len(given) == 4
        assert max(given[1::2]) <= timeout - takes
    else:
        assert it.statuses(2) == [200, 200]
        assert given == [0.2, 0.2]


def test_a_refusal_by_the_rest_is_a_refusal(site: Open, flaky: Flaky) -> None:
    """A rule that limits as ever names itself and its wait, and what is decided here is not charged."""
    it = site(Rule("here", "1/day"), Rule("there", "5/day", on_error="local"), store=flaky)
    flaky.missing = ("there",)
    replies = [it.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 429, 429]
    assert replies[1].json()["violated-policies"] == ["here"]
    assert replies[1].wait == 86400


def test_only_what_is_decided_here_is_a_share(site: Open, flaky: Flaky) -> None:
    """Where a part of the store fails, its rules are divided among the processes; the others stay whole."""
    it = site(Rule("here", "8/day"), Rule("there", "8/day", on_error="local"), store=flaky, processes=4)
    flaky.missing = ("there",)
    assert it.statuses(3) == [200, 200, 429]
    assert {window.rule: (window.limit, window.used) for window in it.seen[-1].windows} == {"here": (8, 2), "there": (2, 2)}
    flaky.missing = ()
    assert it.statuses(7) == [200] * 6 + [429]


# --- what they get ----------------------------------------------------------------------------------------------------


def test_under_open(site: Open) -> None:
    """Under ``open`` the application answers, told that nobody knows, and no rate fields are sent."""
    it = site(*ruled(None), store=broken(), headers=["x-ratelimit", "draft-11"])
    reply = it.ask()
    assert (reply.status, reply.body, reply.rate) == (200, b"hello", {})
    assert "retry-after" not in reply.headers
    (decision,) = it.seen
    assert (decision.allowed, decision.degraded, decision.shadow, decision.retry_after) == (True, True, False, 0.0)


def test_under_local(site: Open) -> None:
    """Under ``local`` this process limits by itself, with rate fields of its own and honest refusals."""
    it = site(Rule("api", "2/day"), store=broken(), on_error="local", headers=["draft-11"])
    first, second, third = (it.ask() for _ in range(3))
    assert [first.status, second.status, third.status] == [200, 200, 429]
    assert first.rate == {"ratelimit-policy": '"api";q=2;w=86400', "ratelimit": '"api";r=1;t=43200'}
    assert third.wait == 43200
    assert third.json()["violated-policies"] == ["api"]
    assert [(decision.allowed, decision.degraded) for decision in it.seen] == [(True, True)] * 2


def test_under_local_only_the_local_rules_are_counted(site: Open) -> None:
    """Where one rule says open and another local, the local one alone limits."""
    it = site(Rule("free", "1/day", on_error="open"), Rule("tight", "2/day", on_error="local"), store=broken())
    replies = [it.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[2].json()["violated-policies"] == ["tight"]
    assert [window.rule for window in it.seen[0].windows] == ["tight"]


@pytest.mark.parametrize(("processes", "limit", "each"), [(1, "8/day", 8), (2, "8/day", 4), (3, "8/day", 2), (99, "8/day", 1)])
def test_under_local_each_process_grants_its_share(site: Open, processes: int, limit: str, each: int) -> None:
    """Of so many processes each admits no more than its part of the limit at once, and one request at least."""
    it = site(Rule("api", limit), store=broken(), on_error="local", processes=processes)
    assert it.statuses(each + 1) == [200] * each + [429]
    assert {decision.degraded for decision in it.seen} == {True}


def test_under_local_the_share_is_what_is_reported(site: Open) -> None:
    """The rate fields and the decision tell what this process grants, and its refusal how long it takes here."""
    it = site(
        Rule("api", "100/minute", "9/day"),
        store=broken(),
        on_error="local",
        processes=4,
        headers=["x-ratelimit", "x-ratelimit-windows", "draft-11"],
    )
    replies = [it.ask() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    rate = replies[0].rate
    assert rate.pop("x-ratelimit-reset").isdigit()
    assert rate == {
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "1",
        "x-ratelimit-limit-minute": "25",
        "x-ratelimit-remaining-minute": "24",
        "ratelimit-policy": '"api-minute";q=25;w=60, "api-345600s";q=9;w=345600',
        "ratelimit": '"api-minute";r=24;t=3, "api-345600s";r=1;t=38400',
    }
    assert [(window.limit, window.period) for window in it.seen[0].windows] == [(25, 60), (2, 345600)]
    assert 0 < replies[2].wait <= 38400


def test_under_local_a_dear_request_stays_possible(site: Open) -> None:
    """A request that costs more than the share of the burst passes once, and leaves no room for cheaper ones."""
    costs = iter([6, 1, 6, 11])
    it = site(Rule("api", "10/day", cost=lambda _: next(costs)), store=broken(), on_error="local", processes=5)
    replies = [it.ask() for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 429, 429, 429]
    assert ["retry-after" in reply.headers for reply in replies] == [False, True, True, False]


def test_shares_are_for_the_time_without_a_store(site: Open, flaky: Flaky) -> None:
    """While the store answers, the whole limit is there for whoever asks."""
    it = site(Rule("api", "8/day"), store=flaky, on_error="local", processes=4)
    assert it.statuses(3) == [200] * 3
    flaky.fault = "timeout"
    assert it.statuses(3) == [200, 200, 429]
    flaky.fault = None
    assert it.statuses(6) == [200] * 5 + [429]


def test_out_of_memory_each_process_grants_its_share(site: Open) -> None:
    """Where out of memory makes ``open`` count as ``local``, it is the share that counts."""
    assert site(Rule("api", "8/day"), store=broken("oom"), processes=4).statuses(3) == [200, 200, 429]


def test_under_local_all_limits_are_charged_or_none(site: Open) -> None:
    """The local rules of a request are decided together: what one refuses is not taken from the others."""
    it = site(Rule("api", "9/day"), Rule("tight", "1/day", path="/tight"), store=broken(), on_error="local")
    assert it.statuses(4, "/tight") == [200, 429, 429, 429]
    assert it.statuses(9, "/easy") == [200] * 8 + [429]


def test_under_local_a_shadow_rule_is_not_counted(site: Open) -> None:
    """A rule that never refuses is left out where this process limits alone."""
    it = site(Rule("api", "9/day"), Rule("shady", "1/day", shadow=True), store=broken(), on_error="local")
    assert it.statuses(2) == [200, 200]
    assert [window.rule for window in it.seen[1].windows] == ["api"]


ALL_STYLES = ["x-ratelimit", "x-ratelimit-windows", "draft-11"]


@pytest.mark.parametrize("fault", ["timeout", "connection", "reply", "oom"])
@pytest.mark.parametrize(("policy", "status"), [("open", 200), ("closed", 503)])
def test_nothing_is_invented(site: Open, fault: str, policy: str, status: int) -> None:
    """Where nobody has counted, no style says a number: neither under ``open`` nor under ``closed``, whatever the fault."""
    rule = Rule("api", "5/day", on_error=policy)
    reply = site(rule, store=broken(fault), on_error="local", processes=4, headers=ALL_STYLES).ask()
    assert (reply.status, reply.rate) == (status, {})


def test_on_denied_answers_a_local_refusal(site: Open) -> None:
    """A refusal by this process alone is a 429 like any other: the application's own answer goes out, with local numbers."""
    opened = site(Rule("api", "1/day"), store=broken())
    own = opened.answering(429, [("Content-Type", "text/plain")], b"mine", denied := [])
    it = site(Rule("api", "1/day"), store=broken(), on_error="local", on_denied=own)
    assert it.ask().status == 200
    reply = it.ask()
    assert (reply.status, reply.body, reply.rate["x-ratelimit-remaining"], reply.wait) == (429, b"mine", "0", 86400)
    assert [(decision.allowed, decision.degraded) for decision in denied] == [(False, True)]


def test_every_store_says_whether_it_is_healthy(own_redis: RedisServer) -> None:
    """``store.healthy`` may be asked of any store; one in memory always is."""
    assert [open_store("memory://").healthy, MemoryStore().healthy] == [True, True]
    assert [open_store(own_redis.url).healthy, open_sync_store(own_redis.url).healthy] == [True, True]


def test_under_closed(site: Open) -> None:
    """Under ``closed`` a request gets a 503 that is no 429 in disguise, and never reaches the application."""
    it = site(*ruled("closed"), store=broken(), on_denied=lambda *_: pytest.fail("asked about a 503"))
    reply = it.ask()
    assert reply.status == 503
    assert reply.json() == {
        "type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
        "title": "Temporary Reduced Capacity",
        "status": 503,
        "detail": reply.json()["detail"],
    }
    assert dict(reply.headers) == {
        "content-type": "application/problem+json",
        "content-length": str(len(reply.body)),
        "cache-control": "no-store",
        "retry-after": str(reply.wait),
    }
    assert 1 <= reply.wait <= BACK_WITHIN
    assert it.seen == []
    head = it.ask(method="HEAD")
    assert (head.status, head.body, head.headers) == (503, b"", reply.headers)


def test_the_decision_under_closed() -> None:
    """The decision under ``closed`` is a refusal that says it is degraded."""
    with SITES[1](*ruled("closed"), store=broken()) as it:
        environ = wsgi_environ()
        it.app(environ, lambda *_: None)
    assert (environ["limitgate"].allowed, environ["limitgate"].degraded) == (False, True)


@pytest.mark.parametrize(
    ("on_error", "fault", "told"),
    [
        ("open", "connection", "open: requests pass without limits, unless"),
        ("open", "oom", "local: this process alone limits requests, unless"),
        ("closed", "connection", "closed: requests get 503, unless"),
        ("local", "reply", "local: this process alone limits requests, unless"),
    ],
)
def test_what_happens_meanwhile_is_logged(
    site: Open, flaky: Flaky, caplog: pytest.LogCaptureFixture, *, on_error: Any, fault: Any, told: str
) -> None:
    """The policy in force, which under full memory is another than the option."""
    flaky.fault = fault
    site(Rule("api", "3/day"), store=flaky, on_error=on_error).statuses(1)
    assert f"the store failed, on_error decides until it answers again ({told}" in caplog.text


def test_the_store_counts_from_where_it_was(site: Open, flaky: Flaky) -> None:
    """What happened while the store failed is not charged to it, nor does it linger here once the store is back."""
    it = site(Rule("api", "3/day"), store=flaky, on_error="local")
    assert it.statuses(2) == [200, 200]
    flaky.fault = "timeout"
    assert it.statuses(4) == [200, 200, 200, 429]
    flaky.fault = None
    assert it.statuses(2) == [200, 429]
    assert [decision.degraded for decision in it.seen] == [False, False, True, True, True, False]


def test_one_line_per_change_of_state(site: Open, flaky: Flaky, caplog: pytest.LogCaptureFixture) -> None:
    """A failing store is logged when it begins to fail and when it answers again, not for each request; all are counted.

    One that answers some requests and fails others, as it does while it is full, is one that fails.
    """
    it = site(Rule("api", "99/day"), store=flaky)
    with caplog.at_level(logging.DEBUG, "limitgate"):
        for fault in (None, "timeout", None, "connection", None, "oom", "calm", None, "reply", "calm"):
            if fault == "calm":
                time.sleep(CALM + 0.05)
            flaky.fault = None if fault == "calm" else fault
            it.statuses(3)
    assert [line.partition(",")[0] for line in caplog.messages] == ["the store failed", "the store answers again"] * 2
    assert "again (open: requests pass without limits, unless a rule has its own on_error): " in caplog.messages[0]
    assert "out of order" in caplog.messages[0]
    assert {record.name for record in caplog.records} == {"limitgate"}
    assert it.app.gate.failures == 12


# --- Redis ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent(folder: Path) -> Iterator[str]:
    """A socket that takes connections and never says a word."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "silent.sock"))
        listening.listen(128)
        yield f"unix://{folder}/silent.sock"


@contextlib.contextmanager
def saying(words: bytes) -> Iterator[str]:
    """A server on TCP that says the same to everybody, then hangs up."""
    stopping = threading.Event()

    def serve(listening: socket.socket) -> None:
        while not stopping.is_set():
            with contextlib.suppress(OSError), listening.accept()[0] as connection:
                if words:
                    connection.recv(1)
                    connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        thread = threading.Thread(target=serve, args=[listening])
        thread.start()
        try:
            yield f"redis://:s3cret@127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stopping.set()
            thread.join(PATIENCE)


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """A TCP port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    yield f"redis://:s3cret@127.0.0.1:{port}/0"


TROUBLES = {
    "no socket": lambda folder: contextlib.nullcontext(f"unix://{folder}/none.sock"),
    "no port": lambda _: nobody(),
    "silence": silent,
    "hangs up": lambda _: saying(b""),
    "another protocol": lambda _: saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "half a reply": lambda _: saying(b"*14\r\n$6\r\nser"),
    "nonsense": lambda _: saying(bytes(range(128, 256))),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize(("on_error", "outcome"), OUTCOMES.items())
def test_no_redis_at_start(site: Open, tmp_path: Path, trouble: str, on_error: str, outcome: list[int]) -> None:
    """An application whose Redis is absent, mute or something else starts, and serves under ``on_error`` in time."""
    with TROUBLES[trouble](tmp_path) as url:
        it = site(Rule("api", "1/day"), store=url, timeout=TIMEOUT, on_error=on_error)
        replies = [ticking(it) for _ in range(3)]
    assert [reply.status for reply, _ in replies] == outcome
    assert max(seconds for _, seconds in replies) < TIMEOUT + SLACK
    assert all(decision.degraded for decision in it.seen)


def test_the_password_is_not_logged(site: Open, caplog: pytest.LogCaptureFixture) -> None:
    """What is said about an unreachable Redis holds no secret out of its URL."""
    with caplog.at_level(logging.DEBUG, "limitgate"), nobody() as url:
        it = site(Rule("api", "1/day"), store=url)
        assert it.ask().status == 200
    assert caplog.messages
    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr(it.app.gate.store)


def healed(it: Site, count: int) -> None:
    """Asks until the store is back, in time, and then that it limits to ``count``: exactly so many pass by its word."""
    deadline = time.monotonic() + BACK_WITHIN
    before = len(it.seen)
    admitted = 0
    while not admitted:
        assert time.monotonic() < deadline
        assert it.ask().status in (200, 503)
        admitted = sum(not decision.degraded for decision in it.seen[before:])
        it.idle()
    while it.ask().status == 200:
        admitted += 1
        assert not it.seen[-1].degraded
    assert admitted == count
    assert it.ask().status == 429


@pytest.mark.parametrize("on_error", OUTCOMES)
def test_redis_crashes_and_comes_back(
    site: Open, own_redis: RedisServer, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    """While Redis is gone ``on_error`` decides, at once; when it is back, empty, it limits exactly, within 2 s."""
    gc.collect()  # gates that earlier tests have dropped are told of now
    caplog.clear()
    it = site(Rule("api", "5/day"), store=own_redis.url, timeout=1, on_error=on_error)
    assert it.statuses(2) == [200, 200]
    own_redis.kill()
    replies = [ticking(it) for _ in range(7)]
    expected = {"open": [200] * 7, "local": [200] * 5 + [429] * 2, "closed": [503] * 7}
    assert [reply.status for reply, _ in replies] == expected[on_error]
    assert max(seconds for _, seconds in replies) < SLACK
    deadline = time.monotonic() + BACK_WITHIN
    while it.app.gate.store.healthy:  # a busy machine may have failed some of them without asking
        assert time.monotonic() < deadline
        it.ask(peer="192.0.2.201")
    own_redis.start()
    if on_error == "local":
        _until_answered(it)
        with own_redis.client() as client:
            client.flushall()
    healed(it, 5)
    time.sleep(CALM)
    it.ask()
    assert [re.split("[,:]", message)[0] for message in caplog.messages] == [
        "the store failed",
        "Redis does not answer",
        "LG019 Redis was restarted or replaced",
        "Redis answers again",
        "the store answers again",
    ]


def _until_answered(it: Site) -> None:
    """Asks for something else until the store is back, where refusals might be this process's own."""
    deadline = time.monotonic() + BACK_WITHIN
    while not it.seen or it.seen[-1].degraded:
        assert time.monotonic() < deadline
        it.ask(peer="192.0.2.200")
        it.idle()


def test_redis_comes_back_while_nobody_asks(site: Open, own_redis: RedisServer) -> None:
    """Where no request has come since Redis is back, it is found all the same, and the first one is limited by it."""
    it = site(Rule("api", "5/day"), store=own_redis.url, timeout=1)
    own_redis.kill()
    assert it.statuses(8) == [200] * 8
    assert not it.app.gate.store.healthy
    own_redis.start()
    deadline = time.monotonic() + BACK_WITHIN
    while not it.app.gate.store.healthy:
        assert time.monotonic() < deadline
        it.idle()
    assert it.statuses(6) == [200, 200, 200, 200, 200, 429]
    assert [decision.degraded for decision in it.seen] == [True] * 8 + [False] * 5


@pytest.mark.parametrize("idle", [True, False])
def test_redis_restarts_between_two_requests(site: Open, own_redis: RedisServer, *, idle: bool) -> None:
    """A restart that no request met goes unnoticed, also where a request comes at the very moment the connection is lost."""
    it = site(Rule("api", "2/day"), store=own_redis.url, timeout=2)
    assert it.ask().status == 200
    own_redis.kill()
    own_redis.start()
    if idle:
        it.idle()
    assert it.statuses(3) == [200, 200, 429]
    assert not any(decision.degraded for decision in it.seen)


@pytest.mark.parametrize("what", [["SCRIPT", "FLUSH"], ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"], ["FLUSHALL"]])
def test_what_an_operator_does_meanwhile(site: Open, own_redis: RedisServer, what: list[str]) -> None:
    """Flushed scripts and killed connections are made up for within the request."""
    it = site(Rule("api", "9/day"), store=own_redis.url, timeout=2)
    with own_redis.client() as client:
        for _ in range(3):
            assert it.ask().status == 200
            client.execute_command(*what)
            it.idle()
    assert not any(decision.degraded for decision in it.seen)


@pytest.mark.parametrize("connected", [False, True])
def test_redis_freezes_and_thaws(site: Open, own_redis: RedisServer, *, connected: bool) -> None:
    """A Redis that stands still holds nobody up for longer than the timeout; thawed, it limits again within 2 s."""
    it = site(Rule("api", "9/day"), store=own_redis.url, timeout=TIMEOUT)
    if connected:
        assert it.ask().status == 200
    with own_redis.frozen():
        replies = [ticking(it) for _ in range(5)]
    assert {reply.status for reply, _ in replies} == {200}
    assert max(seconds for _, seconds in replies) < TIMEOUT + SLACK
    assert all(decision.degraded for decision in it.seen[connected:])
    deadline = time.monotonic() + BACK_WITHIN
    while it.ask().status == 200 and it.seen[-1].degraded:
        assert time.monotonic() < deadline
        it.idle()
    it.statuses(20)
    assert sum(not decision.degraded for decision in it.seen) <= 9
    assert it.ask().status == 429


def test_a_crowd_before_a_frozen_redis(site: Open, own_redis: RedisServer) -> None:
    """Many requests at once are each answered in time: they do not wait for one another's timeouts."""
    it = site(Rule("api", "9/day"), store=own_redis.url, timeout=TIMEOUT)
    it.ask()
    begin, statuses = time.monotonic(), []
    with own_redis.frozen():
        if isinstance(it, ASGISite):

            async def crowd() -> None:
                statuses.extend(reply.status for reply in await asyncio.gather(*[asgi_reply(it.app) for _ in range(50)]))

            it.runner.run(crowd())
        else:
            threads = [threading.Thread(target=lambda: statuses.append(wsgi_reply(it.app).status)) for _ in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
        seconds = time.monotonic() - begin
    assert statuses == [200] * 50
    assert seconds < TIMEOUT + 2 * SLACK


def test_the_event_loop_goes_on(own_redis: RedisServer) -> None:
    """While a request waits for a Redis that stands still, everything else in its event loop goes on."""

    async def scene(app: Any) -> int:
        waiting, ticks = asyncio.create_task(asgi_reply(app)), 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert (await waiting).status == 200
        return ticks

    with ASGISite(Rule("api", "9/day"), store=own_redis.url, timeout=0.5) as it:
        it.ask()
        with own_redis.frozen():
            assert it.runner.run(scene(it.app)) > 10


@contextlib.contextmanager
def slow_to_greet(server: RedisServer, seconds: float, folder: Path) -> Iterator[str]:
    """A way to the server that begins to carry bytes only after a while, on each new connection."""
    stopping = threading.Event()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):  # also after a client that was reset, as the server would wait for more of it
            sink.shutdown(socket.SHUT_WR)

    def carry(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            stopping.wait(seconds)
            far.connect(str(server.socket))
            back = threading.Thread(target=pump, args=[far, near])
            back.start()
            pump(near, far)
            back.join(PATIENCE)

    def serve(listening: socket.socket) -> None:
        carriers, connections = [], []
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                connections.append(listening.accept()[0])
                carriers.append(threading.Thread(target=carry, args=[connections[-1]]))
                carriers[-1].start()
        for connection, carrier in zip(connections, carriers):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            carrier.join(PATIENCE)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "slow.sock"))
        listening.listen(128)
        listening.settimeout(0.05)
        thread = threading.Thread(target=serve, args=[listening])
        thread.start()
        try:
            yield f"unix://{folder}/slow.sock"
        finally:
            stopping.set()
            thread.join(PATIENCE)


def test_connecting_may_take_longer_than_a_request(site: Open, own_redis: RedisServer, tmp_path: Path) -> None:
    """Where the handshake takes longer than the timeout, it goes on behind the requests, and the store is reached."""
    with slow_to_greet(own_redis, 6 * TIMEOUT, tmp_path) as url:
        it = site(Rule("api", "1000/day"), store=url, timeout=TIMEOUT)
        reply, seconds = ticking(it)
        assert (reply.status, it.seen[0].degraded) == (200, True)
        assert seconds < TIMEOUT + SLACK
        deadline = time.monotonic() + BACK_WITHIN
        while it.seen[-1].degraded:
            assert time.monotonic() < deadline
            it.idle()
            assert it.ask().status == 200
        assert 1000 - len(it.seen) <= it.seen[-1].remaining < 1000  # requests that did not wait may count, too
        it.close()


def test_redis_out_of_memory(site: Open, own_redis: RedisServer) -> None:
    """A full Redis does not switch the limiter off: this process limits alone until there is room again."""
    it = site(Rule("api", "2/day"), Rule("free", "1/day", path="/free", on_error="open"), store=own_redis.url, timeout=2)
    with own_redis.client() as client:
        client.config_set("maxmemory", 1)
        assert it.statuses(3) == [200, 200, 429]
        assert [decision.degraded for decision in it.seen] == [True, True]
        client.config_set("maxmemory", 0)
        _until_answered(it)
    assert it.statuses(3) == [200, 200, 429]


def test_redis_turns_into_a_replica(site: Open, own_redis: RedisServer) -> None:
    """A Redis that takes no writes any more is a store that fails, not an error of the application; and it recovers."""
    it = site(Rule("api", "5/day"), store=own_redis.url, timeout=2)
    with own_redis.client() as client:
        it.ask(peer="192.0.2.9")
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert it.statuses(3) == [200, 200, 200]
        assert all(decision.degraded for decision in it.seen[1:])
        client.execute_command("REPLICAOF", "NO", "ONE")
    healed(it, 5)


def test_redis_wants_a_password(site: Open, own_redis: RedisServer) -> None:
    """A Redis that asks for a password we do not have is a store that fails; so is one whose password we have wrong."""
    with own_redis.client() as client:
        client.config_set("requirepass", "other")
        it = site(Rule("api", "5/day"), store=own_redis.url, timeout=2)
        wrong = site(
            Rule("api", "5/day"), store=own_redis.url.replace("unix://", "unix://:s3cret@"), timeout=2, on_error="closed"
        )
        assert it.statuses(3) == [200, 200, 200]
        assert all(decision.degraded for decision in it.seen)
        assert wrong.statuses(3) == [503, 503, 503]
        client.execute_command("AUTH", "other")
        client.config_set("requirepass", "")
    healed(it, 5)


def test_redis_is_busy_with_a_script(site: Open, own_redis: RedisServer) -> None:
    """A Redis that answers BUSY, because somebody's script runs on and on, is a store that fails, and it recovers."""
    it = site(Rule("api", "5/day"), store=own_redis.url, timeout=0.5)
    with own_redis.client() as client, own_redis.client() as busy:
        client.config_set("busy-reply-threshold", 10)

        def run_on() -> None:
            with contextlib.suppress(Exception):
                busy.eval("while true do end", 0)

        thread = threading.Thread(target=run_on)
        thread.start()
        with contextlib.suppress(redis.ResponseError):
            while client.ping():
                time.sleep(MOMENT)
        replies = [ticking(it) for _ in range(3)]
        client.execute_command("SCRIPT", "KILL")
        thread.join(PATIENCE)
    assert [reply.status for reply, _ in replies] == [200] * 3
    assert max(seconds for _, seconds in replies) < 0.5 + SLACK
    assert all(decision.degraded for decision in it.seen)
    healed(it, 5)
