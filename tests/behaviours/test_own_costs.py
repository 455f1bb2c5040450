"""Limits of a rule with a cost of their own: requests and tokens in one decision."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from limitgate import Caller, ConfigError, Limit, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule, load_rules
from limitgate.rules.review import review
from limitgate.rules.revision import digest
from limitgate.rules.rule import RuleSet
from tests.support.clock import Clock
from tests.support.doors import SITES, Site, asgi_reply, wsgi_reply

FIXED = Limit("1000/day", algorithm="fixed_window")
pytestmark = pytest.mark.parametrize("door", SITES, ids=attrgetter("door"))


def left(site: Site) -> dict[str, int]:
    reply = site.ask()
    return {name: int(value) for name, value in reply.headers.items() if name.startswith("x-ratelimit-remaining-")}


@pytest.mark.parametrize("tokens", ["1000/day", FIXED, Limit("1000/day", algorithm="sliding_window")], ids=repr)
@pytest.mark.parametrize("written", ["pair", "mapping", "callable"])
def test_each_limit_has_its_own_cost(door: type[Site], tokens: Any, written: str) -> None:
    options = dict(tokens.given.items() if isinstance(tokens, Limit) else {"limit": tokens}.items())
    given: Any = {"pair": (tokens, 300), "mapping": {**options, "cost": 300}, "callable": (tokens, lambda _: 300)}[written]
    with door(Rule("api", limits=["10/minute", given]), store=MemoryStore(Clock())) as site:
        replies = [site.ask() for _ in range(4)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        # The window with the least room is that of the requests.
        assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["9", "8", "7", "7"]


def test_a_refusal_charges_no_limit(door: type[Site]) -> None:
    clock = Clock()
    rule = Rule("api", "2/minute", ("1000/day", lambda request: int(request.headers["x-size"])))
    with door(rule, store=MemoryStore(clock)) as site:
        assert site.ask(headers=[("x-size", "900")]).status == 200
        assert site.ask(headers=[("x-size", "200")]).status == 429
        assert site.ask(headers=[("x-size", "100")]).status == 200
        # No room for a request is left, whatever its size.
        assert site.ask(headers=[("x-size", "0")]).status == 429


def test_the_cost_of_the_rule_is_that_of_the_other_limits(door: type[Site]) -> None:
    with door(Rule("api", "10/minute", ("1000/day", 100), cost=5), store=MemoryStore(Clock())) as site:
        assert site.statuses(3) == [200, 200, 429]


def settled(door: type[Site], rule: Rule, final: Any) -> list[int]:
    """What is used after a request whose application settles for a cost."""
    store = MemoryStore(Clock())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["limitgate"].settle(final)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def wsgi(environ: Any, start_response: Any) -> list[bytes]:
        environ["limitgate"].settle(final)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"ok"]

    if door.door == "asgi":
        reply = asyncio.run(asgi_reply(LimitGate(app, rules=[rule], store=store)))
    else:
        reply = wsgi_reply(LimitGateWSGI(wsgi, rules=[rule], store=store))
    assert reply.status == 200
    return [window.used for window in Limiter(store).bucket(rule).peek().windows]


@pytest.mark.parametrize("final", [0, 900, 1_500])
def test_settle_corrects_the_limit_with_its_own_cost(door: type[Site], final: int) -> None:
    assert settled(door, Rule("api", "10/minute", ("1000/day", 500), key=["global"]), final) == [1, final]


def test_settle_takes_a_list_for_several_limits(door: type[Site]) -> None:
    rule = Rule("api", ("9000/day", 500), "10/minute", (FIXED, 200), key=["global"])
    assert settled(door, rule, [70, 80]) == [70, 1, 80]


def test_an_outcome_that_is_not_charged_gives_everything_back(door: type[Site]) -> None:
    store, rule = MemoryStore(Clock()), Rule("api", "10/minute", ("1000/day", 500), key=["global"], charge_if={"status": [500]})
    with door(rule, store=store) as site:
        assert site.ask().status == 200
        assert [window.used for window in Limiter(store).bucket(rule).peek().windows] == [0, 0]


def test_a_caller_has_other_limits_and_the_same_costs(door: type[Site]) -> None:
    rule = Rule("api", "1/minute", ("100/day", 100))
    caller = Caller("me", limits={"api": ["10/minute", "1000/day"]})
    with door(rule, store=MemoryStore(Clock()), identify=lambda _: caller) as site:
        assert site.statuses(11) == [*[200] * 10, 429]


def test_two_rules_keep_their_costs_apart(door: type[Site]) -> None:
    rules = Rule("a", "10/minute", ("1000/day", 500)), Rule("b", ("1000/day", 100))
    with door(*rules, store=MemoryStore(Clock())) as site:
        assert site.statuses(3) == [200, 200, 429]


def test_a_rule_file(door: type[Site], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{name: api, limits: [10/minute, {limit: 1000/day, cost: 500}]}]")
    rules = load_rules(tmp_path)
    with door(*rules.tiers["default"], store=MemoryStore(Clock())) as site:
        assert site.statuses(3) == [200, 200, 429]
    assert digest(rules) != digest(RuleSet([Rule("api", "10/minute", "1000/day")]))
    assert digest(rules) == digest(RuleSet([Rule("api", "10/minute", ("1000/day", 500))]))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["5/minute", ("100/day", 101)], "cost 101 exceeds 100/day, expected at most 100"),
        (["5/minute", ("100/day", -1)], "limits: 1: cost is -1|cost is -1"),
        (["5/minute", ("100/day", 1.5)], "cost is a float"),
        (["5/minute", ("100/day", None)], "cost is a NoneType"),
        ([(Limit("100/day", lease=5), 7)], "a lease and its own cost"),
    ],
)
def test_what_cannot_be_a_cost_is_an_error(door: type[Site], limits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        door(Rule("api", limits=limits))


def test_the_fields_of_openai(door: type[Site]) -> None:
    rule = Rule("api", "10/minute", "600/hour", ("36000/hour", 6_000))
    with door(rule, store=MemoryStore(Clock()), headers="openai") as site:
        site.ask()
        fields = {name: value for name, value in site.ask().headers.items() if name.startswith("x-ratelimit")}
    assert fields == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "8",
        "x-ratelimit-reset-requests": "12s",
        "x-ratelimit-limit-tokens": "36000",
        "x-ratelimit-remaining-tokens": "24000",
        "x-ratelimit-reset-tokens": "20m0s",
    }


def test_the_fields_of_anthropic(door: type[Site]) -> None:
    clock = Clock(1_790_000_000_000_000)
    rule = Rule("api", "10/minute", ("36000/hour", 6_000), ("3600/hour", 60))
    with door(rule, store=MemoryStore(clock), headers="anthropic") as site:
        fields = {name: value for name, value in site.ask().headers.items() if name.startswith("anthropic")}
    assert fields == {
        "anthropic-ratelimit-requests-limit": "10",
        "anthropic-ratelimit-requests-remaining": "9",
        "anthropic-ratelimit-requests-reset": "2026-09-21T14:13:26Z",
        "anthropic-ratelimit-input-tokens-limit": "36000",
        "anthropic-ratelimit-input-tokens-remaining": "30000",
        "anthropic-ratelimit-input-tokens-reset": "2026-09-21T14:23:20Z",
        "anthropic-ratelimit-output-tokens-limit": "3600",
        "anthropic-ratelimit-output-tokens-remaining": "3540",
        "anthropic-ratelimit-output-tokens-reset": "2026-09-21T14:14:20Z",
    }


@pytest.mark.parametrize("style", ["openai", "anthropic"])
def test_a_rule_without_tokens_has_the_fields_of_requests(door: type[Site], style: str) -> None:
    with door(Rule("api", "10/minute"), store=MemoryStore(Clock()), headers=style) as site:
        names = {name for name in site.ask().headers if "ratelimit" in name}
        refused = [site.ask() for _ in range(10)][-1]
    assert len(names) == 3
    assert all("requests" in name for name in names)
    assert refused.status == 429
    assert {name for name in refused.headers if "ratelimit" in name} == names


@pytest.mark.parametrize(
    "limits",
    [
        [("200000/minute", 900), "500/minute"],
        ["500/minute", ("200000/minute", 900)],
        ["500/minute", ("200/minute", 0)],
        ["10/minute", ("9/minute", 1)],
    ],
    ids=repr,
)
def test_limits_of_different_costs_are_not_compared(door: type[Site], limits: Any) -> None:
    rules = RuleSet([Rule("api", limits=limits), Rule("other", "499/minute")])
    assert [oddity for oddity in review(rules) if "never refuses" in oddity.message] == []
    assert door


def test_own_costs_leave_slots_at_one_each(door: type[Site]) -> None:
    rule = Rule("api", ("1000/day", 5), concurrency=2, cost=3)
    with door(rule, store=MemoryStore(Clock())) as site:
        assert site.statuses(3) == [200, 200, 200]


def test_a_callers_fewer_limits_have_the_costs_of_their_places(door: type[Site]) -> None:
    rule = Rule("api", "500/minute", ("1000/day", 900))
    caller = Caller("me", limits={"api": "2/minute"})
    with door(rule, store=MemoryStore(Clock()), identify=lambda _: caller) as site:
        assert site.statuses(3) == [200, 200, 429]
