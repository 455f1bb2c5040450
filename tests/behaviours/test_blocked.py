"""A count of 0: every request is refused, waiting is no cure, and none is promised, wherever the limit was written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from limitgate import (
    AsyncLimiter,
    Caller,
    Decision,
    Limit,
    Limiter,
    LimitGate,
    MemoryStore,
    RateLimited,
    Rule,
    ausage,
    load_rules,
)
from limitgate.command.group import limitgate
from limitgate.limits.limit import NAMES
from limitgate.prometheus import PrometheusObserver
from limitgate.rules.review import review
from tests.behaviours.test_failure import Flaky
from tests.support.clock import Clock
from tests.support.command_line import CliRunner
from tests.support.doors import SITES, Site, asgi_reply

STORES = ["memory", "redis", "cluster"]
LIMITS: dict[str, Callable[[], dict[str, Any]]] = {
    "qps": lambda: {"qps": 0},
    "beside others": lambda: {"limits": ["5/second", "0/day"], "qpm": 9},
    "with options of the rule": lambda: {"qps": 5, "qpd": 0, "lease": 2, "cost": 2},
    "reserve": lambda: {"qps": 5, "qpd": 0, "reserve": "20%"},
    "max_delay": lambda: {"qps": 5, "qpd": 0, "max_delay": "2s"},
    "charge_if": lambda: {"qpd": 0, "charge_if": {"status": [401]}},
    "a callable": lambda: {"limits": [lambda _: "0/day"], "qps": 5},
    "a callable's list": lambda: {"limits": [lambda _: ["5/second", Limit("0/day")]]},
    "at once": lambda: {"concurrency": 0},
    "months": lambda: {"limits": ["0/month"], "align": "Europe/Berlin"},
    **{name: lambda name=name: {"qpd": 0, "algorithm": name} for name in NAMES if name != "warm_up"},
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    """The URL of a store of each kind."""
    if request.param == "memory":
        return "memory://"
    return str(request.getfixturevalue("redis_server" if request.param == "redis" else "redis_cluster").url)


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def opened(request: pytest.FixtureRequest, store: str) -> Iterator[Callable[..., Site]]:
    """Opens sites on each store."""
    with contextlib.ExitStack() as sites:
        options = {"store": store, "key_prefix": uuid4().hex[:8]}
        yield lambda *rules, **more: sites.enter_context(request.param(*rules, **{**options, **more}))


@pytest.mark.parametrize("written", LIMITS)
def test_every_request_is_refused_for_good(opened: Callable[..., Site], written: str) -> None:
    """With 429 and nothing remaining, without a time at which it would be otherwise."""
    it = opened(Rule("api", **LIMITS[written]()), headers=["x-ratelimit", "draft-11"])
    for _ in range(3):
        reply = it.ask()
        assert reply.status == 429
        assert reply.json()["violated-policies"] == ["api"]
        assert "Waiting does not help." in reply.json()["detail"]
        assert "retry-after" not in reply.headers
        assert (reply.headers["x-ratelimit-limit"], reply.headers["x-ratelimit-remaining"]) == ("0", "0")
        assert "x-ratelimit-reset" not in reply.headers
        assert "q=0;" in reply.headers["ratelimit-policy"]
        blocked = [state for state in reply.headers["ratelimit"].split(", ") if ";r=0" in state]
        assert blocked
        assert ";t=" not in "".join(blocked)
    assert not it.seen


def test_nothing_else_is_charged(opened: Callable[..., Site]) -> None:
    """Other rules and other callers stay as they are."""

    def identify(request: Any) -> Caller | None:
        return Caller("late", limits={"api": "0/day"}) if request.headers.get("x-late") else None

    it = opened(Rule("api", "3/day", key=["ip"]), Rule("all", "4/day", key=["global"]), identify=identify)
    assert [it.ask(headers={"X-Late": "1"}).status for _ in range(5)] == [429] * 5
    assert it.statuses(4) == [200, 200, 200, 429]


@pytest.mark.parametrize("limits", [None, "0/day", Limit("0/day"), ["5/second", "0/hour"], ("0/month",), "0/s burst 20"])
def test_the_own_limits_of_a_caller(opened: Callable[..., Site], limits: Any) -> None:
    """A customer is suspended by data; None does not limit."""
    it = opened(Rule("api", "2/day"), identify=lambda _: Caller("acme", limits={"api": limits}))
    assert it.statuses(3) == ([200] * 3 if limits is None else [429] * 3)


def test_what_was_used_is_found_again(opened: Callable[..., Site]) -> None:
    """Who is suspended and taken back has used what was used before, and nothing while suspended."""
    plan = ["3/day"]
    it = opened(Rule("api", lambda _: plan[0], key=["global"]))
    assert it.statuses(2) == [200, 200]
    plan[0] = "0/day"
    assert it.statuses(2) == [429, 429]
    plan[0] = "3/day"
    assert it.statuses(2) == [200, 429]


def test_a_shadow_reports_and_lets_pass(opened: Callable[..., Site]) -> None:
    it = opened(Rule("api", qpd=0, shadow=True), Rule("all", qpd=1))
    assert it.statuses(2) == [200, 429]
    assert (it.seen[0].allowed, it.seen[0].shadow) == (True, True)


def test_whatever_costs_nothing_passes(opened: Callable[..., Site]) -> None:
    """As under every limit."""
    it = opened(Rule("api", qpd=0, cost=0))
    assert it.statuses(2) == [200, 200]


def calls(store: str) -> Iterator[Callable[..., Decision]]:
    """What both limiters decide, by the name of the method."""
    key = uuid4().hex
    with Limiter(store) as limiter:
        yield lambda method, *limits, **options: getattr(limiter, method)(key, *limits, **options)

    async def asked(method: str, *limits: Any, **options: Any) -> Decision:
        async with AsyncLimiter(store) as limiter:
            return await getattr(limiter, method)(key, *limits, **options)

    yield lambda method, *limits, **options: asyncio.run(asked(method, *limits, **options))


@pytest.mark.parametrize("limits", [("0/day",), ("5/second", "0/day"), (Limit("0/day", algorithm="sliding_log"), "9/minute")])
def test_limiters(store: str, limits: Any) -> None:
    """Whatever is asked, it does not pass, and nobody waits."""
    for call in calls(store):
        found = [
            call("hit", *limits),
            call("hit", *limits, cost=7),
            call("peek", *limits),
            call("hit_up_to", *limits, cost=5),
            call("wait", *limits),
            call("wait", *limits, timeout="1h"),
            call("reset", *limits),
            call("refund", *limits, cost=3),
            call("hit", *limits),
        ]
        for each in found:
            assert (each.allowed, each.limit, each.remaining, each.granted) == (False, 0, 0, 0)
            assert (each.retry_after, each.reset_after) == (math.inf, 0)
            (blocked,) = [window for window in each.windows if not window.limit]
            assert blocked[1:] == (0, 86400, 0, 0, 0, math.inf)


def test_a_pace_of_nothing(store: str) -> None:
    """The first item is refused, and none is lost."""
    with Limiter(store) as limiter, pytest.raises(RateLimited, match="never fits"):
        next(limiter.pace([1], "0/second", key=uuid4().hex))


def test_slots(store: str) -> None:
    """No place can be held."""
    with Limiter(store) as limiter, pytest.raises(RateLimited, match="never fits"), limiter.slot(uuid4().hex, 0):
        pytest.fail("a place was held")


@pytest.fixture(params=SITES, ids=attrgetter("door"))
def door(request: pytest.FixtureRequest) -> type[Site]:
    """Each door."""
    return request.param


@pytest.mark.parametrize("on_error", ["open", "local"])
def test_while_the_store_fails(door: type[Site], on_error: str) -> None:
    """No store has to be asked: who is suspended stays so under ``open``, and others pass."""
    flaky = Flaky()
    flaky.fault = "connection"

    def identify(request: Any) -> Caller | None:
        return Caller("late", limits={"api": "0/day"}) if request.headers.get("x-late") else None

    with door(Rule("api", "5/day"), Rule("all", "9/day"), store=flaky, on_error=on_error, identify=identify) as it:
        assert [it.ask(headers={"X-Late": "1"}).status for _ in range(2)] == [429, 429]
        assert it.statuses(2) == [200, 200]
    with door(Rule("api", qpd=0, shadow=True), store=flaky, on_error=on_error) as it:
        assert it.statuses(2) == [200, 200]
    with door(Rule("api", qpd=0, on_error="closed"), store=flaky) as it:
        assert it.statuses(1) == [503]


def test_a_rule_file(tmp_path: Path) -> None:
    """Zeros in rules and for callers, and nothing odd about them but what never matters beside them."""
    file = tmp_path / "rules.yaml"
    file.write_text(
        "rules:\n  - {name: stop, qps: 0, on_error: local}\n  - {name: api, qpm: 9, key: [caller]}\n"
        f"callers:\n  - {{id: acme, api_key: 'sha256:{'0' * 64}', limits: {{api: 0/day}}}}\n"
        f"  - {{id: b, api_key: 'sha256:{'1' * 64}', limits: null}}\n"
        "tests:\n  - {given: {path: /}, expect: {allowed: false, rule: stop, remaining: 0}}\n"
    )
    rules = load_rules(file)
    assert [str(limit) for limit in rules.tiers["default"][0].every_limit] == ["0/second"]
    assert not [oddity for oddity in review(rules, rules.listed_callers) if "0/" in oddity.message]


def test_metrics(door: type[Site]) -> None:
    """A window of nothing is used up: utilisation is 1, and its limit 0."""
    registry = CollectorRegistry()
    with door(Rule("api", qpd=0), store=MemoryStore(Clock()), observers=[PrometheusObserver(registry)]) as it:
        assert it.statuses(2) == [429, 429]
        found = partial(registry.get_sample_value, labels={"rule": "api", "tier": "default"})
        assert found("limitgate_rule_utilization_sum") == found("limitgate_rule_utilization_count") == 2
        assert registry.get_sample_value("limitgate_rule_limit", {"rule": "api", "tier": "default", "window": "day"}) == 0


def test_usage(store: str) -> None:
    """What is left is nothing, in numbers that JSON has."""

    async def show(request: Request) -> JSONResponse:
        return JSONResponse([(await ausage(request, "api"))[0]._asdict() | {"retry_after": None}])

    app = Starlette(routes=[Route("/", show)])
    app.add_middleware(LimitGate, rules=[Rule("api", qpd=0, shadow=True)], store=store, key_prefix=uuid4().hex[:8])
    (window,) = asyncio.run(asgi_reply(app)).json()
    assert window | {"rule": None} == {
        "rule": None,
        "limit": 0,
        "period": 86400,
        "remaining": 0,
        "used": 0,
        "reset_after": 0.0,
        "retry_after": None,
    }


def test_the_command(tmp_path: Path) -> None:
    """Explain and replay say that such requests are refused; there is no count that would not refuse any."""
    rules, log = tmp_path / "rules.yaml", tmp_path / "access.log"
    rules.write_text("rules:\n  - {name: api, qpd: 0}\n  - {name: places, concurrency: 0, path: /x}\n")
    line = '203.0.113.7 - - [28/Nov/2026:10:00:0{} +0000] "GET {} HTTP/1.1" 200 5 "-" "-"\n'
    log.write_text("".join([line.format(second, path) for second, path in enumerate(["/", "/x", "/"])]))

    def run(*words: str) -> Any:
        return CliRunner().invoke(limitgate, words, catch_exceptions=False)

    explained = run("explain", "GET", "/", "--rules", str(rules), "--json")
    assert explained.exit_code == 1
    told = json.loads(explained.stdout)
    assert (told["status"], told["decision"]["retry_after"]) == (429, None)
    assert not {"Retry-After", "X-RateLimit-Reset"} & {name for name, _ in told["headers"]}
    replayed = run("replay", str(log), "--rules", str(rules), "--suggest", "--json")
    found = json.loads(replayed.stdout)
    assert (found["requests"], found["refused"]) == (3, 3)
