"""One client's bucket of a rule: the very keys that a gate uses, and bans that it heeds, through every door."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from flask import Flask
from hypothesis import given, strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import limitgate.flask
from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    Caller,
    ConfigError,
    Limit,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Rule,
    RuleSet,
    StoreError,
    limit,
)
from limitgate.fastapi import RateLimit
from limitgate.limiter.rule_bucket import RuleBucket
from limitgate.rules.callers import KnownCaller
from tests.support.clock import Clock
from tests.support.doors import MOMENT, PATIENCE, PEER, Reply, asgi_reply, wsgi_reply
from tests.support.proxy import in_a_loop
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.stored import buckets

SECRET = "a secret of sixteen bytes and more"
ADDRESSES = ("192.0.2.1", "2001:db8:1:2:3::4", "::ffff:198.51.100.7")
VIP = "vip-key"
CALLERS = [KnownCaller(id="acme", api_key="sha256:" + hashlib.sha256(VIP.encode()).hexdigest(), tier="vip")]
LIMITS = (
    [Limit("5/minute")],
    [Limit("5/minute"), Limit("50/day", algorithm="sliding_window"), Limit("3 at once")],
    [Limit("9/second", algorithm="fixed_window")],
    [Limit("50/minute", lease=5)],
)
PARTS = ("path", "ip", "api_key", "header:x-tenant", "method", "host", "user", "caller", "tier", "global", "api_key|ip")
HEADERS = {"x-tenant": "a, b", "host": "Shop.Example.:8080", "x-api-key": VIP}


async def plain_asgi(scope: Any, receive: Any, send: Any) -> None:
    """An application whose routes nobody knows."""
    await PlainTextResponse("ok")(scope, receive, send)


def plain_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]


def with_user(app: Any, user: str | None) -> Any:
    async def authenticated(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "user": user}, receive, send)

    return authenticated


def reply_of(door: str, rules: Any, store: Any, path: str, peer: str, *, user: str | None = None, **options: Any) -> Reply:
    """One request with all there is to count by, through a gate around an application with routes or without."""
    headers = options.pop("headers", HEADERS)
    secret = options.pop("secret", SECRET)
    options = {"rules": rules, "store": store, "key_prefix": "shop", "secret": secret, "new_buckets": 0, **options}
    if door in ("wsgi", "flask"):
        app: Any = plain_wsgi
        if door == "flask":
            app = Flask("app")
            app.add_url_rule("/items/<int:number>", view_func=lambda **_: "ok", methods=["GET", "POST"])
            app.add_url_rule("/login", view_func=lambda: "ok", endpoint="login", methods=["GET", "POST"])
        more = {"REMOTE_USER": user} if user else {}
        return wsgi_reply(LimitGateWSGI(app, **options), path, "POST", headers, REMOTE_ADDR=peer, **more)
    app = plain_asgi
    if door == "starlette":
        item = Route("/{number:int}", lambda _: PlainTextResponse("ok"), methods=["GET", "POST"])
        login = Route("/login", lambda _: PlainTextResponse("ok"), methods=["GET", "POST"])
        app = Starlette(routes=[Mount("/items", routes=[item]), login])
    return asyncio.run(asgi_reply(with_user(LimitGate(app, **options), user), path, "POST", headers, peer=peer))


TEMPLATES = {"starlette": "/items/{number:int}", "flask": "/items/<int:number>"}


@given(
    door=st.sampled_from(["asgi", "wsgi", "starlette", "flask"]),
    key=st.lists(st.sampled_from(PARTS), min_size=1, max_size=4),
    limits=st.sampled_from(LIMITS),
    address=st.sampled_from(ADDRESSES),
    path=st.sampled_from(["/items/7", "/login"]),
    patterns=st.sampled_from(["/**", "/items/{id}", ["/items/**", "/login"], "/login"]),
    lists=st.booleans(),
    user=st.sampled_from(["ann", None]),
    secret=st.sampled_from([SECRET, None]),
    leaves_out=st.booleans(),
    prefix=st.sampled_from([48, 64, 128]),
)
def test_keys_are_those_of_a_gate_property(
    *,
    door: str,
    key: list[str],
    limits: list[Limit],
    address: str,
    path: str,
    patterns: Any,
    lists: bool,
    user: str | None,
    secret: str | None,
    leaves_out: bool,
    prefix: int,
) -> None:
    """Whatever a rule counts by, its bucket is the one that a request has been charged to."""
    rule = Rule("api", *limits, key=key, path=patterns)
    rules = RuleSet([rule], CALLERS if lists else (), ["vip"])
    clock = Clock()
    store = MemoryStore(clock)
    headers = {"host": HEADERS["host"]} if leaves_out else HEADERS
    reply_of(door, rules, store, path, address, user=user, headers=headers, secret=secret, ipv6_prefix=prefix)
    limiter = Limiter(store, key_prefix="shop", secret=secret, ipv6_prefix=prefix)
    template = TEMPLATES.get(door) if path == "/items/7" else "/login" if door in TEMPLATES else None
    own = rule.paths[-1] if path == "/login" and "/login" in rule.paths else rule.paths[0]
    bucket = limiter.bucket(
        rule,
        ip=address,
        path=template or own,
        user=user,
        headers={name.title(): value for name, value in headers.items()},
        method="post",
        host=headers["host"],
        **({} if leaves_out else {"api_key": VIP}),
    )
    kept = set(buckets(store))
    asked = [{charge.key for charge in charges} for charges in bucket._operations._alike]
    if kept:
        assert any(kept <= each for each in asked)
    bucket.ban(60)
    applies = path == "/items/7" if patterns == "/items/{id}" else path == "/login" if patterns == "/login" else True
    reply = reply_of(door, rules, store, path, address, user=user, headers=headers, secret=secret, ipv6_prefix=prefix)
    assert (reply.status == 429) is applies
    if applies:
        assert reply.wait == 60
        assert json.loads(reply.body)["violated-policies"] == ["api"]
        assert bucket.peek().retry_after == 60
        bucket.pardon()
        again = reply_of(door, rules, store, path, address, user=user, headers=headers, secret=secret, ipv6_prefix=prefix)
        assert again.status == 200


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
@pytest.mark.parametrize("patterns", ["/api/**", ["/api/v1/**", "/api/**"]])
def test_a_path_as_it_is_sent(door: str, patterns: str | list[str]) -> None:
    """Whoever names a path need not know that a gate without routes counts by the rule's pattern."""
    rule, store = Rule("api", "3/minute", path=patterns, key=["path", "ip"]), MemoryStore(Clock())
    bucket = Limiter(store, key_prefix="shop", secret=SECRET).bucket(rule, ip=PEER, path="/api/hello")
    assert reply_of(door, [rule], store, "/api/hello", PEER, headers={}).status == 200
    assert bucket.peek().remaining == 2
    bucket.ban(60)
    assert reply_of(door, [rule], store, "/api/hello", PEER, headers={}).status == 429
    bucket.pardon()
    bucket.reset()
    assert reply_of(door, [rule], store, "/api/hello", PEER, headers={}).rate["x-ratelimit-remaining"] == "2"


