"""What clients and operators keep to themselves never turns up in Redis, in logs, in errors or in a repr."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    Caller,
    ConfigError,
    Limiter,
    MemoryStore,
    RedisStore,
    Rule,
    RuleSet,
    Settings,
    StoreError,
    load_rules,
)
from limitgate.gate.planning.identity import Identities
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.rules.callers import KnownCaller
from tests.support.doors import SITES, Site, http_scope, wsgi_environ
from tests.support.redis_server import RedisServer

KEY, UNKNOWN_KEY, BEARER = "sk_live_kq7Zr31", "sk_test_mW9pL22", "eyJhbGciOiJub25l"
ADDRESS, ADDRESS6, HEADER, COOKIE = "203.0.113.177", "2001:db8:abcd:1234::77", "tenant-vY5cX", "session=hG2dT"
USER, HOST, QUERY = "ada.lovelace", "private.example", "token=pQ8sN"
SECRETS = (KEY, UNKNOWN_KEY, BEARER, ADDRESS, ADDRESS6, "2001:db8:abcd:1234", HEADER, "hG2dT", USER, HOST, "pQ8sN")

PARTS = ["ip", "api_key|ip", "header:x-tenant", "header:cookie", "host", "user", "caller", "path"]


def shows(text: str | bytes) -> list[str]:
    """The secrets that can be read in a text."""
    readable = text.decode("latin-1") if isinstance(text, bytes) else text
    return [secret for secret in SECRETS if secret.lower() in readable.lower()]


def listing(*rules: Rule) -> RuleSet:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    known = [
        KnownCaller(id="acme", api_key=f"sha256:{digest}", tier="vip"),
        KnownCaller(id="inside", header={"X-Tenant": HEADER}, tier="vip"),
    ]
    return RuleSet([*rules, Rule("vip", "2/day", key=["api_key"], tier="vip")], known)


def sent(key: str | None) -> dict[str, str]:
    lines = {"X-Tenant": HEADER, "Cookie": COOKIE, "Host": HOST, "Authorization": f"Bearer {BEARER}"}
    return lines | ({"X-API-Key": key} if key else {})


def ask_everything(site: Site) -> None:
    """Requests of all kinds, some admitted and some refused."""
    user = {"user": USER} if site.door == "asgi" else {"REMOTE_USER": USER}
    for key in (KEY, UNKNOWN_KEY, None):
        for peer in (ADDRESS, ADDRESS6):
            for _ in range(3):
                reply = site.ask(f"/{HEADER}?{QUERY}", headers=sent(key), peer=peer, **user)
                assert not shows(reply.body)
                assert not shows(str(reply.headers.multi_items()))


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that is logged, which never shows a secret; but the proxies that are trusted are named at start."""
    caplog.set_level(logging.DEBUG)
    yield caplog
    for record in caplog.get_records("call"):
        if record.levelno == logging.INFO and "trusted proxies" in record.msg:
            continue
        assert not shows(record.getMessage())
        assert not shows(repr(record.__dict__))


def stored(server: RedisServer) -> Iterator[bytes]:
    """All keys and values in a Redis."""
    with server.client() as client:
        for key in client.scan_iter(count=1000):
            yield key
            yield client.get(key)


@pytest.mark.parametrize("door", SITES)
def test_redis_holds_digests_alone(door: type[Site], own_redis: RedisServer) -> None:
    """After requests of all kinds there is nothing in Redis that was sent, nor a plain digest of a key or an address."""
    rules = listing(*[Rule(f"by-{place}", "2/day", key=[part]) for place, part in enumerate(PARTS)])
    with door(rules=rules, store=own_redis.url, timeout=10, api_key_header="x-api-key", trusted_proxies=[ADDRESS]) as site:
        ask_everything(site)
    found = list(stored(own_redis))
    assert len(found) > 2 * len(PARTS)
    assert [text for text in found if shows(text)] == []
    digests = [hashlib.new(name, secret.encode()).hexdigest() for name in ("sha256", "md5", "sha1") for secret in SECRETS]
    assert not any(digest[:32].encode() in text for text in found for digest in digests)


def test_a_bearer_token_is_not_stored_either(own_redis: RedisServer) -> None:
    """A token that is the API key leaves a digest, and with a secret not even one that can be guessed at."""
    kept = []
    for secret in (None, "0123456789abcdef", "fedcba9876543210"):
        rules = [Rule("all", "2/day", key=["api_key"])]
        with SITES[0](*rules, store=own_redis.url, timeout=10, api_key_header="authorization", secret=secret) as site:
            assert site.ask(headers=sent(None)).status == 200
        kept.append({text for text in stored(own_redis) if text.startswith(b"limitgate:")})
    assert [len(keys) for keys in kept] == [1, 2, 3]
    assert not any(shows(text) for text in stored(own_redis))


