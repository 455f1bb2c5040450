"""Headers that are too many or too long: whatever is not read neither opens a limit nor counts as absent."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from django.urls import path as url
from fastapi import Depends, FastAPI, Header
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import (
    Adaptive,
    Caller,
    ConfigError,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    Rule,
    RuleSet,
    ausage,
    exempt,
    limit,
    usage,
)
from limitgate.fastapi import RateLimit
from limitgate.gate.explain import LookingStore, explain
from limitgate.gate.lifecycle.build import build_gate
from limitgate.http.client_ip import MAX_HOPS, MOST_CHARACTERS
from limitgate.http.request import LONGEST_VALUE, MOST_LINES, ASGIRequest
from limitgate.routes import NoRoutes
from limitgate.rules.callers import KnownCaller
from limitgate.stores import open_sync_store
from tests.support.clock import Clock
from tests.support.django_app import WAYS, hello
from tests.support.doors import (
    PATIENCE,
    SITES,
    ASGISite,
    Site,
    Wire,
    asgi_reply,
    handshake,
    http_scope,
    uvicorn_process,
    wsgi_reply,
)

# isort: split
from rest_framework.response import Response
from rest_framework.views import APIView

from limitgate.django.rest import SimpleRateThrottle, Throttle

KEY = "0123456789abcdef"
LISTED = "sha256:9f9f5111f7b27a781f1f1ddde5ebc2dd2b796bfc7365c9c28b548e564176929f"
PROXY, OFFICE, STRANGER = "10.0.0.1", "10.1.1.1", "203.0.113.9"
MANY = [("A", "b")] * (MOST_LINES + 10)


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def opened(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens a site, with a clock that stands."""
    sites: list[Site] = []

    def opening(*rules: Any, **options: Any) -> Site:
        sites.append(request.param(*rules, store=MemoryStore(Clock()), **options))
        return sites[-1]

    yield opening
    for it in sites:
        it.close()


@pytest.fixture
def asgi() -> Iterator[Any]:
    """Opens a site over ASGI, where a request has lines."""
    sites: list[Site] = []

    def opening(*rules: Any, **options: Any) -> Site:
        sites.append(ASGISite(*rules, store=MemoryStore(Clock()), **options))
        return sites[-1]

    yield opening
    for it in sites:
        it.close()


def swallowing(request: Any) -> bool:
    """A condition that takes every error for a header that is not there."""
    try:
        return request.headers.get("x-bad") == "1"
    except BaseException:  # noqa: BLE001 - as people write it
        return False


async def identifying(request: Any) -> Caller | None:
    return Caller("ann", tier="blocked") if swallowing(request) else None


WAYS_BY_HEADER: dict[str, Any] = {
    "deny": [Rule("bad", deny=True, when=swallowing)],
    "when": [Rule("bad", "2/minute", when=swallowing)],
    "cost": [Rule("all", "20/minute", cost=lambda request: 10 if swallowing(request) else 1)],
    "limits": [Rule("all", lambda request: "2/minute" if swallowing(request) else "90/minute")],
    "key": [Rule("all", "2/minute", key=["header:x-bad"])],
    "api key": [Rule("all", "2/minute", key=["api_key"])],
    "host": [Rule("all", "2/minute", key=["host"])],
    "address": [Rule("all", "2/minute")],
    "adaptive": [Rule("all", adaptive=True)],
    "tier": [Rule("all", "90/minute"), Rule("bad", deny=True, tier="blocked")],
}

# --- too many lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS_BY_HEADER)
def test_more_lines_than_are_read_are_refused(asgi: Any, way: str) -> None:
    """A request of more lines gets a 431, however rules read headers, and even if their callables swallow every error."""
    identify = identifying if way == "tier" else None
    it = asgi(*WAYS_BY_HEADER[way], identify=identify, headers=["x-ratelimit", "draft-11"])
    for headers in ([("X-Bad", "1"), *MANY], [*MANY, ("X-Bad", "1")]):
        reply = it.ask(headers=headers)
        assert reply.status == 431
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["title"] == "Request Header Fields Too Large"
        assert not reply.rate
        assert "retry-after" not in reply.headers
    assert not it.seen
    assert it.ask().status == 200
    assert it.ask(method="HEAD", headers=MANY).body == b""