@pytest.mark.parametrize("limits", [["5/second", "2000/day"], ["2000/day", "5/second"], ["5/second", "9/second", "2000/day"]])
def test_the_used_one_of_two_buckets_is_shown_when_its_short_window_is_full_again(limits: list[str]) -> None:
    """A path without placeholders may be a route or not, so there are two candidates."""
    clock = Clock()
    store = MemoryStore(clock)
    rule = Rule("api", *limits, path="/api/**", key=["path", "ip"])
    for _ in range(3):
        assert reply_of("wsgi", [rule], store, "/api/hello", ADDRESSES[0], secret=None).status == 200
    clock.advance(2)
    windows = Limiter(store, key_prefix="shop").bucket(rule, ip=ADDRESSES[0], path="/api/hello").peek().windows
    assert {window.limit: window.used for window in windows} == {5: 0, 2000: 3} | ({9: 0} if len(limits) > 2 else {})


@pytest.mark.parametrize("algorithm", ["gcra", "fixed_window", "sliding_window", "sliding_log"])
@pytest.mark.parametrize("on", ["memory", "redis"])
def test_a_banned_bucket_shows_its_usage(on: str, algorithm: str, own_redis: RedisServer) -> None:
    rule = Rule("api", "5/minute", "7/hour", key=["ip"], algorithm=algorithm)
    with contextlib.closing(MemoryStore() if on == "memory" else RedisStore(own_redis.url)) as store:
        for _ in range(3):
            assert reply_of("wsgi", [rule], store, "/", PEER, secret=None, headers={}, timeout=5).status == 200
        bucket = Limiter(store, timeout=5, key_prefix="shop").bucket(rule, ip=PEER)
        used = [(window.limit, window.used) for window in bucket.peek().windows]
        bucket.ban(60)
        found = bucket.peek()
        assert ([(window.limit, window.used) for window in found.windows], found.remaining) == (used, 0)
        assert [count for _, count in used] == [3, 3]


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
@pytest.mark.parametrize("key", [["path"], ["path", "api_key"], ["global", "path"]])
def test_a_rule_that_does_not_count_by_address(door: str, key: list[str]) -> None:
    """No address is asked for where a path, or a path and an API key, is all that tells its buckets apart."""
    rule, store = Rule("api", "3/minute", path="/api/**", key=key), MemoryStore(Clock())
    parts: Any = {"api_key": "one"} if "api_key" in key else {}
    bucket = Limiter(store, key_prefix="shop", secret=SECRET).bucket(rule, path="/api/hello", **parts)
    headers = {"x-api-key": "one"}
    assert reply_of(door, [rule], store, "/api/hello", PEER, headers=headers).status == 200
    assert bucket.peek().remaining == 2
    bucket.ban(60)
    assert reply_of(door, [rule], store, "/api/hello", PEER, headers=headers).status == 429


