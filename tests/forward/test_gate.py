"""`ForwardGate`, asked as proxies ask it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limitgate import AsyncRedisStore, Caller, ConfigError, MemoryStore, Request, Rule
from limitgate.forward import ForwardGate
from tests.support.doors import PATIENCE, Wire, http_scope, until, websocket_scope
from tests.support.redis_server import RedisServer

PROXY, CLIENT = "198.51.100.1", "192.0.2.7"
AWAY = "redis://127.0.0.1:1"
"""Nobody listens there."""
LOGIN = Rule("login", "2/minute", path="/login", methods=["POST"])
Asked = Callable[..., Awaitable["Answer"]]


class Answer:
    """The gate's answer."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.status: int = sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in sent[1:])

    @property
    def problem(self) -> dict[str, Any]:
        return json.loads(self.headers.get("x-limitgate-body", self.body))


async def asking(
    gate: ForwardGate, place: str, uri: str | None = None, method: str | None = "GET", peer: str | None = PROXY, **headers: str
) -> Answer:
    """Ask as nginx and HAProxy do, or as Envoy below its prefix."""
    lines = [("x-forwarded-for", CLIENT)] if "x_forwarded_for" not in headers else []
    lines += [(name, value) for name, value in (("x-original-uri", uri), ("x-original-method", method)) if value is not None]
    lines += [(name.replace("_", "-"), value) for name, value in headers.items()]
    is_envoy = place.startswith("/envoy")
    scope = http_scope(place, method or "GET" if is_envoy else "GET", headers=lines, peer=peer)
    wire = Wire()
    await asyncio.wait_for(gate(scope, wire.receive, wire.send), PATIENCE)
    return Answer(wire.sent)


def made(*rules: Rule, **options: Any) -> ForwardGate:
    """A gate that believes one proxy."""
    options = {"rules": [*rules], "store": MemoryStore(), "trusted_proxies": [PROXY]} | options
    return ForwardGate(**options)


def statuses(gate: ForwardGate, *asked: tuple[Any, ...], **headers: str) -> list[int]:
    """Of one subrequest after the other."""

    async def ask() -> list[int]:
        return [(await asking(gate, *each, **headers)).status for each in asked]

    return asyncio.run(ask())


