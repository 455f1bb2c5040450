"""Limits as data: a callable in the place of limits, and the own limits of a caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import Caller, ConfigError, Limit, LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet, limit
from limitgate.fastapi import RateLimit
from limitgate.gate.planning.given_limits import MOST_CALLERS
from limitgate.messages.diagnostics import OncePerValue
from limitgate.routes.overview import overview
from limitgate.rules.callers import KnownCaller
from tests.routes.test_overview import listed
from tests.support.clock import Clock
from tests.support.doors import PEER, SITES, ASGISite, Site, WSGISite, asgi_reply, wsgi_reply

PLANS: dict[str, Any] = {
    "text": "2/minute",
    "limit": Limit("2/minute"),
    "list": ["2/minute", Limit("9/hour")],
    "tuple": ("2/minute", "9/hour"),
    "none": None,
}


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def opened(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens a site, with a clock that stands."""
    sites: list[Site] = []

    def opening(*rules: Rule, **options: Any) -> Site:
        sites.append(request.param(*rules, **{"store": MemoryStore(Clock()), **options}))
        return sites[-1]

    yield opening
    for it in sites:
        it.close()


def by_header(request: Any) -> Any:
    """Limits of the plan that a header names, or that text itself."""
    plan = request.headers.get("x-plan", "text")
    return PLANS.get(plan, plan)


def named(request: Any) -> Caller:
    """A caller with the limits that a header names."""
    return Caller("me", limits={"api": by_header(request)})


@pytest.mark.parametrize(
    ("plan", "statuses"),
    [
        ("text", [200, 200, 429]),
        ("limit", [200, 200, 429]),
        ("list", [200, 200, 429]),
        ("tuple", [200, 200, 429]),
        ("none", [200] * 3),
    ],
)
def test_what_a_callable_may_give(opened: Any, plan: str, statuses: list[int]) -> None:
    """Text, a limit, several of them, or nothing: then the rule does not limit this request."""
    it = opened(Rule("api", by_header))
    assert it.statuses(3, headers={"X-Plan": plan}) == statuses


def test_fields_and_decision_are_those_of_the_limits_given(opened: Any) -> None:
    """Nobody can tell from an answer where its limits came from."""
    it = opened(Rule("api", by_header), headers=["draft-11"])
    reply = it.ask(headers={"X-Plan": "list"})
    assert reply.headers["ratelimit-policy"] == '"api-minute";q=2;w=60, "api-hour";q=9;w=3600'
    assert [window.limit for window in it.seen[0].windows] == [2, 9]
    assert it.ask(headers={"X-Plan": "none"}).rate == {}
    assert it.seen[1] is None
    assert it.statuses(1, headers={"X-Plan": "list"}) == [200]
    assert it.ask(headers={"X-Plan": "list"}).json()["violated-policies"] == ["api"]


def test_a_callable_finds_the_caller(opened: Any) -> None:
    """It is whom ``identify`` found, and None where nobody was."""
    seen = []

    def limits_of(request: Any) -> str:
        seen.append(request.caller)
        return "9/minute"

    caller = Caller("me")
    it = opened(Rule("api", limits_of), identify=lambda request: caller if request.headers.get("x-me") else None)
    it.ask(headers={"X-Me": "1"})
    it.ask()
    assert seen == [caller, None]


def test_a_callable_is_asked_once_and_only_for_its_rule(opened: Any) -> None:
    asked = []
    it = opened(Rule("api", lambda request: asked.append(request.path) or "9/minute", path="/api/**"), Rule("all", "99/minute"))
    assert [it.ask(each).status for each in ("/api/a", "/b", "/api/c")] == [200] * 3
    assert asked == ["/api/a", "/api/c"]


def test_what_a_callable_raises_is_the_applications(opened: Any) -> None:
    """It is raised as it is, and nothing was charged."""

    def broken(request: Any) -> str:
        if request.headers.get("x-break"):
            raise LookupError("mine")
        return "9/minute"

    it = opened(Rule("all", "1/minute", key=["global"]), Rule("api", broken))
    with pytest.raises(LookupError, match="mine"):
        it.ask(headers={"X-Break": "1"})
    assert it.statuses(2) == [200, 429]


