"""The live page on both doors, in process."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from example_app import main, wsgi as example_wsgi
from limitgate import AsyncLimiter, ConfigError, Limiter, LimitGate, LimitGateWSGI, MemoryStore, RedisStore, Rule, StoreError
from limitgate.fleet.reader import FRESH
from limitgate.gate import refused_rules
from limitgate.gate.flow import run
from limitgate.gate.journal import Journal, JournalFlows
from limitgate.page import Page, PageWSGI, explaining, this_machine
from limitgate.stores.base import FleetRequest, fleet_key
from tests.support.doors import Reply, asgi_reply, until, wsgi_reply
from tests.support.fleet import digest, fleet, rule, snapshot, write
from tests.support.redis_server import RedisServer

RULES = [Rule("api", path="/api/**", qps=5, qpm=100), Rule("login", path="/login", methods=["POST"], qpm=5)]
Ask = Callable[..., Reply]


def someone(_: object) -> str:
    return "ann"


class Door:
    """A page on one of the two doors, mounted at ``root``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def page(self, store: Any, **options: Any) -> Any:
        return (Page if self.kind == "asgi" else PageWSGI)(store, **{"guard": someone, **options})

    def ask(self, page: Any, path: str = "/", method: str = "GET", headers: Any = (), body: bytes = b"", **more: Any) -> Reply:
        root = more.pop("root", "")
        if self.kind == "asgi":
            return asyncio.run(asgi_reply(page, f"{root}{path}", method, headers, body, root_path=root, **more))
        return wsgi_reply(page, path, method, headers, body, SCRIPT_NAME=root, **more)


@pytest.fixture(params=["asgi", "wsgi"])
def door(request: pytest.FixtureRequest) -> Door:
    return Door(request.param)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def facts(reply: Reply) -> dict[str, Any]:
    found = re.search(r'id="facts">(.*?)</script>', reply.body.decode())
    assert found is not None
    return json.loads(found[1])


# --- the document -------------------------------------------------------------------------------------------------------