@pytest.mark.parametrize("is_redis", [False, True])
def test_a_gate_decides_on_every_store(*, is_redis: bool, request: pytest.FixtureRequest) -> None:
    """The refusal has the fields of the middleware's."""

    async def ask() -> None:
        store: Any = MemoryStore()
        if is_redis:
            server: RedisServer = request.getfixturevalue("redis_server")
            store = AsyncRedisStore(server.url)
        gate = made(LOGIN, store=store, key_prefix="forward", timeout=20.0)
        answers = [await asking(gate, "/haproxy", "/login?x=1", "POST") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[0].headers["x-ratelimit-remaining"] == "1"
        refused = answers[2]
        assert refused.problem["violated-policies"] == ["login"]
        assert refused.problem["instance"].startswith("urn:limitgate:refusal:")
        assert refused.headers.keys() >= {"retry-after", "x-ratelimit-limit", "cache-control"}
        if is_redis:
            await store.aclose()

    asyncio.run(ask())


def test_dialects_share_their_buckets() -> None:
    """The same request is the same, whoever describes it."""
    assert statuses(
        made(LOGIN), ("/nginx", "/login", "POST"), ("/haproxy", "/login", "POST"), ("/envoy/login", None, "POST")
    ) == [
        200,
        200,
        429,
    ]


def test_nginx_gets_403(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        gate = made(LOGIN)
        answers = [await asking(gate, "/nginx", "/login", "POST") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 403]
        assert answers[2].headers["x-limitgate-status"] == "429"
        assert answers[2].problem["status"] == 429
        assert answers[2].body == b""

    asyncio.run(ask())


def test_nginx_asks_twice_and_is_answered_once() -> None:
    async def ask() -> None:
        gate = made(Rule("all", "9/minute"))
        first, again = [await asking(gate, "/nginx", "/", x_request_id="a" * 32) for _ in range(2)]
        assert again.headers == first.headers
        assert first.headers["x-ratelimit-remaining"] == "8"
        for change in ({"uri": "/b"}, {"method": "PUT"}, {"x_forwarded_for": "192.0.2.8"}, {"x_request_id": "b" * 32}):
            other = await asking(gate, "/nginx", **{"uri": "/", "x_request_id": "a" * 32, **change})
            assert other.headers["x-ratelimit-remaining"] != "8" or "x_forwarded_for" in change

    asyncio.run(ask())


def test_other_dialects_charge_each_subrequest() -> None:
    rule = Rule("all", "1/minute")
    assert statuses(made(rule), *[("/haproxy", "/")] * 2, x_request_id="a" * 32) == [200, 429]


def test_without_a_method_every_rule_applies(caplog: pytest.LogCaptureFixture) -> None:
    """Reported once. An exemption by method doesn't apply, as nobody knows whether it should."""
    free = Rule("free", path="/login", methods=["GET"], exempt=True)
    gate = made(LOGIN, free)
    assert statuses(gate, *[("/haproxy", "/login", None)] * 3) == [200, 200, 429]
    assert statuses(gate, ("/haproxy", "/login", "GET")) == [200]
    assert codes(caplog).count("LG081") == 1
    assert "x-original-method" in caplog.text


def codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the lines so far."""
    return [record.getMessage().split()[0] for record in caplog.records if record.getMessage().startswith("LG")]


def test_a_method_that_is_not_a_token() -> None:
    gate = made(LOGIN)
    assert statuses(gate, ("/haproxy", "/login", "G@T"), ("/haproxy", "/login", "a b"), ("/nginx", "/login", "é")) == [
        400,
        400,
        403,
    ]


@pytest.mark.parametrize(
    ("place", "headers", "code"),
    [
        ("/", {"x_forwarded_uri": "/b"}, "LG080"),
        ("/nginx", {}, None),
        ("/caddy", {}, "LG082"),
        ("/envoy", {}, "LG082"),
    ],
)
def test_mistaken_configurations_are_reported(
    place: str, headers: dict[str, str], code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each, with a 400 that names the paths or the header."""
    gate = made(LOGIN)

    async def ask() -> list[Answer]:
        return [await asking(gate, place, "/a", **headers) for _ in range(2)]

    answers = asyncio.run(ask())
    assert [answer.status for answer in answers] == ([200, 200] if code is None else [400, 400])
    assert codes(caplog) == ([] if code is None else [code])
    if code == "LG080":
        assert "/nginx, /caddy, /traefik, /envoy, /haproxy" in answers[0].problem["detail"]


def test_a_proxy_that_names_no_client(caplog: pytest.LogCaptureFixture) -> None:
    """Envoy without allowed_headers: all clients are one, and it shows nowhere else."""

    async def ask() -> None:
        gate, wire = made(Rule("all", "1/minute")), Wire()
        await gate(http_scope("/envoy/a", peer=PROXY), wire.receive, wire.send)
        assert Answer(wire.sent).status == 200

    asyncio.run(ask())
    assert codes(caplog) == ["LG083"]


@pytest.mark.parametrize("place", ["/haproxy", "/nginx", "/", "/envoy/login"])
def test_an_untrusted_peer_is_decided_as_itself(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """By its own address, method and path."""
    seen: list[Request] = []
    gate = made(Rule("all", "2/minute", key=["ip"]), identify=seen.append)

    async def ask() -> list[Answer]:
        clients = ["192.0.2.1", "192.0.2.2", "192.0.2.3"]
        return [await asking(gate, place, "/login", peer="203.0.113.9", x_forwarded_for=client) for client in clients]

    answers = asyncio.run(ask())
    assert [answer.status for answer in answers] == [200, 200, 403 if place == "/nginx" else 429]
    assert {(each.client, each.method, each.path) for each in seen} == {("203.0.113.9", "GET", place)}
    assert codes(caplog) == ["LG006"]


def test_an_untrusted_peer_chooses_no_id() -> None:
    """Each of its requests is charged."""
    asked = [("/nginx", "/", "GET", "203.0.113.9")] * 2
    assert statuses(made(Rule("all", "1/minute")), *asked, x_request_id="a" * 32) == [200, 403]


def test_a_stray_request_is_no_misconfiguration(caplog: pytest.LogCaptureFixture) -> None:
    """A scanner asks without any header of a proxy, and the log must not ask to trust it."""

    async def ask() -> None:
        wire = Wire()
        await made(Rule("all", "1/minute"))(http_scope("/favicon.ico", peer="203.0.113.9"), wire.receive, wire.send)
        assert Answer(wire.sent).status == 200

    asyncio.run(ask())
    assert codes(caplog) == []


def test_a_refused_head_has_no_body() -> None:
    """Behind Envoy, whose subrequest is a HEAD itself."""

    async def ask() -> None:
        answer = await asking(made(Rule("none", "0/day")), "/envoy/", None, "HEAD")
        assert (answer.status, answer.body) == (429, b"")
        assert int(answer.headers["content-length"]) > 0

    asyncio.run(ask())


def test_a_unix_socket_is_trusted_by_name() -> None:
    gate = made(Rule("all", "1/minute"), trusted_proxies=["unix"])
    assert statuses(gate, ("/haproxy", "/", "GET", None)) == [200]
    assert statuses(gate, ("/haproxy", "/", "GET", None), x_forwarded_for="192.0.2.99") == [200]
    assert statuses(gate, ("/haproxy", "/", "GET", None)) == [429]


def test_health_needs_no_store() -> None:
    class Unasked(MemoryStore):
        def spend(self, *_: Any) -> Any:
            raise AssertionError("the store was asked")

    gate = made(Rule("all", "1/minute"), store=Unasked())
    assert statuses(gate, *[("/healthz",)] * 2) == [200, 200]

    async def ask_below_a_mount() -> None:
        wire = Wire()
        await gate(http_scope("/gate/healthz", root_path="/gate"), wire.receive, wire.send)
        assert Answer(wire.sent).body == b"ok\n"

    asyncio.run(ask_below_a_mount())


@pytest.mark.parametrize(("on_error", "expected"), [("open", [200, 200]), ("closed", [403, 503]), ("local", [200, 200])])
def test_the_store_fails(on_error: Any, expected: list[int]) -> None:
    """The failure policy is the middleware's. nginx makes a 503 of its 403; Envoy would fail open on a 503."""
    gate = made(Rule("all", "5/minute"), store=AWAY, on_error=on_error)

    async def ask() -> None:
        answers = [await asking(gate, place, "/") for place in ("/nginx", "/haproxy", "/envoy/")]
        assert [answer.status for answer in answers] == [*expected, expected[0]]
        if on_error == "closed":
            assert answers[0].headers["x-limitgate-status"] == "503"
            assert answers[1].headers["retry-after"] == "1"
            assert answers[2].headers["x-limitgate-status"] == "503"
            assert answers[2].problem["title"] == "Temporary Reduced Capacity"

    asyncio.run(ask())


def test_callers_tiers_and_shadow_are_the_same() -> None:
    def identify(request: Request) -> Caller | None:
        return Caller("acme", tier="vip") if request.headers.get("x-api-key") == "secret" else None

    rules = [Rule("all", "1/minute"), Rule("all", "3/minute", tier="vip", key=["caller"])]
    gate = made(*rules, identify=identify)
    assert statuses(gate, *[("/haproxy", "/")] * 4, x_api_key="secret") == [200, 200, 200, 429]
    assert statuses(gate, *[("/haproxy", "/")] * 2) == [200, 429]
    shadow = made(Rule("all", "1/minute"), shadow=True)
    assert statuses(shadow, *[("/haproxy", "/")] * 2) == [200, 200]


def test_the_path_in_a_key_is_the_pattern() -> None:
    gate = made(Rule("api", "2/minute", path="/api/**", key=["path", "ip"]))
    assert statuses(gate, ("/haproxy", "/api/a"), ("/haproxy", "/api/b"), ("/haproxy", "/api/c")) == [200, 200, 429]


def test_denied_and_exempt_requests() -> None:
    gate = made(Rule("no", path="/no/**", deny=True), Rule("yes", path="/yes", exempt=True), Rule("all", "1/day"))
    assert statuses(gate, ("/haproxy", "/no/a"), ("/nginx", "/no/a"), *[("/haproxy", "/yes")] * 3) == [403, 403, 200, 200, 200]


def test_preflights_are_free() -> None:
    gate = made(Rule("all", "1/day"))
    preflight = {"origin": "https://a.test", "access_control_request_method": "PUT"}
    assert statuses(gate, *[("/haproxy", "/", "OPTIONS")] * 3, **preflight) == [200, 200, 200]


def test_outcomes_are_there_for_access_logs() -> None:
    async def ask() -> None:
        gate = made(Rule("all", "1/day"))
        for outcome in ("admitted", "refused"):
            scope = http_scope("/haproxy", headers={"x-original-uri": "/", "x-original-method": "GET"}, peer=PROXY)
            wire = Wire()
            await gate(scope, wire.receive, wire.send)
            assert scope["limitgate.outcome"] == outcome
            assert ("limitgate.refusal_id" in scope) is (outcome == "refused")

    asyncio.run(ask())


def test_a_handshake_that_a_proxy_passes_on_is_answered() -> None:
    """As a subrequest, if the server can; otherwise it is refused."""

    async def ask() -> None:
        gate = made(Rule("all", "1/day"))
        headers = {"x-forwarded-uri": "/", "x-forwarded-method": "GET", "x-forwarded-for": CLIENT}
        extension = {"websocket.http.response": {}}
        for status in (200, 429):
            wire = Wire({"type": "websocket.connect"})
            await gate(websocket_scope("/caddy", headers, PROXY, extensions=extension), wire.receive, wire.send)
            assert [message["type"] for message in wire.sent] == [
                "websocket.http.response.start",
                "websocket.http.response.body",
            ]
            assert wire.sent[0]["status"] == status
        wire = Wire({"type": "websocket.connect"})
        await gate(websocket_scope("/caddy", headers, PROXY), wire.receive, wire.send)
        assert [message["type"] for message in wire.sent] == ["websocket.close"]

    asyncio.run(ask())


def test_a_gate_that_is_switched_off() -> None:
    assert statuses(made(Rule("all", "1/day"), enabled=False), *[("/haproxy", "/")] * 2) == [200, 200]


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("charge_if", lambda: Rule("r", "1/s", charge_if={"status": [401]})),
        ("concurrency", lambda: Rule("r", concurrency=3)),
        ("concurrency", lambda: Rule("r", "3 at once")),
        ("adaptive", lambda: Rule("r", adaptive=True)),
        ("max_delay", lambda: Rule("r", "1/s", max_delay=2)),
        ("body", lambda: Rule("r", "1/s", key=["json:/user"])),
        ("per", lambda: Rule("r", "1/s", per="message")),
    ],
)
def test_rules_that_need_the_response(option: str, rule: Callable[[], Rule]) -> None:
    with pytest.raises(ConfigError, match=rf"rule 'r': {option}: needs .*, expected|rule 'r': {option}: needs .*; expected"):
        made(Rule("fine", "1/s"), rule())


def test_every_such_rule_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        made(Rule("a", concurrency=3), Rule("b", "1/s", max_delay=2, charge_if={"status": [401]}))
    assert len(raised.value.every) == 3


def test_a_reload_rejects_them_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rules in force stay."""
    file = tmp_path / "default.yaml"
    file.write_text("rules: [{name: all, qpd: 1}]\n")
    gate = ForwardGate(rules=str(tmp_path), store=MemoryStore(), trusted_proxies=[PROXY], reload=0.1)
    assert statuses(gate, *[("/haproxy", "/")] * 2) == [200, 429]
    file.write_text("rules: [{name: all, concurrency: 5}]\n")
    until(lambda: "LG034" in codes(caplog))
    assert statuses(gate, ("/haproxy", "/")) == [429]
    file.write_text("rules: [{name: all, qpd: 3}]\n")
    until(lambda: statuses(gate, ("/haproxy", "/")) == [200])


def test_other_headers_cannot_name_the_client() -> None:
    """A proxy passes them on from its clients."""
    with pytest.raises(ConfigError, match=r"forwarded_header is 'forwarded', .*expected x-forwarded-for"):
        made(Rule("all", "1/day"), forwarded_header="forwarded")


def test_options_have_names() -> None:
    with pytest.raises((ConfigError, TypeError), match="expected"):
        ForwardGate("config/")  # type: ignore[misc]
    with pytest.raises((ConfigError, TypeError), match="rulez"):
        ForwardGate(rulez=[])  # type: ignore[call-arg]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "limitgate"):
        yield