def test_what_was_used_stays_when_limits_change(opened: Any) -> None:
    """A caller who gets a larger plan keeps what it owes, and one who gets a smaller one, too."""
    it = opened(Rule("api", by_header, key=["ip"]))
    assert it.statuses(3, headers={"X-Plan": "2/minute"}) == [200, 200, 429]
    assert it.statuses(5, headers={"X-Plan": "4/minute"}) == [200, 200, 429, 429, 429]
    assert it.statuses(1, headers={"X-Plan": "2/minute"}) == [429]


@pytest.mark.parametrize("algorithm", ["gcra", "fixed_window", "sliding_window", "sliding_log"])
def test_refund_after_the_limits_have_changed_gives_back_what_was_charged(algorithm: str) -> None:
    """The outer request is charged under one limit, and its bucket has another one when it is given back."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] == "/outer":
            ask("/inner", "40/hour")
        start_response("200 OK" if environ["PATH_INFO"] == "/outer" else "401 Unauthorized", [("Content-Type", "text/plain")])
        return []

    def ask(path: str, plan: str, peer: str = PEER) -> int:
        return int(wsgi_reply(gate, path, headers={"X-Plan": plan}, peer=peer).headers["x-ratelimit-remaining"])

    def identify(request: Any) -> Caller:
        return Caller("me", limits={"api": Limit(request.headers["x-plan"], algorithm=algorithm)})

    rule = Rule("api", "5/minute", key=["ip"], cost=3, charge_if={"status": [401]})
    gate = LimitGateWSGI(app, rules=[rule], identify=identify, store=MemoryStore(Clock()))
    assert ask("/another client", "10/minute", "192.0.2.9") == 7
    assert ask("/outer", "10/minute") == 7
    assert ask("/after", "40/hour") == 34


@pytest.mark.parametrize(
    "given", ["often", "5/month", "5/minute burst 0", 5, [], ["9/minute", None], [{}], {}, "9/minute " * 50, Limit]
)
def test_what_cannot_be_read_is_told_and_the_written_limits_apply(
    opened: Any, caplog: pytest.LogCaptureFixture, given: Any
) -> None:
    """Once for a rule and a value, however many requests come."""
    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", lambda _: given, qpm=2))
        assert it.statuses(3) == [200, 200, 429]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("LG026 rule api got invalid limits at run time")
    assert len(told[0]) < 400


UNREADABLE = "rule api got invalid limits at run time, so the rule's own limits apply: "


@pytest.mark.parametrize("names", ["masked", "full", "off"])
def test_each_value_that_cannot_be_read_is_told_with_its_caller(
    opened: Any, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    """A customer's mistake is not hidden by the same of another; the name is as in the log of refusals."""
    known = {"anna-4711": "5 per fortnight", "bert-0815": "plenty", "cora-2342": "5 per fortnight", "dora-1234": "99/minute"}

    def identify(request: Any) -> Caller:
        name = request.headers["x-who"]
        return Caller(name, limits={"api": known[name], "other": known[name]})

    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", qpm=99), identify=identify, names=names)
        for _ in range(3):
            assert [it.ask(headers={"X-Who": name}).status for name in known] == [200] * 4
    told = [record.getMessage() for record in caplog.records]
    callers = {"masked": ["an…11", "be…15", "co…42"], "full": ["anna-4711", "bert-0815", "cora-2342"], "off": ["", ""]}[names]
    assert [UNREADABLE in line for line in told] == [True] * len(callers)
    for line, value, caller in zip(told, ("'5 per fortnight'", "'plenty'", "'5 per fortnight'"), callers):
        assert value in line
        assert (f"(caller {caller})" in line) is bool(caller)
        assert "-" not in line.replace(caller, "") or names == "full"