RULE = Rule("api", "3/minute", path="/**", key=["path", "ip"])


@pytest.mark.parametrize(
    ("rule", "parts", "expected"),
    [
        (RULE, {"ip": PEER}, "counts by path, expected path= with the route's template"),
        (RULE, {"path": "/**"}, "counts by ip, expected ip="),
        (RULE, {"path": 7, "ip": PEER}, "path is 7, expected text"),
        (RULE, {"path": "/**", "ip": "nobody"}, "ip is 'nobody', expected an address such as"),
        (Rule("a", "3/minute", key=["header:x-tenant"]), {}, "expected headers={'x-tenant': ...}, or ip="),
        (Rule("a", "3/minute", key=["api_key|ip"]), {}, "counts by api_key|ip, expected api_key=, or ip="),
        (Rule("a", "3/minute", key=["method", "ip"]), {"ip": PEER}, "counts by method, expected method="),
        (Rule("a", "3/minute", key=["user", "caller"]), {"user": "ann"}, "counts by caller, expected caller=, or ip="),
        (Rule("a", exempt=True), {}, "has no limits"),
        (plain_wsgi, {}, "is not a rule, expected a Rule, or an endpoint with @limit"),
    ],
)
def test_what_is_missing_is_said(rule: Any, parts: Mapping[str, Any], expected: str) -> None:
    """A part of the key that was not given is not silently taken for absent."""
    with pytest.raises(ConfigError) as error:
        Limiter(MemoryStore()).bucket(rule, **parts)
    assert expected in str(error.value)