@pytest.mark.parametrize("on_error", ["open", "closed", "local"])
@pytest.mark.parametrize("door", SITES)
def test_a_failing_redis_gives_nothing_away(
    door: type[Site], on_error: str, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    """What is logged and answered while Redis is away says nothing about who asked."""
    rules = listing(*[Rule(f"by-{place}", "2/day", key=[part]) for place, part in enumerate(PARTS)])
    store = f"unix://:hunter2@{tmp_path}/nobody.sock"
    with door(rules=rules, store=store, on_error=on_error) as site:
        ask_everything(site)
    assert [record for record in logged.records if record.name.startswith("limitgate")]
    assert not any("hunter2" in record.getMessage() for record in logged.records)


def told(error: BaseException) -> str:
    """An error as it is printed, with all that led to it."""
    return "".join(traceback.format_exception(error))


def limiter_error(url: str) -> str:
    with Limiter(url) as limiter, pytest.raises(StoreError) as caught:
        limiter.hit(KEY, "1/day")
    return told(caught.value)


async def async_limiter_error(url: str) -> str:
    async with AsyncLimiter(url) as limiter:
        with pytest.raises(StoreError) as caught:
            await limiter.hit(KEY, "1/day")
    return told(caught.value)


def test_store_errors_give_nothing_away(own_redis: RedisServer) -> None:
    """Neither the key nor the password stands in the error of a Redis that is absent, refuses, or has no memory."""
    with own_redis.client() as client:
        client.config_set("maxmemory", "1")
    url = own_redis.url.replace("unix://", "unix://ada.lovelace:hunter2@")
    for where in (own_redis.url, url, "redis://:hunter2@127.0.0.1:1/0", "unix://:hunter2@/nowhere.sock"):
        for text in (limiter_error(where), asyncio.run(async_limiter_error(where))):
            printed = "\n".join(
                line for line in text.splitlines() if not line.lstrip().startswith(("File", "limiter.", "await"))
            )
            assert not shows(printed)
            assert "hunter2" not in printed


def wrong_callers() -> Iterator[str]:
    yield f"callers: [{{id: acme, api_key: {KEY}}}]\nrules: []"
    yield f"callers: [{{id: acme, api_key: [{KEY}]}}]\nrules: []"
    yield f"callers: [{{id: acme, api_key: {{sha256: {KEY}}}}}]\nrules: []"
    yield f"callers: [{{id: acme, api_key: 'sha256:{KEY}'}}]\nrules: []"
    yield f"callers: [{{id: acme, key: {KEY}}}]\nrules: []"
    yield f"callers: [{{id: acme, api-key: {KEY}, header: {{X-A: {HEADER}}}}}]\nrules: []"
    yield f"callers: [{{api_key: {KEY}}}]\nrules: []"
    yield f"callers: [{{id: 5, api_key: {KEY}, tier: 7}}]\nrules: []"
    yield f"callers: [{{id: acme, header: {HEADER}}}]\nrules: []"
    yield f"callers: [{{id: acme, header: [{HEADER}]}}]\nrules: []"
    yield f"callers: [{{id: acme, header: {{X-A: [{HEADER}]}}}}]\nrules: []"
    yield f"callers: [{{id: acme, header: {{X-A: {HEADER * 100}}}}}]\nrules: []"
    yield f"callers: [{{id: acme, header: {{X-A: {HEADER}}}, surprise: 1}}]\nrules: []"
    yield f"callers: [{KEY}]\nrules: []"
    yield f"callers: {KEY}\nrules: []"
    yield f"callers: [[{KEY}]]\nrules: []"
    yield f'callers: [{{id: acme, api_key: "{KEY}}}]\nrules: []'
    yield f"callers: [{{id: acme, api_key: {KEY}]\nrules: []"
    yield f"callers: [{{id: acme, api_key: '{KEY}'x}}]\nrules: []"
    yield f"callers: [{{id: acme, api_key: {KEY}, api_key: {KEY}}}]\nrules: []"
    yield f"callers: [{{id: acme, api_key: !unknown {KEY}}}]\nrules: []"
    yield f"callers:\n- id: acme\n  api_key: {KEY}\n x: 1\nrules: []"


@pytest.mark.parametrize("text", list(wrong_callers()))
def test_a_mistake_in_a_rule_file_does_not_print_its_secrets(tmp_path: Path, text: str) -> None:
    """Whoever writes an API key or a secret header into a file in a wrong way does not find it in the log of the start."""
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_rules(file)
    assert not shows(str(caught.value))
    assert not shows(told(caught.value))


@pytest.mark.parametrize(
    "options",
    [
        {"store": f"redis://:{KEY}@host:notaport"},
        {"store": f"{KEY}://host"},
        {"store": f"memory://{KEY}"},
        {"store": KEY},
        {"secret": KEY[:10]},
        {"secret": KEY * 10},
        {"secret": 5, "store": KEY},
    ],
)
@pytest.mark.parametrize("door", SITES)
def test_a_mistake_in_an_option_does_not_repeat_a_secret(door: type[Site], options: dict[str, Any]) -> None:
    """The message of a ConfigError names the option and what was expected, never a password or a secret."""
    with pytest.raises(ConfigError) as caught:
        door(Rule("all", "1/day"), **options)
    assert KEY[:10] not in str(caught.value).replace(f"scheme '{KEY[:20]}'", "")


def identified(request: Request) -> Any:
    return request.headers["x-api-key"]


def numbered(request: Request) -> Any:
    return Caller(request.headers["x-api-key"].encode())  # type: ignore[arg-type]


def costly(request: Request) -> Any:
    return request.headers["x-api-key"]


@pytest.mark.parametrize(
    "options",
    [
        {"rules": [Rule("all", "1/day")], "identify": identified},
        {"rules": [Rule("all", "1/day")], "identify": numbered},
        {"rules": [Rule("all", "1/day", cost=costly)]},
    ],
)
@pytest.mark.parametrize("door", SITES)
def test_a_callable_that_gives_nonsense_does_not_publish_it(door: type[Site], options: dict[str, Any]) -> None:
    """Where ``identify`` or ``cost`` return what a client sent, the error says of which type it was and no more."""
    with door(**options) as site, pytest.raises(TypeError) as caught:
        site.ask(headers=sent(KEY))
    assert not shows(str(caught.value))


def shown() -> Iterable[tuple[str, Callable[[], object]]]:
    rules = listing(Rule("all", "1/day", key=PARTS))
    scope = http_scope(f"/{HEADER}", headers=sent(KEY), peer=ADDRESS)
    environ = wsgi_environ(f"/{HEADER}", headers=sent(KEY), peer=ADDRESS)
    for made, request in ((ASGIRequest, scope), (WSGIRequest, environ)):
        yield f"{made.__name__}", lambda made=made, request=request: made(request)
        yield f"{made.__name__}.headers", lambda made=made, request=request: made(request).headers
    yield "RuleSet", lambda: rules
    yield "Callers", lambda: rules.callers
    yield "KnownCaller", lambda: KnownCaller(id="inside", header={"X-Tenant": HEADER})
    yield "Rule", lambda: rules.tiers["default"][0]
    yield "Settings", lambda: Settings(secret=f"{KEY}-{KEY}")
    yield "MemoryStore", MemoryStore
    yield "RedisStore", lambda: RedisStore(f"redis://:{KEY}@localhost/0")
    yield "AsyncRedisStore", lambda: AsyncRedisStore(f"redis://:{KEY}@localhost/0")
    yield "Limiter", lambda: Limiter(f"redis://:{KEY}@localhost/0")
    yield "AsyncLimiter", lambda: AsyncLimiter(f"redis://:{KEY}@localhost/0")
    for door in SITES:
        yield f"{door.door} door", lambda door=door: door(rules=rules, store=f"redis://:{KEY}@localhost/0").app
        yield f"{door.door} gate", lambda door=door: door(rules=rules, store=f"redis://:{KEY}@localhost/0").app.gate
        yield f"{door.door} planner", lambda door=door: door(rules=rules, secret=f"{KEY}-{KEY}").app.gate.rules.planner


@pytest.mark.parametrize(("name", "make"), list(shown()), ids=lambda value: value if isinstance(value, str) else "")
def test_nothing_shows_a_secret_in_its_repr(name: str, make: Callable[[], object]) -> None:
    """Objects of ours turn up in logs and tracebacks of others; none of them gives away what it was made of."""
    assert not shows(repr(make())), name


@pytest.mark.parametrize("door", SITES)
def test_a_decision_and_a_subject_show_nothing(door: type[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision that an application may log, and what the gate knows about who asked, give no secret away."""
    subjects: list[Any] = []
    describe = Identities.subject

    def noting(self: Identities, request: Request, caller: Caller | None) -> Any:
        subjects.append(describe(self, request, caller))
        return subjects[-1]

    monkeypatch.setattr(Identities, "subject", noting)
    with door(rules=listing(*[Rule(f"by-{place}", "9/day", key=[part]) for place, part in enumerate(PARTS)])) as site:
        ask_everything(site)
    assert subjects
    assert not shows(repr(site.seen))
    assert not shows(str(site.seen))
    assert not shows(repr(subjects))