def test_a_name_that_is_masked_as_a_whole_is_told_as_such(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the line would not say that there is a name, nor how to see it."""
    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", qpm=99), identify=lambda _: Caller("ann", limits={"api": "often"}))
        assert it.ask().status == 200
    assert "(caller …, in full with names='full')" in caplog.text


def test_so_many_callers_with_one_value_are_told(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The last line says that further ones are not, and another value is told nevertheless."""

    def identify(request: Any) -> Caller:
        return Caller(request.headers["x-who"], limits={"api": request.headers["x-plan"]})

    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", qpm=99), identify=identify)
        for _ in range(2):
            for number in range(MOST_CALLERS + 3):
                assert it.ask(headers={"X-Who": f"customer-{number:04}", "X-Plan": "often"}).status == 200
        assert it.ask(headers={"X-Who": "customer-0003", "X-Plan": "plenty"}).status == 200
    told = [record.getMessage() for record in caplog.records]
    assert ["'often'" in line for line in told] == [True] * MOST_CALLERS + [False]
    assert ["further callers with this value are not logged" in line for line in told] == [
        number == MOST_CALLERS - 1 for number in range(MOST_CALLERS + 1)
    ]


def test_a_caller_is_told_after_a_request_without_one(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    def identify(request: Any) -> Caller | None:
        who = request.headers.get("x-who")
        return None if who is None else Caller(who)

    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", lambda _: "often", qpm=99), identify=identify)
        for headers in ({}, {"X-Who": "anna-4711"}, {}, {"X-Who": "bert-0815"}):
            assert it.ask(headers=headers).status == 200
    told = [record.getMessage().partition(" (limitgate doc")[0].partition(" (caller ")[2] for record in caplog.records]
    assert told == ["", "an…11)", "be…15)"]


def test_a_callers_values_by_a_callable_are_told_for_each_rule(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The same value is told for another rule, and a request without a caller is told without one."""
    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", by_header, qpm=99), Rule("all", by_header, qpm=99))
        for plan in ("plenty", "often", "plenty"):
            assert it.ask(headers={"X-Plan": plan}).status == 200
    told = [record.getMessage() for record in caplog.records]
    assert [("rule api" in line, "'plenty'" in line) for line in told] == [
        (True, True),
        (False, True),
        (True, False),
        (False, False),
    ]
    assert not [line for line in told if "caller" in line]


def test_only_so_many_values_are_told(opened: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory nor the log grows with what an application invents; objects that differ in nothing are one value."""
    monkeypatch.setattr(OncePerValue, "MOST", 5)
    with caplog.at_level(logging.WARNING, "limitgate"):
        it = opened(Rule("api", lambda _: object(), qpm=99), Rule("all", by_header, qpm=99))
        for number in range(9):
            assert it.ask(headers={"X-Plan": f"{number} often"}).status == 200
    assert len(caplog.records) == 5
    assert sum("object object" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("given", ["often", [], 5])
def test_without_written_limits_the_request_fails(opened: Any, given: Any) -> None:
    """It never passes unlimited in silence."""
    with pytest.raises(ConfigError, match="rule 'api': invalid limits at run time: "):
        opened(Rule("api", lambda _: given)).ask()


def test_the_own_limits_of_a_caller(opened: Any) -> None:
    """In the place of the rule's, for rules of these names and nothing else."""
    it = opened(Rule("api", "1/minute", path="/api"), Rule("all", "4/minute"), identify=named)
    assert it.statuses(3, "/api", headers={"X-Plan": "2/minute"}) == [200, 200, 429]
    assert it.statuses(3, "/", headers={"X-Plan": "9/minute"}) == [200, 200, 429]


def test_own_limits_that_cannot_be_read(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    it = opened(Rule("api", "1/minute"), identify=named)
    assert it.statuses(2, headers={"X-Plan": "plenty"}) == [200, 429]
    assert "LG026" in caplog.text


def test_no_own_limits(opened: Any) -> None:
    """None, no mapping at all and an empty one are the same: the limits of the rule apply."""
    assert Caller("me", limits=None) == Caller("me") == Caller("me", limits={})
    assert (Caller("me", limits=None).limits, hash(Caller("me", limits=None))) == ({}, hash(Caller("me")))
    assert replace(Caller("me", "vip", {"api": "5/s"}), limits=None) == Caller("me", "vip")
    it = opened(Rule("api", "1/minute"), identify=lambda _: Caller("me", limits=None))
    assert it.statuses(2) == [200, 429]


def test_own_limits_of_none(opened: Any) -> None:
    it = opened(Rule("api", "1/minute"), identify=named)
    assert it.statuses(3, headers={"X-Plan": "none"}) == [200] * 3


def test_own_limits_stand_before_those_of_a_callable(opened: Any) -> None:
    """Then the callable is not asked."""
    asked: list[Any] = []
    it = opened(Rule("api", lambda _: asked.append(1) or "1/minute"), identify=named)
    assert it.statuses(3, headers={"X-Plan": "2/minute"}) == [200, 200, 429]
    assert not asked


def test_listed_callers_have_limits_of_their_own(opened: Any) -> None:
    """As in a rule file; all others have those of the rule."""
    key = "sha256:ec2b782e6a1d99c869519255386f29687b6ecea1d59cadeb3eb088398acb97d6"
    caller = KnownCaller(id="acme", api_key=key, limits={"api": "2/minute"})  # type: ignore[dict-item]
    it = opened(rules=RuleSet([Rule("api", "1/minute", key=["api_key"])], [caller]))
    assert it.statuses(3, headers={"X-API-Key": "demo-vip-key"}) == [200, 200, 429]
    assert it.statuses(2) == [200, 429]


def test_own_limits_in_a_rule_file(tmp_path: Path) -> None:
    """One limit or several for each rule, read at start."""
    text = """\
    rules:
      - {name: api, qpm: 1}
      - {name: search, qpm: 1}
    callers:
      - {id: acme, header: {X-Caller: acme}, limits: {api: 2/minute, search: [5/second, 9/day]}}
    """
    (tmp_path / "rules.yaml").write_text(text)
    with ASGISite(rules=tmp_path, store=MemoryStore(Clock()), trusted_proxies=["192.0.2.1"]) as it:
        assert it.statuses(3, headers={"X-Caller": "acme"}) == [200, 200, 429]
        assert [window.limit for window in it.seen[0].windows] == [2, 5, 9]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"apy": "1/minute"}, "there is no rule 'apy' with limits, did you mean 'api'[?] expected one of api, slow"),
        ({"free": "1/minute"}, "there is no rule 'free' with limits"),
        ({"slow": {"limit": "1/minute", "algorithm": "sliding_window"}}, "caller 'acme': rule 'slow' has a sliding_window"),
    ],
)
def test_own_limits_that_a_rule_cannot_have(limits: Any, expected: str) -> None:
    """They are a mistake at start."""
    rules = [Rule("api", "1/minute"), Rule("slow", "1/minute", max_delay=1), Rule("free", path="/f", exempt=True)]
    caller = KnownCaller(id="acme", header={"X-Caller": "acme"}, limits=limits)
    with pytest.raises(ConfigError, match=expected) as caught:
        RuleSet(rules, [caller])
    assert caught.value.field[:3] == ("callers", 0, "limits")


def test_options_of_the_rule_go_for_the_limits_given(opened: Any) -> None:
    """Its algorithm, as far as a limit says none; its cost; its shares."""
    it = opened(Rule("api", by_header, algorithm="fixed_window", cost=2))
    assert it.statuses(3, headers={"X-Plan": "4/minute"}) == [200, 200, 429]
    assert it.seen[0].evidence[0].charge.bucket.limits[0].algorithm == "fixed_window"
    kept = opened(Rule("api", by_header, reserve="20%"))
    assert kept.statuses(5, headers={"X-Plan": "5/minute"}) == [200] * 4 + [429]
    refused = it.ask(headers={"X-Plan": "1/hour"})
    assert (refused.status, "retry-after" in refused.headers) == (429, False)


def test_given_limits_are_charged_by_outcome(opened: Any) -> None:
    """A request that is given back leaves room by these limits, too."""
    it = opened(Rule("api", by_header, charge_if={"status": [401]}))
    assert it.statuses(5, headers={"X-Plan": "1/minute"}) == [200] * 5


def test_places_in_flight_may_be_given(opened: Any) -> None:
    it = opened(Rule("api", by_header))
    assert it.statuses(3, headers={"X-Plan": "1 at once"}) == [200] * 3


def test_a_lease_is_no_larger_than_the_limit_given(opened: Any) -> None:
    it = opened(Rule("api", by_header, lease=50, qpm=500))
    assert it.statuses(3, headers={"X-Plan": "2/minute"}) == [200, 200, 429]
    assert it.seen[0].evidence[0].charge.bucket.lease == 2


# --- async ------------------------------------------------------------------------------------------------------------


async def alater(request: Any) -> Any:
    await asyncio.sleep(0)
    if request.headers.get("x-break"):
        raise LookupError("mine")
    return by_header(request)


def test_an_async_callable() -> None:
    """Under ASGI it is awaited, once for a request; what it raises is raised."""
    asked = []

    async def counted(request: Any) -> Any:
        asked.append(request.path)
        return await alater(request)

    with ASGISite(Rule("api", counted), Rule("two", alater), store=MemoryStore(Clock())) as it:
        assert it.statuses(3) == [200, 200, 429]
        assert it.ask(headers={"X-Plan": "none"}).status == 200
        assert len(asked) == 4
        with pytest.raises(LookupError, match="mine"):
            it.ask(headers={"X-Break": "1"})


class _Later:
    async def __call__(self, request: Any) -> Any:
        return await alater(request)


@pytest.mark.parametrize("function", [alater, _Later()], ids=["function", "object"])
def test_an_async_callable_is_told_at_start_under_wsgi(function: Any) -> None:
    for given in ({"rules": [Rule("api", function)]}, {"rules": [Rule("api", "5/minute")], "identify": function}):
        with pytest.raises(ConfigError, match="is async, expected a plain function under WSGI"):
            LimitGateWSGI(lambda _environ, _start: [], **given)


@pytest.mark.filterwarnings("error")
def test_an_async_callable_under_wsgi() -> None:
    """Where only its result shows it, it is told at the first request."""

    def hidden(request: Any) -> Any:
        return alater(request)

    with (
        WSGISite(Rule("api", hidden), store=MemoryStore(Clock())) as it,
        pytest.raises(TypeError, match="is async, expected a plain function under WSGI"),
    ):
        it.ask()


@pytest.mark.filterwarnings("error")
def test_a_callable_that_fails_leaves_no_coroutine_behind() -> None:
    async def failing(_: Any) -> str:
        raise LookupError("mine")

    with (
        ASGISite(Rule("a", failing), Rule("b", alater), store=MemoryStore(Clock())) as it,
        pytest.raises(LookupError, match="mine"),
    ):
        it.ask()


def test_requests_at_once_have_their_own_limits() -> None:
    """What one of them is given while another one waits is not mixed up."""
    gate = LimitGate(
        ASGISite.answering(200, [], b"", []), rules=[Rule("api", alater, key=["header:x-plan"])], store=MemoryStore(Clock())
    )

    async def all_at_once() -> list[int]:
        plans = [f"{count}/minute" for count in (1, 2, 3)] * 4
        replies = await asyncio.gather(*[asgi_reply(gate, headers={"X-Plan": plan}) for plan in plans])
        return [reply.status for reply in replies]

    assert sorted(asyncio.run(all_at_once())) == [200] * 6 + [429] * 6


# --- where limits stand -----------------------------------------------------------------------------------------------


def test_decorators() -> None:
    """`@limit` takes a callable in the place of its limits, in Starlette and in Flask."""

    @limit(alater)
    async def view(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = LimitGate(Starlette(routes=[Route("/", view)]), rules=[], store=MemoryStore(Clock()))

    async def statuses(plan: str) -> list[int]:
        return [(await asgi_reply(app, headers={"X-Plan": plan})).status for _ in range(3)]

    assert asyncio.run(statuses("text")) == [200, 200, 429]
    assert asyncio.run(statuses("none")) == [200, 200, 200]
    flask = Flask(__name__)
    flask.add_url_rule("/", "view", limit(by_header)(lambda: "hello"))
    flask.wsgi_app = LimitGateWSGI(flask.wsgi_app, rules=[], store=MemoryStore(Clock()))  # type: ignore[method-assign]
    assert [wsgi_reply(flask).status for _ in range(3)] == [200, 200, 429]


def test_dependencies() -> None:
    """So does `RateLimit`; its callable and its condition are asked once for a request, too."""
    app, met = FastAPI(), []
    by_code = RateLimit(alater, key=["ip"], when=lambda request: met.append(request) or True)

    @app.get("/", dependencies=[Depends(by_code)])
    async def view() -> str:
        return "hello"

    app.add_middleware(LimitGate, rules=[Rule("all", "5/minute")], store=MemoryStore(Clock()))

    async def statuses(plan: str, count: int) -> list[int]:
        return [(await asgi_reply(app, headers={"X-Plan": plan})).status for _ in range(count)]

    assert asyncio.run(statuses("text", 3)) == [200, 200, 429]
    assert asyncio.run(statuses("none", 4)) == [200, 200, 200, 429]
    assert len(met) == 6, "of seven requests one was refused before"
    assert by_code.rule.name.startswith("alater-")
    assert "429" in app.openapi()["paths"]["/"]["get"]["responses"]


def test_the_overview_says_that_it_is_by_code() -> None:
    rules = RuleSet([Rule("api", by_header), Rule("more", by_header, qpm=5)])
    table = overview([rules], [listed()])
    assert " by code " in table
    assert " by code, else 5/minute " in table


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_one_callable_stands_for_all() -> None:
    with pytest.raises(ConfigError, match="2 callables, expected one, which may return a list"):
        Rule("api", by_header, alater)
    with pytest.raises(ConfigError, match="is exempt and has limits"):
        Rule("api", by_header, exempt=True)
    with pytest.raises(ConfigError, match="is not a limit"):
        Rule("api", Limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [lambda: "5/minute", lambda *_, more: f"{more}/minute", lambda _request, more: f"{more}/s"])
def test_a_callable_takes_a_request(given: Any) -> None:
    """What cannot be called with one is told at once, not with the first request."""
    with pytest.raises(ConfigError, match=r"rule 'api': limits: .*<lambda> cannot be called with a request, expected a call"):
        Rule("api", given)
    with pytest.raises(ConfigError, match="cannot be called with a request"):
        limit(given)
    Rule("api", dict[str, str]().get)  # type: ignore[arg-type]


def test_limit_without_parentheses_is_told() -> None:
    """A view stands where the limits belong: it is told where it is made, or else with the first request."""
    with pytest.raises(ConfigError, match=r"view cannot be called with a request, .* limits in parentheses"):

        @limit
        def view() -> str:
            return "hello"

    @limit
    async def endpoint(request: Any) -> str:
        return "hello"

    app = Starlette(routes=[Route("/", endpoint)])
    app.add_middleware(LimitGate, rules=[])
    with pytest.raises(ConfigError, match=r"a Request is not an endpoint, .* @limit\('5/minute'\)"):
        asyncio.run(asgi_reply(app))


def test_limits_of_a_caller_are_a_mapping() -> None:
    with pytest.raises(TypeError, match="limits of a Caller are a str, expected a mapping such as"):
        Caller("me", limits="5/minute")  # type: ignore[arg-type]
    assert hash(Caller("me", limits={"api": "5/minute"})) is not None