def test_an_api_key_that_is_not_listed_is_said() -> None:
    """Such a request counts by its address, so that has to be given."""
    rule = Rule("a", "3/minute", key=["api_key"])
    RuleSet([rule], CALLERS, ["vip"])
    with pytest.raises(ConfigError, match=r"expected api_key= that is listed, or ip="):
        Limiter(MemoryStore()).bucket(rule, api_key="made up")
    with pytest.raises(TypeError, match="unexpected keyword argument 'adress'"):
        Limiter(MemoryStore()).bucket(rule, adress=PEER)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["x-api-key", "X-API-Key"])
def test_the_header_of_an_api_key_is_the_key(name: str) -> None:
    """A header that a gate reads by default means the same as ``api_key``; the two must not differ."""
    rule, clock = Rule("a", "3/minute", key=["api_key"]), Clock()
    store = MemoryStore(clock)
    limiter = Limiter(store, key_prefix="shop", secret=SECRET)
    assert reply_of("asgi", [rule], store, "/", PEER, headers={"x-api-key": "abc"}).status == 200
    assert limiter.bucket(rule, ip=PEER, headers={name: "abc"}).peek().remaining == 2
    assert limiter.bucket(rule, headers={name: "abc"}, api_key="abc").peek().remaining == 2
    with pytest.raises(ConfigError, match=r"api_key= and headers=\{'x-api-key': \.\.\.\} differ, expected one of them"):
        limiter.bucket(rule, headers={name: "abc"}, api_key="other")
    other = Rule("vip", "3/minute", key=["caller"], tier="vip")
    RuleSet([other], CALLERS, ["vip"])
    reply_of("wsgi", other.rule_set, store, "/", PEER)
    assert limiter.bucket(other, headers={name: VIP}).peek().remaining == 2


@pytest.mark.parametrize("seconds", [0, -1, math.nan, 1e12])
def test_a_ban_has_a_length(seconds: float) -> None:
    """As a key's."""
    with pytest.raises(ValueError, match="expected a number above 0"):
        Limiter(MemoryStore()).bucket(RULE, ip=PEER, path="/**").ban(seconds)


def test_options_are_checked() -> None:
    """A secret is as long as a gate's, and no network wider."""
    with pytest.raises(ConfigError, match="16 to 64 bytes") as error:
        Limiter(MemoryStore(), secret="short")
    assert "short" not in str(error.value)
    with pytest.raises(ConfigError, match="expected 32 to 128"):
        Limiter(MemoryStore(), ipv6_prefix=16)


def test_a_caller_that_identify_names() -> None:
    """An API key counts as its caller then, and the tier is the caller's."""
    rule = Rule("a", "2/minute", key=["caller", "tier", "api_key"])
    rules = RuleSet([rule], (), ["vip"])
    store = MemoryStore(Clock())

    def identify(_: object) -> Caller:
        return Caller("ann", "vip")

    reply_of("asgi", rules, store, "/", PEER, identify=identify)
    limiter = Limiter(store, key_prefix="shop", secret=SECRET)
    assert limiter.bucket(rule, caller=Caller("ann", "vip"), api_key=VIP).peek().remaining == 1
    assert limiter.bucket(rule, caller="ann", tier="vip", api_key=VIP).reset().remaining == 2
    assert reply_of("asgi", rules, store, "/", PEER, identify=identify).headers["x-ratelimit-remaining"] == "1"


def test_limits_that_a_callable_gives() -> None:
    """They are given, or are the caller's own; the bucket, and so its ban, is the same."""
    store = MemoryStore(Clock())
    rule = Rule("api", lambda _: "5/minute", key=["ip"])
    gate = LimitGateWSGI(plain_wsgi, rules=[rule], store=store)
    assert wsgi_reply(gate).status == 200
    limiter = Limiter(store)
    with pytest.raises(ConfigError, match="has its limits from a callable, expected limits= with those of this client"):
        limiter.bucket(rule, ip=PEER)
    assert limiter.bucket(rule, ip=PEER, limits="5/minute").peek().remaining == 4
    assert limiter.bucket(rule, ip=PEER, caller=Caller("ann", limits={"api": "9/minute"})).peek().remaining == 8
    limiter.bucket(rule, ip=PEER, limits="7/minute").ban(60)
    assert wsgi_reply(gate).wait == 60