def test_the_document_is_whole(door: Door, store: MemoryStore) -> None:
    """One document below 60 KB that asks for nothing else, and is neither stored nor framed."""
    replies = [door.ask(door.page(store)) for _ in range(2)]
    reply, text = replies[0], replies[0].body.decode()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert len(reply.body) < 60_000
    assert reply.headers["cache-control"] == "no-store"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert policy != replies[1].headers["content-security-policy"]
    nonce = re.search("script-src 'nonce-([^']+)'", policy)
    assert nonce is not None
    assert len(re.findall(r"<(?:script|style)\b", text)) == text.count(f'nonce="{nonce[1]}"') == 3
    assert not re.search(r"\sstyle=|\son\w+=|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"(?:src|href)=(?!\"data:,\")|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "{{" not in text


@pytest.mark.parametrize(("url", "shown"), [("memory://", "memory://"), ("redis://u:geheim@h:1/2", "redis://h:1/2")])
def test_the_title_says_what_is_looked_at(door: Door, url: str, shown: str) -> None:
    """Store and prefix stand in the title, the password does not."""
    page = door.page(url, key_prefix="shop</title>")
    text = door.ask(page).body.decode()
    assert f"<title>LimitGate: {shown}, prefix shop&lt;/title&gt;</title>" in text
    assert "geheim" not in text
    made = RedisStore("redis://u:geheim@h:1/2") if door.kind == "wsgi" else "redis://u:geheim@h:1/2"
    assert "redis://h:1/2, prefix limitgate" in door.ask(door.page(made)).body.decode()


@pytest.mark.parametrize("root", ["", "/limits", "/a b/limits"])
def test_it_can_be_mounted_anywhere(door: Door, store: MemoryStore, root: str) -> None:
    """Under any prefix, with and without a trailing slash, and it refers to nothing by an absolute path."""
    page = door.page(store)
    for path in ("/", "") if root else ("/",):
        assert door.ask(page, path, root=root).status == 200
    assert door.ask(page, "/figures", root=root).json()["prefix"] == "limitgate"
    assert door.ask(page, "/figures/", root=root).status == 200
    assert door.ask(page, "/other", root=root).status == 404


def test_head_has_no_body(door: Door, store: MemoryStore) -> None:
    """HEAD is answered like GET, without the body; other methods are not."""
    reply = door.ask(door.page(store), method="HEAD")
    assert (reply.status, reply.body) == (200, b"")
    refused = door.ask(door.page(store), method="POST")
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
    assert door.ask(door.page(store, actions=True), "/ban").headers["allow"] == "POST"
    assert door.ask(door.page(store), "/events", "HEAD").status in (200, 204)


# --- who may look -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Page, PageWSGI])
def test_without_a_guard_it_does_not_start(make: Any, store: MemoryStore) -> None:
    """The page shows who uses the service, so somebody has to decide who sees it."""
    for options in ({}, {"guard": None}, {"guard": "staff"}):
        with pytest.raises(ConfigError, match=r"guard is .*, expected a callable"):
            make(store, **options)
    with pytest.raises(ConfigError, match=r"guard: .* cannot be called with a request, expected a callable"):
        make(store, guard=lambda: "ann")
    with pytest.raises(ConfigError, match="names is 'all', expected masked, full or off"):
        make(store, guard=someone, names="all")
    with pytest.raises(ConfigError, match="actions is 'false', expected True or False"):
        make(store, guard=someone, actions="false")
    with pytest.raises(TypeError, match="options have names"):
        make(store, someone)
    with pytest.raises(ConfigError, match="store: "):
        make(object(), guard=someone)


WRONG_TIMEOUTS = [None, 0, -1, math.nan, math.inf, 1e9, True, "soon", "2 minutes", "", []]


@pytest.mark.parametrize("timeout", WRONG_TIMEOUTS, ids=str)
@pytest.mark.parametrize("make", [Page, PageWSGI, Limiter, AsyncLimiter])
def test_a_wrong_timeout_is_refused_at_once(make: Any, store: MemoryStore, timeout: Any) -> None:
    """By the page as by a limiter, not by the first request."""
    with pytest.raises(ConfigError, match=r"timeout is .*, expected seconds"):
        make(store, timeout=timeout, **({"guard": someone} if make in (Page, PageWSGI) else {}))


@pytest.mark.parametrize("timeout", ["2s", "500 ms", timedelta(seconds=2), 60])
def test_a_timeout_may_be_text(door: Door, store: MemoryStore, timeout: Any) -> None:
    """Every request uses it as seconds."""
    page = door.page(store, timeout=timeout, rules=RULES)
    assert door.ask(page, "/figures").json()["store"]["up"]
    assert door.ask(page, "/explain?path=/api/x").status == 200


@pytest.mark.parametrize("path", ["/", "/figures", "/events", "/explain?path=/api/x", "/nothing"])
def test_a_stranger_sees_nothing(door: Door, store: MemoryStore, path: str) -> None:
    """Where guard returns None, everything is 403, and says nothing of the service."""
    write(store, snapshot())
    for nobody in (None, ""):
        reply = door.ask(door.page(store, guard=lambda _, who=nobody: who), path)
        assert reply.status == 403
        assert b"web-1" not in reply.body
    assert reply.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_guard_sees_the_request(door: Door, store: MemoryStore) -> None:
    """It knows headers and client, and its answer has to be a name."""
    seen: list[Any] = []

    def guard(request: Any) -> str:
        seen.append((request.client, request.headers.get("cookie"), request.method))
        return "ann"

    door.ask(door.page(store, guard=guard), headers={"Cookie": "a=b"})
    assert [each[1:] for each in seen] == [("a=b", "GET")]
    with pytest.raises(TypeError, match="guard returned True, expected the name"):
        door.ask(door.page(store, guard=lambda _: True))


def test_guard_may_be_async_under_asgi() -> None:
    """Under WSGI nothing can await it, and the error says so."""

    async def guard(_: object) -> str:
        return "ann"

    asgi, wsgi = Door("asgi"), Door("wsgi")
    assert asgi.ask(asgi.page(MemoryStore(), guard=guard)).status == 200
    with pytest.raises(TypeError, match="guard is async, expected a plain function under WSGI"):
        wsgi.ask(wsgi.page(MemoryStore(), guard=guard))


@pytest.mark.parametrize(
    ("peer", "headers", "admitted"),
    [
        ("127.0.0.1", {"Host": "localhost:8000"}, True),
        ("::1", {"Host": "[::1]:8000"}, True),
        ("127.0.0.1", {"Host": "evil.example"}, False),
        ("127.0.0.1", {"Host": "127.0.0.1.evil.example"}, False),
        ("127.0.0.1", {"Host": "localhost", "X-Forwarded-For": "198.51.100.1"}, False),
        ("198.51.100.1", {"Host": "localhost"}, False),
        ("127.0.0.1", {"Host": "["}, False),
    ],
)
def test_this_machine_only(door: Door, store: MemoryStore, peer: str, headers: dict[str, str], *, admitted: bool) -> None:
    """The shipped guard admits browsers here, no proxy, and no site that has borrowed this machine's address."""
    reply = door.ask(door.page(store, guard=this_machine), headers=headers, peer=peer)
    assert (reply.status == 200) is admitted


# --- figures ------------------------------------------------------------------------------------------------------------


def test_figures_have_the_facts_of_status(door: Door, store: MemoryStore) -> None:
    """All processes, rules, bans and the store; for the screen, what fits on it."""
    write(store, *fleet(200))
    page = door.page(store)
    found = door.ask(page, "/figures").json()
    assert len(found["processes"]) == 200
    assert {"host", "pid", "version", "revision", "requests", "refused", "store", "last_error"} <= found["processes"][0].keys()
    assert found["rules"][0]["most_refused"][0]["count"] == 200 * 400
    screen = door.ask(page, "/figures?screen=1").json()
    assert (len(screen["processes"]), screen["processes_in_all"]) == (60, 200)
    assert screen["most_refused"][0] | {"who": "ip=20….7", "rule": "api", "tier": "default"} == screen["most_refused"][0]
    assert screen["headline"]["who"] == "ip=20….7"


def test_stragglers_are_on_the_screen(door: Door, store: MemoryStore) -> None:
    """A process with other rules is shown however many there are."""
    write(store, *fleet(150), snapshot(999, revision=7, host="zz"))
    screen = door.ask(door.page(store), "/figures?screen=1").json()
    assert (screen["processes"][0]["host"], screen["processes"][0]["follows"]) == ("zz", False)


def test_an_empty_page_says_why(door: Door, store: MemoryStore, own_redis: RedisServer) -> None:
    """Without snapshots the reason stands there: which prefix, and what may be off."""
    assert "memory://" in door.ask(door.page(store), "/figures?screen=1").json()["empty"]
    page = door.page(own_redis.url, key_prefix="wrong")
    assert "key_prefix 'wrong'" in door.ask(page, "/figures?screen=1").json()["empty"]


@pytest.mark.parametrize(("names", "who"), [("masked", "ip=20….7 x=j…n"), ("full", "ip=203.0.113.7 x=john"), ("off", None)])
def test_names_are_shown_as_the_page_is_told(door: Door, store: MemoryStore, names: str, who: str | None) -> None:
    """Services that write full names don't oblige the page to show them."""
    write(store, snapshot(rules=[rule(refused=[("ip=203.0.113.7 x=john", 9)])]))
    found = door.ask(door.page(store, names=names), "/figures").json()
    shown = {found["headline"]["who"], found["rules"][0]["most_refused"][0]["who"]}
    assert shown == {who or f"#{digest('ip=203.0.113.7 x=john')[:8]}"}


def test_everybody_is_nobody_s_name(door: Door, store: MemoryStore) -> None:
    write(store, snapshot(rules=[rule(refused=[("everybody", 9)])]))
    assert door.ask(door.page(store), "/figures").json()["headline"]["who"] == "everybody"


def test_routes_are_shown_in_full(door: Door, store: MemoryStore) -> None:
    """As the commands show them: a route, a method and a tier name no client."""
    name = "path=/api/items/{id} method=GET tier=vip ip=203.0.113.7"
    write(store, snapshot(rules=[rule(refused=[(name, 9)])]))
    run(store, JournalFlows("limitgate", 5).noting("ban", f"api {name}", ["k"], None, 60, bans=True, by="ann"))
    found = door.ask(door.page(store), "/figures").json()
    shown = name.replace("203.0.113.7", "20….7")
    assert (found["headline"]["who"], found["bans"][0]["key"]) == (shown, f"api {shown}")


def test_hostile_names_are_text(door: Door, store: MemoryStore) -> None:
    """Markup, control characters and marks of direction come as JSON text that no parser takes for more."""
    name = "ip=</script><img src=x onerror=alert(1)>\u202e\x07\u2028"
    write(store, snapshot(host="<b>", rules=[rule("api", refused=[(name, 5)])], last_error="<i>\x1b[31m"))
    reply = door.ask(door.page(store, names="full"), "/figures?screen=1")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert not set("\u202e\x07\u2028\x1b") & set(reply.body.decode())
    assert reply.json()["processes"][0]["host"] == "<b>"


@pytest.mark.parametrize("packed", [b"", b"LG", b"LG\x63what", b"LG\x01" + b"\0" * 1_000_000, b"{}", b"LG\x01x\x9c"])
def test_odd_snapshots_are_passed_over(door: Door, own_redis: RedisServer, packed: bytes) -> None:
    """Other versions, garbage and a value of 1 MB leave the rest as it is."""
    with closing(RedisStore(own_redis.url)) as store:
        write(store, packed, snapshot(77))
    found = door.ask(door.page(own_redis.url), "/figures?screen=1").json()
    assert [each["host"] for each in found["processes"]] == ["web-77"]


def test_a_store_that_fails_is_the_news(door: Door, own_redis: RedisServer) -> None:
    """The page goes on without the store and says so. What it knew stays."""
    with closing(RedisStore(own_redis.url)) as store:
        write(store, snapshot())
    page = door.page(own_redis.url, timeout=0.5)
    assert door.ask(page, "/figures?screen=1").json()["store"]["up"] is True
    own_redis.stop()
    page._site.reader._read_at -= FRESH + 1
    found = door.ask(page, "/figures?screen=1").json()
    assert found["store"]["up"] is False
    assert found["store"]["error"]
    assert [each["host"] for each in found["processes"]] == ["web-1"]
    assert door.ask(page).status == 200
    assert door.ask(door.page(own_redis.url, rules=RULES, timeout=0.5), "/explain?path=/api/x").status == 503


def test_one_reading_serves_many(door: Door, store: MemoryStore) -> None:
    """Viewers share a reading for a second."""
    readings: list[object] = []

    class Counted(MemoryStore):
        def fleet(self, request: FleetRequest, timeout: float = 0) -> Any:
            readings.append(request)
            return super().fleet(request, timeout)

    page = door.page(Counted())
    for _ in range(10):
        door.ask(page, "/figures")
    page.page = door.page(page._site.store)
    door.ask(page.page, "/figures")
    assert 1 <= len(readings) <= 3


# --- explanations -------------------------------------------------------------------------------------------------------


def test_it_explains_a_request(door: Door, store: MemoryStore) -> None:
    """In words: whom it counts as, what would happen, why each rule applies or not. It charges nothing."""
    page = door.page(store, rules=RULES)
    for _ in range(8):
        found = door.ask(page, "/explain?path=/api/hello&ip=203.0.113.7").json()
    assert found["words"] == [
        "GET /api/hello counts as 203.0.113.7 of tier default.",
        "It would be admitted; the tightest limit is of rule api: 4 of 5 left.",
    ]
    assert [(each["name"], each["applies"]) for each in found["rules"]] == [("api", True), ("login", False)]
    assert [each["period"] for each in found["windows"]] == [1, 60]
    assert door.ask(page, "/explain?path=/x").json()["words"][-1] == "No rule limits it."


@pytest.mark.parametrize("written", ["/caf%25C3%25A9%2520au%2520lait", "/caf%C3%A9%20au%20lait"])
def test_explain_reads_a_path_as_a_server_does(door: Door, store: MemoryStore, written: str) -> None:
    """With or without its escapes; those of the page's own query come off first."""
    page = door.page(store, rules=[Rule("cafe", "5/minute", path="/café au lait")])
    (rule,) = door.ask(page, f"/explain?path={written}").json()["rules"]
    assert rule["applies"]


def test_it_explains_a_refusal_by_its_id(door: Door, own_redis: RedisServer) -> None:
    """The id in a 429 leads to its rule, the bucket's state and a ban, by the key of ids in the store."""
    service = Door("wsgi")
    app = _gated(service, lambda *_: None, store=own_redis.url, rules=RULES)
    refusal = [service.ask(app, "/api/x") for _ in range(6)][-1].json()["instance"]
    with own_redis.client() as client:
        until(lambda: client.exists("limitgate:refusal-ids"))
    page = door.page(own_redis.url, rules=RULES)
    found = door.ask(page, f"/explain?id={refusal}").json()
    assert found["words"][0].startswith("Refused at ")
    assert found["words"][1].startswith("By rule api of tier default: 5/second")


def _explained(door: Door, own_redis: RedisServer, rules: Any, headers: dict[str, str]) -> str:
    """Return the page's words about the id of a refusal by these rules."""
    service = Door("wsgi")
    app = _gated(service, lambda *_: None, store=own_redis.url, rules=rules)
    refusal = [service.ask(app, "/api/x", headers=headers) for _ in range(3)][-1].json()["instance"]
    with own_redis.client() as client:
        until(lambda: client.exists("limitgate:refusal-ids"))
    return " ".join(door.ask(door.page(own_redis.url, rules=rules), f"/explain?id={refusal}").json()["words"][1:])


UNKNOWN = "The limits of this client are not known, because its caller may have limits of its own."


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("caller", "2/minute of caller acme, counted by caller. Now: it would be refused"),
        ("ip", f"9/minute, counted by ip. {UNKNOWN} Under the limits of the rule: it would be admitted"),
    ],
)
def test_a_refusal_goes_by_the_own_limits_of_its_caller(
    door: Door, own_redis: RedisServer, tmp_path: Path, key: str, said: str
) -> None:
    """As the command does. A key by address doesn't show the caller, so the page doesn't call the client admitted."""
    file = tmp_path / "rules.yaml"
    caller = f"{{id: acme, api_key: 'sha256:{sha256(b'acmes').hexdigest()}', limits: {{api: 2/minute}}}}"
    rule = f"{{name: api, path: /api/**, key: [{key}], limits: [9/minute]}}"
    file.write_text(f"callers:\n  - {caller}\nrules:\n  - {rule}\n")
    words = _explained(door, own_redis, file, {"X-API-Key": "acmes"})
    assert words.startswith(f"By rule api of tier default: {said}")


def test_a_refusal_is_not_compared_with_thousands_of_callers(
    door: Door, own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shares the event loop of the application."""
    assert explaining._MOST_KEYS == 2_000
    monkeypatch.setattr(explaining, "_MOST_KEYS", 20)
    file = tmp_path / "rules.yaml"
    callers = [f"  - {{id: c{number}, api_key: 'sha256:{number:064}', limits: {{api: 2/minute}}}}" for number in range(21)]
    rule = "{name: api, path: /api/**, key: [caller|ip], limits: [2/minute]}"
    file.write_text("\n".join(["callers:", *callers, "rules:", f"  - {rule}"]))
    monkeypatch.setattr(refused_rules, "_identifies", None)
    words = _explained(door, own_redis, file, {})
    assert UNKNOWN in words


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("", "is not a path"),
        ("path=api", "is not a path"),
        ("path=/x&ip=1.2.3", "is not an address"),
        ("id=short", "is not the id of a refusal"),
        ("id=" + "A" * 32, "the store has no key of ids"),
        ("path=/" + "a" * 5000, "more than 4096 characters"),
    ],
)
def test_questions_without_an_answer(door: Door, store: MemoryStore, query: str, why: str) -> None:
    """What cannot be explained is said, with what was expected."""
    reply = door.ask(door.page(store, rules=RULES), f"/explain?{query}")
    assert reply.status == 400
    assert why in reply.json()["error"]


def test_rules_come_from_the_environment_last(
    door: Door, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the gate around the page are in force, whatever ``LIMITGATE_RULES`` says; a mistake there is told."""
    file = tmp_path / "rules.yaml"
    file.write_text("rules: [{name: env, qpm: 1}]")
    monkeypatch.setenv("LIMITGATE_RULES", str(file))
    page = door.page(store)
    asked = "/explain?path=/api/x&ip=1.1.1.1"
    assert [each["name"] for each in door.ask(_gated(door, page, store=store, rules=RULES), asked).json()["rules"]] == [
        "api",
        "login",
    ]
    assert [each["name"] for each in door.ask(page, asked).json()["rules"]] == ["env"]
    file.write_text("rules: 7")
    assert door.ask(door.page(store), asked).status == 400


def test_without_rules_it_says_where_they_could_come_from(door: Door, store: MemoryStore) -> None:
    """A page that knows no rules shows figures, and explains nothing."""
    reply = door.ask(door.page(store), "/explain?path=/x")
    assert "the page knows no rules, expected rules= of the page" in reply.json()["error"]


def test_the_gate_around_it_lends_its_rules(door: Door, store: MemoryStore) -> None:
    """Mounted in an application behind LimitGate, the page explains by the rules in force there, and ids of this process."""
    page = door.page(store)
    app = _gated(door, page, store=store, rules=RULES)
    refused = [door.ask(app, "/api/x") for _ in range(6)][-1]
    found = door.ask(app, f"/explain?id={refused.json()['instance']}").json()
    assert found["words"][1].startswith("By rule api")
    assert found["allowed"] is False
    assert door.ask(app, "/explain?path=/api/x&ip=1.1.1.1").json()["allowed"] is True


def test_a_bucket_of_unknown_routes_is_a_guess(door: Door, store: MemoryStore) -> None:
    """A page elsewhere doesn't promise that a client is admitted, unless the guessed bucket is in use."""
    by_route = [Rule("api", "2/minute", path="/api/**", key=["path", "ip"]), Rule("all", "9/minute")]
    page, asked = door.page(store, rules=by_route), "/explain?path=/api/hello&ip=192.0.2.7"
    guess = (
        "Rule api has a bucket for each route: this is that of /api/**, which a service uses only if its routes are unknown;"
    )
    found = door.ask(page, asked).json()
    assert found["words"][1] == "Whether it would be admitted is not known."
    assert found["words"][2].startswith(f"{guess} expected limitgate page --app MODULE:APP")
    assert (found["allowed"], [each["rule"] for each in found["windows"]]) == (None, ["all"])
    app = _gated(door, page, store=store, rules=by_route)
    for allowed in (True, False):
        assert door.ask(app, "/api/hello", peer="192.0.2.7").status == 200
        found = door.ask(page, asked).json()
        assert (found["allowed"], len(found["windows"])) == (allowed, 2)
        assert found["words"][2].startswith(guess)
    assert door.ask(app, asked).json()["words"][2:] == []
    assert len(door.ask(page, "/explain?path=/other").json()["words"]) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_the_gate_around_it_lends_its_options(
    door: Door, store: MemoryStore, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    """Its key prefix and secret, unless the page has its own; also the header of API keys."""
    where: Any = own_redis.url if shared else store
    with closing(RedisStore(own_redis.url)) as opened:
        write(opened if shared else store, snapshot(host="here"), key_prefix="inapp")
    options: dict[str, Any] = {"key_prefix": "inapp", "secret": "s" * 16, "api_key_header": "x-key"}
    rules = [Rule("api", "5/minute", path="/api/**", key=["api_key"])]
    page = door.page(where)
    app = _gated(door, page, store=where, rules=rules, **options)
    assert "prefix inapp</title>" in door.ask(app).body.decode()
    found = door.ask(app, "/figures").json()
    assert (found["prefix"], "here" in [each["host"] for each in found["processes"]]) == ("inapp", True)
    refused = [door.ask(app, "/api/x", headers={"X-Key": "abc"}) for _ in range(6)][-1].json()["instance"]
    assert door.ask(app, "/explain?path=/api/x&api_key=abc").json()["allowed"] is False
    assert door.ask(app, f"/explain?id={refused}").json()["allowed"] is False
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", "environment")
    given = door.page(where, key_prefix="other")
    assert door.ask(_gated(door, given, store=where, rules=rules, **options), "/figures").json()["prefix"] == "other"


def test_code_in_rules_may_fail(door: Door, store: MemoryStore) -> None:
    """A condition that a described request does not satisfy is told, and is no error of the page."""
    rules = [Rule("odd", qps=5, when=lambda request: bool(request.headers["x-there"]))]
    reply = door.ask(door.page(store, rules=rules), "/explain?path=/x")
    assert reply.status == 400
    assert "code of the rules raised KeyError" in reply.json()["error"]


def test_the_twins_of_the_example_explain(door: Door) -> None:
    """Behind a framework, paths are counted by the route that it has."""
    app = main.create_app(store="memory://") if door.kind == "asgi" else example_wsgi.create_app(store="memory://")
    here = {"Host": "localhost"}
    found = door.ask(app, "/live/explain?path=/api/items/7&ip=127.0.0.1", headers=here, peer="127.0.0.1").json()
    assert found["words"][1] == "It would be admitted; the tightest limit is of rule api: 4 of 5 left."
    for _ in range(6):
        door.ask(app, "/api/items/8", headers=here, peer="127.0.0.1")
    found = door.ask(app, "/live/explain?path=/api/items/7&ip=127.0.0.1", headers=here, peer="127.0.0.1").json()
    assert found["words"][1].startswith("It would be refused by rule api")
    found = door.ask(app, "/live/explain?path=/api/x&api_key=demo-vip-key", headers=here, peer="127.0.0.1").json()
    assert found["words"][0] == "GET /api/x counts as caller acme of tier vip."


def _gated(door: Door, page: Any, **options: Any) -> Any:
    if door.kind == "asgi":

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if not scope["path"].startswith("/api"):
                await page(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        return LimitGate(app, **options)

    def wsgi(environ: Any, start_response: Any) -> Any:
        if not environ["PATH_INFO"].startswith("/api"):
            return page(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b""]

    return LimitGateWSGI(wsgi, **options)


# --- actions ------------------------------------------------------------------------------------------------------------

SAME = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}


class Viewer:
    """A browser that has opened the page."""

    def __init__(self, door: Door, page: Any) -> None:
        self.door, self.page = door, page
        reply = door.ask(page)
        self.token = facts(reply).get("token", "")
        self.cookie = reply.headers.get("set-cookie", "").partition(";")[0]
        self.attributes = reply.headers.get("set-cookie", "").partition("; ")[2]

    def act(self, action: str, headers: dict[str, str] | None = None, **body: Any) -> Reply:
        given = SAME | {"Cookie": self.cookie, "X-LimitGate-Token": self.token} | (headers or {})
        return self.door.ask(
            self.page, f"/{action}", "POST", {name: each for name, each in given.items() if each}, json.dumps(body).encode()
        )


CLIENT = {"rule": "api", "tier": "default", "key": digest("ip=20….7")}


@pytest.fixture
def viewer(door: Door, own_redis: RedisServer) -> Viewer:
    with closing(RedisStore(own_redis.url)) as store:
        write(store, snapshot())
    return Viewer(door, door.page(own_redis.url, actions=True, rules=RULES))


def bans(viewer: Viewer) -> list[dict[str, Any]]:
    viewer.page._site.reader.expire()
    found: list[dict[str, Any]] = viewer.door.ask(viewer.page, "/figures").json()["bans"]
    return found


def test_a_client_is_banned_and_pardoned(viewer: Viewer) -> None:
    """The journal has the name that guard returned. The ban holds in the store, as one of the command."""
    assert viewer.act("ban", seconds="1h", reason="scraping\x07", **CLIENT).json() == {"done": "ban", "name": "api ip=20….7"}
    (ban,) = bans(viewer)
    assert (ban["key"], ban["by"], ban["reason"], ban["digest"]) == ("api ip=20….7", "ann", "scraping\\x07", CLIENT["key"])
    assert 3500 < ban["retry_after"] <= 3600
    assert viewer.act("reset", **CLIENT).status == 200
    assert len(bans(viewer)) == 1
    assert viewer.act("pardon", key=CLIENT["key"]).status == 200
    assert bans(viewer) == []
    assert viewer.act("pardon", key=CLIENT["key"]).status == 400


def test_a_ban_of_the_command_is_lifted_too(viewer: Viewer, own_redis: RedisServer) -> None:
    """Whatever has set it, a rule's client or the key of a Limiter: the bucket that the journal names is pardoned."""
    with closing(RedisStore(own_redis.url)) as store, Limiter(store) as limiter:
        journal = Journal(store, "limitgate", 5)
        limiter.ban("user:42", 3600)
        journal.note("ban", "key us…42", [limiter.ban_key("user:42")], None, 3600, bans=True)
        (ban,) = bans(viewer)
        assert viewer.act("pardon", key=ban["digest"]).status == 200
        assert limiter.banned("user:42").allowed
    assert bans(viewer) == []


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, "another site"),
        ({"Sec-Fetch-Site": "same-site"}, "another site"),
        ({"Sec-Fetch-Site": ""}, "Origin"),
        ({"Sec-Fetch-Site": "", "Origin": "http://evil.example"}, "Origin"),
        ({"Sec-Fetch-Site": "", "Origin": "null"}, "Origin"),
        ({"X-LimitGate-Token": ""}, "token"),
        ({"X-LimitGate-Token": "A" * 43}, "token"),
        ({"Cookie": ""}, "token"),
        ({"Cookie": "limitgate_page="}, "token"),
        ({"Content-Type": "text/plain"}, "application/json"),
    ],
)
def test_another_site_cannot_act(viewer: Viewer, headers: dict[str, str], why: str) -> None:
    """Neither a form, nor a script of another site, nor a guessed token changes anything."""
    reply = viewer.act("ban", headers, seconds=60, **CLIENT)
    assert reply.status == 403
    assert why in reply.json()["error"]
    assert bans(viewer) == []


def test_an_old_browser_may_act(viewer: Viewer) -> None:
    """Without Sec-Fetch-Site, the origin has to be the host that was asked."""
    headers = {"Sec-Fetch-Site": "", "Origin": "http://testserver"}
    assert viewer.act("ban", headers, seconds=60, **CLIENT).status == 200


def test_the_cookie_is_for_this_site_alone(viewer: Viewer) -> None:
    """No script and no other site sees it; a second tab keeps that of the first."""
    assert viewer.attributes == "HttpOnly; SameSite=Strict"
    again = viewer.door.ask(viewer.page, headers={"Cookie": viewer.cookie})
    assert facts(again)["token"] == viewer.token


def test_it_is_read_only_unless_told_otherwise(door: Door, store: MemoryStore) -> None:
    """Without ``actions`` there is no token, no cookie, and no way to change anything."""
    write(store, snapshot())
    viewer = Viewer(door, door.page(store))
    assert viewer.cookie == viewer.token == ""
    for action in ("ban", "pardon", "reset"):
        assert "read-only" in viewer.act(action, **CLIENT).json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"key": "x"},
        {**CLIENT, "key": "0" * 32},
        {**CLIENT, "rule": "nothing"},
        {**CLIENT, "seconds": "soon"},
        {**CLIENT, "seconds": -1},
        {**CLIENT, "seconds": 1e12},
        {**CLIENT, "seconds": None},
        {"rule": ["api"], "tier": {}, "key": 7, "seconds": 60},
    ],
)
def test_wrong_actions_change_nothing(viewer: Viewer, body: dict[str, Any]) -> None:
    """What does not name a client that the page shows, or no duration, is refused with the reason."""
    reply = viewer.act("ban", **body)
    assert reply.status == 400
    assert "expected" in reply.json()["error"]
    assert bans(viewer) == []


def test_bodies_are_short(viewer: Viewer) -> None:
    """A body that is no JSON object, or has more than 4 KiB, is not read further."""
    headers = SAME | {"Cookie": viewer.cookie, "X-LimitGate-Token": viewer.token}
    for body, status in ((b"[]", 400), (b"{" * 3000, 400), (b'"\xff"', 400), (b" " * 5000, 413)):
        assert viewer.door.ask(viewer.page, "/ban", "POST", headers, body).status == status


def test_a_store_that_fails_is_told_to_who_acts(door: Door) -> None:
    """An action that the store did not take is not reported as done."""

    class Broken(MemoryStore):
        def spend(self, plan: Any, timeout: float = 0) -> Any:
            raise StoreError("the store is read-only")

        async def aspend(self, plan: Any, timeout: float = 0) -> Any:
            raise StoreError("the store is read-only")

    store = Broken()
    write(store, snapshot())
    reply = Viewer(door, door.page(store, actions=True)).act("ban", seconds=60, **CLIENT)
    assert (reply.status, reply.json()["error"]) == (503, "the store is read-only")
    assert fleet_key("limitgate") in store._fleets