def test_as_many_lines_as_are_read_change_nothing(asgi: Any) -> None:
    """With a thousand lines every header is found, wherever it stands."""
    others = [("A", "b")] * (MOST_LINES - 2)  # and Host
    for way, statuses in (("deny", [403] * 3), ("when", [200, 200, 429]), ("cost", [200, 200, 429]), ("tier", [403] * 3)):
        for headers in ([("X-Bad", "1"), *others], [*others, ("X-Bad", "1")]):
            it = asgi(*WAYS_BY_HEADER[way], identify=identifying if way == "tier" else None)
            assert it.statuses(3, headers=headers) == statuses


@pytest.mark.parametrize("count", [MOST_LINES, 8200, 16_000])
def test_no_number_of_lines_makes_a_stranger_the_proxy(asgi: Any, count: int) -> None:
    """The address that a proxy names is found or the request is refused, but nobody becomes the trusted proxy itself."""
    rules = [Rule("office", exempt=True, clients=["10.0.0.0/8"]), Rule("all", "2/minute")]
    it = asgi(*rules, trusted_proxies=["10.0.0.0/8"])
    named = ("X-Forwarded-For", STRANGER)
    for headers in ([named] * count, [named, *[("A", "b")] * count], [*[("A", "b")] * count, named]):
        assert it.statuses(3, headers=headers, peer=PROXY) == [431] * 3
    assert it.statuses(3, headers=[named], peer=PROXY) == [200, 200, 429]


def test_what_no_rule_is_for_passes(asgi: Any) -> None:
    """An exempt path, one without rules and a gate that is switched off take any number of lines."""
    it = asgi(Rule("health", path="/health", exempt=True), Rule("api", "1/minute", path=["/health", "/api"]))
    assert [it.ask(path, headers=MANY).status for path in ("/health", "/other", "/api", "//api/")] == [200, 200, 431, 431]
    assert it.seen == [None, None]
    assert asgi(Rule("all", "1/minute"), enabled=False).statuses(3, headers=MANY) == [200] * 3
    assert asgi(Rule("all", "1/minute", methods=["POST"])).statuses(3, headers=MANY) == [200] * 3


def test_an_exemption_holds_only_if_nobodys_headers_matter(asgi: Any) -> None:
    """A path that is exempt for some callers or clients may not be exempt for this one."""
    health, strict = Rule("health", path="/health", exempt=True), Rule("health", "1/minute", path="/health", tier="strict")
    assert asgi(health, strict).ask("/health", headers=MANY).status == 431
    office = Rule("office", exempt=True, clients=["192.0.2.0/24"])
    it = asgi(office, Rule("all", "1/minute"))
    assert (it.ask().status, it.ask(headers=MANY).status) == (200, 431)