def test_limits_of_endpoints_and_dependencies() -> None:
    """A decorator's bucket is another one than that of a rule of the same name; of several limits one has to be named."""
    store = MemoryStore(Clock())

    async def current_user() -> str:
        return "ann"

    both = RateLimit("5/minute", key=["ip", current_user], name="own")
    app = FastAPI()

    @app.get("/")
    @limit("3/minute", name="few")
    @limit("4/minute", name="more")
    async def home() -> str:
        return "ok"

    @app.get("/own", dependencies=[Depends(both)])
    async def own() -> str:
        return "ok"

    app.add_middleware(LimitGate, rules=[Rule("few", "9/minute")], store=store)
    asyncio.run(asgi_reply(app, "/"))
    asyncio.run(asgi_reply(app, "/own"))
    limiter = Limiter(store)
    assert limiter.bucket(home, name="few", ip=PEER).peek().remaining == 2
    assert limiter.bucket(home, name="more", ip=PEER).peek().remaining == 3
    assert limiter.bucket(Rule("few", "9/minute"), ip=PEER).peek().remaining == 7
    with pytest.raises(ConfigError, match=r"has the limits few, more|has the limits more, few"):
        limiter.bucket(home, ip=PEER)
    for its in (both, both.rule):
        assert limiter.bucket(its, ip=PEER, given={"current_user": "ann"}).peek().remaining == 4
        assert limiter.bucket(its, ip=PEER, given={"current_user": "bob"}).peek().remaining == 5
    dependent = RateLimit("5/minute", key=[current_user])
    with pytest.raises(ConfigError, match=r"counts by current_user, expected given=\{'current_user'"):
        limiter.bucket(dependent)
    with pytest.raises(ConfigError, match="has no key part 'curent_user' for given, expected one of current_user"):
        limiter.bucket(dependent, ip=PEER, given={"curent_user": "ann"})
    limiter.bucket(home, name="more", ip=PEER).ban(30)
    reply = asyncio.run(asgi_reply(app, "/"))
    assert (reply.status, reply.wait, reply.json()["violated-policies"]) == (429, 30, ["more"])


def test_a_banned_client_is_told_when_it_ends() -> None:
    """All header styles say it, in the numbers of the rule."""
    store = MemoryStore(Clock())
    rule = Rule("api", "3/second", qpm=100, concurrency=5)
    options = {"headers": ["x-ratelimit", "x-ratelimit-windows", "draft-11"]}
    gate = LimitGateWSGI(plain_wsgi, rules=[rule], store=store, **options)
    Limiter(store).bucket(rule, ip=PEER).ban(90)
    reply = wsgi_reply(gate)
    assert (reply.status, reply.wait) == (429, 90)
    fields = reply.headers
    assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"]) == ("3", "0")
    assert int(fields["x-ratelimit-reset"]) == 1_790_000_090
    assert fields["x-ratelimit-remaining-second"] == fields["x-ratelimit-remaining-minute"] == "0"
    assert '"api-second";r=0;t=90' in fields["ratelimit"]
    assert '"api-second";q=3;w=1' in fields["ratelimit-policy"]


def test_a_shadow_only_reports_a_ban() -> None:
    """It never refuses; nothing is charged to it meanwhile."""
    store = MemoryStore(Clock())
    rule = Rule("trial", "3/minute", shadow=True)
    seen = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        seen.append(environ["limitgate"])
        return plain_wsgi(environ, start_response)

    bucket = Limiter(store).bucket(rule, ip=PEER)
    bucket.ban(60)
    assert wsgi_reply(LimitGateWSGI(app, rules=[rule], store=store)).status == 200
    assert seen[0].shadow
    bucket.pardon()
    assert bucket.peek().remaining == 3


@pytest.fixture(params=["redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url
    cluster: RedisCluster = request.getfixturevalue("redis_cluster")
    return cluster.url


def test_on_redis_a_ban_is_heeded_and_a_pardon_within_a_second(url: str) -> None:
    """By another process' store, behind both doors, for limits of each kind; the last refusal may be repeated for a second."""
    rules = [Rule(f"rule{number}", *limits, path=f"/{number}") for number, limits in enumerate(LIMITS)]
    prefix, wsgi_peer, asgi_peer = f"t{time.time_ns()}", "192.0.2.1", "192.0.2.2"
    with contextlib.ExitStack() as opened:
        store, runner = opened.enter_context(contextlib.closing(RedisStore(url))), opened.enter_context(asyncio.Runner())
        astore, alimiter = AsyncRedisStore(url), AsyncLimiter(url, key_prefix=prefix)
        limiter = opened.enter_context(Limiter(url, key_prefix=prefix))
        wsgi = LimitGateWSGI(plain_wsgi, rules=rules, store=store, key_prefix=prefix, timeout=PATIENCE)
        asgi = LimitGate(plain_asgi, rules=rules, store=astore, key_prefix=prefix, timeout=PATIENCE)
        clients: list[tuple[Callable[[], Reply], Any, Callable[[Any], Any]]] = []  # asks, its bucket, runs what that is told
        for rule in rules:
            clients += [
                (partial(wsgi_reply, wsgi, rule.path, peer=wsgi_peer), limiter.bucket(rule, ip=wsgi_peer), lambda done: done),
                (
                    lambda rule=rule: runner.run(asgi_reply(asgi, rule.path, peer=asgi_peer)),
                    alimiter.bucket(rule, ip=asgi_peer),
                    runner.run,
                ),
            ]
        assert [ask().status for ask, _, _ in clients] == [200] * len(clients)
        runner.run(asyncio.sleep(1.2))  # what was leased goes back
        for ask, bucket, run in clients:
            assert run(bucket.ban(600)).retry_after == 600
            replies = [ask() for _ in range(5)]
            assert {reply.status for reply in replies} == {429}
            assert all(500 < reply.wait <= 600 for reply in replies)
            assert run(bucket.peek()).retry_after > 500
            assert run(bucket.reset()).retry_after > 500
        for _, bucket, run in clients:
            assert run(bucket.pardon()).allowed
        time.sleep(1.1)
        assert [ask().status for ask, _, _ in clients] == [200] * len(clients)
        runner.run(alimiter.aclose())
        runner.run(astore.aclose())


def test_a_banned_crowd_costs_redis_little(redis_server: RedisServer) -> None:
    """A refusal by a ban is repeated without asking, as any other that holds."""
    prefix, rule = f"t{time.time_ns()}", Rule("api", "1000/second")
    store = RedisStore(redis_server.url)
    with Limiter(redis_server.url, key_prefix=prefix, timeout=5) as limiter, redis_server.client() as client:
        limiter.bucket(rule, ip=PEER).ban(60)
        gate = LimitGateWSGI(plain_wsgi, rules=[rule], store=store, key_prefix=prefix, timeout=5)
        assert wsgi_reply(gate).status == 429
        before = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        assert {wsgi_reply(gate).status for _ in range(50)} == {429}
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 4
    store.close()


LOCAL = Rule("api", "1000/minute", key=["header:x-who"], on_error="local")
OTHERS = [Rule("all", "1000/minute", on_error="open")]


def who(name: str) -> dict[str, Any]:
    return {"headers": {"X-Who": name}}


@pytest.mark.parametrize("shares", [True, False], ids=["by its own store", "by another process"])
def test_a_ban_holds_while_redis_is_gone(own_redis: RedisServer, *, shares: bool) -> None:
    """Under ``local``, as far as the gate's store has seen it: set it, or refused by it. Others are limited as ever."""
    store, other = RedisStore(own_redis.url), RedisStore(own_redis.url)
    gate = LimitGateWSGI(plain_wsgi, rules=[LOCAL, *OTHERS], store=store, timeout=5)
    with Limiter(store if shares else other, timeout=5) as limiter:
        for name in ("ann", "bob", "unseen"):
            limiter.bucket(LOCAL, headers={"x-who": name}).ban(3600)
        for name in ("ann", "bob"):
            assert wsgi_reply(gate, **who(name)).status == 429
        limiter.bucket(LOCAL, headers={"x-who": "bob"}).pardon()
        began = time.monotonic()
        while wsgi_reply(gate, **who("bob")).status == 429:  # for a second the refusal may be repeated
            assert time.monotonic() - began < PATIENCE
            time.sleep(MOMENT)
        own_redis.stop()
        refused = [wsgi_reply(gate, **who("ann")) for _ in range(3)]
        assert {reply.status for reply in refused} == {429}
        assert all(3500 < reply.wait <= 3600 for reply in refused)
        assert [wsgi_reply(gate, **who(name)).status for name in ("bob", "cid")] == [200, 200]
        assert wsgi_reply(gate, **who("unseen")).status == (429 if shares else 200)
    store.close()


@in_a_loop
async def test_a_ban_holds_while_redis_is_gone_on_asyncio(own_redis: RedisServer) -> None:
    """As under threads; its end is that of the ban."""
    store = AsyncRedisStore(own_redis.url)
    gate = LimitGate(plain_asgi, rules=[LOCAL], store=store, timeout=5)
    async with AsyncLimiter(store, timeout=5) as limiter:
        await limiter.bucket(LOCAL, headers={"x-who": "ann"}).ban(3600)
        await limiter.bucket(LOCAL, headers={"x-who": "bob"}).ban(2)
        own_redis.stop()
        began = time.monotonic()
        while (await asgi_reply(gate, **who("bob"))).status == 429:
            assert time.monotonic() - began < PATIENCE
            await asyncio.sleep(MOMENT)
        assert time.monotonic() - began > 1
        assert (await asgi_reply(gate, **who("ann"))).status == 429
        assert (await asgi_reply(gate, **who("cid"))).status == 200
    await store.aclose()


def test_a_store_that_is_gone_is_told(own_redis: RedisServer) -> None:
    """There is no ``on_error`` here."""
    with Limiter(own_redis.url) as limiter:
        own_redis.stop()
        with pytest.raises(StoreError):
            limiter.bucket(RULE, ip=PEER, path="/**").ban(5)


def test_a_memory_store_without_room_keeps_a_ban() -> None:
    """Newcomers share the overflow bucket, and no ban goes to make room for them."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=4)
    rule = Rule("api", "3/minute")
    limiter = Limiter(store)
    bans: list[RuleBucket] = [limiter.bucket(rule, ip=f"192.0.2.{number}") for number in range(1, 9)]
    for bucket in bans:
        bucket.ban(3600)
    gate = LimitGateWSGI(plain_wsgi, rules=[rule], store=store)
    for number in range(200):
        wsgi_reply(gate, REMOTE_ADDR=f"198.51.100.{number}")
    assert all(bucket.peek().retry_after == 3600 for bucket in bans)
    clock.advance(3601)
    for number in range(200):
        wsgi_reply(gate, REMOTE_ADDR=f"198.51.100.{number}")
    assert len(store) <= 4
    assert not store._bans


@pytest.mark.parametrize("extension", [limitgate.flask.LimitGate])
def test_flask_heeds_a_ban(extension: Callable[..., Any]) -> None:
    """By its extension, and by the rule of a file's kind."""
    store, app = MemoryStore(Clock()), Flask("app")
    app.add_url_rule("/items/<int:number>", view_func=lambda **_: "ok")
    extension(app, rules=[RULE], store=store)
    Limiter(store).bucket(RULE, ip="127.0.0.1", path="/items/<int:number>").ban(60)
    assert app.test_client().get("/items/1").status_code == 429
    assert app.test_client().get("/items/2").headers["retry-after"] == "60"
    assert app.test_client().get("/other").status_code == 404