def test_decorators_are_rules_as_well() -> None:
    """A route that only a decorator limits is limited, one that a decorator exempts is exempt."""

    async def endpoint(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async def free(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    routes = [Route("/limited", limit("1/minute")(endpoint)), Route("/free", exempt(free))]
    app = LimitGate(Starlette(routes=routes), rules=[Rule("free", "1/minute", path="/free")], store=MemoryStore(Clock()))
    assert [asyncio.run(asgi_reply(app, path, headers=MANY)).status for path in ("/limited", "/free")] == [431, 200]


@pytest.mark.parametrize("options", [{"shadow": True}, {}])
def test_a_shadow_refuses_nothing(asgi: Any, options: dict[str, Any]) -> None:
    """Where nothing is enforced, the request passes, and the decision says that it would have been refused."""
    it = asgi(Rule("all", "1/minute", key=["header:x-id"], shadow=not options), Rule("no", deny=True, shadow=True), **options)
    assert it.statuses(3, headers=MANY) == [200] * 3
    assert it.statuses(3, headers=[("X-Id", "x" * (LONGEST_VALUE + 1))]) == [200] * 3
    assert all(decision.allowed and decision.shadow and decision.retry_after == 0 for decision in it.seen)


def test_an_enforced_rule_beside_a_shadow_refuses(asgi: Any) -> None:
    """What is not read may be refused by any rule that is enforced."""
    it = asgi(Rule("one", "9/minute", shadow=True), Rule("other", "9/minute"))
    assert it.ask(headers=MANY).status == 431


def test_a_websocket_is_refused_before_it_is_accepted(asgi: Any) -> None:
    """With the denial extension it gets the 431, else a close code that does not ask to try again."""
    it = asgi(Rule("all", "9/minute"))
    assert it.runner.run(handshake(it.app, headers=MANY)).status == 431
    assert it.runner.run(handshake(it.app, headers=MANY, denial=False)).status == 1008


def test_a_gate_inside_refuses_and_the_one_around_takes_nothing(asgi: Any) -> None:
    """Each gate looks for itself: what is none of the outer one's is refused by the inner one."""
    inner = asgi(Rule("inner", "1/minute"))
    outer = LimitGate(inner.app, rules=[Rule("outer", "1/minute", path="/x")], store=MemoryStore(Clock()))
    assert inner.runner.run(asgi_reply(outer, headers=MANY)).status == 431
    assert not inner.seen


def test_a_decision_by_no_bucket_is_shown(asgi: Any) -> None:
    """Access logs find the outcome, and nobody is told to wait."""
    it = asgi(Rule("all", "1/minute"))
    scope = http_scope(headers=MANY)
    it.runner.run(Wire({"type": "http.request"}).call(it.app, scope))
    assert scope["limitgate.outcome"] == "refused"
    decision = it.runner.run(it.app.gate.acheck(ASGIRequest(http_scope(headers=MANY)))).decision
    assert (decision.allowed, decision.rule, decision.retry_after, decision.windows) == (False, None, math.inf, ())


@pytest.mark.parametrize("count", [3, MOST_LINES + 1])
def test_lines_may_be_any_iterable(count: int) -> None:
    """Lines that can be gone through once are counted all the same, and the application still has them."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    lines = [(b"a", b"%d" % number) for number in range(count)]
    scope = http_scope() | {"headers": iter(lines)}
    gated = LimitGate(app, rules=[Rule("all", "2/minute", key=["header:a"])], store=MemoryStore(Clock()))
    reply = asyncio.run(Wire({"type": "http.request"}).call(gated, scope)).reply()
    assert (reply.status, found) == ((200, lines) if count <= MOST_LINES else (431, []))


@pytest.mark.parametrize("headers", [MANY, [("X-Forwarded-For", "a" * 3000)]], ids=["lines", "client"])
@pytest.mark.parametrize(
    "beside", [Rule("other", "1/day", path="/other"), Rule("all", "1/day", shadow=True)], ids=["none", "shadow"]
)
def test_a_limit_of_the_application_s_own_is_not_switched_off(beside: Rule, headers: Any) -> None:
    """A request that no enforced rule is for may still be for a dependency: it is no exempt one."""
    app = FastAPI(dependencies=[Depends(RateLimit("1/minute"))])
    app.get("/")(lambda: "hello")
    gated = LimitGate(app, rules=[beside], store=MemoryStore(Clock()), trusted_proxies=[PROXY])
    assert [asyncio.run(asgi_reply(gated, "/", peer=PROXY)).status for _ in range(2)] == [200, 429]
    assert [asyncio.run(asgi_reply(gated, "/", peer=PROXY, headers=headers)).status for _ in range(2)] == [431, 431]


@pytest.mark.parametrize("forwarded", [", ".join(["10.0.0.1"] * 40), "a" * 3000])
def test_a_client_that_cannot_be_read_keeps_no_place(opened: Any, forwarded: str) -> None:
    """Its place under an adaptive limit is given back, though the request is refused as soon as it has it."""
    it = opened(Rule("all", adaptive=Adaptive(min=2, max=4)), trusted_proxies=["10.0.0.0/8"])
    headers = {"X-Forwarded-For": forwarded}
    assert [it.ask(headers=headers, peer=PROXY).status for _ in range(6)] == [431] * 6
    assert [it.ask().status for _ in range(6)] == [200] * 6


# --- too long values --------------------------------------------------------------------------------------------------

LONG = "x" * (LONGEST_VALUE + 1)


@pytest.mark.parametrize(
    ("key", "header"), [("header:x-id", "X-Id"), ("api_key", "X-API-Key"), ("host", "Host"), ("header:x-id|ip", "X-Id")]
)
def test_a_value_that_is_not_read_counts_as_nothing_else(opened: Any, key: str, header: str) -> None:
    """A header that a key goes by is not absent because it is long: its sender would be counted by address."""
    it = opened(Rule("all", "2/minute", key=[key]), Rule("others", "90/minute", key=["ip"]))
    assert [it.ask(headers={header: LONG}, peer=f"192.0.2.{number}").status for number in range(4)] == [431] * 4
    assert it.statuses(2, headers={header: "x"}) == [200, 200]
    assert it.statuses(3, headers={header: LONG[1:]}) == [200, 200, 429]
    assert opened(Rule("all", "2/minute")).ask(headers={header: LONG}).status == 200


@pytest.mark.parametrize(
    "trial",
    [
        {"key": ["header:x-id"]},
        {"key": ["global"], "when": lambda request: request.client == STRANGER},
        {"key": ["ip"]},
        {"key": ["global"], "clients": [STRANGER]},
    ],
    ids=["header", "condition", "ip", "clients"],
)
def test_only_the_shadow_needs_what_is_not_read(opened: Any, trial: dict[str, Any]) -> None:
    """The other rules decide as without the shadow rule, and the decision says that it would have refused."""
    headers = {"X-Id": LONG, "X-Forwarded-For": ", ".join([PROXY] * 40)}
    it = opened(
        Rule("real", "2/minute", key=["global"]),
        Rule("trial", "1/minute", shadow=True, **trial),
        trusted_proxies=["10.0.0.0/8"],
    )
    replies = [it.ask(headers=headers, peer=PROXY) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]
    assert [decision.shadow for decision in it.seen] == [True, True]


def test_the_shadow_beside_another_limit_that_is_not_read(opened: Any) -> None:
    """It is refused for the enforced rule, which needs the same header."""
    it = opened(Rule("trial", "9/minute", key=["header:x-id"], shadow=True), Rule("real", "9/minute", key=["header:x-id"]))
    assert it.ask(headers={"X-Id": LONG}).status == 431


def test_a_shadow_in_front_of_an_adaptive_limit_keeps_no_place(opened: Any) -> None:
    """The places of the first attempt are given back."""
    it = opened(Rule("all", adaptive=Adaptive(min=2, max=4)), Rule("trial", "9/minute", key=["header:x-id"], shadow=True))
    replies = [it.ask(headers={"X-Id": LONG}) for _ in range(6)]
    assert [(reply.status, reply.rate["x-ratelimit-remaining"]) for reply in replies] == [(200, "3")] * 6
    assert [it.ask().status for _ in range(6)] == [200] * 6
    assert [decision.shadow for decision in it.seen] == [True] * 6 + [False] * 6


def test_who_waits_for_a_place_beside_a_shadow_keeps_its_place_in_the_line() -> None:
    """It is charged like any other, and never more requests are under way than the limit allows."""
    under_way, most, go = 0, 0, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await go.wait()
        under_way -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    rules = [
        Rule("all", adaptive=Adaptive(min=1, max=1), max_delay=60),
        Rule("real", "2/day", key=["global"]),
        Rule("trial", "9/minute", key=["header:x-id"], shadow=True),
    ]
    gated = LimitGate(app, rules=rules, store=MemoryStore(Clock()))

    async def main() -> list[int]:
        tasks = [asyncio.create_task(asgi_reply(gated, headers={"X-Id": value})) for value in ("x", LONG, LONG, LONG)]
        for _ in range(50):
            await asyncio.sleep(0)
        go.set()
        return [reply.status for reply in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == [200, 200, 429, 429]
    assert most == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_limits_of_a_shadow_by_a_client_that_is_not_read(asgi: Any, *, is_async: bool) -> None:
    def limits(request: Any) -> str:
        return "1/minute" if request.client else "2/minute"

    async def alimits(request: Any) -> str:
        return limits(request)

    trial = Rule("trial", alimits if is_async else limits, key=["global"], shadow=True)
    it = asgi(Rule("real", "2/minute", key=["global"]), trial, trusted_proxies=[PROXY])
    assert it.statuses(3, headers=[("X-Forwarded-For", ", ".join([PROXY] * 40))], peer=PROXY) == [200, 200, 429]


def test_padding_makes_no_stranger_of_a_caller(opened: Any) -> None:
    """A listed key behind so many spaces that it is not read is refused, as the application may find the key."""
    callers = [KnownCaller(id="acme", api_key=LISTED, tier="blocked")]
    rules = RuleSet([Rule("all", "90/minute"), Rule("no", deny=True, tier="blocked")], callers)
    it = opened(rules=rules, api_key_header="authorization")
    for spaces, status in ((1, 403), (5000, 403), (20_000, 431)):
        assert it.ask(headers={"Authorization": "Bearer" + " " * spaces + KEY}).status == status


def test_a_host_is_read_up_to_its_port(opened: Any) -> None:
    """What stands behind the colon makes no other host, however long it is."""
    it = opened(Rule("tenant", "2/minute", key=["host"]))
    hosts = ("acme.example", "acme.example:80", "acme.example:" + "0" * (2 * LONGEST_VALUE) + "80")
    assert [it.ask(headers={"Host": host}, peer=f"192.0.2.{place}").status for place, host in enumerate(hosts)] == [
        200,
        200,
        429,
    ]


def test_places_are_given_back(opened: Any) -> None:
    """A request that has its place already, and is refused for its key, is in flight no more."""
    it = opened(Rule("all", "90/minute", key=["header:x-id"], adaptive=Adaptive(min=1, max=1)))
    assert it.statuses(3, headers={"X-Id": LONG}) == [431] * 3
    assert it.ask(headers={"X-Id": "x"}).status == 200


def test_a_request_that_has_waited_for_a_place_is_refused() -> None:
    """The key is read once there is a place for the request, which it gives back then."""

    async def main() -> list[int]:
        busy, free = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            busy.set()
            await free.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        rule = Rule("all", "90/minute", key=["header:x-id"], adaptive=Adaptive(min=1, max=1), max_delay="9s")
        gated = LimitGate(app, rules=[rule], store=MemoryStore(Clock()))
        first = asyncio.create_task(asgi_reply(gated, headers={"X-Id": "x"}))
        await busy.wait()
        second = asyncio.create_task(asgi_reply(gated, headers={"X-Id": LONG}))
        third = asyncio.create_task(asgi_reply(gated, headers={"X-Id": "x"}))
        await asyncio.sleep(0.01)
        assert not second.done()
        free.set()
        async with asyncio.timeout(PATIENCE):
            return [(await each).status for each in (first, second, third)]

    assert asyncio.run(main()) == [200, 431, 200]


# --- forwarding headers -----------------------------------------------------------------------------------------------

BY_ADDRESS = [Rule("office", exempt=True, clients=["10.0.0.0/8"]), Rule("all", "2/minute")]


def test_a_client_behind_more_proxies_than_are_looked_at_is_none_of_them(opened: Any) -> None:
    """The walk does not end at a trusted address just because it has gone far enough."""
    it = opened(*BY_ADDRESS, trusted_proxies=["10.0.0.0/8"])
    for hops, statuses in ((MAX_HOPS - 1, [200, 200, 429]), (MAX_HOPS, [431] * 3), (400, [431] * 3)):
        forwarded = ", ".join([STRANGER, *[OFFICE] * hops])
        assert it.statuses(3, headers={"X-Forwarded-For": forwarded}, peer=PROXY) == statuses
    assert it.statuses(3, headers={"X-Forwarded-For": ", ".join([OFFICE] * MAX_HOPS)}, peer=PROXY) == [200] * 3


def test_a_long_host_does_not_hide_who_sent_it(opened: Any) -> None:
    """A proxy that writes the Host of a request into its element makes that as long as the client likes."""
    it = opened(*BY_ADDRESS, trusted_proxies=["10.0.0.0/8"], forwarded_header="forwarded")
    for length, statuses in ((10, [200, 200, 429]), (MOST_CHARACTERS, [431] * 3), (60_000, [431] * 3)):
        headers = {"Forwarded": f"for={STRANGER};host={'h' * length}"}
        assert it.statuses(3, headers=headers, peer=PROXY) == statuses


def test_who_is_told_the_client_may_not_swallow_that(opened: Any) -> None:
    """A callable that asks for the address gets an error, and the gate that asks for it later refuses."""

    def swallowing(request: Any) -> bool:
        try:
            return request.client == OFFICE
        except Exception:  # noqa: BLE001 - as people write it
            return False

    def raising(request: Any) -> Caller | None:
        return Caller("office") if request.client == OFFICE else None

    forwarded = {"X-Forwarded-For": ", ".join([STRANGER, *[OFFICE] * 40])}
    options = {"trusted_proxies": ["10.0.0.0/8"]}
    assert opened(Rule("all", "9/minute", when=lambda _: True), **options).ask(headers=forwarded, peer=PROXY).status == 431
    it = opened(Rule("no", deny=True, when=swallowing), Rule("all", "9/minute"), **options)
    assert it.ask(headers=forwarded, peer=PROXY).status == 431
    it = opened(Rule("all", "9/minute", key=["caller"]), identify=raising, **options)
    assert it.ask(headers=forwarded, peer=PROXY).status == 431


def test_who_is_denied_whoever_asks_needs_no_address(opened: Any) -> None:
    """Of a request that is refused or let off by its path alone, nobody asks where it comes from."""
    it = opened(Rule("no", deny=True, path="/no"), Rule("free", exempt=True, path="/free"), trusted_proxies=["10.0.0.0/8"])
    forwarded = {"X-Forwarded-For": ", ".join([STRANGER, *[OFFICE] * 40])}
    assert [it.ask(path, headers=forwarded, peer=PROXY).status for path in ("/no", "/free")] == [403, 200]


def test_a_header_that_nobody_believes_may_be_any(opened: Any) -> None:
    """From a peer that is no proxy a forwarding header says nothing, so that it cannot be too long."""
    it = opened(Rule("all", "2/minute"), trusted_proxies=["10.0.0.0/8"])
    headers = {"X-Forwarded-For": ", ".join([OFFICE] * 400), "Forwarded": "x" * 60_000}
    assert it.statuses(3, headers=headers) == [200, 200, 429]


# --- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [MANY, [("X-Id", LONG)]], ids=["lines", "value"])
@pytest.mark.parametrize("names", [(), ("own",), ("all", "own")])
def test_what_is_left_of_limits_that_cannot_be_counted(names: tuple[str, ...], headers: Any) -> None:
    """A request that passes because nothing is enforced asks what is left: nothing is known, which is no error."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(await ausage(scope, *names))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    rules = [Rule("own", "9/minute", key=["header:x-id"]), Rule("all", "9/minute", key=["global"])]
    gated = LimitGate(app, rules=rules, store=MemoryStore(Clock()), shadow=True)
    assert asyncio.run(asgi_reply(gated, headers=headers)).status == 200
    assert asyncio.run(asgi_reply(gated, headers=[("X-Id", "x")])).status == 200
    assert [len(windows) for windows in found] == [0, len(names) or 2]


def test_what_is_left_of_limits_that_cannot_be_counted_under_wsgi() -> None:
    found: list[Any] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        found.append((usage(environ), usage(environ, "own")))
        with pytest.raises(ConfigError, match="there is no rule 'other'"):
            usage(environ, "other")
        start_response("200 OK", [("Content-Type", "text/plain")])
        return []

    gated = LimitGateWSGI(app, rules=[Rule("own", "9/minute", key=["header:x-id"], shadow=True)], store=MemoryStore(Clock()))
    assert wsgi_reply(gated, headers={"X-Id": LONG}).status == 200
    assert found == [((), ())]


# --- frameworks -------------------------------------------------------------------------------------------------------


def test_a_dependency_refuses_and_what_was_charged_is_given_back() -> None:
    """A key of FastAPI's dependency that is not read is refused like that of a rule; all limits are one decision."""
    app = FastAPI()

    async def user(x_user: Annotated[str | None, Header()] = None) -> str | None:
        return x_user

    @app.get("/", dependencies=[Depends(RateLimit("9/minute", name="tenant", key=["header:x-tenant", user]))])
    async def endpoint() -> str:
        return "hello"

    @app.get("/shadow", dependencies=[Depends(RateLimit("1/minute", name="shadow", key=["header:x-tenant"], shadow=True))])
    async def shadowed() -> str:
        return "hello"

    app.add_middleware(LimitGate, rules=[Rule("all", "2/minute", path="/")], store=MemoryStore(Clock()))

    async def statuses(path: str, *headers: dict[str, str]) -> list[int]:
        return [(await asgi_reply(app, path, headers=each)).status for each in headers]

    async def main() -> tuple[list[int], list[int]]:
        long: dict[str, str] = {"X-Tenant": LONG}
        return await statuses("/", long, long, {}, long, {}, {}), await statuses("/shadow", long, long, {}, {})

    assert asyncio.run(main()) == ([431, 431, 200, 431, 200, 429], [200, 200, 200, 200])


@pytest.mark.parametrize("way", WAYS)
def test_django_refuses_as_well(way: str) -> None:
    """In threads and on event loops, by the lines that a server gives and by the headers that Django makes of them."""
    rules = [Rule("all", "2/minute", path="/all", key=["header:x-id"])]
    with WAYS[way].project(url("all", hello), url("free", hello), rules=rules) as project:
        assert [project.ask("/all", headers={"X-Id": value}).status_code for value in (LONG, "a", "a", "a")] == [
            431,
            200,
            200,
            429,
        ]
        if WAYS[way].handler == "asgi":
            many = {f"X-{number}": "b" for number in range(MOST_LINES)}
            assert [project.ask(path, headers=many).status_code for path in ("/all", "/free")] == [431, 200]


@pytest.mark.parametrize("way", ["wsgi", "asgi"])
def test_a_throttle_refuses_as_well(way: str) -> None:
    """REST framework answers with the status of the refusal, not that of an outage."""
    throttle = type("Tenant", (Throttle,), {"limits": ("1/minute",), "name": "tenant", "key": ("header:x-id",)})
    view = type(
        "Limited",
        (APIView,),
        {"throttle_classes": (throttle,), "authentication_classes": (), "get": lambda *_: Response({})},
    )
    with WAYS[way].project(url("x", view.as_view()), rules=[Rule("all", "9/minute")]) as project:
        assert [project.ask("/x", headers={"X-Id": value}).status_code for value in (LONG, "a", "a")] == [431, 200, 429]


@pytest.mark.parametrize(("is_shadow", "statuses"), [(False, [431, 200, 429]), (True, [200, 200, 200])])
def test_a_throttle_that_asks_for_the_address(statuses: list[int], *, is_shadow: bool) -> None:
    """A throttle whose cache key is made of the address refuses as any other does, and a shadow refuses nothing."""

    def key(self: Any, request: Any, view: Any) -> str:
        return f"by {self.get_ident(request)}"

    names = {"rate": "1/minute", "scope": "own", "get_cache_key": key, "shadow": is_shadow}
    throttle = type("ByAddress", (SimpleRateThrottle,), names)
    view = type(
        "Limited",
        (APIView,),
        {"throttle_classes": (throttle,), "authentication_classes": (), "get": lambda *_: Response({})},
    )
    rules = [Rule("other", "9/minute", path="/other")]
    with WAYS["wsgi"].project(url("x", view.as_view()), rules=rules, trusted_proxies=["10.0.0.0/8"]) as project:
        found = [
            project.ask("/x", headers={"X-Forwarded-For": forwarded}, REMOTE_ADDR=PROXY).status_code
            for forwarded in (", ".join([PROXY] * 40), STRANGER, STRANGER)
        ]
    assert found == statuses


def test_explain_tells_why() -> None:
    """The explanation of a request that is refused unread names the rules that may apply, and calls nobody its client."""
    gate = build_gate(
        NoRoutes(),
        open_sync_store,
        store=LookingStore(MemoryStore(Clock())),
        rules=[Rule("api", "1/minute", path="/api"), Rule("other", "1/minute", path="/other")],
        trusted_proxies=[PROXY],
    ).gate
    assert gate is not None
    for headers in (MANY, {"X-Forwarded-For": ", ".join([PROXY] * 40)}):
        found = explain(gate, ASGIRequest(http_scope("/api", headers=headers, peer=PROXY)))
        assert (found.status, found.client, [each.name for each in found.rules]) == (431, None, ["api"])
        assert "more than 1,000" in found.rules[0].why or "last 32 elements" in found.rules[0].why


def test_explain_tells_that_a_shadow_is_left_out() -> None:
    rules = [Rule("real", "9/minute"), Rule("trial", "9/minute", key=["header:x-id"], shadow=True)]
    gate = build_gate(NoRoutes(), open_sync_store, store=LookingStore(MemoryStore(Clock())), rules=rules).gate
    assert gate is not None
    found = explain(gate, ASGIRequest(http_scope(headers={"X-Id": LONG})))
    assert found.status is None
    assert [(each.name, each.applies) for each in found.rules] == [("real", True), ("trial", False)]
    assert found.rules[1].why == "shadow rules are left out, because a header is too long to be read"


# --- a real server ----------------------------------------------------------------------------------------------------


def test_a_server_that_takes_more_lines_changes_nothing(tmp_path: Path) -> None:
    """What uvicorn hands on with httptools is refused, and not charged."""
    request = "GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{}\r\n"
    with uvicorn_process("tests.attacks.served:strict", tmp_path, "--http", "httptools") as base:
        statuses = []
        for count in (MOST_LINES, 8200, 10, 10):
            with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2])), PATIENCE) as connection:
                connection.sendall(request.format("A: b\r\n" * count).encode())
                statuses.append(connection.makefile("rb").read().split()[1])
    assert statuses == [b"431", b"431", b"200", b"429"]
